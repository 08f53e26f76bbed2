"""What `dovetail bench fused` and `dovetail tune --only fused` do: parse, measure, print."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.bench.gpu.spec import Bounds
from dovetail.cli import _output, _table

if TYPE_CHECKING:
    from dovetail.bench.fused.gpu import Measured
    from dovetail.bench.fused.ranks import Measured as RanksMeasured
    from dovetail.bench.fused.spec import Spec

Row = dict[str, Any]
_MISSES, _BUSY = "MISSES", "the machine was busy"
_SHORT = {
    "compute": "compute", "comm": "comm", "gloo": "gloo", "torch+ours": "torch\n+ours", "fbgemm+gloo": "fbgemm\n+gloo",
    "fbgemm+ours": "fbgemm\n+ours", "unfused": "un-\nfused",
    "decomposed": "decom-\nposed", "store": "store", "graph": "store,\ngraph", "dma": "dma", "auto": "auto",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """The options as they were given."""

    op: str | None
    transport: str | None
    ablate: bool
    ranks: int | None
    rounds: int | None
    quick: bool
    peers: str | None = None


def bench(backend: str, asked: Asked, bounds: Bounds, json: Path | None) -> None:
    """Measures and shows; exit 1 if a result was wrong."""
    if backend == "cuda" and asked.peers != "ranks":
        _on_gpu(asked, bounds, json)
        return
    if bounds != Bounds():
        raise ValueError("--force and --pin are for --backend cuda with peers in host memory")
    from dovetail.bench.fused import grid
    from dovetail.cli.bench import progress_bar, words

    ops = grid.named("all" if asked.op is None else asked.op)
    given = words(asked.transport) if asked.transport and asked.transport != "all" else ()
    left_out = _lacking(given, ops, backend)
    from dovetail.bench.fused import ranks as between
    from dovetail.bench.fused import verdict

    spec = between.spec_of(
        ops, short=asked.quick, ranks=2 if asked.ranks is None else asked.ranks, transports=given, rounds=asked.rounds,
        ablate=asked.ablate, backend=backend,
    )  # fmt: skip
    facts = _shared_gpu(spec.ranks, force=False)[0] if backend != "cpu" else None
    with progress_bar() as progress:
        found = between.measure(spec, progress)
    _show(found.rows)
    for note in [*left_out, *found.notes]:
        print(f"note: {note}", file=sys.stderr)
    _judge(verdict.lines(found.rows), found.notes)
    _write("bench", found.rows, facts, json)
    if not found.correct:
        raise typer.Exit(1)


def _shared_gpu(ranks: int, *, force: bool) -> tuple[Row, tuple[str, int]]:
    """What a record says of a GPU that ranks share, its name and driver; notes about it go to stderr.

    Raises `NotSupported` if there is none, or others use it.
    """
    from dovetail.bench.gpu import sharing
    from dovetail.hw.gpu.driver import load

    site = sharing.survey(ranks, force=force)
    for note in sharing.mps_notes(ranks, site):
        print(f"note: {note}", file=sys.stderr)
    driver = load("cuda")
    return sharing.facts() | {"mps": site.mps}, (driver.device_name(0), driver.version)


def _lacking(given: tuple[str, ...], ops: Sequence[str], backend: str) -> list[str]:
    """A line for each transport that some of the operators lack; `ValueError` for one that all of them lack."""
    from dovetail.ops import choose

    lines = []
    for name in given:
        has = [op for op in ops if name in (choose.AUTO, *choose.TRANSPORTS[backend][op])]
        if has or name not in choose.NAMES:  # an unknown one is refused where all are known
            lines += [f"{op} has no transport {name}: left out" for op in ops if has and op not in has]
            continue
        there = "; ".join(f"{op} has {', '.join(choose.TRANSPORTS[backend][op])}" for op in ops)
        raise ValueError(f"--transport: none of these has {name!r} on {backend}: {there}")
    return lines


def _judge(lines: list[str], notes: list[str]) -> None:
    """Prints a verdict, what a miss means, and again whatever makes the figures doubtful."""
    for line in lines:
        print(line)
    if any(line.startswith(_MISSES) for line in lines):
        print("(wanted: what this project aims at. A figure that misses it is no failure: the exit status stays 0)")
    for note in notes:
        if note.startswith(_BUSY):
            print(f"(these figures are doubtful: {note})")


def _show(rows: list[Row]) -> None:
    """A table for each operator: microseconds, and what `auto` took."""
    from rich.table import Table

    from dovetail.bench.fused import verdict

    for op in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in verdict.shapes(rows) if row["op"] == op]
        names = [name for name in _SHORT if any(name in row["times_us"] for row in mine)]
        threads = f"{mine[0]['threads']} thread{'s' if mine[0]['threads'] > 1 else ''} each"
        title = f"{op}, {mine[0]['ranks']} ranks, {threads}: us, slowest rank, median"
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        table.add_column("\nshape", no_wrap=True)
        table.add_column("\ndtype", no_wrap=True)
        for name in (*(_SHORT[name] for name in names), "best /\ngloo", "best /\ntorch+ours", "auto /\nunfused"):
            table.add_column(name if "\n" in name else f"\n{name}", justify="right", no_wrap=True)
        table.add_column("auto\ntook", no_wrap=True)
        for row in mine:
            times = [_number(row["times_us"].get(name)) for name in names]
            best = verdict.best(row)
            ratios = [verdict.speedup(row, best, "gloo"), verdict.speedup(row, best, "torch+ours")]
            ratios.append(verdict.speedup(row, "auto", "unfused"))
            shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            right = "" if row["correct"] else f" [red]WRONG: {', '.join(row['wrong'])}[/]"
            took = row.get("auto", {}).get("transport", "")
            table.add_row(row["shape"] + right, row["dtype"], *times, *shown, took)
        _table.show(table, wide=160, keys=2)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _write(kind: str, rows: list[Row], facts: Row | None, json: Path | None) -> None:
    if json is not None:
        from dovetail.cli import _gpu

        _gpu.write(kind, rows, facts, json)


def _on_gpu(asked: Asked, bounds: Bounds, json: Path | None) -> None:
    """One GPU and peers in host memory."""
    if asked.transport is not None or asked.ablate:
        raise ValueError("--transport and --ablate are for --backend cpu: on a GPU all of it is measured")
    spec = _gpu_spec(asked)
    from dovetail.bench.gpu import session as sessions
    from dovetail.cli.bench import progress_bar

    with sessions.Session("cuda", bounds) as session, progress_bar() as progress:
        from dovetail.bench.fused import gpu

        found, done, facts = gpu.Measured([], []), [0], session.facts()

        def tell(text: str) -> None:
            done[0] += 1
            if progress is not None:
                progress(done[0], len(spec.shapes) + len(spec.products), text)

        try:
            gpu.measure(session, spec, tell, found)
            facts = session.facts()
        except KeyboardInterrupt:
            if found.rows:
                print(f"ended after {len(found.rows)} of {len(spec.shapes)} shapes; of these:", file=sys.stderr)
                _show_gpu(found, facts, json and _output.kept_apart(json))
            raise
    _show_gpu(found, facts, json)


def _show_gpu(found: Measured, facts: Row, json: Path | None) -> None:
    """Table, verdict and record."""
    from dovetail.bench.fused.rows import table, verdict

    for line in table(found.rows):
        print(line)
    _judge([f"{'holds ' if holds else _MISSES} {text}" for holds, text in verdict(found.rows, found.products)], [])
    _write("bench", found.as_dicts(), facts, json)


def _gpu_spec(asked: Asked) -> Spec:
    from dovetail.bench.fused import spec as specs

    spec = specs.quick() if asked.quick else specs.full()
    if asked.op not in (None, "all"):
        from dovetail.cli.bench import words

        names = words(asked.op or "")
        for name in names:
            if name not in list(specs.Op):
                raise ValueError(f"--op: on a GPU with host peers there are all, {', '.join(specs.Op)}; not {name!r}")
        spec = dataclasses.replace(spec, shapes=tuple(shape for shape in spec.shapes if shape.op in names))
    if asked.ranks is not None:
        spec = dataclasses.replace(spec, ranks=asked.ranks)
    if asked.rounds is not None:
        spec = dataclasses.replace(spec, fewest_rounds=asked.rounds, most_rounds=asked.rounds)
    return spec


def tune(backend: str, ranks: list[int], budget_s: float, force: bool, json: Path | None) -> None:
    """Measures every transport of every operator, saves the times in the profile and shows who was fastest.

    On GPUs it is ranks that share them.
    """
    facts, gpu = _shared_gpu(max(ranks), force=force) if backend != "cpu" else (None, None)
    from dovetail.bench.fused import grid
    from dovetail.bench.fused import ranks as between
    from dovetail.bench.fused import tune as tuning
    from dovetail.cli.bench import progress_bar

    done: dict[int, RanksMeasured] = {}
    try:
        with progress_bar() as progress:
            for number in ranks:
                spec = between.tune_spec(grid.OPS, number, budget_s / len(ranks), backend)
                done[number] = between.measure(spec, progress)
    except BaseException:
        if any(tuning.section(found.rows) for found in done.values()):
            _output.ended_early(done, ranks)
            _output.KEPT.append(str(_keep(done, backend, gpu, facts, json and _output.kept_apart(json))))
        raise
    _keep(done, backend, gpu, facts, json)
    if not all(found.correct for found in done.values()):
        print("a result was WRONG; it is not in the profile", file=sys.stderr)
        raise typer.Exit(1)


def _keep(
    done: dict[int, RanksMeasured], backend: str, gpu: tuple[str, int] | None, facts: Row | None, json: Path | None
) -> Path:
    """Saves the times in the profile, shows who was fastest, and writes the record. Returns the profile's file."""
    from dovetail.bench.fused import tune as tuning
    from dovetail.ops import choose

    rows = [row for found in done.values() for row in found.rows]
    notes = [f"{number} ranks: {note}" for number, found in done.items() for note in found.notes]
    where = tuning.where(backend, *gpu) if gpu else None
    if where and where[choose.COLLECTIVES] == choose.TORCHS:
        said = "unfused ran on torch's collectives, and these figures hold until ours have passed the self-test"
        notes.append(f"{said}: better run `dovetail doctor --selftest` first")
    saved = tuning.save(rows, where)
    for line in tuning.lines(rows):
        print(line)
    print(f"profile: {saved}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    _write("tune", rows, facts, json)
    return saved
