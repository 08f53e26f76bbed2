"""What was measured on this machine of computation and communication, alone and together.

Owns the figures and how to read between their points; `section` has their form in a profile. It chooses nothing. There
are no shipped figures: where nothing was measured, nothing is known.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dovetail.overlap.strategy import PARTITIONED, Setting, Strategy
from dovetail.overlap.tasks import Bound, Mover, Traffic

TUNE = "dovetail tune --only overlap"
LOCAL = "local"  #: the kind of all traffic inside one GPU
REDUCING = frozenset({"all_reduce", "reduce_scatter", "reduce"})
_ALIKE = (frozenset({"all_gather", "broadcast", "fetch", "store"}), frozenset({"all_to_all", "gather", "scatter"}))
#: What was measured of another sort of computation and serves where nothing was of this one: the first that is there.
_SERVING = {
    Bound.COMPUTE: (Bound.COMPUTE, Bound.MEMORY, Bound.STREAM),
    Bound.MEMORY: (Bound.MEMORY, Bound.STREAM, Bound.COMPUTE),
    Bound.STREAM: (Bound.STREAM, Bound.MEMORY, Bound.COMPUTE),
}

_Any = TypeVar("_Any")
Spot = tuple[int, int, float]  #: the points on the left and on the right, and how far it is from the one to the other


@dataclass(frozen=True, slots=True)
class ByCores:
    """How many times longer something takes on fewer cores: (cores, slowdown), ascending."""

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        _check_ascending([cores for cores, _ in self.points], "cores")

    def at(self, cores: int) -> float:
        """Straight between points; on fewer cores than any of them, half as many take twice as long."""
        fewest, slowdown = self.points[0]
        if cores < fewest:
            return slowdown * fewest / cores
        return between([slowdown for _, slowdown in self.points], spot([known for known, _ in self.points], cores))


@dataclass(frozen=True, slots=True)
class BySize:
    """The time of something alone: (bytes or FLOPs, microseconds, cores that it took), ascending."""

    points: tuple[tuple[int, float, int], ...]
    _logs: tuple[tuple[float, ...], tuple[float, ...]] = field(init=False, repr=False, compare=False)  # bytes, times

    def __post_init__(self) -> None:
        _check_ascending([size_bytes for size_bytes, _, _ in self.points], "bytes")
        sizes, times = (tuple(math.log(point[n]) for point in self.points) for n in range(2))
        object.__setattr__(self, "_logs", (sizes, times))

    def time_us(self, size_bytes: float) -> float:
        """Straight between points on logarithmic axes, and on beyond the last ones as before them; no bytes, no time.

        Outside the points a time never falls with size. If there is but one, more takes longer in proportion, and less
        just as long.
        """
        if size_bytes <= 0:
            return 0.0
        (sizes, times), x = self._logs, math.log(size_bytes)
        if x < sizes[0]:
            return math.exp(times[0] + (_rise(sizes[:2], times[:2]) if times[1:] else 0.0) * (x - sizes[0]))
        if x > sizes[-1]:
            return math.exp(times[-1] + (_rise(sizes[-2:], times[-2:]) if times[1:] else 1.0) * (x - sizes[-1]))
        return math.exp(between(times, spot(sizes, x)))

    def cores(self, size_bytes: float) -> int:
        """How many it took at the size that is nearest."""
        return min(self.points, key=lambda point: abs(math.log(point[0] / max(size_bytes, 1))))[2]


@dataclass(frozen=True, slots=True)
class Beside:
    """How many times longer than alone each takes for as long as both run."""

    strategy: Strategy
    cores: int
    bound: Bound
    kind: str
    size_bytes: int
    compute_slowdown: float
    comm_slowdown: float

    def __post_init__(self) -> None:
        if self.strategy is Strategy.SERIAL:
            raise ValueError("of two that run one after the other, neither is beside the other")
        if self.strategy is Strategy.DMA and self.cores:
            raise ValueError(f"dma takes 0 cores, not {self.cores}")


@dataclass(frozen=True, slots=True)
class Known:
    """A figure, and the kind of communication that it was measured with."""

    value: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What was measured of one device and its link."""

    num_cores: int
    core_step: int  #: a partition is a multiple of it
    flops: float  #: FLOP/s that a large matrix product reaches
    memory_bytes_per_s: float  #: that a kernel which streams reaches
    link_bytes_per_s: float
    compute_alone: Mapping[Bound, BySize] = field(default_factory=dict)  #: by FLOPs or bytes, of one kernel
    compute_by_cores: Mapping[Bound, ByCores] = field(default_factory=dict)  #: 1 with all cores
    comm_by_cores: Mapping[str, ByCores] = field(default_factory=dict)  #: by kind; 1 at its best
    alone: Mapping[tuple[str, Mover], BySize] = field(default_factory=dict)  #: by kind and who moves
    beside: tuple[Beside, ...] = ()
    joules_per_gb: Mapping[Mover, float] = field(default_factory=dict)
    source: str = "measured"  #: whose figures these are, for a reason
    device: str = ""
    _served: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # what serves for what

    def __post_init__(self) -> None:
        if not self.core_step <= self.num_cores:
            raise ValueError(f"core_step: {self.core_step} of {self.num_cores} cores")
        for bound, curve in self.compute_by_cores.items():
            if curve.points[-1] != (self.num_cores, 1.0):
                raise ValueError(f"compute_by_cores.{bound}: must end with [{self.num_cores}, 1.0]")
        for kind, curve in self.comm_by_cores.items():
            if min(slowdown for _, slowdown in curve.points) != 1.0:
                raise ValueError(f"comm_by_cores.{kind}: the least slowdown must be 1.0")
        cases = [(row.strategy, row.cores, row.bound, row.kind, row.size_bytes) for row in self.beside]
        for n, row in enumerate(self.beside):
            if row.cores >= self.num_cores and row.strategy in PARTITIONED:
                raise ValueError(f"beside[{n}]: {row.strategy} leaves none of {self.num_cores} cores")
            if cases[n] in cases[:n]:
                raise ValueError(f"beside[{n}]: the same case as beside[{cases.index(cases[n])}]")

    def compute_slowdown(self, bound: Bound, cores: int) -> float | None:
        """Of a computation that has so many cores; None if that was not measured.

        What was measured of a product stands for a stream where nothing else does, and the other way round.
        """
        serving = _SERVING[bound][: 1 if bound is Bound.COMPUTE else 2]
        curve = next((self.compute_by_cores[each] for each in serving if each in self.compute_by_cores), None)
        return curve.at(cores) if curve else None

    def compute_us(self, bound: Bound, flops: float, size_bytes: float) -> float | None:
        """The time alone of one kernel of a computation; None if none of its sort was measured."""
        curve = self.compute_alone.get(bound)
        return curve.time_us(flops if bound is Bound.COMPUTE else size_bytes) if curve else None

    def comm_slowdown(self, traffic: Traffic, cores: int) -> Known | None:
        """Of a communication that so many cores move; None if nothing like it was measured."""
        kind = nearest(self.comm_by_cores, traffic, Mover.CORES)
        return Known(self.comm_by_cores[kind].at(cores), kind) if kind else None

    def comm_us(self, traffic: Traffic, mover: Mover) -> Known | None:
        """The time of a communication alone; None if nothing like it was measured."""
        found = self.alone_by_size(traffic, mover)
        return Known(found[1].time_us(traffic.size_bytes), found[0]) if found else None

    def comm_cores(self, traffic: Traffic) -> int:
        """How many cores a communication takes that is moved by them alone; 0 if not known."""
        found = self.alone_by_size(traffic, Mover.CORES)
        return found[1].cores(traffic.size_bytes) if found else 0

    def alone_by_size(self, traffic: Traffic, mover: Mover) -> tuple[str, BySize] | None:
        """The times alone that serve for traffic of this sort, and their kind."""
        kind = nearest({kind for kind, by in self.alone if by is mover}, traffic, mover)
        return (kind, self.alone[kind, mover]) if kind else None

    def both(self, setting: Setting, bound: Bound, traffic: Traffic) -> Beside | None:
        """What a setting does to both; its bound, kind and cores are those of the measured figures that serve.

        Of those of the strategy, first the ones of this bound or the nearest, then of the nearest kind, then of the
        nearest number of cores (0 is only like 0); between two sizes on a line over the logarithm, beyond the last as
        there. None if nothing like it was measured.
        """
        found = lines(self._like(setting, bound, traffic))
        if found is None:
            return None
        compute, comm = found.at(traffic.size_bytes)
        return replace(found.first, size_bytes=traffic.size_bytes, compute_slowdown=compute, comm_slowdown=comm)

    def served(self, key: tuple[Any, ...], traffic: Traffic, make: Callable[[], _Any]) -> _Any:
        """What `make` gives for a key and traffic of this sort, of whatever size; made once."""
        full = (*key, traffic.kind, traffic.local, traffic.reduces)
        try:
            found: _Any = self._served[full]
        except KeyError:
            found = self._served[full] = make()
        return found

    def like(self, setting: Setting, bound: Bound, traffic: Traffic) -> Lines | None:
        """The slowdowns of `both` for traffic of this sort, by size."""
        return lines(self._like(setting, bound, traffic))

    def _like(self, setting: Setting, bound: Bound, traffic: Traffic) -> list[Beside]:
        """The measured ones that serve, by size."""
        mover = setting.moved_by
        rows = [row for row in self.beside if row.strategy is setting.strategy and _serves(row.kind, traffic, mover)]
        if setting.strategy is not Strategy.DMA:
            rows = [row for row in rows if bool(row.cores) == bool(setting.cores)]
        measured = {row.bound for row in rows}
        rows = [row for row in rows if row.bound is next(each for each in _SERVING[bound] if each in measured)]
        kind = nearest({row.kind for row in rows}, traffic, mover)
        rows = [row for row in rows if row.kind == kind]
        cores = min((abs(row.cores - setting.cores), row.cores) for row in rows)[1] if rows else 0
        return sorted((row for row in rows if row.cores == cores), key=lambda row: row.size_bytes)


