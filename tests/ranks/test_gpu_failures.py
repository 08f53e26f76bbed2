"""Every way in which GPU ranks fail, over the stand-in driver: dead, stopped, late, unable, closed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from dovetail.coll import gpu
from dovetail.errors import DovetailError, HardwareError, NotSupported, PeerError, Timeout
from dovetail.hw.gpu.call import GpuRunner
from dovetail.plan import DType, Plan, ReduceOp, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather
from dovetail.plan.build.assembly import Assembly
from tests.ranks import workers
from tests.ranks.conftest import Pool
from tests.ranks.gpuranks import Ready, environment, gathered, pair_of, set_standin, set_up, tensor_of


def _long_plan(size: int) -> Plan:
    """Rank 1 waits for rank 0's word, which rank 0 writes after its caller's flag."""
    a = Assembly("waits for rank 0", 2)
    src = a.buffer("input", Role.INPUT, [size, size])
    dst = a.buffer("output", Role.OUTPUT, [size, size])
    flag, done = a.signal("flag", 0, SignalKind.IMPORTED), a.signal("done", 1)
    a.queue(0, 0, st.wait(flag), st.copy((0, src, 0), (1, dst, 0), size), st.signal(done))
    a.queue(1, 0, st.wait(done), st.copy((1, src, 0), (1, dst, 0), size))
    return passes.entry(a.plan())


def test_killed_rank(spare_pool: Callable[..., Pool]) -> None:
    """The survivor's stream stands at a wait for the victim: a PeerError soon, and other groups go on."""
    pool = spare_pool(3, environment())

    def job() -> Any:
        g = set_up()
        others = g.world.new_group([0, 2]) if g.rank != 1 else None
        if others is not None:
            workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1, others)
        pair = g.world.new_group([1, 2]) if g.rank else None
        if pair is not None:
            runner = GpuRunner(gpu.group_of(pair, "cuda", 0), _long_plan(4096))
            ticket = runner.submit({"input": tensor_of(1024), "output": tensor_of(1024)})
            if g.rank == 1:
                time.sleep(0.3)  # the other's stream is at its wait
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(PeerError, match="rank 0 died"):
                ticket.wait(10)
            took_s = time.monotonic() - begin - 0.3
            assert took_s < 2.0
            assert ticket.error is not None
            with pytest.raises(PeerError, match="rank 0 died"):  # later calls raise it at once
                runner.submit({"input": tensor_of(1024), "output": tensor_of(1024)})
            pair.close()
        else:
            time.sleep(0.5)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="rank 1 died"):  # and where the host waits for it
            dovetail.all_gather_into_tensor(tensor_of(24), tensor_of(8), variant="pcpy")
        assert time.monotonic() - begin < 2.0
        g.close()
        workers.all_gather("pcpy", "mixed", 1000, torch.float32, 2, others)
        dovetail.finalize()
        return True

    pool.start(job)
    assert pool.finish([0, 2]) == {0: True, 2: True}


def test_killed_rank_while_a_run_is_issued(spare_pool: Callable[..., Pool]) -> None:
    """A driver call that blocks until the run's own waits end: somebody must end them before it returns."""
    pool = spare_pool(2, environment())

    def reducing(size: int) -> Plan:
        """Rank 1 waits for rank 0 before it reduces; the CPU's code reduces while the call is issued."""
        a = Assembly("reduces after rank 0", 2)
        src, dst = a.buffer("input", Role.INPUT, size), a.buffer("output", Role.OUTPUT, size)
        flag, done = a.signal("flag", 0, SignalKind.IMPORTED), a.signal("done", 1)
        first = a.sources([1], [src], [0])
        a.queue(0, 0, st.wait(flag), st.copy((0, src, 0), (0, dst, 0), size), st.signal(done))
        a.queue(1, 0, st.wait(done), st.reduce((1, dst, 0), size, first, 1, DType.FLOAT32, ReduceOp.SUM))
        return passes.entry(a.plan())

    def job() -> float:
        g = set_up()
        runner = GpuRunner(gpu.group_of(g, "cuda", 0), reducing(4096))
        buffers = {"input": tensor_of(1024), "output": tensor_of(1024)}
        if g.rank == 0:
            runner.submit(buffers)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="rank 0 died"):
            runner.submit(buffers).wait(10)
        took_s = time.monotonic() - begin
        g.close()
        dovetail.finalize()
        return took_s

    pool.start(job)
    assert pool.finish([1], 20.0)[1] < 2.5


