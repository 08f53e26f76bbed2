"""Plain memory copies on all ranks at once: the limit that an all-gather is held against.

Every rank copies, in private memory and all ranks at the same time, as many bytes as an all-gather must write into
each output. It is what the memory gives, not a bound in principle: an all-gather reads each input from caches that
may still hold it, so at middle sizes it can be faster than these copies.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from dovetail.bench.cases import Case
from dovetail.bench.contender import Contender


class Copies:
    """A contender that communicates nothing."""

    name = "copies"

    def bind(self, case: Case, requested: str) -> Contender:
        """Allocate source and target; the call is one NumPy copy, which is the C library's."""
        size_bytes = case.num_output * case.torch_dtype.itemsize
        # Both written: a source that never was would be read from the kernel's one page of zeros, out of the cache.
        source, target = np.full(size_bytes, 1, np.uint8), np.full(size_bytes, 2, np.uint8)
        return Contender(
            backend=self.name,
            requested=requested,
            variant=self.name,
            inp=torch.from_numpy(source),
            out=torch.from_numpy(target),
            call=partial(np.copyto, target, source),
        )
