"""Two beside each other on a CPU, with real ranks: right results by every strategy, one choice on all ranks."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import pytest
import torch

import dovetail
from dovetail import overlap
from dovetail.overlap import Load, Runtime, Strategy
from dovetail.overlap.contenders import ROUNDS_BEFORE_KEPT
from tests.ranks import workers

N = 4096
STRATEGIES = [s for s in Strategy if s is not Strategy.FUSED]
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "reduce_scatter_tensor")


class Case:
    """A collective on fresh data, and what must come out."""

    def __init__(self, name: str, rank: int, size: int, group: Any = None) -> None:
        self.name, self.rank, self.size = name, rank, size
        gathers = name == "all_gather_into_tensor"
        self.input = dovetail.empty(N, dtype=torch.float32)
        self.output = dovetail.empty(N * size if gathers else N // size if "scatter" in name else N)
        one = [self.input] if name == "all_reduce" else [self.output, self.input]
        self.comm = overlap.Collective(getattr(dovetail, name), *one, group=group)

    def fill(self, seed: int) -> None:
        self.seed = seed
        self.input.copy_(workers.data(seed, self.rank, N, torch.float32))
        self.output.fill_(float("nan"))

    def is_right(self) -> bool:
        each = [workers.data(self.seed, r, N, torch.float32) for r in range(self.size)]
        mine = slice(self.rank * N // self.size, (self.rank + 1) * N // self.size)
        if self.name == "all_gather_into_tensor":
            return workers.same(self.output, torch.cat(each))
        if self.name == "all_to_all_single":
            return workers.same(self.output, torch.cat([data[mine] for data in each]))
        total = workers.reduced(each, "sum")
        if self.name == "all_reduce":
            return workers.same(self.input, total)
        return workers.same(self.output, total[mine])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_strategy_gives_the_same(pools: Any, name: str, world: int) -> None:
    """Ranks begin at different times; the computation's result comes back too."""

    def job() -> list[str]:
        g = workers.world()
        case = Case(name, g.rank, g.size)
        x = torch.randn(64, 64)
        cores = os.sched_getaffinity(0)
        wrong = []
        with Runtime() as runtime:
            for n, strategy in enumerate(STRATEGIES):
                if strategy not in (Strategy.SERIAL, Strategy.STREAMS) and not runtime.place.has_partition:
                    continue
                for seed in range(4):
                    case.fill(10 * n + seed)
                    if (g.rank + seed) % g.size == 0:
                        time.sleep(0.002)
                    outcome = runtime.run(lambda: x @ x, case.comm, strategy)
                    if not case.is_right() or not torch.equal(outcome.wait(), x @ x) or outcome.strategy != strategy:
                        wrong.append(f"{strategy} {seed}")
        assert os.sched_getaffinity(0) == cores  # given back
        return wrong

    assert pools.get(world).run(job) == [[]] * world


def test_all_ranks_choose_alike_and_by_the_slowest(pools: Any) -> None:
    """On rank 1 alone, engines are made slow, by more than a busy machine makes anything: no rank may keep them."""

    def job() -> list[str]:
        g = workers.world()
        case = Case("all_gather_into_tensor", g.rank, g.size)
        start = case.comm.start

        def slow(mover: Any, **more: Any) -> Any:
            if g.rank == 1 and mover is overlap.Mover.ENGINES:
                time.sleep(0.1)
            return start(mover, **more)

        case.comm.start = slow  # type: ignore[method-assign]
        taken = []
        with Runtime() as runtime:
            for seed in range(ROUNDS_BEFORE_KEPT + 8):
                case.fill(seed)
                outcome = runtime.run(overlap.Call(lambda: None, Load(name="nothing")), case.comm)
                assert case.is_right()
                taken.append(f"{outcome.setting} by {outcome.setting.moved_by}")
        return taken

    first, second = pools.get(2).run(job)
    assert first == second
    assert len(set(first[-8:])) == 1
    assert "engines" not in first[-1]


def test_the_with_form(pools: Any) -> None:
    def job() -> list[str]:
        g = workers.world()
        case = Case("all_to_all_single", g.rank, g.size)
        x, reasons = torch.randn(64, 64), []
        for seed in range(20):
            case.fill(seed)
            with overlap.beside(case.comm) as outcome:
                y = x @ x
            assert case.is_right(), outcome.setting
            assert torch.equal(y, x @ x)
            reasons.append(outcome.reason)
        with pytest.raises(ValueError, match="strategies"), overlap.beside(case.comm, "fast"):
            pass
        overlap.close()
        return reasons[-1:]

    for reason in pools.get(2).run(job):
        assert reason[0].startswith("measured: ")


