"""`dovetail phases`: where the time of one copy goes, by size."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from dovetail.bench.gpu.spec import BACKENDS, Bounds, one_of
from dovetail.cli import _table
from dovetail.cli._output import Json
from dovetail.cli.bench import progress_bar
from dovetail.measure.sizes import format_bytes, geometric, parse_bytes

_EXAMPLES = """Examples:

dovetail phases

dovetail phases -b 1K -e 64M -f 2 --json phases.json

dovetail phases --backend cuda
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("phases", epilog=_EXAMPLES)(phases)


def phases(
    backend: Annotated[str, typer.Option(help="cpu, or cuda: a copy from host to GPU.")] = BACKENDS[0],
    begin: Annotated[str, typer.Option("--begin", "-b", help="Smallest copy.")] = "1K",
    end: Annotated[str, typer.Option("--end", "-e", help="Largest copy.")] = "16M",
    factor: Annotated[float, typer.Option("--factor", "-f", help="From one size to the next.")] = 4,
    iters: Annotated[int | None, typer.Option(min=1, help="Copies of each size; by size if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="cuda: measure although others use the GPU.")] = False,
    pin: Annotated[str | None, typer.Option(metavar="SIZE", help="cuda: host memory to pin at most.")] = None,
    json: Json = None,
) -> None:
    """Take the time of a copy by an engine apart: control, schedule, copy, sync.

    Control: the command is built and put into the queue. Schedule: until the engine begins it. Copy: the bytes move.
    Sync: until the caller knows.
    """
    one_of("backend", backend, BACKENDS)
    sizes = geometric(begin, end, factor)
    bounds = Bounds(force=force, pin_bytes=None if pin is None else parse_bytes(pin))
    if backend == "cpu" and bounds != Bounds():
        raise ValueError("--force and --pin are for --backend cuda")
    from rich.table import Table

    from dovetail.bench.phases import PHASES, measure
    from dovetail.cli import _gpu

    facts: dict[str, Any] | None = None
    with progress_bar() as progress:
        if backend == "cuda":
            found, facts = _gpu.phases(sizes, iters, bounds, progress)
        else:
            found = measure(sizes, iters, progress)
    table = Table(
        title=f"phases of a copy, backend {backend}: us (share)", title_justify="left", box=None, pad_edge=False
    )
    table.add_column("size B")
    for name in (*PHASES, "total us", "not copying"):
        table.add_column(name, justify="right")
    for row in found:
        cells = [f"{row[f'{phase}_us']:.3g} ({row[f'{phase}_share']:4.0%})" for phase in PHASES]
        table.add_row(format_bytes(row["size_bytes"]), *cells, f"{row['total_us']:.4g}", f"{1 - row['copy_share']:.0%}")
    _table.show(table, wide=120)
    if backend == "cuda":
        print(f"sync and schedule are known to {max(row['clock_error_us'] for row in found):.3g} us: the clocks' error")
    if json is not None:
        _gpu.write("phases", found, facts, json)
    if not all(row.get("correct", True) for row in found):
        print("dovetail: the copy arrived changed", file=sys.stderr)
        raise typer.Exit(1)
