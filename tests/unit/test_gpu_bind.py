"""Binding to addresses: batches without an order, cuts at registrations, bounds, and the bytes that come of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

from dovetail.errors import NotSupported, PlanError
from dovetail.hw.gpu.bind import Binder, Place, Script, Words, cut, independent, progressions
from dovetail.hw.gpu.driver import WAIT, WRITE, Kind, Memory, SourceOrder
from dovetail.hw.gpu.program import compile_plan
from dovetail.plan import AT_RUN, DType, Op, Plan, ReduceOp, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_to_all
from dovetail.plan.build.assembly import Assembly

from .test_gpu_program import CAPS

Ints = NDArray[np.int64]


class Recorder:
    """A driver that writes calls down and does them on memory from address 0 on; a batch in random order."""

    name = "recorder"

    def __init__(self, size_bytes: int = 1 << 16, seed: int = 0, edges: Sequence[int] = ()) -> None:
        self.memory = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
        self.rng = random.Random(seed)
        self.edges = [0, *sorted(edges), size_bytes]
        self.calls: list[tuple[Any, ...]] = []
        self.limit = 1 << 20

    def memory_at(self, address: int) -> Memory:
        at = next(k for k in range(len(self.edges) - 1) if address < self.edges[k + 1])
        # An address of 0 means that the driver does not tell: memory of tests begins later.
        return Memory(Kind.DEVICE, 0, self.edges[at] or 1, self.edges[at + 1] - (self.edges[at] or 1))

    def _move(self, dst: int, src: int, size: int) -> None:
        for at in (dst, src):
            assert not any(at < e < at + size for e in self.edges), "a copy crosses registrations"
        self.memory[dst : dst + size] = self.memory[src : src + size].copy()

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        self.calls.append(("copy", stream, 1))
        self._move(dst, src, size_bytes)

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        self.calls.append(("rows", stream, rows))
        assert min(dst_pitch, src_pitch) >= width
        order = list(range(rows))
        self.rng.shuffle(order)
        for at, pitch in ((dst, dst_pitch), (src, src_pitch)):
            last = at + (rows - 1) * pitch + width
            assert not any(at < e < last for e in self.edges), "rows cross registrations"
        for k in order:
            self._move(dst + k * dst_pitch, src + k * src_pitch, width)

    def prepared_batch(self, dst: Any, src: Any, size: Any, order: SourceOrder, stream: int) -> Callable[[], None]:
        assert order is SourceOrder.STREAM, "data that something still writes is read in the order of the stream"
        assert dst.dtype == src.dtype == size.dtype == np.uint64
        assert 2 <= len(dst) == len(src) == len(size) <= self.limit

        def call() -> None:
            self.calls.append(("batch", stream, len(dst)))
            turn = list(range(len(dst)))
            self.rng.shuffle(turn)
            for k in turn:
                self._move(int(dst[k]), int(src[k]), int(size[k]))

        return call

    def event_record(self, event: int, stream: int) -> None:
        self.calls.append(("record", stream, event))

    def stream_wait_event(self, stream: int, event: int) -> None:
        self.calls.append(("join", stream, event))

    def stream_words(self, rows: Any, stream: int) -> None:
        self.calls.append(("words", stream, rows.tolist()))


class Summing:
    """A reducer on the recorder's memory."""

    def __init__(self, driver: Recorder) -> None:
        self.driver = driver

    def warm(self, dtype: DType, op: ReduceOp, num_sources: int) -> None: ...

    def launch(self, dst: int, sources: Sequence[int], size: int, dtype: DType, op: ReduceOp, stream: int) -> None:
        self.driver.calls.append(("reduce", stream, len(sources)))
        parts = [self.driver.memory[s : s + size].copy() for s in sources]
        self.driver.memory[dst : dst + size] = np.sum(parts, axis=0, dtype=np.uint8)


def bind(
    plan: Plan,
    driver: Recorder,
    places: dict[tuple[int, int], Place],
    *,
    params: Sequence[int] = (),
    boundaries: Sequence[int] = (),
    entries: int = 512,
    most: int = 1 << 20,
    streams: int = 1,
    driven: Sequence[int] | None = None,
) -> Script:
    mine = range(plan.world) if driven is None else driven
    program = compile_plan(plan, mine, CAPS, most_streams=streams, lane_of=lambda q: q.engine % streams)
    events = list(range(100, 100 + program.num_events))
    binder = Binder(
        program, driver, Summing(driver), streams=[70 + k for k in range(streams)], events=events,  # type: ignore[arg-type]
        stamps={0: 900, 1: 901}, entries_per_call=entries, most_batched=most,
    )  # fmt: skip
    return binder.bind(places, params, lambda signal: 5000 + 64 * signal, boundaries)


