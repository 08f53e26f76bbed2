"""What a user would do without a fused operator: the plain one, then the collective; or both in chunks.

Owns the rivals of the `dma` transport on one GPU with peers in host memory. All move the bytes of the same `Exchange`.
`Unfused`: an operator, then the collective by copy engines. `Chunked`: an operator on one chunk of rows after the
other; an event (or a word that the stream writes) behind each chunk lets its copies begin. Destinations are served
in the order of the fused operator, and what the peers send comes at the same pace. Rows that arrive packed are put side
by side as they are there (`place.py`). The operator is torch's, or a kernel of ours launched once for each chunk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WORD, WRITE
from dovetail.hw.gpu.local import LocalRunner, address_of
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.ops.gpu.exchange import GPU, Buffers, Pace
from dovetail.ops.gpu.place import Placing
from dovetail.ops.gpu.released import LANES, WORDS_ON_DEVICE, Flags, SlicedRun
from dovetail.ops.gpu.tiles import END, FIRST, Order, RowTiles, one_slice, row_tiles
from dovetail.plan.build.sliced import Slice

if TYPE_CHECKING:
    import torch

#: Computes rows [begin, end) of the operator's output in torch's current stream; returns where they are, as bytes.
Rows = Callable[[int, int], "torch.Tensor"]


class How(StrEnum):
    """What lets a chunk's copies begin."""

    EVENTS = "events"  #: an event behind the chunk, and plain copies of the driver
    WORDS = "words"  #: the stream raises the flags of a sliced plan


