"""Caches of transformers on a real GPU: the logits of plain caches, by every path, with requests in flight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from dovetail.bench.serve.server import Scattered
from dovetail.kv.choose import Path
from dovetail.kv.transformers import KVShape, OffloadedCache, PagedCache, PagedMemory, PrefixStore
from tests.llama import WORDS, generate, llama

PATHS = [Path.AUTO, Path.DMA_2D, Path.DMA_BATCH, Path.DMA_LOOP, Path.STAGED, Path.KERNEL]
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
            flying: list[tuple[int, PagedCache]] = []
            moves = []
            for n in [*range(8), None, None, None, None]:
                if n is not None:
                    flying.append((n, store.begin(prompts[n], room=3)))
                if len(flying) > 4 or n is None:
                    which, cache = flying.pop(0)
                    with cache:
                        assert cache.get_seq_length() == (496 if turn else 0)
                        said = generate(model, prompts[which], cache, new=3)
                        moves.append(store.keep(cache, prompts[which]))
                    assert far(said, wanted[which]) < ROUNDING
            for move in moves:
                move.wait()
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
