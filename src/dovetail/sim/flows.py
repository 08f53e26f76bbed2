"""Flows that share resources fairly: max-min, with a cap for each flow.

Owns rates and remaining bytes, no clock: the caller says what time it is. A flow uses each of its resources with a
weight (a swap reads and writes the memory at both of its ends). Rates are as if all flows were raised together, and
each stopped at its own cap or when one of its resources is full.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: (resource, weight)
Use = tuple[int, float]
_SLACK = 1e-9


class Flows:
    """The flows that are under way, between two changes of their set."""

    def __init__(self, capacity: Sequence[float]) -> None:
        self._capacity = capacity  #: of each resource, bytes per ns
        self._left: dict[int, float] = {}  #: bytes, by flow
        self._rate: dict[int, float] = {}
        self._cap: dict[int, float] = {}
        self._uses: dict[int, tuple[Use, ...]] = {}
        self._now = 0

    def add(self, flow: int, size_bytes: float, cap: float, uses: tuple[Use, ...]) -> None:
        """A flow that begins now; it has no rate before `share`."""
        self._left[flow], self._cap[flow], self._uses[flow], self._rate[flow] = size_bytes, cap, uses, 0.0

    def advance(self, now: int) -> list[int]:
        """Moves bytes until `now` and takes out what has ended, in the order in which it was added."""
        passed = now - self._now
        self._now = now
        if passed:
            for flow, rate in self._rate.items():
                self._left[flow] -= rate * passed
        ended = [flow for flow, left in self._left.items() if left <= self._rate[flow] * _SLACK]
        for flow in ended:
            del self._left[flow], self._rate[flow], self._cap[flow], self._uses[flow]
        return ended

    def share(self) -> int | None:
        """Gives every flow its rate; returns the time at which the next one ends."""
        used = dict.fromkeys((r for uses in self._uses.values() for r, _ in uses), 0.0)
        waiting = dict(self._uses)
        while waiting:
            weight = dict.fromkeys(used, 0.0)
            for uses in waiting.values():
                for r, w in uses:
                    weight[r] += w
            shares = {r: (self._capacity[r] - used[r]) / w for r, w in weight.items() if w}
            level = min([*shares.values(), *(self._cap[flow] for flow in waiting)])
            full = {r for r, share in shares.items() if share <= level * (1 + _SLACK)}
            stopped = [
                flow
                for flow, uses in waiting.items()
                if self._cap[flow] <= level * (1 + _SLACK) or any(r in full for r, _ in uses)
            ]
            for flow in stopped:
                self._rate[flow] = level
                for r, w in waiting.pop(flow):
                    used[r] += w * level
        if not self._left:
            return None
        return self._now + min(math.ceil(left / self._rate[flow]) for flow, left in self._left.items())
