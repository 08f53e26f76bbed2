"""A first slice that is a launch of its own, whose copies begin behind an event: on the stand-in driver."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.errors import DovetailError, HardwareError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.local import LocalRunner
from dovetail.ops.gpu import dma
from dovetail.ops.gpu.dma import DmaGemm, gemm_exchange
from dovetail.ops.gpu.exchange import Buffers, Exchange, Pace
from dovetail.ops.gpu.released import Headed, Tickets
from dovetail.ops.gpu.tiles import RowTiles, behind, row_tiles
from dovetail.plan import Op, Plan, passes
from dovetail.plan.check import check

from .gpulib import Control
from .slicelib import (
    CLOSED,
    GEMM,
    POISON,
    SHAPES,
    Fails,
    Played,
    buffers_of,
    control,
    device,
    heaps,
    is_right,
    spoil,
)

__all__ = ["control", "device", "heaps"]  # fixtures


class Head:
    """The first slice: its rows are put into `y` in the stream, behind a word that the test raises."""

    def __init__(self, device: Device, heaps: dict[str, Heap], buffers: Buffers, tiles: RowTiles, stream: int) -> None:
        width = buffers.exchange.row_bytes[0]
        self.rows = slice(*(int(row) * width for row in tiles.slices[0, :2]))
        self._device, self._stream, self._y = device, stream, buffers.y[0]
        self._word = heaps["host"].empty((8,), torch.uint8)
        self.bytes = heaps["host"].empty((self.rows.stop - self.rows.start,), torch.uint8)
        CLOSED.append(self.open)
        self.close()

    def close(self) -> None:
        self._word.zero_()
        self.bytes.copy_(torch.randint(0, POISON, (len(self.bytes),), dtype=torch.uint8))

    def open(self) -> None:
        ctypes.c_uint64.from_address(self._word.data_ptr()).value = 1

    def hold(self) -> None:
        """What the stream is given from now on waits for the word."""
        gate = np.zeros(1, WORD)
        gate["kind"], gate["address"], gate["value"] = WAIT, self._word.data_ptr(), 1
        self._device.driver.stream_words(gate, self._stream)

    def __call__(self) -> None:
        self.hold()
        to = self._y.data_ptr() + self.rows.start
        self._device.driver.copy(to, self.bytes.data_ptr(), len(self.bytes), self._stream)


def headed(device: Device, tiles: RowTiles, buffers: Buffers, **how: Any) -> Headed:
    how = {"pace": Pace.STEP, "timeout_s": 20, "lanes": 2, "words_on_device": False} | how
    return Headed(device, tiles, buffers, **how)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("first_rows", [None, 1])
@SHAPES
def test_the_first_slice_needs_no_flag(
    device: Device, heaps: dict[str, Heap], exchange: Exchange, first_rows: int | None, lanes: int
) -> None:
    """It leaves behind its launch while no flag is up, the others behind theirs; the stream goes on behind all."""
    tiles = row_tiles(exchange.send, 0, 1, slice_rows=2, first_rows=first_rows)
    rest = behind(tiles, 1)
    plans = exchange.headed(tiles, lanes=lanes)
    for plan in plans:
        check(passes.entry(plan))
    buffers = buffers_of(exchange, heaps)
    driver, stream = device.driver, device.driver.stream_create()
    run = headed(device, tiles, buffers, lanes=lanes, words_on_device=lanes == 2)
    head = Head(device, heaps, buffers, tiles, stream)
    probe = heaps["device"].empty((8,), torch.uint8)
    for seed in range(4):
        compute = Played(buffers, rest, seed)
        compute.begin.clear()
        spoil(buffers)
        head.close()
        probe.zero_()
        tickets = run.start(head, compute, stream)
        driver.fill(probe.data_ptr(), 7, 8, stream)
        time.sleep(0.01)
        assert not tickets.first.is_over()
        leaves = [there for _, there in buffers.crossed()][::2]
        assert all(bool((there == POISON).all()) for there in leaves)
        head.open()
        tickets.first.wait(20)
        sent = sum(int((there != POISON).sum()) for there in leaves)
        assert sent == len(head.bytes)
        assert not tickets.is_over()
        assert not probe.any()
        compute.begin.set()
        tickets.wait(20)
        compute.join()
        driver.stream_synchronize(stream)
        assert tickets.is_over()
        assert (probe == 7).all()
        compute.result[head.rows] = head.bytes
        assert is_right(buffers, compute.result), seed
    run.close()
    run.close()
    driver.stream_destroy(stream)


def test_a_first_slice_that_does_not_wait_is_seen(
    device: Device, heaps: dict[str, Heap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the event, what is not there yet is sent."""
    tiles = row_tiles(GEMM.send, 0, 2, slice_rows=2)
    buffers, stream = buffers_of(GEMM, heaps), device.driver.stream_create()
    run = headed(device, tiles, buffers)
    head, compute = Head(device, heaps, buffers, tiles, stream), Played(buffers, behind(tiles, 1))
    spoil(buffers)
    submit = run._head.submit
    monkeypatch.setattr(run, "_head", SimpleNamespace(submit=lambda **_: submit()))
    tickets = run.start(head, compute, stream)
    tickets.first.wait(20)
    head.open()
    tickets.wait(20)
    compute.join()
    device.driver.stream_synchronize(stream)
    compute.result[head.rows] = head.bytes
    assert not is_right(buffers, compute.result)
    run.close()
    device.driver.stream_destroy(stream)


