"""Random plans of any shape, what they do to memory, and broken twins of them: opponents for checker and executors.

`random_plan` writes down random moves in one order, puts each on a random queue and adds the waits that make that order
the only one that counts. `reference` says what a plan leaves in memory. `without_wait` takes away a wait that matters.

Memory is in two halves. In one, moves begin and end at any byte, and reductions are of single bytes. In the other all
is a multiple of a grain of 2, 4 or 8 bytes, and reductions are of elements up to that: the checker follows elements
only as long as nothing cuts them. Floats are summed only where they are still as `contents_of` filled them in: bytes
that make normal, positive numbers of middling size whichever way they are read, so that no NaN, overflow or denormal
makes executors differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.plan import DType, Op, Plan, ReduceOp, Role, passes
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.linear import Linear, linearize
from dovetail.plan.step import Rows

from .planlib import without

Place = tuple[int, int]  # (rank, buffer)
Range = tuple[Place, int, int]  # place, begin, end
Contents = dict[Place, NDArray[np.uint8]]

_UNDEFINED, _COMPUTED = -2, -1
_FILLED = (Role.INPUT, Role.INOUT)
_CALLERS = (Role.INPUT, Role.INOUT, Role.OUTPUT)
_INTEGERS = (
    DType.UINT8,
    DType.INT8,
    DType.INT16,
    DType.UINT16,
    DType.INT32,
    DType.UINT32,
    DType.INT64,
    DType.UINT64,
)
_FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)
_COMBINE: dict[ReduceOp, Callable[..., NDArray[Any]]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def random_plan(
    seed: int, *, ranks: int, moves: int, buffer_bytes: int, ops: Collection[Op] = st.MOVES, max_queues: int = 3
) -> Plan:
    """A correct plan of up to `moves` moves, each one of `ops`, on up to `max_queues` queues per rank.

    All buffers are on the heap; peers touch at most two of the caller's, and scratch. The goal is what ends as a plain
    copy of something that a caller filled in. The entry handshake is in it. The checker follows odd shifts byte by
    byte: above 64 KB a buffer it can take seconds.
    """
    return _Maker(seed, ranks, buffer_bytes, max_queues).make(moves, sorted(ops))


def contents_of(plan: Plan, seed: int) -> Contents:
    """What the callers fill in, and garbage everywhere else."""
    rng = np.random.default_rng(seed)
    found = {}
    for r in range(plan.world):
        for n, b in enumerate(plan.buffers):
            low, high = (0x10, 0x40) if b.role in _FILLED else (0, 256)
            found[r, n] = rng.integers(low, high, max(b.sizes[r], 0), np.uint8)
    return found


def reference(plan: Plan, contents: Contents, order: Linear | None = None) -> Contents:
    """Memory after one run in `order`, that of `linearize` unless told. Plans without parameters only."""
    if plan.params or plan.external:
        raise NotImplementedError("no reference for parameters and accesses from outside")
    memory = {place: data.copy() for place, data in contents.items()}
    order = order or linearize(plan)
    for q, i in zip(order.queue.tolist(), order.index.tolist(), strict=True):
        row = plan.queues[q].steps[i]
        if row["op"] in st.MOVES:
            _run(row, *touched(plan, row), memory)
    return memory


def without_wait(plan: Plan, seed: int) -> Plan | None:
    """The plan without one wait that kept two accesses, or one and a caller, in order; None if there is no such wait.

    Whether a wait matters is found out here, step by step, not with the checker's clocks.
    """
    waits = [
        (q, i) for q in range(len(plan.queues)) for i, row in enumerate(plan.queues[q].steps) if row["op"] == Op.WAIT
    ]
    random.Random(seed).shuffle(waits)
    return next((broken for q, i in waits if _loose(broken := without(plan, q, i))), None)


# --- what a row touches ----------------------------------------------------------------------------------------------


def touched(plan: Plan, row: np.void) -> tuple[list[Range], list[Range]]:
    """The ranges that a row reads, in the order of its sources, and those that it writes."""
    first = int(row["first_source"])
    return _operands(row, plan.sources[first : first + int(row["num_sources"])], plan)


def _operands(row: np.void, sources: Rows, plan: Plan | None = None) -> tuple[list[Range], list[Range]]:
    def at(rank: int, number: int, offset: int, alt: int, pitch: int = 0) -> list[Range]:
        buffer = plan.buffers[number] if plan else None
        if buffer and buffer.role is Role.VIEW:
            number, offset = (number, alt) if buffer.staged[rank] else (buffer.of, offset)
        rows = int(row["rows"]) if row["op"] == Op.COPY2D else 1
        length = int(row["length"])
        return [((rank, number), offset + k * pitch, offset + k * pitch + length) for k in range(rows)]

    def side(name: str) -> list[Range]:
        offset = int(row[f"{name}_offset"])
        alt = int(row["src_alt"]) if name == "src" else offset
        pitch = 0 if name == "dst2" else int(row[f"{name}_pitch"])
        return at(int(row[f"{name}_rank"]), int(row[f"{name}_buffer"]), offset, alt, pitch)

    match Op(int(row["op"])):
        case Op.REDUCE:
            each = [[int(s[k]) for k in ("rank", "buffer", "offset", "alt")] for s in sources]
            return [part for s in each for part in at(*s)], side("dst")
        case Op.BROADCAST:
            return side("src"), side("dst") + side("dst2")
        case Op.SWAP:
            return side("src") + side("dst"), side("dst") + side("src")
    return side("src"), side("dst")


def _meet(some: list[Range], others: list[Range]) -> bool:
    return any(p == q and max(a, c) < min(b, d) for p, a, b in some for q, c, d in others)


def _conflict(a: tuple[list[Range], list[Range]], b: tuple[list[Range], list[Range]]) -> bool:
    return _meet(a[1], b[1]) or _meet(a[1], b[0]) or _meet(a[0], b[1])


# --- what it does ----------------------------------------------------------------------------------------------------


def _run(row: np.void, reads: list[Range], writes: list[Range], memory: Contents) -> None:
    values = [memory[place][begin:end].copy() for place, begin, end in reads]
    if row["op"] == Op.REDUCE:
        values = [_reduced(DType(int(row["dtype"])), ReduceOp(int(row["reduce_op"])), values)]
    if row["op"] == Op.BROADCAST:
        values = values * 2
    for (place, begin, end), value in zip(writes, values, strict=True):
        memory[place][begin:end] = value


def _reduced(dtype: DType, op: ReduceOp, values: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """First to last; 16-bit floats in fp32 and rounded once."""
    if dtype is DType.BFLOAT16:
        wide = [(v.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for v in values]
        bits = _combined(op, wide).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    kind = np.dtype(dtype.name.lower())
    typed = [v.view(kind).astype(np.float32 if dtype is DType.FLOAT16 else kind) for v in values]
    return _combined(op, typed).astype(kind).view(np.uint8)


def _combined(op: ReduceOp, values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    total = values[0]
    for v in values[1:]:
        total = _COMBINE[op](total, v)
    return total


# --- making one ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Move:
    """A move on its queue: what it waits for, and what is known to be done once it is."""

    row: Rows
    sources: Rows
    queue: int
    position: int  #: among the moves of its queue
    operands: tuple[list[Range], list[Range]]
    waits: list[tuple[int, int, int]] = field(default_factory=list)  #: (queue, home of the signal, position)
    clock: list[int] = field(default_factory=list)


class _Maker:
    def __init__(self, seed: int, world: int, buffer_bytes: int, max_queues: int) -> None:
        self.rng = random.Random(seed)
        self.world = world
        self.assembly = Assembly(f"random {seed}", world)
        self.grains = (1, self.rng.choice((2, 4, 8)))
        self.grain: list[int] = []  # of each buffer
        self.role: list[Role] = []
        self.origin: dict[Place, NDArray[np.int64]] = {}  # of each byte: the filled byte it is a copy of
        self.filled: list[tuple[int, Place]] = []  # (number of the first byte, place)
        self._buffers(buffer_bytes)
        callers = [n for n, role in enumerate(self.role) if role in _CALLERS]
        self.remote = set(self.rng.sample(callers, min(len(callers), self.rng.randint(1, 2))))
        self.remote |= {n for n, role in enumerate(self.role) if role is Role.SCRATCH}
        self.queue_rank = [r for r in range(world) for _ in range(self.rng.randint(1, max_queues))]
        self.known = [[0] * len(self.queue_rank) for _ in self.queue_rank]
        self.moves: list[_Move] = []
        self.on_queue: list[list[_Move]] = [[] for _ in self.queue_rank]
        self.signalled: dict[tuple[int, int], set[int]] = {}  # (queue, home) -> positions
        self.style = self.rng.choice(("reader", "raiser", "any"))
        self.anywhere = [self.rng.randrange(world) for _ in self.queue_rank]

    def _buffers(self, buffer_bytes: int) -> None:
        number = 0
        for grain in self.grains:
            roles = [self.rng.choice(_FILLED), self.rng.choice((Role.OUTPUT, Role.INOUT))]
            roles += [r for r in (Role.INPUT, Role.OUTPUT, Role.INOUT, Role.SCRATCH) if self.rng.random() < 0.4]
            for role in roles:
                most = max(1, buffer_bytes // grain)
                sizes = [grain * self.rng.randint((most + 1) // 2, most) for _ in range(self.world)]
                n = self.assembly.buffer(f"{role} {len(self.role)}", role, sizes)
                self.grain.append(grain)
                self.role.append(role)
                for r, size in enumerate(sizes):
                    self.origin[r, n] = np.full(size, _UNDEFINED, np.int64)
                    if role in _FILLED:
                        self.origin[r, n][:] = np.arange(number, number + size)
                        self.filled.append((number, (r, n)))
                        number += size + 1  # so that no copy seems to run on from one buffer into the next

    def make(self, num_moves: int, ops: list[Op]) -> Plan:
        for _ in range(20 * num_moves):
            if len(self.moves) >= num_moves:
                break
            queue, op = self.rng.randrange(len(self.queue_rank)), self.rng.choice(ops)
            places = self._reachable(self.queue_rank[queue], self.rng.choice(self.grains))
            made = _Draw(self, places).draw(op)
            if made is not None:
                self._append(queue, *made)
        self._goal()
        self._emit(self._endings())
        return passes.entry(self.assembly.plan())

    def _reachable(self, rank: int, grain: int) -> list[Place]:
        return [p for p in self.origin if self.grain[p[1]] == grain and (p[0] == rank or p[1] in self.remote)]

    # --- order -------------------------------------------------------------------------------------------------------

    def _append(self, queue: int, row: Rows, sources: Rows) -> None:
        move = _Move(row, sources, queue, len(self.on_queue[queue]), _operands(row[0], sources))
        for other in reversed(self.moves):
            if other.position >= self.known[queue][other.queue] and _conflict(move.operands, other.operands):
                move.waits.append(self._wait(queue, other.queue, other.position))
        self.rng.shuffle(move.waits)
        self.known[queue][queue] = move.position + 1
        move.clock = list(self.known[queue])
        self.moves.append(move)
        self.on_queue[queue].append(move)
        self._trace(move)

    def _wait(self, queue: int, raiser: int, position: int) -> tuple[int, int, int]:
        """Lets `queue` wait until `raiser` has done the move at `position`, or a later one that it has by now."""
        home = {"reader": self.queue_rank[queue], "raiser": self.queue_rank[raiser], "any": self.anywhere[raiser]}
        raised = self.signalled.setdefault((raiser, home[self.style]), set())
        later = [p for p in raised if p > position]
        chosen = self.rng.choice([position, position, len(self.on_queue[raiser]) - 1, *later[:2]])
        raised.add(chosen)
        theirs = self.on_queue[raiser][chosen].clock
        self.known[queue] = [max(a, b) for a, b in zip(self.known[queue], theirs, strict=True)]
        return raiser, home[self.style], chosen

    def _endings(self) -> dict[int, list[tuple[int, int, int]]]:
        """A rank's run ends after everybody is done with its caller's buffers."""
        endings: dict[int, list[tuple[int, int, int]]] = {}
        for move in reversed(self.moves):
            places = {place for part in move.operands for place, _, _ in part if self.role[place[1]] in _CALLERS}
            for rank in sorted({place[0] for place in places}):
                mine = [q for q, r in enumerate(self.queue_rank) if r == rank]
                if all(self.known[q][move.queue] <= move.position for q in mine):
                    queue = self.rng.choice(mine)
                    endings.setdefault(queue, []).append(self._wait(queue, move.queue, move.position))
        return endings

    def _emit(self, endings: dict[int, list[tuple[int, int, int]]]) -> None:
        value: dict[tuple[int, int, int], tuple[int, int]] = {}
        for (queue, home), positions in self.signalled.items():
            signal = self.assembly.signal(f"queue {queue} at {home}", home)
            reached = 0
            for position in sorted(positions):
                reached += self.rng.choice((1, 1, 1, 5))
                value[queue, home, position] = (signal, reached)
        for queue, rank in enumerate(self.queue_rank):
            blocks = []
            for move in self.on_queue[queue]:
                blocks += [st.wait(*value[w]) for w in move.waits]
                if len(move.sources):
                    s = move.sources
                    move.row["first_source"] = self.assembly.sources(s["rank"], s["buffer"], s["offset"])
                blocks.append(move.row)
                blocks += [st.signal(*v) for (q, _, p), v in value.items() if (q, p) == (queue, move.position)]
            blocks += [st.wait(*value[w]) for w in endings.get(queue, [])]
            self.assembly.queue(rank, self.rng.randrange(4), *blocks, name=f"q{queue}")

    # --- result ------------------------------------------------------------------------------------------------------

    def _trace(self, move: _Move) -> None:
        reads, writes = move.operands
        if len(move.sources) > 1:
            values = [np.full(end - begin, _COMPUTED) for _, begin, end in writes]
        else:
            values = [self.origin[place][begin:end].copy() for place, begin, end in reads]
        for n, (place, begin, end) in enumerate(writes):
            self.origin[place][begin:end] = values[n % len(values)]

    def _goal(self) -> None:
        for (rank, n), origin in self.origin.items():
            if self.role[n] not in (Role.OUTPUT, Role.INOUT):
                continue
            for begin, end in _runs(origin >= 0, np.diff(origin) == 1):
                first, (r, b) = max(f for f in self.filled if f[0] <= origin[begin])
                self.assembly.goal(st.copy((r, b, int(origin[begin]) - first), (rank, n, begin), end - begin))


def _runs(mask: NDArray[np.bool_], joined: NDArray[np.bool_] | None = None) -> list[tuple[int, int]]:
    """Maximal ranges where `mask` holds, and where every byte is `joined` to the one before it."""
    begins = mask.copy()
    begins[1:] &= ~(mask[:-1] if joined is None else mask[:-1] & joined)
    ends = mask.copy()
    ends[:-1] &= ~mask[1:] | begins[1:]
    return list(zip(np.flatnonzero(begins).tolist(), (np.flatnonzero(ends) + 1).tolist(), strict=True))


class _Draw:
    """Draws one move over `places`, which have one grain; None where the dice gave nothing possible."""

    def __init__(self, maker: _Maker, places: list[Place]) -> None:
        self.rng, self.origin = maker.rng, maker.origin
        self.places = places
        self.writable = [p for p in places if maker.role[p[1]] is not Role.INPUT]
        self.grain = maker.grain[places[0][1]] if places else 1

    def draw(self, op: Op) -> tuple[Rows, Rows] | None:
        made = getattr(self, f"_{op.name.lower()}")()
        if made is None:
            return None
        row, sources = made if isinstance(made, tuple) else (made, np.zeros(0, st.SOURCE))
        reads, writes = _operands(row[0], sources)
        apart = [*writes] if op is Op.SWAP else [*reads, *writes]
        if op is Op.REDUCE:  # in place only onto a whole source
            apart = [*writes, *(r for r in reads if r != writes[0])]
        clash = any(_meet([w], [a]) for w in writes for a in apart if a is not w)
        return None if clash else (row, sources)

    def _defined(self, places: list[Place], length: int | None = None) -> Range | None:
        """A range that somebody filled or wrote, `length` long or of any length."""
        place = self.rng.choice(places)
        runs = [r for r in _runs(self.origin[place] != _UNDEFINED) if r[1] - r[0] >= (length or 1)]
        if not runs:
            return None
        begin, end = self.rng.choice(runs)
        units = (end - begin) // self.grain
        taken = (length or self.grain * max(1, round(units ** self.rng.random()))) // self.grain
        at = begin + self.grain * self.rng.randint(0, units - taken)
        return place, at, at + taken * self.grain

    def _target(self, length: int) -> tuple[int, int, int] | None:
        """(rank, buffer, offset) of a range that may be written."""
        place = self.rng.choice(self.writable)
        spare = len(self.origin[place]) - length
        return None if spare < 0 else (*place, self.grain * self.rng.randint(0, spare // self.grain))

    def _copy(self) -> Rows | None:
        source = self._defined(self.places)
        if source is None:
            return None
        length = 0 if self.rng.random() < 0.02 else source[2] - source[1]
        target = self._target(length)
        return target and st.copy((*source[0], source[1]), target, length)

    def _copy2d(self) -> Rows | None:
        source, place = self._defined(self.places), self.rng.choice(self.writable)
        if source is None:
            return None
        (at, begin, end), g = source, self.grain
        size = len(self.origin[place])
        rows = self.rng.randint(1, 7)
        width = self.rng.randint(1, max(1, min(end - begin, size) // (rows * g))) * g
        if rows * width > size or width > end - begin:
            return None
        gaps = max(rows - 1, 1)
        src_pitch = self.rng.randint(0, (end - begin - width) // gaps // g) * g
        dst_pitch = self.rng.randint(width // g, max(width, (size - width) // gaps) // g) * g
        spare = size - width - (rows - 1) * dst_pitch
        target = (*place, self.rng.randint(0, spare // g) * g)
        return st.copy2d((*at, begin), target, width, rows, src_pitch, dst_pitch)

    def _broadcast(self) -> Rows | None:
        source = self._defined(self.places)
        if source is None:
            return None
        length = source[2] - source[1]
        first, second = self._target(length), self._target(length)
        return st.broadcast((*source[0], source[1]), first, second, length) if first and second else None

    def _swap(self) -> Rows | None:
        a = self._defined(self.writable)
        b = a and self._defined(self.writable, a[2] - a[1])
        return st.swap((*a[0], a[1]), (*b[0], b[1]), a[2] - a[1]) if a and b else None

    def _reduce(self) -> tuple[Rows, Rows] | None:
        first = self._defined(self.places)
        if first is None:
            return None
        length = first[2] - first[1]
        drawn = [first, *(self._defined(self.places, length) for _ in range(self.rng.randint(0, 4)))]
        sources = [s for s in drawn if s is not None]
        inplace = [s for s in sources if s[0] in self.writable]
        target = self._target(length)
        if inplace and self.rng.random() < 0.4:
            place, begin, _ = self.rng.choice(inplace)
            target = (*place, begin)
        if target is None:
            return None
        plain = all((self.origin[p][b:e] >= 0).all() for p, b, e in sources)
        dtype = self.rng.choice([t for t in _INTEGERS + _FLOATS * plain if t.size_bytes <= self.grain])
        op = ReduceOp.SUM if dtype in _FLOATS else self.rng.choice(list(_COMBINE))
        row = st.reduce(target, length, 0, len(sources), dtype, op)
        ranks, buffers, begins = zip(*((*p, b) for p, b, _ in sources), strict=True)
        return row, st.sources(list(ranks), list(buffers), list(begins))


# --- which waits matter ----------------------------------------------------------------------------------------------


def steps_before(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """(queue, index, the steps that must come before it as a set of bits), in the order of `linearize`.

    The bit of a step is its place in that order.
    """
    order = linearize(plan)
    last = [0] * len(plan.queues)  # what the last step of each queue so far knows, itself included
    raised: dict[int, list[tuple[int, int]]] = {}
    for bit, (q, i) in enumerate(zip(order.queue.tolist(), order.index.tolist(), strict=True)):
        row = plan.queues[q].steps[i]
        before, signal, value = last[q], int(row["signal"]), int(row["value"])
        if row["op"] == Op.WAIT and not plan.signals[signal].kind.from_outside:
            before |= next(known for v, known in raised[signal] if v >= value)
        last[q] = before | 1 << bit
        if row["op"] == Op.SIGNAL:
            raised.setdefault(signal, []).append((value, last[q]))
        yield q, i, before


def _loose(plan: Plan) -> bool:
    """True if some access is not ordered with another, or with its caller."""
    moves, of_rank, ends = [], [0] * plan.world, [0] * plan.world
    for bit, (q, i, before) in enumerate(steps_before(plan)):
        rank = plan.queues[q].rank
        of_rank[rank] |= 1 << bit
        ends[rank] |= before | 1 << bit
        row = plan.queues[q].steps[i]
        if row["op"] in st.MOVES:
            moves.append((1 << bit, before, rank, touched(plan, row)))
    for n, (bit, before, rank, operands) in enumerate(moves):
        for place, begin, end in operands[0] + operands[1]:
            away = place[0] != rank and begin < end and plan.buffers[place[1]].role in _CALLERS
            if away and (not before & of_rank[place[0]] or not ends[place[0]] & bit):
                return True
        if any(not before & other[0] and _conflict(operands, other[3]) for other in moves[:n]):
            return True
    return False
