"""Dovetail fits communication into computation.

This module owns the public names and nothing else. ``import dovetail`` loads no torch and no native code, touches no
driver and starts no thread: a name is resolved on first use (PEP 562) from the module that the table below gives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dovetail import errors as errors
    from dovetail.coll import ReduceOp as ReduceOp
    from dovetail.coll import all_gather_into_tensor as all_gather_into_tensor
    from dovetail.coll import all_reduce as all_reduce
    from dovetail.coll import all_to_all_single as all_to_all_single
    from dovetail.coll import arm as arm
    from dovetail.coll import barrier as barrier
    from dovetail.coll import broadcast as broadcast
    from dovetail.coll import empty as empty
    from dovetail.coll import explain as explain
    from dovetail.coll import finalize as finalize
    from dovetail.coll import gather as gather
    from dovetail.coll import heap as heap
    from dovetail.coll import init as init
    from dovetail.coll import launch as launch
    from dovetail.coll import new_group as new_group
    from dovetail.coll import reduce_scatter_tensor as reduce_scatter_tensor
    from dovetail.coll import scatter as scatter
    from dovetail.coll import stats as stats
    from dovetail.coll import zeros as zeros
    from dovetail.hw.world import Group as Group

# Public name -> the module that defines it. Every name here also stands in the TYPE_CHECKING block above.
_HOME = {
    "Group": "dovetail.hw.world",
    "ReduceOp": "dovetail.coll",
    "all_gather_into_tensor": "dovetail.coll",
    "all_reduce": "dovetail.coll",
    "all_to_all_single": "dovetail.coll",
    "arm": "dovetail.coll",
    "barrier": "dovetail.coll",
    "broadcast": "dovetail.coll",
    "empty": "dovetail.coll",
    "explain": "dovetail.coll",
    "finalize": "dovetail.coll",
    "gather": "dovetail.coll",
    "heap": "dovetail.coll",
    "init": "dovetail.coll",
    "launch": "dovetail.coll",
    "new_group": "dovetail.coll",
    "reduce_scatter_tensor": "dovetail.coll",
    "scatter": "dovetail.coll",
    "stats": "dovetail.coll",
    "zeros": "dovetail.coll",
}

__all__ = [  # noqa: RUF022 - in the order a reader meets them
    "init", "launch", "finalize", "Group", "new_group", "empty", "zeros", "heap",
    "all_gather_into_tensor", "all_to_all_single", "broadcast", "gather", "scatter",
    "reduce_scatter_tensor", "all_reduce", "barrier", "ReduceOp", "arm",
    "explain", "stats", "errors", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("dovetail.errors")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
