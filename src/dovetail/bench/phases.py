"""The four phases of a copy by size, as DMA-Latte has them: control, schedule, copy, sync.

Owns the rows of ``dovetail phases``. The backend takes the times apart (`dovetail.hw.cpu.phases`); here they become
shares of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PHASES = ("control", "schedule", "copy", "sync")
Measure = Callable[[int, int], Mapping[str, float]]
"""size_bytes, iterations -> ``control_us``, ``schedule_us``, ``copy_us``, ``sync_us``."""

_BYTES_PER_SIZE = 256 << 20
_FEWEST, _MOST = 20, 1000


def rows(
    sizes: Sequence[int], *, measure: Measure | None = None, iterations: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """One row per size: the time of each phase, their sum, and the share of each."""
    if measure is None:
        from dovetail.hw.cpu.phases import measure as of_cpu

        measure = of_cpu
    found = []
    for done, size_bytes in enumerate(sizes):
        if progress:
            progress(done, len(sizes), f"copy of {size_bytes} bytes")
        number = iterations or min(max(_BYTES_PER_SIZE // size_bytes, _FEWEST), _MOST)
        times = measure(size_bytes, number)
        found.append(row(size_bytes, times, number))
    return found


def row(size_bytes: int, times: Mapping[str, float], iterations: int) -> dict[str, Any]:
    """The row of one size."""
    by_phase = {phase: float(times[f"{phase}_us"]) for phase in PHASES}
    if min(by_phase.values()) < 0 or not sum(by_phase.values()) > 0:
        raise ValueError(f"the phases of a copy take time, got {by_phase}")
    total_us = sum(by_phase.values())
    return {
        "backend": "cpu",
        "size_bytes": size_bytes,
        **{f"{phase}_us": round(time_us, 4) for phase, time_us in by_phase.items()},
        "total_us": round(total_us, 4),
        **{f"{phase}_share": time_us / total_us for phase, time_us in by_phase.items()},
        "iterations": iterations,
    }
