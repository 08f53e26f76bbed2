"""Memory on the symmetric heap for FSDP, used again when nobody holds it.

FSDP asks for a buffer per call and drops it when it likes: an all-gather's after the copy out of it, a reduce-scatter's
result when the optimizer forgets the gradients, which are views of it. So a block is lent as a storage of its own, and
it is free again when that storage is gone: no view of it is left, and no call in flight, which holds its tensors.
Nothing here is collective: ranks may lend and get back in any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import dlpack

from dovetail.coll import session


class Block:
    """A stretch of the heap and the storage under which it was last lent."""

    def __init__(self, size_bytes: int) -> None:
        self._memory = session.empty(size_bytes, dtype=torch.uint8)
        self._lent: Any = None

    @property
    def idle(self) -> bool:
        """True if no tensor lies over it but ours."""
        return self._lent is None or bool(self._lent.expired())

    def lend(self) -> torch.Tensor:
        """Its bytes, under a new storage over the same memory."""
        lent: torch.Tensor = dlpack.from_dlpack(self._memory.__dlpack__())
        self._lent = StorageWeakRef(lent.untyped_storage())  # type: ignore[no-untyped-call]
        return lent


class Buffers:
    """The blocks of one enabled model. All its modules share them: blocks of one size are alike."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Block]] = {}

    def take(self, size: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A tensor on the heap that nobody else has. Raises `HardwareError` if the heap is full."""
        shape = tuple(int(n) for n in size)
        size_bytes = math.prod(shape) * dtype.itemsize
        if device.type != "cpu" or not size_bytes:  # a GPU's heap keeps its blocks itself, and knows of streams
            made: torch.Tensor = session.empty(shape, dtype=dtype, device=device)
            return made
        blocks = self._blocks.setdefault(size_bytes, [])
        block = next((b for b in blocks if b.idle), None)
        if block is None:
            block = Block(size_bytes)
            blocks.append(block)
        return block.lend().view(dtype).view(shape)

    @property
    def size_bytes(self) -> int:
        """All blocks, lent or not."""
        return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def close(self) -> None:
        """Gives the blocks back to the heap; one that is still lent goes when its last tensor does."""
        self._blocks.clear()
