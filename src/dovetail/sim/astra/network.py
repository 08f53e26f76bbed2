"""The network of ASTRA-sim's analytical backend: a product of dimensions, and how long one message takes.

Owns units and shapes, no collectives. The "GB/s" of ASTRA-sim is 2^30 bytes per second, so fields say `gib`. NPUs are
numbered with the first dimension fastest. A message travels in one dimension only: the first in which source and
destination differ; nothing else on the network slows it down (the backend is unaware of congestion).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dovetail.sim.net.topology import Dimension, Kind, Network

GIB_PER_GB = (1 << 30) / 1e9  #: decimal GB/s in one "GB/s" of ASTRA-sim


class Topology(StrEnum):
    """How the NPUs of one dimension are joined, in the words of the network file."""

    RING = "Ring"  #: hops are the shorter way round
    FULLY_CONNECTED = "FullyConnected"  #: one hop to everyone
    SWITCH = "Switch"  #: two hops, through the switch


_KIND = {
    Topology.RING: Kind.RING,
    Topology.FULLY_CONNECTED: Kind.FULLY_CONNECTED,
    Topology.SWITCH: Kind.SWITCH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AstraNetwork:
    """One entry per dimension in every field, as in ASTRA-sim's network file.

    A dimension of one NPU is allowed here, since the system layer skips it; ASTRA-sim's own reader refuses it.
    """

    topology: tuple[Topology, ...]
    npus: tuple[int, ...]
    bandwidth_gib: tuple[float, ...]  #: of one link in one direction, 2^30 bytes per second
    latency_ns: tuple[float, ...]  #: of one hop

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", tuple(_topology(name) for name in _items(self.topology)))
        object.__setattr__(self, "npus", tuple(_count(n) for n in _items(self.npus)))
        object.__setattr__(self, "bandwidth_gib", tuple(float(b) for b in _items(self.bandwidth_gib)))
        object.__setattr__(self, "latency_ns", tuple(float(t) for t in _items(self.latency_ns)))
        lengths = {name: len(getattr(self, name)) for name in ("topology", "npus", "bandwidth_gib", "latency_ns")}
        if len(set(lengths.values())) != 1 or not self.npus:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(f"every field needs one entry per dimension, at least one: {found}")
        for bandwidth in self.bandwidth_gib:
            if not (bandwidth > 0 and math.isfinite(bandwidth)):
                raise ValueError(f"bandwidth must be above zero and finite, not {bandwidth}")
        for latency in self.latency_ns:
            if not (latency >= 0 and math.isfinite(latency)):
                raise ValueError(f"latency must be zero or more and finite, not {latency}")

    @property
    def num_npus(self) -> int:
        """All NPUs."""
        return math.prod(self.npus)

    @property
    def num_dimensions(self) -> int:
        """How many dimensions."""
        return len(self.npus)

    def message_ns(self, dimension: int, distance: int, size_bytes: int) -> int:
        """Time of one message between two NPUs that are `distance` apart in one dimension, cut to whole ns."""
        bytes_per_ns = self.bandwidth_gib[dimension] * (1 << 30) / 1_000_000_000
        return int(self.hops(dimension, distance) * self.latency_ns[dimension] + size_bytes / bytes_per_ns)

    def hops(self, dimension: int, distance: int) -> int:
        """Links on the way between two NPUs of one dimension."""
        match self.topology[dimension]:
            case Topology.RING:
                return min(distance, self.npus[dimension] - distance)
            case Topology.SWITCH:
                return 2
            case _:
                return 1

    def to_network(self) -> Network:
        """The same network in decimal GB/s, for the models that share `dovetail.sim.net`."""
        return Network(
            dimensions=tuple(
                Dimension(kind=_KIND[kind], ranks=n, bandwidth_gbps=bandwidth * GIB_PER_GB, latency_ns=latency)
                for kind, n, bandwidth, latency in zip(
                    self.topology, self.npus, self.bandwidth_gib, self.latency_ns, strict=True
                )
            )
        )

    @classmethod
    def from_network(cls, network: Network) -> AstraNetwork:
        """The other way; bandwidths may differ in the last bit after there and back."""
        kinds = {kind: name for name, kind in _KIND.items()}
        return cls(
            topology=tuple(kinds[d.kind] for d in network.dimensions),
            npus=tuple(d.ranks for d in network.dimensions),
            bandwidth_gib=tuple(d.bandwidth_gbps / GIB_PER_GB for d in network.dimensions),
            latency_ns=tuple(d.latency_ns for d in network.dimensions),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> AstraNetwork:
        """Reads a network file (YAML); raises ValueError that names file, key, what was found and what is allowed."""
        from dovetail.sim.astra.network_file import read_network

        return read_network(path)

    def to_file(self, path: str | Path) -> None:
        """Writes a network file that ASTRA-sim reads."""
        from dovetail.sim.astra.network_file import write_network

        write_network(self, path)


def _items(value: Any) -> Iterable[Any]:
    """A field given as one value means one dimension."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return value
    return (value,)


def _topology(name: Any) -> Topology:
    try:
        return Topology(name)
    except ValueError:
        raise ValueError(f"topology must be one of {', '.join(Topology)}, not {name!r}") from None


def _count(number: Any) -> int:
    try:
        count = operator.index(number)
    except TypeError:
        count = 0
    if isinstance(number, bool) or count < 1:
        raise ValueError(f"npus must be whole numbers from 1 on, not {number!r}")
    return count
