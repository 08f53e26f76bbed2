"""Networks and collectives at scale, with contention for links: topologies, routes, algorithms, an event model.

Owns `links` mode. Times are simulated. Imports numpy and `dovetail.errors` only.
"""

from dovetail.sim.net.algorithms import Algorithm, Collective
from dovetail.sim.net.fit import Fit, FitRow, fit_launch
from dovetail.sim.net.limits import bound_ns, closed_form_ns
from dovetail.sim.net.result import NetResult, Span
from dovetail.sim.net.schedule import NONE, Schedule
from dovetail.sim.net.simulate import run, simulate
from dovetail.sim.net.topology import Dimension, Kind, Network, grid

__all__ = [
    "NONE", "Algorithm", "Collective", "Dimension", "Fit", "FitRow", "Kind", "NetResult", "Network", "Schedule",
    "Span",
    "bound_ns", "closed_form_ns", "fit_launch", "grid", "run", "simulate",
]  # fmt: skip
