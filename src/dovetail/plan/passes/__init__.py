"""Passes: each takes a plan and returns a new one that moves the same bytes."""

from dovetail.plan.passes.b2b import b2b
from dovetail.plan.passes.chunk import chunk
from dovetail.plan.passes.crossing import crossing
from dovetail.plan.passes.entry import entry
from dovetail.plan.passes.fold import fold
from dovetail.plan.passes.lower import lower
from dovetail.plan.passes.merge import merge
from dovetail.plan.passes.prelaunch import prelaunch

__all__ = ["b2b", "chunk", "crossing", "entry", "fold", "lower", "merge", "prelaunch"]
