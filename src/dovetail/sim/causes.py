"""The chain of causes: every moment knows the one before it and in which phase the time in between was spent.

Owns the moments of one replay. The phases of a run are read off the chain that ends last, so they always add up to its
time.
"""

from __future__ import annotations

from dovetail.sim.result import Phase

START = 0  #: the moment at which a run begins


class Causes:
    """Moments by number; number 0 is the start."""

    def __init__(self) -> None:
        self.when_ns: list[int] = [0]
        self._cause: list[int] = [-1]
        self._phase: list[Phase] = [Phase.CONTROL]

    def add(self, when_ns: int, cause: int, phase: Phase) -> int:
        """A moment that `cause` led to; what lies between them belongs to `phase`."""
        self.when_ns.append(when_ns)
        self._cause.append(cause)
        self._phase.append(phase)
        return len(self.when_ns) - 1

    def later(self, a: int, b: int) -> int:
        """The later of two moments; the first if they are one time."""
        return a if self.when_ns[a] >= self.when_ns[b] else b

    def phases_ns(self, last: int) -> dict[Phase, int]:
        """The time in each phase on the way to a moment."""
        found = dict.fromkeys(Phase, 0)
        while (cause := self._cause[last]) >= 0:
            found[self._phase[last]] += self.when_ns[last] - self.when_ns[cause]
            last = cause
        return found
