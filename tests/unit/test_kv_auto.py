"""The path `auto` on a stand-in driver: which transfers are timed, from which it learns, and what it gives back."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.unit.gpulib import Control

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, DriverError
from dovetail.kv.auto import Auto
from dovetail.kv.choose import CANDIDATES, Costs, Path, Samples
from dovetail.kv.layout import block_outermost, layer_outermost
from dovetail.kv.learn import AGAIN, SETTLED, TRIALS
from dovetail.kv.mover import GpuMover, GpuTransfer
from dovetail.kv.planner import Direction, Pieces, Table, table

LAYOUT = layer_outermost("rows", num_layers=6, row_bytes=128, num_blocks=48)
PIECES = Pieces(num_slots=40, slot_bytes=LAYOUT.slot_bytes, slots_per_piece=40)
TUNED = {Path.DMA_2D: 1000.0, Path.DMA_BATCH: 1100.0}


def costs(tuned: dict[Path, float]) -> Costs:
    samples = {
        (direction, beside, path): Samples([(128, 30 * LAYOUT.slot_bytes, time_us)])
        for direction in Direction
        for beside in (False, True)
        for path, time_us in tuned.items()
    }
    return Costs(samples=samples, entries_per_call=64, source="a test")


@pytest.fixture(scope="module")
def control() -> Control:
    return Control()


@pytest.fixture
def device(control: Control) -> Iterator[Device]:
    with control.device() as gpu:
        yield gpu
        for block in gpu._pinned:  # a test that failed leaves nobody behind a gate
            block.array.view(np.uint64)[0] = 1
    control.reset()


class Rig:
    """A mover whose transfers take what a table of times says; a gate holds a stream up."""

    def __init__(self, device: Device, tuned: dict[Path, float] = TUNED, *, learn: bool = True) -> None:
        self.device, self.driver, self.rng = device, device.driver, np.random.default_rng(5)
        self.cache = self.driver.device_alloc(LAYOUT.size_bytes)
        self.pool = device.pinned(PIECES.size_bytes(0))
        self.mover = GpuMover(device, self.cache, [self.pool.address], costs=costs(tuned), learn=learn)
        self.word, self.held = device.pinned(64), self.driver.stream_create()

    def times(self, monkeypatch: pytest.MonkeyPatch, real: dict[Path, float]) -> None:
        """The clock says what is in `real`, by the path of the transfer whose end is asked for."""
        made: dict[int, Path] = {}
        began = GpuTransfer.__init__

        def noted(transfer: GpuTransfer, *arguments: Any, **named: Any) -> None:
            began(transfer, *arguments, **named)
            made[transfer._end] = transfer.choice.path

        monkeypatch.setattr(GpuTransfer, "__init__", noted)
        monkeypatch.setattr(self.driver, "event_elapsed_us", lambda begin, end: real[made[end]])

    def copies(self, direction: Direction = Direction.FETCH, count: int = 30) -> Table:
        blocks, slots = self.rng.permutation(48)[:count], self.rng.permutation(40)[:count]
        return table(direction, LAYOUT, blocks, slots, PIECES)

    def submit(self, direction: Direction = Direction.FETCH, path: str = "auto", **named: Any) -> GpuTransfer:
        return self.mover.submit(direction, self.copies(direction), path, beside=False, **named)

    def run(self, number: int) -> Counter[Path]:
        """Transfers one after the other."""
        taken: Counter[Path] = Counter()
        for _ in range(number):
            transfer = self.submit()
            transfer.wait()
            taken[transfer.choice.path] += 1
        return taken

    def hold(self) -> int:
        """A stream that goes on when `release` is called."""
        self.word.array.view(np.uint64)[0] = 0
        self.driver.stream_words(np.array([(WAIT, self.word.address, 1)], WORD), self.held)
        return self.held

    def release(self) -> None:
        self.word.array.view(np.uint64)[0] = 1

    def close(self) -> None:
        self.release()
        self.mover.close()
        self.driver.stream_synchronize(self.held)
        self.driver.stream_destroy(self.held)


def test_the_choice_turns_to_what_is_faster_here(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(device)
    rig.times(monkeypatch, {Path.DMA_2D: 1300.0, Path.DMA_BATCH: 900.0})
    assert rig.run(2 * TRIALS) == dict.fromkeys(TUNED, TRIALS)
    last = rig.submit()
    assert last.choice.path is Path.DMA_BATCH
    assert last.choice.entries_per_call == 64
    assert last.choice.reason == "measured here: dma-2d 1300 us, dma-batch 900 us (4 transfers)"
    last.wait()
    assert rig.run(AGAIN // 2)[Path.DMA_2D] == 0
    rig.close()


def test_it_need_not_learn(device: Device, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: no path is tried, nothing is timed."""
    rig = Rig(device, learn=False)
    rig.times(monkeypatch, {})  # asking would fail
    control.calls()
    assert rig.run(2 * AGAIN) == {Path.DMA_2D: 2 * AGAIN}
    assert rig.submit().choice.reason == "estimated on an idle GPU: dma-2d 1000 us, dma-batch 1100 us (a test)"
    rig.close()
    assert not device._timed


def test_paths_that_are_asked_for_are_not_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(device)
    rig.times(monkeypatch, {})
    for path in ("dma-2d", "dma-batch", "dma-loop"):
        rig.submit(path=path).wait()
    rig.close()
    assert not device._timed


