"""Turns one rank's part of a plan into a native program.

Owns the translation: which of the caller's pointers a buffer is, what peers must be told about it, where scratch lies,
and which counter a signal is. The handshake and the gate at the head of the queues become the run's own prologue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dovetail.errors import NotSupported, PlanError
from dovetail.hw.capabilities import CPU
from dovetail.hw.cpu import native
from dovetail.hw.layout import SCRATCH_ROLES, Layout, layout_of, numbered, reached
from dovetail.plan import step as st
from dovetail.plan.plan import Plan, Role, SignalKind
from dovetail.plan.step import NONE, Op, Rows


def compile_plan(plan: Plan, rank: int, layout: Layout | None = None) -> Any:
    """The native program of `rank`."""
    if plan.captured and not CPU.runs_captured:
        raise NotSupported(f"plan {plan.name} has fixed signal values; the CPU executor runs plans that count on")
    layout = layout or layout_of(plan)
    queues = [body_of(plan, q.steps, q.rank) for q in plan.queues if q.rank == rank]
    bounds = np.cumsum([0] + [len(q) for q in queues]).tolist()
    steps = st.sequence(*queues)
    stamps = steps["value"][steps["op"] == Op.STAMP]
    homes = numbered([s.rank for s in plan.signals])
    params = numbered([p.rank for p in plan.params])
    far = reached(plan)
    module = native.load()
    try:
        return module.Program(
            rank=rank,
            world=plan.world,
            steps=steps.tobytes(),
            queues=bounds,
            sources=plan.sources.tobytes(),
            buffers=[_buffer(plan, n, layout) for n in range(len(plan.buffers))],
            sizes=[b.sizes[r] for r in range(plan.world) for b in plan.buffers],
            reached=[(r, n) in far for r in range(plan.world) for n in range(len(plan.buffers))],
            signals=homes,
            params=params,
            equal=list(plan.equal),
            num_stamps=int(stamps.max()) + 1 if len(stamps) else 0,
        )
    except ValueError as error:
        raise PlanError(f"plan {plan.name}, rank {rank}: {error}") from None


def _buffer(plan: Plan, n: int, layout: Layout) -> list[int]:
    b = plan.buffers[n]
    place = SCRATCH_ROLES.get(b.role, 0)
    shown = b.of if b.role is Role.VIEW else n
    user = layout.user.index(shown) if shown in layout.user else NONE
    posted = 2 if b.role is Role.SCRATCH else 0 if user == layout.input else 1 if user == layout.output else NONE
    return [place, posted, user, b.of, layout.scratch[n]]


def body_of(plan: Plan, steps: Rows, rank: int) -> Rows:
    """The queue without gate and handshake; a plan of several ranks must have the handshake."""
    if "entry" not in plan.passes:
        raise PlanError(f"plan {plan.name} has no entry handshake: apply dovetail.plan.passes.entry before running it")
    kinds = [s.kind for s in plan.signals]
    opening = (SignalKind.ENTRY, SignalKind.GATE)
    used = [kinds[s] if s != NONE else None for s in steps["signal"].tolist()]
    head = next((n for n, kind in enumerate(used) if kind not in opening), len(used))
    if any(kind in opening for kind in used[head:]):
        raise PlanError(f"plan {plan.name}, rank {rank}: a handshake in the middle of a queue")
    body: Rows = steps[head:]
    return body
