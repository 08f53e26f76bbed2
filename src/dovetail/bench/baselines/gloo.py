"""gloo, through torch.distributed: what a user of torch runs on CPUs without us, and on GPUs without NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dovetail.bench.cases import ROOT, Case
from dovetail.bench.contender import Contender
from dovetail.bench.placement import Placement


class Gloo:
    """gloo on ordinary tensors. Does not own the process group: the worker makes and destroys it."""

    name = "gloo"

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate and make ready."""
        inp = torch.empty(case.num_elements, dtype=case.torch_dtype)
        out = inp if case.in_place else torch.empty(case.num_output, dtype=case.torch_dtype)
        call = call_of(case, inp, out)
        return Contender(backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call)


class StagedGloo:
    """gloo on ordinary tensors of a GPU, of which it takes only some itself: all go through pinned host memory.

    The staging is that of variant ``torch``, what `auto` falls back to. Does not own the process group.
    """

    name = "gloo"

    def __init__(self, placement: Placement, group: Any = None) -> None:
        self._placement, self._words = placement, {"variant": "torch", "group": group}

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate and make ready."""
        from dovetail.bench import ours

        inp = self._placement.empty(case.num_elements, case.torch_dtype, symmetric=False)
        out = inp if case.in_place else self._placement.empty(case.num_output, case.torch_dtype, symmetric=False)
        call = self._placement.until_done(ours.call_of(case, inp, out, self._words))
        return Contender(backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call)


def call_of(case: Case, inp: torch.Tensor, out: torch.Tensor, **words: Any) -> Callable[[], object]:
    """torch's call of a case, with more keywords if there are any.

    torch would rather have newer names called, which its oldest version that we take lacks; each rank would print that.
    """
    old = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": partial(dist.all_gather_into_tensor, out, inp, **words),
        "all_to_all": partial(dist.all_to_all_single, out, inp, **words),
        "all_reduce": partial(dist.all_reduce, inp, **words),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, out, inp, **words),
        "broadcast": partial(dist.broadcast, inp, ROOT, **words),
    }
    return calls[case.collective]
