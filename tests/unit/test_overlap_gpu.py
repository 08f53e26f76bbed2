"""Two on one GPU, by every strategy, on the stand-in drivers of CUDA and HIP: order under delays, streams, shares,
times, choices. HIP has no stream with both a mask and a priority: what is refused there has tests at the end."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests import standin

from dovetail.bench.overlap import plans
from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, SourceOrder, Words
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.hip import HipDriver
from dovetail.overlap import (
    Call,
    Load,
    LocalCommunication,
    Mover,
    Runtime,
    Setting,
    Strategy,
    Traffic,
    policy,
    tasks,
    trials,
)
from dovetail.overlap.contenders import ROUNDS_BEFORE_KEPT
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.tables import BySize, Tables
from dovetail.overlap.tasks import Bound
from dovetail.overlap.timing import GpuTimer
from dovetail.plan import passes
from dovetail.plan.build import all_gather

from .gpulib import Control, until, view

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
        self.path = str(standin.build("hip"))
        self._library = ctypes.CDLL(self.path)
        self._library.standin_calls.restype = ctypes.c_size_t
        self._library.standin_calls.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

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
        self.settings = settings_of(device.driver.name)
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
@every_setting
def test_both_come_behind_the_callers_stream_and_before_what_follows(
    control: Control, two: Two, setting: Setting, steps: int
) -> None:
    control.set(DELAY_US=300)
    two.steps = steps
    in_order(two, setting, two.main)


def in_order(two: Two, setting: Setting, main: int) -> None:
    """The caller writes the input, runs both, copies both results and overwrites them; every step with a delay. The
    computation is the shorter one, or with more steps the longer one."""
    driver = two.device.driver
    kept = two.heaps[1].empty((3 * SIZE,), torch.uint8)
    for byte in range(1, 9):
        two.value = byte + 100
        two.out[1][SIZE:] = byte + 50
        two.fill(two.out[0][:SIZE], byte, main)
        for _ in range(4):
            two.fill(two.result, 0, main)
        _, pending = two.place.launch(two.computation(two.place), two.comm, setting, main)
        for n, source in enumerate((two.out[0][SIZE:], two.result)):
            driver.copy(kept[n * SIZE :].data_ptr(), source.data_ptr(), SIZE, main)
        driver.copy(kept[2 * SIZE :].data_ptr(), two.out[1].data_ptr(), SIZE, main)
        two.fill(two.result, 0, main)
        two.fill(two.out[0][SIZE:], 0, main)
        assert pending is not None
        pending.wait()
        until(lambda: driver.stream_done(main))
        found = [set(part.tolist()) for part in np.split(kept.numpy(), 3)]
        assert found == [{byte + 50}, {byte + 100}, {byte}], setting


@pytest.mark.parametrize("steps", [1, 12])
@every_setting
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
    for setting in two.settings:  # made and bound
        place.launch(computation, two.comm, setting, two.main)
    two.device.driver.stream_synchronize(two.main)
    for setting in two.settings[2:]:
        control.calls()
        place.launch(computation, two.comm, setting, two.main)
        lines = [line.split()[0] for line in control.calls() if "Memcpy" in line or "Memset" in line]
        first = "Memset" if setting.strategy in (Strategy.STREAMS, Strategy.PARTITION) else "Memcpy"
        assert first in lines[0], (setting, lines)
    assert place.lanes(Setting(Strategy.PRIORITY)).comm != place.lanes(Setting(Strategy.STREAMS)).comm


def test_shares_are_made_once_and_given_back(control: Control, two: Two) -> None:
    made = SHARE[two.place.backend]
    setting = Setting(Strategy.PARTITION, 8)
    assert two.place.lanes(setting) is two.place.lanes(setting)
    lines = control.calls()
    assert len([line for line in lines if line.startswith(made)]) == 2
    assert len([line for line in lines if line.startswith("cuGreenCtxCreate")]) in (0, 2)
    two.place.lanes(Setting(Strategy.DMA_PARTITION, 8))
    assert not control.calls("cuGreenCtxCreate")
    two.place.close()
    destroyed = control.calls()
    if two.place.backend == "hip":
        assert len([line for line in destroyed if line.startswith("hipStreamDestroy")]) == 3 + 2  # and two without
        assert not control._library.standin_masked_streams()
    else:
        assert len([line for line in destroyed if line.startswith("cuGreenCtxDestroy")]) == 2


@every_setting
@pytest.mark.parametrize("default", [False, True], ids=["own", "default"])
def test_they_run_beside_each_other(two: Two, setting: Setting, default: bool) -> None:
    side_by_side(two, setting, 0 if default else two.main)


def side_by_side(two: Two, setting: Setting, main: int) -> None:
    """The computation stands before a closed gate: the communication is over all the same, and not if it is serial."""
    driver = two.device.driver
    word = two.device.pinned(8).array.view(np.uint64)
    word[0] = 0

    def stands() -> None:
        driver.stream_words(waits_for(word, 1), two.place.stream)
        two.compute(9, two.place.stream)

    two.place.launch(Call(lambda: None), two.comm, setting, main)  # made and bound
    until(lambda: driver.stream_done(main))
    two.fill(two.out[0][:SIZE], 7, main)
    two.fill(two.result, 0, main)
    pending: Any = two.place.launch(Call(stands), two.comm, setting, main)[1]
    try:
        if setting.strategy is Strategy.SERIAL:
            assert not pending.is_over()
        else:
            until(pending.is_over, 5)
            assert set(view(two.out[1].data_ptr(), SIZE).tolist()) == {7}
        assert not driver.stream_done(main)
        until(lambda: set(view(two.result.data_ptr(), SIZE).tolist()) == {0}, 5)  # as far as the gate
    finally:
        word[0] = 1
    until(lambda: driver.stream_done(main))
    assert set(view(two.result.data_ptr(), SIZE).tolist()) == {9}
    assert set(view(two.out[1].data_ptr(), SIZE).tolist()) == {7}


def waits_for(word: Any, value: int) -> Any:
    rows = np.zeros(1, WORD)
    rows["kind"], rows["address"], rows["value"] = WAIT, word.ctypes.data, value
    return rows


def test_times_have_a_common_start(control: Control, two: Two) -> None:
    with GpuTimer(two.place) as timer:
        for setting in two.settings:
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
        if strategy is not Strategy.FUSED and (two.place.backend, strategy) != ("hip", Strategy.PRIORITY_PARTITION):
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
                two.comm.traffic, two.comm.movers, num_cores=132, core_step=8, idle_step=2, has_partition=False
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

    for setting in two.settings:
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


def test_a_thread_that_has_not_used_the_gpu(control: Control) -> None:
    """The second GPU, from a thread in which none is current: its streams are on that GPU."""
    control.reset()
    control.set(DEVICES=2)
    driver = control.device().driver
    second = Device(driver.name, 1, driver=driver)
    seen: list[str] = []

    def make() -> None:
        control.calls()
        GpuPlace(second).close()
        seen.extend(line for line in control.calls() if "SetDevice" in line or "CtxSet" in line or "Create" in line)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert seen[0] in ("hipSetDevice device=1", "cuCtxSetCurrent context=0x2"), seen
    second.close()
    control.reset()


def test_a_pair_runs_from_any_thread(two: Two, runtime: Runtime) -> None:
    """The runtime was made in another thread, and this one has used no GPU."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(runtime.run(lambda: 3, two.comm).wait()))
    thread.start()
    thread.join()
    assert found == [3]


