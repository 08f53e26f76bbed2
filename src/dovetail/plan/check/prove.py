"""`check`: takes a plan through all the proofs, cheapest first."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from dovetail.plan.check.bind import Pieces
from dovetail.plan.check.bounds import check_goal, check_reach, check_rows
from dovetail.plan.check.chains import flatten
from dovetail.plan.check.flow import goal_flow, step_flow
from dovetail.plan.check.memory import Memories, survey
from dovetail.plan.check.order import order
from dovetail.plan.check.posted import check_posted
from dovetail.plan.check.races import check_races
from dovetail.plan.check.resets import check_resets
from dovetail.plan.check.scene import stage
from dovetail.plan.check.signals import releases
from dovetail.plan.check.symbolic import check_result
from dovetail.plan.check.text import Text
from dovetail.plan.plan import Plan, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was proved, and what it took."""

    num_steps: int  #: of one run
    num_accesses: int  #: operands of these steps, and accesses from outside
    runs: int
    elapsed_ms: float


def check(plan: Plan, *, runs: int = 2, in_flight: int = 1, lanes: int | None = None) -> Proof:
    """Proves that a plan has no race, no deadlock and no use of an unwritten byte, and that its goal holds.

    Args:
        plan: the plan; one without the `entry` pass is proved with `runs=1`.
        runs: how often it runs in a row, the caller reading its outputs and refilling its inputs in between. Two
            prove any number (`order` says why). One proves a run by itself: all ranks have entered before any step.
        in_flight: how many runs a rank may have started and not ended, each with user buffers of its own.
        lanes: how many sets of signals, scratch memory and staging rings these runs share, `in_flight` by default; a
            run takes a lane whose last run has ended on its rank.

    Raises:
        PlanError: names the steps at fault, the bytes they touch and the runs they belong to.
    """
    begin = time.perf_counter()
    for name, value in (("runs", runs), ("in_flight", in_flight), ("lanes", in_flight if lanes is None else lanes)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    chains, memories = flatten(plan), survey(plan)
    text = Text(plan, chains, memories)
    if lanes is not None and lanes < in_flight:
        _check_shared(plan, memories, text, in_flight, lanes)
    check_rows(plan, chains.rows, text.step, text)
    check_rows(plan, plan.goal, text.goal, text)
    steps, goal = step_flow(plan, chains, memories), goal_flow(plan, memories)
    pieces = Pieces(plan, memories, text)
    for table in (steps.writes, steps.reads):
        pieces.check(table, text.step)
    for table in (goal.writes, goal.reads):
        pieces.check(table, text.goal)
    check_reach(steps, chains, memories, text)
    check_goal(plan, goal, memories, text)
    happens = order(chains, releases(plan, chains, text), plan.world, text, together=runs == 1)
    if plan.captured:
        check_resets(plan, chains, happens, text, repeated=runs > 1)
    if runs > 1:
        check_posted(plan, chains, steps, happens, text)
    element = int(max([1, *np.unique(steps.element).tolist(), *np.unique(goal.element).tolist()]))
    for binding in pieces.bindings((steps, goal), element):
        scene = stage(steps, goal, happens, memories, text, binding)
        check_races(scene, repeated=runs > 1)
        check_result(scene)
    return Proof(
        num_steps=sum(len(q) for q in plan.queues),
        num_accesses=len(steps.writes) + len(steps.reads),
        runs=runs,
        elapsed_ms=(time.perf_counter() - begin) * 1e3,
    )


def _check_shared(plan: Plan, memories: Memories, text: Text, in_flight: int, lanes: int) -> None:
    """Runs in flight at one time must share nothing that a run changes."""
    shared = [f"signal {s.name}" for s in plan.signals]
    shared += [f"scratch buffer {b.name}" for b in plan.buffers if b.role is Role.SCRATCH]
    shared += [f"staging ring of {b.name}" for b in plan.buffers if b.role is Role.VIEW and any(b.staged)]
    if shared:
        raise text.error(
            f"{in_flight} runs in flight on {lanes} lanes share {shared[0]}: one may change what another still needs; "
            "give each run in flight a lane of its own"
        )
