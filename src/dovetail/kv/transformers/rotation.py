"""A few buffers on a device for the layers of a long context, whose place is pinned host memory.

While a layer is computed the next ones are on their way; of what is new only the new blocks go back. A buffer is filled
again behind the attention that read it and behind the copy that stored from it; a layer is fetched behind its own
store. Nothing here knows transformers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dovetail.hw.gpu.device import Device
from dovetail.kv.choose import Path
from dovetail.kv.layout import layer_outermost
from dovetail.kv.memory import DriverPinner, HostMemory
from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.mover import GpuMover, Transfer
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Pieces, table
from dovetail.kv.transformers import order
from dovetail.kv.transformers.shape import KVShape


class Rotation:
    """Buffers of a device that serve `num_layers` layers in turn, and the host memory behind them.

    A block of a layer is one row: block `buffer * blocks_per_layer + k` on the device, slot
    `layer * blocks_per_layer + k` on the host, so what follows each other is one copy.
    """

    def __init__(self, shape: KVShape, tokens: torch.Tensor, num_layers: int, gpu: Device | None) -> None:
        """`tokens`: the buffers, [buffer, token, 2, H, D]."""
        self.tokens, self.num_layers, self.device = tokens, num_layers, tokens.device
        self.num_buffers, self.blocks_per_layer = len(tokens), tokens.shape[1] // BLOCK_TOKENS
        blocks = self.num_buffers * self.blocks_per_layer
        self._layout = layer_outermost("buffers", num_layers=1, row_bytes=shape.row_bytes, num_blocks=blocks)
        pinner = None if gpu is None else DriverPinner(gpu.driver, gpu.enter)
        self.host = HostMemory(num_layers * self.blocks_per_layer, shape.row_bytes, pinner=pinner)
        self._pieces = Pieces(
            num_slots=self.host.num_slots, slot_bytes=shape.row_bytes, slots_per_piece=self.host.slots_per_piece
        )
        try:
            self.mover: Any = _mover(gpu, tokens, self.host)
        except BaseException:
            self.host.close()
            raise
        # Never a batch: it may read host memory before its turn, and what is fetched may just have been stored.
        self._path = Path.CPU if gpu is None else Path.DMA_2D
        self._fences = [order.Fence(self.device) for _ in range(self.num_buffers)]
        for fence in self._fences:
            fence.behind_compute()  # what torch did with this memory before
        self._holds: list[int | None] = list(range(self.num_buffers))  # the layer in each buffer
        self._fetches: dict[int, Transfer] = {}  # buffer -> what fills it
        #: Buffers that nothing is fetched into: whoever writes there first waits for what is still read from them.
        self._unfilled = set(range(self.num_buffers))
        self._stores: dict[int, Transfer] = {}  # layer -> the last one
        self._live: list[Transfer] = []
        self._last: int | None = None  # the layer that was entered last

    def enter(self, layer: int, filled: Callable[[int], Any]) -> torch.Tensor:
        """The buffer with a layer's tokens, for the current stream; the buffer of the layer before goes on.

        `filled`: the blocks of a layer that have tokens.
        """
        if self._last in self._holds and self._last != layer:
            free = self._holds.index(self._last)
            self._fences[free].behind_compute()  # its attention is queued by now
            following = [(layer + n) % self.num_layers for n in range(self.num_layers)]
            wanted = next(n for n in following if n == self._last or n not in self._holds)
            if wanted != self._last:
                self._fetch(wanted, free, filled(wanted))
        if layer not in self._holds:  # out of turn
            other = next(n for n, held in enumerate(self._holds) if held != self._last)
            self._fences[other].behind_compute()
            self._fetch(layer, other, filled(layer))
        self._last = layer
        buffer = self._holds.index(layer)
        if buffer in self._fetches:
            order.join(self._fetches.pop(buffer), self.device)
        elif buffer in self._unfilled:
            self._fences[buffer].enter()
        self._unfilled.discard(buffer)
        return self.tokens[buffer]

    def store(self, layer: int, blocks: Any) -> None:
        """Blocks of a layer that the current stream has written are copied to the host, behind it."""
        buffer = self._holds.index(layer)
        moved = self._submit(Direction.STORE, layer, buffer, blocks, order.computing(self.device))
        self._stores[layer] = moved
        self._fences[buffer].behind(moved)

    def _fetch(self, layer: int, buffer: int, blocks: Any) -> None:
        fence = self._fences[buffer]
        if layer in self._stores:
            fence.behind(self._stores.pop(layer))
        if buffer in self._fetches:
            fence.behind(self._fetches.pop(buffer))
        self._holds[buffer] = None  # until it is under way, should that fail
        if len(blocks):
            self._fetches[buffer] = self._submit(Direction.FETCH, layer, buffer, blocks, fence.after)
        else:
            self._unfilled.add(buffer)
        self._holds[buffer] = layer

    def _submit(self, direction: Direction, layer: int, buffer: int, blocks: Any, after: Sequence[int]) -> Transfer:
        here, there = buffer * self.blocks_per_layer + blocks, layer * self.blocks_per_layer + blocks
        copies = table(direction, self._layout, here, there, self._pieces)
        moved: Transfer = self.mover.submit(direction, copies, self._path, after=after)
        self._live = [other for other in self._live if not other.is_over()] + [moved]
        return moved

    def close(self) -> None:
        """Waits for what is under way and gives the host memory back."""
        for transfer in self._live:
            transfer.wait()
        if isinstance(self.mover, GpuMover):
            self.mover.close()
        self.host.close()


def _mover(gpu: Device | None, tokens: torch.Tensor, host: HostMemory) -> GpuMover | CpuMover:
    if gpu is not None:
        return GpuMover(gpu, tokens.data_ptr(), [piece.base for piece in host.pieces])
    pieces = [np.ctypeslib.as_array((ctypes.c_uint8 * p.size_bytes).from_address(p.base)) for p in host.pieces]
    return CpuMover(tokens.reshape(-1).view(torch.uint8).numpy(), pieces)