# --- HIP: masks of compute units --------------------------------------------------------------------------------------


def bits_of(line: str) -> set[int]:
    """The compute units of a mask, of a line of the record."""
    words = [int(word, 16) for word in line.partition("mask=")[2].split(",")]
    return {32 * at + bit for at, word in enumerate(words) for bit in range(32) if word >> bit & 1}


@on_hip
@pytest.mark.parametrize("cores", [8, 16, 64])
def test_masks_of_a_partition_have_nothing_in_common(control: Control, two: Two, cores: int) -> None:
    control.calls()
    two.place.prepare(Setting(Strategy.PARTITION, cores))
    comm, compute = sorted((bits_of(line) for line in control.calls(SHARE["hip"])), key=len)
    assert (len(comm), len(compute)) == (cores, 304 - cores)
    assert comm | compute == set(range(304))
    lanes = two.place.lanes(Setting(Strategy.PARTITION, cores))
    assert lanes.compute != lanes.comm
    two.place.prepare(Setting(Strategy.DMA_PARTITION, cores))
    (line,) = control.calls(SHARE["hip"])  # the computation goes without, nobody else has them
    assert bits_of(line) == compute


@on_hip
def test_priority_and_partition_is_refused_before_anything_starts(control: Control, two: Two, runtime: Runtime) -> None:
    ran: list[str] = []
    for _ in range(2):
        control.calls()
        with pytest.raises(NotSupported, match=r"priority\+partition: HIP gives streams with a mask .* no priority"):
            runtime.run(lambda: ran.append("run"), two.comm, "priority+partition")
        with pytest.raises(NotSupported, match="priority"), runtime.beside(two.comm, "priority+partition"):
            ran.append("beside")
        assert not [line for line in control.calls() if "Memcpy" in line or "Memset" in line or "StreamWait" in line]
        assert not control._library.standin_masked_streams()
    assert not ran
    runtime.run(lambda: ran.append("run"), two.comm, "partition", cores=8).wait()  # the same cores, without
    assert ran == ["run"]


