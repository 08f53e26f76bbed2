"""x @ w.T on the CPU, as fast as it can be had.

Owns two decisions. Where that is faster, a kernel of our own multiplies (`native/product_kernels.cpp`): few rows, since
reading w is what takes time then, and torch's libraries pack it first; any number where those use older instructions
than the CPU has. And 16-bit floats are multiplied in fp32 where the CPU has no arithmetic for them: torch takes 2 to 10
times as long there, and rounds the same sums.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dovetail.coll.dtypes import DTYPES
from dovetail.hw.cpu import native

#: With fewer rows of x, making w longer takes more than the product; twice as many if w comes from far away.
FEWEST_ROWS = 16
_NEAR_BYTES = 1 << 20  # of w in fp32
_BLOCK_BYTES = 2 << 20  # of w in fp32: so much stays in a cache until it is multiplied
_KEPT_BYTES = 64 << 20  # of w in fp32: more of it is not kept for the next part of x
_ONE_THREAD = 1 << 18  # multiplications: where torch has several threads, it has them for more than this
_FLAGS = {torch.bfloat16: {"avx512_bf16", "amx_bf16"}, torch.float16: {"avx512_fp16", "amx_fp16"}}

#: Multiplies rows of x; into `out`, if that is given.
Multiply = Callable[..., torch.Tensor]


def most_threads(dtype: torch.dtype, rows: int, n: int, k: int) -> int:
    """Of torch's, up to which our own kernel, which has one, multiplies so many rows of x."""
    if not 0 < rows <= _most_rows(dtype, n, k):
        return 0
    return 1 if rows * n * k > _ONE_THREAD else sys.maxsize


def is_ours(w: torch.Tensor, rows: int) -> bool:
    """Whether our own kernel multiplies so many rows of x."""
    return torch.get_num_threads() <= most_threads(w.dtype, rows, *w.shape)


def is_long(w: torch.Tensor, rows: int) -> bool:
    """Whether so many rows of x are multiplied in fp32, though they are not."""
    if w.dtype is torch.float32 or rows < FEWEST_ROWS or w.dtype not in slow():
        return False
    return rows >= 2 * FEWEST_ROWS or 4 * w.numel() <= _NEAR_BYTES


def mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [m, k] times w [n, k], transposed; both are contiguous."""
    rows = x.shape[0]
    if is_ours(w, rows):
        return _ours(w, x)
    return _in_blocks(w, x) if is_long(w, rows) else torch.mm(x, w.t())


def ready(w: torch.Tensor, rows: int) -> Multiply:
    """The same for several parts of x, of so many rows in all: w is made ready once."""
    if is_ours(w, rows) or not is_long(w, rows):
        return functools.partial(_plain, w, w.t())
    if 4 * w.numel() > _KEPT_BYTES:
        return functools.partial(_in_blocks, w)
    return functools.partial(_longer, w.float().t())


def _plain(w: torch.Tensor, columns: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if is_ours(w, x.shape[0]):
        return _ours(w, x, out)
    return torch.mm(x, columns) if out is None else torch.mm(x, columns, out=out)


def _ours(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    (m, k), n = x.shape, w.shape[0]
    if out is None:
        out = x.new_empty((m, n))
    _native().multiply(int(DTYPES[w.dtype]), x.data_ptr(), w.data_ptr(), out.data_ptr(), m, n, k)
    return out


def _longer(columns: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    product = torch.mm(x.float(), columns)
    return product.to(x.dtype) if out is None else out.copy_(product)


def _in_blocks(w: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Columns of the product piece by piece: no second w is as large as w, and what is made longer is still at hand."""
    block, long = max(_BLOCK_BYTES // (4 * max(w.shape[1], 1)), 1), x.float()
    if out is None:
        if block >= w.shape[0]:
            return torch.mm(long, w.float().t()).to(x.dtype)
        out = x.new_empty((x.shape[0], w.shape[0]))
    for first in range(0, w.shape[0], block):
        out[:, first : first + block].copy_(torch.mm(long, w[first : first + block].float().t()))
    return out


@functools.lru_cache(1024)
def _most_rows(dtype: torch.dtype, n: int, k: int) -> int:
    """That our own kernel is faster for, on this CPU; 0 if it has none."""
    return int(_native().most_rows(int(DTYPES[dtype]), n, k)) if dtype in DTYPES else 0


@functools.cache
def _native() -> Any:
    return native.load()


@functools.cache
def slow() -> frozenset[torch.dtype]:
    """The 16-bit floats that this CPU has no arithmetic for; none where that can't be told."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), None)
    if words is None:  # not an x86
        return frozenset()
    return frozenset(dtype for dtype, flags in _FLAGS.items() if not flags & set(words))
