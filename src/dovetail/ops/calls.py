"""The operators' calls, with their arguments checked: what every transport is given.

Owns shapes and dtypes. A call's `text` is what ranks compare: those of one call must be equal on all of them.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from dovetail.coll import arguments
from dovetail.errors import NotSupported
from dovetail.hw.cpu import native

#: Rows of `gemv_all_reduce` at most: it is for decoding; larger products are `matmul_reduce_scatter` and an all-gather.
MOST_GEMV_ROWS = 64

#: Less than so many rows of anything: ranks tell each other numbers of 64 bits.
MOST_ROWS = 1 << 62

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_SUM, _MEAN = "sum", "mean"
_NOTHING = torch.empty(0, 0)
#: What `check_bags` of the native part finds wrong.
_WRONG_OFFSETS, _WRONG_VALUE = 1, 2


@dataclass(slots=True)
class Call(ABC):
    """What all of them have."""

    op: ClassVar[str]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its tensors are."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of what is computed."""

    @property
    @abstractmethod
    def text(self) -> str:
        """The call in words, without what may differ between ranks."""

    @property
    @abstractmethod
    def load(self) -> tuple[int, int]:
        """(operations, bytes that this rank sends): what a choice depends on; the same on all ranks."""


@dataclass(slots=True)
class Product(Call):
    """A product x @ w.T, as torch.nn.Linear has it: x [rows, k], w [n, k]."""

    x: torch.Tensor
    w: torch.Tensor
    world: int
    rows: int = field(init=False)
    k: int = field(init=False)
    n: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows, self.k = self.x.shape
        self.n = self.w.shape[0]

    def forget(self) -> None:
        """Lets its tensors go; what it says of their shapes stays."""
        self.x = self.w = _NOTHING

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def fixed_splits(self) -> tuple[int, ...] | None:
        """Rows that are sent, then received, where there are some; None if a call like this one may have others."""
        return ()

    @property
    def text(self) -> str:
        return _product_text(self.op, self.rows, self.k, self.n, self.dtype)

    @property
    def load(self) -> tuple[int, int]:
        return 2 * self.rows * self.n * self.k, self.rows * self.n * self.dtype.itemsize


@functools.lru_cache(maxsize=1024)
def _product_text(op: str, rows: int | str, k: int, n: int, dtype: torch.dtype) -> str:
    return f"{op}(x [{rows}, {k}], w [{n}, {k}], {dtype})"


@dataclass(slots=True)
class GemmAllToAll(Product):
    """Rows of x are grouped by destination; row counts in `send` and `receive`."""

    op = "gemm_all_to_all"
    send: tuple[int, ...]
    receive: tuple[int, ...]
    even: bool  #: no splits were given: all ranks have as many rows

    @property
    def fixed_splits(self) -> tuple[int, ...] | None:
        return (*self.send, *self.receive) if self.even else None

    @property
    def text(self) -> str:
        return _product_text(self.op, self.rows if self.even else "uneven", self.k, self.n, self.dtype)

    @property
    def load(self) -> tuple[int, int]:
        rows = self.rows if self.even else 0  # uneven: a choice by size would differ between ranks
        return 2 * rows * self.n * self.k, rows * self.n * self.dtype.itemsize


@dataclass(slots=True)
class GemvAllReduce(Product):
    """The inner dimension is shared among ranks; every rank gets the sum."""

    op = "gemv_all_reduce"


@dataclass(slots=True)
class AllGatherMatmul(Product):
    """Every rank has some rows of x and some of w's; the product of all rows of x with its own w."""

    op = "all_gather_matmul"

    @property
    def load(self) -> tuple[int, int]:
        rows = self.rows * self.world
        return 2 * rows * self.n * self.k, self.rows * self.k * self.dtype.itemsize


@dataclass(slots=True)
class MatmulReduceScatter(Product):
    """The inner dimension is shared among ranks; every rank gets its rows of the sum."""

    op = "matmul_reduce_scatter"


@dataclass(slots=True)
class EmbeddingAllToAll(Call):
    """Pooled rows of this rank's tables for all samples; every rank gets those of all tables for its own samples."""

    op = "embedding_all_to_all"
    weights: list[torch.Tensor]  #: this rank's tables, [rows, dim] each
    values: torch.Tensor  #: row numbers, bag after bag, table after table
    offsets: torch.Tensor  #: where bags begin, and the end: tables * batch + 1
    batch: int  #: samples of all ranks together
    mode: str  #: "sum" or "mean"
    per_sample_weights: torch.Tensor | None
    world: int
    dim: int
    num_tables: int = -1  #: of all ranks together, if somebody said

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def text(self) -> str:
        said = f", {self.num_tables} tables" if self.num_tables >= 0 else ""
        return f"{self.op}(batch {self.batch}, dim {self.dim}, {self.mode}, {self.dtype}{said})"

    @property
    def load(self) -> tuple[int, int]:
        return 0, self.batch * self.dim * self.dtype.itemsize  # tables and bags may differ between ranks


