"""Max-min fair rates of flows that share links.

Owns one function. A flow of weight w gets at most w times its fair share on each of its links; no flow can have more
without taking from one that has as little per weight or less. These rates are unique.
"""

from __future__ import annotations

import numpy as np

from dovetail.sim.net.topology import Floats, Ints

#: Shares closer than this are the same share; sums of a million terms differ by less.
_SAME = 1e-9


def fair_rates(capacity: Floats, weight: Floats, num_hops: Ints, link: Ints) -> Floats:
    """The rate of each flow, bytes per nanosecond.

    `link` has the hops of all flows, one flow after the other; a flow that crosses a link h times names it h times. A
    flow without hops gets an infinite rate.

    In each round a link offers what it has left, per weight of its flows not yet settled. Offers only rise from round
    to round, so a link whose flows all have their lowest offer from it has made its last offer: they are settled, on
    all such links at once. The lowest offer of all is always one of them, so rounds end.
    """
    rate = np.full(len(weight), np.inf)
    left = capacity.astype(np.float64, copy=True)
    flow = np.flatnonzero(num_hops)
    count = num_hops[flow]
    while len(flow):
        load = np.bincount(link, np.repeat(weight[flow], count), len(left))
        offer = np.divide(left, load, out=np.full(len(left), np.inf), where=load > 0)
        offered = offer[link]
        first = np.cumsum(count) - count
        lowest = np.minimum.reduceat(offered, first)
        final = np.ones(len(left), np.bool_)
        final[link[np.repeat(lowest, count) < offered * (1 - _SAME)]] = False
        settled = np.logical_or.reduceat(final[link], first)
        rate[flow[settled]] = weight[flow[settled]] * lowest[settled]
        gone = np.repeat(settled, count)
        left -= np.bincount(link[gone], np.repeat(rate[flow[settled]], count[settled]), len(left))
        np.maximum(left, 0.0, out=left)
        flow, count, link = flow[~settled], count[~settled], link[~gone]
    return rate
