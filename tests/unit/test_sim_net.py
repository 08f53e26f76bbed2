"""Collectives on networks: the figures that must hold, the result's fields, and what bad input says."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import NotSupported
from dovetail.sim.net import Algorithm, Collective, Dimension, Kind, Network, fit_launch, grid, simulate
from dovetail.sim.net import routes as routes_module

TORUS = grid("ring", 8, 16, bandwidth_gbps=50, latency_ns=500)
RCCL = json.loads((Path(__file__).parents[1] / "data/mi300x_rccl_all_reduce.json").read_text())
MI300X = grid(
    "fully_connected", 8, bandwidth_gbps=RCCL["link"]["bandwidth_gbps"]
)  # latency: part of what launch_ns stands for


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("symmetry", "limit_s"), [(True, 1.0), (False, 3.0)], ids=["reduced", "full"])
def test_128_node_torus_all_to_all_is_fast_and_at_the_bound(symmetry: bool, limit_s: float) -> None:
    size = 1 << 27
    begin = time.perf_counter()
    got = simulate(TORUS, "all_to_all", size, symmetry=symmetry)
    assert time.perf_counter() - begin < limit_s
    bound = size * 16 / (8 * 50) + 12 * 500
    assert got.bound_ns == round(bound)
    assert bound <= got.time_ns + 1 <= 1.01 * bound
    assert got.reduced == symmetry
    assert got.num_flows == (152 if symmetry else 152 * 128)


def test_dimension_order_pays_for_both_dimensions_unless_chunks_overlap() -> None:
    one, many = (simulate(TORUS, "all_to_all", 1 << 27, algorithm="dimension", chunks=k).time_ns for k in (1, 32))
    bound = simulate(TORUS, "all_to_all", 1 << 27).bound_ns
    assert one == pytest.approx(1.5 * bound, rel=0.01)
    assert bound < many < 1.03 * bound


def test_rccl_all_reduce_on_mi300x_within_5_percent_by_one_constant() -> None:
    rows = [(row["size_bytes"], row["time_us"] * 1e3) for row in RCCL["rows"] if row["size_bytes"] >= 16 << 20]
    assert len(rows) == 4
    fit = fit_launch(MI300X, "all_reduce", "direct", rows)
    assert fit.worst < 0.05
    for row in fit.rows:
        again = simulate(MI300X, "all_reduce", row.size_bytes, launch_ns=fit.launch_ns)
        assert again.time_ns == row.predicted_ns == pytest.approx(row.observed_ns, rel=0.05)


def test_fit_is_the_least_and_finds_what_was_put_in() -> None:
    made = [
        (s, simulate(TORUS, "all_gather", s, algorithm="ring", launch_ns=12_345).time_ns) for s in (10, 10_000, 9**7)
    ]
    fit = fit_launch(TORUS, "all_gather", "ring", made)
    assert (fit.launch_ns, fit.worst) == (12_345, 0)
    rows = [(1 << 20, 60_000.0), (1 << 24, 100_000.0)]

    def loss(launch_ns: float) -> float:
        times = [simulate(MI300X, "all_reduce", size, launch_ns=launch_ns).time_ns for size, _ in rows]
        return sum(np.log(t / o) ** 2 for t, (_, o) in zip(times, rows, strict=True))

    best = fit_launch(MI300X, "all_reduce", "direct", rows).launch_ns
    assert loss(best) < min(loss(best - 50), loss(best + 50))


def test_fit_of_a_library_faster_than_the_links_is_zero() -> None:
    fit = fit_launch(MI300X, "all_reduce", "direct", [(1 << 24, 1000.0)])
    assert fit.launch_ns == 0
    assert fit.worst > 80


def test_thousand_ranks() -> None:
    begin = time.perf_counter()
    torus = grid("ring", 32, 32, bandwidth_gbps=50, latency_ns=500)
    for how in Algorithm:
        got = simulate(torus, "all_reduce", 1 << 30, algorithm=how)
        assert got.time_ns == got.closed_form_ns
    assert time.perf_counter() - begin < 3


# --- the result ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetry", [True, False], ids=["reduced", "full"])
def test_result_names_every_link_and_its_use(symmetry: bool) -> None:
    network = Network(
        dimensions=(
            Dimension(kind=Kind.RING, ranks=4, bandwidth_gbps=2, latency_ns=10),
            Dimension(kind=Kind.SWITCH, ranks=3, bandwidth_gbps=3, latency_ns=10),
            Dimension(kind=Kind.FULLY_CONNECTED, ranks=2, bandwidth_gbps=5, latency_ns=10),
        )
    )
    got = simulate(network, "all_to_all", 2400, launch_ns=1000, symmetry=symmetry, timeline=True)
    used = dict(zip(got.link_names, got.link_bytes.tolist(), strict=True))
    assert len(used) == 24 * (2 + 2 + 1)
    assert used["dim0+ 3->0"] == used["dim0- 0->3"] == pytest.approx(2400 * 4 / 8)
    assert used["dim1 up 23"] == used["dim1 down 4"] == pytest.approx(2400 * 2 / 3)
    assert used["dim2 0->12"] == pytest.approx(2400 / 2)
    assert got.time_ns == got.closed_form_ns == got.bound_ns == 1650
    assert got.link_utilisation[0] == pytest.approx(600 / 650)
    assert got.timeline is not None
    assert sum(s.size_bytes for s in got.timeline if s.link == "dim2 0->12") == pytest.approx(1200, abs=3)
    assert min(s.start_ns for s in got.timeline) == 1000
    assert max(s.end_ns for s in got.timeline) == 1600
    assert list(got.timeline) == sorted(got.timeline, key=lambda s: s[1:3])


def test_timeline_of_a_ring_shows_each_step() -> None:
    ring = grid("ring", 3, bandwidth_gbps=1, latency_ns=5)
    got = simulate(ring, "all_reduce", 30, algorithm="ring", timeline=True)
    assert got.timeline is not None
    steps = [(s.start_ns, s.end_ns, s.size_bytes) for s in got.timeline if s.link == "dim0+ 1->2"]
    assert steps == [(0, 10, 10), (15, 25, 10), (30, 40, 10), (45, 55, 10)]
    assert not [s for s in got.timeline if s.link.startswith("dim0-")]
    assert simulate(ring, "all_reduce", 30).timeline is None


def test_a_slow_link_slows_the_collective() -> None:
    well = simulate(TORUS, "all_to_all", 1 << 27)
    ill = simulate(TORUS, "all_to_all", 1 << 27, link_gbps={"dim1+ 0->8": 25.0})
    assert ill.time_ns == pytest.approx(2 * well.time_ns, rel=0.01)
    assert not ill.reduced
    assert ill.closed_form_ns is None
    assert ill.link_names[int(ill.link_utilisation.argmax())] == "dim1+ 0->8"


def test_repeated_runs_are_equal() -> None:
    first, second = (simulate(TORUS, "all_reduce", 12345, algorithm="dimension", chunks=3) for _ in range(2))
    assert first.time_ns == second.time_ns
    assert (first.link_bytes == second.link_bytes).all()


@pytest.mark.parametrize("what", Collective)
@pytest.mark.parametrize("how", Algorithm)
def test_one_rank_and_no_bytes(what: Collective, how: Algorithm) -> None:
    alone = simulate(grid("ring", 1, 1, bandwidth_gbps=1), what, 1 << 20, algorithm=how, launch_ns=70)
    assert (alone.time_ns, alone.bound_ns, alone.closed_form_ns) == (70, 70, 70)
    assert len(alone.link_bytes) == 0
    nothing = simulate(grid("switch", 4, bandwidth_gbps=1, latency_ns=3), what, 0, algorithm=how)
    assert nothing.time_ns == nothing.closed_form_ns > 0


# --- bad input -------------------------------------------------------------------------------------------------------


def test_unknown_names_list_what_is_allowed() -> None:
    with pytest.raises(ValueError, match="algorithm must be one of ring, direct, dimension, not 'tree'"):
        simulate(TORUS, "all_reduce", 1, algorithm="tree")
    with pytest.raises(ValueError, match="collective must be one of all_reduce, all_gather, .*, not 'broadcast'"):
        simulate(TORUS, "broadcast", 1)
    with pytest.raises(ValueError, match="kind must be one of ring, switch, fully_connected, not 'mesh'"):
        grid("mesh", 4, bandwidth_gbps=1)
    with pytest.raises(ValueError, match=r"there is no link 'dim9'; the network has 512 links: dim0\+ 0->1, "):
        simulate(TORUS, "all_reduce", 1, link_gbps={"dim9": 1.0})


def test_impossible_numbers_are_repeated() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        grid("ring", 4, 0, bandwidth_gbps=1)
    with pytest.raises(ValueError, match="at least one dimension"):
        grid("ring", bandwidth_gbps=1)
    with pytest.raises(ValueError, match="bandwidth_gbps must be above zero, not 0"):
        grid("ring", 4, bandwidth_gbps=0)
    with pytest.raises(ValueError, match="latency_ns must be zero or more, not nan"):
        grid("ring", 4, bandwidth_gbps=1, latency_ns=float("nan"))
    with pytest.raises(TypeError):
        grid("ring", 4.5, bandwidth_gbps=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="size_bytes must be 0 or more, not -1"):
        simulate(TORUS, "all_reduce", -1)
    with pytest.raises(ValueError, match="chunks must be 1 or more, not 0"):
        simulate(TORUS, "all_reduce", 1, chunks=0)
    with pytest.raises(ValueError, match="launch_ns must be zero or more, not -5"):
        simulate(TORUS, "all_reduce", 1, launch_ns=-5)
    with pytest.raises(ValueError, match="bandwidth of link 'dim0. 0->1' must be above zero, not 0"):
        simulate(TORUS, "all_reduce", 1, link_gbps={"dim0+ 0->1": 0})


def test_fit_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="at least one observation"):
        fit_launch(MI300X, "all_reduce", "direct", [])
    with pytest.raises(ValueError, match="time_ns must be above zero, not 0 for 5 bytes"):
        fit_launch(MI300X, "all_reduce", "direct", [(5, 0)])


def test_more_hops_than_memory_is_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "MAX_HOPS", 1000)
    assert simulate(TORUS, "all_to_all", 1, algorithm="dimension").time_ns > 0
    with pytest.raises(
        NotSupported, match=r"hops of 19,456 flows on 128 ranks; the limit is 1,000\. Use a translation"
    ):
        simulate(TORUS, "all_to_all", 1, symmetry=False)
