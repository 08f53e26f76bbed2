"""From a checked call to its run: picks the variant, binds, and runs it now, later, or on the baseline.

The public functions (api.py) come here when the fast path can't be taken: first use of a shape, asynchronous or armed
calls, the baseline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.coll import arguments, baseline, choose
from dovetail.coll.arguments import Alias, usable
from dovetail.coll.bound import DONE, Bound
from dovetail.coll.recipes import Collective, Shape
from dovetail.coll.registry import registry
from dovetail.coll.work import Ticket, Work
from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.capabilities import CPU
from dovetail.hw.cpu import native
from dovetail.hw.world import Group
from dovetail.plan.step import DType, ReduceOp

log = logging.getLogger("dovetail")

#: Shapes that a group remembers.
_MOST_CALLS = 512


@dataclass(slots=True, kw_only=True)
class Request:
    """A call with its arguments checked."""

    group: Group
    collective: Collective
    key: tuple[Any, ...]  #: under which the bound call is remembered
    fast: Any = 0  #: under which the fast path may find it too: the collective, with a root if it has one
    requested: str  #: "auto" or a variant
    size_bytes: int  #: what this rank contributes: what a choice depends on
    plan_bytes: int  #: what the plan is made for
    pointers: list[int]
    bytes: list[int]
    tensors: tuple[Any, ...]  #: kept alive; for the baseline in c10d's order
    params: list[int]
    dtype: DType = DType.UINT8
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    uneven: bool = False
    in_place: bool = False
    splits: Any = None


def run(r: Request, async_op: bool, armed: bool = False) -> Any:
    """Runs it. None for a blocking call, a Work for an asynchronous one."""
    usable(r.group)
    if armed and not async_op:
        raise ValueError("an armed call is asynchronous: pass async_op=True, or use dovetail.arm")
    backend, index = arguments.one_device(_flat(r.tensors))
    if backend != "cpu":
        return _on_gpu(r, backend, index, async_op, armed)
    bound = r.group.calls.get(r.key)
    if bound is None:
        choice = choose.variant_for(r.group, r.collective, r.size_bytes, r.requested, r.in_place)
        if choice.variant == "torch":
            return _on_baseline(r, choice.reason, async_op, armed)
        bound = _bind(r, choice)
    if not async_op:
        status = bound.caller.run(r.pointers, r.bytes, r.params)
        if status != DONE:
            raise bound.fail(bound.caller.failure())
        return None
    work = Work(bound, lambda chosen: ticket(bound, chosen), r.tensors)
    work.attach(bound.caller.start(r.pointers, r.bytes, r.params, armed, work._finished))
    return work


def _flat(tensors: tuple[Any, ...]) -> list[Any]:
    """The tensors of a call, those in lists too."""
    return [t for part in tensors for t in (part if isinstance(part, list) else [part])]


def _on_gpu(r: Request, backend: str, index: int, async_op: bool, armed: bool) -> Any:
    """The same for tensors on a GPU. All ranks are on GPUs, or none is: the slots of a call say so."""
    from dovetail.coll import gpu
    from dovetail.hw.gpu import tensors

    if tensors.is_capturing(index):  # before anything is made: a capture would be spoilt by it
        if r.requested == "torch":
            return _on_baseline(r, "asked for", async_op, armed)
        if r.requested == "auto":
            return _on_baseline(r, "the stream is capturing a graph", async_op, armed)
        raise NotSupported(
            f"torch's current stream is capturing a graph, in which the copies of variant {r.requested!r} would be "
            "lost: call the collective outside of the capture, or choose variant='torch'"
        )
    key = (backend, *r.key)
    bound = r.group.calls.get(key)
    if bound is None:
        choice = choice_for(r.group, r.collective, r.size_bytes, r.requested, r.in_place, (backend, index))
        if choice.variant == "torch":
            return _on_baseline(r, choice.reason, async_op, armed)
        bound = gpu.GpuBound(gpu.group_of(r.group, backend, index), _shape(r, choice, backend), choice.reason)
        _keep(r, key, bound, choice)
    return gpu.run(bound, r, index, async_op=async_op, armed=armed)


def choice_for(
    group: Group, collective: Collective, size_bytes: int, requested: str, in_place: bool, place: tuple[str, int]
) -> choose.Choice:
    """What a call with tensors at `place` runs, and why."""
    backend, index = place
    if backend == "cpu" or not group.world.local:
        return choose.variant_for(group, collective, size_bytes, requested, in_place)
    from dovetail.hw.gpu.world import world_of

    try:
        device = world_of(group.world, backend, index).device
    except NotSupported as error:
        if requested != "auto":
            raise
        return choose.Choice("torch", str(error))
    return choose.variant_for(group, collective, size_bytes, requested, in_place, backend=backend, device=device)


def _shape(r: Request, choice: choose.Choice, backend: str = "cpu") -> Shape:
    if not r.group.world.local:
        raise NotSupported(f"{r.group} spans hosts: only variant 'torch' can serve it")
    return Shape(
        collective=r.collective,
        variant=choice.variant,
        world=r.group.size,
        size_bytes=r.plan_bytes,
        dtype=r.dtype,
        op=r.op,
        root=r.root,
        uneven=r.uneven,
        in_place=r.in_place and choice.variant == "swap",
        backend=backend,
    )


def _bind(r: Request, choice: choose.Choice) -> Bound:
    bound = Bound(r.group, _shape(r, choice), r.bytes, choice.reason)
    _keep(r, r.key, bound, choice)
    if r.fast and r.op is ReduceOp.SUM:
        _remember(r, bound)
    return bound


def _keep(r: Request, key: tuple[Any, ...], bound: Any, choice: choose.Choice) -> None:
    while len(r.group.calls) >= _MOST_CALLS:
        oldest = r.group.calls.pop(next(iter(r.group.calls)))  # it is bound again if it comes back
        oldest.close()
    r.group.calls[key] = bound
    registry.add(bound)
    log.info("rank %d: %s of %d bytes runs %s (%s)", r.group.rank, r.collective.name.lower(), r.size_bytes, *choice)


_ALIAS = {
    Collective.ALL_GATHER: Alias.INPUT_IN_OUTPUT,
    Collective.REDUCE_SCATTER: Alias.OUTPUT_IN_INPUT,
    Collective.ALL_TO_ALL: Alias.SAME,
}


def _remember(r: Request, bound: Bound) -> None:
    """Lets the fast path find this call by its tensors."""
    if not r.tensors:
        r.group.barriers[r.requested] = bound
        return
    key = (r.fast, r.requested)
    if key not in r.group.tables:
        alias = _ALIAS.get(r.collective, Alias.NONE)
        table = native.load().Table(one_tensor=len(r.tensors) == 1, alias=alias, rank=r.group.rank)
        r.group.tables[key] = table
        r.group.fast.setdefault(r.fast, {})[r.requested] = table.one if len(r.tensors) == 1 else table.two
    r.group.tables[key].add(r.tensors[0], r.tensors[1] if len(r.tensors) > 1 else None, bound, bound.caller)


def failed(group: Group) -> DovetailError:
    """The error of the last call that the fast path made."""
    bound: Bound = next(b for t in group.tables.values() if (b := t.take_failed()) is not None)
    return bound.fail(bound.caller.failure())


def ticket(bound: Bound, chosen: int) -> Ticket:
    """Who serves a call."""
    variant = bound.variant_of(chosen) if chosen >= 0 else bound.shape.variant
    reason = bound.reason
    if chosen > 0 and variant != bound.shape.variant:
        reason += "; not all tensors are on the heap, so they are staged"
    return Ticket(
        collective=bound.shape.collective.name.lower(),
        variant=variant,
        reason=reason,
        engine=CPU.engine,
        cores=CPU.compute_cores,
        size_bytes=bound.shape.size_bytes,
    )


class BaselineWork:
    """c10d's Work with our `ticket` and callbacks, so that code need not know who serves it."""

    def __init__(self, work: Any, made: Ticket) -> None:
        self._work, self.ticket = work, made

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Calls `callback(work)` when the call is over."""
        self._work.get_future().add_done_callback(lambda _: callback(self))

    def fire(self) -> BaselineWork:
        """The baseline has no gate."""
        raise NotSupported("a call on the baseline can't be armed: choose a variant of ours")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _on_baseline(r: Request, reason: str, async_op: bool, armed: bool) -> Any:
    if armed:
        raise NotSupported("a call on the baseline can't be armed: choose a variant of ours")
    label = r.collective.name.lower()
    registry.count_baseline(label, reason)
    work = baseline.run(r.group, r.collective, r.tensors, op=r.op, root=r.root, splits=r.splits)
    if async_op:
        made = Ticket(
            collective=label,
            variant="torch",
            reason=reason,
            engine="torch process group",
            cores=1,
            size_bytes=r.size_bytes,
        )
        return BaselineWork(work, made)
    work.wait()
    return None
