"""The handshake that opens every run: no rank is written to or read from before it has entered.

Each rank raises its ENTRY signal (an executor posts the rank's slot with it) and every queue waits for those of all
peers. A rank enters run k+1 only after it has ended run k, so the handshake also proves that all peers are done with
run k: that is what makes plans safe to repeat.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.plan import Plan, Queue, Signal, SignalKind


def entry(plan: Plan) -> Plan:
    """Adds the handshake. Command counts are those of the plan before it."""
    if "entry" in plan.passes:
        raise PlanError(f"plan {plan.name} has its entry handshake already")
    base = len(plan.signals)
    signals = tuple(Signal(name=f"entry {r}", rank=r, kind=SignalKind.ENTRY) for r in range(plan.world))
    queues = [*plan.queues]
    for r in range(plan.world):
        if not plan.of_rank(r):
            queues.append(Queue(rank=r, engine=0, steps=st.blank(0), name="entry"))
    seen: set[int] = set()
    for n, q in enumerate(queues):
        others = np.array([base + p for p in range(plan.world) if p != q.rank], dtype=np.int64)
        opening = [st.signal(base + q.rank)] if q.rank not in seen else []
        waits = [st.wait(others)] if len(others) else []
        seen.add(q.rank)
        queues[n] = dataclasses.replace(q, steps=st.sequence(*opening, *waits, q.steps))
    return plan.replace(signals=plan.signals + signals, queues=tuple(queues), passes=(*plan.passes, "entry"))