def copies(*rows: st.Rows, sources: Sequence[tuple[int, int, int]] = ()) -> Plan:
    """One queue over buffers `a` and `b` of one rank; `sources` of reductions: (buffer, offset, that in a ring)."""
    a = Assembly("copies", 1)
    for name in ("a", "b"):
        a.buffer(name, Role.INOUT, 4096)
    for source in sources:
        a.sources(0, *source)
    a.queue(0, 0, *rows)
    return passes.entry(a.plan())


HERE = {(0, 0): Place(8192, 4096, Kind.DEVICE), (0, 1): Place(16384, 4096, Kind.PINNED)}


# --- batches ---------------------------------------------------------------------------------------------------------


def _clash(a: tuple[int, int, int], b: tuple[int, int, int]) -> bool:
    (s, d, n), (t, e, m) = a, b
    return (d < e + m and e < d + n) or (d < t + m and t < d + n) or (e < s + n and s < e + m)


@some.composite
def moves(draw: some.DrawFn) -> tuple[Ints, Ints, Ints]:
    """Copies in few bytes, so that many meet; none meets itself."""
    space = draw(some.sampled_from([40, 200, 3000]))
    rows = []
    for _ in range(draw(some.integers(0, 30))):
        n = draw(some.integers(1, 12))
        s, d = draw(some.integers(0, space - n)), draw(some.integers(0, space - n))
        if s + n <= d or d + n <= s:
            rows.append((s, d, n))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


@settings(max_examples=300, deadline=None)
@given(table=moves())
def test_batches_are_the_longest_runs_without_a_clash(table: tuple[Ints, Ints, Ints]) -> None:
    rows = list(zip(*(column.tolist() for column in table), strict=True))
    want, begin = [], 0
    for k in range(1, len(rows) + 1):
        if k == len(rows) or any(_clash(rows[k], rows[j]) for j in range(begin, k)):
            want.append((begin, k))
            begin = k
    assert independent(*table) == (want if rows else [])


def test_long_sequences_with_a_few_clashes_are_quick() -> None:
    """20,000 copies, every 1000th of which writes what the one before read."""
    n = 20_000
    src = np.arange(n, dtype=np.int64) * 8
    dst = src + (1 << 30)
    dst[1000::1000] = src[999:-1:1000]
    runs = independent(src, dst, np.full(n, 8, np.int64))
    assert runs == [(k, min(k + 1000, n)) for k in range(0, n, 1000)]


@settings(max_examples=200, deadline=None)
@given(table=moves(), data=some.data())
def test_cuts(table: tuple[Ints, Ints, Ints], data: some.DataObject) -> None:
    """No piece crosses a line, the pieces are the copies, in order, and nothing is cut without need."""
    src, dst, length = table
    lines = np.array(sorted(set(data.draw(some.lists(some.integers(0, 3000), max_size=8)))), np.int64)
    pieces = list(zip(*(column.tolist() for column in cut(src, dst, length, lines)), strict=True))
    left = list(pieces)
    for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        at = 0
        while at < n:
            a, b, m = left.pop(0)
            assert (a, b) == (s + at, d + at)
            assert m > 0
            at += m
            assert at == n or s + at in lines or d + at in lines, "cut where no line is"
        assert at == n
    assert not left
    for a, b, m in pieces:
        assert not any(a < line < a + m or b < line < b + m for line in lines.tolist())


@settings(max_examples=200, deadline=None)
@given(table=moves())
def test_progressions(table: tuple[Ints, Ints, Ints]) -> None:
    src, dst, length = (np.sort(table[0]), np.sort(table[1]), table[2])
    end = -1
    for first, last in progressions(src, dst, length):
        assert end < first < last - 1
        end = last
        here = slice(first, last + 1)
        assert len(set(length[here].tolist())) == 1
        for at in (src[here], dst[here]):
            steps = set(np.diff(at).tolist())
            assert len(steps) == 1
            assert steps.pop() >= length[first]


