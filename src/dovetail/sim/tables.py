"""Tables that a machine is compared with: measured times, speedups over a baseline, or shares of phases.

Owns the forms in which they come and turns each into `Target`s: a case, what is asked of it, and the figure. Forms:
A's speedup table, A's phase table, a `dovetail.bench` record, and the section "points" of a profile.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dovetail.sim.collectives import COPY, Case, collectives, variants
from dovetail.sim.result import Phase

_PRELAUNCH = "_prelaunch"


class Figure(StrEnum):
    """What a target states."""

    TIME = "time_us"
    SPEEDUP = "speedup"  #: over the baseline variant at the same size
    SHARE = "share_pct"  #: of one phase, in percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One entry of a table."""

    case: Case
    figure: Figure
    value: float
    phase: Phase | None = None
    outlier: bool = False  #: the table itself says that it should not count

    @property
    def name(self) -> str:
        """The column it stood in."""
        return f"{self.phase}_pct" if self.phase else self.case.name


def load(
    path: str | os.PathLike[str], *, collective: str | None = None, ranks: int | None = None, backend: str = "cpu"
) -> list[Target]:
    """The targets in a JSON file of any of the forms.

    Args:
        collective: what a speedup table is about (it does not say so itself).
        ranks: of a speedup table.
        backend: whose points of a profile, and whose rows of a bench record.

    Raises:
        ValueError: the file is none of them, or has nothing that can be priced; the message starts with the path.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    try:
        found = list(_parse(data, collective, ranks, backend))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a table that can be priced: {error!r}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not found:
        raise ValueError(f"{path}: it has no entry that can be priced")
    return found


def _parse(data: Any, collective: str | None, ranks: int | None, backend: str) -> Iterator[Target]:
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, found {type(data).__name__}")
    schema = str(data.get("schema", ""))
    if schema.startswith("dovetail.bench/"):
        yield from _bench(data["rows"], backend)
    elif schema.startswith("dovetail.profile/"):
        yield from points(data["sections"], backend)
    elif schema:
        raise ValueError(f"schema {schema!r}: only bench records and profiles can be fitted to")
    elif "rows" in data and data["rows"] and "copy_pct" in data["rows"][0]:
        yield from _phases(data["rows"])
    elif "rows" in data:
        yield from _speedups(data, collective or data.get("collective"), ranks or data.get("ranks", 8))
    else:
        raise ValueError("it has no rows")


def _phases(rows: Iterable[Mapping[str, Any]]) -> Iterator[Target]:
    for row in rows:
        for phase in Phase:
            case = Case(collective=COPY, variant="pcpy", total_bytes=_count(row["total_bytes"]), ranks=2)
            yield Target(case=case, figure=Figure.SHARE, value=_number(row[f"{phase}_pct"], least=0), phase=phase)


def _speedups(data: Mapping[str, Any], collective: str | None, ranks: int) -> Iterator[Target]:
    if collective is None:
        raise ValueError("a table of speedups does not say which collective it is about: give it (--collective)")
    outliers = set(data.get("outliers", ()))
    for row in data["rows"]:
        total = _count(row["total_bytes"])
        for column, value in row.items():
            if column == "total_bytes" or value is None:
                continue
            case = Case(
                collective=collective,
                variant=column.removesuffix(_PRELAUNCH),
                prelaunch=column.endswith(_PRELAUNCH),
                total_bytes=total,
                ranks=_count(ranks),
            )
            if case.variant not in variants(collective):
                allowed = ", ".join(variants(collective))
                raise ValueError(f"{collective} has no variant {case.variant!r}; it has {allowed}")
            yield Target(
                case=case,
                figure=Figure.SPEEDUP,
                value=_number(value),
                outlier=f"{column} at {total}" in outliers,
            )


def _bench(rows: Iterable[Mapping[str, Any]], backend: str) -> Iterator[Target]:
    """Rows of `dovetail bench`: our own variants, measured on every rank at once, tensors on the heap."""
    for row in rows:
        if row.get("correct") and row["backend"] == backend and row.get("tensors", "symmetric") == "symmetric":
            found = _point(row["collective"], row["variant"], row["ranks"], row["size_bytes"], row["time_us"])
            if found is not None:
                yield found


def points(sections: Mapping[str, Any], backend: str) -> Iterator[Target]:
    """The section "points" of a profile: every time that `dovetail tune` measured, the winners' and the others'."""
    table = sections.get("points", {}).get(backend)
    if not table:
        raise ValueError(f"the profile has no measured points for {backend}; measure it again with `dovetail tune`")
    for collective, by_ranks in table.items():
        for ranks, rows in by_ranks.items():
            for size_bytes, variant, time_us in rows:
                found = _point(collective, variant, int(ranks), size_bytes, time_us)
                if found is not None:
                    yield found


def _point(collective: str, variant: str, ranks: int, size_bytes: int, time_us: float | None) -> Target | None:
    """c10d's size (a rank's input) as a total; None for what is no plan of ours (the baselines)."""
    if collective not in collectives() or variant not in variants(collective) or time_us is None or ranks < 2:
        return None
    size_bytes = _count(size_bytes)
    total = size_bytes * ranks if collective == "all_gather" else size_bytes
    if collective == "all_to_all" and total % ranks:
        return None
    case = Case(collective=collective, variant=variant, total_bytes=total, ranks=ranks, complete=True)
    return Target(case=case, figure=Figure.TIME, value=_number(time_us))


def _count(value: Any) -> int:
    """A number of bytes or ranks."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"expected a whole number above 0, found {value!r}")
    return value


def _number(value: Any, least: float | None = None) -> float:
    """A finite figure: above 0, or of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"expected a number, found {value!r}")
    if value < least if least is not None else value <= 0:
        raise ValueError(f"expected a number {'above 0' if least is None else f'of {least} or more'}, found {value!r}")
    return float(value)
