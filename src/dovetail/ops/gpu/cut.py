"""Where what leaves a GPU is cut into slices: the cut that ends soonest, by a model of the computation and the link.

The link waits until the first rows are there, then for each slice that is not there in time, and every copy costs it
some microseconds more. So slices are small while the link waits for the computation, and large when it is behind.
Pure functions of numbers; rough ones are good enough, since they decide nothing but where a slice ends.

Legend: rows are those that leave, counted from the first one that is computed; times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

#: For each copy, both directions busy beside a GEMM; from a flag, or an event, to the first byte. (An H200, PCIe 5.0.)
COPY_US, FLAG_US, EVENT_US = 6.0, 8.0, 4.0
_MOST_PLACES = 128  # that a cut is looked for at, among all rows
_HEADS = (1, 2, 3, 4, 6, 8, 12, 16)  # steps that a first slice of its own is tried with
_AHEAD = 0.95  # of the computation's end: when slices have to have arrived that it does not wait for
_WORTH = 0.98  # of the time without: what such a slice must promise, since it is a launch more


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a computation and a link take."""

    wave_us: float  #: the computation finishes rows so far apart
    wave_rows: float  #: so many at a time
    row_us: float  #: of the link, for one row in each direction
    copy_us: float = COPY_US
    flag_us: float = FLAG_US
    mean_us: float = math.inf  #: of the computation, for one row of all: where the last wave is shared out, it is less

    def __post_init__(self) -> None:
        times = (self.wave_us, self.row_us, self.copy_us, self.flag_us)
        if not (all(0 <= us < math.inf for us in times) and self.mean_us >= 0 and 0 < self.wave_rows < math.inf):
            raise ValueError(f"{self}: times are not negative, and a wave has rows")

    def ready_us(self, rows: int) -> float:
        """When so many rows are there."""
        return math.ceil(rows / self.wave_rows - 1e-9) * self.wave_us

    def computed_us(self, rows: int) -> float:
        """When the last of all these is."""
        return min(self.ready_us(rows), rows * self.mean_us) if rows else 0.0


Piece = tuple[int, int, int]
"""Place, and rows begin to end - 1 of those for it."""


class Planned(NamedTuple):
    """A cut, and when the last of it is said to have arrived, or to be computed, whichever is later."""

    pieces: list[Piece]
    end_us: float
    head: bool = False  #: the first one is a launch of its own


def best_cut(
    rows: Sequence[int], order: Sequence[int], step: int, rates: Rates, *, head_rows: int = 0, head_us: float = 0.0
) -> Planned:
    """Cuts `rows[place]` for each place of `order` in turn, at multiples of `step` of all rows.

    Args:
        head_rows: of a first slice, which is given, and is there after `head_us`; the others are computed behind it. At
            most those of the first place that has any.

    Four rows each 10 us, 4 us for a row on the link: the first four are sent as soon as they are there, later ones,
    for which the link does not wait, go together.

    >>> r = Rates(wave_us=10, wave_rows=4, row_us=4, copy_us=1, flag_us=0)
    >>> best_cut([0, 8, 8], [1, 2], 4, r)
    Planned(pieces=[(1, 0, 4), (1, 4, 8), (2, 0, 8)], end_us=76.0, head=False)
    """
    served = [place for place in order if rows[place]]
    total = sum(rows[place] for place in served)
    between = step * max(1, math.ceil(total / step / _MOST_PLACES))
    pieces: list[Piece] = []
    began, end_us = 0, -math.inf  # rows before this place; when the copies of all before it are over
    if head_rows:
        pieces.append((served[0], 0, head_rows))
        end_us = head_us + EVENT_US + head_rows * rates.row_us
    for number, place in enumerate(served):
        skipped = head_rows if number == 0 else 0
        found, end_us = _cut_place(began + skipped, began + rows[place], between, rates, end_us, head_rows, head_us)
        pieces += [(place, a - began, b - began) for a, b in found]
        began += rows[place]
    return Planned(pieces, end_us, bool(head_rows))


