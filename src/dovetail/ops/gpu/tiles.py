"""In which order a fused kernel computes its rows: tables made on the host, pure numpy.

Owns the cut of rows into tiles, slices and destinations. A slice never crosses a destination, and a tile no slice but
by `across`, so uneven splits and ragged sizes are the same case; rows that go to one destination are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Order(StrEnum):
    """Which rank's rows come first."""

    REMOTE = "remote"  #: those of the ranks after this one, its own last
    LOCAL = "local"  #: its own, then those of the ranks after it
    NATURAL = "natural"  #: as they lie


#: Columns of a table of tiles, and of a table of slices.
FIRST, END, DESTINATION, ROW, SLICE = range(5)
NUM_TILES = 4


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """The rows of an operator's output, in the order in which they are computed."""

    tiles: NDArray[np.int64]  #: [tiles, 5]: first row, end row, destination, row in its buffer, slice
    slices: NDArray[np.int64]  #: [slices, 5]: first row, end row, destination, row in its buffer, number of tiles
    segments: NDArray[np.int64]  #: [destinations, 3], in order: destination, first tile, end tile; may be empty
    slice_rows: int | None = None  #: how slices were cut, see `pieces`
    first_rows: int | None = None
    also: NDArray[np.int64] | None = None  #: [tiles]: the other slice that a tile has rows of, or its own; see `across`
    is_given: bool = False  #: slices were named one by one: what comes from peers is cut at the same parts of it

    @property
    def slice_tiles(self) -> NDArray[np.int64]:
        """How many row tiles each slice has."""
        return np.ascontiguousarray(self.slices[:, NUM_TILES])

    def is_even(self, height: int) -> bool:
        """Whether every tile has `height` rows."""
        return bool(np.all(self.tiles[:, END] - self.tiles[:, FIRST] == height))


