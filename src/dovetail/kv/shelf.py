"""Items in host memory, a few of them at a time on the device: weights, experts, optimizer states.

A *shelf* keeps named sets of tensors in (pinned) host memory; a *window* of equal slots holds some of them where they
are used. `fetch` lends an item; `done` or `store` of the loan ends it. Owns what a user calls; the carrier moves bytes
in the right order, the window knows who has what. No call waits but those that have a timeout. One thread at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from dovetail.errors import Timeout
from dovetail.hw.gpu.device import Device
from dovetail.kv.carrier import Carrier
from dovetail.kv.choose import Path
from dovetail.kv.items import HostItems, Item, arrange, check
from dovetail.kv.loan import Loan
from dovetail.kv.memory import PIECE_BYTES, DriverPinner, HostMemory
from dovetail.kv.planner import Direction
from dovetail.kv.window import Window

if TYPE_CHECKING:
    import torch

Items = Mapping[Hashable, Mapping[str, "torch.Tensor"]]
_PAUSE_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ShelfStats:
    """Since the shelf was made."""

    hits: int  #: items that were asked for and lay in the window, or were on their way
    misses: int
    fetched_bytes: int
    stored_bytes: int


class Shelf:
    """`with Shelf.on_gpu(...) as shelf:`, or `close()`."""

    def __init__(self, items: dict[Hashable, Item], host: HostItems, window: Window, carrier: Carrier) -> None:
        """Made by `on_gpu` and `on_cpu`."""
        self._items, self._host, self.window, self.carrier = items, host, window, carrier
        self._hits = self._misses = 0
        self._closed = False

    @classmethod
    def on_gpu(
        cls,
        device: Device,
        items: Items,
        *,
        slots: int = 2,
        page_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        path: Path | str = Path.DMA_2D,
    ) -> Shelf:
        """A shelf in pinned memory with a window in a GPU's memory.

        Args:
            items: their tensors by name, on any device. An item on `meta` has shapes and dtypes only, and is zero until
                `put` or `store`.
            slots: each as large as the largest item.
            page_bytes: what items are rounded up to; by default their size, or about 1/256 of the largest.
            path: how copies are made; by default an item is one plain copy.

        Raises:
            ValueError: no items, an empty one, or no slot.
            HardwareError: there is not enough memory, or it can't be pinned; nothing is left behind.
        """
        arranged, page = arrange(items, page_bytes)
        window, most = Window(slots), max(item.num_pages for item in arranged.values())
        with contextlib.ExitStack() as made:
            memory = _memory(arranged, page, piece_bytes, DriverPinner(device.driver, device.enter))
            host = HostItems(made.enter_context(memory))
            carrier = Carrier.on_gpu(device, host, slots, most, path)
            made.callback(carrier.close, 60.0, ())
            shelf = cls(arranged, host, window, carrier)
            shelf._fill(items)
            made.pop_all()
        return shelf

    @classmethod
    def on_cpu(
        cls, items: Items, *, slots: int = 2, page_bytes: int | None = None, piece_bytes: int = PIECE_BYTES
    ) -> Shelf:
        """The same with a window in host memory: the same calls and values, copied on the calling thread."""
        arranged, page = arrange(items, page_bytes)
        window, most = Window(slots), max(item.num_pages for item in arranged.values())
        with contextlib.ExitStack() as made:
            host = HostItems(made.enter_context(_memory(arranged, page, piece_bytes, None)))
            shelf = cls(arranged, host, window, Carrier.on_cpu(host, slots, most))
            shelf._fill(items)
            made.pop_all()
        return shelf

    def _fill(self, items: Items) -> None:
        for key, tensors in items.items():
            if not all(t.is_meta for t in tensors.values()):
                self.put(key, tensors)

    # --- on the host

    def put(self, key: Hashable, tensors: Mapping[str, torch.Tensor], timeout_s: float = 60.0) -> None:
        """Writes an item on the host, from tensors of any device; what the window has of it is used no more.

        Raises:
            KeyError: there is no such item.
            ValueError, TypeError: other names, shapes or dtypes than the item has, or it is lent; nothing has changed.
            Timeout: copies of the item were still under way; nothing has changed.
        """
        item = self._item(key)
        check(item, tensors)
        slot = self.window.find(key)
        if slot and slot.lent:
            raise ValueError(f"{item.name} is lent: end its loans before you put it, or write it there and store it")
        self._wait_for(item, timeout_s)
        if slot:
            self.window.empty(slot)
        self._host.write(item, tensors)
        item.torn = False

    def read(self, key: Hashable, timeout_s: float = 60.0) -> dict[str, torch.Tensor]:
        """Copies of an item's tensors as they are on the host; waits for a store under way."""
        item = self._item(key)
        self._wait_for(item, timeout_s)
        item.ensure_whole()
        return self._host.read(item)

    def _wait_for(self, item: Item, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for move in (item.fetch, item.store):
            if move is not None:
                move.wait(max(deadline - time.monotonic(), 0))
        while item.torn and not self.carrier.mover.is_idle(Direction.STORE):
            if time.monotonic() > deadline:
                raise Timeout(f"what a failed store of {item.name} had begun was not over after {timeout_s:g} s")
            time.sleep(_PAUSE_S)

    # --- in the window

    def fetch(self, key: Hashable, *, after: Sequence[int] = ()) -> Loan:
        """Lends one item; see `fetch_many`."""
        return self.fetch_many([key], after=after)[key]

    def fetch_many(self, keys: Iterable[Hashable], *, after: Sequence[int] = ()) -> dict[Hashable, Loan]:
        """Lends items; those that are not in the window are on their way when it returns, as one transfer.

        Args:
            after: streams whose work so far must be done first. Users of the slots are waited for in any case.

        Raises:
            KeyError: there is no such item.
            ValueError: an item is named twice, or there are more than the window has slots.
            WindowFull: too many slots are lent; nothing has changed.
            HardwareError: the driver refused, or the last store of an item failed half way.
        """
        asked = list(keys)
        items = [self._item(key) for key in asked]
        if len(set(asked)) < len(asked):
            raise ValueError(f"{len(asked)} items are asked for, but only {len(set(asked))} different ones")
        room = self.window.room(asked)
        missing = sorted((i for i in items if not self.window.find(i.key)), key=lambda i: i.first_page)
        streams = self.carrier.order.streams(after) if after else []
        for item in missing:
            item.ensure_whole()
        if missing:
            self.carrier.ensure_clear(Direction.FETCH)
            for slot in room:  # from here on what lay there is overwritten
                self.window.empty(slot)
            self.carrier.bring(missing, room, streams)
            for item, slot in zip(missing, room, strict=True):
                self.window.fill(slot, item.key)
        self._hits += len(items) - len(missing)
        self._misses += len(missing)
        return {item.key: Loan(self, item, self.window.lend(item.key)) for item in items}

    def walk(self, keys: Iterable[Hashable], *, ahead: int | None = None, store: bool = False) -> Iterator[Loan]:
        """Lends items one after the other, in torch's current stream, while the next ones are under way.

        Each loan has been joined and ends with its turn of the loop, or with the loop; `store` brings it back to the
        host.

        Args:
            ahead: how many of the next items may be in the window or on their way; by default all slots but one. With
                0 an item is fetched when the one before is done and stored: nothing overlaps.
        """
        most = len(self.window.slots) - 1
        if ahead is not None and not 0 <= ahead <= most:
            raise ValueError(f"ahead must be 0 to {most}, the slots of the window less 1, not {ahead}")
        return self._walked(deque(keys), most if ahead is None else ahead, store)

    def _walked(self, left: deque[Hashable], ahead: int, store: bool) -> Iterator[Loan]:
        loans: deque[Loan] = deque()
        order = self.carrier.order
        lent: Loan | None = None
        try:
            while left or loans:
                while left and len(loans) <= ahead and not (store and left[0] in [loan.key for loan in loans]):
                    loans.append(self.fetch(left.popleft(), after=() if ahead else order.streams(())))
                loan = loans[0]
                loan.join()
                lent = loan
                yield loan
                lent = None
                if store and not loan.is_over:
                    move = loan.store()
                    for stream in () if ahead else order.streams(()):
                        order.join(stream, [move], {})
                elif not loan.is_over:
                    loan.done()
                loans.popleft()
        finally:
            for loan in loans:
                if not (loan.is_over or self._closed or (store and loan is lent)):
                    loan.done()
            if store and lent is not None and not (lent.is_over or self._closed):
                _store(lent)  # the loop was left: what it wrote so far is all that there is

    @property
    def resident(self) -> list[Hashable]:
        """The items in the window, or on their way into it."""
        return self.window.keys

    def stats(self) -> ShelfStats:
        """Hits, misses and bytes so far."""
        moved = self.carrier.moved_bytes
        return ShelfStats(
            hits=self._hits,
            misses=self._misses,
            fetched_bytes=moved[Direction.FETCH],
            stored_bytes=moved[Direction.STORE],
        )

    def _item(self, key: Hashable) -> Item:
        self.ensure_open()
        if key not in self._items:
            raise KeyError(f"there is no item {key!r} on this shelf of {len(self._items)}")
        return self._items[key]

    def ensure_open(self) -> None:
        """Raises ValueError once it is closed."""
        if self._closed:
            raise ValueError("the shelf is closed: make a new one")

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits for copies under way and gives all memory back. Safe to call twice; raises `Timeout`.

        Tensors of loans that are still held keep the window's memory until they are gone.
        """
        if self._closed:
            return
        self.carrier.close(timeout_s, self.window.slots)
        self._closed = True
        self._host.close()

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _memory(items: Mapping[Hashable, Item], page: int, piece_bytes: int, pinner: DriverPinner | None) -> HostMemory:
    return HostMemory(sum(item.num_pages for item in items.values()), page, piece_bytes=piece_bytes, pinner=pinner)


def _store(loan: Loan) -> None:
    """Ends it, also if it can't be stored."""
    try:
        loan.store()
    except BaseException:
        if not loan.is_over:
            loan.done()
        raise
