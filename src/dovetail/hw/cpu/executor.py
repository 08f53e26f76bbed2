"""Runs any plan on the software engines of a group: the executor behind the seam that GPUs will share.

Collectives have their own, faster way in (`dovetail.coll`); this is for plans that somebody made or rewrote: phases,
tests, and whatever imports and exports signals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from dovetail.errors import DovetailError, PlanError, Timeout
from dovetail.hw.cpu import native
from dovetail.hw.cpu.failure import error_of
from dovetail.hw.cpu.program import compile_plan
from dovetail.hw.layout import layout_of
from dovetail.hw.proved import prove_first
from dovetail.hw.slots import PLAN_CALL
from dovetail.hw.world import Group
from dovetail.plan.plan import ABSENT, Plan, SignalKind

AS_SEEN = -1  #: of the native `meet`
_DIRECT = 0


class PlanTicket:
    """A plan in flight on this rank."""

    def __init__(self, runner: PlanRunner, ticket: Any, tensors: tuple[Any, ...]) -> None:
        self._runner, self._ticket, self._tensors = runner, ticket, tensors

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until this rank's part is over; raises its error."""
        status = self._ticket.wait(-1.0 if timeout_s is None else timeout_s)
        if status == 0:
            raise Timeout(f"plan {self._runner.plan.name} was not over after {timeout_s:g} s; it goes on")
        if status != 1:
            raise self._runner.error(self._ticket.failure())

    def fire(self) -> None:
        """Opens the gate of a plan with the `prelaunch` pass."""
        self._ticket.fire()

    def raise_signal(self, name: str, value: int = 1) -> None:
        """Raises an imported signal of this rank. One value after the other, growing."""
        plan = self._runner.plan
        for n, s in enumerate(plan.signals):
            if s.name == name and s.kind is SignalKind.IMPORTED and s.rank == self._runner.group.rank:
                if not self._ticket.raise_signal(n, value):
                    raise DovetailError(f"signal {name!r} can't be raised yet: an earlier run of this lane is not over")
                return
        raise PlanError(f"plan {plan.name} imports no signal {name!r} on rank {self._runner.group.rank}")

    def is_over(self) -> bool:
        """True once this rank's part is over, well or not. Advances nothing: somebody else must."""
        return bool(self._ticket.status != 0)

    @property
    def submitted_ns(self) -> int:
        """When it was enqueued, on the same clock as the stamps."""
        return int(self._ticket.submitted_ns)

    @property
    def stamps_ns(self) -> list[int]:
        """Times that STAMP steps took, on the clock of time.monotonic_ns."""
        return list(self._ticket.stamps)


class PlanRunner:
    """A plan, compiled for this rank of a group. Every member makes one from the same plan."""

    def __init__(self, group: Group, plan: Plan, *, check: bool = True) -> None:
        """A plan that is wrong is refused here, on every rank alike.

        Args:
            check: prove the plan first, once in a process: milliseconds for a few hundred steps, seconds for thousands.
                The library's own plans come without, since tests prove them. `DOVETAIL_CHECK` set to 0 or 1 decides
                for all plans.

        Raises:
            PlanError: the plan is wrong, or for another number of ranks.
            NotSupported: this executor can't run it.
        """
        if plan.world != group.size:
            raise PlanError(f"plan {plan.name} is for {plan.world} ranks, {group} has {group.size}")
        self.group, self.plan = group, plan
        self._layout = layout_of(plan)
        program = compile_plan(plan, group.rank, self._layout)
        prove_first(plan, wanted=check)
        self._names = [plan.buffers[n].name for n in self._layout.user]
        module = native.load()
        grows = self._layout.scratch_bytes < 0
        scratch = int(module.SCRATCH_AS_INPUT) if grows else self._layout.scratch_bytes
        self._caller: Any = module.Caller(
            world=group.world.native,
            group=group.native,
            word=PLAN_CALL | plan.fingerprint() << 8,
            size_bytes=0,
            num_user=len(self._names),
            input=self._layout.input,
            output=self._layout.output,
            bytes=[0] * len(self._names),
            scratch_heap=scratch,
            scratch_ordinary=scratch,
            has_direct=False,
            planner=_no_planner,
        )
        for choice in range(3):
            self._caller.set_program(choice, program)

    def submit(self, tensors: Mapping[str, Any], params: Sequence[int] = (), *, gated: bool = False) -> PlanTicket:
        """Starts a run. `tensors`: this rank's buffers by name; `params`: what it posts, in the plan's order."""
        if missing := set(tensors) ^ {n for n in self._names if self._has(n)}:
            raise ValueError(
                f"plan {self.plan.name} takes the buffers {self._names}; wrong or missing: {sorted(missing)}"
            )
        given = [tensors.get(n) for n in self._names]
        pointers = [0 if t is None else t.data_ptr() for t in given]
        sizes = [0 if t is None else t.nbytes for t in given]
        held = tuple(given)  # until the run is over, also if the ticket is dropped
        ticket = self._caller.start(pointers, sizes, list(params), gated, functools.partial(_let_go, held))
        return PlanTicket(self, ticket, held)

    def run(self, tensors: Sequence[Any]) -> None:
        """Runs it and blocks; `tensors` in the plan's order of buffers. The quickest way, without parameters."""
        caller = self._caller
        if caller.run([t.data_ptr() for t in tensors], [t.nbytes for t in tensors], []) != 1:
            raise self.error(caller.failure())

    def blocking(self, tensors: Sequence[Any]) -> Callable[[], None]:
        """`run` over the same tensors again and again, which the caller keeps."""
        pointers, sizes = [t.data_ptr() for t in tensors], [t.nbytes for t in tensors]
        caller = self._caller

        def again() -> None:
            if caller.run(pointers, sizes, []) != 1:
                raise self.error(caller.failure())

        return again

    def fixed(self, tensors: Sequence[Any]) -> tuple[Any, list[int], list[int]]:
        """What the native part takes to run it over the same tensors again and again, which the caller keeps."""
        return self._caller, [t.data_ptr() for t in tensors], [t.nbytes for t in tensors]

    def check(self, status: int) -> bool:
        """Of the native `meet`: whether all ranks said the same as before. Raises the error of a run that failed."""
        if status not in (AS_SEEN, 1):
            raise self.error(self._caller.failure())
        return status == AS_SEEN

    def _has(self, name: str) -> bool:
        buffer = self.plan.buffers[self._layout.user[self._names.index(name)]]
        return buffer.sizes[self.group.rank] != ABSENT

    def error(self, failure: dict[str, Any]) -> DovetailError:
        """The error of a failed run."""
        return error_of(self.group, f"plan {self.plan.name}", self.plan, failure)

    def __enter__(self) -> PlanRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._caller = None


def _let_go(_: tuple[Any, ...]) -> None:
    """Called when a run is over; its argument lived until then."""


def _no_planner(_: int) -> None:
    return None
