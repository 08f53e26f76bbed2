"""What `dovetail bench kv` does: parses, measures, prints."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from dovetail.bench.gpu.spec import Bounds
from dovetail.cli import _table
from dovetail.measure.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dovetail.bench.kv import Spec

_ALL = "all"
_DEFAULT_TOKENS, _QUICK_TOKENS = "1K,8K", "1K"
_DEFAULT_CACHE = {"cpu": "1G", "cuda": "2G"}
_ROUNDS, _QUICK_ROUNDS = 5, 2
_TIMES = ("submit_us", "time_us")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options as they were given."""

    layout: str | None
    tokens: str | None
    cache: str | None
    path: str | None
    outermost: str | None
    direction: str | None
    beside: str | None
    rounds: int | None
    quick: bool


def bench(backend: str, asked: Asked, bounds: Bounds, json: Path | None) -> None:
    """Measures and shows; exit 1 if a row arrived changed."""
    from dovetail.bench import kv
    from dovetail.cli import _gpu
    from dovetail.cli.bench import progress_bar
    from dovetail.kv.choose import Path as Form

    facts: dict[str, Any] | None = None
    if backend == "cuda":
        from dovetail.bench.gpu.session import Session

        with Session("cuda", bounds) as session, progress_bar() as progress:
            place = kv.GpuPlace(session)
            spec = _spec(asked, backend, place.paths())
            try:
                rows, notes = kv.measure(spec, place, progress)
                facts = session.facts()
            finally:
                place.close()
    else:
        if bounds != Bounds():
            raise ValueError("--force and --pin are for --backend cuda")
        spec = _spec(asked, backend, (Form.CPU,))
        with progress_bar() as progress:
            rows, notes = kv.measure(spec, kv.CpuPlace(), progress)
    _show(spec, rows)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not rows:
        raise ValueError("nothing was measured: --cache is too small for --tokens")
    for line in kv.lines(rows):
        print(line)
    if json is not None:
        _gpu.write("bench", rows, facts, json)
    if not all(row["correct"] for row in rows):
        raise typer.Exit(1)


def tune(backend: str, cache_bytes: int, budget_s: float, force: bool, json: Path | None) -> None:
    """Measures every path, saves the times in the profile and shows what `auto` will take."""
    if backend != "cuda":
        raise ValueError("--only kv needs --backend cuda: a cache in host memory has one path")
    from dovetail.bench import kv
    from dovetail.bench.gpu.session import Session
    from dovetail.bench.kv import tune as tuning
    from dovetail.cli import _gpu
    from dovetail.cli.bench import progress_bar

    with Session("cuda", Bounds(force=force)) as session, progress_bar() as progress:
        place = kv.GpuPlace(session)
        try:
            loads = ("idle", tuning.BESIDE) if session.has_torch else ("idle",)
            rows = tuning.rows(place, cache_bytes, budget_s, loads, progress)
            facts, name = session.facts(), session.device.name
        finally:
            place.close()
    found = tuning.found_in(rows, "this run", name)
    saved = tuning.save(found, backend)
    for line in tuning.lines(found):
        print(line)
    print(f"profile: {saved}")
    if json is not None:
        _gpu.write("tune", rows, facts, json)
    if not all(row["correct"] for row in rows):
        print("a result was WRONG; it is not in the profile", file=sys.stderr)
        raise typer.Exit(1)


def _spec(asked: Asked, backend: str, known: tuple[str, ...]) -> Spec:
    from dovetail.bench.kv import Spec
    from dovetail.cli.bench import words
    from dovetail.kv.models import MODELS, model

    if asked.rounds is not None and asked.rounds < 1:
        raise ValueError(f"--iters: {asked.rounds} must be at least 1")

    named = asked.layout or "llama-70b-tp4"
    names = list(MODELS) if named == _ALL else words(named)
    paths = known if asked.path in (None, _ALL) else words(asked.path)
    if known == ("cpu",):  # there is nothing to choose from
        paths = tuple("cpu" if path == "auto" else path for path in paths)
    for path in paths:
        if path not in known:
            more = "; others need --backend cuda" if backend == "cpu" else ""
            raise ValueError(f"--path: {path!r} is not one of {', '.join(known)}{more}")
    outermost = asked.outermost or "layer"
    if outermost not in ("layer", "block"):
        raise ValueError(f"--outermost: {outermost!r} must be layer or block")
    directions = asked.direction or ("fetch,store" if asked.quick or backend == "cpu" else "fetch,store,both")
    tokens = asked.tokens or (_QUICK_TOKENS if asked.quick else _DEFAULT_TOKENS)
    return Spec(
        models=tuple(model(name.strip()) for name in names),
        tokens=tuple(parse_bytes(word) for word in tokens.split(",")),
        cache_bytes=parse_bytes(asked.cache or _DEFAULT_CACHE[backend]),
        paths=tuple(str(path) for path in paths),
        directions=words(directions),
        loads=words(asked.beside or "idle"),
        outermost=outermost,
        rounds=asked.rounds or (_QUICK_ROUNDS if asked.quick else _ROUNDS),
    )


def _named(row: dict[str, Any]) -> str:
    """A path; of auto also what it took."""
    return f"auto: {row['chosen']}" if row["path"] == "auto" and row["chosen"] else str(row["path"])


def _show(spec: Spec, rows: list[dict[str, Any]]) -> None:
    """A table for each layout and load."""
    from rich.table import Table

    print(f"kv, cache of {format_bytes(spec.cache_bytes)}, {spec.outermost} outermost, random blocks")
    for layout, beside in dict.fromkeys((row["layout"], row["beside"]) for row in rows):
        mine = [row for row in rows if (row["layout"], row["beside"]) == (layout, beside)]
        where = "" if beside == "idle" else f", beside {beside}"
        title = f"{layout}, rows of {format_bytes(mine[0]['row_bytes'])}{where}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("tokens")
        table.add_column("way")
        table.add_column("path")
        names = ["copies", "plan us", "submit us", "time us", "GB/s", "of contiguous"]
        for name in names if beside == "idle" else [*names, "computation"]:
            table.add_column(name, justify="right", no_wrap=True)
        for row in mine:
            share = "" if row["share"] is None else f"{row['share']:.0%}"
            speed = "WRONG" if not row["correct"] else "" if row["time_us"] is None else f"{row['bandwidth_gbps']:.2f}"
            kept = [] if beside == "idle" else ["" if row["compute_kept"] is None else f"{row['compute_kept']:.0%}"]
            table.add_row(
                format_bytes(row["tokens"]), row["direction"], _named(row), str(row["copies"]), f"{row['plan_us']:.0f}",
                *("" if row[k] is None else f"{row[k]:.0f}" for k in _TIMES), speed, share, *kept,
            )  # fmt: skip
        _table.show(table, wide=120, keys=3)
