"""A plan: for each rank a few in-order queues of steps over symbolic addresses, and what it takes from outside.

Owns the frozen containers. Builders make them, passes rewrite them, the checker proves them, executors run them and
the simulator prices them. A plan never changes after it was made; a pass returns a new one.

Signals are counters that only grow; each is raised by one queue (or from outside) with growing values, so
`wait s >= v` is released by one known step. Run k of a plan counts from base(k), so nothing is reset between runs,
except in a `captured` plan, whose values are absolute and whose last steps reset them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.step import NONE, Op, Rows, Step

#: The size of a buffer that is known only when a run is bound (uneven splits).
AT_RUN = -1
#: The size of a buffer on a rank that has none of it.
ABSENT = -2


class Role(StrEnum):
    """Who fills a buffer and who reads it. The caller owns all but SCRATCH and VIEW between runs."""

    INPUT = "input"  #: filled by the caller, only read by the plan
    OUTPUT = "output"  #: undefined at the start, read by the caller at the end
    INOUT = "inout"  #: filled by the caller, overwritten by the plan
    SCRATCH = "scratch"  #: undefined at the start, nobody's at the end; on the heap
    VIEW = "view"  #: the buffer `of` as peers may read it: that buffer itself, or a staging ring where `staged`
    OUTSIDE = "outside"  #: undefined at the start, filled by the `External` accesses of the plan


class Space(StrEnum):
    """Who can reach a buffer."""

    HEAP = "heap"  #: symmetric memory: every rank's engines
    LOCAL = "local"  #: an ordinary tensor: only the engines of the rank that owns it


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A named range of bytes on every rank."""

    name: str
    role: Role
    sizes: tuple[int, ...]  #: bytes on each rank, or AT_RUN, or ABSENT
    spaces: tuple[Space, ...]
    of: int = NONE  #: VIEW: the index of the buffer it shows
    staged: tuple[bool, ...] = ()  #: VIEW: on which ranks it is a ring of `sizes[rank]` bytes, not `of` itself


