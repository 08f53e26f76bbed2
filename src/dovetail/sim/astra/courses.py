"""What an NPU does with one chunk in one phase: exchange packets along a ring, or pass the chunk up and down a tree.

Owns who talks to whom. A course is driven by three calls (start, crossed, arrived) and acts through its carrier.
"""

from __future__ import annotations

import math
from typing import Protocol

from dovetail.sim.astra.exchange import Exchange, Rule
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.phases import Phase


class Carrier(Protocol):
    """What a course may do."""

    def cross(self, size_bytes: int, reduced: bool) -> None:
        """Takes a packet through the endpoint; `crossed` follows."""

    def send(self, target: int, size_bytes: int) -> None:
        """Sends to another NPU."""

    def receive(self, source: int, size_bytes: int) -> None:
        """Takes a message; `arrived` follows."""

    def end(self) -> None:
        """The phase is over."""


class Course(Protocol):
    """What drives a course."""

    def start(self) -> None:
        """The dimension serves the chunk from now on."""

    def crossed(self) -> None:
        """A packet is through the endpoint."""

    def arrived(self) -> None:
        """A message is here."""


class Ring:
    """The NPUs of a phase as one of them numbers them: places 0 to n-1, `stride` apart, and which way is forward."""

    __slots__ = ("_first", "npu", "num_npus", "place", "sign", "stride")

    def __init__(self, phase: Phase, network: AstraNetwork, npu: int) -> None:
        self.npu = npu
        self.num_npus = phase.num_npus
        self.stride = 1 if phase.whole else math.prod(network.npus[: phase.queue])
        self.sign = -1 if phase.backward else 1
        self.place = npu // self.stride % self.num_npus
        self._first = npu - self.place * self.stride

    def at(self, place: int) -> int:
        """The NPU at a place, counted round."""
        return self._first + place % self.num_npus * self.stride

    def distance(self, npu: int) -> int:
        """How far another NPU is, counted up."""
        return ((npu - self._first) // self.stride - self.place) % self.num_npus


class Packets:
    """Ring, direct and halving-doubling."""

    def __init__(self, carrier: Carrier, rule: Rule, ring: Ring) -> None:
        self._carrier = carrier
        self._rule = rule
        self._ring = ring
        self._exchange = Exchange(rule)

    def start(self) -> None:
        """Makes the first packets."""
        for _ in range(self._rule.window):
            self._cross(self._exchange.make())

    def arrived(self) -> None:
        """Makes a packet."""
        self._cross(self._exchange.receive())

    def crossed(self) -> None:
        """Sends what may go."""
        for packet in self._exchange.cross():
            size, distance = self._rule.size(packet), self._rule.distance(packet)
            if self._rule.mirrored:
                target = source = self._ring.at(self._ring.place ^ distance)
            else:
                way = self._ring.sign * distance
                target, source = self._ring.at(self._ring.place + way), self._ring.at(self._ring.place - way)
            self._carrier.send(target, size)
            self._carrier.receive(source, size)
        if self._exchange.done:
            self._carrier.end()

    def _cross(self, packet: int) -> None:
        self._carrier.cross(self._rule.size(packet), self._rule.reduced(packet))


class Tree:
    """A whole chunk up a binary tree, reduced at each node, and down again. Chunks alternate between two trees.

    The tree holds places in order (left, node, right) under a root with one child; the root is the last place or the
    first. A node waits for its children, crosses the endpoint once per child, and sends up when both are reduced.
    """

    def __init__(self, carrier: Carrier, ring: Ring, size_bytes: int, *, root_last: bool) -> None:
        n = ring.num_npus
        self._carrier = carrier
        self._size = size_bytes
        self._parent: int | None = None
        self._children: list[int] = []
        # Without the root, places 1 .. n-1 are a perfect tree: the height of a place is its number of trailing zeros.
        shift = 1 if root_last else 0
        place = ring.place + shift
        if place in (0, n):
            self._children = [ring.at(n // 2 - shift)]
        else:
            reach = place & -place
            up = (place ^ reach) | (reach << 1)
            self._parent = ring.at((n if root_last else 0) - shift) if reach == n // 2 else ring.at(up - shift)
            if reach > 1:
                self._children = [ring.at(place - reach // 2 - shift), ring.at(place + reach // 2 - shift)]
        self._waiting = len(self._children)  # children whose data is still to come or to be reduced
        self._down = False

    def start(self) -> None:
        """A leaf has its data, the others wait for their children."""
        if not self._children:
            self._carrier.cross(self._size, reduced=False)
        for child in self._children:
            self._carrier.receive(child, self._size)

    def arrived(self) -> None:
        """From a child or the parent; all but a leaf reduce what they get, on the way down too."""
        if not self._waiting:
            self._down = True
        self._carrier.cross(self._size, reduced=bool(self._children))

    def crossed(self) -> None:
        """Passes the chunk on, up or down."""
        if not self._down and self._waiting:
            self._waiting -= 1
            if self._waiting:
                return
        if self._parent is not None and not self._down:
            self._carrier.send(self._parent, self._size)
            self._carrier.receive(self._parent, self._size)
            return
        for child in self._children:
            self._carrier.send(child, self._size)
        self._carrier.end()
