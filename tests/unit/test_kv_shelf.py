"""Shelves on host memory and on a stand-in driver: what is lent is what was put or stored, and errors come first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.gpulib import Control

from dovetail.errors import HardwareError, NotSupported
from dovetail.hw import memory as system_memory
from dovetail.hw.gpu.device import Device
from dovetail.kv import Shelf, WindowFull
from dovetail.kv.items import ALIGN_BYTES, arrange
from dovetail.kv.loan import Loan

KINDS = ["cpu", "dma-2d", "dma-batch", "dma-loop"]


@pytest.fixture(scope="module")
def control() -> Iterator[Control]:
    found = Control()
    found.reset()
    yield found
    found.reset()


@pytest.fixture(scope="module")
def device(control: Control) -> Iterator[Device]:
    with control.device() as gpu:
        yield gpu


def layers(number: int = 5) -> dict[Any, dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(number)
    return {
        f"layer {n}": {
            "w": torch.randn(7, 9, generator=made),
            "b": torch.randint(-100, 100, (13,), dtype=torch.int16, generator=made),
            "scale": torch.randn((), dtype=torch.float64, generator=made),
        }
        for n in range(number)
    }


def shelf(kind: str, device: Device, items: Any, **options: Any) -> Shelf:
    if kind == "cpu":
        return Shelf.on_cpu(items, **options)
    return Shelf.on_gpu(device, items, path=kind, **options)


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(wanted) and all(
        t.dtype == wanted[name].dtype and torch.equal(t, wanted[name]) for name, t in found.items()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_put_is_lent(kind: str, device: Device) -> None:
    items = layers()
    with shelf(kind, device, items, piece_bytes=2500) as kept:
        for key, wanted in [*items.items(), *reversed(items.items())]:
            with kept.fetch(key) as loan:
                loan.wait()
                assert loan.key == key
                assert same(loan.tensors, wanted)
                assert all(t.data_ptr() % 64 == 0 for t in loan.tensors.values())
        found = kept.stats()
        assert (found.hits, found.misses) == (2, 8)  # the way back begins with the two that are in the window
        assert found.fetched_bytes == 8 * 3 * ALIGN_BYTES
        assert kept.resident == ["layer 0", "layer 1"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_stored_comes_back(kind: str, device: Device) -> None:
    items = layers()
    with shelf(kind, device, items, slots=3, piece_bytes=2500) as kept:
        for turn in range(3):
            for loan in kept.walk(items, store=True):
                loan.wait()
                assert torch.equal(loan.tensors["w"], items[loan.key]["w"] * 2**turn)
                loan.tensors["w"] *= 2
                loan.tensors["b"].zero_()
        for key, before in items.items():
            found = kept.read(key)
            assert torch.equal(found["w"], before["w"] * 8)
            assert not found["b"].any()
            assert torch.equal(found["scale"], before["scale"])
        assert kept.stats().stored_bytes == kept.stats().fetched_bytes == 15 * 3 * ALIGN_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_one_transfer_of_merged_copies(kind: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {n: {"w": torch.full((1024,), float(n))} for n in range(8)}
    with shelf(kind, device, experts, slots=4) as kept:
        tables = []
        submit = kept.carrier.mover.submit

        def seen(direction: Any, table: Any, *rest: Any, **options: Any) -> Any:
            tables.append(table)
            return submit(direction, table, *rest, **options)

        monkeypatch.setattr(kept.carrier.mover, "submit", seen)
        loans = kept.fetch_many([6, 2, 5, 4])
        assert [(len(t), t.size_bytes) for t in tables] == [(2, 4 * 4096)]  # 4, 5 and 6 are one copy
        for n, loan in loans.items():
            loan.wait()
            assert (loan.tensors["w"] == n).all()
            loan.done()
        again = kept.fetch_many([5, 0, 6])  # one comes, instead of the one that was used longest ago
        assert len(tables) == 2
        again[0].wait()
        assert (again[0].tensors["w"] == 0).all()
        assert sorted(kept.resident) == [0, 4, 5, 6]
        assert kept.fetch_many([]) == {}
        with pytest.raises(ValueError, match="5 items are asked for at once, the window has 4 slots"):
            kept.fetch_many([0, 1, 2, 3, 4])
        with pytest.raises(ValueError, match="3 items are asked for, but only 2 different ones"):
            kept.fetch_many([0, 1, 0])


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_items_of_different_sizes(kind: str, device: Device) -> None:
    items = {n: {"w": torch.randn(size)} for n, size in enumerate([1, 3000, 70_000, 5])}
    items[9] = {"w": torch.randn(0), "x": torch.randn(40, 50)}
    with shelf(kind, device, items, piece_bytes=100_000) as kept:
        for loan in kept.walk([2, 0, 9, 1, 3, 2, 9]):
            loan.wait()
            assert same(loan.tensors, items[loan.key])
        assert kept.stats().fetched_bytes < 7 * 70_000 * 4  # an item moves its own pages, not a whole slot


def test_pages() -> None:
    equal = {n: {"w": torch.empty(100, device="meta")} for n in range(3)}
    found, page = arrange(equal, None)
    assert (page, [i.num_pages for i in found.values()]) == (512, [1, 1, 1])
    unequal = {n: {"w": torch.empty(size, device="meta")} for n, size in enumerate([1 << 20, 1])}
    found, page = arrange(unequal, None)
    assert (page, [i.num_pages for i in found.values()]) == (16384, [256, 1])
    assert [i.num_pages for i in arrange(unequal, 512)[0].values()] == [8192, 1]
    with pytest.raises(ValueError, match="page_bytes must be a multiple of 512, not 100"):
        arrange(equal, 100)
    with pytest.raises(ValueError, match="a shelf needs at least one item"):
        arrange({}, None)
    with pytest.raises(ValueError, match="item 'x' has no byte"):
        arrange({"x": {"w": torch.empty(0)}}, None)


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_put_later_and_again(kind: str, device: Device) -> None:
    items = layers(3)
    shapes = {key: {name: t.to("meta") for name, t in of.items()} for key, of in items.items()}
    with shelf(kind, device, shapes) as kept:
        with kept.fetch("layer 1") as loan:
            loan.wait()
            assert not loan.tensors["w"].any()  # not put yet: zero
            with pytest.raises(ValueError, match="item 'layer 1' is lent: end its loans before you put it"):
                kept.put("layer 1", items["layer 1"])
        kept.put("layer 1", items["layer 1"])
        with kept.fetch("layer 1") as loan:  # what lay in the window is no longer used
            loan.wait()
            assert same(loan.tensors, items["layer 1"])
        assert same(kept.read("layer 1"), items["layer 1"])


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_wrong_tensors_change_nothing(kind: str, device: Device) -> None:
    items = layers(2)
    right = items["layer 0"]
    with shelf(kind, device, items) as kept:
        for wrong, error, message in (
            ({"w": right["w"]}, ValueError, "has the tensors b, scale, w, given were w"),
            ({**right, "w": right["w"][1:]}, ValueError, r"w has the shape \(7, 9\), not \(6, 9\)"),
            ({**right, "w": right["w"].double()}, TypeError, "w is of torch.float32, not torch.float64; convert"),
            ({**right, "w": right["w"].to("meta")}, ValueError, "w is on meta and has no values"),
            ({**right, "w": right["w"].numpy()}, TypeError, "w must be a tensor, not ndarray"),
            ({**right, "w": right["w"].to_sparse()}, TypeError, "w must be a dense tensor, not torch.sparse_coo"),
        ):
            with pytest.raises(error, match=message):
                kept.put("layer 0", wrong)
        assert same(kept.read("layer 0"), right)
    for given in ([1.0], torch.ones(2).to_sparse()):
        with pytest.raises(TypeError, match="item 'x': w must be a"):
            shelf(kind, device, {"x": {"w": given}})
    with pytest.raises(ValueError, match="w is on meta and has no values; give all of them, or none"):
        shelf(kind, device, {"x": {"w": torch.ones(2, device="meta"), "b": torch.ones(2)}})


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_a_window_whose_slots_are_all_lent(kind: str, device: Device) -> None:
    items = layers()
    with shelf(kind, device, items) as kept:
        first, second = kept.fetch("layer 0"), kept.fetch("layer 1")
        again = kept.fetch("layer 0")
        with pytest.raises(WindowFull, match="1 slots are needed, 0 of 2 can be had; lent are 'layer 0', 'layer 1'"):
            kept.fetch("layer 2")
        with pytest.raises(ValueError, match="item 'layer 0' is lent 2 times: only the last loan can store it"):
            first.store()
        again.done()
        with pytest.raises(WindowFull):
            kept.fetch("layer 2")  # the first loan of it still counts
        first.done()
        with kept.fetch("layer 2") as third:
            third.wait()
            assert same(third.tensors, items["layer 2"])
        second.wait()
        assert same(second.tensors, items["layer 1"])
        for use in (first.done, first.store, first.join, first.wait, lambda: first.tensors):
            with pytest.raises(ValueError, match="the loan of item 'layer 0' is over: fetch it again"):
                use()
        second.done()


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_unknown_items_bad_windows_and_closed_shelves(kind: str, device: Device) -> None:
    items = layers(2)
    with pytest.raises(ValueError, match="a window needs at least one slot, not 0"):
        shelf(kind, device, items, slots=0)
    kept = shelf(kind, device, items)
    for call in (kept.fetch, kept.read, lambda key: kept.put(key, {})):
        with pytest.raises(KeyError, match="there is no item 'layer 9' on this shelf of 2"):
            call("layer 9")
    for ahead in (-1, 2):
        with pytest.raises(ValueError, match=f"ahead must be 0 to 1, .*, not {ahead}"):
            kept.walk(items, ahead=ahead)
    if kind == "cpu":
        with pytest.raises(ValueError, match="a shelf in host memory has no streams; 1 were given"):
            kept.fetch("layer 0", after=[7])
        assert kept.resident == []
    loan = kept.fetch("layer 0")
    kept.close()
    kept.close()
    with pytest.raises(ValueError, match="the shelf is closed"):
        kept.fetch("layer 1")
    with pytest.raises(ValueError, match="the shelf is closed"):
        loan.done()


@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_a_walk_that_is_left_gives_everything_back(kind: str, device: Device) -> None:
    items = layers()
    with shelf(kind, device, items, slots=3) as kept:
        for loan in kept.walk(items):
            if loan.key == "layer 1":
                break
        loans = kept.fetch_many(list(items)[2:])  # all three slots can be had
        assert len(loans) == 3
        for loan in loans.values():
            loan.done()
        seen = []
        for ahead in (0, 1, 2):
            for loan in kept.walk(["layer 0", "layer 0", "layer 3", "layer 0"], ahead=ahead, store=True):
                loan.wait()
                assert same(loan.tensors, items[loan.key])
                seen.append(loan.key)
        assert len(seen) == 12


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("kind", ["cpu", "dma-2d"])
def test_what_was_written_before_a_walk_was_left_is_stored(kind: str, ahead: int, device: Device) -> None:
    """The window has it; on the host it would be missing as soon as the item makes room for another."""
    items = layers()
    with shelf(kind, device, items, slots=2) as kept:
        for loan in kept.walk(items, ahead=ahead, store=True):
            loan.wait()
            loan.tensors["w"].fill_(7.0)
            if loan.key == "layer 1":
                break
        for key in ("layer 2", "layer 3", "layer 0", "layer 1"):
            with kept.fetch(key) as loan:
                loan.wait()
                assert bool((loan.tensors["w"] == 7.0).all()) == (key in ("layer 0", "layer 1"))


def test_a_walk_that_fails_lends_nothing_any_more(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    """What was not joined was given to nobody, and is not stored; what can't be stored is not lent for ever."""
    items = layers()
    with shelf("cpu", device, items, slots=3) as kept:
        stored: list[Any] = []
        with monkeypatch.context() as patched:
            patched.setattr(Loan, "join", lambda *_: 1 / 0)
            patched.setattr(Loan, "store", stored.append)
            with pytest.raises(ZeroDivisionError):
                next(kept.walk(items, store=True))
        assert not stored
        with monkeypatch.context() as patched:
            patched.setattr(Loan, "store", lambda *_: 1 / 0)
            walk = kept.walk(items, store=True)
            next(walk)
            with pytest.raises(ZeroDivisionError):
                walk.close()  # type: ignore[attr-defined]
        for loan in kept.fetch_many(list(items)[:3]).values():  # all three slots can be had
            loan.done()


