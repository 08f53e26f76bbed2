"""Binds a program to addresses: what is left to do per run is a list of driver calls.

Every operand is checked against the memory that its buffer names, before anything is issued. Copies that could touch
each other's bytes never share a batch, since a batch has no order; a copy is cut where host memory was registered in
parts, since the driver refuses to cross that line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NotSupported, PlanError
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE, Driver, EngineQueues, Kind, SourceOrder
from dovetail.hw.gpu.program import Block, Program, Work
from dovetail.plan.step import NONE, DType, Op, ReduceOp, Rows

Ints = NDArray[np.int64]


class Reducing(Protocol):
    """Who runs REDUCE steps: a kernel of ours, in the order of a stream."""

    def warm(self, dtype: DType, op: ReduceOp, num_sources: int) -> None:
        """Loads the kernel: a first launch would wait for ever behind an armed gate."""

    def launch(
        self, dst: int, sources: Sequence[int], size_bytes: int, dtype: DType, op: ReduceOp, stream: int
    ) -> None:
        """dst = op over the sources, in their order."""


class Copying(Protocol):
    """Who copies, if not the driver: a kernel of ours."""

    def prepare(self, dst: Ints, src: Ints, size: Ints, stream: int) -> Callable[[], None]:
        """Copies in no order, to be launched again and again."""


#: Entries of one batched copy: the best over 2 to 64 KB and both directions on an H200 (docs/design/hw-gpu.md).
ENTRIES_PER_CALL = 128


@dataclass(frozen=True, slots=True)
class Place:
    """Where a buffer of a rank is."""

    base: int
    size_bytes: int
    kind: Kind
    device: int = -1  #: of device memory, if that is known
    staged: bool = False  #: it is a VIEW that its rank stages: offsets are those of the ring


@dataclass(slots=True)
class Words:
    """Waits and writes of one block; `rows["value"]` is set from `values` and the run's base before they are issued."""

    rows: NDArray[np.void]
    values: NDArray[np.uint64]
    stream: int


Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Driver calls of a run, in order, with their arguments; `Words` still need the run's base."""

    calls: list[Call | Words]
    num_copies: int
    bytes_by_path: dict[str, int]  #: "h2d", "d2h", "d2d" in one GPU, "p2p", "h2h", "reduce" (read) -> bytes
    owned: list[EngineQueues]  #: to be closed with it

    def issue(self, base: int, driver: Driver) -> None:
        """Issues everything. `base`: what this run's signals count from."""
        for call in self.calls:
            if type(call) is Words:
                np.add(call.values, np.uint64(base), out=call.rows["value"])
                driver.stream_words(call.rows, call.stream)
            else:
                call()  # type: ignore[operator]


