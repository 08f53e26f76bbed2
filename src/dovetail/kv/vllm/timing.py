"""When a transfer began and ended, as vLLM's metrics ask for it, and the order that goes with it.

A transfer begins behind what the caller's stream has been given so far: a load behind the readers of the blocks that
it overwrites, a store behind the writers of those that it reads. Waiting for them is no part of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dovetail.hw.gpu.device import Device
from dovetail.kv.planner import Direction


class Span(Protocol):
    """From the first byte of a transfer to its last."""

    def is_over(self) -> bool: ...
    def seconds(self) -> float:
        """Once it is over; ask once."""


class Clock(Protocol):
    """Times the transfers of each direction, which run one after the other."""

    def begin(self, direction: Direction) -> Sequence[int]:
        """To be called before `submit`; gives the streams that it must come after."""

    def end(self, direction: Direction, transfer: Any) -> Span:
        """To be called after it."""

    def close(self) -> None: ...


class CpuClock:
    """For movers that are done when they return."""

    def __init__(self) -> None:
        self._began: dict[Direction, float] = {}

    def begin(self, direction: Direction) -> Sequence[int]:
        self._began[direction] = time.perf_counter()
        return ()

    def end(self, direction: Direction, transfer: Any) -> Span:
        return _Past(time.perf_counter() - self._began[direction])

    def close(self) -> None:
        """Nothing to give back."""


class _Past:
    def __init__(self, time_s: float) -> None:
        self._time_s = time_s

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._time_s


class GpuClock:
    """A stream of its own for each direction, which waits where the transfer waits and joins it at its end.

    So the first of its two events comes when the caller's work and the transfer before are over, and the second when
    the last byte has landed.
    """

    def __init__(self, device: Device, current_stream: Callable[[], int]) -> None:
        """`current_stream`: the stream on which the model runs."""
        self._device, self._driver, self._current = device, device.driver, current_stream
        device.enter()
        self._streams = {direction: self._driver.stream_create() for direction in Direction}
        self._began: dict[Direction, int] = {}
        self._free: list[int] = []
        self._made: list[int] = []

    def begin(self, direction: Direction) -> Sequence[int]:
        self._device.enter()
        stream = self._streams[direction]
        self._device.order(self._current(), stream)
        self._began[direction] = self._marked(stream)
        return (stream,)

    def end(self, direction: Direction, transfer: Any) -> Span:
        stream = self._streams[direction]
        transfer.join(stream)
        return _GpuSpan(self, self._began.pop(direction), self._marked(stream))

    def _marked(self, stream: int) -> int:
        """An event that stands in the stream from now on."""
        if not self._free:
            self._made.append(self._driver.event_create(timing=True))
            self._free.append(self._made[-1])
        event = self._free.pop()
        self._driver.event_record(event, stream)
        return event

    def is_done(self, event: int) -> bool:
        """True once the stream has come to it."""
        return self._driver.event_done(event)

    def between(self, first: int, last: int) -> float:
        """Seconds; gives both events back."""
        time_s = self._driver.event_elapsed_us(first, last) / 1e6
        self._free += [first, last]
        return time_s

    def close(self) -> None:
        """Nothing may be under way any more. Safe to call twice."""
        for event in self._made:
            self._driver.event_destroy(event)
        for stream in self._streams.values():
            self._driver.stream_destroy(stream)
        self._made, self._free, self._streams = [], [], {}


class _GpuSpan:
    def __init__(self, clock: GpuClock, first: int, last: int) -> None:
        self._clock, self._first, self._last = clock, first, last

    def is_over(self) -> bool:
        return self._clock.is_done(self._last)

    def seconds(self) -> float:
        return self._clock.between(self._first, self._last)
