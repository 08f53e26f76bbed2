"""What is settled before anything is timed: how large the operands are, and which setting of every kind is taken.

Owns the choice, never a figure: all that is picked here is timed afresh, side by side. Rivals are looked for as widely
as our own form, and more of them are timed: ways of the collective, tiles, numbers of chunks or planned ones, who
computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from dovetail.bench.fused.rows import Role
from dovetail.bench.fused.work import Chunks, Contender, Cut, Route, Work
from dovetail.measure.interleave import some_orders
from dovetail.measure.stats import median
from dovetail.ops.gpu.decomposed import How
from dovetail.ops.gpu.tiles import Order

#: Stages of a race: runs of each that is left; behind them, those so many times as slow as the fastest drop out.
_STAGES = ((1, 1.15), (1, 1.06), (3, 1.0))
_PILOT = 5
_MOST_SIZE = 1 << 16  # K of a product, or the length of a bag
_FIRST = (4, 16)  # parts of a slice that the first one is tried with
_CLOSE = 0.02  # a ratio that is so near needs no correction
_NEAR = 1.15  # of the shortest time alone: tiles that are tried with planned slices


class Times(Protocol):
    """What a pilot needs of a clock."""

    def run(self, contender: Contender) -> float:
        """Once, without a gate."""

    def us(self, contender: Contender) -> float:
        """Once, behind the gate."""

    def quick_us(self, contender: Contender, number: int) -> float:
        """The median of so many."""


def race(clock: Times, seed: str, contenders: Sequence[Contender], keep: int = 1) -> tuple[list[int], list[float]]:
    """(places of the fastest, fastest first; the median of each): those that are clearly slower drop out early."""
    times: list[list[float]] = [[] for _ in contenders]
    left = list(range(len(contenders)))
    for contender in contenders:
        clock.run(contender)
    for stage, (runs, slack) in enumerate(_STAGES):
        for order in some_orders(len(left), runs, f"{seed} {stage}"):
            for number in [left[place] for place in order]:
                times[number].append(clock.us(contenders[number]))
        left.sort(key=lambda n: median(times[n]))
        bound = slack * median(times[left[0]])
        left = [n for k, n in enumerate(left) if k < keep or median(times[n]) <= bound]
    return left[:keep], [median(found) for found in times]


class Pilot:
    """Settles everything about one work."""

    def __init__(self, clock: Times, work: Work) -> None:
        self._clock, self._work = clock, work
        self.tried: dict[str, dict[str, float]] = {}  #: by question: microseconds of each that was tried

    def _race(self, question: str, contenders: Sequence[Contender], keep: int = 1) -> list[int]:
        best, times_us = race(self._clock, f"{self._work.shape.name} {question}", contenders, keep)
        tried = self.tried.setdefault(question, {})
        tried |= {c.name: round(time_us, 2) for c, time_us in zip(contenders, times_us, strict=True)}
        return best

    # --- the collective and the size

    def routes(self) -> list[Route]:
        """The fastest way of the collective for each layout, the fastest of all first; then plain copies, one lane."""
        work, found = self._work, []
        for layout in work.layouts:
            mine = [route for route in work.routes() if route.layout is layout]
            best = self._race("collective", [work.comm(route) for route in mine])[0]
            found.append(mine[best])
        tried = self.tried["collective"]
        work.comm_us = min(tried.values())
        found.sort(key=lambda route: tried[route.name])
        return list(dict.fromkeys((*found, work.routes()[0])))

    def calibrate(self, route: Route, tile: Any) -> None:
        """Scales the work so that its computation takes `ratio` times as long as its communication.

        The size follows from two probes; it is then measured at that size, and corrected once.
        """
        work = self._work
        sizes, times = [work.step * 8, work.step * 32], []
        for size in sizes:
            times.append(self._compute_us(size, tile))
        comm_us = self._clock.quick_us(work.comm(route), _PILOT)
        slope = max((times[1] - times[0]) / (sizes[1] - sizes[0]), 1e-6)
        size = self._rounded(sizes[1] + (work.shape.ratio * comm_us - times[1]) / slope)
        found_us = self._compute_us(size, tile)
        comm_us = min(comm_us, self._clock.quick_us(work.comm(route), _PILOT))
        off_us = work.shape.ratio * comm_us - found_us
        if abs(off_us) > _CLOSE * work.shape.ratio * comm_us:
            slope = float(np.polyfit([*sizes, size], [*times, found_us], 1)[0])
            size = self._rounded(size + off_us / (slope if slope > 0 else found_us / size))
            work.scale(size)

    def _rounded(self, size: float) -> int:
        step = self._work.step
        return min(max(round(size / step), 1), _MOST_SIZE // step) * step

    def _compute_us(self, size: int, tile: Any) -> float:
        """The faster of torch's computation and ours, at a size."""
        self._work.scale(size)
        with self._work.scope():
            both = self._work.torch_alone(), self._work.alone(tile)
            return min(self._clock.quick_us(each, _PILOT) for each in both)

    # --- settings

    def tile(self) -> Any:
        """Whose computation alone is fastest."""
        best = self._best_tile("tile", self._work.alone, self._work.alone_us)
        self._work.alone_us["torch"] = self._clock.quick_us(self._work.torch_alone(), _PILOT)
        return best

    def cuts(self) -> list[Cut]:
        """The fastest few of the fused form: slices by their number, planned ones; by lanes and layouts."""
        found = [self._numbered(), self._planned()]
        found += [replace(each, lanes=1) for each in found]
        found += [replace(each, layout=layout) for each in found[:2] for layout in self._work.layouts[1:]]
        with self._work.scope():
            best = self._race("cut", [self._work.fused(cut) for cut in found], 1 + self._work.spec.rivals)
        return [found[number] for number in best]

    def _planned(self) -> Cut:
        """Slices that are cut by what was measured of both sides: the tile, and whether the first is by event."""
        work = self._work
        ours = {tile: time_us for tile, time_us in work.alone_us.items() if tile != "torch"}
        near = [tile for tile, time_us in ours.items() if time_us < _NEAR * min(ours.values())]
        plain = [Cut(slices=0, tile=tile, layout=work.layouts[0]) for tile in near]
        return self._best_cut("planned slices", [*plain, *(replace(each, head=True) for each in plain)])

    def _numbered(self) -> Cut:
        """So many slices: the tile, the number, the first one's size and launch."""
        work, slices = self._work, self._slices()
        middle = Cut(slices=slices[len(slices) // 2], tile=None, layout=work.layouts[0])
        tile = self._best_tile("fused tile", lambda tile: work.fused(replace(middle, tile=tile)))
        best = self._best_cut("slices", [replace(middle, tile=tile, slices=number) for number in slices])
        grown = [replace(best, slices=n, first=part) for n, part in self._grown(best.slices, slices)]
        headed = [replace(each, head=True) for each in (best, *grown)]
        return self._best_cut("first slice", [best, *grown, *headed])

    def _grown(self, number: int, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(number, part that the first one is) of slices or chunks that grow: so many, or the next fewer."""
        fewer = max((n for n in numbers if n < number), default=number)
        tries = dict.fromkeys((n, part) for n in (number, fewer) for part in _FIRST)
        return [each for each in tries if self._work.cut_rows(*each)[1]]

    def _slices(self) -> list[int]:
        return self._work.distinct(self._work.spec.slices_of(self._work.shape.size_bytes))

    def _best_tile(
        self, question: str, form: Callable[[Any], Contender], times_us: dict[Any, float] | None = None
    ) -> Any:
        """`times_us` gets what each took."""
        work = self._work
        with work.scope():
            made = [(tile, form(tile)) for tile in work.tiles]
            made = [(tile, each) for tile, each in made if work.is_distinct(tile, each.made.kernel)]
            best = self._race(question, [each for _, each in made])[0]
            settled = [work.settled(tile, each.made.kernel) for tile, each in made]
            if times_us is not None:
                tried = self.tried[question]
                times_us |= {tile: tried[each.name] for tile, (_, each) in zip(settled, made, strict=True)}
            return settled[best]

    def _best_cut(self, question: str, cuts: Sequence[Cut]) -> Cut:
        with self._work.scope():
            return cuts[self._race(question, [self._work.fused(cut) for cut in cuts])[0]]

    def chunks(self, tiles: Sequence[Any]) -> list[Chunks]:
        """The fastest few of the decomposed form by torch, and as many with our kernel, by one of these tiles."""
        work, keep = self._work, self._work.spec.rivals
        numbers = work.distinct(work.spec.chunks_of(work.shape.size_bytes))
        plain = [Chunks(number=number, layout=work.layouts[0]) for number in numbers]
        planned = Chunks(number=0, layout=work.layouts[0])
        by_torch = [planned, *(replace(each, how=how) for each in plain for how in work.hows)]
        by_us = [replace(each, tile=tiles[0]) for each in (planned, *plain)]
        found: list[Chunks] = []
        for question, tries in (("chunks by torch", by_torch), ("chunks by our kernel", by_us)):
            best = self._best_chunks(question, tries, keep)
            counted = next((each for each in best if each.number), tries[-1])
            grown = [replace(counted, number=n, first=part) for n, part in self._grown(counted.number, numbers)]
            best = self._best_chunks(question, [*best, *grown], keep) if grown else best
            first = best[0]
            more = [replace(first, layout=layout) for layout in work.layouts[1:]]
            more += [replace(first, words_on_device=False)] if first.how is How.WORDS else []
            more += [replace(first, tile=tile) for tile in tiles if first.tile not in (None, tile)]
            found += self._best_chunks(question, [*best, *more], keep) if more else best
        return found

    def _best_chunks(self, question: str, tries: Sequence[Chunks], keep: int) -> list[Chunks]:
        with self._work.scope():
            return [tries[n] for n in self._race(question, [self._work.decomposed(each) for each in tries], keep)]

    def contenders(self, routes: Sequence[Route], tile: Any) -> list[Contender]:
        """All that is to be timed of a work that is calibrated: the collective by these ways, our kernel by this tile.

        Ablations are the form that was fastest in the pilot but for the number of slices, whether they grow, at balance
        the order, or the layout.
        """
        work = self._work
        sides = [work.torch_alone(), work.alone(tile)]
        fast, slow = (sides[n] for n in self._race("computation", sides, 2))
        cuts = self.cuts()
        cut = cuts[0]
        found = [*sides, *(work.comm(route) for route in routes)]
        found += [*(work.unfused(route, fast) for route in routes), work.unfused(routes[0], slow)]
        found += [work.decomposed(each) for each in self.chunks([tile, cut.tile])]
        found += [*(work.fused(each, Role.PICKED) for each in cuts), work.as_default()]
        changed = [replace(cut, slices=number) for number in self._slices() if number != cut.slices]
        changed += [replace(cut, slices=0, first=1)] if cut.slices else []
        changed += [replace(cut, first=1)] if cut.first > 1 else []
        changed += [replace(cut, head=False)] if cut.head else []
        if work.shape.ratio == 1:
            numbers = self._slices()
            counted = cut.slices or numbers[len(numbers) // 2]  # no plan knows rows that stay to be the first
            changed.append(replace(cut, slices=counted, order=Order.LOCAL, head=False))
        changed += [replace(cut, layout=layout) for layout in work.layouts if layout is not cut.layout]
        return [*found, *(work.fused(each) for each in changed if each not in cuts)]
