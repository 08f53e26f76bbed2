"""Collectives: choose a variant, bind it once, run it; c10d's names and keywords."""

from dovetail.coll.api import (
    all_gather_into_tensor,
    all_reduce,
    all_to_all_single,
    arm,
    barrier,
    broadcast,
    explain,
    gather,
    reduce_scatter_tensor,
    scatter,
    stats,
    variants,
)
from dovetail.coll.session import empty, finalize, heap, init, new_group, zeros
from dovetail.coll.spawn import launch
from dovetail.coll.work import Ticket, Work
from dovetail.plan.step import ReduceOp

__all__ = [
    "ReduceOp",
    "Ticket",
    "Work",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "arm",
    "barrier",
    "broadcast",
    "empty",
    "explain",
    "finalize",
    "gather",
    "heap",
    "init",
    "launch",
    "new_group",
    "reduce_scatter_tensor",
    "scatter",
    "stats",
    "variants",
    "zeros",
]
