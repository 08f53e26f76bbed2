"""Plain memory copies on all ranks at once: the limit that an all-gather is held against.

Every rank copies, in private memory and all ranks at the same time, as many bytes as an all-gather must write into
each output. It is what the memory gives, not a bound in principle: an all-gather reads each input from caches that
may still hold it, so at middle sizes it can be faster than these copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from dovetail.bench.cases import Case
from dovetail.bench.contender import Contender
from dovetail.bench.placement import Placement
from dovetail.bench.spec import CPU


class Copies:
    """A contender that communicates nothing."""

    name = "copies"

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate source and target; the call is one NumPy copy, which is the C library's, or one of torch's."""
        size_bytes = case.num_output * case.torch_dtype.itemsize
        call: Callable[[], object]
        # Both written: a source that never was would be read from the kernel's one page of zeros, out of the cache.
        if self._placement.backend == CPU:
            source, target = np.full(size_bytes, 1, np.uint8), np.full(size_bytes, 2, np.uint8)
            inp, out, call = torch.from_numpy(source), torch.from_numpy(target), partial(np.copyto, target, source)
        else:
            inp, out = (self._placement.empty(size_bytes, torch.uint8, symmetric=False).fill_(n) for n in (1, 2))
            call = self._placement.until_done(partial(out.copy_, inp))
        return Contender(backend=self.name, requested=requested, variant=self.name, inp=inp, out=out, call=call)
