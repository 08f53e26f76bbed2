"""What arithmetic says: closed forms of the algorithms, and the limit that the links set.

Owns formulas; they share no code with the event model, so that each can be held against the other. All assume what
`Network` guarantees (equal links within a dimension) and one chunk.
"""

from __future__ import annotations

import math

from dovetail.sim.net.algorithms import Algorithm, Collective
from dovetail.sim.net.topology import Dimension, Kind, Network


def bound_ns(network: Network, collective: Collective, size_bytes: float) -> float:
    """The limit of the links, whatever the algorithm: the time of the bytes that must cross, plus the longest route.

    All-to-all: bytes times minimal hops in a dimension, over its links; for an a x b torus of even a and b this is
    size * max(a, b) / (8 * bandwidth) + (a/2 + b/2) * latency. All-gather: what a rank, or all ranks of equal
    coordinate in one dimension, must receive over the links that lead there. Reduce-scatter is its reverse, all-reduce
    both. The limit presumes that far pieces are not all favoured over near ones; without that the longest route and
    the busiest link could overlap, by at most the latency of the longest route.
    """
    used = [d for d in network.dimensions if d.ranks > 1]
    if not used:
        return 0.0
    latency = sum(_longest(d) * d.latency_ns for d in used)
    if collective is Collective.ALL_TO_ALL:
        return latency + max(size_bytes * _crossings(d) / d.bandwidth_gbps for d in used)
    piece = size_bytes if collective is Collective.ALL_GATHER else size_bytes / network.ranks
    into = [_links_into(d) * d.bandwidth_gbps for d in used]
    rank = piece * (network.ranks - 1) / sum(into)
    plane = max(piece * (d.ranks - 1) / gbps for d, gbps in zip(used, into, strict=True))
    return latency + max(rank, plane) * (2 if collective is Collective.ALL_REDUCE else 1)


def closed_form_ns(network: Network, collective: Collective, algorithm: Algorithm, size_bytes: float) -> float:
    """The time of an algorithm in one chunk, exactly as the event model has it.

    Phases of an invariant schedule follow each other without overlap, so their times add up. In a direct phase every
    flow that crosses the tightest dimension gets the same rate to the end, so that dimension alone sets the time.
    """
    parts = [[d for d in network.dimensions if d.ranks > 1]]
    if algorithm is not Algorithm.DIRECT:
        parts = [[d] for d in parts[0]]
    total, size = 0.0, size_bytes
    if collective is Collective.ALL_TO_ALL:
        return sum(_phase(part, collective, algorithm, size) for part in parts)
    if collective is not Collective.ALL_GATHER:
        for part in parts:
            total += _phase(part, Collective.REDUCE_SCATTER, algorithm, size)
            size /= math.prod(d.ranks for d in part)
    if collective is not Collective.REDUCE_SCATTER:
        for part in reversed(parts):
            total += _phase(part, Collective.ALL_GATHER, algorithm, size)
            size *= math.prod(d.ranks for d in part)
    return total


def _phase(part: list[Dimension], collective: Collective, algorithm: Algorithm, size_bytes: float) -> float:
    if not part:
        return 0.0
    n = math.prod(d.ranks for d in part)
    whole = size_bytes * n if collective is Collective.ALL_GATHER else size_bytes  # piece to each rank, times ranks
    d = part[0]
    gather = collective is not Collective.ALL_TO_ALL
    if algorithm is Algorithm.RING:
        bandwidth = d.bandwidth_gbps * (2 if d.kind is Kind.RING and n == 2 else 1)  # both links to the one neighbour
        sent = whole * (n - 1) / (n if gather else 2)
        return sent / bandwidth + (n - 1) * _one_hop(d) * d.latency_ns
    if algorithm is Algorithm.DIMENSION and d.kind is Kind.RING and gather:
        return whole * (n - 1) / n / (2 * d.bandwidth_gbps) + (n // 2) * d.latency_ns
    return max(whole * _crossings(d) / d.bandwidth_gbps for d in part) + sum(_longest(d) * d.latency_ns for d in part)


def _crossings(d: Dimension) -> float:
    """Part of an all-to-all's bytes per rank that crosses each link of the dimension, in minimal routes."""
    n = d.ranks
    match d.kind:
        case Kind.RING:
            return (n * n // 4) / n / 2  # the mean distance is floor(n^2 / 4) / n, over two directions
        case Kind.SWITCH:
            return (n - 1) / n
        case Kind.FULLY_CONNECTED:
            return 1 / n


def _one_hop(d: Dimension) -> int:
    """Links between neighbours."""
    return 2 if d.kind is Kind.SWITCH else 1


def _longest(d: Dimension) -> int:
    """Links of the longest minimal route."""
    return d.ranks // 2 if d.kind is Kind.RING else _one_hop(d)


def _links_into(d: Dimension) -> int:
    """Links that lead to a rank."""
    match d.kind:
        case Kind.RING:
            return 2
        case Kind.SWITCH:
            return 1
        case Kind.FULLY_CONNECTED:
            return d.ranks - 1
