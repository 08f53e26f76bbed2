"""The links of a network, and the ways through one dimension.

Owns numbering, names and capacities. Links come in classes: all links of a class are images of one another under
translation of the ranks. Link = class * ranks + the rank it leaves from (for a switch's down link: the rank it leads
to), so translations move the links of a class as they move the ranks, and no translation but zero leaves one in place.

`Ways` are the routing of one dimension: for each difference of coordinates one way, or two of half the bytes each
where both directions of a ring are equally long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dovetail.sim.net.topology import Dimension, Floats, Ints, Kind, Network


@dataclass(frozen=True, slots=True)
class LinkClass:
    """Links that are images of one another: one leaves from each rank."""

    dimension: int
    step: int  #: what the link adds to the coordinate; a switch's links: 0
    label: str  #: "+", "-", "up", "down", "->"
    bandwidth_gbps: float


@dataclass(frozen=True, slots=True)
class Ways:
    """The ways through one dimension of n ranks, as arrays; ways of difference k: first[k] .. first[k + 1]."""

    first: Ints  #: [n + 1]
    share: Floats  #: part of the message that takes the way
    first_hop: Ints  #: [ways + 1]
    link_class: Ints  #: of each hop
    shift: Ints  #: coordinate of the hop's link, relative to the sender's

    @property
    def num_hops(self) -> Ints:
        """Hops of each way."""
        return np.diff(self.first_hop)


class Links:
    """All links of a network."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.classes: list[LinkClass] = []
        self.ways: list[Ways] = []
        for index, dimension in enumerate(network.dimensions):
            self.ways.append(_ways(dimension, len(self.classes)))
            self.classes += _classes(index, dimension)

    def __len__(self) -> int:
        return len(self.classes) * self.network.ranks

    def gbps(self, *, pattern: bool = False) -> Floats:
        """Bandwidth of each link, or of each class; 1 GB/s is one byte per nanosecond."""
        of_class = np.array([c.bandwidth_gbps for c in self.classes], np.float64)
        return of_class if pattern else np.repeat(of_class, self.network.ranks)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """``dim0+ 3->4``, ``dim1 up 3``, ``dim0 3->6``."""
        ranks = np.arange(self.network.ranks)
        at = self.network.coordinates(ranks)
        names = []
        for c in self.classes:
            if c.label in ("up", "down"):
                names += [f"dim{c.dimension} {c.label} {r}" for r in ranks]
                continue
            there = at.copy()
            there[:, c.dimension] += c.step
            sign = c.label if c.label != "->" else ""
            peers = self.network.ranks_at(there)
            names += [f"dim{c.dimension}{sign} {r}->{p}" for r, p in zip(ranks, peers, strict=True)]
        return tuple(names)


def _classes(index: int, d: Dimension) -> list[LinkClass]:
    if d.ranks == 1:
        return []
    match d.kind:
        case Kind.RING:
            found = [(1, "+"), (-1, "-")]
        case Kind.SWITCH:
            found = [(0, "up"), (0, "down")]
        case Kind.FULLY_CONNECTED:
            found = [(k, "->") for k in range(1, d.ranks)]
    return [LinkClass(index, step, label, d.bandwidth_gbps) for step, label in found]


def _ways(d: Dimension, first_class: int) -> Ways:
    """The minimal ways for each difference of coordinates 0..n-1; difference 0 has one way without a hop."""
    counts: list[int] = []
    ways: list[tuple[float, Ints, Ints]] = []
    for k in range(d.ranks):
        found = _ways_of(d, k)
        counts.append(len(found))
        ways += found
    hops = [len(shift) for _, _, shift in ways]
    return Ways(
        first=offsets(np.array(counts, np.int64)),
        share=np.array([share for share, _, _ in ways], np.float64),
        first_hop=offsets(np.array(hops, np.int64)),
        link_class=first_class + np.concatenate([c for _, c, _ in ways]),
        shift=np.concatenate([shift for _, _, shift in ways]),
    )


def _ways_of(d: Dimension, k: int) -> list[tuple[float, Ints, Ints]]:
    """Share, class within the dimension and shift of each hop."""
    n = d.ranks
    if k == 0:
        return [(1.0, np.zeros(0, np.int64), np.zeros(0, np.int64))]
    if d.kind is Kind.SWITCH:
        return [(1.0, np.array([0, 1]), np.array([0, k]))]
    if d.kind is Kind.FULLY_CONNECTED:
        return [(1.0, np.array([k - 1]), np.array([0]))]
    up = (np.zeros(k, np.int64), np.arange(k))
    down = (np.ones(n - k, np.int64), -np.arange(n - k))
    if 2 * k == n:
        return [(0.5, *up), (0.5, *down)]
    return [(1.0, *up)] if 2 * k < n else [(1.0, *down)]


def offsets(counts: Ints) -> Ints:
    """Where each of the ranges begins when ranges of these lengths follow each other, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def ranges(first: Ints, counts: Ints) -> Ints:
    """The numbers of all ranges [first, first + count), one range after the other."""
    return np.repeat(first - offsets(counts)[:-1], counts) + np.arange(int(counts.sum()), dtype=np.int64)
