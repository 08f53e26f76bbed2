"""ASTRA-sim's files go in and out unchanged, and a wrong one says where and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import NotSupported
from dovetail.sim.astra import AstraNetwork, AstraSystem, Collective, Optimization, Policy, Topology
from dovetail.sim.astra.system_file import INERT
from dovetail.sim.net.topology import Kind

pytest.importorskip("yaml")

POSITIVE = some.floats(min_value=1e-3, max_value=1e6, allow_nan=False)
WORD = some.sampled_from(["ring", "direct", "direct7", "oneRing", "oneDirect3", "halvingDoubling", "doubleBinaryTree"])
WORDS = some.lists(WORD, max_size=4).map(tuple)


@some.composite
def networks(draw: some.DrawFn) -> AstraNetwork:
    n = draw(some.integers(1, 4))

    def each(entry: some.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(some.lists(entry, min_size=n, max_size=n)))

    return AstraNetwork(
        topology=each(some.sampled_from(Topology)),
        npus=each(some.integers(1, 4096)),
        bandwidth_gib=each(POSITIVE),
        latency_ns=each(some.floats(min_value=0, max_value=1e9)),
    )


SYSTEMS = some.builds(
    AstraSystem,
    **dict.fromkeys(Collective, WORDS),
    splits=some.integers(1, 1000),
    active_chunks=some.integers(1, 100),
    endpoint_delay_ns=some.integers(1, 10**6),
    local_mem_bw_gbps=POSITIVE,
    optimization=some.sampled_from(Optimization),
    policy=some.sampled_from(Policy),
    roofline=some.booleans(),
    peak_perf_tflops=POSITIVE,
    replay_only=some.booleans(),
    inert=some.dictionaries(some.sampled_from(sorted(set(INERT) - {"model-shared-bus"})), some.integers(0, 9)),
)


@settings(max_examples=40, deadline=None)
@given(networks())
def test_network_survives_its_file(tmp_path_factory: pytest.TempPathFactory, network: AstraNetwork) -> None:
    path = tmp_path_factory.mktemp("astra") / "network.yml"
    network.to_file(path)
    assert AstraNetwork.from_file(path) == network


@settings(max_examples=40, deadline=None)
@given(SYSTEMS)
def test_system_survives_its_file(tmp_path_factory: pytest.TempPathFactory, system: AstraSystem) -> None:
    path = tmp_path_factory.mktemp("astra") / "system.json"
    system.to_file(path)
    assert AstraSystem.from_file(path) == system


def test_network_files_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "network.yml"
    path.write_text(
        "# two dimensions\ntopology: [ Switch, Ring ]\nnpus_count: [8, 4]\n"
        "bandwidth:\n- 400\n- 1e2\nlatency: [936.25, 0]  # ns\n"
    )
    network = AstraNetwork.from_file(path)
    assert network == AstraNetwork(
        topology=("Switch", "Ring"), npus=(8, 4), bandwidth_gib=(400.0, 100.0), latency_ns=(936.25, 0.0)
    )


NETWORK = {"topology": "[ Ring ]", "npus_count": "[ 4 ]", "bandwidth": "[ 50.0 ]", "latency": "[ 500.0 ]"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"npus_count": "[ 4, 4 ]"}, "network.yml: every field needs one entry per dimension"),
        ({"npus_count": "4"}, "network.yml, line 2: npus_count must be a list, such as .* not '4'"),
        ({"npus_count": "[ four ]"}, "network.yml, line 2: npus_count must be whole numbers from 1 on, not 'four'"),
        ({"topology": "[ Torus ]"}, "line 1: topology must be one of Ring, FullyConnected, Switch, not 'Torus'"),
        ({"bandwidth": "[ fast ]"}, "line 3: bandwidth must be numbers, not 'fast'"),
        ({"bandwidth": "[ [1] ]"}, "line 3: bandwidth must be a list of plain values"),
        ({"bandwidth": "[ 0 ]"}, "bandwidth must be above zero and finite, not 0.0"),
        ({"latency": "[ .nan ]"}, "line 4: latency must be numbers, not '.nan'"),
        ({"latency": None}, "latency missing; the keys are topology, npus_count, bandwidth, latency"),
        ({"jitter": "[ 1 ]"}, "line 5: no key 'jitter'; the keys are topology, npus_count, bandwidth, latency"),
        ({"latency": "[ 1"}, "network.yml: not YAML: "),
    ],
)
def test_wrong_network_file(tmp_path: Path, changes: dict[str, str | None], text: str) -> None:
    path = tmp_path / "network.yml"
    lines = {**NETWORK, **changes}
    path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None))
    with pytest.raises(ValueError, match=text):
        AstraNetwork.from_file(path)


@pytest.mark.parametrize("content", ["", "just text", "- 1\n- 2\n"])
def test_a_network_file_is_a_mapping(tmp_path: Path, content: str) -> None:
    path = tmp_path / "network.yml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"network\.yml: a mapping with the keys topology, npus_count"):
        AstraNetwork.from_file(path)


def test_a_key_given_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "network.yml"
    path.write_text("topology: [ Ring ]\ntopology: [ Switch ]\n")
    with pytest.raises(ValueError, match="line 2: topology is given twice"):
        AstraNetwork.from_file(path)
    path.write_text('{"endpoint-delay": 1, "endpoint-delay": 2}')
    with pytest.raises(ValueError, match="endpoint-delay is given twice"):
        AstraSystem.from_file(path)


SYSTEM = {
    "scheduling-policy": "LIFO",
    "endpoint-delay": 10,
    "active-chunks-per-dimension": 2,
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["direct"],
    "reduce-scatter-implementation": ["oneRing"],
    "all-to-all-implementation": ["direct4"],
    "collective-optimization": "baseline",
    "local-mem-bw": 1600,
    "boost-mode": 0,
    "roofline-enabled": 0,
    "peak-perf": 900,
}


def test_system_files_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    path.write_text(json.dumps(SYSTEM))
    assert AstraSystem.from_file(path) == AstraSystem(
        all_reduce=("ring",),
        all_gather=("direct",),
        reduce_scatter=("oneRing",),
        all_to_all=("direct4",),
        splits=4,
        active_chunks=2,
        optimization="baseline",
        peak_perf_tflops=900,
        inert={"boost-mode": 0},
    )


def test_what_a_system_file_leaves_out_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "system.json"
    path.write_text('{"preferred-dataset-splits": 1}')
    system = AstraSystem.from_file(path)
    assert (system.all_reduce, system.local_mem_bw_gbps, system.endpoint_delay_ns) == ((), 0.0, 10)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"preferred-dataset-split": 4},
            "preferred-dataset-split: no such key; there are .*and without effect boost-mode",
        ),
        ({"scheduling-policy": "RR"}, "scheduling-policy: it must be one of LIFO, FIFO, EXPLICIT, not 'RR'"),
        (
            {"all-reduce-implementation": "ring"},
            "all-reduce-implementation: it must be a list with a word per dimension",
        ),
        ({"all-reduce-implementation": ["rings"]}, "system.json: an implementation must be one of ring,"),
        ({"endpoint-delay": "10"}, "endpoint-delay: it must be a number, not '10'"),
        ({"endpoint-delay": 10.5}, "endpoint-delay: it must be a whole number, not 10.5"),
        ({"preferred-dataset-splits": 0}, "system.json: splits must be a whole number from 1 on, not 0"),
    ],
)
def test_wrong_system_file(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = tmp_path / "system.json"
    path.write_text(json.dumps({**SYSTEM, **changes}))
    with pytest.raises(ValueError, match=text):
        AstraSystem.from_file(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"L": }', r"system\.json, line 1, column 7: not JSON"),
        ("[]", "an object is expected, not list"),
        ("{}", "preferred-dataset-splits is missing"),
    ],
)
def test_a_system_file_is_an_object(tmp_path: Path, content: str, text: str) -> None:
    path = tmp_path / "system.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=text):
        AstraSystem.from_file(path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model-shared-bus": 1}, "model-shared-bus: a shared bus is not modelled; set it to 0"),
        ({"all-reduce-implementation-custom": ["a"]}, "custom: custom collectives are not modelled"),
    ],
)
def test_system_file_that_is_not_modelled(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    path = tmp_path / "system.json"
    path.write_text(json.dumps({**SYSTEM, **changes}))
    with pytest.raises(NotSupported, match=text):
        AstraSystem.from_file(path)


@settings(max_examples=40, deadline=None)
@given(networks())
def test_the_shared_network_is_the_same_network(network: AstraNetwork) -> None:
    shared = network.to_network()
    assert shared.ranks == network.num_npus
    back = AstraNetwork.from_network(shared)
    assert (back.topology, back.npus, back.latency_ns) == (network.topology, network.npus, network.latency_ns)
    assert back.bandwidth_gib == pytest.approx(network.bandwidth_gib, rel=1e-15)


def test_a_gib_is_more_than_a_gb() -> None:
    (dimension,) = (
        AstraNetwork(topology=("Switch",), npus=(8,), bandwidth_gib=(100.0,), latency_ns=(1.0,)).to_network().dimensions
    )
    assert (dimension.kind, dimension.ranks) == (Kind.SWITCH, 8)
    assert dimension.bandwidth_gbps == pytest.approx(107.3741824)
