"""Closed forms of A's variants, where they exist: a fully connected machine with one submitting thread.

They are what the replay comes down to when no link is shared; a test holds the two equal, to the nanosecond. Use the
replay for anything else.
"""

from __future__ import annotations

import math

from dovetail.plan.build.all_to_all import swap_partners
from dovetail.sim.collectives import Case
from dovetail.sim.machine import Machine, MachineError, Threads, Wiring


def time_ns(machine: Machine, case: Case) -> int:
    """The time of one of A's variants: pcpy, bcst, swap or b2b, prelaunched or not.

    Raises:
        MachineError: the machine is not of this kind, or has fewer engines than the variant wants.
        ValueError: no closed form for this case.
    """
    if machine.host.threads is not Threads.ONE or machine.link.wiring is not Wiring.FULLY_CONNECTED:
        raise MachineError(f"machine {machine.name}: closed forms are for one submitting thread and a link per pair")
    machine.require(case.ranks, f"{case.collective} {case.name}")
    if case.collective not in ("all_gather", "all_to_all") or case.complete:
        raise ValueError(f"there is no closed form of {case.collective}{' complete' if case.complete else ''}")
    durations = _durations(machine, case)
    if max(map(len, durations), default=0) > machine.engine.count:
        raise MachineError(f"machine {machine.name} has {machine.engine.count} engines, {case.name} wants more")
    return _prelaunched(machine, durations) if case.prelaunch else _submitted(machine, case, durations)


def _durations(machine: Machine, case: Case) -> list[list[int]]:
    """For each rank, from the start to the landing of what each of its rings moves."""
    n, peers = case.total_bytes // case.ranks, case.ranks - 1
    engine, link = machine.engine, machine.link.bandwidth_gbps
    one = math.ceil(n / min(engine.copy_gbps, link))
    two = math.ceil(n / min(engine.paired_gbps / 2, link))
    latency = round(engine.start_ns) + round(machine.link.latency_ns)
    match case.collective, case.variant:
        case _, "pcpy":
            mine = [one] * peers
        case _, "b2b":
            mine = [max(one, round(engine.command_ns)) * (peers - 1) + one]
        case "all_gather", "bcst":
            mine = [two] * (peers // 2) + [one] * (peers % 2)
        case "all_to_all", "swap":
            partners = [len(swap_partners(r, case.ranks)) for r in range(case.ranks)]
            return [[two + latency] * count for count in partners]
        case _:
            raise ValueError(f"there is no closed form of {case.collective} {case.variant}")
    return [[time + latency for time in mine]] * case.ranks


def _submitted(machine: Machine, case: Case, durations: list[list[int]]) -> int:
    host, engine = machine.host, machine.engine
    commands = case.ranks - 1 if case.variant == "b2b" else 1
    rings = sum(map(len, durations))
    cost = round(host.submit_ns + (commands - 1) * host.command_ns + (host.switch_ns if rings > 1 else 0))
    after = round(engine.schedule_ns) + round(engine.signal_ns)
    flat = [d for mine in durations for d in mine]
    seen = sorted((k + 1) * cost + after + d for k, d in enumerate(flat))
    return _noticed(machine, rings * cost, seen)


def _prelaunched(machine: Machine, durations: list[list[int]]) -> int:
    trigger = round(machine.host.trigger_ns)
    after = round(machine.engine.poll_ns) + round(machine.engine.signal_ns)
    seen = sorted((r + 1) * trigger + after + d for r, mine in enumerate(durations) for d in mine)
    return _noticed(machine, len(durations) * trigger, seen)


def _noticed(machine: Machine, begin: int, seen: list[int]) -> int:
    """One thread notices completions one after the other."""
    at = begin
    for arrived in seen:
        at = max(at, arrived) + round(machine.host.observe_ns)
    return at
