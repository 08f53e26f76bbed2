"""Proof of engine: who moves the bytes of a copy, a copy engine or the GPU's compute cores.

Every multiprocessor is held by a kernel that does nothing; a copy that ends meanwhile was moved by an engine, one that
does not needs a multiprocessor itself. Owns the experiment and the judgement; the hold is `hold.py`'s. Everything is
bounded: a hold ends by itself, and nothing is waited for longer than it lasts.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from dovetail.errors import NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Driver, DriverError, SourceOrder

#: A small and a large copy; drivers may serve them differently.
SIZES = (4 << 10, 64 << 20)
FORMS = ("single", "batch", "rows", "graph")
#: How long a hold lasts at least, `hold.MOST_S`, and how long a copy may take beside it.
HOLD_S, WINDOW_S = 0.2, 0.15
_ALONE_SHARE = 1 / 3
_REPEATS = 2
_PIECES = 4
_PAUSE_S = 20e-6
_GONE, _CAME = 0x5A, 0xA5


class Who(StrEnum):
    """Who moved the bytes; the words that stand in the profile."""

    ENGINE = "copy engine"
    KERNEL = "SM kernel"
    UNPROVED = "unproved"


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one attempt, or of several that were compared."""

    who: Who
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One form of copy at one size on one path."""

    path: str
    form: str
    size_bytes: int
    who: Who
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What holds for a whole path: `ENGINE` only if every trial says so."""

    path: str
    who: Who
    why: str
    trials: tuple[Trial, ...]


class Holding(Protocol):
    """What is asked of `hold.Holder`."""

    num_programs: int

    def hold(self, stream: int) -> AbstractContextManager[int]: ...


def prove(device: Device, *, holder: Holding | None = None, sizes: Sequence[int] = SIZES) -> dict[str, Proof]:
    """Who moves bytes from host to device ("h2d"), "d2h", "d2d" and, where a second GPU can be reached, "p2p".

    Takes every multiprocessor for up to 200 ms at a time, several seconds in all: nobody else should use the GPU.

    Args:
        holder: takes the multiprocessors; by default `hold.Holder`, which needs torch and Triton.

    Raises:
        NotSupported: there is no way to hold the multiprocessors.
        DriverError: the driver refused a copy.
    """
    device.enter()
    if holder is not None:
        return _prove(device, holder, sizes)
    import torch

    if not torch.cuda.is_available():
        raise NotSupported(f"torch {torch.__version__} sees no GPU, and without it no multiprocessor can be held")
    with torch.cuda.device(device.index):
        try:
            from dovetail.hw.gpu.hold import Holder

            made = Holder()
        except ImportError as error:
            raise NotSupported(f"holding the multiprocessors needs Triton, which did not load: {error}") from None
        return _prove(device, made, sizes)


def compared(answers: Sequence[Answer]) -> Answer:
    """One answer of several attempts: theirs if all agree."""
    if len({a.who for a in answers}) == 1:
        return answers[0]
    shown = ", ".join(f"{a.who}{f' ({a.why})' if a.why else ''}" for a in answers)
    return Answer(Who.UNPROVED, f"attempts disagree: {shown}")


def summed(path: str, trials: Sequence[Trial]) -> Proof:
    """One answer for a path: one trial that took compute cores counts more than all that did not."""
    for who in (Who.KERNEL, Who.UNPROVED):
        if found := [t for t in trials if t.who is who]:
            break
    else:
        return Proof(path=path, who=Who.ENGINE, why="", trials=tuple(trials))
    why = ""
    if who is Who.UNPROVED or len(found) < len(trials):
        first = f": {found[0].why}" if found[0].why else ""
        why = ", ".join(f"{t.form} of {t.size_bytes} bytes" for t in found) + first
    return Proof(path=path, who=who, why=why, trials=tuple(trials))


def attempt(
    driver: Driver, holder: Holding, issue: Callable[[int], None], *, held: int, stream: int, event: int
) -> Answer:
    """Issues a copy on `stream` while all multiprocessors are held on the stream `held`. Both were used before.

    Done counts only while the hold lasts for certain: when it is let go, a waiting copy may end before the last of its
    programs does, so the clock decides; the stream of the hold, asked after the copy's event, has to agree.
    """
    begin = time.monotonic()
    with holder.hold(held) as num_up:
        if num_up < holder.num_programs:
            why = f"{num_up} of the {holder.num_programs} programs that fill the GPU came up; is somebody else on it?"
            return Answer(Who.UNPROVED, why)
        issue(stream)
        driver.event_record(event, stream)
        while not (done := driver.event_done(event)) and time.monotonic() - begin < WINDOW_S:
            time.sleep(_PAUSE_S)
        lasts = not driver.stream_done(held) and time.monotonic() - begin < HOLD_S
    driver.stream_synchronize(stream)
    if not lasts:
        return Answer(Who.UNPROVED, "the hold ended before the copy was seen to end, or not to end")
    return Answer(Who.ENGINE if done else Who.KERNEL)


# --- what is copied


@dataclass(frozen=True, slots=True)
class _Route:
    """A path and its two ends: address, and 1 for host memory, whose rows lie close, 2 for a device's, with gaps."""

    path: str
    src: int
    dst: int
    src_gap: int
    dst_gap: int


