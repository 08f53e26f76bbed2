"""A captured plan: signal values are the same in every run, and the plan sets them back.

Owns the proof that such a plan behaves like one whose values count on, which is what `signals` assumed. For a signal
that anybody waits for: one `RESET` per run; every raise and every wait of a run before it, so that it destroys nothing
that is still wanted and nothing stale is left behind; and it before every raise and wait of the next run, so that no
wait there sees a value of this run and no raise there is lost.
"""

from __future__ import annotations

import numpy as np

from dovetail.plan.check.chains import Chains, Ints
from dovetail.plan.check.order import Order
from dovetail.plan.check.text import Text
from dovetail.plan.plan import Plan
from dovetail.plan.step import Op


def check_resets(plan: Plan, chains: Chains, order: Order, text: Text, *, repeated: bool) -> None:
    """Raises PlanError unless every run starts from signals at zero."""
    op, signal = chains.rows["op"], chains.rows["signal"]
    resets = np.flatnonzero(op == Op.RESET)
    for s in np.unique(signal[op == Op.WAIT]).tolist():
        mine = resets[signal[resets] == s]
        name = plan.signals[s].name
        if not len(mine):
            wait = text.step(int(np.flatnonzero((op == Op.WAIT) & (signal == s))[0]))
            raise text.error(f"{wait}: a captured plan must reset {name}, or the next run finds it raised", [wait])
        if len(mine) > 1:
            steps = [text.step(int(n)) for n in mine[:2]]
            raise text.error(f"{name} is reset twice in a run: {steps[0]} and {steps[1]}", steps)
        words = np.flatnonzero(np.isin(op, (Op.SIGNAL, Op.WAIT)) & (signal == s))
        raisers = _outside_raisers(chains, s)
        _ordered(np.concatenate([words, raisers]), mine, order, text)
        if repeated:
            _ordered_next(np.concatenate([words, raisers]), mine, order, text)
            if plan.signals[s].kind.from_outside and not len(raisers):
                _gate(plan, s, mine, order, text)


def _outside_raisers(chains: Chains, signal: int) -> Ints:
    """Accesses from outside that end with this imported signal."""
    ends = [n for n, o in enumerate(chains.outside) if any(s == signal for s, _ in o.before)]
    return np.array([chains.outside_node(n) for n in ends], np.int64)


def _ordered(words: Ints, reset: Ints, order: Order, text: Text) -> None:
    bad = ~order.before(words, np.broadcast_to(reset, words.shape))
    if bad.any():
        steps = [text.step(int(words[np.argmax(bad)])), text.step(int(reset[0]))]
        raise text.error(f"{steps[1]} may come before {steps[0]} of the same run", steps)


def _ordered_next(words: Ints, reset: Ints, order: Order, text: Text) -> None:
    bad = ~order.before_next(np.broadcast_to(reset, words.shape), words)
    if bad.any():
        steps = [text.step(int(reset[0])), text.step(int(words[np.argmax(bad)]))]
        raise text.error(f"{steps[0]} of run 1 may come after {steps[1]} of run 2: it sees a stale value", steps)


def _gate(plan: Plan, signal: int, reset: Ints, order: Order, text: Text) -> None:
    """A gate is raised after its rank's start, so it must be down before that."""
    rank = plan.signals[signal].rank
    if not order.ended(reset, np.array([rank])).all():
        step = text.step(int(reset[0]))
        raise text.error(f"{step} of run 1 may come after rank {rank} has started run 2", [step])
