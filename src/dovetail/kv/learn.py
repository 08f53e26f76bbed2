"""Which path `auto` takes by what its own transfers took, where times that were measured beforehand do not decide.

Those come from another process and are off by 10 to 25 %, more than what often lies between two paths. So a path whose
time is within `REACH` of the best is tried a few times, and later again once in a while; one beyond it never is.

Owns the times that were seen, and when to try what. Pure, without clock and chance: it is told times and counts
requests. Times are shared by requests alike: of one direction, beside computation or not, with rows of about the same
length and of about the same size.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.kv.choose import CANDIDATES, Choice, Estimate, Path, Shape, shown
from dovetail.kv.planner import Direction

REACH = 1.3  #: times the best time: what would take longer is not tried
TRIALS = 3  #: of each path within reach, when requests are new
SETTLED = TRIALS * len(CANDIDATES)  #: requests alike, after which all of those have been
AGAIN = 64  #: requests alike between two later trials
RARELY = 8  #: of so many requests alike one is timed, while nothing is to be tried: timing costs more than choosing
FORGET = 1024  #: requests alike, after which a path that was not taken is as unknown as in the beginning
_ENOUGH = 2  # times, not counting the first
_RECENT = 5
_STEADY = 0.03  # smaller changes of a figure change nothing
_STRANGE = 0.1  # a time that is further off makes the next one worth a look


class Learner:
    """What the transfers of one mover took."""

    def __init__(self) -> None:
        self._alike: dict[tuple[Direction, bool, int, int, frozenset[Path]], Alike] = {}

    def request(
        self, direction: Direction, beside: bool, shape: Shape, paths: Collection[Path], known: Estimate
    ) -> Request:
        """Requests of a shape that these paths can run.

        Args:
            known: what was measured beforehand.
        """
        row, size = math.log2(max(shape.row_bytes, 1)), math.log2(max(shape.size_bytes, 1))
        key = (direction, beside, round(row), round(2 * size), frozenset(paths))
        alike = self._alike.get(key)
        if alike is None:
            alike = self._alike[key] = Alike()
        return Request(known, alike)


class Request:
    """Requests of one shape: what is believed of them, and which path the next one takes."""

    def __init__(self, known: Estimate, alike: Alike) -> None:
        self._known, self._alike = known, alike
        self._least_us = min(known.times_us.values())
        self._version = -1  # of the figures that the next three were made of
        self._near: list[Path] = []
        self._best_us = 0.0
        self._choice: Choice

    def near(self) -> Sequence[Path]:
        """The paths within reach, the best first."""
        if self._version != self._alike.version:
            self._version, believed = self._alike.version, self.believed()
            times, self._choice = believed.times_us, believed.choice()
            self._best_us = times[self._choice.path]
            self._near = sorted(filter(self._is_near, times), key=believed.cost)
        return self._near

    def _is_near(self, path: Path) -> bool:
        """By figures of one origin where there are such: another GPU may be faster at all paths."""
        before, here = self._known.times_us, self._alike.seen[path].per_byte
        if not here and before[path] <= REACH * self._least_us:
            return True
        return (here * self._known.size_bytes or before[path]) <= REACH * self._best_us

    def is_due(self) -> bool:
        """Whether the next transfer is to be timed."""
        return self._alike.is_due()

    def choose(self, *, is_timed: bool) -> Choice:
        """The best path, or one that is tried; nothing is tried unless the transfer `is_timed`."""
        near = self.near()
        path = self._alike.next(near) if is_timed else near[0]
        if path is near[0]:
            return self._choice
        best = self._choice
        return Choice(path=path, entries_per_call=best.entries_per_call, why=lambda: f"tried: {best.reason}")

    def note(self, path: Path, time_us: float) -> None:
        """What a transfer took that nothing disturbed."""
        if time_us > 0 and (size := self._known.size_bytes):
            self._alike.add(path, time_us / size, best=self._best_us / size)

    def believed(self) -> Estimate:
        """What was seen here, and for paths of which too little was seen, what was measured beforehand."""
        known, seen = self._known, self._alike.seen
        here = {path: seen[path].per_byte * known.size_bytes for path in known.times_us if seen[path].per_byte}
        if not here:
            return known
        number = sum([len(seen[path].recent) for path in here])
        return Estimate(
            size_bytes=known.size_bytes, times_us={**known.times_us, **here}, entries_per_call=known.entries_per_call,
            why=functools.partial(_measured, here, number, known), host_us=known.host_us,
        )  # fmt: skip


def _measured(here: Mapping[Path, float], number: int, known: Estimate) -> str:
    reason = f"measured here: {shown(here, known.host_us)} ({number} transfers)"
    if others := {path: time_us for path, time_us in known.times_us.items() if path not in here}:
        reason += f"; estimated: {shown(others, known.host_us)}"
    return reason


@dataclass(slots=True)
class _Seen:
    """Of one path."""

    num_tried: int = 0
    tried_at: int = 0  #: number of the request
    is_new: bool = True  #: no time came yet
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))  #: microseconds for a byte
    per_byte: float = 0.0  #: the figure that is believed, if there is one

    def add(self, per_byte: float) -> bool:
        """Is there another figure now? The first time counts for nothing: kernels were compiled, memory was taken."""
        if self.is_new:
            self.is_new = False
            return False
        self.recent.append(per_byte)
        # The middle one, of two in the middle the lower: what disturbs a transfer does not make it faster.
        figure = sorted(self.recent)[(len(self.recent) - 1) // 2]
        if len(self.recent) < _ENOUGH or abs(figure - self.per_byte) <= _STEADY * self.per_byte:
            return False
        self.per_byte = figure
        return True


class Alike:
    """What requests alike have shown."""

    def __init__(self) -> None:
        self.seen = {path: _Seen() for path in CANDIDATES}
        self.version = 0  #: changes with the figures
        self._count = 0
        self._again_at = AGAIN  # the next later trial
        self._quiet_until = 0  # nothing to try before

    def is_due(self) -> bool:
        """Counts a request that need not be timed, and says so."""
        if self._count + 1 >= self._quiet_until or not (self._count + 1) % RARELY:
            return True
        self._count += 1
        return False

    def next(self, near: Sequence[Path]) -> Path:
        """The path of a request that will be timed, out of those within reach, the best first."""
        self._count += 1
        if self._count < self._quiet_until:
            return near[0]
        path = self._trial(near)
        seen = self.seen[path]
        seen.num_tried, seen.tried_at = seen.num_tried + 1, self._count
        return path

    def _trial(self, near: Sequence[Path]) -> Path:
        new = [path for path in near if self.seen[path].num_tried < TRIALS]
        if new:  # all of a path in a row: beside kernels of others a transfer begins where the last one ended
            return max(new, key=lambda path: self.seen[path].num_tried) if len(near) > 1 else near[0]
        if self._count >= self._again_at:
            self._again_at = self._count + AGAIN
            self._forget(near[0])
            return min(near[1:], key=lambda path: self.seen[path].tried_at, default=near[0])
        self._quiet_until = self._again_at
        return near[0]

    def add(self, path: Path, per_byte: float, *, best: float) -> None:
        """A time. If the figure does not follow it past the best one, another trial is due."""
        seen = self.seen[path]
        if abs(per_byte - seen.per_byte) > _STRANGE * seen.per_byte:
            self._quiet_until = 0
        if seen.add(per_byte):
            self.version, self._quiet_until = self.version + 1, 0
        if per_byte < best < seen.per_byte:
            seen.num_tried, self._quiet_until = TRIALS - 1, 0

    def _forget(self, best: Path) -> None:
        """Perhaps it was seen at a bad time, and what was measured beforehand brings it within reach again."""
        for path, seen in self.seen.items():
            if path is not best and seen.num_tried and self._count - seen.tried_at >= FORGET:
                self.seen[path] = _Seen()
                self.version += 1
