"""How bytes can be moved, and which way is chosen: a pure function of the copies and of measured costs.

Owns the names of the paths and the estimate. A path takes as long as the slower of two: the CPU that issues its
descriptors, and the engine that works them off, a cost for each row and the bytes at the link's speed. The kernel is
never chosen: it takes multiprocessors, and from device to host over PCIe it disturbs what computes beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dovetail.kv.planner import Table


class Path(StrEnum):
    """How bytes are moved."""

    AUTO = "auto"  #: by the estimate of `choose`
    DMA_2D = "dma-2d"  #: a strided copy for each block: few descriptors, no compute cores
    DMA_BATCH = "dma-batch"  #: a linear copy for each row, many to a call
    DMA_LOOP = "dma-loop"  #: a linear copy for each row, a call each
    KERNEL = "kernel"  #: a kernel that gathers rows: it takes multiprocessors
    CPU = "cpu"  #: plain memory copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured of one GPU and its link; microseconds, and GB/s."""

    link_gbps: float  #: of one large copy
    copy_us: float  #: to issue one copy, plain or strided
    row_us: float  #: of an engine for each row of a strided copy, besides its bytes
    start_us: float  #: of an engine for each plain copy, besides its bytes
    entry_us: float  #: to issue one entry of a batch
    entries_per_call: int  #: of a batch


#: One H200, PCIe 5.0 x16, driver 580; set by hand from benchmarks/results/h200-kv-64g.json and h200-kv-block.json.
H200 = Costs(link_gbps=54.0, copy_us=5.4, row_us=0.07, start_us=1.9, entry_us=0.66, entries_per_call=128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A path, and why."""

    path: Path
    entries_per_call: int  #: of a batch
    reason: str


def choose(table: Table, costs: Costs = H200, *, batches: bool = True) -> Choice:
    """The path of the least estimated time; `batches` says whether the driver has them."""
    times = estimates(table, costs)
    if not batches:
        del times[Path.DMA_BATCH]
    best = min(times, key=lambda path: times[path])
    shown = ", ".join(f"{path} {time_us:.0f} us" for path, time_us in times.items())
    return Choice(path=best, entries_per_call=costs.entries_per_call, reason=f"estimated: {shown}")


def estimates(table: Table, costs: Costs = H200) -> dict[Path, float]:
    """Microseconds by path."""
    bytes_us = table.size_bytes / costs.link_gbps / 1e3
    rows, plain = int(table.rows.sum()), int((table.rows == 1).sum())
    by_copies = bytes_us + (rows - plain) * costs.row_us + plain * costs.start_us
    return {
        Path.DMA_2D: max(len(table) * costs.copy_us, by_copies),
        Path.DMA_BATCH: max(rows * costs.entry_us, bytes_us),
    }
