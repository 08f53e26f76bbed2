"""Times of two, alone and together, from a common start; when each ended.

Owns the start and the clock. On a GPU everything is queued behind a gate in the stream that both begin behind, then the
gate is opened: no launch is in the times, which are the GPU's own. A gate that is forgotten opens by itself.
On a CPU the start is the call and times are the host's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.hw.gpu.device import WORD_BYTES
from dovetail.hw.gpu.driver import WAIT, WORD
from dovetail.overlap.cpu import CpuPlace
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.strategy import Setting
from dovetail.overlap.tasks import Communication, Computation, Mover, Side, apart_of

#: A computation that waits for its own results on the host would stand before the closed gate for ever.
_OPEN_AFTER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Microseconds from the common start until each had ended; None for one that did not run."""

    compute_us: float | None = None
    comm_us: float | None = None

    @property
    def total_us(self) -> float:
        """Until both had ended."""
        return max(self.compute_us or 0.0, self.comm_us or 0.0)


class GpuTimer:
    """Times on a GPU. An owner: `close()`, or `with`."""

    def __init__(self, place: GpuPlace) -> None:
        self.place, self._driver = place, place.device.driver
        self.main = self._driver.stream_create()  #: everything is timed behind this stream
        self._word = place.device.pinned(WORD_BYTES)
        self._runs = 0
        self.was_opened = False  #: the last gate was forgotten, and opened by itself: launches are in its times
        self._begin, self._events = self._event(), {side: self._event() for side in Side}
        self._wait = np.zeros(1, WORD)
        self._wait["kind"], self._wait["address"] = WAIT, self._word.address

    def _event(self) -> int:
        return self._driver.event_create(timing=True)

    def compute(self, compute: Computation) -> float:
        """A computation alone, in microseconds."""
        with self._gate():
            self.place.stream = self.main
            with self.place.current(self.main):
                compute()
            self._mark(Side.COMPUTE, self.main)
        return self._us(Side.COMPUTE)

    def comm(self, comm: Communication, mover: Mover, cores: int = 0) -> float:
        """A communication alone, in microseconds."""
        apart = apart_of(comm, mover)
        with self._gate():  # to the same point as beside a computation
            if apart is not None:
                pending: Any = apart(self.main)
                self._mark(Side.COMM, pending.stream)
                self._driver.stream_wait_event(self.main, pending.event)
            else:
                pending = comm.start(mover, stream=self.main, cores=cores)
                self._mark(Side.COMM, self.main)
        if pending is not None:
            pending.wait()
        return self._us(Side.COMM)

    def both(self, compute: Computation, comm: Communication, setting: Setting) -> Times:
        """Together."""
        with self._gate(), self.place.current(self.main):
            _, pending = self.place.launch(compute, comm, setting, self.main, self._mark)
        if pending is not None:
            pending.wait()
        return Times(compute_us=self._us(Side.COMPUTE), comm_us=self._us(Side.COMM))

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        """What is launched inside begins at its end, behind the event of the start."""
        self._runs += 1
        self._wait["value"] = self._runs
        self._driver.stream_words(self._wait, self.main)
        self._driver.event_record(self._begin, self.main)
        self.was_opened = False
        forgotten = threading.Timer(_OPEN_AFTER_S, self._forgotten, [self._runs])
        forgotten.start()
        try:
            yield
        finally:
            forgotten.cancel()
            self._open(self._runs)
        self._driver.stream_synchronize(self.main)

    def _forgotten(self, run: int) -> None:
        self.was_opened = True
        self._open(run)

    def _open(self, run: int) -> None:
        self._word.array[:8].view(np.uint64)[0] = run

    def _mark(self, side: Side, stream: int) -> None:
        self._driver.event_record(self._events[side], stream)

    def _us(self, side: Side) -> float:
        self._driver.event_synchronize(self._events[side])
        return self._driver.event_elapsed_us(self._begin, self._events[side])

    def close(self) -> None:
        """Gives streams and events back. Safe to call twice."""
        if self.main:
            self._driver.stream_synchronize(self.main)
            self._driver.stream_destroy(self.main)
            for event in (self._begin, *self._events.values()):
                self._driver.event_destroy(event)
        self.main = 0

    def __enter__(self) -> GpuTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CpuTimer:
    """Times on a CPU. `meet` makes the ranks begin together."""

    def __init__(self, place: CpuPlace, meet: Any = None) -> None:
        self.place, self._meet = place, meet
        self._ended: dict[Side, float] = {}

    def compute(self, compute: Computation) -> float:
        """A computation alone, in microseconds."""
        began = self._start()
        compute()
        return (time.perf_counter() - began) * 1e6

    def comm(self, comm: Communication, mover: Mover, cores: int = 0) -> float:
        """A communication alone, in microseconds."""
        began = self._start()
        pending = comm.start(mover, cores=cores)
        if pending is not None:
            pending.wait()
        return (time.perf_counter() - began) * 1e6

    def both(self, compute: Computation, comm: Communication, setting: Setting) -> Times:
        """Together."""
        self.place.prepare(setting)
        self._ended = {}
        began = self._start()
        self.place.launch(compute, comm, setting, 0, self._mark)
        took = {side: (end - began) * 1e6 for side, end in self._ended.items()}
        return Times(compute_us=took[Side.COMPUTE], comm_us=took[Side.COMM])

    def _mark(self, side: Side, _stream: int) -> None:
        self._ended[side] = time.perf_counter()

    def _start(self) -> float:
        if self._meet is not None:
            self._meet()
        return time.perf_counter()

    def close(self) -> None:
        """Nothing to give back."""

    def __enter__(self) -> CpuTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Timer = GpuTimer | CpuTimer
