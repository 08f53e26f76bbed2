"""Two beside each other on a CPU, with real ranks: right results by every strategy, one choice on all ranks."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

import dovetail
from dovetail import overlap
from dovetail.overlap import Load, Runtime, Strategy
from dovetail.overlap.runtime import ROUNDS_BEFORE_KEPT
from tests.ranks import workers

N = 4096
STRATEGIES = [s for s in Strategy if s is not Strategy.FUSED]
COLLECTIVES = ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "reduce_scatter_tensor")


class Case:
    """A collective on fresh data, and what must come out."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self.name, self.rank, self.size = name, rank, size
        gathers = name == "all_gather_into_tensor"
        self.input = dovetail.empty(N, dtype=torch.float32)
        self.output = dovetail.empty(N * size if gathers else N // size if "scatter" in name else N)
        one = [self.input] if name == "all_reduce" else [self.output, self.input]
        self.comm = overlap.Collective(getattr(dovetail, name), *one)

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
    """On rank 1 alone, engines are made slow: no rank may keep them."""

    def job() -> list[str]:
        g = workers.world()
        case = Case("all_gather_into_tensor", g.rank, g.size)
        start = case.comm.start

        def slow(mover: Any, **more: Any) -> Any:
            if g.rank == 1 and mover is overlap.Mover.ENGINES:
                time.sleep(0.003)
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
        with pytest.raises(ValueError, match="async_op"):
            overlap.Collective(dovetail.all_reduce, t, async_op=True)
        with pytest.raises(ValueError, match="tensor"):
            overlap.Collective(dovetail.all_reduce)

    pools.get(2).run(job)
