"""Cuts memory into cells that every operand covers whole, so that bytes need not be looked at one by one.

A cell is a range of one memory. The cut must be closed under the moves: the k-th cell that a write covers is as long as
the k-th cell of the read it comes from. Then a cell behaves like one byte, and what is proved of cells holds for each
of their bytes. Cost depends on the number of operands, not on their size. Two ways, the first where it fits:

- *even*: cells of the greatest common divisor of all offsets, lengths and pitches. Trivially closed.
- *fitted*: cells between the ends of operands, with the cuts inside one end of a move carried over to its other end
  until nothing is new. For sizes with no common divisor worth the name.

Elements that a reduction combines must not be cut; `fitted` then says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dovetail.plan.check.chains import Ints
from dovetail.plan.check.fit import Extent, Link, fit, offsets, stretch

#: An even cut may have this many incidences per row of an operand, and this many for free.
_EVEN_RATIO, _EVEN_FREE = 4, 1 << 16
#: Up to so many cells, those touched are numbered with a table of all, not by sorting.
_MAX_TABLE = 1 << 25


class Incidence:
    """Which cells each operand covers: those of operand i are `cell[first[i]:first[i + 1]]`, in order."""

    def __init__(self, first: Ints, cell: Ints) -> None:
        self.first = first
        self.cell = cell

    @cached_property
    def operand(self) -> Ints:
        """The operand of each entry."""
        return np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))

    @cached_property
    def ordinal(self) -> Ints:
        """The place of each entry in its operand."""
        return np.arange(len(self.cell)) - self.first[self.operand]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cut. `low[i]` is where cell i begins in its memory."""

    low: Ints
    length: Ints
    parts: list[Incidence]

    def __len__(self) -> int:
        return len(self.low)


def cut(parts: list[Extent], links: list[Link], num_memories: int, element: int) -> Cells:
    """Cuts the memory under `parts`. `element`: bytes that an even cut must not split.

    Raises:
        TooFineError: no cut of a size worth computing is closed.
    """
    low, high = _touched(parts, num_memories)
    granule = _granule(parts, low)
    rows = sum(int(p.rows.sum()) for p in parts)
    pieces = sum(int((p.rows * (p.length // granule)).sum()) for p in parts)
    if granule % element == 0 and pieces <= _EVEN_RATIO * rows + _EVEN_FREE:
        return _even(parts, low, high, granule)
    base = offsets(high - low)
    cuts, found = fit(parts, links, base[:-1] - low)
    memory = np.searchsorted(base, cuts[:-1], side="right") - 1
    return Cells(low[memory] + cuts[:-1] - base[memory], np.diff(cuts), [Incidence(*i) for i in found])


def _touched(parts: list[Extent], num_memories: int) -> tuple[Ints, Ints]:
    """The lowest and the highest byte of each memory that anything touches."""
    low = np.full(num_memories, np.iinfo(np.int64).max)
    high = np.zeros(num_memories, np.int64)
    for p in parts:
        some = p.length * p.rows > 0
        np.minimum.at(low, p.memory[some], p.start[some])
        np.maximum.at(high, p.memory[some], (p.start + (p.rows - 1) * p.pitch + p.length)[some])
    return np.minimum(low, high), high


def _granule(parts: list[Extent], low: Ints) -> int:
    granule = 0
    for p in parts:
        some = p.length * p.rows > 0
        for column in (p.start - low[p.memory], p.length, p.pitch * (p.rows > 1)):
            granule = int(np.gcd.reduce(column[some], initial=granule))
    return max(granule, 1)


def _even(parts: list[Extent], low: Ints, high: Ints, granule: int) -> Cells:
    base = offsets((high - low) // granule)
    found = []
    for p in parts:
        begin = base[p.memory] + (p.start - low[p.memory]) // granule
        flat = p.pitch == p.length  # rows without gaps are one row
        width = np.where(flat, p.length * p.rows, p.length) // granule
        rows = np.where(flat | (width == 0), 1, p.rows)
        count = width * rows
        begin, width = stretch(begin, rows, p.pitch // granule), np.repeat(width, rows)
        found.append(Incidence(offsets(count), stretch(begin, width, 1)))
    total = int(base[-1])
    used = sum(len(i.cell) for i in found)
    key = np.arange(total) if total <= 4 * used + _EVEN_FREE else _compress(found, total)
    memory = np.searchsorted(base, key, side="right") - 1
    return Cells(low[memory] + (key - base[memory]) * granule, np.full(len(key), granule), found)


def _compress(found: list[Incidence], total: int) -> Ints:
    """Numbers only the cells that are touched, in place; returns the key of each."""
    keys = np.concatenate([i.cell for i in found])
    if total <= _MAX_TABLE:
        touched = np.zeros(total, bool)
        touched[keys] = True
        kept, number = np.flatnonzero(touched), (np.cumsum(touched, dtype=np.int32) - 1)[keys].astype(np.int64)
    else:
        by_key = np.argsort(keys)
        new = np.concatenate([np.ones(1, bool), keys[by_key][1:] != keys[by_key][:-1]])
        kept, number = keys[by_key][new], np.empty(len(keys), np.int64)
        number[by_key] = np.cumsum(new) - 1
    at = 0
    for n, i in enumerate(found):
        found[n] = Incidence(i.first, number[at : at + len(i.cell)])
        at += len(i.cell)
    return kept
