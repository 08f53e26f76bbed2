"""Slices behind flags on the stand-in driver: a thread plays the computation; spoiled memory, lost waits, failures."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.errors import DovetailError, HardwareError, NotSupported, PlanError, Timeout
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.words import VALUE_BITS
from dovetail.ops.gpu import launch
from dovetail.ops.gpu.decomposed import Chunked, How, Unfused, kernel_rows
from dovetail.ops.gpu.dma import DmaEmbedding, DmaGemm, embedding_exchange, gemm_exchange
from dovetail.ops.gpu.exchange import Buffers, Exchange, Layout, Pace, slice_rows_of
from dovetail.ops.gpu.launch import GemmLaunch, SplitK, parts_of, resident
from dovetail.ops.gpu.place import Placing, _item, side_by_side
from dovetail.ops.gpu.released import Flags, SlicedRun
from dovetail.ops.gpu.tiles import Blocks, RowTiles, row_tiles
from dovetail.plan import Op, Plan, SignalKind, passes
from dovetail.plan.check import check

from .gpulib import Control, until
from .planlib import find, rejection, without
from .slicelib import (
    GEMM,
    PACKED,
    POISON,
    SHAPES,
    STRIDED,
    Fails,
    Played,
    buffers_of,
    control,
    device,
    heaps,
    is_right,
    run_some,
    spoil,
)

__all__ = ["control", "device", "heaps"]  # fixtures


def is_finished(buffers: Buffers) -> bool:
    """Every byte of the GPU's output [samples, all columns], put together another way."""
    e, y = buffers.exchange, buffers.y
    if not e.is_wide:
        return True
    assert buffers.wide is not None
    rows = e.receive[0]
    wanted = torch.cat([of[: rows * width].view(rows, width) for of, width in zip(y, e.row_bytes, strict=True)], 1)
    assert all(torch.equal(*pair) for pair in buffers.finished()) == torch.equal(
        buffers.wide[: wanted.numel()].view(wanted.shape), wanted
    )
    return torch.equal(buffers.wide[: wanted.numel()].view(wanted.shape), wanted)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pace", list(Pace))
@pytest.mark.parametrize(
    "how", [{}, {"lanes": 2}, {"lanes": 2, "words_on_device": True}], ids=["one lane", "two lanes", "words on device"]
)
@pytest.mark.parametrize("order", ["remote", "local"])
@SHAPES
def test_slices_arrive(
    device: Device, heaps: dict[str, Heap], exchange: Exchange, order: str, pace: Pace, how: dict[str, Any]
) -> None:
    tiles = row_tiles(exchange.send, 0, 2, slice_rows=2, order=order)
    plan = exchange.sliced(tiles, pace=pace, lanes=how.get("lanes", 1))
    check(passes.entry(plan))
    run_some(device, heaps, exchange, tiles, plan, **how)


class Case:
    """One exchange with slices of two rows, everything made."""

    def __init__(self, device: Device, heaps: dict[str, Heap], exchange: Exchange = GEMM, **how: Any) -> None:
        self.device, self.exchange = device, exchange
        self.tiles = row_tiles(exchange.send, 0, 2, slice_rows=2)
        self.plan: Plan = how.pop("plan", None) or exchange.sliced(self.tiles, pace=how.pop("pace", Pace.STEP))
        self.buffers = buffers_of(exchange, heaps)
        self.stream = device.driver.stream_create()
        self.run = SlicedRun(device, self.plan, self.buffers.of(self.plan), host_ranks=exchange.peers, **how)
        spoil(self.buffers)

    def played(self, seed: int = 0, **how: Any) -> Played:
        return Played(self.buffers, self.tiles, seed, **how)

    def arrived(self) -> list[bool]:
        """Has all of it, of each pair?"""
        return [bool((there != POISON).all()) for _, there in self.buffers.crossed()]

    @property
    def untouched(self) -> bool:
        return all(bool((there == POISON).all()) for _, there in self.buffers.crossed() if there.numel())

    def __enter__(self) -> Case:
        return self

    def __exit__(self, *_: object) -> None:
        self.run.close()
        self.run.close()
        self.device.driver.stream_destroy(self.stream)


