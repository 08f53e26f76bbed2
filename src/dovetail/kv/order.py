"""Who comes after whom on a shelf: events behind the users of a slot, and copies that begin behind them.

A mover takes streams to begin behind, not events. So each direction has a *relay*: a stream that does nothing but wait,
and that every copy of its direction is put behind. Copies of one direction are in order anyway: it delays nobody more.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from dovetail.errors import NotSupported, Timeout
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.device import Device
from dovetail.kv.mover import GpuTransfer, Transfer
from dovetail.kv.planner import Direction

_PAUSE_S = 50e-6
#: stream -> an event behind its latest use of a slot
Users = dict[int, int]


class Order(Protocol):
    """What a shelf asks of streams."""

    def streams(self, given: Sequence[int]) -> list[int]:
        """The streams that a caller means; none given is torch's current one."""

    def mark(self, users: Users, streams: Sequence[int]) -> None:
        """Notes that what these streams have been given so far uses a slot."""

    def behind(self, direction: Direction, moves: Iterable[Transfer | None], users: Iterable[Users]) -> list[int]:
        """The streams that copies must come after to come after all of these."""

    def join(self, stream: int, moves: Iterable[Transfer | None], users: Users) -> None:
        """What the stream is given from now on comes after all of these."""

    def wait(self, users: Users, timeout_s: float) -> None:
        """Blocks until marks are reached; raises `Timeout`."""

    def forget(self, users: Users) -> None:
        """Takes marks away: whoever had to come after them has been told."""

    def close(self) -> None: ...


class GpuOrder:
    """By events of a GPU's streams."""

    def __init__(self, device: Device) -> None:
        device.enter()
        self._device, self._driver = device, device.driver
        self._relays = {direction: self._driver.stream_create() for direction in Direction}

    def streams(self, given: Sequence[int]) -> list[int]:
        self._device.enter()
        found = list(given) or [tensors.current_stream(self._device.index)]
        if any(self._driver.stream_capturing(stream) for stream in found):
            raise NotSupported("a stream that captures a graph can't use a shelf: which slot an item has may change")
        return found

    def mark(self, users: Users, streams: Sequence[int]) -> None:
        for stream in streams:
            if stream not in users:
                users[stream] = self._device.take_event()
            self._driver.event_record(users[stream], stream)

    def behind(self, direction: Direction, moves: Iterable[Transfer | None], users: Iterable[Users]) -> list[int]:
        self._device.enter()
        relay = self._relays[direction]
        for of in users:
            self.join(relay, (), of)
        self.join(relay, moves, {})
        return [relay]

    def join(self, stream: int, moves: Iterable[Transfer | None], users: Users) -> None:
        for move in moves:
            if isinstance(move, GpuTransfer):
                move.join(stream)
        for other, event in users.items():
            if other != stream:
                self._driver.stream_wait_event(stream, event)

    def wait(self, users: Users, timeout_s: float) -> None:
        self._device.enter()
        deadline = time.monotonic() + timeout_s
        while not all(self._driver.event_done(event) for event in users.values()):
            if time.monotonic() > deadline:
                raise Timeout(f"earlier users of the slot were not done after {timeout_s:g} s; they go on")
            time.sleep(_PAUSE_S)

    def forget(self, users: Users) -> None:
        for event in users.values():  # a stream waits for what was recorded when it was told: they can be used again
            self._device.give_event(event)
        users.clear()

    def close(self) -> None:
        for stream in self._relays.values():
            self._driver.stream_destroy(stream)
        self._relays = {}


class CpuOrder:
    """Where copies are over when they are made: nothing is to be ordered."""

    def streams(self, given: Sequence[int]) -> list[int]:
        if given:
            raise ValueError(f"a shelf in host memory has no streams; {len(given)} were given: leave them out")
        return []

    def mark(self, users: Users, streams: Sequence[int]) -> None: ...

    def behind(self, direction: Direction, moves: Iterable[Transfer | None], users: Iterable[Users]) -> list[int]:
        return []

    def join(self, stream: int, moves: Iterable[Transfer | None], users: Users) -> None: ...

    def wait(self, users: Users, timeout_s: float) -> None: ...

    def forget(self, users: Users) -> None: ...

    def close(self) -> None: ...
