"""The allocator of slots: few runs, none across pieces, and every slot accounted for."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import DovetailError
from dovetail.kv.slots import SlotAllocator


def runs_of(slots: list[int], per_piece: int) -> list[list[int]]:
    """Runs of ascending slots, the naive way."""
    runs: list[list[int]] = []
    for slot in slots:
        if runs and runs[-1][-1] + 1 == slot and slot % per_piece:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def fewest(free: set[int], per_piece: int, number: int) -> int:
    """How many runs a request needs at least: the longest first."""
    taken = 0
    for k, size in enumerate(sorted((len(r) for r in runs_of(sorted(free), per_piece)), reverse=True)):
        if taken >= number:
            return k
        taken += size
    return len(runs_of(sorted(free), per_piece))


@settings(max_examples=60, deadline=None)
@given(num_slots=some.integers(1, 60), per_piece=some.integers(1, 70), data=some.data())
def test_against_a_set(num_slots: int, per_piece: int, data: some.DataObject) -> None:
    """Random requests and returns: never twice the same slot, as few runs as can be, exact counts."""
    allocator = SlotAllocator(num_slots, slots_per_piece=per_piece)
    free, held = set(range(num_slots)), list[int]()
    for _ in range(data.draw(some.integers(1, 12))):
        number = data.draw(some.integers(0, len(free)))
        after = data.draw(some.none() | some.integers(0, num_slots - 1))
        least = fewest(free, per_piece, number)
        longest = runs_of(sorted(free), per_piece)
        slots = allocator.alloc(number, after=after).tolist()
        assert len(slots) == number == len(set(slots))
        assert set(slots) <= free
        if after is None:
            assert slots == sorted(slots)
            assert len(runs_of(slots, per_piece)) <= least
            fit = [len(run) for run in longest if len(run) >= number]
            if fit and number:
                assert len(next(run for run in longest if slots[0] in run)) == min(fit), "not the tightest fit"
        else:
            assert len(runs_of([after, *slots], per_piece)) <= least + 1, "a hint cost a run"
        assert allocator.num_runs(np.array(slots, np.int64)) == len(runs_of(slots, per_piece))
        free -= set(slots)
        held += slots
        back = data.draw(some.lists(some.sampled_from(held), unique=True)) if held else []
        allocator.free(back)
        free |= set(back)
        held = [slot for slot in held if slot not in back]
        assert allocator.num_free == len(free)
        assert np.flatnonzero(allocator.is_free(range(num_slots))).tolist() == sorted(free)
        starts, lengths = allocator.free_runs()
        assert [list(range(a, a + n)) for a, n in zip(starts, lengths, strict=True)] == runs_of(sorted(free), per_piece)


def test_best_fit_keeps_long_runs_whole() -> None:
    allocator = SlotAllocator(100)
    allocator.alloc(100)
    for first, number in ((0, 30), (40, 5), (50, 8), (70, 20)):
        allocator.free(range(first, first + number))
    assert allocator.alloc(4).tolist() == [40, 41, 42, 43]
    assert allocator.alloc(8).tolist() == list(range(50, 58))
    assert allocator.alloc(31).tolist() == [*range(30), 44], "the longest, and the tightest fit for one more"


def test_follows_what_it_continues() -> None:
    allocator = SlotAllocator(12, slots_per_piece=6)
    assert allocator.alloc(2).tolist() == [0, 1]
    assert allocator.alloc(6).tolist() == list(range(6, 12))
    assert allocator.alloc(3, after=1).tolist() == [2, 3, 4]
    assert allocator.alloc(1, after=5).tolist() == [5], "the next slot is in another piece, and taken"


def test_one_piece_unless_told() -> None:
    assert SlotAllocator(8).num_runs(np.arange(8)) == 1
    assert SlotAllocator(8, slots_per_piece=4).num_runs(np.arange(8)) == 2
    assert SlotAllocator(8).num_runs(np.empty(0, np.int64)) == 0


def test_errors_change_nothing() -> None:
    allocator = SlotAllocator(8)
    taken = allocator.alloc(5)
    with pytest.raises(DovetailError, match="4 slots were asked for, 3 of 8 are free"):
        allocator.alloc(4)
    with pytest.raises(ValueError, match="must be 0 or more"):
        allocator.alloc(-1)
    with pytest.raises(ValueError, match="slot 6 is free already"):
        allocator.free([1, 6])
    with pytest.raises(ValueError, match="slot 2 is given back twice in one call"):
        allocator.free([1, 2, 2])
    with pytest.raises(ValueError, match="slot 8 is none of this memory"):
        allocator.free([1, 8])
    with pytest.raises(ValueError, match="slot 8 is none"):
        allocator.alloc(1, after=8)
    assert allocator.num_free == 3
    allocator.free(taken)
    with pytest.raises(ValueError, match="slot 0 is free already"):
        allocator.free(taken)
    assert allocator.num_free == 8
    for sizes in ((0, None), (4, 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            SlotAllocator(sizes[0], slots_per_piece=sizes[1])


def test_many_slots() -> None:
    """100,000 slots in pieces, badly fragmented: still as few runs as can be. Times are printed, not judged."""
    per_piece, rng = 800, random.Random(3)
    allocator = SlotAllocator(100_000, slots_per_piece=per_piece)
    taken = allocator.alloc(100_000)
    free = set(rng.sample(range(100_000), 50_000))
    allocator.free(sorted(free))
    assert taken.size == 100_000
    for number in (1, 16, 300, 8192):
        least = fewest(free, per_piece, number)
        begin = time.perf_counter()
        slots = allocator.alloc(number)
        middle = time.perf_counter()
        allocator.free(slots)
        end = time.perf_counter()
        print(f"{number} of 50,000 free: alloc {1e6 * (middle - begin):.0f} us, free {1e6 * (end - middle):.0f} us")
        assert allocator.num_runs(slots) <= least
        assert all(a < b for a, b in pairwise(slots.tolist()))
