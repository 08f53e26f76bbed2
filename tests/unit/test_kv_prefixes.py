"""Prefixes on host memory and on a stand-in driver: what is fetched is what was stored, for whoever stored it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.standin import build

from dovetail.errors import HardwareError, Timeout
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD
from dovetail.kv import prefixes
from dovetail.kv.choose import Path
from dovetail.kv.handles import PoolFull
from dovetail.kv.layout import layer_outermost
from dovetail.kv.prefixes import Prefixes

LAYOUT = layer_outermost("x", num_layers=4, row_bytes=64, num_blocks=32, split=True)
SLOT = LAYOUT.slot_bytes


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device("cuda", driver=CudaDriver(build("cuda"))) as gpu:
        yield gpu


class Rig:
    """A cache, and the prefixes kept beside it."""

    def __init__(self, kind: str, device: Device, pool_slots: int = 24) -> None:
        if kind == "cpu":
            self.cache: Any = np.zeros(LAYOUT.size_bytes, np.uint8)
            self.kept = Prefixes.on_cpu(LAYOUT, self.cache, pool_bytes=pool_slots * SLOT, piece_bytes=5 * SLOT)
        else:
            address = device.driver.device_alloc(LAYOUT.size_bytes)
            self.cache = np.ctypeslib.as_array((ctypes.c_uint8 * LAYOUT.size_bytes).from_address(address))
            self.kept = Prefixes.on_gpu(
                device, LAYOUT, address, pool_bytes=pool_slots * SLOT, piece_bytes=5 * SLOT, path=Path(kind)
            )

    def rows(self, block: int) -> Any:
        group = LAYOUT.groups[0]
        at = group.bases + block * group.strides
        return np.stack([self.cache[a : a + group.row_bytes] for a in at.tolist()])

    def write(self, block: int, rng: np.random.Generator) -> Any:
        group = LAYOUT.groups[0]
        for a in (group.bases + block * group.strides).tolist():
            self.cache[a : a + group.row_bytes] = rng.integers(0, 256, group.row_bytes, dtype=np.uint8)
        return self.rows(block)


KINDS = ["cpu", "auto", "dma-2d", "dma-batch", "dma-loop"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_comes_back_elsewhere(kind: str, device: Device) -> None:
    rig = Rig(kind, device)
    rng = np.random.default_rng(5)
    with rig.kept as kept:
        prompt = rng.integers(0, 1000, 16 * 5 + 3).tolist()  # the last 3 tokens fill no block
        wanted = [rig.write(block, rng) for block in (3, 9, 10, 11, 30)]
        assert kept.lookup(prompt) == 0
        move = kept.store(prompt, [3, 9, 10, 11, 30])
        move.wait()
        assert (move.num_tokens, move.size_bytes) == (80, 5 * SLOT)
        assert kept.lookup(prompt) == 80
        rig.cache[:] = 0xA5
        back = kept.fetch(prompt, [0, 1, 7, 8, 20])
        back.wait()
        assert back.num_tokens == 80
        for block, rows in zip((0, 1, 7, 8, 20), wanted, strict=True):
            assert (rig.rows(block) == rows).all()
        untouched = set(range(32)) - {0, 1, 7, 8, 20}
        assert all((rig.rows(block) == 0xA5).all() for block in untouched)
        assert kept.stats().ready == 5


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_new_is_stored_and_only_what_is_there_is_fetched(kind: str, device: Device) -> None:
    rig = Rig(kind, device)
    rng = np.random.default_rng(6)
    with rig.kept as kept:
        first = rng.integers(0, 1000, 32).tolist()
        kept.store(first, [0, 1]).wait()
        longer = [*first, *rng.integers(0, 1000, 32).tolist()]
        move = kept.store(longer, [0, 1, 2, 3])
        move.wait()
        assert move.size_bytes == 2 * SLOT
        other = [*first, *rng.integers(0, 1000, 32).tolist()]
        back = kept.fetch(other, [10, 11, 12, 13])
        back.wait()
        assert back.num_tokens == 32
        assert kept.fetch(rng.integers(0, 1000, 32).tolist(), [10, 11]).num_tokens == 0
        assert kept.lookup(longer, salt=b"another tenant") == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3, 4, 9])
def test_a_fetch_layer_by_layer(kind: str, layers: int, device: Device) -> None:
    rig = Rig(kind, device)
    rng = np.random.default_rng(8)
    with rig.kept as kept:
        prompt = rng.integers(0, 1000, 48).tolist()
        wanted = [rig.write(block, rng) for block in (3, 9, 20)]
        kept.store(prompt, [3, 9, 20]).wait()
        rig.cache[:] = 0xA5
        move = kept.fetch(prompt, [0, 1, 7], layers=layers)
        assert len(move.parts) == -(-4 // layers)
        for n, part in enumerate(move.parts):
            part.wait()
            rows = min((n + 1) * layers, 4) * 2  # K and V of each layer
            for block, right in zip((0, 1, 7), wanted, strict=True):
                assert (rig.rows(block)[:rows] == right[:rows]).all()
        move.wait()
        assert (move.num_tokens, move.size_bytes) == (48, 3 * SLOT)
        assert kept.stats().held == 0
        assert kept.fetch([9] * 48, [0, 1, 7], layers=2).num_tokens == 0


def test_layers_of_a_held_stream_come_one_after_the_other(device: Device) -> None:
    """A reader of layer 0 that joins the first part does not wait for the others."""
    rig = Rig("dma-2d", device)
    rng = np.random.default_rng(9)
    prompt = list(range(16))
    wanted = rig.write(3, rng)
    rig.kept.store(prompt, [3]).wait()
    rig.cache[:] = 0
    driver, reader = device.driver, device.driver.stream_create()
    move = rig.kept.fetch(prompt, [5], layers=1)
    move.parts[0].join(reader)
    copy = device.pinned(64)
    driver.copy(copy.address, rig.cache.ctypes.data + 5 * 64, 64, reader)
    driver.stream_synchronize(reader)
    assert (copy.array[:64] == wanted[0]).all()
    move.wait()
    rig.kept.close()
    driver.stream_destroy(reader)


def test_a_full_pool_changes_nothing_and_evicts_what_nobody_uses(device: Device) -> None:
    rig = Rig("dma-2d", device, pool_slots=4)
    rng = np.random.default_rng(7)
    with rig.kept as kept:
        prompts = [rng.integers(0, 1000, 64).tolist() for _ in range(2)]
        kept.store(prompts[0], [0, 1, 2, 3]).wait()
        with pytest.raises(PoolFull):
            kept.store(rng.integers(0, 1000, 80).tolist(), [0, 1, 2, 3, 4])
        assert kept.lookup(prompts[0]) == 64
        kept.store(prompts[1], [4, 5, 6, 7]).wait()
        assert (kept.lookup(prompts[0]), kept.lookup(prompts[1])) == (0, 64)


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_bad_blocks_are_refused_and_leave_nothing_behind(kind: str, device: Device) -> None:
    rig = Rig(kind, device)
    with rig.kept as kept:
        prompt = list(range(48))
        for blocks, message in (([0, 1], "fills 3 blocks, only 2"), ([0, 1, 1], "twice"), ([0, 1, 99], "99 is out of")):
            with pytest.raises(ValueError, match=message):
                kept.store(prompt, blocks)
        assert kept.stats().free == 24
        kept.store(prompt, [0, 1, 2]).wait()
        with pytest.raises(ValueError, match="99 is out of range"):
            kept.fetch(prompt, [0, 1, 99])
        kept.store(list(range(100, 100 + 24 * 16)), range(24)).wait()  # the failed fetch holds nothing: all is evicted


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_what_is_refused_evicts_nothing(kind: str, device: Device) -> None:
    rig = Rig(kind, device, pool_slots=4)
    with rig.kept as kept:
        prompt, other = list(range(64)), list(range(100, 164))
        kept.store(prompt, [0, 1, 2, 3]).wait()
        wrong: tuple[tuple[Any, str], ...] = (
            ([4, 5, 6, 99], "99 is out of range; there are 0..31"),
            ([-1, 5, 6, 7], "-1 is out of range"),
            (np.array([4, 5, 6, 2**63], np.uint64), f"{2**63} is out of range"),
            ([4, 5, 6, 2**70], f"{2**70} is out of range"),
            ([4, 5, 6, 7.5], r"whole numbers, not float64: \[4.0, 5.0, 6.0, 7.5\]"),
            (["4", "5", "6", "7"], "whole numbers, not <U1"),
            ([4, 5, 6, None], "whole numbers, not object"),
        )
        for blocks, message in wrong:
            with pytest.raises(ValueError, match=message):
                kept.store(other, blocks)
            with pytest.raises(ValueError, match=message):
                kept.fetch(prompt, blocks)
        if kind == "cpu":
            for call, tokens in ((kept.store, other), (kept.fetch, prompt)):
                with pytest.raises(ValueError, match="has no streams"):
                    call(tokens, [4, 5, 6, 7], after=[3])
        now = kept.stats()
        assert (now.evicted, now.ready, now.num_fetches) == (0, 4, 0)
        kept.fetch(prompt, np.array([4, 5, 6, 7], np.uint8)).wait()
        assert kept.fetch([], []).num_tokens == 0


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_lookup_sees_a_store_that_has_landed(kind: str, device: Device) -> None:
    rig = Rig(kind, device)
    with rig.kept as kept:
        prompt = list(range(48))
        kept.store(prompt, [0, 1, 2]).transfer.wait()
        assert kept.lookup(prompt) == 48


def test_a_prefix_that_is_being_stored_is_not_served(device: Device) -> None:
    rig = Rig("dma-2d", device)
    prompt = list(range(16))
    move = rig.kept.store(prompt, [0])
    keys = rig.kept._keys(prompt, b"everybody")
    assert rig.kept.pool.lookup(keys) == 0  # whatever the engine did: nobody has said that it landed
    move.wait()
    assert rig.kept.pool.lookup(keys) == 1
    rig.kept.close()
    rig.kept.close()


@pytest.mark.parametrize("direction", ["store", "fetch"])
def test_slots_of_a_transfer_that_failed_half_way_wait_until_nothing_is_under_way(
    direction: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig("dma-2d", device)
    prompt = list(range(48))
    if direction == "fetch":
        rig.kept.store(prompt, [0, 5, 10]).wait()
    copy, calls = device.driver.copy_rows, []

    def fails(*arguments: int) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise HardwareError("the driver refused")
        copy(*arguments)

    monkeypatch.setattr(device.driver, "copy_rows", fails)
    busy = [True]
    monkeypatch.setattr(rig.kept._mover, "is_idle", lambda direction: not busy[0])
    monkeypatch.setattr(prefixes, "_LAND_S", 0.01)
    with pytest.raises(HardwareError, match="the driver refused"):
        getattr(rig.kept, direction)(prompt, [0, 5, 10])
    held = rig.kept.stats()
    assert (held.quarantined if direction == "store" else held.held) == 3
    assert rig.kept.is_torn == (direction == "fetch")  # its blocks may still be written
    busy[0] = False
    assert not rig.kept.is_torn
    after = rig.kept.stats()
    assert (after.quarantined, after.held, after.writing) == (0, 0, 0)
    monkeypatch.undo()
    rig.kept.close()


def test_a_fetch_that_fails_half_way_returns_when_its_copies_have_landed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig("dma-2d", device)
    prompt = list(range(48))
    rig.kept.store(prompt, [0, 5, 10]).wait()
    mover = rig.kept._mover
    submit, is_idle, asked = mover.submit, mover.is_idle, []

    def refuses_the_third(*given: Any, **options: Any) -> Any:
        if len(parts) == 2:
            raise HardwareError("the driver refused")
        parts.append(submit(*given, **options))
        return parts[-1]

    def is_idle_when_asked_again(direction: Any) -> bool:
        asked.append([part._over for part in parts])
        return len(asked) > 3 and is_idle(direction)

    parts: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(mover, "submit", refuses_the_third)
        patched.setattr(mover, "is_idle", is_idle_when_asked_again)
        with pytest.raises(HardwareError, match="the driver refused"):
            rig.kept.fetch(prompt, [1, 6, 11], layers=1)
        assert len(asked) > 3  # what a part that failed had begun is waited for too
        assert all(map(all, asked))
        assert not rig.kept.is_torn
    assert rig.kept.stats().held == 0
    rig.kept.close()


def test_closing_waits_no_longer_than_it_is_told(device: Device) -> None:
    rig = Rig("dma-2d", device)
    word = device.pinned(64)
    held = np.zeros(1, WORD)
    held["kind"], held["address"], held["value"] = WAIT, word.address, 1
    caller = device.driver.stream_create()
    device.driver.stream_words(held, caller)
    rig.kept.store(list(range(16)), [0], after=[caller])
    with pytest.raises(Timeout):
        rig.kept.close(0.05)
    word.array.view(np.uint64)[0] = 1
    rig.kept.close()
    device.driver.stream_destroy(caller)


def test_a_pool_without_room_for_a_block() -> None:
    with pytest.raises(ValueError, match="a pool of 10 bytes holds no block"):
        Prefixes.on_cpu(LAYOUT, np.zeros(LAYOUT.size_bytes, np.uint8), pool_bytes=10)
    wrong: Any = "16M"
    with pytest.raises(TypeError, match="pool_bytes must be an int, such as 16 << 20, not '16M'"):
        Prefixes.on_cpu(LAYOUT, np.zeros(LAYOUT.size_bytes, np.uint8), pool_bytes=wrong)


def test_a_failed_pin_leaves_nothing_behind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def refuse(address: int, size_bytes: int) -> None:
        calls.append(address)
        if len(calls) == 3:
            raise HardwareError("out of memory")
        register(address, size_bytes)

    register = device.driver.host_register
    monkeypatch.setattr(device.driver, "host_register", refuse)
    with pytest.raises(HardwareError, match="out of memory"):
        Prefixes.on_gpu(device, LAYOUT, 0, pool_bytes=24 * SLOT, piece_bytes=5 * SLOT)
    assert len(calls) == 3


WRONG = (np.zeros(100, np.uint8), np.zeros(1 << 20, np.float32), np.zeros((4, 1 << 20), np.uint8))


@pytest.mark.parametrize("cache", WRONG)
def test_a_cache_that_is_no_flat_array_of_bytes_is_refused(cache: np.ndarray) -> None:
    layout = layer_outermost("x", num_layers=2, row_bytes=64, num_blocks=8)
    with pytest.raises(ValueError, match="layout x needs a flat array of 1024 uint8, not"):
        Prefixes.on_cpu(layout, cache, pool_bytes=1 << 20)
