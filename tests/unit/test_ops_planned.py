"""Fused operators whose slices are cut by a model: what is sent, what comes, and what is taken by default."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.heap import Heap
from dovetail.ops.gpu import dma, launch
from dovetail.ops.gpu.cut import Rates, planned_cut
from dovetail.ops.gpu.dma import DmaGemm, gemm_exchange
from dovetail.ops.gpu.exchange import Exchange, Pace
from dovetail.ops.gpu.launch import SplitK
from dovetail.ops.gpu.released import Headed
from dovetail.ops.gpu.tiles import LARGE, SMALL, Blocks, row_tiles, slice_blocks
from dovetail.plan import passes
from dovetail.plan.check import check

from .slicelib import SHAPES, buffers_of, control, device, heaps, run_some

__all__ = ["control", "device", "heaps"]  # fixtures


@pytest.mark.parametrize("pace", list(Pace))
@SHAPES
def test_planned_slices_arrive(device: Device, heaps: dict[str, Heap], exchange: Exchange, pace: Pace) -> None:
    rates = Rates(wave_us=3, wave_rows=2, row_us=1, copy_us=0.5, flag_us=0)
    cuts = planned_cut(exchange.send, exchange.served, 1, rates).pieces
    tiles = row_tiles(exchange.send, 0, 1, cuts=cuts)
    assert len(cuts) >= sum(rows > 0 for rows in exchange.send)
    assert [(to, end - first) for first, end, to, *_ in tiles.slices.tolist()] == [(to, e - b) for to, b, e in cuts]
    plan = exchange.sliced(tiles, pace=pace, lanes=2)
    check(passes.entry(plan))
    run_some(device, heaps, exchange, tiles, plan, lanes=2)


@given(st.data())
def test_what_peers_send_is_cut_at_the_same_parts(data: st.DataObject) -> None:
    """All of it once; a piece comes with the first slice by which as large a part of the GPU's rows has left."""
    ranks = data.draw(st.integers(2, 4))
    rows = st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks)
    send = data.draw(rows.filter(lambda r: sum(r[1:]) > 0))
    receive = [send[0], *(data.draw(rows)[1:] if data.draw(st.booleans()) else send[:0:-1])]
    cuts = []
    for to in (*range(1, ranks), 0):
        inside = sorted(data.draw(st.sets(st.integers(1, max(1, send[to] - 1)), max_size=3))) if send[to] > 1 else []
        ends = [0, *inside, send[to]] if send[to] else []
        cuts += [(to, begin, end) for begin, end in itertools.pairwise(ends)]
    exchange = Exchange(send=tuple(send), receive=tuple(receive), row_bytes=(4,) * ranks)
    leaving, arriving, follows = exchange.slices(row_tiles(send, 0, 1, cuts=cuts))
    assert len(follows) == len(arriving)
    done = np.cumsum([piece.rows for piece in leaving if piece.destination])
    came, total = 0, sum(receive[1:])
    for piece, number in zip(arriving, follows, strict=True):
        came += piece.rows
        assert done[number] * total >= came * done[-1]
        assert number == 0 or done[number - 1] * total < came * done[-1]
    for source in range(1, ranks):
        mine = [(piece.source_offset, piece.size_bytes) for piece in arriving if piece.source == source]
        assert sum(size for _, size in mine) == receive[source] * 4
        assert mine == sorted(mine)
        assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(mine))
    if send[1:] == receive[:0:-1]:
        assert [piece.rows for piece in arriving] == [piece.rows for piece in leaving if piece.destination]
    ends = set(itertools.accumulate(piece.rows for piece in arriving))  # total is less than 256: none is too near
    sources = set(itertools.accumulate(receive[source] for source in range(ranks - 1, 0, -1)))
    assert ends | {0} == sources | {0} | {int(number) * total // int(done[-1]) for number in done}


def test_a_product_is_cut_by_a_model_unless_slices_are_given(device: Device, heaps: dict[str, Heap]) -> None:
    exchange = gemm_exchange((1024, 64), (16, 64), torch.bfloat16, (256, 384, 384), (256, 384, 384))
    shapes = (1024, 64), (16, 64), torch.bfloat16
    rates = Rates(wave_us=50, wave_rows=128, row_us=0.6, copy_us=1, flag_us=1)

    def cut(**how: Any) -> tuple[list[int], bool]:
        made = DmaGemm(device, buffers_of(exchange, heaps), *shapes, **how)
        made.close()
        assert made.tiles.is_given == ("slice_rows" not in how and how.get("order") != "local")
        return (made.tiles.slices[:, 1] - made.tiles.slices[:, 0]).tolist(), isinstance(made.run, Headed)

    assert cut(rates=rates, head=False) == ([128, 128, 128, 256, 128, 256], False)
    assert cut(rates=replace(rates, row_us=30), head=False) == ([128, 256, 384, 256], False)
    assert cut(rates=replace(rates, row_us=0.1), head=False) == ([384, 384, 256], False)
    assert cut(rates=rates, head=True)[1]
    assert cut(rates=rates, pace=Pace.START)[1] is False
    assert cut(slice_rows=384) == ([384, 384, 256], False)
    assert sum(cut(order="local")[0]) == 1024
    assert sum(cut()[0]) == 1024
    with pytest.raises(ValueError, match="peers are in step with the GPU"):
        cut(rates=rates, pace=Pace.START, head=True)


def test_no_sliver_is_cut_off_what_peers_send() -> None:
    """Rows of a source end almost where as large a part has left: one cut, not two that are a row apart."""
    exchange = Exchange(send=(0, 513, 511), receive=(0, 512, 512), row_bytes=(4,) * 3)
    tiles = row_tiles(exchange.send, 0, 1, cuts=[(1, 0, 513), (2, 0, 511)])
    assert [piece.rows for piece in exchange.slices(tiles).arriving] == [512, 512]
    tiles = row_tiles(exchange.send, 0, 1, cuts=[(1, 0, 500), (1, 500, 513), (2, 0, 511)])
    assert [piece.rows for piece in exchange.slices(tiles).arriving] == [500, 12, 512]


@pytest.mark.parametrize("small_is_sooner", [False, True])
def test_the_tile_with_which_all_is_over_sooner_is_taken(
    device: Device, heaps: dict[str, Heap], monkeypatch: pytest.MonkeyPatch, small_is_sooner: bool
) -> None:
    exchange = gemm_exchange((1024, 64), (16, 64), torch.bfloat16, (256, 384, 384), (256, 384, 384))

    def rates(blocks: Blocks, *_: Any, **__: Any) -> Rates:
        is_small = blocks.width == SMALL.width
        return Rates(wave_us=10 if is_small == small_is_sooner else 90, wave_rows=128, row_us=0.1)

    monkeypatch.setattr(dma, "slice_blocks", lambda *_, **__: [LARGE, SMALL])
    monkeypatch.setattr(dma, "gemm_rates", rates)
    made = DmaGemm(device, buffers_of(exchange, heaps), (1024, 64), (16, 64), torch.bfloat16)
    assert made.blocks == (SMALL if small_is_sooner else LARGE)
    assert made.kernel.split is (SplitK.NONE if small_is_sooner else SplitK.TAIL)
    made.close()


@pytest.mark.parametrize(("dtype", "is_headed"), [(torch.bfloat16, True), (torch.float32, False)])
def test_a_first_slice_by_event_if_that_is_sooner(
    device: Device, heaps: dict[str, Heap], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_headed: bool
) -> None:
    """Not of its own accord where torch may round otherwise than our kernel; whoever asks for it gets it."""
    exchange = gemm_exchange((1024, 64), (16, 64), dtype, (256, 384, 384), (256, 384, 384))
    monkeypatch.setattr(dma, "gemm_head_us", lambda rows, *_: 1.0)
    rates = Rates(wave_us=500, wave_rows=512, row_us=1)
    for head, expected in ((None, is_headed), (False, False), (True, True)):
        made = DmaGemm(
            device, buffers_of(exchange, heaps), (1024, 64), (16, 64), dtype, rates=rates, head=head
        )  # fmt: skip
        assert isinstance(made.run, Headed) == expected
        made.close()


def test_which_gpus_load_by_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.boxes_on(torch.device("cpu"))
    for capability, expected in (((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert launch.boxes_on(torch.device("cuda:0")) == expected
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not launch.boxes_on(torch.device("cuda:0"))
    few = (2560, 4096, 4096, 2, 132)
    assert [b.width for b in slice_blocks(*few, boxes=True)] == [256, 128]
    assert [b.width for b in slice_blocks(*few, boxes=False)] == [256]
