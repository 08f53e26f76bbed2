"""Steps of fixed form: the logits of the model itself, for any blocks, lengths and caches, and no wait left out."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.llama import LateMover, generate, llama, prompt
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

from dovetail.bench.serve.server import Scattered
from dovetail.errors import NotSupported
from dovetail.kv.memory import HostMemory
from dovetail.kv.pool import Pool
from dovetail.kv.prefixes import Prefixes, _flat
from dovetail.kv.transformers import CacheFull, PagedCache, PagedMemory, PrefixStore, Steps, order, steps
from dovetail.kv.transformers import form as forms
from dovetail.kv.transformers.pages import Pages

MODEL = llama()
ROUNDING = 1e-4  # of logits around 10: masked tokens are summed too, as zeros, in another order


pytestmark = pytest.mark.usefixtures("one_thread")


def memory(num_blocks: int = 48) -> PagedMemory:
    """Full of no-numbers: what is read before it is written shows."""
    made = PagedMemory.for_model(MODEL, num_blocks, allocator=Scattered(num_blocks, 5))
    made.tokens.fill_(float("nan"))
    return made


def plain(ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = MODEL(input_ids=ids, past_key_values=cache).logits[0, -1]
    return found


def far(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).abs().nan_to_num(float("inf")).max())


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_any_steps_have_the_logits_of_the_model(lengths: list[int], seed: int) -> None:
    taken, stock = Steps(MODEL, blocks := memory(), most_tokens=64), DynamicCache(config=MODEL.config)
    with PagedCache(blocks) as cache:
        for n, count in enumerate(lengths):
            ids = prompt(count, seed + n)
            assert far(taken(ids, cache), plain(ids, stock)) < ROUNDING
        assert cache.get_seq_length() == sum(lengths)
        # What is kept is what the model would have kept: it goes on behind it.
        assert far(plain(prompt(3), cache), plain(prompt(3), stock)) < ROUNDING


def test_requests_in_turn_share_a_form_and_do_not_meet() -> None:
    taken = Steps(MODEL, blocks := memory())
    caches = [PagedCache(blocks) for _ in range(3)]
    stocks = [DynamicCache(config=MODEL.config) for _ in caches]
    for turn, count in enumerate((20, 1, 5, 1, 1)):
        for n, (cache, stock) in enumerate(zip(caches, stocks, strict=True)):
            ids = prompt(count + n * (turn == 0), 10 * turn + n)
            assert far(taken(ids[0].tolist(), cache), plain(ids, stock)) < ROUNDING
    for cache in caches:
        cache.close()
    assert len(taken._forms) == 3  # 32, 1 and 8 tokens


def test_blocks_do_not_change_a_bit() -> None:
    """The same steps in other blocks, with other rows at hand behind the last token."""
    taken = Steps(MODEL, blocks := memory())
    found = []
    with PagedCache(blocks, num_tokens=90) as other:
        taken(prompt(90, 8), other)
        for reserve in (0, 200):
            with PagedCache(blocks, num_tokens=reserve) as cache:
                found.append([taken(prompt(n, n), cache) for n in (37, 3, 1)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=9), turns=st.integers(1, 4), leaves=st.integers(0, 8)
)
def test_requests_are_decoded_together_as_if_alone(lengths: list[int], turns: int, leaves: int) -> None:
    """Of any number and length, also where one of them has gone, and those are filled up that a form has room for."""
    taken = Steps(MODEL, blocks := memory(256), most_tokens=16)
    with contextlib.ExitStack() as opened:
        caches = [opened.enter_context(PagedCache(blocks)) for _ in lengths]
        stocks = [DynamicCache(config=MODEL.config) for _ in lengths]
        said = []
        for n, (cache, stock) in enumerate(zip(caches, stocks, strict=True)):
            said.append(plain(prompt(lengths[n], n), stock))
            taken(prompt(lengths[n], n), cache)
        for turn in range(turns):
            if turn == 1 and leaves < len(caches) > 1:
                caches.pop(leaves).close()
                stocks.pop(leaves)
                said.pop(leaves)
            ids = torch.stack(said).argmax(1)
            found = taken.decode(ids, caches)
            said = [plain(token.view(1, 1), stock) for token, stock in zip(ids, stocks, strict=True)]
            assert far(found, torch.stack(said)) < ROUNDING
        # What is kept is what the model would have kept.
        for cache, stock in zip(caches, stocks, strict=True):
            assert cache.get_seq_length() == stock.get_seq_length()
            assert far(taken(prompt(3), cache), plain(prompt(3), stock)) < ROUNDING


def test_a_request_without_numbers_spoils_no_other() -> None:
    taken, alone = Steps(MODEL, blocks := memory(256)), []
    caches = [PagedCache(blocks) for _ in range(3)]
    for n, cache in enumerate(caches):
        taken(prompt(10 + n), cache)
        alone.append(taken([7], cache))
        cache.begin_at(10 + n)
    blocks.tokens[:, caches[1].pages.enter(0, 0)[4]] = float("inf")
    found = taken.decode([7, 7, 7], caches)
    assert [torch.equal(a, b) for a, b in zip(found, alone, strict=True)] == [True, False, True]


def test_a_rotation_by_the_longest_is_that_of_each_request() -> None:
    """One request is longer than the model was trained for: the others are rotated as if it were not there."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = llama(rope_parameters=rope, max_position_embeddings=64)
    taken = Steps(model, blocks := PagedMemory.for_model(model, 48))
    lengths, found = (20, 100, 30), []
    for together in (False, True):
        caches = [PagedCache(blocks) for _ in lengths]
        for n, (length, cache) in enumerate(zip(lengths, caches, strict=True)):
            taken(prompt(length, n), cache)
        alone = [taken([5], cache) for cache in caches] if not together else taken.decode([5, 5, 5], caches)
        found.append(torch.stack(tuple(alone)))
        for cache in caches:
            cache.close()
    assert torch.equal(*found)


