"""The operators as modules: parameters of this rank, a group, a transport."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dovetail.ops import api
from dovetail.ops.backward import ADAGRAD
from dovetail.ops.choose import AUTO
from dovetail.ops.group import ops_group
from dovetail.ops.names import name_of, named


class EmbeddingAllToAll(nn.Module):
    """This rank's embedding tables, pooled for the samples of all ranks: input values and bags, output
    [batch / world, tables of all ranks, dim]. Made by all ranks of the group together.

    Args:
        rows: of each of this rank's tables.
        dim: of every table of every rank.
        mode: "sum" or "mean".
        optimizer: "" for sparse gradients; "sgd" or "rowwise_adagrad" to update the tables in place in the backward
            pass, with `lr` and `eps`.
    """

    def __init__(
        self,
        rows: Sequence[int],
        dim: int,
        *,
        mode: str = "sum",
        optimizer: str = "",
        lr: float = 0.01,
        eps: float = 1e-8,
        group: Any = None,
        transport: str = AUTO,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(dim, "dim")
        self.mode, self.optimizer, self.lr, self.eps, self.transport = mode, optimizer, lr, eps, transport
        self.group_name = name_of(group)
        where = {"device": device, "dtype": dtype}
        self.weights = nn.ParameterList([nn.Parameter(torch.empty((n, dim), **where)) for n in rows])
        for t, n in enumerate(rows):
            state = torch.zeros(n if optimizer == ADAGRAD else 0, dtype=torch.float32, device=device)
            self.register_buffer(f"state_{t}", state)
        self.num_tables = self._count(len(rows), dim)
        self.reset_parameters()

    def _count(self, tables: int, dim: int) -> int:
        ranks = named(self.group_name)
        if not ranks.world.local:
            from dovetail.ops import unfused

            return int(unfused.gathered(ranks, torch.tensor([tables])).sum())
        return sum(row[0] for row in ops_group(ranks).agree(f"EmbeddingAllToAll(dim {dim})", (tables,)))

    def reset_parameters(self) -> None:
        """As torch.nn.EmbeddingBag: normal."""
        for w in self.weights:
            nn.init.normal_(w)

    @property
    def state(self) -> list[torch.Tensor]:
        """Of the optimizer, one tensor per table; none without row-wise Adagrad."""
        if self.optimizer != ADAGRAD:
            return []
        return [getattr(self, f"state_{t}") for t in range(len(self.weights))]

    def forward(
        self,
        values: torch.Tensor,
        offsets: torch.Tensor | None = None,
        *,
        lengths: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `dovetail.ops.embedding_all_to_all`."""
        return api.embedding_all_to_all(
            list(self.weights), values, offsets, lengths=lengths, mode=self.mode, per_sample_weights=per_sample_weights,
            num_tables=self.num_tables, optimizer=self.optimizer, state=self.state, lr=self.lr, eps=self.eps,
            group=self.group_name, transport=self.transport,
        )  # fmt: skip


class _Linear(nn.Module):
    """A weight [n, k] as torch.nn.Linear's, without a bias unless a subclass has one."""

    def __init__(self, n: int, k: int, group: Any, transport: str, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.group_name, self.transport = name_of(group), transport
        _check(n, "out_features")
        self.weight = nn.Parameter(torch.empty((n, k), device=device, dtype=dtype))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def extra_repr(self) -> str:
        """Sizes, as torch.nn.Linear shows them."""
        n, k = self.weight.shape
        return f"in_features={k}, out_features={n}, transport={self.transport!r}"


def _check(number: Any, name: str) -> None:
    """Refuses what is no size, with the name that the caller knows."""
    if not hasattr(number, "__index__"):
        raise TypeError(f"{name} must be a whole number, not {number!r}")
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")


class RowParallelLinear(_Linear):
    """A linear layer whose input features are shared among ranks, for decoding: every rank gets the whole output.

    Args:
        in_features: of all ranks together.
        out_features: of the output.
        bias: added once, after the sum; the same on every rank.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        group: Any = None,
        transport: str = AUTO,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, "in_features")
        size = named(name_of(group)).size
        if in_features % size:
            raise ValueError(f"in_features {in_features} can't be shared equally by {size} ranks")
        super().__init__(out_features, in_features // size, group, transport, device, dtype)
        self.in_features, self.num_ranks = in_features, size
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None

    def extra_repr(self) -> str:
        """Sizes of the layer, and how many ranks share its input features."""
        n, k = self.weight.shape
        sizes = f"in_features={self.in_features}, out_features={n}, bias={self.bias is not None}"
        return f"{sizes}, {k} input features on each of {self.num_ranks} ranks, transport={self.transport!r}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features / world], at most 64 rows in all."""
        k = self.weight.shape[1]
        if x.dim() == 0 or x.shape[-1] != k:
            part = f"{k}, this rank's part of {self.in_features} input features"
            raise ValueError(f"x must have a last dimension of {part}; its shape is {tuple(x.shape)}")
        flat = x.reshape(-1, x.shape[-1])
        out = api.gemv_all_reduce(flat, self.weight, group=self.group_name, transport=self.transport)
        out = out.reshape(*x.shape[:-1], out.shape[-1])
        return out if self.bias is None else out + self.bias


class ExpertParallelLinear(_Linear):
    """The last linear layer of this rank's expert, whose rows go back to the tokens' ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Any = None,
        transport: str = AUTO,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, "in_features")
        super().__init__(out_features, in_features, group, transport, device, dtype)

    def forward(self, x: torch.Tensor, output_splits: Any = None, input_splits: Any = None) -> torch.Tensor:
        """As `dovetail.ops.gemm_all_to_all`."""
        return api.gemm_all_to_all(
            x, self.weight, output_splits, input_splits, group=self.group_name, transport=self.transport
        )