def with_it_first(settings: Sequence[Setting]) -> policy.Ranking:
    return policy.Ranking(order=(NOT_ON_HIP, *settings), words=lambda: "a table says so")


def test_auto_leaves_out_what_the_driver_refuses(
    two: Two, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tables of another machine put it first: on HIP `auto` says that it can't and goes on."""
    monkeypatch.setattr(policy, "choose", lambda *_, **__: with_it_first(two.settings))
    taken = [runtime.run(two.computation(two.place), two.comm) for _ in range(ROUNDS_BEFORE_KEPT + 2)]
    for outcome in taken:
        outcome.wait()
    tried = {outcome.setting for outcome in taken}
    refused = two.place.backend == "hip"
    assert (NOT_ON_HIP in tried) is not refused
    assert len(tried) > 2
    told = [record.getMessage() for record in caplog.records if "auto leaves out" in record.getMessage()]
    assert len(told) == refused  # once, not with every run
    assert all("priority+partition 16" in text and "no priority" in text for text in told)


class Blocking(HipDriver):
    """What the software device leaves out: a stream with a mask waits for the default one, and that one for all such.

    (`hipExtStreamCreateWithCUMask` takes no flags, so its streams are not `hipStreamNonBlocking`.)
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.masked: set[int] = set()

    def stream_create_masked(self, mask_words: Sequence[int]) -> int:
        made = super().stream_create_masked(mask_words)
        self.masked.add(made)
        return made

    def stream_destroy(self, stream: int) -> None:
        self.masked.discard(stream)
        super().stream_destroy(stream)

    def _meet(self, stream: int) -> None:
        for other in self.masked if stream == 0 else {0} if stream in self.masked else ():
            event = self.event_create()
            super().event_record(event, other)
            super().stream_wait_event(stream, event)
            self.event_destroy(event)

    def event_record(self, event: int, stream: int) -> None:
        self._meet(stream)
        super().event_record(event, stream)

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._meet(stream)
        super().stream_wait_event(stream, event)

    def copy(self, dst: int, src: int, size_bytes: int, stream: int) -> None:
        self._meet(stream)
        super().copy(dst, src, size_bytes, stream)

    def fill(self, address: int, byte: int, size_bytes: int, stream: int) -> None:
        self._meet(stream)
        super().fill(address, byte, size_bytes, stream)

    def stream_words(self, rows: Any, stream: int) -> None:
        self._meet(stream)
        super().stream_words(rows, stream)

    def prepared_batch(
        self, dst: Words, src: Words, size: Words, order: SourceOrder, stream: int
    ) -> Callable[[], None]:
        issue = super().prepared_batch(dst, src, size, order, stream)

        def met() -> None:
            self._meet(stream)
            issue()

        return met


@pytest.fixture
def blocking(control: Control) -> Iterator[Two]:
    control.reset()
    device = Device("hip", driver=Blocking(control.path))
    made = Two(device)
    yield made
    made.close()
    device.close()
    control.reset()


@on_hip
@pytest.mark.parametrize("setting", settings_of("hip"), ids=str)
def test_masked_streams_beside_the_default_stream(control: Control, blocking: Two, setting: Setting) -> None:
    """The caller's stream is the default one, for which masked streams wait and which waits for them: right, and no
    circle; the two still run beside each other."""
    control.set(DELAY_US=300)
    in_order(blocking, setting, 0)
    blocking.steps = 12
    in_order(blocking, setting, 0)
    side_by_side(blocking, setting, 0)


@on_hip
def test_a_pair_in_the_default_stream_settles(blocking: Two) -> None:
    with Runtime(blocking.device) as runtime:
        assert runtime.main() == 0
        test_a_pair_is_tried_and_the_fastest_is_kept(blocking, runtime)


class InMain(Runtime):
    """As if torch's current stream were the test's."""

    def __init__(self, two: Two) -> None:
        super().__init__(two.device)
        self._stream = two.main

    def main(self) -> int:
        return self._stream


class Captured:
    """A communication that may be captured, as a library's."""

    traffic = Traffic(kind="all_gather", size_bytes=1 << 22)
    movers = frozenset(Mover)
    group = None

    def __init__(self, two: Two) -> None:
        self._two, self.device = two, two.device

    def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> None:
        if mover is Mover.ENGINES and self._two.value == FAILS:
            self._two.fill(self._two.out[0], 3, stream)
            raise HardwareError("the driver refused the rest")
        self._two.fill(self._two.out[0], 3, stream)


FAILS = 77


def test_a_host_that_is_ahead_of_the_gpu_gets_a_decision(control: Control, two: Two) -> None:
    """Each time four runs are under way when the next one comes."""
    control.set(DELAY_US=100)
    with InMain(two) as runtime:
        behind: list[Any] = []
        for _ in range(ROUNDS_BEFORE_KEPT + 30):
            behind.append(runtime.run(two.computation(runtime.place), two.comm))  # type: ignore[arg-type]
            if len(behind) > 4:
                behind.pop(0).wait()
        assert behind[-1].reason.startswith("measured: ")


def test_a_captured_run_is_not_timed(control: Control, two: Two) -> None:
    """Nor is the driver asked for the times of earlier ones, which would end the capture."""
    driver, comm = two.device.driver, Captured(two)
    with InMain(two) as runtime:
        for _ in range(3):
            runtime.run(lambda: two.fill(two.result, 1, two.main), comm)
            driver.stream_synchronize(two.main)
            control.calls()
            driver.graph_begin(two.main)
            for name in ("known", "new"):
                runtime.run(Call(lambda: None, Load(name=name)), comm)
            with runtime.beside(comm, name="known"):
                pass
            driver.graph_destroy(driver.graph_end(two.main))
            asked = [line for line in control.calls() if "EventQuery" in line or "Elapsed" in line or "Green" in line]
            assert not asked
        for _ in range(ROUNDS_BEFORE_KEPT + 2):
            outcome = runtime.run(lambda: two.fill(two.result, 1, two.main), comm)
            driver.stream_synchronize(two.main)
        assert outcome.reason.startswith("measured: ")


def test_a_kept_pair_is_captured_at_any_count(
    control: Control, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each eighth run is timed and each 64th decides: a captured one does neither, and a plain one asks for nothing."""
    monkeypatch.setattr(trials, "DEMOTED", 1e9)
    driver, comm = two.device.driver, Captured(two)
    with InMain(two) as runtime:

        def run() -> Any:
            outcome = runtime.run(Call(lambda: two.fill(two.result, 1, two.main), Load(name="known")), comm)
            driver.stream_synchronize(two.main)
            return outcome

        for _ in range(ROUNDS_BEFORE_KEPT + 2):
            kept = run().setting
        asked = []
        for _ in range(70):
            driver.graph_begin(two.main)
            control.calls()
            captured = runtime.run(Call(lambda: None, Load(name="known")), comm)
            calls = control.calls()
            driver.graph_destroy(driver.graph_end(two.main))
            assert captured.setting == kept
            assert not [line for line in calls if "EventQuery" in line or "Elapsed" in line]
            assert len([line for line in calls if "EventRecord" in line]) <= 2  # none for times
            control.calls()
            assert run().setting == kept
            asked.append(sum("IsCapturing" in line for line in control.calls()))
        assert 0 < sum(asked) < len(asked)


def test_the_current_stream_by_torchs_short_way(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found when torch sees the GPU; until then as everywhere."""
    place = two.place
    assert place.current_stream() == 0
    monkeypatch.setattr(tensors, "current_stream", lambda index: 70 + index)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 80 + index, raising=False)
    assert place.current_stream() == 70
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [place.current_stream() for _ in range(2)] == [70, 80]
    other = GpuPlace(two.device)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream")
    assert [other.current_stream() for _ in range(2)] == [70, 70]
    other.close()


def test_events_of_failed_runs_are_given_back(control: Control, two: Two) -> None:
    def fails() -> None:
        raise RuntimeError("no")

    with InMain(two) as runtime:
        with pytest.raises(RuntimeError, match="no"):
            runtime.run(fails, two.comm)
        control.calls()
        for _ in range(40):
            with pytest.raises(RuntimeError, match="no"):
                runtime.run(fails, two.comm)
            with pytest.raises(RuntimeError, match="no"), runtime.beside(two.comm, name="x"):
                fails()
        made = [line for line in control.calls() if "EventCreate" in line]
        assert len(made) < 20  # each setting binds some of its own, once


@pytest.mark.parametrize("form", ["launch", "beside"])
def test_a_start_that_fails_half_way_is_waited_for(control: Control, two: Two, form: str) -> None:
    control.set(DELAY_US=2000)
    two.value, comm = FAILS, Captured(two)

    def attempt() -> None:
        if form == "launch":
            two.place.launch(Call(lambda: None), comm, Setting(Strategy.DMA), two.main)
            return
        with two.place.beside(comm, Setting(Strategy.DMA), two.main):
            pass

    for _ in range(4):
        two.fill(two.out[0], 9, two.main)
        with pytest.raises(HardwareError, match="refused"):
            attempt()
        two.fill(two.out[0], 5, two.main)
        two.device.driver.stream_synchronize(two.main)
        assert set(view(two.out[0].data_ptr(), SIZE).tolist()) == {5}


def test_a_closed_one_runs_nothing(control: Control, two: Two) -> None:
    """And waits before it gives shares back."""
    control.set(DELAY_US=2000)
    two.steps, two.value = 6, 31
    runtime = InMain(two)
    runtime.run(two.computation(runtime.place), two.comm, "partition")  # type: ignore[arg-type]
    runtime.close()
    assert set(view(two.result.data_ptr(), SIZE).tolist()) == {31}  # its streams were waited for
    for strategy in ("auto", "dma", "partition", "serial"):
        with pytest.raises(ValueError, match="closed"):
            runtime.run(lambda: None, two.comm, strategy)
    runtime.close()


def test_shares_of_the_same_size_are_one(control: Control, two: Two) -> None:
    """Cores that stay idle are cut off in finer steps than those that work."""
    control.calls()
    for cores in range(1, 9):
        two.place.lanes(Setting(Strategy.PARTITION, cores))
    if two.place.backend == "cuda":
        assert len(control.calls("cuGreenCtxCreate")) == 2
    for cores in range(1, 9):
        two.place.lanes(Setting(Strategy.DMA_PARTITION, cores))
    if two.place.backend == "cuda":
        counts = [line.split("count=")[1].split()[0] for line in control.calls("cuGreenCtxCreate")]
        assert counts == ["2", "130", "4", "128", "6", "126"]  # eight are there already
        two.place.lanes(Setting(Strategy.PRIORITY_PARTITION, 2))  # where two work, eight are cut off
        assert not control.calls("cuGreenCtxCreate")


def test_how_many_stay_idle_by_default(two: Two, runtime: Runtime) -> None:
    fewest = 2 if two.place.backend == "cuda" else 8
    assert runtime.forced(two.comm, "dma+partition") == Setting(Strategy.DMA_PARTITION, fewest)
    assert runtime.forced(two.comm, "dma+partition", 6) == Setting(Strategy.DMA_PARTITION, 6)
    assert runtime.forced(two.comm, "partition") == Setting(Strategy.PARTITION, 8)
    offered = [s for s in runtime.explain(None, two.comm).order if s.strategy is Strategy.DMA_PARTITION]
    assert offered == [Setting(Strategy.DMA_PARTITION, fewest)]


def test_what_is_no_communication(two: Two, runtime: Runtime) -> None:
    with pytest.raises(TypeError, match="function has no traffic"):
        runtime.run(lambda: None, lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="auto chooses them"):
        runtime.run(lambda: None, two.comm, cores=4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops": None}, {"flops": "1e9"}, {"flops": -1.0}, {"flops": float("nan")}, {"flops": float("inf")},
        {"size_bytes": -1}, {"groups": -1}, {"launches": 0}, {"flops": [1e9]},
    ],
)  # fmt: skip
def test_hints_that_can_not_be(two: Two, runtime: Runtime, wrong: dict[str, Any]) -> None:
    """Refused before anything is launched, whether or not there are tables; what else the field may have is said."""
    ran: list[int] = []
    (name, value), *_ = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"Load({name}={value!r}): it must be a number")):
        runtime.run(Call(lambda: ran.append(1), Load(**wrong)), two.comm)
    assert not ran
    with pytest.raises(ValueError, match=re.escape(f"Load({name}={value!r}): it must be a number")):
        runtime.explain(Call(lambda: None, Load(**wrong)), two.comm)
    with pytest.raises(TypeError, match=r"is text, not \['a'\]; say which field"):
        runtime.run(Call(lambda: ran.append(1), Load(name=["a"])), two.comm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"is text, not 1000000000000.0; say which field: Load\(flops=...\)"):
        runtime.run(Call(lambda: ran.append(1), Load(1e12)), two.comm)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is an overlap.Load, not dict"):
        Call(lambda: None, {"flops": 1e9})  # type: ignore[arg-type]
    assert not ran


