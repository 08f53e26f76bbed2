"""Asynchronous, armed and threaded calls: overlapping runs, mixed with blocking ones, on one and several groups."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import NotSupported
from tests.ranks import workers

N = 3000


def _expected(seed: int, size: int) -> torch.Tensor:
    return workers.reduced([workers.data(seed, r, N, torch.float32) for r in range(size)], "sum")


def _input(seed: int, rank: int, kind: str = "symmetric") -> torch.Tensor:
    return workers.make(kind, rank, N, torch.float32).copy_(workers.data(seed, rank, N, torch.float32))


@pytest.mark.parametrize("kind", ["symmetric", "ordinary", "mixed"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_many_in_flight(pools: Any, world: int, kind: str) -> None:
    """More calls than lanes, waited for in any order; one plan in flight many times."""

    def job() -> None:
        g = workers.world()
        tensors = [_input(seed, g.rank, kind) for seed in range(20)]
        works = [dovetail.all_reduce(t, async_op=True) for t in tensors]
        order = list(range(20)) if g.rank % 2 else list(reversed(range(20)))
        for i in order:
            assert works[i].wait() is True
            assert workers.same(tensors[i], _expected(i, g.size)), i
        assert all(w.is_completed() and w.is_success() and w.exception() is None for w in works)

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 4])
def test_blocking_behind_asynchronous(pools: Any, world: int) -> None:
    """A blocking call advances older work first: no deadlock although nobody waits for the asynchronous ones."""

    def job() -> None:
        g = workers.world()
        for round_ in range(20):
            early = _input(round_, g.rank)
            work = dovetail.all_reduce(early, async_op=True)
            t = _input(round_ + 100, g.rank)
            dovetail.all_reduce(t)
            assert workers.same(t, _expected(round_ + 100, g.size))
            work.wait()
            assert workers.same(early, _expected(round_, g.size))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 4])
def test_two_groups_mixed(pools: Any, world: int) -> None:
    """Blocking on one group, asynchronous on another, in different orders on different ranks."""

    def job() -> None:
        w = workers.world().world
        a, b = w.new_group(range(w.size)), w.new_group(range(w.size))
        for round_ in range(20):
            x, y = _input(round_, a.rank), _input(round_ + 50, a.rank)
            if a.rank % 2:
                work = dovetail.all_reduce(x, group=a, async_op=True)
                dovetail.all_reduce(y, group=b)
            else:
                late = dovetail.all_reduce(y, group=b, async_op=True)
                work = dovetail.all_reduce(x, group=a, async_op=True)
                late.wait()
            work.wait()
            assert workers.same(x, _expected(round_, a.size))
            assert workers.same(y, _expected(round_ + 50, a.size))
        a.close()
        b.close()

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 3])
def test_calls_from_threads(pools: Any, world: int) -> None:
    """Several Python threads, each with a group of its own, blocking and asynchronous."""

    def job() -> None:
        w = workers.world().world
        groups = [w.new_group(range(w.size)) for _ in range(3)]
        errors: list[BaseException] = []

        def loop(number: int) -> None:
            try:
                for seed in range(30):
                    t = _input(seed * 10 + number, w.rank)
                    if seed % 2:
                        dovetail.all_reduce(t, group=groups[number])
                    else:
                        dovetail.all_reduce(t, group=groups[number], async_op=True).wait()
                    assert workers.same(t, _expected(seed * 10 + number, w.size))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=loop, args=(n,)) for n in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for g in groups:
            g.close()
        if errors:
            raise errors[0]

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 3])
def test_call_from_a_callback(pools: Any, world: int) -> None:
    """A ticket's callback may itself call a collective; it runs in whichever thread ended the work."""

    def job() -> None:
        g = workers.world()
        first, second = _input(1, g.rank), _input(2, g.rank)
        over = threading.Event()

        def then(work: Any) -> None:
            assert work.is_success()
            dovetail.all_reduce(second)
            over.set()

        dovetail.all_reduce(first, async_op=True).add_done_callback(then)
        assert over.wait(20)
        assert workers.same(first, _expected(1, g.size))
        assert workers.same(second, _expected(2, g.size))
        late = threading.Event()
        done = dovetail.all_reduce(_input(3, g.rank), async_op=True)
        done.wait()
        done.add_done_callback(lambda w: late.set())  # over already
        assert late.wait(20)

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 3])
def test_armed(pools: Any, world: int) -> None:
    """Nothing is posted before fire(); what counts is the input at that moment."""

    def job() -> None:
        g = workers.world()
        for seed in range(5):
            t = workers.make("symmetric", g.rank, N, torch.float32)
            work = dovetail.arm(dovetail.all_reduce, t)
            assert not work.is_completed()
            t.copy_(workers.data(seed, g.rank, N, torch.float32))
            if g.rank == 0:
                time.sleep(0.02)  # the others have fired; they are seen to wait for this rank
            work.fire().wait()
            assert workers.same(t, _expected(seed, g.size))
        with pytest.raises(NotSupported, match="can't be armed"):
            dovetail.arm(dovetail.all_reduce, torch.zeros(3), variant="torch")

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_tensors_live_until_the_end(pools: Any, world: int) -> None:
    """A dropped Work keeps its tensors: nothing is written to freed memory."""

    def job() -> None:
        g = workers.world()
        for seed in range(30):
            dovetail.all_reduce(_input(seed, g.rank), async_op=True)
            torch.empty(N).fill_(7.0)
        dovetail.barrier()
        stays = _input(99, g.rank)
        dovetail.all_reduce(stays)
        assert workers.same(stays, _expected(99, g.size))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_wait_with_a_timeout(pools: Any, world: int) -> None:
    """A short wait ends without ending the call."""

    def job() -> None:
        g = workers.world()
        t = _input(1, g.rank)
        work = dovetail.arm(dovetail.all_reduce, t)
        with pytest.raises(dovetail.errors.Timeout, match="it goes on"):
            work.wait(0.05)
        work.fire().wait()
        assert workers.same(t, _expected(1, g.size))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 3])
