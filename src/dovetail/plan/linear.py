"""One legal order of all the steps of a plan.

Owns a single linear extension of one run, for whoever needs just one: to put queues on fewer streams, to batch
neighbouring copies, to execute a plan in one thread. The checker has the partial order; this module knows no clocks.

A step comes after the steps before it in its queue, and a WAIT also after the SIGNAL that releases it. A wait for an
imported signal comes after the exported signals that let the accesses begin whose end it waits for; accesses that
begin with the run, gates, and imported signals that no access ends with, hold nothing up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.plan.plan import Plan, SignalKind
from dovetail.plan.step import Op

_Word = tuple[int, int]  # (signal, value)
_LATENESS: dict[int, int] = {**dict.fromkeys(Op, 1), Op.SIGNAL: 0, Op.WAIT: 2}  # in a turn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Linear:
    """Step k of the order is row `index[k]` of queue `queue[k]`."""

    queue: NDArray[np.int64]
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.queue)


def linearize(plan: Plan) -> Linear:
    """Takes one step of every queue that can go on, in turn, until all are done: breadth first.

    So the first copies of several queues stand side by side, then their second ones, and can be batched. In a turn
    signals come first and waits last: what releases others early, what may hold a stream up late. The entry that the
    first queue of a rank raises takes no turn, so the queues of a rank begin to move together.

    Raises:
        PlanError: the plan deadlocks; names a wait that nothing releases.
    """
    lengths = [len(q) for q in plan.queues]
    words = [_words(plan, q) for q in range(len(lengths))]
    imported = _imported(plan)
    free = [s.kind is SignalKind.ENTRY for s in plan.signals]
    level = [0] * len(plan.signals)
    parked: list[list[int]] = [[] for _ in plan.signals]
    at = [0] * len(lengths)
    order_queue: list[int] = []
    order_index: list[int] = []

    def place(q: int) -> tuple[int, int]:
        return _LATENESS[words[q][at[q]][0]], q

    turn = sorted((q for q, length in enumerate(lengths) if length), key=place)
    while turn:
        following: list[int] = []
        for q in turn:
            i = at[q]
            op, signal, value = words[q][i]
            if op == Op.WAIT:
                short = _short(level, imported, signal, value)
                if short >= 0:
                    parked[short].append(q)
                    continue
            elif op == Op.SIGNAL and value > level[signal]:
                level[signal] = value
                following += parked[signal]
                parked[signal] = []
            order_queue.append(q)
            order_index.append(i)
            at[q] = i + 1
            if i + 1 < lengths[q]:
                (turn if op == Op.SIGNAL and free[signal] else following).append(q)
        turn = sorted(following, key=place)
    if len(order_queue) < sum(lengths):
        q = next(q for q, length in enumerate(lengths) if at[q] < length)
        step = plan.describe(q, at[q])
        raise PlanError(f"plan {plan.name}: deadlock: {step}: it is never released", steps=(step,))
    return Linear(queue=np.array(order_queue, np.int64), index=np.array(order_index, np.int64))


def _words(plan: Plan, queue: int) -> list[tuple[int, int, int]]:
    """(op, signal, value) of each step, as plain numbers."""
    steps = plan.queues[queue].steps
    return list(zip(*(steps[column].tolist() for column in ("op", "signal", "value")), strict=True))


def _imported(plan: Plan) -> list[list[tuple[int, _Word]] | None]:
    """For each imported signal (value, the word that lets an access begin which ends with it); None: not imported."""
    needs: list[list[tuple[int, _Word]] | None] = [[] if s.kind.from_outside else None for s in plan.signals]
    for external in plan.external:
        if external.before and external.after:
            mine = needs[external.before[0]]
            if mine is not None:
                mine.append((external.before[1], external.after))
    return needs


def _short(level: list[int], imported: list[list[tuple[int, _Word]] | None], signal: int, value: int) -> int:
    """The signal that a wait is still short of, or -1."""
    needs = imported[signal]
    if needs is None:
        return -1 if level[signal] >= value else signal
    return next((s for v, (s, reached) in needs if v <= value and level[s] < reached), -1)
