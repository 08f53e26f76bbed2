"""The choice of a path: lines of measured costs, that explain themselves."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path as File

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dovetail import profile
from dovetail.bench.kv import tune
from dovetail.kv import costs
from dovetail.kv.choose import CANDIDATES, HOST_SHARE, Costs, Path, Samples, Shape, choose, estimate, is_aligned
from dovetail.kv.layout import layer_outermost
from dovetail.kv.planner import Direction, Pieces, Table, table
from dovetail.measure import machine

MB = 1 << 20


def copies(row_bytes: int, blocks: int = 100) -> Table:
    layout = layer_outermost("x", num_layers=10, row_bytes=row_bytes, num_blocks=2 * blocks)
    pieces = Pieces(num_slots=blocks, slot_bytes=layout.slot_bytes, slots_per_piece=blocks)
    return table("fetch", layout, np.arange(0, 2 * blocks, 2), np.arange(blocks), pieces)


COSTS = Costs(
    samples={
        (Direction.FETCH, False, Path.DMA_2D): Samples([(4096, 4 * MB, 180), (65536, 64 * MB, 1300)]),
        (Direction.FETCH, False, Path.DMA_BATCH): Samples([(4096, 4 * MB, 900)]),
        (Direction.FETCH, False, Path.STAGED): Samples([(4096, 4 * MB, 500), (65536, 64 * MB, 1250)]),
        (Direction.FETCH, True, Path.DMA_2D): Samples([(4096, 4 * MB, 1800)]),
        (Direction.FETCH, True, Path.STAGED): Samples([(4096, 4 * MB, 600)]),
    },
    entries_per_call=128,
    source="a test",
)


def test_the_least_time_wins_and_says_why() -> None:
    idle = choose(Direction.FETCH, Shape.of(copies(4096)), COSTS, beside=False)
    assert idle.path is Path.DMA_2D
    assert idle.entries_per_call == 128
    assert idle.reason == "estimated on an idle GPU: dma-2d 176 us, dma-batch 879 us, staged 488 us (a test)"
    near_the_other = Shape.of(copies(65536))
    assert choose(Direction.FETCH, near_the_other, COSTS, beside=False).path is Path.STAGED
    busy = choose(Direction.FETCH, Shape.of(copies(4096)), COSTS, beside=True)
    assert busy.path is Path.STAGED
    assert busy.reason.startswith("estimated beside computation: dma-2d 1758 us, staged 586 us")
    assert choose(Direction.FETCH, Shape.of(copies(4096)), COSTS, beside=True, paths=[Path.DMA_2D]).path is Path.DMA_2D
    unknown = choose(Direction.STORE, Shape.of(copies(4096)), COSTS, beside=False)
    assert (unknown.path, unknown.reason) == (Path.DMA_2D, "no other path was measured")


def test_between_paths_as_fast_the_host_decides() -> None:
    shape = Shape(row_bytes=65536, size_bytes=64 * MB)
    for batch_host_us, wanted in ((100.0, Path.DMA_BATCH), (900.0, Path.STAGED)):
        samples = {
            (Direction.FETCH, False, Path.DMA_BATCH): Samples([(65536, 64 * MB, 1200.0, batch_host_us)]),
            (Direction.FETCH, False, Path.STAGED): Samples([(65536, 64 * MB, 1250.0, 50.0)]),
        }
        made = Costs(samples=samples, entries_per_call=128, source="a test")
        choice = choose(Direction.FETCH, shape, made, beside=False)
        assert choice.path is wanted
        assert f"dma-batch 1200 us (host {batch_host_us:.0f}), staged 1250 us (host 50)" in choice.reason


def test_rows_that_a_kernel_can_move() -> None:
    assert is_aligned(copies(4096))
    assert not is_aligned(copies(4090))


POINTS = some.tuples(some.integers(1, 1 << 20), some.integers(1, 1 << 34), some.floats(0.1, 1e6))


@given(points=some.lists(POINTS, min_size=1, max_size=12, unique_by=lambda p: p[:2]), near=POINTS)
def test_an_estimate_is_exact_at_a_sample_and_between_the_samples_elsewhere(
    points: list[tuple[int, int, float]], near: tuple[int, int, float]
) -> None:
    samples = Samples(points)
    for row_bytes, size_bytes, time_us in points:
        others = [p for p in points if p[:2] != (row_bytes, size_bytes)]
        apart = min((np.log2(p[0] / row_bytes) ** 2 + np.log2(p[1] / size_bytes) ** 2 for p in others), default=9.0)
        if apart > 0.1:
            found = samples.time_us(Shape(row_bytes=row_bytes, size_bytes=size_bytes))
            assert found == pytest.approx(time_us, rel=1e-2)
    speeds = [size_bytes / time_us for _, size_bytes, time_us in points]
    found = near[1] / samples.time_us(Shape(row_bytes=near[0], size_bytes=near[1]))
    assert min(speeds) * 0.999 <= found <= max(speeds) * 1.001
    assert samples.time_us(Shape(row_bytes=1, size_bytes=0)) == 0


def plain(points: list[tuple[int, int, float, float]], shape: Shape, *, host: bool = False) -> float:
    """The definition: all points are sorted by their distance, and of equal ones the faster counts as nearer."""
    row, size = math.log2(shape.row_bytes), math.log2(shape.size_bytes)
    away = [((math.log2(r) - row) ** 2 + (math.log2(s) - size) ** 2) for r, s, _, _ in points]
    every = [(far, h / s if host else math.log(t / s)) for far, (_, s, t, h) in zip(away, points, strict=True)]
    near = sorted(every)[:4]
    weights = [1 / (distance + 1e-6) for distance, _ in near]
    mean = sum(w * per_byte for w, (_, per_byte) in zip(weights, near, strict=True)) / sum(weights)
    return (mean if host else math.exp(mean)) * shape.size_bytes


def test_the_choice_is_that_of_a_plain_search_wherever_it_is_asked_for() -> None:
    """Paths that were measured together share their search: over the grid, on it and between, with ties on all sides.

    Questions for different shapes follow each other, so an answer for another shape would be seen.
    """
    shipped = costs.shipped()
    sizes = [1 << k for k in range(14, 33)] + [3 << k for k in range(14, 31, 3)]
    rows = [512, 4096, 6000, 8192, 16384, 18432, 32768, 65536, 327680, 1 << 20, 3 << 20]
    found = set()
    for row_bytes, size_bytes in itertools.product(rows, sizes):
        shape = Shape(row_bytes=row_bytes, size_bytes=size_bytes)
        for direction, beside in itertools.product(Direction, (False, True)):
            wanted = {path: plain(shipped.samples[direction, beside, path].points, shape) for path in CANDIDATES}
            host = {
                path: plain(shipped.samples[direction, beside, path].points, shape, host=True) for path in CANDIDATES
            }
            made = estimate(direction, shape, shipped, beside=beside)
            assert made.times_us == pytest.approx(wanted, rel=1e-12)
            assert made.host_us == pytest.approx(host, rel=1e-12)
            cost = {path: time_us + HOST_SHARE * host[path] for path, time_us in wanted.items()}
            assert made.choice().path is min(cost, key=cost.__getitem__)
            where = "beside computation" if beside else "on an idle GPU"
            times = ", ".join(f"{path} {time_us:.0f} us (host {host[path]:.0f})" for path, time_us in wanted.items())
            assert made.choice().reason == f"estimated {where}: {times} ({shipped.source})"
            found.add(made.choice().path)
    assert found == set(CANDIDATES)


def test_a_section_comes_back_as_it_was() -> None:
    back = costs.parse(costs.section(COSTS), "a test")
    assert back == COSTS
    for wrong in ({}, {"fetch": {}}, {"entries_per_call": 1, "fetch": {"idle": {"dma-2d": [[1, 1]]}}}, [1]):
        with pytest.raises(ValueError, match="section 'kv' of the profile is not understood"):
            costs.parse(wrong, "profile")
    for points in ([], [[0, 1, 1]], [[1, 1, -1]]):
        with pytest.raises(ValueError, match="a path needs measured times"):
            costs.parse({"entries_per_call": 1, "fetch": {"idle": {"dma-2d": points}}}, "profile")


def test_the_profile_of_this_machine_goes_before_the_shipped_figures(
    tmp_path: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    assert costs.current() == costs.shipped()
    assert "H200" in costs.current().source
    profile.save(profile.Profile(key=machine.profile_key(), sections={"coll": {}, "overlap": {"x": 1}}))
    tune.save(COSTS, "cuda")
    assert costs.current().samples == COSTS.samples
    assert json.loads((tmp_path / "profile.json").read_text())["sections"]["overlap"] == {"x": 1}  # others stay


def test_the_shipped_figures_cover_every_candidate() -> None:
    assert set(costs.shipped().samples) == {(d, b, p) for d in Direction for b in (False, True) for p in CANDIDATES}


def test_the_shipped_figures_are_those_of_a_record() -> None:
    """Made by `dovetail tune --only kv` on an H200, and nothing else."""
    record = json.loads((File(__file__).parents[2] / "benchmarks/results/h200-tune-kv.json").read_text())
    found = tune.found_in(record["rows"], "a record")
    assert costs.section(found) == costs.section(costs.shipped())
