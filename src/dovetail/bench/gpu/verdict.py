"""What a run with host peers says, in lines: our best variant against the best loop, and how near to plain copies.

Pure functions of rows. A ratio is a baseline's time over ours, above 1 where ours is faster. At each size the fastest
of ours stands against the fastest of theirs; since the best of many looks better than any one of them, a line follows
for each variant alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dovetail.bench.gpu.contenders import LOOP, PLAIN, TORCH
from dovetail.measure.sizes import format_bytes
from dovetail.measure.stats import geometric_mean

SMALL_BYTES, LARGE_BYTES = 64 << 10, 16 << 20
"""Small sizes show the cost of commands, large ones the bandwidth."""
Row = dict[str, Any]


def lines(rows: Sequence[Row]) -> list[str]:
    """The verdict on one collective. Sizes are `size_bytes`; a wrong result has no time and enters no ratio."""
    found = []
    for collective, ranks in dict.fromkeys((row["collective"], row["ranks"]) for row in rows):
        here = [row for row in rows if (row["collective"], row["ranks"]) == (collective, ranks)]
        title = f"{collective}, {ranks} ranks"
        best = _fastest(here, lambda row: row["backend"] == "cuda")
        for name, text in ((LOOP, "the loop of copies"), (TORCH, "torch's loop")):
            ratios = _ratios(_fastest(here, lambda row, name=name: row["backend"] == name), best)  # type: ignore[misc]
            if ratios:
                found.append(f"{title}: {text} takes of our best variant's time: {_by_size(ratios)}")
                found += _small(title, text, ratios)
        loop = _fastest(here, lambda row: row["backend"] == LOOP)
        for variant in dict.fromkeys(row["variant"] for row in here if row["backend"] == "cuda"):
            mine = _fastest(here, lambda row, v=variant: row["backend"] == "cuda" and row["variant"] == v)  # type: ignore[misc]
            small = {n: r for n, r in _ratios(loop, mine).items() if n <= SMALL_BYTES}
            if small:
                found.append(f"{title}: {variant} alone: {geometric_mean(small.values()):.2f}x up to 64K")
        shares = _ratios(_fastest(here, lambda row: row["backend"] == PLAIN), best)
        large = {n: share for n, share in shares.items() if n >= LARGE_BYTES}
        if large:
            shown = ", ".join(f"{format_bytes(n)} {share:.1%}" for n, share in large.items())
            found.append(f"{title}: our best variant reaches of two plain copies' speed: {shown}")
        wrong = sum(not row["correct"] for row in here)
        found.append(f"{title}: " + (f"{wrong} of {len(here)} results WRONG" if wrong else "all correct"))
    return found


def _fastest(rows: Iterable[Row], wanted: Callable[[Row], bool]) -> dict[int, float]:
    """size_bytes -> the least time of the rows that are wanted."""
    times: dict[int, float] = {}
    for row in rows:
        if row["time_us"] and wanted(row):
            times[row["size_bytes"]] = min(row["time_us"], times.get(row["size_bytes"], row["time_us"]))
    return times


def _ratios(theirs: dict[int, float], mine: dict[int, float]) -> dict[int, float]:
    return {n: theirs[n] / mine[n] for n in mine if n in theirs}


def _by_size(ratios: dict[int, float]) -> str:
    return ", ".join(f"{format_bytes(n)} {ratio:.2f}x" for n, ratio in ratios.items())


def _small(title: str, text: str, ratios: dict[int, float]) -> list[str]:
    small = [ratio for n, ratio in ratios.items() if n <= SMALL_BYTES]
    if not small:
        return []
    return [f"{title}: {text}, geometric mean up to 64K: {geometric_mean(small):.2f}x"]
