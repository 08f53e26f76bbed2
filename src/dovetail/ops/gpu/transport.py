"""Transports on GPUs, behind the seam of `ops.run`: the kernels of a group and a device, made once.

Every call begins with the exchange of `OpsGroup.agree`, as on the CPU, also while a graph is being captured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dovetail.ops import calls
from dovetail.ops.gpu import sliced
from dovetail.ops.group import OpsGroup

if TYPE_CHECKING:
    from dovetail.ops.gpu.store import Store


def store_of(g: OpsGroup, device: torch.device) -> Store:
    """The kernels of this group on a device. Made by all ranks at their first call."""
    from dovetail.ops.gpu.store import Store

    key = ("store", device)
    if key not in g.known:
        g.known[key] = Store(g.group, device)
    found: Store = g.known[key]
    return found


def check(g: OpsGroup, device: torch.device) -> None:
    """Raises what an earlier kernel reported: a late peer, a row number out of range."""
    for kind in ("store", "sliced"):
        if (found := g.known.get((kind, device))) is not None:
            found.check()


def gemm_all_to_all(g: OpsGroup, c: calls.GemmAllToAll) -> torch.Tensor:
    """Tiles go straight to the peer's output."""
    g.agree(c.text, (), (*c.send, *c.receive))
    return store_of(g, c.device).gemm_all_to_all(c.x, c.w, c.send, c.receive)


def gemv_all_reduce(g: OpsGroup, c: calls.GemvAllReduce) -> torch.Tensor:
    """Tiles go to their owner, sums to everybody."""
    g.agree(c.text)
    return store_of(g, c.device).gemv_all_reduce(c.x, c.w)


def all_gather_matmul(g: OpsGroup, c: calls.AllGatherMatmul) -> torch.Tensor:
    """Rows are read from the peers."""
    g.agree(c.text)
    return store_of(g, c.device).all_gather_matmul(c.x, c.w)


def matmul_reduce_scatter(g: OpsGroup, c: calls.MatmulReduceScatter) -> torch.Tensor:
    """Partial tiles go to their owner."""
    g.agree(c.text)
    return store_of(g, c.device).matmul_reduce_scatter(c.x, c.w)


def embedding_all_to_all(g: OpsGroup, c: calls.EmbeddingAllToAll) -> torch.Tensor:
    """Bags go straight to the sample's rank. Row numbers are looked at by the kernel: `Store.check` raises."""
    every = [row[0] for row in g.agree(c.text, (len(c.weights),))]
    return store_of(g, c.device).embedding_all_to_all(
        c.weights, c.values, c.offsets, c.batch, c.mode, c.per_sample_weights, every
    )


STORE: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemmAllToAll: gemm_all_to_all,
    calls.GemvAllReduce: gemv_all_reduce,
    calls.AllGatherMatmul: all_gather_matmul,
    calls.MatmulReduceScatter: matmul_reduce_scatter,
    calls.EmbeddingAllToAll: embedding_all_to_all,
}
DMA: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemmAllToAll: sliced.gemm_all_to_all,
    calls.MatmulReduceScatter: sliced.matmul_reduce_scatter,
    calls.EmbeddingAllToAll: sliced.embedding_all_to_all,
}
DECOMPOSED: dict[type[calls.Call], Callable[[OpsGroup, Any], torch.Tensor]] = {
    calls.GemmAllToAll: partial(sliced.gemm_all_to_all, fused=False),
    calls.MatmulReduceScatter: partial(sliced.matmul_reduce_scatter, fused=False),
}
