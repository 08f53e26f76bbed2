"""Moves items between their pages on the host and slots of a window on the device.

To the planner a window is a cache whose blocks are pages, and a slot is a run of them: it makes one copy of an item,
and of several that follow each other on both sides; a mover runs them.

Owns the order: a slot is overwritten behind its users and behind the store that reads it, and an item is fetched
behind the store that writes it. Nothing here waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.errors import HardwareError
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.heap import Heap
from dovetail.kv.choose import Path
from dovetail.kv.items import HostItems, Item, pending
from dovetail.kv.layout import block_outermost
from dovetail.kv.mover import GpuMover, Transfer
from dovetail.kv.order import CpuOrder, GpuOrder, Order
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Table, table
from dovetail.kv.prefixes import Mover
from dovetail.kv.window import Slot

if TYPE_CHECKING:
    import torch


class Carrier:
    """Between `host` and a window of `num_slots` slots of `slot_pages` pages."""

    def __init__(self, host: HostItems, num_slots: int, slot_pages: int) -> None:
        """Made by `on_gpu` and `on_cpu`."""
        page_bytes = host.pages.slot_bytes
        self.layout = block_outermost("window", num_layers=1, row_bytes=page_bytes, num_blocks=num_slots * slot_pages)
        self._slot_pages, self._pages = slot_pages, host.pages
        self._bytes: Any
        self._path: Path
        self.mover: Mover
        self.order: Order
        self.moved_bytes = dict.fromkeys(Direction, 0)
        self._moves: list[Transfer] = []
        self._failed: set[Direction] = set()
        self._made = contextlib.ExitStack()

    @classmethod
    def on_gpu(cls, device: Device, host: HostItems, num_slots: int, slot_pages: int, path: Path | str) -> Carrier:
        """With a window in a GPU's memory; the host's memory is pinned."""
        import torch

        found = cls(host, num_slots, slot_pages)
        found._path = Path(path)
        with found._made as made:
            size_bytes = found.layout.size_bytes
            heap = Heap(device, "device", segment_bytes=size_bytes)
            made.callback(heap.close)
            found._bytes = heap.empty((size_bytes,), torch.uint8)
            found.order = GpuOrder(device)
            made.callback(found.order.close)
            addresses = [piece.ctypes.data for piece in host.pieces]
            found.mover = made.enter_context(GpuMover(device, found._bytes.data_ptr(), addresses))
            found._made = made.pop_all()
        return found

    @classmethod
    def on_cpu(cls, host: HostItems, num_slots: int, slot_pages: int) -> Carrier:
        """With a window in host memory."""
        import torch

        found = cls(host, num_slots, slot_pages)
        found._path, found.order = Path.CPU, CpuOrder()
        found._bytes = torch.empty(found.layout.size_bytes, dtype=torch.uint8)
        found.mover = CpuMover(found._bytes.numpy(), host.pieces)
        return found

    def tensors(self, item: Item, slot: Slot) -> dict[str, torch.Tensor]:
        """Views of a slot as the item's tensors."""
        base = slot.number * self._slot_pages * self.layout.slot_bytes
        return {
            name: self._bytes[base + p.offset : base + p.offset + p.size_bytes].view(p.dtype).view(p.shape)
            for name, p in item.parts.items()
        }

    def bring(self, items: Sequence[Item], slots: Sequence[Slot], streams: Sequence[int]) -> None:
        """Host to device, as one transfer, behind these streams and what the slots and items have noted."""
        copies = self._table(Direction.FETCH, items, slots)
        written = [store for item in items if (store := pending(item.store))]
        before = [move for slot in slots for move in (slot.fetch, slot.store)]
        behind = self.order.behind(Direction.FETCH, [*written, *before], [slot.users for slot in slots])
        # A batch reads its sources when it likes, which is too early while a store still writes them.
        path = Path.DMA_2D if written else self._path
        move = self._submit(Direction.FETCH, copies, path, [*behind, *streams])
        for item, slot in zip(items, slots, strict=True):  # the slot's next fetch comes behind this one
            item.fetch = slot.fetch = move
            slot.store = None
            self.order.forget(slot.users)

    def send(self, item: Item, slot: Slot, streams: Sequence[int]) -> Transfer:
        """Device to host, behind the streams that wrote the slot and the fetch that filled it."""
        copies = self._table(Direction.STORE, [item], [slot])
        behind = self.order.behind(Direction.STORE, [item.fetch, item.store], [slot.users])
        item.torn = True
        item.store = slot.store = move = self._submit(Direction.STORE, copies, self._path, [*behind, *streams])
        item.torn = False
        return move

    def _submit(self, direction: Direction, copies: Table, path: Path, after: Sequence[int]) -> Transfer:
        self._settle()
        self._failed.add(direction)
        move = self.mover.submit(direction, copies, path, after=after)
        self._failed.discard(direction)
        self._moves.append(move)
        self.moved_bytes[direction] += copies.size_bytes
        return move

    def ensure_clear(self, direction: Direction) -> None:
        """Raises `HardwareError` while a transfer that failed half way has copies under way: nothing orders those."""
        if direction in self._failed and not self.mover.is_idle(direction):
            raise HardwareError(f"a {direction} failed half way, and some of its copies are under way: try again later")
        self._failed.discard(direction)

    def _table(self, direction: Direction, items: Sequence[Item], slots: Sequence[Slot]) -> Table:
        blocks = [slot.number * self._slot_pages + np.arange(i.num_pages) for i, slot in zip(items, slots, strict=True)]
        pages = [item.pages for item in items]
        return table(direction, self.layout, np.concatenate(blocks), np.concatenate(pages), self._pages)

    def _settle(self) -> None:
        """Whoever is over gives its event back."""
        self._moves = [move for move in self._moves if not move.is_over()]

    def close(self, timeout_s: float, slots: Sequence[Slot]) -> None:
        """Waits for copies under way and gives the window back; raises `Timeout`, and can be called again then."""
        if isinstance(self.mover, GpuMover):
            self.mover.close(timeout_s)
        self._settle()
        for slot in slots:
            self.order.forget(slot.users)
        del self._bytes, self.mover
        self._made.close()
