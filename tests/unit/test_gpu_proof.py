"""The proof of engine against the stand-in driver: who is believed, who is not, and that nothing is held for ever."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import standin

from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.capabilities import Capabilities
from dovetail.hw.gpu import proof
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, DriverError, Kind
from dovetail.hw.gpu.proof import Answer, Trial, Who, compared, prove, summed

SIZES = (4 << 10, 1 << 20)


class Holder:
    """Parks the stream on a word instead of filling multiprocessors; `longest_s` as the real one's clock."""

    num_programs = 8

    def __init__(self, driver: Any, *, num_up: int = 8, longest_s: float = 20.0) -> None:
        self.driver, self.num_up, self.longest_s = driver, num_up, longest_s
        self.address = driver.host_alloc(4096)
        self.word = np.ctypeslib.as_array((ctypes.c_uint64 * 1).from_address(self.address))
        self.word[0] = 0
        self.holds = 0

    def wait_row(self) -> Any:
        """What a stream that needs a multiprocessor waits for."""
        return np.array([(WAIT, self.address, self.holds)], WORD)

    def release(self) -> None:
        self.word[0] = self.holds

    @contextlib.contextmanager
    def hold(self, stream: int) -> Iterator[int]:
        self.holds += 1
        self.driver.stream_words(self.wait_row(), stream)
        timer = threading.Timer(self.longest_s, self.release)
        timer.start()
        try:
            yield self.num_up
        finally:
            timer.cancel()
            self.release()
            self.driver.stream_synchronize(stream)


class Driver(CudaDriver):
    """The stand-in with copies that need multiprocessors, where `kernel(dst, src, stream)` says so."""

    holder: Holder

    def __init__(self) -> None:
        super().__init__(str(standin.build("cuda")))
        self.failing = ""

    def kernel(self, dst: int, src: int) -> bool:
        return self.memory_at(dst).kind is self.memory_at(src).kind is Kind.DEVICE

    def _wait(self, dst: int, src: int, stream: int) -> None:
        if self.kernel(int(dst), int(src)) and not self.stream_capturing(stream):
            self.stream_words(self.holder.wait_row(), stream)

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        self._wait(dst, src, stream)
        super().copy(dst, src, size_bytes, stream)

    def copy_batch(self, dst: Any, src: Any, size: Any, order: Any, stream: int) -> None:
        if self.failing == "batch":
            raise DriverError("no", call="cuMemcpyBatchAsync", code=1)
        self._wait(dst[0], src[0], stream)
        super().copy_batch(dst, src, size, order, stream)

    def copy_rows(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int, stream: int) -> None:
        self._wait(dst, src, stream)
        super().copy_rows(dst, dst_pitch, src, src_pitch, width, rows, stream)

    def graph_begin(self, stream: int) -> None:
        if self.failing == "graph":
            raise DriverError("no", call="cuStreamBeginCapture_v2", code=801)
        super().graph_begin(stream)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(proof, "WINDOW_S", 0.05)
    driver = Driver()
    with Device(driver=driver) as made:
        driver.holder = Holder(driver)
        yield made
        driver.holder.release()


def test_copies_inside_the_gpu_need_multiprocessors(device: Device) -> None:
    device.driver.graph_begin = _refused  # a captured copy would not wait in this stand-in
    proofs = prove(device, holder=device.driver.holder, sizes=SIZES)
    assert {path: found.who for path, found in proofs.items()} == {
        "h2d": Who.ENGINE,
        "d2h": Who.ENGINE,
        "d2d": Who.KERNEL,
    }
    trials = proofs["h2d"].trials
    assert [(t.form, t.size_bytes) for t in trials] == [(f, s) for f in ("single", "batch", "rows") for s in SIZES]
    assert proofs["d2d"].why == ""  # all of its trials say the same


def _refused(_stream: int) -> None:
    raise DriverError("no", call="cuStreamBeginCapture_v2", code=801)


def test_one_form_that_needs_multiprocessors_is_enough(device: Device) -> None:
    proofs = prove(device, holder=device.driver.holder, sizes=SIZES)
    graphs = [t.who for t in proofs["d2d"].trials if t.form == "graph"]
    assert graphs == [Who.ENGINE] * len(SIZES)
    assert proofs["d2d"].who is Who.KERNEL
    assert proofs["d2d"].why.startswith("single of 4096 bytes, single of 1048576 bytes, batch")


def test_forms_that_the_driver_lacks_are_left_out(device: Device) -> None:
    device.driver.failing = "graph"
    device.caps = replace(device.caps, batched_copy=False)
    assert isinstance(device.caps, Capabilities)
    found = prove(device, holder=device.driver.holder, sizes=SIZES[:1])
    assert [t.form for t in found["h2d"].trials] == ["single", "rows"]


