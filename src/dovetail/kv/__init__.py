"""KV caches in host memory: blocks of prompts, brought to the GPU and back by strided copies of its copy engines.

`Prefixes` keeps and fetches prefixes of prompts; `layout` describes a cache, `planner` makes the copies, `mover` runs
them. Importing this package loads no torch and touches no driver.
"""

from dovetail.kv.choose import Path
from dovetail.kv.handles import NotStored, PoolError, PoolFull
from dovetail.kv.layout import Group, Layout, block_outermost, layer_outermost, of_tensors
from dovetail.kv.prefixes import Move, Prefixes

__all__ = [
    "Group",
    "Layout",
    "Move",
    "NotStored",
    "Path",
    "PoolError",
    "PoolFull",
    "Prefixes",
    "block_outermost",
    "layer_outermost",
    "of_tensors",
]