def test_a_head_whose_rest_fails(device: Device, heaps: dict[str, Heap]) -> None:
    """The stream still goes on behind the copies of the head, and the next run is right."""
    tiles = row_tiles(GEMM.send, 0, 2, slice_rows=2)
    buffers, driver, stream = buffers_of(GEMM, heaps), device.driver, device.driver.stream_create()
    run = headed(device, tiles, buffers)
    head, probe = Head(device, heaps, buffers, tiles, stream), heaps["device"].empty((8,), torch.uint8)
    probe.zero_()
    lanes = [Head(device, heaps, buffers, tiles, lane) for lane in set(device.streams(4))]
    for lane in lanes:
        lane.hold()
    head.open()
    with pytest.raises(RuntimeError, match="no kernel image"):
        run.start(head, Fails(buffers, behind(tiles, 1)), stream)
    driver.fill(probe.data_ptr(), 7, 8, stream)
    time.sleep(0.02)
    assert not probe.any()
    for lane in lanes:
        lane.open()
    driver.stream_synchronize(stream)
    assert (probe == 7).all()
    compute = Played(buffers, behind(tiles, 1))
    spoil(buffers)
    run.start(head, compute, stream).wait(20)
    compute.join()
    driver.stream_synchronize(stream)
    compute.result[head.rows] = head.bytes
    assert is_right(buffers, compute.result)
    driver.graph_begin(stream)
    launched: list[int] = []
    with pytest.raises(NotSupported, match="capturing a graph"):
        run.start(lambda: launched.append(1), compute, stream)
    driver.graph_destroy(driver.graph_end(stream))
    assert not launched  # it would be in the graph
    run.close()
    driver.stream_destroy(stream)


def test_a_head_that_can_not_be_issued(control: Control, device: Device, heaps: dict[str, Heap]) -> None:
    """Some of its copies may be under way: there is no other run over these buffers."""
    tiles = row_tiles(GEMM.send, 0, 2, slice_rows=2)
    buffers, driver, stream = buffers_of(GEMM, heaps), device.driver, device.driver.stream_create()
    run, compute = headed(device, tiles, buffers), Played(buffers, behind(tiles, 1))
    control.set(FAIL="cuMemcpyAsync:700:1")
    with pytest.raises(HardwareError, match="700"):
        run.start(lambda: None, compute, stream)
    control.set(FAIL="")
    assert compute.thread is None
    launched: list[int] = []
    with pytest.raises(DovetailError, match="an earlier run was not issued as a whole"):
        run.start(lambda: launched.append(1), compute, stream)
    assert not launched
    run.close()
    driver.stream_destroy(stream)


def test_the_next_head_waits_for_the_copies_of_the_one_before(device: Device, heaps: dict[str, Heap]) -> None:
    """They read what it computes anew, whatever stream it is launched into."""
    tiles = row_tiles(GEMM.send, 0, 2, slice_rows=2)
    buffers, driver = buffers_of(GEMM, heaps), device.driver
    streams = [driver.stream_create() for _ in range(2)]
    run, computes = headed(device, tiles, buffers), [Played(buffers, behind(tiles, 1), seed) for seed in range(2)]
    heads = [Head(device, heaps, buffers, tiles, stream) for stream in streams]
    spoil(buffers)
    first = run.start(heads[0], computes[0], streams[0])
    heads[1].open()
    # Where the flags of a run are is the same in the next one: the second computes when the first is over.
    computes[1].begin.clear()
    second = run.start(heads[1], computes[1], streams[1])
    time.sleep(0.02)
    assert bool((buffers.y[0][heads[0].rows] == POISON).all())
    heads[0].open()
    first.wait(20)
    computes[1].begin.set()
    second.wait(20)
    for compute in computes:
        compute.join()
    for stream in streams:
        driver.stream_synchronize(stream)
    computes[1].result[heads[1].rows] = heads[1].bytes
    assert is_right(buffers, computes[1].result)
    run.close()
    for stream in streams:
        driver.stream_destroy(stream)


