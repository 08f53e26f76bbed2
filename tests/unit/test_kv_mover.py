"""Movers on host memory and on a stand-in driver: every path gives the bytes of the others, in the stated order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.standin import build

from dovetail.errors import Timeout
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD
from dovetail.kv.choose import Path
from dovetail.kv.layout import Layout, block_outermost, layer_outermost
from dovetail.kv.models import MODELS, model
from dovetail.kv.mover import GpuMover, linear
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Pieces, table

LAYOUTS = [
    layer_outermost("layer", num_layers=5, row_bytes=96, num_blocks=40, split=True),
    layer_outermost("gaps", num_layers=5, row_bytes=96, num_blocks=40, gap_bytes=32),
    block_outermost("block", num_layers=5, row_bytes=96, num_blocks=40),
]


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device("cuda", driver=CudaDriver(build("cuda"))) as gpu:
        yield gpu


def view(address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Rig:
    """A cache of the stand-in's device and a pool of two pieces, with the naive result of each request beside them."""

    def __init__(self, device: Device, layout: Layout, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.layout = layout
        self.pieces = Pieces(num_slots=24, slot_bytes=layout.slot_bytes, slots_per_piece=16)
        self.cache = device.driver.device_alloc(layout.size_bytes)
        self.parts = [device.pinned(self.pieces.size_bytes(n)) for n in range(2)]
        self.mover = GpuMover(device, self.cache, [p.address for p in self.parts], entries_per_call=7)
        view(self.cache, layout.size_bytes)[:] = self.rng.integers(0, 256, layout.size_bytes, dtype=np.uint8)
        for part in self.parts:
            part.array[:] = self.rng.integers(0, 256, part.size_bytes, dtype=np.uint8)

    def request(self) -> Any:
        blocks = self.rng.permutation(40)[:20]
        slots = self.rng.permutation(24)[:20]
        return blocks, slots

    def expected(self, direction: Direction, copies: Any) -> tuple[Any, list[Any]]:
        cache = view(self.cache, self.layout.size_bytes).copy()
        parts = [p.array.copy() for p in self.parts]
        CpuMover(cache, parts).submit(direction, copies)
        return cache, parts


@pytest.mark.parametrize("path", [Path.AUTO, Path.DMA_2D, Path.DMA_BATCH, Path.DMA_LOOP])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_path_moves_the_same_bytes(device: Device, layout: Layout, path: Path) -> None:
    rig = Rig(device, layout, 7)
    for direction in [*Direction, *Direction]:
        copies = table(direction, layout, *rig.request(), rig.pieces)
        cache, parts = rig.expected(direction, copies)
        transfer = rig.mover.submit(direction, copies, path)
        transfer.wait()
        assert transfer.is_over()
        assert transfer.size_bytes == 20 * layout.slot_bytes
        assert (view(rig.cache, layout.size_bytes) == cache).all()
        assert all((p.array == wanted).all() for p, wanted in zip(rig.parts, parts, strict=True))
    rig.mover.close()
    rig.mover.close()
    with pytest.raises(ValueError, match="the mover is closed"):
        rig.mover.submit(Direction.FETCH, copies)


def test_a_fetch_waits_for_what_its_caller_was_doing(device: Device) -> None:
    """The caller's stream is held by a gate: the fetch must not land before it opens, and who joins comes after it."""
    rig = Rig(device, LAYOUTS[0], 3)
    driver = device.driver
    copies = table("fetch", rig.layout, *rig.request(), rig.pieces)
    before = view(rig.cache, rig.layout.size_bytes).copy()
    after, _ = rig.expected(Direction.FETCH, copies)
    word = device.pinned(64)
    held = np.zeros(1, WORD)
    held["kind"], held["address"], held["value"] = WAIT, word.address, 1
    caller, reader = driver.stream_create(), driver.stream_create()
    driver.stream_words(held, caller)
    transfer = rig.mover.submit("fetch", copies, after=[caller])
    copy = device.pinned(rig.layout.size_bytes)
    transfer.join(reader)
    driver.copy(copy.address, rig.cache, rig.layout.size_bytes, reader)
    with pytest.raises(Timeout, match=r"the fetch of \d+ bytes by dma-2d was not over after 0.05 s; it goes on"):
        transfer.wait(0.05)
    assert (view(rig.cache, rig.layout.size_bytes) == before).all()
    word.array.view(np.uint64)[0] = 1
    transfer.wait()
    driver.stream_synchronize(reader)
    assert (copy.array == after).all()
    transfer.join(reader)  # over: nothing to wait for
    rig.mover.close()
    for stream in (caller, reader):
        driver.stream_destroy(stream)


def test_a_mover_gives_back_the_events_of_transfers_that_nobody_asked_about(device: Device) -> None:
    rig = Rig(device, LAYOUTS[0], 4)
    free = len(device._events)
    events = {rig.mover.submit(d, table(d, rig.layout, *rig.request(), rig.pieces))._end for d in Direction}
    rig.mover.close()
    assert events <= set(device._events)
    assert len(set(device._events)) == len(device._events) >= free


def test_linear_copies_are_the_rows_of_strided_ones() -> None:
    layout = LAYOUTS[0]
    pieces = Pieces(num_slots=24, slot_bytes=layout.slot_bytes, slots_per_piece=16)
    copies = table("fetch", layout, [3, 9], [0, 20], pieces)
    device, piece, host, length = linear(copies)
    assert len(device) == 20
    assert set(length.tolist()) == {96}
    assert sorted(set(piece.tolist())) == [0, 1]
    assert len(set(zip(piece.tolist(), host.tolist(), strict=True))) == 20


def test_paths_that_do_not_fit_are_refused(device: Device) -> None:
    rig = Rig(device, LAYOUTS[0], 1)
    copies = table("fetch", rig.layout, [1], [1], rig.pieces)
    with pytest.raises(ValueError, match="can't be reached by the path cpu"):
        rig.mover.submit("fetch", copies, "cpu")
    with pytest.raises(ValueError, match="'fast' is not a valid Path"):
        rig.mover.submit("fetch", copies, "fast")
    with pytest.raises(ValueError, match="is moved by the path cpu, not dma-2d"):
        CpuMover(np.zeros(8, np.uint8), []).submit("fetch", copies, "dma-2d")
    with pytest.raises(ValueError, match="are outside a memory of 8 bytes"):
        CpuMover(np.zeros(8, np.uint8), [np.zeros(10_000, np.uint8)]).submit("fetch", copies)
    with pytest.raises(ValueError, match="entries_per_call and num_streams must be at least 1, not 0 and 2"):
        GpuMover(device, 0, [], entries_per_call=0)
    rig.mover.close()


@pytest.mark.parametrize("name", list(MODELS))
def test_models(name: str) -> None:
    found = model(name)
    layer, block = found.layout(10), found.layout(10, outermost="block")
    assert layer.slot_bytes == block.slot_bytes == found.block_bytes
    assert found.blocks(17) == 2
    with pytest.raises(ValueError, match="not 'row'"):
        found.layout(10, outermost="row")


def test_pages_are_those_that_engines_have() -> None:
    rows = {name: found.row_bytes for name, found in MODELS.items()}
    assert rows["llama-8b"] == 64 << 10
    assert rows["llama-70b-tp4"] == 16 << 10
    assert rows["llama-70b-tp8"] == 8 << 10
    assert rows["mla"] == 18 << 10
    with pytest.raises(ValueError, match="layout must be one of llama-8b, "):
        model("llama")
