"""One GPU as this process uses it: its driver, the few streams that plans run on, its events and pinned words.

Owns what must be made once and given back: streams, events, pinned memory, the watchdog. Everything here is warmed
when it is made, since a first use behind a gate that nobody has opened yet could wait for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.capabilities import Capabilities
from dovetail.hw.gpu.bind import Reducing
from dovetail.hw.gpu.driver import WORD, WRITE, Driver, Kind, load
from dovetail.hw.gpu.program import MOST_GATED_STREAMS
from dovetail.hw.gpu.watchdog import Watchdog

_PAUSE_S = 50e-6

# The limit on streams behind gates is the process's: one count for all devices.
_gates = threading.Lock()
_armed: Counter[int] = Counter()


class Armed(Protocol):
    """A run that stands behind a gate."""

    def is_open(self) -> bool:
        """True once its gates are open: it will end."""

    def is_over(self) -> bool: ...


#: A signal word has a cache line of its own.
WORD_BYTES = 64


class Pinned:
    """Pinned host memory, seen by the CPU as `array` and by the GPU at `address`."""

    def __init__(self, driver: Driver, size_bytes: int) -> None:
        self._driver, self.size_bytes = driver, size_bytes
        self.address = driver.host_alloc(size_bytes)
        self.array: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(self.address))
        self.array[:] = 0

    def close(self) -> None:
        """Gives it back; nothing may use it any more."""
        if self.address:
            self._driver.host_free(self.address)
        self.address = 0


class Device:
    """A GPU of this process. `with Device("cuda") as gpu:`, or `close()`."""

    def __init__(self, backend: str = "cuda", index: int = 0, *, driver: Driver | None = None) -> None:
        self.driver = driver or load(backend)
        count = self.driver.num_devices()
        if not 0 <= index < count:
            raise NotSupported(f"there is no {backend} device {index}: this process sees {count}")
        self.index = index
        self.driver.use(index)
        self.caps: Capabilities = self.driver.capabilities(index)
        self.watchdog = Watchdog(self.enter_beside)
        self._entered = threading.local()
        self._streams: list[int] = []
        self._armed: dict[int, Armed | None] = {}
        self.generation = 0  #: changes when streams are armed or given back: who has bound to streams looks again
        self._events: list[int] = []
        self._timed: list[int] = []
        self._kept: list[object] = []
        self._pinned: list[Pinned] = []
        self._lock = threading.Lock()
        self._reducer: Reducing | None = None

    @property
    def name(self) -> str:
        """The driver's name of it."""
        return self.driver.device_name(self.index)

    @property
    def reducer(self) -> Reducing:
        """Runs REDUCE steps; made when first needed."""
        if self._reducer is None:
            from dovetail.hw.gpu.reduce import reducer

            self._reducer = reducer(self.driver)
        return self._reducer

    def enter(self) -> None:
        """Makes it current in this thread, once: whoever works with several devices sets his own."""
        if not getattr(self._entered, "done", False):
            self.driver.use(self.index)
            self._entered.done = True

    def enter_beside(self) -> None:
        """For threads of ours: makes it current there, and lets the caller capture graphs meanwhile."""
        with contextlib.suppress(HardwareError):  # a driver that refuses leaves captures less free, no more
            self.driver.relax_capture()
        self.enter()

    # --- streams

    def streams(self, number: int) -> list[int]:
        """Streams for runs that nothing holds up but the work of others; all runs share them."""
        with self._lock:
            free = [s for s in self._grown(MOST_GATED_STREAMS) if s not in self._armed]
            return [free[k % len(free)] for k in range(number)]

    def arm(self, number: int, timeout_s: float = 60.0) -> list[int]:
        """Streams for a run behind a gate, its own until `disarm`.

        A run whose gate is open gives its streams back by itself: it is waited for, at most `timeout_s`.

        Raises:
            NotSupported: too many runs are armed. One stream always stays free for runs without a gate.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                runs = {id(run): run for run in self._armed.values() if run is not None}
            leaving = [run for run in runs.values() if not run.is_over() and run.is_open()]  # who is over has left
            with self._lock, _gates:
                free = [s for s in self._grown(MOST_GATED_STREAMS) if s not in self._armed]
                if number < len(free) and number + sum(_armed.values()) < MOST_GATED_STREAMS:
                    taken = free[-number:]
                    self._armed.update(dict.fromkeys(taken))
                    _armed[id(self)] = len(self._armed)
                    self.generation += 1
                    return taken
                behind = sum(_armed.values())
            if not leaving or time.monotonic() > deadline:
                raise NotSupported(
                    f"{behind} of {MOST_GATED_STREAMS} streams of this process stand behind gates and one must stay "
                    f"free, so {number} more can't be armed: fire one of the armed runs, or put this plan on fewer "
                    "streams (b2b)"
                )
            time.sleep(_PAUSE_S)

    def armed_for(self, streams: Sequence[int], run: Armed) -> None:
        """Tells who stands on armed streams."""
        with self._lock:
            self._armed.update(dict.fromkeys(streams, run))

    def disarm(self, streams: Sequence[int]) -> None:
        """Gives armed streams back."""
        with self._lock:
            for stream in streams:
                self._armed.pop(stream, None)
            with _gates:
                _armed[id(self)] = len(self._armed)
            self.generation += 1

    def _grown(self, number: int) -> list[int]:
        if len(self._streams) < number:
            words = self.pinned(WORD_BYTES)
            first = np.zeros(1, WORD)
            first["kind"], first["address"] = WRITE, words.address
            while len(self._streams) < number:
                stream = self.driver.stream_create()
                self.driver.fill(words.address, 0, 8, stream)
                if self.caps.stream_gates:
                    self.driver.stream_words(first, stream)
                self.driver.stream_synchronize(stream)
                self._streams.append(stream)
        return self._streams

    # --- events and memory

    def take_event(self, *, timed: bool = False) -> int:
        """An event for one run; of two that are timed, the driver tells how long one came after the other."""
        try:
            return (self._timed if timed else self._events).pop()
        except IndexError:
            return self.driver.event_create(timing=timed)

    def give_event(self, event: int, *, timed: bool = False) -> None:
        """For the next run. Takes no lock: the garbage collector may come here from anywhere."""
        (self._timed if timed else self._events).append(event)

    def order(self, first: int, then: int) -> None:
        """What the stream `then` is given from now on comes after what `first` was given."""
        event = self.take_event()
        self.driver.event_record(event, first)
        self.driver.stream_wait_event(then, event)
        self.give_event(event)

    def keep(self, thing: object) -> None:
        """Holds memory that a late peer, or a stream that did not drain, may still write, until it is closed."""
        self._kept.append(thing)

    def pinned(self, size_bytes: int) -> Pinned:
        """Pinned host memory that lives as long as the device object."""
        made = Pinned(self.driver, size_bytes)
        self._pinned.append(made)
        return made

    def boundaries(self, base: int, size_bytes: int) -> tuple[Kind, list[int]]:
        """What a range is, and the places inside it where one registration ends and the next begins.

        Raises:
            HardwareError: part of it is host memory that the driver does not know, or of another kind.
        """
        first = self.driver.memory_at(base)
        found: list[int] = []
        at = base
        while True:
            here = first if at == base else self.driver.memory_at(at)
            if here.kind is Kind.PAGEABLE or here.kind is not first.kind:
                raise HardwareError(
                    f"memory at {at:#x} is {here.kind}: copy engines need pinned host memory or device memory; "
                    "allocate it with a heap, or torch's pin_memory=True"
                )
            if not here.base or here.base + here.size_bytes >= base + size_bytes:
                return first.kind, found
            at = here.base + here.size_bytes
            found.append(at)

    def close(self) -> None:
        """Waits for nothing: whoever runs plans closes them first. Safe to call twice."""
        self.watchdog.close()
        for event in (*self._events, *self._timed):
            self.driver.event_destroy(event)
        for stream in self._streams:
            self.driver.stream_destroy(stream)
        for block in self._pinned:
            block.close()
        self._events, self._timed, self._streams, self._pinned, self._kept = [], [], [], [], []
        with _gates:
            _armed.pop(id(self), None)

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