def destinations(world: int, rank: int, order: Order | str = Order.REMOTE) -> list[int]:
    """The ranks in the order in which they are served."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in 0..{world - 1}, not {rank}")
    order = Order(order)
    if order is Order.NATURAL:
        return list(range(world))
    first = rank + (order is Order.REMOTE)
    return [(first + k) % world for k in range(world)]


def pieces(
    rows: Sequence[int], order: Sequence[int], slice_rows: int | None = None, first_rows: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """(place, begin, end) of slices: `rows[place]` are cut into slices, for each place of `order` in turn.

    The last slice of a place may have less than `slice_rows`; by default there is one. With `first_rows` the first
    slice has so many and each has twice as many as the one before until they have `slice_rows`, and what would be less
    than half a slice at the end of a place goes with the one before, which then has up to half as much again.

    >>> list(pieces([0, 5, 3], [1, 2], 2))
    [(1, 0, 2), (1, 2, 4), (1, 4, 5), (2, 0, 2), (2, 2, 3)]
    >>> list(pieces([8, 9], [0, 1], 4, 1))
    [(0, 0, 1), (0, 1, 3), (0, 3, 8), (1, 0, 4), (1, 4, 9)]
    """
    size = first_rows
    for place in order:
        begin, total = 0, rows[place]
        while begin < total:
            if size is None or slice_rows is None:
                end = min(begin + (slice_rows or total), total)
            else:
                end = begin + min(size, slice_rows)
                end = total if total - end < (end - begin + 1) // 2 else end
                size = min(2 * size, slice_rows)
            yield place, begin, end
            begin = end


def row_tiles(
    rows: Sequence[int],
    rank: int,
    height: int,
    *,
    slice_rows: int | None = None,
    first_rows: int | None = None,
    order: Order | str = Order.REMOTE,
    rows_before: Sequence[int] | None = None,
    cuts: Sequence[tuple[int, int, int]] | None = None,
) -> RowTiles:
    """Cuts rows that are grouped by destination.

    Args:
        rows: how many rows go to each rank; they lie in the order of the ranks.
        height: rows of a tile, the last of a slice may have less.
        slice_rows, first_rows: rows of a slice, and of the first one; see `pieces`.
        rows_before: where this rank's rows begin in each destination's buffer; 0 by default.
        cuts: the slices themselves instead: rank, and first and end of its rows; all rows, in the order of ranks.

    Two ranks, rank 0, 5 and 3 rows, height 2: tiles 5-7, 7-8 (for rank 1), 0-2, 2-4, 4-5.
    """
    if height < 1 or (slice_rows is not None and slice_rows < 1) or (first_rows is not None and first_rows < 1):
        given = f"{height}, {slice_rows} and {first_rows}"
        raise ValueError(f"height, slice_rows and first_rows are at least 1, not {given}")
    if first_rows is not None and slice_rows is None:
        raise ValueError(f"slices that grow from {first_rows} rows need slice_rows, too")
    if any(n < 0 for n in rows):
        raise ValueError(f"numbers of rows are not negative: {list(rows)}")
    before = [0] * len(rows) if rows_before is None else rows_before
    if len(before) != len(rows):
        raise ValueError(f"rows_before has {len(before)} numbers for {len(rows)} ranks")
    begins = np.concatenate(([0], np.cumsum(np.asarray(rows, np.int64))))
    served = destinations(len(rows), rank, order)
    tiles: list[NDArray[np.int64]] = []
    slices: list[tuple[int, int, int, int, int]] = []
    ends = [0] * len(rows)
    count = 0
    for to, at, stop in pieces(rows, served, slice_rows, first_rows) if cuts is None else cuts:
        first = np.arange(at, stop, height, dtype=np.int64)
        part = np.empty((len(first), 5), np.int64)
        part[:, FIRST], part[:, END] = begins[to] + first, begins[to] + np.minimum(first + height, stop)
        part[:, DESTINATION], part[:, ROW], part[:, SLICE] = to, first + before[to], len(slices)
        tiles.append(part)
        slices.append((int(begins[to]) + at, int(begins[to]) + stop, to, at + int(before[to]), len(first)))
        count += len(first)
        ends[to] = count
    segments = np.zeros((len(rows), 3), np.int64)
    begin = 0
    for k, to in enumerate(served):
        segments[k] = to, begin, max(begin, ends[to])
        begin = int(segments[k, 2])
    table = np.concatenate(tiles) if tiles else np.zeros((0, 5), np.int64)
    numbered = np.array(slices, np.int64).reshape(-1, 5)
    return RowTiles(table, numbered, segments, slice_rows, first_rows, is_given=cuts is not None)


def one_slice(made: RowTiles, number: int) -> RowTiles:
    """A slice as a table of its own."""
    return _part(made, number, number + 1)


def behind(made: RowTiles, number: int) -> RowTiles:
    """The slices from one on."""
    return _part(made, number, len(made.slices))


def _part(made: RowTiles, first: int, end: int) -> RowTiles:
    """Of a table without tiles that belong to two slices; it has one segment, and says nothing of how it was cut."""
    tiles = made.tiles[(made.tiles[:, SLICE] >= first) & (made.tiles[:, SLICE] < end)].copy()
    tiles[:, SLICE] -= first
    slices = made.slices[first:end].copy()
    to = slices[0, DESTINATION] if len(slices) else 0
    return RowTiles(tiles, slices, np.array([[to, 0, len(tiles)]], np.int64))


def across(made: RowTiles, height: int) -> RowTiles:
    """The same slices with as few tiles as can be: one may have the last rows of a slice and the first of the next.

    For results that lie in one piece, whatever the destinations; a tile has rows of two slices at most. Columns
    `destination` and `row` are those of its first row.

    Two slices of 3 and 5 rows, height 4: rows 0-3 (of both) and 4-7, instead of 0-2, 3-6 and 7.
    """
    tiles: list[tuple[int, int, int, int, int]] = []
    also: list[int] = []
    counts = np.zeros(len(made.slices), np.int64)
    for run in _adjoining(made.slices):
        place, row, end = 0, int(made.slices[run[0], FIRST]), int(made.slices[run[-1], END])
        while row < end:
            while made.slices[run[place], END] <= row:
                place += 1
            number, behind = run[place], run[min(place + 1, len(run) - 1)]
            stop = min(row + height, int(made.slices[behind, END]))
            other = behind if stop > made.slices[number, END] else number
            first, _, to, at, _ = (int(v) for v in made.slices[number])
            tiles.append((row, stop, to, at + row - first, number))
            also.append(other)
            counts[list({number, other})] += 1
            row = stop
    cut = made.slices.copy()
    cut[:, NUM_TILES] = counts
    table = np.array(tiles, np.int64).reshape(-1, 5)
    return replace(made, tiles=table, slices=cut, segments=made.segments[:0], also=np.array(also, np.int64))


#: Two runs with nothing in them.
NO_RUNS = (0,) * 5


def runs_of(made: RowTiles, height: int) -> tuple[int, ...] | None:
    """Row tiles in at most two runs: first row, end row and number of the first; first and end row of the other.

    Within a run a row tile begins where the one before it ends, and all but the last have `height` rows. Ranks are
    served in a circle, so rows that lie in one piece have no more runs, if tiles go across slices and no slice is
    shorter than a tile. None if they have.

    >>> runs_of(row_tiles((0, 200, 0, 100), 2, 128), 128)
    (200, 300, 1, 0, 200)
    """
    found: list[list[int]] = []
    for first, end in made.tiles[:, [FIRST, END]].tolist():
        if found and found[-1][1] == first and found[-1][2] * height == first - found[-1][0]:
            found[-1][1:] = [end, found[-1][2] + 1]
        else:
            found.append([first, end, 1])
    if len(found) > 2:
        return None
    found += [[0, 0, 0]] * (2 - len(found))
    return (*found[0], *found[1][:2])


def _adjoining(slices: NDArray[np.int64]) -> list[list[int]]:
    """Slices that follow each other in memory."""
    found: list[list[int]] = []
    for k, entry in enumerate(slices):
        if not found or slices[found[-1][-1], END] != entry[FIRST]:
            found.append([])
        found[-1].append(k)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What a GEMM kernel is compiled for."""

    height: int  #: rows of a tile
    width: int
    depth: int
    group: int = 8  #: row tiles that go together, see `kernels.gemm.locate`
    warps: int
    stages: int
    boxes: int = 0  #: `stages` with loads by tensor descriptors, where they are to be had; 0: never by them


