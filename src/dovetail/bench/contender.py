"""A contender: one way to run a case, bound to buffers of its own.

Owns the protocol that Dovetail and the baselines share, and the check that gates every timing. Each contender has its
own input and output, so that between two calls of one contender the caches have seen all the others, whoever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from dovetail.bench.cases import Case, same_bits

_POISON = 0xA5


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A case made ready: `call` moves `inp` of all ranks to `out` of all ranks."""

    backend: str
    """``cpu`` or ``cuda`` for Dovetail, otherwise the baseline's name."""
    requested: str
    """The variant that was asked for, such as ``auto``."""
    variant: str
    """The variant that runs."""
    inp: torch.Tensor
    out: torch.Tensor
    """Where the result appears; `inp` itself where the case is in place."""
    call: Callable[[], object]
    """Returns when the result is there; on a GPU that is when the GPU is done."""
    reason: str = ""
    """Why this variant runs, where there was a choice."""
    tensors: str = ""
    """What `inp` and `out` are, where it is not what the spec says of ours and ``ordinary`` of a baseline's."""


class Backend(Protocol):
    """Whoever can run a case."""

    @property
    def name(self) -> str:
        """``cpu``, ``cuda``, or that of a baseline."""
        ...

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate buffers and make the call ready; `NotSupported` when this backend cannot run the case."""
        ...


def check(contender: Contender, given: torch.Tensor, wanted: torch.Tensor, start: Callable[[], object]) -> bool:
    """Run once on `given` and say whether the result is `wanted` to the last bit, and the input untouched."""
    in_place = contender.out is contender.inp
    if not in_place:
        contender.out.view(torch.uint8).fill_(_POISON)
    contender.inp.copy_(given)
    start()
    contender.call()
    right = same_bits(contender.out, wanted) and (in_place or same_bits(contender.inp, given))
    start()  # no rank fills its input again while another still looks at its result
    return right
