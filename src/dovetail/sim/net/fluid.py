"""The event model: flows over links, started by gates, at max-min fair rates.

Owns time. Knows no topology and no collective. Rates change only when a flow starts or its last byte leaves, so time
moves from one such event to the next and nothing is sampled. A flow arrives its latency after its last byte left.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from dovetail.sim.net.fair import fair_rates
from dovetail.sim.net.links import ranges
from dovetail.sim.net.schedule import NONE
from dovetail.sim.net.topology import Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """A row per flow. A gate opens when all flows that name it in `deliver` or `sent` have counted."""

    capacity: Floats  #: bytes per nanosecond of each link
    size_bytes: Floats
    weight: Floats
    latency_ns: Floats
    wait: Ints  #: gate before which the flow does not start, or NONE
    deliver: Ints  #: gate that counts its arrival, or NONE
    sent: Ints  #: gate that counts its departure, or NONE
    num_gates: int
    first_hop: Ints  #: [flows + 1]
    link: Ints  #: of each hop

    def __len__(self) -> int:
        return len(self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Times:
    """When each flow started, when its last byte left, and when it arrived; NaN if it never started."""

    start_ns: Floats
    left_ns: Floats
    arrived_ns: Floats
    num_events: int


def solve(flows: Flows, *, resolution_ns: float = 0.0) -> Times:
    """Runs all flows to their end.

    With a `resolution_ns`, what departs within that time of an event is one event: each flow leaves at its own moment,
    but those that wait for it, and the rates of the others, follow at the end of that time. Sizes that all differ make
    an event per flow, so this is what makes thousands of them quick. 0 is exact.
    """
    state = _State(flows, resolution_ns)
    state.start(np.flatnonzero(flows.wait == NONE))
    while len(state.active) or state.arrivals:
        state.advance()
    return Times(
        start_ns=state.began, left_ns=state.left, arrived_ns=state.left + flows.latency_ns, num_events=state.events
    )


class _State:
    """What is under way."""

    def __init__(self, flows: Flows, resolution_ns: float) -> None:
        self.flows = flows
        self.resolution_ns = resolution_ns
        self.now = 0.0
        self.events = 0
        self.began = np.full(len(flows), np.nan)
        self.left = np.full(len(flows), np.nan)
        self.remaining = flows.size_bytes.astype(np.float64, copy=True)
        self.num_hops = np.diff(flows.first_hop)
        self.active = np.zeros(0, np.int64)
        self.rate = np.zeros(0)
        self.stale = False  # the flows under way are not those that the rates are for
        self.arrivals: list[tuple[float, int, Ints]] = []  # time, a number that breaks ties, flows
        self.arriving = 0
        named = np.concatenate([flows.deliver, flows.sent])
        self.missing = np.bincount(named[named != NONE], minlength=flows.num_gates)
        self.waiting: Ints = np.argsort(flows.wait, kind="stable")  # flows by the gate they wait for
        self.first_waiting = np.searchsorted(flows.wait[self.waiting], np.arange(flows.num_gates + 1))

    def start(self, who: Ints) -> None:
        """Starts flows, and whatever starts because some of them end at once."""
        started: list[Ints] = []
        while len(who):
            self.began[who] = self.now
            at_once = (self.remaining[who] <= 0) | (self.num_hops[who] == 0)
            started.append(who[~at_once])
            who = who[at_once]
            who = self._opened(self._end(who, np.full(len(who), self.now)))
        if started:
            self.active = np.concatenate([self.active, *started])
            self.stale = True

    def advance(self) -> None:
        """Moves time to the next departure or arrival, with all that fall on the same moment."""
        self.events += 1
        if self.stale:
            self._share()
        lasts = np.maximum(self.remaining[self.active], 0.0) / self.rate
        until = self.now + float(lasts.min(initial=np.inf))
        if self.arrivals:
            until = min(until, self.arrivals[0][0])
        until += self.resolution_ns
        same = 1e-6 + 1e-12 * until  # nanoseconds: far below what is reported, far above what rounding does
        ends = lasts <= until - self.now + same
        self.remaining[self.active] -= self.rate * (until - self.now)
        left = np.minimum(self.now + lasts[ends], until)
        self.now = until
        gates = [self._end(self.active[ends], left)]
        if ends.any():
            self.active, self.stale = self.active[~ends], True
        while self.arrivals and self.arrivals[0][0] <= until + same:
            gates.append(self.flows.deliver[heapq.heappop(self.arrivals)[2]])
        self.start(self._opened(np.concatenate(gates)))

    def _end(self, who: Ints, left: Floats) -> Ints:
        """Notes when the last bytes left, plans the arrivals, and gives the gates that count now."""
        self.left[who] = left
        counted = who[self.flows.deliver[who] != NONE]
        times = self.left[counted] + self.flows.latency_ns[counted]
        order = np.argsort(times, kind="stable")
        first = np.flatnonzero(np.diff(times[order], prepend=-1.0))
        for time, together in zip(times[order][first], np.split(counted[order], first[1:]), strict=False):
            heapq.heappush(self.arrivals, (float(time), self.arriving, together))
            self.arriving += 1
        gates: Ints = self.flows.sent[who]
        return gates.compress(gates != NONE)

    def _opened(self, gates: Ints) -> Ints:
        """Counts for the gates; gives the flows that waited for those now complete."""
        which, times = np.unique(gates, return_counts=True)
        self.missing[which] -= times
        which = which[self.missing[which] == 0]
        first = self.first_waiting[which]
        return self.waiting[ranges(first, self.first_waiting[which + 1] - first)]

    def _share(self) -> None:
        """New rates for the flows under way."""
        count = self.num_hops[self.active]
        hops = ranges(self.flows.first_hop[self.active], count)
        self.stale = False
        self.rate = fair_rates(self.flows.capacity, self.flows.weight[self.active], count, self.flows.link[hops])