def test_progressions_are_found() -> None:
    at = np.array([0, 10, 20, 30, 100, 107, 114, 500], np.int64)
    assert progressions(at, at + 1000, np.full(8, 5, np.int64)) == [(0, 3), (4, 6)]


@settings(max_examples=150, deadline=None)
@given(table=moves(), seed=some.integers(0, 1 << 20), entries=some.sampled_from([0, 1, 2, 3, 512]), data=some.data())
def test_bytes_are_those_of_the_sequence(
    table: tuple[Ints, Ints, Ints], seed: int, entries: int, data: some.DataObject
) -> None:
    """Whatever order the driver takes inside a batch, and wherever memory was registered in parts."""
    src, dst, length = table
    edges = sorted(set(data.draw(some.lists(some.integers(8193, 8192 + 2999), max_size=4))))
    driver = Recorder(seed=seed, edges=[8192, *edges, 8192 + 3000])
    want = driver.memory.copy()
    for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        want[8192 + d : 8192 + d + n] = want[8192 + s : 8192 + s + n].copy()
    a = Assembly("random copies", 1)
    a.buffer("a", Role.INOUT, 3000)
    a.queue(0, 0, st.copy((0, 0, src), (0, 0, dst), length))
    script = bind(a.plan(), driver, {(0, 0): Place(8192, 3000, Kind.DEVICE)}, boundaries=edges, entries=entries)
    script.issue(0, driver)  # type: ignore[arg-type]
    assert np.array_equal(driver.memory, want)
    assert script.bytes_by_path == ({"d2d": int(length.sum())} if len(src) else {})
    if entries < 2:
        assert not [c for c in driver.calls if c[0] == "batch"]
    else:
        assert max((c[2] for c in driver.calls if c[0] == "batch"), default=0) <= entries


def test_entries_per_call() -> None:
    n = np.arange(50, dtype=np.int64)
    at = n * n  # no progression
    plan = copies(st.copy((0, 0, at), (0, 1, at), 1))
    for entries, most, want in (
        (512, 1 << 20, [50]),
        (20, 1 << 20, [20, 20, 10]),
        (512, 7, [7] * 7 + [1]),
        (3, 0, [1] * 50),
    ):
        driver = Recorder()
        script = bind(plan, driver, HERE, entries=entries, most=most)
        script.issue(0, driver)  # type: ignore[arg-type]
        assert [c[2] for c in driver.calls] == want
        assert script.num_copies == 50


def test_nothing_to_do() -> None:
    """No bytes, or onto itself."""
    plan = copies(st.copy((0, 0, 0), (0, 1, 0), 0), st.copy2d((0, 0, 0), (0, 1, 0), 0, 4, 8, 8))
    driver = Recorder()
    script = bind(plan, driver, HERE)
    script.issue(0, driver)  # type: ignore[arg-type]
    assert not driver.calls
    onto = copies(st.copy((0, 0, 8), (0, 1, 8), 64))
    same = {(0, 0): HERE[0, 0], (0, 1): HERE[0, 0]}
    assert not bind(onto, driver, same).calls


def test_paths_are_counted() -> None:
    plan = copies(
        st.copy((0, 0, 0), (0, 1, 0), 10), st.copy((0, 1, 0), (0, 0, 100), 20), st.copy((0, 0, 0), (0, 0, 200), 40),
        st.copy((0, 1, 0), (0, 1, 200), 80), st.copy2d((0, 0, 0), (0, 1, 300), 5, 4, 16, 32),
    )  # fmt: skip
    assert bind(plan, Recorder(), HERE).bytes_by_path == {"d2h": 30, "h2d": 20, "d2d": 40, "h2h": 80}


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", [[], [8192 + 100], [16384 + 50], [8192 + 40, 16384 + 129]], ids=str)
@pytest.mark.parametrize(
    ("width", "rows", "src_pitch", "dst_pitch"),
    [(16, 8, 32, 16), (16, 8, 0, 16), (16, 8, 16, 48), (7, 5, 9, 40), (16, 1, 0, 0), (16, 8, 4, 24)],
)
def test_rows(edges: list[int], width: int, rows: int, src_pitch: int, dst_pitch: int) -> None:
    """In one call where they can be; cut where memory was registered in parts; one by one where they overlap."""
    driver = Recorder(edges=edges, seed=3)
    want = driver.memory.copy()
    for k in range(rows):
        src, dst = 8192 + k * src_pitch, 16384 + k * dst_pitch
        want[dst : dst + width] = want[src : src + width]
    plan = copies(st.copy2d((0, 0, 0), (0, 1, 0), width, rows, src_pitch, dst_pitch))
    script = bind(plan, driver, HERE, boundaries=edges)
    script.issue(0, driver)  # type: ignore[arg-type]
    assert np.array_equal(driver.memory, want)
    spans = [(8192, 8192 + (rows - 1) * src_pitch + width), (16384, 16384 + (rows - 1) * dst_pitch + width)]
    crossed = any(a < e < b for e in edges for a, b in spans)
    if not crossed and min(src_pitch, dst_pitch) >= width:
        assert [c[0] for c in driver.calls] == ["rows"]


