"""NCCL, through torch.distributed: as torch ships it, and with its collectives on copy engines.

Both need a GPU for each rank. For the copy engines NCCL (2.28 and newer) wants two things: a communicator of the policy
"zero CTA" and buffers that all ranks have registered as windows, for which torch has symmetric memory of its backend
"NCCL". It then uses them for all_gather and all_to_all inside one NVLink domain and otherwise falls back to kernels
without a word; ``NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL,TUNING`` shows which. Written to the documentation of NCCL and
torch and not yet run on hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed

from dovetail.bench.baselines.gloo import call_of
from dovetail.bench.cases import Case
from dovetail.bench.contender import Contender
from dovetail.bench.placement import Placement
from dovetail.bench.spec import Spec
from dovetail.errors import NotSupported

dist: Any = torch.distributed
_MOVING = ("all_gather", "all_to_all")


class Nccl:
    """The default process group's NCCL on ordinary tensors. Does not own the group."""

    name = "nccl"

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate and make ready."""
        inp = self._placement.empty(case.num_elements, case.torch_dtype, symmetric=False)
        out = inp if case.in_place else self._placement.empty(case.num_output, case.torch_dtype, symmetric=False)
        call = self._placement.until_done(call_of(case, inp, out))
        return Contender(backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call)


class NcclCe:
    """NCCL on copy engines: a process group of its own, and one registered buffer for inputs and one for outputs.

    Made by all ranks together. The buffers serve all sizes: registering is collective, and so is giving back.
    """

    name = "nccl-ce"

    def __init__(self, placement: Placement, spec: Spec) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        memory: Any = symmetric
        self._placement = placement
        self._cases = [Case.of(name, spec.ranks, size, spec.dtype) for name in spec.collectives if name in _MOVING
                       for size in spec.sizes]  # fmt: skip
        self._problem = self._missing()
        if self._problem or not self._cases:
            return
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        self._group = dist.new_group(backend="nccl", pg_options=options)
        # A window belongs to a communicator, which NCCL makes in the first call.
        dist.all_reduce(torch.zeros(1, device=placement.device), group=self._group)
        memory.set_backend("NCCL")
        item = self._cases[0].torch_dtype.itemsize
        given = max(case.size_bytes for case in self._cases)
        made = max(case.num_output * item for case in self._cases)
        self._inp, self._out = (memory.empty(n, dtype=torch.uint8, device=placement.device) for n in (given, made))
        self._windows = [memory.rendezvous(buffer, self._group) for buffer in (self._inp, self._out)]

    def bind(self, case: Case, requested: str) -> Contender:
        """Cut the buffers to size; `NotSupported` for what copy engines cannot do."""
        if case.collective not in _MOVING:
            raise NotSupported("NCCL's copy engines serve all_gather and all_to_all")
        if self._problem:
            raise NotSupported(self._problem)
        inp = self._inp[: case.size_bytes].view(case.torch_dtype)
        out = self._out[: case.num_output * case.torch_dtype.itemsize].view(case.torch_dtype)
        call = self._placement.until_done(_waiting(call_of(case, inp, out, group=self._group, async_op=True)))
        return Contender(
            backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call, tensors="symmetric"
        )

    def _missing(self) -> str | None:
        """What this torch lacks; the same on all ranks."""
        if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
            return "this torch cannot ask NCCL for its policy zero CTA"
        return None


def _waiting(start: Callable[[], object]) -> Callable[[], object]:
    """Asynchronous and waited for: in NCCL 2.28 copy engines do not serve the default stream, and c10d then has one."""

    def call() -> object:
        work: Any = start()
        return work.wait()

    return call
