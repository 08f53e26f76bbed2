"""What `dovetail bench overlap` and `dovetail tune --only overlap` do: parse, measure, print."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.bench.gpu.spec import Bounds
from dovetail.cli import _table

if TYPE_CHECKING:
    from dovetail.bench.overlap import Sampled, Spec
    from dovetail.bench.overlap.sample import Gauge

_RANKS = {"cpu": 2, "cuda": 4}
_SHORT = {
    "streams": "stre-\nams", "priority": "prio", "partition": "part", "priority+partition": "prio+\npart", "dma": "dma",
    "dma+partition": "dma+\npart",
}  # fmt: skip
Row = dict[str, Any]
Found = tuple["list[Sampled]", list[str], float | None]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options as they were given."""

    suite: str | None
    scenario: str | None
    strategy: str | None
    ranks: int | None
    rounds: int | None
    quick: bool
    energy: bool
    least: float | None
    cost: bool | None
    plot: Path | None


def bench(backend: str, asked: Asked, bounds: Bounds, json: Path | None) -> None:
    """Measures and shows; exit 1 if a result was wrong."""
    spec = _spec(asked, backend)
    if asked.cost:
        _cost(backend, asked, spec, bounds, json)
        return
    if backend == "cpu":
        if bounds != Bounds():
            raise ValueError("--force and --pin are for --backend cuda")
        if asked.energy:
            raise ValueError("--energy is for --backend cuda")
    from dovetail.bench import overlap

    facts: Row | None = None
    if backend == "cuda":
        (samples, notes, memory), facts = _on_gpu(spec, bounds)
    else:
        samples, notes, memory = _on_ranks(spec)
    rows = overlap.rows_of(samples, memory)
    _show(rows, backend)
    for note in [*notes, overlap.NOTE]:
        print(f"note: {note}", file=sys.stderr)
    for line in overlap.lines(rows):
        print(line)
    if asked.plot is not None:
        from dovetail.report import overlap as pages

        where = facts["name"] if facts else f"{spec.ranks} ranks on a CPU"
        for page in pages.write(rows, asked.plot, f"{asked.suite or 'llama'}, {where}"):
            print(f"plot: {page}")
    if json is not None:
        from dovetail.cli import _gpu

        _gpu.write("bench", rows, facts, json)
    if not all(row["correct"] for row in rows):
        raise typer.Exit(1)


def _cost(backend: str, asked: Asked, spec: Spec, bounds: Bounds, json: Path | None) -> None:
    """What `overlap.run` costs the host."""
    if backend != "cuda":
        raise ValueError("--cost is for --backend cuda: on a CPU a run is over when it returns")
    if asked.scenario or asked.strategy or asked.energy or asked.plot or asked.least is not None:
        others = "--scenario, --strategy, --energy, --plot and --least"
        raise ValueError(f"--cost measures a pair of its own: leave out {others}")
    from dovetail.bench.gpu.session import Session
    from dovetail.bench.overlap import cost
    from dovetail.bench.overlap.gpu import GpuSite
    from dovetail.cli import _gpu

    with Session("cuda", bounds) as session, GpuSite(session, spec.ranks) as site:
        rows = cost.measure(site, session, cost.ROUNDS if asked.rounds is None else asked.rounds)
        facts = session.facts()
    for line in cost.lines(rows):
        print(line)
    if json is not None:
        _gpu.write("bench", rows, facts, json)
    if not all(row["correct"] for row in rows):
        raise typer.Exit(1)


def _spec(asked: Asked, backend: str) -> Spec:
    from dovetail.bench.overlap import Spec, pick, suite
    from dovetail.bench.overlap.spec import LEAST_US, QUICK_ROUNDS, ROUNDS
    from dovetail.cli.bench import words
    from dovetail.overlap.strategy import named

    given = words(asked.scenario) if asked.scenario else suite.QUICK if asked.quick else ("*",)
    names = words(asked.strategy) if asked.strategy and asked.strategy != "all" else ()
    return Spec(
        scenarios=pick(given, asked.suite or "llama"),
        strategies=tuple(named(name) for name in names),
        rounds=(QUICK_ROUNDS if asked.quick else ROUNDS) if asked.rounds is None else asked.rounds,
        ranks=_RANKS[backend] if asked.ranks is None else asked.ranks,
        energy=asked.energy,
        least_us=LEAST_US if asked.least is None else asked.least,
    )


