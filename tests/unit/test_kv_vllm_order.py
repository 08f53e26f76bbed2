"""Jobs of vLLM on a stand-in driver: what they wait for, what waits for them, and what their time counts."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.standin import build

from dovetail.errors import Timeout
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device, Pinned
from dovetail.hw.gpu.driver import WAIT, WORD
from dovetail.kv.planner import Direction
from dovetail.kv.vllm.jobs import Caches, Job, Page
from dovetail.kv.vllm.options import Options
from dovetail.kv.vllm.timing import GpuClock
from dovetail.kv.vllm.transfers import Finished, Transfers, private_memory

LAYERS, BLOCKS, PAGE = 3, 16, 96


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device("cuda", driver=CudaDriver(build("cuda"))) as gpu:
        yield gpu


class Rig:
    """A cache in the stand-in's device memory, and a model whose stream can be held by a gate."""

    def __init__(self, device: Device, path: str = "auto") -> None:
        self.driver = device.driver
        size = LAYERS * BLOCKS * PAGE
        address = self.driver.device_alloc(size)
        memory = (ctypes.c_int8 * size).from_address(address)
        self.cache = torch.frombuffer(memory, dtype=torch.int8).view(LAYERS, BLOCKS, PAGE)
        self.cache.copy_(torch.from_numpy(np.random.default_rng(3).integers(-128, 128, self.cache.shape, np.int8)))
        self.model = self.driver.stream_create()
        self.word: Pinned = device.pinned(64)
        options = Options.of({"dovetail": {"path": path, "piece_bytes": 4096}})
        caches = Caches([[Page(tensor=layer, padded_bytes=PAGE, offset=0) for layer in self.cache]])
        memory = private_memory(caches, 8, options, device)
        self.moving = Transfers.on_gpu(device, caches, memory, options.path, lambda: self.model)

    def hold(self) -> None:
        """The model works until `let_go`."""
        self.word.array[:] = 0
        gate = np.zeros(1, WORD)
        gate["kind"], gate["address"], gate["value"] = WAIT, self.word.address, 1
        self.driver.stream_words(gate, self.model)

    def let_go(self) -> None:
        self.word.array.view(np.uint64)[0] = 1

    def submit(self, job_id: int, direction: Direction, blocks: list[int], chunks: list[int]) -> None:
        job = Job(blocks=np.array(blocks), chunks=np.array(chunks), group_sizes=[len(blocks)], block_indices=[0])
        self.moving.submit(job_id, direction, job)

    def ended(self, number: int) -> list[Finished]:
        """So many jobs that are over."""
        deadline, found = time.monotonic() + 10, []
        while len(found) < number and time.monotonic() < deadline:
            found += self.moving.finished()
        return found

    def slot(self, chunk: int) -> Any:
        return self.moving.memory.view(chunk).view(np.int8).reshape(LAYERS, PAGE)

    def block(self, block: int) -> Any:
        return self.cache[:, block].numpy()


@pytest.fixture
def rig(device: Device) -> Iterator[Rig]:
    """One whose gate is open in the end, also where a test has failed."""
    made = Rig(device)
    yield made
    made.let_go()


@pytest.mark.parametrize("path", ["auto", "dma-2d", "dma-batch", "dma-loop"])
def test_stored_and_loaded(device: Device, path: str) -> None:
    rig = Rig(device, path)
    before = rig.cache.clone()
    rig.submit(1, Direction.STORE, [3, 4, 9], [7, 0, 1])
    rig.moving.wait({1})
    assert [(f.job_id, f.size_bytes) for f in rig.ended(1)] == [(1, 3 * LAYERS * PAGE)]
    rig.submit(2, Direction.FETCH, [5, 6], [7, 1])
    rig.moving.wait({2, 1})  # 1 is known to be over
    assert torch.equal(rig.cache[:, [5, 6]], before[:, [3, 9]])
    assert len(rig.moving.counts.transfers) == 2
    for _, taken, reason in rig.moving.counts.transfers:
        assert (taken, reason) == (path, "asked for") or (path == "auto" and "beside computation" in reason)
        assert ":" not in reason
    rig.moving.close()


def test_a_store_waits_for_the_writer_of_its_blocks(rig: Rig) -> None:
    rig.hold()
    new = rig.moving.memory.view(7)  # the model writes block 3, behind its gate
    new[:] = 11
    rig.driver.copy(rig.cache[0, 3].data_ptr(), new.ctypes.data, PAGE, rig.model)
    rig.submit(1, Direction.STORE, [3], [0])
    with pytest.raises(Timeout):
        rig.moving.wait({1}, 0.05)
    assert not rig.moving.finished()
    assert not rig.slot(0).any()
    rig.let_go()
    rig.moving.wait({1})
    assert (rig.slot(0)[0] == 11).all()
    rig.moving.close()


def test_a_load_waits_for_the_reader_of_its_blocks(rig: Rig) -> None:
    before = rig.block(3).copy()
    rig.slot(2)[:] = 5
    rig.hold()
    rig.submit(1, Direction.FETCH, [3], [2])
    with pytest.raises(Timeout):
        rig.moving.wait({1}, 0.05)
    assert (rig.block(3) == before).all()
    rig.let_go()
    rig.moving.wait({1})
    assert (rig.block(3) == 5).all()
    rig.moving.close()


def test_what_the_model_does_later_is_not_waited_for(rig: Rig) -> None:
    rig.submit(1, Direction.STORE, [3], [0])
    rig.hold()
    rig.moving.wait({1})
    rig.let_go()
    rig.moving.close()


def test_time_begins_when_the_copies_can(rig: Rig) -> None:
    """Neither the model's work nor the job before counts."""
    rig.hold()
    for n in range(3):
        rig.submit(n, Direction.STORE, [n + 1], [n])
    time.sleep(0.3)
    rig.let_go()
    found = rig.ended(3)
    assert [f.job_id for f in found] == [0, 1, 2]
    assert all(0 <= f.time_s < 0.2 for f in found)
    rig.moving.close()


def test_time_ends_with_the_last_byte(device: Device, rig: Rig) -> None:
    class Slow:
        """A transfer that ends when the rig lets go."""

        def join(self, stream: int) -> None:
            event = rig.driver.event_create()
            rig.driver.event_record(event, rig.model)
            rig.driver.stream_wait_event(stream, event)

    clock = GpuClock(device, lambda: rig.model)
    clock.begin(Direction.FETCH)
    rig.hold()
    span = clock.end(Direction.FETCH, Slow())
    time.sleep(0.1)
    assert not span.is_over()
    rig.let_go()
    rig.driver.stream_synchronize(rig.model)
    deadline = time.monotonic() + 10
    while not span.is_over() and time.monotonic() < deadline:
        pass
    assert 0.05 < span.seconds() < 10
    clock.close()
    rig.moving.close()


def test_closing_with_copies_under_way_leaves_the_memory(rig: Rig) -> None:
    rig.hold()
    rig.submit(1, Direction.STORE, [3], [0])
    slot = rig.slot(0)
    with pytest.raises(Timeout):
        rig.moving.close(0.05)
    rig.let_go()
    deadline = time.monotonic() + 10
    while not slot.any() and time.monotonic() < deadline:
        pass
    assert slot.any()  # it landed in memory that is still mapped
