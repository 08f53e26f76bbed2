"""The order of a shelf's copies and its users, with users that are held up: and that each wait is needed.

A user is a stream of the stand-in driver behind a gate. Each scenario says whether all values were right; with its wait
taken out it must say no.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.gpulib import Control, until, view

from dovetail.errors import Timeout
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD
from dovetail.kv import Shelf
from dovetail.kv.order import GpuOrder
from dovetail.kv.planner import Direction

SIZE = 4096


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    control = Control()
    control.reset()
    with control.device() as gpu:
        yield gpu


class Rig:
    """A shelf of items that are full of their number, and two streams, the first of them behind a gate."""

    def __init__(self, device: Device, slots: int, path: str = "dma-2d", patience_s: float = 0.1) -> None:
        self.device, self.driver, self.patience_s = device, device.driver, patience_s
        items: Any = {n: {"w": torch.full((SIZE,), n, dtype=torch.uint8)} for n in range(8)}
        self.shelf = Shelf.on_gpu(device, items, slots=slots, path=path)
        self.held, self.free = self.driver.stream_create(), self.driver.stream_create()
        self.word = device.pinned(64)
        gate = np.zeros(1, WORD)
        gate["kind"], gate["address"], gate["value"] = WAIT, self.word.address, 1
        self.driver.stream_words(gate, self.held)

    def read(self, loan: Any, stream: int) -> Any:
        """A reader: what it sees, once it has run."""
        seen = self.device.pinned(SIZE)
        self.driver.copy(seen.address, loan.tensors["w"].data_ptr(), SIZE, stream)
        return seen.array

    def write(self, loan: Any, stream: int, value: int) -> None:
        self.driver.fill(loan.tensors["w"].data_ptr(), value, SIZE, stream)

    def give_time(self) -> None:
        """What nothing holds up is done meanwhile."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline and not self._is_idle():
            time.sleep(0.001)

    def _is_idle(self) -> bool:
        return self.driver.stream_done(self.free) and all(map(self.shelf.carrier.mover.is_idle, Direction))

    def end(self) -> None:
        """Opens the gate and waits for everything."""
        self.give_time()
        self.word.array.view(np.uint64)[0] = 1
        for stream in (self.held, self.free):
            self.driver.stream_synchronize(stream)
        until(self._is_idle)

    def close(self) -> None:
        self.shelf.close()
        for stream in (self.held, self.free):
            self.driver.stream_destroy(stream)


def overwritten_behind_its_reader(rig: Rig) -> bool:
    loan = rig.shelf.fetch(1)
    loan.wait()
    seen = rig.read(loan, rig.held)
    loan.done(rig.held)
    second = rig.shelf.fetch(2)  # the same slot
    second.join(rig.free)
    then = rig.read(second, rig.free)
    rig.end()
    return bool((seen == 1).all() and (then == 2).all())


def stored_behind_its_writer(rig: Rig) -> bool:
    loan = rig.shelf.fetch(1)
    loan.join(rig.held)
    rig.write(loan, rig.held, 99)
    loan.store(rig.held)
    rig.end()
    return bool((rig.shelf.read(1)["w"] == 99).all())


def overwritten_behind_its_store(rig: Rig) -> bool:
    loan = rig.shelf.fetch(1)
    loan.join(rig.free)
    rig.write(loan, rig.free, 99)
    rig.driver.stream_synchronize(rig.free)
    loan.store(rig.free, rig.held)
    rig.shelf.fetch(2).done(rig.free)  # the same slot
    rig.end()
    return bool((rig.shelf.read(1)["w"] == 99).all())


def fetched_behind_its_store(rig: Rig) -> bool:
    """The item has left the window, and comes back into another slot while its store is held up."""
    loan = rig.shelf.fetch(1)
    loan.join(rig.held)
    rig.write(loan, rig.held, 99)
    loan.store(rig.held)
    slot = rig.shelf.window.find(1)
    assert slot is not None
    rig.shelf.window.empty(slot)
    slot.lent += 1  # nobody else gets that slot
    back = rig.shelf.fetch(1)
    back.join(rig.free)
    seen = rig.read(back, rig.free)
    rig.end()
    return bool((seen == 99).all())


def joined_behind_the_last_byte(rig: Rig) -> bool:
    loan = rig.shelf.fetch(1, after=[rig.held])
    loan.join(rig.free)
    seen = rig.read(loan, rig.free)
    rig.end()
    return bool((seen == 1).all())


def joined_behind_the_last_writer(rig: Rig) -> bool:
    """The item is in the window: nothing is fetched, but who wrote it before is still at it."""
    loan = rig.shelf.fetch(1)
    loan.join(rig.held)
    rig.write(loan, rig.held, 99)
    loan.store(rig.held)
    again = rig.shelf.fetch(1)
    again.join(rig.free)
    seen = rig.read(again, rig.free)
    rig.end()
    return bool((seen == 99).all())


def joined_behind_the_last_reader(rig: Rig) -> bool:
    loan = rig.shelf.fetch(1)
    loan.wait()
    seen = rig.read(loan, rig.held)
    loan.done(rig.held)
    again = rig.shelf.fetch(1)
    again.join(rig.free)
    rig.write(again, rig.free, 99)
    again.store(rig.free)
    rig.end()
    return bool((seen == 1).all() and (rig.shelf.read(1)["w"] == 99).all())


def stored_behind_its_fetch(rig: Rig) -> bool:
    """A store of what is still on its way must not bring back what lay in the slot before."""
    loan = rig.shelf.fetch(1, after=[rig.held])
    loan.store(rig.free)
    rig.end()
    return bool((rig.shelf.read(1)["w"] == 1).all())


