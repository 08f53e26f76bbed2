"""A bound call: a shape on a group, with its programs. Made once per shape; every later call is one native call.

Owns the link between a recipe and the native caller, and turns a native failure into a typed error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dovetail import env
from dovetail.coll.recipes import AS_INPUT, Collective, Shape, recipe, word_of
from dovetail.errors import DovetailError
from dovetail.hw.capabilities import CPU
from dovetail.hw.cpu import native
from dovetail.hw.cpu.failure import error_of
from dovetail.hw.cpu.program import compile_plan
from dovetail.hw.layout import layout_of
from dovetail.hw.world import Group
from dovetail.plan import passes
from dovetail.plan.check import check
from dovetail.plan.plan import Plan

DONE = 1
DIRECT, STAGED_HEAP, STAGED_ORDINARY = range(3)


class Bound:
    """`caller.run` blocks and returns a status, DONE if all is well; `caller.start` returns a native ticket."""

    __slots__ = ("__weakref__", "_planner_error", "_recipe", "caller", "group", "plans", "reason", "shape")

    def __init__(self, group: Group, shape: Shape, buffer_bytes: list[int], reason: str = "") -> None:
        self.group, self.shape, self.reason = group, shape, reason
        self.plans: dict[int, Plan] = {}
        self._recipe = recipe(shape)
        self._planner_error: DovetailError | None = None
        module = native.load()

        def scratch(n: int) -> int:
            return int(module.SCRATCH_AS_INPUT) if n == AS_INPUT else -(-n // 4096) * 4096

        # The first program that can be needed is made now, so that its errors are raised before anything is posted.
        first = DIRECT if self._recipe.direct is not None else STAGED_HEAP
        plan = self._plan(first)
        layout = layout_of(plan)
        self.caller: Any = module.Caller(
            world=group.world.native,
            group=group.native,
            word=word_of(shape),
            size_bytes=0 if shape.uneven else shape.size_bytes,
            num_user=len(buffer_bytes),
            input=layout.input,
            output=layout.output,
            bytes=buffer_bytes,
            scratch_heap=scratch(self._recipe.scratch_heap),
            scratch_ordinary=scratch(self._recipe.scratch_ordinary),
            has_direct=self._recipe.direct is not None,
            planner=_planner(weakref.ref(self)),
        )
        self.caller.set_program(first, self._program(first))

    def _plan(self, choice: int) -> Plan:
        if choice not in self.plans:
            if choice == DIRECT:
                assert self._recipe.direct is not None
                raw = self._recipe.direct()
            else:
                raw = self._recipe.staged(choice == STAGED_ORDINARY)
            plan = passes.entry(raw)
            if env.check():
                check(plan, runs=2)
            self.plans[choice] = plan
        return self.plans[choice]

    def _program(self, choice: int) -> Any:
        """Called by the engine when a run needs a program that no run needed before."""
        try:
            return compile_plan(self._plan(choice), self.group.rank)
        except DovetailError as error:
            self._planner_error = error
            raise

    def variant_of(self, choice: int) -> str:
        """The variant that a run used."""
        return self.shape.variant if choice == DIRECT else self._recipe.staged_name

    def close(self) -> None:
        """Nothing to give back: native objects go with the last run that uses them."""

    def namer(self) -> Callable[[], str]:
        """Says who moves the bytes, also when this object is gone."""
        return lambda: CPU.engine

    def fail(self, failure: dict[str, Any]) -> DovetailError:
        """The error for a failed run, remembered by the group if it broke it."""
        if self._planner_error is not None:
            return self._planner_error
        s = self.shape
        label = f"{s.collective.name.lower()} ({s.variant}, {s.size_bytes} bytes)"
        return error_of(self.group, label, self.plans.get(failure["choice"]), failure)

    def __repr__(self) -> str:
        return (
            f"Bound({Collective(self.shape.collective).name.lower()}, {self.shape.variant}, {self.shape.size_bytes} B)"
        )


def _planner(bound: weakref.ref[Bound]) -> Callable[[int], Any]:
    """Asks `bound` for a program without keeping it alive: the native caller can't be collected through a cycle."""

    def make(choice: int) -> Any:
        found = bound()
        return None if found is None else found._program(choice)

    return make