def test_copies_begin_while_it_computes(device: Device, heaps: dict[str, Heap]) -> None:
    """The first peer has its rows while the last slice of another is still to come."""
    with Case(device, heaps) as case:
        compute = case.played(shuffled=False)
        slow, last = threading.Event(), len(case.tiles.slices) - 1

        class Slow(Played):
            def _run(self, flags: Flags) -> None:
                whole, self.leaving = self.leaving, self.leaving[:last]
                super()._run(flags)
                assert slow.wait(20)
                self.leaving = whole
                rows = slice(whole[last][0] * 16, whole[last][1] * 16)
                self.buffers.y[0][rows] = self.result[rows]
                ctypes.c_uint64.from_address(flags.words[last]).value = flags.value

        compute = Slow(case.buffers, case.tiles, 1, shuffled=False)
        ticket = case.run.start(compute, case.stream)
        until(lambda: case.arrived() == [True] * 6)  # the last slice stays on the GPU
        assert not ticket.is_over()
        slow.set()
        ticket.wait(20)
        compute.join()
        assert is_right(case.buffers, compute.result)


def test_the_stream_goes_on_behind_both(device: Device, heaps: dict[str, Heap]) -> None:
    probe = heaps["device"].empty((8,), torch.uint8)
    probe.zero_()
    with Case(device, heaps) as case:
        compute = case.played()
        compute.begin.clear()
        ticket = case.run.start(compute, case.stream)
        device.driver.fill(probe.data_ptr(), 7, 8, case.stream)
        time.sleep(0.05)
        assert not probe.any()
        assert case.untouched  # nothing moves before a flag, what the peers send is in step
        compute.begin.set()
        device.driver.stream_synchronize(case.stream)
        assert ticket.is_over()
        assert (probe == 7).all()
        compute.join()
        assert is_right(case.buffers, compute.result)


def test_peers_that_are_ready_come_at_once(device: Device, heaps: dict[str, Heap]) -> None:
    with Case(device, heaps, pace=Pace.START) as case:
        compute = case.played()
        compute.begin.clear()
        ticket = case.run.start(compute, case.stream)
        until(lambda: case.arrived()[1::2] == [True] * 3)
        assert not any(done and there.numel() for done, (_, there) in zip(
            case.arrived()[::2], list(case.buffers.crossed())[::2], strict=True))  # fmt: skip
        compute.begin.set()
        ticket.wait(20)
        compute.join()


@SHAPES
def test_a_lost_wait_is_found(device: Device, heaps: dict[str, Heap], exchange: Exchange, monkeypatch: Any) -> None:
    """By the checker, and, where nobody checks, by what arrives."""
    plan = exchange.sliced(row_tiles(exchange.send, 0, 2, slice_rows=2))
    flags = [
        at for at in find(plan, Op.WAIT)
        if plan.signals[plan.queues[at[0]].steps["signal"][at[1]]].kind is SignalKind.IMPORTED
    ]  # fmt: skip
    sends = [at for at in flags if plan.queues[at[0]].steps["op"][at[1] + 1] != Op.WAIT][:3]
    for at in flags:
        assert rejection(passes.entry(without(plan, *at))) is not None
    monkeypatch.setenv("DOVETAIL_CHECK", "1")
    with pytest.raises(PlanError):
        Case(device, heaps, exchange, plan=without(plan, *sends[0]))
    monkeypatch.setenv("DOVETAIL_CHECK", "0")
    with Case(device, heaps, exchange, plan=without(plan, *sends[0])) as case:
        compute = case.played()
        compute.begin.clear()
        ticket = case.run.start(compute, case.stream)
        time.sleep(0.05)
        compute.begin.set()
        ticket.wait(20)
        compute.join()
        assert not is_right(case.buffers, compute.result)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_launch_that_fails_leaves_nothing_behind(control: Control, device: Device, heaps: dict[str, Heap]) -> None:
    with Case(device, heaps, timeout_s=20) as case:
        bases = []
        for seed in range(3):
            with pytest.raises(RuntimeError, match="no kernel image"):
                case.run.start(Fails(case.buffers, case.tiles), case.stream)
            assert control.parked() == 0
            assert case.untouched
            compute = case.played(seed)
            compute.begin.clear()
            ticket = case.run.start(compute, case.stream)
            bases.append(ticket.base >> VALUE_BITS)
            time.sleep(0.02)
            assert case.untouched  # flags of a failed launch do not release the next run
            compute.begin.set()
            ticket.wait(20)
            compute.join()
            assert is_right(case.buffers, compute.result)
            spoil(case.buffers)
        assert bases == [2, 4, 6]


