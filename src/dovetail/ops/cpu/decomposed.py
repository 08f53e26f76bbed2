"""Transport `decomposed` on the CPU: the plain operator in chunks, each followed by its own asynchronous collective."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from dovetail.coll import api
from dovetail.ops import calls
from dovetail.ops.cpu.product import mm, ready
from dovetail.ops.cpu.shared import CPU
from dovetail.ops.group import OpsGroup

_CHUNKS = 4


def gemv_all_reduce(g: OpsGroup, c: calls.GemvAllReduce) -> torch.Tensor:
    """Columns in chunks: a chunk is summed over ranks while the next is computed."""
    g.agree(c.text)
    cuts = [c.n * k // _CHUNKS for k in range(_CHUNKS + 1)]
    parts, works = [], []
    for a, b in itertools.pairwise(cuts):
        parts.append(mm(c.x, c.w[a:b]))
        works.append(api.all_reduce(parts[-1], group=g.group, async_op=True))
    for work in works:
        work.wait()
    return torch.cat(parts, 1)


def all_gather_matmul(g: OpsGroup, c: calls.AllGatherMatmul) -> torch.Tensor:
    """The rank's own rows are multiplied while the others' arrive."""
    g.agree(c.text)
    rank, m = g.group.rank, c.rows
    every = torch.empty((m * g.group.size, c.k), dtype=c.dtype, device=CPU)
    work = api.all_gather_into_tensor(every, c.x, group=g.group, async_op=True)
    out = torch.empty((m * g.group.size, c.n), dtype=c.dtype, device=CPU)
    multiply = ready(c.w, m * g.group.size)
    multiply(c.x, out[rank * m : (rank + 1) * m])
    work.wait()
    for a, b in ((0, rank * m), ((rank + 1) * m, out.shape[0])):
        if a < b:
            multiply(every[a:b], out[a:b])
    return out


def matmul_reduce_scatter(g: OpsGroup, c: calls.MatmulReduceScatter) -> torch.Tensor:
    """Each rank's rows in chunks: a chunk is summed over ranks while the next is computed."""
    g.agree(c.text)
    size, m = g.group.size, c.rows // g.group.size
    x = c.x.view(size, m, c.k)
    out = torch.empty((m, c.n), dtype=c.dtype, device=CPU)
    cuts = [m * k // _CHUNKS for k in range(_CHUNKS + 1)]
    works, held, multiply = [], [], ready(c.w, c.rows)
    for a, b in itertools.pairwise(cuts):
        if a < b:
            part = torch.empty((size, b - a, c.n), dtype=c.dtype, device=CPU)
            for d in range(size):
                multiply(x[d, a:b], part[d])
            held.append(part)
            works.append(api.reduce_scatter_tensor(out[a:b], part.view(-1, c.n), group=g.group, async_op=True))
    for work in works:
        work.wait()
    return out


FORWARD: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemvAllReduce: gemv_all_reduce,
    calls.AllGatherMatmul: all_gather_matmul,
    calls.MatmulReduceScatter: matmul_reduce_scatter,
}
