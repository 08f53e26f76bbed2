"""What if the hardware or the runtime were different: how much of the gap to the link limit each change closes.

A's arguments, one change at a time and all together. A change is a machine with other constants, or prelaunched plans;
the best variant is chosen anew for each. What each stands for is written beside it: some are choices of this model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.sim.collectives import Case, program_of, variants
from dovetail.sim.machine import Machine, MachineError, Threads, Wiring
from dovetail.sim.replay import native, price

_DOORBELL = 0.1
_ENGINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference to the machine as it is."""

    name: str
    what: str
    machine: Callable[[Machine], Machine]
    prelaunch: bool = False


def _same(machine: Machine) -> Machine:
    return machine


def _doorbells(machine: Machine) -> Machine:
    return machine.replace({k: machine.value(k) * _DOORBELL for k in ("host.submit_ns", "host.switch_ns")})


def _ways(machine: Machine) -> Machine:
    return machine.replace({"engine.broadcast_ways": max(machine.ranks - 1, 2)})


def _engines(machine: Machine) -> Machine:
    return machine.replace({k: machine.value(k) * _ENGINES for k in ("engine.copy_gbps", "engine.paired_gbps")})


def _triggered(machine: Machine) -> Machine:
    return machine.replace({"engine.poll_ns": 0, "host.trigger_ns": 0, "host.observe_ns": 0})


def _submitters(machine: Machine) -> Machine:
    return dataclasses.replace(machine, host=dataclasses.replace(machine.host, threads=Threads.RANK))


def _all(machine: Machine) -> Machine:
    for change in CHANGES[1:-1]:
        machine = change.machine(machine)
    return machine


AS_IS = "as it is"
CHANGES: tuple[Change, ...] = (
    Change(name=AS_IS, what="the machine as its file says, plans submitted when they are called", machine=_same),
    Change(name="cheaper doorbells", what="a submission costs the host a tenth", machine=_doorbells),
    Change(name="prelaunch", what="plans are queued beforehand, one write starts them", machine=_same, prelaunch=True),
    Change(name="N-way broadcast", what="one command copies a source to all peers", machine=_ways),
    Change(name="more engines", what="two engines share every command: twice the bytes per second", machine=_engines),
    Change(
        name="hardware-triggered",
        what="queued commands start and completions are noticed without polling and without the host",
        machine=_triggered,
        prelaunch=True,
    ),
    Change(name="parallel submitter", what="a host thread for each rank", machine=_submitters),
    Change(name="all together", what="all of the above", machine=_all, prelaunch=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One change at one size. Simulated."""

    collective: str
    total_bytes: int
    change: str
    variant: str  #: the best one under this change
    time_us: float
    limit_us: float  #: what the links alone need
    closed: float  #: share of the gap between the machine as it is and the link limit


def whatif(machine: Machine, collective: str, sizes: Sequence[int], ranks: int | None = None) -> list[Row]:
    """Every change at every size.

    Raises:
        MachineError: the machine has no links, so there is no limit to compare with, or too few ranks.
    """
    if machine.link.wiring is Wiring.SHARED_MEMORY:
        raise MachineError(f"machine {machine.name} has no links: there is no link limit to compare with")
    machine.require(ranks or machine.ranks, f"this {collective}")
    rows = []
    for size in sizes:
        before: float | None = None
        for change in CHANGES:
            name, time_us, limit_us = _best(change, machine, collective, size, ranks or machine.ranks)
            before = time_us if before is None else before
            gap = before - limit_us
            closed = (before - time_us) / gap if gap > 0 else 0.0
            rows.append(
                Row(
                    collective=collective,
                    total_bytes=size,
                    change=change.name,
                    variant=name,
                    time_us=time_us,
                    limit_us=limit_us,
                    closed=closed,
                )
            )
    return rows


def _best(change: Change, machine: Machine, collective: str, size: int, ranks: int) -> tuple[str, float, float]:
    """The fastest variant; with or without the change, since nobody has to use it."""
    found = []
    offers = ((change.machine(machine), change.prelaunch), (machine, change.prelaunch), (machine, False))
    for offered, prelaunch in offers:
        for variant in variants(collective):
            case = Case(collective=collective, variant=variant, total_bytes=size, ranks=ranks, prelaunch=prelaunch)
            result = price(program_of(case, native(offered)), offered)
            found.append((result.time_us, variant, result.limit_ns / 1000))
    time_us, variant, limit_us = min(found)
    return variant, time_us, limit_us
