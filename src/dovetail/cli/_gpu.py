"""What `bench` and `phases` do with ``--backend cuda``: open the GPU, measure, print, write the record."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.bench.gpu.spec import BESIDE, COPIES, Bounds, CollectiveSpec, Effort
from dovetail.cli._output import refuse_nothing, save
from dovetail.cli._table import show as show_table
from dovetail.measure.sizes import format_bytes

if TYPE_CHECKING:
    from dovetail.bench.gpu.session import Session

Progress = Callable[[int, int, str], None] | None
Row = dict[str, Any]
Found = tuple[list[Row], dict[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured, ready to be shown."""

    title: str
    rows: list[Row]
    columns: dict[str, str]
    """Field of a row -> heading."""
    share: str
    """The field that is shown in per cent."""
    lines: list[str]
    notes: list[str]
    facts: dict[str, Any]
    """The GPU."""
    extra: list[Row] = dataclasses.field(default_factory=list)
    """Rows that are in the record and not in the table."""


def collective(spec: CollectiveSpec, bounds: Bounds, energy: bool, progress: Progress) -> Outcome:
    """A collective with host peers."""
    from dovetail.bench.gpu import collectives, verdict
    from dovetail.bench.gpu import energy as joules

    with _session(bounds) as session:
        extra, more = _energy(session, spec.collective, spec.ranks, progress) if energy else ([], [])
        rows, notes = collectives.measure(session, spec, progress)
        return Outcome(
            title=f"{spec.collective}, {spec.ranks} ranks: a GPU and host peers",
            rows=rows,
            columns={
                "variant": "variant", "streams": "streams", "time_us": "time us", "busbw_gbps": "busbw GB/s",
                "link_gbps": "link GB/s",
            },
            share="limit_share",
            lines=[*verdict.lines(rows), *joules.lines(extra)],
            notes=[*notes, *more],
            facts=session.facts(),
            extra=extra,
        )  # fmt: skip


def copies(sizes: Sequence[int], effort: Effort, bounds: Bounds, progress: Progress) -> Outcome:
    """Single copies."""
    from dovetail.bench.gpu import copies as work

    with _session(bounds) as session:
        rows, notes = work.measure(session, sizes, effort, progress)
        return Outcome(
            title=f"{COPIES}: a plan of one copy beside the driver's call",
            rows=rows,
            columns={"backend": "by", "direction": "direction", "time_us": "time us", "bandwidth_gbps": "GB/s"},
            share="share",
            lines=work.lines(rows),
            notes=notes,
            facts=session.facts(),
        )


def beside(ranks: int, rounds: int, bounds: Bounds, energy: bool, progress: Progress) -> Outcome:
    """A GEMM beside transfers."""
    from dovetail.bench.gpu import beside as work
    from dovetail.bench.gpu import energy as joules

    with _session(bounds) as session:
        extra, more = _energy(session, "all_gather", ranks, progress) if energy else ([], [])
        rows, notes = work.measure(session, ranks=ranks, rounds=rounds, progress=progress)
        return Outcome(
            title=f"{rows[0]['computation']} beside transfers",
            rows=rows,
            columns={
                "transfer": BESIDE, "programs": "programs", "compute_us": "GEMM us", "gbps": "GB/s",
                "alone_gbps": "alone GB/s",
            },
            share="compute_kept",
            lines=[*work.lines(rows), *joules.lines(extra)],
            notes=[*notes, *more],
            facts=session.facts(),
            extra=extra,
        )  # fmt: skip


def phases(sizes: Sequence[int], iterations: int | None, bounds: Bounds, progress: Progress) -> Found:
    """Rows of the phases of a copy, and the GPU for the record."""
    from dovetail.bench.gpu import phases as work

    with _session(bounds) as session:
        return work.measure(session, sizes, iterations, progress), session.facts()


def _energy(session: Session, name: str, ranks: int, progress: Progress) -> tuple[list[Row], list[str]]:
    """Before everything else, while the GPU is cool; a missing meter is a line, no end."""
    from dovetail.bench.gpu import energy as joules
    from dovetail.errors import NotSupported

    try:
        return joules.measure(session, name, ranks=ranks, progress=progress)
    except NotSupported as error:
        return [], [f"no energy figures: {error}"]


def write(kind: str, rows: list[Row], facts: dict[str, Any] | None, json: Path) -> None:
    """The record, with the GPU among the machine's facts where there was one."""
    from dovetail.measure import record

    made = record.new(kind, ["dovetail", *sys.argv[1:]], rows)
    gpu = {} if facts is None else {"gpu": facts}
    save(dataclasses.replace(made, machine=made.machine | gpu), json)


@contextmanager
def _session(bounds: Bounds) -> Iterator[Session]:
    from dovetail.bench.gpu.session import Session

    with Session("cuda", bounds) as session:
        yield session


def show(outcome: Outcome, json: Path | None) -> None:
    """Table, notes and verdict; the record; exit 1 if a result was wrong, or nothing was measured."""
    _table(outcome)
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    refuse_nothing([*outcome.rows, *outcome.extra])
    for line in outcome.lines:
        print(line)
    rows = [*outcome.rows, *outcome.extra]
    if json is not None:
        write("bench", rows, outcome.facts, json)
    if not all(row["correct"] for row in rows):
        raise typer.Exit(1)


def _table(outcome: Outcome) -> None:
    from rich.table import Table

    table = Table(title=outcome.title, title_justify="left", box=None, pad_edge=False)
    sized = any("size_bytes" in row for row in outcome.rows)
    left = ("size B", "variant", BESIDE, "by", "correct")
    for name in [*["size B"] * sized, *outcome.columns.values(), "share", "correct"]:
        table.add_column(name, justify="left" if name in left else "right")
    last = None
    for row in outcome.rows:
        first = [format_bytes(row["size_bytes"]) if row["size_bytes"] != last else ""] if sized else []
        last = row.get("size_bytes")
        share = row[outcome.share]
        cells = [*first, *(_cell(row[name]) for name in outcome.columns), "" if share is None else f"{share:.1%}"]
        table.add_row(*cells, "yes" if row["correct"] else "[red]NO[/]")
    show_table(table, wide=120, keys=2 if sized else 1)


def _cell(value: float | str | None) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