class Unfused:
    """The operator, then the collective. An owner: `close()`."""

    def __init__(
        self, device: Device, buffers: Buffers, *, lanes: int = 1, slice_rows: int | None = None,
        timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        """`lanes`, `slice_rows`: see `Exchange.whole`."""
        exchange, self._buffers = buffers.exchange, buffers
        self.plan = exchange.whole(lanes=lanes, slice_rows=slice_rows)
        self._rows = sum(exchange.send)
        self._placing = Placing(device, buffers)
        self._runner = LocalRunner(
            device, self.plan, host_ranks=exchange.peers, most_streams=2 * lanes, timeout_s=timeout_s
        )  # fmt: skip

    def start(self, compute: Rows, stream: int) -> GpuTicket:
        """Both in the raw stream, torch's current one."""
        return self.collective(compute(0, self._rows), stream)

    def collective(self, y: torch.Tensor, stream: int) -> GpuTicket:
        """The collective alone, until the output is finished; it takes the GPU's rows from `y`."""
        self._placing.begin(stream)
        ticket = self._runner.submit(self._buffers.of(self.plan, y), after=stream)
        self._placing.end(stream, y)
        return ticket

    def close(self) -> None:
        """Waits for the last run."""
        self._runner.close()
        self._placing.close()


class Chunked:
    """The operator in chunks of rows, each followed by its copies. An owner: `close()`."""

    def __init__(
        self, device: Device, buffers: Buffers, chunk_rows: int, *, first_rows: int | None = None,
        cuts: Sequence[tuple[int, int, int]] | None = None, how: How | str = How.EVENTS,
        order: Order | str = Order.REMOTE, pace: Pace | str = Pace.STEP, timeout_s: float | None = None,
        lanes: int = LANES, streams: Sequence[int] = (), words_on_device: bool = WORDS_ON_DEVICE,
    ) -> None:  # fmt: skip
        """`first_rows`: of the first chunk, from which they grow; see `tiles.pieces`. `cuts`: see `tiles.row_tiles`.

        `lanes`: streams for the copies of each direction; `streams`: twice as many of the caller's, or its own.

        `words_on_device`: with words, these lie in the GPU's memory.
        """
        device.enter()
        exchange, self._driver, self._buffers = buffers.exchange, device.driver, buffers
        tiles = row_tiles(
            exchange.send, GPU, chunk_rows, slice_rows=chunk_rows, first_rows=first_rows, order=order, cuts=cuts
        )  # fmt: skip
        self.chunks: list[tuple[int, int]] = tiles.slices[:, [FIRST, END]].tolist()
        self.how = How(how)
        self._run: SlicedRun | None = None
        self._events: list[int] = []
        self._streams, self._owns = list(streams), not streams
        self._kept = exchange.send[GPU]
        self._placing = Placing(device, buffers)
        if self.how is How.WORDS:
            plan = exchange.sliced(tiles, pace=pace, lanes=lanes)
            self._run = SlicedRun(
                device, plan, buffers.of(plan), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
                words_on_device=words_on_device,
            )  # fmt: skip
            return
        self.leaving, arriving, follows = exchange.slices(tiles, pace)
        self._early = [] if follows else arriving
        self._with: list[list[Slice]] = [[] for _ in self.chunks]
        for piece, k in zip(arriving, follows, strict=False):
            self._with[k].append(piece)
        try:
            while self._owns and len(self._streams) < 2 * lanes:
                self._streams.append(self._driver.stream_create())
            while len(self._events) < len(self.chunks) + 1 + len(self._streams):
                self._events.append(self._driver.event_create())
        except BaseException:
            self.close()
            raise

    def start(self, compute: Rows, stream: int) -> GpuTicket | None:
        """All of it in the raw stream, torch's current one. With events there is no ticket: the stream tells."""
        self._placing.begin(stream)
        if self._run is not None:
            ticket = self._run.start(_Chunks(self, compute), stream)
            self._placing.end(stream)
            return ticket
        driver, number = self._driver, len(self.chunks)
        ready, before, ends = self._events[:number], self._events[number], self._events[number + 1 :]
        out, into = (itertools.cycle(self._streams[side::2]) for side in (0, 1))
        driver.event_record(before, stream)
        for other in self._streams:
            driver.stream_wait_event(other, before)
        for piece in self._early:
            self._copy(piece, next(into))
        held = []
        for k, (begin, end) in enumerate(self.chunks):
            rows = compute(begin, end)
            held.append(rows)  # until the stream waits for its copies: what is freed then is used again behind them
            driver.event_record(ready[k], stream)
            if self.leaving[k].destination != GPU:
                self._copy(self.leaving[k], next(out), ready[k], rows)
            for piece in self._with[k]:
                self._copy(piece, next(into), ready[k])
            self._own(begin, end, rows, stream)
        for other, event in zip(self._streams, ends, strict=True):
            driver.event_record(event, other)
            driver.stream_wait_event(stream, event)
        self._placing.end(stream)
        return None

    def _own(self, begin: int, end: int, rows: torch.Tensor, stream: int) -> None:
        """Places a chunk of what the GPU keeps: its first rows."""
        if end <= self._kept:
            self._placing.own(rows, begin, stream)

    def _copy(self, piece: Slice, stream: int, after: int | None = None, rows: torch.Tensor | None = None) -> None:
        """Behind an event; `rows`: the chunk itself, if that is what the source's bytes are."""
        if after is not None:
            self._driver.stream_wait_event(stream, after)
        begin = self._buffers.y[piece.source].data_ptr() + piece.source_offset if rows is None else address_of(rows)
        to = self._buffers.output[piece.destination].data_ptr() + piece.destination_offset
        pitches = piece.pitch("destination"), piece.pitch("source")
        if piece.rows == 1 or pitches == (piece.row_bytes, piece.row_bytes):
            self._driver.copy(to, begin, piece.size_bytes, stream)
        else:
            self._driver.copy_rows(to, pitches[0], begin, pitches[1], piece.row_bytes, piece.rows, stream)

    def close(self) -> None:
        """Waits for the last run. Safe to call twice."""
        if self._run is not None:
            self._run.close()
        self._placing.close()
        for stream in self._streams:
            self._driver.stream_synchronize(stream)
            if self._owns:
                self._driver.stream_destroy(stream)
        for event in self._events:
            self._driver.event_destroy(event)
        self._streams, self._events = [], []


class _Chunks:
    """The chunks as a computation that raises flags: the stream writes the word behind each."""

    def __init__(self, chunked: Chunked, compute: Rows) -> None:
        self._chunked, self._compute = chunked, compute

    def launch(self, flags: Flags, stream: int) -> None:
        """See `Sliced`."""
        word = np.zeros(1, WORD)
        word["kind"], word["value"] = WRITE, flags.value
        for (begin, end), address in zip(self._chunked.chunks, flags.words, strict=True):
            rows = self._compute(begin, end)
            word["address"] = address
            self._chunked._driver.stream_words(word, stream)
            self._chunked._own(begin, end, rows, stream)


def kernel_rows(
    tiles: RowTiles, make: Callable[[RowTiles], Callable[[], object]], y: torch.Tensor
) -> Rows:  # fmt: skip
    """Rows of `y` by a kernel of ours, launched once for each slice of a table.

    `make`: of one slice's tiles, what launches the kernel on them in torch's current stream; it writes to `y`.
    """
    ends = tiles.slices[:, [FIRST, END]].tolist()
    launches = {(first, end): make(one_slice(tiles, k)) for k, (first, end) in enumerate(ends)}

    def compute(begin: int, end: int) -> torch.Tensor:
        launches[begin, end]()
        return y[begin:end]

    return compute


def gemm_rows(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> Rows:
    """Rows of y = x @ w.T by torch, in place."""
    import torch

    transposed = w.t()

    def compute(begin: int, end: int) -> torch.Tensor:
        return torch.mm(x[begin:end], transposed, out=y[begin:end])

    return compute


def bag_rows(weight: torch.Tensor, values: torch.Tensor, offsets: torch.Tensor, num_tables: int, mode: str) -> Rows:
    """Samples [begin, end), each `num_tables` bags, by torch: one call over one table that has the rows of all.

    The values are those of sample 0's bags, one of each table, then sample 1's: torch then writes what is to be sent,
    with nothing to be put in order. What is known before a run (where each chunk's bags begin) is not done in it.
    """
    import torch

    where = values.device
    known: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    bags = offsets.to(values.dtype)

    def compute(begin: int, end: int) -> torch.Tensor:
        if (begin, end) not in known:
            mine = bags[begin * num_tables : end * num_tables + 1]
            first, last = int(mine[0]), int(mine[-1])
            known[begin, end] = values[first:last], (mine - first).to(where)
        indices, at = known[begin, end]
        return torch.nn.functional.embedding_bag(indices, weight, at, mode=mode, include_last_offset=True)

    return compute
