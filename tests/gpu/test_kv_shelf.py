"""Shelves on a real GPU: values, and kernels that are slow on purpose. CI tests the same order on a stand-in driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dovetail.hw.gpu.device import Device
from dovetail.kv import Shelf
from dovetail.kv.order import GpuOrder

SIZE = 1 << 20
SLEEP_CYCLES = 100_000_000  # some 50 ms


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    torch.cuda.init()
    with Device("cuda") as gpu:
        yield gpu


def numbered(number: int) -> dict[Any, dict[str, torch.Tensor]]:
    return {n: {"w": torch.full((SIZE,), float(n))} for n in range(number)}


@pytest.mark.parametrize("path", ["dma-2d", "dma-batch", "dma-loop", "auto"])
@pytest.mark.parametrize("own_stream", [False, True], ids=["default stream", "own stream"])
def test_a_walk_that_stores(path: str, own_stream: bool, device: Device) -> None:
    items = numbered(7)
    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    with torch.cuda.stream(stream), Shelf.on_gpu(device, items, slots=3, path=path) as shelf:
        for turn in range(1, 4):
            for loan in shelf.walk(items, store=True):
                loan.tensors["w"] += loan.tensors["w"] + turn
        for n in items:
            assert (shelf.read(n)["w"] == 8 * n + 4 + 4 + 3).all()


def test_a_set(device: Device) -> None:
    with Shelf.on_gpu(device, numbered(16), slots=6) as shelf:
        for chosen in ([1, 2, 3, 9], [2, 3, 4, 5, 6, 7], [15, 0], [9, 1]):
            loans = shelf.fetch_many(chosen)
            for n, loan in loans.items():
                loan.join()
                assert (loan.tensors["w"] == n).all()
                loan.done()
        assert shelf.stats().hits >= 2


def slow_reader(shelf: Shelf) -> bool:
    side = torch.cuda.Stream()
    loan = shelf.fetch(1)
    loan.join(side.cuda_stream)
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        seen = loan.tensors["w"].clone()
    loan.done(side.cuda_stream)
    second = shelf.fetch(2)  # the same slot
    second.join()
    then = second.tensors["w"].clone()
    second.done()
    torch.cuda.synchronize()
    return bool((seen == 1).all() and (then == 2).all())


def slow_store(shelf: Shelf) -> bool:
    loan = shelf.fetch(1)
    loan.join()
    loan.tensors["w"].fill_(99)
    torch.cuda._sleep(SLEEP_CYCLES)
    loan.store()
    shelf.fetch(2).done()
    back = shelf.fetch(1)
    back.join()
    seen = back.tensors["w"].clone()
    back.done()
    torch.cuda.synchronize()
    return bool((seen == 99).all() and (shelf.read(1)["w"] == 99).all())


@pytest.mark.parametrize("path", ["dma-2d", "dma-batch"])
@pytest.mark.parametrize("scenario", [slow_reader, slow_store])
def test_order(scenario: Any, path: str, device: Device) -> None:
    with Shelf.on_gpu(device, numbered(3), slots=1, path=path) as shelf:
        scenario(shelf)  # kernels and copies have run once
        shelf.put(1, numbered(2)[1])
        assert scenario(shelf)


@pytest.mark.parametrize("scenario", [slow_reader, slow_store])
def test_without_the_wait_values_are_wrong(scenario: Any, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    with Shelf.on_gpu(device, numbered(3), slots=1) as shelf:
        scenario(shelf)
        shelf.put(1, numbered(2)[1])
        torch.cuda.synchronize()
        monkeypatch.setattr(GpuOrder, "behind", lambda *_: [])
        assert not scenario(shelf)
