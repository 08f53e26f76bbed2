"""From measured times of transports to the section "fused" of a profile (`dovetail.ops.choose` has its form)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail import env, profile
from dovetail.errors import DovetailError
from dovetail.measure import evidence, machine
from dovetail.ops import choose

SECTION = "fused"
Row = dict[str, Any]


def where(backend: str, device: str, driver: int) -> dict[str, str]:
    """What the figures of a GPU hold for: its name, and whose collectives unfused runs on."""
    ours = choose.has_passed(evidence.found(evidence.SELFTEST, backend), device, driver)
    return {choose.DEVICE: device, choose.COLLECTIVES: choose.OURS if ours else choose.TORCHS}


def section(rows: Iterable[Row], where: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Backend, operator, number of ranks -> ``[operations, bytes, {transport: time_us}, dtype]`` of each shape.

    A wrong result has no time. A shape without a time of unfused tells nothing and is left out. Uneven splits have the
    load (0, 0): what a rank does there must not depend on its own sizes. What figures of a GPU hold for stands beside.
    """
    table: dict[str, dict[str, Any]] = {}
    for row in rows:
        times = {name: t for name, t in row["times_us"].items() if name in choose.NAMES}
        if choose.UNFUSED in times:
            by_ranks = table.setdefault(row["backend"], {}).setdefault(row["op"], {})
            entry = [row["operations"], row["size_bytes"], times, row["dtype"]]
            by_ranks.setdefault(str(row["ranks"]), []).append(entry)
    for of_backend in table.values():
        of_backend |= where or {}
    return table


def save(rows: Sequence[Row], where: Mapping[str, str] | None = None) -> Path:
    """Writes the profile of this machine. An operator's figures for a number of ranks are replaced as a whole; all else
    in the profile stays, except figures of the same backend that hold for something else."""
    new = section(rows, where)
    if not new:
        raise DovetailError("nothing was measured within the budget; give more time")
    made = profile.Profile(key=machine.profile_key(), sections={SECTION: new})  # it says itself for how many ranks
    old, _ = profile.load(env.profile_path(), machine.profile_key())
    if old:
        for backend, figures in new.items():
            before = old.sections.get(SECTION, {})
            if any(before.get(backend, {}).get(key) != figures.get(key) for key in choose.WHERE):
                before.pop(backend, None)
    return profile.save(old.merged(made) if old else made)


def lines(rows: Sequence[Row]) -> list[str]:
    """For each operator and number of ranks: who was fastest how often, and the mean gain over unfused."""
    from dovetail.measure.stats import geometric_mean

    found = []
    for backend, by_op in section(rows).items():
        for op, by_ranks in by_op.items():
            for ranks, entries in by_ranks.items():
                fastest = [min(entry[2].items(), key=lambda item: item[1])[0] for entry in entries]
                gain = geometric_mean(entry[2][choose.UNFUSED] / min(entry[2].values()) for entry in entries)
                counts = ", ".join(f"{name} {fastest.count(name)}" for name in choose.NAMES if name in fastest)
                text = f"{op}, {backend}, {ranks} ranks: fastest of {len(entries)} shapes: {counts}"
                found.append(f"{text}; {gain:.2f}x over unfused")
    return found
