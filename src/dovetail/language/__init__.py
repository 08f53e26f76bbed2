"""Device functions for kernels of one's own that reach other ranks, on stock Triton, and memory to reach them by.

The functions are used inside a `@triton.jit` kernel; `Symmetric` makes their tables on the host. Needs Triton.
"""

from __future__ import annotations

try:
    import triton as _triton  # noqa: F401
except ImportError as error:
    raise ImportError("dovetail.language needs Triton 3.4 or later: pip install 'dovetail-ml[gpu]'") from error

from dovetail.language.interpreted import mend as _mend
from dovetail.language.kernels.device import (
    arrive,
    end_epoch,
    epoch,
    fence,
    peer,
    put,
    remote_first,
    signal,
    wait,
)
from dovetail.language.symmetric import Addresses, Symmetric

_mend()

__all__ = [
    "Addresses",
    "Symmetric",
    "arrive",
    "end_epoch",
    "epoch",
    "fence",
    "peer",
    "put",
    "remote_first",
    "signal",
    "wait",
]