@pytest.mark.parametrize("cores", [-1, 1000, 1.5, True, "8"])
def test_cores_that_can_not_be(two: Two, runtime: Runtime, cores: Any) -> None:
    with pytest.raises(ValueError, match=f"cores: a number from 0 to {two.place.num_cores - 1}, not "):
        runtime.run(lambda: None, two.comm, "streams", cores=cores)
    with pytest.raises(ValueError, match="auto chooses them"), runtime.beside(two.comm, cores=cores):
        pass
    with pytest.raises(ValueError, match="dma takes none"):
        runtime.run(lambda: None, two.comm, "dma", cores=8)


def test_the_reason_is_that_of_what_ran(two: Two, runtime: Runtime) -> None:
    """While settings are tried in turn it says so, of the chosen one too, and why that one was chosen."""
    pair = Call(lambda: None, Load(name="tried"))
    words = runtime.explain(pair, two.comm).reason
    tried = [runtime.run(pair, two.comm) for _ in range(4)]
    assert len({outcome.setting for outcome in tried}) > 1
    for outcome in tried:
        assert outcome.reason.startswith("on trial: ")
        assert outcome.reason.endswith(f"so far {tried[0].setting}: {words}")
        assert str(outcome.setting) in outcome.reason
    for _ in range(ROUNDS_BEFORE_KEPT):
        kept = runtime.run(pair, two.comm)
        kept.wait()
    assert kept.reason.startswith("measured: ")
    found = runtime.explain(pair, two.comm)
    assert repr(found) == f"Ranking({found.choice}: {found.reason})"


