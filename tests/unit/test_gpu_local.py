"""Plans on one GPU and host memory, run by the stand-in driver: bytes, gates, streams, refusals and clean ends."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.errors import HardwareError, NotSupported, PlanError, Timeout
from dovetail.hw.gpu import local, ticket
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE, DriverError, Kind
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.local import LocalRunner
from dovetail.plan import Op, Plan, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.build.assembly import Assembly

from .gpulib import Control, number, tensors_of, until, view, wrong
from .randomplans import contents_of, random_plan, reference, without_wait

HOST = frozenset({1, 2, 3, 4, 5, 6, 7})


@pytest.fixture(scope="module")
def control() -> Control:
    return Control()


@pytest.fixture
def device(control: Control) -> Iterator[Device]:
    control.reset()
    made = control.device()
    yield made
    control.reset()
    made.close()


@pytest.fixture
def heaps(device: Device) -> Iterator[list[Heap]]:
    """Device memory and pinned host memory."""
    made = [Heap(device, kind, segment_bytes=1 << 20) for kind in ("device", "host")]
    yield made
    for heap in made:
        heap.close()


def lanes(seed: int) -> Callable[..., Any]:
    """Instead of a stream per direction: any queue on any stream."""
    rng = random.Random(seed)
    return lambda host, most: lambda queue: rng.randrange(most)


def copies(number_: int = 8, size: int = 64) -> Plan:
    """From rank 0's buffer to rank 1's, in pieces that are no progression."""
    a = Assembly("to the host", 2)
    total = number_ * number_ * size
    src, dst = a.buffer("input", Role.INPUT, [total, -2]), a.buffer("output", Role.OUTPUT, [-2, total])
    at = np.arange(number_, dtype=np.int64) ** 2 * size
    a.queue(0, 0, st.copy((0, src, at), (1, dst, at), size))
    return passes.entry(a.plan())


class Moved:
    """A copy from the GPU to the host: is it there yet?"""

    def __init__(self, heaps: list[Heap], size: int = 8 * 8 * 64) -> None:
        self.src = heaps[0].empty((size,), torch.uint8)
        self.src.numpy()[:] = np.random.default_rng(7).integers(1, 256, size, np.uint8)
        self.dst = heaps[1].empty((size,), torch.uint8)
        self.dst.zero_()
        self.buffers = {(0, "input"): self.src, (1, "output"): self.dst}
        at = np.arange(8) ** 2 * 64
        self.mask = np.zeros(size, bool)
        for a in at.tolist():
            self.mask[a : a + 64] = True

    @property
    def none(self) -> bool:
        return not self.dst.numpy().any()

    @property
    def all(self) -> bool:
        return bool(np.array_equal(self.dst.numpy()[self.mask], self.src.numpy()[self.mask]))


# --- bytes -----------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, Callable[[int, int], Plan]] = {
    "all_gather pcpy": all_gather.pcpy,
    "all_gather bcst": all_gather.bcst,
    "all_gather pull": all_gather.pull,
    "all_to_all pcpy": all_to_all.pcpy,
    "all_to_all pull": all_to_all.pull,
    "all_gather b2b": lambda n, size: passes.b2b(all_gather.pcpy(n, size)),
    "all_to_all b2b": lambda n, size: passes.b2b(all_to_all.pcpy(n, size)),
}


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_crosses_the_link(control: Control, device: Device, heaps: list[Heap], name: str, most: int) -> None:
    """Rank 0 is the GPU, its peers are host memory; delays before every copy."""
    control.set(DELAY_US=30)
    for world in (2, 4):
        plan = passes.crossing(passes.entry(VARIANTS[name](world, 1000)), 0)
        filled = contents_of(plan, world)
        want = reference(plan, filled)
        given = tensors_of(plan, filled, lambda r: heaps[r > 0])
        with LocalRunner(device, plan, host_ranks=HOST, most_streams=most) as runner:
            bound = runner.bind(given)
            done = bound.submit()
            done.wait(20)
            assert not wrong(plan, given, want), (name, world)
            assert set(done.bytes_by_path) <= {"h2d", "d2h", "d2d"}
            assert {"h2d", "d2h"} <= set(done.bytes_by_path)
            if "swap" not in name:
                bound.submit().wait(20)
                assert not wrong(plan, given, want)


@pytest.mark.parametrize("build", [all_to_all.swap, all_to_all.swap_copied])
def test_swaps(control: Control, device: Device, heaps: list[Heap], build: Callable[[int, int], Plan]) -> None:
    """In place, over scratch of the rank that swaps: on device memory it works, among peers in host memory it can't."""
    control.set(DELAY_US=30)
    plan = passes.entry(build(4, 1000))
    filled = contents_of(plan, 1)
    given = tensors_of(plan, filled, lambda r: heaps[0])
    with LocalRunner(device, plan) as runner:
        runner.submit(given).wait(20)
        assert not wrong(plan, given, reference(plan, filled))
    given = tensors_of(plan, filled, lambda r: heaps[r > 0])
    runner = LocalRunner(device, plan, host_ranks=HOST)
    with pytest.raises(NotSupported, match="from host memory to host memory"):
        runner.submit(given)
    runner.close()