ERROR = """
import sys, time
import dovetail
from tests.ranks.gpuranks import pair_of, set_up
g = set_up()
out, inp = pair_of(1, g)
dovetail.all_gather_into_tensor(out, inp, variant="pcpy")
dovetail.barrier()
if g.rank:
    work = dovetail.arm(dovetail.all_gather_into_tensor, out, inp, variant="pcpy")
    try:
        work.synchronize()
    except dovetail.errors.PeerError as error:
        assert "rank 0" in str(error), error
        print("told")
else:
    dovetail.all_gather_into_tensor(out, inp, variant="pcpy")  # its stream waits for the other's
    print("issued")
    raise KeyboardInterrupt if sys.argv[1] == "interrupt" else ValueError("mine")
"""


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_a_process_that_ends_by_an_error(how: str) -> None:
    """Its stream waits for a late rank, for up to a minute: the process does not."""
    token, processes = uuid.uuid4().hex, []
    for rank in range(2):
        place = {"DOVETAIL_RENDEZVOUS": token, "DOVETAIL_RANK": str(rank), "DOVETAIL_WORLD_SIZE": "2"}
        env = {**os.environ, **environment(), **place, "DOVETAIL_TIMEOUT": "60", "DOVETAIL_CHECK": "0"}
        words = [sys.executable, "-c", ERROR, how]
        root = Path(__file__).parents[2]
        processes.append(subprocess.Popen(words, env=env, cwd=root, stdout=subprocess.PIPE, text=True))
    try:
        begin = time.monotonic()
        assert processes[0].stdout is not None
        assert processes[0].stdout.readline() == "issued\n"
        assert processes[0].wait(20) != 0
        assert processes[1].communicate(timeout=20)[0] == "told\n"
        assert time.monotonic() - begin < 30  # starting Python is most of it
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("world", [2])
def test_stopped_and_late_ranks(ready: Ready, world: int) -> None:
    """A Timeout that names plan, rank, queue, step and signal, on every rank an error, and the streams go on."""

    def job() -> list[str]:
        g = set_up()
        w = g.world
        texts = []
        for how in ("the flag is not raised", "a rank does not call"):
            pair = w.new_group([0, 1])
            pair.set_timeout(0.4)
            side = gpu.group_of(pair, "cuda", 0)
            workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1, pair)
            if how == "the flag is not raised":
                ticket = GpuRunner(side, _long_plan(4096)).submit({"input": tensor_of(1024), "output": tensor_of(1024)})
                with pytest.raises((Timeout, PeerError)) as caught:
                    ticket.wait(10)
            else:
                if g.rank == 1:
                    time.sleep(1.0)
                with pytest.raises((Timeout, PeerError)) as caught:
                    dovetail.all_gather_into_tensor(tensor_of(16), tensor_of(8), variant="pcpy", group=pair)
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
            with pytest.raises((Timeout, PeerError)):
                dovetail.all_gather_into_tensor(tensor_of(16), tensor_of(8), variant="pcpy", group=pair)
            dovetail.barrier()
            pair.close()
        workers.all_gather("pcpy", "mixed", 1000, torch.float32, 5)
        return texts

    (first, second), (third, fourth) = ready.run(world, job)
    late = [t for t in (first, third) if t.startswith("Timeout")]
    assert late, (first, third)
    for text in late:
        assert "plan waits for rank 0" in text
        assert "signal 'flag' was not raised" in text or "signal 'done' was not raised" in text
        assert "rank" in text
        assert "queue" in text
        assert "step" in text
    assert second.startswith("Timeout")
    assert "rank 1" in second
    assert fourth.startswith(("Timeout", "PeerError"))


def test_stopped_process(spare_pool: Callable[..., Pool]) -> None:
    pool = spare_pool(2, environment())

    def job() -> str:
        g = set_up()
        g.set_timeout(0.5)
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1)
        if g.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        work = dovetail.all_gather_into_tensor(*pair_of(1, g), variant="pcpy", async_op=True)
        with pytest.raises(Timeout) as caught:
            work.wait()
        with pytest.raises(Timeout):
            work.synchronize()
        assert isinstance(work.exception(), Timeout)
        return str(caught.value)

    pool.start(job)
    try:
        assert "rank 1" in pool.finish([0])[0]
    finally:
        os.kill(pool.processes[1].pid, signal.SIGCONT)  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2])