def test_copies_that_can_not_be_issued(control: Control, device: Device, heaps: dict[str, Heap]) -> None:
    """What was issued is opened, so that streams drain; there is no other run over these buffers."""
    with Case(device, heaps, timeout_s=20) as case:
        compute = case.played()
        compute.begin.clear()
        control.set(FAIL="cuMemcpyAsync:700:3")
        with pytest.raises(HardwareError, match="700"):
            case.run.start(compute, case.stream)
        control.set(FAIL="")
        until(lambda: control.parked() == 0)
        compute.begin.set()
        compute.join()
        with pytest.raises(DovetailError, match="an earlier run was not issued as a whole"):
            case.run.start(compute, case.stream)


def test_a_flag_that_nobody_raises(control: Control, device: Device, heaps: dict[str, Heap]) -> None:
    with Case(device, heaps, timeout_s=0.3) as case:
        compute = case.played(shuffled=False)
        compute.leaving = compute.leaving[:-1]
        compute.launch = lambda flags, stream: Played.launch(  # type: ignore[method-assign]
            compute, Flags(flags.addresses[:-1], flags.words[:-1], flags.base, flags.value), stream
        )
        ticket = case.run.start(compute, case.stream)
        last = len(case.tiles.slices) - 1
        with pytest.raises(Timeout, match=f"signal 'slice {last}' was not raised"):
            ticket.wait(20)
        compute.join()
        device.driver.stream_synchronize(case.stream)
        assert control.parked() == 0


def test_a_capturing_stream_is_refused(device: Device, heaps: dict[str, Heap]) -> None:
    with Case(device, heaps) as case:
        device.driver.graph_begin(case.stream)
        with pytest.raises(NotSupported, match="is capturing a graph"):
            case.run.start(case.played(), case.stream)
        device.driver.graph_destroy(device.driver.graph_end(case.stream))


def test_wrong_buffers_are_refused_at_once(device: Device, heaps: dict[str, Heap]) -> None:
    plan = GEMM.sliced(row_tiles(GEMM.send, 0, 2, slice_rows=2))
    given = buffers_of(GEMM, heaps).of(plan)
    given.pop((1, "output"))
    with pytest.raises(ValueError, match="missing: .*'output'"):
        SlicedRun(device, plan, given, host_ranks=GEMM.peers)


# --- the rivals ------------------------------------------------------------------------------------------------------


class InStream:
    """An operator whose rows come late: copies inside the device, in the order of a stream."""

    def __init__(self, device: Device, buffers: Buffers, heaps: dict[str, Heap], stream: int) -> None:
        self.device, self.buffers, self.stream = device, buffers, stream
        self.result = heaps["device"].empty((buffers.y[0].numel(),), torch.uint8)
        self.fresh(0)

    def fresh(self, seed: int) -> None:
        self.result.copy_(torch.randint(0, POISON, self.result.shape, generator=torch.Generator().manual_seed(seed)))

    def __call__(self, begin: int, end: int) -> torch.Tensor:
        width = self.buffers.exchange.row_bytes[0]
        rows = slice(begin * width, end * width)
        to, of = self.buffers.y[0][rows], self.result[rows]
        if to.numel():
            self.device.driver.copy(to.data_ptr(), of.data_ptr(), to.numel(), self.stream)
        return to


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("form", ["unfused", "unfused in slices", *How])
@SHAPES
def test_the_rivals_move_the_same(
    control: Control, device: Device, heaps: dict[str, Heap], exchange: Exchange, form: str, lanes: int
) -> None:
    control.set(DELAY_US=200)
    buffers, stream = buffers_of(exchange, heaps), device.driver.stream_create()
    rows = InStream(device, buffers, heaps, stream)
    made: Unfused | Chunked
    if form.startswith("unfused"):
        made = Unfused(device, buffers, lanes=lanes, slice_rows=2 if form != "unfused" else None)
        check(passes.entry(made.plan))
    else:
        made = Chunked(device, buffers, 2, how=form, lanes=lanes)
    for seed in range(4):
        rows.fresh(seed)
        spoil(buffers)
        ticket = made.start(rows, stream)
        device.driver.stream_synchronize(stream)
        if ticket is not None:
            ticket.wait(20)
        assert is_right(buffers, rows.result), seed
        assert is_finished(buffers), seed
    made.close()
    made.close()
    device.driver.stream_destroy(stream)


