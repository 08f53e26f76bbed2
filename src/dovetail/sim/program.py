"""A plan, made ready to be replayed: each queue as a list of plain tuples, on any machine.

Owns what does not depend on the machine's costs: which steps an engine runs and which waits are left to the host (the
last ones of a queue, after which it moves nothing), how many bytes each move has, which of a queue's moves must not
overlap, and whom it crosses. Parameters are bound here.
"""

from __future__ import annotations

import copy
import dataclasses
from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.plan import Plan, Role, SignalKind
from dovetail.plan.step import Op
from dovetail.sim.signals import Word


class Kind(IntEnum):
    """What a step of a program is."""

    MOVE = 0
    SIGNAL = 1
    WAIT = 2


class Move(NamedTuple):
    """A command that moves bytes, or a reduction."""

    number: int  #: in the program
    op: Op
    size_bytes: int  #: payload: what each destination gets
    reads: tuple[int, ...]  #: ranks read from; a swap reads both its ends
    writes: tuple[int, ...]  #: ranks written to
    pairs: tuple[tuple[int, int], ...]  #: (from, to) for each transfer between two ranks
    drains: bool  #: must not begin before all earlier moves of its queue have landed
    step: int  #: its row in the queue, for names
    source: tuple[int, ...]  #: what it reads, if that is one range: equal sources can become one broadcast


#: (Kind.MOVE, Move), (Kind.SIGNAL, (signal, value)), or (Kind.WAIT, its number in `Program.waits`)
Action = tuple[Kind, Any]


@dataclass(frozen=True, slots=True)
class Ring:
    """A queue of a rank: what its engine runs, and what the host waits for afterwards."""

    rank: int
    engine: int
    name: str
    actions: list[Action]
    waits: list[tuple[int, int]]
    commands: int  #: moves


class Program:
    """A plan, ready to be replayed many times."""

    def __init__(self, plan: Plan, params: Mapping[str, int] | None = None) -> None:
        self.plan = plan
        self.prelaunched = any(s.kind is SignalKind.GATE for s in plan.signals)
        self._params = _bound(plan, params or {})
        self._columns = _columns(plan)
        self._sources = plan.sources["rank"].tolist()
        self.num_rows = sum(map(len, plan.queues))
        first = 0
        self.waits: list[tuple[Word, ...]] = []  #: words that queues wait for one after the other, each list once
        self._numbers: dict[tuple[Word, ...], int] = {}
        self.rings: list[Ring] = []
        for q in plan.queues:
            self.rings.append(self._ring(q.rank, q.engine, q.name, first, len(q)))
            first += len(q)
        self.ops = frozenset(a.op for ring in self.rings for kind, a in ring.actions if kind is Kind.MOVE)

    def _ring(self, rank: int, engine: int, name: str, first: int, length: int) -> Ring:
        c = self._columns
        ops = c["op"][first : first + length]
        moves = [n for n, op in enumerate(ops) if op in _MOVES]
        body = length
        while body and ops[body - 1] in _SILENT:
            body -= 1
        if not moves and _SIGNAL not in ops[:body]:
            body = 0
        pending = _Pending(self.plan) if len(moves) > 1 else None
        signal, value = c["signal"], c["value"]
        actions: list[Action] = []
        words: list[Word] = []
        for n in range(body):
            op = ops[n]
            if op == _WAIT:
                words.append((signal[first + n], value[first + n]))
                continue
            if words:
                actions.append((Kind.WAIT, self._wait(words)))
                words = []
            if op in _MOVES:
                actions.append((Kind.MOVE, self._move(first + n, n, pending)))
            elif op == _SIGNAL:
                actions.append((Kind.SIGNAL, (signal[first + n], value[first + n])))
        waits = [(signal[first + n], value[first + n]) for n in range(body, length) if ops[n] == _WAIT]
        if self.prelaunched:  # the host opens the gates itself
            waits = [word for word in waits if self.plan.signals[word[0]].kind is not SignalKind.GATE]
        return Ring(rank, engine, name, actions, waits, len(moves))

    def _wait(self, words: list[Word]) -> int:
        key = tuple(words)
        if key not in self._numbers:
            self._numbers[key] = len(self.waits)
            self.waits.append(key)
        return self._numbers[key]

    def _move(self, at: int, step: int, pending: _Pending | None) -> Move:
        c = self._columns
        op = _OPS[c["op"][at]]
        size = c["length"][at]
        if c["length_param"][at] >= 0:
            size = min(size, max(self._params[c["length_param"][at]] - c["skip"][at], 0))
        src, dst = c["src_rank"][at], c["dst_rank"][at]
        if op is Op.REDUCE:
            begin = c["first_source"][at]
            reads = tuple(self._sources[begin : begin + c["num_sources"][at]])
            writes: tuple[int, ...] = (dst,)
            pairs = tuple((r, dst) for r in reads if r != dst)
        elif op is Op.SWAP:
            reads = writes = (src, dst)
            pairs = ((src, dst), (dst, src)) if src != dst else ()
        else:
            reads, writes = (src,), (dst, c["dst2_rank"][at]) if op is Op.BROADCAST else (dst,)
            pairs = tuple([(src, w) for w in writes if w != src])
            size *= c["rows"][at] if op is Op.COPY2D else 1
        drains = pending is not None and pending.meets(op, at, c, self._params)
        source: tuple[int, ...] = ()
        if op is Op.COPY or op is Op.BROADCAST:
            source = (src, c["src_buffer"][at], c["src_offset"][at], c["src_alt"][at], c["src_param"][at])
        return Move(at, op, size, reads, writes, pairs, drains, step, source)

    def scaled(self, factor: int) -> Program:
        """The program of the same plan with every size and offset `factor` times as large."""
        made = copy.copy(self)
        made.rings = [dataclasses.replace(r, actions=[_scaled(a, factor) for a in r.actions]) for r in self.rings]
        return made

    def widened(self, ways: int) -> list[Ring]:
        """The rings where a broadcast reaches `ways` destinations: copies of one source become one command."""
        return self.rings if ways <= 2 else [_widened(ring, ways) for ring in self.rings]

    def traffic(self) -> dict[tuple[int, int], int]:
        """Bytes that go from one rank to another."""
        table: dict[tuple[int, int], int] = {}
        for ring in self.rings:
            for kind, move in ring.actions:
                for pair in move.pairs if kind is Kind.MOVE else ():
                    table[pair] = table.get(pair, 0) + move.size_bytes
        return table


