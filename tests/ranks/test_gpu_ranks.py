"""GPU collectives and plans on real processes, over the stand-in driver: results, agreement, and every way to fail.

Device memory is the host's and streams are threads, so CI sees what a GPU would: copies in random order and late.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dovetail
from dovetail.coll import arguments, choose, gpu, variants
from dovetail.errors import DovetailError, HardwareError, MismatchError, NotSupported, PeerError, PlanError, Timeout
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.gpu import symmetric
from dovetail.hw.gpu.call import GpuRunner
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.world import GpuWorld
from dovetail.plan import Plan, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.build.assembly import Assembly
from tests import standin
from tests.ranks import workers
from tests.ranks.conftest import Pool
from tests.unit import randomplans

KINDS = ("symmetric", "ordinary", "mixed")


def environment(**more: object) -> dict[str, str]:
    """Of a rank whose GPU is the stand-in's."""
    return {"DOVETAIL_CUDA_LIBRARY": str(standin.build("cuda")), "DOVETAIL_GPU_SEGMENT": "4M"} | {
        name: str(value) for name, value in more.items()
    }


def _word(address: int) -> Any:
    """The 64-bit word at an address, to be written as a kernel would."""
    return np.frombuffer((ctypes.c_uint64 * 1).from_address(address), np.uint64)


def _set(name: str, value: object) -> None:
    """A setting of the stand-in, in this rank."""
    ctypes.CDLL(os.environ["DOVETAIL_CUDA_LIBRARY"]).standin_set(name.encode(), str(value).encode())


def set_up() -> Any:
    """In a rank: CPU tensors count as a GPU's, and `auto` takes our paths; gives the world's group."""
    workers.use("standin")
    choose.untested = lambda told, device: None
    return workers.world()


class Ready:
    """One pool at a time, kept from test to test; its ranks are set up."""

    def __init__(self) -> None:
        self.pool: Pool | None = None

    def get(self, ranks: int) -> Pool:
        if self.pool is None or self.pool.ranks != ranks or not all(p.is_alive() for p in self.pool.processes):
            self.close()
            self.pool = Pool(ranks, environment(STANDIN_DELAY_US=20))
        return self.pool

    def run(self, ranks: int, job: Callable[..., Any]) -> list[Any]:
        """A failed test may leave a broken group: the next one starts anew."""
        try:
            return self.get(ranks).run(job)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None


@pytest.fixture(scope="module")
def ready() -> Iterator[Ready]:
    made = Ready()
    yield made
    made.close()


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_collectives(ready: Ready, world: int, kind: str) -> None:
    def job() -> None:
        set_up()
        for seed, items in enumerate((0, 1, 1000, 40_001)):
            for variant in (*variants("all_gather"), "auto"):
                workers.all_gather(variant, kind, items, torch.float32, seed)
            for variant in (*variants("all_to_all"), "auto"):
                workers.all_to_all(variant, kind, items, torch.float32, seed)
        for seed, items in enumerate((3, 5000)):
            same = {workers.all_reduce(v, kind, items, torch.bfloat16, "sum", seed) for v in variants("all_reduce")}
            assert len(same) == 1, "variants differ in their bits"
            workers.all_reduce("auto", kind, items, torch.int32, "max", seed)
            workers.reduce_scatter(kind, items, torch.float16, "avg", seed)
        for seed, items in enumerate((0, 1000)):
            workers.rooted(kind, items, torch.float32, seed)

    ready.run(world, job)


