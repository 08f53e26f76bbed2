"""One cell of a benchmark: all contenders for one collective at one size, checked, timed side by side, checked again.

Owns the protocol of a measurement on one rank. How ranks come to be, and what they agree on besides times, is the
worker's; `Agree` is all that is asked of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.bench.baselines.copies import Copies
from dovetail.bench.cases import Case
from dovetail.bench.contender import Backend, Contender, check
from dovetail.bench.spec import Spec
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


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What the contenders are measured with."""

    case: Case
    spec: Spec
    rank: int
    start: Callable[[], object]
    agree: Agree

    def measure(self, wanted: list[tuple[Backend, str]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Rows, one per contender that can run the case, and lines about those that cannot."""
        contenders, notes = self._bind(wanted)
        right = [self._check(contender, range(_CHECKS)) for contender in contenders]
        timed = [contender for contender, is_right in zip(contenders, right, strict=True) if is_right]
        limit = Copies().bind(self.case, "") if self.case.collective == "all_gather" else None
        # Timed on the data of the last check, not on zeros: some CPUs write zeros over zeros faster than other data.
        # Sums in place soon reach infinity, which takes no longer to add than a number.
        times_us, iterations = self._time([*timed, *([limit] if limit else [])])
        still = {id(contender): self._check(contender, range(_CHECKS, _CHECKS + 1)) for contender in timed}
        times = {id(contender): index for index, contender in enumerate(timed)}
        rows = []
        for contender in contenders:
            correct = still.get(id(contender), False)
            index = times[id(contender)] if correct else None
            time_us = None if index is None else times_us[index]
            row = self._row(contender, time_us, correct)
            row["iterations"] = 0 if index is None else iterations[index]
            if limit is not None:
                row["limit_us"] = times_us[-1]
                row["limit_share"] = None if time_us is None else times_us[-1] / time_us
            rows.append(row)
        return rows, notes

    def _bind(self, wanted: list[tuple[Backend, str]]) -> tuple[list[Contender], list[str]]:
        """All ranks leave out the same contenders: one is bound where it can be bound on all."""
        contenders, notes = [], []
        for backend, requested in wanted:
            bound: Contender | None = None
            problem = None
            try:
                bound = backend.bind(self.case, requested)
            except NotSupported as error:
                problem = str(error)
            problems = [text for text in self.agree(problem) if text is not None]
            if bound is not None and not problems:
                contenders.append(bound)
            else:
                name = backend.name if requested == backend.name else f"{backend.name} {requested}"
                notes.append(f"{self.case.collective}: {name} left out: {problems[0]}")
        return contenders, notes

    def _check(self, contender: Contender, iterations: range) -> bool:
        """Whether all ranks have the right result on fresh data; an error of one contender names it."""
        right = True
        for iteration in iterations:
            try:
                right &= check(contender, self.case, self.rank, iteration, self.start)
            except DovetailError as error:
                error.add_note(f"in {self.case.collective} of {self.case.size_bytes} bytes, {contender.requested}")
                raise
        return all(self.agree(right))

    def _time(self, contenders: list[Contender]) -> tuple[list[float], list[int]]:
        """The slowest rank's median of each contender in microseconds, and how often each was called."""
        if not contenders:
            return [], []
        calls = [contender.call for contender in contenders]
        iterations = self._iterations(self._medians(interleave(calls, self.start, [_WARM_UP] * len(calls))))
        return self._medians(interleave(calls, self.start, iterations)), iterations

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

    def _row(self, contender: Contender, time_us: float | None, correct: bool) -> dict[str, Any]:
        case = self.case
        return {
            "collective": case.collective,
            "backend": contender.backend,
            "variant": contender.variant,
            "requested": contender.requested,
            "ranks": case.ranks,
            "size_bytes": case.size_bytes,
            "tensors": self.spec.tensors if contender.backend == "cpu" else "ordinary",
            "time_us": None if time_us is None else round(time_us, 3),
            "algbw_gbps": None if time_us is None else case.algbw_gbps(time_us),
            "busbw_gbps": None if time_us is None else case.busbw_gbps(time_us),
            "correct": correct,
            "dtype": case.dtype,
            "in_place": contender.out is contender.inp,
        }
