"""One cell of a benchmark: all contenders for one collective at one size, checked, timed side by side, checked again.

Owns the protocol of a measurement on one rank. How ranks come to be, and what they agree on besides times, is the
worker's; `Agree` is all that is asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from dovetail.bench.baselines.copies import Copies
from dovetail.bench.cases import Case
from dovetail.bench.contender import Backend, Contender, check
from dovetail.bench.placement import Cpu, Placement
from dovetail.bench.spec import CPU, OURS, Spec
from dovetail.errors import DovetailError, NotSupported
from dovetail.measure.interleave import interleave
from dovetail.measure.stats import median

_CHECKS = 2
"""Fresh inputs before the timing, and one more after it."""
_WARM_UP = 3
_FEWEST, _MOST = 5, 2000
"""Bounds of the number of iterations that a time is turned into."""


class Agree(Protocol):
    """Gives every rank the values of all ranks, in their order."""

    def __call__(self, value: Any, /) -> list[Any]: ...


class Timing(NamedTuple):
    """How long a call takes, and how many were timed; None for a contender that gave a wrong result."""

    time_us: float | None
    """The slowest rank's median."""
    iterations: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the contenders are measured with."""

    case: Case
    spec: Spec
    rank: int
    start: Callable[[], object]
    agree: Agree
    placement: Placement = field(default_factory=Cpu)

    def measure(self, wanted: list[tuple[Backend, str]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows, one per contender that can run the case, and lines about those that cannot."""
        contenders, notes = self._bind(wanted)
        right = self._check(contenders, range(_CHECKS))
        timed = [contender for contender, is_right in zip(contenders, right, strict=True) if is_right]
        limit = Copies(self.placement).bind(self.case, "") if self._has_limit else None
        # Timed on the data of the last check, not on zeros, which some CPUs are said to write faster.
        # Sums in place soon reach infinity, which takes no longer to add than a number.
        timings = self._time([*timed, *([limit] if limit else [])])
        still = self._check(timed, range(_CHECKS, _CHECKS + 1))
        valid = {id(timed[index]): timings[index] for index, is_right in enumerate(still) if is_right}
        rows = []
        for contender in contenders:
            timing = valid.get(id(contender), Timing(None, 0))
            row = self._row(contender, timing)
            if contender.reason:
                row["reason"] = contender.reason
            if limit is not None:
                row["limit_us"] = limit_us = timings[-1].time_us
                row["limit_share"] = limit_us / timing.time_us if limit_us and timing.time_us else None
            rows.append(row)
        return rows, notes

    @property
    def _has_limit(self) -> bool:
        """Plain copies bound an all-gather where all ranks' memory is the same: not on several GPUs."""
        return self.case.collective == "all_gather" and (self.spec.backend == CPU or self.spec.gpus == 1)

    def _bind(self, wanted: list[tuple[Backend, str]]) -> tuple[list[Contender], list[str]]:
        """All ranks leave out the same contenders: one takes part where all ranks could bind it."""
        bound: list[Contender | None] = []
        problems: list[str | None] = []
        for backend, requested in wanted:
            try:
                bound.append(backend.bind(self.case, requested))
                problems.append(None)
            except NotSupported as error:
                bound.append(None)
                problems.append(str(error))
        contenders, notes = [], []
        for (backend, requested), contender, *of_ranks in zip(wanted, bound, *self.agree(problems), strict=True):
            problem = next((text for text in of_ranks if text is not None), None)
            if contender is not None and problem is None:
                contenders.append(contender)
            else:
                name = backend.name if requested == backend.name else f"{backend.name} {requested}"
                notes.append(f"{self.case.collective}: {name} left out: {problem}")
        return contenders, notes

    def _check(self, contenders: list[Contender], iterations: range) -> list[bool]:
        """Which contenders give all ranks the right result, on fresh data in each iteration."""
        right = [True] * len(contenders)
        for iteration in iterations:
            given, wanted = self.case.input(self.rank, iteration), self.case.expected(self.rank, iteration)
            for index, contender in enumerate(contenders):
                try:
                    right[index] &= check(contender, given, wanted, self.start)
                except DovetailError as error:
                    error.add_note(f"in {self.case.collective} of {self.case.size_bytes} bytes, {contender.requested}")
                    raise
        return [all(of_ranks) for of_ranks in zip(*self.agree(right), strict=True)]

    def _time(self, contenders: list[Contender]) -> list[Timing]:
        """Time all contenders side by side."""
        if not contenders:
            return []
        calls = [contender.call for contender in contenders]
        about_us = self._medians(interleave(calls, self.start, [_WARM_UP] * len(calls)))
        slowest_us = min(about_us) * (self.spec.give_up or math.inf)
        going_on = [index for index, time_us in enumerate(about_us) if time_us <= slowest_us]
        iterations = self._iterations([about_us[index] for index in going_on])
        medians = self._medians(interleave([calls[index] for index in going_on], self.start, iterations))
        timings = [Timing(time_us, _WARM_UP) for time_us in about_us]
        for index, time_us, number in zip(going_on, medians, iterations, strict=True):
            timings[index] = Timing(time_us, number)
        return timings

    def _medians(self, times_ns: list[list[int]]) -> list[float]:
        by_rank = self.agree([median(times) / 1e3 for times in times_ns])
        return [max(of_ranks) for of_ranks in zip(*by_rank, strict=True)]

    def _iterations(self, about_us: list[float]) -> list[int]:
        """As many calls as fit into the time; a fixed number, too, is bounded by time for one that is far slower."""
        fitting = [int(self.spec.seconds * 1e6 / max(time_us, 1.0)) for time_us in about_us]
        if self.spec.iterations is None:
            return [min(max(number, _FEWEST), _MOST) for number in fitting]
        bound = self.spec.iterations
        return [bound if time_us <= 10 * min(about_us) else min(bound, max(number, _FEWEST))
                for number, time_us in zip(fitting, about_us, strict=True)]  # fmt: skip

    def _row(self, contender: Contender, timing: Timing) -> dict[str, Any]:
        case, time_us = self.case, timing.time_us
        usual = self.spec.tensors if contender.backend in OURS else "ordinary"
        return {
            "collective": case.collective,
            "backend": contender.backend,
            "variant": contender.variant,
            "requested": contender.requested,
            "ranks": case.ranks,
            "size_bytes": case.size_bytes,
            "tensors": contender.tensors or usual,
            "time_us": None if time_us is None else round(time_us, 3),
            "algbw_gbps": None if time_us is None else case.algbw_gbps(time_us),
            "busbw_gbps": None if time_us is None else case.busbw_gbps(time_us),
            "correct": time_us is not None,
            "dtype": case.dtype,
            "in_place": contender.out is contender.inp,
            "iterations": timing.iterations,
        }
