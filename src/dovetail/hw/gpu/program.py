"""Turns a plan into blocks of work for a few streams: batches of copies, waits and writes of words, joins by events.

Owns the translation and no hardware: it is made once per plan and bound to addresses later (bind.py). One process
drives some ranks of a plan, most often one. A signal between two queues that this process drives needs no word in
memory: in one stream the order of the stream is enough, between two streams an event is. Words are written and waited
for only where somebody else is at the other end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from dovetail.errors import NotSupported, PlanError
from dovetail.hw.capabilities import Capabilities
from dovetail.plan import passes
from dovetail.plan import step as st
from dovetail.plan.linear import linearize
from dovetail.plan.plan import Plan, Queue, SignalKind
from dovetail.plan.step import Op, Rows

#: Streams of one process that may stand at a wait: with 16 or more no other stream of an H200 gets on, 8 are harmless.
MOST_GATED_STREAMS = 4


class Work(IntEnum):
    """What a block does."""

    COPIES = 0  #: copies without an order among themselves
    ROWS = 1  #: strided copies
    REDUCE = 2
    WORDS = 3  #: waits and writes of signal words
    RECORD = 4  #: an event
    JOIN = 5  #: wait for an event of another stream
    STAMP = 6
    SWAPS = 7  #: exchanges without an order among themselves


@dataclass(slots=True)
class Block:
    """Steps of one kind that follow each other in one stream."""

    work: Work
    stream: int
    steps: list[int] = field(default_factory=list)  #: positions in `Program.steps`
    event: int = -1  #: RECORD, JOIN


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A plan as one process runs it."""

    plan: Plan  #: lowered and folded
    lanes: tuple[int, ...]  #: which of a device's streams those of the blocks are; ones without blocks are not there
    steps: Rows  #: those that this process runs
    blocks: tuple[Block, ...]  #: in an order in which they can be issued
    num_events: int
    places: tuple[tuple[int, int], ...]  #: (queue, step) of each row of `steps`, for messages
    waits_outside: bool  #: some stream waits for somebody else

    @property
    def num_streams(self) -> int:
        """That it runs in."""
        return len(self.lanes)


LaneOf = Callable[[Queue], int]


def compile_plan(
    plan: Plan, driven: Collection[int], caps: Capabilities, *, most_streams: int = 2, lane_of: LaneOf | None = None
) -> Program:
    """The program of the ranks in `driven`.

    Raises:
        NotSupported: the plan has more queues than can be folded away, fixed signal values, or too many signals.
    """
    if plan.captured:
        raise NotSupported(f"plan {plan.name} has fixed signal values; GPU streams run plans that count on")
    if not 1 <= most_streams <= MOST_GATED_STREAMS:
        raise NotSupported(f"a process has 1 to {MOST_GATED_STREAMS} streams for plans, not {most_streams}")
    if "entry" not in plan.passes and set(driven) != set(range(plan.world)):
        raise PlanError(f"plan {plan.name} has no entry handshake: apply dovetail.plan.passes.entry before running it")
    plan = _tagged(passes.lower(plan, caps.native_ops))
    plan = passes.fold(plan, most_streams, lane_of=lane_of)
    return _Compiler(plan, frozenset(driven)).program()


def _tagged(plan: Plan) -> Plan:
    """Notes in each step's `flags` which engine it was on: streams are few, but copies may still be put on engines."""
    queues = []
    for q in plan.queues:
        steps = q.steps.copy()
        steps["flags"] = min(q.engine, 255)
        queues.append(dataclasses.replace(q, steps=steps))
    return plan.replace(queues=tuple(queues))


_MOVES = {Op.COPY: Work.COPIES, Op.COPY2D: Work.ROWS, Op.REDUCE: Work.REDUCE, Op.SWAP: Work.SWAPS}