def test_places_are_copied_again_only_when_they_change() -> None:
    blocks = memory()
    form = forms.Form(MODEL, MODEL.forward, blocks, None, num_tokens=4, room=48, apart=True, paged=True)
    one, two, longer = torch.arange(16), torch.arange(100, 132), torch.arange(32)
    for rows, copied in (
        ([one, two], [True] * 4),  # the last fills the form up
        ([one, two], [False] * 4),
        ([longer, two], [True, False, False, False]),
        ([two, longer], [True] * 4),
    ):
        form._rows.fill_(-1)
        form.fill(torch.tensor([5, 6]), [15, 31], rows)
        assert [bool((form._rows[n] >= 0).any()) for n in range(4)] == copied
        for n, mine in enumerate((*rows, rows[1], rows[1])):
            assert not copied[n] or form._rows[n].tolist() == [*mine.tolist(), *[-1] * (48 - len(mine))]


def late(blocks: PagedMemory, layers: int | None) -> PrefixStore:
    """A store whose bytes land when somebody waits for them, no sooner."""
    host = HostMemory(16, blocks.layout.slot_bytes)
    kept = Prefixes(blocks.layout, Pool(host), LateMover(blocks.bytes(), _flat(host)), "cpu")
    return PrefixStore(blocks, kept=kept, layers=layers)


def kept(store: PrefixStore, taken: Steps, ids: torch.Tensor) -> torch.Tensor:
    """Keeps 48 tokens, spoils the blocks, and says what the rest of the prompt gives."""
    with store.begin(ids) as cache:
        taken(ids[:, :48], cache)
        store.keep(cache, ids).wait()
        right = taken(ids[:, 48:], cache)
    store.memory.tokens.fill_(float("nan"))
    return right