def test_whole_rows_take_lanes_in_turn() -> None:
    """One copy for each peer and direction, or one for each slice; the same bytes in every form."""
    moved = []
    for how in ({}, {"lanes": 2}, {"slice_rows": 2}, {"lanes": 2, "slice_rows": 2}):
        plan = GEMM.whole(**how)
        queues = {q.engine: int((q.steps["op"] == Op.COPY).sum()) for q in plan.queues if q.rank == 0}
        moved.append(queues)
        steps = np.concatenate([q.steps[q.steps["op"] == Op.COPY] for q in plan.queues])
        assert sorted(steps["length"].tolist()) == (
            sorted(n * 16 for n in (3, 9, 2, 7, 4)) if "slice_rows" not in how
            else sorted(n * 16 for n in (2, 1, 2, 2, 2, 2, 1, 2, 2, 2, 2, 1, 2, 2))
        )  # fmt: skip
    assert moved == [{0: 2, 1: 3}, {0: 1, 1: 2, 2: 1, 3: 1}, {0: 7, 1: 7}, {0: 4, 1: 4, 2: 3, 3: 3}]


def test_a_kernel_is_launched_for_each_slice() -> None:
    """With tables that hold the tiles of one slice only, whose number is 0."""
    tiles = row_tiles((5, 3, 4), 0, 2, slice_rows=3)
    y = torch.zeros(12, 2)
    seen = []

    def make(part: RowTiles) -> Callable[[], None]:
        assert part.slice_tiles.tolist() == [len(part.tiles)]
        assert set(part.tiles[:, 4]) == {0}
        assert part.segments.tolist() == [[part.slices[0, 2], 0, len(part.tiles)]]
        return lambda: seen.append(part.tiles[:, :2].tolist())

    compute = kernel_rows(tiles, make, y)
    for first, end in tiles.slices[:, :2].tolist():
        rows = compute(first, end)
        assert rows.data_ptr() == y[first:].data_ptr()
        assert len(rows) == end - first
        assert [n for a, b in seen[-1] for n in range(a, b)] == list(range(first, end))
    assert tiles.slice_tiles.tolist() == [2, 2, 1, 2, 1]  # the table itself is as it was


def test_a_chunk_needs_its_event(device: Device, heaps: dict[str, Heap], monkeypatch: Any) -> None:
    """The operator stands behind a gate: without events the copies run ahead of it."""
    buffers, stream = buffers_of(GEMM, heaps), device.driver.stream_create()
    rows, made = InStream(device, buffers, heaps, stream), Chunked(device, buffers, 2)
    spoil(buffers)
    gate, word = device.pinned(64), np.zeros(1, WORD)
    word["kind"], word["address"], word["value"] = WAIT, gate.address, 1
    device.driver.stream_words(word, stream)
    monkeypatch.setattr(device.driver, "stream_wait_event", lambda stream, event: None)
    made.start(rows, stream)
    for each in made._streams:
        device.driver.stream_synchronize(each)
    gate.array.view(np.uint64)[0] = 1
    device.driver.stream_synchronize(stream)
    assert not is_right(buffers, rows.result)
    made.close()


# --- packed rows, put side by side ------------------------------------------------------------------------------------


