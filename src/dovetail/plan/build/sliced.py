"""All-to-all of a computation's output, slice by slice: a slice is sent when the computation has raised its flag.

Every rank has `y`, filled from outside during the run, and `output`. A kernel that finishes a slice of `y` raises an
imported signal; the copy of that slice waits for it, and for nothing else. The plan states what each flag promises
(`External`), so the checker proves that no byte is read before it is there, and finds a copy that no flag covers.

Slices of one rank are moved in the order in which they are given: the order in which the computation finishes them.
Slices without bytes are dropped; their flags do not exist. A rank in `ready` has no computation: what it sends is in
`input` when the run begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.plan import ABSENT, External, Plan, Region, Role, SignalKind, Space
from dovetail.plan.step import Rows

#: Signals that a rank has room for, with some left for its handshake.
MOST_SIGNALS = 480


class Flags(StrEnum):
    """What a computation raises."""

    SLICE = "slice"  #: a flag for each slice, in any order: "slice 3" reaches 1
    DESTINATION = "destination"  #: a counter for each destination, where slices end in order: "slices 0->1" reaches 3


class Own(StrEnum):
    """What happens to slices whose source is their destination."""

    COPIED = "copied"  #: they go to the output like all others
    PLACED = "placed"  #: the computation writes them to the output itself, and raises their flags
    LEFT = "left"  #: they stay in `y`


class Done(StrEnum):
    """When a rank tells another that its slices were moved."""

    PAIR = "pair"  #: after the last slice between the two
    END = "end"  #: when all it moves is moved: for ranks of one process, whose streams then wait but once


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Rows of a source's `y`, and where they go. Offsets, widths and pitches are bytes."""

    source: int
    destination: int
    source_offset: int
    destination_offset: int
    row_bytes: int
    rows: int = 1
    source_pitch: int = 0  #: from row to row, `row_bytes` if 0
    destination_pitch: int = 0
    mover: int | None = None  #: the rank whose engine moves it, source or destination; the source if None

    @property
    def size_bytes(self) -> int:
        """All rows."""
        return self.rows * self.row_bytes

    @property
    def moved_by(self) -> int:
        """The rank whose engine moves it."""
        return self.source if self.mover is None else self.mover

    def pitch(self, side: str) -> int:
        """Of "source" or "destination"."""
        given: int = getattr(self, f"{side}_pitch")
        return given or self.row_bytes

    def extent(self, side: str) -> int:
        """The first byte behind it."""
        begin: int = getattr(self, f"{side}_offset")
        return begin + (self.rows - 1) * self.pitch(side) + self.row_bytes if self.size_bytes else 0

    def regions(self, side: str, buffer: int) -> list[Region]:
        """The bytes of one side: one range, or one for each row where rows do not follow each other."""
        rank, offset, pitch = getattr(self, side), getattr(self, f"{side}_offset"), self.pitch(side)
        if self.rows == 1 or pitch == self.row_bytes:
            return [Region(rank=rank, buffer=buffer, offset=offset, length=self.size_bytes)]
        at = range(offset, offset + self.rows * pitch, pitch)
        return [Region(rank=rank, buffer=buffer, offset=begin, length=self.row_bytes) for begin in at]

    def move(self, source: int, destination: int) -> Rows:
        """The step, between these buffers."""
        src = (self.source, source, self.source_offset)
        dst = (self.destination, destination, self.destination_offset)
        pitches = self.pitch("source"), self.pitch("destination")
        if self.rows == 1 or pitches == (self.row_bytes, self.row_bytes):
            return st.copy(src, dst, self.size_bytes)
        return st.copy2d(src, dst, self.row_bytes, self.rows, *pitches)


_Word = tuple[int, int]  # (signal, value)


def sliced_all_to_all(
    world: int,
    slices: Sequence[Slice],
    *,
    y_bytes: Sequence[int] | None = None,
    output_bytes: Sequence[int] | None = None,
    flags: Flags | str = Flags.SLICE,
    own: Own | str = Own.COPIED,
    done: Done | str = Done.PAIR,
    ready: Collection[int] = (),
    follows: Mapping[int, int] | None = None,
    lanes: int = 1,
    first_lane: int = 0,
) -> Plan:
    """Moves `slices`, each when its flag is up.

    Args:
        world: ranks.
        slices: what goes where, those of one rank in the order in which it is to move them. Signal "slice k" is the
            flag of `slices[k]`.
        y_bytes, output_bytes: of each rank; by default up to the last slice.
        flags: what the computation raises.
        own: what happens to slices that stay on their rank.
        done: when others are told.
        ready: ranks that have no computation.
        follows: {k: m}: slice k has no flag of its own: that of slice m says that both are there. So peers that are
            only memory can be in step with the rank that computes.
        lanes: queues of a rank in each direction, which take its slices in turn: while one moves a slice, another
            waits for the next flag.
        first_lane: the lane of the first slice in each direction, where another plan's slices go before these.

    Raises:
        ValueError: a slice that can't be.
        PlanError: a rank has more than `MOST_SIGNALS` signals.
    """
    if lanes < 1:
        raise ValueError(f"lanes is at least 1, not {lanes}")
    made = _Builder(
        world, slices, Flags(flags), Own(own), Done(done), frozenset(ready), dict(follows or {}), lanes, first_lane
    )
    return made.plan(y_bytes, output_bytes)


