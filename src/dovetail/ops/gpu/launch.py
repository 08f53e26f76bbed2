"""The computation of a sliced operator on a GPU: kernels that raise a flag for every slice that they have finished.

Owns how a product and pooled bags are cut into programs, and the tables, counters and memory that their kernels work
with; who waits for the flags is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.ops.gpu.tiles import Blocks, RowTiles

if TYPE_CHECKING:
    import torch


#: Steps of a tile's depth that each part of K has at least: several programs to a tile must be worth the sum.
_PART_STEPS = 4
#: Waves of tiles up to which a whole product is computed in parts: it takes memory for each of them, in fp32.
_MOST_WAVES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first row tiles of a product, which are to be finished early: several programs to a tile, a part of K each.

    How many row tiles it has follows from the product (`head_tiles`), or it is the whole of it.
    """

    parts: int = 2
    is_whole: bool = False


def waves(num_tiles: int, columns: int, programs: int, head: int = 0, parts: int = 2) -> float:
    """How often a tile's time a product takes: `num_tiles` row tiles of so many columns on so many programs.

    The first `head` row tiles are computed by `parts` programs to a tile, in that part of the time.

    >>> waves(20, 16, 132), waves(20, 16, 132, head=4), waves(20, 16, 132, head=20, parts=4)
    (3.0, 2.5, 2.5)
    """
    return -(-parts * head * columns // programs) / parts + -(-(num_tiles - head) * columns // programs)


def head_tiles(num_tiles: int, columns: int, programs: int, parts: int = 2) -> int:
    """How many row tiles a head has: as many as make the fewest waves, the most of those, in a wave at most.

    >>> head_tiles(20, 16, 132), head_tiles(132, 32, 132), head_tiles(20, 16, 132, parts=4)
    (4, 2, 4)
    """
    most = min(num_tiles, programs // max(columns, 1))
    if most < 1:
        return 0
    return -min((waves(num_tiles, columns, programs, head, parts), -head) for head in range(1, most + 1))[1]


class GemmLaunch:
    """y = x @ w.T of given sizes, by rows in the order of a table of tiles.

    Nothing can be sent before the first tiles are finished, and a last wave that is not full leaves programs idle.
    A head helps with both.
    """

    def __init__(
        self, tiles: RowTiles, n: int, k: int, multiprocessors: int, where: torch.device, *,
        blocks: Blocks, head: Head | None = None,
    ) -> None:  # fmt: skip
        """`head`: there is none if K is too short for its parts, or if there are too many tiles for a whole one."""
        import torch

        self.N, self.K, self.blocks, self._tiles = n, k, blocks, tiles
        self._tables = _Tables(tiles, where)
        self._programs = multiprocessors
        columns, num_tiles = -(-n // blocks.width), len(tiles.tiles)
        #: Row tiles of the head, and programs to each of their tiles.
        self.head, self.parts = 0, 1
        if head and head.parts * _PART_STEPS * blocks.depth <= k:
            self.parts = head.parts
            if not head.is_whole:
                self.head = head_tiles(num_tiles, columns, self._programs, head.parts)
            elif num_tiles * columns <= _MOST_WAVES * self._programs:
                self.head = num_tiles
        self._rest = self._tables.tiles[self.head :].clone()
        sums = (self.head * columns, self.parts, blocks.height, blocks.width)
        self._sums = torch.empty(sums, dtype=torch.float32, device=where)
        self._arrivals = torch.zeros(self.head * columns, dtype=torch.int64, device=where)

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, flags: torch.Tensor | None = None, value: int = 0
    ) -> None:
        """Launches it in torch's current stream. `flags`: the addresses of the slices' words, which get `value`."""
        from dovetail.ops.kernels.gemm import gemm_parts_kernel, gemm_slices_kernel

        b, t = self.blocks, self._tables
        flags = t.no_flags if flags is None else flags
        how = {
            "BM": b.height, "BN": b.width, "BK": b.depth, "GROUP": b.group, "EVEN_M": self._tiles.is_even(b.height),
            "EVEN_N": self.N % b.width == 0, "EVEN_K": self.K % b.depth == 0, "PRECISION": "ieee",
            "SOFT": not x.is_cuda, "num_warps": b.warps, "num_stages": b.stages,
        }  # fmt: skip
        if not self.N:
            return
        try:
            if self.head:
                gemm_parts_kernel[(self.parts * len(self._arrivals),)](
                    x, w, y, t.tiles, t.slice_tiles, t.counters, flags, self._sums, self._arrivals, value,
                    self.head, self.N, self.K, PARTS=self.parts, **how,
                )  # fmt: skip
            if len(self._rest):
                gemm_slices_kernel[(self._programs,)](
                    x, w, y, self._rest, t.slice_tiles, t.counters, flags, value, len(self._rest), self.N, self.K,
                    PROGRAMS=self._programs, **how,
                )  # fmt: skip
        except BaseException:
            t.counters.zero_()  # behind a head that counted tiles of slices which nobody completes now
            self._arrivals.zero_()
            raise


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
        self.counters = torch.zeros(max(1, len(tiles.slices)), dtype=torch.int64, device=where)
        self.no_flags = torch.zeros_like(self.counters)
