"""How long calls take, side by side: a few tell how many fit into the time, then all are interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dovetail.bench.gpu.spec import Effort
from dovetail.measure.interleave import interleave
from dovetail.measure.stats import median

WARM_UP = 3
FEWEST, MOST = 5, 2000


class Timing(NamedTuple):
    """The median of a contender's calls, and how many there were."""

    time_us: float
    iterations: int


def timed(calls: Sequence[Callable[[], object]], effort: Effort) -> list[Timing]:
    """Each call returns when the GPU is done with it, so all start on an idle one."""
    if not calls:
        return []
    about_us = [median(times) / 1e3 for times in interleave(calls, _ready, [WARM_UP] * len(calls))]
    if effort.iterations is None:
        iterations = [min(max(int(effort.seconds * 1e6 / max(us, 1.0)), FEWEST), MOST) for us in about_us]
    else:
        iterations = [effort.iterations] * len(calls)
    found = interleave(calls, _ready, iterations)
    return [Timing(median(times) / 1e3, len(times)) for times in found]


def _ready() -> None:
    """There is one rank: nobody to wait for."""
