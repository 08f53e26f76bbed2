"""Two on one GPU, by every strategy, on the stand-in drivers of CUDA and HIP: order under delays, streams, shares,
times, choices. HIP has no stream with both a mask and a priority: what is refused there has tests at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests import standin

from dovetail.errors import NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, SourceOrder, Words
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.hip import HipDriver
from dovetail.overlap import Call, Load, LocalCommunication, Mover, Runtime, Setting, Strategy, policy
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.runtime import ROUNDS_BEFORE_KEPT
from dovetail.overlap.timing import GpuTimer
from dovetail.plan import passes
from dovetail.plan.build import all_gather

from .gpulib import Control, number, until, view

HOST = frozenset({1})
SIZE = 4096
SETTINGS = [
    Setting(Strategy.SERIAL),
    Setting(Strategy.SERIAL, mover=Mover.ENGINES),
    Setting(Strategy.STREAMS, 2),
    Setting(Strategy.PRIORITY),
    Setting(Strategy.PARTITION, 8),
    Setting(Strategy.PRIORITY_PARTITION, 16),
    Setting(Strategy.DMA),
    Setting(Strategy.DMA_PARTITION, 8),
]


#: HIP gives a stream with a mask no priority.
NOT_ON_HIP = Setting(Strategy.PRIORITY_PARTITION, 16)
BACKENDS = ("cuda", "hip")
CORES = {"cuda": 132, "hip": 304}
SHARE = {"cuda": "cuGreenCtxStreamCreate", "hip": "hipExtStreamCreateWithCUMask"}


class HipControl(Control):
    """The back door of the HIP stand-in."""

    def __init__(self) -> None:
        super().__init__("hip")

    def device(self) -> Device:
        return Device("hip", driver=HipDriver(self.path))


def settings_of(backend: str) -> list[Setting]:
    return [s for s in SETTINGS if backend != "hip" or s != NOT_ON_HIP]


every_setting = pytest.mark.parametrize(
    ("control", "setting"),
    [pytest.param(backend, s, id=f"{backend}-{s}") for backend in BACKENDS for s in settings_of(backend)],
    indirect=["control"],
)
on_hip = pytest.mark.parametrize("control", ["hip"], indirect=True)


@pytest.fixture(scope="module", params=BACKENDS)
def control(request: pytest.FixtureRequest) -> Control:
    return Control() if request.param == "cuda" else HipControl()


@pytest.fixture
def device(control: Control) -> Iterator[Device]:
    control.reset()
    made = control.device()
    control.set(CORES=CORES[made.driver.name])
    yield made
    control.set(CORES="")
    control.reset()
    made.close()


class Two:
    """An all-gather of a GPU and one peer in host memory, and a computation that fills other memory."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.heaps = [Heap(device, kind, segment_bytes=1 << 20) for kind in ("device", "host")]
        self.plan = passes.crossing(passes.entry(all_gather.pcpy(2, SIZE, own_copy=False)), 0)
        self.out = [heap.empty((2 * SIZE,), torch.uint8) for heap in self.heaps]
        buffers = {(r, "data"): self.out[r] for r in range(2)}
        self.comm = LocalCommunication(device, self.plan, buffers, host_ranks=HOST, kind="all_gather", cores=4)
        self.result = self.heaps[0].empty((SIZE,), torch.uint8)
        self.place = GpuPlace(device)
        self.main = device.driver.stream_create()
        self.value, self.steps = 0, 1

    def fill(self, tensor: torch.Tensor, byte: int, stream: int) -> None:
        self.device.driver.fill(tensor.data_ptr(), byte, tensor.numel(), stream)

    def compute(self, byte: int, stream: int) -> None:
        """As many steps as are asked for, each delayed; the last one has the result."""
        for n in reversed(range(self.steps)):
            self.fill(self.result, byte if n == 0 else 255, stream)

    def computation(self, place: GpuPlace) -> Call:
        return Call(lambda: self.compute(self.value, place.stream), Load(name="fill", flops=1e6))

    def close(self) -> None:
        self.device.driver.stream_synchronize(self.main)
        self.comm.close()
        self.place.close()
        self.device.driver.stream_destroy(self.main)
        for heap in self.heaps:
            heap.close()


