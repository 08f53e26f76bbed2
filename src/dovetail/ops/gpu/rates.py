"""What an operator and its link take, for the model that cuts slices (`cut`): from what was measured, or about.

The figures are those of an H200 with PCIe 5.0. They decide where slices are cut, which tile is taken and whether the
first slice is a launch of its own; nothing else.
"""

from __future__ import annotations

from dovetail.ops.gpu.cut import Rates
from dovetail.ops.gpu.launch import SplitK, parts_of, waves
from dovetail.ops.gpu.tiles import LARGE, Blocks

#: Floating-point operations of a multiprocessor in a microsecond, in 16 bits; in 32 it has no tensor cores.
_CORE_FLOPS, _SLOWER_IN_FP32 = 6e6, 12
_NARROW = 0.96  # of that with tiles that are narrower than `LARGE`
#: Bytes in a microsecond: each way over the link beside a product, and of the GPU's memory.
_LINK_BYTES, _MEMORY_BYTES = 50e3, 3.5e6
_FEW_ROWS = 1.2  # times as long, by torch: they fill no wave
LAUNCH_US = 5.0  #: what a launch of its own takes longer than the same rows in another one


def link_us(row_bytes: int) -> float:
    """About what the link takes for a row."""
    return row_bytes / _LINK_BYTES


def _flops(item_bytes: int) -> float:
    return _CORE_FLOPS / (1 if item_bytes <= 2 else _SLOWER_IN_FP32)


def gemm_rates(
    blocks: Blocks, split: SplitK | str, rows: int, n: int, k: int, cores: int, *, row_us: float, item_bytes: int = 2,
    compute_us: float | None = None,
) -> Rates:  # fmt: skip
    """When rows of a product are there; `compute_us`: what all of it takes alone, if that was measured."""
    columns, num_tiles = -(-n // blocks.width), -(-rows // blocks.height)
    parts = parts_of(split, num_tiles, columns, cores, -(-k // blocks.depth))
    several = [number for number in parts if number > 1]
    num_waves = waves(num_tiles, columns, cores, len(several), max(parts, default=1))
    speed = _flops(item_bytes) * (1 if blocks.width >= LARGE.width else _NARROW)
    tile_us = 2 * blocks.height * blocks.width * k / speed
    if compute_us is not None:
        tile_us = compute_us / num_waves if num_waves else 0.0
    first = parts[0] if parts else 1  # several programs to each of the first tiles are done sooner, with fewer tiles
    return Rates(
        wave_us=tile_us / first, wave_rows=cores / max(columns, 1) * blocks.height / first, row_us=row_us,
        mean_us=tile_us * num_waves / max(rows, 1),
    )  # fmt: skip


def gemm_head_us(rows: int, n: int, k: int, cores: int, item_bytes: int = 2) -> float:
    """About what torch takes for the first rows of a product; all of w is read once."""
    read_us = n * k * item_bytes / _MEMORY_BYTES
    return max(read_us, _FEW_ROWS * 2 * rows * n * k / (cores * _flops(item_bytes))) + LAUNCH_US


def bag_rates(rows: int, leaving: int, *, row_us: float, compute_us: float | None = None) -> Rates:
    """The same of bags; if nothing was measured, as if all of them took as long as the link does."""
    each_us = (leaving * row_us if compute_us is None else compute_us) / max(rows, 1)
    return Rates(wave_us=each_us, wave_rows=1, row_us=row_us)
