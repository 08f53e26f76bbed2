"""Messages to flows: dimension-ordered minimal routes.

Owns the lowering of a schedule to what `fluid` runs. A message goes through the first dimension first; where two ways
of a ring are equally long it becomes two flows of half the bytes and half the weight, so that a message counts as one
in the sharing of links however it is split.

A pattern is lowered with ranks projected away: links become their classes and slots those of rank 0. This is exact.
Translations keep the schedule, links and routes, and fair rates are unique, so all images of a flow have equal rates at
all times. They act freely on the links of a class, so each of these carries as many images of a flow as the flow has
hops in the class: the class is a link that the flow crosses that many times.
"""

from __future__ import annotations

import numpy as np

from dovetail.errors import NotSupported
from dovetail.sim.net.fluid import Flows
from dovetail.sim.net.links import Links, offsets, ranges
from dovetail.sim.net.schedule import NONE, Schedule
from dovetail.sim.net.topology import Floats, Ints, Network

#: Hops of all flows together; each takes some 50 bytes while it is lowered.
MAX_HOPS = 100_000_000


def lower(links: Links, schedule: Schedule, *, pattern: bool, link_gbps: Floats | None = None) -> tuple[Flows, Ints]:
    """The flows of a schedule, or of a pattern on link classes, and the message that each is part of.

    `link_gbps` replaces the bandwidth of every link of the network.
    """
    network = links.network
    src, dst = network.coordinates(schedule.src), network.coordinates(schedule.dst)
    message, way = _choose(links, (dst - src) % np.array(network.shape))
    first_hop, link_class, rank = _hops(links, src[message], dst[message], way)
    share, latency = np.ones(len(message)), np.zeros(len(message))
    for d, ways in enumerate(links.ways):
        share *= ways.share[way[:, d]]
        latency += ways.num_hops[way[:, d]] * network.dimensions[d].latency_ns
    slots = schedule.slots

    def gate(slot: Ints, owner: Ints) -> Ints:
        chosen = slot[message]
        return np.where(chosen == NONE, NONE, chosen if pattern else owner[message] * slots + chosen)

    flows = Flows(
        capacity=links.gbps(pattern=pattern) if link_gbps is None else link_gbps,
        size_bytes=schedule.size_bytes[message] * share,
        weight=share,
        latency_ns=latency,
        wait=gate(schedule.wait, schedule.src),
        deliver=gate(schedule.deliver, schedule.dst),
        sent=gate(schedule.sent, schedule.src),
        num_gates=slots if pattern else slots * network.ranks,
        first_hop=first_hop,
        link=link_class if pattern else link_class * network.ranks + rank,
    )
    return flows, message


def _choose(links: Links, difference: Ints) -> tuple[Ints, Ints]:
    """A row per flow: its message, and the way it takes in each dimension."""
    message = np.arange(len(difference))
    way = np.zeros((len(difference), 0), np.int64)
    for d, ways in enumerate(links.ways):
        k = difference[message, d]
        count = ways.first[k + 1] - ways.first[k]
        way = np.column_stack([np.repeat(way, count, axis=0), ranges(ways.first[k], count)])
        message = np.repeat(message, count)
    return message, way


def _hops(links: Links, src: Ints, dst: Ints, way: Ints) -> tuple[Ints, Ints, Ints]:
    """Where the hops of each flow begin, and the class and the rank of each hop's link."""
    network = links.network
    counts = [ways.num_hops[way[:, d]] for d, ways in enumerate(links.ways)]
    total = np.stack(counts).sum(axis=0)
    if total.sum() > MAX_HOPS:
        raise NotSupported(
            f"{total.sum():,} hops of {len(way):,} flows on {network.ranks} ranks; the limit is {MAX_HOPS:,}. "
            "Use a translation-invariant schedule, fewer chunks, or algorithm 'ring' or 'dimension'"
        )
    first_hop = offsets(total)
    link_class, rank = np.empty(first_hop[-1], np.int64), np.empty(first_hop[-1], np.int64)
    at, filled = src.copy(), first_hop[:-1].copy()
    for d, (ways, count) in enumerate(zip(links.ways, counts, strict=True)):
        hop = ranges(ways.first_hop[way[:, d]], count)
        where = ranges(filled, count)
        link_class[where] = ways.link_class[hop]
        rank[where] = _ranks(network, at, d, count, ways.shift[hop])
        at[:, d] = dst[:, d]
        filled += count
    return first_hop, link_class, rank


def _ranks(network: Network, at: Ints, d: int, count: Ints, shift: Ints) -> Ints:
    """The rank of each hop: that of its flow's row in `at`, moved by `shift` in dimension d."""
    stride = int(np.prod(network.shape[:d], dtype=np.int64))
    x = at[:, d]
    base = network.ranks_at(at) - stride * x
    moved = (np.repeat(x, count) + shift) % network.shape[d]
    return np.asarray(np.repeat(base, count) + stride * moved, np.int64)
