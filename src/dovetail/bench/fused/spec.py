"""What the benchmark of fused operators on a GPU runs: shapes and grid as data. Imports neither torch nor a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dovetail.measure.sizes import format_bytes

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Time of the computation over that of the communication, each alone."""
SIZES = (16 << 20, 200 << 20)
"""Bytes that leave the GPU, and as many that come to it."""
TILE_ROWS = 128
FEWEST_CHECKS = 20
_FEWEST_UNEVEN = 3  # ranks


class Op(StrEnum):
    """An operator with the collective that depends on it."""

    GEMM = "gemm_all_to_all"
    EMBEDDING = "embedding_all_to_all"


class Split(StrEnum):
    """How rows are shared out."""

    EQUAL = "equal"
    UNEVEN = "uneven"  #: one peer gets about half as much again, another about half, in numbers that no tile divides


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One place of the grid. K of a product, or the length of bags, follows from the ratio by calibration."""

    op: Op
    ratio: float
    size_bytes: int
    split: Split = Split.EQUAL

    @property
    def name(self) -> str:
        """``gemm_all_to_all 200M equal @1``."""
        return f"{self.op} {format_bytes(self.size_bytes)} {self.split} @{self.ratio:g}"

    def rows(self, ranks: int, row_bytes: int) -> tuple[int, ...]:
        """Rows of the GPU for each rank; those of the peers add up to about `size_bytes`, and the GPU keeps a share.

        >>> Shape(op=Op.GEMM, ratio=1, size_bytes=192 << 20).rows(4, 16384)
        (4096, 4096, 4096, 4096)
        """
        tile = TILE_ROWS if self.op is Op.GEMM else 8
        share = max(1, round(self.size_bytes / (ranks - 1) / row_bytes / tile)) * tile
        if self.split is Split.EQUAL:
            return (share,) * ranks
        if ranks < _FEWEST_UNEVEN:
            raise ValueError(f"{self.name}: rows can't be shared out unevenly with {ranks - 1} peer")
        more = share // 2 - 3
        return (share, share + more, *[share] * (ranks - 3), share - more)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A measurement."""

    shapes: tuple[Shape, ...]
    ranks: int = 4
    """The GPU and its peers in host memory."""
    slices: tuple[tuple[int, tuple[int, ...]], ...] = ((64 << 20, (6, 12, 24, 48)), (0, (3, 4, 6, 8, 12)))
    """Slices of all that leaves, tried with every form: those of the first whose bytes the communication reaches."""
    least_slice_bytes: int = 1 << 19
    """Numbers that would make smaller ones are not tried."""
    chunks: tuple[int, ...] = (3, 6, 12, 24)
    """Chunks of all that leaves, tried with the decomposed forms beside the numbers of slices."""
    rivals: int = 2
    """Decomposed forms that are timed, of those by torch and of those by our kernel: the fastest of a pilot. Of the
    fused ones it is one more than this."""
    columns: tuple[tuple[int, int], ...] = ((64 << 20, 8192), (0, 4096))
    """N of a product: the first whose bytes the communication reaches."""
    tables: int = 16
    dim: int = 128
    table_rows: int = 250_000
    products: tuple[tuple[int, int, int], ...] = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 4096))
    """M, N, K at which our kernel is held against torch.mm."""
    seconds: float = 1.0
    """Time for all contenders of a shape together; the fewest rounds may take longer."""
    fewest_rounds: int = 7
    most_rounds: int = 31
    checks: int = FEWEST_CHECKS
    """Runs of the `dma` transport with new data and spoiled memory, before it is timed."""

    def __post_init__(self) -> None:
        """With a single peer there is no uneven split: such shapes are dropped, they would be the equal ones again."""
        if self.ranks < 2:
            raise ValueError(f"there is a GPU and at least one peer, not {self.ranks} ranks")
        if self.ranks < _FEWEST_UNEVEN and self.shapes:
            equal = tuple(shape for shape in self.shapes if shape.split is Split.EQUAL)
            if not equal:
                raise ValueError(f"uneven splits take at least {_FEWEST_UNEVEN} ranks, not {self.ranks}")
            object.__setattr__(self, "shapes", equal)
        slices = [number for _, numbers in self.slices for number in numbers]
        if min((*slices, *self.chunks, self.rivals, self.checks, self.fewest_rounds), default=0) < 1:
            raise ValueError("slices, chunks, rivals, checks and rounds are at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")

    def slices_of(self, size_bytes: int) -> tuple[int, ...]:
        """Numbers of slices for so many bytes.

        >>> Spec(shapes=()).slices_of(16 << 20)
        (3, 4, 6, 8, 12)
        """
        numbers = next(numbers for least, numbers in self.slices if size_bytes >= least)
        return tuple(n for n in numbers if size_bytes / n >= self.least_slice_bytes) or numbers[:1]

    def chunks_of(self, size_bytes: int) -> tuple[int, ...]:
        """Numbers of chunks for so many bytes: all that slices have, too.

        >>> Spec(shapes=()).chunks_of(200 << 20)
        (3, 6, 12, 24, 48)
        """
        return tuple(sorted({*self.chunks, *self.slices_of(size_bytes)}))

    def width(self, size_bytes: int) -> int:
        """N of the product whose communication is so large."""
        return next(n for least, n in self.columns if size_bytes >= least)


def grid(
    ops: Sequence[Op] = tuple(Op), ratios: Sequence[float] = RATIOS, sizes: Sequence[int] = SIZES,
    splits: Sequence[Split] = tuple(Split),
) -> tuple[Shape, ...]:  # fmt: skip
    """All of it; what shares buffers stands together."""
    return tuple(
        Shape(op=op, ratio=ratio, size_bytes=size, split=split)
        for op in ops for size in sizes for split in splits for ratio in ratios
    )  # fmt: skip


def full() -> Spec:
    """The grid."""
    return Spec(shapes=grid())


def quick() -> Spec:
    """A miniature: balance of both operators, equal splits."""
    return Spec(
        shapes=grid(ratios=(1.0,), splits=(Split.EQUAL,)), chunks=(6, 12), seconds=0.3,
        slices=((64 << 20, (6, 12, 24)), (0, (3, 6, 12))), products=((4096, 4096, 4096),),
    )  # fmt: skip
