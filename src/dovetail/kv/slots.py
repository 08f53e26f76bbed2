"""Which slots are free, handed out in as few contiguous runs as possible.

A run is a range of slots that one copy can move; it ends where a piece of memory does. Owns a bitmap and nothing else:
what it costs is a pass over the bitmap (100,000 slots: tens of microseconds), whatever the state of the free slots.
Not thread-safe: the pool that owns it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError
from dovetail.kv.memory import checked_slots

Slots = NDArray[np.int64]


class SlotAllocator:
    """The slots 0 to `num_slots` - 1, all free at first.

    Args:
        slots_per_piece: no run crosses a multiple of it; None if the slots are one piece.
    """

    def __init__(self, num_slots: int, *, slots_per_piece: int | None = None) -> None:
        if num_slots < 1 or (slots_per_piece is not None and slots_per_piece < 1):
            raise ValueError(f"num_slots {num_slots} and slots_per_piece {slots_per_piece} must be 1 or more")
        self.num_slots, self.num_free = num_slots, num_slots
        self._per_piece = min(num_slots, slots_per_piece or num_slots)
        # A place that is never free stands before the first slot and behind each piece, so runs end there.
        self._row = self._per_piece + 1
        self._free = np.zeros(1 + -(-num_slots // self._per_piece) * self._row, np.bool_)
        self._free[self._places(np.arange(num_slots))] = True

    def alloc(self, number: int, *, after: int | None = None) -> Slots:
        """Takes `number` slots: from the smallest free run that holds them all, otherwise from as few as can be.

        Args:
            after: slots right behind this one are taken first, so that they make one run with it.

        Returns:
            The slots, ascending (those behind `after` come first).

        Raises:
            DovetailError: fewer are free; nothing was taken.
        """
        if number < 0:
            raise ValueError(f"{number} slots were asked for; it must be 0 or more")
        if number > self.num_free:
            raise DovetailError(f"{number} slots were asked for, {self.num_free} of {self.num_slots} are free")
        head = np.empty(0, np.int64) if after is None else self._behind(after, number)
        self._free[self._places(head)] = False
        starts, lengths = self.free_runs()
        runs, taken = _fewest(lengths, number - head.size)
        tail = np.repeat(starts[runs] - (np.cumsum(taken) - taken), taken) + np.arange(number - head.size)
        self._free[self._places(tail)] = False
        self.num_free -= number
        return np.concatenate((head, tail))

    def free(self, slots: Slots | Sequence[int]) -> None:
        """Gives slots back, in any order.

        Raises:
            ValueError: a slot is unknown, given twice, or free already; none was given back.
        """
        given = checked_slots(slots, self.num_slots)
        places = self._places(given)
        again = given[self._free[places]]
        if again.size:
            raise ValueError(f"slot {again[0]} is free already: it was given back twice, or never handed out")
        if np.unique(given).size != given.size:
            values, counts = np.unique(given, return_counts=True)
            raise ValueError(f"slot {values[counts > 1][0]} is given back twice in one call")
        self._free[places] = True
        self.num_free += given.size

    def is_free(self, slots: Slots | Sequence[int]) -> NDArray[np.bool_]:
        """For each slot, whether nobody holds it."""
        return self._free[self._places(checked_slots(slots, self.num_slots))]

    def free_runs(self) -> tuple[Slots, Slots]:
        """(first slot, length) of the runs that are free, ascending."""
        edges = np.flatnonzero(self._free[1:] != self._free[:-1])
        starts, ends = edges[::2], edges[1::2]
        return starts - starts // self._row, ends - starts

    def num_runs(self, slots: Slots) -> int:
        """How many runs a row of slots is, in the order given."""
        if not slots.size:
            return 0
        breaks = (slots[1:] != slots[:-1] + 1) | (slots[1:] % self._per_piece == 0)
        return 1 + int(np.count_nonzero(breaks))

    def _places(self, slots: Slots) -> Slots:
        return 1 + slots + slots // self._per_piece

    def _behind(self, slot: int, most: int) -> Slots:
        """The free slots that follow `slot` in its piece, at most `most`."""
        place = int(self._places(checked_slots([slot], self.num_slots))[0]) + 1
        taken = np.flatnonzero(~self._free[place : place + most])
        return slot + 1 + np.arange(taken[0] if taken.size else most)


def _fewest(lengths: Slots, number: int) -> tuple[Slots, Slots]:
    """(runs, how much of each) that make up `number`: the longest whole, then the tightest fit for what is left.

    Runs ascend. No choice has fewer: the longest k runs hold the most that k runs can.
    """
    if not number:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = np.argsort(-lengths, kind="stable") if lengths.max() < number else np.empty(0, np.int64)
    sums = np.cumsum(lengths[order])
    whole = order[: int(np.searchsorted(sums, number))]
    left = number - int(lengths[whole].sum())
    fitting = np.where(lengths >= left, lengths, np.iinfo(np.int64).max)
    fitting[whole] = np.iinfo(np.int64).max
    runs = np.append(whole, np.argmin(fitting))
    taken = np.append(lengths[whole], left)
    ascending = np.argsort(runs)
    return runs[ascending], taken[ascending]
