"""Pooled rows of embedding tables on the CPU, written straight to where they belong."""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from dovetail.coll.dtypes import DTYPES
from dovetail.hw.cpu import native
from dovetail.ops.calls import EmbeddingAllToAll

#: Lookups below which a second thread costs more than it gives.
_FEW_LOOKUPS = 4096


def pool(c: EmbeddingAllToAll, first: int, end: int, out: torch.Tensor) -> None:
    """Samples [first, end) of the batch into `out`, [samples, tables, dim]; its samples may lie apart.

    Uses as many threads as torch does (`torch.set_num_threads`). Row numbers are known to be in range.
    """
    threads = min(torch.get_num_threads(), max(1, c.values.numel() // _FEW_LOOKUPS), max(1, end - first))
    if threads == 1:
        _pool(c, first, end, out)
        return
    cuts = [first + (end - first) * k // threads for k in range(threads + 1)]
    parts = [_threads().submit(_pool, c, a, b, out[a - first :]) for a, b in itertools.pairwise(cuts[1:])]
    try:
        _pool(c, cuts[0], cuts[1], out)
    finally:
        for part in parts:
            part.result()


def _pool(c: EmbeddingAllToAll, first: int, end: int, out: torch.Tensor) -> None:
    scales = c.per_sample_weights
    native.load().pool(
        int(DTYPES[c.dtype]), c.values.dtype is torch.int64, c.mode == "mean", [w.data_ptr() for w in c.weights], c.dim,
        c.values.data_ptr(), c.offsets.data_ptr(), c.batch, first, end, 0 if scales is None else scales.data_ptr(),
        out.data_ptr(), out.stride(0) if out.shape[0] > 1 else 0,
    )  # fmt: skip


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=max(1, torch.get_num_threads() - 1), thread_name_prefix="dovetail-pool")


os.register_at_fork(after_in_child=_threads.cache_clear)  # the child has none of its parent's threads