@pytest.mark.parametrize("part", range(3))
def test_random_plans(
    control: Control, device: Device, heaps: list[Heap], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 of them each time, of 1 to 4 ranks on 1 to 4 streams, any queue on any stream, short batches, delays; two
    thirds of them by cores."""
    control.set(DELAY_US=3)
    for seed in range(100 * part, 100 * part + 100):
        world, most = 1 + seed % 4, 1 + seed // 4 % 4
        plan = random_plan(seed, ranks=world, moves=10, buffer_bytes=300)
        filled = contents_of(plan, seed)
        want = reference(plan, filled)
        monkeypatch.setattr(local, "by_direction", lanes(seed))
        given = tensors_of(plan, filled, lambda r: heaps[0])
        cores = seed // 16 % 3  # 0: by engines
        with LocalRunner(device, plan, most_streams=most, entries_per_call=1 + seed % 5, cores=cores) as runner:
            runner.submit(given).wait(20)
            assert not wrong(plan, given, want), seed


def test_random_plans_as_graphs(device: Device, heaps: list[Heap], monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        plan = random_plan(seed, ranks=2, moves=10, buffer_bytes=300, ops=(Op.COPY, Op.COPY2D, Op.SWAP, Op.BROADCAST))
        filled = contents_of(plan, seed)
        monkeypatch.setattr(local, "by_direction", lanes(seed))
        given = tensors_of(plan, filled, lambda r: heaps[0])
        with LocalRunner(device, plan, most_streams=1 + seed % 4) as runner:
            graph = runner.graph(given)
            for _ in range(2):
                filled = reference(plan, filled)
                graph.submit(after=0).wait(20)
                names = {b.name: n for n, b in enumerate(plan.buffers)}
                for r, name in given:
                    if plan.buffers[names[name]].role is not Role.SCRATCH:
                        assert np.array_equal(given[r, name].numpy(), filled[r, names[name]]), seed
                filled = {k: v for k, v in filled.items() if plan.buffers[k[1]].role is not Role.SCRATCH} | {
                    k: v for k, v in contents_of(plan, seed).items() if plan.buffers[k[1]].role is Role.SCRATCH
                }
            graph.close()
            graph.close()


def test_a_missing_wait_is_seen(
    control: Control, device: Device, heaps: list[Heap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the tests: plans without one wait that matters give wrong bytes for some seeds."""
    control.set(DELAY_US=300)
    monkeypatch.setattr(ticket, "_SPIN_NS", 0)
    tried = 0
    for seed in range(200):
        plan = random_plan(seed, ranks=2, moves=8, buffer_bytes=60, ops=(Op.COPY,))
        broken = without_wait(plan, seed)
        if broken is None:
            continue
        filled = contents_of(plan, seed)
        want = reference(plan, filled)
        monkeypatch.setattr(local, "by_direction", lanes(seed))
        given = tensors_of(plan, filled, lambda r: heaps[0])
        with LocalRunner(device, broken, most_streams=4) as runner:
            runner.submit(given).wait(20)
            tried += 1
            if wrong(plan, given, want):
                return
    pytest.fail(f"{tried} plans without a wait gave the right bytes")


# --- gates -----------------------------------------------------------------------------------------------------------


def test_nothing_moves_before_fire(control: Control, device: Device, heaps: list[Heap]) -> None:
    moved = Moved(heaps)
    with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST) as runner:
        run = runner.submit(moved.buffers, gated=True)
        until(lambda: control.parked() >= 1)
        assert moved.none
        assert not run.is_over()
        with pytest.raises(Timeout, match="it goes on"):
            run.wait(0.02)
        run.fire()
        run.wait(20)
        assert moved.all
        assert run.error is None


