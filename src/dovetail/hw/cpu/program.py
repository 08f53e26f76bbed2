"""Turns one rank's part of a plan into a native program.

Owns the translation: which of the caller's pointers a buffer is, what peers must be told about it, where scratch lies,
and which counter a signal is. The handshake and the gate at the head of the queues become the run's own prologue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.errors import NotSupported, PlanError
from dovetail.hw.capabilities import CPU
from dovetail.hw.cpu import native
from dovetail.plan import step as st
from dovetail.plan.plan import AT_RUN, Plan, Role, SignalKind
from dovetail.plan.step import NONE, Op, Rows

_PLACE = {Role.SCRATCH: 1, Role.VIEW: 2}
_ALIGN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the ranks tell each other about a plan's buffers."""

    user: tuple[int, ...]  #: buffers that the caller gives, in the order of its pointers
    input: int  #: position among `user` that is posted first: what peers read
    output: int  #: position that is posted second: what peers write; NONE if there is none
    scratch: tuple[int, ...]  #: offset of each buffer in a rank's scratch memory
    scratch_bytes: int  #: 0 if there is none; NONE if it is as large as the input


def layout_of(plan: Plan) -> Layout:
    """Orders buffers; raises `NotSupported` if peers touch more than two of a caller's."""
    user = tuple(n for n, b in enumerate(plan.buffers) if b.role not in _PLACE)
    first, second = _posted(plan, user)
    scratch, at, grows = [], 0, False
    for b in plan.buffers:
        scratch.append(at)
        if b.role in _PLACE:
            grows = grows or AT_RUN in b.sizes
            at += -(-max(0, *b.sizes) // _ALIGN) * _ALIGN
    return Layout(user=user, input=first, output=second, scratch=tuple(scratch), scratch_bytes=NONE if grows else at)


def _posted(plan: Plan, user: tuple[int, ...]) -> tuple[int, int]:
    """Which of the caller's buffers a slot names: the first that is filled and the first output, if that is enough.

    Direct and staged plans of one collective have the same buffers first, so they agree on this.
    """
    filled = [k for k, n in enumerate(user) if plan.buffers[n].role in (Role.INPUT, Role.INOUT, Role.OUTSIDE)]
    outputs = [k for k, n in enumerate(user) if plan.buffers[n].role is Role.OUTPUT]
    usual = (filled[0] if filled else 0, outputs[0] if outputs else NONE)
    remote = _touched_by_others(plan)
    wanted = [k for k, n in enumerate(user) if n in remote]
    if set(wanted) <= set(usual):
        return usual
    if len(wanted) > 2:
        names = ", ".join(plan.buffers[user[k]].name for k in wanted)
        raise NotSupported(f"plan {plan.name}: peers touch {names}; this executor lets them touch at most two buffers")
    return wanted[0], wanted[1] if len(wanted) > 1 else NONE


def _touched_by_others(plan: Plan) -> set[int]:
    """Buffers with an operand that is not on the rank of the queue, views counted as what they show."""
    found: set[int] = set()
    for q in plan.queues:
        for side in ("src", "dst", "dst2"):
            far = (q.steps[f"{side}_rank"] != q.rank) & (q.steps[f"{side}_buffer"] != NONE)
            found.update(q.steps[f"{side}_buffer"][far].tolist())
        for row in q.steps[q.steps["op"] == Op.REDUCE]:
            sources = plan.sources[row["first_source"] : row["first_source"] + row["num_sources"]]
            found.update(sources["buffer"][sources["rank"] != q.rank].tolist())
    return found | {plan.buffers[n].of for n in found if plan.buffers[n].role is Role.VIEW}


def compile_plan(plan: Plan, rank: int, layout: Layout | None = None) -> Any:
    """The native program of `rank`."""
    if plan.captured and not CPU.runs_captured:
        raise NotSupported(f"plan {plan.name} has fixed signal values; the CPU executor runs plans that count on")
    layout = layout or layout_of(plan)
    queues = [body_of(plan, q.steps, q.rank) for q in plan.queues if q.rank == rank]
    bounds = np.cumsum([0] + [len(q) for q in queues]).tolist()
    steps = st.sequence(*queues)
    stamps = steps["value"][steps["op"] == Op.STAMP]
    homes = _number([s.rank for s in plan.signals])
    params = _number([p.rank for p in plan.params])
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
            signals=homes,
            params=params,
            equal=list(plan.equal),
            num_stamps=int(stamps.max()) + 1 if len(stamps) else 0,
        )
    except ValueError as error:
        raise PlanError(f"plan {plan.name}, rank {rank}: {error}") from None


def _number(ranks: list[int]) -> list[tuple[int, int]]:
    """(rank, how many of that rank stand before) for each."""
    seen: dict[int, int] = {}
    out = []
    for r in ranks:
        out.append((r, seen.get(r, 0)))
        seen[r] = out[-1][1] + 1
    return out


def _buffer(plan: Plan, n: int, layout: Layout) -> list[int]:
    b = plan.buffers[n]
    place = _PLACE.get(b.role, 0)
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
