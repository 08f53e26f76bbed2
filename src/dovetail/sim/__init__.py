"""Prices plans and collectives on machines that are described by data: what they would take where nobody has to be.

Imports `dovetail.plan` and `dovetail.profile` only: no torch, no hardware. Every figure that comes out of here is
simulated and says so.

    machine = sim.load("mi300x")
    sim.price(plan, machine).time_us
"""

from dovetail.sim.collectives import Case, plan_of
from dovetail.sim.files import load, names, read, write
from dovetail.sim.machine import Machine, MachineError
from dovetail.sim.program import Program
from dovetail.sim.replay import price
from dovetail.sim.result import Phase, Result, Span, chrome_trace

__all__ = [
    "Case",
    "Machine",
    "MachineError",
    "Phase",
    "Program",
    "Result",
    "Span",
    "chrome_trace",
    "load",
    "names",
    "plan_of",
    "price",
    "read",
    "write",
]
