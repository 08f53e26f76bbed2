"""Texts and types for runs that failed: which rank, which plan, queue, step and signal, and what to do."""

from __future__ import annotations

from typing import Any

from dovetail.errors import DovetailError, HardwareError, MismatchError, PeerError, Timeout
from dovetail.hw.cpu.program import body_of
from dovetail.hw.layout import layout_of, reached
from dovetail.hw.world import Group
from dovetail.plan.plan import Plan
from dovetail.plan.step import NONE

DEAD, LATE, MISMATCH, BROKEN, BOUNDS, MEMORY, PLANNER, CROSSED = range(2, 10)
_CLOSED, _FAILED = 3, 4


def error_of(group: Group, label: str, plan: Plan | None, failure: dict[str, Any]) -> DovetailError:
    """The error of a failed run. One that broke the group is remembered: later calls raise it again."""
    status, about = failure["status"], failure["about"]
    what = f"{label}, run {failure['run']} on {group}"
    if status == MISMATCH:
        return _mismatch(group, plan, failure)
    if group.broken is not None:
        return group.broken
    if status == CROSSED:
        return group.crossed([about, failure["reporter"]])
    where = _where(group, plan, failure)
    error: DovetailError
    if status == DEAD:
        how = "closed the group" if group.native is not None and group.native.closed(about) else "died"
        error = PeerError(
            f"rank {about} {how}; {what}{where}. The group is broken: make a new one from the others", rank=about
        )
    elif status == LATE:
        error = Timeout(f"{what} made no progress for {group.timeout_s:g} s: {_late(group, plan, failure)}{where}")
    elif status == MEMORY:
        error = HardwareError(
            f"{what}: no memory for staging; free some, or put the tensors on the heap (dovetail.empty)"
        )
    elif status == BROKEN:
        code = group.native.abort & 0xFF if group.native is not None else _CLOSED
        word = "was closed" if code == _CLOSED else "failed"
        error = PeerError(f"the group {word} on rank {failure['reporter']}; {what}{where}", rank=failure["reporter"])
    elif status == BOUNDS:
        error = DovetailError(f"{what}: {_misfit(plan, failure)}{where}; nothing was moved by it")
    else:
        return DovetailError(f"{what}: no plan could be made")
    group.set_broken(error)
    return error


def _misfit(plan: Plan | None, failure: dict[str, Any]) -> str:
    """What of a rank's buffers the plan can't use, from what that rank has posted."""
    rank = failure["about"]
    if plan is None or failure["queue"] >= 0:
        return f"a step reaches outside the memory of rank {rank}"
    layout, state, far = layout_of(plan), failure["states"][rank], reached(plan)
    found = []
    for k, at in enumerate((layout.input, layout.output)):
        if at == NONE or at >= len(layout.user):
            continue
        n = layout.user[at]
        buffer, given = plan.buffers[n], state["bytes"][k]
        if buffer.sizes[rank] > given:
            found.append(f"{buffer.name!r} of rank {rank} has {given} bytes, the plan takes {buffer.sizes[rank]}")
        elif (rank, n) in far and not state["symmetric"][k]:
            found.append(f"{buffer.name!r} of rank {rank} is not symmetric, and peers reach it: use dovetail.empty")
    takes = ", ".join(f"{plan.buffers[n].name!r} {plan.buffers[n].sizes[rank]}" for n in layout.user)
    return "; ".join(found) or f"a buffer of rank {rank} is too small: the plan takes, in bytes, {takes}"


def _mismatch(group: Group, plan: Plan | None, failure: dict[str, Any]) -> DovetailError:
    a, b = failure["param_a"], failure["param_b"]
    splits = plan is not None and a >= 0
    shown = (
        {plan.params[a].rank, plan.params[b].rank} if plan is not None and splits else {group.rank, failure["about"]}
    )
    states = {r: failure["states"][r] for r in shown}
    calls = {r: group.world.describe(state, group.size) for r, state in states.items()}
    if plan is None or not splits:
        return MismatchError(f"the ranks of {group} do not make the same call; nothing was moved", calls=calls)

    def posted(index: int) -> int:
        """The value of a parameter, from the slot of the rank that posted it."""
        rank = plan.params[index].rank
        return int(states[rank]["params"][sum(p.rank == rank for p in plan.params[:index])])

    sender, receiver = plan.params[a].rank, plan.params[b].rank
    if plan.params[a].name.startswith("send_length"):
        text = f"rank {sender} sends {posted(a)} bytes to rank {receiver}, which expects {posted(b)}; nothing was moved"
    else:
        text = f"{plan.params[a].name} is {posted(a)}, but {plan.params[b].name} is {posted(b)}; nothing was moved"
    return MismatchError(text, calls=calls)


def _where(group: Group, plan: Plan | None, failure: dict[str, Any]) -> str:
    if plan is None or failure["queue"] < 0:
        return ""
    return f"; this rank stood at {_step_text(plan, group.rank, failure['queue'], failure['step'])}"


def _step_text(plan: Plan, rank: int, queue: int, step: int) -> str:
    """Names a step of the native program: its queues are the rank's, without the handshake at their head."""
    mine = [n for n, q in enumerate(plan.queues) if q.rank == rank]
    if queue >= len(mine):
        return f"rank {rank} queue {queue} step {step}"
    n = mine[queue]
    head = len(plan.queues[n]) - len(body_of(plan, plan.queues[n].steps, rank))
    return plan.describe(n, min(head + step, len(plan.queues[n]) - 1))


def _late(group: Group, plan: Plan | None, failure: dict[str, Any]) -> str:
    if failure["states"][group.rank]["entered"] != failure["run"]:
        return "an earlier call of this rank is not over: was one armed and never fired?"
    lines = []
    for r in range(group.size):
        if r == group.rank:
            continue
        state = failure["states"][r]
        if state["entered"] != failure["run"]:
            lines.append(f"rank {r} has not entered it (the last run it finished is {state['last']})")
        elif state["finished"] < failure["run"]:
            parked = state["parked"]
            if plan is not None and parked >> 32 == failure["run"]:
                lines.append(f"rank {r} waits at {_step_text(plan, r, parked >> 20 & 0xFFF, parked & 0xFFFFF)}")
            else:
                lines.append(f"rank {r} is in it and has not finished")
    return "; ".join(lines) or "all other ranks have finished it"