@pytest.mark.parametrize("world", [4])
def test_four_ranks(ready: Ready, world: int) -> None:
    def job() -> None:
        set_up()
        for kind in KINDS:
            workers.all_gather("bcst", kind, 3000, torch.float32, 1)
            workers.all_to_all("pcpy", kind, 3000, torch.float32, 2)
            workers.all_reduce("twoshot", kind, 3000, torch.float32, "sum", 3)

    ready.run(world, job)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_uneven_all_to_all(ready: Ready, world: int, kind: str) -> None:
    """Splits change from call to call, zeros among them."""

    def job() -> None:
        g = set_up()
        for variant, seed in itertools.product(("auto", "pcpy", "pull"), range(4)):
            rng = torch.Generator().manual_seed(seed)
            rows = torch.randint(0, 9, (g.size, g.size), generator=rng)  # rows[i, j]: from i to j
            send, receive = rows[g.rank].tolist(), rows[:, g.rank].tolist()
            inp = workers.make(kind, g.rank, sum(send) * 5, torch.float32).view(-1, 5)
            inp.copy_(workers.data(seed, g.rank, sum(send) * 5, torch.float32).view(-1, 5))
            out = workers.make(kind, g.rank, sum(receive) * 5, torch.float32).view(-1, 5)
            dovetail.all_to_all_single(out, inp, receive, send, variant=variant)
            parts = []
            for i in range(g.size):
                theirs = workers.data(seed, i, int(rows[i].sum()) * 5, torch.float32).view(-1, 5)
                parts.append(theirs.split(rows[i].tolist())[g.rank])
            assert workers.same(out, torch.cat(parts)), (variant, kind, seed)

    ready.run(world, job)