#: The shape that equals cuBLAS on an H200 at 8192^3 in bf16, in a flattened loop.
LARGE = Blocks(height=128, width=256, depth=64, warps=8, stages=3, boxes=4)
#: With tensor descriptors nearly as fast, and twice as many waves: there is something to be sent after half the time.
SMALL = Blocks(height=128, width=128, depth=64, group=4, warps=4, stages=4, boxes=6)
#: Without descriptors, which take the host longer: where products are launched one by one.
_PLAIN, _MEDIUM = replace(LARGE, boxes=0), Blocks(height=128, width=128, depth=64, warps=8, stages=4)
_FLAT = Blocks(height=64, width=128, depth=64, warps=4, stages=4)
_SINGLE = Blocks(height=64, width=64, depth=32, warps=4, stages=3)
_FEW_WAVES = 3


def slice_blocks(rows: int, n: int, k: int, item_bytes: int, programs: int, *, boxes: bool) -> list[Blocks]:
    """For a product whose rows are sent slice by slice: what may be fastest, in groups that are computed in one wave.

    `SMALL` too where `LARGE` would make few waves and there are `boxes`, tensor descriptors: twice as many waves, so
    there is something to be sent after half the time.

    >>> [(b.width, b.group) for b in slice_blocks(2560, 4096, 4096, 2, 132, boxes=True)]
    [(256, 8), (128, 4)]
    >>> [(b.width, b.group) for b in slice_blocks(16896, 8192, 4096, 2, 132, boxes=True)]
    [(256, 4)]
    """
    found, tiles = [LARGE], -(-rows // LARGE.height) * -(-n // LARGE.width)
    if boxes and tiles < _FEW_WAVES * programs and item_bytes == 2 and k * item_bytes % 16 == 0:
        found.append(SMALL)
    return [replace(b, group=max(1, min(b.group, programs // max(1, -(-n // b.width))))) for b in found]


def gemm_blocks(rows: Sequence[int], n: int, k: int, item_bytes: int, programs: int) -> Blocks:
    """For a product with these rows per destination: the largest tiles that keep `programs` programs busy.

    Items of 4 bytes are multiplied without tensor cores, and rows of w that are not multiples of 16 bytes are loaded
    element by element: both want small tiles.
    """
    if item_bytes > 2 or k * item_bytes % 16:
        return _SINGLE
    if max(rows, default=0) <= _FLAT.height:
        return _FLAT
    large = sum(-(-r // LARGE.height) for r in rows) * -(-n // LARGE.width)
    return _PLAIN if large >= programs else _MEDIUM


def fitting(blocks: Blocks, item_bytes: int, memory_bytes: int) -> Blocks:
    """The same with as many stages as a multiprocessor's shared memory holds, at least one.

    >>> fitting(Blocks(height=128, width=256, depth=64, warps=8, stages=3), 2, 100_000).stages
    2
    """
    stage = (blocks.height + blocks.width) * blocks.depth * item_bytes
    return replace(blocks, stages=max(1, min(blocks.stages, memory_bytes // stage)))


#: Columns of w that a program could read in the time a tile takes besides.
_TILE_COLUMNS = 8


def gemv_blocks(m: int, n: int, item_bytes: int, programs: int, world: int) -> Blocks:
    """For a product of few rows, whose tiles are shared out among `world` owners: reading w is all the work.

    So much of w should be on its way as there is room for, and the program with the most tiles should not read much
    more than the others. In fp32 a tile is of up to 16 rows, for `kernels.gemv.thin_product`, and `depth` such that its
    sums fit the registers; otherwise of all rows, for tensor cores.
    """
    height = 1 << (m - 1).bit_length()
    height = min(height, 16) if item_bytes > 2 else max(height, 16)

    def columns(width: int) -> int:
        """What the program with the most tiles of an owner reads."""
        tiles = -(-n // (width * world))
        return -(-tiles // programs) * (width + _TILE_COLUMNS)

    width = min((64, 32, 16), key=columns)
    if item_bytes > 2:
        width = min(width, 32) if height > 8 else width
        return Blocks(height=height, width=width, depth=128 if height * width <= 64 else 64, warps=8, stages=4)
    return Blocks(height=height, width=width, depth=256 if height <= 16 else 128, warps=4, stages=4)


#: Elements of one step of a bag kernel, and at most so many bags and rows of each in it.
_BAG_ELEMENTS, _MOST_BAGS, _MOST_DEPTH = 16384, 64, 16


def bag_shape(dim: int, num_values: int, num_bags: int) -> tuple[int, int, int]:
    """(bags, rows of each at a time, block of dims): powers of two, for bags of the average length."""
    block = max(16, 1 << (dim - 1).bit_length())
    average = num_values // max(num_bags, 1)
    depth = min(_MOST_DEPTH, 1 << max(0, average.bit_length() - 1))
    return max(1, min(_MOST_BAGS, _BAG_ELEMENTS // (depth * block))), depth, block