def test_a_kernel_opens_the_gate(control: Control, device: Device, heaps: list[Heap]) -> None:
    """By writing one word, also where several ranks of the process have a gate each."""
    moved = Moved(heaps)
    for _ in range(3):
        moved.dst.zero_()
        with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST, timeout_s=5) as runner:
            run = runner.submit(moved.buffers, gated=True)
            until(lambda: control.parked() >= 1)
            assert moved.none
            address, value = run.gate()
            view(address, 8, "u8")[0] = value
            run.wait(20)
            assert moved.all
    plan = passes.prelaunch(passes.entry(all_to_all.pcpy(3, 300)))
    filled = contents_of(plan, 1)
    given = tensors_of(plan, filled, lambda r: heaps[0])
    with LocalRunner(device, plan, timeout_s=5) as runner:
        run = runner.submit(given, gated=True)
        address, value = run.gate()
        view(address, 8, "u8")[0] = value
        run.wait(20)
        assert not wrong(plan, given, reference(plan, filled))


def test_without_arming_the_gate_is_open(device: Device, heaps: list[Heap]) -> None:
    moved = Moved(heaps)
    with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST) as runner:
        for _ in range(3):
            moved.dst.zero_()
            runner.submit(moved.buffers).wait(20)
            assert moved.all


def test_an_expired_gate(control: Control, device: Device, heaps: list[Heap]) -> None:
    """The watchdog opens it although nobody waits for the ticket; the streams are free afterwards."""
    moved = Moved(heaps)
    with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST, timeout_s=0.2) as runner:
        begin = time.monotonic()
        run = runner.submit(moved.buffers, gated=True)
        until(run.is_over, 5)
        assert time.monotonic() - begin >= 0.2
        assert control.parked() == 0
        named = r"gate 'gate 0' was not raised; rank 0 queue 0.* step 0: wait gate 0 >= 1; it was opened.*undefined"
        with pytest.raises(Timeout, match=rf"plan to the host made no progress for 0.2 s: {named}"):
            run.wait()
        assert isinstance(run.error, Timeout)
        assert len(device.arm(3)) == 3
        device.disarm(device._streams)
        for gated in (False, True):
            moved.dst.zero_()
            again = runner.submit(moved.buffers, gated=gated)
            again.fire()
            again.wait(20)
            assert moved.all


def test_more_calls_than_a_stream_takes(device: Device, heaps: list[Heap], monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver call that blocks behind the closed gate, which the caller can't open before it returns."""
    moved, record = Moved(heaps), device.driver.event_record
    with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST, timeout_s=0.2) as runner:
        gate = next(n for n, s in enumerate(runner.program.plan.signals) if s.kind is SignalKind.GATE)

        def full(event: int, stream: int) -> None:
            until(lambda: runner._execution.words.read(gate) > 0, 5)
            record(event, stream)

        with monkeypatch.context() as patched:
            patched.setattr(device.driver, "event_record", full)
            run = runner.submit(moved.buffers, gated=True)
        with pytest.raises(Timeout, match="'gate 0' was not raised, and the driver took no more of the run's calls"):
            run.wait(20)
        moved.dst.zero_()
        runner.submit(moved.buffers).wait(20)
        assert moved.all