class _Compiler:
    def __init__(self, plan: Plan, driven: frozenset[int]) -> None:
        self.plan, self.driven = plan, driven
        self.stream_of = [q.engine for q in plan.queues]
        self.blocks: list[Block] = []
        self.last: dict[int, Block] = {}  # the block at the end of each stream
        self.events: dict[tuple[int, int], tuple[int, int]] = {}  # (signal, value) -> (event, stream)
        self.known: dict[tuple[int, int], int] = {}  # (stream, other stream) -> last event of the other it has joined
        self.waits_outside = False
        self.alone = driven == frozenset(range(plan.world))  # the process enters all of its ranks at once
        self._look_at_signals()

    def _look_at_signals(self) -> None:
        """Who raises each signal, and whether somebody waits for it in another stream, or in another process."""
        n = len(self.plan.signals)
        self.raised_in: list[int] = [-1] * n  # stream; -1: outside
        self.heard_outside = [s.kind is SignalKind.EXPORTED for s in self.plan.signals]
        self.joins: list[list[int]] = [[] for _ in range(n)]  # values that another stream of ours waits for
        for number, q in enumerate(self.plan.queues):
            if q.rank in self.driven:
                for s in np.unique(q.steps["signal"][q.steps["op"] == Op.SIGNAL]).tolist():
                    self.raised_in[s] = self.stream_of[number]
        for number, q in enumerate(self.plan.queues):
            waits = q.steps[q.steps["op"] == Op.WAIT]
            for s, v in zip(waits["signal"].tolist(), waits["value"].tolist(), strict=True):
                if q.rank not in self.driven:
                    self.heard_outside[s] = True
                elif self.raised_in[s] not in (-1, self.stream_of[number]):
                    self.joins[s].append(v)

    def program(self) -> Program:
        plan = self.plan
        order = linearize(plan)
        mine = [
            (q, i)
            for q, i in zip(order.queue.tolist(), order.index.tolist(), strict=True)
            if plan.queues[q].rank in self.driven
        ]
        first = np.concatenate([[0], np.cumsum([len(q) for q in plan.queues])])
        everything = st.sequence(*(q.steps for q in plan.queues))
        steps = everything[[int(first[q]) + i for q, i in mine]]
        columns = (steps["op"].tolist(), steps["signal"].tolist(), steps["value"].tolist())
        for n, (op, signal, value) in enumerate(zip(*columns, strict=True)):
            self._add(n, Op(op), signal, value, self.stream_of[mine[n][0]])
        blocks, lanes = _renumbered(_joined(_pruned(self.blocks)))
        return Program(
            plan=plan,
            lanes=lanes,
            steps=steps,
            blocks=tuple(blocks),
            num_events=len(self.events),
            places=tuple(mine),
            waits_outside=self.waits_outside,
        )

    def _add(self, n: int, op: Op, signal: int, value: int, stream: int) -> None:
        if self.alone and signal >= 0 and self.plan.signals[signal].kind is SignalKind.ENTRY:
            return
        if op is Op.SIGNAL:
            self._signal(n, signal, value, stream)
        elif op is Op.WAIT:
            self._wait(n, signal, value, stream)
        elif op is Op.STAMP:
            self._append(Work.STAMP, stream, n)
        else:
            kind = _MOVES.get(op)
            if kind is None:
                raise NotSupported(f"plan {self.plan.name}: a GPU has no {op.name}")
            self._append(kind, stream, n)

    def _append(self, work: Work, stream: int, step: int) -> None:
        block = self.last.get(stream)
        if block is None or block.work is not work:
            block = self._new(work, stream)
        block.steps.append(step)

    def _new(self, work: Work, stream: int, event: int = -1) -> Block:
        block = Block(work, stream, event=event)
        self.blocks.append(block)
        self.last[stream] = block
        return block

    def _signal(self, n: int, signal: int, value: int, stream: int) -> None:
        if self.heard_outside[signal]:
            self._append(Work.WORDS, stream, n)
        if any(v <= value for v in self.joins[signal]):
            self.joins[signal] = [v for v in self.joins[signal] if v > value]  # later values have events of their own
            event = len(self.events)
            self.events[signal, value] = (event, stream)
            self._new(Work.RECORD, stream, event)

    def _wait(self, n: int, signal: int, value: int, stream: int) -> None:
        if self.raised_in[signal] == -1:
            self._append(Work.WORDS, stream, n)
            self.waits_outside = True
        elif self.raised_in[signal] != stream:
            at = min(v for s, v in self.events if s == signal and v >= value)
            event, other = self.events[signal, at]
            if self.known.get((stream, other), -1) < event:
                self.known[stream, other] = event
                self._new(Work.JOIN, stream, event)


def _pruned(blocks: list[Block]) -> list[Block]:
    """Without joins that nothing in their stream comes after, and events that nobody joins: a run's end joins all."""
    while True:
        busy: set[int] = set()
        kept: list[Block] = []
        wanted = {b.event for b in blocks if b.work is Work.JOIN}
        for block in reversed(blocks):
            if (block.work is Work.JOIN and block.stream not in busy) or (
                block.work is Work.RECORD and block.event not in wanted
            ):
                continue
            busy.add(block.stream)
            kept.append(block)
        kept.reverse()
        if len(kept) == len(blocks):
            return kept
        blocks = kept


def _renumbered(blocks: list[Block]) -> tuple[list[Block], tuple[int, ...]]:
    """On streams 0 and up, and which they were: one that has nothing to do would only be waited for."""
    lanes = tuple(sorted({block.stream for block in blocks})) or (0,)
    for block in blocks:
        block.stream = lanes.index(block.stream)
    return blocks, lanes


def _joined(blocks: list[Block]) -> list[Block]:
    """Blocks of one kind that now stand side by side in their stream become one."""
    last: dict[int, Block] = {}
    kept = []
    for block in blocks:
        before = last.get(block.stream)
        if before is not None and before.work is block.work and before.steps and block.work is not Work.STAMP:
            before.steps += block.steps
            continue
        last[block.stream] = block
        kept.append(block)
    return kept
