"""How rows are cut into tiles, slices and programs: pure tables."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ops.gpu.launch import GemmLaunch, few_waves, task_table, waves
from dovetail.ops.gpu.tiles import Blocks, Order, across, pieces, row_tiles


@pytest.mark.parametrize(
    ("row_tiles", "columns", "programs", "expected"),
    [
        (20, 16, 132, (4, 2)),  # 2.5 waves instead of 3
        (21, 16, 132, (5, 3)),  # 2.67; halves would not help
        (132, 32, 132, (0, 1)),  # 32 full waves
        (5, 4, 40, (5, 2)),  # all of it at once
        (1, 132, 132, (0, 1)),
        (1, 133, 132, (0, 1)),
        (0, 16, 132, (0, 1)),
    ],
)  # fmt: skip
def test_how_many_row_tiles_are_split(row_tiles: int, columns: int, programs: int, expected: tuple[int, int]) -> None:
    assert few_waves(row_tiles, columns, programs) == expected


def test_a_split_makes_the_fewest_waves_that_one_of_a_wave_can() -> None:
    for num, columns, programs in ((n, c, p) for n in range(1, 40) for c in (1, 3, 16, 64) for p in (8, 132)):
        number, parts = few_waves(num, columns, programs)
        fit = [h for h in range(1, num + 1) if h * columns <= programs]
        found = [waves(num, columns, programs, h, p) for h in fit for p in (2, 3, 4)]
        plain = waves(num, columns, programs)
        assert waves(num, columns, programs, number, parts) == min([plain, *found])
        assert (number > 0) == (min([plain, *found]) < plain)


@given(st.data())
def test_tasks_are_every_tile_once(data: st.DataObject) -> None:
    """All of K of every tile, the last part behind the others, and no place of a sum twice."""
    rows = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)))
    height, columns, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(4, 9))
    tiles = row_tiles(rows, 0, height, slice_rows=data.draw(st.integers(1, 5)))
    if data.draw(st.booleans()):
        tiles = across(tiles, height)
    number = len(tiles.tiles)
    parts = data.draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))
    table, sums, split_tiles = task_table(tiles, columns, steps, parts, data.draw(st.integers(1, 3)))
    assert len(table) == sum(parts) * columns
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for first, end, column, begin, stop, last, place, tile, _, also in table.tolist():
        found.setdefault((first, column), []).append((end, begin, stop, last, place, tile, also))
    stored, arrivals = [], []
    for row, (first, end, _, _, number) in enumerate(tiles.tiles.tolist()):
        for column in range(columns):
            pieces_of = found.pop((first, column))
            assert all(piece[0] == end for piece in pieces_of)
            assert [piece[1:3] for piece in pieces_of] == [
                (n * steps // parts[row], (n + 1) * steps // parts[row]) for n in range(parts[row])
            ]
            assert [piece[3] for piece in pieces_of] == [-1] * (parts[row] - 1) + [parts[row]]
            assert all(piece[6] == (number if tiles.also is None else tiles.also[row]) for piece in pieces_of)
            places = [piece[4] for piece in pieces_of[:-1]]
            stored += places
            if places:
                assert places == list(range(pieces_of[-1][4], pieces_of[-1][4] + len(places)))
                assert len({piece[5] for piece in pieces_of}) == 1
                arrivals.append(pieces_of[0][5])
    assert not found
    assert sorted(stored) == list(range(sums))
    assert sorted(arrivals) == list(range(split_tiles))


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5), st.data(), st.integers(1, 9), st.integers(1, 12),
    st.none() | st.integers(1, 6),
)  # fmt: skip
def test_tiles_across_slices(rows: list[int], data: st.DataObject, height: int, cut: int, first: int | None) -> None:
    """Every row once, in order, of one or two slices; every slice counts the tiles that have rows of it."""
    rank = data.draw(st.integers(0, len(rows) - 1))
    order = data.draw(st.sampled_from(list(Order)))
    made = row_tiles(rows, rank, height, slice_rows=cut, first_rows=first, order=order)
    found = across(made, height)
    assert found.also is not None
    assert [tuple(s[:4]) for s in found.slices.tolist()] == [tuple(s[:4]) for s in made.slices.tolist()]
    every = [r for begin, end, *_ in made.tiles.tolist() for r in range(begin, end)]
    assert [r for begin, end, *_ in found.tiles.tolist() for r in range(begin, end)] == every
    assert len(found.tiles) <= len(made.tiles)
    counts = [0] * len(made.slices)
    for (begin, end, _, _, number), other in zip(found.tiles.tolist(), found.also.tolist(), strict=True):
        assert 0 < end - begin <= height
        mine = [k for k, s in enumerate(made.slices.tolist()) if s[0] < end and begin < s[1]]
        assert mine == sorted({number, other})
        assert number == min(mine, key=lambda k: made.slices[k, 0])
        for k in mine:
            counts[k] += 1
    assert counts == found.slice_tiles.tolist()


def test_tiles_across_slices_are_whole() -> None:
    """Uneven rows that are whole tiles together take no more tiles than even ones."""
    made = across(row_tiles((640, 957, 640, 323), 0, 128, slice_rows=256), 128)
    assert len(made.tiles) == 20
    assert made.is_even(128)


@given(st.lists(st.integers(0, 50), max_size=4), st.integers(1, 20), st.integers(1, 20))
def test_slices_that_grow(rows: list[int], most: int, first: int) -> None:
    """From the first one's rows to `most`, twice as many each time; only what ends a place differs, by half at most."""
    found = list(pieces(rows, range(len(rows)), most, first))
    assert [(k, r) for k, begin, end in found for r in range(begin, end)] == [
        (k, r) for k, number in enumerate(rows) for r in range(number)
    ]
    for n, (place, begin, end) in enumerate(found):
        size = min(first * 2**n, most)
        assert end - begin == size or (end == rows[place] and end - begin < size + (size + 1) // 2)


def test_sums_are_kept_in_fp32_whatever_the_default_is() -> None:
    blocks = Blocks(height=2, width=4, depth=16, warps=4, stages=1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        made = GemmLaunch(row_tiles((4, 6), 0, 2), 4, 128, 4, torch.device("cpu"), blocks=blocks, parts=(2,) * 5)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made._scratch(0).dtype is torch.float32
    assert made._scratch(0).numel() == made._num_sums == 5 * 2 * 4


def test_slices_that_grow_need_a_size() -> None:
    with pytest.raises(ValueError, match="need slice_rows, too"):
        row_tiles((4, 6), 0, 2, first_rows=1)
    with pytest.raises(ValueError, match="at least 1, not 2, 4 and 0"):
        row_tiles((4, 6), 0, 2, slice_rows=4, first_rows=0)
