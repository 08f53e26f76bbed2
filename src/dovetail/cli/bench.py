"""`dovetail bench`: our collectives beside Open MPI and gloo, in one run, with a verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.bench.spec import AUTO, BASELINES, COLLECTIVES, DTYPES, TENSORS, Spec
from dovetail.measure.sizes import format_bytes, geometric

if TYPE_CHECKING:
    from rich.table import Table

_EXAMPLES = """Examples:

dovetail bench all_gather --ranks 2 -b 1K -e 16M -f 4

dovetail bench all_to_all --variant auto,pcpy,b2b --baseline openmpi --json all_to_all.json

dovetail bench all_reduce --ranks 4 --tensors ordinary --dtype bfloat16 --baseline gloo

dovetail bench all --quick
"""
_EVERY = "all"
_NONE = "none"
_QUICK_S, _SECONDS = 0.03, 0.25
_QUICK_LIMIT_S = 45.0


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench", epilog=_EXAMPLES)(bench)


def bench(
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help=f"{', '.join(COLLECTIVES)}, or {_EVERY}.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many ranks.")] = 2,
    begin: Annotated[str, typer.Option("--begin", "-b", help="Smallest size: what each rank contributes.")] = "1K",
    end: Annotated[str, typer.Option("--end", "-e", help="Largest size.")] = "16M",
    factor: Annotated[float, typer.Option("--factor", "-f", help="From one size to the next.")] = 4,
    variant: Annotated[str, typer.Option(help="Variants of ours; the verdict is about the first.")] = AUTO,
    baseline: Annotated[str, typer.Option(help=f"Out of {', '.join(BASELINES)}; or {_NONE}.")] = ",".join(BASELINES),
    tensors: Annotated[str, typer.Option(help=f"Our tensors: {' or '.join(TENSORS)}.")] = TENSORS[0],
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = DTYPES[0],
    iters: Annotated[int | None, typer.Option(help="Calls of each at each size; as many as fit if not given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less time for each size.")] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write a record to FILE.")] = None,
) -> None:
    """Measure a collective beside its baselines, in the manner of nccl-tests.

    Every result is checked on fresh random data before it is timed. All contenders run in the same processes, in turn,
    from a common start; the time is the slowest rank's median. Exit 1 if a result was wrong.
    """
    spec = Spec(
        collectives=COLLECTIVES if collective == _EVERY else (collective,),
        ranks=ranks,
        sizes=tuple(geometric(begin, end, factor)),
        variants=words(variant),
        baselines=() if baseline == _NONE else words(baseline),
        tensors=tensors,
        dtype=dtype,
        iterations=iters,
        seconds=_QUICK_S if quick else _SECONDS,
        limit_s=_QUICK_LIMIT_S if quick else None,
    )
    from dovetail.bench import runner
    from dovetail.bench.verdict import verdicts

    with progress_bar() as progress:
        outcome = runner.run(spec, progress)
    _show(outcome.rows, spec)
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    print("ratio = baseline's time / our time, geometric mean over sizes; time = slowest rank's median")
    for verdict in verdicts(outcome.rows):
        print(verdict.line())
    if json is not None:
        from dovetail.measure import record

        record.write(record.new("bench", ["dovetail", *sys.argv[1:]], outcome.rows), json)
    if not outcome.correct:
        raise typer.Exit(1)


def words(text: str) -> tuple[str, ...]:
    """``'a, b'`` -> ``('a', 'b')``."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr where that is a terminal, otherwise nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, where: bar.update(task, completed=done, total=total, description=where)


def _show(rows: list[dict[str, Any]], spec: Spec) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=120)
    for collective in spec.collectives:
        own = [row for row in rows if row["collective"] == collective]
        if own:
            console.print(_table(collective, own, spec))


def _table(collective: str, rows: list[dict[str, Any]], spec: Spec) -> Table:
    """One line per size and contender; the last columns only where there is something in them."""
    from rich.table import Table

    with_c = any(row.get("c_time_us") is not None for row in rows)
    with_limit = any("limit_us" in row for row in rows)
    title = f"{collective}, {spec.ranks} ranks, {spec.dtype}, {spec.tensors} tensors"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("size\nB")
    table.add_column("\ncontender")
    for name in ("time\nus", "algbw\nGB/s", "busbw\nGB/s", "ratio\n/ ours"):
        table.add_column(name, justify="right")
    if with_c:
        table.add_column("from C\nus", justify="right")
    if with_limit:
        table.add_column("share of\nplain copies", justify="right")
    table.add_column("\ncorrect")
    for size_bytes in dict.fromkeys(row["size_bytes"] for row in rows):
        here = [row for row in rows if row["size_bytes"] == size_bytes]
        ours = here[0]["time_us"] if here[0]["backend"] == "cpu" else None
        for index, row in enumerate(here):
            cells = [format_bytes(size_bytes) if index == 0 else "", _name(row)]
            cells += [_number(row[name]) for name in ("time_us", "algbw_gbps", "busbw_gbps")]
            cells.append(_number(row["time_us"] / ours if ours and row["time_us"] and index else None))
            cells += [_number(row.get("c_time_us"))] * with_c
            cells += ["" if row.get("limit_share") is None else f"{row['limit_share']:.0%}"] * with_limit
            table.add_row(*cells, "yes" if row["correct"] else "[red]NO[/]", end_section=row is here[-1])
    return table


def _name(row: dict[str, Any]) -> str:
    same = row["requested"] in (row["variant"], row["backend"])
    return str(row["requested"]) if same else f"{row['requested']} ({row['variant']})"


def _number(value: float | None) -> str:
    """Four digits that matter."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}" if value >= 1 else f"{value:.3f}"
