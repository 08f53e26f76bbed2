"""`dovetail doctor`: what this machine has and lacks, who moves its bytes, and whether they arrive."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail import env
from dovetail.cli import _ranks, _table
from dovetail.cli._output import Json, profile_can_be_saved, save

if TYPE_CHECKING:
    from dovetail.coll.selftest import Outcome
    from dovetail.hw.gpu.proof import Proof
    from dovetail.measure.doctor import Finding

_EXAMPLES = """Examples:

dovetail doctor

dovetail doctor --json doctor.json

dovetail doctor --prove

dovetail doctor --selftest --ranks 4

dovetail doctor --selftest --backend cpu
"""
_BACKENDS = ("cpu", "cuda", "hip")
#: Failures that are printed.
_MOST_SHOWN = 20
_TIMEOUT_S = 300.0


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor", epilog=_EXAMPLES)(doctor)


def doctor(
    prove: Annotated[bool, typer.Option("--prove", help="Find out who moves bytes on the GPU, and save it.")] = False,
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Check every collective against plain torch, and save the result.")
    ] = False,
    backend: Annotated[
        str | None, typer.Option(help="cuda, hip, or for a self-test cpu; this machine's GPU if not given.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", "-n", help="Ranks of the self-test: one per GPU, 2 on a single one.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Most seconds for the self-test.")] = _TIMEOUT_S,
    force: Annotated[bool, typer.Option("--force", help="Prove although somebody else uses the GPU.")] = False,
    json: Json = None,
) -> None:
    """Look at this machine: GPU, torch, native part, limits, baselines, profile. Exit 1 if an essential part fails.

    --prove holds every multiprocessor for a moment and sees which copies go on: those are a copy engine's. --selftest
    starts ranks and compares every collective with plain torch, bit for bit; on a GPU `auto` takes our path only where
    it has passed. Both write what they find into the profile. Exit 1 if a path is unproved or a case failed.
    """
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"--backend: {backend!r} is not known; there are {', '.join(_BACKENDS)}")
    _ranks.check(ranks)
    if not 0 < timeout < float("inf"):
        raise ValueError(f"--timeout: {timeout:g} must be seconds above 0")
    for option, others, wrong in (
        ("--ranks", "--selftest", ranks is not None and not selftest),
        ("--timeout", "--selftest", timeout != _TIMEOUT_S and not selftest),
        ("--force", "--prove", force and not prove),
        ("--backend", "--prove and --selftest", backend is not None and not (prove or selftest)),
    ):
        if wrong:
            raise ValueError(f"{option} is for {others}")
    if prove and selftest and json is not None:
        raise ValueError("--json is for one record: give --prove or --selftest with it, not both")
    if not prove and not selftest:
        _examine(json)
        return
    profile_can_be_saved()
    good = _prove(backend or _gpu_backend(), force, json) if prove else True
    if selftest:
        good &= _selftest(backend, ranks, timeout, json)
    if not good:
        raise typer.Exit(1)


def _examine(json: Path | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    from dovetail.measure.doctor import State, examine

    findings = [*examine(), *_forced()]
    styles = {State.OK: "green", State.WARNING: "yellow", State.FAILED: "red"}
    console = _table.console(200)
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
        _write("doctor", [asdict(f) for f in findings], json)
    if any(finding.state is State.FAILED for finding in findings):
        raise typer.Exit(1)


def _forced() -> list[Finding]:
    """Forced choices that there are none of: their names are known further up than where the doctor's checks lie."""
    from dovetail.coll.recipes import VARIANTS
    from dovetail.measure.doctor import Finding, State

    wrong = []
    try:
        env.transport()
    except ValueError as error:
        wrong.append(str(error))
    known = sorted({name for names in VARIANTS.values() for name in names} | {"torch", "auto"})
    if (variant := env.variant()) and variant not in known:
        wrong.append(f"DOVETAIL_VARIANT={variant!r} is no variant; there are {', '.join(known)}")
    mend = "see docs/environment.md"
    return [Finding(check="forced choices", state=State.FAILED, value=text, mend=mend) for text in wrong]


def _write(kind: str, rows: list[dict[str, Any]], path: Path, gpu: Mapping[str, Any] | None = None) -> None:
    from dovetail.measure import record

    made = record.new(kind, ["dovetail", *sys.argv[1:]], rows)
    if gpu is not None:
        facts = {name: fact for name, fact in gpu.items() if name != "uuid"}
        made = replace(made, machine={**made.machine, "gpu": facts})
    save(made, path)


def _gpu_backend() -> str:
    """That of the installed torch."""
    import torch

    return "hip" if torch.version.hip else "cuda"


