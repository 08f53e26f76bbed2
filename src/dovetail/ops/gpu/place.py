"""Puts rows that arrived one source below the other side by side, inside the GPU.

Owns the step between the last copy and the finished output of an exchange that is wide (`Exchange.is_wide`): it runs in
the caller's stream, where torch sees the GPU in one launch for all that arrived. Rows that the GPU keeps wait for
nobody, so they may be placed before; copies that place rows themselves (`Layout.STRIDED`) leave only these.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dovetail.hw.gpu.device import Device
from dovetail.ops.gpu.exchange import GPU, Buffers, Layout

if TYPE_CHECKING:
    import torch


class Placing:
    """The finished output of an exchange, again and again; does nothing where rows stand below each other. An owner.

    A run: `begin`, the copies, then `end`; `own` at any time between, if rows that stay are to be placed in parts.
    """

    def __init__(self, device: Device, buffers: Buffers) -> None:
        exchange, self._driver, self._buffers = buffers.exchange, device.driver, buffers
        self._is_wide = exchange.is_wide and exchange.receive[GPU] * sum(exchange.row_bytes) > 0
        packed = self._is_wide and exchange.layout is Layout.PACKED
        self._sources = [r for r in range(1, exchange.world) if packed and exchange.row_bytes[r]]
        self._event = 0  # made by the first run: there is nothing to give back if an owner's making fails
        self._is_recorded = False

    def begin(self, stream: int) -> None:
        """What follows in the raw stream is behind the last `end`, which was perhaps in another stream."""
        if self._is_recorded:
            self._driver.stream_wait_event(stream, self._event)

    def own(self, rows: torch.Tensor, first: int, stream: int) -> None:
        """Places rows of the GPU for itself, from the `first` on, before the copies are over; any dtype."""
        if not self._is_wide or not rows.numel():
            return
        width = self._buffers.exchange.row_bytes[GPU]
        given = _bytes(rows).view(-1, width)
        self._move([given], self._buffers.columns(GPU)[first : first + len(given)], stream)

    def end(self, stream: int, own: torch.Tensor | None = None) -> None:
        """Places what arrived, in the raw stream, which is torch's current one and behind the last copy.

        `own`: memory that begins with the rows of the GPU for itself, which are placed with the others.
        """
        if not self._is_wide:
            return
        pieces = [self._buffers.arrived(source) for source in self._sources]
        first = 1
        if own is not None:
            count, width = self._buffers.exchange.receive[GPU], self._buffers.exchange.row_bytes[GPU]
            pieces.insert(0, _bytes(own)[: count * width].view(count, width))
            first = 0
        pieces = [piece for piece in pieces if piece.numel()]
        if pieces:
            before = sum(self._buffers.exchange.row_bytes[:first])
            width = sum(piece.shape[1] for piece in pieces)
            self._move(pieces, self._buffers.all_columns.narrow(1, before, width), stream)
        self._event = self._event or self._driver.event_create()
        self._driver.event_record(self._event, stream)
        self._is_recorded = True

    def _move(self, pieces: list[torch.Tensor], to: torch.Tensor, stream: int) -> None:
        """Rows of bytes, side by side into `to`."""
        if to.is_cuda:
            side_by_side(pieces, to)
            return
        at = to.data_ptr()  # memory that torch has no stream for: a stand-in
        for piece in pieces:
            rows, width = piece.shape
            self._driver.copy_rows(at, to.stride(0), piece.data_ptr(), width, width, rows, stream)
            at += width

    def close(self) -> None:
        """Safe to call twice."""
        if self._event:
            self._driver.event_destroy(self._event)
        self._event, self._is_wide, self._is_recorded = 0, False, False


def side_by_side(pieces: list[torch.Tensor], to: torch.Tensor) -> None:
    """Rows of bytes into `to`, whose rows may be apart, in one launch in torch's current stream."""
    import torch

    item = _item([to, *pieces])
    torch.cat([piece.view(item) for piece in pieces], dim=1, out=to.view(item))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.reshape(-1).view(torch.uint8)


def _item(tensors: list[torch.Tensor]) -> torch.dtype:
    """The widest item that all rows and their beginnings are multiples of: a launch moves item by item."""
    import torch

    unit = math.gcd(8, *(n for t in tensors for n in (t.data_ptr(), t.stride(0), t.shape[1])))
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[unit]
