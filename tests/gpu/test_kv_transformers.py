"""Caches of transformers on a real GPU: the logits of plain caches, by every path, with requests in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from dovetail.bench.serve.server import Scattered
from dovetail.kv.choose import Path
from dovetail.kv.transformers import KVShape, OffloadedCache, PagedCache, PagedMemory, PrefixStore, Steps, order
from dovetail.kv.transformers.attention import attend
from tests.llama import WORDS, generate, llama

PATHS = [Path.AUTO, Path.DMA_2D, Path.DMA_BATCH, Path.DMA_LOOP, Path.STAGED, Path.MIXED, Path.KERNEL]
ROUNDING = 0.05  # of logits around 10, in float32: attention may multiply in shorter numbers


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(num_layers=6).to("cuda")


def ids(count: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, WORDS, (1, count))).cuda()


def far(left: Any, right: Any) -> float:
    pairs = zip(left.logits, right.logits, strict=True)
    return max((a - b).abs().nan_to_num(float("inf")).max().item() for a, b in pairs)


def memory(model: Any, num_blocks: int = 256) -> PagedMemory:
    made = PagedMemory.for_model(model, num_blocks, allocator=Scattered(num_blocks, 1))
    made.tokens.fill_(float("nan"))
    made.fence.behind_compute()
    return made


@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_blocks_give_the_tokens_of_a_plain_cache(model: Any, own_stream: bool) -> None:
    stream = torch.cuda.Stream() if own_stream else torch.cuda.default_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream), PagedCache(memory(model)) as cache:
        prompt = ids(300, 1)
        ours, plain = generate(model, prompt, cache), generate(model, prompt)
        assert torch.equal(ours.sequences, plain.sequences)
        assert far(ours, plain) < ROUNDING


def served(store: PrefixStore, prompts: list[torch.Tensor], answer: Callable[[int, PagedCache], None]) -> None:
    """All prompts once, four admitted ahead; each is kept behind its answer."""
    flying: list[tuple[int, PagedCache]] = []
    moves = []
    for n in [*range(len(prompts)), None, None, None, None]:
        if n is not None:
            flying.append((n, store.begin(prompts[n], room=3)))
        if len(flying) > 4 or n is None:
            which, cache = flying.pop(0)
            with cache:
                answer(which, cache)
                moves.append(store.keep(cache, prompts[which]))
    for move in moves:
        move.wait()


@pytest.mark.parametrize("layers", [None, 1, 4], ids=lambda n: f"layers {n}")
@pytest.mark.parametrize("path", PATHS)
def test_requests_in_flight_get_their_own_prefixes(model: Any, path: Path, layers: int | None) -> None:
    """Each of eight prompts three times, four admitted ahead, blocks short: reuse follows at once."""
    prompts = [ids(500 + n, n) for n in range(8)]
    wanted = [generate(model, prompt, new=3) for prompt in prompts]
    blocks = memory(model, 6 * 33)
    slots = blocks.layout.slot_bytes
    with PrefixStore(blocks, pool_bytes=300 * slots, path=path, layers=layers) as store:
        for turn in range(3):

            def answer(which: int, cache: PagedCache, turn: int = turn) -> None:
                assert cache.get_seq_length() == (496 if turn else 0)
                assert far(generate(model, prompts[which], cache, new=3), wanted[which]) < ROUNDING

            served(store, prompts, answer)
        assert store.kept.stats().evicted == 0


@pytest.mark.parametrize("buffers", [2, 3])
@pytest.mark.parametrize("resident", [0, 2])
def test_a_context_in_host_memory(model: Any, buffers: int, resident: int) -> None:
    prompt = ids(3000, 3)
    plain = generate(model, prompt, new=12)
    shape = KVShape.of(model)
    with OffloadedCache(shape, 3100, device="cuda", num_buffers=buffers, resident_layers=resident) as cache:
        cache._tokens.fill_(float("nan"))
        torch.cuda.synchronize()
        ours = generate(model, prompt, cache, new=12)
    assert torch.equal(ours.sequences, plain.sequences)
    assert far(ours, plain) < ROUNDING


@pytest.fixture(scope="module")
def half(model: Any) -> Any:
    """The same in bfloat16: attention is a kernel of ours, over blocks."""
    return llama(num_layers=6).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("layers", [None, 2], ids=lambda n: f"layers {n}")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["model", "half"])
def test_steps_as_graphs_behind_fetches(
    kind: str, path: Path, layers: int | None, request: pytest.FixtureRequest
) -> None:
    """Requests in flight, blocks short: replays have the bits of the first run, and rounding from the model."""
    model = request.getfixturevalue(kind)
    rounding = ROUNDING if kind == "model" else 1.5
    prompts = [ids(500 + n, n) for n in range(8)]
    blocks = memory(model, 6 * 33)
    steps = Steps(model, blocks)
    assert steps.paged is (kind == "half")
    with PrefixStore(blocks, pool_bytes=300 * blocks.layout.slot_bytes, path=path, layers=layers) as store:
        first: dict[int, list[torch.Tensor]] = {}

        def answer(which: int, cache: PagedCache) -> None:
            if which not in first:
                steps(prompts[which][:, :496], cache)
            assert cache.get_seq_length() == 496
            said = [steps(prompts[which][:, 496:], cache)]
            for _ in range(2):
                said.append(steps(said[-1].argmax().view(1), cache))
            if which not in first:
                with torch.inference_mode():
                    right = model(input_ids=prompts[which], logits_to_keep=1).logits[0, -1]
                assert (said[0] - right).abs().nan_to_num(float("inf")).max().item() < rounding
            assert all(torch.equal(a, b) for a, b in zip(said, first.setdefault(which, said), strict=True))

        for _ in range(3):
            served(store, prompts, answer)


@pytest.mark.parametrize("kind", ["model", "half"])
def test_requests_are_decoded_together(kind: str, request: pytest.FixtureRequest) -> None:
    """By graphs, with requests that come and go; against each alone, and twice the same bits."""
    model = request.getfixturevalue(kind)
    rounding = ROUNDING if kind == "model" else 1.5
    blocks = memory(model, 640)
    steps, alone = Steps(model, blocks), Steps(model, blocks)
    prompts = [ids(40 + 333 * (n % 3) + n, n) for n in range(7)]
    texts: list[dict[int, list[torch.Tensor]]] = []
    for _ in range(2):
        said: dict[int, list[torch.Tensor]] = {n: [] for n in range(7)}
        flying: dict[int, tuple[PagedCache, PagedCache]] = {}
        for turn in range(12):
            if turn < 7:
                flying[turn] = PagedCache(blocks), PagedCache(blocks)
                for cache, by in zip(flying[turn], (steps, alone), strict=True):
                    last = by(prompts[turn], cache)
                said[turn].append(last)
            if not flying:
                break
            tokens = torch.stack([said[n][-1].argmax() for n in flying])
            found = steps.decode(tokens, [cache for cache, _ in flying.values()])
            for n, token, logits in zip(list(flying), tokens, found, strict=True):
                right = alone(token.view(1), flying[n][1])
                assert (logits - right).abs().nan_to_num(float("inf")).max().item() < rounding
                said[n].append(logits)
                if len(said[n]) == 5:
                    for cache in flying.pop(n):
                        cache.close()
        for cache in (cache for pair in flying.values() for cache in pair):
            cache.close()
        texts.append(said)
    # With the model's own attention they are computed in turn.
    assert {tokens for tokens, _, apart in steps._forms if apart} == (set() if kind == "model" else {2, 4})
    assert all(torch.equal(a, b) for n in range(7) for a, b in zip(texts[0][n], texts[1][n], strict=True))


@pytest.mark.parametrize("count", [2, 16])
@pytest.mark.parametrize(("num_heads", "group", "width"), [(8, 4, 128), (1, 71, 64), (2, 48, 256)])
def test_attention_of_sequences_apart(count: int, num_heads: int, group: int, width: int) -> None:
    make = torch.Generator("cuda").manual_seed(count)
    lengths = [1, 63, 64, 65, 900, 20_000, *range(100, 110)][-count:]
    rows = torch.zeros((count, max(lengths) + 100), dtype=torch.int64, device="cuda")
    mixed = torch.randperm(sum(lengths) + 50, generator=make, device="cuda")
    tokens = torch.full((len(mixed), 2, num_heads, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    queries = torch.randn((num_heads * group, count, width), generator=make, device="cuda").bfloat16()
    right, scale = [], width**-0.5
    for n, mine in enumerate(mixed[: sum(lengths)].split(lengths)):
        rows[n, : lengths[n]] = mine
        tokens[mine] = torch.randn((len(mine), 2, num_heads, width), generator=make, device="cuda").bfloat16()
        keys, values = (tokens[mine, k].float().transpose(0, 1).repeat_interleave(group, 0) for k in (0, 1))
        score = scale * queries[:, n : n + 1].float() @ keys.transpose(1, 2)
        right.append((score.softmax(-1) @ values)[:, 0])
    found = attend(queries, tokens, rows, torch.tensor(lengths, device="cuda") - 1, scale)
    wanted = torch.stack(right)
    error = (found.float() - wanted).abs().nan_to_num(float("inf")) / wanted.abs().clamp(min=0.1)
    assert error.max().item() < 0.05


@pytest.mark.parametrize("taken_out", [False, True], ids=["waits", "no waits"])
def test_a_layer_of_a_graph_waits_for_its_part(half: Any, taken_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch is held up for a while, and the graph is launched meanwhile."""
    prompt, blocks = ids(500, 1), memory(half)
    steps, slow = Steps(half, blocks), torch.cuda.Stream()
    with PrefixStore(blocks, pool_bytes=64 * blocks.layout.slot_bytes, path=Path.DMA_2D, layers=1) as store:
        with PagedCache(blocks) as cache:
            steps(prompt[:, :496], cache)
            store.keep(cache, prompt).wait()
            right = steps(prompt[:, 496:], cache)
        for _ in range(3):
            blocks.tokens.fill_(float("nan"))
            blocks.fence.behind_compute()
            torch.cuda.synchronize()
            with monkeypatch.context() as patch, torch.cuda.stream(slow):
                torch.cuda._sleep(100_000_000)
                patch.setattr(order.Fence, "after", property(lambda fence: (slow.cuda_stream,)))
                with torch.cuda.stream(torch.cuda.default_stream()):
                    cache = store.begin(prompt)
            with cache, monkeypatch.context() as patch:
                assert cache.get_seq_length() == 496
                if taken_out:
                    patch.setattr(order.Arrivals, "expect", lambda self, layer, transfer: None)
                found = steps(prompt[:, 496:], cache)
                assert not slow.query()
                assert torch.equal(found, right) is not taken_out
            torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["model", "half"])
