"""Where slices are cut, by a model: held against every cut there is, and against a simulation of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ops.gpu.cut import EVENT_US, Piece, Rates, best_cut, planned_cut
from dovetail.ops.gpu.launch import SplitK
from dovetail.ops.gpu.rates import bag_rates, gemm_head_us, gemm_rates
from dovetail.ops.gpu.tiles import LARGE, SMALL, Order, across, row_tiles, runs_of

_US = st.floats(0.25, 40, allow_nan=False)
RATES = st.builds(
    Rates, wave_us=_US, wave_rows=st.floats(0.5, 9), row_us=st.floats(0.1, 20), copy_us=st.floats(0, 9),
    flag_us=st.floats(0, 9),
)  # fmt: skip


def arrival_us(pieces: Sequence[Piece], rates: Rates, head_rows: int = 0, head_us: float = 0.0) -> float:
    """A link that takes slices in turn: when the last one is there."""
    there, free_us = 0, -math.inf
    for number, (_, begin, end) in enumerate(pieces):
        there += end - begin
        waves = math.ceil((there - head_rows) / rates.wave_rows - 1e-9)
        raised_us = head_us + waves * rates.wave_us + rates.flag_us
        if number == 0 and head_rows:
            raised_us = head_us + EVENT_US
        free_us = max(free_us + rates.copy_us, raised_us) + (end - begin) * rates.row_us
    return free_us


def compositions(number: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut so many rows."""
    if not number:
        yield ()
    for first in range(1, number + 1):
        yield from ((first, *rest) for rest in compositions(number - first))


def as_pieces(order: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Piece]:
    found = []
    for place, sizes in zip(order, cuts, strict=True):
        ends = list(itertools.accumulate(sizes))
        found += [(place, end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return found


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=3), RATES, st.integers(0, 3), _US)
def test_no_cut_ends_sooner(rows: list[int], rates: Rates, head_rows: int, head_us: float) -> None:
    """Of all that begin with the head, if there is one: rows of the first place that has any."""
    order = list(range(len(rows)))
    first = next((place for place in order if rows[place]), 0)
    head_rows = min(head_rows, rows[first])
    head_us = head_us if head_rows else 0.0
    found = best_cut(rows, order, 1, rates, head_rows=head_rows, head_us=head_us)
    every = [list(compositions(number)) for number in rows]
    if head_rows:
        every[first] = [(head_rows, *rest) for rest in compositions(rows[first] - head_rows)]
    best_us = min(arrival_us(as_pieces(order, c), rates, head_rows, head_us) for c in itertools.product(*every))
    assert found.end_us == pytest.approx(best_us)
    assert arrival_us(found.pieces, rates, head_rows, head_us) == pytest.approx(best_us)
    assert found.head == (head_rows > 0)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=3, max_size=4), st.integers(1, 40), RATES, st.floats(0, 60), st.floats(0, 2)
)
def test_the_head_is_the_best_of_those_tried(
    rows: list[int], step: int, rates: Rates, launch_us: float, row_us: float
) -> None:
    order = [*range(1, len(rows)), 0]
    leaving, first = order[:-1], next((rows[place] for place in order[:-1] if rows[place]), 0)
    numbers = [n for n in {min(step * k, first) for k in (1, 2, 3, 4, 6, 8, 12, 16)} if 0 < n < sum(rows)]

    def ends(number: int) -> float:
        after_us = launch_us + number * row_us if number else 0.0
        cut = best_cut(rows, leaving, step, rates, head_rows=number, head_us=after_us)
        return max(cut.end_us, after_us + rates.computed_us(sum(rows) - number))

    def planned(head: bool | None) -> float:
        return planned_cut(rows, order, step, rates, head_us=lambda n: launch_us + n * row_us, head=head).end_us

    assert planned(False) == pytest.approx(ends(0))
    if numbers:
        best = min(map(ends, numbers))
        assert planned(True) == pytest.approx(best)
        assert planned(None) == pytest.approx(best if best < 0.98 * ends(0) else ends(0))


