"""Choosing among strategies for FSDP by the times of steps, without ranks; and what `enable` refuses."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.overlap import fsdp
from dovetail.overlap.fsdp import buffers
from dovetail.overlap.fsdp.auto import CANDIDATES, Auto
from dovetail.overlap.strategy import Strategy

SERIAL, DMA, STREAMS = Strategy.SERIAL, Strategy.DMA, Strategy.STREAMS


class Training:
    """A clock that goes on by what the modules' strategies cost: `cost(module, strategy)` in seconds."""

    def __init__(self, num: int, cost: Callable[[int, Strategy], float], seed: int = 0, **keywords: Any) -> None:
        self.now, self.cost, self.asked = 0.0, cost, 0
        self._noise = random.Random(seed)
        self.auto = Auto(num, self._slowest, clock=lambda: self.now, **keywords)
        self.num, self.seen = num, []

    def _slowest(self, times: list[float]) -> list[float]:
        self.asked += 1
        return times

    def forward(self, *, learns: bool = True) -> None:
        self.auto.step(learns)
        for m in range(self.num):
            held = self.cost(m, self.auto.strategy(m)) + self._noise.uniform(0, 1e-4)
            self.now += held
            self.auto.gathered(m, held)

    def step(self, forwards: int = 1) -> None:
        for _ in range(forwards):
            self.forward()
        for m in range(self.num):
            self.auto.scattered(m, 0.0)
        self.now += 0.01
        self.seen.append(tuple(self.auto.strategy(m) for m in range(self.num)))


@pytest.mark.parametrize("best", CANDIDATES)
def test_the_fastest_is_kept(best: Strategy) -> None:
    t = Training(3, lambda m, s: 0.001 if s is best else 0.002)
    for _ in range(40):
        t.step()
    assert not t.auto.measuring
    assert t.auto.kept == (best,) * 3
    assert t.asked == 1, "one decision, so one reduction over the ranks"
    assert set(t.seen[:12]) == {(c,) * 3 for c in CANDIDATES}
    assert set(t.seen[13:]) == {(best,) * 3}
    assert "a step takes 13." in t.auto.reasons[0]


def test_each_module_has_its_own() -> None:
    fast = {0: SERIAL, 1: DMA, 2: STREAMS}
    t = Training(3, lambda m, s: 0.001 if s is fast[m] else 0.003)
    for _ in range(40):
        t.step()
    assert t.auto.kept == (SERIAL, DMA, STREAMS)
    assert t.asked == 2, "the mix was tried against the others"
    assert "serial 1." in t.auto.reasons[0]
    assert "serial 3." in t.auto.reasons[1]


def test_a_mix_that_slows_the_step_is_not_kept() -> None:
    """What modules hold is not all that counts: here the mix costs the computation more than it saves."""
    fast = {0: SERIAL, 1: DMA}

    def cost(m: int, s: Strategy) -> float:
        return 0.001 if s is fast[m] else 0.002

    t = Training(2, cost)
    for _ in range(60):
        t.step()
        if {t.auto.strategy(0), t.auto.strategy(1)} != {STREAMS}:
            t.now += 0.1
    assert t.auto.kept == (STREAMS, STREAMS)


def test_steps_are_counted_by_their_reductions() -> None:
    """Accumulated gradients: three forwards are one step, and a strategy is not changed inside."""
    t = Training(1, lambda m, s: 0.001 if s is DMA else 0.002)
    for _ in range(40):
        before = len(set(t.seen))
        t.step(forwards=3)
        assert len(set(t.seen)) - before <= 1
    assert t.auto.kept == (DMA,)


def test_evaluation_in_between_is_not_compared_with_training() -> None:
    t = Training(1, lambda m, s: 0.001 if s is DMA else 0.002)
    for k in range(60):
        t.step()
        if k % 2:
            t.forward(learns=False)
            t.now += 5 if t.auto.strategy(0) is DMA else 0  # only the slower strategies look good here
    assert t.auto.kept == (DMA,)


def test_inference_alone_is_measured_too() -> None:
    t = Training(2, lambda m, s: 0.001 if s is SERIAL else 0.002)
    for _ in range(40):
        t.forward(learns=False)
    assert t.auto.kept == (SERIAL, SERIAL)


def test_steps_that_never_repeat_stay_with_stock() -> None:
    t = Training(1, lambda m, s: 0.001 if s is DMA else 0.002)
    for k in range(80):
        t.step(forwards=k + 1)
    assert t.auto.kept == (STREAMS,)
    assert "differ" in t.auto.reasons[0]
    assert t.asked == 0


def test_a_choice_is_checked_again() -> None:
    best = SERIAL
    t = Training(1, lambda m, s: 0.001 if s is best else 0.002, recheck=10)
    for _ in range(15):
        t.step()
    assert t.auto.kept == (SERIAL,)
    best = DMA
    for _ in range(30):
        t.step()
    assert t.auto.kept == (DMA,)


def test_a_slower_rank_decides() -> None:
    """This rank measures `dma` faster; the slowest rank does not."""
    auto = Auto(1, lambda times: [9.0 if t < 0.0105 else t for t in times], clock=lambda: now)
    now = 0.0
    for _ in range(14):
        auto.step(True)
        held = {DMA: 0.0001, SERIAL: 0.001, STREAMS: 0.002}[auto.strategy(0)]
        auto.gathered(0, held)
        auto.scattered(0, 0.0)
        now += 0.01 + held
    assert auto.kept == (SERIAL,)


def test_a_block_is_lent_again_when_its_last_view_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers.session, "empty", torch.empty)
    lent, cpu = buffers.Buffers(), torch.device("cpu")
    first = lent.take((8,), torch.float32, cpu)
    at = first.data_ptr()
    view = torch.as_strided(first, (2,), (1,), 3)
    del first
    assert lent.take((8,), torch.float32, cpu).data_ptr() != at, "a view of it is still there"
    assert lent.size_bytes == 64
    del view
    gc.collect()
    again = lent.take((16,), torch.bfloat16, cpu)
    assert again.data_ptr() == at
    assert (again.dtype, again.shape, lent.size_bytes) == (torch.bfloat16, (16,), 64)
    again.fill_(3)
    lent.close()
    assert again.sum() == 48, "a lent block outlives the pool"
    assert lent.take((0,), torch.float32, cpu).numel() == 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="strategies serial, streams, dma and auto, not 'fast'"):
        fsdp.enable(torch.nn.Linear(2, 2), "fast")
    with pytest.raises(ValueError, match="not 'partition'"):
        fsdp.enable(torch.nn.Linear(2, 2), "partition")
    with pytest.raises(TypeError, match=r"must be a torch.nn.Module, not list"):
        fsdp.enable([])
    for function in (fsdp.enable, fsdp.disable, fsdp.explain):
        with pytest.raises(ValueError, match="Linear has no module that FSDP2 shards: call .*fully_shard"):
            function(torch.nn.Linear(2, 2))
