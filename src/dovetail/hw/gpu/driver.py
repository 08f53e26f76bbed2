"""The seam between our code and a GPU driver: the calls that the executor makes, and nothing of a vendor.

`load("cuda")` and `load("hip")` give the two tables. Addresses, streams, events and graphs are plain integers (0 is no
stream: the legacy default one). Many copies travel as NumPy arrays, so a call costs no Python per copy and the
interpreter is free while the driver works. Every call that the driver refuses raises `DriverError` with its own text.
Nothing is loaded when this module is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import HardwareError
from dovetail.hw.capabilities import Capabilities

Words = NDArray[np.uint64]


class DriverError(HardwareError):
    """A driver call failed. `call` and `code` are the driver's; the text has its name and message."""

    def __init__(self, message: str, *, call: str, code: int) -> None:
        super().__init__(message)
        self.call, self.code = call, code


class SourceOrder(IntEnum):
    """When a batch of copies may read its sources."""

    STREAM = 1  #: in the order of the stream: the only right choice for data that something still writes
    DURING_CALL = 2  #: before the call returns
    ANY = 3  #: at any time: host memory that nothing writes meanwhile


class Kind(StrEnum):
    """What an address points to."""

    PAGEABLE = "pageable"  #: host memory that the driver does not know: copies from it are not asynchronous
    PINNED = "pinned"  #: host memory, allocated or registered through the driver
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Memory:
    """What the driver knows of an address: one allocation or registration. A copy may not reach beyond it."""

    kind: Kind
    device: int  #: -1 for pageable memory
    base: int  #: 0 where the driver does not tell
    size_bytes: int


#: One stream memory operation: row kinds of `stream_words`.
WAIT, WRITE = 0, 1

WORD = np.dtype([("kind", "u4"), ("address", "u8"), ("value", "u8")], align=True)


class EngineQueues(Protocol):
    """Copies bound to engines, to be run again and again."""

    def run(self, stream: int) -> None:
        """Starts them when the stream gets there; the stream goes on when all are done."""

    def close(self) -> None: ...


class Share(Protocol):
    """Some multiprocessors (compute units) of a GPU, for kernels that must leave the others alone."""

    @property
    def num_cores(self) -> int:
        """How many it really has."""

    def stream(self, *, priority: int = 0) -> int:
        """A new stream whose kernels run on this share only, its own until `close`. Copies run on it as on any other.

        Work goes to it as to a stream of `stream_create`, events order both. On CUDA it does not synchronise with the
        legacy default stream; on HIP it does, and any priority but 0 is `NotSupported`.
        """

    def close(self) -> None:
        """Destroys its streams and gives the multiprocessors back. Waits for nothing: its work is over, or the
        caller waits for it first. Safe to call twice."""


