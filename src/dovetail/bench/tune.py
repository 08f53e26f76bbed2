"""Measures the variants and turns what was found into the section "coll" of a profile.

At each size the fastest correct contender wins, neighbours that agree are one range, and the border between two ranges
lies at the geometric middle of the sizes on its sides. What the user would run without us (variant ``torch``) is a
contender like the others. All but `measure` and `save` are pure functions of rows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail import env, profile
from dovetail.bench import runner
from dovetail.bench.placement import Cpu, Placement
from dovetail.bench.spec import COLLECTIVES, CPU, OUT_OF_TIME, SWAP, TORCH, Spec
from dovetail.errors import DovetailError
from dovetail.measure import machine

_MOST_S = 0.25
"""More time for one variant at one size would tell no more."""
_VARIANTS_ABOUT = 4
_GIVE_UP = 4.0
"""Three calls are enough to know that a variant this many times slower will not win."""
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


def measure(
    ranks: Sequence[int],
    sizes: Sequence[int],
    budget_s: float,
    progress: AbstractContextManager[runner.Progress | None],
    into: list[runner.Outcome],
    placement: Placement | None = None,
) -> None:
    """Every variant of every collective, within about `budget_s`; on the CPU by default.

    One number of ranks after the other; `into` gets the outcome of each when it is done, so that it has those before
    if a later one fails or is interrupted.
    """
    from dovetail import coll

    # The bench runs `swap` in place, and `auto` takes it for just those calls: it is no candidate for the others.
    names = dict.fromkeys([*(variant for name in COLLECTIVES for variant in coll.variants(name)), TORCH])
    variants = tuple(name for name in names if name != SWAP)
    deadline = time.monotonic() + budget_s
    where = placement or Cpu()
    with progress as tell:
        for index, number in enumerate(ranks):
            share_s = max((deadline - time.monotonic()) / (len(ranks) - index), 0.0)
            # About half of the time goes into checks, starts and slow first calls.
            seconds = share_s / 2 / (len(COLLECTIVES) * len(sizes) * _VARIANTS_ABOUT)
            spec = Spec(
                collectives=COLLECTIVES,
                ranks=number,
                sizes=tuple(sizes),
                variants=variants,
                backend=where.backend,
                seconds=min(max(seconds, 1e-3), _MOST_S),
                limit_s=share_s,
                give_up=_GIVE_UP,
            )
            outcome = runner.run(spec, tell, where)
            into.append(replace(outcome, notes=[_told(number, note) for note in outcome.notes]))


def _told(ranks: int, note: str) -> str:
    mend = "; a longer --budget has them" if note.startswith(OUT_OF_TIME) else ""
    return f"{ranks} ranks: {note}{mend}"


def joined(outcomes: Iterable[runner.Outcome]) -> runner.Outcome:
    """All of them as one, on the GPU of the last."""
    rows: list[Row] = []
    notes: list[str] = []
    gpu: dict[str, Any] | None = None
    for outcome in outcomes:
        rows, notes, gpu = rows + outcome.rows, notes + outcome.notes, outcome.gpu
    return runner.Outcome(rows=rows, notes=notes, gpu=gpu)


def save(found: Sequence[Winner], rows: Sequence[Row], backend: str = CPU, up_to: int = 0) -> tuple[Path, list[str]]:
    """Write the profile of this machine; returns its file, and lines about what stays as it was.

    What it has for other numbers of ranks and backends stays in it, and so does a table that was made of more sizes
    than this run has got to. `up_to` is the largest size that was asked for: where less was measured, the shipped
    default serves beyond.
    """
    if not found:
        raise DovetailError("nothing was measured within the budget; give more time")
    old, _ = profile.load(env.profile_path(), machine.profile_key())
    before = old.sections.get("points", {}).get(backend, {}) if old else {}
    better, notes = [], []
    for name, number in dict.fromkeys((winner.collective, winner.ranks) for winner in found):
        mine = [winner for winner in found if (winner.collective, winner.ranks) == (name, number)]
        known = {point[0] for point in before.get(name, {}).get(str(number), ())}
        if len(mine) < len(known):
            notes.append(f"{name}, {number} ranks: the profile keeps its {len(known)} sizes; this run has {len(mine)}")
        else:
            better += mine
    if not better:
        return env.profile_path(), notes
    kept = {(winner.collective, winner.ranks) for winner in better}
    fresh = points([row for row in rows if (row["collective"], row["ranks"]) in kept], backend)
    sections = {"coll": section(better, backend, up_to), "points": fresh}
    new = profile.Profile(key=machine.profile_key({number for _, number in kept}), sections=sections)
    return profile.save(old.merged(new) if old else new), notes


def winners(rows: Iterable[Row], backend: str = CPU) -> list[Winner]:
    """The fastest correct variant for each collective, number of ranks and size, in the order of the rows."""
    cells: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row["backend"] == backend and row["correct"] and row["time_us"] is not None:
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


def section(found: Sequence[Winner], backend: str = CPU, up_to: int = 0) -> dict[str, Any]:
    """The section "coll": backend, collective, ranks -> rows ``[max_bytes or null, variant, time_us]``.

    Where the largest measured size is below `up_to`, the shipped default's variant serves beyond it.
    """
    table: dict[str, dict[str, list[list[Any]]]] = {}
    for winner in found:
        table.setdefault(winner.collective, {}).setdefault(str(winner.ranks), [])
    for collective, by_ranks in table.items():
        for ranks in by_ranks:
            mine = [w for w in found if w.collective == collective and str(w.ranks) == ranks]
            by_ranks[ranks] = _ranges(mine)
            largest = max(w.size_bytes for w in mine)
            if largest < up_to:
                by_ranks[ranks][-1][0] = largest
                beyond = profile.choose(collective, int(ranks), largest + 1, backend=backend)
                by_ranks[ranks].append([None, beyond.variant])
    return {backend: table}


def points(rows: Iterable[Row], backend: str = CPU) -> dict[str, Any]:
    """The section "points": backend, collective, ranks -> ``[size_bytes, variant, time_us]`` of all that was measured.

    Choices need only the winners; a model of the machine is fitted to all of it.
    """
    table: dict[str, dict[str, list[list[Any]]]] = {}
    for row in rows:
        if row["backend"] == backend and row["correct"] and row["time_us"] is not None:
            found = table.setdefault(row["collective"], {}).setdefault(str(row["ranks"]), [])
            found.append([row["size_bytes"], row["variant"], row["time_us"]])
    return {backend: table}


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
