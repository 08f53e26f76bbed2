"""Queues of copies on SDMA engines of their own, in the order of a HIP stream.

Written from published sources; **not yet run on hardware**. A run is issued in three steps: the host sets the signals
and queues the copies, which stand at a start signal; the stream, when it gets there, clears that signal; then it waits
until every queue's completion signal is 0. Signals are used again only after the stream has passed all of those waits,
which it tells by writing the number of the run: a signal that were set again earlier would hold the stream for ever.

An engine works its queue off in order, so whatever others put on it behind our copies waits for our stream as well.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from dovetail import env
from dovetail.errors import HardwareError, NotSupported, Timeout
from dovetail.hw.gpu.driver import WORD, WRITE, Words
from dovetail.hw.gpu.hip import HipDriver
from dovetail.hw.gpu.rocr import Copies, Engines, bits

_log = logging.getLogger("dovetail")

_WORD_STRIDE = 64  # one cache line for each word that the host polls


@dataclass(frozen=True, slots=True, eq=False)
class Queue:
    """Copies that run back to back on one engine (a bit)."""

    copies: Copies
    engine: int

    @property
    def name(self) -> str:
        return f"SDMA engine {self.engine.bit_length() - 1}"


@dataclass(slots=True, eq=False)
class _Slot:
    """Signals of one run: words for the stream, handles for the engines."""

    words: list[int]  # start, then one for each queue
    signals: list[int]
    passed_at: int  # the stream writes the number of the run here when it has passed all waits
    run: int = 0  # the last run that used it

    @property
    def passed(self) -> bool:
        return ctypes.c_uint64.from_address(self.passed_at).value >= self.run


def assign(choices: Sequence[Sequence[int]], most_engines: int | None = None) -> list[int]:
    """An engine for each queue from those that it may use, best first; queues share only when engines run out.

    Raises `NotSupported` if a queue has no choice, or `most_engines` cannot serve all queues.
    """
    popularity = Counter(engine for choice in choices for engine in choice)
    load: Counter[int] = Counter()
    found: list[int] = []
    for number, choice in enumerate(choices):
        allowed = list(choice)
        if most_engines is not None:
            allowed.sort(key=lambda engine: -popularity[engine])  # few engines must be such that many queues can use
            if len(load) >= most_engines:
                allowed = [engine for engine in allowed if engine in load]
        if not allowed:
            limit = "" if most_engines is None else f" with {most_engines} in all"
            raise NotSupported(f"no free engine serves all copies of queue {number}{limit}; split the queue by peer")
        found.append(min(allowed, key=lambda engine: load[engine]))
        load[found[-1]] += 1
    return found


class SdmaQueues:
    """Runs queues of copies again and again, each on an engine of its own (`most_engines=1`: all on one, b2b).

    `queues` holds (dst, src, size) arrays. `device` must be current in the calling thread; its engines are used. Up to
    `runs_in_flight` runs may be pending; one more waits for the oldest. One thread uses it at a time.
    """

    def __init__(
        self,
        hip: HipDriver,
        engines: Engines,
        device: int,
        queues: Sequence[tuple[Words, Words, Words]],
        *,
        most_engines: int | None = None,
        runs_in_flight: int = 2,
    ) -> None:
        self._hip, self._engines = hip, engines
        agent = engines.agent(hip.device_pci(device), hip.device_uuid(device)).handle
        copies = [engines.copies(*queue, on=agent) for queue in queues]
        chosen = assign([self._choices(c) for c in copies], most_engines)
        self.queues = tuple(map(Queue, copies, chosen))
        self._runs, self._broken, self._closed = 0, "", False
        self._fence = hip.event_create()
        self._passed = hip.host_alloc(_WORD_STRIDE * runs_in_flight)
        ctypes.memset(self._passed, 0, _WORD_STRIDE * runs_in_flight)
        self._slots = [self._slot(self._passed + _WORD_STRIDE * n) for n in range(runs_in_flight)]

    def run(self, stream: int) -> None:
        """Queues one run: it starts when the stream gets there, and the stream goes on when all copies are done.

        Raises:
            NotSupported: the stream is capturing.
            Timeout: `runs_in_flight` earlier runs are still pending after `DOVETAIL_TIMEOUT` seconds.
            HardwareError: the runtime refused. What was queued until then runs; later calls raise this again.
        """
        self._check()
        if self._hip.stream_capturing(stream):
            raise NotSupported("copies on chosen engines cannot be captured into a graph; use plain copies there")
        slot = self._slots[self._runs % len(self._slots)]
        self._retire(slot, time.monotonic() + env.timeout_s())
        self._runs = slot.run = self._runs + 1
        start, done = slot.signals[0], slot.signals[1:]
        for queue, signal in zip(self.queues, done, strict=True):
            self._engines.store(signal, len(queue.copies))
        self._engines.store(start, 1)
        try:
            for queue, signal in zip(self.queues, done, strict=True):
                self._engines.copies_on_engine(queue.copies, queue.engine, (start,), signal)
            self._hip.event_record(self._fence, stream)  # engines read memory, not the caches of the kernels before
            self._hip.stream_words(np.array([(WRITE, slot.words[0], 0)], WORD), stream)
            for word in slot.words[1:]:
                self._hip.stream_wait_equal(word, 0, stream)
            self._hip.stream_words(np.array([(WRITE, slot.passed_at, slot.run)], WORD), stream)
        except HardwareError as error:
            self._broken = f"run {slot.run} could not be issued: {error}"
            self._engines.store(start, 0)  # what is queued already must not hold its engine for ever
            raise

    def wait(self, timeout_s: float) -> None:
        """Returns when the copies of every run are done, seen from the host.

        Raises:
            Timeout: names the engine that is not done, and whether the stream has started it.
            HardwareError: a copy failed. The stream is let go then; the targets hold anything.
        """
        self._check()
        deadline = time.monotonic() + timeout_s
        for slot in sorted(self._slots, key=lambda s: s.run):
            self._finish(slot, deadline)

    def close(self, timeout_s: float = 10.0) -> None:
        """Frees the signals once the engines and the stream are done with them, and leaves them if they are not."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        try:
            for slot in self._slots:
                self._retire(slot, deadline)
        except (HardwareError, Timeout) as error:
            _log.warning("signals of SDMA queues stay allocated, an engine may still write them: %s", error)
            return
        for slot in self._slots:
            for word in slot.words:
                self._hip.device_free(word)
        self._hip.host_free(self._passed)
        self._hip.event_destroy(self._fence)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choices(self, copies: Copies) -> list[int]:
        """Engines that serve every pair of agents in the queue, those that are fastest for all of them first."""
        pairs = set(zip(copies.dst_agent.tolist(), copies.src_agent.tolist(), strict=True))
        free = preferred = 2**32 - 1 if pairs else 1  # an empty queue goes anywhere
        for dst, src in pairs:
            free &= self._engines.free(dst, src)
            preferred &= self._engines.preferred(dst, src)
        return bits(free & preferred) + bits(free & ~preferred)

    def _slot(self, passed_at: int) -> _Slot:
        words = [self._hip.signal_alloc() for _ in range(1 + len(self.queues))]
        return _Slot(words, [self._engines.signal_at(word) for word in words], passed_at)

    def _retire(self, slot: _Slot, deadline: float) -> None:
        """Waits until the engines and the stream are done with the signals of a slot."""
        if self._broken:
            raise HardwareError(self._broken)
        if not slot.passed:
            self._finish(slot, deadline)
        pause_s = 20e-6
        while not slot.passed:
            if time.monotonic() >= deadline:
                raise Timeout(f"the copies of run {slot.run} are done, but the stream has not seen it; is it stuck?")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1e-3)

    def _finish(self, slot: _Slot, deadline: float) -> None:
        """Waits for the engines alone."""
        if slot.passed:
            return
        for queue, signal in zip(self.queues, slot.signals[1:], strict=True):
            left = self._engines.wait(signal, max(deadline - time.monotonic(), 0.0))
            if left > 0:
                held = self._engines.load(slot.signals[0]) > 0
                raise Timeout(
                    f"{queue.name} has {left} of {len(queue.copies)} copies of run {slot.run} to do; "
                    + ("the stream has not started it yet" if held else "it was started and makes no progress")
                )
            if left < 0:
                self._broken = f"a copy of run {slot.run} failed on {queue.name}"
                self._let_go(slot)
                raise HardwareError(self._broken)

    def _let_go(self, slot: _Slot) -> None:
        """Leads the stream past its waits, for a second: engines that still count keep changing the signals."""
        deadline = time.monotonic() + 1.0
        while not slot.passed and time.monotonic() < deadline:
            for signal in slot.signals:
                self._engines.store(signal, 0)
            time.sleep(1e-4)

    def _check(self) -> None:
        if self._closed or self._broken:
            raise HardwareError(self._broken or "these SDMA queues are closed")
