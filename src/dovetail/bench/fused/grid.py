"""The shapes of `dovetail bench fused` between ranks, and those that `dovetail tune --only fused` measures: pure data.

The rule: an operator's grid is a product of two axes and nothing is left out of it. One is the size of what is sent, in
steps of 4 to 8: from a decoding step to a batch of a mixture of experts or of a recommendation model. The other is the
work for each byte that is sent, in steps of 4 to 8: the inner dimension of a product (columns of `all_gather_matmul`,
where the inner dimension is what is sent), the length of bags. The least of it is where communication takes longer,
the most where computation does by far and nothing can be gained. Uneven splits are the middle of that grid once more.

What is tuned lies between these shapes, so that a choice is never judged where it was measured.

Legend: m rows of x, n rows of w, k inner dimension, all of one rank; tables of one rank, batch of all ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

GEMM, GEMV, GATHER, SCATTER = "gemm_all_to_all", "gemv_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"
EMBEDDING = "embedding_all_to_all"
OPS = (EMBEDDING, GEMV, GEMM, GATHER, SCATTER)
DTYPES = ("float32", "bfloat16")
WIDE = 1024  #: columns of what is sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """x [m, k] with w [n, k]."""

    op: str
    m: int
    n: int
    k: int
    uneven: bool = False

    @property
    def name(self) -> str:
        """``128x1024x32``: m, n, k."""
        return f"{self.m}x{self.n}x{self.k}{' uneven' if self.uneven else ''}"

    @property
    def sizes(self) -> dict[str, int]:
        """For a record."""
        return {"m": self.m, "n": self.n, "k": self.k}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Bags of `bag` rows out of `tables` tables of a rank, for `batch` samples."""

    batch: int
    bag: int
    op: str = EMBEDDING
    tables: int = 8
    dim: int = 64
    rows: int = 40_000  #: of a table: all of a rank's are larger than a cache
    uneven = False

    @property
    def name(self) -> str:
        """``512 x 8 tables, bags of 32``."""
        return f"{self.batch} x {self.tables} tables, bags of {self.bag}"

    @property
    def sizes(self) -> dict[str, int]:
        """For a record."""
        names = ("batch", "bag", "tables", "dim", "rows")
        return {name: getattr(self, name) for name in names}


Shape = Product | Lookup


def _product(op: str, size: int, work: int) -> Shape:
    if op == EMBEDDING:
        return Lookup(batch=size, bag=work)
    if op == GATHER:
        return Product(op=op, m=size, n=work, k=WIDE)
    return Product(op=op, m=size, n=WIDE, k=work)


#: Rows (samples, for embeddings), and work for each byte.
_SIZES = {EMBEDDING: (64, 512, 2048, 8192), GEMM: (16, 128, 512, 2048)}
_WORK = {EMBEDDING: (1, 8, 32)}
_PRODUCT_WORK = (32, 128, 512)
#: The few rows of a decoding step, by a rank's part of the layer: n, k.
_GEMV_ROWS, _LAYERS = (1, 4, 16, 64), ((1024, 128), (2048, 512), (4096, 1024))
#: The same on a GPU.
_GPU_LAYERS = ((4096, 1024), (8192, 2048), (8192, 8192))
_TUNE_SIZES = {EMBEDDING: (128, 1024, 4096), GEMM: (32, 256, 1024)}
_TUNE_WORK = {EMBEDDING: (2, 16)}
_TUNE_PRODUCT_WORK = (64, 256)
_TUNE_GEMV_ROWS, _TUNE_LAYERS = (2, 32), ((1536, 256), (3072, 768))
#: There fp32 is multiplied without tensor cores: many rows of a large layer decide whether that pays.
_TUNE_GPU_ROWS, _TUNE_GPU_LAYERS = (2, 8, 48), ((6144, 1536), (8192, 6144))


def grid(ops: Sequence[str] = OPS, backend: str = "cpu") -> tuple[Shape, ...]:
    """All of it: at least 12 shapes of each operator."""
    found: list[Shape] = []
    layers = _LAYERS if backend == "cpu" else _GPU_LAYERS
    for op in ops:
        if op == GEMV:
            found += [Product(op=op, m=m, n=n, k=k) for (n, k), m in itertools.product(layers, _GEMV_ROWS)]
            continue
        sizes, works = _SIZES.get(op, _SIZES[GEMM]), _WORK.get(op, _PRODUCT_WORK)
        found += [_product(op, size, work) for work, size in itertools.product(works, sizes)]
        if op == GEMM:
            found += [Product(op=op, m=m, n=WIDE, k=works[1], uneven=True) for m in sizes[1:]]
    return tuple(found)


def quick(ops: Sequence[str] = OPS) -> tuple[Shape, ...]:
    """A miniature: one small and one middle shape of each operator, and uneven splits."""
    found: list[Shape] = []
    for op in ops:
        mine = [shape for shape in grid([op]) if not shape.uneven]
        found += [mine[0], mine[5]]
        found += [shape for shape in grid([op]) if shape.uneven][:1]
    return tuple(found)


def coarse(ops: Sequence[str] = OPS, backend: str = "cpu") -> tuple[Shape, ...]:
    """What a choice is made by, from small to large: where time is short, every operator lacks its large ones."""
    found: list[Shape] = []
    rows, layers = (_TUNE_GEMV_ROWS, _TUNE_LAYERS) if backend == "cpu" else (_TUNE_GPU_ROWS, _TUNE_GPU_LAYERS)
    for op in ops:
        if op == GEMV:
            found += [Product(op=op, m=m, n=n, k=k) for m, (n, k) in itertools.product(rows, layers)]
            continue
        sizes, works = _TUNE_SIZES.get(op, _TUNE_SIZES[GEMM]), _TUNE_WORK.get(op, _TUNE_PRODUCT_WORK)
        found += [_product(op, size, work) for size, work in itertools.product(sizes, works)]
        if op == GEMM:
            found += [Product(op=op, m=m, n=WIDE, k=works[0], uneven=True) for m in sizes]
    return tuple(sorted(found, key=_cost))


def _cost(shape: Shape) -> int:
    """About in the order of time."""
    if isinstance(shape, Lookup):
        return shape.batch * shape.tables * shape.bag * shape.dim * 8
    return shape.m * shape.n * shape.k


def named(text: str) -> tuple[str, ...]:
    """Operators of ``--op``: names, or all. Raises `ValueError` for another."""
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if found in ((), ("all",)):
        return OPS
    for name in found:
        if name not in OPS:
            raise ValueError(f"--op: {name!r} is not known; there are all, {', '.join(OPS)}")
    return tuple(dict.fromkeys(found))
