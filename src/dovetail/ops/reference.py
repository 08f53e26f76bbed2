"""Each operator in plain torch, over the arguments of all ranks: what the fused ones are compared with.

Every function takes one argument per rank and returns every rank's result. Sums are those of our collectives: partial
products in the dtype, added up in the order of ranks in fp32 (fp64 for fp64), rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def gemm_all_to_all(xs: Tensors, ws: Tensors, sends: Sequence[Sequence[int]] | None = None) -> list[torch.Tensor]:
    """`sends[i][j]`: rows from rank i to rank j; by default equal pieces."""
    world = len(xs)
    if sends is None:
        sends = [[x.shape[0] // world] * world for x in xs]
    pieces = [torch.split(x @ w.t(), list(send)) for x, w, send in zip(xs, ws, sends, strict=True)]
    return [torch.cat([pieces[i][j] for i in range(world)]) for j in range(world)]


def gemv_all_reduce(xs: Tensors, ws: Tensors) -> list[torch.Tensor]:
    """The same sum for every rank."""
    return [_sum([x @ w.t() for x, w in zip(xs, ws, strict=True)])] * len(xs)


def all_gather_matmul(xs: Tensors, ws: Tensors) -> list[torch.Tensor]:
    """All rows with each rank's w."""
    return [torch.cat(list(xs)) @ w.t() for w in ws]


def matmul_reduce_scatter(xs: Tensors, ws: Tensors) -> list[torch.Tensor]:
    """The sum, cut into the ranks' rows."""
    return list(_sum([x @ w.t() for x, w in zip(xs, ws, strict=True)]).chunk(len(xs)))


def embedding_all_to_all(
    weights: Sequence[Tensors],
    values: Tensors,
    offsets: Tensors,
    *,
    mode: str = "sum",
    per_sample_weights: Tensors | None = None,
) -> list[torch.Tensor]:
    """Every table's pooled bags, side by side, cut into the ranks' samples."""
    pooled = []
    for r, tables in enumerate(weights):
        batch = (offsets[r].numel() - 1) // len(tables)
        for t, w in enumerate(tables):
            bounds = offsets[r][t * batch : (t + 1) * batch + 1]
            part = slice(int(bounds[0]), int(bounds[-1]))
            scales = None if per_sample_weights is None else per_sample_weights[r][part]
            bags = torch.nn.functional.embedding_bag(
                values[r][part], w, bounds - bounds[0], mode=mode, per_sample_weights=scales, include_last_offset=True
            )
            pooled.append(bags)
    return list(torch.stack(pooled, 1).chunk(len(weights)))


def _sum(parts: Tensors) -> torch.Tensor:
    wide = torch.float64 if parts[0].dtype is torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)
