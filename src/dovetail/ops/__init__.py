"""Fused operators: a computation and the collective that depends on it as one, on CPUs and GPUs.

`dovetail.ops.reference` has each of them in plain torch; `torch.ops.dovetail` has them as torch operators.
"""

from dovetail.ops.api import (
    all_gather_matmul,
    check,
    embedding_all_to_all,
    explain,
    gemm_all_to_all,
    gemv_all_reduce,
    matmul_reduce_scatter,
)
from dovetail.ops.modules import EmbeddingAllToAll, ExpertParallelLinear, RowParallelLinear
from dovetail.ops.names import name_of

__all__ = [
    "EmbeddingAllToAll",
    "ExpertParallelLinear",
    "RowParallelLinear",
    "all_gather_matmul",
    "check",
    "embedding_all_to_all",
    "explain",
    "gemm_all_to_all",
    "gemv_all_reduce",
    "matmul_reduce_scatter",
    "name_of",
]