def _on_gpu(spec: Spec, bounds: Bounds) -> tuple[Found, Row]:
    from contextlib import ExitStack

    from dovetail.bench.gpu.session import Session
    from dovetail.bench.overlap.gpu import GpuSite
    from dovetail.bench.overlap.measure import measure
    from dovetail.cli.bench import progress_bar
    from dovetail.overlap import section

    with ExitStack() as stack:
        session = stack.enter_context(Session("cuda", bounds))
        site = stack.enter_context(GpuSite(session, spec.ranks))
        progress = stack.enter_context(progress_bar())
        gauge, notes = _gauge(stack, session.uuid) if spec.energy else (None, [])
        samples, more, memory = measure(site, progress, spec, section.current("cuda", site.device_name), gauge)
        return (samples, [*notes, *more], memory), session.facts()


def _gauge(stack: Any, uuid: Any) -> tuple[Gauge | None, list[str]]:
    """A missing meter is a line, no end."""
    from dovetail.bench.overlap.energy import PairGauge
    from dovetail.errors import NotSupported
    from dovetail.measure import energy

    try:
        return PairGauge(stack.enter_context(energy.require(uuid))), []
    except NotSupported as error:
        return None, [f"no energy figures: {error}"]


def _on_ranks(spec: Spec) -> Found:
    from dovetail.bench.load import BUSY_SHARE, Others
    from dovetail.bench.overlap.ranks import measure
    from dovetail.cli.bench import progress_bar
    from dovetail.overlap import section

    others = Others()
    with progress_bar() as progress:
        samples, notes, memory = measure(spec, section.current("cpu"), progress)
    share = others.share()
    if share is not None and share >= BUSY_SHARE:
        notes = [*notes, f"the machine was busy: others took {share:.0%} of its cores' time; measure again"]
    return samples, notes, memory


def _show(rows: list[Row], backend: str) -> None:
    """A line for each scenario: the share of ideal of each strategy, and what `auto` took."""
    from rich.table import Table

    from dovetail.bench.overlap import verdict

    title = "share of the ideal speedup, with the best number of cores; times alone in us"
    table = Table(title=f"overlap, {backend}: {title}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    best = verdict.best_by_strategy(rows)
    strategies = [name for name in _SHORT if any(row["strategy"] == name for row in best)]
    table.add_column("\nscenario", no_wrap=True)
    table.add_column("\nlong")
    for name in ("comp.\nalone", "comm.\nalone", "\nideal", *(_SHORT[name] for name in strategies)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("\nauto", no_wrap=True)
    table.add_column("\nregret", justify="right", no_wrap=True)
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        here = [row for row in rows if row["scenario"] == scenario]
        if here[0]["strategy"] is None:
            table.add_row(scenario, "[red]WRONG[/]")
            continue
        share = {row["strategy"]: row["share_of_ideal"] for row in best if row["scenario"] == scenario}
        auto = next((row for row in here if row.get("policy") == "auto"), None)
        first = here[0]
        cells = [f"{first['alone_compute_us']:.0f}", f"{min(first['alone_comm_us'].values()):.0f}"]
        cells += [f"{first['ideal_speedup']:.2f}", *(f"{share[n]:.0%}" if n in share else "" for n in strategies)]
        right = "" if first["correct"] else " [red]WRONG[/]"
        chosen = [auto["setting"].replace("serial by", "serial"), f"{auto['regret']:.0%}"] if auto else ["", ""]
        table.add_row(scenario + right, first["class"].split("-")[0], *cells, *chosen)
    _table.show(table, wide=120)


def tune(backend: str, ranks: int | None, budget_s: float, force: bool, json: Path | None) -> None:
    """Measures the tables that `auto` estimates with, saves them in the profile and shows them."""
    from dovetail.bench.overlap import tune as tuning
    from dovetail.cli import _gpu
    from dovetail.cli.bench import progress_bar

    facts: Row | None = None
    number = _RANKS[backend] if ranks is None else ranks
    with progress_bar() as progress:
        if backend == "cuda":
            outcome, facts = tuning.on_gpu(number, budget_s, Bounds(force=force), progress)
        else:
            outcome = tuning.on_ranks(number, budget_s, progress)
    saved = tuning.save(outcome.tables, backend)
    for line in tuning.lines(outcome.tables):
        print(line)
    print(f"profile: {saved}")
    for note in outcome.notes:
        print(f"note: {note}", file=sys.stderr)
    if json is not None:
        _gpu.write("tune", outcome.rows, facts, json)
    if not outcome.correct:
        print("a result was WRONG; it is not in the profile", file=sys.stderr)
        raise typer.Exit(1)
