"""What was measured on this machine of computation and communication, alone and together.

Owns the section "overlap" of a profile, by backend, and how to read between its points. It chooses nothing. There are
no shipped figures: where nothing was measured, nothing is known.

    {"overlap": {"cuda": {"device": "NVIDIA H200", "num_cores": 132, "core_step": 8, "flops": 8e14,
                          "memory_bytes_per_s": 4.1e12, "link_bytes_per_s": 5.5e10,
                          "compute_alone": {"memory": [[75000000, 24.0, 132], [300000000, 78.0, 132]]},
                          "compute_by_cores": {"compute": [[124, 1.06], [132, 1.0]]},
                          "comm_by_cores": {"all_gather": [[8, 1.4], [16, 1.0]]},
                          "alone": {"all_gather": {"engines": [[1048576, 24.0, 0]], "cores": [[1048576, 27.0, 16]]}},
                          "beside": [["dma", 0, "compute", "all_gather", 1048576, 1.01, 1.0]],
                          "joules_per_gb": {"engines": 1.1, "cores": 3.0}}}}

All that follows the rates may be left out. `compute_alone` is of one kernel, by FLOPs for what compute bounds, else by
bytes. A row of `beside` is strategy, cores, bound, kind, bytes, and how many times longer than alone computation and
communication take, for as long as both run; alone is with all cores, and by the same mover at its best. What moves
inside one GPU is of the kind "local", whatever it is for.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from dovetail.measure import machine
from dovetail.overlap.strategy import PARTITIONED, Setting, Strategy
from dovetail.overlap.tasks import Bound, Mover, Traffic
from dovetail.profile import current as current_profile

logger = logging.getLogger(__name__)
SECTION = "overlap"
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


# --- the section of a profile ----------------------------------------------------------------------------------------


def current(backend: str, device: str = "") -> Tables | None:
    """What the profile of this machine has of a backend (`dovetail tune --only overlap` puts it there); None: nothing.

    A section of another device than `device` is ignored; so is one that is not understood, with a warning.
    """
    profile, _ = current_profile(machine.profile_key())
    every = profile.sections.get(SECTION)
    found = every.get(backend) if isinstance(every, dict) else every
    if not found or (isinstance(found, dict) and found.get("device", device) != device):
        return None
    try:
        return parse(found, f"profile of {profile.date}")
    except ValueError as error:
        logger.warning("%s; until then it counts as not measured", error)
        return None


def parse(section: Any, source: str) -> Tables:
    """A section of a profile for one backend; raises ValueError that names the place if it has not the form above."""
    try:
        return _parse(section, source)
    except ValueError as error:
        mend = f"`{TUNE}` makes a new one"
        raise ValueError(f"section {SECTION!r} of the {source} is not understood ({error}); {mend}") from None


def section(tables: Tables) -> dict[str, Any]:
    """The other way round."""
    made: dict[str, Any] = {"device": tables.device} if tables.device else {}
    made |= {name: getattr(tables, name) for name in (*_COUNTS, *_RATES)}
    alone: dict[str, Any] = {}
    for (kind, mover), by_size in tables.alone.items():
        alone.setdefault(kind, {})[str(mover)] = _rows(by_size)
    rows = [
        [str(r.strategy), r.cores, str(r.bound), r.kind, r.size_bytes, r.compute_slowdown, r.comm_slowdown]
        for r in tables.beside
    ]
    optional: dict[str, Any] = {
        "compute_alone": {str(bound): _rows(curve) for bound, curve in tables.compute_alone.items()},
        "compute_by_cores": {str(bound): _rows(curve) for bound, curve in tables.compute_by_cores.items()},
        "comm_by_cores": {kind: _rows(curve) for kind, curve in tables.comm_by_cores.items()},
        "alone": alone,
        "beside": rows,
        "joules_per_gb": {str(mover): joules for mover, joules in tables.joules_per_gb.items()},
    }
    return made | {name: value for name, value in optional.items() if value}


_COUNTS = ("num_cores", "core_step")
_RATES = ("flops", "memory_bytes_per_s", "link_bytes_per_s")
_OPTIONAL = ("device", "compute_alone", "compute_by_cores", "comm_by_cores", "alone", "beside", "joules_per_gb")
_Name = TypeVar("_Name", bound=StrEnum)
_Made = TypeVar("_Made", ByCores, BySize, Beside)
_MOST = 1e300  # not infinity, and not too large to reckon with
_Reader = Callable[[Any, str], Any]


def _rows(curve: ByCores | BySize) -> list[list[float]]:
    return [list(point) for point in curve.points]


def _check_fields(data: Any) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"it must be an object, not {data!r}")
    if unknown := sorted(set(data) - {*_COUNTS, *_RATES, *_OPTIONAL}):
        raise ValueError(f"{unknown[0]}: there is no such field")
    if missing := [name for name in (*_COUNTS, *_RATES) if name not in data]:
        raise ValueError(f"{missing[0]}: it is missing")


def _parse(data: Any, source: str) -> Tables:
    _check_fields(data)
    by_cores, by_size = (_count, _positive), (_count, _positive, _count_or_0)
    return Tables(
        num_cores=_count(data["num_cores"], "num_cores"),
        core_step=_count(data["core_step"], "core_step"),
        flops=_positive(data["flops"], "flops"),
        memory_bytes_per_s=_positive(data["memory_bytes_per_s"], "memory_bytes_per_s"),
        link_bytes_per_s=_positive(data["link_bytes_per_s"], "link_bytes_per_s"),
        compute_alone={
            _name(Bound, bound, where): _curve(BySize, points, where, by_size)
            for bound, points, where in _entries(data.get("compute_alone", {}), "compute_alone")
        },
        compute_by_cores={
            _name(Bound, bound, where): _curve(ByCores, points, where, by_cores)
            for bound, points, where in _entries(data.get("compute_by_cores", {}), "compute_by_cores")
        },
        comm_by_cores={
            kind: _curve(ByCores, points, where, by_cores)
            for kind, points, where in _entries(data.get("comm_by_cores", {}), "comm_by_cores")
        },
        alone={
            (kind, _name(Mover, mover, where)): _curve(BySize, points, where, by_size)
            for kind, movers, of_kind in _entries(data.get("alone", {}), "alone")
            for mover, points, where in _entries(movers, of_kind)
        },
        beside=tuple(_beside(row, where) for row, where in _items(data.get("beside", []), "beside")),
        joules_per_gb={
            _name(Mover, mover, where): _positive(joules, where)
            for mover, joules, where in _entries(data.get("joules_per_gb", {}), "joules_per_gb")
        },
        source=source,
        device=_text(data["device"], "device") if "device" in data else "",
    )


def _entries(value: Any, where: str) -> list[tuple[str, Any, str]]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: must be an object, not {value!r}")
    return [(str(name), entry, f"{where}.{name}") for name, entry in value.items()]


def _items(value: Any, where: str) -> list[tuple[Any, str]]:
    if not isinstance(value, list):
        raise ValueError(f"{where}: must be a list, not {value!r}")
    return [(item, f"{where}[{n}]") for n, item in enumerate(value)]


def _row(value: Any, where: str, fields: Sequence[_Reader]) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(fields):
        raise ValueError(f"{where}: must be a list of {len(fields)}, not {value!r}")
    return tuple(read(item, f"{where}[{n}]") for n, (read, item) in enumerate(zip(fields, value, strict=True)))


def _curve(make: Callable[[Any], _Made], value: Any, where: str, fields: Sequence[_Reader]) -> _Made:
    return _made(make, where, tuple(_row(point, at, fields) for point, at in _items(value, where)))


def _beside(value: Any, where: str) -> Beside:
    strategy, bound = functools.partial(_name, Strategy), functools.partial(_name, Bound)
    fields = (strategy, _count_or_0, bound, _text, _count, _positive, _positive)
    return _made(Beside, where, *_row(value, where, fields))


def _made(make: Callable[..., _Made], where: str, *given: Any) -> _Made:
    try:
        return make(*given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _name(names: type[_Name], value: Any, where: str) -> _Name:
    if not isinstance(value, str) or value not in set(names):
        raise ValueError(f"{where}: must be one of {', '.join(names)}, not {value!r}")
    return names(value)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: must be text, not {value!r}")
    return value


def _at_least_0(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError(f"{where}: must be a number that is not negative, not {value!r}")
    return float(value)


def _positive(value: Any, where: str) -> float:
    if not _at_least_0(value, where):
        raise ValueError(f"{where}: must be more than 0")
    return float(value)


def _count_or_0(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{where}: must be a count, not {value!r}")
    return value


def _count(value: Any, where: str) -> int:
    if not _count_or_0(value, where):
        raise ValueError(f"{where}: must be more than 0")
    return value  # type: ignore[no-any-return]
