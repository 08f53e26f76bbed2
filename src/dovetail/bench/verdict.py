"""The conclusion of a benchmark, from its rows: how much longer each baseline takes than we do.

Pure functions of rows. At one size the ratio is ``baseline's time_us / our time_us``, above 1 where we are faster; over
sizes it is their geometric mean. A size with a wrong result has no time and enters no ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.bench.spec import OURS
from dovetail.measure.sizes import format_bytes
from dovetail.measure.stats import geometric_mean

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One baseline against us."""

    baseline: str
    by_size: dict[int, float]
    """size_bytes -> baseline's time over ours."""

    @property
    def mean(self) -> float:
        """Geometric mean over the sizes."""
        return geometric_mean(self.by_size.values())

    @property
    def least(self) -> tuple[int, float]:
        """The size at which we do worst, and the ratio there."""
        return min(self.by_size.items(), key=lambda item: item[1])

    @property
    def num_faster(self) -> int:
        """Sizes at which we are faster."""
        return sum(ratio > 1 for ratio in self.by_size.values())


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run says about one collective."""

    collective: str
    requested: str
    """The variant of ours it is about."""
    num_rows: int
    num_wrong: int
    ratios: tuple[Ratio, ...]

    @property
    def correct(self) -> bool:
        """Whether every result of every contender was right."""
        return self.num_wrong == 0

    def line(self) -> str:
        """The verdict in one line."""
        parts = []
        for ratio in self.ratios:
            size_bytes, least = ratio.least
            faster = f"faster at {ratio.num_faster} of {len(ratio.by_size)} sizes"
            parts.append(
                f"{ratio.baseline} takes {ratio.mean:.2f}x our time "
                f"({faster}, least {least:.2f}x at {format_bytes(size_bytes)})"
            )
        right = "all correct" if self.correct else f"{self.num_wrong} of {self.num_rows} results WRONG"
        return f"{self.collective} {self.requested}: " + "; ".join([*parts, right])


def verdicts(rows: Sequence[Row], requested: str | None = None) -> list[Verdict]:
    """One verdict per collective; `requested` names the variant of ours, the first one in the rows if not given."""
    found = []
    for collective in dict.fromkeys(row["collective"] for row in rows):
        own = [row for row in rows if row["collective"] == collective]
        names = [row["requested"] for row in own if row["backend"] in OURS]
        name = requested if requested in names or not names else names[0]
        mine = [row for row in own if row["backend"] in OURS and row["requested"] == name]
        ours = {row["size_bytes"]: row["time_us"] for row in mine}
        baselines = dict.fromkeys(row["backend"] for row in own if row["backend"] not in OURS)
        ratios = [_ratio(baseline, own, ours) for baseline in baselines]
        found.append(
            Verdict(
                collective=collective,
                requested=name or "baselines only",
                num_rows=len(own),
                num_wrong=sum(not row["correct"] for row in own),
                ratios=tuple(ratio for ratio in ratios if ratio.by_size),
            )
        )
    return found


def _ratio(baseline: str, rows: Sequence[Row], ours: dict[int, float | None]) -> Ratio:
    by_size = {}
    for row in rows:
        mine = ours.get(row["size_bytes"])
        if row["backend"] == baseline and row["time_us"] and mine:
            by_size[row["size_bytes"]] = row["time_us"] / mine
    return Ratio(baseline=baseline, by_size=by_size)