def test_streams_behind_gates(control: Control, device: Device, heaps: list[Heap]) -> None:
    """One stream always stays free; who asks for more is told; a run without a gate gets on meanwhile."""
    control.set(MOST_PARKED=4)
    plan = passes.prelaunch(copies())
    moved = [Moved(heaps) for _ in range(5)]
    runners = [LocalRunner(device, plan, host_ranks=HOST, most_streams=1) for _ in range(5)]
    runs = [runners[k].submit(moved[k].buffers, gated=True) for k in range(3)]
    until(lambda: control.parked() == 3)
    with pytest.raises(NotSupported, match="3 of 4 streams of this process stand behind gates .* so 1 more can't"):
        runners[3].submit(moved[3].buffers, gated=True)
    runners[4].submit(moved[4].buffers).wait(20)
    assert moved[4].all
    assert all(m.none for m in moved[:4])
    for k, run in enumerate(runs):
        run.fire()
        run.wait(20)
        assert moved[k].all
    run = runners[3].submit(moved[3].buffers, gated=True)  # given back
    run.fire()
    run.wait(20)
    assert moved[3].all
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("most", [0, 5])
def test_more_streams_than_may_be_gated(device: Device, most: int) -> None:
    with pytest.raises(NotSupported, match="1 to 4 streams"):
        LocalRunner(device, copies(), most_streams=most)


def test_a_plan_that_has_no_gate(device: Device, heaps: list[Heap]) -> None:
    with LocalRunner(device, copies(), host_ranks=HOST) as runner:
        with pytest.raises(NotSupported, match="has no gate"):
            runner.submit(Moved(heaps).buffers, gated=True)
        run = runner.submit(Moved(heaps).buffers)
        with pytest.raises(PlanError, match="has no gate"):
            run.gate()
        run.wait(20)
        assert run.stamps_us() == []
        assert len(device.arm(3)) == 3  # nothing stayed armed
        device.disarm(device._streams)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_imported_signals(device: Device, heaps: list[Heap], on_device: bool) -> None:
    a = Assembly("released", 2)
    src, dst = a.buffer("input", Role.INPUT, [64, -2]), a.buffer("output", Role.OUTPUT, [-2, 64])
    flag = a.signal("flag", 0, SignalKind.IMPORTED)
    at = np.arange(4, dtype=np.int64) * 16
    a.queue(0, 0, st.interleave(st.wait(np.full(4, flag), np.arange(1, 5)), st.copy((0, src, at), (1, dst, at), 16)))
    moved = Moved(heaps, 4096)
    moved.dst.zero_()
    given = {(0, "input"): moved.src[:64], (1, "output"): moved.dst[:64]}
    with LocalRunner(device, a.plan(), host_ranks=HOST, timeout_s=0.3, words_on_device=on_device) as runner:
        run = runner.submit(given)
        where = device.driver.memory_at(run.signal_address("flag")[0]).kind
        assert where is (Kind.DEVICE if on_device else Kind.PINNED)
        for k in range(4):
            assert not moved.dst[16 * k : 64].any()
            run.raise_signal("flag", k + 1)
            until(lambda k=k: bool(torch.equal(moved.dst[: 16 * k + 16], moved.src[: 16 * k + 16])))
        run.wait(20)
        run.raise_signal("flag", 1)  # it never goes back
        late = runner.submit(given)
        late.raise_signal("flag", 2)
        with pytest.raises(Timeout, match="signal 'flag' was not raised; rank 0 queue 0.*wait flag >= 3"):
            late.wait()


def test_a_run_calls_for_what_raises_its_signals(control: Control, device: Device, heaps: list[Heap]) -> None:
    """On two streams in turn: what is computed anew waits for the copies of the run before. A launch that fails leaves
    nothing behind."""
    a = Assembly("released", 2)
    src, dst = a.buffer("input", Role.INPUT, [64, -2]), a.buffer("output", Role.OUTPUT, [-2, 64])
    flag = a.signal("flag", 0, SignalKind.IMPORTED)
    a.queue(0, 0, st.wait(flag), st.copy((0, src, 0), (1, dst, 0), 64))
    moved, driver = Moved(heaps, 4096), device.driver
    data, there = heaps[1].empty((6, 64), torch.uint8).random_(), heaps[1].empty((6, 64), torch.uint8).zero_()
    control.set(DELAY_US=2000)
    streams = [driver.stream_create(), driver.stream_create()]
    with LocalRunner(device, a.plan(), host_ranks=HOST, timeout_s=20) as runner:
        (address,) = runner.imported()
        for k in range(6):
            run = runner.bind({(0, "input"): moved.src[:64], (1, "output"): there[k]})
            stream = streams[k % 2]

            def launch(base: int, k: int = k, stream: int = stream) -> None:
                if k == 3:
                    raise RuntimeError("no kernel image")
                word = np.zeros(1, WORD)
                word["kind"], word["address"], word["value"] = WRITE, address, base + 1
                driver.copy(moved.src.data_ptr(), data[k].data_ptr(), 64, stream)
                driver.stream_words(word, stream)

            with contextlib.suppress(RuntimeError):
                run.submit(after=stream, launch=launch)
        for stream in streams:
            driver.stream_synchronize(stream)
            driver.stream_destroy(stream)
    good = [k for k in range(6) if k != 3]
    assert torch.equal(there[good], data[good])
    assert not there[3].any()


