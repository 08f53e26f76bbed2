"""Energy windows over a GPU made up for the test: its counter ticks every 20 ms of a clock that only work moves."""

import gc
import json
import logging
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dovetail.errors import HardwareError, NotSupported
from dovetail.measure import energy

UUID = bytes(range(0xF0, 0x100))
HIP_UUID = b"18f68e602b8a790f"
TICK_S, LOOK_S = 0.020, 20e-6
IDLE_W, BUSY_W = 80.0, 300.0
ROUNDING_J = 0.001  # the counter counts millijoules


class NVMLError(Exception):
    pass


class FakeGpu(ModuleType):
    """A clock, a GPU and its NVML. `advance` passes time at some power; the counter shows what it was at its tick."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.now_s = self.taken_j = self.shown_j = 0.0
        self.next_tick_s, self.watts = TICK_S, IDLE_W
        self.looks = self.users = 0
        self.lag_ticks, self.history = 0, [0.0]
        self.stuck = self.without_counter = self.without_power = False

    def advance(self, seconds: float, watts: float) -> None:
        end_s, self.watts = self.now_s + seconds, watts
        while self.next_tick_s <= end_s:
            self.taken_j += (self.next_tick_s - self.now_s) * watts
            self.now_s, self.next_tick_s = self.next_tick_s, self.next_tick_s + TICK_S
            self.history.append(self.taken_j)
            if not self.stuck:
                self.shown_j = self.history[max(0, len(self.history) - 1 - self.lag_ticks)]
        self.taken_j += (end_s - self.now_s) * watts
        self.now_s = end_s

    def work(self, seconds: float, watts: float = BUSY_W) -> Callable[[], None]:
        return lambda: self.advance(seconds, watts)

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, text: bytes) -> str:
        return text.decode()

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.without_counter:
            raise NVMLError("Not Supported")
        self.looks += 1
        self.advance(LOOK_S, self.watts)
        return round(self.shown_j * 1000)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.without_power:
            raise NVMLError("Not Supported")
        return round(BUSY_W * 1000)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    clock = SimpleNamespace(perf_counter=lambda: fake.now_s, sleep=lambda s: fake.advance(s, IDLE_W))
    monkeypatch.setattr(energy, "time", clock)
    return fake


@pytest.fixture
def meter(gpu: FakeGpu) -> energy.Meter:
    return energy.require(UUID)


def test_the_period_is_that_of_the_counter(meter: energy.Meter) -> None:
    assert energy.period(meter) == pytest.approx(TICK_S, abs=0.001)


@pytest.mark.parametrize("phase_ms", [0, 7, 13, 19])
@pytest.mark.parametrize("repetition_s", [50e-6, 0.005, 0.013, 0.7], ids=["50us", "5ms", "13ms", "700ms"])
def test_the_truth_lies_within_the_bound(gpu: FakeGpu, meter: energy.Meter, phase_ms: int, repetition_s: float) -> None:
    gpu.advance(phase_ms / 1000, IDLE_W)
    found = energy.measure(gpu.work(repetition_s), meter=meter, idle_w=IDLE_W)
    assert abs(found.joules - BUSY_W * found.seconds) <= found.resolution_j + ROUNDING_J
    assert found.repetitions == pytest.approx(found.seconds / repetition_s, rel=0.03)
    assert abs(found.net_joules - (BUSY_W - IDLE_W) * found.seconds) <= found.net_error_j + ROUNDING_J
    gap_s = min(max(repetition_s, TICK_S / 10) + 0.001, TICK_S)
    assert found.resolution_j <= 2 * gap_s * BUSY_W * 1.05
    assert 2.0 <= found.seconds < 2.0 + 2 * repetition_s + 2 * TICK_S
    assert found.note == ""


def test_a_counter_that_lags_is_given_time_to_settle(gpu: FakeGpu, meter: energy.Meter) -> None:
    gpu.lag_ticks = 8
    found = energy.measure(gpu.work(0.005), meter=meter, idle_w=IDLE_W)
    assert abs(found.joules - BUSY_W * found.seconds) <= found.resolution_j + ROUNDING_J


def test_short_work_has_a_bound_well_below_a_tick(gpu: FakeGpu, meter: energy.Meter) -> None:
    found = energy.measure(gpu.work(0.001), meter=meter, idle_w=IDLE_W)
    assert found.resolution_j < TICK_S * BUSY_W / 3


def test_looks_are_few_beside_short_work(gpu: FakeGpu, meter: energy.Meter) -> None:
    found = energy.measure(gpu.work(10e-6), meter=meter, idle_w=IDLE_W, period_s=TICK_S)
    assert found.repetitions > 100 * gpu.looks


def test_the_window_has_many_ticks(gpu: FakeGpu, meter: energy.Meter) -> None:
    found = energy.measure(gpu.work(0.005), meter=meter, seconds=0.01, idle_w=0)
    assert found.seconds >= 20 * found.period_s
    assert found.net_joules == found.joules


def test_the_window_is_bounded(gpu: FakeGpu, meter: energy.Meter) -> None:
    found = energy.measure(gpu.work(0.005), meter=meter, ticks=10**6, limit_s=3, idle_w=0)
    assert found.seconds < 3.1


def test_idle_power_is_measured_when_not_given(gpu: FakeGpu, meter: energy.Meter) -> None:
    power = energy.idle(meter, 1.0)
    assert abs(power.watts - IDLE_W) <= power.error_w
    assert power.error_w < 0.5
    found = energy.measure(gpu.work(0.005), meter=meter)
    assert abs(found.idle_w - IDLE_W) <= found.idle_error_w
    assert abs(found.net_joules - (BUSY_W - IDLE_W) * found.seconds) <= found.net_error_j + ROUNDING_J


def test_work_that_takes_nothing_is_reported_with_the_bound(gpu: FakeGpu, meter: energy.Meter) -> None:
    for watts in (IDLE_W - 0.01, IDLE_W, IDLE_W + 0.01):
        found = energy.measure(gpu.work(0.005, watts), meter=meter)
        assert 0 <= found.net_joules <= found.net_error_j
        assert "at most" in found.note


def test_less_than_idle_says_so(gpu: FakeGpu, meter: energy.Meter) -> None:
    found = energy.measure(gpu.work(0.005, 60), meter=meter, idle_w=energy.Power(watts=90, error_w=0.1))
    assert found.net_joules < -found.net_error_j
    assert "negative" in found.note


def test_joules_per_gigabyte(gpu: FakeGpu, meter: energy.Meter) -> None:
    found = energy.measure(gpu.work(0.010), meter=meter, idle_w=IDLE_W)
    size_bytes = 500_000_000
    assert found.joules_per_gb(size_bytes) == pytest.approx((BUSY_W - IDLE_W) * 0.010 / 0.5, rel=0.02)
    assert 0 < found.error_per_gb(size_bytes) < 0.1 * found.joules_per_gb(size_bytes)
    with pytest.raises(ValueError, match="some bytes, got 0"):
        found.joules_per_gb(0)
    row = json.loads(json.dumps(found.row()))
    assert {"meter", "joules", "net_joules", "net_error_j", "resolution_j", "idle_w", "repetitions"} <= set(row)


@pytest.mark.parametrize("arguments", [{"seconds": 0}, {"ticks": 0}, {"limit_s": -1}])
def test_bad_arguments(gpu: FakeGpu, meter: energy.Meter, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        energy.measure(gpu.work(0.1), meter=meter, **arguments)


def test_a_counter_that_stands_still(gpu: FakeGpu, meter: energy.Meter) -> None:
    gpu.stuck = True
    with pytest.raises(HardwareError, match="stood still"):
        energy.period(meter)
    with pytest.raises(HardwareError, match="stood still"):
        energy.measure(gpu.work(0.005), meter=meter, period_s=TICK_S, idle_w=0)


def test_a_counter_that_runs_backwards(gpu: FakeGpu, meter: energy.Meter) -> None:
    gpu.taken_j = gpu.shown_j = 1e6

    def work() -> None:
        gpu.advance(0.005, BUSY_W)
        if gpu.now_s > 1.5:
            gpu.taken_j = min(gpu.taken_j, BUSY_W * gpu.now_s)

    with pytest.raises(HardwareError, match="backwards"):
        energy.measure(work, meter=meter, period_s=TICK_S, idle_w=0)


def test_nvml_is_let_go(gpu: FakeGpu) -> None:
    with energy.require(UUID) as meter:
        assert meter.name == "NVML energy counter"
        assert meter.watts() == BUSY_W
        assert gpu.users == 1
    assert gpu.users == 0


def test_no_nvml_is_no_meter_and_a_reason(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level(logging.INFO):
        assert energy.meter(UUID) is None
    assert "pip install nvidia-ml-py" in caplog.text
    with pytest.raises(NotSupported, match="nvidia-ml-py"):
        energy.require(UUID)


def test_neither_joules_nor_watts(gpu: FakeGpu) -> None:
    gpu.without_counter = gpu.without_power = True
    with pytest.raises(NotSupported, match="neither joules nor watts"):
        energy.require(UUID)
    assert gpu.users == 0


def test_the_integral_of_power() -> None:
    integral = energy.Integral()
    for time_s, watts in [(10.0, 100.0), (11.0, 300.0), (11.5, 300.0)]:
        integral.add(time_s, watts)
    assert integral.joules == pytest.approx(200 + 150)


class FakeSource:
    """A meter without a counter; `sampled` is set when its power was read a few times."""

    name, settle_s = "NVML energy counter", 0.2

    def __init__(self) -> None:
        self.reads, self.closed = 0, False
        self.sampled, self.broken = threading.Event(), threading.Event()

    def joules(self) -> float:
        raise HardwareError("no counter")

    def watts(self) -> float:
        if self.broken.is_set():
            raise HardwareError("GPU is lost")
        self.reads += 1
        if self.reads > 3:
            self.sampled.set()
        return BUSY_W

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> "FakeSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def power_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dovetail-power"]


def test_without_a_counter_power_is_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    fake.without_counter = True
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    with energy.require(UUID) as meter:
        assert meter.name == "NVML power, summed up"
        found = energy.measure(lambda: threading.Event().wait(0.002), meter=meter, seconds=0.2, ticks=5, idle_w=0)
    assert found.watts == pytest.approx(BUSY_W, rel=0.5)  # in real time: a loaded machine samples late
    assert not power_threads()
    assert fake.users == 0


def test_an_interrupt_leaves_no_thread() -> None:
    source = FakeSource()

    def interrupted() -> None:
        with energy.PowerMeter(source, sample_s=0.001) as meter:
            assert source.sampled.wait(30)
            assert meter.joules() > 0
            assert [thread.daemon for thread in power_threads()] == [True]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not power_threads()
    assert source.closed


def test_the_thread_ends_with_a_meter_that_was_forgotten() -> None:
    source = FakeSource()
    meter = energy.PowerMeter(source, sample_s=0.001)
    (thread,) = power_threads()
    del meter
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_power_that_can_no_longer_be_read() -> None:
    source = FakeSource()
    with energy.PowerMeter(source, sample_s=0.001) as meter:
        (thread,) = power_threads()
        source.broken.set()
        thread.join(30)
        with pytest.raises(HardwareError, match="GPU is lost"):
            meter.joules()


@pytest.mark.parametrize("name", ["energy_accumulator", "power"])
def test_amd(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake = SimpleNamespace(
        AmdSmiException=NVMLError,
        amdsmi_init=lambda: None,
        amdsmi_get_processor_handles=lambda: ["one"],
        amdsmi_get_gpu_asic_info=lambda handle: {"asic_serial": "0x18F68E602B8A790F"},
        amdsmi_get_energy_count=lambda handle: {name: 2_000_000, "counter_resolution": 15.0},
        amdsmi_get_power_info=lambda handle: {"current_socket_power": 140, "average_socket_power": "N/A"},
    )
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    with energy.require(HIP_UUID) as meter:
        assert meter.name == "AMD SMI energy counter"
        assert (meter.joules(), meter.watts()) == (30, 140)
    fake.amdsmi_get_energy_count = lambda handle: {name: "N/A"}
    with energy.require(HIP_UUID) as meter:
        assert meter.name == "AMD SMI power, summed up"
