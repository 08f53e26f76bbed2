"""Pooled rows of embedding tables on the CPU, written straight to where they belong."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from dovetail.coll.dtypes import DTYPES
from dovetail.hw.cpu import native
from dovetail.ops.calls import EmbeddingAllToAll

#: Lookups below which a second thread costs more than it gives.
_FEW_LOOKUPS = 4096
#: From so many on, torch's threads share them.
MANY_LOOKUPS = 2 * _FEW_LOOKUPS


def pool(c: EmbeddingAllToAll, first: int, end: int, out: torch.Tensor) -> None:
    """Samples [first, end) of the batch into `out`, [samples, tables, dim]; its samples may lie apart.

    Uses as many threads as torch does (`torch.set_num_threads`). Row numbers are known to be in range.
    """
    Pooling(c)(first, end, out.data_ptr(), out.stride(0) if out.shape[0] > 1 else 0)


class Pooling:
    """The bags of a call, to be pooled part by part."""

    __slots__ = ("_given", "_most", "_row_bytes", "_scales")

    def __init__(self, c: EmbeddingAllToAll) -> None:
        self._given = (
            int(DTYPES[c.dtype]), c.values.dtype is torch.int64, c.mode == "mean", [w.data_ptr() for w in c.weights],
            c.dim, c.values.data_ptr(), c.offsets.data_ptr(), c.batch,
        )  # fmt: skip
        self._scales = 0 if c.per_sample_weights is None else c.per_sample_weights.data_ptr()
        self._most = min(torch.get_num_threads(), max(1, c.values.numel() // _FEW_LOOKUPS))
        self._row_bytes = c.dtype.itemsize

    def __call__(self, first: int, end: int, address: int, stride: int) -> None:
        """Samples [first, end), the first of them to `address`, the next ones `stride` items apart."""
        threads = min(self._most, max(1, end - first))
        if threads == 1:
            _pool(self._given, first, end, self._scales, address, stride)
            return
        cuts = [first + (end - first) * k // threads for k in range(threads + 1)]
        step = stride * self._row_bytes
        parts = [
            _threads().submit(_pool, self._given, a, b, self._scales, address + (a - first) * step, stride)
            for a, b in itertools.pairwise(cuts[1:])
        ]
        try:
            _pool(self._given, cuts[0], cuts[1], self._scales, address, stride)
        finally:
            for part in parts:
                part.result()


def _pool(given: tuple[Any, ...], first: int, end: int, scales: int, address: int, stride: int) -> None:
    _native().pool(*given, first, end, scales, address, stride)


_native = cache(native.load)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1), thread_name_prefix="dovetail-pool")


os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has none of its parent's threads
