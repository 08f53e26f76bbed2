"""How bytes can be moved, and which way is chosen: a pure function of the copies and of measured costs.

Owns the names of the paths and the estimate: the time for each byte that was measured for requests most like this one,
by the length of their rows and by their size (`dovetail.kv.costs`), in each direction, on an idle GPU and beside
computation, where rows cost more. What a path takes of the host counts a little: whoever submits has other work to do,
and a call for each row may keep him as long as the link is busy. No formula: next to kernels that hold all
multiprocessors, times go in steps. The kernel that gathers rows is never chosen: it holds multiprocessors for as long
as the link is busy, and from device to host it stalls what runs beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from dovetail.kv.planner import Direction, Table

VECTOR_BYTES = 16  #: what kernels move is whole ones


class Path(StrEnum):
    """How bytes are moved."""

    AUTO = "auto"  #: by the estimate of `choose`
    DMA_2D = "dma-2d"  #: a strided copy for each block: few descriptors, no compute cores
    DMA_BATCH = "dma-batch"  #: a linear copy for each row, many to a call
    DMA_LOOP = "dma-loop"  #: a linear copy for each row, a call each
    STAGED = "staged"  #: contiguous copies to staging memory on the GPU, and a kernel between that and the cache
    MIXED = "mixed"  #: staged, and a part by dma-2d while the kernel waits for its place
    KERNEL = "kernel"  #: a kernel that gathers rows: it takes multiprocessors
    CPU = "cpu"  #: plain memory copies


CANDIDATES = (Path.DMA_2D, Path.DMA_BATCH, Path.STAGED, Path.MIXED)  #: of `auto`
BY_STAGING = frozenset({Path.STAGED, Path.MIXED})  #: those that need staging memory and a kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the time of copies depends on."""

    row_bytes: int  #: on average
    size_bytes: int

    @classmethod
    def of(cls, table: Table) -> Shape:
        """Of a table."""
        return cls(row_bytes=round(table.size_bytes / max(table.num_rows, 1)), size_bytes=table.size_bytes)


class _Places:
    """Of which requests times were measured. Paths that were measured together share one, so that a search serves all.

    Plain numbers: there are a few dozen, and arrays would cost more than the search.
    """

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        """Each is (row bytes, size in bytes)."""
        self._logs = [(math.log2(row), math.log2(size)) for row, size in points]
        self._found: tuple[Shape | None, list[tuple[float, int]]] = None, []  # the latest answer

    def near(self, shape: Shape) -> list[tuple[float, int]]:
        """(distance, number) of the nearest ones, and of all that are as near as the last of those."""
        asked, near = self._found
        if asked is not shape:
            row, size = math.log2(max(shape.row_bytes, 1)), math.log2(shape.size_bytes)
            every = [(r - row) * (r - row) + (s - size) * (s - size) for r, s in self._logs]
            most = sorted(every)[:_NEAREST][-1]
            near = [(distance, n) for n, distance in enumerate(every) if distance <= most]
            self._found = shape, near
        return near


_places = functools.lru_cache(maxsize=64)(_Places)


class Samples:
    """Measured times of one path."""

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        """Each is (row bytes, size in bytes, microseconds), and those of the host where they are known."""
        self.points: list[tuple[int, int, float, float]] = []
        for row, size, time_us, *host_us in points:
            self.points.append((int(row), int(size), float(time_us), float(host_us[0]) if host_us else 0.0))
        if not self.points or min(min(point[:3]) for point in self.points) <= 0:
            raise ValueError("a path needs measured times, of rows and requests that have bytes")
        self._places = _places(tuple((row, size) for row, size, _, _ in self.points))
        self._per_byte = [math.log(time_us / size) for _, size, time_us, _ in self.points]
        self._host = [host_us / size for _, size, _, host_us in self.points]

    def time_us(self, shape: Shape) -> float:
        """What the nearest of them make likely; exact at one of them, and nothing takes no time."""
        return math.exp(self._mean(self._per_byte, shape)) * shape.size_bytes if shape.size_bytes else 0.0

    def host_us(self, shape: Shape) -> float:
        """The same for what submitting takes; 0 where it is not known."""
        return self._mean(self._host, shape) * shape.size_bytes if shape.size_bytes else 0.0

    def _mean(self, figures: list[float], shape: Shape) -> float:
        near = sorted([(distance, figures[n]) for distance, n in self._places.near(shape)])[:_NEAREST]
        weights = [1 / (distance + _CLOSE) for distance, _ in near]
        return sum([w * figure for w, (_, figure) in zip(weights, near, strict=True)]) / sum(weights)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Samples) and self.points == other.points

    __hash__ = None  # type: ignore[assignment]


