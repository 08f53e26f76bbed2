"""A rank's parameters are read only after it has posted them: with its entry, in this run."""

from __future__ import annotations

import numpy as np

from dovetail.plan.check.chains import Bools, Chains, Ints
from dovetail.plan.check.flow import Flow
from dovetail.plan.check.order import Order
from dovetail.plan.check.text import Text
from dovetail.plan.plan import Plan, SignalKind
from dovetail.plan.step import Op


def check_posted(plan: Plan, chains: Chains, flow: Flow, order: Order, text: Text) -> None:
    """Every step that uses a peer's parameter comes after an ENTRY signal that the peer raised."""
    if not plan.params:
        return
    owner = np.array([p.rank for p in plan.params], np.int64)
    for table in (flow.writes, flow.reads):
        for params in (table.param, table.length_param):
            used = np.flatnonzero(params >= 0)
            node, rank = table.node[used], owner[params[used]]
            away = rank != chains.rank[chains.chain[node]]
            used, node, rank = used[away], node[away], rank[away]
            bad = ~_entered(plan, chains, node, rank, order)
            if bad.any():
                i = int(np.argmax(bad))
                step, param = text.step(int(node[i])), plan.params[int(params[used[i]])]
                raise text.error(
                    f"{step} uses {param.name} before it has seen rank {param.rank} enter the run: wait for its entry",
                    [step],
                )


def _entered(plan: Plan, chains: Chains, node: Ints, rank: Ints, order: Order) -> Bools:
    """Has each node seen the given rank enter?"""
    kind = np.array([s.kind is SignalKind.ENTRY for s in plan.signals] + [False], bool)
    entries = np.flatnonzero((chains.rows["op"] == Op.SIGNAL) & kind[chains.rows["signal"]])
    seen = np.zeros(len(node), bool)
    for entry in entries.tolist():
        mine = np.flatnonzero(rank == chains.rank[chains.chain[entry]])
        seen[mine] |= order.before(np.full(len(mine), entry), node[mine])
    return seen
