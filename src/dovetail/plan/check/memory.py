"""Where the bytes of a plan really are: one memory per (rank, buffer), with views resolved.

Owns the answer to "may these two operands touch the same byte". A `VIEW` that its rank does not stage is the buffer it
shows; one that it stages is a ring of its own. Everything behind this module speaks of memories only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.errors import PlanError
from dovetail.plan.check.chains import Bools, Ints
from dovetail.plan.plan import Plan, Role, Space

#: Roles whose bytes the caller fills before a run, and those it owns between runs.
_FILLED = (Role.INPUT, Role.INOUT)
_CALLERS = (Role.INPUT, Role.INOUT, Role.OUTPUT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Memories:
    """Facts per memory; memory number = rank * number of buffers + buffer."""

    at: Ints  #: [rank, buffer] -> memory that a step touches
    shown: Ints  #: [rank, buffer] -> memory with a view taken for the buffer it shows: what a goal speaks of
    staged: Bools  #: [rank, buffer] -> an operand takes its `alt` offset
    rank: Ints
    buffer: Ints
    size: Ints  #: bytes, or AT_RUN, or ABSENT
    local: Bools  #: only its own rank's engines reach it
    filled: Bools  #: the caller fills it before every run
    callers: Bools  #: the caller owns it between runs
    outside: Bools  #: filled from outside
    input: Bools  #: never written by the plan


def survey(plan: Plan) -> Memories:
    """Resolves the buffers of a plan on every rank."""
    world, count = plan.world, len(plan.buffers)
    own = np.arange(world * count, dtype=np.int64).reshape(world, count)
    at, shown, staged = own.copy(), own.copy(), np.zeros((world, count), bool)
    for b, buffer in enumerate(plan.buffers):
        if buffer.role is not Role.VIEW:
            continue
        if plan.buffers[buffer.of].role is Role.VIEW:
            raise PlanError(f"plan {plan.name}: view {buffer.name} shows a view; it must show a buffer")
        staged[:, b] = buffer.staged
        shown[:, b] = own[:, buffer.of]
        at[:, b] = np.where(staged[:, b], own[:, b], own[:, buffer.of])

    def per_memory(values: list[bool]) -> Bools:
        return np.tile(np.array(values, bool), world)

    roles = [b.role for b in plan.buffers]
    return Memories(
        at=at,
        shown=shown,
        staged=staged,
        rank=np.repeat(np.arange(world), count),
        buffer=np.tile(np.arange(count), world),
        size=np.array([b.sizes for b in plan.buffers], np.int64).reshape(count, world).T.reshape(-1),
        local=np.array([[s is Space.LOCAL for s in b.spaces] for b in plan.buffers], bool)
        .reshape(count, world)
        .T.reshape(-1),
        filled=per_memory([r in _FILLED for r in roles]),
        callers=per_memory([r in _CALLERS for r in roles]),
        outside=per_memory([r is Role.OUTSIDE for r in roles]),
        input=per_memory([r is Role.INPUT for r in roles]),
    )