# --- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        st.copy((0, 0, 4090), (0, 1, 0), 7),
        st.copy((0, 0, 0), (0, 1, 4095), 2),
        st.copy((0, 0, -1), (0, 1, 0), 2),
        st.copy2d((0, 0, 0), (0, 1, 0), 16, 5, 1024, 16),
        st.copy2d((0, 0, 0), (0, 1, 0), 16, 5, 16, 1021),
        st.reduce((0, 1, 4090), 8, 0, 1, DType.UINT8, ReduceOp.SUM),
        st.reduce((0, 1, 0), 8, 1, 1, DType.UINT8, ReduceOp.SUM),
    ],
    ids=["source", "destination", "before", "source rows", "destination rows", "reduced", "reduced source"],
)
def test_outside_of_its_buffer(row: st.Rows) -> None:
    """The error names the step; nothing is issued."""
    good = st.copy((0, 0, 0), (0, 1, 0), 8)
    plan = copies(good, row, sources=[(0, 0, 0), (0, 4095, 4095)])
    driver = Recorder()
    with pytest.raises(PlanError, match="rank 0 queue 0.* step 2: .*reaches outside the memory of rank 0.*nothing was"):
        bind(plan, driver, HERE)
    assert not driver.calls


def test_a_buffer_that_nobody_posted() -> None:
    with pytest.raises(PlanError, match="or that rank has not posted it"):
        bind(copies(st.copy((0, 0, 0), (0, 1, 0), 8)), Recorder(), {(0, 0): HERE[0, 0]})


def test_reductions() -> None:
    driver = Recorder()
    plan = copies(
        st.reduce((0, 1, 10), 8, 0, 3, DType.UINT8, ReduceOp.SUM),
        st.reduce((0, 1, 0), 0, 0, 1, DType.UINT8, ReduceOp.SUM),
        sources=[(0, 0, 0), (0, 8, 8), (1, 100, 100)],
    )
    want = driver.memory[8192:8200] + driver.memory[8200:8208] + driver.memory[16484:16492]
    bind(plan, driver, HERE).issue(0, driver)  # type: ignore[arg-type]
    assert driver.calls == [("reduce", 70, 3)]
    assert np.array_equal(driver.memory[16394:16402], want)


# --- parameters and views --------------------------------------------------------------------------------------------


def test_parameters_give_offsets_and_lengths() -> None:
    """An uneven all_to_all of two ranks in one process."""
    plan = passes.entry(all_to_all.pcpy_uneven(2))
    table = np.array([[5, 0], [300, 17]])
    places, params, base = {}, [], 4096
    for r in range(2):
        send, receive = table[r], table[:, r]
        params += [*(np.cumsum(send) - send), *send, *(np.cumsum(receive) - receive), *receive]
        for n, b in enumerate(plan.buffers):
            size = int((send if b.role is Role.INPUT else receive).sum())
            assert b.sizes[r] == AT_RUN
            places[r, n] = Place(base, size, Kind.DEVICE)
            base += 4096
    driver = Recorder()
    names = [b.role for b in plan.buffers]
    i, o = names.index(Role.INPUT), names.index(Role.OUTPUT)
    want = []
    for r in range(2):
        for s in range(2):
            at = places[s, i].base + int(table[s, :r].sum())
            want.append(driver.memory[at : at + table[s, r]].copy())
    order = [p.rank for p in plan.params]
    per_rank = {r: iter(params[8 * r : 8 * r + 8]) for r in range(2)}
    values = [int(next(per_rank[r])) for r in order]
    bind(plan, driver, places, params=values).issue(0, driver)  # type: ignore[arg-type]
    got = [driver.memory[places[r, o].base : places[r, o].base + places[r, o].size_bytes] for r in range(2)]
    assert np.array_equal(np.concatenate(got), np.concatenate(want))
    too_long = list(values)
    too_long[plan.params.index(next(p for p in plan.params if p.rank == 1))] += 4096
    with pytest.raises(PlanError, match="reaches outside the memory"):
        bind(plan, driver, places, params=too_long)