class _Builder:
    def __init__(
        self, world: int, slices: Sequence[Slice], flags: Flags, own: Own, done: Done, ready: frozenset[int],
        follows: dict[int, int], lanes: int, first_lane: int = 0,
    ) -> None:  # fmt: skip
        self.a = Assembly("all_to_all sliced", world)
        self.slices, self.flags, self.own, self.done = list(slices), flags, own, done
        self.ready, self.follows, self.lanes, self.first_lane = ready, follows, lanes, first_lane
        for k, piece in enumerate(self.slices):
            _validate(k, piece, world)
        self.kept = [k for k, piece in enumerate(self.slices) if piece.size_bytes]
        self.external: list[External] = []
        self.words: dict[int, _Word] = {}  # of the slices that have a flag
        self.told: dict[int, list[int]] = {r: [] for r in range(world)}  # signals that others raise for a rank

    def plan(self, y_bytes: Sequence[int] | None, output_bytes: Sequence[int] | None) -> Plan:
        self._buffers(y_bytes, output_bytes)
        self._flags()
        ranks, lanes = range(self.a.world), range(self.lanes)
        received = {r: [self._queue_of(r, lane, receives=True) for lane in lanes] for r in ranks}
        sent = {r: [self._queue_of(r, lane, receives=False) for lane in lanes] for r in ranks}
        for r in ranks:
            self._own_left(r, sent[r][0])
            if self.done is Done.END:
                self._tell_at_the_end(r, sent[r][0], [*sent[r][1:], *received[r]])
        for r in ranks:
            last = sent[r][0] if sent[r][0] or not received[r][0] else received[r][0]
            last += [st.wait(signal) for signal in self.told[r]]
            for lane in lanes:
                self.a.queue(r, 2 * lane, *sent[r][lane], name="send")
                self.a.queue(r, 2 * lane + 1, *received[r][lane], name="receive")
        made = self.a.plan().replace(external=tuple(self.external))
        _fits(made)
        return made

    def _buffers(self, y_bytes: Sequence[int] | None, output_bytes: Sequence[int] | None) -> None:
        a, ranks = self.a, range(self.a.world)
        needed = {
            side: [max([0, *(s.extent(side) for s in self.slices if getattr(s, side) == r)]) for r in ranks]
            for side in ("source", "destination")
        }
        sizes = {}
        for side, name, given in (("source", "y_bytes", y_bytes), ("destination", "output_bytes", output_bytes)):
            sizes[side] = list(needed[side] if given is None else given)
            if len(sizes[side]) != a.world or any(h < n for h, n in zip(sizes[side], needed[side], strict=True)):
                raise ValueError(f"{name} is {sizes[side]}; the slices of {a.world} ranks need {needed[side]}")
        pulled = {self.slices[k].source for k in self.kept if self.slices[k].moved_by != self.slices[k].source}
        spaces = [Space.HEAP if r in pulled else Space.LOCAL for r in ranks]

        def of(computes: bool) -> list[int]:
            sized = enumerate(sizes["source"])
            return [size if size and (r in self.ready) != computes else ABSENT for r, size in sized]

        self.y = a.buffer("y", Role.OUTSIDE, of(True), spaces)
        self.input = a.buffer("input", Role.INPUT, of(False), spaces)
        self.output = a.buffer("output", Role.OUTPUT, [size or ABSENT for size in sizes["destination"]])

    def _stays(self, piece: Slice) -> bool:
        return piece.source == piece.destination and self.own is not Own.COPIED

    def _flags(self) -> None:
        """A flag for each slice of a computation, and what it promises."""
        counters: dict[tuple[int, int], int] = {}
        counts: dict[tuple[int, int], int] = {}
        for k in self.kept:
            piece = self.slices[k]
            pair = piece.source, piece.destination
            if piece.source in self.ready or k in self.follows:
                continue
            if self.flags is Flags.SLICE:
                self.words[k] = self.a.signal(f"slice {k}", piece.source, SignalKind.IMPORTED), 1
                continue
            if pair not in counters:
                name = f"slices {piece.source}->{piece.destination}"
                counters[pair] = self.a.signal(name, piece.source, SignalKind.IMPORTED)
            counts[pair] = counts.get(pair, 0) + 1
            self.words[k] = counters[pair], counts[pair]
        for k, other in self.follows.items():
            if k not in self.kept:
                continue
            if other not in self.words or self.slices[k].source in self.ready:
                raise ValueError(f"slice {k} can't follow slice {other}: one of them has no flag")
        self.words |= {k: self.words[other] for k, other in self.follows.items() if k in self.kept}
        for k, word in self.words.items():
            piece = self.slices[k]
            placed = self._stays(piece) and self.own is Own.PLACED
            side, buffer = ("destination", self.output) if placed else ("source", self.y)
            self.external += [External(write=region, before=word) for region in piece.regions(side, buffer)]

    def _queue_of(self, rank: int, lane: int, *, receives: bool) -> list[Rows]:
        """The slices that a rank moves in one direction and on one lane, each behind its flag."""
        every = [
            k
            for k in self.kept
            if self.slices[k].moved_by == rank
            and (self.slices[k].source != rank) == receives
            and not self._stays(self.slices[k])
        ]
        mine = every[(lane - self.first_lane) % self.lanes :: self.lanes]
        last = {(self.slices[k].source, self.slices[k].destination): k for k in mine}
        rows: list[Rows] = []
        reached: set[_Word] = set()
        for k in mine:
            piece = self.slices[k]
            word = self.words.get(k)
            if word is not None and word not in reached:
                reached.add(word)
                rows.append(st.wait(*word))
            move = piece.move(self.input if piece.source in self.ready else self.y, self.output)
            self.a.goal(move)
            rows.append(move)
            pair = piece.source, piece.destination
            if self.done is Done.PAIR and last[pair] == k and pair[0] != pair[1]:
                other = piece.source if receives else piece.destination
                more = f" {lane}" if lane else ""
                rows.append(st.signal(self._told(f"done {pair[0]}->{pair[1]}{more}", other)))
        return rows

    def _told(self, name: str, rank: int) -> int:
        signal = self.a.signal(name, rank)
        self.told[rank].append(signal)
        return signal

    def _own_left(self, rank: int, rows: list[Rows]) -> None:
        """What the computation does with its own slices is over when the rank is."""
        mine = [k for k in self.kept if self.slices[k].source == rank and self._stays(self.slices[k])]
        last = dict(self.words[k] for k in mine if k in self.words)  # of a counter, the value that it ends with
        rows += [st.wait(*word) for word in last.items()]

    def _tell_at_the_end(self, rank: int, sent: list[Rows], others_of_it: list[list[Rows]]) -> None:
        moved = [self.slices[k] for k in self.kept if self.slices[k].moved_by == rank]
        others = sorted({end for s in moved for end in (s.source, s.destination)} - {rank})
        for n, queue in enumerate(others_of_it):
            if any(_reaches_others(rows, rank) for rows in queue):
                over = self.a.signal(f"over {rank}.{n}", rank)
                queue.append(st.signal(over))
                sent.append(st.wait(over))
        sent += [st.signal(self._told(f"done {rank}: {other}", other)) for other in others]


