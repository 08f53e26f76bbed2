"""The path staged on a stand-in driver: its kernel is played by a thread, behind a gate in the stream and late."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import dataclasses
import itertools
import mmap
import queue
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tests.standin import build

from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE, DriverError
from dovetail.kv import staging
from dovetail.kv.choose import Costs, Path, Samples
from dovetail.kv.layout import Layout, block_outermost, layer_outermost
from dovetail.kv.mover import GpuMover
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Pieces, Table, layer_tables, table
from dovetail.kv.prefixes import Prefixes
from dovetail.kv.staging import Half, Staging

CHUNK_BYTES, NUM_CHUNKS = 4096, 3


def view(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def numbers(address: int, count: int) -> Any:
    return view(address, 8 * count).view(np.int64)


class Kernel:
    """Runs a launch when its stream gets there: the stream waits for a word that a thread writes after the work."""

    def __init__(self, device: Device, delay_s: float = 0.0) -> None:
        self._device, self._delay_s = device, delay_s
        self._word = device.pinned(64)
        self._jobs: queue.Queue[Any] = queue.Queue()
        self.launches: list[int] = []  # tiles that each launch moved
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def __call__(self, half: Half, stream: int) -> None:
        driver = self._device.driver
        event = driver.event_create()
        driver.event_record(event, stream)
        self._jobs.put((half, event))
        self._number = getattr(self, "_number", 0) + 1
        driver.stream_words(np.array([(WAIT, self._word.address, self._number)], WORD), stream)

    def _work(self) -> None:
        self._device.driver.use(self._device.index)
        number = 0
        while (job := self._jobs.get()) is not None:
            half, event = job
            while not self._device.driver.event_done(event):
                time.sleep(20e-6)
            time.sleep(self._delay_s)
            self.launches.append(move(half))
            number += 1
            self._word.array.view(np.uint64)[0] = number

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(10)


def move(half: Half) -> int:
    """What the kernel does, a row at a time."""
    total, moved = -(-half.num_copies // half.per_chunk), 0
    words = numbers(half.words, 1 + 2 * half.programs + 2 * half.num_copies + total)
    ready, (next_tile, seen) = min(int(words[0]), total), words[1 : 1 + 2 * half.programs].reshape(2, -1)
    address, pitch = words[1 + 2 * half.programs :][: 2 * half.num_copies].reshape(2, -1)
    done = words[1 + 2 * half.programs + 2 * half.num_copies :]
    end = min(ready * half.per_chunk, half.num_copies) * half.num_rows
    for program in range(half.programs):
        tile = int(next_tile[program])
        while tile < end:
            copy, row = divmod(tile, half.num_rows)
            cached = view(int(address[copy] + row * pitch[copy]), half.row_bytes)
            inside = ((copy % half.per_chunk) * half.num_rows + row) * half.row_bytes
            chunk = copy // half.per_chunk % half.num_chunks
            staged = view(half.staging + chunk * half.chunk_bytes + inside, half.row_bytes)
            cached[:], staged[:] = (staged, staged) if half.direction is Direction.FETCH else (cached, cached)
            tile, moved = tile + half.programs, moved + 1
        next_tile[program] = tile
        done[int(seen[program]) : ready] += 1  # the kernel says so chunk by chunk
        seen[program] = max(int(seen[program]), ready)
    return moved


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device("cuda", driver=CudaDriver(build("cuda"))) as gpu:
        yield gpu


class Rig:
    """A cache, a pool and a mover whose staging memory is small, so that chunks are used again and again."""

    def __init__(self, device: Device, layout: Layout, delay_s: float = 0.0, seed: int = 1) -> None:
        self.rng, self.layout = np.random.default_rng(seed), layout
        self.pieces = Pieces(num_slots=40, slot_bytes=layout.slot_bytes, slots_per_piece=24)
        self.cache = device.driver.device_alloc(layout.size_bytes)
        self.parts = [device.pinned(self.pieces.size_bytes(n)) for n in range(2)]
        self.kernel = Kernel(device, delay_s)
        self.mover = GpuMover(device, self.cache, [p.address for p in self.parts])
        self.mover._staging = {
            d: Staging(device, d, chunk_bytes=CHUNK_BYTES, num_chunks=NUM_CHUNKS, launch=self.kernel) for d in Direction
        }
        for memory in self.memories():
            memory[:] = self.rng.integers(0, 256, len(memory), dtype=np.uint8)

    def has(self, address: int) -> bool:
        """Is it in the cache? Copies elsewhere reach staging memory."""
        return 0 <= address - self.cache < self.layout.size_bytes

    def memories(self) -> list[Any]:
        return [view(self.cache, self.layout.size_bytes), *(p.array for p in self.parts)]

    def copies(self, direction: Direction, count: int = 30) -> Table:
        blocks = self.rng.permutation(self.layout.num_blocks)[:count]
        return table(direction, self.layout, blocks, self.rng.permutation(40)[:count], self.pieces)

    def expected(self, *requests: tuple[Direction, Table]) -> list[Any]:
        cache, *parts = [memory.copy() for memory in self.memories()]
        for direction, copies in requests:
            CpuMover(cache, parts).submit(direction, copies)
        return [cache, *parts]

    def is_like(self, wanted: list[Any]) -> bool:
        return all((found == right).all() for found, right in zip(self.memories(), wanted, strict=True))

    def close(self) -> None:
        self.mover.close()
        self.kernel.close()


def layout_of(rows: int = 6, row_bytes: int = 128, blocks: int = 48) -> Layout:
    return layer_outermost("rows", num_layers=rows, row_bytes=row_bytes, num_blocks=blocks)


@pytest.mark.parametrize("path", ["staged", "mixed"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("delay_s", [0.0, 2e-3], ids=["prompt", "late"])
def test_it_moves_the_bytes_of_plain_copies(device: Device, direction: Direction, delay_s: float, path: str) -> None:
    rig = Rig(device, layout_of(), delay_s)
    copies = rig.copies(direction)
    wanted = rig.expected((direction, copies))
    transfer = rig.mover.submit(direction, copies, path)
    transfer.wait()
    assert rig.is_like(wanted)
    directly = len(copies) // 4 if path == "mixed" else 0
    assert sum(rig.kernel.launches) == int(copies.rows.sum()) - 6 * directly
    rig.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_a_mixed_transfer_sends_some_directly_while_the_kernel_waits(
    device: Device, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks of a fetch, the first ones of a store; the kernel does not wait for them, but the end does."""
    rig = Rig(device, layout_of())
    copies = rig.copies(direction)
    wanted = rig.expected((direction, copies))
    gate, held, copy_rows = device.pinned(64), [], device.driver.copy_rows
    gate.array[:] = 0

    def late(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        if rig.has(at := dst if direction is Direction.FETCH else src):
            device.driver.stream_words(np.array([(WAIT, gate.address, 1)], WORD), stream)
            held.append(at - rig.cache)
        copy_rows(dst, dst_pitch, src, src_pitch, width, rows, stream)

    monkeypatch.setattr(device.driver, "copy_rows", late)
    transfer = rig.mover.submit(direction, copies, "mixed")
    few = len(copies) // 4
    mine = slice(-few, None) if direction is Direction.FETCH else slice(few)
    assert held == copies.device[mine].tolist()
    until = time.monotonic() + 20
    while sum(rig.kernel.launches) < 6 * (len(copies) - few) and time.monotonic() < until:
        time.sleep(1e-3)
    assert sum(rig.kernel.launches) == 6 * (len(copies) - few)
    time.sleep(5e-3)
    assert not transfer.is_over()
    gate.array.view(np.uint64)[0] = 1
    transfer.wait()
    assert rig.is_like(wanted)
    rig.close()


@pytest.mark.parametrize("path", ["staged", "mixed", "dma-2d"])
def test_a_store_begins_behind_the_writers_of_its_blocks(device: Device, path: str) -> None:
    rig, driver = Rig(device, layout_of()), device.driver
    copies, writer, gate = rig.copies(Direction.STORE), driver.stream_create(), device.pinned(64)
    gate.array[:] = 0
    driver.stream_words(np.array([(WAIT, gate.address, 1)], WORD), writer)
    driver.fill(rig.cache, 0xA5, rig.layout.size_bytes, writer)
    transfer = rig.mover.submit("store", copies, path, after=[writer])
    time.sleep(5e-3)
    cache, *parts = [memory.copy() for memory in rig.memories()]
    cache[:] = 0xA5
    CpuMover(cache, parts).submit("store", copies)
    gate.array.view(np.uint64)[0] = 1
    transfer.wait()
    assert rig.is_like([cache, *parts])
    driver.stream_destroy(writer)
    rig.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_what_goes_directly_comes_behind_the_transfer_before(
    device: Device, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel may still write the same blocks. All streams of the strided copies have joined it, or one that has."""
    rig, said = Rig(device, layout_of()), []
    before = rig.mover.submit(direction, rig.copies(direction), "staged")
    join, order, copy_rows = before.join, device.order, device.driver.copy_rows
    monkeypatch.setattr(before, "join", lambda stream: (said.append((None, stream)), join(stream)))
    monkeypatch.setattr(device, "order", lambda of, to: (said.append((of, to)), order(of, to)))

    def noted(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        if rig.has(dst) or rig.has(src):
            said.append(("copy", stream))
        copy_rows(dst, dst_pitch, src, src_pitch, width, rows, stream)

    monkeypatch.setattr(device.driver, "copy_rows", noted)
    rig.mover.submit(direction, rig.copies(direction), "mixed").wait()
    behind: set[Any] = {None}
    for of, stream in said:
        if of == "copy":
            assert stream in behind
        elif of in behind:
            behind.add(stream)
    assert any(of == "copy" for of, _ in said)
    rig.close()


def test_few_copies_and_one_stream_are_staged(device: Device) -> None:
    """There is nothing to be mixed: three copies have no quarter, and one stream has the kernel behind it."""
    rig = Rig(device, layout_of())
    alone = GpuMover(device, rig.cache, [p.address for p in rig.parts], num_streams=1, launch=rig.kernel)
    for mover, count in ((rig.mover, 3), (alone, 30)):
        for direction in Direction:
            copies = rig.copies(direction, count)
            wanted, before = rig.expected((direction, copies)), sum(rig.kernel.launches)
            mover.submit(direction, copies, "mixed").wait()
            assert rig.is_like(wanted)
            assert sum(rig.kernel.launches) - before == 6 * len(copies)
    alone.close()
    rig.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_transfers_that_follow_each_other_share_the_chunks(device: Device, direction: Direction) -> None:
    rig = Rig(device, layout_of(), 1e-3)
    requests = [(direction, rig.copies(direction)) for _ in range(4)]
    wanted = rig.expected(*requests)
    paths = ["staged", "mixed", "staged", "mixed"]
    transfers = [rig.mover.submit(*request, path) for request, path in zip(requests, paths, strict=True)]
    transfers[-1].wait()
    assert all(t.is_over() for t in transfers)
    assert rig.is_like(wanted)
    rig.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_chunks_that_are_used_too_early_are_seen(
    device: Device, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: without waits for what the kernel has done, bytes come changed."""

    rig = Rig(device, layout_of(), 3e-3)
    copies = rig.copies(direction, 40)
    wanted = rig.expected((direction, copies))
    staging = rig.mover._staging[direction]
    words = staging._words
    monkeypatch.setattr(staging, "_words", lambda kind, *rest: words(kind, *rest) if kind == WRITE else None)
    rig.mover.submit(direction, copies, "staged")
    while not rig.mover.is_idle(direction):
        time.sleep(1e-3)
    assert not rig.is_like(wanted)
    rig.close()


def test_a_transfer_is_over_after_those_before_it(device: Device) -> None:
    """A prompt path after a late one of the same direction: slots are freed by the last transfer."""
    rig = Rig(device, layout_of(), 5e-3)
    late = rig.mover.submit("fetch", rig.copies(Direction.FETCH), "staged")
    prompt = rig.mover.submit("fetch", rig.copies(Direction.FETCH, 2), "dma-2d")
    prompt.wait()
    assert late.is_over()
    rig.close()


@pytest.mark.parametrize("path", ["dma-2d", "dma-batch", "dma-loop", "staged", "mixed"])
def test_the_last_of_two_fetches_of_a_block_stays(device: Device, path: str) -> None:
    """The kernel of the first is late: what the second brings, by whatever path, comes behind it."""
    rig = Rig(device, layout_of(), 5e-3)
    blocks, slots = np.arange(0, 40, 2), np.arange(20)
    first = table("fetch", rig.layout, blocks, slots, rig.pieces)
    second = table("fetch", rig.layout, blocks, slots[::-1] + 20, rig.pieces)
    wanted = rig.expected((Direction.FETCH, first), (Direction.FETCH, second))
    rig.mover.submit("fetch", first, "staged")
    rig.mover.submit("fetch", second, path).wait()
    assert rig.is_like(wanted)
    rig.close()


def test_both_ways_and_all_paths_at_once(device: Device) -> None:
    """Fetches and stores that share no block and no slot, some of no bytes, by random paths, behind late kernels."""
    rng = np.random.default_rng(5)
    for trial in range(12):
        shape = int(rng.integers(2, 60)), 16 * int(rng.integers(1, 20))
        rig = Rig(device, layout_of(*shape), 5e-4 * (trial % 2), seed=trial)
        requests = []
        for direction in rng.choice(list(Direction), 6):
            block, slot = (0, 0) if direction == Direction.FETCH else (24, 20)
            count = int(rng.integers(0, 18))
            where = block + rng.permutation(24)[:count], slot + np.sort(rng.permutation(20)[:count])
            requests.append((Direction(direction), table(direction, rig.layout, *where, rig.pieces)))
        wanted = rig.expected(*requests)
        paths = rng.choice(["staged", "staged", "mixed", "mixed", "dma-2d", "dma-loop"], len(requests))
        for transfer in [rig.mover.submit(*request, str(path)) for request, path in zip(requests, paths, strict=True)]:
            transfer.wait()
        assert rig.is_like(wanted), f"trial {trial}: {shape}, {paths}"
        rig.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_no_copy_reaches_into_two_pieces_that_adjoin(device: Device, direction: Direction) -> None:
    layout, kernel = layout_of(), Kernel(device)
    pieces = Pieces(num_slots=32, slot_bytes=layout.slot_bytes, slots_per_piece=16)
    size = pieces.size_bytes(0)
    assert size % mmap.PAGESIZE == 0
    memory = np.frombuffer(mmap.mmap(-1, 2 * size), np.uint8)
    addresses = [memory.ctypes.data + n * size for n in range(2)]
    for address in addresses:
        device.driver.host_register(address, size)
    cache = device.driver.device_alloc(layout.size_bytes)
    mover = GpuMover(device, cache, addresses, launch=kernel)
    copies = table(direction, layout, np.arange(48)[::-1][:32], np.arange(32), pieces)
    mover.submit(direction, copies, "staged").wait()
    assert sum(kernel.launches) == 6 * 32
    mover.close()
    kernel.close()
    for address in addresses:
        device.driver.host_unregister(address)


@pytest.mark.parametrize("direction", list(Direction))
def test_a_launch_that_fails_leaves_nothing_behind(
    device: Device, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half way: what was begun comes to its end, later transfers are right, and all memory is given back."""
    live: set[int] = set()
    alloc, free = device.driver.device_alloc, device.driver.device_free
    monkeypatch.setattr(device.driver, "device_alloc", lambda size: _noted(live, alloc(size)))
    monkeypatch.setattr(device.driver, "device_free", lambda address: (live.discard(address), free(address)))
    rig = Rig(device, layout_of(), 1e-3)
    staging = rig.mover._staging[direction]
    left = itertools.count()

    def fails(half: Half, stream: int) -> None:
        if next(left) == 1:
            raise HardwareError("the launch failed")
        rig.kernel(half, stream)

    monkeypatch.setattr(staging, "launch", fails)
    with pytest.raises(HardwareError, match="the launch failed"):
        rig.mover.submit(direction, rig.copies(direction), "staged")
    while not rig.mover.is_idle(direction):
        time.sleep(1e-3)
    requests = [(direction, rig.copies(direction)) for _ in range(3)]
    wanted = rig.expected(*requests)
    for request in requests:
        rig.mover.submit(*request, "staged").wait()
    assert rig.is_like(wanted)
    rig.close()
    assert live == {rig.cache}


def _noted(live: set[int], address: int) -> int:
    live.add(address)
    return address


def test_a_late_launch_catches_up_with_all_that_has_arrived(device: Device) -> None:
    rig = Rig(device, layout_of(), 4e-3)
    rig.mover.submit("fetch", rig.copies(Direction.FETCH, 40), "staged").wait()
    assert sum(rig.kernel.launches) == 6 * 40  # over when all is moved, not when the last launch is
    rig.close()
    assert 0 in rig.kernel.launches  # somebody before had moved its chunk


def test_what_is_contiguous_or_strided_on_the_host_goes_directly(device: Device) -> None:
    for layout in (block_outermost("block", num_layers=4, row_bytes=128, num_blocks=48), layout_of(rows=2)):
        rig = Rig(device, layout)
        run = np.arange(20)
        copies = table("fetch", layout, run, run, rig.pieces)
        assert (copies.rows == 1).all() or (copies.host_pitch != copies.width).all()
        wanted = rig.expected((Direction.FETCH, copies))
        rig.mover.submit("fetch", copies, "staged").wait()
        assert rig.is_like(wanted)
        assert not rig.kernel.launches
        rig.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=some.integers(2, 40), vectors=some.integers(1, 20), seed=some.integers(0, 99), count=some.integers(1, 40),
    direction=some.sampled_from(list(Direction)), path=some.sampled_from(["staged", "mixed"]),
)  # fmt: skip
def test_any_shape(
    device: Device, rows: int, vectors: int, seed: int, count: int, direction: Direction, path: str
) -> None:
    rig = Rig(device, layout_of(rows, 16 * vectors), seed=seed)
    copies = rig.copies(direction, count)
    wanted = rig.expected((direction, copies))
    rig.mover.submit(direction, copies, path).wait()
    assert rig.is_like(wanted)
    rig.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=some.integers(4, 20), layers=some.integers(2, 7), seed=some.integers(0, 99), count=some.integers(1, 40),
    in_order=some.booleans(), direction=some.sampled_from(list(Direction)),
)  # fmt: skip
def test_any_layers(
    device: Device, rows: int, layers: int, seed: int, count: int, in_order: bool, direction: Direction
) -> None:
    """Of a few layers a slot has a part only: neighbours are equally far apart, and there may be gaps between them."""
    rig = Rig(device, layout_of(rows, 48), seed=seed)
    blocks, slots = rig.rng.permutation(rig.layout.num_blocks)[:count], rig.rng.permutation(40)[:count]
    slots = np.sort(slots) if in_order else slots
    parts = layer_tables(direction, rig.layout, blocks, slots, rig.pieces, layers=layers)
    wanted = rig.expected(*((direction, part) for part in parts))
    for part in parts:
        rig.mover.submit(direction, part, "staged")
    rig.mover.submit(direction, parts[-1], "staged").wait()
    assert rig.is_like(wanted)
    rig.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_parts_of_slots_that_follow_each_other_are_one_copy_to_a_chunk(
    device: Device, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(device, layout_of(rows=8, row_bytes=128))
    slots = np.concatenate((np.arange(4, 14), np.arange(17, 30)))  # a gap; the second piece begins with slot 24
    blocks = rig.rng.permutation(rig.layout.num_blocks)[: len(slots)]
    parts = layer_tables(direction, rig.layout, blocks, slots, rig.pieces, layers=2)
    wanted = rig.expected(*((direction, part) for part in parts))
    seen, copy_rows = [], device.driver.copy_rows

    def noted(dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        seen.append((width, rows, src_pitch if direction is Direction.FETCH else dst_pitch))
        copy_rows(dst, dst_pitch, src, src_pitch, width, rows, stream)

    monkeypatch.setattr(device.driver, "copy_rows", noted)
    for part in parts:
        rig.mover.submit(direction, part, "staged").wait()
    assert rig.is_like(wanted)
    assert seen == 4 * [(256, 10, 1024), (256, 6, 1024), (256, 1, 1024), (256, 6, 1024)]  # 16 blocks to a chunk
    rig.close()


def test_refusals(device: Device) -> None:
    rig = Rig(device, layout_of(row_bytes=40))
    with pytest.raises(NotSupported, match="the path staged moves whole 16 bytes; use dma-2d for these rows"):
        rig.mover.submit("fetch", rig.copies(Direction.FETCH), "staged")
    rig.close()
    with pytest.raises(ValueError, match="staging needs 2 chunks of whole 16 bytes, not 1 of 64"):
        Staging(device, Direction.FETCH, chunk_bytes=64, num_chunks=1)
    bare = GpuMover(device, rig.cache, [p.address for p in rig.parts])
    with pytest.raises(NotSupported, match="the path staged needs"):
        bare.submit("fetch", rig.copies(Direction.FETCH), "staged")
    bare.close()


def staged_is_fast(staged_us: float = 1.0) -> Costs:
    samples = {
        (direction, beside, path): Samples([(128, 4096, time_us)])
        for direction in Direction
        for beside in (False, True)
        for path, time_us in ((Path.STAGED, staged_us), (Path.DMA_2D, 9.0))
    }
    return Costs(samples=samples, entries_per_call=1, source="a test")


def test_auto_stages_what_the_kernel_can_move(device: Device) -> None:
    for row_bytes, path in ((128, Path.STAGED), (120, Path.DMA_2D)):
        rig = Rig(device, layout_of(row_bytes=row_bytes))
        mover = GpuMover(device, rig.cache, [p.address for p in rig.parts], costs=staged_is_fast(), launch=rig.kernel)
        for _ in range(2):  # the second time from memory
            copies = rig.copies(Direction.FETCH)
            wanted = rig.expected((Direction.FETCH, copies))
            transfer = mover.submit("fetch", copies, "auto")
            transfer.wait()
            assert transfer.choice.path is path
            assert rig.is_like(wanted)
        mover.close()
        rig.close()


def test_auto_tries_staged_only_where_the_kernel_can_move_the_rows(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near the best, and fast here: taken for aligned rows once it is known; requests of others learn by themselves."""
    monkeypatch.setattr(device.driver, "event_elapsed_us", lambda begin, end: next(ticks))
    near = staged_is_fast(staged_us=10.0)
    for row_bytes, kinds in ((128, {Path.DMA_2D, Path.STAGED}), (120, {Path.DMA_2D})):
        rig = Rig(device, layout_of(row_bytes=row_bytes))
        mover = GpuMover(device, rig.cache, [p.address for p in rig.parts], costs=near, launch=rig.kernel)
        ticks = itertools.cycle([20.0, 12.0])  # dma-2d and staged in turn
        taken = []
        for _ in range(8):
            copies = rig.copies(Direction.FETCH)
            wanted = rig.expected((Direction.FETCH, copies))
            transfer = mover.submit("fetch", copies, "auto", beside=False)
            transfer.wait()
            assert rig.is_like(wanted)
            taken.append(transfer.choice.path)
        assert set(taken) == kinds
        assert taken[-1] is (Path.STAGED if Path.STAGED in kinds else Path.DMA_2D)
        assert transfer.choice.reason.startswith("measured here: ")
        mover.close()
        rig.close()


@pytest.mark.parametrize("why", ["the cache begins at an odd place", "nothing is strided on one side only", "no words"])
def test_auto_leaves_out_what_can_not_be_staged(device: Device, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(device, layout_of(blocks=49))
    blocks = np.arange(40) if "strided" in why else np.arange(0, 40, 2)
    copies = table("fetch", rig.layout, blocks, np.arange(len(blocks)), rig.pieces)
    base = rig.cache + 8 if "odd" in why else rig.cache
    if why == "no words":
        monkeypatch.setattr(device, "caps", dataclasses.replace(device.caps, stream_gates=False))
    mover = GpuMover(device, base, [p.address for p in rig.parts], costs=staged_is_fast(), launch=rig.kernel)
    transfer = mover.submit("fetch", copies, "auto")
    transfer.wait()
    assert transfer.choice.path is Path.DMA_2D
    assert not mover._staging  # no memory was taken for it
    assert mover.fewest_copies(Path.AUTO, 20, 1) == (1 if "strided" in why else 20)
    assert [mover.fewest_copies(path, 20, 3) for path in (Path.STAGED, Path.DMA_2D)] == [3, 20]
    if why == "no words":
        with pytest.raises(NotSupported, match="needs streams that can wait for words in memory"):
            mover.submit("fetch", copies, "staged")
    mover.close()
    rig.close()


def test_auto_goes_on_without_staging_memory(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU that is full: the path is left out from then on, with a warning, and nothing is left behind."""
    rig = Rig(device, layout_of(blocks=4000))
    rig.mover._staging = {}
    copies = rig.copies(Direction.FETCH)
    mover = GpuMover(device, rig.cache, [p.address for p in rig.parts], costs=staged_is_fast(), launch=rig.kernel)

    def full(size_bytes: int) -> int:
        raise DriverError("out of memory", call="cuMemAlloc", code=2)

    monkeypatch.setattr(device.driver, "device_alloc", full)
    wanted = rig.expected((Direction.FETCH, copies))
    transfer = mover.submit("fetch", copies, "auto")
    transfer.wait()
    assert transfer.choice.path is Path.DMA_2D
    assert rig.is_like(wanted)
    assert "auto leaves out the path staged from now on" in caplog.text
    mover.close()
    rig.close()


def test_tables_do_not_pile_up(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` reserves is what the run takes, also while events that were used before are not reached."""
    live: set[int] = set()
    alloc, free = device.driver.device_alloc, device.driver.device_free
    monkeypatch.setattr(device.driver, "device_alloc", lambda size: _noted(live, alloc(size)))
    monkeypatch.setattr(device.driver, "device_free", lambda address: (live.discard(address), free(address)))
    rig = Rig(device, layout_of(), 2e-3)
    staging, before = rig.mover._staging[Direction.FETCH], len(live)
    for _ in range(20):
        staging.reserve(40)
    assert len(live) == before + 1
    staging.reserve(4000)
    staging.reserve(40)
    assert len(live) == before + 2
    copies = rig.copies(Direction.FETCH)
    wanted = rig.expected((Direction.FETCH, copies))
    rig.mover.submit("fetch", copies, "staged").wait()
    assert rig.is_like(wanted)
    assert len(live) == before + 2
    staging.reserve(40)
    rig.close()
    assert live == {rig.cache}


def test_a_kernel_is_launched_without_triton_once_it_is_compiled(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The first launch of a block length goes through Triton; later ones give the same numbers to what it compiled."""
    source = File(staging.__file__).parent / "kernels" / "staged.py"
    (kernel,) = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.FunctionDef)]
    names = [argument.arg for argument in kernel.args.args]
    slow: list[dict[str, Any]] = []
    quick: list[tuple[Any, dict[str, Any], Any]] = []

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, stream: quick.append((grid, dict(zip(names, given, strict=True)), stream))

    class Triton:
        def __getitem__(self, grid: Any) -> Any:
            def call(*given: Any, num_warps: int, **more: Any) -> Compiled:
                slow.append(dict(zip(names, given, strict=False)) | more)
                return Compiled()

            return call

        def warmup(self, *given: Any, num_warps: int, grid: Any, **more: Any) -> Compiled:
            assert grid == (5,)
            return self[grid](*given, num_warps=num_warps, **more)

    fake = types.ModuleType("staged")
    fake.staged_kernel = Triton()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dovetail.kv.kernels.staged", fake)
    monkeypatch.setattr(staging, "has_kernel", lambda: True)
    for name in ("device", "stream", "ExternalStream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())
    current = device.index
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(staging, "num_programs", lambda _: 5)
    launch = staging.Kernel(device)
    numbers_of = {"staging": 7, "num_copies": 3, "num_rows": 2, "per_chunk": 2, "chunk_bytes": 4096, "num_chunks": 3}
    for turn, (direction, row_bytes) in enumerate(itertools.product([*Direction] * 2, (64, 4096, 60000))):
        half = Half(direction=direction, words=turn, row_bytes=row_bytes, programs=5, **numbers_of)
        launch(half, 99)
        seen = slow[-1] if turn < 6 else quick[-1][1]
        block = min(1 << (row_bytes // 8 - 1).bit_length(), 2048)
        wanted = {"words": turn, "num_vectors": row_bytes // 16, "UNPACK": direction is Direction.FETCH, "BLOCK": block}
        wanted |= {"ROWS": 2048 // block}
        assert seen == numbers_of | wanted
    assert (len(slow), len(quick)) == (6, 6)
    fresh = staging.Kernel(device)
    fresh.prepare(4096)
    assert len(slow) == 8  # both ways
    fresh(Half(direction=Direction.STORE, words=0, row_bytes=4096, programs=5, **numbers_of), 99)
    assert (len(slow), len(quick)) == (8, 7)  # nothing is left to compile
    assert slow.pop() | {"UNPACK": True} == slow.pop()
    current += 1  # another GPU is current: Triton's way, which makes ours so
    launch(half, 99)
    assert (len(slow), len(quick)) == (7, 7)
    assert {(grid, stream) for grid, _, stream in quick} == {((5, 1, 1), 99)}


@pytest.mark.parametrize("fails", [False, True], ids=["compiled", "no compiler"])
def test_what_is_compiled_beforehand(device: Device, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For rows that can be staged; where Triton can't compile, auto goes on without."""
    asked: list[int] = []

    class Kernel:
        def __init__(self, _: Device) -> None: ...

        def prepare(self, row_bytes: int) -> None:
            if fails:
                raise RuntimeError("Failed to find C compiler")
            asked.append(row_bytes)

    monkeypatch.setattr(staging, "has_kernel", lambda: True)
    monkeypatch.setattr("dovetail.kv.mover.Kernel", Kernel)
    layout = layout_of(rows=4, row_bytes=4096)
    cache = device.driver.device_alloc(layout.size_bytes)
    try:
        with Prefixes.on_gpu(device, layout, cache, pool_bytes=8 * layout.slot_bytes) as kept:
            assert asked == ([] if fails else [4096])
            assert kept._mover._auto.can_stage is not fails  # type: ignore[attr-defined]
        if fails:
            with pytest.raises(RuntimeError, match="C compiler"):
                Prefixes.on_gpu(device, layout, cache, pool_bytes=8 * layout.slot_bytes, path="staged")
    finally:
        device.driver.device_free(cache)