def test_callables_that_compute_something_else_have_another_name(two: Two) -> None:
    """The same in every run: nothing of it is an address or counts steps."""
    small, large = torch.zeros(4, 4), torch.zeros(8, 8)
    given: list[Any] = [
        functools.partial(torch.mm, small, small), functools.partial(torch.mm, large, large),
        functools.partial(torch.mm, small, mat2=small), functools.partial(round, 1.5, 2), functools.partial(round, 1.5),
        torch.nn.Linear(4, 4), torch.nn.Linear(4, 8), functools.partial(torch.nn.Linear(4, 8), small),
        lambda: None, nothing, two.computation,
    ]  # fmt: skip
    names = [tasks.computation(each)[1].name for each in given]
    assert len(set(names)) == len(names)
    assert names == [tasks.computation(each)[1].name for each in given]
    assert tasks.computation(torch.nn.Linear(4, 8))[1].name == names[6]
    assert "0x" not in "".join(names)
    once, again = (tasks.computation(functools.partial(round, step, True))[1].name for step in (1, 2))
    assert once == again
    assert once != tasks.computation(functools.partial(round, 1, False))[1].name


def test_a_name_that_ranks_have_alike() -> None:
    """Each has tokens, numbers, texts and shares of the weights of its own, but the same functions and classes."""
    few, many = torch.zeros(3, 4), torch.zeros(5, 4)
    for one, other in (
        (functools.partial(torch.mm, few, out=few), functools.partial(torch.mm, many)),
        (functools.partial(nothing, 0, "rank 0"), functools.partial(nothing, 1, "rank 1", None)),
        (torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)),
        (functools.partial(torch.nn.Linear(4, 4), few), functools.partial(torch.nn.Linear(4, 8), many)),
    ):
        names = {tasks.computation(given, alike=True)[1].name for given in (one, other)}
        assert len(names) == 1
        assert tasks.computation(one)[1].name != tasks.computation(other)[1].name
    every = [torch.nn.Linear(4, 4), torch.nn.ReLU(), nothing, functools.partial(round, 1.5), functools.partial(abs, 1)]
    assert len({tasks.computation(given, alike=True)[1].name for given in every}) == len(every)


