"""Rows of the bench: a cell is a layout, a number of tokens, a direction and what computes beside."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.bench.kv.load import Load
from dovetail.bench.kv.places import Place
from dovetail.bench.kv.race import Contender, Part, Sample, race
from dovetail.bench.kv.spec import BOTH, CONTIGUOUS, IDLE, PLAIN, Progress, Row, Spec
from dovetail.kv.choose import Path
from dovetail.kv.layout import Layout, block_outermost
from dovetail.kv.models import Model
from dovetail.kv.planner import Direction, Pieces, table

Ints = NDArray[np.int64]


def measure(spec: Spec, place: Place, progress: Progress | None = None) -> tuple[list[Row], list[str]]:
    """A row for each layout, number of tokens, direction, load and contender; and lines about what was left out."""
    rows: list[Row] = []
    notes: list[str] = []
    fitting = []
    both = 2 if BOTH in spec.directions else 1
    for model in spec.models:
        for tokens in spec.tokens:
            if both * model.blocks(tokens) * model.block_bytes > spec.cache_bytes:
                twice = " twice, for both directions at once" if both == 2 else ""
                notes.append(f"{model.name}: {tokens} tokens do not fit into the cache{twice}")
            else:
                fitting.append((model, tokens))
    if not fitting:
        return rows, notes
    loads = {name: None if name == IDLE else place.load(name) for name in spec.loads}
    place.begin(spec.cache_bytes, both * max(model.blocks(tokens) * model.block_bytes for model, tokens in fitting))
    cells = [(name, model, tokens) for model, tokens in fitting for name in spec.loads]
    for done, (name, model, tokens) in enumerate(cells):
        if progress:
            progress(done, len(cells), f"{model.name}, {tokens} tokens, {name}")
        case = _Case(spec, place, model, tokens, name, loads[name])
        for direction in spec.directions:
            rows += case.rows(direction)
    return rows, notes


class _Case:
    """The same request by every contender."""

    def __init__(self, spec: Spec, place: Place, model: Model, tokens: int, beside: str, load: Load | None) -> None:
        self._spec, self._place, self._model, self._tokens = spec, place, model, tokens
        self._beside, self._load = beside, load
        self._num_blocks, self._count = spec.cache_bytes // model.block_bytes, model.blocks(tokens)
        self._layout = model.layout(self._num_blocks, outermost=spec.outermost)
        self._whole = block_outermost(
            CONTIGUOUS, num_layers=model.num_layers, row_bytes=model.row_bytes, num_blocks=self._num_blocks
        )

    def rows(self, direction: str) -> list[Row]:
        """Of one direction, or of both at once."""
        model = self._model
        parts = list(Direction) if direction == BOTH else [Direction(direction)]
        num_slots = self._count * len(parts)
        rng = np.random.default_rng([self._spec.seed, self._count, model.num_layers, model.row_bytes])
        request = _Request(
            directions=parts,
            blocks=np.split(rng.permutation(self._num_blocks)[:num_slots], len(parts)),
            slots=np.split(rng.permutation(num_slots), len(parts)),
            pieces=Pieces(num_slots=num_slots, slot_bytes=self._layout.slot_bytes, slots_per_piece=num_slots),
            rng=rng,
        )
        made = [self._contender(request, *way) for way in self._ways()]
        race(made, self._spec.rounds, self._load)
        same = {
            "collective": "kv", "backend": self._place.backend, "layout": model.name,
            "outermost": self._spec.outermost, "direction": direction, "beside": self._beside,
            "tokens": self._tokens, "blocks": self._count, "num_layers": model.num_layers,
            "row_bytes": model.row_bytes, "cache_bytes": self._spec.cache_bytes,
        }  # fmt: skip
        return _shared([same | contender.row() for contender in made])

    def _ways(self) -> list[tuple[str, Layout, Path, int | None]]:
        """(name, layout, path, entries of a call)."""
        spec = self._spec
        plain = Path.CPU if Path.CPU in self._place.paths() else Path.DMA_2D
        made: list[tuple[str, Layout, Path, int | None]] = []
        if spec.yardsticks:
            made = [(PLAIN, self._whole, plain, None), (CONTIGUOUS, self._whole, plain, None)]
        for name in spec.paths:
            path = Path(name)
            if path is Path.DMA_BATCH:
                made += [(f"{path} {n or 'one call'}", self._layout, path, n or 1 << 20) for n in spec.entries]
            else:
                made.append((str(path), self._layout, path, None))
        return made

    def _contender(self, request: _Request, name: str, of: Layout, path: Path, entries: int | None) -> Contender:
        pairs = [request.plain(n) if name == PLAIN else request.random(n) for n in range(len(request.directions))]
        began = time.perf_counter_ns()
        tables = [table(d, of, *pair, request.pieces) for d, pair in zip(request.directions, pairs, strict=True)]
        plan_us = (time.perf_counter_ns() - began) / 1e3
        parts = []
        for direction, pair, copies in zip(request.directions, pairs, tables, strict=True):
            submit = functools.partial(self._place.submit, direction, copies, path, entries, self._load is not None)
            sample = Sample(self._place, of, *pair, request.rng)
            parts.append(Part(direction=direction, submit=submit, sample=sample))
        return Contender(
            name=name, entries=entries, size_bytes=sum(t.size_bytes for t in tables), copies=sum(map(len, tables)),
            plan_us=plan_us, parts=parts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """Blocks and slots, a list for each direction; no block and no slot is in two of them."""

    directions: list[Direction]
    blocks: list[Ints]
    slots: list[Ints]
    pieces: Pieces
    rng: np.random.Generator

    def random(self, n: int) -> tuple[Ints, Ints]:
        """Blocks and slots of one direction."""
        return self.blocks[n], self.slots[n]

    def plain(self, n: int) -> tuple[Ints, Ints]:
        """As many that follow each other on both sides."""
        run = np.arange(len(self.slots[n])) + n * len(self.slots[n])
        return run, run


def _shared(rows: list[Row]) -> list[Row]:
    """With the share of what contiguous copies reach."""
    best = next((row["bandwidth_gbps"] for row in rows if row["path"] == CONTIGUOUS), None)
    return [row | {"share": row["bandwidth_gbps"] / best if best and row["bandwidth_gbps"] else None} for row in rows]
