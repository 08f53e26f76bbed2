"""The choice of a path: an estimate with the form of the records, that explains itself."""

from __future__ import annotations

import json
from pathlib import Path as File

import numpy as np
import pytest

from dovetail.kv.choose import H200, Path, choose, estimates
from dovetail.kv.layout import block_outermost, layer_outermost
from dovetail.kv.models import model
from dovetail.kv.planner import Pieces, Table, table

RECORDS = sorted((File(__file__).parents[2] / "benchmarks/results").glob("h200-kv-*.json"))


def copies(layout: str, tokens: int, cache_bytes: int, outermost: str) -> Table:
    found = model(layout)
    num_blocks, count = cache_bytes // found.block_bytes, found.blocks(tokens)
    made = found.layout(num_blocks, outermost=outermost)
    rng = np.random.default_rng(1)
    pieces = Pieces(num_slots=count, slot_bytes=made.slot_bytes, slots_per_piece=count)
    return table("fetch", made, rng.permutation(num_blocks)[:count], rng.permutation(count), pieces)


def test_the_estimate_has_the_form_of_the_records() -> None:
    cells: dict[tuple[object, ...], dict[str, float]] = {}
    for record in RECORDS:
        for row in json.loads(record.read_text())["rows"]:
            key = (row["layout"], row["tokens"], row["cache_bytes"], row["outermost"], row["direction"])
            cells.setdefault(key, {})[row["path"]] = row["time_us"]
    assert len(cells) == 48
    near = 0
    for (layout, tokens, cache_bytes, outermost, _), times in cells.items():
        choice = choose(copies(layout, tokens, cache_bytes, outermost))  # type: ignore[arg-type]
        name = f"{choice.path} {choice.entries_per_call}" if choice.path is Path.DMA_BATCH else str(choice.path)
        engines = [time_us for path, time_us in times.items() if path.startswith("dma")]
        near += times[name] <= 1.05 * min(engines)
        assert times[name] <= 1.15 * min(engines)
    assert near / len(cells) >= 0.9


def test_short_rows_are_strided_and_whole_blocks_are_batched() -> None:
    pieces = Pieces(num_slots=100, slot_bytes=80 * 8192, slots_per_piece=100)
    strided = layer_outermost("x", num_layers=80, row_bytes=8192, num_blocks=1000)
    whole = block_outermost("x", num_layers=80, row_bytes=8192, num_blocks=1000)
    blocks, slots = np.arange(0, 200, 2), np.arange(100)
    assert choose(table("fetch", strided, blocks, slots, pieces)).path is Path.DMA_2D
    batched = choose(table("fetch", whole, blocks, slots, pieces))
    assert batched.path is Path.DMA_BATCH
    assert batched.entries_per_call == H200.entries_per_call
    assert batched.reason.startswith("estimated: dma-2d ")
    assert choose(table("fetch", whole, blocks, slots, pieces), batches=False).path is Path.DMA_2D


def test_an_estimate_is_the_slower_of_issuing_and_moving() -> None:
    layout = layer_outermost("x", num_layers=10, row_bytes=64, num_blocks=1000)
    pieces = Pieces(num_slots=100, slot_bytes=640, slots_per_piece=100)
    found = estimates(table("fetch", layout, np.arange(0, 200, 2), np.arange(100), pieces))
    assert found[Path.DMA_2D] == pytest.approx(100 * H200.copy_us)  # tiny rows: issuing takes longer
    assert found[Path.DMA_BATCH] == pytest.approx(1000 * H200.entry_us)
    empty = estimates(table("fetch", layout, [], [], pieces))
    assert set(empty.values()) == {0.0}