_NEAREST = 4
_CLOSE = 1e-6
#: What a microsecond of the host counts, in microseconds until the last byte. On an H200 a batch of 1 GB in rows of
#: 64 KB keeps the host for 16 ms, and is over as soon as what needs 1: this decides between paths as close as those.
HOST_SHARE = 0.1

#: (direction, whether computation runs beside, path)
Case = tuple[Direction, bool, Path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What was measured of one GPU and its link."""

    samples: Mapping[Case, Samples]
    entries_per_call: int  #: of a batch
    source: str  #: whose figures these are, for `Choice.reason`
    device: str = ""  #: the GPU's name


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A path, and why."""

    path: Path
    entries_per_call: int  #: of a batch
    why: Callable[[], str] = field(compare=False)  #: gives the reason: copies need not wait for its words

    @functools.cached_property
    def reason(self) -> str:
        """Whose figures decided, and the figures."""
        return self.why()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a request would take."""

    size_bytes: int
    times_us: Mapping[Path, float]  #: of the paths that can run here, at least one
    entries_per_call: int  #: of a batch
    why: Callable[[], str]  #: as of `Choice`
    host_us: Mapping[Path, float] = field(default_factory=dict)  #: of the host, where it is known

    def cost(self, path: Path) -> float:
        """What is least for the path that is taken: its time, and a little for the host's."""
        return self.times_us[path] + HOST_SHARE * self.host_us.get(path, 0.0)

    def choice(self) -> Choice:
        """The path of the least cost."""
        best = min(self.times_us, key=self.cost)
        return Choice(path=best, entries_per_call=self.entries_per_call, why=self.why)


def estimate(
    direction: Direction, shape: Shape, costs: Costs, *, beside: bool, paths: Collection[Path] = CANDIDATES
) -> Estimate:
    """By what was measured beforehand.

    Args:
        beside: does computation run at the same time? Where nothing was measured so, the other figures serve.
        paths: those that can run here.
    """
    times: dict[Path, float] = {Path.DMA_2D: 0.0}
    host: dict[Path, float] = {}
    why: Callable[[], str] = _nothing_else
    for state in (beside, not beside):  # what was measured in the other state is better than nothing
        found = {
            path: costs.samples[direction, state, path].time_us(shape)
            for path in CANDIDATES
            if path in paths and (direction, state, path) in costs.samples
        }
        if found:
            times = found
            host = {path: costs.samples[direction, state, path].host_us(shape) for path in found}
            why = functools.partial(_estimated, state, found, host, costs.source)
            break
    return Estimate(
        size_bytes=shape.size_bytes, times_us=times, entries_per_call=costs.entries_per_call, why=why, host_us=host
    )


def _nothing_else() -> str:
    return "no other path was measured"


def _estimated(beside: bool, times_us: Mapping[Path, float], host_us: Mapping[Path, float], source: str) -> str:
    where = "beside computation" if beside else "on an idle GPU"
    return f"estimated {where}: {shown(times_us, host_us)} ({source})"


def shown(times_us: Mapping[Path, float], host_us: Mapping[Path, float]) -> str:
    """Times as a reason has them, and where it is known what the host takes of them."""
    return ", ".join(
        f"{path} {time_us:.0f} us" + (f" (host {host:.0f})" if (host := host_us.get(path)) else "")
        for path, time_us in times_us.items()
    )


def choose(
    direction: Direction, shape: Shape, costs: Costs, *, beside: bool, paths: Collection[Path] = CANDIDATES
) -> Choice:
    """The path of the least estimated cost; arguments as of `estimate`."""
    return estimate(direction, shape, costs, beside=beside, paths=paths).choice()


def is_aligned(table: Table) -> bool:
    """Can a kernel move the strided copies of a table?"""
    if table.form and not table.form.unit_bytes % VECTOR_BYTES:
        return True
    bits = table.device | table.width | table.device_pitch
    return not (bits[table.rows > 1] % np.int64(VECTOR_BYTES)).any()
