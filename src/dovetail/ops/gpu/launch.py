"""The computation of a sliced operator on a GPU: kernels that raise a flag for every slice that they have finished.

Owns how a product and pooled bags are cut into programs, and the tables, counters and memory that their kernels work
with; who waits for the flags is not its business.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dovetail.ops.gpu.tiles import NO_RUNS, SLICE, Blocks, RowTiles, runs_of

if TYPE_CHECKING:
    import torch


#: Steps of a tile's depth that each part of K has at least: several programs to a tile must be worth the sum.
_PART_STEPS = 4
#: Waves of tiles up to which a product is computed in parts: it takes memory for them, in fp32, and gains little.
_MOST_WAVES = 8
_MOST_PARTS = 4
#: Looks at another part of the same tile, a microsecond each; it has begun before.
_LOOKS = 1 << 22


class SplitK(StrEnum):
    """Which row tiles of a product are computed by several programs to a tile, each over a part of K."""

    NONE = "none"
    HEAD = "head"  #: the first ones, so that there are as few waves as can be: see `few_waves`
    TAIL = "tail"  #: as many of the last ones
    HALVES = "halves"  #: all, by two


def waves(num_tiles: int, columns: int, programs: int, split: int = 0, parts: int = 1) -> float:
    """How often a tile's time a product takes: `num_tiles` row tiles of so many columns on so many programs.

    `split` row tiles are computed by `parts` programs to a tile, in that part of the time.

    >>> waves(20, 16, 132), waves(20, 16, 132, 4, 2), waves(21, 16, 132, 5, 3)
    (3.0, 2.5, 2.6666666666666665)
    """
    return -(-parts * split * columns // programs) / parts + -(-(num_tiles - split) * columns // programs)


def few_waves(num_tiles: int, columns: int, programs: int) -> tuple[int, int]:
    """(row tiles to split, programs to each of their tiles): what makes the fewest waves, with the fewest parts.

    At most a wave of tiles is split, (0, 1) is none. Multiprocessors are taken to hold one program each.

    >>> few_waves(20, 16, 132), few_waves(21, 16, 132), few_waves(132, 32, 132)
    ((4, 2), (5, 3), (0, 1))
    """
    found = [(waves(num_tiles, columns, programs), 1, 0)]
    for parts in range(2, _MOST_PARTS + 1):
        most = min(num_tiles, programs // max(columns, 1))
        found += [(waves(num_tiles, columns, programs, number, parts), parts, -number) for number in range(1, most + 1)]
    _, parts, number = min(found)
    return -number, parts


def parts_of(split: SplitK | str, num_tiles: int, columns: int, programs: int, steps: int) -> tuple[int, ...]:
    """How many programs compute a tile of each row tile; `steps`: of a tile's depth, in K.

    >>> parts_of("head", 6, 4, 16, 100)
    (2, 2, 1, 1, 1, 1)
    """
    split = SplitK(split)
    number, parts = (0, 1) if split is SplitK.NONE else (num_tiles, 2)
    if split in (SplitK.HEAD, SplitK.TAIL):
        number, parts = few_waves(num_tiles, columns, programs)
    if steps < parts * _PART_STEPS or num_tiles * columns > _MOST_WAVES * programs:
        number = 0
    split_ones, others = (parts,) * number, (1,) * (num_tiles - number)
    return others + split_ones if split is SplitK.TAIL else split_ones + others


def task_table(
    tiles: RowTiles, columns: int, steps: int, parts: Sequence[int], group: int
) -> tuple[NDArray[np.int64], int, int]:  # fmt: skip
    """(what every program computes, sums to keep, tiles of several parts); see `gemm_tasks_kernel` for the columns.

    Row tiles of as many parts go together, `group` at a time, column by column, so that programs side by side share
    what they load. The last part of a tile is behind the others.
    """
    rows: list[tuple[int, ...]] = []
    sums = split_tiles = 0
    for alike, run in itertools.groupby(range(len(parts)), key=lambda r: parts[r]):
        members = list(run)
        for some in (members[at : at + group] for at in range(0, len(members), group)):
            for column in range(columns):
                for part in range(alike):
                    for place, row in enumerate(some):
                        first, end, _, _, number = (int(v) for v in tiles.tiles[row])
                        last = part == alike - 1
                        kept = sums + place * (alike - 1)
                        begin, stop = part * steps // alike, (part + 1) * steps // alike
                        rows.append((
                            first, end, column, begin, stop, alike if last else -1, kept + (0 if last else part),
                            split_tiles + place, number, int(tiles.also[row]) if tiles.also is not None else number,
                        ))  # fmt: skip
                if alike > 1:
                    sums += len(some) * (alike - 1)
                    split_tiles += len(some)
    return np.array(rows, np.int64).reshape(-1, 10), sums, split_tiles


#: Memory to work in, on the GPU: so many numbers in fp32. It may be the same each time, if launches follow each other.
Scratch = Callable[[int], "torch.Tensor"]


class GemmLaunch:
    """y = x @ w.T of given sizes, by rows in the order of a table of tiles.

    Nothing can be sent before the first tiles are finished, and a last wave that is not full leaves programs idle.
    Several programs to a tile help with both. Launches must follow each other on the GPU: they count in the same words
    and add up in the same memory.
    """

    def __init__(
        self, tiles: RowTiles, n: int, k: int, multiprocessors: int, where: torch.device, *,
        blocks: Blocks, split: SplitK | str = SplitK.NONE, parts: Sequence[int] | None = None,
        scratch: Scratch | None = None,
    ) -> None:  # fmt: skip
        """`parts`: programs to a tile of each row tile, instead of those of `split`; `scratch`: for sums of parts."""
        import torch

        self.N, self.K, self.blocks, self.split = n, k, blocks, SplitK(split)
        self._tables = _Tables(tiles, where)
        self._programs = multiprocessors
        columns, num_tiles, steps = -(-n // blocks.width), len(tiles.tiles), -(-k // blocks.depth)
        if parts is None:
            parts = parts_of(split, num_tiles, columns, multiprocessors, steps)
        #: Programs to a tile, of each row tile.
        self.parts = tuple(parts)
        if len(self.parts) != num_tiles or min(self.parts, default=1) < 1 or max(self.parts, default=1) > max(steps, 1):
            raise ValueError(f"parts {self.parts} for {num_tiles} row tiles and {steps} steps of K")
        self._how = {
            "BM": blocks.height, "BN": blocks.width, "BK": blocks.depth, "EVEN_M": tiles.is_even(blocks.height),
            "EVEN_N": n % blocks.width == 0, "EVEN_K": k % blocks.depth == 0, "PRECISION": "ieee",
            "num_warps": blocks.warps,
        }  # fmt: skip
        self._runs = runs_of(tiles, blocks.height)
        self._tasks: torch.Tensor | None = None
        if any(number > 1 for number in self.parts):
            table, sums, split_tiles = task_table(tiles, columns, steps, self.parts, blocks.group)
            self._tasks = torch.from_numpy(table).to(where)
            self._num_sums = sums * blocks.height * blocks.width
            if scratch is None:
                own = torch.empty(self._num_sums, dtype=torch.float32, device=where)
                scratch = lambda _: own  # noqa: E731
            self._scratch = scratch
            self._arrivals = torch.zeros(split_tiles, dtype=torch.int64, device=where)
            self._spoiled = torch.full((len(tiles.slices),), -1, dtype=torch.int64, device=where)

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, flags: torch.Tensor | None = None, value: int = 0
    ) -> None:
        """Launches it in torch's current stream. `flags`: the addresses of the slices' words, which get `value`."""
        from dovetail.ops.kernels.gemm import gemm_slices_kernel, gemm_tasks_kernel

        t, b = self._tables, self.blocks
        boxes = bool(b.boxes) and has_boxes(x, w)
        how = {**self._how, "SOFT": not x.is_cuda, "BOXES": boxes, "num_stages": b.boxes if boxes else b.stages}
        flags = t.no_flags if flags is None else flags
        if not self.N or not len(t.tiles):
            return
        given: tuple[Any, Any] = (box(x, b.height, b.depth), box(w, b.width, b.depth)) if boxes else (x, w)
        if self._tasks is not None:
            gemm_tasks_kernel[(len(self._tasks),)](
                *given, y, self._tasks, t.slice_tiles, t.counters, flags, self._scratch(self._num_sums), self._arrivals,
                self._spoiled, value, _LOOKS, self.N, self.K, **how,
            )  # fmt: skip
        else:
            gemm_slices_kernel[(self._programs,)](
                *given, y, t.tiles, t.also, t.slice_tiles, t.counters, flags, value, len(t.tiles), self.N, self.K,
                *(self._runs or NO_RUNS), RUNS=self._runs is not None, GROUP=self.blocks.group,
                PROGRAMS=self._programs, ACROSS=t.is_across, **how,
            )  # fmt: skip


#: Major compute capabilities of GPUs that load by tensor descriptors, and have the shared memory for it.
_BOXES = (9, 10)


def boxes_on(where: torch.device) -> bool:
    """Whether kernels there can load by tensor descriptors; the interpreter can."""
    import torch

    if where.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(where)[0] in _BOXES


def has_boxes(*matrices: torch.Tensor) -> bool:
    """Whether tensor descriptors can be made of all these, and are loaded by."""
    fit = all(m.data_ptr() % 16 == 0 and m.shape[1] * m.element_size() % 16 == 0 and m.numel() for m in matrices)
    return fit and matrices[0].element_size() == 2 and boxes_on(matrices[0].device)


def box(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """A tensor descriptor of a contiguous matrix in boxes of so many rows and columns."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), [matrix.shape[1], 1], [rows, columns])  # one row has any stride


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How the kernel cuts bags."""

    bags: int = 4  #: pooled at a time by one program
    depth: int = 4  #: rows of each that are loaded at a time
    warps: int = 4
    programs: int = 8  #: for each multiprocessor, at most: the more, the more loads are on their way


class BagLaunch:
    """Pooled bags of some tables for a batch, by samples in the order of a table of tiles: y [batch, tables, dim]."""

    def __init__(
        self, tiles: RowTiles, weights: Sequence[torch.Tensor], batch: int, multiprocessors: int, where: torch.device,
        *, mode: str, shape: PoolShape, error: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """`error`: one int64 that the device reaches, set to 1 + the place of a value that names no row."""
        import torch

        self.T, self.D, self.B, self.shape = len(weights), weights[0].shape[1], batch, shape
        self._mean, self._weights, self._where = mode == "mean", list(weights), where
        self._tables = _Tables(tiles, where)
        self._addresses = torch.tensor([w.data_ptr() for w in weights], dtype=torch.int64, device=where)
        self._num_rows = torch.tensor([len(w) for w in weights], dtype=torch.int64, device=where)
        self._error = torch.zeros(1, dtype=torch.int64, device=where) if error is None else error
        self._cores, self._programs = multiprocessors, 0  # how many fit is not known before the kernel was compiled

    @property
    def programs(self) -> int:
        """For each multiprocessor, those that it holds at once; 0 before the first launch."""
        return self._programs // self._cores

    def check_bags(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """Bag b of table t is values[offsets[t * B + b]:...]."""
        if offsets.numel() != self.T * self.B + 1 or not (values.is_contiguous() and offsets.is_contiguous()):
            given = f"{offsets.numel()} offsets for {self.T} tables and {self.B} bags of each"
            raise ValueError(f"{given}: one for each bag and one behind the last, and no gaps in memory")

    def check(self) -> None:
        """Waits for the GPU. IndexError if some value named a row that its table has not; it added nothing."""
        if place := int(self._error.item()):
            self._error.zero_()
            raise IndexError(f"values[{place - 1}] names a row that its table has not")

    def __call__(
        self, values: torch.Tensor, offsets: torch.Tensor, y: torch.Tensor, flags: torch.Tensor | None = None,
        value: int = 0, scales: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launches it in torch's current stream. `scales`: a factor for each value; see `GemmLaunch` for the flags."""
        import triton

        from dovetail.ops.kernels.embedding import embedding_slices_kernel

        s, t = self.shape, self._tables
        if not len(t.tiles):
            return
        flags = t.no_flags if flags is None else flags
        dtype = getattr(triton.language, str(self._weights[0].dtype).removeprefix("torch."))
        kernel = embedding_slices_kernel[(min(self._programs or self._cores, len(t.tiles) * self.T),)](
            self._addresses, self._num_rows, values, offsets, values if scales is None else scales, y,
            t.tiles, t.slice_tiles, t.counters, flags, self._error, value, len(t.tiles), self.T, self.B, self.D,
            DTYPE=dtype, BAGS=s.bags, DEPTH=s.depth, BLOCK_D=triton.next_power_of_2(self.D),
            MEAN=self._mean, SCALED=scales is not None, SOFT=not y.is_cuda, num_warps=s.warps,
        )  # fmt: skip
        if not self._programs:
            shared_bytes = getattr(getattr(kernel, "metadata", None), "shared", 0)
            held = resident(getattr(kernel, "n_regs", 0), s.warps, shared_bytes)
            self._programs = self._cores * min(s.programs, held)


