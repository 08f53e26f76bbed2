"""Blocks of a heap that operators use again: never while anybody can still see what is in them."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.ops.cpu import memory
from dovetail.ops.cpu.memory import Blocks, Peers, strides_of


class Heap:
    """A world's heap in ordinary memory: what Blocks asks of it, and how much is out."""

    rank = 0

    def __init__(self) -> None:
        self.memory = torch.empty(64 << 20, dtype=torch.uint8)
        self.taken, self.alive = 0, 0
        self.native = SimpleNamespace(base=lambda _: self.memory.data_ptr(), contains=self._contains)
        self.memory_bytes = [self.memory.nbytes]

    def _contains(self, address: int, size: int) -> bool:
        begin = self.memory.data_ptr()
        return begin <= address and address + size <= begin + self.memory.nbytes

    def empty(self, shape: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        size = shape[0]
        owner = (ctypes.c_uint8 * size).from_address(self.memory.data_ptr() + self.taken)
        self.taken += size
        self.alive += size
        weakref.finalize(owner, self._gone, size)
        return torch.frombuffer(owner, dtype=dtype)

    def _gone(self, size: int) -> None:
        self.alive -= size


@pytest.fixture
def heap() -> Heap:
    return Heap()


@pytest.fixture
def blocks(heap: Heap) -> Blocks:
    return Blocks(heap)  # type: ignore[arg-type]


USERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "view": lambda t: t[3:4],
    "transposed": lambda t: t.view(10, 10).t(),
    "detached": lambda t: t.detach(),
    "other dtype": lambda t: t.view(torch.int32),
    "numpy": lambda t: t.numpy(),
    "numpy view": lambda t: t[5:].numpy()[::2],
    "storage": lambda t: t.untyped_storage(),
    "dlpack": lambda t: t.__dlpack__(),
    "memoryview": lambda t: memoryview(t.numpy()),
    "graph": lambda t: torch.ones(100, requires_grad=True) * t,  # saved for its gradient
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("name", USERS)
def test_not_while_it_is_used(blocks: Blocks, name: str) -> None:
    t = blocks.empty((100,), torch.float32)
    address, user = t.data_ptr(), USERS[name](t)
    del t
    assert blocks.empty((100,), torch.float32).data_ptr() != address
    del user
    gc.collect()
    found = [blocks.empty((100,), torch.float32) for _ in range(2)]
    assert address in [f.data_ptr() for f in found]


def test_many_at_once(blocks: Blocks, heap: Heap) -> None:
    held = [blocks.empty((n + 1, 100), torch.float16).fill_(n) for n in range(30)]
    assert all((t == n).all() for n, t in enumerate(held))
    assert len({t.data_ptr() for t in held}) == 30
    taken = heap.taken
    del held
    again = [blocks.empty((n + 1, 100), torch.float16) for n in range(30)]
    assert heap.taken == taken, "free blocks were there"
    del again


def test_size_classes(blocks: Blocks, heap: Heap) -> None:
    """Shapes that vary a little share a block; memory is wasted by a quarter at most, from a page on."""
    address = blocks.empty((1000, 100), torch.float32).data_ptr()
    assert blocks.empty((999, 100), torch.float32).data_ptr() == address
    assert blocks.empty((500, 100), torch.float64).data_ptr() == address
    assert blocks.empty((2000, 100), torch.float32).data_ptr() != address


@given(st.integers(1, 1 << 34))
def test_rounded(size: int) -> None:
    found = memory._rounded(size)
    assert found >= size
    assert found % memory._PAGE == 0
    assert found == memory._PAGE or found <= max(size * 5 // 4, size + memory._PAGE)
    assert memory._rounded(found) == found


def test_empty_tensors(blocks: Blocks, heap: Heap) -> None:
    t = blocks.empty((0, 5), torch.float32)
    assert (t.shape, heap.taken, blocks.offset(t)) == ((0, 5), 0, -1)


def test_offset(blocks: Blocks) -> None:
    first, second = (blocks.empty((7, 3), torch.float64) for _ in range(2))
    assert second.is_contiguous()
    assert blocks.offset(second) - blocks.offset(first) == second.data_ptr() - first.data_ptr()
    assert blocks.offset(second[1:]) == blocks.offset(second) + 24
    assert blocks.offset(torch.zeros(3)) == -1


def test_gives_back(blocks: Blocks, heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit free blocks go back to the heap, those that are used stay, and the count is right."""
    monkeypatch.setattr(memory, "_MOST_KEPT", 40 * 4096)
    used = blocks.empty((10 * 4096,), torch.uint8).fill_(7)
    free = blocks.empty((20 * 4096,), torch.uint8)
    del free
    assert heap.alive == 30 * 4096
    other = blocks.empty((16 * 4096,), torch.uint8)
    assert heap.alive == 26 * 4096
    assert blocks._bytes == 26 * 4096
    assert (used == 7).all()
    del other


def test_gives_back_and_goes_on(blocks: Blocks, heap: Heap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the limit with everything in use: new blocks are known like others, and used again."""
    monkeypatch.setattr(memory, "_MOST_KEPT", 10 * 4096)
    held = [blocks.empty((4096,), torch.uint8) for _ in range(20)]
    assert blocks._bytes == heap.alive == 20 * 4096
    addresses = {t.data_ptr() for t in held}
    del held
    again = [blocks.empty((4096,), torch.uint8) for _ in range(20)]
    assert {t.data_ptr() for t in again} == addresses
    del again
    last = blocks.empty((2 * 4096,), torch.uint8)
    assert blocks._bytes == heap.alive == 2 * 4096
    del last


def test_peers(heap: Heap) -> None:
    """A peer's memory at an offset, as any dtype; the same view for the same question."""
    peers = Peers(heap)  # type: ignore[arg-type]
    heap.memory[800:880].view(torch.float64).copy_(torch.arange(10.0))
    t = peers.at(0, 800, (2, 5), torch.float64)
    assert t.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert peers.at(0, 800, (2, 5), torch.float64) is t
    t[1, 1] = 60
    assert peers.at(0, 800 + 48, (1,), torch.float64).item() == 60
    assert peers.at(0, -1, (0, 3), torch.float32).numel() == 0
    for n in range(2000):
        peers.at(0, 8 * n, (1,), torch.float32)
    assert len(peers._views) <= memory._MOST_VIEWS


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 1, 5)])
def test_strides(shape: tuple[int, ...]) -> None:
    assert strides_of(shape) == torch.empty(shape).stride()
