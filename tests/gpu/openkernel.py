# mypy: ignore-errors
"""A kernel that opens a gate: in a module of its own, since Triton reads its source."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["address", "value"])
def open_gate(address: tl.int64, value: tl.int64):
    """What `gate()` of a ticket gives."""
    tl.store(address.to(tl.pointer_type(tl.int64)), value)