class Bags:
    """An embedding whose kernel is a copy in the stream, or a thread that is told when to raise the flags."""

    def __init__(
        self, device: Device, heaps: dict[str, Heap], exchange: Exchange, monkeypatch: pytest.MonkeyPatch, **how: Any
    ) -> None:
        self.device, self.buffers, self.stream = device, buffers_of(exchange, heaps), device.driver.stream_create()
        self.result = heaps["device"].empty((self.buffers.y[0].numel(),), torch.uint8)
        self.begin: threading.Event | None = None
        self.threads: list[threading.Thread] = []
        tables = exchange.row_bytes[0] // 4
        self.values = torch.zeros(1, dtype=torch.int64)
        self.offsets = torch.zeros(tables * sum(exchange.send) + 1, dtype=torch.int64)
        weights = [torch.zeros(1, 1) for _ in range(tables)]
        self.made = DmaEmbedding(device, self.buffers, weights, slice_rows=2, timeout_s=20, **how)
        monkeypatch.setattr(
            launch.BagLaunch, "__call__", lambda _, values, offsets, y, flags, value: self.kernel(flags, value)
        )

    def kernel(self, flags: torch.Tensor, value: int) -> None:
        y, driver = self.buffers.y[0], self.device.driver
        driver.copy(y.data_ptr(), self.result.data_ptr(), y.numel(), self.stream)
        word = np.zeros(len(flags), WORD)
        word["kind"], word["value"], word["address"] = WRITE, value, flags.numpy()
        if self.begin is None:
            driver.stream_words(word, self.stream)
            return
        raised, begin = flags.tolist(), self.begin

        def late() -> None:
            assert begin.wait(20)
            for address in raised:
                ctypes.c_uint64.from_address(address).value = value

        self.threads.append(threading.Thread(target=late))
        self.threads[-1].start()

    def start(self, seed: int = 0, spoiled: bool = True) -> None:
        self.result.copy_(torch.randint(0, POISON, self.result.shape, generator=torch.Generator().manual_seed(seed)))
        if spoiled:
            spoil(self.buffers)
        self.made.start(self.values, self.offsets, self.stream)

    def close(self) -> None:
        for thread in self.threads:
            thread.join(20)
        self.made.close()
        self.made.close()


@pytest.fixture
def bags(device: Device, heaps: dict[str, Heap], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bags]]:
    made: list[Bags] = []

    def make(exchange: Exchange = PACKED, **how: Any) -> Bags:
        made.append(Bags(device, heaps, exchange, monkeypatch, **how))
        return made[-1]

    yield make
    for each in made:
        if each.begin is not None:
            each.begin.set()
        each.close()


@pytest.mark.parametrize("order", ["remote", "local"])
@pytest.mark.parametrize(
    "exchange",
    [
        PACKED,
        STRIDED,
        replace(PACKED, send=(7, 9, 1, 4), receive=(7,) * 4, row_bytes=(12, 4, 4, 20)),
        replace(PACKED, row_bytes=(4, 8, 0, 4)),
        replace(PACKED, send=(0, 4, 5, 3), receive=(0,) * 4),
        replace(PACKED, send=(5, 0, 0, 0), receive=(5,) * 4),
        replace(PACKED, send=(5,), receive=(5,), row_bytes=(8,)),
    ],
    ids=["zero split", "strided", "ragged", "a rank without tables", "no samples here", "all stay", "alone"],
)
def test_columns_are_finished(
    control: Control, device: Device, bags: Callable[..., Bags], exchange: Exchange, order: str
) -> None:
    """When the stream is done, nobody else asked: copies are late, memory is spoiled, data is new."""
    control.set(DELAY_US=200)
    case = bags(exchange, order=order)
    for seed in range(3):
        case.start(seed)
        device.driver.stream_synchronize(case.stream)
        assert is_right(case.buffers, case.result), seed
        assert is_finished(case.buffers), seed


def test_own_columns_wait_for_nobody(device: Device, bags: Callable[..., Bags]) -> None:
    """They are in place while the peers' rows are still to come, and those are not placed before they came."""
    case = bags()
    case.begin = threading.Event()
    case.start()
    own, others = case.buffers.columns(0), [case.buffers.columns(r) for r in (1, 2, 3)]
    until(lambda: not bool((own == POISON).any()))
    time.sleep(0.02)
    untouched = all(bool((there == POISON).all()) for there in others)
    case.begin.set()
    assert untouched
    device.driver.stream_synchronize(case.stream)
    assert is_finished(case.buffers)


def test_placing_needs_the_last_copy(device: Device, bags: Callable[..., Bags], monkeypatch: Any) -> None:
    """The same without the stream's wait for the copies: a lost wait shows."""
    case = bags()
    case.begin = threading.Event()
    wait = device.driver.stream_wait_event
    monkeypatch.setattr(
        device.driver, "stream_wait_event", lambda stream, event: stream == case.stream or wait(stream, event)
    )
    case.start()
    device.driver.stream_synchronize(case.stream)
    case.begin.set()
    until(lambda: is_right(case.buffers, case.result))
    assert not is_finished(case.buffers)


