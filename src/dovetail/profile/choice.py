"""Chooses a variant from the section "coll" of a profile: a pure function of the table, the ranks and the size."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dovetail.profile.profile import Profile, default


class Choice(NamedTuple):
    """A variant and one line that says why."""

    variant: str
    reason: str


def choose(
    collective: str, ranks: int, size_bytes: int, *, backend: str = "cpu", profile: Profile | None = None
) -> Choice:
    """The variant that `profile` names for a call; without a profile the shipped default is asked.

    Where it has no figures for just this number of ranks, the nearest number is taken, of two the smaller; where it
    does not know the collective at all, the shipped default is asked. The reason tells either, and why a profile of
    this machine is ignored.

    Args:
        collective: such as ``all_gather``.
        ranks: ranks of the group.
        size_bytes: what each rank contributes.

    Raises:
        ValueError: neither `profile` nor the default knows the collective, or a number is out of range.
    """
    if ranks < 1 or size_bytes < 0:
        raise ValueError(f"ranks must be at least 1 and size_bytes not negative, got {ranks} and {size_bytes}")
    known: set[str] = set()
    for source in (profile, default()):
        if source is None:
            continue
        table = source.sections.get("coll", {}).get(backend, {})
        known.update(table)
        if by_ranks := table.get(collective):
            measured = min((int(number) for number in by_ranks), key=lambda number: (abs(number - ranks), number))
            rows = by_ranks[str(measured)]
            row = _row(rows, size_bytes)
            points = source.sections.get("points", {}).get(backend, {}).get(collective, {}).get(str(measured), [])
            told = f"{_where(source, measured, ranks)}, {_sizes(source, rows, row)}{_time(row, points, size_bytes)}"
            return Choice(str(row[1]), told + _instead_of(profile, source))
    names = ", ".join(sorted(known)) or "none"
    raise ValueError(f"no profile knows {collective!r} on backend {backend!r}; known are {names}")


def quoted(profile: Profile) -> dict[str, Any]:
    """Of the section "points" what reasons quote: at each size the variant that is chosen there."""
    made: dict[str, Any] = {}
    for backend, table in profile.sections.get("coll", {}).items():
        measured = profile.sections.get("points", {}).get(backend, {})
        for collective, by_ranks in table.items():
            for ranks, rows in by_ranks.items():
                points = measured.get(collective, {}).get(ranks, [])
                chosen = [point for point in points if point[1] == _row(rows, point[0])[1]]
                made.setdefault(backend, {}).setdefault(collective, {})[ranks] = chosen
    return made


def _row(rows: list[list[Any]], size_bytes: int) -> list[Any]:
    """The first row whose limit is not below the size; a validated table ends with one for any size."""
    return next(row for row in rows if row[0] is None or size_bytes <= row[0])


def _where(source: Profile, measured: int, ranks: int) -> str:
    name = "shipped default" if source.origin == "default" else f"profile of {source.date}"
    nearest = "" if measured == ranks else f" (nearest to {ranks})"
    return f"{name}, {measured} ranks{nearest}"


def _sizes(source: Profile, rows: list[list[Any]], row: list[Any]) -> str:
    """For which sizes a row holds; one that a measured profile has from the shipped default says so."""
    if source.origin == "default" or len(row) == 3:
        return "larger sizes" if row[0] is None else f"up to {_size(row[0])}"
    place = rows.index(row)
    above = f" above {_size(rows[place - 1][0])}" if place else ""
    return f"not measured{above} (tune ran out of time), shipped default"


def _time(row: list[Any], points: list[list[Any]], size_bytes: int) -> str:
    """What the variant took at the measured size that is nearest by ratio. A row's own time is of its largest size."""
    mine = [point for point in points if len(row) == 3 and point[1] == row[1]]
    if not mine:
        return ""
    near, _, time_us = min(mine, key=lambda point: abs(math.log((point[0] + 1) / (size_bytes + 1))))
    shown = f"{time_us:.0f}" if time_us >= 1000 else f"{time_us:.4g}"
    return f", measured {shown} us at {_size(near)}"


def _size(size_bytes: int) -> str:
    """``65536`` -> ``'64 KiB'``; what is no whole number of KiB stays in bytes."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift} {unit}"
    return f"{size_bytes} bytes"


def _instead_of(profile: Profile | None, source: Profile) -> str:
    """Why it is not this machine's profile that was asked; nothing where there is none."""
    if profile is None or source.origin != "default":
        return ""
    if profile.ignored:
        return f"; the profile is ignored: {profile.ignored}"
    return "" if profile.origin == "default" else f"; the profile of {profile.date} has no figures for it"