class Binder:
    """Binds one program; `streams` and `events` are the handles that the calls will use."""

    def __init__(
        self,
        program: Program,
        driver: Driver,
        reducer: Reducing | None,
        *,
        streams: Sequence[int],
        events: Sequence[int],
        stamps: Mapping[int, int],
        entries_per_call: int = ENTRIES_PER_CALL,
        most_batched: int = 0,
        engines_of: int | None = None,
        copier: Copying | None = None,
    ) -> None:
        """`engines_of`: the device whose engines are chosen here, one for each queue of the plan; `copier`: no engine
        takes part."""
        self.program, self.driver, self.reducer = program, driver, reducer
        self.streams, self.events, self.stamps = streams, events, stamps
        self.entries = min(entries_per_call, most_batched)  # 0: no batches
        self.engines_of, self.copier = engines_of, copier

    def bind(
        self,
        places: Mapping[tuple[int, int], Place],
        params: Sequence[int],
        word_of: Callable[[int], int],
        boundaries: Sequence[int] = (),
    ) -> Script:
        """Raises `PlanError` that names the step whose operand lies outside its memory."""
        plan, steps = self.program.plan, self.program.steps
        shape = (plan.world, len(plan.buffers))
        base, size = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
        staged, host, device = np.zeros(shape, bool), np.zeros(shape, bool), np.full(shape, -1, np.int64)
        for (r, b), p in places.items():
            base[r, b], size[r, b], staged[r, b] = p.base, p.size_bytes, p.staged
            host[r, b], device[r, b] = p.kind is not Kind.DEVICE, p.device
        self.base, self.size, self.staged, self.host, self.device = base, size, staged, host, device
        self.params = np.array([*params, 0], np.int64)  # the last is what NONE picks
        self.boundaries = np.array(sorted(boundaries), np.int64)
        self.length = self._lengths(steps)
        self.calls: list[Call | Words] = []
        self.num_copies = 0
        self.paths: dict[str, int] = {}
        self.owned: list[EngineQueues] = []
        for block in self.program.blocks:
            self._block(block, steps[block.steps], word_of)
        return Script(
            calls=self.calls, num_copies=self.num_copies, bytes_by_path=self.paths, owned=self.owned
        )  # fmt: skip

    def _later(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.calls.append(functools.partial(function, *arguments))

    def _lengths(self, steps: Rows) -> Ints:
        bounded = np.minimum(steps["length"], np.maximum(self.params[steps["length_param"]] - steps["skip"], 0))
        length: Ints = np.where(steps["length_param"] == NONE, steps["length"], bounded)
        return length

    def _block(self, block: Block, rows: Rows, word_of: Callable[[int], int]) -> None:
        stream = self.streams[block.stream]
        match block.work:
            case Work.COPIES:
                self._copies(block, rows, stream)
            case Work.SWAPS:
                self._swaps(block, rows, stream)
            case Work.ROWS:
                self._rows(block, rows, stream)
            case Work.REDUCE:
                for n, row in zip(block.steps, rows, strict=True):
                    self._reduce(n, row, stream)
            case Work.WORDS:
                words = np.zeros(len(rows), WORD)
                words["kind"] = np.where(rows["op"] == Op.WAIT, WAIT, WRITE)
                words["address"] = [word_of(s) for s in rows["signal"].tolist()]
                self.calls.append(Words(words, rows["value"].astype(np.uint64), stream))
            case Work.RECORD:
                self._later(self.driver.event_record, self.events[block.event], stream)
            case Work.JOIN:
                self._later(self.driver.stream_wait_event, stream, self.events[block.event])
            case Work.STAMP:
                for n in rows["value"].tolist():
                    self._later(self.driver.event_record, self.stamps[n], stream)

    # --- operands

    def _address(self, block: Block, rows: Rows, side: str, extent: Ints) -> Ints:
        rank, buffer = rows[f"{side}_rank"], rows[f"{side}_buffer"]
        at = rows[f"{side}_offset"] + self.params[rows[f"{side}_param"]]
        if side == "src":
            at = np.where(self.staged[rank, buffer], rows["src_alt"] + self.params[rows["src_param"]], at)
        size = self.size[rank, buffer]
        bad = (extent > 0) & ((at < 0) | (at + extent > size))
        if bad.any():
            self._outside(block.steps[int(np.argmax(bad))], int(rank[np.argmax(bad)]))
        where: Ints = self.base[rank, buffer] + at
        return where

    def _outside(self, step: int, rank: int) -> None:
        plan = self.program.plan
        where = plan.describe(*self.program.places[step])
        raise PlanError(
            f"plan {plan.name}: {where} reaches outside the memory of rank {rank}, or that rank has not posted it; "
            "nothing was moved"
        )

    def _count(self, rows: Rows, extent: Ints) -> None:
        at = [(rows[f"{side}_rank"], rows[f"{side}_buffer"]) for side in ("src", "dst")]
        src, dst = (self.host[place] for place in at)
        far = ~src & ~dst & (self.device[at[0]] != self.device[at[1]])
        inside = ~src & ~dst & ~far
        paths = {"d2d": inside, "p2p": far, "d2h": ~src & dst, "h2d": src & ~dst, "h2h": src & dst}
        for name, chosen in paths.items():
            if moved := int(extent[chosen].sum()):
                self.paths[name] = self.paths.get(name, 0) + moved

    # --- copies

    def _copies(self, block: Block, rows: Rows, stream: int) -> None:
        length = self.length[block.steps]
        src, dst = self._address(block, rows, "src", length), self._address(block, rows, "dst", length)
        moves = (length > 0) & (src != dst)
        self._count(rows[moves], length[moves])
        if self.engines_of is None or self.copier is not None:
            self._linear(src[moves], dst[moves], length[moves], stream)
        else:
            self._on_engines(src[moves], dst[moves], length[moves], rows["flags"][moves], stream)

    def _on_engines(self, src: Ints, dst: Ints, length: Ints, engine: NDArray[np.uint8], stream: int) -> None:
        """A queue of the plan is a queue on an engine; where none serves it, the driver chooses as it likes."""
        assert self.engines_of is not None
        for begin, end in independent(src, dst, length):
            here = slice(begin, end)
            parts = [begin + np.flatnonzero(engine[here] == e) for e in np.unique(engine[here])]
            queues = [(_words(dst[p]), _words(src[p]), _words(length[p])) for p in parts]
            try:
                made = self.driver.engine_queues(self.engines_of, queues)
            except NotSupported:
                self._linear(src[here], dst[here], length[here], stream)
                continue
            self.num_copies += end - begin
            self.owned.append(made)
            self._later(made.run, stream)

    def _swaps(self, block: Block, rows: Rows, stream: int) -> None:
        length = self.length[block.steps]
        a, b = self._address(block, rows, "src", length), self._address(block, rows, "dst", length)
        moves = length > 0
        self._count(rows[moves], 2 * length[moves])
        a, b, length = a[moves], b[moves], length[moves]
        self.num_copies += len(a)
        if not len(a):
            return
        order = np.argsort(both := np.concatenate([a, b]))
        ends = (both + np.tile(length, 2))[order]
        most = self.entries if (ends[:-1] <= both[order][1:]).all() else 1  # some share bytes: one after the other
        for k in range(0, len(a), max(1, most)):
            here = slice(k, k + max(1, most))
            self._later(self.driver.swap_batch, _words(a[here]), _words(b[here]), _words(length[here]), stream)

    def _linear(self, src: Ints, dst: Ints, length: Ints, stream: int) -> None:
        src, dst, length = cut(src, dst, length, self.boundaries)
        self.num_copies += len(src)
        for begin, end in independent(src, dst, length):
            if self.copier is not None:
                self.calls.append(self.copier.prepare(dst[begin:end], src[begin:end], length[begin:end], stream))
                continue
            single = np.ones(end - begin, bool)
            for first, last in progressions(src[begin:end], dst[begin:end], length[begin:end]):
                a, b = begin + first, begin + last
                if self._one_memory(int(src[a]), int(src[b] + length[b])) and self._one_memory(
                    int(dst[a]), int(dst[b] + length[b])
                ):
                    single[first : last + 1] = False
                    pitches = int(dst[a + 1] - dst[a]), int(src[a + 1] - src[a])
                    rows = (int(dst[a]), pitches[0], int(src[a]), pitches[1], int(length[a]), b - a + 1)
                    self._later(self.driver.copy_rows, *rows, stream)
            left = begin + np.flatnonzero(single)
            for k in range(0, len(left), max(1, self.entries)):
                part = left[k : k + max(1, self.entries)]
                self._call(src[part], dst[part], length[part], stream)

    def _one_memory(self, begin: int, end: int) -> bool:
        """True if a range lies in one allocation: a strided copy may not leave it, even where it touches nothing."""
        memory = self.driver.memory_at(begin)
        return bool(memory.base) and memory.base <= begin and end <= memory.base + memory.size_bytes

    def _call(self, src: Ints, dst: Ints, length: Ints, stream: int) -> None:
        n = len(src)
        if n == 1 or not self.entries:
            self._later(self.driver.copy, int(dst[0]), int(src[0]), int(length[0]), stream)
            return
        batch = self.driver.prepared_batch(_words(dst), _words(src), _words(length), SourceOrder.STREAM, stream)
        self.calls.append(batch)

    def _rows(self, block: Block, rows: Rows, stream: int) -> None:
        width, count = self.length[block.steps], rows["rows"]
        spans = [np.where(count > 0, (count - 1) * rows[f"{s}_pitch"] + width, 0) for s in ("src", "dst")]
        src, dst = (self._address(block, rows, s, span) for s, span in zip(("src", "dst"), spans, strict=True))
        moves = (width > 0) & (count > 0)
        self._count(rows[moves], (width * count)[moves])
        for k in np.flatnonzero(moves).tolist():
            n, w = int(count[k]), int(width[k])
            pitches = int(rows["src_pitch"][k]), int(rows["dst_pitch"][k])
            a, b = int(src[k]), int(dst[k])
            inside = any(
                np.searchsorted(self.boundaries, at, "right") < np.searchsorted(self.boundaries, at + span)
                for at, span in ((a, int(spans[0][k])), (b, int(spans[1][k])))
            )
            if self.copier is not None or inside or min(pitches) < w:
                # Rows one by one; those that overlap are copied in their order.
                each = np.arange(n, dtype=np.int64)
                self._linear(a + each * pitches[0], b + each * pitches[1], np.full(n, w, np.int64), stream)
                continue
            self.num_copies += 1
            self._later(self.driver.copy_rows, b, pitches[1], a, pitches[0], w, n, stream)

    def _reduce(self, n: int, row: np.void, stream: int) -> None:
        plan, size = self.program.plan, int(self.length[n])
        if not size:
            return
        first = int(row["first_source"])
        sources = []
        for s in plan.sources[first : first + int(row["num_sources"])]:
            r, b = int(s["rank"]), int(s["buffer"])
            at = int(s["alt"] if self.staged[r, b] else s["offset"]) + int(self.params[s["param"]])
            if at < 0 or at + size > self.size[r, b]:
                self._outside(n, r)
            sources.append(int(self.base[r, b]) + at)
        r, b = int(row["dst_rank"]), int(row["dst_buffer"])
        at = int(row["dst_offset"]) + int(self.params[row["dst_param"]])
        if at < 0 or at + size > self.size[r, b]:
            self._outside(n, r)
        assert self.reducer is not None
        kind, how = DType(int(row["dtype"])), ReduceOp(int(row["reduce_op"]))
        self.paths["reduce"] = self.paths.get("reduce", 0) + size * len(sources)
        self._later(self.reducer.launch, int(self.base[r, b]) + at, sources, size, kind, how, stream)


def _words(values: Ints) -> NDArray[np.uint64]:
    return np.ascontiguousarray(values, np.uint64)


def cut(src: Ints, dst: Ints, length: Ints, boundaries: Ints) -> tuple[Ints, Ints, Ints]:
    """The same copies, none of which crosses one of the ascending `boundaries` with its source or destination."""
    if not len(boundaries):
        return src, dst, length
    crossing = np.zeros(len(src), bool)
    for at in (src, dst):
        crossing |= np.searchsorted(boundaries, at, "right") < np.searchsorted(boundaries, at + length)
    if not crossing.any():
        return src, dst, length
    out: list[tuple[int, int, int]] = []
    for s, d, n in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        inside = {0, n}
        for at in (s, d):
            near = boundaries[np.searchsorted(boundaries, at, "right") : np.searchsorted(boundaries, at + n)]
            inside.update((near - at).tolist())
        edges = sorted(inside)
        out += [(s + a, d + a, b - a) for a, b in itertools.pairwise(edges)]
    pieces = np.array(out, np.int64)
    return pieces[:, 0], pieces[:, 1], pieces[:, 2]


def independent(src: Ints, dst: Ints, length: Ints) -> list[tuple[int, int]]:
    """Cuts a sequence of copies into runs [begin, end) in which no copy writes what another reads or writes."""
    if len(src) < 2:
        return [(0, len(src))] if len(src) else []
    if _apart(src, dst, length):
        return [(0, len(src))]
    runs, begin = [], 0
    while begin < len(src):
        good, bad, step = begin + 1, len(src) + 1, 1  # [begin, good) is independent, [begin, bad) is not
        while good + 1 < bad:
            step = min(step, bad - good - 1)  # growing steps: where plans cut often, runs are short
            if _apart(src[begin : good + step], dst[begin : good + step], length[begin : good + step]):
                good, step = good + step, 2 * step
            else:
                bad, step = good + step, 1
        runs.append((begin, good))
        begin = good
    return runs


def progressions(src: Ints, dst: Ints, length: Ints) -> list[tuple[int, int]]:
    """Stretches [first, last] of at least three copies of one length at constant strides, none of which overlap.

    One strided copy does their work: what a rank sends to peers whose regions lie side by side, for instance.
    """
    found: list[tuple[int, int]] = []
    if len(src) < 3:
        return found
    step_src, step_dst = np.diff(src), np.diff(dst)
    same = (length[1:] == length[:-1]) & (step_src >= length[:-1]) & (step_dst >= length[:-1])
    regular = same[1:] & same[:-1] & (step_src[1:] == step_src[:-1]) & (step_dst[1:] == step_dst[:-1])
    edges = np.flatnonzero(np.diff(np.concatenate([[False], regular, [False]]).astype(np.int8)))
    end = -1
    for begin, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        first, last = max(begin, end + 1), stop + 1
        if last - first >= 2:
            found.append((first, last))
            end = last
    return found


def _apart(src: Ints, dst: Ints, length: Ints) -> bool:
    """True if all destinations are apart from each other and from all sources."""
    order = np.argsort(dst, kind="stable")
    begin, end = dst[order], (dst + length)[order]
    if (end[:-1] > begin[1:]).any():
        return False
    # Of disjoint destinations, the last that begins before a source ends is the only one that could reach into it.
    before = np.searchsorted(begin, src + length) - 1
    reaches = (before >= 0) & (end[np.maximum(before, 0)] > src)
    return not bool(reaches.any())