def test_a_length_parameter_bounds_its_step() -> None:
    a = Assembly("bounded", 1)
    a.buffer("a", Role.INPUT, 64)
    a.buffer("b", Role.OUTPUT, 64)
    length = a.param("length", 0)
    row = st.copy((0, 0, 0), (0, 1, 0), 16)
    row["length_param"], row["skip"] = length, 8
    a.queue(0, 0, row)
    for value, want in ((4, 0), (8, 0), (13, 5), (24, 16), (60, 16)):
        script = bind(a.plan(), Recorder(), HERE, params=[value])
        assert script.bytes_by_path.get("d2h", 0) == want


def test_views_are_read_where_their_rank_stages_them() -> None:
    """Staged: at the offsets of the ring; not staged: those of the buffer that is shown."""
    alone = copies(st.copy((0, 0, 100), (0, 1, 0), 16))
    alone.queues[0].steps["src_alt"][-1] = 300
    driver = Recorder()
    staged = {(0, 0): Place(8192, 4096, Kind.DEVICE, staged=True), (0, 1): HERE[0, 1]}
    want = driver.memory[8192 + 300 : 8192 + 316].copy()
    bind(alone, driver, staged).issue(0, driver)  # type: ignore[arg-type]
    assert np.array_equal(driver.memory[16384:16400], want)
    want = driver.memory[8192 + 100 : 8192 + 116].copy()
    bind(alone, driver, HERE).issue(0, driver)  # type: ignore[arg-type]
    assert np.array_equal(driver.memory[16384:16400], want)
    reduced = copies(st.reduce((0, 1, 0), 16, 0, 1, DType.UINT8, ReduceOp.SUM), sources=[(0, 100, 300)])
    for places, at in ((staged, 300), (HERE, 100)):
        want = driver.memory[8192 + at : 8192 + at + 16].copy()
        bind(reduced, driver, places).issue(0, driver)  # type: ignore[arg-type]
        assert np.array_equal(driver.memory[16384:16400], want)


# --- words, events, stamps -------------------------------------------------------------------------------------------


def test_words_count_from_the_base_of_a_run() -> None:
    a = Assembly("words", 2)
    a.buffer("a", Role.INPUT, 64)
    flag, told = a.signal("flag", 0, SignalKind.IMPORTED), a.signal("told", 0, SignalKind.EXPORTED)
    a.queue(0, 0, st.wait(flag, 3), st.signal(told, 9))
    a.queue(1, 0)
    plan = passes.entry(a.plan())
    driver = Recorder()
    script = bind(plan, driver, {}, driven=[0])
    assert [type(c) for c in script.calls] == [Words]
    entry = [n for n, s in enumerate(plan.signals) if s.kind is SignalKind.ENTRY]
    for base in (1 << 20, 7 << 20):
        driver.calls.clear()
        script.issue(base, driver)  # type: ignore[arg-type]
        rows = [
            (WRITE, 5000 + 64 * entry[0], base + 1),
            (WAIT, 5000 + 64 * entry[1], base + 1),
            (WAIT, 5000 + 64 * flag, base + 3),
            (WRITE, 5000 + 64 * told, base + 9),
        ]
        assert driver.calls == [("words", 70, rows)]


def test_events_and_stamps() -> None:
    a = Assembly("events", 1)
    a.buffer("a", Role.INOUT, 64)
    a.buffer("b", Role.INOUT, 64)
    done = a.signal("done", 0)
    a.queue(0, 0, st.stamp(0), st.copy((0, 0, 0), (0, 0, 16), 8), st.signal(done))
    a.queue(0, 1, st.wait(done), st.copy((0, 0, 16), (0, 0, 32), 8), st.stamp(1))
    driver = Recorder()
    bind(passes.entry(a.plan()), driver, HERE, streams=2).issue(0, driver)  # type: ignore[arg-type]
    assert [c for c in driver.calls if c[1] == 70] == [("record", 70, 900), ("copy", 70, 1), ("record", 70, 100)]
    assert [c for c in driver.calls if c[1] == 71] == [("join", 71, 100), ("copy", 71, 1), ("record", 71, 901)]
    assert driver.calls.index(("record", 70, 100)) < driver.calls.index(("join", 71, 100))