def resident(num_registers: int, warps: int, shared_bytes: int = 0) -> int:
    """Programs of so many registers a thread that a multiprocessor holds at once; one if that is not known.

    A program that has no place begins when another has ended, and what it has to pool is then late for its slice.
    The figures are NVIDIA's: 65,536 registers, given in blocks of 256 a warp; 64 warps; 32 programs; of shared memory
    the 164 KiB of an A100 (later ones have more), of which a program takes one more than it asks for.

    >>> resident(96, 4)
    5
    """
    if not num_registers:
        return 1
    a_warp = -(-num_registers * 32 // 256) * 256
    return max(1, min(65536 // (a_warp * warps), 64 // warps, 32, (164 << 10) // (shared_bytes + 1024)))


class _Tables:
    """The tables of a kernel on its device."""

    def __init__(self, tiles: RowTiles, where: torch.device) -> None:
        import torch

        self.tiles, self.slice_tiles = (torch.from_numpy(a.copy()).to(where) for a in (tiles.tiles, tiles.slice_tiles))
        also = tiles.tiles[:, SLICE] if tiles.also is None else tiles.also
        self.is_across = bool((also != tiles.tiles[:, SLICE]).any())
        self.also = torch.from_numpy(also.copy()).to(where)
        self.counters = torch.zeros(max(1, len(tiles.slices)), dtype=torch.int64, device=where)
        self.no_flags = torch.zeros_like(self.counters)
