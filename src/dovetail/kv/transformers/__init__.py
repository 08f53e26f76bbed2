"""Caches for `generate()` of transformers, 5.17 and newer: paged, with prefixes kept in host memory, or offloaded.

`PagedCache` keeps one request in blocks of a `PagedMemory`; `PrefixStore` fills it with what earlier requests have
computed; `Steps` computes tokens behind it as graphs; `OffloadedCache` keeps a long context in host memory, layer by
layer. Importing this loads torch and transformers; importing `dovetail.kv` does not.
"""

from dovetail.kv.transformers.shape import KVShape, require_version

require_version()

from dovetail.kv.transformers.memory import CacheFull, PagedMemory  # noqa: E402
from dovetail.kv.transformers.offload import OffloadedCache  # noqa: E402
from dovetail.kv.transformers.paged import PagedCache  # noqa: E402
from dovetail.kv.transformers.prefix import PrefixStore  # noqa: E402
from dovetail.kv.transformers.steps import Steps  # noqa: E402

__all__ = ["CacheFull", "KVShape", "OffloadedCache", "PagedCache", "PagedMemory", "PrefixStore", "Steps"]
