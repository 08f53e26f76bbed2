"""Texts and types for runs that failed: which rank, which plan, queue, step and signal, and what to do."""

from __future__ import annotations

from typing import Any

from dovetail.coll.recipes import VARIANTS, Collective, Shape
from dovetail.errors import DovetailError, HardwareError, MismatchError, PeerError, Timeout
from dovetail.hw.cpu.program import body_of
from dovetail.hw.world import Group
from dovetail.plan.plan import Plan
from dovetail.plan.step import DType, ReduceOp

DEAD, LATE, MISMATCH, BROKEN, BOUNDS, MEMORY, PLANNER = range(2, 9)
_CLOSED, _FAILED = 3, 4


def describe_call(word: int, size_bytes: int, params: list[int], size: int) -> str:
    """A call as its slot shows it: `all_gather(1024 bytes, variant pcpy)`."""
    collective = Collective(word & 0xFF)
    parts = [f"{size_bytes} bytes"] if not params else []
    if params:
        sends, receives = params[size : 2 * size], params[3 * size : 4 * size]
        parts.append(f"sends {sends} and receives {receives} bytes")
    if collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
        parts += [DType(word >> 8 & 0xFF).name.lower(), ReduceOp(word >> 16 & 0xFF).name.lower()]
    if collective in (Collective.BROADCAST, Collective.GATHER, Collective.SCATTER):
        parts.append(f"root {word >> 32 & 0xFFFFFF}")
    names = VARIANTS.get(collective, ())
    number = word >> 24 & 0xFF
    if number < len(names):
        parts.append(f"variant {names[number]}")
    return f"{collective.name.lower()}({', '.join(parts)})"


def error_of(group: Group, shape: Shape, plan: Plan | None, failure: dict[str, Any]) -> DovetailError:
    """The error of a failed run. One that broke the group is remembered: later calls raise it again."""
    status, about = failure["status"], failure["about"]
    what = f"{shape.collective.name.lower()} ({shape.variant}, {shape.size_bytes} bytes, run {failure['run']}) on {group}"
    if status == MISMATCH:
        return _mismatch(group, failure)
    if group.broken is not None:
        return group.broken
    where = _where(group, plan, failure)
    error: DovetailError
    if status == DEAD:
        how = "closed the group" if group.native is not None and group.native.closed(about) else "died"
        error = PeerError(f"rank {about} {how}; {what}{where}. The group is broken: make a new one from the others", rank=about)
    elif status == LATE:
        error = Timeout(f"{what} made no progress for {group.timeout_s:g} s: {_late(group, plan, failure)}{where}")
    elif status == MEMORY:
        error = HardwareError(f"{what}: no memory for staging; free some, or put the tensors on the heap (dovetail.empty)")
    elif status == BROKEN:
        code = group.native.abort & 0xFF if group.native is not None else _CLOSED
        word = "was closed" if code == _CLOSED else "failed"
        error = PeerError(f"the group {word} on rank {failure['reporter']}; {what}{where}", rank=failure["reporter"])
    elif status == BOUNDS:
        error = DovetailError(f"{what}: a step reaches outside the memory of rank {about}{where}; nothing was moved by it")
    else:
        return DovetailError(f"{what}: no plan could be made")
    group.set_broken(error)
    return error


def _mismatch(group: Group, failure: dict[str, Any]) -> DovetailError:
    calls, params = {}, {}
    for r in {group.rank, failure["about"]}:
        state = group.native.peer_state(r, failure["slot"], failure["lane"])
        params[r] = state["params"]
        calls[r] = describe_call(state["call"], state["size_bytes"], state["params"], group.size)
    if failure["param_a"] >= 0:
        sender, receiver = failure["param_a"] // (4 * group.size), failure["param_b"] // (4 * group.size)
        for r in (sender, receiver):
            state = group.native.peer_state(r, failure["slot"], failure["lane"])
            params[r] = state["params"]
            calls[r] = describe_call(state["call"], state["size_bytes"], state["params"], group.size)
        text = (
            f"rank {sender} sends {params[sender][group.size + receiver]} bytes to rank {receiver}, "
            f"which expects {params[receiver][3 * group.size + sender]}; nothing was moved"
        )
        return MismatchError(text, calls=calls)
    return MismatchError(f"the ranks of {group} do not make the same call; nothing was moved", calls=calls)


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


    return len(plan.queues[queue]) - len(body_of(plan, plan.queues[queue].steps, plan.queues[queue].rank))


def _late(group: Group, plan: Plan | None, failure: dict[str, Any]) -> str:
    lines = []
    for r in range(group.size):
        if r == group.rank:
            continue
        state = group.native.peer_state(r, failure["slot"], failure["lane"])
        if state["entered"] != failure["run"]:
            lines.append(f"rank {r} has not entered it (its last run here was {state['finished']})")
        elif state["finished"] < failure["run"]:
            parked = state["parked"]
            if plan is not None and parked >> 32 == failure["run"]:
                lines.append(f"rank {r} waits at {_step_text(plan, r, parked >> 20 & 0xFFF, parked & 0xFFFFF)}")
            else:
                lines.append(f"rank {r} is in it and has not finished")
    return "; ".join(lines) or "all other ranks have finished it"
