"""The statistics of a measurement: plain functions of numbers.

Times are summarised by the slowest rank's median: a collective is over when its last rank is done, and a median
forgives the odd interruption. Ratios are summarised by the geometric mean, so that twice as fast and twice as slow
cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return percentile(values, 50)


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between neighbours (numpy's default)."""
    ordered = sorted(_finite(values, "percentile"))
    if not 0 <= percent <= 100:
        raise ValueError(f"percent is {percent}; it lies between 0 and 100")
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def geometric_mean(values: Iterable[float]) -> float:
    """The n-th root of the product; all values must be above zero."""
    numbers = _finite(values, "geometric mean")
    if min(numbers) <= 0:
        raise ValueError(f"a geometric mean takes values above zero, got {min(numbers)}")
    return math.exp(math.fsum(map(math.log, numbers)) / len(numbers))


def slowest_rank_median(times_by_rank: Sequence[Sequence[float]]) -> float:
    """Each rank's median over its iterations, then the greatest of them.

    Args:
        times_by_rank: one row per rank, one time per iteration; all rows equally long.
    """
    if not times_by_rank:
        raise ValueError("slowest_rank_median needs the times of at least one rank, got none")
    lengths = {len(times) for times in times_by_rank}
    if len(lengths) != 1:
        raise ValueError(f"every rank must have as many iterations as the others, got {sorted(lengths)}")
    return max(median(times) for times in times_by_rank)


def _finite(values: Iterable[float], name: str) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError(f"a {name} needs at least one value, got none")
    if not all(map(math.isfinite, numbers)):
        raise ValueError(f"a {name} takes finite values, got {next(n for n in numbers if not math.isfinite(n))}")
    return numbers
