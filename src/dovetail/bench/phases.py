"""The four phases of a copy by size, as DMA-Latte has them: control, schedule, copy, sync.

Owns the rows of ``dovetail phases``. The backend takes the times apart (`dovetail.hw.cpu.phases`); here they become
shares of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dovetail.measure.stats import median

PHASES = ("control", "schedule", "copy", "sync")
_BYTES_PER_SIZE = 256 << 20
_FEWEST, _MOST = 20, 1000


class Phases(Protocol):
    """One copy taken apart, in microseconds."""

    @property
    def control_us(self) -> float: ...
    @property
    def schedule_us(self) -> float: ...
    @property
    def copy_us(self) -> float: ...
    @property
    def sync_us(self) -> float: ...


def measure(
    sizes: Sequence[int], iterations: int | None = None, progress: Callable[[int, int, str], None] | None = None
) -> list[dict[str, Any]]:
    """One row per size, measured on the software engine of this process, which joins a world of its own for it."""
    import dovetail
    from dovetail.hw.cpu import phases

    group = dovetail.init()
    try:
        if group.size != 1:
            raise ValueError(f"the phases of a copy are those of one process; this is one of {group.size} ranks")
        rows = []
        for done, size_bytes in enumerate(sizes):
            if progress:
                progress(done, len(sizes), f"copy of {size_bytes} bytes")
            number = iterations or min(max(_BYTES_PER_SIZE // size_bytes, _FEWEST), _MOST)
            rows.append(row(size_bytes, phases.measure(group, size_bytes, number)))
        return rows
    finally:
        dovetail.finalize()


def row(size_bytes: int, copies: Sequence[Phases]) -> dict[str, Any]:
    """The row of one size: the median of each phase, their sum, and the share of each in it."""
    times = {phase: median(getattr(copy, f"{phase}_us") for copy in copies) for phase in PHASES}
    total_us = sum(times.values())
    if min(times.values()) < 0 or not total_us > 0:
        raise ValueError(f"the phases of a copy take time, got {times}")
    return {
        "backend": "cpu",
        "size_bytes": size_bytes,
        **{f"{phase}_us": round(time_us, 4) for phase, time_us in times.items()},
        "total_us": round(total_us, 4),
        **{f"{phase}_share": time_us / total_us for phase, time_us in times.items()},
        "iterations": len(copies),
    }