def _prove(backend: str, force: bool, json: Path | None) -> bool:
    if backend == "cpu":
        raise ValueError("--prove is for GPUs: the CPU's engines are software, on the cores themselves")
    from dovetail.hw.gpu.device import Device
    from dovetail.hw.gpu.driver import load
    from dovetail.hw.gpu.proof import Who, prove
    from dovetail.measure import evidence
    from dovetail.measure import gpu as state

    uuid = load(backend).device_uuid(0)
    state.refuse_if_busy(uuid, force)
    with Device(backend) as device:
        proofs = prove(device)
        name, version = device.name, device.driver.version
        facts = state.describe(uuid, num_multiprocessors=device.driver.num_multiprocessors(0))
    _show_proofs(f"{name}, driver {version}", proofs)
    paths = {path: str(proof.who) for path, proof in proofs.items()}
    saved = evidence.save(evidence.ENGINES, backend, evidence.stamped(name, version, {"paths": paths}))
    print(f"profile: {saved}")
    if json is not None:
        _write("proof", [asdict(trial) for proof in proofs.values() for trial in proof.trials], json, facts)
    return all(proof.who is not Who.UNPROVED for proof in proofs.values())


def _show_proofs(title: str, proofs: dict[str, Proof]) -> None:
    """A line per path and form, a column per size."""
    from rich.table import Table

    from dovetail.measure.sizes import format_bytes

    table = Table(title=f"{title}: who moves the bytes", title_justify="left", box=None, pad_edge=False)
    trials = [trial for proof in proofs.values() for trial in proof.trials]
    sizes = sorted({trial.size_bytes for trial in trials})
    for column in ("path", "form", *map(format_bytes, sizes)):
        table.add_column(column)
    cells = {(t.path, t.form, t.size_bytes): str(t.who) for t in trials}
    for path, form in dict.fromkeys((t.path, t.form) for t in trials):
        table.add_row(path, form, *(cells.get((path, form, size), "") for size in sizes))
    _table.show(table, wide=200, keys=2)
    for path, proof in proofs.items():
        print(f"{path}: {proof.who}" + (f" ({proof.why})" if proof.why else ""))


def _selftest(backend: str | None, ranks: int | None, limit_s: float, json: Path | None) -> bool:
    import torch

    from dovetail.cli.bench import progress_bar
    from dovetail.coll import selftest
    from dovetail.measure import evidence
    from dovetail.measure import gpu as state

    chosen = backend or (_gpu_backend() if torch.cuda.is_available() else "cpu")
    driver = None
    if chosen != "cpu":
        from dovetail.errors import NotSupported
        from dovetail.hw.gpu.driver import load

        driver = load(chosen)
        if not torch.cuda.is_available():
            raise NotSupported(
                f"torch {torch.__version__} finds no GPU for backend {chosen}; `dovetail doctor` says why"
            )
    gpus = driver.num_devices() if driver else 0
    number = ranks if ranks is not None else selftest.default_ranks(gpus)
    with progress_bar() as progress:
        outcome = selftest.run(chosen, number, limit_s=limit_s, progress=progress)
    _show_outcome(outcome)
    facts = None
    if driver is not None:
        name, version = driver.device_name(0), driver.version
        print(f"profile: {evidence.save(evidence.SELFTEST, chosen, outcome.entry(name, version, gpus))}")
        facts = state.describe(driver.device_uuid(0), num_multiprocessors=driver.num_multiprocessors(0))
    if json is not None:
        _write("selftest", outcome.rows(), json, facts)
    return outcome.passed


def _show_outcome(outcome: Outcome) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("collective", "variant"):
        table.add_column(column)
    for column in ("cases", "failed"):
        table.add_column(column, justify="right")
    for row in outcome.rows():
        failed = f"[red]{row['failed']}[/]" if row["failed"] else "0"
        table.add_row(row["collective"], row["variant"], str(row["cases"]), failed)
    _table.show(table, wide=200, keys=2)
    for failure in outcome.failures[:_MOST_SHOWN]:
        print(f"FAILED {failure}")
    if len(outcome.failures) > _MOST_SHOWN:
        print(f"and {len(outcome.failures) - _MOST_SHOWN} more")
    if outcome.ended:
        print(f"ENDED EARLY: {outcome.ended}")
    verdict = "passed" if outcome.passed else "FAILED"
    where = f"{outcome.backend}, {outcome.ranks} ranks, {len(outcome.cases)} cases, seed {outcome.seed}"
    print(f"self-test {verdict}: {where}, {outcome.seconds:.1f} s")
