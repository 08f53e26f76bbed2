"""Which setting a repeated pair runs in: a few are tried, the fastest is kept, and watched.

Owns when to try what; pure, without clock and chance. It counts runs, so that all ranks of a group, which make the same
calls, try the same at the same time; and it decides by figures that it is given, so that they can be those of the
slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dovetail.overlap.strategy import Setting

ROUNDS = 3  #: runs of each setting, of which the first is not timed: it compiles, loads and finds pages
EVERY = 8  #: when nothing is tried, each so many-th run is timed
WATCH = 64  #: runs after which the kept one is compared with what the others took
AGAIN = 1024  #: runs after which all are tried again
DEMOTED = 1.1  #: times the second best's figure: a kept one that takes longer is tried against the others again
_RECENT = 9


class Trials:
    """Of one pair."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        """`settings`: the one that is thought to be best first; each only once."""
        self.settings = list(dict.fromkeys(settings))
        self.kept = self.settings[0]  #: what runs when nothing is tried
        self._figures = [math.inf] * len(self.settings)
        self._count = 0  # runs since the last trials began
        self._forget()
        self.is_trying = len(self.settings) > 1

    def next(self) -> Setting:
        """For the next run."""
        count, self._count = self._count, self._count + 1
        if self.is_trying and count < self._tries:
            return self.settings[count % len(self.settings)]
        return self.kept

    @property
    def wants_time(self) -> bool:
        """Should the run that `next` was asked for be timed? Not the first one of a setting that is tried."""
        if self.is_trying:
            return len(self.settings) < self._count <= self._tries
        return self._count % EVERY == 0

    def plain(self) -> Setting | None:
        """For the next run, if it is one of the kept setting with nothing to time, and nothing to decide before it.

        None: ask `is_due` and `next`.
        """
        count = self._count
        if self.is_trying or not count % WATCH or not (count + 1) % EVERY:
            return None
        self._count = count + 1
        return self.kept

    @property
    def _tries(self) -> int:
        return ROUNDS * len(self.settings)

    def note(self, setting: Setting, time_us: float) -> None:
        """What a run took."""
        times = self._times[self.settings.index(setting)]
        times.append(time_us)
        del times[:-_RECENT]

    @property
    def is_due(self) -> bool:
        """Must `decide` be called before the next run?"""
        if self.is_trying:
            return self._count >= self._tries
        return self._count % WATCH == 0 and len(self.settings) > 1

    def figures(self) -> list[float]:
        """Of each setting, as seen here: the least of its trials; of the one that is kept, the middle of the last."""
        found = []
        for n, times in enumerate(self._times):
            if not times:
                found.append(self._figures[n])
            elif self.is_trying:
                found.append(min(times))
            else:
                found.append(sorted(times)[len(times) // 2])
        return found

    def decide(self, figures: Sequence[float]) -> None:
        """Keeps the fastest; or, of one that was kept and has become slower than others were, tries again."""
        self._figures = list(figures)
        best = min(range(len(figures)), key=lambda n: figures[n])
        if self.is_trying:
            self.kept, self.is_trying = self.settings[best], False
            self._forget()
            return
        now = figures[self.settings.index(self.kept)]
        if now > DEMOTED * figures[best] or self._count >= AGAIN:
            self.is_trying = True
            self._forget()
            self._count = 0

    def _forget(self) -> None:
        self._times: list[list[float]] = [[] for _ in self.settings]  # the last few

    def why(self) -> str:
        """The figures, in words."""
        known = [(f, s) for s, f in zip(self.settings, self._figures, strict=True) if math.isfinite(f)]
        return ", ".join(f"{setting} {time_us:.0f} us" for time_us, setting in sorted(known, key=lambda k: k[0]))
