"""Which setting a repeated pair runs in."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.trials import AGAIN, ROUNDS, WATCH, Trials

ALL = [Setting(Strategy.DMA), Setting(Strategy.SERIAL), Setting(Strategy.STREAMS)]


def play(trials: Trials, times: dict[Setting, float], runs: int, seed: int = 0, noise: float = 0.0) -> list[Setting]:
    """Runs of a machine on which each setting takes its time, and a little more now and then."""
    chance = random.Random(seed)
    taken = []
    for _ in range(runs):
        if trials.is_due:
            trials.decide(trials.figures())
        setting = trials.next()
        trials.note(setting, times[setting] * (1 + noise * chance.random()))
        taken.append(setting)
    return taken


@given(some.permutations([100.0, 120.0, 150.0]), some.integers(0, 1000))
def test_the_fastest_is_kept(times: list[float], seed: int) -> None:
    machine = dict(zip(ALL, times, strict=True))
    taken = play(Trials(ALL), machine, 300, seed, noise=0.1)
    best = min(machine, key=lambda setting: machine[setting])
    assert set(taken[ROUNDS * len(ALL) :]) == {best}
    assert taken[: ROUNDS * len(ALL)] == ALL * ROUNDS


def test_the_first_run_of_each_is_not_timed() -> None:
    trials = Trials(ALL)
    for n in range(ROUNDS * len(ALL)):
        setting = trials.next()
        assert trials.wants_time is (n >= len(ALL))  # it compiles
        if trials.wants_time:
            trials.note(setting, 100.0 + 10 * ALL.index(setting))
    trials.decide(trials.figures())
    assert trials.kept is ALL[0]


def test_one_that_becomes_slow_is_demoted() -> None:
    machine = dict(zip(ALL, [100.0, 150.0, 200.0], strict=True))
    trials = Trials(ALL)
    play(trials, machine, 100)
    assert trials.kept is ALL[0]
    machine[ALL[0]] = 400.0
    taken = play(trials, machine, WATCH + 30)
    assert taken[-1] is ALL[1]
    assert trials.kept is ALL[1]


def test_one_that_was_slow_gets_another_chance() -> None:
    machine = dict(zip(ALL, [100.0, 150.0, 200.0], strict=True))
    trials = Trials(ALL)
    play(trials, machine, 100)
    machine[ALL[2]] = 50.0
    assert ALL[2] not in play(trials, machine, WATCH)
    assert play(trials, machine, AGAIN + 100)[-1] is ALL[2]


def test_ranks_that_make_the_same_calls_try_the_same() -> None:
    """Each has times of its own; what is decided by is the slowest rank's."""
    ranks = [Trials(ALL), Trials(ALL)]
    own = [dict(zip(ALL, [100.0, 150.0, 200.0], strict=True)), dict(zip(ALL, [300.0, 150.0, 200.0], strict=True))]
    for _ in range(200):
        if ranks[0].is_due:
            assert ranks[1].is_due
            slowest = [max(pair) for pair in zip(*(trials.figures() for trials in ranks), strict=True)]
            for trials in ranks:
                trials.decide(slowest)
        first, second = (trials.next() for trials in ranks)
        assert first == second
        for trials, times in zip(ranks, own, strict=True):
            trials.note(first, times[first])
    assert [trials.kept for trials in ranks] == [ALL[1], ALL[1]]


def test_one_setting_needs_no_trial() -> None:
    trials = Trials(ALL[:1])
    assert play(trials, {ALL[0]: 1.0}, 200) == ALL[:1] * 200
    assert not trials.is_due


@pytest.mark.parametrize("number", [1, 3])
def test_a_plain_run_is_one_of_the_kept_setting_and_nothing_else(number: int) -> None:
    trials, plain = Trials(ALL[:number]), []
    for _ in range(400):
        is_due = trials.is_due
        kept = trials.plain()
        plain.append(kept is not None)
        if kept is not None:
            assert kept is trials.kept
            assert not is_due
            assert not trials.wants_time
            continue
        if is_due:
            trials.decide(trials.figures())
        setting = trials.next()
        if trials.wants_time:
            trials.note(setting, 100.0)
    assert not any(plain[: ROUNDS * number]) or number == 1
    assert 0.8 < sum(plain[100:]) / 300 < 7 / 8 + 0.01


def test_a_setting_without_a_time_is_not_kept() -> None:
    trials = Trials(ALL)
    for _ in range(ROUNDS * len(ALL)):
        setting = trials.next()
        if setting is not ALL[1]:
            trials.note(setting, 100.0)
    assert math.isinf(trials.figures()[1])
    trials.decide(trials.figures())
    assert trials.kept is not ALL[1]
    assert "serial" not in trials.why()


@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_make_it_try_again(seed: int) -> None:
    machine = dict(zip(ALL, [100.0, 150.0, 200.0], strict=True))
    trials = Trials(ALL)
    play(trials, machine, 20, seed)
    assert set(play(trials, machine, 500, seed, noise=0.3)) == {ALL[0]}