# --- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "own"])
def test_ordered_with_the_callers_stream(control: Control, device: Device, heaps: list[Heap], legacy: bool) -> None:
    """The run reads what the stream wrote before, and the stream sees what the run wrote; no host waits."""
    driver = device.driver
    device.enter()
    stream = 0 if legacy else driver.stream_create()
    moved = Moved(heaps)
    back = heaps[0].empty((moved.dst.nbytes,), torch.uint8)
    with LocalRunner(device, copies(), host_ranks=HOST) as runner:
        for seed in range(5):
            control.set(DELAY_US=3000)
            moved.dst.zero_()
            data = heaps[1].empty((moved.src.nbytes,), torch.uint8)
            data.numpy()[:] = np.random.default_rng(seed).integers(1, 256, data.nbytes, np.uint8)
            driver.copy(moved.src.data_ptr(), data.data_ptr(), data.nbytes, stream)  # late
            runner.submit(moved.buffers, after=stream)
            driver.copy(back.data_ptr(), moved.dst.data_ptr(), back.nbytes, stream)  # after the run
            driver.stream_synchronize(stream)
            assert np.array_equal(back.numpy()[moved.mask], data.numpy()[moved.mask]), seed
    if not legacy:
        driver.stream_destroy(stream)


def test_a_capturing_stream_is_refused(device: Device, heaps: list[Heap]) -> None:
    driver = device.driver
    device.enter()
    stream = driver.stream_create()
    moved = Moved(heaps)
    with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST) as runner:
        bound = runner.bind(moved.buffers)
        for gated in (False, True):
            driver.graph_begin(stream)
            with pytest.raises(NotSupported, match="is capturing a graph: copies would be lost"):
                bound.submit(after=stream, gated=gated)
            driver.graph_destroy(driver.graph_end(stream))
        assert moved.none
        assert len(device.arm(3)) == 3  # a refused run leaves no stream armed
        device.disarm(device._streams)
        bound.submit(after=stream).wait(20)
        assert moved.all
    driver.stream_destroy(stream)


def test_what_no_graph_can_hold(control: Control, device: Device, heaps: list[Heap]) -> None:
    """Gates and stamps; and a graph is not launched into a stream that captures another."""
    driver = device.driver
    device.enter()
    moved = Moved(heaps)
    gated = LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST)
    with gated, pytest.raises(NotSupported, match="waits for a gate or for another process"):
        gated.graph(moved.buffers)
    plain = copies()
    stamped = plain.replace(
        queues=tuple(dataclasses.replace(q, steps=st.sequence(q.steps, st.stamp(0))) for q in plain.queues[:1])
        + plain.queues[1:]
    )
    with LocalRunner(device, stamped, host_ranks=HOST) as runner, pytest.raises(NotSupported, match="takes stamps"):
        runner.graph(moved.buffers)
    stream = driver.stream_create()
    with LocalRunner(device, plain, host_ranks=HOST) as runner:
        for call in ("cuMemcpyAsync", "cuMemcpy2DAsync"):  # whichever the copies become
            control.set(FAIL=f"{call}:1:1")
            with contextlib.suppress(DriverError):
                runner.graph(moved.buffers).close()
        control.set(FAIL="")
        graph = runner.graph(moved.buffers)  # nothing is left of the capture that failed
        driver.graph_begin(stream)
        with pytest.raises(NotSupported, match="launch this one outside of the capture"):
            graph.submit(after=stream)
        driver.graph_destroy(driver.graph_end(stream))
        assert moved.none
        graph.submit(after=stream).wait(20)
        assert moved.all
        graph.close()
    driver.stream_destroy(stream)


