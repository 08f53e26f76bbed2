"""`dovetail bench kv`: blocks of a paged KV cache between host memory and a GPU (or host memory), by path.

Owns the rows. Block ids and slots are random. Beside every path stand two yardsticks: one contiguous copy per block of
the same bytes (`contiguous`), and one copy of all of them (`one copy`); with both directions at once, those are two.
On an idle GPU, or beside a computation whose own speed is measured too.
"""

from dovetail.bench.kv.measure import measure
from dovetail.bench.kv.places import CpuPlace, GpuPlace, Place
from dovetail.bench.kv.spec import Spec
from dovetail.bench.kv.verdict import lines

__all__ = ["CpuPlace", "GpuPlace", "Place", "Spec", "lines", "measure"]
