"""The operators as two calls: torch's operator, then a collective of ours. The baseline that `auto` may always take.

Works on any device and group that the collectives serve, across hosts too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dovetail.coll import api
from dovetail.hw.world import Group
from dovetail.ops import calls
from dovetail.ops.group import OpsGroup, ops_group
from dovetail.ops.repeat import Same


def gemm_all_to_all(g: Group, c: calls.GemmAllToAll) -> torch.Tensor:
    """A product, then its rows to where they belong."""
    out = c.x.new_empty((sum(c.receive), c.n))
    return all_to_all_rows(g, torch.mm(c.x, c.w.t()), out, None if c.even else (c.receive, c.send))


def all_to_all_rows(
    g: Group, y: torch.Tensor, out: torch.Tensor, splits: tuple[tuple[int, ...], tuple[int, ...]] | None
) -> torch.Tensor:
    """Rows of `y` to the ranks; `splits`: received, sent. Returns `out`."""
    if splits is None:
        api.all_to_all_single(out, y, group=g)
    else:
        api.all_to_all_single(out, y, list(splits[0]), list(splits[1]), group=g)
    return out


def gemv_all_reduce(g: Group, c: calls.GemvAllReduce) -> torch.Tensor:
    """A product of parts of the inner dimension, then the sum over ranks."""
    out = torch.mm(c.x, c.w.t())
    api.all_reduce(out, group=g)
    return out


def all_gather_matmul(g: Group, c: calls.AllGatherMatmul) -> torch.Tensor:
    """Everybody's rows, then one product."""
    return torch.mm(gathered(g, c.x), c.w.t())


def gathered(g: Group, x: torch.Tensor) -> torch.Tensor:
    """Everybody's x, one after the other."""
    every = x.new_empty((x.shape[0] * g.size, *x.shape[1:]))
    api.all_gather_into_tensor(every, x, group=g)
    return every


def matmul_reduce_scatter(g: Group, c: calls.MatmulReduceScatter) -> torch.Tensor:
    """A product of parts of the inner dimension, then the sum over ranks of this rank's rows."""
    out = c.x.new_empty((c.rows // g.size, c.n))
    api.reduce_scatter_tensor(out, torch.mm(c.x, c.w.t()), group=g)
    return out


def embedding_all_to_all(g: Group, c: calls.EmbeddingAllToAll, every: Sequence[int]) -> torch.Tensor:
    """torch's pooled lookup, table by table, then everybody's samples to their ranks.

    `every`: how many tables each rank has.
    """
    cuts = c.offsets[:: c.batch].tolist() if c.batch else [0] * (len(c.weights) + 1)
    pooled = torch.stack([bags(c, t, *cuts[t : t + 2]) for t in range(len(c.weights))], 1)  # [batch, tables, dim]
    local = c.batch // g.size
    if len(set(every)) == 1:
        parts = all_to_all_rows(g, pooled, torch.empty_like(pooled), None).view(g.size, local, every[0], c.dim)
        return parts.transpose(0, 1).reshape(local, sum(every), c.dim)
    received = [local * n * c.dim for n in every]
    flat = pooled.new_empty(sum(received))
    sent = (local * len(c.weights) * c.dim,) * g.size
    all_to_all_rows(g, pooled.view(-1), flat, (tuple(received), sent))
    pieces = [p.view(local, n, c.dim) for p, n in zip(torch.split(flat, received), every, strict=True)]
    return torch.cat(pieces, 1)


def bags(c: calls.EmbeddingAllToAll, t: int, first: int, end: int) -> torch.Tensor:
    """The pooled rows of one table for the whole batch, by torch; its values are those from `first` to `end`."""
    offsets = c.offsets[t * c.batch : (t + 1) * c.batch + 1]
    scales = None if c.per_sample_weights is None else c.per_sample_weights[first:end]
    return torch.nn.functional.embedding_bag(
        c.values[first:end].to(torch.int64), c.weights[t], offsets - first, mode=c.mode, per_sample_weights=scales,
        include_last_offset=True,
    )  # fmt: skip


PRODUCTS: dict[type[calls.Call], Callable[[Group, Any], torch.Tensor]] = {
    calls.GemmAllToAll: gemm_all_to_all,
    calls.GemvAllReduce: gemv_all_reduce,
    calls.AllGatherMatmul: all_gather_matmul,
    calls.MatmulReduceScatter: matmul_reduce_scatter,
}


def run(g: Group, c: calls.Call) -> torch.Tensor:
    """The operator, then the collective."""
    splits = (*c.send, *c.receive) if isinstance(c, calls.GemmAllToAll) else ()
    if isinstance(c, calls.EmbeddingAllToAll):
        return embedding_all_to_all(g, c, _tables(g, c))
    if g.world.local:
        ops_group(g).agree(c.text, (), splits)  # every call begins with it: who refuses its arguments says so here
    return PRODUCTS[type(c)](g, c)


class Repeated:
    """A product whose like was run before: the ranks meet in few steps, to say that they make the same call."""

    def __init__(self, same: Same, group: Group, call: calls.Product) -> None:
        call.forget()
        self._same, self._group, self._call, self._run = same, group, call, PRODUCTS[type(call)]

    @staticmethod
    def of(g: OpsGroup, c: calls.Product) -> Repeated | None:
        """For a call that was just made; None if it can't be, or if its splits may be others each time."""
        if (splits := c.fixed_splits) is None:
            return None
        same = g.same(c.text, (), splits)
        return None if same is None else Repeated(same, g.group, copy.copy(c))

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        """None, and nothing was done, if it can't be done like that any more."""
        if self._same.is_over:
            return None
        self._same.meet()
        call = self._call
        call.x, call.w = x, w
        try:
            return self._run(self._group, call)
        finally:
            call.forget()


def _tables(g: Group, c: calls.EmbeddingAllToAll) -> list[int]:
    mine = len(c.weights)
    if g.world.local:
        return [row[0] for row in ops_group(g).agree(c.text, (mine,))]
    found: list[int] = gathered(g, torch.tensor([mine], device=c.device)).tolist()
    return found