def test_many_in_flight(control: Control, device: Device, heaps: list[Heap]) -> None:
    """32 runs whose tickets and tensors nobody holds: no run writes into memory that somebody else was given."""
    control.set(DELAY_US=200)
    others = []
    with LocalRunner(device, copies(), host_ranks=HOST) as runner:
        for _ in range(32):
            runner.submit(Moved(heaps).buffers)
            others.append(heaps[1].empty((4096,), torch.uint8).fill_(0))
        last = Moved(heaps)
        runner.submit(last.buffers).wait(20)
        assert last.all
    assert not any(t.any() for t in others)


def test_events_are_used_again(control: Control, device: Device, heaps: list[Heap]) -> None:
    """Tickets that are dropped at once cost no events for ever."""
    moved = Moved(heaps)
    with LocalRunner(device, copies(), host_ranks=HOST) as runner:
        bound = runner.bind(moved.buffers)
        for _ in range(20):
            bound.submit()
        bound.submit().wait(20)
        control.calls()
        for _ in range(200):
            bound.submit().wait(20)
        assert len(control.calls("cuEventCreate")) <= 2


def test_a_ticket_from_another_thread(device: Device, heaps: list[Heap]) -> None:
    """Threads that never saw the device can wait for a run, and drop tensors of a heap."""
    moved = Moved(heaps)
    errors: list[BaseException] = []
    with LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST) as runner:
        run = runner.submit(moved.buffers, gated=True)

        def wait() -> None:
            try:
                run.wait(20)
                heaps[0].empty((100,), torch.uint8)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        run.fire()
        thread.join(20)
    assert not errors
    assert moved.all


# --- driver calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("entries", "want"), [(512, [30]), (8, [8, 8, 8, 6]), (29, [29])])
def test_entries_per_call(control: Control, device: Device, heaps: list[Heap], entries: int, want: list[int]) -> None:
    plan = copies(30, 8)
    size = 30 * 30 * 8
    given = {(0, "input"): heaps[0].empty((size,), torch.uint8), (1, "output"): heaps[1].empty((size,), torch.uint8)}
    with LocalRunner(device, plan, host_ranks=HOST, entries_per_call=entries) as runner:
        control.calls()
        runner.submit(given).wait(20)
        lines = control.calls("cuMemcpy")
    batches = [line for line in lines if line.startswith("cuMemcpyBatchAsync")]
    assert [number(line, "count") for line in batches] == want
    assert {number(line, "order") for line in batches} == {1}  # in the order of the stream
    assert len(lines) - len(batches) == 30 - sum(want)


def test_a_driver_without_batches(control: Control, heaps: list[Heap]) -> None:
    control.set(VERSION=12070)
    old = control.device()
    assert not old.caps.batched_copy
    moved = Moved(heaps)
    with LocalRunner(old, copies(), host_ranks=HOST) as runner:
        control.calls()
        runner.submit(moved.buffers).wait(20)
        lines = control.calls("cuMemcpy")
    assert moved.all
    assert [line.split()[0] for line in lines] == ["cuMemcpyAsync"] * 8
    old.close()


def test_a_driver_without_stream_words(control: Control, heaps: list[Heap]) -> None:
    control.set(STREAM_WORDS=0)
    poor = control.device()
    with pytest.raises(NotSupported, match="has no stream memory operations"):
        LocalRunner(poor, passes.prelaunch(copies()))
    moved = Moved(heaps)
    with LocalRunner(poor, copies(), host_ranks=HOST) as runner:
        runner.submit(moved.buffers).wait(20)
    assert moved.all
    poor.close()


