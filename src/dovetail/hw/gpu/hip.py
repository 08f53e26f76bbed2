"""The table of the HIP runtime (libamdhip64): what `Driver` asks, and what only AMD's runtime has.

Written from the published headers and their source; **not yet run on hardware**. What the versions differ in is decided
here: batched copies came with 7.1 (a loop inside until 7.14), take attributes from 7.13 on and exchange memory from
7.14 on. Stream waits and writes are one-wave kernels, and take only memory that HIP knows. `hipStreamBatchMemOp` is
left alone: its kernel, as published, gives each row to a lane of its own, so rows would have no order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dovetail import env
from dovetail.errors import NotSupported
from dovetail.hw.capabilities import Capabilities
from dovetail.hw.gpu.driver import WAIT, DriverError, EngineQueues, Kind, Memory, Share, SourceOrder, Words
from dovetail.hw.gpu.library import Function, Library
from dovetail.hw.gpu.partition import StreamShare, mask_words, rounded
from dovetail.plan.step import Op

if TYPE_CHECKING:
    from dovetail.hw.gpu.rocr import Engines

#: Versions as the runtime tells them: 10,000,000 * major + 100,000 * minor + patch.
BATCH, BATCH_ATTRIBUTES, BATCH_ENGINE = 70_100_000, 71_300_000, 71_400_000
#: Entries of a batched copy; with more the runtime faults.
MOST_BATCHED = 8192
#: Compute units of a share come in eights: the mask's bits go round the XCDs of a GPU (bit i is on XCD i % 8 of an
#: MI300X), then round the shader engines of each, as the kernel driver maps them (mqd_symmetrically_map_cu_mask). So
#: eight neighbouring bits are one unit of every XCD. An XCD without a unit would hang the queue: workgroups are dealt
#: to all of them in turn. A run of bits keeps the shares even over the XCDs, and a multiple of 32 over the engines.
CORE_STEP = 8
#: Pitches above this are outside of what a 2-D copy is specified for.
MOST_PITCH = 2**31 - 1

_NOT_READY, _PEER_ALREADY_ENABLED, _INVALID_VALUE = 600, 704, 1
_KIND_DEFAULT = 4
_TYPE_UNREGISTERED, _TYPE_HOST = 0, 1
_STREAM_NON_BLOCKING, _EVENT_DISABLE_TIMING = 0x1, 0x2
_HOST_PORTABLE, _HOST_MAPPED, _HOST_COHERENT = 0x1, 0x2, 0x4000_0000
_MALLOC_SIGNAL, _IPC_LAZY_PEER, _CAPTURE_THREAD_LOCAL = 0x2, 0x1, 1
_ATTRIBUTE_MULTIPROCESSORS, _ATTRIBUTE_STREAM_WAIT = 63, 10013
_WAIT_GEQ, _WAIT_EQ, _EVERY_BIT = 0, 1, 2**64 - 1
_PREFER_OVERLAP, _PREFER_ENGINE, _SWAP = 0x1, 0x100, 0x200


class _Attributes(ctypes.Structure):
    """hipMemcpyAttributes. The location hints stay empty."""

    _fields_ = (("order", c_int), ("source", c_int * 2), ("target", c_int * 2), ("flags", c_uint))


class _Handle(ctypes.Structure):
    """hipIpcMemHandle_t, passed by value."""

    _fields_ = (("bytes", c_char * 64),)


class _PointerAttributes(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("device", c_int),
        ("device_pointer", c_void_p),
        ("host_pointer", c_void_p),
        ("managed", c_int),
        ("flags", c_uint),
    )


class _Pitched(ctypes.Structure):
    _fields_ = (("address", c_void_p), ("pitch", c_size_t), ("width", c_size_t), ("height", c_size_t))


class _Copy3D(ctypes.Structure):
    """hipMemcpy3DParms, without arrays."""

    _fields_ = (
        ("src_array", c_void_p),
        ("src_at", c_size_t * 3),
        ("src", _Pitched),
        ("dst_array", c_void_p),
        ("dst_at", c_size_t * 3),
        ("dst", _Pitched),
        ("extent", c_size_t * 3),
        ("kind", c_int),
    )


def _error_text(library: Library, code: int) -> tuple[str, str]:
    """The runtime's words. Also clears its last error, which would come up again at the next check of a framework."""
    name = library.raw("hipGetErrorName", c_int, restype=c_char_p)(code)
    text = library.raw("hipGetErrorString", c_int, restype=c_char_p)(code)
    library.raw("hipGetLastError")()
    return str(name, "utf-8"), str(text, "utf-8")  # type: ignore[call-overload]


