"""Prices a collective, or any schedule of messages, on a network.

Owns the public functions. Nothing here knows how a collective works: a schedule is lowered to flows,
the flows are run, and `result` adds up what they used.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import numpy as np

from dovetail.errors import NotSupported
from dovetail.sim.net import limits
from dovetail.sim.net.algorithms import Algorithm, Collective, pattern
from dovetail.sim.net.fluid import solve
from dovetail.sim.net.links import Links
from dovetail.sim.net.result import NetResult, result
from dovetail.sim.net.routes import lower
from dovetail.sim.net.schedule import Schedule, fold, spread
from dovetail.sim.net.topology import Floats, Network

_MOST_RANKS = 1 << 17
_Choice = TypeVar("_Choice", bound=StrEnum)


def simulate(
    network: Network,
    collective: Collective | str,
    size_bytes: int,
    *,
    algorithm: Algorithm | str = Algorithm.DIRECT,
    chunks: int = 1,
    launch_ns: float = 0,
    symmetry: bool = True,
    link_gbps: Mapping[str, float] | None = None,
    timeline: bool = False,
) -> NetResult:
    """The time of a collective.

    Args:
        network: where it runs.
        collective: all_reduce, all_gather, reduce_scatter or all_to_all.
        size_bytes: what c10d counts per rank. all_reduce: the tensor. all_gather: the input; the output is ranks times
            that. reduce_scatter, all_to_all: the whole input; each rank gets 1/ranks of it, its own piece stays.
        algorithm: `ring`, `direct` or `dimension`; all three run on every network.
        chunks: pieces that follow each other through the dimensions.
        launch_ns: time of the library call that moves no bytes, added once.
        symmetry: simulate one flow for all its images; the result is the same, faster.
        link_gbps: links by name (`NetResult.link_names`) whose bandwidth differs; turns
            `symmetry` off, and the bound is that of the busiest link.
        timeline: also return who used each link when.

    Raises:
        ValueError: an unknown collective, algorithm or link, a negative size, less than one chunk.
        NotSupported: more hops than fit into memory.
    """
    collective = _choice(Collective, "collective", collective)
    algorithm = _choice(Algorithm, "algorithm", algorithm)
    size_bytes, chunks = _at_least("size_bytes", size_bytes, 0), _at_least("chunks", chunks, 1)
    if network.ranks > _MOST_RANKS:
        raise ValueError(f"a network of {network.ranks} ranks is too large to simulate; the most is {_MOST_RANKS}")
    rank0 = pattern(network, collective, algorithm, size_bytes, chunks)
    links = Links(network)
    gbps = _bandwidths(links, link_gbps)
    reduced = symmetry and gbps is None
    schedule = rank0 if reduced else spread(network, rank0)
    made = _run(links, schedule, reduced=reduced, launch_ns=launch_ns, gbps=gbps, timeline=timeline)
    bound: float = made.bound_ns
    closed = None
    if gbps is None:
        bound = launch_ns + limits.bound_ns(network, collective, size_bytes)
        if chunks == 1:
            closed = round(launch_ns + limits.closed_form_ns(network, collective, algorithm, size_bytes))
    return dataclasses.replace(made, bound_ns=round(bound), closed_form_ns=closed)


def run(
    network: Network,
    schedule: Schedule,
    *,
    launch_ns: float = 0,
    symmetry: bool | None = None,
    link_gbps: Mapping[str, float] | None = None,
    resolution_ns: float = 0,
    timeline: bool = False,
) -> NetResult:
    """The time of any schedule. `bound_ns` is that of its busiest link, `closed_form_ns` is None.

    Args:
        network, launch_ns, link_gbps, timeline: as in `simulate`.
        resolution_ns: departures closer than this are one event; a thousandth of the time is ample where the sizes of
            thousands of messages all differ. 0 is exact.
        schedule: every rank's messages.
        symmetry: None looks whether the schedule is translation-invariant and then simulates one flow for all its
            images; True insists on it, False does without.

    Raises:
        ValueError: a message that cannot be, or one that never starts.
        NotSupported: `symmetry` is True and the schedule or the links have none.
    """
    schedule.check(network)
    links = Links(network)
    gbps = _bandwidths(links, link_gbps)
    folded = fold(network, schedule) if symmetry is not False and gbps is None else None
    if symmetry and folded is None:
        why = "some links differ (link_gbps)" if gbps is not None else "the ranks' messages differ"
        raise NotSupported(f"symmetry=True, but {why}; symmetry=None simulates all ranks where it must")
    return _run(
        links, schedule if folded is None else folded, reduced=folded is not None, launch_ns=launch_ns, gbps=gbps,
        timeline=timeline, resolution_ns=resolution_ns,
    )  # fmt: skip


def _run(
    links: Links, schedule: Schedule, *, reduced: bool, launch_ns: float, gbps: Floats | None, timeline: bool,
    resolution_ns: float = 0,
) -> NetResult:  # fmt: skip
    for name, value in (("launch_ns", launch_ns), ("resolution_ns", resolution_ns)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be zero or more, not {value}")
    flows, message = lower(links, schedule, pattern=reduced, link_gbps=gbps)
    times = solve(flows, resolution_ns=resolution_ns)
    stuck = message[np.isnan(times.start_ns)]
    if len(stuck):
        raise ValueError(
            f"{len(np.unique(stuck))} of {len(schedule)} messages never start, first {schedule.row(int(stuck[0]))}: "
            "nothing completes the slot it waits for, or they wait for each other"
        )
    return result(links, flows, times, launch_ns=launch_ns, reduced=reduced, timeline=timeline)


def _bandwidths(links: Links, link_gbps: Mapping[str, float] | None) -> Floats | None:
    if not link_gbps:
        return None
    gbps = links.gbps()
    index: dict[str, int] = {name: i for i, name in enumerate(links.names)}
    for name, value in link_gbps.items():
        if name not in index:
            some = ", ".join(links.names[:3])
            raise ValueError(f"there is no link {name!r}; the network has {len(index)} links: {some}, ...")
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"the bandwidth of link {name!r} must be above zero, not {value}")
        gbps[index[name]] = value
    return gbps


def _choice(kind: type[_Choice], name: str, given: str) -> _Choice:
    try:
        return kind(given)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(kind)}, not {given!r}") from None


def _at_least(name: str, given: int, least: int) -> int:
    value = operator.index(given)
    if value < least:
        raise ValueError(f"{name} must be {least} or more, not {given}")
    return value
