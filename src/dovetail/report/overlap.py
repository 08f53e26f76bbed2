"""The plots of `dovetail bench overlap`, from its rows: shares of ideal, both slowdowns, and the regret of policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dovetail.bench.overlap import rows as kinds
from dovetail.bench.overlap import verdict
from dovetail.report import dots
from dovetail.report.dots import Dot

Row = dict[str, Any]


def write(rows: Sequence[Row], folder: Path, title: str) -> list[Path]:
    """Writes the pages into the folder, which is made. `title` says where the rows are from."""
    folder.mkdir(parents=True, exist_ok=True)
    best = [row for row in verdict.best_by_strategy(rows) if row["strategy"] != "serial"]
    policies = [row for row in rows if row["row"] == kinds.POLICY]
    note = "of each strategy the number of cores that was best in each scenario"
    return [
        dots.by_name(
            folder / "share_of_ideal.html", _series(best, "strategy", lambda row: row["share_of_ideal"]),
            title=f"Share of the ideal speedup: {title}", note=note, y="share of ideal",
        ),
        dots.against(
            folder / "slowdowns.html",
            _series(best, "strategy", lambda row: row["comm_slowdown"], lambda row: row["compute_slowdown"]),
            title=f"Times together over times alone: {title}", note=note, x="computation", y="communication",
        ),
        dots.by_name(
            folder / "regret.html", _series(policies, "policy", lambda row: row["regret"]),
            title=f"Regret of policies: {title}", note="over the best of the sweep, in other rounds than found it",
            y="regret",
        ),
    ]  # fmt: skip


def _series(
    rows: Sequence[Row], by: str, y: Callable[[Row], float], x: Callable[[Row], float] | None = None
) -> dict[str, list[Dot]]:
    found: dict[str, list[Dot]] = {}
    for row in rows:
        text = f"{row['scenario']}, {row['setting']}"
        found.setdefault(row[by], []).append(Dot(x(row) if x else row[by], y(row), text))
    return found