def test_a_rank_that_can_not_bind(ready: Ready, world: int) -> None:
    """One rank fails after all have agreed: the others' streams must not wait for it."""

    def job() -> str:
        g = set_up()
        pair = g.world.new_group([0, 1])
        side = gpu.group_of(pair, "cuda", 0)
        runner = GpuRunner(side, passes.entry(all_gather.pcpy(2, 400)))
        if g.rank == 1:

            def refuse(*_: Any) -> None:
                raise HardwareError("no more of anything")

            side.world.open = refuse  # type: ignore[method-assign]
        begin = time.monotonic()
        with pytest.raises(DovetailError) as caught:
            runner.submit({"input": tensor_of(100), "output": tensor_of(200)}).wait(20)
        assert time.monotonic() - begin < 2.0
        if g.rank == 1:
            del side.world.open
        dovetail.barrier()
        pair.close()
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1)  # other groups go on
        return f"{type(caught.value).__name__}: {caught.value}"

    one, two = ready.run(world, job)
    assert one.startswith("PeerError")
    assert "rank 1" in one
    assert "no more of anything" in two


@pytest.mark.parametrize("world", [2])
def test_tensors_that_do_not_fit(ready: Ready, world: int) -> None:
    """Too small, or where peers can't reach: refused with the step's name before any copy."""

    def job() -> list[str]:
        g = set_up()
        texts = []
        for case in ("small", "ordinary"):
            pair = g.world.new_group([0, 1])
            runner = GpuRunner(gpu.group_of(pair, "cuda", 0), passes.entry(all_gather.pcpy(2, 400)))
            inp = tensor_of(50 if g.rank and case == "small" else 100)
            out = workers.make("symmetric" if case == "small" else "ordinary", 0, 200, torch.float32)
            with pytest.raises(DovetailError) as caught:
                runner.submit({"input": inp, "output": out}).wait(20)
            texts.append(str(caught.value))
            dovetail.barrier()
            pair.close()
        return texts

    for rank, (small, ordinary) in enumerate(ready.run(world, job)):
        assert "rank" in small
        assert "has not posted it" in ordinary or "failed on rank" in ordinary, (rank, ordinary)


@pytest.mark.parametrize("world", [2])
def test_a_call_that_fails_while_it_is_issued(ready: Ready, world: int) -> None:
    """The driver refuses a copy after some of the run is in the streams: all ranks are told and the streams drain."""

    def job() -> str:
        g = set_up()
        pair = g.world.new_group([0, 1])
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1, pair)
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1)
        dovetail.barrier()
        if g.rank == 1:
            set_standin("FAIL", "cuMemcpyAsync:719:1,cuMemcpyBatchAsync:719:1")
        begin = time.monotonic()
        out, inp = pair_of(1, g)

        def call() -> None:
            dovetail.all_gather_into_tensor(out, inp, variant="pcpy", group=pair)
            pair.gpu.settle()

        with pytest.raises(DovetailError) as caught:
            call()
        assert time.monotonic() - begin < 2.0
        if g.rank == 1:
            set_standin("FAIL", "")
        dovetail.barrier()
        pair.close()
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1)  # other groups go on, on the same streams
        return f"{type(caught.value).__name__}: {caught.value}"

    one, two = ready.run(world, job)
    assert one.startswith("PeerError"), one
    assert two.startswith("DriverError"), two


@pytest.mark.parametrize("world", [2])
def test_a_peer_that_closes_too_early(ready: Ready, world: int) -> None:
    """One's own group is closed under a run: that run ends with an error, and the peer's ends too, bounded."""

    def job() -> str:
        g = set_up()
        text = ""
        for who in (0, 1):
            pair = g.world.new_group([0, 1])
            side = gpu.group_of(pair, "cuda", 0)
            pair.set_timeout(20)
            runner = GpuRunner(side, _long_plan(4096))
            ticket = runner.submit({"input": tensor_of(1024), "output": tensor_of(1024)})
            dovetail.barrier()
            if g.rank == who:
                side._companion.close()  # as if it had no part in flight
                with pytest.raises(PeerError) as caught:
                    ticket.wait(10)
                text = str(caught.value)
            else:
                with contextlib.suppress(PeerError):  # its waits may have been opened before it looked
                    ticket.wait(10)
            dovetail.barrier()
            pair.close()
        return text

    for text in ready.run(world, job):
        assert "closed" in text, text