def gemm_all_to_all(x: Any, w: Any, output_splits: Any, input_splits: Any, world: int) -> GemmAllToAll:
    """Checked; splits may be sequences or tensors (one on a GPU is read with a synchronisation)."""
    x, w = _product(x, w)
    given = output_splits is not None, input_splits is not None
    if given[0] != given[1]:
        raise ValueError("give output_splits and input_splits, or neither for equal pieces")
    rows = x.shape[0]
    if not any(given):
        if rows % world:
            raise ValueError(f"x has {rows} rows, which {world} ranks can't share equally: give splits")
        equal = (rows // world,) * world
        return GemmAllToAll(x, w, world, equal, equal, True)
    send, receive = _splits("input_splits", input_splits, world), _splits("output_splits", output_splits, world)
    if sum(send) != rows:
        raise ValueError(f"input_splits {list(send)} sum to {sum(send)}, x has {rows} rows")
    return GemmAllToAll(x, w, world, send, receive, False)


def gemv_all_reduce(x: Any, w: Any, world: int) -> GemvAllReduce:
    """Checked."""
    x, w = _product(x, w)
    if x.shape[0] > MOST_GEMV_ROWS:
        raise ValueError(
            f"x has {x.shape[0]} rows; gemv_all_reduce takes up to {MOST_GEMV_ROWS}: for more, matmul_reduce_scatter "
            "and an all-gather"
        )
    return GemvAllReduce(x, w, world)


def all_gather_matmul(x: Any, w: Any, world: int) -> AllGatherMatmul:
    """Checked."""
    return AllGatherMatmul(*_product(x, w), world)


def matmul_reduce_scatter(x: Any, w: Any, world: int) -> MatmulReduceScatter:
    """Checked."""
    x, w = _product(x, w)
    if x.shape[0] % world:
        raise ValueError(f"x has {x.shape[0]} rows, which {world} ranks can't share equally")
    return MatmulReduceScatter(x, w, world)


def embedding_all_to_all(
    weights: Any,
    values: Any,
    offsets: Any,
    lengths: Any,
    batch: Any,
    mode: str,
    per_sample_weights: Any,
    world: int,
    num_tables: Any = -1,
) -> EmbeddingAllToAll:
    """Checked, row numbers included where that needs no synchronisation."""
    if not isinstance(num_tables, int) or not -1 <= num_tables < MOST_ROWS:
        raise ValueError(f"num_tables is a whole number of tables, or -1, not {num_tables!r:.80}")
    tables = list(_listed("weights", weights))
    is_plain_call = all(map(is_plain, tables))
    if not is_plain_call:
        tables = [arguments.source(f"weights[{t}]", w) for t, w in enumerate(tables)]
    if not tables:
        raise ValueError("weights has no table: every rank pools at least one")
    for t, w in enumerate(tables):
        if w.dim() != 2 or w.shape[1] != tables[0].shape[1] or w.dtype != tables[0].dtype:
            raise ValueError(
                f"weights[{t}] is {w.dtype} {tuple(w.shape)}: tables are [rows, dim] of one dim and dtype, as "
                f"weights[0], {tables[0].dtype} {tuple(tables[0].shape)}"
            )
    _floating("weights", tables[0])
    if mode not in (_SUM, _MEAN):
        raise ValueError(f"mode is 'sum' or 'mean', not {mode!r}")
    values = _numbers("values", values)
    if (offsets is None) == (lengths is None):
        raise ValueError("give offsets or lengths, one of them")
    if offsets is None:
        lengths = _numbers("lengths", lengths)
        if lengths.is_cpu and lengths.numel() and int(lengths.min()) < 0:
            raise ValueError("lengths has a negative number")
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
        torch.cumsum(lengths, 0, out=offsets[1:])
    offsets = _numbers("offsets", offsets).to(torch.int64)
    bags = offsets.numel() - 1
    if bags < 0 or bags % len(tables) or (batch is not None and bags != batch * len(tables)):
        wanted = f"{len(tables)} tables times {'the batch' if batch is None else batch}, and one"
        raise ValueError(f"offsets has {bags + 1} numbers: it needs {wanted}")
    batch = bags // len(tables)
    if batch % world:
        raise ValueError(f"a batch of {batch} can't be shared equally by {world} ranks")
    if per_sample_weights is not None:
        per_sample_weights = arguments.source("per_sample_weights", per_sample_weights)
        if per_sample_weights.shape != values.shape:
            raise ValueError(f"per_sample_weights is {tuple(per_sample_weights.shape)}, values {tuple(values.shape)}")
        arguments.same_dtype("per_sample_weights", per_sample_weights, "weights[0]", tables[0])
        if mode == _MEAN:
            raise ValueError("per_sample_weights go with mode='sum'")
    extra = [] if per_sample_weights is None else [per_sample_weights]
    if not (is_plain_call and all(t.is_cpu for t in (values, offsets, *extra))):
        arguments.one_device([*tables, values, offsets, *extra])
    call = EmbeddingAllToAll(
        tables, values, offsets, batch, mode, per_sample_weights, world, int(tables[0].shape[1]), num_tables
    )
    if values.is_cpu:
        _in_range(call)
    return call


def _in_range(call: EmbeddingAllToAll) -> None:
    """Raises `ValueError` or `IndexError` that names the table and the row; the tensors are on the CPU."""
    offsets, values = call.offsets, call.values
    num_rows = [w.shape[0] for w in call.weights]
    wide = values.dtype is torch.int64
    wrong, table, row = native.load().check_bags(
        values.data_ptr(), wide, values.numel(), offsets.data_ptr(), call.batch, num_rows
    )
    if wrong == _WRONG_OFFSETS:
        raise ValueError(
            f"offsets begin at 0, never fall and end at the number of values, {values.numel()}; these go from "
            f"{int(offsets[0])} to {int(offsets[-1])}"
        )
    if wrong == _WRONG_VALUE:
        raise IndexError(f"values has row {row} for weights[{table}], which has rows 0..{num_rows[table] - 1}")


def _product(x: Any, w: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if is_plain(x) and is_plain(w) and x.dtype is w.dtype and x.dtype in _FLOATS:
        (_, k), (_, inner) = x.shape, w.shape
        if k == inner:
            return x, w  # as most calls have them: what follows costs more than a small product
    x, w = arguments.source("x", x), arguments.source("w", w)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        shapes = f"{tuple(x.shape)} and {tuple(w.shape)}"
        raise ValueError(f"x is [rows, k] and w [n, k], as for torch.nn.Linear; these are {shapes}")
    arguments.same_dtype("x", x, "w", w)
    _floating("x and w", x)
    arguments.one_device([x, w])
    return x, w


def is_plain(t: Any) -> bool:
    """A matrix in the CPU's memory that nothing has to be done to."""
    return (
        (type(t) is torch.Tensor or type(t) is torch.nn.Parameter)
        and t.is_cpu
        and t.dim() == 2
        and t.layout is torch.strided
        and not t.is_nested
        and t.is_contiguous()
        and not t.is_conj()
        and not t.is_neg()
        and bool(t.data_ptr() or not t.numel())  # not given up by whoever shards parameters
    )


def _floating(name: str, t: torch.Tensor) -> None:
    if t.dtype not in _FLOATS:
        can = ", ".join(str(d) for d in _FLOATS)
        raise NotSupported(
            f"{name} are {t.dtype}; operators compute in {can}. Collectives move any dtype, 8-bit floats too"
        )


def _numbers(name: str, given: Any) -> torch.Tensor:
    is_plain = type(given) is torch.Tensor and given.is_cpu and given.layout is torch.strided and given.is_contiguous()
    t = given if is_plain else arguments.source(name, given)
    if t.dim() != 1 or t.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be whole numbers (int64, int32) in one dimension, not {t.dtype} {tuple(t.shape)}")
    return t


def _listed(name: str, tensors: Any) -> Sequence[Any]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{name} is a list of tables, not {type(tensors).__name__}")
    return tensors


def _splits(name: str, sizes: Any, world: int) -> tuple[int, ...]:
    if isinstance(sizes, torch.Tensor):
        sizes = sizes.tolist()
    if len(sizes) != world or any(not isinstance(n, int) or not 0 <= n < MOST_ROWS for n in sizes):
        raise ValueError(f"{name} must be {world} whole numbers, 0 or more and less than 2^62, not {list(sizes)}")
    return tuple(sizes)
