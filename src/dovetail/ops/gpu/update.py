"""Updates of embedding tables in place, from the gradients of pooled bags: no gradient of a table's size is made.

Owns the way from bags to sorted rows, in torch, without a synchronisation; the arithmetic is in `kernels/embedding.py`.
The result does not depend on the order in which programs run. On torch's current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_DEPTH = 8
_WARPS = 4
#: Programs per multiprocessor: nobody waits for anybody here.
_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True, slots=True)
class SortedBags:
    """The values of bags, ordered by the row of weights that they name."""

    addresses: torch.Tensor  #: of each value's row; 0 for a row number out of range
    order: torch.Tensor  #: which value it is
    bags: torch.Tensor  #: row of the gradient [batch * tables, dim]
    scales: torch.Tensor | None
    tables: torch.Tensor  #: the table of each value


def sort_bags(
    weights: Sequence[torch.Tensor],
    values: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = "sum",
    per_sample_weights: torch.Tensor | None = None,
) -> SortedBags:
    """Orders the values of a call of `embedding_all_to_all` for an update of its tables."""
    many, num_tables = values.numel(), len(weights)
    batch = (offsets.numel() - 1) // max(num_tables, 1)
    lengths = offsets[1:] - offsets[:-1]
    place = torch.arange(lengths.numel(), device=values.device)
    bag = torch.repeat_interleave(place, lengths, output_size=many)
    table = bag // max(batch, 1)
    bases = torch.tensor([w.data_ptr() for w in weights], dtype=torch.int64, device=values.device)
    sizes = torch.tensor([w.shape[0] for w in weights], dtype=torch.int64, device=values.device)
    row = values.to(torch.int64)
    there = (row >= 0) & (row < sizes[table])
    row_bytes = weights[0].shape[1] * weights[0].dtype.itemsize
    addresses, order = torch.sort(torch.where(there, bases[table] + row * row_bytes, 0), stable=True)
    scales = None
    if mode == "mean":
        scales = 1.0 / lengths.to(torch.float32).clamp(min=1)[bag]
    if per_sample_weights is not None:
        own = per_sample_weights.to(torch.float32)
        scales = own if scales is None else scales * own
    rows = bag % max(batch, 1) * num_tables + table
    return SortedBags(addresses, order, rows[order], None if scales is None else scales[order], table[order])


def sgd_update(weights: Sequence[torch.Tensor], bags: SortedBags, grad: torch.Tensor, lr: float) -> None:
    """row -= lr * gradient for every row that some bag has.

    Args:
        weights: this rank's tables, changed in place; contiguous, of one dim and dtype.
        grad: [batch, tables, dim], contiguous: the gradient of every bag of these tables.
    """
    from dovetail.ops.kernels.embedding import sgd_update_kernel

    _launch(sgd_update_kernel, weights, bags, grad, (), (lr,))


def rowwise_adagrad_update(
    weights: Sequence[torch.Tensor],
    states: Sequence[torch.Tensor],
    bags: SortedBags,
    grad: torch.Tensor,
    lr: float,
    eps: float = 1e-8,
) -> None:
    """state += mean(gradient ** 2); row -= lr * gradient / (sqrt(state) + eps), for every row that some bag has.

    Args:
        states: fp32, a number per row of each table, changed in place.
    """
    from dovetail.ops.kernels.embedding import rowwise_adagrad_update_kernel

    bases = torch.tensor([s.data_ptr() for s in states], dtype=torch.int64, device=grad.device)
    first = torch.tensor([w.data_ptr() for w in weights], dtype=torch.int64, device=grad.device)
    row_bytes = weights[0].shape[1] * weights[0].dtype.itemsize
    places = bases[bags.tables] + (bags.addresses - first[bags.tables]) // row_bytes * 4
    _launch(rowwise_adagrad_update_kernel, weights, bags, grad, (places,), (lr, eps))


def _launch(
    kernel: Any,
    weights: Sequence[torch.Tensor],
    bags: SortedBags,
    grad: torch.Tensor,
    more: tuple[torch.Tensor, ...],
    rates: tuple[float, ...],
) -> None:
    import triton
    import triton.language as tl

    many, dim = bags.addresses.numel(), weights[0].shape[1]
    if not many or not dim:
        return
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    soft = bool(triton.knobs.runtime.interpret)
    if soft:
        programs = 2
    else:
        programs = _PER_MULTIPROCESSOR * torch.cuda.get_device_properties(grad.device).multi_processor_count
    scales = grad if bags.scales is None else bags.scales
    kernel[(min(programs, many),)](
        bags.addresses, *more, bags.bags, scales, grad.contiguous(), *rates, many, dim,
        kinds[weights[0].dtype], max(16, 1 << (dim - 1).bit_length()), _DEPTH, bags.scales is not None, soft,
        num_warps=_WARPS,
    )  # fmt: skip
