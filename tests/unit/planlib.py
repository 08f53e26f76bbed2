"""Plans by hand, broken twins of them, and a machine that runs a plan byte by byte under a random schedule.

The machine is the checker's opponent: it knows nothing of happens-before. It takes one enabled step after another, in
an order that starves some queues, and finds a plan wrong if it hangs or if a caller sees a wrong byte at its end. A
byte is a 64-bit token; callers spoil all their buffers as soon as they own them, so that a late access shows.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dovetail.errors import PlanError
from dovetail.plan import AT_RUN, Buffer, External, Op, Plan, Queue, Role, Signal, SignalKind, Space
from dovetail.plan import step as st
from dovetail.plan.check import check
from dovetail.plan.step import Rows

HEAP, LOCAL = Space.HEAP, Space.LOCAL


def buffer(name: str, role: Role, sizes: Sequence[int], spaces: Space | Sequence[Space] = HEAP, **more: Any) -> Buffer:
    """A buffer with one space for all ranks, or one each."""
    each = (spaces,) * len(sizes) if isinstance(spaces, Space) else tuple(spaces)
    return Buffer(name=name, role=role, sizes=tuple(sizes), spaces=each, **more)


def queue(rank: int, *blocks: Rows, name: str = "") -> Queue:
    """A queue of blocks of rows."""
    return Queue(rank=rank, engine=0, steps=st.sequence(*blocks), name=name)


def signals(*names: str, rank: int = 0, kind: SignalKind = SignalKind.INTERNAL) -> tuple[Signal, ...]:
    """Signals of one kind."""
    return tuple(Signal(name=n, rank=rank, kind=kind) for n in names)


def find(plan: Plan, op: Op) -> list[tuple[int, int]]:
    """(queue, index) of every step with this op."""
    return [(q, i) for q in range(len(plan.queues)) for i in np.flatnonzero(plan.queues[q].steps["op"] == op).tolist()]


def with_steps(plan: Plan, number: int, steps: Rows) -> Plan:
    """The plan with other steps in one queue."""
    queues = list(plan.queues)
    queues[number] = dataclasses.replace(queues[number], steps=steps)
    return plan.replace(queues=tuple(queues))


def without(plan: Plan, number: int, index: int) -> Plan:
    """The plan without one step."""
    return with_steps(plan, number, np.delete(plan.queues[number].steps, index))


def changed(plan: Plan, number: int, index: int, **columns: int) -> Plan:
    """The plan with columns of one step changed."""
    steps = plan.queues[number].steps.copy()
    for name, value in columns.items():
        steps[name][index] = value
    return with_steps(plan, number, steps)


def swapped(plan: Plan, a: tuple[int, int], b: tuple[int, int], column: str = "signal") -> Plan:
    """The plan with a column of two steps exchanged."""
    rows = [plan.queues[q].steps[i] for q, i in (a, b)]
    plan = changed(plan, *a, **{column: int(rows[1][column])})
    return changed(plan, *b, **{column: int(rows[0][column])})


class Fault(Exception):
    """The machine hung or a caller saw a wrong byte."""


class Machine:
    """Runs a plan `runs` times. `lengths`: a value for each parameter class, for plans with splits."""

    def __init__(self, plan: Plan, runs: int, seed: int) -> None:
        self.plan, self.runs, self.random = plan, runs, random.Random(seed)
        self._bind()
        self.memory = {
            (r, b): self._garbage(self._size(r, b)) for r in range(plan.world) for b in range(len(plan.buffers))
        }
        self.raised = [0] * len(plan.signals)
        self.stride = 1 + max([0, *(int(q.steps["value"].max(initial=0)) for q in plan.queues)])
        self.started, self.ended = [0] * plan.world, [0] * plan.world
        self.at = [[0, 0] for _ in plan.queues]  # (run, next step) of each queue
        self.outside = list({(x.read, x.write, x.after): x for x in plan.external}.values())
        self.external = [0] * len(self.outside)  # runs done of each
        self.imports = self._imports()
        self.imported = [(0, 0) for _ in self.imports]  # (run, next value) of each

    def _bind(self) -> None:
        """Random lengths, equal where the plan says so; offsets are their sums."""
        plan = self.plan
        group = list(range(len(plan.params)))
        for a, b in plan.equal:
            group = [group[b] if g == group[a] else g for g in group]
        value = {g: self.random.choice([0, 1, 2, 5, 8]) for g in group}
        self.param = [value[g] for g in group]
        self.total: dict[tuple[int, int], int] = {}
        for p in plan.partitions:
            lengths = [self.param[k] for k in p.lengths]
            self.total[p.rank, p.buffer] = sum(lengths)
            for k, offset in enumerate(p.offsets):
                self.param[offset] = sum(lengths[:k])

    def _size(self, rank: int, number: int) -> int:
        b = self.plan.buffers[number]
        if b.sizes[rank] == AT_RUN:
            return self.total.get((rank, number if b.role is not Role.VIEW else b.of), 0)
        return max(0, b.sizes[rank])

    def _garbage(self, size: int) -> np.ndarray:
        return np.array([self.random.getrandbits(63) for _ in range(size)], np.uint64)

    @staticmethod
    def fresh(rank: int, number: int, size: int, run: int) -> np.ndarray:
        """What a caller (or somebody outside) fills into a buffer in a run."""
        at = np.arange(size, dtype=np.uint64)
        return at + np.uint64((((run + 1) << 16) + (rank << 8) + number) << 32)

    def _imports(self) -> list[tuple[int, list[int]]]:
        """(signal, values) that outside raises."""
        found: dict[int, set[int]] = {
            s: set() for s, signal in enumerate(self.plan.signals) if signal.kind is SignalKind.IMPORTED
        }
        for q in self.plan.queues:
            for row in q.steps[q.steps["op"] == Op.WAIT]:
                if int(row["signal"]) in found:
                    found[int(row["signal"])].add(int(row["value"]))
        for e in self.plan.external:
            if e.before:
                found[e.before[0]].add(e.before[1])
        return [(s, sorted(v)) for s, v in found.items() if v]

    def base(self, run: int) -> int:
        return 0 if self.plan.captured else run * self.stride

    # --- what can happen next ----------------------------------------------------------------------------------------

    def enabled(self) -> Iterator[tuple[str, int]]:
        for r in range(self.plan.world):
            if self.started[r] < self.runs and self.started[r] == self.ended[r]:
                yield "start", r
            elif self.started[r] > self.ended[r] and self._finished(r):
                yield "end", r
        for q, (run, index) in enumerate(self.at):
            rank = self.plan.queues[q].rank
            if run < self.started[rank] and index < len(self.plan.queues[q]) and self._passes(q, run, index):
                yield "queue", q
        for e in range(len(self.outside)):
            if self.external[e] < self.runs and self._begins(e, self.external[e]):
                yield "external", e
        for i in range(len(self.imports)):
            if self.imported[i][0] < self.runs and self._promised(i):
                yield "import", i

    def _finished(self, rank: int) -> bool:
        run = self.started[rank] - 1
        mine = [q for q, queue in enumerate(self.plan.queues) if queue.rank == rank]
        queues = all(self.at[q] >= [run, len(self.plan.queues[q])] for q in mine)
        outside = [e for e, x in enumerate(self.outside) if not x.before and _rank(x) == rank]
        return queues and all(self.external[e] > run for e in outside)

    def _passes(self, q: int, run: int, index: int) -> bool:
        row = self.plan.queues[q].steps[index]
        return row["op"] != Op.WAIT or self.raised[row["signal"]] >= self.base(run) + int(row["value"])

    def _begins(self, e: int, run: int) -> bool:
        x = self.outside[e]
        if x.after:
            return self.raised[x.after[0]] >= self.base(run) + x.after[1]
        return self.started[_rank(x)] > run

    def _promised(self, i: int) -> bool:
        (signal, values), (run, k) = self.imports[i], self.imported[i]
        mine = [x for x in self.plan.external if x.before and x.before[0] == signal and x.before[1] <= values[k]]
        accesses = [(x.read, x.write, x.after) for x in mine]
        ends = [e for e, x in enumerate(self.outside) if (x.read, x.write, x.after) in accesses]
        if not ends:
            return self.started[self.plan.signals[signal].rank] > run
        return all(self.external[e] > run for e in ends)

    # --- doing it ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Fault if this schedule shows a fault."""
        weight: dict[tuple[str, int], float] = {}
        done = 0
        while choices := list(self.enabled()):
            for c in choices:
                weight.setdefault(c, 10 ** self.random.uniform(-3, 0))
            what, which = self.random.choices(choices, [weight[c] for c in choices])[0]
            getattr(self, f"_do_{what}")(which)
            done += 1
            if done % 16 == 0:
                weight.clear()
        if self.ended != [self.runs] * self.plan.world:
            raise Fault(f"hangs: ended {self.ended}, queues at {self.at}")

    def _do_start(self, r: int) -> None:
        run = self.started[r]
        for b, spec in enumerate(self.plan.buffers):
            if spec.role in (Role.INPUT, Role.INOUT):
                self.memory[r, b][:] = self.fresh(r, b, len(self.memory[r, b]), run)
        for q in range(len(self.at)):
            if self.plan.queues[q].rank == r:
                self.at[q] = [run, 0]
        self.started[r] += 1

    def _do_end(self, r: int) -> None:
        run = self.ended[r]
        for row in self.plan.goal[self.plan.goal["dst_rank"] == r]:
            length = self._length(row)
            dst = self._at(int(row["dst_rank"]), int(row["dst_buffer"]), row["dst_offset"], row["dst_param"])
            spans = [self._expected(*s, length, run) for s in self._sources(row, goal=True)]
            for k in range(int(row["rows"])):
                want = _combined(row, [s[k * int(row["src_pitch"]) :][:length] for s in spans])
                if not np.array_equal(dst[k * int(row["dst_pitch"]) :][:length], want):
                    raise Fault(f"rank {r} run {run}: wrong bytes")
        for b, spec in enumerate(self.plan.buffers):
            if spec.role in (Role.INPUT, Role.INOUT, Role.OUTPUT):
                self.memory[r, b][:] = self._garbage(len(self.memory[r, b]))
        self.ended[r] += 1

    def _expected(self, rank: int, number: int, offset: int, length: int, run: int) -> np.ndarray:
        return self.fresh(rank, number, self._size(rank, number), run)[offset:]

    def _do_queue(self, q: int) -> None:
        run, index = self.at[q]
        row = self.plan.queues[q].steps[index]
        self.at[q][1] += 1
        if row["op"] == Op.SIGNAL:
            self.raised[row["signal"]] = self.base(run) + int(row["value"])
        elif row["op"] == Op.RESET:
            self.raised[row["signal"]] = 0
        elif row["op"] in st.MOVES:
            self._move(row)

    def _do_external(self, e: int) -> None:
        x, run = self.outside[e], self.external[e]
        self.external[e] += 1
        if x.write:
            w = x.write
            value = self.fresh(w.rank, w.buffer, w.offset + w.length, run)[w.offset :]
            if x.read:
                value = self.memory[x.read.rank, x.read.buffer][x.read.offset :][: w.length]
            self.memory[w.rank, w.buffer][w.offset :][: w.length] = value

    def _do_import(self, i: int) -> None:
        (signal, values), (run, k) = self.imports[i], self.imported[i]
        self.raised[signal] = self.base(run) + values[k]
        self.imported[i] = (run, k + 1) if k + 1 < len(values) else (run + 1, 0)

    # --- moves -------------------------------------------------------------------------------------------------------

    def _length(self, row: np.void) -> int:
        length = int(row["length"])
        if row["length_param"] >= 0:
            length = min(length, max(self.param[row["length_param"]] - int(row["skip"]), 0))
        return length

    def _at(self, rank: int, number: int, offset: Any, param: Any) -> np.ndarray:
        spec = self.plan.buffers[number]
        if spec.role is Role.VIEW and not spec.staged[rank]:
            number = spec.of
        return self.memory[rank, number][int(offset) + (self.param[param] if param >= 0 else 0) :]

    def _sources(self, row: np.void, *, goal: bool) -> list[tuple[int, int, int]]:
        """(rank, buffer, offset) of what a row reads."""
        raw = [(row["src_rank"], row["src_buffer"], row["src_offset"], row["src_alt"], row["src_param"])]
        if row["op"] == Op.REDUCE:
            first = int(row["first_source"])
            raw = [tuple(s[n] for n in ("rank", "buffer", "offset", "alt", "param")) for s in self.plan.sources[first:]]
            raw = raw[: int(row["num_sources"])]
        found = []
        for rank, number, offset, alt, param in raw:
            spec = self.plan.buffers[number]
            staged = spec.role is Role.VIEW and spec.staged[rank] and not goal
            begin = int(alt if staged else offset) + (self.param[param] if param >= 0 else 0)
            found.append((int(rank), int(number) if spec.role is not Role.VIEW or staged else spec.of, begin))
        return found

    def _move(self, row: np.void) -> None:
        length = self._length(row)
        reads = [self.memory[r, b][at:] for r, b, at in self._sources(row, goal=False)]
        dst = self._at(int(row["dst_rank"]), int(row["dst_buffer"]), row["dst_offset"], row["dst_param"])
        if row["op"] == Op.SWAP:
            reads[0][:length], dst[:length] = dst[:length].copy(), reads[0][:length].copy()
            return
        for k in range(int(row["rows"]) if row["op"] == Op.COPY2D else 1):
            value = _combined(row, [r[k * int(row["src_pitch"]) :][:length] for r in reads])
            dst[k * int(row["dst_pitch"]) :][:length] = value
        if row["op"] == Op.BROADCAST:
            dst2 = self._at(int(row["dst2_rank"]), int(row["dst2_buffer"]), row["dst2_offset"], row["dst2_param"])
            dst2[:length] = dst[:length]


def _rank(external: External) -> int:
    region = external.write or external.read
    assert region is not None
    return region.rank


def _combined(row: np.void, values: list[np.ndarray]) -> np.ndarray:
    """A copy, or a value that depends on op, dtype and the order of the sources."""
    if len(values) == 1:
        return values[0].copy()
    total = np.full(len(values[0]), int(row["reduce_op"]) * 256 + int(row["dtype"]), np.uint64)
    for v in values:
        total = (total ^ v) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1)
    return total


def rejection(plan: Plan) -> PlanError | None:
    """The checker's error, or None if it accepts the plan."""
    try:
        check(plan)
    except PlanError as error:
        return error
    return None


def faults(plan: Plan, *, runs: int = 2, schedules: int = 20, seed: int = 0) -> str:
    """What the first faulty schedule of several shows, or nothing."""
    for k in range(schedules):
        try:
            Machine(plan, runs, seed * 1000 + k).run()
        except Fault as fault:
            return str(fault)
    return ""
