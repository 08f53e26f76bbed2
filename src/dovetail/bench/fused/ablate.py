"""Ablations of fused operators on a CPU: the order of destinations, slices of `dma`, and a rank that comes late."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dovetail.bench.fused.cases import Case, Run
from dovetail.coll.session import group_of
from dovetail.ops import calls, choose
from dovetail.ops.cpu import dma, shared, store
from dovetail.ops.group import ops_group

ORDER, SLICES, SKEW = "order", "slices", "skew"
_SLICES = (1, 2, 4, 8, 16)
_LATE = 0  # the rank


def contenders(case: Case, late_us: float, rank: int) -> dict[str, dict[str, Run]]:
    """By what is varied: runs by setting. One rank comes `late_us` late; `rank` is this one."""
    group = ops_group(group_of(None))
    kind, has = type(case.made()), choose.TRANSPORTS["cpu"][case.made().op]
    found: dict[str, dict[str, Run]] = {}
    orders = {"remote first": shared.remote_first, "local first": shared.local_first}
    found[ORDER] = {
        f"store, {name}": _direct(case, functools.partial(store.FORWARD[kind], group, order=order))
        for name, order in orders.items()
    }
    if choose.DMA in has:
        forward = functools.partial(dma.FORWARD[kind], group)
        for name, order in orders.items():
            found[ORDER][f"dma, {name}"] = _direct(case, functools.partial(forward, order=order))
        found[SLICES] = {
            f"{number} slices": _direct(case, functools.partial(forward, slices=number)) for number in _SLICES
        }
    found[SKEW] = {"unfused, together": case.fused(choose.UNFUSED)}
    for name in ("gloo", *has):
        run = case.then(dist) if name == "gloo" else case.fused(name)
        found[SKEW][name] = _delayed(run, late_us if rank == _LATE else 0.0)
    return found


def _direct(case: Case, forward: Callable[[calls.Call], torch.Tensor]) -> Run:
    """A transport's function, without the choice; the call is checked each time, as always."""
    return lambda: forward(case.made())


def _delayed(run: Run, late_us: float) -> Run:
    """Begins later; the time counts from the common start."""

    def delayed() -> torch.Tensor:
        until = time.perf_counter_ns() + int(late_us * 1e3)
        while time.perf_counter_ns() < until:
            pass
        return run()

    return delayed
