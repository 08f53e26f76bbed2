"""Tensors of torch's own symmetric memory: taken as they are, since torch has already mapped them on every rank."""

from __future__ import annotations

import sys
from typing import Any


def pointers_of(tensor: Any, process_group: Any) -> tuple[int, ...] | None:
    """Where each rank's counterpart of `tensor` is in this process; None for any other tensor.

    The tensor was given to torch's `rendezvous` by all ranks, as torch asks for; then this is local.
    """
    module = sys.modules.get("torch.distributed._symmetric_memory")
    known = getattr(module, "is_symm_mem_tensor", None)
    if known is None or process_group is None or not known(tensor):
        return None
    assert module is not None
    handle = module.rendezvous(tensor, process_group.group_name)
    bases = [int(p) for p in handle.buffer_ptrs]
    offset = int(tensor.data_ptr()) - bases[handle.rank]
    return tuple(base + offset for base in bases)