def _reaches_others(rows: Rows, rank: int) -> bool:
    """Do they move something from or to another rank?"""
    away = (rows["src_rank"] != rank) | (rows["dst_rank"] != rank)
    return bool((away & st.among(rows["op"], st.MOVES)).any())


def _validate(k: int, piece: Slice, world: int) -> None:
    for side in ("source", "destination"):
        rank, offset, pitch = getattr(piece, side), getattr(piece, f"{side}_offset"), getattr(piece, f"{side}_pitch")
        if not 0 <= rank < world:
            raise ValueError(f"slice {k}: {side} is rank {rank} in a world of {world}")
        if offset < 0 or (pitch and pitch < piece.row_bytes):
            raise ValueError(f"slice {k}: {side} at {offset} with rows of {piece.row_bytes} bytes every {pitch}")
    if piece.rows < 0 or piece.row_bytes < 0:
        raise ValueError(f"slice {k} has {piece.rows} rows of {piece.row_bytes} bytes")
    if piece.moved_by not in (piece.source, piece.destination):
        raise ValueError(f"slice {k} from {piece.source} to {piece.destination} can't be moved by rank {piece.mover}")


def _fits(plan: Plan) -> None:
    for rank in range(plan.world):
        number = sum(s.rank == rank for s in plan.signals)
        if number > MOST_SIGNALS:
            raise PlanError(
                f"plan {plan.name}: rank {rank} has {number} signals, room is for {MOST_SIGNALS}: make slices larger, "
                "or raise a counter for each destination"
            )
