"""The order of the calls favours nobody, and every call has its start."""

import gc
from collections import Counter
from itertools import pairwise

import pytest

from dovetail.measure.interleave import interleave, orders, schedule


@pytest.mark.parametrize("num", range(1, 9))
def test_orders_balance_places_and_neighbours(num: int) -> None:
    square = orders(num)
    assert all(sorted(order) == list(range(num)) for order in square)
    for place in range(num):
        assert len(set(Counter(order[place] for order in square).values())) == 1
    behind = Counter(pair for order in square for pair in pairwise(order))
    assert len(behind) == num * (num - 1)
    assert len(set(behind.values())) <= 1


@pytest.mark.parametrize("iterations", [[1], [4, 4], [10, 3, 10], [7, 0, 5], [1000, 5]])
def test_schedule_calls_each_as_often_as_wanted(iterations: list[int]) -> None:
    calls = Counter(schedule(iterations))
    assert [calls[contender] for contender in range(len(iterations))] == iterations


def test_schedule_spreads_the_rarer_evenly() -> None:
    places = [place for place, contender in enumerate(schedule([100, 4])) if contender == 1]
    assert all(20 <= after - before <= 30 for before, after in pairwise(places))


def test_schedule_calls_all_once_a_round() -> None:
    calls = schedule([6, 6, 6])
    assert all(sorted(calls[place : place + 3]) == [0, 1, 2] for place in range(0, 18, 3))


def test_interleave_starts_before_each_call_and_keeps_the_times_apart() -> None:
    events: list[str] = []
    times = interleave([lambda: events.append("a"), lambda: events.append("b")], lambda: events.append("-"), [3, 2])
    assert [len(of_one) for of_one in times] == [3, 2]
    assert all(time_ns >= 0 for of_one in times for time_ns in of_one)
    assert events[::2] == ["-"] * 5
    assert Counter(events[1::2]) == {"a": 3, "b": 2}


def test_interleave_collects_no_garbage_and_restores_the_collector() -> None:
    seen: list[bool] = []

    def fail() -> None:
        seen.append(gc.isenabled())
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interleave([fail], lambda: None, [1])
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("iterations", [[], [-1]])
def test_schedule_refuses(iterations: list[int]) -> None:
    with pytest.raises(ValueError, match="iterations must be given"):
        schedule(iterations)


def test_interleave_refuses_a_missing_number() -> None:
    with pytest.raises(ValueError, match="2 contenders but 1"):
        interleave([lambda: None, lambda: None], lambda: None, [1])