def test_conjugate_tensors_have_values() -> None:
    given = torch.tensor([1 + 2j, 3 - 1j])
    with Shelf.on_cpu({"x": {"w": given.conj()}}) as kept:
        assert torch.equal(kept.read("x")["w"], given.conj().resolve_conj())


def test_memory_that_is_not_there(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(system_memory, "available_bytes", lambda: 1000)
    for kind in ("cpu", "dma-2d"):
        with pytest.raises(HardwareError, match="no memory for 2 slots of 1536 bytes"):
            shelf(kind, device, layers(2))


def test_a_window_that_the_device_refuses(control: Control, device: Device) -> None:
    control.set(FAIL="cuMemAlloc:2:0")
    with pytest.raises(HardwareError, match="no device memory for"):
        shelf("dma-2d", device, layers(2))
    control.reset()


def test_a_captured_stream_is_refused(device: Device) -> None:
    stream = device.driver.stream_create()
    with shelf("dma-2d", device, layers(2)) as kept, kept.fetch("layer 0") as loan:
        device.driver.graph_begin(stream)
        for use in (loan.join, loan.done, loan.store):
            with pytest.raises(NotSupported, match="captures a graph"):
                use(stream)
        device.driver.graph_destroy(device.driver.graph_end(stream))
    device.driver.stream_destroy(stream)


def test_a_store_that_failed_half_way(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    items = {n: {"w": torch.randn(2000)} for n in range(3)}
    with shelf("dma-2d", device, items, page_bytes=4096, piece_bytes=4096) as kept:  # two copies for each
        copy, calls = device.driver.copy_rows, []

        def fails(*arguments: int) -> None:
            calls.append(arguments)
            if len(calls) == 2:
                raise HardwareError("the driver refused")
            copy(*arguments)

        loan = kept.fetch(0)
        loan.wait()
        loan.tensors["w"].zero_()
        monkeypatch.setattr(device.driver, "copy_rows", fails)
        with pytest.raises(HardwareError, match="the driver refused"):
            loan.store()
        with pytest.raises(HardwareError, match="a store of item 0 failed half way: put it, or store it again"):
            kept.read(0)
        assert not loan.is_over
        loan.store()  # once more
        assert not kept.read(0)["w"].any()
        calls.clear()
        loan = kept.fetch(0)
        with pytest.raises(HardwareError, match="the driver refused"):
            loan.store()
        loan.done()
        kept.fetch_many([1, 2])[1].wait()
        for slot in kept.window.slots:
            slot.lent = 0
        with pytest.raises(HardwareError, match="a store of item 0 failed half way"):
            kept.fetch(0)
        kept.put(0, items[0])
        assert same(kept.read(0), items[0])


@pytest.mark.parametrize("direction", ["fetch", "store"])
def test_nothing_comes_beside_the_copies_of_a_transfer_that_failed(
    direction: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = {n: {"w": torch.randn(2000)} for n in range(3)}
    with shelf("dma-2d", device, items, slots=1, page_bytes=4096, piece_bytes=4096) as kept:

        def transfer() -> None:
            kept.fetch(1).done() if direction == "fetch" else loan.store()

        loan = kept.fetch(0)
        loan.wait()
        if direction == "fetch":
            loan.done()
        with monkeypatch.context() as patch:
            patch.setattr(device.driver, "copy_rows", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                transfer()
            patch.undo()
            patch.setattr(kept.carrier.mover, "is_idle", lambda direction: False)
            with pytest.raises(HardwareError, match=f"a {direction} failed half way, and some of its copies are under"):
                transfer()
        while not kept.carrier.mover.is_idle(direction):  # what had been begun when it failed
            time.sleep(1e-3)
        transfer()
        assert same(kept.read(0), items[0])
        with kept.fetch(1) as other:
            other.wait()
            assert same(other.tensors, items[1])
