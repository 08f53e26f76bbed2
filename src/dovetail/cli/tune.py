"""`dovetail tune`: measures the variants on this machine and saves what `auto` will choose by."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.bench.gpu.spec import BACKENDS, one_of
from dovetail.bench.spec import CPU
from dovetail.cli import _ranks
from dovetail.cli._output import KEPT, Json, ended_early, kept_apart, profile_can_be_saved
from dovetail.cli.bench import progress_bar, words
from dovetail.measure.sizes import format_bytes, geometric, parse_bytes

if TYPE_CHECKING:
    from dovetail.bench.runner import Outcome
    from dovetail.bench.tune import Winner

_EXAMPLES = """Examples:

dovetail tune

dovetail tune --only coll --ranks 2,4,8 --budget 2m --json tune.json

dovetail tune --backend cuda --ranks 4

dovetail tune --backend cuda --only kv --cache 32G

dovetail tune --backend cuda --only overlap --budget 60s

dovetail tune --only fused --ranks 2

dovetail tune --only fused --backend cuda --ranks 2
"""
_SECTIONS = ("coll", "kv", "overlap", "fused")
_USUAL_S = 60.0
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("tune", epilog=_EXAMPLES)(tune)


def tune(
    only: Annotated[str, typer.Option(help=f"Sections of the profile, out of {', '.join(_SECTIONS)}.")] = "coll",
    backend: Annotated[str, typer.Option(help="cpu, or cuda: tensors on GPUs, shared by ranks beyond them.")] = CPU,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for everything: 60s for each number of ranks if not given, 2m for fused on GPUs. kv: from 2m "
            "on, more."
        ),
    ] = None,
    ranks: Annotated[str | None, typer.Option(help="Numbers of ranks to measure: 2,4; overlap: one.")] = None,
    begin: Annotated[str | None, typer.Option("--begin", "-b", help="coll: smallest size: 1K.")] = None,
    end: Annotated[str | None, typer.Option("--end", "-e", help="coll: largest size: 16M.")] = None,
    factor: Annotated[float | None, typer.Option("--factor", "-f", help="coll: from one size to the next: 4.")] = None,
    cache: Annotated[str | None, typer.Option(help="kv: size of the cache that is measured with: 16G.")] = None,
    force: Annotated[bool, typer.Option("--force", help="cuda: measure although others use the GPU.")] = False,
    json: Json = None,
) -> None:
    """Measure every variant of every collective, and torch's own, and save the fastest by ranks and size.

    With --only kv: what every path between a KV cache and host memory costs, on an idle GPU and beside computation;
    `auto` of dovetail.kv estimates with it.

    With --only overlap: how much a computation and a communication slow each other down, by strategy; `auto` of
    dovetail.overlap estimates with it.

    With --only fused: every transport of every fused operator; `auto` of dovetail.ops takes the fastest. On GPUs
    between ranks that share them, best under MPS.

    The profile goes to ~/.cache/dovetail/ or DOVETAIL_PROFILE; figures in it for other numbers of ranks and for the
    other backend are kept, and so is all else in it. One that does not hold here is kept under another name. Numbers of
    ranks that were done when the command is ended (Ctrl-C) are saved. A variant with a wrong result is never chosen.
    Exit 1 if there was one. On a GPU the collectives' `auto` uses the figures where the self-test has passed (dovetail
    doctor --selftest).
    """
    one_of("backend", backend, BACKENDS)
    profile_can_be_saved()
    if force and backend == CPU:
        raise ValueError("--force is for --backend cuda")
    for name in words(only) or ("",):
        if name not in _SECTIONS:
            raise ValueError(f"--only: {name!r} is not known; there are {', '.join(_SECTIONS)}")
    for name in ("kv", "overlap", "fused"):
        if name in words(only) and only != name:
            raise ValueError(f"--only: measure {name} by itself")
    if only == "overlap":
        refuse({"begin": begin, "end": end, "factor": factor}, "--only coll")
        refuse({"cache": cache}, "--only kv")
        from dovetail.cli import _overlap

        number = _numbers(ranks) if ranks is not None else [None]
        if len(number) != 1:
            raise ValueError(f"--ranks: with --only overlap one number of ranks is measured, not {ranks}")
        _overlap.tune(backend, number[0], _seconds(budget), force, json)
        return
    if only == "fused":
        refuse({"begin": begin, "end": end, "factor": factor}, "--only coll")
        refuse({"cache": cache}, "--only kv")
        from dovetail.cli import _fused

        counts = _numbers("2" if ranks is None else ranks)
        runs = len(counts) if backend == CPU else 2 * len(counts)  # launches take longer than products of this size
        _fused.tune(backend, counts, _seconds(budget, runs), force, json)
        return
    if only == "kv":
        refuse({"ranks": ranks}, "--only coll, overlap and fused")
        refuse({"begin": begin, "end": end, "factor": factor}, "--only coll")
        from dovetail.cli import _kv

        _kv.tune(backend, parse_bytes(cache or "16G"), _seconds(budget), force, json)
        return
    refuse({"cache": cache}, "--only kv")
    numbers = _numbers("2,4" if ranks is None else ranks)
    sizes = geometric(begin or "1K", end or "16M", factor or 4)
    _collectives(backend, numbers, sizes, _seconds(budget, len(numbers)), force, json)


def _collectives(
    backend: str, ranks: list[int], sizes: list[int], budget_s: float, force: bool, json: Path | None
) -> None:
    """Measures, saves and shows; numbers of ranks that are done are saved whatever ends the others."""
    from dovetail.bench import placement
    from dovetail.bench import tune as tuning

    done: list[Outcome] = []
    try:
        tuning.measure(ranks, sizes, budget_s, progress_bar(), done, placement.of(backend, force=force))
    except BaseException:
        outcome = tuning.joined(done)
        if tuning.winners(outcome.rows, backend):
            ended_early(ranks[: len(done)], ranks)
            KEPT.append(str(_keep(outcome, backend, sizes[-1], json and kept_apart(json))))
        raise
    outcome = tuning.joined(done)
    _keep(outcome, backend, sizes[-1], json)
    if not outcome.correct:
        print("a result was WRONG; that variant is not in the profile", file=sys.stderr)
        raise typer.Exit(1)


def _keep(outcome: Outcome, backend: str, up_to: int, json: Path | None) -> Path:
    """Saves the fastest in the profile, shows them, and writes the record. Returns the profile's file."""
    from dovetail.bench import tune as tuning

    found = tuning.winners(outcome.rows, backend)
    saved, kept = tuning.save(found, outcome.rows, backend, up_to)
    _show(found)
    print(f"profile: {saved}")
    for note in [*outcome.notes, *kept, *_untested(backend)]:
        print(f"note: {note}", file=sys.stderr)
    if json is not None:
        from dovetail.cli import _gpu

        _gpu.write("tune", outcome.rows, outcome.gpu, json)
    return saved