@pytest.mark.parametrize("layers", [None, 1])
def test_decoding_comes_behind_the_fetches_of_all(layers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(49)
    with late(blocks := memory(), layers) as store:
        right = kept(store, taken := Steps(MODEL, blocks), ids)
        for taken_out in (False, True):
            if taken_out:
                monkeypatch.setattr(forms.Form, "expect", lambda form, parts: None)
            blocks.tokens.fill_(float("nan"))
            with store.begin(ids) as one, store.begin(ids) as two:
                assert not one.has_arrived
                assert not two.has_arrived
                found = taken.decode(ids[0, 48:].repeat(2), [one, two])
                assert (far(found, right.expand(2, -1)) < ROUNDING) is not taken_out
                assert one.has_arrived


@pytest.mark.parametrize("layers", [None, 1])
def test_a_step_comes_behind_every_part_of_a_fetch(layers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(50)
    with late(blocks := memory(), layers) as store:
        right = kept(store, taken := Steps(MODEL, blocks), ids)
        with store.begin(ids) as cache:
            assert cache.get_seq_length() == 48
            assert torch.equal(taken(ids[:, 48:], cache), right)
        blocks.tokens.fill_(float("nan"))
        monkeypatch.setattr(forms.Form, "expect", lambda form, parts: None)  # the wait is taken out
        with store.begin(ids) as cache:
            assert not torch.equal(taken(ids[:, 48:], cache), right)


def test_what_a_store_reads_is_overwritten_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, other = prompt(50), prompt(50, 9)
    for taken_out in (False, True):
        if taken_out:
            monkeypatch.setattr(Pages, "_behind_stores", lambda self, begin: None)
        with late(blocks := memory(), None) as store:
            taken = Steps(MODEL, blocks)
            with store.begin(ids) as cache:
                right = taken(ids, cache)
                store.keep(cache, ids)
                cache.crop(-50)
                taken(other, cache)
            with store.begin(ids) as cache:
                cache.pages.arrive(0)
                assert (far(taken(ids[:, 48:], cache), right) < ROUNDING) is not taken_out


def test_generate_uses_them_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Steps(MODEL, blocks := memory(), most_tokens=32)
    ran: list[int] = []
    run = forms.Form.run
    monkeypatch.setattr(forms.Form, "run", lambda form: (ran.append(form.num_tokens), run(form))[1])
    for count, wanted in ((20, [32] + 19 * [1]), (50, 19 * [1])):
        ids = prompt(count)
        right = generate(MODEL, ids)
        with taken.generating(), PagedCache(blocks) as cache:
            said = generate(MODEL, ids, cache)
        assert torch.equal(said.sequences, right.sequences)
        assert max(far(a, b) for a, b in zip(said.logits, right.logits, strict=True)) < ROUNDING
        assert ran == wanted
        ran.clear()
    mask = torch.ones((2, 24), dtype=torch.int64)
    mask[0, :7] = 0
    ids = prompt(24, 4, batch=2)
    with taken.generating():
        with PagedCache(blocks, num_sequences=2) as cache:  # a batch, padded
            assert torch.equal(
                generate(MODEL, ids, cache, attention_mask=mask).sequences,
                generate(MODEL, ids, attention_mask=mask).sequences,
            )
        with PagedCache(blocks) as cache:  # padded
            one = generate(MODEL, ids[:1], cache, attention_mask=mask[:1])
            assert torch.equal(one.sequences, generate(MODEL, ids[:1], attention_mask=mask[:1]).sequences)
        generate(MODEL, prompt(5))  # a cache of transformers
        with PagedCache(blocks) as cache:  # more than logits is asked for
            assert generate(MODEL, prompt(5), cache, output_hidden_states=True).hidden_states[-1]
        ids = prompt(5)
        strange: dict[str, Any] = {"position_ids": torch.arange(3, 8)[None], "return_dict": False, "inputs_embeds": ids}
        for other in [{name: value} for name, value in strange.items()] + [{"attention_mask": {}}]:
            with PagedCache(blocks) as cache, torch.inference_mode():
                assert not taken._fits({"input_ids": ids, "past_key_values": cache, "logits_to_keep": 1} | other)
    assert not ran
    assert "forward" not in vars(MODEL)


def test_nothing_is_kept_alive_by_a_cycle() -> None:
    """A memory may be as large as the device: it goes with its last user, not when garbage is collected."""
    taken = Steps(MODEL, blocks := memory())
    with PagedCache(blocks) as cache:
        taken(prompt(3), cache)
    gone = weakref.ref(blocks), weakref.ref(next(iter(taken._forms.values())))
    gc.disable()
    try:
        del taken, blocks, cache
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_logits_are_plain_tensors() -> None:
    taken = Steps(MODEL, blocks := memory(), most_tokens=4)
    with PagedCache(blocks) as cache:
        for count in (2, 2, 9):
            logits = taken(prompt(count), cache)
            logits[3] = -1e9  # as somebody who bans a token does


def test_a_step_that_fails_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(50)
    with late(blocks := memory(), 1) as store:
        right = kept(store, taken := Steps(MODEL, blocks), ids)
        with store.begin(ids) as cache:
            with monkeypatch.context() as patch:
                patch.setattr(forms.Form, "expect", lambda form, parts: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    taken(ids[:, 48:], cache)
            assert cache.get_seq_length() == 48
            assert torch.equal(taken(ids[:, 48:], cache), right)


def test_forms_that_were_not_used_lately_go() -> None:
    taken = Steps(MODEL, blocks := memory(), most_forms=2)
    with PagedCache(blocks) as cache:
        for count in (1, 2, 4, 1):
            taken(prompt(count), cache)
    assert list(taken._forms) == [(4, 256, False), (1, 256, False)]


@pytest.mark.parametrize(
    ("tokens", "room"), [(1, 256), (256, 256), (257, 512), (2048, 2048), (2049, 2304), (8256, 9216), (32832, 36864)]
)
def test_rooms(tokens: int, room: int) -> None:
    assert steps._room(tokens) == room


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    blocks = memory(4)
    taken = Steps(MODEL, blocks)
    with PagedCache(blocks) as cache, pytest.raises(ValueError, match="at least one token"):
        taken([], cache)
    with PagedCache(memory()) as cache, pytest.raises(ValueError, match="blocks of their own memory"):
        taken([1], cache)
    with PagedCache(blocks, num_sequences=2) as cache, pytest.raises(ValueError, match="caches of one sequence"):
        taken([1], cache)
    for wrong in (prompt(5, batch=2), prompt(5).float(), prompt(5).bool(), prompt(5)[None]):
        with PagedCache(blocks) as cache, pytest.raises(ValueError, match="one row of token ids"):
            taken(wrong, cache)
    with PagedCache(blocks) as cache, pytest.raises(CacheFull):
        taken(prompt(65), cache)
    assert (cache.get_seq_length(), blocks.num_free) == (0, 4)
    with pytest.raises(ValueError, match="the cache is closed"):
        taken([1], cache)
    with PagedCache(blocks) as cache, PagedCache(blocks) as second:
        for ids, caches, what in (
            ([], [], "a token for each cache, not 0 tokens and 0 caches"), ([1, 2], [cache], "2 tokens and 1 caches"),
            ([1, 2], [cache, cache], "a cache is there twice"), (prompt(2).float(), [cache, second], "one row of"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=what):
                taken.decode(ids, caches)
        taken(prompt(20), cache)
        taken(prompt(32), second)
        with pytest.raises(CacheFull):
            taken.decode([1, 2], [cache, second])
        assert (cache.get_seq_length(), second.get_seq_length()) == (20, 32)
        second.close()
        with PagedCache(blocks) as third:
            taken(prompt(12), cache)
            taken(prompt(16), third)
            with pytest.raises(CacheFull, match="2 more blocks of 16 tokens are needed and 1 of 4"):
                taken.decode([1, 2], [cache, third])  # there is one for either
            assert (cache.get_seq_length(), third.get_seq_length(), blocks.num_free) == (32, 16, 1)
        with pytest.raises(ValueError, match="the cache is closed"):
            taken.decode([1, 2], [cache, second])
    with pytest.raises(ValueError, match="most_tokens is 0"):
        Steps(MODEL, blocks, most_tokens=0)
    with pytest.raises(NotSupported, match="attention over blocks is for NVIDIA GPUs"):
        Steps(MODEL, blocks, paged=True)
    with pytest.raises(NotSupported, match="BloomForCausalLM takes no position_ids"):
        Steps(BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=2)).eval(), blocks)
    MODEL.train()
    try:
        with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
            Steps(MODEL, blocks)
    finally:
        MODEL.eval()


class Graphs:
    """Stands for graphs of torch: a replay computes the captured form again; events are over when they are told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.are_over, self.fails = True, False
        self.captured: list[Graph] = []
        self.capturing, self.events, self.waits = False, list[Event](), list[int]()
        cuda: Any = torch.cuda
        for name, stands in {
            "CUDAGraph": lambda: Graph(self),
            "graph": self.capture,
            "Event": self.event,
            "Stream": lambda device: Stream(self),
            "current_stream": lambda device: Stream(self),
            "set_stream": lambda stream: self.log.append("the stream of before"),
            "graph_pool_handle": lambda: "pool",
        }.items():
            monkeypatch.setattr(cuda, name, stands)

    def event(self, *, external: bool = False) -> Event:
        made = Event(self)
        self.events += [made] if external else []
        return made

    @contextlib.contextmanager
    def capture(self, graph: Graph, *, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        assert isinstance(stream, Stream)
        if self.fails:
            self.log.clear()
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.log.clear()
        self.captured.append(graph)

    def steps(self, blocks: PagedMemory, **options: Any) -> Steps:
        made = Steps(MODEL, blocks, **options)
        made._recorder = forms.Recorder(blocks)
        return made


class Graph:
    form: Any = None

    def __init__(self, of: Graphs) -> None:
        self._of = of

    def replay(self) -> None:
        arrivals, self.form.arrivals = self.form.arrivals, None  # what was captured: it waits by itself
        with torch.inference_mode():
            self.form.logits = self.form.compute()
        self.form.arrivals = arrivals
        self._of.log.append("replay")


class Event:
    def __init__(self, of: Graphs) -> None:
        self._of = of

    def record(self, stream: Any = None) -> None:
        self._of.log.append("record")

    def query(self) -> bool:
        return self._of.are_over


class Stream:
    cuda_stream = 7

    def __init__(self, of: Graphs) -> None:
        self._of = of

    def wait_event(self, event: Event) -> None:
        """An event from outside, in a capture."""
        assert self._of.capturing
        self._of.waits.append(self._of.events.index(event))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs(monkeypatch)
    record = forms.Recorder.record

    def recorded(recorder: Any, form: Any) -> None:
        record(recorder, form)
        form.graph.form = form

    monkeypatch.setattr(forms.Recorder, "record", recorded)
    return made


def test_a_form_is_captured_once_and_replayed(graphs: Graphs) -> None:
    taken, stock = graphs.steps(blocks := memory()), DynamicCache(config=MODEL.config)
    with PagedCache(blocks) as cache:
        for n, count in enumerate((20, 1, 1, 1, 30)):
            ids = prompt(count, n)
            assert far(taken(ids, cache), plain(ids, stock)) < ROUNDING
    assert len(graphs.captured) == 2
    assert graphs.log.count("replay") == 3


def test_a_model_that_cannot_be_captured_says_so(graphs: Graphs) -> None:
    graphs.fails = True
    taken = graphs.steps(blocks := memory())
    with PagedCache(blocks) as cache:
        with pytest.raises(NotSupported, match=r"can't be captured .*capturing.*graphs=False"):
            taken(prompt(3), cache)
        assert cache.get_seq_length() == 0
        assert gc.isenabled()
        assert graphs.log == ["the stream of before"]
        graphs.fails = False
        assert far(taken(prompt(3), cache), plain(prompt(3), DynamicCache(config=MODEL.config))) < ROUNDING


def test_every_layer_of_a_graph_waits_once(graphs: Graphs) -> None:
    taken = graphs.steps(blocks := memory())
    with PagedCache(blocks) as cache:
        taken(prompt(3), cache)
    assert graphs.waits == list(range(blocks.shape.num_layers))


def test_layers_wait_by_themselves_only_if_the_last_run_is_over(
    graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(order.Arrivals, "expect", lambda self, layer, part: joined.append(f"layer {layer}"))
    monkeypatch.setattr(order, "join", lambda part, device: joined.append("all"))
    taken = graphs.steps(blocks := memory())
    parts: list[Any] = [(0, object()), (2, object())]
    with PagedCache(blocks) as cache:
        for is_over, expected, wanted in (
            (True, parts, ["all", "all"]),  # nothing is captured yet
            (True, parts, ["layer 0", "layer 2"]),
            (False, parts, ["all", "all"]),  # the graph would wait for the wrong fetch
            (True, parts[:1], ["all"]),
        ):
            graphs.are_over = is_over
            monkeypatch.setattr(Pages, "expected", lambda self, expected=expected: expected)
            taken(prompt(1), cache)
            assert joined == wanted
            joined.clear()


def test_a_graph_that_runs_is_not_dropped(graphs: Graphs) -> None:
    taken = graphs.steps(blocks := memory(), most_forms=1)
    with PagedCache(blocks) as cache:
        graphs.are_over = False
        for count in (1, 2, 4):
            taken(prompt(count), cache)
        assert len(taken._forms) == 3
        graphs.are_over = True
        taken(prompt(8), cache)
    assert [tokens for tokens, *_ in taken._forms] == [8]
