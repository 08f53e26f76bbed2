"""What a simulation says: the time, what each link carried, and when.

Owns the result and adding up the flows per link. Where one flow stood for its images, one link stands for its class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.sim.net.fluid import Flows, Times
from dovetail.sim.net.links import Links
from dovetail.sim.net.topology import Floats


class Span(NamedTuple):
    """Bytes that cross a link between two moments."""

    link: str
    start_ns: int
    end_ns: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetResult:
    """What a simulation says. Simulated time; utilisation is of the time without `launch_ns`."""

    time_ns: int  #: until the last byte has arrived, `launch_ns` included
    launch_ns: int
    bound_ns: int  #: the link limit, `launch_ns` included
    closed_form_ns: int | None  #: the same time by arithmetic, where a form exists
    links: Links
    link_bytes: Floats  #: bytes over each link
    link_utilisation: Floats  #: share of what each link could have carried
    timeline: tuple[Span, ...] | None  #: on request, sorted by time; flows of one link with equal times are one span
    num_flows: int  #: flows that were simulated
    num_events: int
    reduced: bool  #: one flow stood for its images on all ranks

    @property
    def link_names(self) -> tuple[str, ...]:
        """The name of each link, in the order of `link_bytes`."""
        return self.links.names


def result(links: Links, flows: Flows, times: Times, *, launch_ns: float, reduced: bool, timeline: bool) -> NetResult:
    """Adds up; the bound is that of the busiest link."""
    took = float(times.arrived_ns.max(initial=0.0))
    copies = links.network.ranks if reduced else 1
    size = np.repeat(flows.size_bytes, np.diff(flows.first_hop))
    used = np.bincount(flows.link, size, len(flows.capacity)).astype(np.float64)
    busy_ns = used / flows.capacity
    return NetResult(
        time_ns=round(launch_ns + took),
        launch_ns=round(launch_ns),
        bound_ns=round(launch_ns + float(busy_ns.max(initial=0.0))),
        closed_form_ns=None,
        links=links,
        link_bytes=np.repeat(used, copies),
        link_utilisation=np.repeat(busy_ns / took if took > 0 else np.zeros(len(busy_ns)), copies),
        timeline=_timeline(links, flows, times, launch_ns, copies) if timeline else None,
        num_flows=len(flows),
        num_events=times.num_events,
        reduced=reduced,
    )


def _timeline(links: Links, flows: Flows, times: Times, launch_ns: float, copies: int) -> tuple[Span, ...]:
    """Spans of all links; `copies` links follow each other where one stands for a class."""
    count = np.diff(flows.first_hop)
    columns = (np.rint(launch_ns + t).astype(np.int64) for t in (times.start_ns, times.left_ns))
    key = np.stack([*(np.repeat(c, count) for c in columns), flows.link])
    unique, which = np.unique(key, axis=1, return_inverse=True)
    size = np.bincount(which.ravel(), np.repeat(flows.size_bytes, count), unique.shape[1])
    names = links.names
    return tuple(
        Span(names[int(link) * copies + copy], int(start), int(end), round(total))
        for (start, end, link), total in zip(unique.T, size, strict=True)
        for copy in range(copies)
    )
