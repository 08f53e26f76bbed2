"""Fits the one constant of a library that the links do not explain: the time of a call that moves no bytes.

Owns the fit and its errors. A fitted figure holds for the sizes it was fitted on; libraries change protocol at others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dovetail.sim.net.algorithms import Algorithm, Collective
from dovetail.sim.net.simulate import simulate
from dovetail.sim.net.topology import Floats, Network


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """One observation and what the model says."""

    size_bytes: int
    observed_ns: float
    predicted_ns: float

    @property
    def error(self) -> float:
        """Predicted over observed, less one."""
        return self.predicted_ns / self.observed_ns - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The constant, and how well it does."""

    launch_ns: int
    rows: tuple[FitRow, ...]

    @property
    def worst(self) -> float:
        """The largest error, without its sign."""
        return max(abs(row.error) for row in self.rows)


def fit_launch(
    network: Network,
    collective: Collective | str,
    algorithm: Algorithm | str,
    observations: Sequence[tuple[int, float]],
) -> Fit:
    """The `launch_ns` of least squared log error over observations (size_bytes, time_ns); sizes as in `simulate`.

    Raises:
        ValueError: no observation, or one whose time is not above zero.
    """
    if not observations:
        raise ValueError("fit_launch needs at least one observation (size_bytes, time_ns), got none")
    for size_bytes, time_ns in observations:
        if not (np.isfinite(time_ns) and time_ns > 0):
            raise ValueError(f"time_ns must be above zero, not {time_ns} for {size_bytes} bytes")
    observed = np.array([time_ns for _, time_ns in observations], np.float64)
    moved = [simulate(network, collective, size, algorithm=algorithm).time_ns for size, _ in observations]
    launch_ns = _least(np.array(moved, np.float64), observed)
    rows = [
        FitRow(size_bytes=size, observed_ns=float(time_ns), predicted_ns=float(base + launch_ns))
        for (size, time_ns), base in zip(observations, moved, strict=True)
    ]
    return Fit(launch_ns=launch_ns, rows=tuple(rows))


def _least(moved: Floats, observed: Floats) -> int:
    """Each row alone is best served by its own gap, so the answer is between the gaps: a grid there, ever finer."""
    gaps = np.maximum(observed - moved, 0.0)
    low, high = float(gaps.min()), float(gaps.max())
    while True:
        grid = np.linspace(low, high, 1001)
        # what moves nothing takes no time; one nanosecond keeps its logarithm finite
        total = np.maximum(moved[:, None] + grid, 1.0)
        best = int(np.argmin((np.log(total / observed[:, None]) ** 2).sum(axis=0)))
        if high - low < 1:
            return round(float(grid[best]))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 1000)])
