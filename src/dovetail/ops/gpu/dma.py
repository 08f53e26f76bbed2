"""The `dma` transport on one GPU whose peers are in host memory: products and pooled bags, sent slice by slice.

A finished slice raises a flag, the flag releases a copy by an engine (`released`). Owns the two operators.

Peers in host memory have no computation of their own. What they send is read by the GPU's engines, so the bytes that
cross the link are those of a real all-to-all, both ways: `paced` peers are in step with the GPU (a part of their rows
is there when the GPU has as large a part of its own), others have everything ready at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.ops.gpu.cut import Rates, planned_cut
from dovetail.ops.gpu.exchange import GPU, Buffers, Exchange, Layout, Pace, first_rows_of, slice_rows_of
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch, PoolShape, SplitK, boxes_on
from dovetail.ops.gpu.place import Placing
from dovetail.ops.gpu.rates import LAUNCH_US, bag_rates, gemm_head_us, gemm_rates, link_us
from dovetail.ops.gpu.released import LANES, WORDS_ON_DEVICE, Flags, Headed, Tickets, run_of
from dovetail.ops.gpu.tiles import (
    END,
    FIRST,
    LARGE,
    Blocks,
    Order,
    RowTiles,
    across,
    behind,
    one_slice,
    row_tiles,
    slice_blocks,
)

if TYPE_CHECKING:
    import torch


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
        pace: Pace | str = Pace.STEP, blocks: Blocks | None = None, split: SplitK | str | None = None,
        timeout_s: float | None = None, lanes: int = LANES, words_on_device: bool = WORDS_ON_DEVICE,
        head: bool | None = None, rates: Rates | None = None,
    ) -> None:  # fmt: skip
        """`buffers` of `gemm_exchange`. By default slices are cut where they arrive soonest by `rates` (see `cut`).

        Args:
            slice_rows, first_rows: rows that one flag stands for, and those of the first one; whole tiles are best.
                Slices do not grow unless `first_rows` is given, too.
            head: the first slice is torch's product, and an event lets its copies begin; None: where that is sooner, in
                16 bits.
            blocks: the tile; by default the one with which all is said to be over sooner.
            split: see `SplitK`; by default the last tiles, where tiles are large.
            rates: what was measured of the product and the link; about those of an H200 by default.
        """

        exchange, cores = buffers.exchange, device.driver.num_multiprocessors(device.index)
        gemm_exchange(x_shape, w_shape, dtype, exchange.send, exchange.receive)
        (self.M, self.K), self.N, self.dtype = x_shape, w_shape[0], dtype
        self.y = buffers.y[GPU][: exchange.y_bytes(GPU)].view(dtype).view(self.M, self.N)
        sizes, item_bytes = (self.M, self.N, self.K), dtype.itemsize
        tries = [blocks] if blocks else slice_blocks(*sizes, item_bytes, cores, boxes=boxes_on(self.y.device))
        row_us, cuts = link_us(exchange.row_bytes[GPU]), []
        if head is None and item_bytes != 2:
            head = False  # torch may round the operands of longer ones, our kernel does not
        for each in tries:
            how = split or (SplitK.TAIL if each.width == LARGE.width else SplitK.NONE)
            by = rates or gemm_rates(each, how, *sizes, cores, row_us=row_us, item_bytes=item_bytes)
            cut = _cut(
                exchange, each.height, slice_rows, first_rows, order, pace, head, by,
                lambda rows: gemm_head_us(rows, self.N, self.K, cores, item_bytes),
            )  # fmt: skip
            cuts.append((each, how, cut))
        self.blocks, split, (every, first_apart, _) = min(cuts, key=lambda found: found[2].end_us)
        height = self.blocks.height
        self.tiles = across(every, height)
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None
        by_us = across(behind(every, 1), height) if first_apart else self.tiles
        self.kernel = GemmLaunch(by_us, self.N, self.K, cores, self.y.device, blocks=self.blocks, split=split)
        self.run = run_of(
            device, buffers, self.tiles, first_apart, pace=pace, timeout_s=timeout_s, lanes=lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        self._first = (int(every.slices[0, FIRST]), int(every.slices[0, END])) if first_apart else (0, 0)

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


class _Cut(NamedTuple):
    tiles: RowTiles
    head: bool  #: the first slice is a launch of its own
    end_us: float  #: when all is said to be over; 0 if slices were given


def _cut(
    exchange: Exchange, height: int, rows: int | None, first: int | None, order: Order | str, pace: Pace | str,
    head: bool | None, rates: Rates, head_us: Callable[[int], float],
) -> _Cut:  # fmt: skip
    """Slices as given, or the best ones by a model.

    The model knows rows that leave first. Where others come before them, slices are cut by their number.
    """
    send, leaving = exchange.send, sum(exchange.send[1:])
    if rows is None and first is None and Order(order) is Order.REMOTE and leaving:
        may = head is not False and Pace(pace) is Pace.STEP
        found = planned_cut(send, exchange.served, height, rates, head_us=head_us if may else None, head=head)
        tiles = row_tiles(send, GPU, height, cuts=found.pieces, order=order)
        return _Cut(tiles, found.head or bool(head), found.end_us)
    if rows is None:
        rows = slice_rows_of(leaving, exchange.row_bytes[GPU], height)
        first = first or first_rows_of(rows, height)
    return _Cut(row_tiles(send, GPU, height, slice_rows=rows, first_rows=first, order=order), bool(head), 0.0)


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
        words_on_device: bool = WORDS_ON_DEVICE, head: bool | None = None, rates: Rates | None = None,
    ) -> None:  # fmt: skip
        """`buffers` of `embedding_exchange`; `weights`: this rank's tables [rows, dim].

        `slice_rows`, `first_rows`: in samples; `rates`, `head`: see `DmaGemm`. How long bags are is not known here: by
        default slices are cut as if pooling took as long as the link.
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
        row_us = link_us(exchange.row_bytes[GPU])
        rates = rates or bag_rates(self.B, sum(exchange.send[1:]), row_us=row_us)
        each_us = rates.wave_us / rates.wave_rows
        self.tiles, first_apart, _ = _cut(
            exchange, height, slice_rows, first_rows, order, pace, head, rates, lambda rows: rows * each_us + LAUNCH_US
        )  # fmt: skip
        self.y = buffers.y[GPU][: exchange.y_bytes(GPU)].view(self.dtype).view(self.B, self.T, self.D)
        cores = device.driver.num_multiprocessors(device.index)
        self._bags: tuple[torch.Tensor, torch.Tensor] | None = None
        self._kept = exchange.send[GPU]
        launches = [one_slice(self.tiles, 0), behind(self.tiles, 1)] if first_apart else [self.tiles]
        *self._head, self.kernel = [
            BagLaunch(tiles, weights, self.B, cores, self.y.device, mode=mode, shape=self.shape) for tiles in launches
        ]
        self.run = run_of(
            device, buffers, self.tiles, first_apart, pace=pace, timeout_s=timeout_s, lanes=lanes,
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