def test_wrong_arguments(pools: Any) -> None:
    def job() -> None:
        t = dovetail.empty(8)
        with pytest.raises(ValueError, match="no collective"):
            overlap.Collective(torch.add, t)
        for other in (dovetail.empty, dovetail.explain, dovetail.stats):
            with pytest.raises(ValueError, match="no collective"):
                overlap.Collective(other, t)
        with pytest.raises(TypeError, match="input_split_sizes must be whole numbers"):
            overlap.Collective(dovetail.all_to_all_single, dovetail.empty(8), t, [4, 4], "44")
        comm = overlap.Collective(dovetail.all_reduce, t)
        with pytest.raises(TypeError, match=r"is text, not \['a'\]"):
            overlap.run(overlap.Call(lambda: None, Load(name=["a"])), comm)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"is text, not \['a'\]"), overlap.beside(comm, name=["a"]):  # type: ignore[arg-type]
            pass
        with pytest.raises(ValueError, match="async_op"):
            overlap.Collective(dovetail.all_reduce, t, async_op=True)
        with pytest.raises(ValueError, match="tensor"):
            overlap.Collective(dovetail.all_reduce)

    pools.get(2).run(job)


def test_two_groups_that_share_a_rank(pools: Any) -> None:
    """Each group counts its own runs: one that one rank alone also runs in would decide at another call."""

    def job() -> int:
        g = workers.world()
        mine = [dovetail.new_group(ranks) for ranks in ([0, 1], [0, 2]) if g.rank in ranks]
        with Runtime() as runtime:
            for n in range(40):
                for group in mine:
                    case = Case("all_gather_into_tensor", group.rank, group.size, group)
                    case.fill(n)
                    runtime.run(overlap.Call(lambda: None, Load(name="same")), case.comm)
                    assert case.is_right()
        return len(mine)

    assert pools.get(3).run(job) == [2, 1, 1]


def _exchange(rank: int, uneven: bool) -> overlap.Collective:
    """With splits; if uneven, rank 1 has more bytes than in the other exchange, and rank 0 as many."""
    sends, receives = [2, 2], [2, 2]
    if uneven:
        sends, receives = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
    out, inp = torch.empty(sum(receives), 8), torch.randn(sum(sends), 8)
    return overlap.Collective(dovetail.all_to_all_single, out, inp, receives, sends)


def test_what_ranks_know_may_differ(pools: Any) -> None:
    """Splits, hints, and a rank that is told to take the baseline: all try and keep the same."""

    def job(kind: str) -> list[str]:
        g = workers.world()
        comms = [_exchange(g.rank, kind == "splits" and turn == 1) for turn in range(2)]
        if kind == "disabled" and g.rank == 1:
            os.environ["DOVETAIL_DISABLE"] = "1"
        taken = []
        try:
            with Runtime() as runtime:
                for n in range(2 * ROUNDS_BEFORE_KEPT):
                    load = Load(name="same", flops=1e9 * (1 + 9 * g.rank) if kind == "hints" else 0.0, size_bytes=1e6)
                    taken.append(str(runtime.run(overlap.Call(lambda: None, load), comms[n % 2]).setting))
        finally:
            os.environ.pop("DOVETAIL_DISABLE", None)
        return taken

    for kind in ("splits", "hints", "disabled"):
        first, second = pools.get(2).run(job, kind)
        assert first == second, kind


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_lists_that_the_root_has(pools: Any, name: str) -> None:
    """They are not what tells the root's pairs apart: it and the others find new ones at the same calls."""

    def job() -> list[str]:
        g = workers.world()
        taken = []
        with Runtime() as runtime:
            for n in range(2 * ROUNDS_BEFORE_KEPT):
                items = (64, 1024)[n % 2]
                mine = workers.data(n, g.rank, items, torch.float32)
                every = [workers.data(n, r, items, torch.float32) for r in range(g.size)]
                one = mine if name == "gather" else torch.empty(items)
                many = [torch.empty(items) for _ in every] if name == "gather" else every
                comm = overlap.Collective(getattr(dovetail, name), one, many if g.rank == 0 else None)
                assert comm.traffic.size_bytes == one.nbytes
                taken.append(str(runtime.run(overlap.Call(lambda: None, Load(name="same")), comm).setting))
                if name == "scatter":
                    assert workers.same(one, every[g.rank])
                elif g.rank == 0:
                    assert all(map(workers.same, many, every))
        return taken

    first, second = pools.get(2).run(job)
    assert first == second


