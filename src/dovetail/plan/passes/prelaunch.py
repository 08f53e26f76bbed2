"""Prelaunch: everything is queued beforehand and one write to a gate lets it go.

Each rank has a gate, a signal that its caller (or a kernel) raises. Applied after `entry`, the gate stands
before the handshake: a rank enters when its gate opens, since only then is its input ready.
"""

from __future__ import annotations

import dataclasses

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.plan import Plan, Signal, SignalKind


def prelaunch(plan: Plan) -> Plan:
    """Puts a wait for the rank's gate in front of every queue."""
    if "prelaunch" in plan.passes:
        raise PlanError(f"plan {plan.name} has its gates already")
    base = len(plan.signals)
    gates = tuple(Signal(name=f"gate {r}", rank=r, kind=SignalKind.GATE) for r in range(plan.world))
    queues = tuple(dataclasses.replace(q, steps=st.sequence(st.wait(base + q.rank), q.steps)) for q in plan.queues)
    return plan.replace(signals=plan.signals + gates, queues=queues, passes=(*plan.passes, "prelaunch"))
