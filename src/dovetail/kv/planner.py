"""From a layout, block ids and slots to a plan: the fewest strided copies that move just those bytes.

Pure and vectorised: a fetch of 8,192 blocks of 80 layers is planned in a few milliseconds, without a Python object per
block. Rows that are equally spaced on the device are one `COPY2D`; blocks that follow each other on both sides are
merged, across whichever of the two directions gives fewer copies. Slots in different pieces of host memory are never
joined, since a copy may not cross two registrations. Two ranks: 0 is the device, 1 the host.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.kv.layout import Group, Layout, RowRun
from dovetail.plan import step as st
from dovetail.plan.plan import ABSENT, Buffer, Plan, Queue, Role, Signal, Space
from dovetail.plan.step import Rows

Ints = NDArray[np.int64]
DEVICE, HOST = 0, 1


class Direction(StrEnum):
    """Which way bytes go."""

    FETCH = "fetch"  #: host to device
    STORE = "store"  #: device to host


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Host memory as it was registered: `slots_per_piece` slots in each piece, the last one may have fewer."""

    num_slots: int
    slot_bytes: int
    slots_per_piece: int

    def __post_init__(self) -> None:
        if min(self.num_slots, self.slot_bytes, self.slots_per_piece) < 1:
            raise ValueError(f"a pool needs at least one slot of one byte, not {self}")

    @property
    def count(self) -> int:
        """How many pieces."""
        return -(-self.num_slots // self.slots_per_piece)

    def size_bytes(self, piece: int) -> int:
        """Of one piece."""
        return min(self.slots_per_piece, self.num_slots - piece * self.slots_per_piece) * self.slot_bytes


class Form(NamedTuple):
    """What copies have in common, wherever they lie."""

    width: int
    rows: int
    device_pitch: int
    host_pitch: int
    unit_bytes: int  #: a power of two: width, and offsets and pitch on the device, are multiples of it


@dataclass(frozen=True, eq=False)
class Table:
    """Strided copies as columns: `rows` rows of `width` bytes each."""

    device: Ints  #: offset in the cache
    piece: Ints
    host: Ints  #: offset in the piece
    width: Ints
    rows: Ints
    device_pitch: Ints
    host_pitch: Ints

    @classmethod
    def of_form(cls, form: Form, device: Ints, piece: Ints, host: Ints) -> Table:
        """Copies that have the same form."""
        number = len(device)
        made = cls(device, piece, host, *(np.full(number, value) for value in form[:-1]))
        # As if they had been asked for before.
        made.__dict__.update(form=form, size_bytes=number * form.rows * form.width, num_rows=number * form.rows)
        return made

    def __len__(self) -> int:
        return len(self.device)

    @functools.cached_property
    def form(self) -> Form | None:
        """Of all copies, if it is known. It is of most requests, which are submitted sooner for it."""
        return None

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of all copies together."""
        return int(self.width @ self.rows)

    @functools.cached_property
    def num_rows(self) -> int:
        """Of all copies together."""
        return int(self.rows.sum())

    def where(self, which: NDArray[Any]) -> Table:
        """Some of the copies, by mask or by number."""
        return Table(*(getattr(self, column.name)[which] for column in dataclasses.fields(self)))

    def by_shape(self) -> list[Table]:
        """The copies, those of as many rows of as many bytes together."""
        if not len(self):
            return []
        if self.form:
            return [self]
        shape = self.width * (int(self.rows.max()) + 1) + self.rows
        if (shape == shape[0]).all():
            return [self]
        return [self.where(shape == one) for one in np.unique(shape)]

    def split(self, most_bytes: int) -> Table:
        """The same bytes in copies of at most `most_bytes`, cut between rows; a single row is never cut."""
        largest = self.form.rows * self.form.width if self.form else int((self.rows * self.width).max(initial=0))
        if largest <= most_bytes:
            return self
        most = np.maximum(most_bytes // np.maximum(self.width, 1), 1)
        parts = -(-self.rows // most)
        which = np.repeat(np.arange(len(self)), parts)
        first = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * most[which]
        cut = self.where(which)
        return dataclasses.replace(
            cut,
            device=cut.device + first * cut.device_pitch,
            host=cut.host + first * cut.host_pitch,
            rows=np.minimum(cut.rows - first, most[which]),
        )


def plan(direction: Direction | str, layout: Layout, blocks: Any, slots: Any, pieces: Pieces) -> Plan:
    """The plan that moves block blocks[k] of the cache from or to slot slots[k], for all k, in no order among them.

    Raises:
        ValueError: lists of different lengths, an id out of range, or a destination that is named twice.
    """
    return as_plan(Direction(direction), layout, table(direction, layout, blocks, slots, pieces), pieces)


def table(direction: Direction | str, layout: Layout, blocks: Any, slots: Any, pieces: Pieces) -> Table:
    """The copies of such a plan, as columns."""
    where = _where(Direction(direction), layout, blocks, slots, pieces)
    return _table(layout, [group.runs for group in layout.groups], where, pieces)


def layer_tables(
    direction: Direction | str, layout: Layout, blocks: Any, slots: Any, pieces: Pieces, *, layers: int = 1
) -> list[Table]:
    """The same copies cut by layers, `layers` at a time, the first ones first: a layer can be used when its part is in.

    Raises:
        ValueError: also if the layout does not tell layers apart.
    """
    if layers < 1 or not layout.num_layers:
        raise ValueError(f"layout {layout.name} has {layout.num_layers} layers; they are taken {layers} at a time")
    where = _where(Direction(direction), layout, blocks, slots, pieces)
    found = []
    for first in range(0, layout.num_layers, layers):
        runs = [layout.runs_of(n, first, first + layers) for n in range(len(layout.groups))]
        found.append(_table(layout, runs, where, pieces))
    return found


def _where(direction: Direction, layout: Layout, blocks: Any, slots: Any, pieces: Pieces) -> _Where:
    device, host = _checked(direction, layout, blocks, slots, pieces)
    order = host.argsort(kind="stable")  # runs are found along the slots
    device, host = device[order], host[order]
    piece, place = np.divmod(host, pieces.slots_per_piece)
    begins = np.ones(len(host), bool)
    begins[1:] = (host[1:] - host[:-1] != 1) | (device[1:] - device[:-1] != 1) | (piece[1:] != piece[:-1])
    (first,) = begins.nonzero()
    ends = np.concatenate((first, [len(host)]))
    return _Where(device, piece, place * pieces.slot_bytes, first, ends[1:] - ends[:-1])


def _table(layout: Layout, runs: Sequence[Sequence[RowRun]], where: _Where, pieces: Pieces) -> Table:
    parts: list[Table] = []
    for group, offset, mine in zip(layout.groups, layout.slot_offsets, runs, strict=True):
        for run in mine:
            parts += _copies(group, run, where, offset + int(group.places[run.first]), pieces.slot_bytes)
    if len(parts) == 1:
        return parts[0]
    columns = [[getattr(part, column.name) for part in parts] for column in dataclasses.fields(Table)]
    return Table(*(np.concatenate(column) if column else np.zeros(0, np.int64) for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class _Where:
    """Blocks in order of their slots; stretches `first[k] .. first[k] + count[k]` follow each other on both sides."""

    device: Ints
    piece: Ints
    host: Ints  #: where a slot, or the rows of a run in it, begin in the piece
    first: Ints
    count: Ints


def _copies(group: Group, run: RowRun, where: _Where, offset: int, slot_bytes: int) -> list[Table]:
    """The copies of one run of rows, which begins at `offset` in a slot, for all blocks."""
    base, width, rows = int(group.bases[run.first]), group.row_bytes, run.count
    pitch, host_pitch = run.pitch, run.host_pitch
    if pitch == host_pitch == width:  # the rows of a block are contiguous on both sides: one wide row
        width, rows = width * rows, 1
        pitch = host_pitch = width
    begins = where.device * run.stride + base, where.piece, where.host + offset
    found = []
    if len(where.first) < len(where.device):  # some blocks follow others
        along = (where.count > rows) | (rows == 1)
        if along.any():  # down the blocks of a stretch, a copy for each row
            k = np.repeat(where.first[along], rows)
            row = np.tile(np.arange(rows), int(along.sum()))
            device, piece, host = (column[k] for column in begins)
            begin = device + row * pitch, piece, host + row * host_pitch
            found.append(_wide(*begin, width, np.repeat(where.count[along], rows), run.stride, slot_bytes))
        others = np.repeat(~along, where.count)
        begins = begins[0][others], begins[1][others], begins[2][others]
    if len(begins[0]):  # down the rows of a block, a copy for each block
        bits = base | run.stride | pitch | width
        found.append(Table.of_form(Form(width, rows, pitch, host_pitch, bits & -bits), *begins))
    return found


def _wide(device: Ints, piece: Ints, host: Ints, width: int, rows: Ints, pitch: int, host_pitch: int) -> Table:
    """A copy whose rows are contiguous on both sides is one wide row."""
    whole = (rows == 1) | ((pitch == width) & (host_pitch == width))
    wide = np.where(whole, width * rows, width)
    pitches = np.where(whole, wide, pitch), np.where(whole, wide, host_pitch)
    return Table(device, piece, host, wide, np.where(whole, 1, rows), *pitches)


def as_plan(direction: Direction, layout: Layout, copies: Table, pieces: Pieces) -> Plan:
    """Columns as a plan of one queue, with a signal when all has landed."""
    world = 2
    heap = (Space.HEAP,) * world
    read, written = (Role.INPUT, Role.INOUT)
    fetch = direction is Direction.FETCH
    cache = Buffer(name="cache", role=written if fetch else read, sizes=(layout.size_bytes, ABSENT), spaces=heap)
    pool = tuple(
        Buffer(name=f"pool {n}", role=read if fetch else written, sizes=(ABSENT, pieces.size_bytes(n)), spaces=heap)
        for n in range(pieces.count)
    )
    done = Signal(name="done", rank=DEVICE)
    steps = st.sequence(_moves(fetch, copies), st.signal(0), st.wait(0))
    queue = Queue(rank=DEVICE, engine=0, steps=steps, name=str(direction))
    over = Queue(rank=HOST, engine=0, steps=st.wait(0), name="until it has landed")
    return Plan(
        name=f"kv {direction} {layout.name}",
        world=world,
        buffers=(cache, *pool),
        signals=(done,),
        queues=(queue, over),
        goal=steps[: len(copies)],
    )


def _moves(fetch: bool, copies: Table) -> Rows:
    device = (DEVICE, 0, copies.device)
    host = (HOST, copies.piece + 1, copies.host)
    src, dst = (host, device) if fetch else (device, host)
    pitches = (copies.host_pitch, copies.device_pitch) if fetch else (copies.device_pitch, copies.host_pitch)
    moves = st.copy2d(src, dst, copies.width, copies.rows, *pitches)
    plain = copies.rows == 1
    moves["op"][plain] = st.Op.COPY
    for column in ("src_pitch", "dst_pitch"):
        moves[column][plain] = 0
    return moves


def _checked(direction: Direction, layout: Layout, blocks: Any, slots: Any, pieces: Pieces) -> tuple[Ints, Ints]:
    device, host = _ids("blocks", blocks, layout.num_blocks), _ids("slots", slots, pieces.num_slots)
    if len(device) != len(host):
        raise ValueError(f"blocks and slots must be pairs, not {len(device)} and {len(host)}")
    if pieces.slot_bytes < layout.slot_bytes:  # it may have more: caches with smaller blocks can share a pool
        raise ValueError(
            f"a slot of the pool has {pieces.slot_bytes} bytes, a block of layout {layout.name} {layout.slot_bytes}"
        )
    written, what = (device, "block") if direction is Direction.FETCH else (host, "slot")
    ordered = np.sort(written)
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        first = int(ordered[1:][twice][0])
        raise ValueError(f"{direction}: {what} {first} is named twice: it can't be written twice at once")
    return device, host


def _ids(name: str, ids: Sequence[int] | Ints, limit: int) -> Ints:
    found = np.asarray(ids)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, not {found.dtype}")
    found = found.astype(np.int64).reshape(-1)
    if found.size and int(found.view(np.uint64).max()) >= limit:  # below 0 is far beyond it
        bad = int(found[(found < 0) | (found >= limit)][0])
        raise ValueError(f"{name}: {bad} is out of range; there are 0..{limit - 1}")
    return found
