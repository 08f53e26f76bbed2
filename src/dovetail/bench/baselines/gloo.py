"""gloo, through torch.distributed: what a user of torch runs on CPUs without us."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from dovetail.bench.cases import ROOT, Case
from dovetail.bench.contender import Contender


class Gloo:
    """gloo on ordinary tensors. Does not own the process group: the worker makes and destroys it."""

    name = "gloo"

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate and make ready."""
        inp = torch.empty(case.num_elements, dtype=case.torch_dtype)
        out = inp if case.in_place else torch.empty(case.num_output, dtype=case.torch_dtype)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(dist.all_gather_into_tensor, out, inp),
            "all_to_all": partial(dist.all_to_all_single, out, inp),
            "all_reduce": partial(dist.all_reduce, inp),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, out, inp),
            "broadcast": partial(dist.broadcast, inp, ROOT),
        }
        call = calls[case.collective]
        return Contender(backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call)