def test_several_engines(spare_pool: Any, world: int) -> None:
    """More runner threads than one advance the queues of one run together."""
    pool = spare_pool(world, {"DOVETAIL_ENGINES": "3"})

    def job() -> None:
        g = workers.world()
        tensors = [_input(seed, g.rank, "mixed") for seed in range(30)]
        works = [dovetail.all_reduce(t, async_op=True) for t in tensors]
        for i, work in enumerate(works):
            work.wait()
            assert workers.same(tensors[i], _expected(i, g.size))
        for seed in range(10):
            workers.all_to_all("pcpy", "symmetric", 5000, torch.float32, seed)

    pool.run(job)


@pytest.mark.parametrize("world", [2])
def test_tickets_and_stats(pools: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        before = dovetail.stats()["calls"]
        heap = dovetail.all_gather_into_tensor(dovetail.empty(40), dovetail.empty(20), variant="bcst", async_op=True)
        heap.wait()
        assert (heap.ticket.variant, heap.ticket.engine, heap.ticket.cores) == ("bcst", "software DMA engine", 1)
        plain = dovetail.all_gather_into_tensor(torch.empty(40), torch.empty(20), variant="bcst", async_op=True)
        plain.wait()
        assert plain.ticket.variant == "pull"
        assert "staged" in plain.ticket.reason
        base = dovetail.all_reduce(torch.ones(20), variant="torch", async_op=True)
        base.wait()
        assert base.ticket.variant == "torch"
        t = torch.full((20,), float(g.rank + 1))
        dovetail.all_reduce(t, variant="torch")
        assert t[0] == 3.0
        found = dovetail.stats()
        assert found["calls"] - before >= 4
        assert any(f["collective"] == "all_reduce" for f in found["fall_backs"])
        choice = dovetail.explain("all_reduce", 1 << 20)
        assert choice.variant in ("oneshot", "twoshot")
        assert choice.reason

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_the_clock_of_an_armed_call_starts_with_fire(spare_pool: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        g.set_timeout(0.5)
        t = _input(1, g.rank)
        work = dovetail.arm(dovetail.all_reduce, t)
        with pytest.raises(dovetail.errors.Timeout, match="it goes on"):
            work.wait(1.0)
        work.fire().wait()
        assert workers.same(t, _expected(1, g.size))

    spare_pool(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_too_many_behind_an_armed_call(spare_pool: Any, world: int) -> None:
    """An armed call holds its lane; the error of the call that waits for it says so."""

    def job() -> str:
        g = workers.world()
        g.set_timeout(0.5)
        dovetail.arm(dovetail.all_reduce, dovetail.zeros(10))
        for _ in range(3):
            dovetail.barrier()
        with pytest.raises(dovetail.errors.Timeout) as caught:
            dovetail.barrier()
        return str(caught.value)

    assert any("armed and never fired" in text for text in spare_pool(world).run(job))


def test_pending_work_at_exit() -> None:
    """A script that ends with work in flight, its Work dropped, ends well."""
    code = (
        "import torch, dovetail\n"
        "def work():\n"
        "    g = dovetail.init()\n"
        "    for _ in range(20):\n"
        "        dovetail.all_reduce(dovetail.empty(1 << 18), async_op=True)\n"
        "    return g.rank\n"
        "if __name__ == '__main__':\n"
        "    print(dovetail.launch(work, ranks=2))\n"
        "    dovetail.all_reduce(dovetail.empty(1 << 22), async_op=True)\n"
    )
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(code)
        script.flush()
        env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
        command = [sys.executable, script.name]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 1]"), done.stderr
    assert "terminate" not in done.stderr


@pytest.mark.parametrize("world", [2])
def test_futures(pools: Any, world: int) -> None:
    """c10d's get_future and result, on our variants and on the baseline."""

    def job() -> None:
        g = workers.world()
        for variant in ("auto", "torch"):
            t = _input(4, g.rank)
            work = dovetail.all_reduce(t, async_op=True, variant=variant)
            over = threading.Event()
            work.add_done_callback(lambda _, over=over: over.set())
            work.wait()
            assert over.wait(20)
            assert workers.same(t, _expected(4, g.size))
        future = dovetail.all_reduce(_input(5, g.rank), async_op=True).get_future()
        assert workers.same(future.wait()[0], _expected(5, g.size))
        with pytest.raises(ValueError, match="armed call is asynchronous"):
            dovetail.all_reduce(_input(6, g.rank), armed=True)

    pools.get(world).run(job)
