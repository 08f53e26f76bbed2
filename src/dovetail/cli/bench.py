"""`dovetail bench`: our collectives beside Open MPI, gloo and NCCL; a GPU's copy engines; KV caches; overlap; fused
operators."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.bench.gpu.spec import BACKENDS, BESIDE, COPIES, PEERS, WORK, Bounds, CollectiveSpec, Effort, one_of
from dovetail.bench.spec import AUTO, COLLECTIVES, CPU, CUDA, DTYPES, OURS, OUT_OF_TIME, TENSORS, Spec
from dovetail.cli import _ranks
from dovetail.cli._output import PLOTS, Json, refuse_nothing
from dovetail.cli._table import show as show_table
from dovetail.measure.sizes import format_bytes, geometric, parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

_EXAMPLES = """Examples:

dovetail bench all_gather --ranks 2 -b 1K -e 16M -f 4

dovetail bench all_to_all --variant auto,pcpy,b2b --baseline openmpi --json all_to_all.json

dovetail bench all_reduce --ranks 4 --tensors ordinary --dtype bfloat16 --baseline gloo

dovetail bench all --quick

dovetail bench all_gather --backend cuda --ranks 8 -b 1K -e 64M --energy

dovetail bench all --backend cuda --peers ranks --ranks 4

dovetail bench copies --backend cuda

dovetail bench beside --backend cuda

dovetail bench kv --layout llama-70b-tp8 --tokens 1K,4K --cache 1G

dovetail bench kv --backend cuda --layout all --tokens 1K,8K,32K --cache 64G --pin 12G

dovetail bench kv --serve

dovetail bench kv --serve --backend cuda --model llama-8b --tokens 1K,8K,32K --hit 0.5,0.9 --pin 40G

dovetail bench overlap --quick

dovetail bench overlap --suite llama --backend cuda --energy --pin 12G --plot plots --json overlap.json

dovetail bench overlap --scenario '70b-decode+*' --strategy streams,dma --iters 15

dovetail bench fused --op all --ranks 2 --json fused.json

dovetail bench fused --op gemm_all_to_all,embedding_all_to_all --transport store,dma --ablate

dovetail bench fused --backend cuda --quick

