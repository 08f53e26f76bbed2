"""The GPU side of a world: this rank's device, its heaps, and the memory of peers that it has opened.

Made from a `World` when a GPU tensor is first used; local, nothing collective happens here. What peers hand over (IPC
handles, offsets in their arena) comes in the slots of a run (group.py) and is opened once.
"""

from __future__ import annotations

import contextlib
import struct
import time
import weakref
from typing import Any, Protocol

from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.gpu import symmetric, tensors
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Kind
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.issuer import Issuer
from dovetail.hw.world import World

#: How a slot names memory.
NOWHERE, ON_DEVICE, IN_ARENA, ADOPTED = range(4)

_SPAN = struct.Struct("<QQ")
_ARENA_SEGMENT_BYTES = 64 << 20
#: A process that ends by an error waits this long for its runs.
_LEAVE_S = 1.0


class Leaves(Protocol):
    """A group with runs that may wait for peers."""

    def leave(self, deadline_s: float) -> None:
        """Gives up what is not over at `deadline_s` (of the monotonic clock)."""


class ArenaSource:
    """Segments in this rank's shared memory, pinned: every rank of the host maps and pins the same pages."""

    def __init__(self, world: World, device: Device) -> None:
        self._world, self._device = world, device
        self._held: dict[int, Any] = {}  # never given back to the arena while the heap lives: peers have pinned them

    def alloc(self, size_bytes: int) -> tuple[int, bytes]:
        import torch

        block = self._world.empty((size_bytes,), torch.uint8)
        base = block.data_ptr()
        self._device.driver.host_register(base, size_bytes)
        self._held[base] = block
        return base, _SPAN.pack(base - self._world.native.base(self._world.rank), size_bytes)

    def free(self, base: int) -> None:
        self._device.driver.host_unregister(base)
        self._held.pop(base)


class GpuWorld:
    """This rank's GPU among those of the others."""

    def __init__(self, world: World, device: Device) -> None:
        if not world.local:
            raise NotSupported("this world spans hosts: GPU plans run among ranks of one host")
        if not device.caps.ipc and world.size > 1:
            raise NotSupported(f"{device.name}: processes can't share its memory (no IPC); only the baseline can serve")
        self.world, self.device = world, device
        self.heap = Heap(device, "device")
        self.host_heap = Heap(device, "host", source=ArenaSource(world, device), segment_bytes=_ARENA_SEGMENT_BYTES)
        # One for all groups: they share streams, so all ranks must issue in one order.
        self.issuer = Issuer(device.enter_beside)
        self._opened: dict[tuple[int, int, bytes], int] = {}
        self.adopted: dict[int, tuple[int, tuple[int, ...]]] = {}  #: address -> bytes, where it is on each rank
        self._pinned: list[int] = []
        self._words: list[Any] = []
        self._word_pins: dict[tuple[int, int], int] = {}
        self.runs = 0  #: the highest number of a run in any group so far
        self.groups: weakref.WeakSet[Leaves] = weakref.WeakSet()
        self.closed = False

    def name_of(self, address: int, size_bytes: int) -> tuple[int, bytes, int]:
        """(how, handle, offset) of memory as peers may open it; NOWHERE if they can't."""
        for how, heap in ((ON_DEVICE, self.heap), (IN_ARENA, self.host_heap)):
            if (found := heap.find(address, size_bytes)) is not None:
                return how, found[0].handle, found[1]
        if address in self.adopted and size_bytes <= self.adopted[address][0]:
            return ADOPTED, b"", 0
        return NOWHERE, b"", 0

    def adopt(self, tensor: Any, process_group: Any) -> None:
        """Notes a tensor that torch has mapped on every rank, so that peers reach it without a copy."""
        address = tensor.data_ptr()
        pointers = symmetric.pointers_of(tensor, process_group)  # asked each time: memory may have been given back
        if pointers is None:
            self.adopted.pop(address, None)
        else:
            self.adopted[address] = (tensor.nbytes, pointers)

    def open(self, rank: int, how: int, handle: bytes) -> tuple[int, Kind]:
        """Where the segment of a peer begins in this process."""
        kind = Kind.DEVICE if how == ON_DEVICE else Kind.PINNED
        key = (rank, how, handle)
        if key not in self._opened:
            if how == ON_DEVICE:
                self._opened[key] = self.device.driver.ipc_open(handle)
            else:
                offset, size = _SPAN.unpack(handle[: _SPAN.size])
                self._opened[key] = self.pin(rank, offset, size)
        return self._opened[key], kind

    def pin(self, rank: int, offset: int, size_bytes: int) -> int:
        """Pins a part of a rank's shared memory in this process; returns its address here."""
        address = int(self.world.native.base(rank)) + offset
        self.device.driver.host_register(address, size_bytes)
        self._pinned.append(address)
        return address

    def take_words(self, size_bytes: int) -> Any:
        """Shared memory for the words of a group, all of one size. It is never given back, only to the next group:
        peers have pinned it, and close when they like."""
        import torch

        return self._words.pop() if self._words else self.world.empty((size_bytes,), torch.uint8).zero_()

    def give_words(self, words: Any) -> None:
        """For the next group, whose runs count on from `runs`: what the words hold is long past."""
        self._words.append(words)

    def pin_words(self, rank: int, offset: int, size_bytes: int) -> int:
        """Pins the words of a rank, once."""
        if (rank, offset) not in self._word_pins:
            self._word_pins[rank, offset] = self.pin(rank, offset, size_bytes)
        return self._word_pins[rank, offset]

    def leave(self) -> None:
        """Before `close` in a process that ends by an error: it waits for late peers only a moment. They would take it
        for one that still comes, and it may be somebody at a terminal who ends it."""
        deadline_s = time.monotonic() + _LEAVE_S
        for group in list(self.groups):
            group.leave(deadline_s)

    def close(self) -> None:
        """Closes what peers opened to us and gives our memory back. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        self.issuer.close()
        driver = self.device.driver
        self.device.enter()
        for (_, how, _), address in self._opened.items():
            if how == ON_DEVICE:
                _quietly(driver.ipc_close, address)
        for address in self._pinned:
            _quietly(driver.host_unregister, address)
        self._opened, self._pinned, self._words, self._word_pins = {}, [], [], {}
        self.heap.close()
        self.host_heap.close()
        self.device.close()


def world_of(world: World, backend: str, index: int) -> GpuWorld:
    """The GPU side of a world; made when a GPU is first used, without the other ranks."""
    if world.gpu is None:
        tensors.require_gpu(backend, index)
        device = Device(backend, index)
        try:
            world.gpu = GpuWorld(world, device)
        except BaseException:
            device.close()
            raise
    found: GpuWorld = world.gpu
    if found.device.index != index:
        raise ValueError(f"this rank uses GPU {found.device.index}, the tensor is on GPU {index}: one GPU per rank")
    return found


def _quietly(call: Any, address: int) -> None:
    """A peer that is gone may have taken its memory along."""
    with contextlib.suppress(DovetailError):
        call(address)