def test_time_is_that_of_the_copies_and_not_of_waiting(device: Device, control: Control) -> None:
    """Begun behind what it comes after, before the first byte, ended behind the last."""
    rig = Rig(device)
    control.set(DELAY_US=4000, SEED=1)
    began = time.perf_counter()
    transfer = rig.submit()
    transfer.wait()
    assert 10_000 < transfer.time_us < (time.perf_counter() - began) * 1e6
    control.set(DELAY_US=0)
    transfer = rig.submit(after=[rig.hold()])
    time.sleep(0.25)
    assert not transfer.is_over()
    rig.release()
    transfer.wait()
    assert 0 < transfer.time_us < 200_000
    rig.close()


@pytest.mark.parametrize("other", list(Direction))
def test_nothing_is_learned_or_tried_beside_other_transfers(
    device: Device, monkeypatch: pytest.MonkeyPatch, other: Direction
) -> None:
    """One that is under way already, in either direction, though its path was asked for."""
    rig = Rig(device)
    rig.times(monkeypatch, {})
    for _ in range(SETTLED):
        first = rig.submit(other, "dma-loop", after=[rig.hold()])
        second = rig.submit()
        rig.release()
        for transfer in (first, second):
            transfer.wait()
        assert second.choice.path is Path.DMA_2D
        assert second.choice.reason.startswith("estimated")
    rig.close()
    assert not device._timed


def test_a_transfer_that_another_joins_on_the_link_teaches_nothing(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone when it began; then one of the other direction came. One of its own comes behind it, and does no harm."""
    for later, learns in ((Direction.STORE, False), (Direction.FETCH, True)):
        rig = Rig(device)
        rig.times(monkeypatch, {Path.DMA_2D: 5000.0, Path.DMA_BATCH: 1.0})
        for _ in range(2 * TRIALS):
            alone = rig.submit(after=[rig.hold()])
            joined = rig.submit(later, "dma-loop")
            rig.release()
            for transfer in (alone, joined):
                transfer.wait()
        reason = rig.submit().choice.reason
        assert reason.startswith("measured here") == learns, reason
        rig.close()


def test_a_transfer_that_nobody_asks_about_teaches_too(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams join it, the host never looks."""
    rig = Rig(device)
    rig.times(monkeypatch, {Path.DMA_2D: 5000.0, Path.DMA_BATCH: 100.0})
    for _ in range(2 * TRIALS):
        rig.submit().join(rig.held)
        rig.driver.stream_synchronize(rig.held)
    assert rig.submit().choice.path is Path.DMA_BATCH
    rig.close()


@pytest.mark.parametrize("asks", [True, False])
def test_events_are_given_back(device: Device, monkeypatch: pytest.MonkeyPatch, asks: bool) -> None:
    """Timed ones and others, whether or not somebody asks, and where a path is refused half way."""
    made: list[tuple[bool, int]] = []
    create = device.driver.event_create

    def counted(*, timing: bool = False) -> int:
        made.append((timing, create(timing=timing)))
        return made[-1][1]

    monkeypatch.setattr(device.driver, "event_create", counted)
    rig = Rig(device)
    for n in range(30):
        transfer = rig.submit(list(Direction)[n // 3 % 2])
        if asks:
            transfer.wait()
        else:
            rig.driver.stream_synchronize(rig.mover._streams[transfer.direction][0])

    def refused(*_: object) -> None:
        raise DriverError("no", call="cuMemcpy2DAsync", code=1)

    with monkeypatch.context() as broken:
        broken.setattr(rig.mover, "_strided", refused)
        broken.setattr(rig.mover, "_batched", refused)
        with pytest.raises(DriverError):
            rig.submit()
    begun = rig.submit(after=[rig.hold()])  # timed, then joined by one of the other direction, then nobody looks
    rig.submit(Direction.STORE)
    rig.submit(Direction.FETCH, "dma-2d")
    rig.close()
    assert begun._over
    for timed, pool in ((True, device._timed), (False, device._events)):
        assert sorted(pool) == sorted(event for timing, event in made if timing is timed)
    assert len(device._timed) <= 4


def test_requests_of_no_bytes_teach_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(device)
    rig.times(monkeypatch, {})
    rig.mover.submit("fetch", rig.copies(count=0), "auto").wait()
    rig.close()


@pytest.mark.parametrize("row_bytes", [128, 120, 65536])
@pytest.mark.parametrize("outermost", [layer_outermost, block_outermost])
def test_the_choice_is_that_of_the_columns(device: Device, row_bytes: int, outermost: Any) -> None:
    """A table that knows its form and one of the same columns that does not: the same paths and reasons, all along."""
    layout = outermost("rows", num_layers=6, row_bytes=row_bytes, num_blocks=48)
    pieces = Pieces(num_slots=40, slot_bytes=layout.slot_bytes, slots_per_piece=40)
    tuned = TUNED | {Path.STAGED: 990.0}
    taken: list[list[tuple[Path, str]]] = [[], []]
    for bare, found in enumerate(taken):
        auto = Auto(device, 1 << 30, costs(tuned), CANDIDATES, has_launch=True, learn=True)
        rng = np.random.default_rng(3)
        for n in range(3 * AGAIN):
            count = int(rng.integers(1, 24))
            blocks = 2 * rng.permutation(24)[:count]
            copies = table("fetch", layout, blocks, rng.permutation(40)[:count], pieces)
            assert copies.form
            if bare:
                copies = dataclasses.replace(copies)
                assert copies.form is None
            choice, request = auto.choose(Direction.FETCH, copies, beside=n % 3 == 0, is_clear=lambda: True)
            time_us = float(rng.uniform(900, 1100))
            if request:
                request.note(choice.path, time_us)
            found.append((choice.path, choice.reason))
    assert taken[0] == taken[1]
    is_staged = Path.STAGED in {path for path, _ in taken[0]}
    assert is_staged == (outermost is layer_outermost and row_bytes % 16 == 0)