def test_the_next_run_waits_for_placing(device: Device, bags: Callable[..., Bags], monkeypatch: Any) -> None:
    """In another stream, too: what arrived is not written over before it is in its place."""
    case, first = bags(), 0
    gate, word = device.pinned(64), np.zeros(1, WORD)
    word["kind"], word["address"], word["value"] = WAIT, gate.address, 1
    move = Placing._move

    def gated(self: Placing, pieces: Any, to: torch.Tensor, stream: int) -> None:
        if len(pieces) > 1 and stream == first:
            device.driver.stream_words(word, stream)
        move(self, pieces, to, stream)

    first = case.stream
    monkeypatch.setattr(Placing, "_move", gated)
    case.start(1)
    until(lambda: is_right(case.buffers, case.result))
    landed = case.buffers.output[0].clone()
    for peer in case.buffers.y[1:]:
        peer.copy_(torch.randint(0, POISON, peer.shape, dtype=torch.uint8))
    case.stream = device.driver.stream_create()
    case.start(1, spoiled=False)
    time.sleep(0.05)
    kept = torch.equal(case.buffers.output[0], landed)
    gate.array.view(np.uint64)[0] = 1  # before anything can fail: streams stand behind it
    assert kept
    device.driver.stream_synchronize(case.stream)
    assert is_right(case.buffers, case.result)
    assert is_finished(case.buffers)
    device.driver.stream_synchronize(first)
    device.driver.stream_destroy(first)


@pytest.mark.parametrize(
    ("begin", "widths", "item"),
    [(0, (48,), torch.int64), (8, (8, 16), torch.int64), (4, (8, 4), torch.int32), (2, (2, 4), torch.int16),
     (1, (3, 4), torch.uint8)],
)  # fmt: skip
def test_one_launch_for_all_pieces(begin: int, widths: tuple[int, ...], item: torch.dtype) -> None:
    """As on a GPU, by torch: beginnings and widths decide what an item is, and nothing beside it is touched."""
    whole = torch.full((7, 48), POISON, dtype=torch.uint8)
    to = whole.narrow(1, begin, sum(widths))
    pieces = [torch.randint(0, POISON, (7, width), dtype=torch.uint8) for width in widths]
    assert _item([to, *pieces]) is item
    side_by_side(pieces, to)
    assert torch.equal(to, torch.cat(pieces, 1))
    assert int((whole == POISON).sum()) == 7 * (48 - sum(widths))


# --- operators: all but the kernels -----------------------------------------------------------------------------------


def test_a_product_is_held_against_what_was_planned(device: Device, heaps: dict[str, Heap]) -> None:
    exchange = gemm_exchange((10, 3), (4, 3), torch.float32, (4, 6), (4, 5))
    buffers = buffers_of(exchange, heaps)
    made = DmaGemm(device, buffers, (10, 3), (4, 3), torch.float32, slice_rows=3)
    assert made.tiles.slices[:, :3].tolist() == [[4, 7, 1], [7, 10, 1], [0, 3, 0], [3, 4, 0]]
    assert made.y.shape == (10, 4)
    x, w = torch.randn(10, 3), torch.randn(4, 3)
    for wrong in ((x[:9], w), (x, w.double()), (torch.randn(3, 10).t(), w)):
        with pytest.raises(ValueError, match=r"this one was made for \((10|4), 3\) of torch.float32, contiguous"):
            made.start(*wrong, 0)
    with pytest.raises(ValueError, match="all of M rows are sent"):
        gemm_exchange((10, 3), (4, 3), torch.float32, (4, 5), (4, 5))
    made.close()