def test_registered_in_two_parts(control: Control, device: Device, heaps: list[Heap]) -> None:
    """Host memory that was pinned in parts is one buffer; copies and rows are cut at the line."""
    driver = device.driver
    device.enter()
    raw = np.zeros(3 * 4096 + 4096, np.uint8)
    base = -(-raw.ctypes.data // 4096) * 4096
    whole = view(base, 2 * 4096)
    driver.host_register(base, 4096)
    driver.host_register(base + 4096, 4096)
    src = heaps[0].empty((2 * 4096,), torch.uint8)
    src.numpy()[:] = np.random.default_rng(1).integers(1, 256, 2 * 4096, np.uint8)
    a = Assembly("over the line", 2)
    i, o = a.buffer("input", Role.INPUT, [8192, -2]), a.buffer("output", Role.OUTPUT, [-2, 8192])
    a.queue(0, 0, st.copy((0, i, 1000), (1, o, 1000), 6000), st.copy2d((0, i, 7000), (1, o, 30), 100, 9, 110, 600))
    with LocalRunner(device, a.plan(), host_ranks=HOST) as runner:
        assert device.boundaries(base, 8192) == (Kind.PINNED, [base + 4096])
        want = np.zeros(8192, np.uint8)
        want[1000:7000] = src.numpy()[1000:7000]
        for k in range(9):
            want[30 + 600 * k : 130 + 600 * k] = src.numpy()[7000 + 110 * k : 7100 + 110 * k]
        control.calls()
        runner.submit({(0, "input"): src, (1, "output"): whole}).wait(20)
        assert np.array_equal(whole, want)
    driver.host_unregister(base + 4096)
    with pytest.raises(HardwareError, match="is pageable: copy engines need pinned host memory"):
        device.boundaries(base, 8192)
    driver.host_unregister(base)


def test_pageable_and_other_memory(device: Device, heaps: list[Heap]) -> None:
    moved = Moved(heaps)
    with LocalRunner(device, copies(), host_ranks=HOST) as runner:
        with pytest.raises(HardwareError, match="is pageable: .*pin_memory=True"):
            runner.submit({(0, "input"): moved.src, (1, "output"): np.zeros(4096, np.uint8)})
        with pytest.raises(NotSupported, match="from host memory to host memory, which no engine of a GPU does"):
            runner.submit({(0, "input"): heaps[1].empty((4096,), torch.uint8), (1, "output"): moved.dst})
        with pytest.raises(ValueError, match=r"wrong or missing: \[\(1, 'output'\)\]"):
            runner.submit({(0, "input"): moved.src})
        with pytest.raises(ValueError, match=r"wrong or missing: \[\(0, 'output'\)\]"):
            runner.submit(moved.buffers | {(0, "output"): moved.src})
        with pytest.raises(ValueError, match="output of rank 1 has 100 bytes, plan to the host needs 4096"):
            runner.submit({(0, "input"): moved.src, (1, "output"): moved.dst[:100]})
        runner.submit(moved.buffers).wait(20)
        assert moved.all


def test_plans_for_processes_of_their_own(device: Device) -> None:
    with pytest.raises(NotSupported, match="has parameters that ranks post"):
        LocalRunner(device, passes.entry(all_to_all.pcpy_uneven(2)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "call", ["cuMemcpyBatchAsync", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync", "cuStreamBatchMemOp"]
)
def test_a_driver_call_fails(control: Control, device: Device, heaps: list[Heap], call: str, gated: bool) -> None:
    """In the middle of a run: the error is the driver's, nothing stands at a gate, and the next run works."""
    a = Assembly("both ways", 2)
    i, o = a.buffer("input", Role.INPUT, [512, 512]), a.buffer("output", Role.OUTPUT, [512, 512])
    at = np.arange(4, dtype=np.int64) ** 2
    done = a.signal("done", 0)
    a.queue(0, 0, st.copy((0, i, at), (1, o, at), 1), st.signal(done))
    a.queue(1, 0, st.copy((1, i, at), (0, o, at), 1), st.wait(done), st.copy((1, i, 100), (0, o, 100), 9))
    plan = passes.prelaunch(passes.entry(a.plan()))
    filled = contents_of(plan, 3)
    given = tensors_of(plan, filled, lambda r: heaps[r])
    with LocalRunner(device, plan, host_ranks=HOST) as runner:
        bound = runner.bind(given)
        failed = []
        for nth in (1, 2, 3):
            control.set(FAIL=f"{call}:719:{nth}")
            try:
                run = bound.submit(after=0, gated=gated)
            except DriverError as error:
                failed.append((error.call, error.code))
                until(lambda: not device._armed, 5)
            else:
                run.fire()
                run.wait(20)
            control.set(FAIL="")
        assert set(failed) == {(call, 719)}
        until(lambda: control.parked() == 0, 5)
        again = bound.submit(gated=gated)
        again.fire()
        again.wait(20)
        assert not wrong(plan, given, reference(plan, filled))
        until(lambda: not device._armed, 5)
    runner.close()


def test_closing(control: Control, device: Device, heaps: list[Heap]) -> None:
    """Twice; with a run in flight; with one behind a gate that nobody opens."""
    control.set(DELAY_US=2000)
    moved = Moved(heaps)
    runner = LocalRunner(device, copies(), host_ranks=HOST)
    runner.submit(moved.buffers)
    runner.close()
    assert moved.all
    runner.close()
    armed = LocalRunner(device, passes.prelaunch(copies()), host_ranks=HOST, timeout_s=0.2)
    armed.submit(moved.buffers, gated=True)
    armed.close()
    assert control.parked() == 0
    with control.device() as other:
        assert other.name == "stand-in 0"
        other.streams(2)
    other.close()


def test_more_bound_addresses_than_are_kept(device: Device, heaps: list[Heap]) -> None:
    a = Assembly("small", 2)
    i, o = a.buffer("input", Role.INPUT, [8, -2]), a.buffer("output", Role.OUTPUT, [-2, 8])
    a.queue(0, 0, st.copy((0, i, 0), (1, o, 0), 8))
    src, dst = heaps[0].empty((1000,), torch.uint8), heaps[1].empty((1000,), torch.uint8)
    src.numpy()[:] = np.random.default_rng(1).integers(1, 256, 1000, np.uint8)
    with LocalRunner(device, a.plan(), host_ranks=HOST) as runner:
        for k in range(0, 900, 9):
            runner.submit({(0, "input"): src[k : k + 8], (1, "output"): dst[k : k + 8]}).wait(20)
            assert torch.equal(src[k : k + 8], dst[k : k + 8])
        assert len(runner._execution._bound) == 64


def test_a_device_that_is_not_there(control: Control) -> None:
    from dovetail.hw.gpu.cuda import CudaDriver

    control.reset()
    with pytest.raises(NotSupported, match="no cuda device 3: this process sees 1"):
        Device("cuda", 3, driver=CudaDriver(control.path))


def test_streams_that_never_drain(
    control: Control, device: Device, heaps: list[Heap], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that has stopped: the run is given up after a while, and says so."""
    monkeypatch.setattr(ticket, "_DRAIN_S", 0.2)
    control.set(DELAY_US=0)
    driver = device.driver
    device.enter()
    stuck, word = driver.stream_create(), device.pinned(64)
    driver.stream_words(np.array([(WAIT, word.address, 1)], WORD), stuck)
    moved = Moved(heaps)
    runner = LocalRunner(device, copies(), host_ranks=HOST, timeout_s=0.1)
    run = runner.submit(moved.buffers, after=stuck)
    with pytest.raises(HardwareError, match="its copies did not end.*did not drain within 0.2 s"):
        run.wait()
    word.array[:8].view(np.uint64)[0] = 1
    driver.stream_synchronize(stuck)
    driver.stream_destroy(stuck)
    runner.close()


def test_the_watchdog_outlives_a_run_it_can_not_watch(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def is_over(self) -> bool:
            raise HardwareError("gone")

        def look(self) -> None: ...

    class Fine:
        looked = 0

        def is_over(self) -> bool:
            return self.looked > 2

        def look(self) -> None:
            self.looked += 1

    fine = Fine()
    device.watchdog.add(Broken())
    device.watchdog.add(fine)
    until(lambda: fine.looked > 2)
    until(lambda: not device.watchdog._runs)
    assert "can't be watched any more" in caplog.text