@given(
    st.lists(st.integers(0, 700), min_size=2, max_size=4), st.integers(1, 130), RATES,
    st.sampled_from([None, True, False]),
)  # fmt: skip
def test_all_rows_are_cut_once_and_in_order(rows: list[int], step: int, rates: Rates, head: bool | None) -> None:
    order = [*range(1, len(rows)), 0]
    try:
        found = planned_cut(rows, order, step, rates, head_us=lambda number: 3.0 + number, head=head)
    except ValueError:
        assert head
        first = next((rows[place] for place in order[:-1] if rows[place]), 0)
        assert not first or min(step, first) >= sum(rows)  # all there is
        return
    places = [place for place in order if rows[place]]
    assert [place for place, _ in itertools.groupby(piece[0] for piece in found.pieces)] == places
    for place in places:
        mine = [piece[1:] for piece in found.pieces if piece[0] == place]
        assert mine[0][0] == 0
        assert mine[-1][1] == rows[place]
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(mine))
        assert all(end > begin for begin, end in mine)
    assert not found.head or head is not False
    sent = [piece for piece in found.pieces if piece[0] != 0]
    number = sent[0][2] if found.head else 0
    if sent:
        assert arrival_us(sent, rates, number, 3.0 + number if number else 0.0) <= found.end_us + 1e-6


def test_a_link_that_waits_gets_small_slices_and_one_that_is_behind_large_ones() -> None:
    slow_link = Rates(wave_us=1, wave_rows=10, row_us=5)
    assert len(best_cut([0, 100, 100], [1, 2], 1, slow_link).pieces) <= 4
    balanced = Rates(wave_us=10, wave_rows=10, row_us=1, copy_us=1, flag_us=1)
    found = [end - begin for _, begin, end in best_cut([0, 100, 100], [1, 2], 1, balanced).pieces]
    assert found[0] == 10
    assert len(found) > 6
    dear = Rates(wave_us=10, wave_rows=10, row_us=1, copy_us=100, flag_us=1)
    assert len(best_cut([0, 100, 100], [1, 2], 1, dear).pieces) == 2


def test_a_computation_that_takes_longer_needs_few_slices() -> None:
    """All have arrived before it ends as they are: no copy more than there must be."""
    rates = Rates(wave_us=100, wave_rows=10, row_us=1)
    found = planned_cut([100, 50, 50], [1, 2, 0], 1, rates)
    assert found.pieces == [(1, 0, 50), (2, 0, 50), (0, 0, 100)]


def test_a_first_slice_of_its_own_is_taken_where_it_promises_a_gain() -> None:
    rates = Rates(wave_us=100, wave_rows=500, row_us=1, flag_us=8)
    soon = planned_cut([0, 500, 500], [1, 2, 0], 50, rates, head_us=lambda rows: 5 + rows / 10)
    assert soon.head
    assert soon.end_us < planned_cut([0, 500, 500], [1, 2, 0], 50, rates).end_us
    assert not planned_cut([0, 500, 500], [1, 2, 0], 50, rates, head_us=lambda rows: 100.0 + rows).head
    with pytest.raises(ValueError, match="others follow it"):
        planned_cut([9, 0, 0], [1, 2, 0], 50, rates, head_us=lambda rows: 1.0, head=True)
    for rows in ([4, 0, 256, 256], [128, 128], [128, 128, 0], [128, 0, 0, 640], [5, 7]):
        found = planned_cut(rows, [*range(1, len(rows)), 0], 128, rates, head_us=lambda rows: 1.0, head=True)
        assert found.head
        assert found.pieces[0][0] == next(place for place in range(1, len(rows)) if rows[place])


@pytest.mark.parametrize("wrong", [{"wave_rows": 0}, {"row_us": -1}, {"wave_us": math.nan}, {"flag_us": math.inf}])
def test_rates_that_can_not_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="times are not negative, and a wave has rows"):
        Rates(**{"wave_us": 1, "wave_rows": 1, "row_us": 1} | wrong)


