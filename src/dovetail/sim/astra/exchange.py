"""How one NPU goes through a phase: packets in, packets out. Ring, direct and halving-doubling are one machine.

Owns the counters that ASTRA-sim keeps per phase, no clock. Packet 0 is made when the phase starts (with a window, that
many at once) and packet k+1 when a message arrives; each crosses the endpoint, some are reduced, and then it is sent
while sends are left. The phase is over when nothing is left to send and a whole window has come back.

Which packets are reduced follows a cycle: first a window of plain packets, then `rest` packets that a reduce-scatter
reduces always, and an all-reduce in every other cycle.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.errors import NotSupported
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.phases import Phase
from dovetail.sim.astra.system import Algorithm
from dovetail.sim.net.algorithms import Collective


@dataclass(frozen=True, slots=True)
class Rule:
    """What a phase does, for every NPU alike."""

    collective: Collective
    steps: int  #: messages that an NPU sends
    window: int  #: packets in flight
    rest: int  #: packets of a cycle after its window
    barrier: int  #: messages to receive before the second half of a direct all-reduce goes out; 0: no barrier
    sizes: tuple[int, ...]  #: bytes of packet k; the last entry holds for all later ones
    distances: tuple[int, ...]  #: how far packet k goes along the ring; repeats
    mirrored: bool  #: pairs swap (index XOR distance) instead of going round

    def size(self, packet: int) -> int:
        """Bytes of a packet."""
        return self.sizes[min(packet, len(self.sizes) - 1)]

    def distance(self, packet: int) -> int:
        """How far a packet goes."""
        return self.distances[packet % len(self.distances)]

    def reduced(self, packet: int) -> bool:
        """True if the endpoint reduces this packet."""
        cycle, place = divmod(packet, self.window + self.rest)
        if place < self.window:
            return False
        return self.collective == Collective.REDUCE_SCATTER or (
            self.collective == Collective.ALL_REDUCE and cycle % 2 == 0
        )


def rule(phase: Phase) -> Rule:
    """The rule of a phase."""
    n, size, kind = phase.num_npus, phase.size_bytes, phase.collective
    share = size if kind == Collective.ALL_GATHER else size // n
    twice = 2 if kind == Collective.ALL_REDUCE else 1
    match phase.implementation.algorithm:
        case Algorithm.RING | Algorithm.ONE_RING:
            steps = n * (n - 1) // 2 if kind == Collective.ALL_TO_ALL else twice * (n - 1)
            made = Rule(kind, steps, 1, n - 1, 0, (share,), (1,), mirrored=False)
        case Algorithm.DIRECT | Algorithm.ONE_DIRECT:
            window = min(phase.implementation.window or n - 1, n - 1)
            barrier = n - 1 if kind == Collective.ALL_REDUCE else 0
            made = Rule(kind, twice * (n - 1), window, window, barrier, (share,), tuple(range(1, n)), mirrored=False)
        case Algorithm.HALVING_DOUBLING | Algorithm.ONE_HALVING_DOUBLING:
            made = _halving_doubling(phase)
        case _:
            raise NotSupported(
                f"{phase.implementation} is not modelled here; ring, direct, halvingDoubling and their `one` forms are"
            )
    if made.sizes[0] < 1 or min(made.sizes[: made.steps]) < 1:
        raise NotSupported(
            f"a {kind} of {size} bytes over {n} NPUs has empty messages, which ASTRA-sim does not send; use more bytes"
        )
    return made


def _halving_doubling(phase: Phase) -> Rule:
    n, kind = phase.num_npus, phase.collective
    if kind == Collective.ALL_TO_ALL:
        raise NotSupported("halvingDoubling has no all_to_all in ASTRA-sim; ring and direct have")
    if n & (n - 1):
        raise NotSupported(f"halvingDoubling needs a power of two of NPUs, not {n}: ASTRA-sim never ends it; use ring")
    rounds = n.bit_length() - 1
    halving, doubling = [1 << k for k in range(rounds)], [n >> (k + 1) for k in range(rounds)]
    if kind == Collective.ALL_GATHER:
        distances, sizes = doubling, [phase.size_bytes << k for k in range(rounds + 1)]
    else:
        distances, sizes = halving, [phase.size_bytes >> (k + 1) for k in range(rounds + 1)]
        if kind == Collective.ALL_REDUCE:  # doubles what halving has left, rounding included
            distances = halving + doubling
            sizes = sizes[:rounds] + [sizes[rounds] << (k + 1) for k in range(rounds + 1)]
    return Rule(kind, len(distances), 1, rounds - 1, 0, tuple(sizes), tuple(distances), mirrored=True)


def message_ns(network: AstraNetwork, phase: Phase, distance: int, size_bytes: int) -> int:
    """Time of a message of this phase; on a ring of all NPUs it takes the first dimension in which the ends differ."""
    if not phase.whole:
        return network.message_ns(phase.queue, distance, size_bytes)
    for dimension, n in enumerate(network.npus):
        distance, step = divmod(distance, n)
        if step:
            return network.message_ns(dimension, step, size_bytes)
    raise AssertionError("an NPU does not send to itself")


class Exchange:
    """The counters of one NPU in one phase."""

    __slots__ = ("_free", "_left", "_made", "_received", "_sent", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._made = self._sent = self._received = self._free = 0
        self._left = rule.steps

    def make(self) -> int:
        """A new packet, on its way through the endpoint."""
        self._made += 1
        return self._made - 1

    def receive(self) -> int:
        """A message has arrived; returns the packet it makes."""
        self._received += 1
        return self.make()

    def cross(self) -> list[int]:
        """A packet is through the endpoint; returns the packets to send now."""
        self._free += 1
        held = self.rule.barrier > 0 and self._left <= self.rule.barrier
        if held and self._received < self.rule.barrier:
            return []
        out = []
        for _ in range(self.rule.window if held else 1):
            if self._made == self._sent or not self._left or not self._free:
                break
            out.append(self._sent)
            self._sent += 1
            self._left -= 1
            self._free -= 1
        return out

    def barrier_falls_after(self, arrivals: int) -> bool:
        """True if this many arrivals change what a packet at the endpoint does."""
        held = 0 < self._left <= self.rule.barrier
        return held and self._received < self.rule.barrier <= self._received + arrivals

    @property
    def done(self) -> bool:
        """True at the end; asked after `cross`."""
        return not self._left and self._free == self.rule.window
