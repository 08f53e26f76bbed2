"""What `dovetail simulate fit` does: tables in, a machine and its errors out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.measure.sizes import format_bytes

if TYPE_CHECKING:
    from dovetail.sim.fit import Errors, Fit
    from dovetail.sim.machine import Machine
    from dovetail.sim.tables import Target

Row = dict[str, Any]
#: Error (rms log) from which on a fit is told to be a poor one; that of the shipped model of two cores is 0.36.
_POOR = 0.4


def targets(words: Sequence[str], backend: str) -> list[Target]:
    """Of all tables; a word is FILE or COLLECTIVE=FILE."""
    from dovetail.sim import tables

    found = []
    for word in words:
        about, equals, path = word.rpartition("=")
        found += tables.load(Path(path).expanduser(), collective=about if equals else None, backend=backend)
    return found


def checked(machine: Machine, wanted: Sequence[Target]) -> Fit:
    """The machine as it is."""
    from dovetail.sim import fit

    return fit.Fit(machine=machine, free=(), predicted=tuple(fit.predict(machine, wanted)))


def fitted(machine: Machine, wanted: Sequence[Target], names: Sequence[str] | None, note: str) -> Fit:
    """The machine with refitted constants, with a bar on a terminal meanwhile."""
    from dovetail.cli.bench import progress_bar
    from dovetail.sim import fit

    with progress_bar() as progress:
        tell = None if progress is None else lambda n, of, rms: progress(n, of, f"error {rms:.4f}")
        return fit.fit(machine, wanted, free=names, note=note, progress=tell)


def constants(before: Machine, found: Fit) -> tuple[list[str], list[Row]]:
    """Headings, and a line for each free constant."""
    headings = ["constant", "before", "after"]
    lines = [[name, f"{before.value(name):.4g}", f"{found.machine.value(name):.4g}"] for name in found.free]
    return headings, [dict(zip(headings, line, strict=True)) for line in lines]


def errors(found: Fit) -> tuple[list[str], list[Row]]:
    """Headings, and a line for all sizes, those fitted to and those held out."""
    from dovetail.sim import fit

    parts = {"all": found.predicted}
    if found.free:
        parts["fitted to"] = tuple(p for p in found.predicted if not p.held_out)
        parts["held out"] = tuple(p for p in found.predicted if p.held_out)
    headings = ["sizes", "entries", "rms log", "within 15%", "within 25%", "phase rows", "within 5 points", "worst"]
    lines = [[name, *_cells(fit.errors(part))] for name, part in parts.items()]
    return headings, [dict(zip(headings, line, strict=True)) for line in lines]


def _cells(e: Errors) -> list[str]:
    within = sum(points <= 5 for points in e.worst_points)
    log = [f"{e.rms_log:.1%}", f"{e.within_15:.0%}", f"{e.within_25:.0%}"] if e.entries else ["-"] * 3
    points = [f"{within} of {e.rows}", f"{max(e.worst_points):.1f}"] if e.rows else ["-"] * 2
    return [str(e.entries), *log, str(e.rows), *points]


def warning(found: Fit) -> str:
    """What to say of a model that does not hold where it was not fitted; nothing of one that does."""
    from dovetail.sim import fit

    unseen = [p for p in found.predicted if p.held_out or not found.free]
    error = fit.errors(unseen)
    if not error.entries or error.rms_log <= _POOR:
        return ""
    where = "sizes that it was not fitted to" if found.free else "these sizes"
    return (
        f"on {where} the model is off by {error.rms_log:.0%} (rms): compare plans with it, but do not read its times. "
        "Tables of more ranks than there are cores do not fit a model whose ranks all run at once"
    )


def winners(found: Fit) -> list[str]:
    """How often the fastest variant is right, and where it is not."""
    from dovetail.sim import fit

    sizes, misses = fit.winners(found.predicted)
    if not sizes:
        return []
    lines = [f"fastest variant right, or within 5 % of it, at {sizes - len(misses)} of {sizes} sizes"]
    return lines + [f"  {format_bytes(n)}: the model says {said}, the table {fastest}" for n, said, fastest in misses]


def rows(name: str, found: Fit) -> list[Row]:
    """What the model says and how far that is from the table, whose own figures stay out of a simulated record."""
    from dovetail.sim.tables import Figure

    return [
        {
            "machine": name,
            "collective": p.target.case.collective,
            "column": p.target.name,
            "total_bytes": p.target.case.total_bytes,
            "figure": p.target.figure.value,
            "model": p.value,
            "error": p.points if p.target.figure is Figure.SHARE else p.log_error,
            "held_out": p.held_out,
            "outlier": p.target.outlier,
            "simulated": True,
        }
        for p in found.predicted
    ]
