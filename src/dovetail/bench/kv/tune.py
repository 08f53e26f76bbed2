"""Measures what moving blocks costs on this machine: the section "kv" of a profile, by which `auto` chooses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path as File
from typing import Any

from dovetail import env, profile
from dovetail.bench.kv.measure import measure
from dovetail.bench.kv.places import Place
from dovetail.bench.kv.spec import IDLE, Progress, Row, Spec
from dovetail.kv import costs
from dovetail.kv.choose import CANDIDATES, Case, Costs, Path, Samples, Shape, choose
from dovetail.kv.models import BLOCK_TOKENS, MODELS
from dovetail.kv.planner import Direction
from dovetail.measure import machine
from dovetail.measure.sizes import format_bytes

ENTRIES = (128, 512)
BESIDE = "gemm"  #: what stands for computation
_TOKENS, _FEW_TOKENS = (512, 1024, 2048, 4096, 8192), (512, 4096)
_FEW_MODELS = ("llama-70b-tp8-fp8", "llama-70b-tp4", "llama-8b")  # rows of 4, 16 and 64 KB
_LONG_S = 120.0  # a budget for everything
_ROUNDS = 3
_SHARE = 8  # of the cache that one request may take at most


def rows(place: Place, cache_bytes: int, budget_s: float, loads: Sequence[str], progress: Progress | None) -> list[Row]:
    """Requests of several sizes and shapes, layer-outermost and block-outermost; with little time, fewer of them.

    A window beside a computation has several transfers in it: one is enough.
    """
    long = budget_s >= _LONG_S
    wanted = _TOKENS if long else _FEW_TOKENS
    names = {"layer": tuple(MODELS) if long else _FEW_MODELS, "block": _FEW_MODELS}
    block_bytes = max(MODELS[name].block_bytes for name in names["layer"])
    tokens = tuple(t for t in wanted if t // BLOCK_TOKENS * block_bytes * _SHARE <= cache_bytes)
    if not tokens:
        need = wanted[0] // BLOCK_TOKENS * block_bytes * _SHARE
        raise ValueError(f"--cache: {cache_bytes} bytes are too few to measure with, give at least {need}")
    found: list[Row] = []
    for load, outermost in itertools.product(loads, ("layer", "block")):
        spec = Spec(
            models=tuple(MODELS[name] for name in names[outermost]),
            tokens=tokens,
            cache_bytes=cache_bytes,
            paths=tuple(str(path) for path in CANDIDATES if path in place.paths()),
            entries=ENTRIES,
            outermost=outermost,
            loads=(load,),
            yardsticks=load == IDLE,
            rounds=_ROUNDS if load == IDLE else 1,
        )
        found += measure(spec, place, progress)[0]
    return found


def found_in(measured: Sequence[Row], source: str, device: str = "") -> Costs:
    """The times of every path in each direction and state; entries of a batch: those that were fastest on the whole."""
    entries = min(ENTRIES, key=functools.partial(_total, measured))
    samples: dict[Case, Samples] = {}
    for direction, beside, path in itertools.product(Direction, (False, True), CANDIDATES):
        if points := _points(measured, direction, beside, path, entries):
            samples[direction, beside, path] = Samples(points)
    return Costs(samples=samples, entries_per_call=entries, source=source, device=device)


def _points(
    measured: Sequence[Row], direction: Direction, beside: bool, path: Path, entries: int
) -> list[tuple[int, int, float, float]]:
    name = f"{path} {entries}" if path is Path.DMA_BATCH else str(path)
    mine = [row for row in measured if row["path"] == name and row["direction"] == direction and row["correct"]]
    return [
        (*dataclasses.astuple(shape_of(row)), row["time_us"], row["submit_us"])
        for row in mine
        if (row["beside"] != IDLE) == beside
    ]


def _total(measured: Sequence[Row], entries: int) -> float:
    mine = [row for row in measured if row["path"] == f"{Path.DMA_BATCH} {entries}"]
    return sum(float(row["time_us"]) for row in mine) if all(row["correct"] for row in mine) else math.inf


def shape_of(row: Row) -> Shape:
    """Of the copies of a row: a block has a row for each layer, or is one."""
    rows = int(row["blocks"]) * (int(row["num_layers"]) if row["outermost"] == "layer" else 1)
    return Shape(row_bytes=row["size_bytes"] // rows, size_bytes=int(row["size_bytes"]))


def lines(found: Costs) -> list[str]:
    """For each direction and state, which path would be taken by the length of rows and the size of a request."""
    shown = []
    for direction, (state, beside) in itertools.product(Direction, costs.STATES.items()):
        mine = {path: s for (d, b, path), s in found.samples.items() if (d, b) == (direction, beside)}
        shapes = sorted({point[:2] for samples in mine.values() for point in samples.points})
        by_row: dict[int, list[str]] = {}
        for row_bytes, size_bytes in shapes:
            shape = Shape(row_bytes=row_bytes, size_bytes=size_bytes)
            best = choose(direction, shape, found, beside=beside).path
            speed = size_bytes / mine[best].time_us(shape) / 1e3
            by_row.setdefault(row_bytes, []).append(f"{format_bytes(size_bytes)} {best} {speed:.0f} GB/s")
        for row_bytes, cells in by_row.items():
            shown.append(f"{direction} {state}, rows of {format_bytes(row_bytes)}: {', '.join(cells)}")
    return shown


def save(found: Costs, backend: str) -> File:
    """Into the profile of this machine; what else it has stays in it."""
    sections: dict[str, Any] = {costs.SECTION: {backend: costs.section(found)}}
    new = profile.Profile(key=machine.profile_key(), sections=sections)
    old, _ = profile.load(env.profile_path(), machine.profile_key())
    return profile.save(old.merged(new) if old else new)
