"""Which step releases which wait.

Owns the rules that make this a function of the plan alone: a signal is raised by one queue, with strictly growing
positive values, or only from outside. Then `WAIT s >= v` of run k is released exactly when the earliest `SIGNAL` of s
with a value of at least v is done in run k: values of run k-1 stay below base(k) + 1, and a later value of the same
queue comes after the earlier one. (A captured plan, whose values start over, needs more: see `resets`.)

An imported signal reaches v when every access from outside that ends with (s, at most v) has ended; one that no access
ends with is a gate, which somebody on its rank raises at some time after that rank's start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.plan.check.chains import Chains, Ints
from dovetail.plan.check.text import Text
from dovetail.plan.plan import Plan
from dovetail.plan.step import Op


@dataclass(frozen=True, slots=True, eq=False)
class Releases:
    """What each wait needs, in the order of `waits`."""

    waits: Ints  #: nodes, ascending, so grouped by chain
    needs: list[tuple[int, ...] | None]  #: nodes that must be done; None: nothing ever releases it
    gates: list[int]  #: the rank whose start it needs, or -1


def releases(plan: Plan, chains: Chains, text: Text) -> Releases:
    """Finds the releasing step of every wait, after checking the rules on signals."""
    op = chains.rows["op"]
    raised = np.flatnonzero(op == Op.SIGNAL)
    waits = np.flatnonzero(op == Op.WAIT)
    _check_words(plan, chains, text)
    raised = raised[np.argsort(chains.rows["signal"][raised], kind="stable")]
    _check_raisers(plan, chains, raised, text)
    release = _earliest(chains, raised, waits)
    needs: list[tuple[int, ...] | None] = [(r,) if r >= 0 else None for r in release.tolist()]
    gates = [-1] * len(needs)
    imported = np.array([s.kind.from_outside for s in plan.signals] + [False], bool)
    promises: dict[int, list[tuple[int, int]]] = {}
    for number, outside in enumerate(chains.outside):
        for s, value in outside.before:
            promises.setdefault(s, []).append((value, chains.outside_node(number)))
    signal = chains.rows["signal"][waits]
    for w in np.flatnonzero(imported[signal]).tolist():
        s, value = int(signal[w]), int(chains.rows["value"][waits[w]])
        ends = tuple(node for v, node in promises.get(s, ()) if v <= value)
        needs[w] = ends
        gates[w] = -1 if ends else plan.signals[s].rank
    return Releases(waits, needs, gates)


def _check_words(plan: Plan, chains: Chains, text: Text) -> None:
    rows, op = chains.rows, chains.rows["op"]
    low = np.flatnonzero(np.isin(op, (Op.SIGNAL, Op.WAIT)) & (rows["value"] < 1))
    if len(low):
        step = text.step(int(low[0]))
        raise text.error(f"{step}: values start at 1, a signal has 0 before anybody raises it", [step])
    resets = np.flatnonzero(op == Op.RESET)
    if len(resets) and not plan.captured:
        step = text.step(int(resets[0]))
        raise text.error(f"{step}: only a captured plan resets signals, others count on from run to run", [step])


def _check_raisers(plan: Plan, chains: Chains, raised: Ints, text: Text) -> None:
    """`raised`: SIGNAL nodes sorted by signal, then in plan order."""
    signal, value = chains.rows["signal"][raised], chains.rows["value"][raised]
    for n in raised[[plan.signals[s].kind.from_outside for s in signal.tolist()]].tolist():
        step = text.step(n)
        raise text.error(f"{step}: an imported signal is raised from outside only", [step])
    same = signal[1:] == signal[:-1]
    chain = chains.chain[raised]
    for problem, bad in (
        ("a signal is raised by one queue only", same & (chain[1:] != chain[:-1])),
        ("the values of a signal must grow", same & (value[1:] <= value[:-1])),
    ):
        if bad.any():
            first = int(np.argmax(bad))
            steps = [text.step(int(raised[first])), text.step(int(raised[first + 1]))]
            raise text.error(f"{problem}: {steps[0]} and {steps[1]}", steps)


def _earliest(chains: Chains, raised: Ints, waits: Ints) -> Ints:
    """For each wait the first SIGNAL that reaches its value, or -1. `raised` is sorted by (signal, value)."""
    rows = chains.rows
    levels = np.unique(np.concatenate([rows["value"][raised], rows["value"][waits]]))
    width = len(levels) + 1

    def key(nodes: Ints) -> Ints:
        return rows["signal"][nodes].astype(np.int64) * width + np.searchsorted(levels, rows["value"][nodes])

    if not len(raised):
        return np.full(len(waits), -1, np.int64)
    place = np.searchsorted(key(raised), key(waits))
    found = raised[np.minimum(place, len(raised) - 1)]
    reached = (place < len(raised)) & (rows["signal"][found] == rows["signal"][waits])
    return np.where(reached, found, -1)
