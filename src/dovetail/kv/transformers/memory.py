"""The blocks of a device: one tensor for all requests, and who has which of its blocks.

Legend: L layers, B blocks, T tokens of a block, H heads of K and V, D their width. The layer is outermost and K and V
of a token lie side by side, so what a block has in a layer (a row) is contiguous, and a block is L rows of one stride.

A block that was given back may still be read or copied by work that is queued: its next user comes behind that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import DovetailError
from dovetail.hw.memory import lasting
from dovetail.kv.layout import layer_outermost
from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.prefixes import Move
from dovetail.kv.slots import SlotAllocator
from dovetail.kv.transformers.order import Fence
from dovetail.kv.transformers.shape import KVShape


class CacheFull(DovetailError):
    """The memory has fewer free blocks than a request needs; nothing has changed."""


class Allocator(Protocol):
    """Hands out blocks."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""

    def alloc(self, number: int, *, after: int | None = None) -> NDArray[np.int64]:
        """`number` blocks, if possible those behind `after`."""

    def free(self, slots: Any) -> None: ...


class PagedMemory:
    """`num_blocks` blocks of 16 tokens on a device: `PagedMemory.for_model(model, num_blocks=4096)`.

    For one model: another one is refused where its K and V differ in layers, heads, width or type of the numbers.

    Args:
        allocator: chooses blocks; if not given, such that those of a request follow each other where they can, which
            saves a copy of K and V in each step.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        allocator: Allocator | None = None,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be 1 or more")
        self.shape, self.num_blocks, self.device = shape, num_blocks, _indexed(torch.device(device))
        self.layout = layer_outermost(
            "paged", num_layers=shape.num_layers, row_bytes=shape.row_bytes, num_blocks=num_blocks
        )
        size = (shape.num_layers, num_blocks * BLOCK_TOKENS, 2, shape.num_heads, shape.head_dim)
        #: [L, B * T, 2, H, D]
        with lasting():
            self.tokens = torch.zeros(size, dtype=shape.dtype, device=self.device)
        #: The same in words as wide as they go, [L, B * T, words]: what gathers tokens moves fewer elements.
        self.words = self.tokens.flatten(2).view(_widest(self.tokens[0, 0].nbytes))
        self.fence = Fence(self.device)  #: behind all that uses blocks which were given back
        self.fence.behind_compute()
        self._allocator: Allocator = allocator or SlotAllocator(num_blocks)
        self._leaving: list[tuple[list[int], list[Move]]] = []  # given back, while copies still use them

    @classmethod
    def for_model(cls, model: Any, num_blocks: int, *, allocator: Allocator | None = None) -> PagedMemory:
        """Blocks of a model of transformers, on its device."""
        return cls(KVShape.of(model), num_blocks, device=model.device, allocator=allocator)

    @property
    def num_free(self) -> int:
        """Blocks that nobody has; copies may still use some, who takes those comes behind them."""
        return self._allocator.num_free + sum(len(blocks) for blocks, _ in self._leaving)

    def bytes(self) -> Any:
        """All of it as a flat NumPy array; only where it is in host memory."""
        return self.tokens.view(-1).view(torch.uint8).numpy()

    def ensure(self, count: int) -> None:
        """Raises `CacheFull` if fewer than so many blocks are free."""
        if count > self.num_free:
            raise CacheFull(
                f"{count} more blocks of {BLOCK_TOKENS} tokens are needed and {self.num_free} of {self.num_blocks} are "
                f"free: close caches that are done, or make a larger PagedMemory"
            )

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` blocks, if possible those behind the block `after`, for the current stream and for copies.

        Raises:
            CacheFull: fewer are free; nothing has changed.
        """
        self.ensure(count)
        self._settle(count)
        self.fence.enter()
        taken: list[int] = self._allocator.alloc(count, after=after).tolist()
        return taken

    def give(self, blocks: Sequence[int], moves: Sequence[Move] = ()) -> None:
        """Gives blocks back. What the current stream was given, and `moves`, may still use them."""
        if len(blocks):
            self.fence.behind_compute()
            self._leaving.append((list(blocks), list(moves)))
            self._settle(0)

    def _settle(self, needed: int) -> None:
        """Frees what no copy uses any more; and more if `needed`, the oldest first: the fence waits for its copies."""
        leaving, self._leaving = self._leaving, []
        for blocks, moves in leaving:
            busy = [move for move in moves if not is_over(move)]
            if busy and self._allocator.num_free >= needed:
                self._leaving.append((blocks, busy))
                continue
            for move in busy:
                self.fence.behind(move.transfer)
            self._allocator.free(np.array(blocks, np.int64))


def is_over(move: Move) -> bool:
    """True once all bytes have landed; asks every part, so that each gives back what it holds."""
    return all(part.is_over() for part in move.parts) and move.is_over()


def _indexed(device: torch.device) -> torch.device:
    """With the number of the GPU."""
    number: int | None = device.index
    if device.type == "cuda" and number is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _widest(size_bytes: int) -> torch.dtype:
    """Of the whole numbers, the widest that divides this."""
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8)
    return next(kind for kind in kinds if size_bytes % kind.itemsize == 0)
