"""What ROCr (libhsa-runtime64) has beyond HIP: copies on a chosen engine, behind dependency signals.

Written from the published headers and their source; **not yet run on hardware**. An engine is a bit, as ROCr counts
them. A signal is a 64-bit word that engines count down: a dependency is met when it is 0, a copy takes 1 from its
completion signal, and a negative value says that a copy failed. Several copies share a completion signal: that needs
atomics from the GPU to host memory, without which ROCr writes the value that the signal had when the copy was issued.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np

from dovetail import env
from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu.driver import Words
from dovetail.hw.gpu.library import Library

#: Entries of one operation of the batch call.
MOST_ENTRIES = 1024

_COPY_ON_ENGINE, _BATCH_COPY = "hsa_amd_memory_async_copy_on_engine", "hsa_amd_memory_async_batch_copy"
_PREFERRED = "hsa_amd_memory_get_preferred_copy_engine"
_INFO_DEVICE, _INFO_BDF, _INFO_DOMAIN, _INFO_UUID, _DEVICE_GPU = 17, 0xA006, 0xA00F, 0xA011, 1
_OUT_OF_RESOURCES, _INVALID_AGENT = 0x1008, 0x1004
_TIMESTAMP_FREQUENCY = 3
_SIGNAL_GPU_ONLY, _SIGNAL_WORD = 1, 8  # an attribute; where the word of a signal lies, from its handle on
_CONDITION_LESS, _WAIT_BLOCKED = 2, 0
_POINTER_UNKNOWN = 0
_LINEAR, _BROADCAST, _SWAP = 0, 1, 2

_Callback = ctypes.CFUNCTYPE(c_int, c_uint64, c_void_p)


class _Operation(ctypes.Structure):
    """hsa_amd_memory_copy_op_t, version 1, without the raw waits and signals at its end."""

    _fields_ = (
        ("version", c_uint16),
        ("type", c_uint16),
        ("num_entries", c_uint16),
        ("traffic_class", c_uint16),
        ("completion", c_uint64),
        ("src", c_void_p),
        ("src_agent", c_uint64),
        ("dst_agent", c_void_p),
        ("dst", c_void_p),
        ("size", c_size_t),
        ("dst_size", c_size_t),
        ("unused", c_uint64 * 8),
    )


class _PointerInfo(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32),
        ("type", c_int),
        ("agent_base", c_void_p),
        ("host_base", c_void_p),
        ("size_bytes", c_size_t),
        ("user_data", c_void_p),
        ("owner", c_uint64),
        ("flags", c_uint32),
    )


@dataclass(frozen=True, slots=True)
class Agent:
    """A processor that ROCr knows. `pci` is "domain:bus:device.function" as HIP writes it."""

    handle: int
    is_gpu: bool
    pci: str
    uuid: str  #: "GPU-" and 16 characters, or "GPU-XX" where it has none


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Copies of one queue, with the agents that own the memory. None is empty: a copy of 0 bytes signals nothing."""

    dst: Words
    src: Words
    size: Words
    dst_agent: Words
    src_agent: Words

    def __len__(self) -> int:
        return len(self.dst)


def available(path: str | None = None) -> bool:
    """True if the library loads and puts copies on chosen engines. Starts nothing."""
    try:
        return Library("ROCr runtime", path or env.library("hsa"), _status_text).has(_COPY_ON_ENGINE)
    except NotSupported:
        return False


def bits(mask: int) -> list[int]:
    """The engines of a mask, the lowest first, each as its bit."""
    return [1 << i for i in range(mask.bit_length()) if mask >> i & 1]


def _status_text(library: Library, code: int) -> tuple[str, str]:
    text = c_char_p()
    library.raw("hsa_status_string", c_int, POINTER(c_char_p))(code, byref(text))
    name, _, message = (text.value or b"unknown status").decode().partition(": ")
    return name, message or "no text"