# --- what only some engines do ---------------------------------------------------------------------------------------


class Engines(Recorder):
    """Swaps in place, and queues that are bound to engines."""

    refuse = False

    def swap_batch(self, a: Any, b: Any, size: Any, stream: int) -> None:
        self.calls.append(("swap", stream, len(a)))
        turn = list(range(len(a)))
        self.rng.shuffle(turn)
        for x, y, n in ((int(a[k]), int(b[k]), int(size[k])) for k in turn):
            first = self.memory[x : x + n].copy()
            self._move(x, y, n)
            self.memory[y : y + n] = first

    def engine_queues(self, device: int, queues: Sequence[tuple[Any, Any, Any]]) -> Any:
        if self.refuse:
            raise NotSupported("no engine")
        driver = self

        class Made:
            def run(self, stream: int) -> None:
                driver.calls.append(("engines", stream, [len(q[0]) for q in queues]))
                rows = [row for q in queues for row in zip(*(c.tolist() for c in q), strict=True)]
                driver.rng.shuffle(rows)
                for row in rows:
                    driver._move(*row)

            def close(self) -> None:
                driver.calls.append(("closed", 0, device))

        return Made()


@settings(max_examples=60, deadline=None)
@given(table=moves(), seed=some.integers(0, 1 << 20), entries=some.sampled_from([0, 1, 3, 512]))
def test_swaps_in_place(table: tuple[Ints, Ints, Ints], seed: int, entries: int) -> None:
    src, dst, length = table
    driver = Engines(seed=seed)
    want = driver.memory.copy()
    for s, d, n in zip((8192 + src).tolist(), (8192 + dst).tolist(), length.tolist(), strict=True):
        first = want[s : s + n].copy()
        want[s : s + n], want[d : d + n] = want[d : d + n].copy(), first
    a = Assembly("swaps", 1)
    a.buffer("a", Role.INOUT, 4096)
    a.queue(0, 0, st.swap((0, 0, src), (0, 0, dst), length))
    caps = replace(CAPS, native_ops=frozenset((Op.COPY, Op.SWAP)))
    program = compile_plan(a.plan(), [0], caps, most_streams=1)
    binder = Binder(
        program, driver, None, streams=[70], events=[], stamps={}, entries_per_call=entries, most_batched=512,  # type: ignore[arg-type]
    )  # fmt: skip
    script = binder.bind({(0, 0): HERE[0, 0]}, [], lambda signal: 0)
    script.issue(0, driver)  # type: ignore[arg-type]
    assert np.array_equal(driver.memory, want)
    assert script.bytes_by_path.get("d2d", 0) == 2 * int(length.sum())


@pytest.mark.parametrize("refuse", [False, True])
def test_queues_on_engines(refuse: bool) -> None:
    """A queue of the plan is one on an engine; where no engine takes it, copies go the usual way."""
    driver = Engines(seed=5)
    driver.refuse = refuse
    a = Assembly("engines", 1)
    a.buffer("a", Role.INPUT, 4096)
    a.buffer("b", Role.OUTPUT, 4096)
    for engine in range(3):
        at = np.arange(4, dtype=np.int64) ** 2 * 10 + 1000 * engine
        a.queue(0, engine, st.copy((0, 0, at), (0, 1, at), 10))
    program = compile_plan(a.plan(), [0], CAPS, most_streams=1)
    binder = Binder(
        program, driver, None, streams=[70], events=[], stamps={}, most_batched=512, engines_of=3,  # type: ignore[arg-type]
    )  # fmt: skip
    script = binder.bind(HERE, [], lambda signal: 0)
    script.issue(0, driver)  # type: ignore[arg-type]
    for engine in range(3):
        for k in range(4):
            at = k * k * 10 + 1000 * engine
            assert np.array_equal(driver.memory[16384 + at : 16394 + at], driver.memory[8192 + at : 8202 + at])
    assert ("engines" in [c[0] for c in driver.calls]) is not refuse
    assert len(script.owned) == (0 if refuse else 1)
    assert script.num_copies == 12