def _seconds(budget: str | None, num_runs: int = 1) -> float:
    """The time that is given, or the usual one for so many numbers of ranks."""
    return _USUAL_S * num_runs if budget is None else parse_seconds(budget)


def refuse(given: dict[str, object], where: str) -> None:
    """Raises ValueError for an option that means nothing here."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name} is for {where}")


def _untested(backend: str) -> list[str]:
    """A line where `auto` will not take the figures yet."""
    from dovetail.measure import evidence

    if backend == CPU or evidence.found(evidence.SELFTEST, backend).get("passed"):
        return []
    return ["`auto` takes these figures once the self-test has passed: run `dovetail doctor --selftest`"]


def parse_seconds(text: str) -> float:
    """Seconds from ``'60s'``, ``'2m'``, ``'90'``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is not a time; write seconds, or a number with s, m or h, such as '60s'")
    return float(found[1]) * _UNITS[found[2]]


def _numbers(text: str) -> list[int]:
    numbers = [int(word) if word.isdecimal() else 0 for word in words(text)]
    if not numbers:
        raise ValueError(f"--ranks: {text!r} names nothing; give numbers, such as 2,4")
    for word, number in zip(words(text), numbers, strict=True):
        if not _ranks.FEWEST <= number <= _ranks.MOST:
            raise ValueError(f"--ranks: {word!r} must be a number, {_ranks.FEWEST} to {_ranks.MOST}; such as 2,4")
    return sorted(set(numbers))


def _show(found: list[Winner]) -> None:
    """A table per number of ranks: sizes down, collectives across."""
    from rich.table import Table

    from dovetail.cli import _table

    for ranks in dict.fromkeys(winner.ranks for winner in found):
        own = [winner for winner in found if winner.ranks == ranks]
        table = Table(title=f"{ranks} ranks: fastest variant (us)", title_justify="left", box=None, pad_edge=False)
        table.add_column("size B")
        collectives = list(dict.fromkeys(winner.collective for winner in own))
        for collective in collectives:
            table.add_column(collective)
        cells = {(w.collective, w.size_bytes): f"{w.variant} {w.time_us:.4g}" for w in own}
        for size_bytes in sorted({winner.size_bytes for winner in own}):
            table.add_row(format_bytes(size_bytes), *(cells.get((name, size_bytes), "") for name in collectives))
        _table.show(table, wide=120)
