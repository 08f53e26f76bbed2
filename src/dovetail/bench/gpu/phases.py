"""The four phases of one copy from host to GPU, by size: control, schedule, copy, sync.

The host's clock is read before the submit, when the driver's copy call has returned (the command is handed over), when
the submit has returned and when completion is seen. The copy's end is an event behind it. Events are placed on the
host's clock by a gate: a stream stands at a pinned word, with an event and a write to a second word behind it; the host
opens the gate, watches the second word, and the event lies between. Half of that round trip is the clock's error. It is
done anew before every copy, so that the clocks have no time to drift apart.

copy: between two events around it behind a gate (so that no enqueuing falls in between) less that between two events
with nothing between them. control: until the command is handed over. schedule: until the copy begins. sync: from its
end until the host knows. A copy that begins before its call has returned ends `control` there. Their sum is the total.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.bench.gpu.copies import H2D, copy_buffers, copy_plan
from dovetail.bench.gpu.session import Arena, Session
from dovetail.bench.gpu.spec import check_sizes
from dovetail.bench.phases import row
from dovetail.errors import HardwareError
from dovetail.hw.gpu.device import WORD_BYTES, Device
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE, Driver
from dovetail.hw.gpu.local import LocalRunner
from dovetail.measure.stats import median
from dovetail.plan import passes

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
_BYTES_PER_SIZE = 1 << 30
_FEWEST, _MOST = 20, 500
_WARM_UP = 5
_CALIBRATIONS = 3
_EMPTY = 50
_UNCERTAIN = 2
_PARK_S = 50e-6
"""Until a stream surely stands at its gate."""
_LOST_S = 5.0
_POISON = 0xA5
_HOST_RANKS = frozenset({1})


class Noting:
    """A driver that notes when a copy call returned, and which events were recorded after it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.event_done = driver.event_done  # asked in a loop: without the detour
        self.copied_ns = 0
        self.recorded: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        """The driver's, noted."""
        self._driver.copy(dst, src, size_bytes, stream)
        self.copied_ns = time.perf_counter_ns()
        self.recorded.clear()

    def event_record(self, event: int, stream: int) -> None:
        """The driver's, noted."""
        self._driver.event_record(event, stream)
        self.recorded.append(event)


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event and where it lies on the host's clock, give or take `error_ns`."""

    event: int
    host_ns: float
    error_ns: float


class Gate:
    """A stream that can be held at a pinned word, and a second word that tells when it went on."""

    def __init__(self, device: Device, stream: int) -> None:
        self._driver, self._stream = device.driver, stream
        block = device.pinned(2 * WORD_BYTES)
        self._words: NDArray[np.uint64] = block.array.view(np.uint64)
        self._told = WORD_BYTES // 8
        self._rows = np.zeros(2, WORD)
        self._rows["kind"] = (WAIT, WRITE)
        self._rows["address"] = (block.address, block.address + WORD_BYTES)
        self._number = 0
        self._anchors = [self._driver.event_create(timing=True) for _ in range(_CALIBRATIONS)]
        self._pair = [self._driver.event_create(timing=True) for _ in range(2)]

    def anchor(self) -> Anchor:
        """The event that is placed best, of a few."""
        return min((self._placed(event) for event in self._anchors), key=lambda anchor: anchor.error_ns)

    def _placed(self, event: int) -> Anchor:
        begin, end = self._opened([event])
        return Anchor(event, (begin + end) / 2, (end - begin) / 2)

    def empty_us(self) -> float:
        """Between two events with nothing between them, all enqueued before the gate opens."""
        self._opened(self._pair)
        self._driver.stream_synchronize(self._stream)
        return self._driver.event_elapsed_us(*self._pair)

    def _opened(self, events: Sequence[int]) -> tuple[int, int]:
        """Host times before the gate opens and after it is seen that the events behind it are done."""
        self._number += 1
        words, told, number = self._words, self._told, self._number
        self._rows["value"] = number
        self._driver.stream_words(self._rows[:1], self._stream)
        for event in events:
            self._driver.event_record(event, self._stream)
        self._driver.stream_words(self._rows[1:], self._stream)
        deadline = time.perf_counter_ns() + int(_PARK_S * 1e9)
        while time.perf_counter_ns() < deadline:
            pass
        lost = deadline + int(_LOST_S * 1e9)
        begin = time.perf_counter_ns()
        words[0] = number
        while words[told] != number:
            if time.perf_counter_ns() > lost:
                raise HardwareError(f"a stream did not go on within {_LOST_S:g} s after its gate was opened")
        return begin, time.perf_counter_ns()

    def close(self) -> None:
        """Opens it for good, waits for the stream and gives the events back."""
        self._words[0] = self._number
        self._driver.stream_synchronize(self._stream)
        for event in (*self._anchors, *self._pair):
            self._driver.event_destroy(event)
        self._anchors, self._pair = [], []


@dataclass(frozen=True, slots=True)
class Phases:
    """One copy, in microseconds."""

    control_us: float
    schedule_us: float
    copy_us: float
    sync_us: float
    submit_us: float
    """Until the submit call returned: it also enqueues what comes after the copy."""
    clock_error_us: float

    @property
    def total_us(self) -> float:
        """From before the submit until completion is seen."""
        return self.control_us + self.schedule_us + self.copy_us + self.sync_us


