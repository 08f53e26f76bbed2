"""Which strategy each module runs: found by trying them in the first steps, with the clock of training itself.

Owns the schedule and the decision, and knows neither FSDP nor tensors. Every rank runs the same schedule, by counting
calls; times are compared after the slowest rank's were taken, so that all ranks decide alike.

A step lasts from one forward of the model to the next, with all that happens in between, so what a strategy costs the
computation beside it counts too. A module's own figure is how long its calls hold: from the issue of an all-gather to
where its result was needed and there, and the whole of a reduce-scatter.

First every strategy is tried on all modules, then the mix of each module's best against the best single one and against
`streams`, what FSDP would do by itself; the one with the shortest step stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dovetail.measure.interleave import schedule
from dovetail.measure.stats import median
from dovetail.overlap.strategy import Strategy

CANDIDATES = (Strategy.STREAMS, Strategy.SERIAL, Strategy.DMA)
#: Steps per contender; the first of each is not counted: it binds plans and takes memory.
ROUNDS = 4
#: Steps until all are tried again.
RECHECK = 2000
#: Rounds after which steps that differ too much in their calls end a trial.
_MOST_ROUNDS = 12

Assignment = tuple[Strategy, ...]


class Auto:
    """Chooses for the modules of one process group.

    Args:
        num_modules: how many; they are known by their numbers.
        slowest: the largest of each number over all ranks; called by all ranks at the same step.
    """

    def __init__(
        self,
        num_modules: int,
        slowest: Callable[[list[float]], list[float]],
        *,
        clock: Callable[[], float] = time.perf_counter,
        rounds: int = ROUNDS,
        recheck: int = RECHECK,
    ) -> None:
        self._num, self._slowest, self._clock = num_modules, slowest, clock
        self._rounds, self._recheck = rounds, recheck
        self.reasons = ["not measured yet"] * num_modules
        self.kept: Assignment = (Strategy.STREAMS,) * num_modules
        self._began: float | None = None
        self._learns = False
        self._forget_step()
        self._alike: list[Assignment] = [(c,) * num_modules for c in CANDIDATES]
        self._try(self._alike)

    def strategy(self, module: int) -> Strategy:
        """What this module runs now."""
        return self._now[module]

    @property
    def measuring(self) -> bool:
        """False while a choice is kept."""
        return bool(self._contenders)

    def gathered(self, module: int, seconds: float) -> None:
        """An all-gather held that long."""
        self._held[module] += seconds
        self._gathers += 1

    def scattered(self, module: int, seconds: float) -> None:
        """A reduce-scatter held that long."""
        self._held[module] += seconds
        self._scatters += 1

    def step(self, learns: bool) -> None:
        """The model's forward begins; `learns` if a backward may follow.

        Forwards without a reduce-scatter in between (gradient accumulation) belong to one step.
        """
        now = self._clock()
        if self._began is not None and (self._scatters or not self._learns):
            self._ended(now - self._began)
            now = self._clock()  # a decision is no part of a step
            self._began = None
        if self._began is None:
            self._began = now
            self._forget_step()
        self._learns = learns

    def _forget_step(self) -> None:
        self._held = [0.0] * self._num
        self._gathers = self._scatters = 0

    def _try(self, contenders: Sequence[Assignment]) -> None:
        self._contenders = list(contenders)
        self._turns = schedule([_MOST_ROUNDS] * len(contenders))
        self._turn = 0
        self._samples: dict[tuple[int, int], list[list[list[float]]]] = {}
        self._now = self._contenders[self._turns[0]]

    def _keep(self, chosen: Assignment, reasons: list[str]) -> None:
        self.kept, self.reasons = chosen, reasons
        self._now, self._contenders, self._left = chosen, [], self._recheck

    def _ended(self, seconds: float) -> None:
        if not self._contenders:
            self._left -= 1
            if self._left == 0:
                self._try(self._alike)
            return
        calls = self._gathers, self._scatters
        samples = self._samples.setdefault(calls, [[] for _ in self._contenders])
        samples[self._turns[self._turn]].append([seconds, *self._held])
        self._turn += 1
        if all(len(of) >= self._rounds for of in samples):
            self._decide([[median(column) for column in zip(*of[1:], strict=True)] for of in samples])
        elif self._turn == len(self._turns):
            self._keep(self._alike[0], ["steps differ in their calls, so they can't be compared"] * self._num)
        else:
            self._now = self._contenders[self._turns[self._turn]]

    def _decide(self, mine: list[list[float]]) -> None:
        """`mine` is this rank's medians by contender: the step, then what each module's calls hold."""
        flat = self._slowest([value for row in mine for value in row])
        width = 1 + self._num
        rows = [flat[k : k + width] for k in range(0, len(flat), width)]
        contenders = self._contenders
        if contenders == self._alike:
            self._first = rows
            mix = tuple(CANDIDATES[_least([row[1 + m] for row in rows])] for m in range(self._num))
            if mix not in contenders:
                single = contenders[_least([row[0] for row in rows])]
                self._try(list(dict.fromkeys([mix, single, self._alike[0]])))
                return
        steps = [row[0] for row in rows]
        best, stock = _least(steps), contenders.index(self._alike[0])
        beside = "" if best == stock else f", with streams {steps[stock] * 1e3:.2f}"
        why = f"a step takes {steps[best] * 1e3:.2f} ms{beside}"
        self._keep(contenders[best], [f"{why}; {self._held_by(m)}" for m in range(self._num)])

    def _held_by(self, module: int) -> str:
        shown = (f"{c} {row[1 + module] * 1e3:.2f}" for c, row in zip(CANDIDATES, self._first, strict=True))
        return f"its calls hold, in ms: {', '.join(shown)}"


def _least(values: list[float]) -> int:
    return min(range(len(values)), key=values.__getitem__)
