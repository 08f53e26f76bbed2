"""A network as data: dimensions of one kind each, whose product is the whole; every link is full duplex.

Owns shapes, units and the numbering of ranks, no routing and no time. Ranks are numbered with the first dimension
fastest: rank = x0 + n0 * (x1 + n1 * ...), as ASTRA-sim numbers them.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Kind(StrEnum):
    """How the ranks of one dimension are joined."""

    RING = "ring"  #: a link to each neighbour; a ring of two has both, so two parallel links
    SWITCH = "switch"  #: one link from each rank to a switch that never blocks
    FULLY_CONNECTED = "fully_connected"  #: a link from each rank to every other


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One dimension of a network."""

    kind: Kind
    ranks: int
    bandwidth_gbps: float  #: of one link in one direction, 10^9 bytes per second
    latency_ns: float  #: of one link; a way through a switch is two links

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _kind(self.kind))
        object.__setattr__(self, "ranks", operator.index(self.ranks))
        if self.ranks < 1:
            raise ValueError(f"a dimension needs at least 1 rank, not {self.ranks}")
        if not self.bandwidth_gbps > 0 or not math.isfinite(self.bandwidth_gbps):
            raise ValueError(f"bandwidth_gbps must be above zero, not {self.bandwidth_gbps}")
        if not self.latency_ns >= 0 or not math.isfinite(self.latency_ns):
            raise ValueError(f"latency_ns must be zero or more, not {self.latency_ns}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The product of its dimensions; two rings are a torus."""

    dimensions: tuple[Dimension, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dimensions", tuple(self.dimensions))
        if not self.dimensions:
            raise ValueError("a network needs at least one dimension")

    @property
    def ranks(self) -> int:
        """All ranks."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Ranks of each dimension."""
        return tuple(d.ranks for d in self.dimensions)

    def coordinates(self, ranks: Ints) -> Ints:
        """A row of coordinates for each rank."""
        return np.stack(np.unravel_index(ranks, self.shape, order="F"), axis=-1).astype(np.int64)

    def ranks_at(self, coordinates: Ints) -> Ints:
        """The rank of each row; coordinates wrap around, so a sum of two rows is a translation."""
        columns = tuple(np.moveaxis(coordinates, -1, 0))
        return np.asarray(np.ravel_multi_index(columns, self.shape, mode="wrap", order="F"), np.int64)


def grid(kind: Kind | str, *ranks: int, bandwidth_gbps: float, latency_ns: float = 0.0) -> Network:
    """Dimensions of one kind with equal links: ``grid("ring", 8, 16, bandwidth_gbps=50)`` is a torus of 128 ranks."""
    same = {"bandwidth_gbps": bandwidth_gbps, "latency_ns": latency_ns}
    return Network(dimensions=tuple(Dimension(kind=_kind(kind), ranks=n, **same) for n in ranks))


def _kind(given: str) -> Kind:
    if given not in list(Kind):
        raise ValueError(f"kind must be one of {', '.join(Kind)}, not {given!r}")
    return Kind(given)
