"""The CUDA driver (libcuda) behind the `Driver` protocol, through ctypes.

Every entry point is resolved by `cuGetProcAddress` at an explicit version, because the same name takes other arguments
in another version. Kernels are none of this module's business. Nothing is loaded when it is imported.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail import env
from dovetail.errors import NotSupported
from dovetail.hw.capabilities import Capabilities
from dovetail.hw.gpu.cuda_calls import ANSWERS, CALLS, GREEN, IpcHandle, P
from dovetail.hw.gpu.driver import WAIT, WRITE, DriverError, EngineQueues, Kind, Memory, Share, SourceOrder, Words
from dovetail.hw.gpu.green import Green
from dovetail.hw.gpu.library import Function, Library
from dovetail.plan.step import Op

#: The driver states no limit, and a batch of this length ran on an H200 (driver 580). At 1-1.5 us per entry the call
#: then takes more than a second, so a longer one has no use.
MOST_BATCHED = 1 << 20

#: `cuStreamBatchMemOp` takes fewer than 256 operations.
MOST_WORDS = 255

#: CU_DEVICE_ATTRIBUTE_MAX_PITCH of an H200. Beyond it a 2-D copy is not promised to work, and was four times slower.
MOST_PITCH = (1 << 31) - 1

_INVALID_VALUE, _NOT_READY, _PEER_ALREADY_ENABLED = 1, 600, 704

# CUdevice_attribute.
_MULTIPROCESSORS, _CAPABILITY_MAJOR, _VMM, _STREAM_WORDS_64, _IPC = 16, 75, 102, 122, 125

_UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED: the driver finds out from the address
_RELAXED = 2  # a mode of captures, as _THREAD_LOCAL is
_NON_BLOCKING, _DISABLE_TIMING, _PORTABLE_MAPPED, _LAZY_PEER, _THREAD_LOCAL = 1, 2, 1 | 2, 1, 1
_PREFER_OVERLAP_WITH_COMPUTE = 0x1
_LEGACY = 1  # CU_STREAM_LEGACY, the default stream by its other name


# CUDA_MEMCPY2D and CUDA_MEMCPY3D: x, y(, z, lod), memory type, host, device, array(, reserved), pitch(, height) of the
# source, the same of the destination, then width, height(, depth).
_COPY_2D = struct.Struct("<2QI4x4Q2QI4x4Q2Q")
_COPY_3D = struct.Struct("<4QI4x6Q4QI4x6Q3Q")

# CUmemcpyAttributes: order, two location hints (type, id) that only managed memory heeds, flags.
_ATTRIBUTES = {order: struct.pack("<I4iI", order, 0, 0, 0, 0, _PREFER_OVERLAP_WITH_COMPUTE) for order in SourceOrder}
_FIRST = bytes(8)  # the attributes hold from entry 0 on

# CUstreamBatchMemOpParams, the 64-bit wait and write: operation, address, value, flags, alias. Flags 0 makes a wait one
# for "greater or equal", cyclic.
_MEM_OP = struct.Struct("<I4xQQ24x")
_FEW = 8  # up to so many, packing one by one is faster than NumPy
_OPERATIONS = (4, 5)  # CU_STREAM_MEM_OP_WAIT_VALUE_64 and _WRITE_VALUE_64, by WAIT and WRITE

# CUpointer_attribute: memory type (0 for unknown memory), device ordinal, start and size of the range.
_POINTER_ATTRIBUTES = (c_int * 4)(2, 9, 11, 12)
_HOST = 1


def _error_text(library: Library, code: int) -> tuple[str, str]:
    """The driver's name and message of an error."""
    found = []
    for symbol in ("cuGetErrorName", "cuGetErrorString"):
        text = c_char_p()
        library.raw(symbol, c_int, P)(code, byref(text))
        found.append((text.value or b"unknown error").decode())
    return found[0], found[1]


