"""GPU collectives on real processes, over the stand-in driver: results, asynchronous and armed calls."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
import torch

import dovetail
from dovetail.coll import variants
from dovetail.errors import NotSupported, Timeout
from tests.ranks import workers
from tests.ranks.gpuranks import KINDS, N, Ready, gathered, pair_of, set_standin, set_up, word


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
                    set_standin("PAGEABLE", 1)
                whole.copy_(workers.data(2, g.rank, 100 * g.size, torch.float32))
                dovetail.all_to_all_single(whole, whole, variant=variant)
                theirs = [workers.data(2, r, 100 * g.size, torch.float32) for r in range(g.size)]
                want = torch.cat([t[100 * g.rank : 100 * g.rank + 100] for t in theirs])
                assert workers.same(whole, want), (variant, kind)
                set_standin("PAGEABLE", 0)

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [2, 3])
def test_many_in_flight(ready: Ready, world: int, kind: str) -> None:
    def job() -> None:
        g = set_up()
        pairs = [pair_of(seed, g, kind) for seed in range(32)]
        works = [dovetail.all_gather_into_tensor(*p, variant="pcpy", async_op=True) for p in pairs]
        for i in range(32) if g.rank % 2 else reversed(range(32)):
            works[i].synchronize()
            assert torch.equal(pairs[i][0], gathered(i, g.size)), i
        assert all(w.is_completed() and w.is_success() and w.exception() is None for w in works)
        assert works[0].ticket.variant
        assert works[0].result()[0] is pairs[0][0]

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_dropped_works_hold_their_tensors(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        for seed in range(20):
            dovetail.all_gather_into_tensor(*pair_of(seed, g), variant="pcpy", async_op=True)
            workers.make("symmetric", g.rank, N * g.size, torch.float32).fill_(7.0)  # must not be a block in use
        stays = pair_of(99, g)
        dovetail.all_gather_into_tensor(*stays, variant="pcpy")  # behind all of them
        assert workers.same(stays[0], gathered(99, g.size))

    ready.run(world, job)


@pytest.mark.parametrize("world", [2, 3])
def test_callbacks_futures_and_waits(ready: Ready, world: int) -> None:
    def job() -> None:
        g = set_up()
        out, inp = pair_of(1, g)
        work = dovetail.all_gather_into_tensor(out, inp, variant="pcpy", async_op=True)
        seen: list[bool] = []
        called = threading.Event()

        def callback(w: Any) -> None:
            seen.append(w.is_completed() and torch.equal(out, gathered(1, g.size)))
            called.set()

        work.add_done_callback(callback)
        future = work.get_future()
        assert called.wait(20)
        assert seen == [True], "a callback came before the end of its call"
        future.wait()
        assert torch.equal(future.value()[0], gathered(1, g.size))
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
            out, inp = pair_of(50, g)
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
                word(address)[0] = value
            work.synchronize()
            assert torch.equal(out, gathered(seed, g.size)), seed
        with pytest.raises(NotSupported, match="can't be armed"):
            dovetail.arm(dovetail.all_gather_into_tensor, out, inp, variant="torch")

    ready.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_blocking_and_armed_in_one_group(ready: Ready, world: int) -> None:
    """A later call stands behind an armed one, and the caller is not held up."""

    def job() -> None:
        g = set_up()
        first, second = pair_of(1, g), pair_of(2, g)
        work = dovetail.arm(dovetail.all_gather_into_tensor, *first, variant="pcpy")
        dovetail.all_gather_into_tensor(*second, variant="pcpy")
        time.sleep(0.02)
        assert torch.isnan(second[0]).all()
        work.fire()
        assert workers.same(second[0], gathered(2, g.size))
        assert torch.equal(first[0], gathered(1, g.size))

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
            made = [(pair_of(10 * round_ + k, g), g) for k, g in enumerate((a, b, a, b))]
            works = [dovetail.all_gather_into_tensor(*p, group=g, variant="pcpy", async_op=True) for p, g in made]
            for work in works:
                work.synchronize()
            for k, (p, g) in enumerate(made):
                assert torch.equal(p[0], gathered(10 * round_ + k, g.size))
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
