"""From an operator's arguments to its result: check, choose a transport, run it.

Every call of a group on one host begins with one exchange among its ranks, whatever the transport: there they find out
that they make the same call, or that one of them refused its arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from dovetail.coll.arguments import backend_of, usable
from dovetail.coll.registry import registry
from dovetail.hw.world import Group
from dovetail.ops import calls, choose, quick, unfused
from dovetail.ops.choose import Choice
from dovetail.ops.cpu import decomposed, dma, store
from dovetail.ops.gpu import transport as transport_on_gpu
from dovetail.ops.group import OpsGroup, ops_group

log = logging.getLogger("dovetail")

C = TypeVar("C", bound=calls.Call)
_said: set[tuple[str, str]] = set()


def checked(group: Group, make: Callable[[int], C], transport: str = choose.AUTO) -> tuple[C, Choice]:
    """The call and how it runs; `make` takes the number of ranks. Wrong arguments are told to the other ranks."""

    def both() -> tuple[C, Choice]:
        call = make(group.size)
        ranks = ops_group(group) if _is_on_gpu(call) and group.world.local else None
        if ranks is not None:
            transport_on_gpu.check(ranks, call.device)
        choice = choose.transport_for(group, call, transport, backend_of_call(call))
        if ranks is not None and choice.transport == choose.STORE:
            transport_on_gpu.refuse(ranks, call)
        return call, choice

    usable(group)
    return ops_group(group).checked(both) if group.world.local else both()


def run(group: Group, make: Callable[[int], C], transport: str = choose.AUTO) -> torch.Tensor:
    """Runs it. Under autocast too, operators compute in the dtype of their arguments."""
    if quick.is_autocast():
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run(group, make, transport)
    call, choice = checked(group, make, transport)
    out = performed(group, call, choice)
    if group.ops is not None:
        forward, on_gpu = _forward(call, choice.transport), _is_on_gpu(call)
        quick.learn(group.ops, call, choice, transport, forward, on_gpu=on_gpu)
    return out


def performed(group: Group, call: calls.Call, choice: Choice) -> torch.Tensor:
    """Runs a call that was checked."""
    registry.tally(call.op, *choice)[0] += 1
    if (call.op, choice.transport) not in _said:
        _said.add((call.op, choice.transport))
        log.info("rank %d: %s runs %s (%s)", group.rank, call.text, *choice)
    if not group.world.local:
        return unfused.run(group, call)
    ranks = ops_group(group)
    with ranks.calling(choice.transport):
        return _forward(call, choice.transport)(ranks, call)


def check(group: Group, *, synchronize: bool = False) -> None:
    """Raises what earlier calls on GPUs reported after they had returned."""
    if group.ops is not None:
        transport_on_gpu.check_all(group.ops, synchronize=synchronize)
    if group.broken is not None:
        raise group.broken


def _forward(call: calls.Call, transport: str) -> Callable[[OpsGroup, Any], torch.Tensor]:
    """What runs a call among ranks of one host."""
    if transport == choose.UNFUSED:
        return _unfused
    return (_GPU if _is_on_gpu(call) else _CPU)[transport][type(call)]


def _unfused(ranks: OpsGroup, call: calls.Call) -> torch.Tensor:
    return unfused.run(ranks.group, call)


def _is_on_gpu(call: calls.Call) -> bool:
    return call.device.type != "cpu"


def backend_of_call(call: calls.Call) -> str:
    """Who runs a call: "cpu", "cuda" or "hip"."""
    return backend_of(torch.empty(0, device=call.device)) if call.device.type != "cpu" else "cpu"


_Forwards = dict[str, dict[type[calls.Call], Callable[..., torch.Tensor]]]
_GPU: _Forwards = {
    choose.STORE: transport_on_gpu.STORE,
    choose.DMA: transport_on_gpu.DMA,
    choose.DECOMPOSED: transport_on_gpu.DECOMPOSED,
}
_CPU: _Forwards = {
    choose.STORE: store.FORWARD,
    choose.DMA: dma.FORWARD,
    choose.DECOMPOSED: decomposed.FORWARD,
}
