"""Turns measured rows into the section "coll" of a profile.

Pure functions of rows: at each size the fastest correct contender wins, neighbours that agree are one range, and the
border between two ranges lies at the geometric middle of the sizes on its sides. What the user would run without us
(variant ``torch``) is a contender like the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The fastest at one size."""

    collective: str
    ranks: int
    size_bytes: int
    variant: str
    time_us: float
    runner_up: str | None
    """The second fastest, if there was one."""
    lead: float | None
    """How many times longer that one takes."""


def winners(rows: Iterable[Row]) -> list[Winner]:
    """The fastest correct variant for each collective, number of ranks and size, in the order of the rows."""
    cells: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row["backend"] == "cpu" and row["correct"] and row["time_us"] is not None:
            cells.setdefault((row["collective"], row["ranks"], row["size_bytes"]), []).append(row)
    found = []
    for (collective, ranks, size_bytes), candidates in cells.items():
        first, *others = sorted(candidates, key=lambda row: float(row["time_us"]))
        found.append(
            Winner(
                collective=collective,
                ranks=ranks,
                size_bytes=size_bytes,
                variant=first["variant"],
                time_us=first["time_us"],
                runner_up=others[0]["variant"] if others else None,
                lead=others[0]["time_us"] / first["time_us"] if others else None,
            )
        )
    return found


def section(found: Sequence[Winner]) -> dict[str, Any]:
    """The section "coll": backend, collective, ranks -> rows ``[max_bytes or null, variant, time_us]``."""
    table: dict[str, dict[str, list[list[Any]]]] = {}
    for winner in found:
        table.setdefault(winner.collective, {}).setdefault(str(winner.ranks), [])
    for collective, by_ranks in table.items():
        for ranks in by_ranks:
            by_ranks[ranks] = _ranges([w for w in found if w.collective == collective and str(w.ranks) == ranks])
    return {"cpu": table}


def _ranges(found: Sequence[Winner]) -> list[list[Any]]:
    """One row per range of sizes with the same winner; its time is that at its largest measured size."""
    ordered = sorted(found, key=lambda winner: winner.size_bytes)
    rows: list[list[Any]] = []
    for winner, after in zip(ordered, [*ordered[1:], None], strict=True):
        if after is None:
            rows.append([None, winner.variant, winner.time_us])
        elif after.variant != winner.variant:
            border = math.isqrt(winner.size_bytes * after.size_bytes)
            rows.append([border, winner.variant, winner.time_us])
    return rows
