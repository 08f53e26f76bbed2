"""Fair sharing: nothing over its capacity, nobody slowed without a reason, no byte lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.sim.flows import Flows
from dovetail.sim.net.fair import fair_rates

Load = tuple[list[float], list[tuple[float, float, tuple[tuple[int, float], ...]]]]
CAPACITIES = some.lists(some.floats(0.5, 50), min_size=1, max_size=5)


@some.composite
def loads(draw: some.DrawFn) -> Load:
    capacity = draw(CAPACITIES)
    uses = some.dictionaries(
        some.integers(0, len(capacity) - 1), some.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=3
    ).map(lambda d: tuple(sorted(d.items())))
    flow = some.tuples(some.floats(1, 1e6), some.floats(0.1, 20), uses)
    return capacity, draw(some.lists(flow, min_size=1, max_size=8))


def started(capacity: list[float], flows: list[tuple[float, float, tuple[tuple[int, float], ...]]]) -> Flows:
    shared = Flows(capacity)
    for n, (size, cap, uses) in enumerate(flows):
        shared.add(n, size, cap, uses)
    return shared


@given(loads())
def test_rates_are_max_min_fair(load: Load) -> None:
    capacity, flows = load
    shared = started(capacity, flows)
    shared.share()
    rate = dict(shared._rate)
    used = [0.0] * len(capacity)
    for n, (_, _, uses) in enumerate(flows):
        for r, w in uses:
            used[r] += w * rate[n]
    assert all(u <= c * (1 + 1e-6) for u, c in zip(used, capacity, strict=True))
    for n, (_, cap, uses) in enumerate(flows):
        at_cap = rate[n] >= cap * (1 - 1e-6)
        # Otherwise some resource of it is full, and no flow there is faster than it is.
        held = any(
            used[r] >= capacity[r] * (1 - 1e-6)
            and all(rate[m] <= rate[n] * (1 + 1e-6) for m, f in enumerate(flows) if r in dict(f[2]))
            for r, _ in uses
        )
        assert at_cap or held


@settings(max_examples=60)
@given(loads())
def test_every_flow_ends_and_no_byte_is_lost(load: Load) -> None:
    capacity, flows = load
    shared = started(capacity, flows)
    moved = dict.fromkeys(range(len(flows)), 0.0)
    now, ended = 0, []
    while (following := shared.share()) is not None:
        assert following > now
        for n, rate in shared._rate.items():
            moved[n] += rate * (following - now)
        now = following
        ended += shared.advance(now)
    assert sorted(ended) == list(range(len(flows)))
    for n, (size, cap, _) in enumerate(flows):
        assert size * (1 - 1e-6) <= moved[n] <= size + cap * len(flows) + 1  # rounded up to whole nanoseconds
    assert now >= max(math.floor(size / cap) for size, cap, _ in flows)


@settings(max_examples=60)
@given(loads())
def test_rates_are_those_of_the_networks_solver(load: Load) -> None:
    """Two solvers of one law: here a flow has a cap and weights, there it is a link of its own and repeated hops."""
    capacity, flows = load
    shared = started(capacity, flows)
    shared.share()
    hops = [[len(capacity) + n] for n in range(len(flows))]
    for path, (_, _, uses) in zip(hops, flows, strict=True):
        path += [r for r, w in uses for _ in range(int(2 * w))]
    links = np.array([*(2 * c for c in capacity), *(cap for _, cap, _ in flows)])  # hops count half a weight each
    count = np.array([len(h) for h in hops])
    found = fair_rates(links, np.ones(len(flows)), count, np.concatenate([np.array(h) for h in hops]))
    assert found.tolist() == pytest.approx([shared._rate[n] for n in range(len(flows))], rel=1e-6)


def test_a_flow_held_up_elsewhere_leaves_its_share_to_others() -> None:
    shared = started([10.0, 2.0], [(100, 99, ((0, 1.0),)), (100, 99, ((0, 1.0), (1, 1.0)))])
    shared.share()
    assert shared._rate == {0: 8.0, 1: 2.0}