class Driver(Protocol):
    """What the executor asks of a GPU driver. Methods act on the device that is current in the calling thread."""

    @property
    def name(self) -> str:
        """ "cuda" or "hip"."""

    @property
    def version(self) -> int:
        """Of the driver, as it tells it: 13000, 70100000."""

    # --- devices
    def num_devices(self) -> int: ...
    def use(self, device: int) -> None:
        """Makes `device` current in this thread (its primary context, the one torch uses)."""

    def relax_capture(self) -> None:
        """From now on what this thread calls does not spoil a capture that another thread of the process has begun."""

    def device_name(self, device: int) -> str: ...
    def device_uuid(self, device: int) -> bytes:
        """16 bytes, the same in every process."""

    def num_multiprocessors(self, device: int) -> int: ...
    def core_step(self, device: int) -> int:
        """Shares come in multiples of so many multiprocessors. `NotSupported` unless `capabilities().partition`."""

    def idle_step(self, device: int) -> int:
        """Shares that stay idle come in multiples of so many, which may be fewer: no kernel has to fit there."""

    def split_cores(self, device: int, number: int, *, idle: bool = False) -> tuple[Share, Share]:
        """Two shares of the multiprocessors that have none in common: at least `number` of them, rounded up to what
        the hardware can cut, and all others. `idle`: nothing will run in the first.

        Raises:
            ValueError: `number` is below 1, or leaves too little for the second share. Nothing was made.
            NotSupported: the driver, or a GPU as small as this one, can't split.
            DriverError: the driver refused; what was made is gone again.
        """

    def capabilities(self, device: int) -> Capabilities: ...
    def can_reach(self, device: int, peer: int) -> bool:
        """True if `device` can access the memory of `peer` directly."""

    def enable_peer(self, peer: int) -> None:
        """Lets the current device access `peer`'s memory; no error if it could already."""

    # --- streams and events
    def stream_create(self, *, priority: int = 0) -> int:
        """A stream that does not synchronise with the legacy default one."""

    def stream_priorities(self) -> tuple[int, int]:
        """(least, greatest); a lower number is more urgent."""

    def stream_destroy(self, stream: int) -> None: ...
    def stream_synchronize(self, stream: int) -> None: ...
    def stream_done(self, stream: int) -> bool: ...
    def stream_capturing(self, stream: int) -> bool: ...
    def event_create(self, *, timing: bool = False) -> int: ...
    def event_destroy(self, event: int) -> None: ...
    def event_record(self, event: int, stream: int) -> None: ...
    def event_done(self, event: int) -> bool: ...
    def event_synchronize(self, event: int) -> None: ...
    def event_elapsed_us(self, begin: int, end: int) -> float: ...
    def stream_wait_event(self, stream: int, event: int) -> None: ...

    # --- memory
    def device_alloc(self, size_bytes: int) -> int: ...
    def device_free(self, address: int) -> None: ...
    def host_alloc(self, size_bytes: int) -> int:
        """Pinned host memory that every device can reach under the same address."""

    def host_free(self, address: int) -> None: ...
    def host_register(self, address: int, size_bytes: int) -> None: ...
    def host_unregister(self, address: int) -> None: ...
    def device_pointer(self, host_address: int) -> int:
        """Where the current device finds pinned host memory."""

    def memory_at(self, address: int) -> Memory: ...
    def ipc_export(self, address: int) -> bytes:
        """A handle (64 bytes) of the allocation that begins at `address`, for other processes."""

    def ipc_open(self, handle: bytes) -> int: ...
    def ipc_close(self, address: int) -> None: ...

    # --- copies
    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None: ...
    def copy_rows(
        self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """A strided copy, in the form that is fast for its pitches (3-D above 2 GiB)."""

    def copy_batch(self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int) -> None:
        """Many copies in one call, in no order among themselves. The arrays are contiguous and of one length.

        Raises `NotSupported` where `capabilities().batched_copy` is false.
        """

    def prepared_batch(
        self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int
    ) -> Callable[[], None]:
        """`copy_batch` with its arguments checked and converted now, to be called again and again.

        Whoever calls it vouches that the stream is not capturing then.
        """

    def swap_batch(self, a: Words, b: Words, size: Words, stream: int) -> None:
        """Exchanges memory in place, in no order. Raises `NotSupported` unless SWAP is among the native ops."""

    def engine_queues(self, device: int, queues: Sequence[tuple[Words, Words, Words]]) -> EngineQueues:
        """Queues of copies (dst, src, size), each on an engine of its own.

        Raises `NotSupported` unless `capabilities().engine_choice`, or if no engine serves a queue.
        """

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None: ...

    # --- stream memory operations
    def stream_words(self, rows: NDArray[np.void], stream: int) -> None:
        """Waits and writes (rows of `WORD`), in order: WAIT until the signed difference is not negative; WRITE after
        everything before it in the stream is done and visible."""

    # --- graphs
    def graph_begin(self, stream: int) -> None: ...
    def graph_end(self, stream: int) -> int:
        """Ends the capture and returns an executable graph."""

    def graph_launch(self, graph: int, stream: int) -> None: ...
    def graph_destroy(self, graph: int) -> None: ...


@functools.cache
def load(name: str) -> Driver:
    """The table of a driver: "cuda" or "hip". Raises `NotSupported` that says what is missing."""
    if name == "cuda":
        from dovetail.hw.gpu.cuda import CudaDriver

        return CudaDriver()
    if name == "hip":
        from dovetail.hw.gpu.hip import HipDriver

        return HipDriver()
    raise ValueError(f"there are the drivers cuda and hip, not {name!r}")
