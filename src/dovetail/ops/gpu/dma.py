"""The `dma` transport: a finished slice raises a flag, the flag releases a copy by an engine.

Owns the run of a sliced plan beside the computation that raises its flags, and the two operators on one GPU whose peers
are in host memory. The computation is launched first and the copies are issued while it runs, behind an event that was
recorded before it; the caller's stream then waits for the last copy. Nothing here waits on the host.

Peers in host memory have no computation of their own. What they send is read by the GPU's engines, so the bytes that
cross the link are those of a real all-to-all, both ways: `paced` peers are in step with the GPU (a part of their rows
is there when the GPU has as large a part of its own), others have everything ready at the start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.local import LocalRunner
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.ops.gpu.exchange import GPU, Buffers, Exchange, Layout, Pace, first_rows_of, slice_rows_of
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch, PoolShape, SplitK
from dovetail.ops.gpu.place import Placing
from dovetail.ops.gpu.tiles import (
    END,
    FIRST,
    Blocks,
    Order,
    RowTiles,
    across,
    behind,
    large_blocks,
    one_slice,
    row_tiles,
)
from dovetail.plan.plan import Plan

if TYPE_CHECKING:
    import torch

#: Queues in each direction, which take slices in turn: a stream that waits for a flag sees it some 10 us late, while
#: the other one copies.
LANES = 2
#: Where flags lie: a kernel's store to its own memory is over sooner than one over the link.
WORDS_ON_DEVICE = True


@dataclass(frozen=True, slots=True, eq=False)
class Flags:
    """What a computation raises in one run: it stores `value`, 64 bits, to the address of a slice that is finished.

    All bytes of the slice must be visible to the system before (a release store at system scope). The addresses are
    those of the plan's imported signals in their order, which is that of the slices.
    """

    addresses: torch.Tensor  #: int64, on the device
    words: Sequence[int]  #: the same numbers, for whoever raises them from a stream
    base: int  #: what this run's signals count from
    value: int  #: base + 1

    def __len__(self) -> int:
        return len(self.words)


class Sliced(Protocol):
    """A computation that raises a flag for each of its slices."""

    def launch(self, flags: Flags, stream: int) -> None:
        """Puts it into the raw stream, which is torch's current one, and returns at once.

        It must not wait for anything that comes later in that stream, and must raise every flag.
        """


class SlicedRun:
    """A sliced plan over given buffers, run again and again, each time beside a computation. An owner: `close()`."""

    def __init__(
        self, device: Device, plan: Plan, buffers: Mapping[tuple[int, str], Any], *, host_ranks: frozenset[int],
        timeout_s: float | None = None, lanes: int = 1, words_on_device: bool = False,
    ) -> None:  # fmt: skip
        """`plan`: of `plan.build.sliced`; `buffers` by rank and name, those of `host_ranks` in pinned host memory.

        `lanes`: those of the plan; `words_on_device`: the flags lie in the GPU's memory.
        """
        import torch

        device.enter()
        self._device = device
        self._runner = LocalRunner(
            device, plan, host_ranks=host_ranks, timeout_s=timeout_s, most_streams=2 * lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        try:
            self._run = self._runner.bind(buffers)
        except BaseException:
            self._runner.close()
            raise
        self._error: BaseException | None = None
        where = f"cuda:{device.index}" if torch.cuda.is_available() else "cpu"
        self._words = self._runner.imported()
        self._addresses = torch.tensor(self._words, dtype=torch.int64).to(where)

    @property
    def num_flags(self) -> int:
        """How many flags a computation raises."""
        return len(self._words)

    def start(self, compute: Sliced, stream: int) -> GpuTicket:
        """Launches the computation into the raw stream and issues the copies; the stream goes on behind both.

        Returns before anything is done. The ticket's wait blocks the host until all slices are where they belong.

        Raises:
            NotSupported: the stream is capturing a graph.
            DovetailError: an earlier run could not be issued as a whole: close this and make another.
        """
        self.refuse(stream)
        is_launched = False

        def launch(base: int) -> None:
            nonlocal is_launched
            compute.launch(Flags(self._addresses, self._words, base, base + 1), stream)
            is_launched = True

        try:
            return self._run.submit(after=stream, launch=launch)
        except BaseException as error:
            if is_launched:  # in part, it may still read and write the buffers: there is no other run after it
                self._error = error
            raise

    def refuse(self, stream: int, error: BaseException | None = None) -> None:
        """Raises what `start` does before it launches anything; `error`: of an earlier run, besides its own."""
        self._device.enter()
        error = error or self._error
        if error is not None:
            raise DovetailError(f"an earlier run was not issued as a whole: {error!r}") from error
        if self._device.driver.stream_capturing(stream):
            raise NotSupported("the stream is capturing a graph: copies behind flags would be lost. Run it outside")

    def close(self) -> None:
        """Waits for the last run. Safe to call twice."""
        self._runner.close()

    def __enter__(self) -> SlicedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Headed:
    """A sliced run whose first slice has a launch of its own: its copies begin behind an event.

    A queue sees an event some microseconds sooner than a word, and the link waits for nothing but the first slice. An
    owner: `close()`.
    """

    def __init__(
        self, device: Device, exchange: Exchange, tiles: RowTiles, buffers: Buffers, *, pace: Pace | str,
        timeout_s: float | None, lanes: int, words_on_device: bool,
    ) -> None:  # fmt: skip
        """`tiles`: the table of all slices; see `Exchange.headed`."""
        plan, rest = exchange.headed(tiles, pace=pace, lanes=lanes)
        self._device = device
        self._error: BaseException | None = None
        self._early: GpuTicket | None = None
        self._runner = LocalRunner(
            device, plan, host_ranks=exchange.peers, timeout_s=timeout_s, most_streams=2 * lanes
        )  # fmt: skip
        try:
            self._head = self._runner.bind(buffers.of(plan))
            self.rest = SlicedRun(
                device, rest, buffers.of(rest), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
                words_on_device=words_on_device,
            )  # fmt: skip
        except BaseException:
            self._runner.close()
            raise

    def start(self, first: Callable[[], object], compute: Sliced, stream: int) -> Tickets:
        """`first` launches the first slice into the raw stream, torch's current one; then as `SlicedRun.start`."""
        self.rest.refuse(stream, self._error)
        driver, before = self._device.driver, self._early
        if before is not None and not before.is_over():
            driver.stream_wait_event(stream, before.event)  # its copies still read what is computed anew
        first()
        try:
            early = self._early = self._head.submit(after=stream, joins=False)
        except BaseException as error:
            self._error = error  # some of its copies may be under way: there is no other run after it
            raise
        try:
            return Tickets(early, self.rest.start(compute, stream))
        finally:
            driver.stream_wait_event(stream, early.event)

    def close(self) -> None:
        """Waits for the last run. Safe to call twice."""
        try:
            self.rest.close()
        finally:
            self._runner.close()


