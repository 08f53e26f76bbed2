"""What the times of fused operators on a CPU say: pure functions of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dovetail.measure.stats import geometric_mean

Row = dict[str, Any]
OVER_GLOO, OVER_OURS = 1.3, 1.0
"""Speedups of the best transport, geometric mean over shapes: what must hold. The second is over torch's operator and
our collective as a user would write them, without an operator of ours."""
AUTO_LEAST, AUTO_MEAN = 0.95, 1.0
"""Speedups of `auto` over unfused: at any shape, and the geometric mean."""
FUSED = ("decomposed", "store", "dma")


def shapes(rows: Iterable[Row]) -> list[Row]:
    """Without the ablations."""
    return [row for row in rows if row["row"] == "shape"]


def best(row: Row) -> str | None:
    """The fastest transport that is not unfused."""
    times = {name: row["times_us"][name] for name in FUSED if name in row["times_us"]}
    return min(times, key=lambda name: times[name]) if times else None


def speedup(row: Row, name: str | None, over: str) -> float | None:
    """How many times faster a contender is than another: the median of the rounds' own ratios where these are known."""
    times = row["times_us"]
    if name is None or name not in times or over not in times:
        return None
    known = row.get({"unfused": "over_unfused", "torch+ours": "over_ours"}.get(over, ""), {})
    return float(known[name] if name in known else times[over] / times[name])


def _speedups(rows: Sequence[Row], over: str) -> list[float]:
    found = (speedup(row, best(row), over) for row in rows)
    return [ratio for ratio in found if ratio is not None]


def verdict(rows: Sequence[Row]) -> list[tuple[bool, str]]:
    """(holds, sentence), operator by operator, for what must hold."""
    found: list[tuple[bool, str]] = []
    for op in dict.fromkeys(row["op"] for row in shapes(rows)):
        mine = [row for row in shapes(rows) if row["op"] == op]
        for over, bar in (("gloo", OVER_GLOO), ("torch+ours", OVER_OURS)):
            if ratios := _speedups(mine, over):
                mean = geometric_mean(ratios)
                text = f"{op}: best transport {mean:.3f}x over {over} on the mean of {len(ratios)}, wanted {bar:g}"
                found.append((mean >= bar, text + _by_dtype(mine, over)))
        found += _auto(op, mine)
    return found


def _by_dtype(rows: Sequence[Row], over: str) -> str:
    means = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        if ratios := _speedups([row for row in rows if row["dtype"] == dtype], over):
            means.append(f"{dtype} {geometric_mean(ratios):.2f}")
    return f" ({', '.join(means)})"


def _auto(op: str, rows: Sequence[Row]) -> list[tuple[bool, str]]:
    ratios = {_name(row): ratio for row in rows if (ratio := speedup(row, "auto", "unfused")) is not None}
    if not ratios:
        return []
    mean, least = geometric_mean(ratios.values()), min(ratios, key=lambda name: ratios[name])
    below = [name for name, ratio in ratios.items() if ratio < AUTO_LEAST]
    where = f"; below {AUTO_LEAST:g} at {len(below)} of {len(ratios)}: {'; '.join(below)}" if below else ""
    return [
        (mean >= AUTO_MEAN, f"{op}: auto {mean:.2f}x over unfused on the mean, wanted {AUTO_MEAN:g}"),
        (not below, f"{op}: auto at least {ratios[least]:.2f}x ({least}), wanted {AUTO_LEAST:g}{where}"),
    ]


def _name(row: Row) -> str:
    return f"{row['shape']} {row['dtype']}"


def losses(rows: Sequence[Row]) -> list[str]:
    """Where the best transport does not beat torch with our collective, or with gloo's, and by how much."""
    found = []
    for op in dict.fromkeys(row["op"] for row in shapes(rows)):
        for over in ("torch+ours", "gloo"):
            mine = [row for row in shapes(rows) if row["op"] == op]
            slower = [(row, ratio) for row in mine if (ratio := speedup(row, best(row), over)) and ratio < 1]
            if slower:
                places = "; ".join(f"{_name(row)} {ratio:.3f}" for row, ratio in slower)
                found.append(f"{op}: best transport behind {over} at {len(slower)} of {len(mine)}: {places}")
    return found


def fbgemm(rows: Sequence[Row]) -> list[str]:
    """Against FBGEMM's lookup, where it could run."""
    found = []
    for name in ("fbgemm+gloo", "fbgemm+ours"):
        if ratios := _speedups(shapes(rows), name):
            mean = geometric_mean(ratios)
            found.append(f"embedding_all_to_all: best transport {mean:.3f}x over {name} on the mean of {len(ratios)}")
    return found


def graphs(rows: Sequence[Row]) -> list[str]:
    """Where `store` was captured in a graph: against itself and others as they are called."""
    found = []
    for op in dict.fromkeys(row["op"] for row in shapes(rows)):
        mine = [row for row in shapes(rows) if row["op"] == op]
        means = {
            over: geometric_mean(ratios)
            for over in ("torch+ours", "unfused", "store")
            if (ratios := [r for row in mine if (r := speedup(row, "graph", over)) is not None])
        }
        if means:
            told = ", ".join(f"{mean:.2f}x over {over}" for over, mean in means.items())
            found.append(f"{op}: store replayed in a graph {told}, which are called (collectives can't be captured)")
    return found


def ablations(rows: Sequence[Row]) -> list[str]:
    """One line for each operator and what was varied: geometric means over shapes, relative to the first setting."""
    found = []
    for op in dict.fromkeys(row["op"] for row in rows):
        for what in ("order", "slices", "skew"):
            mine = [row for row in rows if row["op"] == op and row["row"] == what and row["times_us"]]
            if not mine:
                continue
            parts = [part for name in mine[0]["times_us"] if (part := _relative(mine, what, name))]
            first = next(iter(mine[0]["times_us"]))
            told = "left to do when the late rank comes, over the whole" if what == "skew" else "time over that of"
            found.append(f"{op}, {what}: {told} {first}: {', '.join(parts)}")
    return found


def _relative(rows: Sequence[Row], what: str, name: str) -> str | None:
    ratios = []
    for row in rows:
        times = row["times_us"]
        first = next(iter(times))
        if name in times and name != first:
            left = times[name] - (row["late_us"] if what == "skew" else 0.0)
            ratios.append(max(left, 0.001) / times[first])
    return f"{name} {geometric_mean(ratios):.2f}" if ratios else None


def lines(rows: Sequence[Row]) -> list[str]:
    """For people."""
    found = [f"{'holds ' if holds else 'MISSES'} {text}" for holds, text in verdict(rows)]
    found += [*losses(rows), *fbgemm(rows), *graphs(rows), *ablations(rows)]
    wrong = sum(not row["correct"] for row in rows)
    return [*found, f"{wrong} of {len(rows)} rows WRONG" if wrong else "all correct"]
