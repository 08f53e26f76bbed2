"""FBGEMM's table-batched pooled lookup on the CPU (wheel ``fbgemm-gpu-cpu``), for embeddings beside torch's and ours.

No dependency of ours: it comes in one build per version of torch, and a build for another one does not load.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch

PACKAGE = "fbgemm_gpu"


@functools.cache
def missing() -> str | None:
    """Why it can't be used here; None if it can."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "fbgemm-gpu-cpu is not installed"
    try:
        _module()
    except Exception as error:
        return f"fbgemm-gpu-cpu can't be loaded with torch {torch.__version__}: {str(error).splitlines()[0]}"
    return None


def _module() -> Any:
    return importlib.import_module(f"{PACKAGE}.split_table_batched_embeddings_ops_training")


def pooled(
    tables: Sequence[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A lookup in copies of `tables`: [batch, tables, dim], sums of bags. Raises what FBGEMM raises for a dtype."""
    training = _module()
    types = importlib.import_module(f"{PACKAGE}.split_embedding_configs").SparseType
    kinds = {torch.float32: types.FP32, torch.float16: types.FP16, torch.bfloat16: types.BF16}
    dim = tables[0].shape[1]
    kind = kinds[tables[0].dtype]
    specs = [
        (len(w), dim, training.EmbeddingLocation.HOST, training.ComputeDevice.CPU) for w in tables
    ]  # fmt: skip
    lookup = training.SplitTableBatchedEmbeddingBagsCodegen(
        specs, weights_precision=kind, output_dtype=kind, pooling_mode=training.PoolingMode.SUM, device="cpu"
    )
    for there, here in zip(lookup.split_embedding_weights(), tables, strict=True):
        there.data.copy_(here)

    def run() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = lookup(values, offsets)
        return found.view(-1, len(tables), dim)

    return run
