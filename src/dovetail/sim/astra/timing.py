"""How long one chunk takes in one phase, seen by one NPU.

One NPU is enough: every dimension looks the same from each of its NPUs, a phase sends its k-th packet equally far from
everyone, and all start it at the same tick. So the message that an NPU sends as packet k tells when the message that it
receives as packet k arrives. Chunks do not slow each other down inside a phase (the network has no contention and the
endpoint is a pure delay), so the time depends on the phase alone.

Where packets come one at a time (ring, halving-doubling) the time is a sum that is written down at once. A direct phase
has several in flight and is played packet by packet.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.sim.astra.exchange import Exchange, Rule, message_ns, rule
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.phases import Phase
from dovetail.sim.astra.system import Algorithm, AstraSystem
from dovetail.sim.net.algorithms import Collective


class Undecided(Exception):
    """Two events meet in one tick and their order, which matters, is not the same on every NPU: play all of them."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """Duration of a phase, and how long before its end the event that ends it was put into the NPU's list of events.

    ASTRA-sim works off the events of a tick in the order in which they were put there, so of two chunks that end in one
    tick the one with the longer lead goes first.
    """

    duration_ns: int
    lead_ns: int


def phase_time(network: AstraNetwork, system: AstraSystem, phase: Phase) -> PhaseTime:
    """Time of one chunk in one phase. Raises Undecided, or NotSupported for what ASTRA-sim does not do."""
    if phase.implementation.algorithm == Algorithm.DOUBLE_BINARY_TREE:
        raise Undecided("the NPUs of a tree are not alike")
    made = rule(phase)
    if phase.implementation.algorithm in (Algorithm.DIRECT, Algorithm.ONE_DIRECT):
        return _play(network, system, phase, made)
    return _chain(network, system, phase, made)


def _chain(network: AstraNetwork, system: AstraSystem, phase: Phase, made: Rule) -> PhaseTime:
    """One packet at a time: an endpoint before the first send and after each receive, reductions, messages."""
    delay = system.endpoint_delay_ns
    if len(made.sizes) == 1:
        size = made.size(0)
        per_step = message_ns(network, phase, made.distance(0), size)
        total = made.steps * per_step + (made.steps + 1) * delay
        if made.collective in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE):
            total += sum(map(made.reduced, range(made.steps + 1))) * system.reduce_ns(size)
    else:
        total = (made.steps + 1) * delay
        for k in range(made.steps):
            total += message_ns(network, phase, made.distance(k), made.size(k))
        total += sum(system.reduce_ns(made.size(k)) for k in range(made.steps + 1) if made.reduced(k))
    last = made.steps
    return PhaseTime(total, system.reduce_ns(made.size(last)) if made.reduced(last) else delay)


_ARRIVED, _CROSSED, _REDUCED = range(3)


def _play(network: AstraNetwork, system: AstraSystem, phase: Phase, made: Rule) -> PhaseTime:
    """Several packets in flight: the events of one NPU, in ticks and in the order in which they were put there."""
    exchange = Exchange(made)
    delay, size = system.endpoint_delay_ns, made.size(0)
    reduce_ns = system.reduce_ns(size) if any(map(made.reduced, range(made.steps + made.window))) else 0
    travel = {d: message_ns(network, phase, d, size) for d in set(made.distances)}
    events: list[tuple[int, int, int, int, int]] = []  # tick, tick when put there, number, what, packet
    number = 0

    def put(now: int, after: int, what: int, packet: int) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (now + after, now, number, what, packet))

    for _ in range(made.window):
        put(0, delay, _CROSSED, exchange.make())
    while events:
        now, put_at, _, what, packet = heapq.heappop(events)
        if made.barrier and _meet(exchange, [what, *(other for at, _, _, other, _ in events if at == now)]):
            raise Undecided(f"an arrival meets a packet at the endpoint of {phase} at {now} ns")
        if what == _ARRIVED:
            put(now, delay, _CROSSED, exchange.receive())
        elif what == _CROSSED and made.reduced(packet):
            put(now, reduce_ns, _REDUCED, packet)
        else:
            for k in exchange.cross():
                put(now, travel[made.distance(k)], _ARRIVED, k)
            if exchange.done:
                return PhaseTime(now, now - put_at)
    raise AssertionError(f"{phase} does not end")


def _meet(exchange: Exchange, tick: Sequence[int]) -> bool:
    """True if it matters which of the events of a tick comes first: the last arrival opens the barrier for the rest."""
    arrivals = tick.count(_ARRIVED)
    return 0 < arrivals < len(tick) and exchange.barrier_falls_after(arrivals)
