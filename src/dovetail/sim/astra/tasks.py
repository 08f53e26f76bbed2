"""A trace as tasks: what each node takes and needs, and which may start.

Owns the meaning of a node for the workload layer; time and other NPUs are elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dovetail.errors import NotSupported
from dovetail.sim.astra.chakra import CommType, Node, NodeType, Trace
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.phases import Plan, plan
from dovetail.sim.astra.system import AstraSystem
from dovetail.sim.net.algorithms import Collective

_SUPPORTED = f"compute nodes, invalid nodes, and the collectives {', '.join(Collective)} and broadcast"


class Resource(Enum):
    """What a task occupies while it runs."""

    HOST = "host"
    COMPUTE = "compute"
    NETWORK = "network"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Task:
    """A node, placed by its id among the nodes of its trace; equal tasks cost the same on every NPU."""

    place: int
    resource: Resource
    duration_ns: int  #: of what is not a collective; -1: ends at once, and wakes nobody up
    plan: Plan | None  #: of a collective
    after: tuple[int, ...]  #: places of the tasks that come before


def tasks(trace: Trace, network: AstraNetwork, system: AstraSystem) -> tuple[Task, ...]:
    """The tasks of a trace in order of their ids. Raises ValueError or NotSupported that names the node."""
    if not trace.nodes:
        raise ValueError("no nodes; a trace needs at least one")
    nodes = sorted(trace.nodes, key=lambda node: node.id)
    places = {node.id: place for place, node in enumerate(nodes)}
    if len(places) != len(nodes):
        twice = next(a.id for a, b in itertools.pairwise(nodes) if a.id == b.id)
        raise ValueError(f"two nodes have the id {twice}; ids must differ")
    made = []
    for place, node in enumerate(nodes):
        before = sorted({*node.data_deps, *node.ctrl_deps})
        if missing := [number for number in before if number not in places]:
            raise ValueError(f"node {node.id} ({node.name}) depends on {missing[0]}, which is not in the trace")
        try:
            resource, duration_ns, collective = _cost(node, network, system)
        except (ValueError, NotSupported) as error:
            raise type(error)(f"node {node.id} ({node.name}): {error}") from None
        made.append(Task(place, resource, duration_ns, collective, tuple(places[number] for number in before)))
    if all(node.type == NodeType.INVALID for node in nodes):
        raise NotSupported("nothing but invalid nodes, which stops ASTRA-sim; give the trace something to do")
    _check_order(nodes, made)
    return tuple(made)


class Agenda:
    """Which tasks of one NPU wait, run and are done."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._before = [len(task.after) for task in tasks]
        self._after: list[list[int]] = [[] for _ in tasks]
        for task in tasks:
            for place in task.after:
                self._after[place].append(task.place)
        self._free = {task.place for task in tasks if not task.after}
        self._running: set[int] = set()
        self._occupied: set[Resource] = set()

    def issue(self) -> list[Task]:
        """Takes the tasks that start now, lowest id first; those that end at once end here."""
        out = []
        for place in sorted(self._free):
            task = self.tasks[place]
            if task.resource in self._occupied:
                continue
            self._free.remove(place)
            self._running.add(place)
            if task.resource is not Resource.NONE:
                self._occupied.add(task.resource)
            if task.plan is None and task.duration_ns < 0:
                self.end(task)
            else:
                out.append(task)
        return out

    def end(self, task: Task) -> None:
        """A task is done; what it held back may start at the next `issue`."""
        self._running.remove(task.place)
        self._occupied.discard(task.resource)
        for place in self._after[task.place]:
            self._before[place] -= 1
            if not self._before[place]:
                self._free.add(place)

    @property
    def busy(self) -> bool:
        """True while a task runs."""
        return bool(self._running)

    @property
    def ended(self) -> bool:
        """True when nothing runs and nothing may start."""
        return not self._free and not self._running

    def held(self) -> int:
        """The first place that still waits for others."""
        return next(place for place, count in enumerate(self._before) if count)

    def stuck(self) -> str:
        """Why a trace does not end although nothing runs."""
        return (
            f"{len(self._free)} nodes may start but nothing wakes the NPU up: they follow a node that ends at once, "
            "and ASTRA-sim never runs them; leave such nodes out"
        )


