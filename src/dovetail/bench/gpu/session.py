"""A GPU opened for measuring: nobody else on it, pinned memory bounded, everything given back at the end.

Owns the device and its two heaps. torch, where it sees the GPU, makes its context first: both then share the primary
one. Where torch sees none (a stand-in driver) there are still plans and copies, but no kernels.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

from dovetail.bench.gpu.spec import Bounds
from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Driver, load
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.program import MOST_GATED_STREAMS
from dovetail.measure import gpu

if TYPE_CHECKING:
    import torch

_ALIGN = 4096


class Arena:
    """One block of memory, cut up anew for every size."""

    def __init__(self, heap: Heap, size_bytes: int) -> None:
        import torch

        self._all: torch.Tensor = heap.empty((size_bytes,), torch.uint8)
        self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """The next bytes of it, on pages of their own; what they hold is undefined."""
        begin = self._used
        if begin + size_bytes > self._all.numel():
            raise ValueError(f"an arena of {self._all.numel()} bytes has no {size_bytes} left behind {begin}")
        self._used = pages(begin + size_bytes)
        return self._all[begin : begin + size_bytes]

    def reset(self) -> None:
        """All of it is free again: nothing that was taken may be used any more."""
        self._used = 0


def pages(size_bytes: int) -> int:
    """Rounded up to whole pages: what `take` uses up."""
    return -(-size_bytes // _ALIGN) * _ALIGN


class Session:
    """The GPU number 0 that this process sees. `with Session("cuda", Bounds()) as session:`.

    Raises:
        NotSupported: there is no driver or no GPU, or somebody else uses it and `bounds.force` is not set.
        ValueError: `bounds` asks for more memory than there is.
    """

    def __init__(self, backend: str = "cuda", bounds: Bounds | None = None) -> None:
        bounds = bounds or Bounds()
        self.driver: Driver = load(backend)
        if not self.driver.num_devices():
            raise NotSupported(f"the {backend} driver is here, but shows this process no GPU")
        self.uuid = self.driver.device_uuid(0)
        gpu.refuse_if_busy(self.uuid, bounds.force)
        self.pin_limit_bytes = gpu.pin_limit_bytes(bounds.pin_bytes)
        self.has_torch = _torch_began()
        self.device = Device(backend)
        self._heaps: list[Heap] = []
        self._streams: list[int] = []
        self._urgent: list[int] = []
        self.pinned_bytes = 0
        self._open = True

    def arena(self, kind: str, size_bytes: int) -> Arena:
        """Memory for measuring, "device" or "host" (pinned).

        Raises:
            NotSupported: more would be pinned than the bound allows.
        """
        size_bytes = pages(size_bytes)
        if kind == "host":
            if self.pinned_bytes + size_bytes > self.pin_limit_bytes:
                raise NotSupported(f"{size_bytes} bytes of pinned memory are over the limit; {self.limit_text()}")
            self.pinned_bytes += size_bytes
        heap = Heap(self.device, kind, segment_bytes=size_bytes)
        self._heaps.append(heap)
        return Arena(heap, size_bytes)

    def limit_text(self) -> str:
        """The bound, and what raises it."""
        return f"at most {self.pin_limit_bytes} bytes are pinned here, --pin allows more"

    def streams(self, number: int) -> list[int]:
        """Streams for baselines, the same ones each time: many would share the hardware's few queues."""
        while len(self._streams) < number:
            self._streams.append(self.driver.stream_create())
        return self._streams[:number]

    def urgent(self) -> int:
        """A stream of the greatest priority, the same one each time."""
        if not self._urgent:
            self._urgent.append(self.driver.stream_create(priority=min(self.driver.stream_priorities())))
        return self._urgent[0]

    def synchronize(self) -> None:
        """Waits until torch's part of the GPU has nothing left to do."""
        if self.has_torch:
            import torch

            torch.cuda.synchronize()

    def facts(self) -> dict[str, Any]:
        """The GPU for a record, without what names this very one. Ask while it is warm: an idle link slows down."""
        found = gpu.describe(self.uuid, num_multiprocessors=self.driver.num_multiprocessors(0))
        found.pop("uuid", None)
        found["name"] = found["name"] or self.device.name
        return found | {"driver_api": self.driver.version, "pinned_bytes": self.pinned_bytes}

    def close(self) -> None:
        """Waits for what is still in flight and gives everything back. Safe to call twice."""
        if not self._open:
            return
        with contextlib.suppress(DovetailError):  # closing after an error of the GPU: nothing more to wait for
            for stream in {*self.device.streams(MOST_GATED_STREAMS), *self._streams, *self._urgent}:
                self.driver.stream_synchronize(stream)
            self.synchronize()
            for stream in (*self._streams, *self._urgent):
                self.driver.stream_destroy(stream)
        for heap in self._heaps:
            heap.close()
        self.device.close()
        self._heaps, self._streams, self._urgent, self._open = [], [], [], False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _torch_began() -> bool:
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_available():
        return False
    cuda.init()
    torch.zeros(1, device="cuda")
    return True
