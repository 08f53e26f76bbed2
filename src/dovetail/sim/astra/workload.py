"""Whole workloads: a trace per NPU, computing and communicating, as ASTRA-sim's workload layer runs them.

A node starts when the nodes it depends on have ended (data and control alike) and its resource is free: an NPU
computes one node at a time, communicates one at a time, and runs one node on its host at a time. Of several nodes that
may start, the lowest id goes first. Computing and communicating do not slow each other down.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

from dovetail.errors import NotSupported
from dovetail.sim.astra.chakra import Node, Trace
from dovetail.sim.astra.model import alike, as_collective, check_all_ended, check_messages
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.npus import Npu, World
from dovetail.sim.astra.phases import Plan
from dovetail.sim.astra.system import AstraSystem
from dovetail.sim.astra.tasks import Agenda, Task, tasks
from dovetail.sim.astra.timing import PhaseTime, Undecided
from dovetail.sim.net.algorithms import Collective


def workload_time_ns(network: AstraNetwork, system: AstraSystem, traces: Trace | Sequence[Trace]) -> list[int]:
    """When each NPU has ended its trace, in ns, as ASTRA-sim reports it.

    Args:
        network: dimensions with their links.
        system: chunking, algorithms and endpoint.
        traces: one per NPU, or one that all run.

    Raises:
        NotSupported: a node that is not modelled (sends, remote memory, communicator groups), or a workload that
            ASTRA-sim does not end either.
        ValueError: a trace that is wrong.
    """
    if isinstance(traces, Trace):
        traces = [traces] * network.num_npus
    if len(traces) != network.num_npus:
        raise ValueError(f"{network.num_npus} NPUs need a trace each, {len(traces)} were given")
    lists: dict[int, tuple[Task, ...]] = {}
    for npu, trace in enumerate(traces):
        if id(trace) not in lists:
            try:
                lists[id(trace)] = tasks(trace, network, system)
            except (ValueError, NotSupported) as error:
                raise type(error)(f"trace of NPU {npu}: {error}") from None
    ranks = [lists[id(trace)] for trace in traces]
    if all(rank == ranks[0] for rank in ranks[1:]):
        try:
            return [_one_npu(network, system, Agenda(ranks[0]))] * network.num_npus
        except Undecided:
            pass
    return _every_npu(network, system, [Agenda(rank) for rank in ranks])


def _one_npu(network: AstraNetwork, system: AstraSystem, agenda: Agenda) -> int:
    """One NPU stands for all, since all do the same: a collective starts everywhere at once."""
    times: dict[Plan, PhaseTime] = {}
    events: list[tuple[int, int, int, Task]] = []  # tick, tick when put there, number, what ends
    now = number = 0
    while True:
        for task in agenda.issue():
            number += 1
            if task.plan is None:
                heapq.heappush(events, (now + task.duration_ns, now, number, task))
                continue
            if task.plan not in times:
                times[task.plan] = alike(network, system, task.plan)
            time = times[task.plan]
            heapq.heappush(events, (now + time.duration_ns, now + time.duration_ns - time.lead_ns, number, task))
        if agenda.ended:
            return now
        if not events:
            raise NotSupported(agenda.stuck())
        now, put_at, _, task = heapq.heappop(events)
        if events and events[0][:2] == (now, put_at) and (task.plan is None) != (events[0][3].plan is None):
            raise Undecided(f"a node and a collective end at {now} ns")
        agenda.end(task)


def _every_npu(network: AstraNetwork, system: AstraSystem, agendas: Sequence[Agenda]) -> list[int]:
    world = World(network, system)
    check_messages(world, *(task.plan for task in agendas[0].tasks if task.plan is not None))
    ends = [-1] * network.num_npus

    def go_on(npu: Npu, agenda: Agenda) -> None:
        for task in agenda.issue():
            begin(npu, agenda, task)
        if agenda.ended:
            ends[npu.number] = world.now

    def begin(npu: Npu, agenda: Agenda, task: Task) -> None:
        def ended() -> None:
            agenda.end(task)
            go_on(npu, agenda)

        if task.plan is None:
            npu.put(task.duration_ns, ended)
        else:
            npu.start(task.plan, ended)

    for npu, agenda in zip(world.npus, agendas, strict=True):
        go_on(npu, agenda)
    world.run()
    stuck = [agenda for agenda, end in zip(agendas, ends, strict=True) if end < 0]
    if stuck and not any(agenda.busy for agenda in stuck):
        raise NotSupported(stuck[0].stuck())
    check_all_ended(ends)
    return ends


def read_workload(prefix: str | Path, num_npus: int) -> list[Trace]:
    """Reads `PREFIX.0.et`, `PREFIX.1.et`, ...: what ASTRA-sim's --workload-configuration names."""
    return [Trace.from_file(f"{prefix}.{npu}.et") for npu in range(num_npus)]


def write_workload(prefix: str | Path, traces: Sequence[Trace]) -> None:
    """Writes one file per NPU, and the folder if it is not there."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    for npu, trace in enumerate(traces):
        trace.to_file(f"{prefix}.{npu}.et")


def write_collective_workload(
    folder: str | Path, network: AstraNetwork, collective: Collective | str, size_bytes: int
) -> Path:
    """Writes a trace per NPU with this one collective; returns the prefix to pass as --workload-configuration."""
    kind = as_collective(collective)
    prefix = Path(folder) / str(kind)
    trace = Trace(nodes=(Node.collective(0, kind, size_bytes),))
    write_workload(prefix, [trace] * network.num_npus)
    return prefix
