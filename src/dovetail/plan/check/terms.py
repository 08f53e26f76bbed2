"""Numbers for reductions, so that two are equal iff their op, dtype and ordered sources are."""

from __future__ import annotations

import numpy as np

from dovetail.plan.check.chains import Ints

#: Above every `combine` code, so that a head is never taken for a pair.
_HEADS = 1 << 16


class Terms:
    """A table of pairs, each numbered when it is first seen. A reduction is a chain of pairs."""

    def __init__(self, num_cells: int) -> None:
        self._next = max(num_cells, _HEADS)
        self._keys = np.zeros(0, np.int64)  # sorted
        self._numbers = np.zeros(0, np.int64)

    def reduce(self, combine: Ints, count: Ints, columns: list[Ints]) -> Ints:
        """The number of each reduction; column k holds the k-th source of each, ignored from `count` on."""
        term = self._pair(combine, count)
        for k, column in enumerate(columns):
            some = np.flatnonzero(count > k)
            term[some] = self._pair(term[some], column[some])
        return term

    def _pair(self, left: Ints, right: Ints) -> Ints:
        """Both parts are below 2**31: cells and pairs are counted, not hashed."""
        keys = (left << 32) | right
        new = np.setdiff1d(keys, self._keys)
        if len(new):
            keys_now = np.concatenate([self._keys, new])
            numbers = np.concatenate([self._numbers, self._next + np.arange(len(new))])
            self._next += len(new)
            by_key = np.argsort(keys_now)
            self._keys, self._numbers = keys_now[by_key], numbers[by_key]
        found: Ints = self._numbers[np.searchsorted(self._keys, keys)]
        return found