class Fake:
    """A ticket."""

    def __init__(self, *, over: bool, error: Exception | None = None) -> None:
        self.over, self.error, self.waited = over, error, [] if over else None

    def wait(self, timeout_s: float | None = None) -> None:
        self.waited = [*(self.waited or []), timeout_s]
        if self.error:
            raise self.error

    def is_over(self) -> bool:
        return self.over


def test_two_tickets_are_one() -> None:
    for first, rest in itertools.product([True, False], repeat=2):
        assert Tickets(Fake(over=first), Fake(over=rest)).is_over() == (first and rest)  # type: ignore[arg-type]
    for places in ((0,), (1,), ()):
        fakes = [Fake(over=True, error=ValueError("no") if n in places else None) for n in range(2)]
        both = Tickets(*fakes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no") if places else contextlib.nullcontext():
            both.wait(5.0)
        assert fakes[0].waited == [5.0]
        assert fakes[1].waited is not None
        assert 4.0 < fakes[1].waited[0] <= 5.0  # of the same five seconds
    unbounded = [Fake(over=True) for _ in range(2)]
    Tickets(*unbounded).wait()  # type: ignore[arg-type]
    assert [fake.waited for fake in unbounded] == [[None], [None]]


def test_aCLOSED_head_isCLOSED_as_a_whole(
    device: Device, heaps: dict[str, Heap], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles = row_tiles(GEMM.send, 0, 2, slice_rows=2)
    buffers, closed = buffers_of(GEMM, heaps), []
    run = headed(device, tiles, buffers)
    close = LocalRunner.close
    monkeypatch.setattr(LocalRunner, "close", lambda self: (closed.append(self), close(self)))
    run.close()
    assert closed == [run.rest._runner, run._runner]


def test_behind_a_head_the_other_lane_is_first() -> None:
    """The lane of the first slice has its copy still to do."""
    tiles = row_tiles(GEMM.send, 0, 2, slice_rows=2)
    leaving, arriving, follows = GEMM.slices(tiles)
    head, rest = GEMM.headed(tiles, lanes=2)

    def moves(plan: Plan, queue: int) -> list[tuple[int, int]]:
        steps = [s for q in plan.queues if (q.rank, q.engine) == (0, queue) for s in q.steps]
        return [(int(s["src_offset"]), int(s["length"])) for s in steps if s["op"] in (Op.COPY, Op.COPY2D)]

    sent = [(piece.source_offset, piece.size_bytes) for piece in leaving if piece.destination != 0]
    assert moves(head, 0) == sent[:1]
    assert (moves(rest, 2), moves(rest, 0)) == (sent[1::2], sent[2::2])
    come = [(piece.source_offset, piece.size_bytes) for piece in arriving]
    early = sum(k == 0 for k in follows)
    assert sorted(moves(head, 1) + moves(head, 3)) == sorted(come[:early])
    assert (moves(rest, 3), moves(rest, 1)) == (come[early::2], come[early + 1 :: 2])


@pytest.mark.parametrize(("order", "slice_rows"), [("local", 2), ("remote", 1000)])
def test_a_first_slice_that_stays_or_is_alone(order: str, slice_rows: int) -> None:
    exchange = GEMM if order == "local" else replace(GEMM, send=(0, 3, 0, 0), receive=(0, 2, 7, 4))
    tiles = row_tiles(exchange.send, 0, 2, slice_rows=slice_rows, order=order)
    with pytest.raises(ValueError, match="must leave the GPU, and others follow it"):
        exchange.headed(tiles)
    with pytest.raises(ValueError, match="peers are in step with the GPU"):
        exchange.headed(tiles, pace=Pace.START)


@pytest.mark.parametrize("head", [False, True])
def test_what_can_not_be_launched_leaves_no_run(
    device: Device, heaps: dict[str, Heap], monkeypatch: pytest.MonkeyPatch, head: bool
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(dma, "run_of", lambda *_, **__: made.append(1))
    exchange = gemm_exchange((34, 8), (16, 8), torch.float32, (16, 18), (16, 10))
    with pytest.raises(ValueError, match="bogus"):
        DmaGemm(device, buffers_of(exchange, heaps), (34, 8), (16, 8), torch.float32, head=head, split="bogus")
    assert not made


def test_a_head_of_nothing(device: Device, heaps: dict[str, Heap]) -> None:
    exchange = gemm_exchange((0, 8), (16, 8), torch.float32, (0, 0), (0, 10))
    with pytest.raises(ValueError, match="must leave the GPU, and others follow it"):
        DmaGemm(device, buffers_of(exchange, heaps), (0, 8), (16, 8), torch.float32, head=True)
