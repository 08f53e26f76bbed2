"""Memory that ranks of a host share, as tensors: blocks of this rank's heap that are used again, and peers' blocks.

A block given back to the heap goes back to the system, page by page; an operator that is called in a loop would pay for
its output's pages every time. So blocks are kept here for the next call.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import OrderedDict
from typing import Any

import torch

from dovetail.errors import DovetailError
from dovetail.hw.world import World

#: Bytes of blocks above which free ones are given back to the heap.
_MOST_KEPT = 1 << 30
_MOST_VIEWS = 1024
_PAGE = 4096


def _rounded(size_bytes: int) -> int:
    """A few sizes per power of two, so that blocks fit again where shapes vary a little."""
    size = max(size_bytes, _PAGE)
    step = max(_PAGE, 1 << max(0, size.bit_length() - 3))
    return -(-size // step) * step


class Blocks:
    """Blocks of this rank's heap. One is free again when no tensor over it is left but ours."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._native = world.native
        self._base = int(self._native.base(world.rank))
        self._blocks: OrderedDict[int, list[_Block]] = OrderedDict()  # by size, what was used last at the end
        self._bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the heap, not initialised."""
        items = math.prod(shape)
        if not items:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block = self._take(_rounded(items * dtype.itemsize))
        return torch.empty(0, dtype=dtype, device="cpu").set_(block.storage, 0, shape, strides_of(shape))

    def _take(self, size: int) -> _Block:
        kept = self._blocks.get(size)
        if kept is None:
            kept = self._blocks[size] = []
        else:
            self._blocks.move_to_end(size)
            for block in kept:
                if block.is_free and not block.is_gone:
                    return block
            lost = [block for block in kept if block.is_gone]
            kept[:] = [block for block in kept if block not in lost]
            self._bytes -= size * len(lost)
        self._shrink(size)
        made = _Block(self._world.empty((size,), torch.uint8))
        self._bytes += size
        kept.append(made)
        return made

    def _shrink(self, coming: int) -> None:
        """Lets free blocks of other sizes go when there are many."""
        for size, blocks in list(self._blocks.items()):
            if self._bytes + coming <= _MOST_KEPT:
                return
            free = [b for b in blocks if b.is_free]
            self._bytes -= size * len(free)
            blocks[:] = [b for b in blocks if b not in free]

    def offset(self, t: torch.Tensor) -> int:
        """Where a tensor is on this rank's heap; -1 if it is not."""
        address, size = t.data_ptr(), t.nbytes
        return address - self._base if size and self._native.contains(address, size) else -1


class _Block:
    """Memory, and how many users of it torch counts when nobody but this object has it."""

    __slots__ = ("_address", "_alone", "_number", "_references", "_tensor", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.storage = tensor, tensor.untyped_storage()
        self._number, self._address = self.storage._cdata, self.storage.data_ptr()
        self._alone = torch._C._storage_Use_Count(self._number)
        self._references = sys.getrefcount(self.storage)  # a storage is one Python object, whoever asks for it

    @property
    def is_gone(self) -> bool:
        """Its storage has other memory now: somebody moved a tensor over it (`share_memory_`)."""
        return self.storage.data_ptr() != self._address

    @property
    def is_free(self) -> bool:
        if sys.getrefcount(self.storage) != self._references:
            return False
        return bool(torch._C._storage_Use_Count(self._number) == self._alone)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides, step = [0] * len(shape), 1
    for d in range(len(shape) - 1, -1, -1):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


class Peers:
    """Every rank's heap as this process maps it. `rank` is that of the world."""

    def __init__(self, world: World) -> None:
        self._native = world.native  # keeps the mappings
        self._bytes = world.memory_bytes
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._views: dict[tuple[int, int, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def at(self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over a peer's memory; valid while the peer says so. An empty one is nowhere."""
        if offset < 0 and 0 not in shape:
            raise DovetailError(f"rank {rank} has posted memory that is not on its heap")
        key = (rank, offset, shape, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            where = (rank, dtype)
            if where not in self._memory:
                self._memory[where] = self._map(rank, dtype)
            at = max(0, offset) // dtype.itemsize
            found = self._views[key] = self._memory[where].as_strided(shape, strides_of(shape), at)
        return found

    def _map(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        size = self._bytes[rank] // dtype.itemsize * dtype.itemsize
        owner: Any = (ctypes.c_uint8 * size).from_address(int(self._native.base(rank)))
        return torch.frombuffer(owner, dtype=dtype)
