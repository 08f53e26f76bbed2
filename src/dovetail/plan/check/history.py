"""Who wrote a cell last, and who writes it next, in the linear extension of one run."""

from __future__ import annotations

import numpy as np

from dovetail.plan.check.chains import Ints


class History:
    """All writes, by cell and position. Most cells are written once; only the others are sorted."""

    def __init__(self, cell: Ints, position: Ints, num_cells: int) -> None:
        self._position = position
        self._span = int(position.max()) + 2 if len(position) else 2
        self.count = np.bincount(cell, minlength=num_cells)
        self._only = np.full(num_cells, -1, np.int64)
        self._only[cell] = np.arange(len(cell))
        again = np.flatnonzero(self.count[cell] > 1)
        keys = cell[again] * self._span + position[again]
        by_key = np.argsort(keys, kind="stable")
        self._keys = keys[by_key]
        self._sorted = again[by_key]
        self._cell = cell

    def neighbours(self) -> tuple[Ints, Ints]:
        """Pairs of writes that follow each other in a cell."""
        cell = self._cell[self._sorted]
        same = cell[1:] == cell[:-1]
        return self._sorted[:-1][same], self._sorted[1:][same]

    def previous(self, cell: Ints, position: Ints) -> Ints:
        """The last write of each cell before a position, or -1."""
        only = self._only[cell]
        found = np.where((only >= 0) & (self._position[only] < position), only, -1) if len(self._position) else only
        many = np.flatnonzero(self.count[cell] > 1)
        if len(many):
            place = np.searchsorted(self._keys, cell[many] * self._span + position[many]) - 1
            write = self._sorted[np.maximum(place, 0)]
            found[many] = np.where((place >= 0) & (self._cell[write] == cell[many]), write, -1)
        return found

    def following(self, cell: Ints, position: Ints) -> Ints:
        """The first write of each cell at or after a position, or -1."""
        only = self._only[cell]
        found = np.where((only >= 0) & (self._position[only] >= position), only, -1) if len(self._position) else only
        many = np.flatnonzero(self.count[cell] > 1)
        if len(many):
            place = np.searchsorted(self._keys, cell[many] * self._span + position[many])
            write = self._sorted[np.minimum(place, len(self._sorted) - 1)]
            inside = (place < len(self._sorted)) & (self._cell[write] == cell[many])
            found[many] = np.where(inside, write, -1)
        return found

    def first(self, cell: Ints) -> Ints:
        """The first write of each cell, or -1."""
        return self.following(cell, np.zeros(len(cell), np.int64))

    def last(self, cell: Ints) -> Ints:
        """The last write of each cell, or -1."""
        return self.previous(cell, np.full(len(cell), self._span - 1))
