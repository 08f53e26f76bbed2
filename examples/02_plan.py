"""A plan of one's own: made by hand, proved, broken, and run. Run: python examples/02_plan.py"""

from __future__ import annotations

import dataclasses

import torch

import dovetail
from dovetail.errors import PlanError
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.plan import Plan, Role, passes
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.check import check


def shift(world: int, size_bytes: int) -> Plan:
    """Every rank sends its input to the next one."""
    a = Assembly("shift", world)
    inp = a.buffer("input", Role.INPUT, size_bytes)
    out = a.buffer("output", Role.OUTPUT, size_bytes)
    done = [a.signal(f"done {r}", r) for r in range(world)]
    for r in range(world):
        right = (r + 1) % world
        copy = st.copy((r, inp, 0), (right, out, 0), size_bytes)
        a.goal(copy)  # what must hold at the end
        a.queue(r, 0, copy, st.signal(done[right]), st.wait(done[r]))
    return passes.entry(a.plan())


def broken(plan: Plan) -> Plan:
    """The same without the last wait of rank 0: it would return before its output is there."""
    first = plan.queues[0]
    return plan.replace(queues=(dataclasses.replace(first, steps=first.steps[:-1]), *plan.queues[1:]))


def work() -> float:
    """Runs the plan on this rank."""
    group = dovetail.init()
    mine, theirs = dovetail.empty(256).fill_(group.rank), dovetail.zeros(256)
    PlanRunner(group, shift(group.size, 1024)).submit({"input": mine, "output": theirs}).wait()
    assert bool((theirs == (group.rank - 1) % group.size).all())
    return torch.mean(theirs).item()


def main() -> None:
    print(check(shift(3, 1024)))
    try:
        check(broken(shift(3, 1024)))
    except PlanError as error:
        print(f"rejected: {error}")
    print("received:", dovetail.launch(work, ranks=3))


if __name__ == "__main__":
    main()