@pytest.mark.parametrize("named", [False, True])
def test_split_sizes_in_a_tensor(pools: Any, named: bool) -> None:
    """As in a list: no bytes tell pairs apart."""

    def job() -> None:
        g = workers.world()
        sends = torch.tensor([2, 4] if g.rank == 0 else [3, 1])
        receives = torch.tensor([2, 3] if g.rank == 0 else [4, 1])
        each = [torch.arange(6.0), 10 + torch.arange(4.0)]
        out = torch.empty(5)
        splits = {"output_split_sizes": receives, "input_split_sizes": sends}
        given = ((), splits) if named else (tuple(splits.values()), {})
        comm = overlap.Collective(dovetail.all_to_all_single, out, each[g.rank], *given[0], **given[1])
        assert comm.traffic.size_bytes == 0
        overlap.run(overlap.Call(lambda: None, Load(name="uneven")), comm)
        assert torch.equal(out, torch.cat([each[0][:2], each[1][:3]] if g.rank == 0 else [each[0][2:], each[1][3:]]))

    pools.get(2).run(job)


def test_computations_of_other_shapes_on_each_rank(pools: Any) -> None:
    """Tokens come back to a number that one rank knows and the other doesn't; so do steps and shares of the weights."""

    def job() -> list[str]:
        g = workers.world()
        case, taken = Case("all_gather_into_tensor", g.rank, g.size), []
        layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4 + g.rank)]
        with Runtime() as runtime:
            for n in range(2 * ROUNDS_BEFORE_KEPT):
                case.fill(n)
                tokens = torch.ones((3, 3, 5, 4)[n % 4] if g.rank == 0 else (3, 4, 4, 3)[n % 4], 4)
                product = functools.partial(torch.mul, tokens, 2)
                taken.append(str(runtime.run(product, case.comm).setting))
                taken.append(str(runtime.run(functools.partial(str, n * g.rank), case.comm).setting))
                taken.append(str(runtime.run(functools.partial(layers[n % 2], torch.ones(1, 4)), case.comm).setting))
                assert case.is_right()
        return taken

    first, second = pools.get(2).run(job)
    assert first == second


def test_a_computation_that_communicates(pools: Any) -> None:
    """`auto` leaves out what a thread would start: its call would come at another place of each rank's order."""

    def job() -> set[str]:
        g = workers.world()
        case = Case("all_gather_into_tensor", g.rank, g.size)
        inner, taken = dovetail.empty(16), set()
        with Runtime() as runtime:
            for seed in range(ROUNDS_BEFORE_KEPT + 20):
                case.fill(seed)
                inner.fill_(1.0)
                outcome = runtime.run(overlap.Call(lambda: dovetail.all_reduce(inner), Load(name="tp")), case.comm)
                assert case.is_right()
                assert inner.eq(g.size).all()
                taken.add(str(outcome.strategy))
        return taken

    for taken in pools.get(2).run(job):
        assert taken <= {"serial", "dma", "dma+partition"}
        assert len(taken) > 1


def test_cores_are_as_before(pools: Any) -> None:
    """After a partition, and after one whose computation failed."""

    def job() -> None:
        g = workers.world()
        case = Case("all_reduce", g.rank, g.size)
        cores, number = os.sched_getaffinity(0), torch.get_num_threads()
        if len(cores) < 2:
            return
        with Runtime() as runtime:
            seen: list[set[int]] = []
            case.fill(1)
            runtime.run(lambda: seen.append(os.sched_getaffinity(0)), case.comm, "partition")
            assert len(seen[0]) == len(cores) - 1
            assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, number)
            with pytest.raises(ZeroDivisionError):
                runtime.run(lambda: 1 / 0, case.comm, "partition")
            assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cores, number)
        with pytest.raises(ValueError, match="closed"):
            runtime.run(lambda: None, case.comm, "streams")

    pools.get(2).run(job)
