"""KV caches in host memory: blocks of prompts, brought to the GPU and back by strided copies of its copy engines.

`Prefixes` keeps and fetches prefixes of prompts, `Shelf` weights, experts and optimizer states; `layout` describes a
cache, `planner` makes the copies, `mover` runs them. Importing this package loads no torch and touches no driver.
"""

from dovetail.kv.choose import Path
from dovetail.kv.handles import NotStored, PoolError, PoolFull
from dovetail.kv.layout import Group, Layout, block_outermost, layer_outermost, of_tensors
from dovetail.kv.loan import Loan
from dovetail.kv.prefixes import Move, Prefixes
from dovetail.kv.shelf import Shelf, ShelfStats
from dovetail.kv.window import WindowFull

__all__ = [
    "Group",
    "Layout",
    "Loan",
    "Move",
    "NotStored",
    "Path",
    "PoolError",
    "PoolFull",
    "Prefixes",
    "Shelf",
    "ShelfStats",
    "WindowFull",
    "block_outermost",
    "layer_outermost",
    "of_tensors",
]