def test_generate_by_graphs(kind: str, request: pytest.FixtureRequest) -> None:
    """In bfloat16 the first token is compared: what follows may be another text, by rounding."""
    model = request.getfixturevalue(kind)
    blocks = memory(model)
    steps = Steps(model, blocks)
    for n in range(3):
        prompt = ids(300 + 40 * n, n)
        mask = torch.ones_like(prompt)  # otherwise generate() takes some of the tokens for padding
        plain = generate(model, prompt, attention_mask=mask)
        with steps.generating(), PagedCache(blocks) as cache:
            ours = generate(model, prompt, cache, attention_mask=mask)
        assert {tokens for tokens, *_ in steps._forms} == {1}
        if kind == "half":
            assert (ours.logits[0] - plain.logits[0]).abs().max().item() < 1.5
            continue
        assert torch.equal(ours.sequences, plain.sequences)
        assert far(ours, plain) < ROUNDING


@pytest.mark.parametrize("count", [1, 8, 64, 256])
@pytest.mark.parametrize(("num_heads", "group", "width"), [(8, 4, 128), (2, 16, 128), (3, 3, 64), (1, 1, 256)])
def test_attention_over_blocks(count: int, num_heads: int, group: int, width: int) -> None:
    """Against softmax in float32, of tokens that are scattered among no-numbers."""
    make = torch.Generator("cuda").manual_seed(count)
    for before in (0, 5, 1000, 9000):
        number = before + count
        rows = torch.randperm(number + 300, generator=make, device="cuda")
        tokens = torch.full((len(rows), 2, num_heads, width), float("nan"), dtype=torch.bfloat16, device="cuda")
        size = (number, 2, num_heads, width)
        tokens[rows[:number]] = torch.randn(size, generator=make, device="cuda").bfloat16()
        asked = torch.randn((count, num_heads * group, width), generator=make, device="cuda").bfloat16()
        queries, positions = asked.transpose(0, 1), torch.arange(before, number, device="cuda")
        found = attend(queries, tokens, rows[None], positions, width**-0.5)
        kept = tokens[rows[:number]].float()
        keys, values = (kept[:, n].transpose(0, 1).repeat_interleave(group, 0) for n in (0, 1))
        score = queries.float() @ keys.transpose(1, 2) * width**-0.5
        score = score.masked_fill(torch.arange(number, device="cuda") > positions[:, None], float("-inf"))
        right = (score.softmax(-1) @ values).transpose(0, 1)
        error = (found.float() - right).abs().nan_to_num(float("inf")) / right.abs().clamp(min=0.1)
        assert error.max().item() < 0.05