@pytest.fixture
def two(device: Device) -> Iterator[Two]:
    made = Two(device)
    yield made
    made.close()


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_both_come_behind_the_callers_stream_and_before_what_follows(
    control: Control, two: Two, setting: Setting, steps: int
) -> None:
    """The caller writes the input, runs both, copies both results and overwrites them; every step with a delay. The
    computation is the shorter one, then the longer one."""
    control.set(DELAY_US=300)
    two.steps = steps
    driver, main = two.device.driver, two.main
    kept = two.heaps[1].empty((3 * SIZE,), torch.uint8)
    for byte in range(1, 9):
        two.value = byte + 100
        two.out[1][SIZE:] = byte + 50
        two.fill(two.out[0][:SIZE], byte, main)
        for _ in range(4):
            two.fill(two.result, 0, main)
        launched = two.place.launch(two.computation(two.place), two.comm, setting, main)
        for n, source in enumerate((two.out[0][SIZE:], two.result)):
            driver.copy(kept[n * SIZE :].data_ptr(), source.data_ptr(), SIZE, main)
        driver.copy(kept[2 * SIZE :].data_ptr(), two.out[1].data_ptr(), SIZE, main)
        two.fill(two.result, 0, main)
        two.fill(two.out[0][SIZE:], 0, main)
        assert launched.pending is not None
        launched.pending.wait()
        driver.stream_synchronize(main)
        found = [set(part.tolist()) for part in np.split(kept.numpy(), 3)]
        assert found == [{byte + 50}, {byte + 100}, {byte}], setting


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_with_form(control: Control, two: Two, setting: Setting, steps: int) -> None:
    control.set(DELAY_US=300)
    two.steps = steps
    driver, kept = two.device.driver, two.heaps[1].empty((SIZE,), torch.uint8)
    for byte in range(1, 6):
        two.out[1][SIZE:] = byte + 50
        two.fill(two.out[0][:SIZE], byte, two.main)
        for _ in range(4):
            two.fill(two.result, 0, two.main)
        with two.place.beside(two.comm, setting, two.main):
            two.compute(byte + 100, two.place.stream)
        two.fill(two.out[0][:SIZE], 0, two.main)
        driver.copy(kept.data_ptr(), two.result.data_ptr(), SIZE, two.main)
        driver.stream_synchronize(two.main)
        assert set(kept.tolist()) == {byte + 100}
        assert set(view(two.out[1].data_ptr(), SIZE).tolist()) == {byte}
        assert set(view(two.out[0].data_ptr() + SIZE, SIZE).tolist()) == {byte + 50}


def test_priority_and_order_of_launches(control: Control, two: Two) -> None:
    """Plain streams launch the computation first; where the communication has priority it comes first."""
    place, computation = two.place, two.computation(two.place)
    for setting in SETTINGS:  # made and bound
        place.launch(computation, two.comm, setting, two.main)
    two.device.driver.stream_synchronize(two.main)
    for setting in SETTINGS[2:]:
        control.calls()
        place.launch(computation, two.comm, setting, two.main)
        lines = [line.split()[0] for line in control.calls() if "Memcpy" in line or "Memset" in line]
        first = "Memset" if setting.strategy in (Strategy.STREAMS, Strategy.PARTITION) else "Memcpy"
        assert first in lines[0], (setting, lines)
    assert place.lanes(Setting(Strategy.PRIORITY)).comm != place.lanes(Setting(Strategy.STREAMS)).comm


def test_shares_are_made_once_and_given_back(control: Control, two: Two) -> None:
    setting = Setting(Strategy.PARTITION, 8)
    assert two.place.lanes(setting) is two.place.lanes(setting)
    assert len(control.calls("cuGreenCtxCreate")) == 2
    two.place.lanes(Setting(Strategy.DMA_PARTITION, 8))
    assert not control.calls("cuGreenCtxCreate")
    two.place.close()
    assert len(control.calls("cuGreenCtxDestroy")) == 2


def test_times_have_a_common_start(control: Control, two: Two) -> None:
    with GpuTimer(two.place) as timer:
        for setting in SETTINGS:
            timer.both(two.computation(two.place), two.comm, setting)
            times = timer.both(two.computation(two.place), two.comm, setting)
            assert times.compute_us is not None
            assert times.comm_us is not None
            assert times.total_us == max(times.compute_us, times.comm_us) > 0
            if setting.strategy is Strategy.SERIAL:
                assert times.comm_us >= times.compute_us
        assert timer.compute(two.computation(two.place)) > 0
        assert timer.comm(two.comm, Mover.ENGINES) > 0


