"""Runs the copies of a plan: by a GPU's copy engines, in one of several forms, or by the CPU.

Owns the ordering rules, in one place: a transfer begins after what the caller's stream has been
given so far (readers of what is overwritten, writers of what is read), and a stream that joins it goes on after its
last byte. Submitting returns at once: the engines work while Python issues the rest.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import HardwareError, Timeout
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import SourceOrder
from dovetail.kv import staging
from dovetail.kv.auto import Auto, gains_by_staging
from dovetail.kv.choose import BY_STAGING, CANDIDATES, VECTOR_BYTES, Choice, Costs, Path
from dovetail.kv.learn import Request
from dovetail.kv.planner import Direction, Table
from dovetail.kv.staging import Kernel, Launch, Staging

logger = logging.getLogger(__name__)
Ints = NDArray[np.int64]
_PAUSE_S = 50e-6
#: How long a kernel may wait for its place beside GEMMs; what an engine takes for a row there, and bytes in a
#: microsecond (an H200, PCIe 5.0).
_PLACE_US, _ROW_US, _LINK_BYTES = 800.0, 0.2, 52e3


class Transfer(Protocol):
    """Bytes under way."""

    def is_over(self) -> bool: ...
    def wait(self, timeout_s: float = 60.0) -> None:
        """Blocks until the last byte has landed; raises `Timeout`."""


def linear(table: Table) -> tuple[Ints, Ints, Ints, Ints]:
    """Strided copies as linear ones: (device offset, piece, host offset, length) of each row."""
    rows = table.rows
    which = np.repeat(np.arange(len(table)), rows)
    row = np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows)
    device = table.device[which] + row * table.device_pitch[which]
    return device, table.piece[which], table.host[which] + row * table.host_pitch[which], table.width[which]


class GpuMover:
    """Copies between a cache in a GPU's memory and pinned pieces of host memory."""

    def __init__(
        self,
        device: Device,
        cache: int,
        pieces: Sequence[int],
        *,
        entries_per_call: int = 512,
        num_streams: int = 2,
        costs: Costs | None = None,
        paths: Collection[Path | str] = CANDIDATES,
        launch: Launch | None = None,
        learn: bool = True,
    ) -> None:
        """For a cache in a GPU's memory.

        Args:
            cache: the address at which the layout begins.
            pieces: the address of each piece of host memory.
            num_streams: streams of a direction that share strided copies. An engine idles between two copies of one
                stream until it has a long queue; two streams fill that gap.
            costs: what `auto` estimates by; if not given, what was measured on this machine, or what is shipped.
            paths: those that `auto` may take. `staged` needs 256 MB of the GPU's memory for each direction, when it
                first takes it; where there is no room it is left out.
            launch: puts the kernel of the path staged into a stream, if not by Triton.
            learn: `auto` times its own transfers, and tries paths that are near the best (`dovetail.kv.learn`).
        """
        if entries_per_call < 1 or num_streams < 1:
            found = f"{entries_per_call} and {num_streams}"
            raise ValueError(f"entries_per_call and num_streams must be at least 1, not {found}")
        device.enter()
        self._device, self._driver = device, device.driver
        self._cache, self._pieces = cache, np.array(pieces, np.int64)
        self._launch = launch
        self._auto = Auto(device, cache, costs, paths, has_launch=launch is not None, learn=learn)
        self._entries = min(entries_per_call, device.caps.most_batched or entries_per_call)
        self._streams = {
            direction: [self._driver.stream_create() for _ in range(num_streams)] for direction in Direction
        }  #: the first has the order, others share the work of copies
        self._staging: dict[Direction, Staging] = {}  # made when first needed
        self._last: dict[Direction, GpuTransfer] = {}
        #: In the order in which they end. Whether or not somebody asks, those that are over give back what they hold.
        self._under_way: dict[Direction, deque[GpuTransfer]] = {direction: deque() for direction in Direction}
        self._closed = False

    def submit(
        self,
        direction: Direction | str,
        table: Table,
        path: Path | str = Path.DMA_2D,
        *,
        after: Sequence[int] = (),
        beside: bool | None = None,
        entries_per_call: int | None = None,
    ) -> GpuTransfer:
        """Starts a transfer; returns before it has landed.

        Args:
            after: streams whose work so far must be done first.
            beside: for `auto`: does computation run at the same time? If not said: yes, unless `after` are all done.

        Raises:
            ValueError: an unknown path, or the mover is closed.
            NotSupported: the driver has no batched copies, or a kernel can't move these rows (`kernel`, `staged`).
            HardwareError: the driver refused; some copies may be under way, until `is_idle`.
        """
        direction, path = Direction(direction), Path(path)
        if self._closed:
            raise ValueError("the mover is closed")
        self._device.enter()
        self._auto.look(direction)
        request: Request | None = None  # that learns from this one
        if path is Path.AUTO:
            if beside is None:
                beside = not after or not all(map(self._driver.stream_done, after))
            choice, request = self._choice(direction, table, beside)
        else:
            choice = _asked_for(path, entries_per_call or self._entries)
        stream = self._streams[direction][0]
        for other in after:
            self._device.order(other, stream)
        if choice.path not in BY_STAGING:
            self._behind_last(direction, stream)
        began = self._marked(stream) if request else 0
        try:
            last, held = self._start(direction, table, stream, choice)
            self._behind_last(direction, last)  # a transfer is over after those before it, whatever their streams
            made = GpuTransfer(self._device, last, direction, choice, table.size_bytes, held, began)
        except BaseException:
            if began:
                self._device.give_event(began, timed=True)
            raise
        self._last[direction] = made
        if request:
            self._auto.watch(made, request)
        open_ones = self._under_way[direction]
        open_ones.append(made)
        while open_ones and open_ones[0].is_over():
            open_ones.popleft()
        return made

    def _start(self, direction: Direction, table: Table, stream: int, choice: Choice) -> tuple[int, list[Any]]:
        """Issues copies; returns the stream that has the last byte, and what must stay until then."""
        match choice.path:
            case Path.KERNEL:
                return stream, self._gathered(direction, table, stream)
            case Path.DMA_2D:
                self._strided(direction, table, stream)
            case Path.DMA_BATCH:
                self._batched(direction, table, stream, choice.entries_per_call)
            case Path.DMA_LOOP:
                self._looped(direction, table, stream)
            case Path.STAGED | Path.MIXED:
                return self._staged(direction, table, stream, mixed=choice.path is Path.MIXED), []
            case _:
                raise ValueError(f"a cache in a GPU's memory can't be reached by the path {choice.path}")
        return stream, []

    def _behind_last(self, direction: Direction, stream: int) -> None:
        """What the stream is given comes after the transfer before: its kernel may still write the same blocks."""
        if before := self._last.get(direction):
            before.join(stream)

    def _marked(self, stream: int) -> int:
        """An event that has the time at which the stream gets there."""
        event = self._device.take_event(timed=True)
        self._driver.event_record(event, stream)
        return event

    def _choice(self, direction: Direction, table: Table, beside: bool) -> tuple[Choice, Request | None]:
        """The path that `auto` takes, and who learns from it."""
        choice, request = self._auto.choose(direction, table, beside=beside, is_clear=self._is_clear)
        if choice.path in BY_STAGING:
            try:
                self._through(direction).reserve(len(table) + 2 * table.size_bytes // staging.CHUNK_BYTES + 1)
            except HardwareError as error:
                logger.warning("auto leaves out the path staged from now on: %s", error)
                self._auto.leave_out(BY_STAGING)
                return self._choice(direction, table, beside)
        return choice, request

    def _is_clear(self) -> bool:
        """Nothing is under way."""
        return all(map(GpuTransfer.is_over, self._last.values()))

    def is_idle(self, direction: Direction | str) -> bool:
        """True if nothing is under way in this direction."""
        self._device.enter()
        if self._closed:
            return True
        through = self._staging.get(Direction(direction))
        copied = all(self._driver.stream_done(stream) for stream in self._streams[Direction(direction)])
        return copied and (through is None or through.is_idle())

    def fewest_copies(self, path: Path, num_blocks: int, num_runs: int) -> int:
        """Of a fetch: one for each run of slots if it may be staged, wherever the blocks lie; otherwise one a block."""
        return num_runs if self._may_stage(path) else num_blocks

    def _sides(self, direction: Direction, device: Ints, piece: Ints, host: Ints) -> tuple[Ints, Ints]:
        """(destination, source) addresses."""
        there, here = self._cache + device, self._pieces[piece] + host
        return (there, here) if direction is Direction.FETCH else (here, there)

    def _strided(self, direction: Direction, table: Table, stream: int) -> None:
        """By all streams of the direction, behind what `stream` has; it goes on behind them."""
        streams = self._streams[direction][: len(table)]
        for other in streams[1:]:
            self._device.order(stream, other)
        self._issue(direction, table, streams)
        for other in streams[1:]:
            self._device.order(other, stream)

    def _issue(self, direction: Direction, table: Table, streams: Sequence[int]) -> None:
        """Strided copies, in these streams by turns."""
        dst, src = self._sides(direction, table.device, table.piece, table.host)
        pitches = (table.device_pitch, table.host_pitch)
        to, of = pitches if direction is Direction.FETCH else pitches[::-1]
        columns = [column.tolist() for column in (dst, to, src, of, table.width, table.rows)]
        copy = self._driver.copy_rows
        for d, d_pitch, s, s_pitch, width, rows, where in zip(*columns, itertools.cycle(streams), strict=False):
            copy(d, d_pitch, s, s_pitch, width, rows, where)

    def prepare(self, path: Path | str, row_bytes: Collection[int]) -> None:
        """Compiles what a path needs for rows of these lengths, so that no transfer waits for it: some 0.1 s each.

        Where that fails (Triton without a C compiler, say), `auto` leaves the path out.
        """
        lengths = [length for length in row_bytes if not length % VECTOR_BYTES]
        if not lengths or self._launch is not None or not self._may_stage(Path(path)) or not staging.has_kernel():
            return
        self._device.enter()
        try:
            kernel = Kernel(self._device)
            for length in lengths:
                kernel.prepare(length)
        except Exception as error:  # of Triton, of many kinds
            if path != Path.AUTO:
                raise
            logger.warning("auto leaves out the paths staged and mixed: their kernel can't be compiled: %s", error)
            self._auto.leave_out(BY_STAGING)
            return
        self._launch = kernel

    def _may_stage(self, path: Path) -> bool:
        return self._auto.can_stage if path is Path.AUTO else path in BY_STAGING

    def _through(self, direction: Direction) -> Staging:
        """Staging memory, made when it is first needed."""
        if direction not in self._staging:
            made = self._staging[direction] = Staging(self._device, direction, launch=self._launch)
            self._launch = made.launch  # both directions share what was compiled
        return self._staging[direction]

    def _staged(self, direction: Direction, table: Table, stream: int, *, mixed: bool = False) -> int:
        """Rows through staging memory, all else directly; returns the stream that ends last."""
        fits = gains_by_staging(table.form or table, self._through(direction).chunk_bytes)
        if not (fits if table.form else fits.all()):
            others = ~np.broadcast_to(fits, len(table))
            self._behind_last(direction, stream)
            self._strided(direction, table.where(others), stream)
            table = table.where(~others)
        return (self._mixed if mixed else self._by_chunks)(direction, table, stream)

    def _by_chunks(self, direction: Direction, table: Table, stream: int) -> int:
        through, last = self._through(direction), stream
        for mine in table.split(through.chunk_bytes).by_shape():
            device, host = self._cache + mine.device, self._pieces[mine.piece] + mine.host
            shape = int(mine.rows[0]), int(mine.width[0])
            last = through.run(device, mine.device_pitch, host, mine.piece, *shape, stream)
        return last

    def _mixed(self, direction: Direction, table: Table, stream: int) -> int:
        """Some of the copies directly, while the kernel waits for its place beside kernels of others.

        The last ones of a fetch, which ends with the kernel; the first ones of a store, which begins with it. Those are
        in streams that the kernel does not wait for.
        """
        others = self._streams[direction][1:]
        directly = _meanwhile(direction, table)
        if not directly.any() or not others:
            return self._by_chunks(direction, table, stream)
        meanwhile, table = table.where(directly), table.where(~directly)
        if direction is Direction.FETCH:
            last = self._by_chunks(direction, table, stream)
            self._behind_last(direction, stream)
            self._strided(direction, meanwhile, stream)
            self._device.order(stream, last)
            return last
        for other in others:
            self._device.order(stream, other)
            self._behind_last(direction, other)
        self._issue(direction, meanwhile, others)
        last = self._by_chunks(direction, table, stream)
        for other in others:
            self._device.order(other, last)
        return last

    def _batched(self, direction: Direction, table: Table, stream: int, entries: int) -> None:
        device, piece, host, length = linear(table)
        dst, src = (side.astype(np.uint64) for side in self._sides(direction, device, piece, host))
        size = length.astype(np.uint64)
        order = SourceOrder.ANY if direction is Direction.FETCH else SourceOrder.STREAM
        for k in range(0, len(size), entries):
            part = slice(k, k + entries)
            self._driver.copy_batch(dst[part], src[part], size[part], order, stream)

    def _gathered(self, direction: Direction, table: Table, stream: int) -> list[Any]:
        from dovetail.kv import gather

        dst, src = self._sides(direction, table.device, table.piece, table.host)
        pitches = (table.device_pitch, table.host_pitch)
        to, of = pitches if direction is Direction.FETCH else pitches[::-1]
        return gather.launch(np.stack([dst, to, src, of]), table.width, table.rows, stream, self._device.index)

    def _looped(self, direction: Direction, table: Table, stream: int) -> None:
        device, piece, host, length = linear(table)
        dst, src = self._sides(direction, device, piece, host)
        copy = self._driver.copy
        for d, s, n in zip(dst.tolist(), src.tolist(), length.tolist(), strict=True):
            copy(d, s, n, stream)

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits for what is under way and gives the streams back. Safe to call twice; raises `Timeout`."""
        deadline = time.monotonic() + timeout_s
        while not all(self.is_idle(direction) for direction in Direction):
            if time.monotonic() > deadline:
                raise Timeout(f"copies were under way for {timeout_s:g} s after the mover was to be closed; they go on")
            time.sleep(_PAUSE_S)
        if self._closed:
            return
        self._closed = True
        for direction in Direction:
            self._auto.look(direction)
        for transfer in itertools.chain(*self._under_way.values()):
            transfer.is_over()
        for through in self._staging.values():
            through.close(timeout_s)
        for stream in itertools.chain(*self._streams.values()):
            self._driver.stream_destroy(stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _meanwhile(direction: Direction, table: Table) -> NDArray[np.bool_]:
    """Which copies go directly where a path is mixed: as long as a kernel may wait, a quarter of all at most."""
    number, places = len(table), np.arange(len(table))
    each_us = (table.num_rows * _ROW_US + table.size_bytes / _LINK_BYTES) / max(number, 1)
    few = min(number // 4, int(_PLACE_US / max(each_us, _ROW_US)))
    return places >= number - few if direction is Direction.FETCH else places < few


@functools.lru_cache(maxsize=64)
def _asked_for(path: Path, entries_per_call: int) -> Choice:
    return Choice(path=path, entries_per_call=entries_per_call, why=lambda: "asked for")


class GpuTransfer:
    """Copies in a stream."""

    def __init__(
        self,
        device: Device,
        stream: int,
        direction: Direction,
        choice: Choice,
        size_bytes: int,
        held: list[Any],
        began: int = 0,
    ) -> None:
        """For copies that have been issued.

        Args:
            held: what must stay alive until the last byte has landed.
            began: a timed event before the first byte, this object's from now on.
        """
        self._held = held
        self.direction, self.choice, self.size_bytes = direction, choice, size_bytes  #: choice: the path, and why
        self.time_us = 0.0  #: from the first byte to the last on the GPU's clock, if it was timed and is over
        self._device, self._began, self._end = device, began, device.take_event(timed=bool(began))
        device.driver.event_record(self._end, stream)
        self._over = False

    def is_over(self) -> bool:
        """True once the last byte has landed."""
        if not self._over and self._device.driver.event_done(self._end):
            self._over, self._held = True, []
            if self._began:
                self.time_us = self._device.driver.event_elapsed_us(self._began, self._end)
                self._device.give_event(self._began, timed=True)
            self._device.give_event(self._end, timed=bool(self._began))
        return self._over

    def join(self, stream: int) -> None:
        """What `stream` is given from now on comes after the last byte."""
        if not self._over:
            self._device.driver.stream_wait_event(stream, self._end)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Blocks until the last byte has landed."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over():
            if time.monotonic() > deadline:
                what = f"the {self.direction} of {self.size_bytes} bytes by {self.choice.path}"
                raise Timeout(f"{what} was not over after {timeout_s:g} s; it goes on")
            time.sleep(_PAUSE_S)