@pytest.mark.parametrize("world", [2, 3])
def test_in_place(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        for kind in ("symmetric", "ordinary"):
            whole = workers.make(kind, g.rank, 100 * g.size, torch.float32)
            mine = whole[100 * g.rank : 100 * (g.rank + 1)]
            for variant in variants("all_gather"):
                workers.poison(whole)
                mine.copy_(workers.data(1, g.rank, 100, torch.float32))
                dovetail.all_gather_into_tensor(whole, mine, variant=variant)
                assert workers.same(whole, torch.cat([workers.data(1, r, 100, torch.float32) for r in range(g.size)]))
            for variant in ("auto", "swap", "pcpy"):
                if variant == "pcpy":  # the API copies the input first, and a copy of the CPU's is not pinned
                    _set("PAGEABLE", 1)
                whole.copy_(workers.data(2, g.rank, 100 * g.size, torch.float32))
                dovetail.all_to_all_single(whole, whole, variant=variant)
                theirs = [workers.data(2, r, 100 * g.size, torch.float32) for r in range(g.size)]
                want = torch.cat([t[100 * g.rank : 100 * g.rank + 100] for t in theirs])
                assert workers.same(whole, want), (variant, kind)
                _set("PAGEABLE", 0)

    ready.run(world, job)


@pytest.mark.parametrize("world", [3])
def test_subgroups(ready: Ready, world: int) -> None:
    """Groups that are subsets, overlapping and in another order, used in turn; closed and made again."""

    def job() -> None:
        w = set_up().world
        for round_ in range(3):
            groups = [[0, 2], [2, 1, 0], [1, 2]]
            mine = [w.new_group(ranks) for ranks in groups if w.rank in ranks]
            for seed in range(2):
                for g in mine:
                    workers.all_gather("pcpy", "mixed", 130, torch.float32, seed + round_, g)
                    workers.all_reduce("twoshot", "symmetric", 130, torch.float32, "sum", seed, g)
            dovetail.barrier()
            for g in mine:
                g.close()
            del g, mine

    ready.run(world, job)


# --- asynchronous and armed ------------------------------------------------------------------------------------------

N = 3000


def _sum_of(seed: int, size: int) -> torch.Tensor:
    return workers.reduced([workers.data(seed, r, N, torch.float32) for r in range(size)], "sum")


def _gathered(seed: int, size: int) -> torch.Tensor:
    return torch.cat([workers.data(seed, r, N, torch.float32) for r in range(size)])


def _pair(seed: int, g: Any, kind: str = "symmetric") -> tuple[torch.Tensor, torch.Tensor]:
    """(output, input) of an all_gather."""
    inp = workers.make(kind, g.rank, N, torch.float32).copy_(workers.data(seed, g.rank, N, torch.float32))
    return workers.make(kind, g.rank, N * g.size, torch.float32), inp


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_many_in_flight(ready: Ready, world: int, kind: str) -> None:
    def job() -> None:
        g = set_up()
        pairs = [_pair(seed, g, kind) for seed in range(32)]
        works = [dovetail.all_gather_into_tensor(*p, variant="pcpy", async_op=True) for p in pairs]
        for i in range(32) if g.rank % 2 else reversed(range(32)):
            works[i].synchronize()
            assert torch.equal(pairs[i][0], _gathered(i, g.size)), i
        assert all(w.is_completed() and w.is_success() and w.exception() is None for w in works)
        assert works[0].ticket.variant
        assert works[0].result()[0] is pairs[0][0]

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_dropped_works_hold_their_tensors(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        for seed in range(20):
            dovetail.all_gather_into_tensor(*_pair(seed, g), variant="pcpy", async_op=True)
            workers.make("symmetric", g.rank, N * g.size, torch.float32).fill_(7.0)  # must not be a block in use
        stays = _pair(99, g)
        dovetail.all_gather_into_tensor(*stays, variant="pcpy")  # behind all of them
        assert workers.same(stays[0], _gathered(99, g.size))

    ready.run(world, job)


@pytest.mark.parametrize("world", [2, 3])
def test_callbacks_futures_and_waits(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        out, inp = _pair(1, g)
        work = dovetail.all_gather_into_tensor(out, inp, variant="pcpy", async_op=True)
        seen: list[bool] = []
        called = threading.Event()

        def callback(w: Any) -> None:
            seen.append(w.is_completed() and torch.equal(out, _gathered(1, g.size)))
            called.set()

        work.add_done_callback(callback)
        future = work.get_future()
        assert called.wait(20)
        assert seen == [True], "a callback came before the end of its call"
        future.wait()
        assert torch.equal(future.value()[0], _gathered(1, g.size))
        assert work.wait() is True
        assert work.wait(5.0) is True
        assert work.is_success()
        late = threading.Event()
        work.add_done_callback(lambda _: late.set())  # over already
        assert late.wait(20)

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_reductions_are_a_kernels(ready: Ready, world: int) -> None:
    """A reduction reads and writes with compute cores; before a call is issued nothing is claimed."""

    def job() -> None:
        g = set_up()
        t, out = (workers.make("symmetric", g.rank, n, torch.float32) for n in (64, 32))
        work = dovetail.reduce_scatter_tensor(out, t.fill_(1), async_op=True)
        assert "copy engine" not in work.ticket.engine
        work.synchronize()
        assert work.ticket.engine == "reduce: SM kernel"
        assert work.ticket.cores == g.gpu.world.device.driver.num_multiprocessors(0)
        work = dovetail.all_reduce(t, variant="twoshot", async_op=True)
        work.synchronize()
        assert work.ticket.engine == "d2d: unproved, reduce: SM kernel"

    ready.run(world, job)


@pytest.mark.parametrize("world", [2, 3])
def test_armed(ready: Ready, world: int) -> None:
    """Nothing is moved before `fire`; what counts is the input at that moment. A kernel can open the gate as well."""

    def job() -> None:
        g = set_up()
        for seed in range(4):
            out, inp = _pair(50, g)
            work = dovetail.arm(dovetail.all_gather_into_tensor, out, inp, variant="pcpy")
            with pytest.raises(Timeout, match="it goes on"):
                work.wait(0.03)
            assert not work.is_completed()
            assert torch.isnan(out).all()
            inp.copy_(workers.data(seed, g.rank, N, torch.float32))
            if seed % 2:
                work.fire()
            else:
                address, value = work.gate()
                _word(address)[0] = value
            work.synchronize()
            assert torch.equal(out, _gathered(seed, g.size)), seed
        with pytest.raises(NotSupported, match="can't be armed"):
            dovetail.arm(dovetail.all_gather_into_tensor, out, inp, variant="torch")

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_blocking_and_armed_in_one_group(ready: Ready, world: int) -> None:
    """A later call stands behind an armed one, and the caller is not held up."""

    def job() -> None:
        g = set_up()
        first, second = _pair(1, g), _pair(2, g)
        work = dovetail.arm(dovetail.all_gather_into_tensor, *first, variant="pcpy")
        dovetail.all_gather_into_tensor(*second, variant="pcpy")
        time.sleep(0.02)
        assert torch.isnan(second[0]).all()
        work.fire()
        assert workers.same(second[0], _gathered(2, g.size))
        assert torch.equal(first[0], _gathered(1, g.size))

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_two_groups_asynchronously(ready: Ready, world: int) -> None:
    """Calls of two groups, in the same order on every rank, never wait for each other in a circle."""

    def job() -> None:
        w = set_up().world
        a, b = w.new_group([0, 1]), w.new_group([0, 1])
        for g in (a, b):
            workers.all_gather("pcpy", "symmetric", N, torch.float32, 1, g)
            g.set_timeout(5)
        for round_ in range(15):
            made = [(_pair(10 * round_ + k, g), g) for k, g in enumerate((a, b, a, b))]
            works = [dovetail.all_gather_into_tensor(*p, group=g, variant="pcpy", async_op=True) for p, g in made]
            for work in works:
                work.synchronize()
            for k, (p, g) in enumerate(made):
                assert torch.equal(p[0], _gathered(10 * round_ + k, g.size))
        dovetail.barrier()
        a.close()
        b.close()

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_groups_come_and_go(ready: Ready, world: int) -> None:
    """Closed groups give their memory back, and their words can be pinned again where they were."""

    def job() -> int:
        w = set_up().world
        for round_ in range(12):
            g = w.new_group([0, 1])
            workers.all_gather("pcpy", "ordinary", 1000, torch.float32, round_, g)
            dovetail.barrier()
            g.close()
            del g
            if round_ == 3:
                early = w.used_bytes
        return w.used_bytes - early

    assert max(ready.run(world, job)) < 2 << 20


# --- agreement -------------------------------------------------------------------------------------------------------


def _t(items: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return workers.make("symmetric", 0, items, dtype)


CALLS: dict[str, Callable[[Any], Any]] = {
    "another collective": lambda g: (
        dovetail.all_reduce(_t(8)) if g.rank == 0 else dovetail.all_gather_into_tensor(_t(8 * g.size), _t(8))
    ),
    "another size": lambda g: dovetail.all_reduce(_t(8 + g.rank)),
    "another dtype": lambda g: dovetail.all_reduce(_t(8, (torch.float32, torch.int32)[g.rank > 0])),
    "another root": lambda g: dovetail.broadcast(_t(8), int(g.rank > 0)),
    "another variant": lambda g: dovetail.all_reduce(_t(8), variant="oneshot" if g.rank else "twoshot"),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_disagree(ready: Ready, world: int, what: str) -> None:
    """Every rank gets an error that shows both calls; nothing moved, so the group goes on."""
    call = CALLS[what]

    def job() -> dict[int, str]:
        g = set_up()
        with pytest.raises(MismatchError) as caught:
            call(g)
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)
        return caught.value.calls

    for rank, calls in enumerate(ready.run(world, job)):
        assert rank in calls
        assert len(set(calls.values())) == 2, calls


@pytest.mark.parametrize("world", [2])
def test_asynchronous_calls_disagree(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        work = dovetail.all_reduce(_t(8 + g.rank), async_op=True)
        with pytest.raises(MismatchError):
            work.wait()
        assert isinstance(work.exception(), MismatchError)
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(MismatchError):
            work.get_future().wait()
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)

    ready.run(world, job)


@pytest.mark.parametrize("world", [2, 3])
def test_splits_disagree(ready: Ready, world: int) -> None:
    def job() -> str:
        g = set_up()
        send, receive = [2] * g.size, [2] * g.size
        if g.rank == 1:
            receive[0] = 3  # rank 0 sends 2 rows
        inp, out = _t(4 * sum(send)).view(-1, 4), _t(4 * sum(receive)).view(-1, 4)
        with pytest.raises(MismatchError) as caught:
            dovetail.all_to_all_single(out, inp, receive, send)
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)
        return str(caught.value)

    for text in ready.run(world, job):
        assert "32" in text
        assert "48" in text


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [3])
def test_random_plans_as_on_the_cpu(ready: Ready, world: int) -> None:
    """60 random plans on GPU memory leave the bytes that the CPU's executor leaves."""

    def job() -> int:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        moved = 0
        for seed in range(60):
            plan = randomplans.random_plan(seed, ranks=3, moves=12, buffer_bytes=500)
            filled = randomplans.contents_of(plan, seed)
            users = [n for n, b in enumerate(plan.buffers) if b.role is not Role.SCRATCH]
            both = []
            for here in (False, True):
                tensors = {}
                for n in users:
                    size = plan.buffers[n].sizes[g.rank]
                    t = side.world.heap.empty((size,), torch.uint8) if here else dovetail.empty(size, dtype=torch.uint8)
                    tensors[plan.buffers[n].name] = t.copy_(torch.from_numpy(filled[g.rank, n]))
                runner: Any = GpuRunner(side, plan, most_streams=1 + seed % 4) if here else PlanRunner(g, plan)
                for _ in range(1 + seed % 2):  # the same bytes come of two runs only if they do not overlap
                    ticket = runner.submit(tensors)
                    ticket.wait(20)
                both.append(tensors)
            for name in both[0]:
                assert torch.equal(both[0][name], both[1][name]), (seed, name)
            moved += sum(ticket.bytes_by_path.values())
        return moved

    assert min(ready.run(world, job)) > 10_000


@pytest.mark.parametrize("world", [2])
def test_imported_signals_gates_and_parameters(ready: Ready, world: int) -> None:
    def released(slabs: int, slab_bytes: int) -> Plan:
        """Rank 0 sends slab k to rank 1 when its caller has raised `flag` to k + 1; the rows of a slab are strided."""
        a = Assembly("released copies", 2)
        size = slabs * slab_bytes
        src = a.buffer("input", Role.INPUT, [size, -2])
        dst = a.buffer("output", Role.OUTPUT, [-2, size])
        flag, done = a.signal("flag", 0, SignalKind.IMPORTED), a.signal("done", 1)
        at = np.arange(slabs, dtype=np.int64) * slab_bytes
        copies = st.copy2d((0, src, at), (1, dst, at), 16, slab_bytes // 16, 16, 16)
        waits = st.wait(np.full(slabs, flag), np.arange(1, slabs + 1))
        a.queue(0, 0, st.stamp(0), st.interleave(waits, copies), st.signal(done), st.stamp(1))
        a.queue(1, 0, st.wait(done))
        a.goal(st.copy((0, src, 0), (1, dst, 0), size))
        return passes.entry(a.plan())

    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        runner = GpuRunner(side, released(8, 160))
        name = "input" if g.rank == 0 else "output"
        for seed in range(4):
            t = workers.make("symmetric", g.rank, 1280, torch.uint8)
            if g.rank == 0:
                t.copy_(workers.data(seed, 0, 1280, torch.uint8))
            ticket = runner.submit({name: t})
            if g.rank == 0:
                for k in range(8):
                    assert not ticket.is_over()
                    if k % 2:
                        ticket.raise_signal("flag", k + 1)
                    else:
                        address, base = ticket.signal_address("flag")
                        _word(address)[0] = base + k + 1
            ticket.wait(20)
            if g.rank == 1:
                assert torch.equal(t, workers.data(seed, 0, 1280, torch.uint8))
        if g.rank == 0:
            first, last = ticket.stamps_us()
            assert first == 0.0 < last
            for call in (lambda: ticket.raise_signal("flog"), lambda: ticket.signal_address("flog"), ticket.gate):
                with pytest.raises(PlanError, match="imports no signal|has no signal|has no gate"):
                    call()
        gated = GpuRunner(side, passes.prelaunch(passes.entry(all_gather.bcst(g.size, 4 * N))))
        out, inp = _pair(7, g)
        ticket = gated.submit({"input": inp, "output": out}, gated=True)
        time.sleep(0.01)
        assert torch.isnan(out).all()
        ticket.fire()
        ticket.wait(20)
        assert torch.equal(out, _gathered(7, g.size))
        gated.submit({"input": inp, "output": workers.poison(out)}).wait(20)  # not armed: the gate is open
        assert torch.equal(out, _gathered(7, g.size))
        uneven = GpuRunner(side, passes.entry(all_to_all.pcpy_uneven(g.size)))
        table = np.array([[4 * (1 + (i + j) % 3) for j in range(g.size)] for i in range(g.size)])
        send, receive = table[g.rank], table[:, g.rank]
        params = [*(np.cumsum(send) - send), *send, *(np.cumsum(receive) - receive), *receive]
        inp = workers.make("symmetric", g.rank, int(send.sum()), torch.uint8).fill_(g.rank)
        out = workers.make("symmetric", g.rank, int(receive.sum()), torch.uint8)
        uneven.submit({"input": inp, "output": out}, [int(p) for p in params]).wait(20)
        assert out.tolist() == [r for r in range(g.size) for _ in range(int(receive[r]))]

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_plans_that_are_refused(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        with pytest.raises(NotSupported, match="is for 3 ranks"):
            GpuRunner(side, passes.entry(all_gather.pcpy(3, 8)))
        runner = GpuRunner(side, passes.entry(all_gather.pcpy(2, 8)))
        with pytest.raises(ValueError, match="wrong or missing: \\['output'\\]"):
            runner.submit({"input": _t(2)})
        many = Assembly("many signals", 2)
        many.buffer("input", Role.INPUT, 8)
        for n in range(520):
            many.signal(f"s{n}", 0)
        many.queue(0, 0, st.signal(np.arange(520)))
        with pytest.raises(NotSupported, match="signals on one rank; at most 511 fit"):
            GpuRunner(side, passes.entry(many.plan()))
        # Ranks that run different plans see it before anything moves.
        other = GpuRunner(side, passes.entry(all_gather.pcpy(2, 8 * (1 + g.rank))))
        with pytest.raises(MismatchError, match="fingerprint"):
            other.submit({"input": _t(8), "output": _t(16)})
        workers.all_gather("pcpy", "mixed", 100, torch.float32, 3)

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_host_heap(ready: Ready, world: int) -> None:
    """Pinned memory in the ranks' arenas: peers' copies go to and from host memory."""

    def job() -> dict[str, int]:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        runner = GpuRunner(side, passes.entry(all_gather.pcpy(2, 4 * N)))
        for seed in range(3):
            inp = side.world.heap.empty((N,), torch.float32).copy_(workers.data(seed, g.rank, N, torch.float32))
            out = workers.poison(side.world.host_heap.empty((N * g.size,), torch.float32))
            ticket = runner.submit({"input": inp, "output": out})
            ticket.wait(20)
            assert torch.equal(out, _gathered(seed, g.size))
        return ticket.bytes_by_path

    for paths in ready.run(world, job):
        assert set(paths) == {"d2h"}


@pytest.mark.parametrize("world", [2])
def test_the_edges_of_a_rank(ready: Ready, world: int) -> None:
    """Another GPU, a capturing stream, a driver without IPC, memory in a peer's arena, a work that is not issued."""

    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        with pytest.raises(ValueError, match="this rank uses GPU 0, the tensor is on GPU 1: one GPU per rank"):
            gpu.world_of(g.world, "cuda", 1)
        device = side.world.device
        for caps, local, text in (
            (replace(device.caps, ipc=False), True, "no IPC"),
            (device.caps, False, "spans hosts"),
        ):
            with pytest.raises(NotSupported, match=text):
                GpuWorld(SimpleNamespace(local=local, size=2), SimpleNamespace(caps=caps, name="poor"))  # type: ignore[arg-type]
        out, inp = _pair(4, g)
        gpu.is_capturing, asked = lambda: True, gpu.is_capturing
        try:
            with pytest.raises(NotSupported, match="current stream is capturing a graph"):
                dovetail.all_gather_into_tensor(out, inp, variant="pcpy")
        finally:
            gpu.is_capturing = asked
        dovetail.barrier()
        if g.rank == 1:
            time.sleep(0.1)  # the other's call is seen not to be issued
        work = dovetail.all_gather_into_tensor(out, inp, variant="pcpy", async_op=True)
        if g.rank == 0:
            assert not work.is_completed()
            assert work.exception() is None
            assert work.ticket.variant == "pcpy"
            with pytest.raises(Timeout, match="was not issued after 0.01 s; it goes on"):
                work.wait(0.01)
        work.synchronize()
        assert torch.equal(out, _gathered(4, g.size))
        runner = GpuRunner(side, passes.entry(all_gather.pull(2, 4 * N)))
        inp = side.world.host_heap.empty((N,), torch.float32).copy_(workers.data(5, g.rank, N, torch.float32))
        runner.submit({"input": inp, "output": workers.poison(out)}).wait(20)  # read from the peer's arena
        assert torch.equal(out, _gathered(5, g.size))
        assert dovetail.stats()

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_tensors_of_torchs_symmetric_memory(ready: Ready, world: int) -> None:
    """Memory that somebody else has mapped on every rank is used where it is; on one rank only it is refused."""

    def job() -> None:
        g = set_up()
        side = gpu.group_of(g, "cuda", 0)
        driver = side.world.device.driver
        theirs = Heap(side.world.device)  # torch's heap, as it were
        mine = [theirs.empty((n,), torch.float32) for n in (N, N * g.size)]
        handles = torch.empty(64 * g.size, dtype=torch.uint8)
        place = torch.frombuffer(bytearray(theirs.segments[0].handle), dtype=torch.uint8)
        arguments.one_device, counted = lambda _: ("cpu", -1), arguments.one_device
        dovetail.all_gather_into_tensor(handles, place)
        arguments.one_device = counted
        opened = [driver.ipc_open(bytes(handles[64 * r : 64 * r + 64].tolist())) for r in range(g.size) if r != g.rank]
        opened.insert(g.rank, theirs.segments[0].base)
        offsets = {t.data_ptr(): t.data_ptr() - theirs.segments[0].base for t in mine}

        def pointers(tensor: torch.Tensor, _: Any) -> tuple[int, ...] | None:
            offset = offsets.get(tensor.data_ptr())
            return None if offset is None else tuple(base + offset for base in opened)

        symmetric.pointers_of, asked = pointers, symmetric.pointers_of
        before = g.baseline
        g.baseline = object()
        try:
            for seed in range(3):
                mine[0].copy_(workers.data(seed, g.rank, N, torch.float32))
                work = dovetail.all_gather_into_tensor(mine[1], mine[0], variant="pcpy", async_op=True)
                work.synchronize()
                assert torch.equal(mine[1], _gathered(seed, g.size))
                assert work.ticket.variant == "pcpy"  # not staged
            one = mine[0] if g.rank == 0 else side.world.heap.empty((N,), torch.float32)
            with pytest.raises(MismatchError, match=r"ranks \[0\] pass tensors of torch's symmetric memory"):
                dovetail.all_gather_into_tensor(mine[1], one, variant="pcpy")
        finally:
            symmetric.pointers_of, g.baseline = asked, before
        out, inp = _pair(9, g)
        dovetail.all_gather_into_tensor(out, inp, variant="pcpy")
        side.settle()
        assert torch.equal(out, _gathered(9, g.size))  # the group goes on

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_a_gpu_tensor_here_and_a_cpu_tensor_there(ready: Ready, world: int) -> None:
    """The first call with GPU tensors finds out, and the group goes on."""

    def job() -> None:
        g = set_up()
        pair = g.world.new_group([0, 1])
        counted = arguments.one_device
        if g.rank == 1:
            arguments.one_device = lambda _: ("cpu", -1)
        try:
            with pytest.raises(MismatchError, match="do not make the same call"):
                dovetail.all_reduce(torch.ones(4), group=pair, variant="oneshot")
        finally:
            arguments.one_device = counted
        workers.all_reduce("oneshot", "symmetric", 100, torch.float32, "sum", 1, pair)
        pair.close()

    ready.run(world, job)


# --- failures --------------------------------------------------------------------------------------------------------


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
            ticket = runner.submit({"input": _t(1024), "output": _t(1024)})
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
                runner.submit({"input": _t(1024), "output": _t(1024)})
            pair.close()
        else:
            time.sleep(0.5)
        begin = time.monotonic()
        with pytest.raises(PeerError, match="rank 1 died"):  # and where the host waits for it
            dovetail.all_gather_into_tensor(_t(24), _t(8), variant="pcpy")
        assert time.monotonic() - begin < 2.0
        g.close()
        workers.all_gather("pcpy", "mixed", 1000, torch.float32, 2, others)
        dovetail.finalize()
        return True

    pool.start(job)
    assert pool.finish([0, 2]) == {0: True, 2: True}


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
                ticket = GpuRunner(side, _long_plan(4096)).submit({"input": _t(1024), "output": _t(1024)})
                with pytest.raises((Timeout, PeerError)) as caught:
                    ticket.wait(10)
            else:
                if g.rank == 1:
                    time.sleep(1.0)
                with pytest.raises((Timeout, PeerError)) as caught:
                    dovetail.all_gather_into_tensor(_t(16), _t(8), variant="pcpy", group=pair)
            texts.append(f"{type(caught.value).__name__}: {caught.value}")
            with pytest.raises((Timeout, PeerError)):
                dovetail.all_gather_into_tensor(_t(16), _t(8), variant="pcpy", group=pair)
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
        work = dovetail.all_gather_into_tensor(*_pair(1, g), variant="pcpy", async_op=True)
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
            runner.submit({"input": _t(100), "output": _t(200)}).wait(20)
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
            inp = _t(50 if g.rank and case == "small" else 100)
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
            _set("FAIL", "cuMemcpyAsync:719:1,cuMemcpyBatchAsync:719:1")
        begin = time.monotonic()
        out, inp = _pair(1, g)

        def call() -> None:
            dovetail.all_gather_into_tensor(out, inp, variant="pcpy", group=pair)
            pair.gpu.settle()

        with pytest.raises(DovetailError) as caught:
            call()
        assert time.monotonic() - begin < 2.0
        if g.rank == 1:
            _set("FAIL", "")
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
            ticket = runner.submit({"input": _t(1024), "output": _t(1024)})
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
            _set("DELAY_US", 20_000)
        inp, out = _t(1000).fill_(3.0), _t(1000)
        ticket = runner.submit({"input": inp, "output": out})
        if g.rank == 1:
            ticket.wait(20)
            pair.close()
            time.sleep(1.0)
            return True
        ticket.wait(20)
        _set("DELAY_US", 20)
        return bool((out == 3.0).all())

    assert ready.run(world, job) == [True, True]


@pytest.mark.parametrize("world", [2])
def test_an_expired_gate(ready: Ready, world: int) -> None:
    """Nobody fires: a Timeout that names the gate; every rank has an error; streams are free afterwards."""

    def job() -> str:
        g = set_up()
        pair = g.world.new_group([0, 1])
        pair.set_timeout(0.3)
        work = dovetail.arm(dovetail.all_gather_into_tensor, *_pair(1, g), variant="pcpy", group=pair)
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
        pairs = [_pair(k, g) for k in range(5)]
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
            assert torch.equal(pairs[k][0], _gathered(k, g.size))
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
                dovetail.all_gather_into_tensor(*_pair(k, g), variant="pcpy", group=pair, async_op=True)
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