@dataclass(frozen=True, slots=True)
class Lines:
    """Slowdowns by size: both over its logarithm."""

    first: Beside  #: its strategy, cores, bound and kind are those of all
    sizes: tuple[float, ...]  #: logarithms
    compute: tuple[float, ...]
    comm: tuple[float, ...]

    def at(self, size_bytes: int) -> tuple[float, float]:
        """Of the computation and of the communication."""
        here = spot(self.sizes, log_of(size_bytes))
        return between(self.compute, here), between(self.comm, here)


def lines(rows: list[Beside]) -> Lines | None:
    """Through rows in the order of their sizes; None without any."""
    if not rows:
        return None
    return Lines(
        rows[0], tuple(log_of(row.size_bytes) for row in rows), tuple(row.compute_slowdown for row in rows),
        tuple(row.comm_slowdown for row in rows),
    )  # fmt: skip


def nearest(kinds: Collection[str], traffic: Traffic, mover: Mover) -> str | None:
    """The measured kind that serves for this traffic: its own, else one alike, else another; None if none may."""
    alike = next((family for family in (*_ALIKE, REDUCING) if traffic.kind in family), frozenset())
    serving = [kind for kind in kinds if _serves(kind, traffic, mover)]
    return min(serving, key=lambda kind: (kind != traffic.kind, kind not in alike, kind), default=None)


