"""What `dovetail bench kv --serve` does: parses, measures, prints."""

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
    from dovetail.bench.serve.spec import Spec

_ALL = "all"
#: backend -> what is measured if nothing else is asked for.
_MODELS = {"cpu": "tiny", "cuda": "llama-8b,llama-8b-tp4"}
_TOKENS = {"cpu": "256,1K", "cuda": "1K,2K,4K,8K,16K,32K"}
_QUICK_TOKENS = {"cpu": "256", "cuda": "1K,8K"}
_HITS = {"cpu": "0.5,1", "cuda": "0.5,0.9,1"}
_QUICK_HIT = "1"
_CACHE = {"cpu": "256M", "cuda": "16G"}
_SERVE_TOKENS = {"cpu": 512, "cuda": 8192}
_REQUESTS, _IN_FLIGHT = {"cpu": 8, "cuda": 24}, {"cpu": 4, "cuda": 8}
_STEPS = {"cpu": "plain", "cuda": "graph"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options as they were given."""

    model: str | None
    tokens: str | None
    hit: str | None
    requests: int | None
    in_flight: int | None
    new: int | None
    offload: str | None
    cache: str | None
    path: str | None
    steps: str | None
    rounds: int | None
    quick: bool


def bench(backend: str, asked: Asked, bounds: Bounds, json: Path | None) -> None:
    """Measures and shows; exit 1 if logits were wrong or a part failed."""
    spec = _spec(asked, backend)
    from dovetail.bench.serve import run, verdict
    from dovetail.cli import _gpu
    from dovetail.cli.bench import progress_bar

    facts: dict[str, Any] | None = None
    if backend == "cuda":
        from dovetail.bench.gpu.session import Session

        with Session("cuda", bounds) as session, progress_bar() as progress:
            rows, notes = run.measure(spec, session, progress)
            facts = session.facts()
    else:
        if bounds != Bounds():
            raise ValueError("--force and --pin are for --backend cuda")
        with progress_bar() as progress:
            rows, notes = run.measure(spec, None, progress)
    _show(spec, rows)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    for line in verdict.lines(rows):
        print(line)
    if json is not None:
        _gpu.write("bench", rows, facts, json)
    if notes or not all(row["correct"] for row in rows):
        raise typer.Exit(1)


def _spec(asked: Asked, backend: str) -> Spec:
    from dovetail.bench.serve.contender import known, usual
    from dovetail.bench.serve.shapes import served_model
    from dovetail.bench.serve.spec import Spec

    names = usual(backend) if asked.path in (None, _ALL) else tuple(w.strip() for w in asked.path.split(","))
    for name in names:
        if name not in known(backend):
            raise ValueError(f"--path: {name!r} is not one of {', '.join(known(backend))}, which {backend} has")
    tokens = asked.tokens or (_QUICK_TOKENS if asked.quick else _TOKENS)[backend]
    hits = asked.hit or (_QUICK_HIT if asked.quick else _HITS[backend])
    steps = asked.steps or _STEPS[backend]
    if steps not in ("graph", "plain"):
        raise ValueError(f"--steps: {steps!r} is neither graph nor plain")
    return Spec(
        models=tuple(served_model(word.strip()) for word in (asked.model or _MODELS[backend]).split(",")),
        tokens=tuple(parse_bytes(word) for word in tokens.split(",")),
        hit_rates=tuple(_share(word) for word in hits.split(",")),
        cache_bytes=parse_bytes(asked.cache or _CACHE[backend]),
        contenders=names,
        serve_tokens=_SERVE_TOKENS[backend],
        num_requests=_REQUESTS[backend] if asked.requests is None else asked.requests,
        in_flight=_IN_FLIGHT[backend] if asked.in_flight is None else asked.in_flight,
        new_tokens=4 if asked.new is None else asked.new,
        offload_tokens=tuple(parse_bytes(word) for word in asked.offload.split(",")) if asked.offload else (),
        rounds=asked.rounds or (2 if asked.quick else 5),
        passes=1 if asked.quick else 2,
        graphs=steps == "graph",
    )


def _share(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"--hit: {word.strip()!r} is no number between 0 and 1") from None


def _show(spec: Spec, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    flight = f"{spec.in_flight} requests in flight, {spec.new_tokens} new tokens"
    title = f"kv, served by transformers, cache of {format_bytes(spec.cache_bytes)}, random blocks; {flight}"
    title += "; short steps are graphs" if spec.graphs else ""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("model", "page B", "", "prefix", "kept", "contender", "fetched by"):
        table.add_column(name)
    for name in ("ms", "requests/s", "of std", "bits"):
        table.add_column(name, justify="right")
    for row in rows:
        rate, speed = row.get("hit_rate"), row.get("requests_per_s")
        time = "WRONG" if row["time_us"] is None else f"{row['time_us'] / 1e3:.2f}"
        differ = "" if row["logits_diff"] is None else f"{row['logits_diff']:.1g}"
        table.add_row(
            row["model"], format_bytes(row["row_bytes"]), row["section"], format_bytes(row["tokens"]),
            "" if rate is None else f"{rate:.0%}", row["contender"], row["path"], time,
            "" if speed is None else f"{speed:.2f}", differ, "same" if row["same_bits"] else "other",
        )  # fmt: skip
    _table.show(table, wide=150, keys=6)