def well_placed(copies: Sequence[Phases]) -> list[Phases]:
    """Those whose place on the host's clock is at most twice as uncertain as the best: the host was not interrupted."""
    most = _UNCERTAIN * min(copy.clock_error_us for copy in copies)
    return [copy for copy in copies if copy.clock_error_us <= most]


def split(
    begin_ns: float, handed_ns: float, submitted_ns: float, end_ns: float, seen_ns: float, *, copy_us: float,
    error_ns: float,
) -> Phases:  # fmt: skip
    """The phases from times on the host's clock: submit called, copy call returned, submit returned, copy ended (placed
    with `error_ns`), completion seen. They add up to `seen_ns - begin_ns`."""
    ended = min(max(end_ns, begin_ns), seen_ns)
    copying = min(copy_us * 1e3, ended - begin_ns)
    started = ended - copying
    control = min(handed_ns, started)
    return Phases(
        (control - begin_ns) / 1e3, (started - control) / 1e3, copying / 1e3, (seen_ns - ended) / 1e3,
        (submitted_ns - begin_ns) / 1e3, error_ns / 1e3,
    )  # fmt: skip


def measure(
    session: Session, sizes: Sequence[int], iterations: int | None = None, progress: Progress | None = None
) -> list[Row]:
    """One row per size, with the fields of the CPU's phases and what only a GPU has.

    Raises `NotSupported` where streams cannot wait for words, or more would be pinned than the bound allows.
    """
    check_sizes(sizes)
    noting = Noting(session.driver)
    arenas = session.arena("device", max(sizes)), session.arena("host", max(sizes))
    with Device(session.driver.name, driver=noting) as device:
        gate = Gate(device, session.streams(1)[0])
        try:
            for _ in range(_WARM_UP):
                gate.empty_us()
            empty_us = median(gate.empty_us() for _ in range(_EMPTY))
            rows = []
            for done, size_bytes in enumerate(sizes):
                if progress:
                    progress(done, len(sizes), f"copy of {size_bytes} bytes")
                number = iterations or min(max(_BYTES_PER_SIZE // size_bytes, _FEWEST), _MOST)
                rows.append(_size(session, device, noting, gate, arenas, size_bytes, number, empty_us))
        finally:
            gate.close()
    return rows


def _size(
    session: Session, device: Device, noting: Noting, gate: Gate, arenas: tuple[Arena, Arena], size_bytes: int,
    number: int, empty_us: float,
) -> Row:  # fmt: skip
    for arena in arenas:
        arena.reset()
    dst, src = (arena.take(size_bytes) for arena in arenas)
    buffers = copy_buffers(H2D, dst, src)
    src.random_()
    dst.fill_(_POISON)
    session.synchronize()
    gated_us = _gated(device, buffers, size_bytes, number)
    correct = torch.equal(dst.cpu(), src)
    copy_us = max(gated_us - empty_us, 0.0)
    src.random_()
    dst.fill_(_POISON)
    session.synchronize()
    plan = copy_plan(size_bytes, H2D, after=True)
    with LocalRunner(device, plan, host_ranks=_HOST_RANKS, most_streams=1) as runner:
        submit, clock = runner.bind(buffers).submit, time.perf_counter_ns
        copies = []
        for turn in range(_WARM_UP + number):
            anchor = gate.anchor()
            begin = clock()
            ticket = submit()
            submitted = clock()
            handed, stamp = noting.copied_ns, noting.recorded[0]
            while not ticket.is_over():
                pass
            seen = clock()
            ticket.wait()
            if turn < _WARM_UP:
                continue
            end = anchor.host_ns + device.driver.event_elapsed_us(anchor.event, stamp) * 1e3
            copies.append(split(begin, handed, submitted, end, seen, copy_us=copy_us, error_ns=anchor.error_ns))
    correct = correct and torch.equal(dst.cpu(), src)
    copies = well_placed(copies)
    return row(size_bytes, copies) | {
        "backend": "cuda",
        "direction": H2D,
        "host_total_us": round(median(copy.total_us for copy in copies), 4),
        "submit_us": round(median(copy.submit_us for copy in copies), 4),
        "empty_us": round(empty_us, 4),
        "clock_error_us": round(median(copy.clock_error_us for copy in copies), 4),
        "correct": correct,
    }


def _gated(device: Device, buffers: dict[tuple[int, str], torch.Tensor], size_bytes: int, number: int) -> float:
    """Between the events around a copy that was enqueued before its gate opened: the median."""
    plan = passes.prelaunch(passes.entry(copy_plan(size_bytes, H2D, before=True, after=True)))
    found = []
    with LocalRunner(device, plan, host_ranks=_HOST_RANKS, most_streams=1) as runner:
        run = runner.bind(buffers)
        for turn in range(_WARM_UP + number):
            ticket = run.submit(gated=True)
            try:
                time.sleep(_PARK_S)
            finally:
                ticket.fire()
                ticket.wait()
            if turn >= _WARM_UP:
                found.append(ticket.stamps_us()[1])
    return median(found)