@pytest.mark.parametrize("world", [2])
def test_a_peer_that_is_done_may_close(ready: Ready, world: int) -> None:
    """Closing after one's own part is no failure of those who still copy."""

    def slow_end(size: int) -> Plan:
        a = Assembly("slow end", 2)
        src = a.buffer("input", Role.INPUT, [size, size])
        dst = a.buffer("output", Role.OUTPUT, [size, size])
        n = np.arange(40, dtype=np.int64) * (size // 40)
        a.queue(0, 0, st.copy((0, src, n), (0, dst, n), size // 40))
        a.goal(st.copy((0, src, 0), (0, dst, 0), size))
        return passes.entry(a.plan())

    def job() -> bool:
        g = set_up()
        pair = g.world.new_group([0, 1])
        runner = GpuRunner(gpu.group_of(pair, "cuda", 0), slow_end(4000))
        if g.rank == 0:
            set_standin("DELAY_US", 20_000)
        inp, out = tensor_of(1000).fill_(3.0), tensor_of(1000)
        ticket = runner.submit({"input": inp, "output": out})
        if g.rank == 1:
            ticket.wait(20)
            pair.close()
            time.sleep(1.0)
            return True
        ticket.wait(20)
        set_standin("DELAY_US", 20)
        return bool((out == 3.0).all())

    assert ready.run(world, job) == [True, True]


@pytest.mark.parametrize("world", [2])
def test_an_expired_gate(ready: Ready, world: int) -> None:
    """Nobody fires: a Timeout that names the gate; every rank has an error; streams are free afterwards."""

    def job() -> str:
        g = set_up()
        pair = g.world.new_group([0, 1])
        pair.set_timeout(0.3)
        work = dovetail.arm(dovetail.all_gather_into_tensor, *pair_of(1, g), variant="pcpy", group=pair)
        with pytest.raises((Timeout, PeerError)) as caught:
            work.synchronize()
        assert work.is_completed()
        assert not work.is_success()
        dovetail.barrier()
        pair.close()
        device = g.world.gpu.device
        assert len(device.arm(3)) == 3  # given back
        device.disarm(device._streams)
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1)
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = ready.run(world, job)
    assert any(t.startswith("Timeout") and "gate 'gate" in t for t in texts), texts


@pytest.mark.parametrize("world", [2])
def test_too_many_armed(ready: Ready, world: int) -> None:
    """The run that can't be armed is refused; those that are armed still run."""

    def job() -> list[str]:
        g = set_up()
        groups = [g.world.new_group([0, 1]) for _ in range(5)]
        pairs = [pair_of(k, g) for k in range(5)]
        works = [
            dovetail.arm(dovetail.all_gather_into_tensor, *p, variant="b2b", group=q)
            for p, q in zip(pairs, groups, strict=True)
        ]
        deadline = time.monotonic() + 10
        while not all(w._issued.done() for w in works):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        refused: list[str] = []
        for k, work in enumerate(works):
            try:
                work.fire()
                work.synchronize()
            except (NotSupported, PeerError) as error:  # a rank that finds no stream fails the call for all
                refused.append(str(error))
                continue
            assert torch.equal(pairs[k][0], gathered(k, g.size))
        dovetail.barrier()
        for group in groups:
            group.close()
        return refused

    both = ready.run(world, job)
    assert [len(refused) for refused in both] == [2, 2]
    assert any("one must stay free" in text for refused in both for text in refused)


@pytest.mark.parametrize("world", [2])
def test_close_with_calls_pending(ready: Ready, world: int) -> None:
    """Works that were never issued, since a peer never called, end with an error when the group is closed."""

    def job() -> bool:
        g = set_up()
        pair = g.world.new_group([0, 1])
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1, pair)
        if g.rank == 0:
            works = [
                dovetail.all_gather_into_tensor(*pair_of(k, g), variant="pcpy", group=pair, async_op=True)
                for k in range(3)
            ]
            time.sleep(0.1)
            pair.close()
            for work in works:
                with pytest.raises(DovetailError):
                    work.wait(5)
                assert work.is_completed()
        dovetail.barrier()
        workers.all_gather("pcpy", "symmetric", 100, torch.float32, 1)
        return True

    assert ready.run(world, job) == [True, True]
