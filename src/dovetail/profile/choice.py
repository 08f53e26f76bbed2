"""Chooses a variant from the section "coll" of a profile: a pure function of the table, the ranks and the size."""

from __future__ import annotations

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

    Where it has no figures for just this number of ranks, the nearest number below is taken, otherwise the nearest
    above; where it does not know the collective at all, the shipped default is asked.

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
            measured = _nearest(ranks, [int(number) for number in by_ranks])
            row = _row(by_ranks[str(measured)], size_bytes)
            return Choice(str(row[1]), _reason(source, ranks, measured, row))
    names = ", ".join(sorted(known)) or "none"
    raise ValueError(f"no profile knows {collective!r} on backend {backend!r}; known are {names}")


def _nearest(ranks: int, measured: list[int]) -> int:
    below = [number for number in measured if number <= ranks]
    return max(below) if below else min(measured)


def _row(rows: list[list[Any]], size_bytes: int) -> list[Any]:
    """The first row whose limit is not below the size; a validated table ends with one for any size."""
    return next(row for row in rows if row[0] is None or size_bytes <= row[0])


def _reason(source: Profile, ranks: int, measured: int, row: list[Any]) -> str:
    name = "shipped default" if source.origin == "default" else f"profile of {source.date}"
    text = f"{name}, {measured} ranks, {'larger sizes' if row[0] is None else f'up to {row[0]} bytes'}"
    if measured != ranks:
        text += f" (nearest to {ranks} ranks)"
    if len(row) == 3:
        text += f", measured {row[2]} us"
    return text