class Tickets(NamedTuple):
    """Of a run in two parts."""

    first: GpuTicket
    rest: GpuTicket

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until both are over; raises the error of either."""
        begin = time.monotonic()
        try:
            self.first.wait(timeout_s)
        finally:
            self.rest.wait(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin)))

    def is_over(self) -> bool:
        """True once all of it is done, well or not."""
        return self.first.is_over() and self.rest.is_over()


def gemm_exchange(
    x_shape: Sequence[int], w_shape: Sequence[int], dtype: torch.dtype, send: Sequence[int], receive: Sequence[int]
) -> Exchange:
    """Rows of y = x @ w.T, `send[j]` for rank j; `receive[j]` rows come from rank j."""
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1] or sum(send) != x_shape[0]:
        given = f"x {tuple(x_shape)}, w {tuple(w_shape)}, send {tuple(send)}"
        raise ValueError(f"{given}: x is [M, K], w is [N, K], and all of M rows are sent")
    width = w_shape[0] * dtype.itemsize
    return Exchange(send=tuple(send), receive=tuple(receive), row_bytes=(width,) * len(send))


class DmaGemm:
    """y = x @ w.T on the GPU, rows sent to peers in host memory slice by slice. An owner: `close()`."""

    def __init__(
        self, device: Device, buffers: Buffers, x_shape: Sequence[int], w_shape: Sequence[int], dtype: torch.dtype, *,
        slice_rows: int | None = None, first_rows: int | None = None, order: Order | str = Order.REMOTE,
        pace: Pace | str = Pace.STEP, blocks: Blocks | None = None, split: SplitK | str = SplitK.TAIL,
        timeout_s: float | None = None, lanes: int = LANES, words_on_device: bool = WORDS_ON_DEVICE,
        head: bool = False,
    ) -> None:  # fmt: skip
        """`buffers` of `gemm_exchange`; `slice_rows`: rows that one flag stands for, `first_rows` those of the first.

        Whole tiles are best. If `slice_rows` is given, slices do not grow unless `first_rows` is, too. `head`: the
        first slice is torch's product, and an event lets its copies begin.
        """

        exchange, cores = buffers.exchange, device.driver.num_multiprocessors(device.index)
        self.blocks = blocks or large_blocks(w_shape[0], cores)
        gemm_exchange(x_shape, w_shape, dtype, exchange.send, exchange.receive)
        (self.M, self.K), self.N, self.dtype = x_shape, w_shape[0], dtype
        height = self.blocks.height
        every = _cut(exchange, height, slice_rows, first_rows, order)
        self.tiles = across(every, height)
        self.y = buffers.y[GPU][: exchange.y_bytes(GPU)].view(dtype).view(self.M, self.N)
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None
        by_us = across(behind(every, 1), height) if head else self.tiles
        self.kernel = GemmLaunch(by_us, self.N, self.K, cores, self.y.device, blocks=self.blocks, split=split)
        self.run = _run_of(
            device, buffers, self.tiles, head, pace=pace, timeout_s=timeout_s, lanes=lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        self._first = (int(every.slices[0, FIRST]), int(every.slices[0, END])) if head else (0, 0)

    def start(self, x: torch.Tensor, w: torch.Tensor, stream: int) -> GpuTicket | Tickets:
        """Puts it all into the raw stream, torch's current one, and returns. `y` and the peers' outputs are written."""
        self._check(x, w)
        self._operands = x, w
        if isinstance(self.run, Headed):
            return self.run.start(self._compute_first, self, stream)
        return self.run.start(self, stream)

    def compute(self, x: torch.Tensor, w: torch.Tensor) -> None:
        """The product alone, with nobody waiting for it."""
        self._check(x, w)
        self._operands = x, w
        self._compute_first()
        self.kernel(x, w, self.y)

    def _compute_first(self) -> None:
        """The head, if there is one."""
        import torch

        assert self._operands is not None
        (x, w), (begin, end) = self._operands, self._first
        if end > begin:
            with torch.no_grad():  # w may be a parameter
                torch.mm(x[begin:end], w.t(), out=self.y[begin:end])

    def _check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        for name, given, shape in (("x", x, (self.M, self.K)), ("w", w, (self.N, self.K))):
            if tuple(given.shape) != shape or given.dtype != self.dtype or not given.is_contiguous():
                found = f"{tuple(given.shape)} of {given.dtype}{'' if given.is_contiguous() else ', with gaps'}"
                raise ValueError(f"{name} is {found}; this one was made for {shape} of {self.dtype}, contiguous")

    def launch(self, flags: Flags, stream: int) -> None:
        """See `Sliced`."""
        assert self._operands is not None
        self.kernel(*self._operands, self.y, flags.addresses, flags.value)

    def close(self) -> None:
        """Waits for the last run."""
        self.run.close()


def _cut(exchange: Exchange, height: int, rows: int | None, first: int | None, order: Order | str) -> RowTiles:
    """The GPU's rows; slices as they are by default, unless rows are given."""
    if rows is None:
        rows = slice_rows_of(sum(exchange.send[1:]), exchange.row_bytes[GPU], height)
        first = first or first_rows_of(rows, height)
    return row_tiles(exchange.send, GPU, height, slice_rows=rows, first_rows=first, order=order)


