"""Plans: every movement of data as a table. Python and NumPy only; no torch, no hardware."""

from dovetail.plan.plan import (
    ABSENT,
    AT_RUN,
    Buffer,
    Counts,
    External,
    Param,
    Partition,
    Plan,
    Queue,
    Region,
    Role,
    Signal,
    SignalKind,
    Space,
)
from dovetail.plan.step import DType, Op, ReduceOp, Step

__all__ = [
    "ABSENT",
    "AT_RUN",
    "Buffer",
    "Counts",
    "DType",
    "External",
    "Op",
    "Param",
    "Partition",
    "Plan",
    "Queue",
    "ReduceOp",
    "Region",
    "Role",
    "Signal",
    "SignalKind",
    "Space",
    "Step",
]
