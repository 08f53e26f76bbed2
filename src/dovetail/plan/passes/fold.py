"""Fewer queues: the queues of a rank on a few in-order streams, as a GPU has them.

Owns the choice of a stream for each queue and the order on it. Every stream takes its steps from one legal order of
the whole plan (`linear`), so folding adds order and can't add a deadlock: whatever the streams have done, the first
step of that global order that is not done yet stands at the head of its stream, and all it waits for is done.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.linear import linearize
from dovetail.plan.plan import Plan, Queue, SignalKind
from dovetail.plan.step import Op, Rows

_OPENING = (SignalKind.ENTRY, SignalKind.GATE)


def fold(plan: Plan, most: int, *, lane_of: Callable[[Queue], int] | None = None) -> Plan:
    """Merges the queues of every rank into at most `most`; steps, signals and waits stay as they are.

    Per-queue orders that are restrictions of one legal global order are free of deadlocks. The heads are moved to the
    front: gates, then the rank's own entry, then those of its peers, each once. All of it can be done before any
    other step, since a gate opens from outside and an entry needs gates only.

    Args:
        plan: any plan, with or without handshake and gates.
        most: queues per rank.
        lane_of: which of the `most` a queue goes to. Default: queues of one engine together, engines in turn.

    Raises:
        ValueError: `most` is less than 1, or `lane_of` gave a lane that is not below it.
        PlanError: the plan deadlocks, or an entry is raised behind the head of a queue.
    """
    if most < 1:
        raise ValueError(f"most must be at least 1, not {most}")
    linear = linearize(plan)
    lanes = _by_engine(plan, most) if lane_of is None else [lane_of(q) for q in plan.queues]
    for q, lane in zip(plan.queues, lanes, strict=True):
        if not 0 <= lane < most:
            raise ValueError(f"lane_of must be in 0..{most - 1}, not {lane} (rank {q.rank} queue {q.name!r})")
    heads = _heads(plan)
    first = np.cumsum([0, *(len(q) for q in plan.queues)])
    rows = st.sequence(*(q.steps for q in plan.queues))
    in_body = linear.index >= np.array(heads, np.int64)[linear.queue]
    queue, index = linear.queue[in_body], linear.index[in_body]
    stream = np.array([q.rank * most + lane for q, lane in zip(plan.queues, lanes, strict=True)], np.int64)
    folded = []
    for s in sorted(set(stream.tolist())):
        mine = np.flatnonzero(stream == s).tolist()
        chosen = stream[queue] == s
        head = _union(plan, st.sequence(*(plan.queues[q].steps[: heads[q]] for q in mine)))
        steps = st.sequence(head, rows[first[queue[chosen]] + index[chosen]])
        name = plan.queues[mine[0]].name if len(mine) == 1 else f"fold of {len(mine)}"
        folded.append(Queue(rank=s // most, engine=s % most, steps=steps, name=name))
    return plan.replace(queues=tuple(folded), passes=(*plan.passes, f"fold {most}"))


def _by_engine(plan: Plan, most: int) -> list[int]:
    """A lane for each queue: the engines of a rank, in the order in which they come, go round the lanes."""
    seen: dict[int, dict[int, int]] = {}
    lanes = []
    for q in plan.queues:
        engines = seen.setdefault(q.rank, {})
        lanes.append(engines.setdefault(q.engine, len(engines)) % most)
    return lanes


def _heads(plan: Plan) -> list[int]:
    """How many steps of each queue are gate and handshake."""
    opening = np.array([s.kind in _OPENING for s in plan.signals] + [False], bool)  # the last entry is for NONE
    entry = np.array([s.kind is SignalKind.ENTRY for s in plan.signals] + [False], bool)
    heads = []
    for n, q in enumerate(plan.queues):
        op, signal = q.steps["op"], q.steps["signal"]
        body = ~(st.among(op, (Op.SIGNAL, Op.WAIT)) & opening[signal])
        head = int(np.argmax(body)) if body.any() else len(body)
        late = np.flatnonzero((op == Op.SIGNAL) & entry[signal])
        if len(late) and late[-1] >= head:
            step = plan.describe(n, int(late[-1]))
            raise PlanError(f"plan {plan.name}: {step}: an entry is raised behind the head of its queue", steps=(step,))
        heads.append(head)
    return heads


def _union(plan: Plan, rows: Rows) -> Rows:
    """Gate waits, raised entries, waits for entries: each (signal, value) once, otherwise in the order given."""
    gate = np.array([s.kind is SignalKind.GATE for s in plan.signals] + [False], bool)[rows["signal"]]
    place: NDArray[np.int64] = np.where(gate, 0, np.where(rows["op"] == Op.SIGNAL, 1, 2))
    words = zip(place.tolist(), rows["signal"].tolist(), rows["value"].tolist(), strict=True)
    seen: dict[tuple[int, int, int], int] = {}
    for n, word in enumerate(words):
        seen.setdefault(word, n)
    kept = np.array(list(seen.values()), np.int64)
    union: Rows = rows[kept[np.argsort(place[kept], kind="stable")]]
    return union
