"""`dovetail doctor`: what this machine has, what is missing, and what mends it."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

_EXAMPLES = "Examples:  dovetail doctor  |  dovetail doctor --json doctor.json"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor", epilog=_EXAMPLES)(doctor)


def doctor(
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write a record to FILE.")] = None,
) -> None:
    """Look at this machine: GPU, torch, native part, limits, baselines, profile. Exit 1 if an essential part fails."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from dovetail.measure.doctor import State, examine

    findings = examine()
    styles = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "red"}
    console = Console() if sys.stdout.isatty() else Console(width=200)
    first = findings[0]
    console.print(f"[{styles[first.state]}]{first.check}[/]: {escape(first.value)}", highlight=False)
    if first.mend:
        console.print(f"  {escape(first.mend)}", highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    for finding in findings[1:]:
        text = escape(finding.value) + (f"\n[dim]{escape(finding.mend)}[/]" if finding.mend else "")
        table.add_row(f"[{styles[finding.state]}]{finding.state}[/]", finding.check, text)
    console.print(table)
    if json is not None:
        from dovetail.measure import record

        record.write(record.new("doctor", ["dovetail", *sys.argv[1:]], [asdict(f) for f in findings]), json)
    if any(finding.state is State.FAILED for finding in findings):
        raise typer.Exit(1)