class Engines:
    """The copy engines of this machine's GPUs. `path` is the library; without one, `DOVETAIL_HSA_LIBRARY` decides.

    Raises `NotSupported` if ROCr is missing or cannot choose an engine. `close` ends our use of the runtime.
    """

    def __init__(self, path: str | None = None) -> None:
        self._library = library = Library("ROCr runtime", path or env.library("hsa"), _status_text)
        f = library.function
        self._copy = f(
            _COPY_ON_ENGINE,
            *(c_void_p, c_uint64, c_void_p, c_uint64, c_size_t, c_uint32, c_void_p, c_uint64, c_int, c_bool),
        )
        self._status = library.raw("hsa_amd_memory_copy_engine_status", c_uint64, c_uint64, POINTER(c_uint32))
        self._preferred = None
        if library.has(_PREFERRED):
            self._preferred = library.raw(_PREFERRED, c_uint64, c_uint64, POINTER(c_uint32))
        self._batch = f(_BATCH_COPY, c_void_p, c_uint32, c_uint32, c_void_p) if library.has(_BATCH_COPY) else None
        self._info = f("hsa_agent_get_info", c_uint64, c_int, c_void_p)
        self._pointer_info = f("hsa_amd_pointer_info", c_void_p, POINTER(_PointerInfo), c_void_p, c_void_p, c_void_p)
        self._value_pointer = f("hsa_amd_signal_value_pointer", c_uint64, POINTER(c_void_p))
        self._store = library.raw("hsa_signal_store_screlease", c_uint64, c_int64, restype=None)
        self._load = library.raw("hsa_signal_load_scacquire", c_uint64, restype=c_int64)
        self._wait = library.raw(
            "hsa_signal_wait_scacquire", c_uint64, c_int, c_int64, c_uint64, c_int, restype=c_int64
        )
        f("hsa_init")()
        self._open = True
        frequency = c_uint64()
        f("hsa_system_get_info", c_int, c_void_p)(_TIMESTAMP_FREQUENCY, byref(frequency))
        self._ticks_per_s = frequency.value
        self.agents = tuple(self._agents())

    def close(self) -> None:
        """May be called twice. Signals must be destroyed before."""
        if self._open:
            self._open = False
            self._library.function("hsa_shut_down")()

    # --- agents and engines

    def agent(self, pci: str, uuid: bytes = b"") -> Agent:
        """The GPU at a PCI address (`HipDriver.device_pci`); `uuid` tells partitions of one GPU apart."""
        found = [a for a in self.agents if a.is_gpu and a.pci == pci.lower()]
        if len(found) > 1:
            found = [a for a in found if a.uuid.encode() == b"GPU-" + uuid]
        if len(found) != 1:
            known = ", ".join(f"{a.pci} {a.uuid}" for a in self.agents if a.is_gpu) or "none"
            raise NotSupported(f"ROCr has {len(found)} GPUs at {pci} with UUID {uuid!r}; those it has: {known}")
        return found[0]

    def host(self) -> Agent:
        """The first CPU."""
        return next(a for a in self.agents if not a.is_gpu)

    def owner(self, address: int) -> int:
        """The agent whose memory it is, also where another process exported it. Takes microseconds: ask once."""
        info = _PointerInfo(size=ctypes.sizeof(_PointerInfo))
        self._pointer_info(address, byref(info), None, None, None)
        if info.type == _POINTER_UNKNOWN:
            raise HardwareError(f"ROCr does not know the memory at {address:#x}; allocate or register it through HIP")
        return int(info.owner)

    def free(self, dst_agent: int, src_agent: int) -> int:
        """A mask of the engines between two agents that have nothing to do; 0 if all of them have.

        Within one agent it asks for those that it shares with the host.
        """
        if dst_agent == src_agent:
            dst_agent = self.host().handle
        mask = c_uint32()
        code = self._status(dst_agent, src_agent, byref(mask))
        if code not in (0, _OUT_OF_RESOURCES):
            raise self._library.error("hsa_amd_memory_copy_engine_status", code)
        return mask.value

    def preferred(self, dst_agent: int, src_agent: int) -> int:
        """A mask of the engines that are fastest between two agents; 0 without a preference."""
        mask = c_uint32()
        code = self._preferred(dst_agent, src_agent, byref(mask)) if self._preferred else 0
        if code not in (0, _INVALID_AGENT):
            raise self._library.error(_PREFERRED, code)
        return mask.value if code == 0 else 0

    # --- signals

    def signal_create(self, value: int) -> int:
        """A signal that engines and the host share; a stream cannot, HIP does not know its word (see `signal_at`)."""
        signal = c_uint64()
        create = self._library.function(
            "hsa_amd_signal_create", c_int64, c_uint32, c_void_p, c_uint64, POINTER(c_uint64)
        )
        create(value, 0, None, _SIGNAL_GPU_ONLY, byref(signal))
        return signal.value

    def signal_destroy(self, signal: int) -> None:
        self._library.function("hsa_signal_destroy", c_uint64)(signal)

    def signal_at(self, word: int) -> int:
        """The signal whose word HIP allocated (`HipDriver.signal_alloc`). HIP owns it."""
        signal = word - _SIGNAL_WORD
        if self.signal_word(signal) != word:
            raise NotSupported(f"the word at {word:#x} is not that of a signal; this ROCr lays signals out differently")
        return signal

    def signal_word(self, signal: int) -> int:
        """Where the value of a signal is."""
        word = c_void_p()
        self._value_pointer(signal, byref(word))
        return word.value or 0

    def store(self, signal: int, value: int) -> None:
        """Sets a signal, after everything that this thread wrote before."""
        self._store(signal, value)

    def load(self, signal: int) -> int:
        """Its value; what was copied before it got that value can be read afterwards."""
        return int(self._load(signal))

    def wait(self, signal: int, timeout_s: float) -> int:
        """Waits until a signal is 0 or less, or the time is over. Returns its value then."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = min(max(deadline - time.monotonic(), 0.0), 0.1)  # in slices, so that Ctrl-C gets through
            value = int(self._wait(signal, _CONDITION_LESS, 1, int(left * self._ticks_per_s), _WAIT_BLOCKED))
            if value < 1 or time.monotonic() >= deadline:
                return value

    # --- copies

    def copies(self, dst: Words, src: Words, size: Words, on: int = 0) -> Copies:
        """Looks up who owns the memory of each copy; drops those of 0 bytes. For a plan, not for every run of it.

        ROCr takes the engines of the source's agent. Where the memory of `on` is the target of another GPU's, the two
        agents are named the other way round, so that `on` pulls (ROCr's HSA_REV_COPY_DIR does the same).
        """
        if not len(dst) == len(src) == len(size):
            raise ValueError(f"a queue needs arrays of one length, not {len(dst)}, {len(src)} and {len(size)}")
        real = size > 0
        dst, src, size = (np.ascontiguousarray(column[real], np.uint64) for column in (dst, src, size))
        to, of = (np.array([self.owner(a) for a in column.tolist()], np.uint64) for column in (dst, src))
        pulls = (to == on) & (of != on) & np.isin(of, [a.handle for a in self.agents if a.is_gpu])
        return Copies(dst, src, size, np.where(pulls, of, to), np.where(pulls, to, of))

    def copies_on_engine(self, copies: Copies, engine: int, depends: Sequence[int], completion: int) -> None:
        """Issues a queue back to back on one engine; returns before anything is copied.

        Every copy waits until all of `depends` are 0: ROCr promises no order between two calls. `completion` must have
        been set to at least `len(copies)` before and is taken down by that. If a call is refused, those before it stay.
        """
        signals, num = self._signals(depends)
        for dst, src, size, to, of in zip(*(c.tolist() for c in self._columns(copies)), strict=True):
            self._copy(dst, to, src, of, size, num, signals, completion, engine, True)

    def linear(self, copies: Copies, depends: Sequence[int], completion: int) -> None:
        """Copies from one agent in one operation, on engines that ROCr chooses. It takes 1 from `completion`."""
        self._operation(_LINEAR, copies, depends, completion)

    def swap(self, copies: Copies, depends: Sequence[int], completion: int) -> None:
        """Exchanges `dst` and `src` of each entry in one operation. It takes 1 from `completion`."""
        self._operation(_SWAP, copies, depends, completion)

    def broadcast(self, copies: Copies, depends: Sequence[int], completion: int) -> None:
        """One source to many targets in one operation: all entries have the same source and size, on a GPU.

        It takes 1 from `completion`.
        """
        if len(np.unique(copies.src)) > 1 or len(np.unique(copies.size)) > 1:
            raise ValueError("a broadcast has one source and one size; those of its entries differ")
        self._operation(_BROADCAST, copies, depends, completion)

    def _operation(self, kind: int, copies: Copies, depends: Sequence[int], completion: int) -> None:
        """One operation per call: with more, the documentation and the source disagree on the completion signal."""
        if self._batch is None:
            raise NotSupported(f"this ROCr has no {_BATCH_COPY}; ROCm 7.14 or newer has")
        if not 1 <= len(copies) <= MOST_ENTRIES or len(np.unique(copies.src_agent)) > 1:
            raise ValueError(f"an operation has 1 to {MOST_ENTRIES} entries ({len(copies)} given) from one agent")
        shared = kind == _BROADCAST
        operation = _Operation(
            version=1,
            type=kind,
            num_entries=len(copies),
            completion=completion,
            src=int(copies.src[0]) if shared else copies.src.ctypes.data,
            src_agent=int(copies.src_agent[0]),
            dst_agent=copies.dst_agent.ctypes.data,
            dst=copies.dst.ctypes.data,
            size=int(copies.size[0]) if shared else copies.size.ctypes.data,
        )
        signals, num = self._signals(depends)
        self._batch(byref(operation), 1, num, signals)

    @staticmethod
    def _columns(copies: Copies) -> tuple[Words, ...]:
        return copies.dst, copies.src, copies.size, copies.dst_agent, copies.src_agent

    @staticmethod
    def _signals(depends: Sequence[int]) -> tuple[ctypes.Array[c_uint64] | None, int]:
        return ((c_uint64 * len(depends))(*depends), len(depends)) if depends else (None, 0)

    def _agents(self) -> Iterator[Agent]:
        handles: list[int] = []

        def add(handle: int, _data: object) -> int:
            handles.append(handle)
            return 0

        self._library.function("hsa_iterate_agents", _Callback, c_void_p)(_Callback(add), None)
        for handle in handles:
            kind, bdf, domain, uuid = c_int(), c_uint32(), c_uint32(), ctypes.create_string_buffer(64)
            self._info(handle, _INFO_DEVICE, byref(kind))
            self._info(handle, _INFO_BDF, byref(bdf))
            self._info(handle, _INFO_DOMAIN, byref(domain))
            self._info(handle, _INFO_UUID, uuid)
            place = bdf.value & 0xFFFF
            pci = f"{domain.value:04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7:x}"
            yield Agent(handle, kind.value == _DEVICE_GPU, pci, uuid.value.decode())
