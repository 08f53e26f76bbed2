"""Dovetail as a contender: the public calls, as a user writes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import dovetail
from dovetail.bench.cases import ROOT, Case
from dovetail.bench.contender import Contender
from dovetail.bench.placement import Cpu, Placement
from dovetail.bench.spec import AUTO, SWAP


class Ours:
    """Dovetail on symmetric or ordinary tensors. Does not own the group: who called `dovetail.init` closes it."""

    def __init__(self, tensors: str, placement: Placement | None = None) -> None:
        self._symmetric = tensors == "symmetric"
        self._placement = placement or Cpu()
        self.name = self._placement.backend

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate, call once so that a plan is bound, and see in the counts which variant that was.

        Collective. What ran may differ from what was asked for: `auto` chooses, ordinary tensors are staged.
        """
        inp = self._empty(case.num_elements, case.torch_dtype).zero_()
        in_place = case.in_place or requested == SWAP
        out = inp if in_place else self._empty(case.num_output, case.torch_dtype)
        call = self._placement.until_done(_call(case, inp, out, requested))
        before = _counts(case.collective)
        call()
        variant = next(iter(_counts(case.collective) - before), requested)
        # Which profile guided it belongs to the figure.
        reason = self._reason(case) if requested == AUTO else ""
        return Contender(
            backend=self.name, requested=requested, variant=variant, inp=inp, out=out, call=call, reason=reason
        )

    def _empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return self._placement.empty(num_elements, dtype, symmetric=self._symmetric)

    def _reason(self, case: Case) -> str:
        return str(dovetail.explain(case.collective, case.size_bytes, device=self._placement.device).reason)


def _counts(collective: str) -> Counter[str]:
    """Calls of each variant so far."""
    stats = dovetail.stats()
    counts: Counter[str] = Counter()
    for row in [*stats["by_variant"], *stats["fall_backs"]]:
        if row["collective"] == collective:
            counts[row["variant"]] += row["calls"]
    return counts


def _call(case: Case, inp: torch.Tensor, out: torch.Tensor, requested: str) -> Callable[[], object]:
    # `auto` is what a user gets who says nothing, so nothing is said.
    return call_of(case, inp, out, {} if requested == AUTO else {"variant": requested})


def call_of(case: Case, inp: torch.Tensor, out: torch.Tensor, words: dict[str, Any]) -> Callable[[], object]:
    """The public call of a case, with the keywords in `words`."""
    calls: dict[str, Callable[[], object]] = {
        "all_gather": partial(dovetail.all_gather_into_tensor, out, inp, **words),
        "all_to_all": partial(dovetail.all_to_all_single, out, inp, **words),
        "all_reduce": partial(dovetail.all_reduce, inp, **words),
        "reduce_scatter": partial(dovetail.reduce_scatter_tensor, out, inp, **words),
        "broadcast": partial(dovetail.broadcast, inp, ROOT, **words),
    }
    return calls[case.collective]
