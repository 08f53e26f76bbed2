"""torch dtypes and reduction names to the plan's own."""

from __future__ import annotations

from typing import Any

import torch

from dovetail.errors import NotSupported
from dovetail.plan.step import DType, ReduceOp

DTYPES: dict[torch.dtype, DType] = {
    torch.uint8: DType.UINT8,
    torch.int8: DType.INT8,
    torch.int16: DType.INT16,
    torch.int32: DType.INT32,
    torch.int64: DType.INT64,
    torch.uint16: DType.UINT16,
    torch.uint32: DType.UINT32,
    torch.uint64: DType.UINT64,
    torch.bool: DType.BOOL,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.BFLOAT16,
    torch.float32: DType.FLOAT32,
    torch.float64: DType.FLOAT64,
    torch.float8_e4m3fn: DType.FLOAT8_E4M3FN,
    torch.float8_e5m2: DType.FLOAT8_E5M2,
    torch.float8_e4m3fnuz: DType.FLOAT8_E4M3FNUZ,
    torch.float8_e5m2fnuz: DType.FLOAT8_E5M2FNUZ,
}

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def reduce_op(op: Any) -> ReduceOp:
    """Ours for a torch ReduceOp, one of ours, or a name such as "sum"."""
    if isinstance(op, ReduceOp):
        return op
    name = op if isinstance(op, str) else str(getattr(op, "op", op)).rpartition(".")[2]
    try:
        return ReduceOp[name.upper()]
    except KeyError:
        allowed = ", ".join(o.name for o in ReduceOp)
        raise NotSupported(f"no reduction {name!r}; there are {allowed}") from None


def reducible(dtype: torch.dtype, op: ReduceOp) -> DType:
    """The plan's dtype; raises `NotSupported` or `TypeError` for what can't be reduced."""
    found = DTYPES.get(dtype)
    if found is None:
        raise NotSupported(f"{dtype} can't be reduced; these can: {', '.join(str(d) for d in DTYPES)}")
    if op in _BITWISE and (dtype.is_floating_point):
        raise TypeError(f"{op.name} combines bits; it takes integers and bool, not {dtype}")
    if op is ReduceOp.AVG and dtype is torch.bool:
        raise TypeError("AVG of bool has no meaning; use MAX for 'any', MIN for 'all'")
    return found
