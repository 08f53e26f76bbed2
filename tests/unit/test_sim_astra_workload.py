"""Execution traces keep every byte, and a workload takes as long as ASTRA-sim says."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import NotSupported
from dovetail.sim.astra import (
    AstraNetwork,
    AstraSystem,
    Attribute,
    Collective,
    Node,
    NodeType,
    Tensors,
    Trace,
    collective_time_ns,
    read_workload,
    workload_time_ns,
    write_collective_workload,
)
from dovetail.sim.astra.wire import read_varint, varint

from .test_sim_astra import network_of, system_of

DATA = Path(__file__).parents[1] / "data"
CHAKRA = json.loads((DATA / "astra_chakra.json").read_text())
WORKLOADS = json.loads((DATA / "astra_runs.json").read_text())["workloads"]
RING = AstraNetwork(topology=("Ring",), npus=(4,), bandwidth_gib=(50.0,), latency_ns=(500.0,))
SYSTEM = AstraSystem(splits=4)


# --- the file --------------------------------------------------------------------------------------------------------


def test_bytes_of_the_reference_implementation() -> None:
    data = base64.b64decode(CHAKRA["trace"])
    trace = Trace.from_bytes(data)
    assert trace.to_bytes() == data
    node, blank = trace.nodes
    assert blank == Node(id=0, type=NodeType.INVALID)
    assert (trace.version, len(trace.attributes)) == ("0.0.4", 3)
    assert (node.id, node.type, node.name) == ((1 << 64) - 1, NodeType.COMM_COLL, "all kinds")
    assert (node.ctrl_deps, node.data_deps) == ((0, 1, 1 << 40), (2,))
    assert (node.start_time_micros, node.duration_micros) == (12, 34)
    assert (node.inputs, node.outputs) == (Tensors("v", "s", "t"), Tensors())

    def plain(value: object) -> object:
        if isinstance(value, tuple):
            return [plain(item) for item in value]
        return value.hex() if isinstance(value, bytes) else value

    assert [[entry.name, entry.kind, plain(entry.value)] for entry in node.attributes] == CHAKRA["attributes"]


@pytest.mark.parametrize("row", WORKLOADS, ids=lambda row: f"{row['kind']}-{'x'.join(map(str, row['npus']))}")
def test_traces_of_the_reference_implementation(row: dict[str, Any]) -> None:
    for text in row["traces"]:
        assert Trace.from_bytes(base64.b64decode(text)).to_bytes() == base64.b64decode(text)


U64 = some.integers(0, (1 << 64) - 1)
I32 = some.integers(-(1 << 31), (1 << 31) - 1)
I64 = some.integers(-(1 << 63), (1 << 63) - 1)
FLOAT = some.floats(width=32, allow_nan=False)
SCALARS: dict[str, some.SearchStrategy[Any]] = {
    "double": some.floats(allow_nan=False),
    "float": FLOAT,
    **dict.fromkeys(("int32", "sint32", "sfixed32"), I32),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), I64),
    **dict.fromkeys(("uint32", "fixed32"), some.integers(0, (1 << 32) - 1)),
    **dict.fromkeys(("uint64", "fixed64"), U64),
    "bool": some.booleans(),
    "string": some.text(max_size=9),
    "bytes": some.binary(max_size=9),
}


@some.composite
def attributes(draw: some.DrawFn) -> Attribute:
    kind = draw(some.sampled_from(sorted(SCALARS)))
    name, doc = draw(some.text(max_size=5)), draw(some.text(max_size=3))
    if draw(some.booleans()):
        return Attribute(name, f"{kind}_list", tuple(draw(some.lists(SCALARS[kind], max_size=3))), doc)
    return Attribute(name, f"{kind}_val", draw(SCALARS[kind]), doc)


TENSORS = some.none() | some.builds(Tensors, *(some.text(max_size=4),) * 3)
NODES = some.builds(
    Node,
    id=U64,
    type=some.sampled_from(NodeType),
    name=some.text(max_size=5),
    ctrl_deps=some.lists(U64, max_size=3).map(tuple),
    data_deps=some.lists(U64, max_size=3).map(tuple),
    start_time_micros=U64,
    duration_micros=U64,
    inputs=TENSORS,
    outputs=TENSORS,
    attributes=some.lists(attributes(), max_size=3).map(tuple),
)
TRACES = some.builds(
    Trace,
    nodes=some.lists(NODES, max_size=3).map(tuple),
    version=some.text(max_size=5),
    attributes=some.lists(attributes(), max_size=2).map(tuple),
)


@settings(max_examples=40, deadline=None)
@given(TRACES)
def test_trace_survives_its_bytes(trace: Trace) -> None:
    assert Trace.from_bytes(trace.to_bytes()) == trace


@settings(max_examples=80, deadline=None)
@given(TRACES, some.data())
def test_damaged_bytes_are_a_value_error_or_a_trace(trace: Trace, data: some.DataObject) -> None:
    damaged = bytearray(trace.to_bytes())
    for _ in range(data.draw(some.integers(1, 3))):
        place = data.draw(some.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(some.integers(0, 255))
    damaged = damaged[: data.draw(some.integers(0, len(damaged)))]
    with contextlib.suppress(ValueError):  # any other error fails the test
        Trace.from_bytes(bytes(damaged))


@given(U64)
def test_numbers_survive(value: int) -> None:
    assert read_varint(b"\xff" + varint(value), 1) == (value, 1 + len(varint(value)))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", r"w\.0\.et: an empty file; a trace begins with its GlobalMetadata"),
        (b"\x05ab", r"w\.0\.et: byte 0: a message of 5 bytes is announced, 2 are there"),
        (b"\x00\xff", r"w\.0\.et: byte 1: the data ends inside a number, where the length of a message is due"),
        (b"\x00\x02\x58\x01", "node 0 at byte 2: byte 0: no field 11; the fields are 1 id, 2 name"),
        (b"\x00\x02\x18\x09", "node 0 at byte 2: no type 9; the types are 0 INVALID, 1 METADATA"),
        (b"\x00\x02\x0a\x00", "node 0 at byte 2: byte 0: id: wire type 2 does not fit"),
        (b"\x00\x03\x12\x05a", "node 0 at byte 2: byte 0: name: 5 bytes announced, 1 there"),
        (b"\x00\x03\x12\x01\xff", "node 0 at byte 2: byte 0: name: not UTF-8 text"),
        (b"\x02\x18\x01", "GlobalMetadata at byte 1: byte 0: no field 3"),
    ],
)
def test_wrong_trace_file(tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=text):
        Trace.from_file(path)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="id must be a uint64, not -1"):
        Trace(nodes=(Node(id=-1, type=NodeType.COMP),)).to_bytes()
    with pytest.raises(ValueError, match="no kind 'int_val'; one of bool_list, bool_val"):
        Attribute("a", "int_val", 1)
    with pytest.raises(ValueError, match="attribute a has a value but no kind"):
        Attribute("a", None, 1)
    with pytest.raises(ValueError, match="int32_val must be a int32, not 4294967296"):
        Trace(nodes=(), attributes=(Attribute("a", "int32_val", 1 << 32),)).to_bytes()


def test_one_collective_to_take_to_astra_sim(tmp_path: Path) -> None:
    prefix = write_collective_workload(tmp_path / "new", RING, "all_reduce", 1 << 20)
    assert sorted(path.name for path in prefix.parent.iterdir()) == [f"all_reduce.{npu}.et" for npu in range(4)]
    traces = read_workload(prefix, 4)
    expected = collective_time_ns(RING, SYSTEM, "all_reduce", 1 << 20)
    assert workload_time_ns(RING, SYSTEM, traces) == [expected] * 4


# --- the time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", WORKLOADS, ids=lambda row: f"{row['kind']}-{'x'.join(map(str, row['npus']))}")
def test_recorded_workload(row: dict[str, Any]) -> None:
    network = network_of(row)
    traces = [Trace.from_bytes(base64.b64decode(text)) for text in row["traces"]]
    expected = row["time_ns"] if isinstance(row["time_ns"], list) else [row["time_ns"]] * network.num_npus
    assert workload_time_ns(network, system_of(row), traces if len(traces) > 1 else traces[0]) == expected


def run(*nodes: Node, system: AstraSystem = SYSTEM) -> int:
    (time_ns,) = set(workload_time_ns(RING, system, Trace(nodes=nodes)))
    return time_ns


ALL_REDUCE_NS = 43000  # 1 MiB, a row of astra_golden.json


def test_computing_and_communicating_overlap_unless_one_waits_for_the_other() -> None:
    reduce_, compute = Node.collective(1, "all_reduce", 1 << 20), Node.compute(2, 50)
    assert run(reduce_) == ALL_REDUCE_NS
    assert run(reduce_, compute) == 50_000
    assert run(reduce_, dataclasses.replace(compute, data_deps=(1,))) == ALL_REDUCE_NS + 50_000
    assert run(reduce_, dataclasses.replace(compute, ctrl_deps=(1,))) == ALL_REDUCE_NS + 50_000


def test_an_npu_does_one_thing_of_a_kind_at_a_time() -> None:
    assert run(Node.compute(1, 5), Node.compute(2, 7)) == 12_000
    pair = [Node.collective(k, "all_reduce", 1 << 20) for k in (1, 2)]
    assert run(*pair) == 2 * ALL_REDUCE_NS
    on_host = dataclasses.replace(Node.compute(3, 9), attributes=(Attribute("is_cpu_op", "bool_val", True),))
    assert run(Node.compute(1, 5), on_host) == 9_000


def test_the_lowest_id_goes_first() -> None:
    long, short = Node.compute(1, 50), Node.compute(2, 1)
    follower = Node.collective(9, "all_reduce", 1 << 20, after=(2,))
    assert run(long, short, follower) == 51_000 + ALL_REDUCE_NS
    swapped = [dataclasses.replace(long, id=2), dataclasses.replace(short, id=1)]
    assert run(*swapped, dataclasses.replace(follower, data_deps=(1,))) == 51_000


def test_a_node_without_duration_takes_a_nanosecond() -> None:
    assert run(Node.compute(1, 0)) == 1


def test_replay_takes_the_recorded_durations() -> None:
    recorded = dataclasses.replace(Node.collective(2, "all_reduce", 1 << 20, after=(1,)), duration_micros=4)
    assert run(Node.compute(1, 5), recorded, system=dataclasses.replace(SYSTEM, replay_only=True)) == 9_000


def test_roofline() -> None:
    system = dataclasses.replace(SYSTEM, roofline=True, peak_perf_tflops=900)
    ops = Attribute("num_ops", "int64_val", 1_000_000_000)

    def node(size: int) -> Node:
        return dataclasses.replace(Node.compute(1, 5), attributes=(ops, Attribute("tensor_size", "uint64_val", size)))

    assert run(node(1_000_000), system=system) == 1111  # bound by arithmetic
    assert run(node(16_000_000), system=system) == 10_000  # bound by memory


def test_ranks_that_differ_wait_for_the_slowest() -> None:
    traces = [
        Trace(nodes=(Node.compute(0, 10 * (npu + 1)), Node.collective(1, "all_reduce", 1 << 20, after=(0,))))
        for npu in range(4)
    ]
    ends = workload_time_ns(RING, SYSTEM, traces)
    assert min(ends) > 40_000
    assert len(set(ends)) > 1


def test_a_tick_in_which_a_node_and_a_collective_end_is_played_on_every_npu() -> None:
    """Nodes 1 and 2 end at 2 us, both put there at 1 us; 2 goes first, so 3 is ready before the network is free.

    ASTRA-sim gives the same; with node 1 first, node 5 would take the network and all would end at 54 us.
    """
    nodes = (
        Node.compute(0, 1),
        Node.collective(1, "all_gather", 4),
        Node.compute(2, 1, after=(0,)),
        Node.collective(3, "all_gather", 4, after=(2,)),
        Node.collective(5, "all_gather", 4),
        Node.compute(6, 50, after=(5,)),
    )
    network = dataclasses.replace(RING, npus=(2,), latency_ns=(0.0,))
    system = AstraSystem(endpoint_delay_ns=1000)
    assert workload_time_ns(network, system, Trace(nodes=nodes)) == [56_000, 56_000]


def refused(*nodes: Node) -> str:
    with pytest.raises((ValueError, NotSupported)) as caught:
        workload_time_ns(RING, SYSTEM, Trace(nodes=nodes))
    return str(caught.value)


def with_attributes(node: Node, *more: Attribute, drop: Sequence[str] = ()) -> Node:
    kept = tuple(attribute for attribute in node.attributes if attribute.name not in drop)
    return dataclasses.replace(node, attributes=(*kept, *more))


COLLECTIVE = Node.collective(1, "all_reduce", 99, name="step")


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "trace of NPU 0: no nodes"),
        ([Node(id=1, type=NodeType.COMM_SEND)], "COMM_SEND nodes are not modelled; there are compute nodes"),
        ([Node(id=1, type=NodeType.MEM_LOAD)], "MEM_LOAD nodes are not modelled"),
        ([Node(id=1, type=NodeType.METADATA)], "metadata nodes stop ASTRA-sim"),
        ([Node(id=1, type=NodeType.INVALID)], "nothing but invalid nodes"),
        ([Node(id=1, type=NodeType.INVALID), Node.compute(2, 1, after=(1,))], "nothing wakes the NPU up"),
        ([COLLECTIVE, Node.compute(2, 1, after=(9,))], "node 2 (comp_2) depends on 9, which is not in the trace"),
        ([COLLECTIVE, COLLECTIVE], "two nodes have the id 1"),
        (
            [COLLECTIVE, Node.compute(2, 1, after=(3,)), Node.compute(3, 1, after=(2,))],
            "node 2 (comp_2) waits for itself",
        ),
        ([with_attributes(COLLECTIVE, drop=["comm_size"])], "node 1 (step): it needs the attribute comm_size"),
        (
            [with_attributes(COLLECTIVE, Attribute("comm_size", "double_val", 1.5), drop=["comm_size"])],
            "comm_size must be a whole number from 0 on, not 1.5 (double_val)",
        ),
        (
            [with_attributes(COLLECTIVE, Attribute("comm_type", "int64_val", 1), drop=["comm_type"])],
            "comm_type 1: ASTRA-sim has 0 all_reduce, 2 all_gather, 6 all_to_all, 7 reduce_scatter and 5 broadcast",
        ),
        ([with_attributes(COLLECTIVE, Attribute("pg_name", "string_val", "7"))], "communicator group '7'"),
        (
            [with_attributes(COLLECTIVE, Attribute("involved_dim", "bool_val", True))],
            "involved_dim must be a bool_list",
        ),
        (
            [with_attributes(COLLECTIVE, Attribute("is_cpu_op", "bool_val", True), drop=["is_cpu_op"])],
            "a collective on the host (is_cpu_op) stops ASTRA-sim",
        ),
    ],
)
def test_refused_traces_name_the_node(nodes: list[Node], text: str) -> None:
    assert text in refused(*nodes)


def test_a_trace_per_npu() -> None:
    with pytest.raises(ValueError, match="4 NPUs need a trace each, 3 were given"):
        workload_time_ns(RING, SYSTEM, [Trace(nodes=(COLLECTIVE,))] * 3)


def test_involved_dimensions_and_default_group() -> None:
    grid = AstraNetwork(topology=("Ring",) * 2, npus=(2, 4), bandwidth_gib=(50.0,) * 2, latency_ns=(500.0,) * 2)
    system = AstraSystem.uniform("ring", dimensions=2)
    dims = Attribute("involved_dim", "bool_list", (False, True))
    node = with_attributes(COLLECTIVE, dims, Attribute("pg_name", "string_val", "0"))
    expected = collective_time_ns(grid, system, Collective.ALL_REDUCE, 99, involved=[False, True])
    assert set(workload_time_ns(grid, system, Trace(nodes=(node,)))) == {expected}
