"""What the rows say: shares of the yardsticks, what a computation keeps, and whether `auto` chose well."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.bench.kv.spec import BOTH, CONTIGUOUS, IDLE, PLAIN, Row
from dovetail.kv.choose import Path

KEPT = 0.97  #: of its speed a computation must keep for a path to count beside it
COPIES_KEPT = 0.9  #: of their path's idle speed, beside a computation: what is aimed at
NEAR = 1.05
_CELL = ("layout", "outermost", "tokens", "cache_bytes", "direction", "beside")


def lines(rows: Sequence[Row]) -> list[str]:
    """For each layout, direction and load the share of contiguous copies; then `auto` beside the best path."""
    found = []
    for key in dict.fromkeys((row["layout"], row["direction"], row["beside"]) for row in rows):
        here = [row for row in rows if (row["layout"], row["direction"], row["beside"]) == key and row["share"]]
        paths = [path for path in dict.fromkeys(row["path"] for row in here) if path != CONTIGUOUS]
        shown = ", ".join(_path(here, path) for path in paths)
        if shown:
            beside = "" if key[2] == IDLE else f" beside {key[2]}"
            found.append(f"{key[0]} {key[1]}{beside}: of one contiguous copy per block: {shown}")
    found += _auto(rows)
    wrong = sum(not row["correct"] for row in rows)
    return [*found, f"{wrong} of {len(rows)} results WRONG" if wrong else "all correct"]


def _path(rows: Sequence[Row], path: str) -> str:
    mine = [row for row in rows if row["path"] == path]
    text = f"{path} {_range([row['share'] for row in mine])}"
    kept = [row["compute_kept"] for row in mine if row["compute_kept"] is not None]
    return f"{text} (computation {_range(kept)})" if kept else text


def _range(shares: Sequence[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low}-{high}"


def cells(rows: Sequence[Row]) -> dict[tuple[object, ...], list[Row]]:
    """Rows of the same request under the same load, those that have a time."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row["time_us"] is not None:
            found.setdefault(tuple(row[name] for name in _CELL), []).append(row)
    return found


def best(cell: Sequence[Row]) -> Row | None:
    """The fastest path of a cell; beside a computation, of those that leave it enough, if there are any."""
    paths = [row for row in cell if row["path"] not in (CONTIGUOUS, PLAIN, Path.AUTO)]
    gentle = [row for row in paths if _is_gentle(row)]
    return min(gentle or paths, key=lambda row: float(row["time_us"]), default=None)


def _is_gentle(row: Row) -> bool:
    return row["compute_kept"] is None or row["compute_kept"] >= KEPT


def _auto(rows: Sequence[Row]) -> list[str]:
    """How near `auto` comes to the best path, and what it does beside a computation."""
    found, far = [], []
    graded = 0
    for key, cell in cells(rows).items():
        auto, first = next((row for row in cell if row["path"] == Path.AUTO), None), best(cell)
        if auto is None or first is None or key[4] == BOTH:  # it knows nothing of the other direction
            continue
        graded += 1
        behind = auto["time_us"] / first["time_us"]
        where = f"  {key[0]}, {key[2]} tokens, {key[4]}, {key[5]}"
        if behind > NEAR:
            far.append(f"{where}: {behind - 1:.0%} behind {first['path']}")
        elif not _is_gentle(auto) and _is_gentle(first):
            far.append(f"{where}: leaves computation {auto['compute_kept']:.0%}, {first['path']} leaves enough")
    if graded:
        found.append(f"auto is within {NEAR - 1:.0%} of the best path in {graded - len(far)} of {graded} cells")
    return [*found, *far, *_beside(rows)]


def _beside(rows: Sequence[Row]) -> list[str]:
    """Of `auto` beside computation: what that keeps, and its own speed as a share of that on an idle GPU.

    There it may have taken another path: so also as a share of what the path that it takes beside reaches there, if
    that was measured.
    """
    found = []
    known = cells(rows)
    met = 0
    for key, cell in known.items():
        idle = {row["path"]: row["bandwidth_gbps"] for row in known.get((*key[:-1], IDLE), [])}
        for row in cell:
            if key[-1] == IDLE or row["path"] != Path.AUTO or Path.AUTO not in idle:
                continue
            share = row["bandwidth_gbps"] / idle[Path.AUTO]
            own = row["bandwidth_gbps"] / idle[row["chosen"]] if row["chosen"] in idle else None
            met += (share if own is None else own) >= COPIES_KEPT and row["compute_kept"] >= KEPT
            kept = f"computation keeps {row['compute_kept']:.0%}, the copies {share:.0%} of auto's idle speed"
            kept += "" if own is None else f", {own:.0%} of that of its path"
            where = f"{key[0]}, {key[2]} tokens, {key[4]} beside {key[5]}"
            found.append(f"  auto, {where}: {kept} ({row['chosen']})")
    if found:
        aim = f"computation keeps {KEPT:.0%}, and copies {COPIES_KEPT:.0%} of what their path reaches on an idle GPU"
        found.insert(0, f"beside computation, in {met} of {len(found)} cells {aim}")
    return found