def test_a_second_gpu_is_a_path(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = device.driver
    used = []
    monkeypatch.setattr(driver, "num_devices", lambda: 2)
    monkeypatch.setattr(driver, "can_reach", lambda a, b: True)
    monkeypatch.setattr(driver, "use", used.append)
    monkeypatch.setattr(driver, "enable_peer", used.append)
    found = prove(device, holder=driver.holder, sizes=SIZES[:1])
    assert list(found) == ["h2d", "d2h", "d2d", "p2p"]
    assert used[-3:] == [1, 0, 1]  # memory of the other, back to this one, which may then reach it


def test_too_few_programs_prove_nothing(device: Device) -> None:
    device.driver.holder.num_up = 7
    found = prove(device, holder=device.driver.holder, sizes=SIZES[:1])
    assert {p.who for p in found.values()} == {Who.UNPROVED}
    assert "7 of the 8 programs" in found["h2d"].why


def test_a_hold_that_ends_early_proves_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that waits for multiprocessors ends with the hold: that is not an engine's."""
    monkeypatch.setattr(proof, "WINDOW_S", 10.0)
    monkeypatch.setattr(proof, "HOLD_S", 0.3)
    device.driver.holder.longest_s = 0.3
    found = prove(device, holder=device.driver.holder, sizes=SIZES[:1])
    assert found["h2d"].who is Who.ENGINE
    assert [t.who for t in found["d2d"].trials if t.form != "graph"] == [Who.UNPROVED] * 3
    assert "the hold ended" in found["d2d"].why


def test_a_copy_that_is_lost_proves_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.driver, "copy_batch", lambda *_: None)
    trials = prove(device, holder=device.driver.holder, sizes=SIZES[:1])["h2d"].trials
    assert [(t.form, t.who) for t in trials if t.who is Who.UNPROVED] == [("batch", Who.UNPROVED)]
    assert "did not arrive" in next(t.why for t in trials if t.form == "batch")


def test_a_slow_copy_is_not_taken_for_a_kernel(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "WINDOW_S", 1e-9)
    found = prove(device, holder=device.driver.holder, sizes=SIZES[:1])
    assert {t.who for p in found.values() for t in p.trials} == {Who.UNPROVED}
    assert "too long to be seen" in found["h2d"].why


def test_an_error_releases_the_hold(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, real, calls = device.driver.holder, device.driver.event_record, []

    def fail(event: int, stream: int) -> None:
        calls.append(event)
        raise DriverError("lost", call="cuEventRecord", code=700)

    monkeypatch.setattr(device.driver, "event_record", fail)
    with pytest.raises(HardwareError, match="lost"):
        prove(device, holder=holder, sizes=SIZES[:1])
    assert calls
    assert holder.word[0] == holder.holds
    monkeypatch.setattr(device.driver, "event_record", real)
    assert prove(device, holder=holder, sizes=SIZES[:1])["h2d"].who is Who.ENGINE


def test_without_a_gpu_of_torchs_there_is_no_holder(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NotSupported, match="sees no GPU"):
        prove(device)


def test_the_window_ends_before_the_hold() -> None:
    source = Path(proof.__file__).with_name("hold.py").read_text()
    assert f"MOST_S = {proof.HOLD_S}\n" in source
    assert proof.WINDOW_S < proof.HOLD_S


def test_answers_that_disagree_prove_nothing() -> None:
    same = [Answer(Who.KERNEL), Answer(Who.KERNEL)]
    assert compared(same) == Answer(Who.KERNEL)
    mixed = compared([Answer(Who.KERNEL), Answer(Who.ENGINE)])
    assert mixed.who is Who.UNPROVED
    assert mixed.why == "attempts disagree: SM kernel, copy engine"


@pytest.mark.parametrize(
    ("answers", "who", "why"),
    [
        ([Who.ENGINE, Who.ENGINE], Who.ENGINE, ""),
        ([Who.KERNEL, Who.KERNEL], Who.KERNEL, ""),
        ([Who.ENGINE, Who.KERNEL], Who.KERNEL, "form1 of 8 bytes: because"),
        ([Who.UNPROVED, Who.ENGINE], Who.UNPROVED, "form0 of 8 bytes: because"),
        ([Who.UNPROVED, Who.KERNEL], Who.KERNEL, "form1 of 8 bytes: because"),
    ],
)
def test_a_path_is_as_good_as_its_worst_trial(answers: list[Who], who: Who, why: str) -> None:
    trials = [Trial(path="x", form=f"form{n}", size_bytes=8, who=w, why="because") for n, w in enumerate(answers)]
    found = summed("x", trials)
    assert (found.who, found.why) == (who, why)
