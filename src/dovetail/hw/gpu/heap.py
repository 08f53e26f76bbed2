"""The symmetric heap on a GPU: segments that peers can map, and blocks in them.

`kind="device"` is device memory, opened by other processes through IPC handles; `kind="host"` is pinned host memory,
the only place that the copy engines of a single GPU reach besides its own. A `Source` says where segments come from.

A block that a tensor gave back is used again when what stood in torch's current stream at that moment is done: the rule
of torch's own allocator. Segments stay until the heap is closed, so a peer's mapping never points to other memory.
"""

from __future__ import annotations

import functools
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dovetail import env
from dovetail.errors import HardwareError, NotSupported
from dovetail.hw import memory
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Kind

if TYPE_CHECKING:
    import torch

_ALIGN = 4096


@dataclass(slots=True, eq=False)
class Segment:
    """One allocation of the driver's."""

    base: int
    size_bytes: int
    handle: bytes  #: for other processes; empty for host memory
    free: list[tuple[int, int]] = field(default_factory=list)  #: (offset, bytes), ascending, neighbours joined


class Source(Protocol):
    """Where segments come from."""

    def alloc(self, size_bytes: int) -> tuple[int, bytes]:
        """(address, handle); raises `HardwareError` when there is no more."""

    def free(self, base: int) -> None: ...


class DeviceSource:
    """Device memory, with IPC handles where the driver has them."""

    def __init__(self, device: Device) -> None:
        self._driver, self._ipc = device.driver, device.caps.ipc

    def alloc(self, size_bytes: int) -> tuple[int, bytes]:
        base = self._driver.device_alloc(size_bytes)
        return base, self._driver.ipc_export(base) if self._ipc else b""

    def free(self, base: int) -> None:
        self._driver.device_free(base)


class PinnedSource:
    """Pinned host memory of this process alone."""

    def __init__(self, device: Device) -> None:
        self._driver = device.driver

    def alloc(self, size_bytes: int) -> tuple[int, bytes]:
        memory.require(size_bytes)
        return self._driver.host_alloc(size_bytes), b""

    def free(self, base: int) -> None:
        self._driver.host_free(base)