def _cut_place(
    begin: int, end: int, between: int, rates: Rates, free_us: float, head_rows: int, head_us: float
) -> tuple[list[tuple[int, int]], float]:
    """(rows begin..end-1 in slices, when they have arrived), for a link that is free from `free_us` on.

    The soonest end at every multiple of `between`, from the first one on: no later slice is helped by a later end.
    """
    if begin >= end:
        return [], free_us
    at = [begin, *range((begin // between + 1) * between, end, between), end]
    best: list[tuple[float, int, int]] = [(free_us, 0, 0)]  # end, copies, the place before
    for k in range(1, len(at)):
        there_us = head_us + rates.ready_us(at[k] - head_rows) + rates.flag_us
        best.append(min(
            (max(before + rates.copy_us, there_us) + (at[k] - at[j]) * rates.row_us, copies + 1, j)
            for j, (before, copies, _) in enumerate(best)
        ))  # fmt: skip
    cuts, k = [], len(at) - 1
    while k:
        cuts.append((at[best[k][2]], at[k]))
        k = best[k][2]
    return cuts[::-1], best[-1][0]


def _arrival_us(pieces: Sequence[Piece], rates: Rates, head_rows: int, head_us: float) -> float:
    """When the last of a cut has arrived."""
    there, free_us = 0, -math.inf
    for number, (_, begin, end) in enumerate(pieces):
        there += end - begin
        ready_us = head_us + rates.ready_us(there - head_rows) + rates.flag_us
        if head_rows and number == 0:
            ready_us = head_us + EVENT_US
        free_us = max(free_us + rates.copy_us, ready_us) + (end - begin) * rates.row_us
    return free_us


def _merged(pieces: Sequence[Piece], rates: Rates, end_us: float, head_rows: int, head_us: float) -> list[Piece]:
    """The same in fewer slices, if all has arrived by `end_us` as before: where the computation takes longer."""
    found, k = list(pieces), 1 if head_rows else 0
    while k + 1 < len(found):
        (place, begin, _), (other, _, end) = found[k : k + 2]
        tried = [*found[:k], (place, begin, end), *found[k + 2 :]]
        if place == other and _arrival_us(tried, rates, head_rows, head_us) <= end_us:
            found = tried
        else:
            k += 1
    return found


def planned_cut(
    rows: Sequence[int], order: Sequence[int], step: int, rates: Rates, *,
    head_us: Callable[[int], float] | None = None, head: bool | None = None,
) -> Planned:  # fmt: skip
    """The best cut, with or without a first slice of its own. The rows of the last place stay, and are one slice.

    Args:
        head_us: how long so many rows take as a launch of their own.
        head: whether to have one; None: if it promises a gain.

    Raises:
        ValueError: `head`, and no slice can be one that another one follows.
    """
    *leaving, stays = order
    every = sum(rows)

    def cut(number: int, after_us: float) -> Planned:
        made = best_cut(rows, leaving, step, rates, head_rows=number, head_us=after_us)
        computed_us = after_us + rates.computed_us(every - number)
        end_us = max(made.end_us, computed_us)
        merged = _merged(made.pieces, rates, max(made.end_us, _AHEAD * computed_us), number, after_us)
        own = [(stays, 0, rows[stays])] if rows[stays] else []
        return Planned([*merged, *own], end_us, made.head)

    plain = cut(0, 0.0)
    if head is False or head_us is None:
        return plain
    first = next((rows[place] for place in leaving if rows[place]), 0)
    heads = {min(number * step, first) for number in _HEADS} - {0, every}
    found = [cut(number, head_us(number)) for number in sorted(heads)]
    if not found:
        if head:
            raise ValueError("a first slice of its own must leave the GPU, and others follow it")
        return plain
    best = min(found, key=lambda made: made.end_us)
    return best if head or best.end_us < _WORTH * plain.end_us else plain