def nothing() -> None: ...


def test_two_lambdas_of_one_function_are_two_computations(two: Two) -> None:
    with InMain(two) as runtime:
        for function in (lambda: 1, lambda: 2, lambda: 3):
            runtime.run(function, two.comm)
        first = runtime.explain(lambda: 1, two.comm)
        assert first.choice in first.order
        assert len(runtime._pairs) == 1  # of one line
        runtime.run(
            lambda: 4,
            two.comm,
        )
        assert len(runtime._pairs) == 2


@pytest.mark.parametrize("ways", [("out", "into"), ("into", "out")])
def test_copies_the_other_way_do_not_wait(two: Two, ways: tuple[str, str]) -> None:
    """One stands behind a caller's stream that is busy; what goes the other way, for another stream, gets on."""
    driver = two.device.driver
    comms, ends = [], []
    for way in ways:
        source, target = (1, 0) if way == "into" else (0, 1)
        sides = ((source, "from"), (target, "to"))
        made = {(r, f"{way} {end}"): two.heaps[r].empty((SIZE,), torch.uint8) for r, end in sides}
        view(made[source, f"{way} from"].data_ptr(), SIZE)[:] = 7
        ends.append(view(made[target, f"{way} to"].data_ptr(), SIZE))
        ends[-1][:] = 0
        plan = passes.entry(plans.copies((way,), 1, SIZE))
        comms.append(LocalCommunication(two.device, plan, made, host_ranks=HOST, kind="fetch"))
    word, wait = two.device.pinned(8).array.view(np.uint64), np.zeros(1, WORD)
    word[0] = 0
    wait["kind"], wait["address"], wait["value"] = WAIT, word.ctypes.data, 1
    driver.stream_words(wait, two.main)
    other = driver.stream_create()
    runs = [comm.start(Mover.ENGINES, stream=stream) for comm, stream in zip(comms, (two.main, other), strict=True)]
    try:
        runs[1].wait(10)
        assert set(ends[1].tolist()) == {7}
        assert set(ends[0].tolist()) == {0}
    finally:
        word[0] = 1
        for run in runs:
            run.wait(10)
    assert set(ends[0].tolist()) == {7}
    for comm in comms:
        comm.close()
    driver.stream_destroy(other)


