"""A cut of memory that fits every operand, closed under the moves.

Starts from the ends of all operands. A cut inside one end of a move is carried to the same place of its other end,
until none is new. A plan that shifts bytes within a buffer by odd amounts can need a cut at every byte: given up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.plan.check.chains import Ints

#: A cut that has not settled after so many rounds, or needs so many cells, is given up.
_MAX_ROUNDS, _MAX_CELLS = 1024, 1 << 23


class TooFineError(Exception):
    """The moves shift bytes against each other until nothing but single bytes is left."""


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Placed operands: `rows` ranges of `length` bytes, `pitch` apart."""

    memory: Ints
    start: Ints
    length: Ints
    rows: Ints
    pitch: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """Operands that must be cut alike: writes of part `to` and reads of part `of`, pair by pair."""

    to: int
    of: int
    write: Ints
    read: Ints


def stretch(first: Ints, count: Ints, stride: Ints | int) -> Ints:
    """first[i], first[i] + stride[i], ..: count[i] of them, for every i."""
    if (count == 1).all():
        return first
    begins = np.cumsum(count) - count
    step = np.arange(int(count.sum())) - np.repeat(begins, count)
    if not isinstance(stride, int):
        step *= np.repeat(stride, count)
    step += np.repeat(first, count)
    return step


def offsets(count: Ints) -> Ints:
    """Where each of `count` begins when they stand end to end, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])


@dataclass(frozen=True, slots=True, eq=False)
class _Ranges:
    """The rows of a part, as ranges of one address space."""

    first: Ints  #: of each operand
    begin: Ints
    end: Ints


def fit(parts: list[Extent], links: list[Link], base: Ints) -> tuple[Ints, list[tuple[Ints, Ints]]]:
    """Cuts, and for every part the first entry of each operand and the cells of all entries.

    `base[m]` is added to an offset in memory m: memories stand end to end in one address space.

    Raises:
        TooFineError: see the module.
    """
    ranges = []
    for p in parts:
        rows = np.where(p.length > 0, p.rows, 0)
        begin = stretch(base[p.memory] + p.start, rows, p.pitch)
        ranges.append(_Ranges(offsets(rows), begin, begin + np.repeat(p.length, rows)))
    cuts = _unique(np.concatenate([end for r in ranges for end in (r.begin, r.end)] + [np.zeros(1, np.int64)]))
    pairs = [_pairs(ranges, link) for link in links]
    for _ in range(_MAX_ROUNDS):
        covers = [_cover(cuts, r) for r in ranges]
        new = _carried(cuts, ranges, covers, links, pairs)
        if not len(new):
            cells = [stretch(low, num, 1) for low, num in covers]
            firsts = [offsets(num)[r.first] for r, (_, num) in zip(ranges, covers, strict=True)]
            return cuts, list(zip(firsts, cells, strict=True))
        cuts = _unique(np.concatenate([cuts, new]))
        if len(cuts) > _MAX_CELLS:
            break
    raise TooFineError


def _unique(values: Ints) -> Ints:
    """`np.unique`, by sorting: its hash table is many times slower on a million numbers."""
    values = np.sort(values)
    kept: Ints = values[np.concatenate([np.ones(1, bool), values[1:] != values[:-1]])]
    return kept


def _cover(cuts: Ints, ranges: _Ranges) -> tuple[Ints, Ints]:
    """The first cell and the number of cells of each range; most have one."""
    low = np.searchsorted(cuts, ranges.begin)
    num = np.ones(len(low), np.int64)
    more = np.flatnonzero(cuts[np.minimum(low + 1, len(cuts) - 1)] != ranges.end)
    num[more] = np.searchsorted(cuts, ranges.end[more]) - low[more]
    return low, num


def _pairs(ranges: list[_Ranges], link: Link) -> tuple[Ints, Ints]:
    """The two ends of every row of every move, as numbers of ranges."""
    to, of = ranges[link.to], ranges[link.of]
    rows = np.diff(to.first)[link.write]
    return stretch(to.first[link.write], rows, 1), stretch(of.first[link.read], rows, 1)


def _carried(
    cuts: Ints,
    ranges: list[_Ranges],
    covers: list[tuple[Ints, Ints]],
    links: list[Link],
    pairs: list[tuple[Ints, Ints]],
) -> Ints:
    """Cuts inside one end of a move that its other end lacks."""
    found = [np.zeros(0, np.int64)]
    for link, (write, read) in zip(links, pairs, strict=True):
        for a, at_a, b, at_b in ((link.to, write, link.of, read), (link.of, read, link.to, write)):
            low, num = covers[a]
            some = num[at_a] > 1
            at_a, at_b = at_a[some], at_b[some]
            inner = cuts[stretch(low[at_a] + 1, num[at_a] - 1, 1)]
            found.append(inner + np.repeat(ranges[b].begin[at_b] - ranges[a].begin[at_a], num[at_a] - 1))
    new = _unique(np.concatenate(found)) if any(len(f) for f in found) else found[0]
    missing: Ints = new[cuts[np.minimum(np.searchsorted(cuts, new), len(cuts) - 1)] != new]
    return missing
