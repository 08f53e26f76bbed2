"""Ranks that wait for each other in different calls: both calls are shown on all ranks, long before the time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
import dovetail.ops as ops
from dovetail.errors import DovetailError
from dovetail.language import Addresses

LIMIT_S = 4.0  # calls may look crossed for a quarter of it
OPERATOR = "gemv_all_reduce(x [4, 64], w [32, 64], torch.float32) by store"
FIRST = "its first operator"
COLLECTIVE = "all_reduce(12 bytes, float32, sum, variant twoshot)"


def _group(*ranks: int) -> Any:
    """One of its own, since it will be broken, with a time limit that a test can wait for."""
    return dovetail.new_group(ranks, timeout=LIMIT_S)


def _operator(group: Any) -> None:
    ops.gemv_all_reduce(torch.ones(4, 64), torch.ones(32, 64), group=group, transport="store")


def _collective(group: Any) -> None:
    dovetail.all_reduce(torch.ones(3), group=group)


def _error_of(call: Callable[[Any], Any], group: Any) -> tuple[str, dict[int, str]]:
    try:
        call(group)
    except DovetailError as error:
        return type(error).__name__, getattr(error, "calls", {})
    return "", {}


@pytest.mark.parametrize("known", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(("world", "other"), [(2, 0), (2, 1), (3, 1)])
def test_an_operator_on_one_rank_and_a_collective_on_others(pools: Any, world: int, other: int, known: bool) -> None:
    def job() -> tuple[Any, ...]:
        group = _group(*range(world))
        if known:
            _operator(group)
            _collective(group)
        begin = time.monotonic()
        found = _error_of(_operator if group.rank == other else _collective, group)
        took_s = time.monotonic() - begin
        return *found, took_s, _error_of(_operator, group)[0], _error_of(_collective, group)[0]

    for rank, (kind, calls, took_s, *then) in enumerate(pools.get(world).run(job)):
        assert kind == "MismatchError"
        assert calls[other] == (OPERATOR if known else FIRST)
        assert [text for r, text in calls.items() if r != other] == [COLLECTIVE]
        assert rank in calls
        assert took_s < 0.75 * LIMIT_S, "as late as a time limit"
        assert then == ["MismatchError", "MismatchError"], "the group is broken"


def test_first_calls_of_two_sorts(pools: Any) -> None:
    """Neither rank is in a run: each joins what the other one does not."""

    def job() -> tuple[str, dict[int, str]]:
        group = _group(0, 1)
        return _error_of(_operator if group.rank else lambda g: Addresses.of(g, "cpu"), group)

    for found in pools.get(2).run(job):
        assert found == ("MismatchError", {0: "to exchange addresses of tensors", 1: FIRST})


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_none_that_calls_something_else(pools: Any, late: int) -> None:
    """The same calls everywhere, some of which run on while a rank computes for longer than calls may look crossed."""

    def job() -> str:
        group = _group(0, 1)
        _operator(group)
        works = [dovetail.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(6)]
        if group.rank == late:
            time.sleep(0.4 * LIMIT_S)  # is the other rank patient?
        found = _error_of(_operator, group)[0]
        for work in works:
            work.wait()
        group.close()
        return found

    assert pools.get(2).run(job) == ["", ""]


def test_another_thread_of_a_late_rank_is_waited_for(pools: Any) -> None:
    """A thread that waits for all ranks apart from the main one: that rank still comes, and the others' threads too."""

    def job() -> list[str]:
        group = _group(0, 1)
        group.set_timeout(10 * LIMIT_S)
        _operator(group)
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(_error_of(_collective, group)[0]))
        if group.rank == 0:
            thread.start()
            time.sleep(3)  # longer than a main thread would be waited for
        found.append(_error_of(_operator, group)[0])
        if group.rank == 1:
            thread.start()
        thread.join()
        group.close()
        return found

    assert pools.get(2).run(job) == [["", ""]] * 2


def test_groups_apart_do_not_cross(pools: Any) -> None:
    """What another group of the same ranks does may come in any order."""

    def job() -> str:
        group, apart = _group(0, 1), _group(0, 1)
        _operator(group)
        works = []
        if group.rank == 0:
            works.append(dovetail.all_reduce(torch.ones(3), group=apart, async_op=True))
            time.sleep(0.4 * LIMIT_S)  # is the other rank patient?
        found = _error_of(_operator, group)[0]
        if group.rank:
            _collective(apart)
        for work in works:
            work.wait()
        group.close()
        apart.close()
        return found

    assert pools.get(2).run(job) == ["", ""]
