"""What embedding tables get from a gradient: rows of the lookups, never a tensor as large as a table.

The gradient of a pooled bag is that of each of its rows. It goes back to the table's rank (`exchange`), and there
either into sparse gradients or straight into the table (`update`), by SGD or row-wise Adagrad.
"""

from __future__ import annotations

import itertools

import torch

from dovetail.hw.world import Group
from dovetail.ops import unfused
from dovetail.ops.group import ops_group

SGD, ADAGRAD = "sgd", "rowwise_adagrad"


def exchange(group: Group, grad: torch.Tensor, tables: int) -> torch.Tensor:
    """From [local batch, all tables, dim] on every rank to this rank's [tables, batch, dim]."""
    local, total, dim = grad.shape
    text = f"the gradient of embedding_all_to_all ({local} samples, {total} tables, dim {dim}, {grad.dtype})"
    if not group.world.local:
        every: list[int] = unfused.gathered(group, torch.tensor([tables], device=grad.device)).tolist()
        return _by_collective(group, grad, every)
    g = ops_group(group)
    if not grad.is_cpu:
        return _by_collective(group, grad, [row[0] for row in g.agree(text, (tables,))])
    offset = g.blocks.offset(grad)
    if offset < 0 and group.size > 1 and grad.numel():
        here = g.scratch("grad", grad.nbytes)[: grad.nbytes].view(grad.dtype).view(grad.shape)
        here.copy_(grad)
        offset = g.blocks.offset(here)
    slots = g.agree(text, (tables, offset))
    try:
        first = sum(row[0] for row in slots[: group.rank])
        out = grad.new_empty((tables, local * group.size, dim))
        for s in range(group.size):
            there = grad if s == group.rank else g.at(s, slots[s][1], (local, total, dim), grad.dtype)
            out[:, s * local : (s + 1) * local].copy_(there[:, first : first + tables].transpose(0, 1))
        g.barrier()  # everybody has read it
    except BaseException as error:
        g.fail(error)
        raise
    return out


def _by_collective(group: Group, grad: torch.Tensor, every: list[int]) -> torch.Tensor:
    local, _, dim = grad.shape
    mine = every[group.rank]
    sent = torch.cat([part.reshape(-1) for part in torch.split(grad, every, 1)])
    splits = ((local * mine * dim,) * group.size, tuple(local * n * dim for n in every))
    flat = unfused.all_to_all_rows(group, sent, grad.new_empty(local * mine * dim * group.size), splits)
    return flat.view(group.size * local, mine, dim).transpose(0, 1).contiguous()


def bags_of(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The bag of each value."""
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(bags, offsets.diff(), output_size=values.numel())


def rows(
    bags: torch.Tensor, bag_of: torch.Tensor, offsets: torch.Tensor, mode: str, scales: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of each looked-up row, [values, dim]."""
    found = bags.reshape(-1, bags.shape[2]).index_select(0, bag_of)
    if mode == "mean":
        wide = torch.float64 if found.dtype is torch.float64 else torch.float32
        lengths = offsets.diff().index_select(0, bag_of).to(wide)[:, None]
        return (found.to(wide) / lengths).to(found.dtype)  # as going forward: a count may be too large for the dtype
    return found if scales is None else found.mul_(scales[:, None])


def scale_grads(
    bags: torch.Tensor, bag_of: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    """The gradient of each value's own weight: its row times the bag's gradient."""
    pooled = bags.reshape(-1, bags.shape[2]).index_select(0, bag_of)
    looked_up = [w.index_select(0, v) for w, v in zip(weights, _by_table(values, offsets, len(weights)), strict=True)]
    return (torch.cat(looked_up) * pooled).sum(1)


def _by_table(values: torch.Tensor, offsets: torch.Tensor, tables: int) -> list[torch.Tensor]:
    """The values of each table. Where it begins is asked of the device: one synchronisation on a GPU."""
    batch = (offsets.numel() - 1) // tables
    bounds = offsets[:: max(1, batch)].tolist() if batch else [0] * (tables + 1)
    return [values[a:b] for a, b in itertools.pairwise(bounds)]


def sparse(
    found: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Sparse gradients, one per table, with the rows as they were looked up."""
    grads, at = [], 0
    for w, v in zip(weights, _by_table(values, offsets, len(weights)), strict=True):
        part = found[at : at + v.numel()]
        grads.append(torch.sparse_coo_tensor(v[None].to(torch.int64), part, w.shape, check_invariants=False))
        at += v.numel()
    return grads


@torch.no_grad()
def update(
    weights: list[torch.Tensor],
    state: list[torch.Tensor],
    wanted: list[bool],
    found: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    optimizer: str,
    lr: float,
    eps: float,
) -> None:
    """Takes a step in place, of the tables that are `wanted`: equal rows are added up first, so it is what a dense
    gradient would give."""
    at = 0
    for t, v in enumerate(_by_table(values, offsets, len(weights))):
        part = found[at : at + v.numel()]
        at += v.numel()
        if not wanted[t]:
            continue
        # A step is one on every rank, whatever it has looked up: who needs tables as they were is told on all ranks.
        torch.autograd.graph.increment_version(weights[t])
        if not v.numel():
            continue
        unique, where = torch.unique(v.to(torch.int64), return_inverse=True)
        summed = part.new_zeros((unique.numel(), part.shape[1])).index_add_(0, where, part)
        if optimizer == SGD:
            weights[t].index_add_(0, unique, summed, alpha=-lr)
            continue
        moment = state[t].index_select(0, unique) + summed.float().square().mean(1)
        state[t].index_copy_(0, unique, moment)
        step = summed.float() / (moment.sqrt() + eps)[:, None]
        weights[t].index_add_(0, unique, step.to(weights[t].dtype), alpha=-lr)
