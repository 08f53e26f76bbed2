"""The event model by itself: hand-made schedules with known times, and random ones against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.errors import NotSupported
from dovetail.sim.net import NONE, Dimension, Kind, Network, Schedule, grid, run
from dovetail.sim.net.fair import fair_rates
from dovetail.sim.net.fluid import Flows, solve
from dovetail.sim.net.schedule import Message


def free(src: int, dst: int, size_bytes: float) -> Message:
    return (src, dst, size_bytes, NONE, NONE, NONE)


# --- rates -----------------------------------------------------------------------------------------------------------


def test_rates_of_the_textbook() -> None:
    """Three flows on link 0 (6), one of them also on link 1 (1): it is held to 1 there, the others share the rest."""
    rate = fair_rates(np.array([6.0, 1.0]), np.ones(3), np.array([1, 1, 2]), np.array([0, 0, 0, 1]))
    assert rate.tolist() == [2.5, 2.5, 1.0]


def test_rates_follow_weights_and_repeated_hops() -> None:
    rate = fair_rates(np.array([6.0]), np.array([1.0, 0.5]), np.array([1, 1]), np.array([0, 0]))
    assert rate.tolist() == [4.0, 2.0]
    rate = fair_rates(np.array([6.0]), np.ones(2), np.array([1, 2]), np.array([0, 0, 0]))
    assert rate.tolist() == [2.0, 2.0]  # the second takes 4 of the 6


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rates_are_max_min_fair(data: st.DataObject) -> None:
    """Feasible, and every flow has a full link on which nobody gets more per weight: this characterises them."""
    num_links = data.draw(st.integers(1, 6))
    capacity = np.array(data.draw(st.lists(st.floats(0.1, 100), min_size=num_links, max_size=num_links)))
    link = st.sets(st.integers(0, num_links - 1), min_size=1)
    paths = data.draw(st.lists(link, min_size=1, max_size=12))
    weight = np.array([data.draw(st.sampled_from([1.0, 0.5, 0.25])) for _ in paths])
    flow = np.array([f for f, path in enumerate(paths) for _ in path])
    hop = np.array([each for path in paths for each in sorted(path)])
    rate = fair_rates(capacity, weight, np.bincount(flow), hop)
    used = np.bincount(hop, rate[flow], num_links)
    assert (used <= capacity * (1 + 1e-6)).all()
    for f, path in enumerate(paths):
        assert any(
            used[each] >= capacity[each] * (1 - 1e-6)
            and (rate / weight)[flow[hop == each]].max() <= rate[f] / weight[f] * (1 + 1e-6)
            for each in path
        )


# --- hand-made schedules ---------------------------------------------------------------------------------------------


def test_two_messages_share_a_link_and_one_goes_on_alone() -> None:
    network = grid("ring", 5, bandwidth_gbps=10, latency_ns=100)
    got = run(network, Schedule.of([free(0, 1, 1000), free(0, 2, 3000)]), timeline=True)
    # both at 5 B/ns until 200 ns; then 2000 bytes at 10 B/ns until 400 ns; two links further on
    assert got.time_ns == 600
    assert got.timeline == (
        ("dim0+ 0->1", 0, 200, 1000),
        ("dim0+ 0->1", 0, 400, 3000),
        ("dim0+ 1->2", 0, 400, 3000),
    )
    assert got.bound_ns == 400
    assert got.closed_form_ns is None
    assert dict(zip(got.link_names, got.link_bytes.tolist(), strict=True))["dim0+ 1->2"] == 3000
    assert got.link_utilisation.max() == pytest.approx(400 / 600)


def test_a_message_to_the_opposite_rank_takes_both_ways_and_counts_as_one() -> None:
    network = grid("ring", 4, bandwidth_gbps=10, latency_ns=7)
    assert run(network, Schedule.of([free(0, 2, 1000)])).time_ns == 50 + 14
    # beside it a neighbour's: weights 1/2 and 1, so a third and two thirds of the link
    got = run(network, Schedule.of([free(0, 2, 1000), free(0, 1, 1000)]), timeline=True)
    assert got.timeline is not None
    assert ("dim0- 0->3", 0, 50, 500) in got.timeline
    assert ("dim0+ 0->1", 0, 150, 1500) in got.timeline  # 500 at 10/3 and 1000 at 20/3


def test_slots_hold_a_message_until_what_it_waits_for() -> None:
    """0 sends to 1 and then, when that has left, to 2; 1 passes on what arrived."""
    network = grid("switch", 3, bandwidth_gbps=1, latency_ns=10)
    messages = [(0, 1, 100.0, NONE, 0, 0), (0, 2, 50.0, 0, NONE, NONE), (1, 2, 60.0, 0, NONE, NONE)]
    got = run(network, Schedule.of(messages), timeline=True)
    assert got.timeline is not None
    # at 120 both lead to 2: the down link has 30 bytes of 0's message left, both halve it until 180
    assert [s for s in got.timeline if "up" in s.link] == [
        ("dim0 up 0", 0, 100, 100),
        ("dim0 up 0", 100, 180, 50),
        ("dim0 up 1", 120, 210, 60),
    ]
    assert got.time_ns == 210 + 20


def test_a_slot_waits_for_all_that_name_it() -> None:
    network = grid("fully_connected", 3, bandwidth_gbps=1, latency_ns=1)
    messages = [(0, 2, 10.0, NONE, 5, NONE), (1, 2, 30.0, NONE, 5, NONE), (2, 0, 5.0, 5, NONE, NONE)]
    assert run(network, Schedule.of(messages)).time_ns == 31 + 6


def test_empty_messages_and_messages_to_oneself_take_no_time_on_links() -> None:
    network = grid("ring", 4, bandwidth_gbps=1, latency_ns=10)
    chain = [(0, 0, 500.0, NONE, 0, NONE), (0, 1, 0.0, 0, 0, NONE), (1, 2, 8.0, 0, NONE, NONE)]
    assert run(network, Schedule.of(chain)).time_ns == 10 + 18
    assert run(network, Schedule.of([])).time_ns == 0


def test_a_slow_link_holds_up_those_who_cross_it_and_lends_the_rest_to_others() -> None:
    network = grid("ring", 5, bandwidth_gbps=10)
    both = Schedule.of([free(0, 2, 1000), free(0, 1, 1000)])
    assert run(network, both).time_ns == 200
    got = run(network, both, link_gbps={"dim0+ 1->2": 2.0}, timeline=True)
    assert got.timeline is not None
    assert ("dim0+ 0->1", 0, 125, 1000) in got.timeline  # at 8 B/ns
    assert got.time_ns == 500


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ((0, 4, 1.0, NONE, NONE, NONE), r"dst must be in 0..3: message 0 \(rank 0 to 4"),
        ((-1, 0, 1.0, NONE, NONE, NONE), r"src must be in 0..3"),
        ((0, 1, -1.0, NONE, NONE, NONE), "size_bytes must be finite and zero or more"),
        ((0, 1, float("nan"), NONE, NONE, NONE), "size_bytes must be finite"),
        ((0, 1, 1.0, -2, NONE, NONE), "slot wait must be zero or more, or NONE"),
        ((0, 1, 1.0, 3, NONE, NONE), r"1 of 1 messages never start, first message 0 .*nothing completes the slot"),
        ((0, 1, 1.0, 3, NONE, 3), "or they wait for each other"),
    ],
)
def test_bad_schedules_say_what_is_wrong(message: Message, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        run(grid("ring", 4, bandwidth_gbps=1), Schedule.of([message]))


def test_insisting_on_symmetry_that_is_not_there() -> None:
    network = grid("ring", 4, bandwidth_gbps=1)
    with pytest.raises(NotSupported, match="symmetry=True, but the ranks' messages differ"):
        run(network, Schedule.of([free(0, 1, 1)]), symmetry=True)
    shift = Schedule.of([free(r, (r + 1) % 4, 9) for r in range(4)])
    assert run(network, shift, symmetry=True).reduced
    assert run(network, shift).reduced
    assert not run(network, shift, symmetry=False).reduced
    with pytest.raises(NotSupported, match="some links differ"):
        run(network, shift, symmetry=True, link_gbps={"dim0+ 0->1": 2})


# --- random schedules against exact arithmetic -----------------------------------------------------------------------


def walk(network: Network, src: int, dst: int) -> list[tuple[Fraction, list[tuple[object, ...]]]]:
    """The flows of a message as (share, links), found rank by rank."""
    flows: list[tuple[Fraction, list[tuple[object, ...]]]] = [(Fraction(1), [])]
    at = [int(x) for x in network.coordinates(np.array([src]))[0]]
    goal = [int(x) for x in network.coordinates(np.array([dst]))[0]]
    for d, dim in enumerate(network.dimensions):
        n, k = dim.ranks, (goal[d] - at[d]) % dim.ranks
        there = [*at[:d], goal[d], *at[d + 1 :]]
        if k and dim.kind is Kind.RING:
            ways = []
            for sign, hops in ((1, k), (-1, n - k)):
                if 2 * hops <= n:
                    seen = [(d, sign, *at[:d], (at[d] + sign * j) % n, *at[d + 1 :]) for j in range(hops)]
                    ways.append((Fraction(1, 2) if 2 * hops == n else Fraction(1), seen))
        elif k and dim.kind is Kind.SWITCH:
            ways = [(Fraction(1), [(d, "up", *at), (d, "down", *there)])]
        else:
            ways = [(Fraction(1), [(d, *at, "to", *there)] if k else [])]
        flows = [(a * b, path + more) for a, path in flows for b, more in ways]
        at = there
    return flows


def shares(flows: dict[int, tuple[Fraction, list[tuple[object, ...]]]], gbps: dict[object, Fraction]) -> list[Fraction]:
    """Progressive filling, one link at a time."""
    rate: dict[int, Fraction] = {}
    left = dict(gbps)
    while len(rate) < len(flows):
        load: dict[object, Fraction] = {}
        for f, (weight, path) in flows.items():
            for link in path if f not in rate else []:
                load[link] = load.get(link, Fraction(0)) + weight
        tight = min(load, key=lambda link: left[link] / load[link])
        level = left[tight] / load[tight]
        for f, (weight, path) in flows.items():
            if f not in rate and tight in path:
                rate[f] = weight * level
                for link in path:
                    left[link] -= rate[f]
    return [rate[f] for f in flows]


def exact(network: Network, rows: list[Message]) -> Fraction:
    """The time of the last arrival in rational numbers, written for clearness alone."""
    flows: list[tuple[int, Fraction, list[tuple[object, ...]]]] = []
    for m, row in enumerate(rows):
        flows += [(m, share, path) for share, path in walk(network, row[0], row[1])]
    gbps = {link: Fraction(network.dimensions[link[0]].bandwidth_gbps) for _, _, p in flows for link in p}  # type: ignore[index]
    latency = [sum((Fraction(network.dimensions[i[0]].latency_ns) for i in p), Fraction(0)) for _, _, p in flows]  # type: ignore[index]
    remaining = [Fraction(rows[m][2]) * share for m, share, _ in flows]
    left: dict[int, Fraction] = {}
    started: set[int] = set()
    now = Fraction(0)
    while len(left) < len(flows):
        opened = {(rank, slot) for rank in range(network.ranks) for slot in range(4)}
        for f, (m, _, _) in enumerate(flows):
            src, dst, _, _, deliver, sent = rows[m]
            if f not in left or left[f] + latency[f] > now:
                opened.discard((dst, deliver))
            if f not in left:
                opened.discard((src, sent))
        started |= {f for f, (m, _, _) in enumerate(flows) if rows[m][3] == NONE or (rows[m][0], rows[m][3]) in opened}
        at_once = {f for f in started - set(left) if not remaining[f] or not flows[f][2]}
        if at_once:
            left |= dict.fromkeys(at_once, now)
            continue
        under_way = {f: flows[f][1:] for f in sorted(started - set(left))}
        rate = dict(zip(under_way, shares(under_way, gbps), strict=True))
        moments = [remaining[f] / rate[f] for f in under_way]
        moments += [left[f] + latency[f] - now for f in left if left[f] + latency[f] > now]
        step = min(moments)
        now += step
        for f in under_way:
            remaining[f] -= rate[f] * step
            if not remaining[f]:
                left[f] = now
    return max(left[f] + latency[f] for f in left)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    shape = draw(st.sampled_from([(2,), (3,), (4,), (5,), (2, 2), (3, 2), (2, 4)]))
    return Network(
        dimensions=tuple(
            Dimension(
                kind=draw(st.sampled_from(Kind)),
                ranks=n,
                bandwidth_gbps=draw(st.integers(1, 9)),
                latency_ns=draw(st.integers(0, 40)),
            )
            for n in shape
        )
    )


@settings(max_examples=40, deadline=None)
@given(networks(), st.data())
def test_random_schedules_match_exact_arithmetic(network: Network, data: st.DataObject) -> None:
    """Message i waits for a slot that only messages before it may name, so there is no deadlock."""
    rows: list[Message] = []
    rank = st.integers(0, network.ranks - 1)
    for stage in range(data.draw(st.integers(1, 3))):
        raised = {(dst, deliver) for _, dst, _, _, deliver, _ in rows} | {(src, sent) for src, _, _, _, _, sent in rows}
        for _ in range(data.draw(st.integers(1, 5))):
            src, dst = data.draw(rank), data.draw(rank)
            wait = stage - 1 if (src, stage - 1) in raised else NONE
            slots = st.sampled_from([stage, NONE])
            rows.append((src, dst, data.draw(st.integers(0, 500)), wait, data.draw(slots), data.draw(slots)))
    assert abs(run(network, Schedule.of(rows)).time_ns - exact(network, rows)) <= 1


def test_resolution_trades_events_for_a_bounded_delay() -> None:
    rng = np.random.default_rng(7)
    network = grid("ring", 4, 4, bandwidth_gbps=50, latency_ns=500)
    rows = [free(a, b, float(rng.integers(100_000, 1_000_000))) for a in range(16) for b in range(16) if a != b]
    fine, coarse = (run(network, Schedule.of(rows), resolution_ns=ns) for ns in (0, 500))
    assert coarse.num_events < fine.num_events / 2
    assert coarse.time_ns == pytest.approx(fine.time_ns, rel=0.01)
    assert fine.time_ns >= fine.bound_ns
    with pytest.raises(ValueError, match="resolution_ns must be zero or more, not -1"):
        run(network, Schedule.of(rows), resolution_ns=-1)


def test_solve_needs_no_network() -> None:
    none = np.array([NONE])
    flows = Flows(
        capacity=np.array([2.0]), size_bytes=np.array([8.0]), weight=np.ones(1), latency_ns=np.array([1.5]),
        wait=none, deliver=none, sent=none, num_gates=0, first_hop=np.array([0, 1]), link=np.array([0]),
    )  # fmt: skip
    times = solve(flows)
    assert (times.start_ns[0], times.left_ns[0], times.arrived_ns[0]) == (0, 4, 5.5)
