"""Collectives as patterns: what rank 0 sends, step by step.

Owns what the algorithms are; `fluid` runs them without knowing. A pattern is made of phases in order, a phase of lanes
that run side by side, a lane of steps in order: a rank sends a step when it has received the one before. The first
steps of a phase wait for everything that the phase before brought.

Sizes are per rank, as c10d counts them: all_reduce the tensor, all_gather the input (the output is ranks times that),
reduce_scatter and all_to_all the whole input, in which a rank's own piece stays where it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from dovetail.sim.net.schedule import NONE, Schedule
from dovetail.sim.net.topology import Ints, Kind, Network


class Collective(StrEnum):
    """What is moved."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class Algorithm(StrEnum):
    """How it is moved."""

    RING = "ring"  #: dimension by dimension, from neighbour to neighbour in one direction
    DIRECT = "direct"  #: every pair of ranks at once over all dimensions
    DIMENSION = "dimension"  #: dimension by dimension: both ways round a ring, but all-to-all and other kinds directly


@dataclass(frozen=True, slots=True)
class Step:
    """Rank 0 sends `size_bytes` to each of `peers` at once."""

    peers: Ints
    size_bytes: float


Lane = list[Step]
Phase = list[Lane]
Maker = Callable[[Collective, Ints, float], Phase]  #: from a collective, the peers of rank 0, and the bytes per rank


def pattern(network: Network, collective: Collective, algorithm: Algorithm, size_bytes: float, chunks: int) -> Schedule:
    """What rank 0 sends; every other rank does the same.

    Chunks follow each other through the phases like a pipeline: a rank starts a chunk in a phase when the chunk before
    has left it there, so a dimension serves one chunk at a time in each phase, in order.
    """
    each = phases(network, collective, algorithm, size_bytes / chunks)
    rows: list[tuple[Step, tuple[int, int, int]]] = []  # and its slots: wait, deliver, sent
    slots = itertools.count()
    enter = [[next(slots) for _ in each] for _ in range(chunks)]  # [chunk][phase]
    for c, (p, phase) in itertools.product(range(chunks), enumerate(each)):
        done = enter[c][p + 1] if p + 1 < len(each) else NONE
        sent = enter[c + 1][p] if c + 1 < chunks else NONE
        for lane in phase:
            wait = enter[c][p] if c or p else NONE
            for step in lane[:-1]:
                arrived = next(slots)
                rows.append((step, (wait, arrived, NONE)))
                wait = arrived
            rows.append((lane[-1], (wait, done, sent)))
    return Schedule.of((0, int(peer), step.size_bytes, *slots_of) for step, slots_of in rows for peer in step.peers)


def phases(network: Network, collective: Collective, algorithm: Algorithm, size_bytes: float) -> list[Phase]:
    """The phases of one chunk: reduce-scatter and all-to-all first part to last, all-gather back, all-reduce both."""
    parts = _parts(network, algorithm)
    if collective is Collective.ALL_TO_ALL:
        return [make(collective, peers, size_bytes) for peers, make in parts]
    made: list[Phase] = []
    size = size_bytes
    if collective is not Collective.ALL_GATHER:
        for peers, make in parts:
            made.append(make(Collective.REDUCE_SCATTER, peers, size))
            size /= len(peers) + 1
    if collective is not Collective.REDUCE_SCATTER:
        for peers, make in reversed(parts):
            made.append(make(Collective.ALL_GATHER, peers, size))
            size *= len(peers) + 1
    return made


def _parts(network: Network, algorithm: Algorithm) -> list[tuple[Ints, Maker]]:
    """The peers of rank 0 in each part of the network, and what makes the phase of a part."""
    if algorithm is Algorithm.DIRECT:
        return [(np.arange(1, network.ranks), _direct)] if network.ranks > 1 else []
    parts: list[tuple[Ints, Maker]] = []
    for d, dimension in enumerate(network.dimensions):
        if dimension.ranks > 1:
            suited = _both_ways if dimension.kind is Kind.RING else _direct
            parts.append((_line(network, d), _passed if algorithm is Algorithm.RING else suited))
    return parts


def _line(network: Network, d: int) -> Ints:
    """The other ranks of rank 0's line in dimension d, nearest first in the direction of growing coordinates."""
    at = np.zeros((network.shape[d] - 1, len(network.shape)), np.int64)
    at[:, d] = np.arange(1, network.shape[d])
    return network.ranks_at(at)


def _direct(collective: Collective, peers: Ints, size_bytes: float) -> Phase:
    """Each rank sends each peer its piece."""
    piece = size_bytes if collective is Collective.ALL_GATHER else size_bytes / (len(peers) + 1)
    return [[Step(peers, piece)]]


def _passed(collective: Collective, peers: Ints, size_bytes: float) -> Phase:
    """Pieces go from neighbour to neighbour in one direction, n-1 steps; those of all-to-all that have arrived stay."""
    n = len(peers) + 1
    if collective is Collective.ALL_TO_ALL:
        sizes = [size_bytes * (n - k) / n for k in range(1, n)]
    else:
        sizes = [size_bytes if collective is Collective.ALL_GATHER else size_bytes / n] * (n - 1)
    return [[Step(peers[:1], size) for size in sizes]]


def _both_ways(collective: Collective, peers: Ints, size_bytes: float) -> Phase:
    """Pieces go both ways round a ring, n/2 steps; that of the rank opposite goes half each way.

    All-gather sends what is farthest last. Reduce-scatter is its reverse: what comes from farthest goes first.
    """
    if collective is Collective.ALL_TO_ALL:
        return _direct(collective, peers, size_bytes)
    n = len(peers) + 1
    piece = size_bytes if collective is Collective.ALL_GATHER else size_bytes / n
    sizes = [piece] * ((n - 1) // 2)
    if n % 2 == 0:
        sizes.append(piece / 2)
    if collective is Collective.REDUCE_SCATTER:
        sizes.reverse()
    return [[Step(neighbour, size) for size in sizes] for neighbour in (peers[:1], peers[-1:])]
