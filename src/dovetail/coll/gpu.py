"""Collectives on GPU tensors: from a checked call to plans on copy engines.

Stream semantics are c10d's: a blocking call returns when its work is issued and the caller's current stream is ordered
after it; an asynchronous one returns a `GpuWork` whose `wait()` orders the current stream. Both first agree with the
other ranks on the host; an asynchronous call does that in a thread of the group, so the caller goes on at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from dovetail.coll import choose
from dovetail.coll.recipes import AS_INPUT, Recipe, Shape, recipe, word_of
from dovetail.coll.work import Ticket
from dovetail.errors import DovetailError, Timeout
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.call import DIRECT, STAGED_ORDINARY, GpuCall, Spec
from dovetail.hw.gpu.group import GpuGroup
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.hw.gpu.world import world_of
from dovetail.hw.world import Group
from dovetail.plan import passes
from dovetail.plan.build import rooted
from dovetail.plan.plan import Plan

if TYPE_CHECKING:
    from dovetail.coll.dispatch import Request

log = logging.getLogger("dovetail")


def group_of(group: Group, backend: str, index: int) -> GpuGroup:
    """The GPU side of a group. All members come here in their first call with GPU tensors.

    Raises:
        MismatchError: another rank makes its call with CPU tensors.
    """
    if group.gpu is None:
        meet = rooted.barrier(group.size).replace(name="first call with GPU tensors")
        PlanRunner(group, passes.entry(meet), check=False).run([])
        group.gpu = GpuGroup(group, world_of(group.world, backend, index))
    found: GpuGroup = group.gpu
    return found


class GpuBound:
    """A shape on the GPUs of a group. Made once per shape; the counterpart of `bound.Bound`."""

    def __init__(self, group: GpuGroup, shape: Shape, reason: str) -> None:
        self.group, self.shape, self.reason = group, shape, reason
        self._recipe: Recipe = recipe(shape)
        self.engine = choose.engine_of(group.group, group.world.device)

        def scratch(n: int) -> int:
            return AS_INPUT if n == AS_INPUT else -(-n // 4096) * 4096

        spec = Spec(
            call=word_of(shape), size_bytes=0 if shape.uneven else shape.size_bytes, plan_of=self._plan,
            has_direct=self._recipe.direct is not None, scratch_heap=scratch(self._recipe.scratch_heap),
            scratch_ordinary=scratch(self._recipe.scratch_ordinary),
            most_streams=1 if shape.variant == "b2b" else 2,
        )  # fmt: skip
        self.caller = GpuCall(group, spec)

    def _plan(self, choice: int) -> Plan:
        if choice == DIRECT:
            assert self._recipe.direct is not None
            return passes.entry(self._recipe.direct())
        return passes.entry(self._recipe.staged(choice == STAGED_ORDINARY))

    def variant_of(self, choice: int) -> str:
        """The variant that a run used."""
        return self.shape.variant if choice == DIRECT else self._recipe.staged_name

    def close(self) -> None:
        """Gives events back, after the last run."""
        self.caller.close()

    def namer(self) -> Callable[[], str]:
        """Says who moves the bytes, also when this object is gone."""
        engine, counter = self.engine, self.caller.counter
        return lambda: engine(counter.paths)[0]

    def ticket(self, ticket: GpuTicket | None, choice: int) -> Ticket:
        """Who served a run."""
        variant = self.variant_of(choice)
        reason = self.reason
        if choice != DIRECT and variant != self.shape.variant:
            reason += "; not all tensors are on the heap, so they are staged"
        paths = ticket.bytes_by_path if ticket is not None else {}
        engine, cores = self.engine(paths)
        return Ticket(
            collective=self.shape.collective.name.lower(), variant=variant, reason=reason, engine=engine, cores=cores,
            size_bytes=self.shape.size_bytes,
        )  # fmt: skip


class GpuWork:
    """A call in flight on a GPU, with c10d's methods. Holds its tensors until it is over."""

    def __init__(self, bound: GpuBound, index: int, held: tuple[Any, ...]) -> None:
        self._bound, self._index, self._held = bound, index, held
        self._issued: Future[tuple[GpuTicket, int]] = Future()

    def _get(self, timeout_s: float | None = None) -> tuple[GpuTicket, int]:
        if (error := self._issued.exception() if self._issued.done() else None) is not None:
            raise error
        try:
            return self._issued.result(timeout_s)
        except TimeoutError:
            if self._issued.done():  # a call's own `Timeout` is a TimeoutError too
                raise
            raise Timeout(f"the call was not issued after {timeout_s:g} s; it goes on") from None

    def wait(self, timeout: Any = None) -> bool:
        """Orders torch's current stream after the call, as c10d does; with a timeout blocks the host until it is done.

        Blocks the host until the other ranks have called. Raises the call's error, or `Timeout` and leaves it going.
        """
        if timeout is not None:
            self._get(float(getattr(timeout, "total_seconds", lambda: timeout)()))[0].wait(
                float(getattr(timeout, "total_seconds", lambda: timeout)())
            )
            return True
        ticket, _ = self._get()
        if ticket.error is not None:
            raise ticket.error
        device = self._bound.group.world.device
        device.driver.stream_wait_event(tensors.current_stream(self._index), ticket.event)
        return True

    def synchronize(self) -> None:
        """Blocks the host until the call is done."""
        self._get()[0].wait()

    def is_completed(self) -> bool:
        """True once the call is over, well or not."""
        if not self._issued.done():
            return False
        return self._issued.exception() is not None or self._issued.result()[0].is_over()

    def is_success(self) -> bool:
        """True once the call is over and well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error of a call that failed."""
        if not self._issued.done():
            return None
        return self._issued.exception() or self._issued.result()[0].error

    def fire(self) -> GpuWork:
        """Opens the gate of an armed call; blocks until the other ranks have called."""
        self._get()[0].fire()
        return self

    def gate(self) -> tuple[int, int]:
        """(address, value): what a kernel writes instead of `fire`."""
        return self._get()[0].gate()

    def result(self) -> list[Any]:
        """The tensors of the call; the host waits for it."""
        self.synchronize()
        return list(self._held)

    def get_future(self) -> Any:
        """A torch Future of `result()`."""
        future: Any = torch.futures.Future()

        def settle(work: GpuWork) -> None:
            error = work.exception()
            if error is None:
                future.set_result(list(work._held))
            else:
                future.set_exception(error)

        self.add_done_callback(settle)
        return future

    def add_done_callback(self, callback: Callable[[GpuWork], None]) -> None:
        """Calls `callback(work)` once the GPU is done with the call, in a thread of its own."""

        def serve() -> None:
            try:
                self.synchronize()
            except Exception:  # the callback asks for it
                log.debug("a call failed", exc_info=True)
            callback(self)

        threading.Thread(target=serve, name="dovetail callback", daemon=True).start()

    @property
    def ticket(self) -> Ticket:
        """Choice, reason, engine, bytes and cores. Final once the call is issued."""
        if not self._issued.done() or self._issued.exception() is not None:
            return self._bound.ticket(None, DIRECT)
        return self._bound.ticket(*self._issued.result())