class SignalKind(StrEnum):
    """Who raises a signal."""

    INTERNAL = "internal"  #: one queue of the plan
    ENTRY = "entry"  #: one queue of the plan, as the handshake that opens a run
    IMPORTED = "imported"  #: somebody outside: a kernel, a network thread, the caller
    EXPORTED = "exported"  #: one queue of the plan, for somebody outside
    GATE = "gate"  #: the caller, once per run: the gate of a prelaunched plan

    @property
    def from_outside(self) -> bool:
        """True if no queue of the plan raises it."""
        return self in (SignalKind.IMPORTED, SignalKind.GATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """A counter in the memory of `rank`."""

    name: str
    rank: int
    kind: SignalKind = SignalKind.INTERNAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A number of bytes that `rank` posts when it enters a run; others may use it after they saw it enter."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Says that `buffer` on `rank` is cut without gaps into pieces: offsets[k] is the sum of lengths[:k]."""

    rank: int
    buffer: int
    offsets: tuple[int, ...]  #: parameter of each piece's offset
    lengths: tuple[int, ...]  #: parameter of each piece's length


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of a buffer on a rank."""

    rank: int
    buffer: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """An access by somebody outside the plan, and what orders it.

    It begins after `after` = (exported signal, value) was reached, or when its rank starts the run; it has ended
    when `before` = (imported signal, value) is reached, or, if that is None, when the rank ends the run.
    With `read` and `write` it copies; with `write` alone it fills (a kernel's output); with `read` alone it uses.
    """

    read: Region | None = None
    write: Region | None = None
    after: tuple[int, int] | None = None
    before: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """Steps that one engine of `rank` runs in order."""

    rank: int
    engine: int
    steps: Rows
    name: str = ""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What one rank issues: the figures of A's table."""

    commands: int  #: steps that move bytes
    syncs: int  #: signals raised
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """Everything that is to happen in one run of one movement, on all ranks."""

    name: str
    world: int
    buffers: tuple[Buffer, ...]
    signals: tuple[Signal, ...]
    queues: tuple[Queue, ...]
    goal: Rows  #: COPY and REDUCE rows over the buffers as the callers filled them: what must hold at the end
    sources: Rows = field(default_factory=lambda: np.zeros(0, st.SOURCE))  #: of the REDUCE rows of queues and goal
    params: tuple[Param, ...] = ()
    partitions: tuple[Partition, ...] = ()
    equal: tuple[tuple[int, int], ...] = ()  #: pairs of parameters that must be equal: checked at entry
    external: tuple[External, ...] = ()
    captured: bool = False  #: signal values are absolute; the plan resets its signals
    passes: tuple[str, ...] = ()  #: the passes it went through, in order

    def __post_init__(self) -> None:
        _validate(self)

    def replace(self, **changes: object) -> Plan:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def of_rank(self, rank: int) -> list[Queue]:
        """The queues of one rank."""
        return [q for q in self.queues if q.rank == rank]

    def steps(self, queue: int) -> Iterator[Step]:
        """The steps of a queue, as objects for people."""
        for i in range(len(self.queues[queue])):
            yield self.step(queue, i)

    def step(self, queue: int, index: int) -> Step:
        """One step of a queue."""
        row = self.queues[queue].steps[index]
        first = int(row["first_source"])
        return Step(row, self.sources[first : first + int(row["num_sources"])])

    def describe(self, queue: int, index: int) -> str:
        """`rank 0 queue 1 (send 2) step 3: copy ...`: how errors name a step."""
        q = self.queues[queue]
        text = self.step(queue, index).describe([b.name for b in self.buffers], [s.name for s in self.signals])
        local = [n for n, other in enumerate(self.queues) if other.rank == q.rank].index(queue)
        return f"rank {q.rank} queue {local}{f' ({q.name})' if q.name else ''} step {index}: {text}"

    def fingerprint(self) -> int:
        """56 bits that differ for plans that differ: what ranks compare before they run one."""
        digest = hashlib.blake2b(digest_size=7)
        for part in (self.name, self.world, self.buffers, self.signals, self.params, self.equal, self.captured):
            digest.update(repr(part).encode())
        for q in self.queues:
            digest.update(repr((q.rank, q.engine, len(q))).encode() + q.steps.tobytes())
        digest.update(self.sources.tobytes())
        return int.from_bytes(digest.digest(), "little")

    def counts(self, rank: int) -> Counts:
        """Commands, syncs and engines of one rank."""
        queues = self.of_rank(rank)
        ops: Counter[int] = Counter()
        for q in queues:
            ops.update(Counter(q.steps["op"].tolist()))
        return Counts(
            commands=sum(ops[op] for op in st.MOVES),
            syncs=ops[Op.SIGNAL],
            engines=len({q.engine for q in queues if st.among(q.steps["op"], st.MOVES).any()}),
        )

    def __str__(self) -> str:
        lines = [
            f"plan {self.name}: {self.world} ranks" + (f", passes {', '.join(self.passes)}" if self.passes else "")
        ]
        lines += [self.describe(q, i) for q in range(len(self.queues)) for i in range(len(self.queues[q]))]
        return "\n".join(lines)


def _validate(plan: Plan) -> None:
    """Every index in range; the checker proves the rest."""
    if plan.world < 1:
        raise PlanError(f"plan {plan.name}: world must be at least 1, not {plan.world}")
    for buffer in plan.buffers:
        if len(buffer.sizes) != plan.world or len(buffer.spaces) != plan.world:
            raise PlanError(
                f"plan {plan.name}: buffer {buffer.name} needs a size and a space for each of {plan.world} ranks"
            )
        if buffer.role is Role.VIEW and not (0 <= buffer.of < len(plan.buffers) and len(buffer.staged) == plan.world):
            raise PlanError(
                f"plan {plan.name}: view {buffer.name} needs the buffer it shows and `staged` for each rank"
            )
    for q in plan.queues:
        if not 0 <= q.rank < plan.world:
            raise PlanError(f"plan {plan.name}: a queue of rank {q.rank} in a world of {plan.world}")
    tables = [*(q.steps for q in plan.queues), plan.goal]
    if any(rows.dtype != st.STEP for rows in tables):
        raise PlanError(f"plan {plan.name}: a queue, or the goal, is not a table of steps")
    if sum(map(len, tables)) < _LARGE:
        _in_range(plan, tables)
        return
    if any(_is_part(plan.goal, q.steps) for q in plan.queues):  # the goal may be the moves themselves
        tables.pop()
    for place, rows in enumerate(tables):
        _in_range(plan, [rows], place)


def _is_part(rows: Rows, whole: Rows) -> bool:
    """Are they rows of another table, in the same memory?"""
    at = rows.ctypes.data - whole.ctypes.data
    return rows.strides == whole.strides and at >= 0 and at + rows.nbytes <= whole.nbytes and not at % st.STEP.itemsize


_LARGE = 4096  # rows: few small tables are faster as one, large ones are not worth copying
_OPERANDS = {
    "src": (Op.COPY, Op.COPY2D, Op.BROADCAST, Op.SWAP),
    "dst": st.MOVES,
    "dst2": (Op.BROADCAST,),
}


def _in_range(plan: Plan, tables: list[Rows], first: int = 0) -> None:
    """All tables at once, the queues from `first` on, then the goal; a fault is then traced back to its queue."""
    rows = st.sequence(*tables) if len(tables) > 1 else tables[0]

    def require(ok: np.ndarray, what: str) -> None:
        if ok.all():
            return
        at, place = int(np.argmin(ok)), 0
        while at >= len(tables[place]):
            at, place = at - len(tables[place]), place + 1
        where = f"queue {first + place}" if first + place < len(plan.queues) else "goal"
        raise PlanError(f"plan {plan.name}: {where} step {at}: {what}")

    op = rows["op"]
    require(op <= max(Op), "unknown op")
    for side, ops in _OPERANDS.items():
        unused = ~st.among(op, ops)
        for part, limit in (("rank", plan.world), ("buffer", len(plan.buffers))):
            column = rows[f"{side}_{part}"]
            require(unused | ((column >= 0) & (column < limit)), f"{side} {part} out of range")
        require(rows[f"{side}_param"] < len(plan.params), f"{side} parameter out of range")
    silent = ~st.among(op, (Op.SIGNAL, Op.WAIT, Op.RESET))
    require(silent | ((rows["signal"] >= 0) & (rows["signal"] < len(plan.signals))), "signal out of range")
    still = ~st.among(op, st.MOVES)
    require(still | ((rows["length"] >= 0) & (rows["rows"] >= 0) & (rows["skip"] >= 0)), "negative extent")
    require(rows["length_param"] < len(plan.params), "length parameter out of range")
    last = rows["first_source"] + rows["num_sources"]
    sourced = (rows["num_sources"] > 0) & (rows["first_source"] >= 0) & (last <= len(plan.sources))
    require((op != Op.REDUCE) | sourced, "sources out of range")
