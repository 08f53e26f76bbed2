"""What lies on a shelf: named sets of tensors, each in a run of pages of host memory.

Owns where each tensor of each item is, and reading and writing those bytes on the host. A page is what the planner
calls a block: items of one size are a page each, others take as many pages as they need, one behind the other, so that
the planner makes one copy of each (two where a piece of memory ends inside it).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import HardwareError
from dovetail.kv.memory import HostMemory
from dovetail.kv.mover import Transfer
from dovetail.kv.planner import Pieces

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]
#: Of the first byte of each tensor: what torch's own allocator gives.
ALIGN_BYTES = 512
#: Items of different sizes: the largest one has about as many pages.
_PAGES, _LEAST_PAGE_BYTES = 256, 4096


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an item."""

    offset: int  #: in the item
    size_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True, eq=False)
class Item:
    """A set of tensors that travel together, and what is under way with it."""

    key: Hashable
    parts: dict[str, Part]
    first_page: int
    num_pages: int
    fetch: Transfer | None = None  #: the latest one: it reads the item's pages
    store: Transfer | None = None  #: the latest one: it writes them
    torn: bool = False  #: a store failed half way: what lies on the host is neither old nor new

    @property
    def name(self) -> str:
        """For messages."""
        return f"item {self.key!r}"

    @property
    def pages(self) -> NDArray[np.int64]:
        """Of host memory, ascending."""
        return np.arange(self.first_page, self.first_page + self.num_pages)

    def ensure_whole(self) -> None:
        """Raises `HardwareError` if it is torn."""
        if self.torn:
            raise HardwareError(f"a store of {self.name} failed half way: put it, or store it again, first")


def pending(transfer: Transfer | None) -> Transfer | None:
    """The transfer while it is under way, then None."""
    return None if transfer is None or transfer.is_over() else transfer


def arrange(
    given: Mapping[Hashable, Mapping[str, torch.Tensor]], page_bytes: int | None
) -> tuple[dict[Hashable, Item], int]:
    """The items, one behind the other, and the bytes of a page.

    Raises:
        ValueError: no item, an item without a byte, or `page_bytes` that would not keep tensors aligned.
    """
    if not given:
        raise ValueError("a shelf needs at least one item")
    for key, tensors in given.items():
        if not isinstance(tensors, Mapping):
            raise TypeError(f"item {key!r} must be tensors by name, such as {{'weight': tensor}}, not {type(tensors)}")
        for name, t in tensors.items():
            _require_dense(f"item {key!r}", name, t)
    parts = {key: _parts(tensors) for key, tensors in given.items()}
    sizes = {key: max((part.offset + part.size_bytes for part in of.values()), default=0) for key, of in parts.items()}
    for key, size in sizes.items():
        if not size:
            raise ValueError(f"item {key!r} has no byte: leave it out, or give it a tensor")
    if page_bytes is None:
        page_bytes = _page_bytes(list(sizes.values()))
    if page_bytes < 1 or page_bytes % ALIGN_BYTES:
        raise ValueError(f"page_bytes must be a multiple of {ALIGN_BYTES}, not {page_bytes}")
    items, first = {}, 0
    for key, of in parts.items():
        number = -(-sizes[key] // page_bytes)
        items[key] = Item(key, of, first, number)
        first += number
    return items, page_bytes


def _page_bytes(sizes: list[int]) -> int:
    largest = max(sizes)
    if min(sizes) == largest:
        return _round(largest, ALIGN_BYTES)
    return _round(max(largest // _PAGES, 1), _LEAST_PAGE_BYTES)


def _parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    found, offset = {}, 0
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        found[name] = Part(offset, size, tuple(t.shape), t.dtype)
        offset = _round(offset + size, ALIGN_BYTES)
    return found


def _round(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _require_dense(item: str, name: str, t: Any) -> None:
    import torch

    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{item}: {name} must be a tensor, not {type(t).__name__}")
    if t.layout is not torch.strided or t.is_nested:
        raise TypeError(f"{item}: {name} must be a dense tensor, not {'nested' if t.is_nested else t.layout}")


def check(item: Item, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError or TypeError unless `tensors` are those of the item, by name, shape and dtype."""
    if set(tensors) != set(item.parts):
        raise ValueError(
            f"{item.name} has the tensors {', '.join(sorted(item.parts))}, "
            f"given were {', '.join(sorted(tensors)) or 'none'}"
        )
    for name, part in item.parts.items():
        t = tensors[name]
        _require_dense(item.name, name, t)
        if tuple(t.shape) != part.shape:
            raise ValueError(f"{item.name}: {name} has the shape {part.shape}, not {tuple(t.shape)}")
        if t.dtype != part.dtype:
            raise TypeError(f"{item.name}: {name} is of {part.dtype}, not {t.dtype}; convert it first")
        if t.is_meta:
            raise ValueError(f"{item.name}: {name} is on meta and has no values; give all of them, or none")


class HostItems:
    """The bytes of items in host memory."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self.pages = Pieces(
            num_slots=memory.num_slots, slot_bytes=memory.slot_bytes, slots_per_piece=memory.slots_per_piece
        )
        self.pieces: list[Bytes] = [np.frombuffer(piece.mapping, np.uint8) for piece in memory.pieces]

    def write(self, item: Item, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies tensors of any device into the item's pages. Nothing may be under way there."""
        import torch

        for name, part in item.parts.items():
            flat = tensors[name].detach().resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
            source: Any = flat.view(torch.uint8).numpy()
            for begin, span in self._spans(item, part):
                span[:] = source[begin : begin + len(span)]

    def read(self, item: Item) -> dict[str, torch.Tensor]:
        """Copies of the item's tensors, in ordinary memory."""
        import torch

        found = {}
        for name, part in item.parts.items():
            made = torch.empty(math.prod(part.shape), dtype=part.dtype)
            target: Any = made.view(torch.uint8).numpy()
            for begin, span in self._spans(item, part):
                target[begin : begin + len(span)] = span
            found[name] = made.view(part.shape)
        return found

    def _spans(self, item: Item, part: Part) -> Iterator[tuple[int, Bytes]]:
        """(offset in the tensor, bytes of the host) of each stretch: a new one where a piece begins."""
        first, at = item.first_page * self.pages.slot_bytes + part.offset, 0
        piece_bytes = self.pages.size_bytes(0)
        while at < part.size_bytes:
            piece, within = divmod(first + at, piece_bytes)
            size = min(part.size_bytes - at, piece_bytes - within)
            yield at, self.pieces[piece][within : within + size]
            at += size

    def close(self) -> None:
        """Gives the memory back; nothing may use it any more."""
        self.pieces = []
        self._memory.close()
