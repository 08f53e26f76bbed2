"""Slices behind flags on the stand-in driver: what its tests have in common; a thread plays the computation."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.heap import Heap
from dovetail.ops.gpu.exchange import Buffers, Exchange, Layout
from dovetail.ops.gpu.released import Flags, SlicedRun
from dovetail.ops.gpu.tiles import RowTiles
from dovetail.plan import Plan

from .gpulib import Control

#: fp16 NaN in every second byte's place: what nobody wrote shows.
POISON = 0xFF


@pytest.fixture(scope="module")
def control() -> Control:
    return Control()


@pytest.fixture
def device(control: Control) -> Iterator[Device]:
    control.reset()
    made = control.device()
    yield made
    control.reset()
    made.close()


#: What a test that has failed leaves closed; streams would stand before it for ever.
CLOSED: list[Callable[[], None]] = []


@pytest.fixture
def heaps(device: Device) -> Iterator[dict[str, Heap]]:
    made = {kind: Heap(device, kind, segment_bytes=1 << 20) for kind in ("device", "host")}
    yield made
    while CLOSED:
        CLOSED.pop()()
    for heap in made.values():
        heap.close()


def buffers_of(exchange: Exchange, heaps: dict[str, Heap]) -> Buffers:
    return Buffers(exchange, lambda kind, size: heaps[kind].empty((size,), torch.uint8))


GEMM = Exchange(send=(5, 3, 0, 9), receive=(5, 2, 7, 4), row_bytes=(16,) * 4)
STRIDED = Exchange(send=(6, 4, 5, 3), receive=(6,) * 4, row_bytes=(8, 4, 12, 8), layout=Layout.STRIDED)
PACKED = replace(STRIDED, send=(6, 0, 5, 3), layout=Layout.PACKED)
SHAPES = pytest.mark.parametrize("exchange", [GEMM, PACKED, STRIDED], ids=["rows", "packed", "strided"])


class Played:
    """A computation: a thread that fills one slice after the other, with pauses, and stores the flags' words."""

    def __init__(self, buffers: Buffers, tiles: RowTiles, seed: int = 0, *, shuffled: bool = True) -> None:
        self.buffers, self.random = buffers, random.Random(seed)
        self.leaving = tiles.slices[:, :2].tolist()
        self.result = torch.empty_like(buffers.y[0])
        self.shuffled, self.pause_s = shuffled, 0.002
        self.begin = threading.Event()
        self.begin.set()
        CLOSED.append(self.begin.set)
        self.thread: threading.Thread | None = None

    def launch(self, flags: Flags, stream: int) -> None:
        assert len(flags) == len(self.leaving)
        assert flags.value == flags.base + 1
        self.result = torch.from_numpy(np.frombuffer(self.random.randbytes(self.result.nbytes), np.uint8).copy())
        self.result[self.result == POISON] = 1
        self.thread = threading.Thread(target=self._run, args=(flags,))
        self.thread.start()

    def _run(self, flags: Flags) -> None:
        assert self.begin.wait(20)
        width = self.buffers.exchange.row_bytes[0]
        order = list(range(len(self.leaving)))
        if self.shuffled:
            self.random.shuffle(order)
        for k in order:
            time.sleep(self.random.uniform(0, self.pause_s))
            rows = slice(self.leaving[k][0] * width, self.leaving[k][1] * width)
            self.buffers.y[0][rows] = self.result[rows]
            ctypes.c_uint64.from_address(int(flags.addresses[k])).value = flags.value

    def join(self) -> None:
        assert self.thread is not None
        self.thread.join(20)
        assert not self.thread.is_alive()


def spoil(buffers: Buffers) -> None:
    """Everything but what the peers have, which is new."""
    for tensor in (buffers.y[0], *buffers.written):
        tensor.fill_(POISON)
    for tensor in buffers.y[1:]:
        tensor.copy_(torch.randint(0, POISON, (tensor.numel(),), dtype=torch.uint8))


def is_right(buffers: Buffers, computed: torch.Tensor) -> bool:
    return torch.equal(buffers.y[0], computed) and all(torch.equal(there, sent) for sent, there in buffers.crossed())


class Fails(Played):
    """Raises some flags, then an error."""

    def launch(self, flags: Flags, stream: int) -> None:
        for address in flags.words:
            ctypes.c_uint64.from_address(address).value = flags.value
        raise RuntimeError("no kernel image")


def run_some(
    device: Device, heaps: dict[str, Heap], exchange: Exchange, tiles: RowTiles, plan: Plan, **how: Any
) -> None:
    """Runs of a sliced plan beside computations that end their slices in any order: every byte is where it belongs."""
    buffers = buffers_of(exchange, heaps)
    stream = device.driver.stream_create()
    with SlicedRun(device, plan, buffers.of(plan), host_ranks=exchange.peers, **how) as run:
        assert run.num_flags == len(tiles.slices)
        for seed in range(4):
            compute = Played(buffers, tiles, seed)
            spoil(buffers)
            run.start(compute, stream).wait(20)
            compute.join()
            device.driver.stream_synchronize(stream)
            assert is_right(buffers, compute.result), seed
    device.driver.stream_destroy(stream)