dovetail bench fused --backend cuda --peers ranks --ranks 2 --op gemv_all_reduce
"""
_EVERY = "all"
_BEGIN, _FACTOR = "1K", 4.0
KV, OVERLAP, FUSED = "kv", "overlap", "fused"
_KNOWN = (*COLLECTIVES, _EVERY, KV, OVERLAP, FUSED)
_COLLECTIVE_HELP = f"{', '.join(_KNOWN)}; with --backend cuda and host peers: {', '.join(WORK)}."
_BASELINE_HELP = f"Out of {', '.join(OURS[CPU])}; between ranks on GPUs {', '.join(OURS[CUDA])}; or none. Default: all."
_END, _RANKS = "16M", {CPU: 2, CUDA: 4}
_NONE = "none"
_HOST, _RANK_PROCESSES = PEERS
_OF_COLLECTIVES, _OF_CUDA, _OF_KV, _OF_SERVE, _OF_OVERLAP, _OF_FUSED = (
    partial(typer.Option, rich_help_panel=f"Options of {name}")
    for name in ("collectives", "--backend cuda", KV, f"{KV} --serve", OVERLAP, FUSED)
)
_QUICK_S, _SECONDS = 0.03, 0.25
_QUICK_LIMIT_S = 45.0
_ROUNDS = 20
_LOG_EVERY_S = 30.0  # at least, between two lines of progress where there is no terminal


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("bench", epilog=_EXAMPLES)(bench)


def bench(
    collective: Annotated[str, typer.Argument(metavar="COLLECTIVE", help=_COLLECTIVE_HELP)],
    backend: Annotated[str, typer.Option(help="cpu, or cuda: tensors on GPUs.")] = BACKENDS[0],
    peers: Annotated[str | None, _OF_CUDA(help="host: memory (the default), or ranks: processes.")] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="How many ranks: 2; cuda 4.")] = None,
    begin: Annotated[str, _OF_COLLECTIVES("--begin", "-b", help="Smallest size: what each rank contributes.")] = _BEGIN,
    end: Annotated[str | None, _OF_COLLECTIVES("--end", "-e", help="Largest size: 16M; copies 1G.")] = None,
    factor: Annotated[float, _OF_COLLECTIVES("--factor", "-f", help="From one size to the next.")] = _FACTOR,
    variant: Annotated[str, _OF_COLLECTIVES(help="Variants of ours; the verdict is about the first.")] = AUTO,
    baseline: Annotated[str | None, _OF_COLLECTIVES(help=_BASELINE_HELP)] = None,
    tensors: Annotated[str, _OF_COLLECTIVES(help=f"Our tensors: {' or '.join(TENSORS)}.")] = TENSORS[0],
    dtype: Annotated[str, _OF_COLLECTIVES(help=f"One of {', '.join(DTYPES)}.")] = DTYPES[0],
    iters: Annotated[int | None, typer.Option(help="Calls of each at each size; as many as fit if not given.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Less time for each size.")] = False,
    energy: Annotated[bool, _OF_CUDA("--energy", help="Joules per GB too.")] = False,
    force: Annotated[bool, _OF_CUDA("--force", help="Measure although others use the GPU.")] = False,
    pin: Annotated[str | None, _OF_CUDA(metavar="SIZE", help="Host memory to pin at most.")] = None,
    layout: Annotated[str | None, _OF_KV(help="Models such as llama-8b,llama-70b-tp4,mla, or all.")] = None,
    tokens: Annotated[str | None, _OF_KV(help="How many tokens are fetched and stored: 1K,8K.")] = None,
    cache: Annotated[str | None, _OF_KV(help="Size of the cache: 1G; cuda 2G; --serve 16G.")] = None,
    path: Annotated[str | None, _OF_KV(help="auto, dma-2d, ..., all; --serve: also loop, vllm, ...")] = None,
    outermost: Annotated[str | None, _OF_KV(help="layer or block.")] = None,
    direction: Annotated[str | None, _OF_KV(help="fetch, store, both (at once).")] = None,
    beside: Annotated[str | None, _OF_KV(help="Beside what: idle,gemm,decode.")] = None,
    serve: Annotated[bool, _OF_SERVE("--serve", help="End to end, in a model of transformers.")] = False,
    model: Annotated[str | None, _OF_SERVE(help="llama-8b, llama-8b-tp4 (16 KB pages), tiny.")] = None,
    hit: Annotated[str | None, _OF_SERVE(help="Shares of requests whose prefix is kept.")] = None,
    requests: Annotated[int | None, _OF_SERVE(help="How many are served in a pass.")] = None,
    in_flight: Annotated[int | None, _OF_SERVE(help="How many of them at a time: 4; cuda 8.")] = None,
    new: Annotated[int | None, _OF_SERVE(help="Tokens to decode of each request: 4.")] = None,
    offload: Annotated[str | None, _OF_SERVE(help="Also contexts in host memory, in tokens.")] = None,
    steps: Annotated[str | None, _OF_SERVE(help="Short steps: graph (cuda), or plain (cpu).")] = None,
    suite: Annotated[str | None, _OF_OVERLAP(help="llama.")] = None,
    scenario: Annotated[str | None, _OF_OVERLAP(help="Names of scenarios, * for anything.")] = None,
    strategy: Annotated[str | None, _OF_OVERLAP(help="streams, dma, ...; serial is always there.")] = None,
    least: Annotated[float | None, _OF_OVERLAP(metavar="US", help="Computations take at least: 300.")] = None,
    cost: Annotated[bool, _OF_OVERLAP("--cost", help="What run() costs the host, instead.")] = False,
    plot: Annotated[Path | None, _OF_OVERLAP(metavar="DIR", callback=PLOTS, help="Also write plots to DIR.")] = None,
    op: Annotated[str | None, _OF_FUSED(help="all, or names such as gemm_all_to_all.")] = None,
    transport: Annotated[str | None, _OF_FUSED(help="store, dma, ...; unfused is always there.")] = None,
    ablate: Annotated[bool, _OF_FUSED("--ablate", help="Also order, slices, a late rank.")] = False,
    json: Json = None,
) -> None:
    """Measure a collective beside its baselines, in the manner of nccl-tests.

    Every result is checked on fresh random data before it is timed. All contenders run in the same processes, in turn,
    from a common start; the time is the slowest rank's median. Exit 1 if a result was wrong, or nothing was measured.

    With --backend cuda rank 0 is the GPU and its peers are pinned host memory of this process: what is timed is what
    crosses the link. There are also copies (single ones) and beside (a GEMM beside transfers). With --peers ranks there
    are rank processes with tensors on their GPUs, which ranks beyond the GPUs share; a call ends when the GPU is done.

    overlap: pairs of a computation and a communication, by every strategy: which share of the ideal speedup each has,
    and how near `auto` and other policies come to the best. On a CPU between ranks, on a GPU with host memory.

    fused: operators with the collective that depends on them, by every transport, beside operator then collective
    (ours, gloo's) and either of them alone, over a grid of shapes. On a GPU with peers in host memory, or between ranks
    that share GPUs (--peers ranks).
    """
    one_of("backend", backend, BACKENDS)
    one_of("peers", peers or _HOST, PEERS)
    if collective not in (*_KNOWN, *WORK):
        on_gpus = f"with --backend cuda also {COPIES}, {BESIDE}"
        raise ValueError(f"collective: {collective!r} is not known; there are {', '.join(_KNOWN)}; {on_gpus}")
    _ranks.check(ranks)
    kv: dict[str, Any] = {"layout": layout, "tokens": tokens, "cache": cache, "path": path, "outermost": outermost}
    kv |= {"direction": direction, "beside": beside}
    serving: dict[str, Any] = {"model": model, "hit": hit, "requests": requests, "new": new, "offload": offload}
    serving |= {"steps": steps, "in_flight": in_flight}
    paired: dict[str, Any] = {"suite": suite, "scenario": scenario, "strategy": strategy, "plot": plot}
    paired |= {"least": least, "cost": cost or None}
    fused: dict[str, Any] = {"op": op, "transport": transport, "ablate": ablate or None}
    changed = {"begin": begin != _BEGIN, "factor": factor != _FACTOR, "variant": variant != AUTO}
    changed |= {"tensors": tensors != TENSORS[0], "dtype": dtype != DTYPES[0]}
    _refuse_blank(kv | serving | paired | fused | {"variant": variant, "baseline": baseline})
    if collective != FUSED:
        _refuse({name: given is not None for name, given in fused.items()}, FUSED)
    if collective == OVERLAP:
        from dovetail.cli import _overlap

        _refuse({name: given is not None for name, given in (kv | serving).items()} | {"serve": serve}, KV)
        unfit: dict[str, Any] = {"peers": peers, "end": end, "baseline": baseline}
        _refuse({name: given is not None for name, given in unfit.items()} | changed, "collectives")
        bounds = Bounds(force=force, pin_bytes=None if pin is None else parse_bytes(pin))
        asked = _overlap.Asked(**paired, ranks=ranks, rounds=iters, quick=quick, energy=energy)
        _overlap.bench(backend, asked, bounds, json)
        return
    _refuse({name: given is not None for name, given in paired.items()}, OVERLAP)
    if collective == FUSED:
        from dovetail.cli import _fused

        _refuse({name: given is not None for name, given in (kv | serving).items()} | {"serve": serve}, KV)
        unfit = {"end": end, "baseline": baseline, "energy": energy or None}
        if backend == "cpu" or ablate:
            unfit["peers"] = peers
        _refuse({name: given is not None for name, given in unfit.items()} | changed, "collectives")
        bounds = Bounds(force=force, pin_bytes=None if pin is None else parse_bytes(pin))
        wanted = _fused.Asked(
            op=op, transport=transport, ablate=ablate, ranks=ranks, rounds=iters, quick=quick, peers=peers
        )  # fmt: skip
        _fused.bench(backend, wanted, bounds, json)
        return
    if collective == KV:
        from dovetail.cli import _kv

        others = {"peers": peers, "ranks": ranks, "end": end, "baseline": baseline}
        changed |= {"energy": energy}
        _refuse({name: given is not None for name, given in others.items()} | changed, "collectives")
        bounds = Bounds(force=force, pin_bytes=None if pin is None else parse_bytes(pin))
        if serve:
            from dovetail.cli import _serve

            alone = ("layout", "outermost", "direction", "beside")
            _refuse({name: kv.pop(name) is not None for name in alone}, "kv without --serve")
            _serve.bench(backend, _serve.Asked(**kv, **serving, rounds=iters, quick=quick), bounds, json)
            return
        _refuse({name: given is not None for name, given in serving.items()}, "--serve")
        _kv.bench(backend, _kv.Asked(**kv, rounds=iters, quick=quick), bounds, json)
        return
    _refuse({name: given is not None for name, given in (kv | serving).items()} | {"serve": serve}, KV)
    if backend == CUDA and peers != _RANK_PROCESSES:
        ranks_only = {
            "baseline": baseline is not None,
            "tensors": tensors != TENSORS[0],
            "dtype": dtype != DTYPES[0],
        }
        _refuse(ranks_only, "--backend cpu and --peers ranks")
        bounds = Bounds(force=force, pin_bytes=None if pin is None else parse_bytes(pin))
        effort = Effort(seconds=_QUICK_S if quick else _SECONDS, iterations=iters)
        _on_gpu(collective, (begin, end, factor), ranks, variant, effort, bounds, energy, json)
        return
    _refuse({"energy": energy, "pin": pin is not None}, "--backend cuda with host peers")
    if backend == CPU:
        _refuse({"force": force, "peers": peers is not None}, "--backend cuda")
    if collective in (COPIES, BESIDE):
        there = "with host peers: leave --peers out" if backend == CUDA else "on a GPU: add --backend cuda"
        raise ValueError(f"collective: {collective!r} is measured {there}")
    spec = Spec(
        collectives=COLLECTIVES if collective == _EVERY else (collective,),
        ranks=_RANKS[backend] if ranks is None else ranks,
        sizes=tuple(geometric(begin, end or _END, factor)),
        variants=words(variant),
        backend=backend,
        baselines=OURS[backend] if baseline is None else () if baseline == _NONE else words(baseline),
        tensors=tensors,
        dtype=dtype,
        iterations=iters,
        seconds=_QUICK_S if quick else _SECONDS,
        limit_s=_QUICK_LIMIT_S if quick else None,
    )
    from dovetail.bench import placement, runner
    from dovetail.bench.verdict import verdicts

    with progress_bar() as progress:
        outcome = runner.run(spec, progress, placement.of(backend, force=force))
    _show(outcome.rows, spec)
    for note in outcome.notes:
        mend = "; leave out --quick to have them" if note.startswith(OUT_OF_TIME) else ""
        print(f"note: {note}{mend}", file=sys.stderr)
    refuse_nothing(outcome.rows)
    until = ", until the GPU is done" if backend == CUDA else ""
    print(f"ratio = baseline's time / our time, geometric mean over sizes; time = slowest rank's median{until}")
    for verdict in verdicts(outcome.rows):
        print(verdict.line())
    if json is not None:
        from dovetail.cli import _gpu

        _gpu.write("bench", outcome.rows, outcome.gpu, json)
    if not outcome.correct:
        raise typer.Exit(1)


def _refuse(given: dict[str, bool], others: str) -> None:
    """Raise `ValueError` for an option that is given and belongs to `others`."""
    for option in (name for name, is_given in given.items() if is_given):
        raise ValueError(f"--{option.replace('_', '-')} is for {others}")


def _refuse_blank(given: dict[str, Any]) -> None:
    """Raise `ValueError` for a list of names that is given and has none in it: it is no way to say all."""
    for name, text in given.items():
        if isinstance(text, str) and not words(text):
            raise ValueError(f"--{name}: {text!r} names nothing; leave it out for what is usual")


def _on_gpu(
    collective: str, sizes: tuple[str, str | None, float], ranks: int | None, variant: str, effort: Effort,
    bounds: Bounds, energy: bool, json: Path | None,
) -> None:  # fmt: skip
    """The part with ``--backend cuda``."""
    one_of("collective", collective, WORK)
    if energy and collective == COPIES:
        raise ValueError("--energy is for collectives and beside: single copies are too short for a window")
    begin, end, factor = sizes
    number = _RANKS[CUDA] if ranks is None else ranks
    range_of_sizes = tuple(geometric(begin, end or ("1G" if collective == COPIES else _END), factor))
    variants = () if variant == AUTO else words(variant)
    # Always made: a wrong number of ranks is refused, whatever is measured.
    first = collective if collective not in (COPIES, BESIDE) else WORK[0]
    spec = CollectiveSpec(collective=first, sizes=range_of_sizes, ranks=number, variants=variants, effort=effort)
    from dovetail.cli import _gpu

    with progress_bar() as progress:
        if collective == COPIES:
            outcome = _gpu.copies(range_of_sizes, effort, bounds, progress)
        elif collective == BESIDE:
            outcome = _gpu.beside(number, effort.iterations or _ROUNDS, bounds, energy, progress)
        else:
            outcome = _gpu.collective(spec, bounds, energy, progress)
    _gpu.show(outcome, json)


def words(text: str) -> tuple[str, ...]:
    """``'a, b'`` -> ``('a', 'b')``."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on stderr where that is a terminal, otherwise a line once in a while, for logs of what takes long."""
    if not sys.stderr.isatty():
        yield _in_a_log()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, where: bar.update(task, completed=done, total=total, description=where)


def _in_a_log() -> Callable[[int, int, str], None]:
    said = [time.monotonic()]

    def tell(done: int, total: int, where: str) -> None:
        if time.monotonic() - said[0] >= _LOG_EVERY_S:
            said[0] = time.monotonic()
            print(f"{done} of {total}: {where}", file=sys.stderr, flush=True)

    return tell


def _show(rows: list[dict[str, Any]], spec: Spec) -> None:
    for collective in spec.collectives:
        own = [row for row in rows if row["collective"] == collective]
        if own:
            show_table(_table(collective, own, spec), wide=120, keys=2)


def _table(collective: str, rows: list[dict[str, Any]], spec: Spec) -> Table:
    """One line per size and contender; the last columns only where there is something in them."""
    from rich.table import Table

    with_c = any(row.get("c_time_us") is not None for row in rows)
    with_limit = any("limit_us" in row for row in rows)
    gpus = rows[0].get("gpus")
    where = f" on {gpus} GPU{'s' if gpus != 1 else ''}" if gpus else ""
    title = f"{collective}, {spec.ranks} ranks{where}, {spec.dtype}, {spec.tensors} tensors"
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
        ours = here[0]["time_us"] if here[0]["backend"] in OURS else None
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