def test_an_estimate_is_of_what_was_asked(two: Two) -> None:
    """It is kept for the next pair of the same sizes, and for no other."""
    figures = {("all_gather", mover): BySize(((SIZE, 10.0, 0),)) for mover in Mover}
    known = Tables(
        num_cores=132, core_step=8, flops=1e12, memory_bytes_per_s=1e11, link_bytes_per_s=1e10, alone=figures,
        compute_alone={Bound.MEMORY: BySize(((1000, 50.0, 132),))},
    )  # fmt: skip
    engines_only = SimpleNamespace(traffic=two.comm.traffic, movers=frozenset({Mover.ENGINES}), group=None)
    with Runtime(two.device, known=known) as runtime:

        def least(comm: Any = two.comm, **load: float) -> float:
            asked = [runtime.explain(Call(lambda: None, Load(name=f"{turn}", **load)), comm) for turn in range(2)]
            assert asked[0] is asked[1]
            return asked[0].predictions[0].time_us

        assert least(flops=1e9) == pytest.approx(1010.0)
        assert least(flops=2e9) == pytest.approx(2010.0)
        assert least(flops=1e6, size_bytes=1e6) == pytest.approx(50_010.0)
        assert least(flops=1e6, size_bytes=1e6, launches=1000) == pytest.approx(50_010.0)
        assert least(flops=1e5, size_bytes=1e5, launches=1000) == pytest.approx(50_010.0)
        assert least(flops=1e5, size_bytes=1e5) == pytest.approx(5_010.0)
        few = runtime.explain(Call(lambda: None, Load(flops=1e9)), engines_only)
        assert {setting.moved_by for setting in few.order} == {Mover.ENGINES}
