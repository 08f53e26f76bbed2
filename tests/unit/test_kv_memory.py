"""Host memory of the KV pool: slots lie where they should, and what fails half way leaves nothing behind."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import HardwareError
from dovetail.hw import memory as machine_memory
from dovetail.kv import memory as kv_memory
from dovetail.kv.memory import DriverPinner, HostMemory

PAGE = mmap.PAGESIZE


class FakePinner:
    """Records what it is asked; refuses to register the k-th piece, and to let go of some addresses."""

    def __init__(self, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.fails_at, self.error = fails_at, error or HardwareError("out of lockable pages")
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.keeps: set[int] = set()

    def register(self, address: int, size_bytes: int) -> None:
        if len(self.registered) == self.fails_at:
            raise self.error
        self.registered.append((address, size_bytes))

    def unregister(self, address: int) -> None:
        if address in self.keeps:
            raise HardwareError("still in use")
        self.unregistered.append(address)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[mmap.mmap]]:
    """All mappings that are made."""
    made: list[mmap.mmap] = []

    class Recorded(mmap.mmap):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            made.append(self)

    monkeypatch.setattr(mmap, "mmap", Recorded)
    yield made
    kv_memory._abandoned.clear()


@settings(max_examples=60, deadline=None)
@given(num_slots=some.integers(1, 40), slot_bytes=some.integers(1, 9000), piece_bytes=some.integers(1, 50_000))
def test_slots_lie_apart_and_inside_their_piece(num_slots: int, slot_bytes: int, piece_bytes: int) -> None:
    with HostMemory(num_slots, slot_bytes, piece_bytes=piece_bytes) as memory:
        slots = np.arange(num_slots)
        addresses, piece = memory.addresses(slots), memory.piece_of(slots)
        assert addresses.dtype == np.uint64
        assert addresses.tolist() == [memory.address(k) for k in range(num_slots)]
        assert [memory.view(k).ctypes.data for k in range(num_slots)] == addresses.tolist()
        spans = sorted((int(a), int(a) + slot_bytes) for a in addresses)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert memory.size_bytes == num_slots * slot_bytes
        assert all(p.num_slots * slot_bytes <= max(piece_bytes, slot_bytes) for p in memory.pieces)
        for k, number in enumerate(piece):
            held = memory.pieces[number]
            assert held.first_slot <= k < held.first_slot + held.num_slots
            assert held.base <= addresses[k] <= held.base + held.size_bytes - slot_bytes
        cuts = memory.boundaries().tolist()
        assert cuts == sorted(cuts)
        for p in memory.pieces:
            assert p.base in cuts
            assert p.base + p.size_bytes in cuts
        assert not any(a < cut < a + slot_bytes for a in addresses.tolist() for cut in cuts)
        data = np.random.default_rng(num_slots).integers(0, 256, (num_slots, slot_bytes), np.uint8)
        for k in slots:
            memory.view(k)[:] = data[k]
        assert all(np.array_equal(memory.view(k), data[k]) for k in slots)


def test_default_pieces_are_whole_slots_below_a_gibibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "_map", lambda self: None)
    slot_bytes = 10 * 80 * 16384
    assert HostMemory(1000, slot_bytes).slots_per_piece == (1 << 30) // slot_bytes
    assert HostMemory(3, 2 << 30).slots_per_piece == 1


def test_pages_are_there_before_they_are_used() -> None:
    begin = time.perf_counter()
    with HostMemory(64, 1 << 20, piece_bytes=16 << 20) as memory:
        print(f"64 MiB in {time.perf_counter() - begin:.3f} s")
        for piece in memory.pieces:
            present = np.zeros(piece.size_bytes // PAGE, np.uint8)
            base, into = ctypes.c_void_p(piece.base), ctypes.c_void_p(present.ctypes.data)
            assert ctypes.CDLL(None).mincore(base, ctypes.c_size_t(piece.size_bytes), into) == 0
            assert (present & 1).all()


@pytest.mark.parametrize("given", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-3, 1, 1)])
def test_bad_sizes(given: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        HostMemory(given[0], given[1], piece_bytes=given[2])


def test_bad_slots() -> None:
    with HostMemory(4, 8) as memory:
        for wrong in (-1, 4):
            with pytest.raises(ValueError, match=f"slot {wrong} is none of this memory: its slots are 0 to 3"):
                memory.address(wrong)
            with pytest.raises(ValueError, match="slots are 0 to 3"):
                memory.view(wrong)
        for odd in ([1.5], [[1]], ["a"], [True]):
            with pytest.raises(TypeError, match="a row of whole numbers"):
                memory.addresses(np.array(odd))
        assert memory.addresses([]).size == 0


def test_close_twice_and_use_after_it(mappings: list[mmap.mmap]) -> None:
    pinner = FakePinner()
    memory = HostMemory(10, PAGE, piece_bytes=4 * PAGE, pinner=pinner)
    assert memory.pinned
    assert [size for _, size in pinner.registered] == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert [p.base for p in memory.pieces] == [base for base, _ in pinner.registered]
    memory.close()
    memory.close()
    assert pinner.unregistered == [base for base, _ in reversed(pinner.registered)]
    assert len(mappings) == 3
    assert all(m.closed for m in mappings)
    for use in (lambda: memory.address(0), lambda: memory.view(0), memory.boundaries):
        with pytest.raises(HardwareError, match="closed"):
            use()


def test_a_view_keeps_its_mapping(mappings: list[mmap.mmap]) -> None:
    memory = HostMemory(2, PAGE, piece_bytes=PAGE)
    view = memory.view(1)
    view[:] = 7
    memory.close()
    assert [m.closed for m in mappings] == [True, False]
    assert view.sum() == 7 * PAGE


@pytest.mark.parametrize("fails_at", [0, 1, 3])
def test_failed_pin_is_rolled_back(fails_at: int, mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "memlock_bytes", lambda: 8 << 20)
    pinner = FakePinner(fails_at)
    with pytest.raises(HardwareError) as caught:
        HostMemory(16, PAGE, piece_bytes=4 * PAGE, pinner=pinner)
    assert len(pinner.registered) == fails_at
    assert pinner.unregistered == [base for base, _ in reversed(pinner.registered)]
    assert len(mappings) == 4
    assert all(m.closed for m in mappings), "memory stayed mapped"
    text = str(caught.value)
    pinned = f"{16 * fails_at} KiB" if fails_at else "0 B"
    assert f"pinning 64 KiB of host memory failed at piece {fails_at} of 4 (16 KiB), {pinned} were pinned" in text
    assert "out of lockable pages" in text
    assert "memlock 8 MiB" in text
    assert "--ulimit memlock=-1" in text
    assert "fewer slots" in text


def test_roll_back_after_an_interrupt(mappings: list[mmap.mmap]) -> None:
    pinner = FakePinner(1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        HostMemory(4, PAGE, piece_bytes=2 * PAGE, pinner=pinner)
    assert pinner.unregistered == [base for base, _ in pinner.registered]
    assert all(m.closed for m in mappings)


def test_roll_back_that_fails_says_so(mappings: list[mmap.mmap]) -> None:
    class Stubborn(FakePinner):
        def register(self, address: int, size_bytes: int) -> None:
            super().register(address, size_bytes)
            self.keeps = {self.registered[0][0]}

    pinner = Stubborn(2)
    with pytest.raises(HardwareError, match="failed at piece 2") as caught:
        HostMemory(3, PAGE, piece_bytes=PAGE, pinner=pinner)
    assert caught.value.__notes__ == ["and 1 pieces stay pinned until the process ends: still in use"]
    assert [m.closed for m in mappings] == [False, True, True], "what the driver holds must stay mapped"
    assert kv_memory._abandoned == mappings[:1]


def test_close_that_fails_can_be_tried_again(mappings: list[mmap.mmap]) -> None:
    pinner = FakePinner()
    memory = HostMemory(3, PAGE, piece_bytes=PAGE, pinner=pinner)
    stuck = memory.pieces[1].base
    pinner.keeps = {stuck}
    with pytest.raises(HardwareError, match="1 pieces .* could not be unpinned and stay mapped: still in use"):
        memory.close()
    assert [m.closed for m in mappings] == [True, False, True]
    pinner.keeps = set()
    memory.close()
    assert all(m.closed for m in mappings)
    assert pinner.unregistered[-1] == stuck
    assert len(pinner.unregistered) == 3


def test_dropped_memory_is_given_back_and_reported(mappings: list[mmap.mmap]) -> None:
    pinner = FakePinner()
    memory = HostMemory(2, PAGE, piece_bytes=PAGE, pinner=pinner)
    with pytest.warns(ResourceWarning, match="2 slots of host memory were not closed"):
        del memory
    assert len(pinner.unregistered) == 2
    assert all(m.closed for m in mappings)


def test_dropped_memory_that_a_driver_holds_stays(mappings: list[mmap.mmap]) -> None:
    pinner = FakePinner()
    memory = HostMemory(1, PAGE, pinner=pinner)
    pinner.keeps = {memory.address(0)}
    with pytest.warns(ResourceWarning):
        del memory
    assert not mappings[0].closed
    assert kv_memory._abandoned == mappings


def test_too_much_is_refused_before_anything_is_mapped(
    mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: 1 << 20)
    with pytest.raises(HardwareError, match="that is 2 MiB, and 1 MiB are available .* fewer slots"):
        HostMemory(512, PAGE)
    assert not mappings
    monkeypatch.setattr(machine_memory, "available_bytes", lambda: None)
    HostMemory(2, PAGE).close()


def test_a_mapping_that_fails(mappings: list[mmap.mmap], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = mmap.mmap

    def limited(*arguments: Any, **more: Any) -> mmap.mmap:
        if len(mappings) == 2:
            raise OSError(12, "Cannot allocate memory")
        return recorded(*arguments, **more)

    monkeypatch.setattr(mmap, "mmap", limited)
    with pytest.raises(HardwareError, match=r"mapping 4 KiB for slots 2 to 2 of 4 failed \(Cannot allocate memory\)"):
        HostMemory(4, PAGE, piece_bytes=PAGE)
    assert all(m.closed for m in mappings)


def test_driver_pinner() -> None:
    calls: list[tuple[object, ...]] = []

    class Driver:
        def host_register(self, address: int, size_bytes: int) -> None:
            calls.append(("register", address, size_bytes))

        def host_unregister(self, address: int) -> None:
            calls.append(("unregister", address))

    driver: Any = Driver()
    with HostMemory(1, PAGE, pinner=DriverPinner(driver, lambda: calls.append(("enter",)))) as memory:
        base = memory.address(0)
    assert calls == [("enter",), ("register", base, PAGE), ("enter",), ("unregister", base)]
    DriverPinner(driver).register(1, 2)
    assert calls[-1] == ("register", 1, 2)


def test_a_forked_child_has_none_of_it() -> None:
    pinner = FakePinner()
    with HostMemory(1, PAGE, pinner=pinner) as memory:
        view = memory.view(0)
        view[:] = 9
        child = os.fork()
        if not child:
            try:
                memory.view(0)
            except HardwareError as error:
                memory.close()
                memory.__del__()
                os._exit(int("forked child" not in str(error) or pinner.unregistered != []))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert view.sum() == 9 * PAGE
        del view
    assert len(pinner.unregistered) == 1
