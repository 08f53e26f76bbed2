"""Back to back: all queues of a rank on one engine, one completion for all of them.

The moves of a rank follow each other without a sync in between, so they overlap inside the engine, and every peer waits
for the rank's one signal. That costs bandwidth (one engine is one link's worth) and saves commands and syncs.
"""

from __future__ import annotations

import numpy as np

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.plan import Plan, Queue, Signal, SignalKind
from dovetail.plan.step import Op, Rows


def b2b(plan: Plan) -> Plan:
    """Merges each rank's queues: leading waits, moves for peers, one signal, remaining moves, trailing waits.

    Raises `PlanError` for queues that depend on each other: one engine would wait for itself.
    """
    raised_by = np.full(len(plan.signals), -1, np.int64)
    for q in plan.queues:
        raised_by[q.steps["signal"][q.steps["op"] == Op.SIGNAL]] = q.rank
    signals = list(plan.signals)
    completion: dict[int, int] = {}
    for r in sorted(set(raised_by[raised_by >= 0].tolist())):
        completion[r] = len(signals)
        signals.append(Signal(name=f"all done {r}", rank=r, kind=SignalKind.INTERNAL))
    rewired = np.arange(len(signals))
    for s, r in enumerate(raised_by.tolist()):
        if r >= 0 and plan.signals[s].kind is SignalKind.INTERNAL:
            rewired[s] = completion[r]
    queues = []
    for r in range(plan.world):
        if mine := plan.of_rank(r):
            queues.append(Queue(rank=r, engine=0, steps=_merged(plan, mine, rewired), name="b2b"))
    return _dropping_unused(plan.replace(signals=tuple(signals), queues=tuple(queues), passes=(*plan.passes, "b2b")))


def _merged(plan: Plan, queues: list[Queue], rewired: np.ndarray) -> Rows:
    leading, before, says, after, trailing = [], [], [], [], []
    for q in queues:
        op = q.steps["op"]
        moves = st.among(op, st.MOVES)
        raised = np.flatnonzero(op == Op.SIGNAL)
        waits = np.flatnonzero(op == Op.WAIT)
        first = int(np.argmax(moves)) if moves.any() else 0
        last = int(len(op) - 1 - np.argmax(moves[::-1])) if moves.any() else -1
        if ((waits > first) & (waits < last)).any() or len(raised) > 1:
            raise PlanError(f"plan {plan.name}: b2b can't merge queues whose moves depend on a wait among them")
        kinds = [plan.signals[s].kind for s in q.steps["signal"][waits[waits < first]].tolist()]
        if SignalKind.INTERNAL in kinds:
            raise PlanError(f"plan {plan.name}: b2b can't merge queues that wait for another queue before they move")
        cut = int(raised[0]) if len(raised) else 0
        leading.append(q.steps[waits[waits < first]])
        before.append(q.steps[:cut][moves[:cut]])
        after.append(q.steps[cut:][moves[cut:]])
        says.append(q.steps[raised])
        trailing.append(q.steps[waits[waits >= first]])
    signal = _rewire(st.sequence(*says), rewired)[:1]
    return st.sequence(
        _rewire(st.sequence(*leading), rewired),
        *before,
        signal,
        *after,
        _rewire(st.sequence(*trailing), rewired),
    )


def _rewire(rows: Rows, rewired: np.ndarray) -> Rows:
    """Points sync rows to the completion signals; of equal waits only the first stays."""
    rows = rows.copy()
    rows["signal"] = rewired[rows["signal"]]
    words = zip(rows["op"].tolist(), rows["signal"].tolist(), rows["value"].tolist(), strict=True)
    seen: dict[tuple[int, int, int], int] = {}
    for n, word in enumerate(words):
        seen.setdefault(word, n)
    kept: Rows = rows[list(seen.values())]
    return kept


def _dropping_unused(plan: Plan) -> Plan:
    """Removes signals that nobody uses any more."""
    used = sorted({s for q in plan.queues for s in q.steps["signal"].tolist() if s >= 0})
    number = np.full(len(plan.signals) + 1, -1, np.int64)  # the last entry maps NONE to itself
    number[used] = np.arange(len(used))
    queues = []
    for q in plan.queues:
        steps = q.steps.copy()
        steps["signal"] = number[steps["signal"]]
        queues.append(Queue(rank=q.rank, engine=q.engine, steps=steps, name=q.name))
    return plan.replace(signals=tuple(plan.signals[s] for s in used), queues=tuple(queues))