def test_fewer_copies_where_the_computation_ends_later() -> None:
    """With the last wave shared out there is less time: `mean_us` counts, and slices have to be there a bit before."""
    rates = Rates(wave_us=100, wave_rows=10, row_us=1, copy_us=0, flag_us=0)
    assert rates.computed_us(95) == 1000
    assert replace(rates, mean_us=9.5).computed_us(95) == pytest.approx(902.5)
    rows, order = [20, 40, 40], [1, 2, 0]
    assert len(planned_cut(rows, order, 10, rates).pieces) == 3
    close = replace(rates, mean_us=8.4)  # 840 of 1000: whole places would be there at 840, nearly too late
    assert len(planned_cut(rows, order, 10, close).pieces) > 3
    assert planned_cut(rows, order, 10, close).end_us == pytest.approx(840)


def test_rates_follow_from_what_was_measured() -> None:
    """2560x4096 on 132 multiprocessors: 640 tiles of 128x128 are 5 waves; 320 of 128x256, 64 of them halved, 2.5."""
    rates = gemm_rates(SMALL, SplitK.NONE, 2560, 4096, 12416, 132, row_us=0.16, compute_us=350)
    assert (rates.wave_us, rates.wave_rows, rates.row_us) == (70, 528, 0.16)
    rates = gemm_rates(LARGE, SplitK.TAIL, 2560, 4096, 12416, 132, row_us=0.16, compute_us=350)
    assert (rates.wave_us, rates.wave_rows) == (140, 1056)
    rates = gemm_rates(LARGE, SplitK.HALVES, 2560, 4096, 12416, 132, row_us=0.16, compute_us=350)
    assert (rates.wave_us, rates.wave_rows) == (70, 528)
    about = gemm_rates(LARGE, SplitK.NONE, 2560, 4096, 12416, 132, row_us=0.16)
    assert 100 < about.wave_us < 160
    assert gemm_rates(LARGE, SplitK.NONE, 2560, 4096, 12416, 132, row_us=0.16, item_bytes=4).wave_us > 8 * about.wave_us
    assert gemm_head_us(640, 4096, 12416, 132, 4) > 8 * gemm_head_us(640, 4096, 12416, 132)
    for split in (SplitK.HALVES, SplitK.TAIL):  # less than a wave
        assert gemm_rates(LARGE, split, 512, 512, 4096, 132, row_us=0.02, compute_us=100).computed_us(512) == 100
    assert bag_rates(400, 300, row_us=2).ready_us(400) == pytest.approx(600)
    assert bag_rates(400, 300, row_us=2, compute_us=1000).ready_us(400) == pytest.approx(1000)
    for empty in (gemm_rates(LARGE, SplitK.TAIL, 0, 0, 0, 132, row_us=1), bag_rates(0, 0, row_us=1)):
        assert empty.ready_us(0) == 0


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4), st.integers(1, 4), st.integers(1, 5),
    st.sampled_from(list(Order)),
)  # fmt: skip
def test_runs_say_what_the_table_says(
    rows: list[int], rank: int, height: int, slice_rows: int, order: Order
) -> None:
    """Whatever the rank, if tiles go across slices; otherwise where slices are whole tiles."""
    cut = row_tiles(rows, min(rank, len(rows) - 1), height, slice_rows=slice_rows, order=order)
    shortest = min((end - first for first, end, *_ in cut.slices.tolist()), default=height)
    if shortest >= height and order is not Order.NATURAL:  # a tile has rows of two slices at most
        assert runs_of(across(cut, height), height) is not None
    for tiles in (cut, across(cut, height)):
        runs = runs_of(tiles, height)
        if runs is None:
            assert len(tiles.tiles) > 2
            continue
        for number, (first, end) in enumerate(tiles.tiles[:, :2].tolist()):
            begin, stop = runs[:2] if number < runs[2] else runs[3:]
            at = begin + (number - (0 if number < runs[2] else runs[2])) * height
            assert (first, end) == (at, min(at + height, stop))
