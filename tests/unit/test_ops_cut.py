"""Where slices are cut, by a model: held against every cut there is, and against a simulation of its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ops.gpu.cut import EVENT_US, Piece, Rates, best_cut, planned_cut
from dovetail.ops.gpu.launch import SplitK, bag_rates, gemm_rates
from dovetail.ops.gpu.tiles import LARGE, MEDIUM, row_tiles, runs_of

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


@given(st.lists(st.integers(0, 5), min_size=2, max_size=3), RATES)
def test_no_cut_ends_sooner(rows: list[int], rates: Rates) -> None:
    order = list(range(len(rows)))
    found = best_cut(rows, order, 1, rates)
    every = itertools.product(*(list(compositions(number)) for number in rows))
    best_us = min(arrival_us(as_pieces(order, cuts), rates) for cuts in every)
    assert found.end_us == pytest.approx(best_us)
    assert arrival_us(found.pieces, rates) == pytest.approx(best_us)


@given(
    st.lists(st.integers(0, 700), min_size=2, max_size=4), st.integers(1, 130), RATES,
    st.sampled_from([None, True, False]),
)  # fmt: skip
def test_all_rows_are_cut_once_and_in_order(rows: list[int], step: int, rates: Rates, head: bool | None) -> None:
    order = [*range(1, len(rows)), 0]
    leaving = sum(rows[1:])
    try:
        found = planned_cut(rows, order, step, rates, head_us=lambda number: 3.0 + number, head=head)
    except ValueError:
        assert head
        assert not rows[1] or min(step, rows[1]) >= leaving
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


def test_rates_follow_from_what_was_measured() -> None:
    """2560x4096 on 132 multiprocessors: 640 tiles of 128x128 are 5 waves; 320 of 128x256, 64 of them halved, 2.5."""
    rates = gemm_rates(MEDIUM, SplitK.NONE, 2560, 4096, 12416, 132, row_us=0.16, compute_us=350)
    assert (rates.wave_us, rates.wave_rows, rates.row_us) == (70, 528, 0.16)
    rates = gemm_rates(LARGE, SplitK.TAIL, 2560, 4096, 12416, 132, row_us=0.16, compute_us=350)
    assert (rates.wave_us, rates.wave_rows) == (140, 1056)
    rates = gemm_rates(LARGE, SplitK.HALVES, 2560, 4096, 12416, 132, row_us=0.16, compute_us=350)
    assert (rates.wave_us, rates.wave_rows) == (70, 528)
    about = gemm_rates(LARGE, SplitK.NONE, 2560, 4096, 12416, 132, row_us=0.16)
    assert 100 < about.wave_us < 160
    assert bag_rates(400, 300, row_us=2).ready_us(400) == pytest.approx(600)
    assert bag_rates(400, 300, row_us=2, compute_us=1000).ready_us(400) == pytest.approx(1000)
    for empty in (gemm_rates(LARGE, SplitK.TAIL, 0, 0, 0, 132, row_us=1), bag_rates(0, 0, row_us=1)):
        assert empty.ready_us(0) == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4), st.integers(1, 4), st.integers(1, 5))
def test_runs_say_what_the_table_says(rows: list[int], rank: int, height: int, slice_rows: int) -> None:
    tiles = row_tiles(rows, min(rank, len(rows) - 1), height, slice_rows=slice_rows)
    runs = runs_of(tiles, height)
    if runs is None:
        assert len(tiles.tiles) > 3
        return
    numbers = [runs[2], runs[5], len(tiles.tiles)]
    for number, (first, end) in enumerate(tiles.tiles[:, :2].tolist()):
        run = next(k for k in range(3) if number < sum(numbers[: k + 1]))
        begin, stop = runs[3 * run : 3 * run + 2]
        at = begin + (number - sum(numbers[:run])) * height
        assert (first, end) == (at, min(at + height, stop))
