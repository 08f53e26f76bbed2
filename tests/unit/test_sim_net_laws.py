"""Laws of the collectives: the event model is the closed form, the reduced run is the full one, no limit is beaten."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.sim.net import (
    Algorithm,
    Collective,
    Dimension,
    Kind,
    Network,
    Schedule,
    bound_ns,
    closed_form_ns,
    grid,
    run,
    simulate,
)
from dovetail.sim.net.algorithms import pattern
from dovetail.sim.net.links import Links
from dovetail.sim.net.routes import lower
from dovetail.sim.net.schedule import fold, spread


@st.composite
def networks(draw: st.DrawFn, most: int = 24) -> Network:
    dimensions: list[Dimension] = []
    for _ in range(draw(st.integers(1, 3))):
        room = most // math.prod(d.ranks for d in dimensions)
        dimensions.append(
            Dimension(
                kind=draw(st.sampled_from(Kind)),
                ranks=draw(st.integers(1, min(room, 7))),
                bandwidth_gbps=draw(st.sampled_from([0.7, 1.0, 3.0, 12.5, 46.55, 50.0])),
                latency_ns=draw(st.sampled_from([0.0, 1.0, 333.3, 700.0])),
            )
        )
    return Network(dimensions=tuple(dimensions))


sizes = st.integers(0, 1 << 26)
collectives = st.sampled_from(Collective)
algorithms = st.sampled_from(Algorithm)


@settings(max_examples=70, deadline=None)
@given(networks(), collectives, algorithms, sizes)
def test_event_model_is_the_closed_form(network: Network, what: Collective, how: Algorithm, size: int) -> None:
    got = simulate(network, what, size, algorithm=how)
    assert got.closed_form_ns is not None
    assert abs(got.time_ns - got.closed_form_ns) <= 1


@settings(max_examples=30, deadline=None)
@given(networks(), collectives, algorithms, sizes, st.integers(1, 4))
def test_reduced_is_full(network: Network, what: Collective, how: Algorithm, size: int, chunks: int) -> None:
    reduced, full = (
        simulate(network, what, size, algorithm=how, chunks=chunks, symmetry=symmetry) for symmetry in (True, False)
    )
    assert reduced.reduced
    assert not full.reduced
    assert full.num_flows == reduced.num_flows * network.ranks
    assert abs(reduced.time_ns - full.time_ns) <= 1
    np.testing.assert_allclose(reduced.link_bytes, full.link_bytes, rtol=1e-9)
    np.testing.assert_allclose(reduced.link_utilisation, full.link_utilisation, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(networks(), st.data())
def test_random_patterns_reduced_is_full(network: Network, data: st.DataObject) -> None:
    """Not only collectives: any messages to any peers, in any order, of any sizes."""
    peer, size = st.integers(0, network.ranks - 1), st.integers(0, 10_000)
    rows = []
    for step in range(data.draw(st.integers(1, 3))):
        wait = step - 1
        for _ in range(data.draw(st.integers(1, 4))):
            sent = data.draw(st.sampled_from([step, -1]))
            rows.append((0, data.draw(peer), data.draw(size), wait, step, sent))
    whole = spread(network, Schedule.of(rows))
    shuffle = data.draw(st.randoms(use_true_random=False)).sample(range(len(whole)), len(whole))
    whole = Schedule(**{name: getattr(whole, name)[shuffle] for name in Schedule.__slots__})
    reduced, full = run(network, whole, symmetry=True), run(network, whole, symmetry=False)
    assert abs(reduced.time_ns - full.time_ns) <= 1
    np.testing.assert_allclose(reduced.link_bytes, full.link_bytes, rtol=1e-9)


@settings(max_examples=70, deadline=None)
@given(networks(), collectives, algorithms, sizes, st.integers(1, 5))
def test_no_limit_is_beaten(network: Network, what: Collective, how: Algorithm, size: int, chunks: int) -> None:
    got = simulate(network, what, size, algorithm=how, chunks=chunks)
    assert got.time_ns >= got.bound_ns
    assert got.link_utilisation.max(initial=0) <= 1 + 1e-9


@settings(max_examples=30, deadline=None)
@given(networks(), algorithms, st.sampled_from([Collective.ALL_GATHER, Collective.REDUCE_SCATTER]), sizes)
def test_every_rank_receives_what_it_needs(network: Network, how: Algorithm, what: Collective, size: int) -> None:
    """All-gather and its reverse move each piece to each rank once, whatever the algorithm."""
    sent = pattern(network, what, how, size, 1).size_bytes.sum()
    piece = size if what is Collective.ALL_GATHER else size / network.ranks
    assert sent == pytest.approx(piece * (network.ranks - 1))


@settings(max_examples=30, deadline=None)
@given(networks(), collectives, algorithms)
def test_fold_undoes_spread(network: Network, what: Collective, how: Algorithm) -> None:
    rank0 = pattern(network, what, how, 1 << 20, 2)
    whole = spread(network, rank0)
    folded = fold(network, whole)
    assert folded is not None
    for name in Schedule.__slots__:
        np.testing.assert_array_equal(np.sort(getattr(folded, name)), np.sort(getattr(rank0, name)))


def test_fold_sees_one_byte_one_slot_one_receiver() -> None:
    network = grid("ring", 3, 4, bandwidth_gbps=1)
    whole = spread(network, pattern(network, Collective.ALL_REDUCE, Algorithm.RING, 1 << 10, 2))
    for name in Schedule.__slots__:
        columns = {n: getattr(whole, n).copy() for n in Schedule.__slots__}
        columns[name][5] = (columns[name][5] + 1) % 12
        assert fold(network, Schedule(**columns)) is None, name
    assert fold(network, Schedule(**{n: getattr(whole, n)[:-1] for n in Schedule.__slots__})) is None


@settings(max_examples=30, deadline=None)
@given(networks())
def test_routes_are_minimal_and_connected(network: Network) -> None:
    """Each hop begins where the last one ended; shares of a message add up to one."""
    links = Links(network)
    ranks = np.arange(network.ranks)
    none = np.full(network.ranks**2, -1)
    src, dst = (m.ravel() for m in np.meshgrid(ranks, ranks))
    pairs = Schedule(src=src, dst=dst, size_bytes=np.ones(len(src)), wait=none, deliver=none, sent=none)
    flows, message = lower(links, pairs, pattern=False)
    np.testing.assert_allclose(np.bincount(message, flows.weight, len(src)), 1)
    for f, m in enumerate(message):
        at, hops = int(src[m]), 0
        for link in flows.link[flows.first_hop[f] : flows.first_hop[f + 1]]:
            name = links.names[link].split()
            if name[1] == "up":
                assert int(name[2]) == at
            elif name[1] == "down":
                at = int(name[2])
            else:
                assert int(name[1].split("->")[0]) == at
                at = int(name[1].split("->")[1])
            hops += 1
        assert at == dst[m]
        assert hops == distance(network, int(src[m]), int(dst[m]))


def distance(network: Network, src: int, dst: int) -> int:
    a, b = network.coordinates(np.array([src, dst]))
    total = 0
    for d, k in zip(network.dimensions, (b - a).tolist(), strict=True):
        if k:
            around = min(k % d.ranks, -k % d.ranks)
            total += {Kind.RING: around, Kind.SWITCH: 2, Kind.FULLY_CONNECTED: 1}[d.kind]
    return total


# --- the forms as textbooks have them --------------------------------------------------------------------------------

S, B, L = 1 << 20, 25.0, 600.0


@pytest.mark.parametrize("n", [3, 4, 8, 9])
def test_ring_forms(n: int) -> None:
    ring = grid("ring", n, bandwidth_gbps=B, latency_ns=L)
    step = S / n / B + L
    form = {
        Collective.REDUCE_SCATTER: (n - 1) * step,
        Collective.ALL_GATHER: (n - 1) * (S / B + L),
        Collective.ALL_REDUCE: 2 * (n - 1) * step,
    }
    for what, expected in form.items():
        assert closed_form_ns(ring, what, Algorithm.RING, S) == pytest.approx(expected)
        assert simulate(ring, what, S, algorithm="ring").time_ns == pytest.approx(expected, abs=1)
    both_ways = simulate(ring, "all_gather", S, algorithm="dimension")
    assert both_ways.time_ns == both_ways.bound_ns == round((n - 1) * S / (2 * B) + n // 2 * L)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_direct_forms(n: int) -> None:
    mesh = grid("fully_connected", n, bandwidth_gbps=B, latency_ns=L)
    switch = grid("switch", n, bandwidth_gbps=B, latency_ns=L)
    assert simulate(mesh, "all_reduce", S).time_ns == pytest.approx(2 * (S / n / B + L), abs=1)
    assert simulate(mesh, "all_gather", S).time_ns == pytest.approx(S / B + L, abs=1)
    assert simulate(switch, "all_to_all", S).time_ns == pytest.approx(S * (n - 1) / n / B + 2 * L, abs=1)
    assert simulate(switch, "all_gather", S).time_ns == pytest.approx(S * (n - 1) / B + 2 * L, abs=1)


@pytest.mark.parametrize(("a", "b"), [(2, 2), (4, 4), (4, 8), (8, 2), (8, 16), (16, 16)])
def test_torus_all_to_all_is_the_bound(a: int, b: int) -> None:
    torus = grid("ring", a, b, bandwidth_gbps=B, latency_ns=L)
    bound = S * max(a, b) / (8 * B) + (a / 2 + b / 2) * L
    assert bound_ns(torus, Collective.ALL_TO_ALL, S) == pytest.approx(bound)
    assert simulate(torus, "all_to_all", S).time_ns == pytest.approx(bound, abs=1)


def test_odd_rings_have_a_lower_limit() -> None:
    """Mean distance (n^2 - 1) / 4n instead of n / 4."""
    ring = grid("ring", 5, bandwidth_gbps=B)
    assert simulate(ring, "all_to_all", S).time_ns == pytest.approx(S * 24 / 20 / 2 / B, abs=1)


def test_chunks_overlap_the_dimensions() -> None:
    """Two equal dimensions in k chunks: k + 1 turns of 1/k instead of 2 of 1, the latency of the last only."""
    torus = grid("ring", 8, 8, bandwidth_gbps=B, latency_ns=L)
    for k in (1, 2, 8):
        got = simulate(torus, "all_to_all", S, algorithm="dimension", chunks=k)
        assert got.time_ns == pytest.approx((k + 1) / k * S / B + 8 * L, abs=1)
        assert (got.closed_form_ns is None) == (k > 1)


def test_both_ways_round_an_even_ring_the_opposite_piece_goes_in_halves() -> None:
    """All-gather sends it last; a reduce-scatter, in reverse, first."""
    ring = grid("ring", 6, bandwidth_gbps=B)
    for what, sizes in ((Collective.ALL_GATHER, [6, 6, 3]), (Collective.REDUCE_SCATTER, [0.5, 1, 1])):
        steps = pattern(ring, what, Algorithm.DIMENSION, 6, 1)
        for neighbour in (1, 5):
            assert steps.size_bytes[steps.dst == neighbour].tolist() == sizes


def test_limit_of_all_gather_is_that_of_a_rank_or_of_a_slow_dimension() -> None:
    def torus(second_gbps: float) -> Network:
        return Network(
            dimensions=tuple(
                Dimension(kind=Kind.RING, ranks=4, bandwidth_gbps=gbps, latency_ns=0) for gbps in (10, second_gbps)
            )
        )

    assert bound_ns(torus(10), Collective.ALL_GATHER, 800) == 15 * 800 / 40
    assert bound_ns(torus(1), Collective.ALL_GATHER, 800) == 3 * 800 / 2
    assert bound_ns(torus(10), Collective.REDUCE_SCATTER, 800 * 16) == 15 * 800 / 40
    assert bound_ns(torus(10), Collective.ALL_REDUCE, 800 * 16) == 2 * 15 * 800 / 40