def _scaled(action: Action, factor: int) -> Action:
    kind, move = action
    if kind is not Kind.MOVE:
        return action
    m: Move = move
    source = (*m.source[:2], m.source[2] * factor, m.source[3] * factor, m.source[4]) if m.source else ()
    return kind, Move(m.number, m.op, m.size_bytes * factor, m.reads, m.writes, m.pairs, m.drains, m.step, source)


def _widened(ring: Ring, ways: int) -> Ring:
    actions: list[Action] = []
    for kind, what in ring.actions:
        last = actions[-1][1] if actions and actions[-1][0] is Kind.MOVE else None
        if kind is Kind.MOVE and last is not None and _joins(last, what, ways):
            both = last._replace(op=Op.BROADCAST, writes=last.writes + what.writes, pairs=last.pairs + what.pairs)
            actions[-1] = (kind, both)
        else:
            actions.append((kind, what))
    commands = sum(kind is Kind.MOVE for kind, _ in actions)
    return dataclasses.replace(ring, actions=actions, commands=commands)


def _joins(first: Move, then: Move, ways: int) -> bool:
    return (
        bool(first.source)
        and (first.source, first.size_bytes) == (then.source, then.size_bytes)
        and not then.drains
        and len(first.writes) + len(then.writes) <= ways
    )


#: What leaves nothing for an engine to do once the last move and the last signal are past.
_SILENT = frozenset(int(op) for op in (Op.WAIT, Op.STAMP, Op.RESET))
_SIGNAL, _WAIT = int(Op.SIGNAL), int(Op.WAIT)
_OPS = {int(op): op for op in Op}
_MOVES = frozenset(int(op) for op in st.MOVES)
_NAMES = (
    "op", "signal", "value", "src_rank", "dst_rank", "dst2_rank", "src_buffer", "dst_buffer", "dst2_buffer",
    "src_offset", "src_alt", "dst_offset", "dst2_offset", "length", "length_param", "skip", "rows", "src_pitch",
    "dst_pitch", "num_sources", "first_source", "src_param", "dst_param", "dst2_param",
)  # fmt: skip


def _columns(plan: Plan) -> dict[str, list[int]]:
    """All queues' rows end to end, as lists: a Python list is read many times faster than an array's elements."""
    rows = st.sequence(*(q.steps for q in plan.queues))
    return {name: rows[name].tolist() for name in _NAMES}


def _bound(plan: Plan, params: Mapping[str, int]) -> list[int]:
    names = [p.name for p in plan.params]
    if unknown := sorted(set(params) - set(names)):
        raise PlanError(f"plan {plan.name} has no parameter {unknown[0]!r}; it has {', '.join(names) or 'none'}")
    if missing := [name for name in names if name not in params]:
        raise PlanError(f"plan {plan.name}: parameter {missing[0]!r} needs a value before the plan can be priced")
    if wrong := [name for name in names if params[name] < 0]:
        raise PlanError(f"plan {plan.name}: parameter {wrong[0]!r} must not be negative")
    return [int(params[name]) for name in names]


