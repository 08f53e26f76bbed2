"""`dovetail trace`: when every engine, link and host thread is busy, as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli._output import FILE
from dovetail.measure.sizes import format_bytes, parse_bytes

_EXAMPLES = """Examples:

dovetail trace --machine mi300x --collective all_gather --variant pcpy --size 1M

dovetail trace --machine h200-nvl8 --collective all_to_all --variant b2b --prelaunch --size 64M -o b2b.json
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("trace", epilog=_EXAMPLES)(trace)


def trace(
    machine: Annotated[str, typer.Option(help="The machine to simulate: a shipped one, or a machine file.")],
    collective: Annotated[str, typer.Option(help="all_gather, all_to_all, all_reduce, ..., or copy.")] = "all_gather",
    variant: Annotated[str | None, typer.Option(help="Such as pcpy, bcst, swap, b2b; by default the first.")] = None,
    size: Annotated[str, typer.Option("--size", "-s", help="Total: chunk x ranks.")] = "1M",
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", min=2, help="Ranks that take part; all if not given.")
    ] = None,
    prelaunch: Annotated[bool, typer.Option("--prelaunch", help="Queued beforehand.")] = False,
    complete: Annotated[bool, typer.Option("--complete", help="With the handshake and a rank's own piece.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", callback=FILE, help="To write.")] = Path(
        "trace.json"
    ),
) -> None:
    """Write a simulated timeline of a collective: one track per engine, per link and per host thread.

    Open the file at ui.perfetto.dev or chrome://tracing; every process in it is marked as simulated.
    """
    from dovetail.profile.file import write_json
    from dovetail.sim import files
    from dovetail.sim.collectives import COPY, Case, baseline, plan_of
    from dovetail.sim.replay import price
    from dovetail.sim.result import chrome_trace

    there = files.load(machine)
    case = Case(
        collective=collective,
        variant=variant or baseline(collective),
        total_bytes=parse_bytes(size),
        ranks=ranks or (2 if collective == COPY else there.ranks),
        prelaunch=prelaunch,
        complete=complete,
    )
    there.require(case.ranks, f"this {collective}")
    found = price(plan_of(case), there, timeline=True)
    write_json(chrome_trace(found), output)
    tracks = len({span.track for span in found.spans})
    what = f"{collective} {case.name} of {format_bytes(case.total_bytes)} on {there.name}"
    print(f"{what}: {found.time_us:.4g} us simulated, {tracks} tracks: {output}")