def test_which_products_are_split(device: Device, heaps: dict[str, Heap]) -> None:
    blocks = Blocks(height=2, width=4, depth=16, warps=4, stages=1)
    for k, n, split, expected in (
        (112, 4, SplitK.HALVES, (1,) * 5),  # halves of K would be too short
        (128, 4, SplitK.HALVES, (2,) * 5),
        (128, 4, "none", (1,) * 5),
        (256, 40000, SplitK.HALVES, (1,) * 5),  # it would take much memory
    ):
        exchange = gemm_exchange((10, k), (n, k), torch.float32, (4, 6), (4, 5))
        made = DmaGemm(
            device, buffers_of(exchange, heaps), (10, k), (n, k), torch.float32, slice_rows=3, blocks=blocks,
            split=split,
        )  # fmt: skip
        assert made.kernel.parts == expected, (k, n, split)
        made.close()
    assert parts_of("head", 20, 16, 132, 100) == (2,) * 4 + (1,) * 16
    assert parts_of("tail", 20, 16, 132, 100) == (1,) * 16 + (2,) * 4
    assert parts_of("tail", 20, 16, 132, 7) == (1,) * 20
    tiles = row_tiles((4, 6), 0, 2)
    for wrong in ((1, 1), (2,) * 6, (1, 1, 1, 1, 0), (9, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match=r"parts .* for 5 row tiles and 8 steps of K"):
            GemmLaunch(tiles, 4, 128, 4, torch.device("cpu"), blocks=blocks, parts=wrong)


def test_bags_are_held_against_what_was_planned(device: Device, heaps: dict[str, Heap]) -> None:
    exchange = embedding_exchange([2, 3], 4, torch.float32, [5, 6])
    assert exchange.layout is Layout.PACKED
    assert (exchange.output_bytes(0), exchange.output_bytes(1), exchange.wide_bytes) == (400, 6 * 32, 400)
    assert (exchange.row_bytes, exchange.receive, exchange.out_bytes) == ((32, 48), (5, 5), 6 * 32)
    buffers = buffers_of(exchange, heaps)
    weights = [torch.randn(7, 4), torch.randn(9, 4)]
    made = DmaEmbedding(device, buffers, weights, slice_rows=4)
    assert made.y.shape == (11, 2, 4)
    with pytest.raises(ValueError, match="22 offsets for 2 tables and 11 bags of each: one for each bag"):
        made.start(torch.zeros(3, dtype=torch.int64), torch.zeros(22, dtype=torch.int64), 0)
    made.kernel.check()
    made.kernel._error.fill_(3)
    with pytest.raises(IndexError, match=r"values\[2\] names a row"):
        made.kernel.check()
    made.kernel.check()
    made.close()
    for wrong, message in (
        ({"mode": "max"}, "mode 'max'"), ({"weights": weights[:1]}, "1 tables of dim 4"),
        ({"weights": [weights[0], torch.randn(2, 3)]}, "one dim and dtype"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            DmaEmbedding(device, buffers, **({"weights": weights} | wrong))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"send": (1, 2), "receive": (1,)}, "name all ranks"),
        ({"send": (1, 2), "receive": (2, 2)}, "what stays is in both"),
        ({"send": (1, -2), "receive": (1, 2)}, "nothing is negative"),
        ({"row_bytes": (4, 8)}, "of one width"),
        ({"layout": Layout.STRIDED, "receive": (1, 3)}, "as many from every rank"),
        ({"layout": Layout.PACKED, "receive": (1, 3)}, "as many from every rank"),
    ],
)
def test_exchanges_that_can_not_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exchange(**({"send": (1, 2), "receive": (1, 2), "row_bytes": (4, 4)} | given))


def test_what_peers_send_is_in_step() -> None:
    """As many slices: the n-th with the n-th, the rank before the GPU first; fewer or more: spread evenly."""
    tiles = row_tiles((2, 4, 4), 0, 2, slice_rows=2)
    even = Exchange(send=(2, 4, 4), receive=(2, 4, 4), row_bytes=(8,) * 3).slices(tiles)
    assert [s.source for s in even.arriving] == [2, 2, 1, 1]
    assert even.follows == [0, 1, 2, 3]
    assert Exchange(send=(2, 4, 4), receive=(2, 2, 2), row_bytes=(8,) * 3).slices(tiles).follows == [1, 3]
    more = Exchange(send=(2, 4, 4), receive=(2, 8, 8), row_bytes=(8,) * 3).slices(tiles)
    assert more.follows == [0, 0, 1, 1, 2, 2, 3, 3]
    assert more.leaving[4].destination == 0


def test_slices_are_whole_tiles_of_megabytes() -> None:
    assert slice_rows_of(12288, 16384, 128) == 1024
    assert slice_rows_of(100, 16384, 128) == 128
    assert slice_rows_of(1 << 20, 1 << 10, 8, num_slices=1 << 12) == 2560
    assert slice_rows_of(0, 0, 4) % 4 == 0


def test_programs_that_fit() -> None:
    assert [resident(regs, warps) for regs, warps in ((0, 4), (32, 4), (96, 4), (255, 8), (20, 1))] == [1, 16, 5, 1, 32]
    assert [resident(32, 4, shared) for shared in (0, 20 << 10, 160 << 10, 200 << 10)] == [16, 7, 1, 1]