def _cost(node: Node, network: AstraNetwork, system: AstraSystem) -> tuple[Resource, int, Plan | None]:
    on_host = bool(_integer(node, "is_cpu_op", 0))
    if node.type == NodeType.METADATA:
        raise NotSupported("metadata nodes stop ASTRA-sim; leave them out")
    resource = Resource.HOST if on_host else Resource.COMPUTE if node.type == NodeType.COMP else Resource.NETWORK
    if node.type == NodeType.COMM_RECV and not on_host:
        resource = Resource.NONE
    if system.replay_only:
        return resource, _recorded_ns(node), None
    match node.type:
        case NodeType.COMP:
            return resource, _compute_ns(node, system) if system.roofline and not on_host else _recorded_ns(node), None
        case NodeType.INVALID:
            return resource, -1, None
        case NodeType.COMM_COLL:
            if on_host:
                raise NotSupported("a collective on the host (is_cpu_op) stops ASTRA-sim; set is_cpu_op to false")
            return _collective(node, network, system)
        case _:
            raise NotSupported(f"{node.type.name} nodes are not modelled; there are {_SUPPORTED}")


def _collective(node: Node, network: AstraNetwork, system: AstraSystem) -> tuple[Resource, int, Plan | None]:
    group = node.attribute("pg_name")
    if group is not None and group.value not in ("", "0"):
        raise NotSupported(f"communicator group {group.value!r}: only collectives among all NPUs are modelled")
    kind = _integer(node, "comm_type", None)
    if kind == CommType.BROADCAST:
        return Resource.NETWORK, _recorded_ns(node), None
    names = {int(CommType[collective.name]): collective for collective in Collective}
    if kind not in names:
        allowed = ", ".join(f"{number} {collective}" for number, collective in sorted(names.items()))
        raise NotSupported(f"comm_type {kind}: ASTRA-sim has {allowed} and {int(CommType.BROADCAST)} broadcast")
    dims = node.attribute("involved_dim")
    if dims is not None and (dims.kind != "bool_list" or not isinstance(dims.value, tuple)):
        raise ValueError(f"involved_dim must be a bool_list, not {dims.kind}")
    involved = None if dims is None else [bool(flag) for flag in dims.value]  # type: ignore[union-attr]
    return Resource.NETWORK, 0, plan(network, system, names[kind], _integer(node, "comm_size", None), involved)


def _recorded_ns(node: Node) -> int:
    """The recorded duration; 1 ns where there is none."""
    return node.duration_micros * 1000 or 1


def _compute_ns(node: Node, system: AstraSystem) -> int:
    """Roofline: bound by memory or by arithmetic."""
    num_ops, size = _integer(node, "num_ops", None), _integer(node, "tensor_size", None)
    if size == 0:
        return -1
    perf = min(system.local_mem_bw_gbps * 1_000_000_000 * (num_ops / size), system.peak_perf_tflops * 1_000_000_000_000)
    if not perf > 0:
        raise NotSupported("a roofline needs num_ops, local_mem_bw_gbps and peak_perf_tflops above zero")
    return int(num_ops / perf * 1e9)


def _integer(node: Node, name: str, default: int | None) -> int:
    attribute = node.attribute(name)
    if attribute is None:
        if default is None:
            raise ValueError(f"it needs the attribute {name}")
        return default
    if not isinstance(attribute.value, int) or attribute.value < 0:
        raise ValueError(f"{name} must be a whole number from 0 on, not {attribute.value!r} ({attribute.kind})")
    return int(attribute.value)


def _check_order(nodes: Sequence[Node], made: Sequence[Task]) -> None:
    """Raises ValueError if nodes wait for each other in a circle."""
    agenda = Agenda([Task(task.place, Resource.NONE, 0, None, task.after) for task in made])
    left = len(made)
    while ready := agenda.issue():
        left -= len(ready)
        for task in ready:
            agenda.end(task)
    if left:
        node = nodes[agenda.held()]
        raise ValueError(f"node {node.id} ({node.name}) waits for itself, or for a node that does; break the circle")
