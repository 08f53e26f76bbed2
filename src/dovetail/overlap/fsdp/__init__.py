"""FSDP2 through Dovetail: its all-gathers and reduce-scatters, with buffers on the symmetric heap.

`enable(model)` sets the hooks of a model that torch's `fully_shard` has sharded, `disable(model)` puts back what stood
there, `explain(model)` says what each module runs and why. Values are FSDP's own; docs/fsdp.md has the rest.
"""

from dovetail.overlap.fsdp.enabled import Enabled, Row, disable, enable, explain

__all__ = ["Enabled", "Row", "disable", "enable", "explain"]