def _run_of(
    device: Device, buffers: Buffers, tiles: RowTiles, head: bool, *, pace: Pace | str, timeout_s: float | None,
    lanes: int, words_on_device: bool,
) -> SlicedRun | Headed:  # fmt: skip
    """All slices behind flags, or all but the first."""
    exchange = buffers.exchange
    if head:
        return Headed(
            device, exchange, tiles, buffers, pace=pace, timeout_s=timeout_s, lanes=lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
    plan = exchange.sliced(tiles, pace=pace, lanes=lanes)
    return SlicedRun(
        device, plan, buffers.of(plan), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
        words_on_device=words_on_device,
    )  # fmt: skip


def embedding_exchange(
    num_tables: Sequence[int], dim: int, dtype: torch.dtype, batch: Sequence[int],
    layout: Layout | str = Layout.PACKED,
) -> Exchange:  # fmt: skip
    """Pooled rows: rank r has `num_tables[r]` tables and gets the bags of all tables for its `batch[r]` samples."""
    widths = tuple(number * dim * dtype.itemsize for number in num_tables)
    return Exchange(
        send=tuple(batch), receive=(batch[GPU],) * len(batch), row_bytes=widths, layout=Layout(layout)
    )  # fmt: skip


class DmaEmbedding:
    """Bags of the GPU's tables, pooled and sent to peers in host memory slice by slice. An owner: `close()`.

    The GPU's finished output, [its samples][tables of all ranks][dim], is `buffers.wide`. Packed rows are put there in
    the caller's stream behind the last copy, the GPU's own while copies still run. Peers put theirs in place
    themselves: they are other ranks, and what they do costs this one nothing.
    """

    def __init__(
        self, device: Device, buffers: Buffers, weights: Sequence[torch.Tensor], *, slice_rows: int | None = None,
        first_rows: int | None = None, order: Order | str = Order.REMOTE, pace: Pace | str = Pace.STEP,
        mode: str = "sum", shape: PoolShape | None = None, timeout_s: float | None = None, lanes: int = LANES,
        words_on_device: bool = WORDS_ON_DEVICE, head: bool = False,
    ) -> None:  # fmt: skip
        """`buffers` of `embedding_exchange`; `weights`: this rank's tables [rows, dim].

        `slice_rows`, `first_rows`: in samples; see `DmaGemm`. `head`: the first slice is a launch of its own, and an
        event lets its copies begin.
        """

        exchange, self.shape = buffers.exchange, shape or PoolShape()
        self.T, self.D, self.B = len(weights), weights[0].shape[1], sum(exchange.send)
        self.dtype = weights[0].dtype
        if any(w.shape[1] != self.D or w.dtype != self.dtype or not w.is_contiguous() for w in weights):
            raise ValueError("tables of one rank have one dim and dtype, and are contiguous")
        if mode not in ("sum", "mean") or self.T * self.D * self.dtype.itemsize != exchange.row_bytes[GPU]:
            given = f"mode {mode!r}, {self.T} tables of dim {self.D} and {self.dtype}"
            raise ValueError(f"{given}: mode is sum or mean, and rows to send have {exchange.row_bytes[GPU]} bytes")
        height = self.shape.bags
        self.tiles = _cut(exchange, height, slice_rows, first_rows, order)
        self.y = buffers.y[GPU][: exchange.y_bytes(GPU)].view(self.dtype).view(self.B, self.T, self.D)
        cores = device.driver.num_multiprocessors(device.index)
        self._bags: tuple[torch.Tensor, torch.Tensor] | None = None
        self._kept = exchange.send[GPU]
        launches = [one_slice(self.tiles, 0), behind(self.tiles, 1)] if head else [self.tiles]
        *self._head, self.kernel = [
            BagLaunch(tiles, weights, self.B, cores, self.y.device, mode=mode, shape=self.shape) for tiles in launches
        ]
        self.run = _run_of(
            device, buffers, self.tiles, head, pace=pace, timeout_s=timeout_s, lanes=lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        self._placing = Placing(device, buffers)

    def start(self, values: torch.Tensor, offsets: torch.Tensor, stream: int) -> GpuTicket | Tickets:
        """Puts it all into the raw stream, torch's current one. Bag b of table t: values[offsets[t * B + b]:...].

        The ticket tells that all slices arrived; the output is finished behind that, in the stream.
        """
        self.kernel.check_bags(values, offsets)
        self._bags = values, offsets
        self._placing.begin(stream)
        if isinstance(self.run, Headed):
            ticket: GpuTicket | Tickets = self.run.start(self._compute_first, self, stream)
        else:
            ticket = self.run.start(self, stream)
        self._placing.end(stream)
        return ticket

    def compute(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """The bags alone, with nobody waiting for them."""
        self.kernel.check_bags(values, offsets)
        self._bags = values, offsets
        self._compute_first()
        self.kernel(values, offsets, self.y)

    def _compute_first(self) -> None:
        """The head, if there is one."""
        assert self._bags is not None
        for kernel in self._head:
            kernel(*self._bags, self.y)

    def launch(self, flags: Flags, stream: int) -> None:
        """See `Sliced`."""
        assert self._bags is not None
        self.kernel(*self._bags, self.y, flags.addresses, flags.value)
        self._placing.own(self.y[: self._kept], 0, stream)

    def close(self) -> None:
        """Waits for the last run."""
        self.run.close()
        self._placing.close()