def _serves(kind: str, traffic: Traffic, mover: Mover) -> bool:
    """May figures of a kind stand for this traffic?

    Inside a GPU only its own. Engines move and do not add: what they move and cores then reduce is not like a copy.
    """
    if traffic.local or kind == LOCAL:
        return traffic.local and kind == LOCAL
    return kind == traffic.kind or mover is Mover.CORES or (kind in REDUCING) == traffic.reduces


def log_of(size_bytes: int) -> float:
    """Where a size is on a line; none is as one byte."""
    return math.log(max(size_bytes, 1))


def spot(grid: Sequence[float], x: float) -> Spot:
    """Where `x` is among ascending points: to be looked for once for all that was measured at the same points.

    Beyond the last it is the last.
    """
    if x <= grid[0]:
        return 0, 0, 0.0
    if x >= grid[-1]:
        return -1, -1, 0.0
    right = bisect.bisect_right(grid, x)
    left = right - 1
    return left, right, (x - grid[left]) / (grid[right] - grid[left])


def between(values: Sequence[float], here: Spot) -> float:
    """On the line between two neighbours."""
    left, right, share = here
    return values[left] * (1 - share) + values[right] * share


def _rise(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The slope to go on with: no time falls with size, and none grows with more than its square, but by noise."""
    run = sizes[1] - sizes[0]
    return min(max((times[1] - times[0]) / run, 0.0), 2.0) if run else 0.0


def _check_ascending(values: Sequence[float], what: str) -> None:
    if not values:
        raise ValueError("there are no points")
    if any(left >= right for left, right in itertools.pairwise(values)):
        raise ValueError(f"{what} must ascend, not {', '.join(map(str, values))}")
