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
from dovetail.errors import MismatchError
from dovetail.hw.world import Group
from dovetail.ops import calls, choose, unfused
from dovetail.ops.choose import Choice
from dovetail.ops.cpu import decomposed, dma, store
from dovetail.ops.gpu import transport as transport_on_gpu
from dovetail.ops.group import ops_group

log = logging.getLogger("dovetail")

C = TypeVar("C", bound=calls.Call)
_said: set[tuple[str, str]] = set()


def checked(group: Group, make: Callable[[int], C], transport: str = choose.AUTO) -> tuple[C, Choice]:
    """The call and how it runs; `make` takes the number of ranks. Wrong arguments are told to the other ranks."""

    def both() -> tuple[C, Choice]:
        call = make(group.size)
        if call.device.type != "cpu" and group.world.local:
            transport_on_gpu.check(ops_group(group), call.device)
        return call, choose.transport_for(group, call, transport, backend_of_call(call))

    usable(group)
    return ops_group(group).checked(both) if group.world.local else both()


def run(group: Group, make: Callable[[int], C], transport: str = choose.AUTO) -> torch.Tensor:
    """Runs it."""
    call, choice = checked(group, make, transport)
    registry.count_operator(call.op, *choice)
    if (call.op, choice.transport) not in _said:
        _said.add((call.op, choice.transport))
        log.info("rank %d: %s runs %s (%s)", group.rank, call.text, *choice)
    ranks = ops_group(group) if group.world.local else None
    if ranks is not None:
        ranks.transport = choice.transport
    try:
        if ranks is None or choice.transport == choose.UNFUSED:
            return unfused.run(group, call)
        by = _CPU if call.device.type == "cpu" else _GPU
        return by[choice.transport](ranks, call)
    except (MismatchError, IndexError):
        raise  # all ranks have it, and nothing was moved; a row out of range was of an earlier call
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)  # others would wait for this rank
        raise
    finally:
        if ranks is not None:
            ranks.transport = ""


def backend_of_call(call: calls.Call) -> str:
    """Who runs a call: "cpu", "cuda" or "hip"."""
    return backend_of(torch.empty(0, device=call.device)) if call.device.type != "cpu" else "cpu"


_GPU: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    choose.STORE: lambda g, c: transport_on_gpu.STORE[type(c)](g, c),
    choose.DMA: lambda g, c: transport_on_gpu.DMA[type(c)](g, c),
    choose.DECOMPOSED: lambda g, c: transport_on_gpu.DECOMPOSED[type(c)](g, c),
}
_CPU: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    choose.STORE: lambda g, c: store.FORWARD[type(c)](g, c),
    choose.DMA: lambda g, c: dma.FORWARD[type(c)](g, c),
    choose.DECOMPOSED: lambda g, c: decomposed.FORWARD[type(c)](g, c),
}
