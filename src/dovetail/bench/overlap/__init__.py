"""`dovetail bench overlap`: C's characterisation (ConCCL) on this machine: pairs of computation and communication, run
together by every strategy.

Owns the scenarios, what is measured of each, the rows and the verdict. Strategies, policies and times are those of
`dovetail.overlap`; here nothing is chosen that a user would not get.
"""

from dovetail.bench.overlap.rows import rows_of
from dovetail.bench.overlap.sample import Sampled
from dovetail.bench.overlap.spec import Scenario, Spec
from dovetail.bench.overlap.suite import LLAMA, SUITES, pick
from dovetail.bench.overlap.verdict import NOTE, lines

__all__ = ["LLAMA", "NOTE", "SUITES", "Sampled", "Scenario", "Spec", "lines", "pick", "rows_of"]
