"""An item of a shelf as its user has it: tensors in the window, from `fetch` to `done` or `store`."""

from __future__ import annotations

import functools
import time
from collections.abc import Hashable
from types import TracebackType
from typing import TYPE_CHECKING

from dovetail.kv.items import Item
from dovetail.kv.mover import Transfer
from dovetail.kv.planner import Direction
from dovetail.kv.window import Slot

if TYPE_CHECKING:
    import torch

    from dovetail.kv.shelf import Shelf


class Loan:
    """One item in the window. `with loan:` ends it by `done()`.

    Streams are raw ones (`torch.cuda.Stream.cuda_stream`); none given is torch's current one. The CPU has none.
    """

    def __init__(self, shelf: Shelf, item: Item, slot: Slot) -> None:
        """Made by `Shelf.fetch`."""
        self._shelf, self._carrier, self._item, self._slot = shelf, shelf.carrier, item, slot
        self.is_over = False  #: it was ended

    @property
    def key(self) -> Hashable:
        """Of the item."""
        return self._item.key

    @functools.cached_property
    def _views(self) -> dict[str, torch.Tensor]:
        return self._carrier.tensors(self._item, self._slot)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The item's tensors in the window: to be used behind `join` or `wait`, and not once the loan is over.

        Write them only if `store` is to bring them back.
        """
        self._ensure_lent()
        return self._views

    def join(self, stream: int | None = None) -> None:
        """What a stream is given from now on comes after the item's last byte, and after the slot's users before."""
        self._ensure_lent()
        for one in self._carrier.order.streams(() if stream is None else (stream,)):
            self._carrier.order.join(one, (self._item.fetch, self._slot.store), self._slot.users)

    def wait(self, timeout_s: float = 60.0) -> None:
        """Blocks until then; raises `Timeout`. For those who use the tensors without a stream."""
        self._ensure_lent()
        deadline = time.monotonic() + timeout_s
        for move in (self._item.fetch, self._slot.store):
            if move is not None:
                move.wait(max(deadline - time.monotonic(), 0))
        self._carrier.order.wait(self._slot.users, max(deadline - time.monotonic(), 0))

    def done(self, *streams: int) -> None:
        """Ends the loan: the slot is overwritten when what these streams have been given so far is done."""
        self._ensure_lent()
        self._carrier.order.mark(self._slot.users, self._carrier.order.streams(streams))
        self._end()

    def store(self, *streams: int) -> Transfer:
        """Ends the loan and brings the tensors back to the host, behind what these streams have been given so far.

        Returns before the bytes have landed. A later fetch comes after them by itself; `Shelf.read` waits for them.

        Raises:
            ValueError: the item is lent to others too, who would read what is being written; nothing has changed.
        """
        self._ensure_lent()
        if self._slot.lent > 1:
            raise ValueError(f"item {self.key!r} is lent {self._slot.lent} times: only the last loan can store it")
        self._carrier.ensure_clear(Direction.STORE)
        move = self._carrier.send(self._item, self._slot, self._carrier.order.streams(streams))
        self._end()
        return move

    def _end(self) -> None:
        self.is_over = True
        self._shelf.window.take_back(self._slot)

    def _ensure_lent(self) -> None:
        self._shelf.ensure_open()
        if self.is_over:
            raise ValueError(f"the loan of item {self.key!r} is over: fetch it again")

    def __enter__(self) -> Loan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_over:
            self.done()