def _prove(device: Device, holder: Holding, sizes: Sequence[int]) -> dict[str, Proof]:
    driver = device.driver
    proofs = {}
    with contextlib.ExitStack() as stack:
        held, stream = driver.stream_create(), driver.stream_create()
        stack.callback(driver.stream_destroy, held)
        stack.callback(driver.stream_destroy, stream)
        event = driver.event_create()
        stack.callback(driver.event_destroy, event)
        look = driver.host_alloc(4096)
        stack.callback(driver.host_free, look)
        for s in (held, stream):
            driver.fill(look, 0, 8, s)
            driver.stream_synchronize(s)
        for route in _routes(device, max(sizes), stack):
            trials = []
            for form, size in itertools.product(FORMS, sizes):
                with _issuer(device, route, form, size, stream) as issue:
                    if issue is None:
                        continue
                    whole = _Whole(driver, route, size, form, look, stream)
                    answer = _tried(driver, holder, issue, whole, held=held, stream=stream, event=event)
                trials.append(Trial(path=route.path, form=form, size_bytes=size, who=answer.who, why=answer.why))
            proofs[route.path] = summed(route.path, trials)
    return proofs


def _tried(
    driver: Driver, holder: Holding, issue: Callable[[int], None], whole: _Whole, *, held: int, stream: int, event: int
) -> Answer:
    """Alone first, which loads what the driver loads late and tells how long it takes; then beside the hold, twice."""
    alone_s = 0.0
    for _ in range(2):
        begin = time.monotonic()
        issue(stream)
        driver.stream_synchronize(stream)
        alone_s = time.monotonic() - begin
    if alone_s > WINDOW_S * _ALONE_SHARE:
        return Answer(Who.UNPROVED, f"it takes {alone_s * 1e3:.0f} ms alone, too long to be seen beside a hold")
    answers = []
    for _ in range(_REPEATS):
        whole.mark()
        answer = attempt(driver, holder, issue, held=held, stream=stream, event=event)
        if answer.who is not Who.UNPROVED and not whole.arrived():
            answer = Answer(Who.UNPROVED, "the copy ended, but its bytes did not arrive")
        answers.append(answer)
    return compared(answers)


def _routes(device: Device, most_bytes: int, stack: contextlib.ExitStack) -> Iterator[_Route]:
    driver, room = device.driver, 2 * most_bytes

    def on_device() -> int:
        address = driver.device_alloc(room)
        stack.callback(driver.device_free, address)
        return address

    host, first, second = driver.host_alloc(most_bytes), on_device(), on_device()
    stack.callback(driver.host_free, host)
    yield _Route("h2d", host, first, 1, 2)
    yield _Route("d2h", first, host, 2, 1)
    yield _Route("d2d", first, second, 2, 2)
    others = (n for n in range(driver.num_devices()) if n != device.index and driver.can_reach(device.index, n))
    if (peer := next(others, None)) is not None:
        driver.use(peer)
        try:
            far = on_device()
        finally:
            driver.use(device.index)
        driver.enable_peer(peer)
        yield _Route("p2p", first, far, 2, 2)


def _rows(size: int) -> tuple[int, int]:
    """(width, rows) of a strided copy of `size` bytes."""
    width = 512 if size <= 64 << 10 else 4096
    return width, size // width


@contextlib.contextmanager
def _issuer(device: Device, route: _Route, form: str, size: int, stream: int) -> Iterator[Callable[[int], None] | None]:
    """Issues the copy, as often as it is called; None where the driver does not have the form."""
    driver, src, dst = device.driver, route.src, route.dst
    if form == "single":
        yield lambda s: driver.copy(dst, src, size, s)
    elif form == "rows":
        width, rows = _rows(size)
        pitches = width * route.dst_gap, width * route.src_gap
        yield lambda s: driver.copy_rows(dst, pitches[0], src, pitches[1], width, rows, s)
    elif form == "batch":
        if not device.caps.batched_copy:
            yield None
            return
        starts = np.arange(_PIECES, dtype=np.uint64) * np.uint64(size // _PIECES)
        each: Any = np.full(_PIECES, size // _PIECES, np.uint64)
        to, of = starts + np.uint64(dst), starts + np.uint64(src)
        yield lambda s: driver.copy_batch(to, of, each, SourceOrder.STREAM, s)
    else:
        try:
            driver.graph_begin(stream)
            driver.copy(dst, src, size, stream)
            graph = driver.graph_end(stream)
        except (NotSupported, DriverError):
            yield None
            return
        try:
            yield lambda s: driver.graph_launch(graph, s)
        finally:
            driver.graph_destroy(graph)


class _Whole:
    """Whether a copy arrived: its first and its last byte."""

    def __init__(self, driver: Driver, route: _Route, size: int, form: str, look: int, stream: int) -> None:
        self._driver, self._look, self._stream = driver, look, stream
        last = [size - 1, size - 1]
        if form == "rows":
            width, rows = _rows(size)
            last = [(rows - 1) * width * gap + width - 1 for gap in (route.src_gap, route.dst_gap)]
        self._sources = (route.src, route.src + last[0])
        self._targets = (route.dst, route.dst + last[1])

    def mark(self) -> None:
        """Makes the ends of source and destination differ."""
        for byte, addresses in ((_CAME, self._sources), (_GONE, self._targets)):
            for address in addresses:
                self._driver.fill(address, byte, 1, self._stream)
        self._driver.stream_synchronize(self._stream)

    def arrived(self) -> bool:
        """True if the ends of the destination are now the source's."""
        for n, address in enumerate(self._targets):
            self._driver.copy(self._look + n, address, 1, self._stream)
        self._driver.stream_synchronize(self._stream)
        return ctypes.string_at(self._look, 2) == bytes((_CAME, _CAME))