def _out(function: Function, result: Any, *arguments: Any) -> Any:
    """Calls a function whose first argument is where its answer goes."""
    function(byref(result), *arguments)
    return result.value or 0


def slices(pitch: int, width: int) -> tuple[int, int] | None:
    """(pitch, height) of a slice of a 3-D copy of one row each, so that slices are `pitch` bytes apart and the pitch
    of their rows is small enough; None if no such division exists."""
    if pitch <= MOST_PITCH:
        return pitch, 1
    for height in range(2, 1025):
        if pitch % height == 0 and width <= pitch // height <= MOST_PITCH:
            return pitch // height, height
    return None


class HipDriver:
    """`Driver` over HIP. `path` is the library to load; without one, `DOVETAIL_HIP_LIBRARY` decides.

    Raises `NotSupported` if the library is missing or too old for what every call here needs.
    """

    name: Final = "hip"

    def __init__(self, path: str | None = None) -> None:
        self._library = library = Library("HIP runtime", path or env.library("hip"), _error_text)
        self._has_engines: bool | None = None
        f, p, out = library.function, c_void_p, POINTER(c_void_p)
        self._get_last_error = library.raw("hipGetLastError")
        self._set_device = f("hipSetDevice", c_int)
        self._attribute = f("hipDeviceGetAttribute", POINTER(c_int), c_int, c_int)
        self._stream_priority = f("hipStreamCreateWithPriority", out, c_uint, c_int)
        self._stream_destroy = f("hipStreamDestroy", p)
        self._stream_synchronize = f("hipStreamSynchronize", p)
        self._stream_query = library.raw("hipStreamQuery", p)
        self._stream_is_capturing = f("hipStreamIsCapturing", p, POINTER(c_int))
        self._stream_wait_event = f("hipStreamWaitEvent", p, p, c_uint)
        self._event_create = f("hipEventCreateWithFlags", out, c_uint)
        self._event_destroy = f("hipEventDestroy", p)
        self._event_record = f("hipEventRecord", p, p)
        self._event_query = library.raw("hipEventQuery", p)
        self._event_synchronize = f("hipEventSynchronize", p)
        self._event_elapsed = f("hipEventElapsedTime", POINTER(c_float), p, p)
        self._copy = f("hipMemcpyAsync", p, p, c_size_t, c_int, p)
        self._copy2d = f("hipMemcpy2DAsync", p, c_size_t, p, c_size_t, c_size_t, c_size_t, c_int, p)
        self._fill = f("hipMemsetAsync", p, c_int, c_size_t, p)
        self._pointer_attributes = library.raw("hipPointerGetAttributes", POINTER(_PointerAttributes), p)
        self._address_range = library.raw("hipMemGetAddressRange", out, POINTER(c_size_t), p)
        self._wait_value = f("hipStreamWaitValue64", p, p, c_uint64, c_uint, c_uint64)
        self._write_value = f("hipStreamWriteValue64", p, p, c_uint64, c_uint)
        self.version = int(_out(f("hipRuntimeGetVersion", POINTER(c_int)), c_int()))
        self._batch: Function | None = None
        self._engines: Engines | None = None  # opened when a plan first asks for engines of its own
        if self.version >= BATCH and library.has("hipMemcpyBatchAsync"):
            self._batch = library.raw("hipMemcpyBatchAsync", p, p, p, c_size_t, p, p, c_size_t, p, p)

    # --- devices

    def driver_version(self) -> int:
        """The version of the kernel driver's interface; `version` is the runtime's, on which the calls depend."""
        return int(_out(self._library.function("hipDriverGetVersion", POINTER(c_int)), c_int()))

    def num_devices(self) -> int:
        return int(_out(self._library.function("hipGetDeviceCount", POINTER(c_int)), c_int()))

    def use(self, device: int) -> None:
        self._set_device(device)

    def relax_capture(self) -> None:
        if self._library.has("hipThreadExchangeStreamCaptureMode"):
            relaxed = 2
            self._library.function("hipThreadExchangeStreamCaptureMode", c_void_p)(byref(c_int(relaxed)))

    def device_name(self, device: int) -> str:
        return self._text("hipDeviceGetName", 256, device)

    def device_pci(self, device: int) -> str:
        """The PCI address, such as "0000:c1:00.0": how other libraries find the same device."""
        return self._text("hipDeviceGetPCIBusId", 64, device)

    def device_uuid(self, device: int) -> bytes:
        uuid = (c_char * 16)()
        self._library.function("hipDeviceGetUuid", c_void_p, c_int)(uuid, device)
        return bytes(uuid.raw)

    def num_multiprocessors(self, device: int) -> int:
        return int(_out(self._attribute, c_int(), _ATTRIBUTE_MULTIPROCESSORS, device))

    def core_step(self, device: int) -> int:
        self._need_masks()
        return CORE_STEP

    def idle_step(self, device: int) -> int:
        return self.core_step(device)

    def split_cores(self, device: int, number: int, *, idle: bool = False) -> tuple[Share, Share]:
        self._need_masks()
        total = self.num_multiprocessors(device)
        taken = rounded(number, total, least=CORE_STEP, step=CORE_STEP, least_rest=CORE_STEP)
        return self._masked_share(device, 0, taken, total), self._masked_share(device, taken, total, total)

    def _need_masks(self) -> None:
        if not self._library.has("hipExtStreamCreateWithCUMask"):
            raise NotSupported(f"HIP {self.version} has no hipExtStreamCreateWithCUMask to reserve compute units with")

    def _masked_share(self, device: int, first: int, end: int, total: int) -> StreamShare:
        """The compute units `first` to `end` of `total`."""
        mask = mask_words(first, end, total)

        def create(priority: int) -> int:
            if priority:
                raise NotSupported(f"HIP gives streams with a mask of compute units no priority; 0, not {priority}")
            before = int(_out(self._library.function("hipGetDevice", POINTER(c_int)), c_int()))
            self.use(device)
            try:
                return self.stream_create_masked(mask)
            finally:
                self.use(before)

        return StreamShare(end - first, create, self.stream_destroy)

    def capabilities(self, device: int) -> Capabilities:
        return Capabilities(
            backend="hip",
            engine="SDMA engine",
            native_ops=frozenset({Op.COPY, Op.COPY2D, Op.REDUCE} | ({Op.SWAP} if self._swaps else set())),
            runs_captured=False,
            most_signals=512,
            runs_in_flight=4,
            compute_cores=0,
            batched_copy=self._batch is not None,
            most_batched=MOST_BATCHED if self._batch is not None else 0,
            stream_gates=bool(_out(self._attribute, c_int(), _ATTRIBUTE_STREAM_WAIT, device)),
            ipc=self._library.has("hipIpcGetMemHandle"),
            partition=self._library.has("hipExtStreamCreateWithCUMask"),
            engine_choice=self._chooses_engines(),
        )

    def can_reach(self, device: int, peer: int) -> bool:
        call = self._library.function("hipDeviceCanAccessPeer", POINTER(c_int), c_int, c_int)
        return device == peer or bool(_out(call, c_int(), device, peer))

    def enable_peer(self, peer: int) -> None:
        code = self._library.raw("hipDeviceEnablePeerAccess", c_int, c_uint)(peer, 0)
        self._answer("hipDeviceEnablePeerAccess", code, _PEER_ALREADY_ENABLED)

    # --- streams and events

    def stream_create(self, *, priority: int = 0) -> int:
        return int(_out(self._stream_priority, c_void_p(), _STREAM_NON_BLOCKING, priority))

    def stream_create_masked(self, mask_words: Sequence[int]) -> int:
        """A stream whose kernels use only the compute units of the mask: bit i of word j is unit 32 * j + i."""
        if not any(mask_words):
            raise ValueError(f"the mask {list(mask_words)} leaves no compute unit; set at least one bit")
        create = self._library.function("hipExtStreamCreateWithCUMask", POINTER(c_void_p), c_uint32, POINTER(c_uint32))
        return int(_out(create, c_void_p(), len(mask_words), (c_uint32 * len(mask_words))(*mask_words)))

    def stream_priorities(self) -> tuple[int, int]:
        least, greatest = c_int(), c_int()
        ask = self._library.function("hipDeviceGetStreamPriorityRange", POINTER(c_int), POINTER(c_int))
        ask(byref(least), byref(greatest))
        return least.value, greatest.value

    def stream_destroy(self, stream: int) -> None:
        self._stream_destroy(stream)

    def stream_synchronize(self, stream: int) -> None:
        self._stream_synchronize(stream)

    def stream_done(self, stream: int) -> bool:
        return self._answer("hipStreamQuery", self._stream_query(stream), _NOT_READY)

    def stream_capturing(self, stream: int) -> bool:
        status = c_int()
        self._stream_is_capturing(stream, byref(status))
        return status.value != 0

    def event_create(self, *, timing: bool = False) -> int:
        return int(_out(self._event_create, c_void_p(), 0 if timing else _EVENT_DISABLE_TIMING))

    def event_destroy(self, event: int) -> None:
        self._event_destroy(event)

    def event_record(self, event: int, stream: int) -> None:
        self._event_record(event, stream)

    def event_done(self, event: int) -> bool:
        return self._answer("hipEventQuery", self._event_query(event), _NOT_READY)

    def event_synchronize(self, event: int) -> None:
        self._event_synchronize(event)

    def event_elapsed_us(self, begin: int, end: int) -> float:
        return float(_out(self._event_elapsed, c_float(), begin, end)) * 1e3

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._stream_wait_event(stream, event, 0)

    # --- memory

    def device_alloc(self, size_bytes: int) -> int:
        return int(_out(self._library.function("hipMalloc", POINTER(c_void_p), c_size_t), c_void_p(), size_bytes))

    def device_free(self, address: int) -> None:
        self._library.function("hipFree", c_void_p)(address)

    def signal_alloc(self) -> int:
        """The 64-bit word of a fresh HSA signal: memory that streams can write and wait for, and engines too
        (`rocr.Engines.signal_at`). `device_free` frees it."""
        alloc = self._library.function("hipExtMallocWithFlags", POINTER(c_void_p), c_size_t, c_uint)
        return int(_out(alloc, c_void_p(), 8, _MALLOC_SIGNAL))

    def host_alloc(self, size_bytes: int) -> int:
        if size_bytes <= 0:  # HIP would give address 0 and no error
            raise ValueError(f"{size_bytes} bytes of host memory cannot be allocated; the least is 1")
        alloc = self._library.function("hipHostMalloc", POINTER(c_void_p), c_size_t, c_uint)
        return int(_out(alloc, c_void_p(), size_bytes, _HOST_PORTABLE | _HOST_MAPPED | _HOST_COHERENT))

    def host_free(self, address: int) -> None:
        self._library.function("hipHostFree", c_void_p)(address)

    def host_register(self, address: int, size_bytes: int) -> None:
        register = self._library.function("hipHostRegister", c_void_p, c_size_t, c_uint)
        register(address, size_bytes, _HOST_PORTABLE | _HOST_MAPPED)

    def host_unregister(self, address: int) -> None:
        self._library.function("hipHostUnregister", c_void_p)(address)

    def device_pointer(self, host_address: int) -> int:
        ask = self._library.function("hipHostGetDevicePointer", POINTER(c_void_p), c_void_p, c_uint)
        return int(_out(ask, c_void_p(), host_address, 0))

    def memory_at(self, address: int) -> Memory:
        found = _PointerAttributes()
        code = self._pointer_attributes(byref(found), address)
        if not self._answer("hipPointerGetAttributes", code, _INVALID_VALUE) or found.type == _TYPE_UNREGISTERED:
            return Memory(Kind.PAGEABLE, -1, 0, 0)
        base, size = c_void_p(), c_size_t()
        code = self._address_range(byref(base), byref(size), found.device_pointer or address)
        told = self._answer("hipMemGetAddressRange", code, _INVALID_VALUE) and base.value is not None
        kind = Kind.PINNED if found.type == _TYPE_HOST else Kind.DEVICE
        return Memory(kind, found.device, base.value or 0, size.value) if told else Memory(kind, found.device, 0, 0)

    def ipc_export(self, address: int) -> bytes:
        handle = _Handle()
        self._library.function("hipIpcGetMemHandle", POINTER(_Handle), c_void_p)(byref(handle), address)
        return ctypes.string_at(byref(handle), 64)

    def ipc_open(self, handle: bytes) -> int:
        call = self._library.function("hipIpcOpenMemHandle", POINTER(c_void_p), _Handle, c_uint)
        return int(_out(call, c_void_p(), _Handle.from_buffer_copy(handle), _IPC_LAZY_PEER))

    def ipc_close(self, address: int) -> None:
        self._library.function("hipIpcCloseMemHandle", c_void_p)(address)

    # --- copies

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        self._copy(dst, src, size_bytes, _KIND_DEFAULT, stream)

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        if rows == 1 or dst_pitch == src_pitch == width:
            self.copy(dst, src, width * rows, stream)
            return
        if max(dst_pitch, src_pitch) <= MOST_PITCH:
            self._copy2d(dst, dst_pitch, src, src_pitch, width, rows, _KIND_DEFAULT, stream)
            return
        to, of = slices(dst_pitch, width), slices(src_pitch, width)
        if to is None or of is None:
            for row in range(rows):
                self.copy(dst + row * dst_pitch, src + row * src_pitch, width, stream)
            return
        shape = _Copy3D(
            src=_Pitched(src, of[0], width, of[1]),
            dst=_Pitched(dst, to[0], width, to[1]),
            extent=(c_size_t * 3)(width, 1, rows),
            kind=_KIND_DEFAULT,
        )
        self._library.function("hipMemcpy3DAsync", POINTER(_Copy3D), c_void_p)(byref(shape), stream)

    def copy_batch(self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int) -> None:
        issue = self.prepared_batch(dst, src, size, order, stream)
        self._refuse_capturing(stream)
        issue()

    def prepared_batch(
        self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int
    ) -> Callable[[], None]:
        if self.version < BATCH_ATTRIBUTES:
            return self._prepared(dst, src, size, None, stream)  # always in the order of the stream
        engine = _PREFER_ENGINE if self.version >= BATCH_ENGINE else 0
        return self._prepared(dst, src, size, _Attributes(order=order, flags=_PREFER_OVERLAP | engine), stream)

    def engine_queues(self, device: int, queues: Sequence[tuple[Words, Words, Words]]) -> EngineQueues:
        from dovetail.hw.gpu.rocr import Engines
        from dovetail.hw.gpu.sdma import SdmaQueues

        if not self.capabilities(device).engine_choice:
            raise NotSupported("ROCr is not there, or can't put a copy on a chosen engine")
        if self._engines is None:
            self._engines = Engines()
        return SdmaQueues(self, self._engines, device, queues)

    def swap_batch(self, a: Words, b: Words, size: Words, stream: int) -> None:
        """Exchanges a[i] and b[i], in no order among themselves. `NotSupported` unless `native_ops` has SWAP."""
        if not self._swaps:
            raise NotSupported(f"HIP {self.version} cannot exchange memory; from {BATCH_ENGINE} on it can")
        issue = self._prepared(a, b, size, _Attributes(order=SourceOrder.STREAM, flags=_SWAP), stream)
        self._refuse_capturing(stream)
        issue()

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        self._fill(address, byte, size_bytes, stream)

    # --- stream memory operations

    def stream_words(self, rows: NDArray[np.void], stream: int) -> None:
        """HIP compares without a sign: values count up from zero, where both comparisons agree."""
        columns = (rows["kind"].tolist(), rows["address"].tolist(), rows["value"].tolist())
        for kind, address, value in zip(*columns, strict=True):
            if kind == WAIT:
                self._wait_value(stream, address, value, _WAIT_GEQ, _EVERY_BIT)
            else:
                self._write_value(stream, address, value, 0)

    def stream_wait_equal(self, address: int, value: int, stream: int) -> None:
        """Holds the stream until the word is `value`: for signals, which count down."""
        self._wait_value(stream, address, value, _WAIT_EQ, _EVERY_BIT)

    # --- graphs

    def graph_begin(self, stream: int) -> None:
        self._library.function("hipStreamBeginCapture", c_void_p, c_int)(stream, _CAPTURE_THREAD_LOCAL)

    def graph_end(self, stream: int) -> int:
        end = self._library.function("hipStreamEndCapture", c_void_p, POINTER(c_void_p))
        captured = c_void_p()
        end(stream, byref(captured))
        try:
            make = self._library.function("hipGraphInstantiateWithFlags", POINTER(c_void_p), c_void_p, c_uint64)
            return int(_out(make, c_void_p(), captured, 0))
        finally:
            self._library.function("hipGraphDestroy", c_void_p)(captured)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._library.function("hipGraphLaunch", c_void_p, c_void_p)(graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._library.function("hipGraphExecDestroy", c_void_p)(graph)

    @property
    def _swaps(self) -> bool:
        return self._batch is not None and self.version >= BATCH_ENGINE

    def _chooses_engines(self) -> bool:
        if self._has_engines is None:
            from dovetail.hw.gpu import rocr

            self._has_engines = rocr.available()
        return self._has_engines

    def _refuse_capturing(self, stream: int) -> None:
        if self.stream_capturing(stream):
            raise NotSupported("a batch of copies cannot be captured into a graph; use single copies there")

    def _prepared(
        self, dst: Words, src: Words, size: Words, shared: _Attributes | None, stream: int
    ) -> Callable[[], None]:
        """A call of the batch with these arrays; it keeps them."""
        batch, count = self._batch, len(dst)
        if batch is None:
            raise NotSupported(f"HIP {self.version} has no hipMemcpyBatchAsync; {BATCH} or newer has")
        if not count == len(src) == len(size) <= MOST_BATCHED:
            raise ValueError(
                f"a batch has as many sources ({len(src)}) and sizes ({len(size)}) as targets ({count}), "
                f"and at most {MOST_BATCHED} entries; cut it into several"
            )
        arrays = dst, src, size
        pointers = tuple(array.ctypes.data for array in arrays)
        first, failed = c_size_t(0), c_size_t()
        attributes = (byref(shared), byref(first), 1) if shared is not None else (None, None, 0)

        def issue(_keep: object = arrays) -> None:
            failed.value = 2**64 - 1
            code = batch(*pointers, count, *attributes, byref(failed), stream) if count else 0
            if code:
                error = self._library.error("hipMemcpyBatchAsync", code)
                which = f"entry {failed.value}" if failed.value < count else "no single one"
                raise DriverError(f"{error} ({which} of {count} entries)", call=error.call, code=code)

        return issue

    def _answer(self, call: str, code: int, no: int) -> bool:
        """True for success and False for the code that means no; the runtime must not remember that one."""
        if code not in (0, no):
            raise self._library.error(call, code)
        if code:
            self._get_last_error()
        return code == 0

    def _text(self, call: str, size: int, device: int) -> str:
        buffer = ctypes.create_string_buffer(size)
        self._library.function(call, c_char_p, c_int, c_int)(buffer, size, device)
        return buffer.value.decode()