class _Pending:
    """What the moves of a queue touch since it was last drained: a move that meets it must wait for them.

    Reductions run on other hardware than copies, so they always drain, and so does what follows one.
    """

    def __init__(self, plan: Plan) -> None:
        self._buffers = plan.buffers
        self._reads, self._writes = _Ranges(), _Ranges()
        self._reduced = False

    def meets(self, op: Op, at: int, c: dict[str, list[int]], params: list[int]) -> bool:
        """Must the move at row `at` wait for those before it? It then counts as one of them."""
        reads, writes = self._operands(op, at, c, params)
        drains = op is Op.REDUCE or self._reduced
        for r in reads:
            drains = drains or self._writes.meets(r)
        for w in writes:
            drains = drains or self._writes.meets(w) or self._reads.meets(w)
        if drains:
            self._reads, self._writes = _Ranges(), _Ranges()
        for r in reads:
            self._reads.add(r)
        for w in writes:
            self._writes.add(w)
        self._reduced = op is Op.REDUCE
        return drains

    def _operands(
        self, op: Op, at: int, c: dict[str, list[int]], params: list[int]
    ) -> tuple[list[_At], list[_At]]:
        length = c["length"][at]
        if (param := c["length_param"][at]) >= 0:
            length = min(length, max(params[param] - c["skip"][at], 0))
        to = self._ranged(_DST, op, at, c, params, length)
        if op is Op.REDUCE:
            return [], [to]
        of = self._ranged(_SRC, op, at, c, params, length)
        if op is Op.SWAP:
            return [of, to], [of, to]
        return [of], [to, self._ranged(_DST2, op, at, c, params, length)] if op is Op.BROADCAST else [to]

    def _ranged(
        self, side: tuple[str, ...], op: Op, at: int, c: dict[str, list[int]], params: list[int], length: int
    ) -> _At:
        """What a move touches on one side."""
        rank, buffer, begin = c[side[0]][at], c[side[1]][at], c[side[2]][at]
        shown = self._buffers[buffer]
        if shown.role is Role.VIEW and not shown.staged[rank]:
            buffer = shown.of
        elif shown.role is Role.VIEW and side is _SRC:
            begin = c["src_alt"][at]
        if (param := c[side[3]][at]) >= 0:
            begin += params[param]
        if op is Op.COPY2D and c["rows"][at] > 1:
            rows, pitch = c["rows"][at], c[side[4]][at]
            return _At((rank, buffer), begin, begin + (rows - 1) * pitch + length, length, pitch)
        return _At((rank, buffer), begin, begin + length, length, 0)


#: The columns of each side of a move.
_FIELDS = ("rank", "buffer", "offset", "param", "pitch")
_SRC, _DST, _DST2 = (tuple(f"{side}_{field}" for field in _FIELDS) for side in ("src", "dst", "dst2"))


class _At(NamedTuple):
    """Rows of bytes in a buffer of a rank; `pitch` is 0 for a single row."""

    place: tuple[int, int]
    begin: int
    end: int  #: behind the last byte
    width: int
    pitch: int


class _Ranges:
    """What moves have touched, by place and pitch.

    Single rows meet where they overlap. Rows of one pitch meet where their windows overlap modulo the pitch, as blocks
    of a layer-major cache do not; everything else meets where the hulls do, so a wait may be seen where none is.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], dict[int, tuple[_Sorted, _Sorted]]] = {}  # pitch -> hulls, windows

    def add(self, at: _At) -> None:
        if not at.width:
            return
        pitches = self._kinds.get(at.place)
        if pitches is None:
            pitches = self._kinds[at.place] = {}
        if at.pitch not in pitches:
            pitches[at.pitch] = (_Sorted(), _Sorted())
        hulls, windows = pitches[at.pitch]
        hulls.add(at.begin, at.end)
        for begin, end in _windows(at) if at.pitch else ():
            windows.add(begin, end)

    def meets(self, at: _At) -> bool:
        pitches = self._kinds.get(at.place)
        if pitches is None or not at.width:
            return False
        for pitch, (hulls, windows) in pitches.items():
            if hulls.meets(at.begin, at.end) and (
                pitch != at.pitch or not pitch or any(windows.meets(*window) for window in _windows(at))
            ):
                return True
        return False


def _windows(at: _At) -> list[tuple[int, int]]:
    """The bytes of rows modulo their pitch; two ranges where they go round."""
    if at.width >= at.pitch:
        return [(0, at.pitch)]
    begin = at.begin % at.pitch
    over = begin + at.width - at.pitch
    return [(begin, begin + at.width)] if over <= 0 else [(begin, at.pitch), (0, over)]


class _Sorted:
    """Ranges that may overlap, by their begin; `_reach` is the longest, so that a search is short."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._reach = 0

    def add(self, begin: int, end: int) -> None:
        insort(self._ranges, (begin, end))
        if end - begin > self._reach:
            self._reach = end - begin

    def meets(self, begin: int, end: int) -> bool:
        for low, high in self._ranges[bisect_left(self._ranges, (begin - self._reach, 0)) :]:
            if low >= end:
                return False
            if high > begin:
                return True
        return False
