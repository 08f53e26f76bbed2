"""Arguments of `embedding_all_to_all` as the kernels of `store` take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.errors import NotSupported

#: What kernels multiply and pool.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_bags(
    weights: Sequence[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, batch: int, mode: str,
    scales: torch.Tensor | None, world: int,
) -> None:  # fmt: skip
    """Raises `ValueError` or `NotSupported` for arguments that say no batch of bags, or one that can't be pooled."""
    if not weights:
        raise ValueError("weights has no table: every rank pools at least one")
    if mode not in ("sum", "mean"):
        raise ValueError(f"mode is 'sum' or 'mean', not {mode!r}")
    if batch % world:
        raise ValueError(f"a batch of {batch} can't be shared equally by {world} ranks")
    if offsets.numel() != len(weights) * batch + 1:
        raise ValueError(f"offsets has {offsets.numel()} numbers, not {len(weights)} tables * {batch} + 1")
    for t, w in enumerate(weights):
        if w.dim() != 2 or w.shape[1] != weights[0].shape[1] or w.dtype != weights[0].dtype:
            raise ValueError(f"weights[{t}] is {w.dtype} {tuple(w.shape)}: tables have one dim and dtype")
        check_table(t, w)
        if w.dtype not in DTYPES:
            raise NotSupported(f"weights are {w.dtype}: the kernels pool {', '.join(str(d) for d in DTYPES)}")
    if scales is not None and scales.shape != values.shape:
        raise ValueError(f"per_sample_weights is {tuple(scales.shape)}, values {tuple(values.shape)}")


def check_table(number: int, table: torch.Tensor) -> None:
    """Raises `ValueError` for a table of embeddings that the kernels can't read."""
    if not table.is_contiguous() or table.data_ptr() % 16:
        raise ValueError(
            f"weights[{number}] must be contiguous and begin at a multiple of 16 bytes for transport 'store': clone it"
        )