def test_a_computation_that_waits_for_the_host_does_not_hang(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.overlap.timing._OPEN_AFTER_S", 0.2)

    def impatient() -> None:
        two.fill(two.result, 1, two.place.stream)
        two.device.driver.stream_synchronize(two.place.stream)

    with GpuTimer(two.place) as timer:
        assert timer.compute(Call(impatient)) > 0
        assert timer.was_opened


# --- the runtime ------------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(two: Two) -> Iterator[Runtime]:
    with Runtime(two.device) as made:
        yield made


def test_a_pair_is_tried_and_the_fastest_is_kept(two: Two, runtime: Runtime) -> None:
    taken = []
    for _ in range(ROUNDS_BEFORE_KEPT + 20):
        outcome = runtime.run(two.computation(runtime.place), two.comm)  # type: ignore[arg-type]
        outcome.wait()
        taken.append(outcome)
    tried = {outcome.strategy for outcome in taken}
    assert {Strategy.SERIAL, Strategy.STREAMS} <= tried
    assert len({outcome.setting for outcome in taken[-10:]}) == 1
    assert taken[-1].reason.startswith("measured: ")
    assert "us" in taken[-1].reason


def test_forced(two: Two, runtime: Runtime) -> None:
    compute: Any = two.computation(runtime.place)  # type: ignore[arg-type]
    for strategy in Strategy:
        if strategy is not Strategy.FUSED:
            outcome = runtime.run(compute, two.comm, strategy)
            outcome.wait()
            assert (outcome.strategy, outcome.reason) == (strategy, "asked for")
    with pytest.raises(ValueError, match="there are the strategies serial, streams"):
        runtime.run(compute, two.comm, "dmaa")
    with pytest.raises(NotSupported, match="operators"):
        runtime.run(compute, two.comm, "fused")
    with pytest.raises(ValueError, match="cores"):
        runtime.run(compute, two.comm, "partition", cores=1000)


def test_a_driver_without_shares(control: Control, two: Two) -> None:
    two.device.caps = type(two.device.caps)(**{
        **{name: getattr(two.device.caps, name) for name in two.device.caps.__slots__}, "partition": False
    })  # fmt: skip
    with Runtime(two.device) as runtime:
        with pytest.raises(NotSupported, match="shared out"):
            runtime.run(lambda: None, two.comm, "partition")
        assert not {"partition", "dma+partition"} & {
            s.strategy
            for s in policy.candidates(
                two.comm.traffic, two.comm.movers, num_cores=132, core_step=8, has_partition=False
            )
        }
        runtime.run(lambda: None, two.comm).wait()


def test_disabled_is_the_baseline(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_DISABLE", "1")
    with Runtime(two.device) as runtime:
        outcomes = [runtime.run(lambda: None, two.comm) for _ in range(5)]
        assert {o.strategy for o in outcomes} <= {Strategy.SERIAL, Strategy.STREAMS}
        assert outcomes[0].reason == "DOVETAIL_DISABLE is set"
        for outcome in outcomes:
            outcome.wait()


def test_an_error_of_the_computation_leaves_nothing_waiting(two: Two, runtime: Runtime) -> None:
    def fails() -> None:
        raise RuntimeError("no")

    for setting in SETTINGS:
        with pytest.raises(RuntimeError, match="no"):
            two.place.launch(Call(fails), two.comm, setting, two.main)
    two.device.driver.stream_synchronize(two.main)
    with pytest.raises(RuntimeError, match="no"), runtime.beside(two.comm, "dma"):
        fails()
    runtime.run(lambda: None, two.comm).wait()


def test_what_is_no_computation(two: Two, runtime: Runtime) -> None:
    with pytest.raises(TypeError, match="called without arguments"):
        runtime.run(3, two.comm)  # type: ignore[arg-type]


def test_traffic(two: Two) -> None:
    assert two.comm.traffic.size_bytes == SIZE
    assert two.comm.traffic.num_pieces == 2
    assert not two.comm.traffic.reduces
