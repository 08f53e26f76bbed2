"""Where the time of one copy goes on the software engines: control, schedule, copy, sync, as A splits it.

control: the caller builds and enqueues the command. schedule: until the engine takes it up. copy: the move itself.
sync: until the caller knows that it is done.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.world import Group
from dovetail.plan import passes
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.plan import Plan, Role

_PAUSE_S = 0.0002


@dataclass(frozen=True, slots=True)
class Phases:
    """One copy, in microseconds."""

    control_us: float
    schedule_us: float
    copy_us: float
    sync_us: float


def stamped_copy(size_bytes: int) -> Plan:
    """One copy between two buffers of a rank, with the time taken before and after."""
    a = Assembly("stamped copy", 1)
    src, dst = a.buffer("input", Role.INPUT, size_bytes), a.buffer("output", Role.OUTPUT, size_bytes)
    move = st.copy((0, src, 0), (0, dst, 0), size_bytes)
    a.queue(0, 0, st.stamp(0), move, st.stamp(1))
    a.goal(move)
    return passes.entry(a.plan())


def measure(group: Group, size_bytes: int, iterations: int) -> list[Phases]:
    """Runs the copy on an idle runner thread, `iterations` times. `group` has one rank."""
    import torch

    src = group.world.empty((size_bytes,), torch.uint8).random_()
    dst = group.world.empty((size_bytes,), torch.uint8)
    runner = PlanRunner(group, stamped_copy(size_bytes), check=False)
    found = []
    for _ in range(iterations):
        time.sleep(_PAUSE_S)  # the runner goes idle, as an engine is before its doorbell rings
        t0 = time.monotonic_ns()
        ticket = runner.submit({"input": src, "output": dst})
        while not ticket.is_over():  # watch the completion word; waiting would take the runner's place
            pass
        t4 = time.monotonic_ns()
        ticket.wait()
        t1, (t2, t3) = ticket.submitted_ns, ticket.stamps_ns
        times = [t0, t1, t2, t3, t4]
        found.append(Phases(*((b - a) / 1e3 for a, b in itertools.pairwise(times))))
    if not torch.equal(src, dst):
        raise AssertionError("the copy arrived changed")
    return found