@functools.lru_cache(maxsize=1024)
def _layers(stride: int, width: int) -> tuple[int, int] | None:
    """A stride as (pitch, height) of a 3-D copy: pitch * height == stride, width <= pitch <= MOST_PITCH. None if none.

    >>> _layers(3 << 30, 4096)
    (4096, 786432)
    """
    if stride <= MOST_PITCH:
        return stride, 1
    if stride % width == 0 and width <= MOST_PITCH:
        return width, stride // width
    fewest = -(-stride // MOST_PITCH)
    for height in range(fewest, min(stride // width, fewest + 4096) + 1):
        if stride % height == 0:
            return stride // height, height
    return None


class CudaDriver:
    """The CUDA driver. Objects of it share the process's state: streams of one are streams of all."""

    name = "cuda"

    def __init__(self, path: str | None = None) -> None:
        """`path`: the library, else what `dovetail.env` names. Raises `NotSupported` without a driver or a device."""
        self._library = Library("CUDA driver", path or env.library("cuda"), _error_text)
        self._resolve = self._library.raw("cuGetProcAddress_v2", c_char_p, P, c_int, c_uint64, P)
        calls = {symbol: self._library.at(self._need(symbol, v), symbol, *a) for symbol, (v, a) in CALLS.items()}
        calls |= {symbol: self._library.raw_at(self._need(symbol, v), *a) for symbol, (v, a) in ANSWERS.items()}
        self._call = SimpleNamespace(**calls)
        try:
            self._call.cuInit(0)
        except DriverError as error:
            raise NotSupported(f"the CUDA driver finds no device to work with: {error}") from None
        version = c_int()
        self._call.cuDriverGetVersion(byref(version))
        self.version = version.value
        self._batch, self._batch_tells = self._find_batch()
        self._query = self._call.cuEventQuery  # asked in a loop
        self._contexts: dict[int, int] = {}
        self._capabilities: dict[int, Capabilities] = {}
        self._green: Green | None = None  # made when a share is first asked for
        # Streams of ours, and those of them that cannot be in a capture: neither begun nor joined through an event
        # since we last asked.
        self._streams: set[int] = set()
        self._plain: set[int] = set()

    def _address(self, symbol: str, version: int) -> int:
        """Where the driver has `symbol` with the arguments of `version`; 0 if it has not."""
        address, status = c_uint64(), c_int()
        code = self._resolve(symbol.encode(), byref(address), version, 0, byref(status))
        return 0 if code or status.value else address.value

    def _need(self, symbol: str, version: int) -> int:
        address = self._address(symbol, version)
        if not address:
            raise NotSupported(f"the CUDA driver has no {symbol} of version {version}; CUDA 12.0 or later is needed")
        return address

    def _find_batch(self) -> tuple[Function | None, bool]:
        """The batched copy, and whether it is the older form that tells which entry failed (one argument more)."""
        arguments = (P, P, P, c_size_t, P, P, c_size_t)
        if address := self._address("cuMemcpyBatchAsync", 13000):  # refused by an older driver
            return self._library.raw_at(address, *arguments, P), False
        if address := self._address("cuMemcpyBatchAsync", 12080):
            return self._library.raw_at(address, *arguments, P, P), True
        return None, False

    # --- devices

    def num_devices(self) -> int:
        return self._int("cuDeviceGetCount")

    def use(self, device: int) -> None:
        self._call.cuCtxSetCurrent(self._context(device))

    def relax_capture(self) -> None:
        if address := self._address("cuThreadExchangeStreamCaptureMode", 10010):
            self._library.at(address, "cuThreadExchangeStreamCaptureMode", P)(byref(c_int(_RELAXED)))

    def device_name(self, device: int) -> str:
        name = ctypes.create_string_buffer(256)
        self._call.cuDeviceGetName(name, len(name), self._device(device))
        return name.value.decode()

    def device_uuid(self, device: int) -> bytes:
        uuid = (c_ubyte * 16)()
        self._call.cuDeviceGetUuid(uuid, self._device(device))
        return bytes(uuid)

    def num_multiprocessors(self, device: int) -> int:
        return self._attribute(_MULTIPROCESSORS, device)

    def core_step(self, device: int) -> int:
        return self._cuts().step(self._device(device), self._attribute(_CAPABILITY_MAJOR, device))

    def idle_step(self, device: int) -> int:
        return self._cuts().idle_step(self._device(device), self._attribute(_CAPABILITY_MAJOR, device))

    def split_cores(self, device: int, number: int, *, idle: bool = False) -> tuple[Share, Share]:
        green = self._cuts()
        self._context(device)  # a green context would make a primary one, and unmake it with its last share
        return green.split(self._device(device), self._attribute(_CAPABILITY_MAJOR, device), number, idle=idle)

    def _cuts(self) -> Green:
        if self._green is None:
            lacks = [symbol for symbol, (version, _) in GREEN.items() if not self._address(symbol, version)]
            if lacks:
                raise NotSupported(
                    f"CUDA {self.version} has no {lacks[0]}; 12050 and later can split the multiprocessors"
                )
            calls = {s: self._library.at(self._address(s, v), s, *a) for s, (v, a) in GREEN.items()}
            self._green = Green(SimpleNamespace(**calls), self.version, self._own, self.stream_destroy)
        return self._green

    def capabilities(self, device: int) -> Capabilities:
        found = self._capabilities.get(device)
        if found is None:
            found = self._capabilities[device] = self._find_capabilities(device)
        return found

    def _find_capabilities(self, device: int) -> Capabilities:
        strided = any(self._address("cuMemcpy3DBatchAsync", version) for version in (13000, 12080))
        return Capabilities(
            backend="cuda",
            engine="copy engine",
            native_ops=frozenset((Op.COPY, Op.COPY2D, Op.REDUCE)),
            runs_captured=False,
            most_signals=512,
            runs_in_flight=4,
            compute_cores=0,
            batched_copy=self._batch is not None,
            most_batched=MOST_BATCHED if self._batch is not None else 0,
            strided_batch=strided,
            stream_gates=bool(self._attribute(_STREAM_WORDS_64, device)),
            ipc=bool(self._attribute(_IPC, device)),
            vmm=bool(self._attribute(_VMM, device)),
            partition=all(self._address(symbol, version) for symbol, (version, _) in GREEN.items()),
        )

    def can_reach(self, device: int, peer: int) -> bool:
        return device == peer or bool(self._int("cuDeviceCanAccessPeer", self._device(device), self._device(peer)))

    def enable_peer(self, peer: int) -> None:
        self._answer("cuCtxEnablePeerAccess", self._context(peer), 0, also=_PEER_ALREADY_ENABLED)

    def _device(self, ordinal: int) -> int:
        return self._int("cuDeviceGet", ordinal)

    def _context(self, device: int) -> int:
        """The primary context, retained once and for good: torch holds it as well."""
        if device not in self._contexts:
            self._contexts[device] = self._handle("cuDevicePrimaryCtxRetain", self._device(device))
        return self._contexts[device]

    def _attribute(self, attribute: int, device: int) -> int:
        return self._int("cuDeviceGetAttribute", attribute, self._device(device))

    # --- streams and events

    def stream_create(self, *, priority: int = 0) -> int:
        return self._own(self._handle("cuStreamCreateWithPriority", _NON_BLOCKING, priority))

    def _own(self, stream: int) -> int:
        """Notes a fresh stream as ours."""
        self._streams.add(stream)
        self._plain.add(stream)
        return stream

    def stream_priorities(self) -> tuple[int, int]:
        least, greatest = c_int(), c_int()
        self._call.cuCtxGetStreamPriorityRange(byref(least), byref(greatest))
        return least.value, greatest.value

    def stream_destroy(self, stream: int) -> None:
        self._streams.discard(stream)
        self._plain.discard(stream)
        self._call.cuStreamDestroy(stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call.cuStreamSynchronize(stream)

    def stream_done(self, stream: int) -> bool:
        return self._answer("cuStreamQuery", stream, also=_NOT_READY) == 0

    def stream_capturing(self, stream: int) -> bool:
        status = c_int()
        self._call.cuStreamIsCapturing(stream, byref(status))
        return status.value != 0

    def event_create(self, *, timing: bool = False) -> int:
        return self._handle("cuEventCreate", 0 if timing else _DISABLE_TIMING)

    def event_destroy(self, event: int) -> None:
        self._call.cuEventDestroy(event)

    def event_record(self, event: int, stream: int) -> None:
        self._call.cuEventRecord(event, stream)

    def event_done(self, event: int) -> bool:
        code: int = self._query(event)
        if code not in (0, _NOT_READY):
            raise self._library.error("cuEventQuery", code)
        return code == 0

    def event_synchronize(self, event: int) -> None:
        self._call.cuEventSynchronize(event)

    def event_elapsed_us(self, begin: int, end: int) -> float:
        time_ms = c_float()
        self._call.cuEventElapsedTime(byref(time_ms), begin, end)
        return time_ms.value * 1e3

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._plain.discard(stream)  # an event recorded in a capture draws the stream into it
        self._call.cuStreamWaitEvent(stream, event, 0)

    # --- memory

    def device_alloc(self, size_bytes: int) -> int:
        return self._handle("cuMemAlloc", size_bytes)

    def device_free(self, address: int) -> None:
        self._call.cuMemFree(address)

    def host_alloc(self, size_bytes: int) -> int:
        if size_bytes <= 0:  # the driver would give address 0 and no error
            raise ValueError(f"{size_bytes} bytes of host memory cannot be allocated; the least is 1")
        return self._handle("cuMemHostAlloc", size_bytes, _PORTABLE_MAPPED)

    def host_free(self, address: int) -> None:
        self._call.cuMemFreeHost(address)

    def host_register(self, address: int, size_bytes: int) -> None:
        self._call.cuMemHostRegister(address, size_bytes, _PORTABLE_MAPPED)

    def host_unregister(self, address: int) -> None:
        self._call.cuMemHostUnregister(address)

    def device_pointer(self, host_address: int) -> int:
        return self._handle("cuMemHostGetDevicePointer", host_address, 0)

    def memory_at(self, address: int) -> Memory:
        kind, device, base, size = c_uint(), c_int(), c_uint64(), c_size_t()
        slots = (P * 4)(addressof(kind), addressof(device), addressof(base), addressof(size))
        code = self._answer("cuPointerGetAttributes", 4, _POINTER_ATTRIBUTES, slots, address, also=_INVALID_VALUE)
        if code or not kind.value:
            return Memory(Kind.PAGEABLE, -1, 0, 0)
        return Memory(Kind.PINNED if kind.value == _HOST else Kind.DEVICE, device.value, base.value, size.value)

    def ipc_export(self, address: int) -> bytes:
        handle = IpcHandle()
        self._call.cuIpcGetMemHandle(byref(handle), address)
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        if len(handle) != ctypes.sizeof(IpcHandle):
            raise ValueError(f"a handle has 64 bytes, not {len(handle)}")
        return self._handle("cuIpcOpenMemHandle", IpcHandle.from_buffer_copy(handle), _LAZY_PEER)

    def ipc_close(self, address: int) -> None:
        self._call.cuIpcCloseMemHandle(address)

    # --- copies

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        self._call.cuMemcpyAsync(dst, src, size_bytes, stream)

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        if width <= 0 or rows <= 0:
            return
        if rows == 1 or dst_pitch == src_pitch == width:
            self.copy(dst, src, width * rows, stream)
            return
        if min(dst_pitch, src_pitch) < width:
            raise ValueError(f"rows of {width} bytes overlap at pitches {dst_pitch} (dst) and {src_pitch} (src)")
        if max(dst_pitch, src_pitch) <= MOST_PITCH:
            source, target = (0, 0, _UNIFIED, 0, src, 0, src_pitch), (0, 0, _UNIFIED, 0, dst, 0, dst_pitch)
            self._call.cuMemcpy2DAsync(_COPY_2D.pack(*source, *target, width, rows), stream)
            return
        # Each row becomes a layer of height 1.
        src_layers, dst_layers = _layers(src_pitch, width), _layers(dst_pitch, width)
        if src_layers and dst_layers:
            source_3d = (0, 0, 0, 0, _UNIFIED, 0, src, 0, 0, *src_layers)
            target_3d = (0, 0, 0, 0, _UNIFIED, 0, dst, 0, 0, *dst_layers)
            self._call.cuMemcpy3DAsync(_COPY_3D.pack(*source_3d, *target_3d, width, 1, rows), stream)
            return
        for row in range(rows):
            self.copy(dst + row * dst_pitch, src + row * src_pitch, width, stream)

    def copy_batch(self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int) -> None:
        count = len(dst)
        if not len(src) == len(size) == count:
            raise ValueError(f"a batch needs arrays of one length, not {count}, {len(src)} and {len(size)}")
        if self._batch is None:
            raise NotSupported(
                f"CUDA {self.version} has no cuMemcpyBatchAsync (12080 and later have); use single copies"
            )
        if stream in (0, _LEGACY):
            raise ValueError("a batch of copies cannot run on the default stream; use one from stream_create")
        self._refuse_capturing(stream)
        if np.count_nonzero(size) != count:  # the driver refuses a batch with an empty entry
            kept = size != 0
            dst, src, size = dst[kept], src[kept], size[kept]
            count = len(dst)
        if not count:
            return
        head = dst.ctypes.data, src.ctypes.data, size.ctypes.data, count, _ATTRIBUTES[order], _FIRST, 1
        if not self._batch_tells:
            if code := self._batch(*head, stream):
                raise self._library.error("cuMemcpyBatchAsync", code)
            return
        failed = c_size_t()
        if code := self._batch(*head, byref(failed), stream):
            error = self._library.error("cuMemcpyBatchAsync", code)
            which = f"entry {failed.value} of {count}" if failed.value < count else f"no single one of {count} entries"
            raise DriverError(f"{error} ({which})", call=error.call, code=code)

    def prepared_batch(
        self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int
    ) -> Callable[[], None]:
        count = len(dst)
        if self._batch is None or self._batch_tells or not count or np.count_nonzero(size) != count:
            return functools.partial(self.copy_batch, dst, src, size, order, stream)
        if stream in (0, _LEGACY) or not len(src) == len(size) == count:
            return functools.partial(self.copy_batch, dst, src, size, order, stream)  # which says what is wrong
        self._refuse_capturing(stream)
        kept = (dst, src, size)  # alive as long as the call
        batch = self._batch
        pointers = [c_void_p(a.ctypes.data) for a in kept]
        attributes, first = _ATTRIBUTES[order], _FIRST

        def call(_kept: Any = kept) -> None:
            if code := batch(*pointers, count, attributes, first, 1, stream):
                raise self._library.error("cuMemcpyBatchAsync", code)

        return call

    def _refuse_capturing(self, stream: int) -> None:
        """The driver would drop the batch from the graph and leave the capture valid."""
        if stream in self._plain:
            return
        if self.stream_capturing(stream):
            raise NotSupported("a batch of copies cannot be captured into a graph; use single copies there")
        if stream in self._streams:
            self._plain.add(stream)

    def swap_batch(self, a: Words, b: Words, size: Words, stream: int) -> None:
        raise NotSupported("CUDA has no command that exchanges memory; dovetail.plan.passes.lower makes copies of it")

    def engine_queues(self, device: int, queues: Sequence[tuple[Words, Words, Words]]) -> EngineQueues:
        raise NotSupported("CUDA chooses the engine of a copy itself")

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        self._call.cuMemsetD8Async(address, byte, size_bytes, stream)

    # --- stream memory operations

    def stream_words(self, rows: NDArray[np.void], stream: int) -> None:
        try:
            if len(rows) <= _FEW:
                few = b"".join([_MEM_OP.pack(_OPERATIONS[kind], at, value) for kind, at, value in rows.tolist()])
                if few:
                    self._call.cuStreamBatchMemOp(stream, len(rows), few, 0)
                return
            ops = np.zeros((len(rows), _MEM_OP.size // 8), np.uint64)
            ops[:, 0] = np.take(_OPERATIONS, rows["kind"])
        except IndexError:
            raise ValueError(f"a row is WAIT ({WAIT}) or WRITE ({WRITE}), not {rows['kind'].max()}") from None
        ops[:, 1], ops[:, 2] = rows["address"], rows["value"]
        for first in range(0, len(rows), MOST_WORDS):
            part = ops[first : first + MOST_WORDS]
            self._call.cuStreamBatchMemOp(stream, len(part), part.ctypes.data, 0)

    # --- graphs

    def graph_begin(self, stream: int) -> None:
        self._plain.discard(stream)
        self._call.cuStreamBeginCapture(stream, _THREAD_LOCAL)

    def graph_end(self, stream: int) -> int:
        graph = c_uint64()
        self._call.cuStreamEndCapture(stream, byref(graph))
        try:
            return self._handle("cuGraphInstantiateWithFlags", graph.value, 0)
        finally:
            self._call.cuGraphDestroy(graph.value)

    def graph_launch(self, graph: int, stream: int) -> None:
        self._call.cuGraphLaunch(graph, stream)

    def graph_destroy(self, graph: int) -> None:
        self._call.cuGraphExecDestroy(graph)

    # --- how calls are made

    def _int(self, symbol: str, *arguments: Any) -> int:
        """Calls a function whose first parameter is an int that it sets."""
        out = c_int()
        getattr(self._call, symbol)(byref(out), *arguments)
        return out.value

    def _handle(self, symbol: str, *arguments: Any) -> int:
        """Calls a function whose first parameter is a handle or an address that it sets."""
        out = c_uint64()
        getattr(self._call, symbol)(byref(out), *arguments)
        return out.value

    def _answer(self, symbol: str, *arguments: Any, also: int) -> int:
        """Calls a function for which the code `also` is an answer and no error."""
        code: int = getattr(self._call, symbol)(*arguments)
        if code not in (0, also):
            raise self._library.error(symbol, code)
        return code