def walked_without_overlap(rig: Rig) -> bool:
    """With `ahead=0` nothing is fetched while the current stream still works on the item before, in another slot."""
    current = rig.held
    rig.shelf.carrier.order.streams = lambda given: list(given) or [current]  # type: ignore[method-assign]
    walk = rig.shelf.walk([1, 2], ahead=0)
    next(walk)
    loan = next(walk)
    rig.give_time()
    early = (view(loan.tensors["w"].data_ptr(), SIZE) == 2).any()
    rig.end()
    walk.close()  # type: ignore[attr-defined]
    return not early


def walked_and_stored_without_overlap(rig: Rig) -> bool:
    """The same of the store of the item before: here it is held up, the current stream is not."""
    carrier = rig.shelf.carrier
    carrier.order.streams = lambda given: list(given) or [rig.free]  # type: ignore[method-assign]
    send = carrier.send
    carrier.send = lambda item, slot, streams: send(item, slot, [*streams, rig.held])  # type: ignore[method-assign]
    walk = rig.shelf.walk([1, 2], ahead=0, store=True)
    next(walk)
    loan = next(walk)
    rig.give_time()
    early = (view(loan.tensors["w"].data_ptr(), SIZE) == 2).any()
    rig.end()
    walk.close()  # type: ignore[attr-defined]
    return not early


def no_fetch_behind(patch: pytest.MonkeyPatch) -> None:
    behind = GpuOrder.behind

    def without(self: Any, direction: Direction, *rest: Any) -> Any:
        return [] if direction is Direction.FETCH else behind(self, direction, *rest)

    patch.setattr(GpuOrder, "behind", without)


def no_store_behind(patch: pytest.MonkeyPatch) -> None:
    behind = GpuOrder.behind

    def without(self: Any, direction: Direction, *rest: Any) -> Any:
        return [] if direction is Direction.STORE else behind(self, direction, *rest)

    patch.setattr(GpuOrder, "behind", without)


def no_mark(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuOrder, "mark", lambda *_: None)


def no_join(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuOrder, "join", lambda *_: None)


def no_after(patch: pytest.MonkeyPatch) -> None:
    from dovetail.kv.mover import GpuMover

    submit = GpuMover.submit

    def without(self: Any, *rest: Any, after: Any = (), **options: Any) -> Any:
        return submit(self, *rest, after=(), **options)

    patch.setattr(GpuMover, "submit", without)


Scenario = Callable[[Rig], bool]
CASES: list[tuple[Scenario, int, Callable[[pytest.MonkeyPatch], None]]] = [
    (overwritten_behind_its_reader, 1, no_fetch_behind),
    (overwritten_behind_its_reader, 1, no_mark),
    (stored_behind_its_writer, 2, no_after),
    (overwritten_behind_its_store, 1, no_fetch_behind),
    (fetched_behind_its_store, 2, no_fetch_behind),
    (joined_behind_the_last_byte, 2, no_join),
    (joined_behind_the_last_writer, 2, no_join),
    (joined_behind_the_last_reader, 2, no_join),
    (joined_behind_the_last_reader, 2, no_mark),
    (stored_behind_its_fetch, 2, no_store_behind),
    (walked_without_overlap, 2, no_after),
    (walked_and_stored_without_overlap, 2, no_join),
]


def named(value: Any) -> str:
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize("path", ["dma-2d", "dma-batch"])
@pytest.mark.parametrize(("scenario", "slots"), dict.fromkeys(case[:2] for case in CASES), ids=named)
def test_order(scenario: Scenario, slots: int, path: str, device: Device) -> None:
    rig = Rig(device, slots, path)
    assert scenario(rig)
    rig.close()


@pytest.mark.parametrize(("scenario", "slots", "without"), CASES, ids=named)
def test_every_wait_is_needed(
    scenario: Scenario, slots: int, without: Any, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch)
    rig = Rig(device, slots, patience_s=0.5)
    assert not scenario(rig)
    rig.close()


def test_a_batch_would_read_what_is_being_stored(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sources are read when the driver likes: so such a fetch goes another way, and this one shows why."""
    monkeypatch.setattr("dovetail.kv.carrier.pending", lambda store: None)  # nothing seems to be stored
    rig = Rig(device, 2, "dma-batch", patience_s=0.5)
    assert not fetched_behind_its_store(rig)
    rig.close()


def test_waits_are_bounded(device: Device) -> None:
    rig = Rig(device, 2)
    loan = rig.shelf.fetch(1, after=[rig.held])
    with pytest.raises(Timeout, match="the fetch of 4096 bytes by dma-2d was not over after"):
        loan.wait(0.02)
    loan.store(rig.free)
    zeros = {"w": torch.zeros(SIZE, dtype=torch.uint8)}
    for call in (lambda: rig.shelf.read(1, 0.02), lambda: rig.shelf.put(1, zeros, 0.02), lambda: rig.shelf.close(0.02)):
        with pytest.raises(Timeout):
            call()
    rig.end()
    assert (rig.shelf.read(1)["w"] == 1).all()
    rig.close()


def test_a_wait_for_earlier_users_is_bounded(device: Device) -> None:
    rig = Rig(device, 2)
    rig.shelf.fetch(1).done(rig.held)
    loan = rig.shelf.fetch(1)
    with pytest.raises(Timeout, match="earlier users of the slot were not done after"):
        loan.wait(0.02)
    rig.end()
    loan.wait()
    rig.close()