def run(bound: GpuBound, r: Request, index: int, *, async_op: bool, armed: bool) -> GpuWork | None:
    """Issues a call. None for a blocking one, which is ordered into torch's current stream."""
    device = bound.group.world.device
    device.enter()
    stream = tensors.current_stream(index)
    buffers = list(zip(r.pointers, r.bytes, strict=True))
    if r.group.baseline is not None:
        for t in r.tensors:
            if isinstance(t, torch.Tensor):
                bound.group.world.adopt(t, r.group.baseline)
    issuer = bound.group.world.issuer
    if not async_op:
        issuer.run(lambda: bound.caller.start(buffers, r.params, after=stream, hold=r.tensors))
        return None
    work = GpuWork(bound, index, r.tensors)
    begin = device.take_event()
    device.driver.event_record(begin, stream)

    def issue() -> None:
        try:
            device.enter()
            started = bound.caller.start(buffers, r.params, after_event=begin, gated=armed, hold=(r.tensors, work))
            work._issued.set_result(started)
        except BaseException as error:
            work._issued.set_exception(error)
        finally:
            device.give_event(begin)

    def closed(pending: Future[Any]) -> None:
        if pending.cancelled():
            device.give_event(begin)
            work._issued.set_exception(DovetailError("the group was closed before the call was issued"))

    bound.group.later(issue).add_done_callback(closed)
    return work