class Heap:
    """Blocks of memory on `device`, or pinned beside it."""

    def __init__(
        self,
        device: Device,
        kind: str = "device",
        *,
        source: Source | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        if kind not in ("device", "host"):
            raise ValueError(f"a heap is of kind 'device' or 'host', not {kind!r}")
        self.device, self.kind = device, Kind.DEVICE if kind == "device" else Kind.PINNED
        self._source: Source = source or (DeviceSource(device) if kind == "device" else PinnedSource(device))
        self._segment_bytes = segment_bytes or env.gpu_segment_bytes()
        self.segments: list[Segment] = []
        self._sizes: dict[int, tuple[Segment, int]] = {}
        self._returned: deque[tuple[int, int]] = deque()  # (event, address): given back, perhaps still in use
        self._tensors: dict[int, Segment] = {}  # blocks that a tensor lies over
        self._lock = threading.RLock()
        self._closed = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Any:
        """A tensor on the heap, not initialised."""
        import torch

        if any(n < 0 for n in shape):
            raise ValueError(f"a shape has no negative sizes: {tuple(shape)}")
        size_bytes = math.prod(shape) * dtype.itemsize
        if not size_bytes:
            on_gpu = self.kind is Kind.DEVICE and torch.cuda.is_available()
            where = torch.device("cuda", self.device.index) if on_gpu else torch.device("cpu")
            return torch.empty(tuple(shape), dtype=dtype, device=where)
        address = self.alloc(size_bytes)
        self._tensors[address] = self._sizes[address][0]
        give_back = functools.partial(self._give_back, address)
        with memory.lasting():
            if self.kind is Kind.DEVICE:
                raw = tensors.on_device(address, size_bytes, self.device.index, give_back)
            else:
                raw = tensors.on_host(address, size_bytes, give_back)
            return raw.view(dtype).view(tuple(shape))

    def alloc(self, size_bytes: int) -> int:
        """The address of a block; raises `HardwareError` when the memory is full."""
        size = -(-max(size_bytes, 1) // _ALIGN) * _ALIGN
        self.device.enter()
        with self._lock:
            if self._closed:
                raise HardwareError(f"the heap of {self.device.name} is closed")
            if not self.device.driver.stream_capturing(tensors.current_stream(self.device.index)):
                self._collect()  # a capture would end if a driver were asked for an event
            for segment in self.segments:
                if (address := self._take(segment, size)) is not None:
                    return address
            segment = self._grow(max(size, self._segment_bytes), size)
            address = self._take(segment, size)
            assert address is not None
            return address

    def free(self, address: int) -> None:
        """Gives a block back at once: nothing uses it any more."""
        with self._lock:
            segment, size = self._sizes.pop(address)
            spans = sorted([*segment.free, (address - segment.base, size)])
            joined: list[tuple[int, int]] = []
            for at, n in spans:
                if joined and joined[-1][0] + joined[-1][1] == at:
                    joined[-1] = (joined[-1][0], joined[-1][1] + n)
                else:
                    joined.append((at, n))
            segment.free = joined

    def find(self, address: int, size_bytes: int) -> tuple[Segment, int] | None:
        """(segment, offset in it) of a range that lies on the heap, otherwise None."""
        for segment in self.segments:
            if segment.base <= address and address + size_bytes <= segment.base + segment.size_bytes:
                return segment, address - segment.base
        return None

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are handed out."""
        return sum(size for _, size in self._sizes.values())

    def _take(self, segment: Segment, size: int) -> int | None:
        for k, (at, n) in enumerate(segment.free):
            if n >= size:
                segment.free[k : k + 1] = [(at + size, n - size)] if n > size else []
                self._sizes[segment.base + at] = (segment, size)
                return segment.base + at
        return None

    def _grow(self, wanted: int, least: int) -> Segment:
        if self.device.driver.stream_capturing(tensors.current_stream(self.device.index)):
            raise NotSupported("the heap can't grow while torch's current stream captures a graph: allocate before it")
        for size in dict.fromkeys((wanted, least)):
            try:
                base, handle = self._source.alloc(size)
            except HardwareError as error:
                refused = error
                continue
            made = Segment(base, size, handle, [(0, size)])
            self.segments.append(made)
            return made
        raise HardwareError(f"no {self.kind} memory for {least} bytes of heap on {self.device.name}: {refused}")

    def _give_back(self, address: int) -> None:
        """The last tensor over a block is gone; what it stood in a stream for may not be done.

        Takes no lock: the garbage collector may come here from anywhere, in any thread.
        """
        segment = self._tensors.pop(address)
        self.device.enter()
        if self._closed:
            if segment not in self._tensors.values():
                self._source.free(segment.base)
            return
        self._returned.append((self._mark(), address))

    def _mark(self) -> int:
        """An event behind what is in torch's current stream; 0 if that is capturing, and would take the event along."""
        driver, stream = self.device.driver, tensors.current_stream(self.device.index)
        if driver.stream_capturing(stream):
            return 0
        event = self.device.take_event()
        driver.event_record(event, stream)
        return event

    def _collect(self) -> None:
        for _ in range(len(self._returned)):
            event, address = self._returned.popleft()
            if event and self.device.driver.event_done(event):
                self.device.give_event(event)
                self.free(address)
            else:
                self._returned.append((event or self._mark(), address))

    def close(self) -> None:
        """Gives memory back to the driver: at once, or with the last tensor over it. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.device.enter()
            while self._returned:
                if event := self._returned.popleft()[0]:
                    self.device.give_event(event)
            held = list(self._tensors.values())
            for segment in self.segments:
                if segment not in held:
                    self._source.free(segment.base)
            self.segments = []
