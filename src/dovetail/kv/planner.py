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
from typing import Any

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

    def __len__(self) -> int:
        return len(self.device)

    @functools.cached_property
    def size_bytes(self) -> int:
        """Of all copies together."""
        return int(self.width @ self.rows)

    def where(self, which: NDArray[Any]) -> Table:
        """Some of the copies, by mask or by number."""
        return Table(*(getattr(self, column.name)[which] for column in dataclasses.fields(self)))

    def by_shape(self) -> list[Table]:
        """The copies, those of as many rows of as many bytes together."""
        if not len(self):
            return []
        shape = self.width * (int(self.rows.max()) + 1) + self.rows
        if (shape == shape[0]).all():
            return [self]
        return [self.where(shape == one) for one in np.unique(shape)]

    def split(self, most_bytes: int) -> Table:
        """The same bytes in copies of at most `most_bytes`, cut between rows; a single row is never cut."""
        if int((self.rows * self.width).max(initial=0)) <= most_bytes:
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
    order = np.argsort(host, kind="stable")  # runs are found along the slots
    device, host = device[order], host[order]
    piece, at = host // pieces.slots_per_piece, host % pieces.slots_per_piece * pieces.slot_bytes
    follows = (np.diff(host) == 1) & (np.diff(device) == 1) & (np.diff(piece) == 0)
    first = np.flatnonzero(np.concatenate([[True], ~follows])) if len(host) else np.zeros(0, np.int64)
    return _Where(device, piece, at, first, np.diff(np.append(first, len(host))))


def _table(layout: Layout, runs: Sequence[Sequence[RowRun]], where: _Where, pieces: Pieces) -> Table:
    parts = []
    for group, offset, mine in zip(layout.groups, layout.slot_offsets, runs, strict=True):
        for run in mine:
            there = dataclasses.replace(where, host=where.host + offset + int(group.places[run.first]))
            parts += _copies(group, run, there, pieces.slot_bytes)
    parts = parts or [(np.zeros(0, np.int64),) * len(dataclasses.fields(Table))]
    return Table(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class _Where:
    """Blocks in order of their slots; stretches `first[k] .. first[k] + count[k]` follow each other on both sides."""

    device: Ints
    piece: Ints
    host: Ints  #: where a slot, or the rows of a run in it, begin in the piece
    first: Ints
    count: Ints


_Columns = tuple[Ints, ...]


def _copies(group: Group, run: RowRun, where: _Where, slot_bytes: int) -> list[_Columns]:
    """The copies of one run of rows, for all blocks."""
    base = int(group.bases[run.first])
    width, rows = group.row_bytes, run.count
    if run.pitch == run.host_pitch == width:  # the rows of a block are contiguous on both sides: one wide row
        width, rows = width * rows, 1
    along = where.count > rows if rows > 1 else np.ones(len(where.count), bool)
    found = []
    if along.any():  # down the blocks of a stretch, a copy for each row
        k = np.repeat(where.first[along], rows)
        row = np.tile(np.arange(rows), int(along.sum()))
        device = base + where.device[k] * run.stride + row * run.pitch
        blocks = np.repeat(where.count[along], rows)
        host = where.host[k] + row * run.host_pitch
        found.append(_columns(device, where.piece[k], host, width, blocks, run.stride, slot_bytes))
    if not along.all():  # down the rows of a block, a copy for each block
        inside = np.repeat(~along, where.count)
        device = base + where.device[inside] * run.stride
        found.append(_columns(device, where.piece[inside], where.host[inside], width, rows, run.pitch, run.host_pitch))
    return found


def _columns(device: Ints, piece: Ints, host: Ints, width: int, rows: Any, pitch: int, host_pitch: int) -> _Columns:
    """A copy whose rows are contiguous on both sides is one wide row."""
    shape = device.shape
    rows = np.broadcast_to(np.asarray(rows, np.int64), shape)
    whole = (rows == 1) | ((pitch == width) & (host_pitch == width))
    wide = np.where(whole, width * rows, width)
    return (
        device, piece, host, wide, np.where(whole, 1, rows),
        np.where(whole, wide, pitch), np.where(whole, wide, host_pitch),
    )  # fmt: skip


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
    times = np.bincount(written)
    if (times > 1).any():
        twice = int(np.argmax(times > 1))
        raise ValueError(f"{direction}: {what} {twice} is named twice: it can't be written twice at once")
    return device, host


def _ids(name: str, ids: Sequence[int] | Ints, limit: int) -> Ints:
    found = np.asarray(ids)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, not {found.dtype}")
    found = found.astype(np.int64).reshape(-1)
    if found.size and (found.min() < 0 or found.max() >= limit):
        bad = int(found[(found < 0) | (found >= limit)][0])
        raise ValueError(f"{name}: {bad} is out of range; there are 0..{limit - 1}")
    return found
