"""In which order a fused kernel computes its rows: tables made on the host, pure numpy.

Owns the cut of rows into tiles, slices and destinations. A tile never crosses a slice and a slice never crosses a
destination, so uneven splits and ragged sizes are the same case; rows that go to one destination are neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


def row_tiles(
    rows: Sequence[int],
    rank: int,
    height: int,
    *,
    slice_rows: int | None = None,
    order: Order | str = Order.REMOTE,
    rows_before: Sequence[int] | None = None,
) -> RowTiles:
    """Cuts rows that are grouped by destination.

    Args:
        rows: how many rows go to each rank; they lie in the order of the ranks.
        height: rows of a tile, the last of a slice may have less.
        slice_rows: rows of a slice, the last one of a destination may have less; by default a destination is one slice.
        rows_before: where this rank's rows begin in each destination's buffer; 0 by default.

    Two ranks, rank 0, 5 and 3 rows, height 2: tiles 5-7, 7-8 (for rank 1), 0-2, 2-4, 4-5.
    """
    if height < 1 or (slice_rows is not None and slice_rows < 1):
        raise ValueError(f"height and slice_rows are at least 1, not {height} and {slice_rows}")
    if any(n < 0 for n in rows):
        raise ValueError(f"numbers of rows are not negative: {list(rows)}")
    before = [0] * len(rows) if rows_before is None else rows_before
    if len(before) != len(rows):
        raise ValueError(f"rows_before has {len(before)} numbers for {len(rows)} ranks")
    begins = np.concatenate(([0], np.cumsum(np.asarray(rows, np.int64))))
    tiles: list[NDArray[np.int64]] = []
    slices: list[tuple[int, int, int, int, int]] = []
    segments = np.zeros((len(rows), 3), np.int64)
    count = 0
    for k, to in enumerate(destinations(len(rows), rank, order)):
        begin, end = int(begins[to]), int(begins[to + 1])
        segments[k] = to, count, count
        for at in range(begin, end, slice_rows or max(rows[to], 1)):
            stop = min(at + (slice_rows or rows[to]), end)
            first = np.arange(at, stop, height, dtype=np.int64)
            part = np.empty((len(first), 5), np.int64)
            part[:, FIRST], part[:, END] = first, np.minimum(first + height, stop)
            part[:, DESTINATION], part[:, ROW], part[:, SLICE] = to, first - begin + before[to], len(slices)
            tiles.append(part)
            slices.append((at, stop, to, at - begin + int(before[to]), len(first)))
            count += len(first)
        segments[k, 2] = count
    table = np.concatenate(tiles) if tiles else np.zeros((0, 5), np.int64)
    return RowTiles(table, np.array(slices, np.int64).reshape(-1, 5), segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """What a GEMM kernel is compiled for."""

    height: int  #: rows of a tile
    width: int
    depth: int
    group: int = 8  #: row tiles that go together, see `kernels.gemm.locate`
    warps: int
    stages: int


#: The shape that equals cuBLAS on an H200 at 8192^3 in bf16, in a flattened loop.
LARGE = Blocks(height=128, width=256, depth=64, warps=8, stages=3)
_MEDIUM = Blocks(height=128, width=128, depth=64, warps=8, stages=4)
_FLAT = Blocks(height=64, width=128, depth=64, warps=4, stages=4)
_SINGLE = Blocks(height=64, width=64, depth=32, warps=4, stages=3)


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
    return LARGE if large >= programs else _MEDIUM


def gemv_blocks(m: int, n: int, item_bytes: int, programs: int) -> Blocks:
    """For a product of few rows: every program should have columns, and many bytes of w on their way."""
    height = 16 if m <= 16 else 32 if m <= 32 else 64
    width = 32 if -(-n // 32) >= programs else 16
    return Blocks(height=height, width=width, depth=256 // item_bytes, warps=4, stages=4)


#: Elements of one step of a bag kernel, and at most so many bags and rows of each in it.
_BAG_ELEMENTS, _MOST_BAGS, _MOST_DEPTH = 16384, 64, 16


def bag_shape(dim: int, num_values: int, num_bags: int) -> tuple[int, int, int]:
    """(bags, rows of each at a time, block of dims): powers of two, for bags of the average length."""
    block = max(16, 1 << (dim - 1).bit_length())
    average = num_values // max(num_bags, 1)
    depth = min(_MOST_DEPTH, 1 << max(0, average.bit_length() - 1))
    return max(1, min(_MOST_BAGS, _BAG_ELEMENTS // (depth * block))), depth, block
