"""The self-test as it is run: on CPU tensors, on a stand-in GPU, and with a collective that gives a wrong result."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from dovetail.coll import api, cases, selftest
from dovetail.coll.cases import Case, Tensors
from tests import standin
from tests.ranks import workers


class StandIn:
    """A stand-in GPU's tensors, which are the host's: no stream orders what the host reads."""

    def __init__(self) -> None:
        workers.use("standin")

    def empty(self, items: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor:
        return workers.make("symmetric" if symmetric else "ordinary", 0, items, dtype)

    def flush(self) -> None:
        pass

    def settle(self) -> None:
        workers.settle()


def wrong_on_rank_1() -> Tensors:
    """Breaks one variant of broadcast, as a bug would."""
    right = api.broadcast

    def wrong(tensor: torch.Tensor, **how: object) -> object:
        done = right(tensor, **how)
        if how["variant"] == "pull" and how["group"].rank == 1 and tensor.numel() > 100:
            cases.bits(tensor)[-1] ^= 1
        return done

    api.broadcast = wrong
    return Tensors("cpu")


def refusing_on_all() -> Tensors:
    """One variant raises before anything moves."""

    def refuse(*_: object, **how: object) -> None:
        raise TypeError("no such thing")

    api.scatter = refuse
    return Tensors("cpu")


def dying() -> Tensors:
    """Rank 1 fails in the middle with an error that no check expects."""
    right = api.all_reduce

    def fail(tensor: torch.Tensor, *more: object, **how: object) -> object:
        if how["group"].rank == 1:
            raise RuntimeError("an illegal memory access")
        return right(tensor, *more, **how)

    api.all_reduce = fail
    return Tensors("cpu")


class Stuck(Tensors):
    """Never gets anywhere."""

    def __init__(self) -> None:
        super().__init__("cpu")
        time.sleep(60)


def small(ranks: int) -> list[Case]:
    """All but the large ones, whose random data take most of the time."""
    return [case for case in cases.table(ranks) if case.items < 70001]


def large(ranks: int) -> list[Case]:
    """Some of the others, of every collective."""
    return [case for case in cases.table(ranks) if case.items >= 70001][::7]


@pytest.fixture
def device_in_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(standin.build("cuda")))
    monkeypatch.setenv("DOVETAIL_GPU_SEGMENT", "64M")


def test_on_the_cpu() -> None:
    outcome = selftest.run("cpu", 2, cases=[*small(2), *large(2)], limit_s=60)
    assert outcome.passed, (outcome.ended, list(map(str, outcome.failures)))


@pytest.mark.usefixtures("device_in_software", "forked")
def test_on_a_stand_in_gpu() -> None:
    # The stand-in's reductions are the CPU's and wait for their stream, which an armed one would do for ever.
    chosen = [case for case in [*small(2), *large(2)] if case.moves or case.mode != "armed"]
    outcome = selftest.run("cuda", 2, make=StandIn, cases=chosen, limit_s=60)
    assert outcome.passed, (outcome.ended, list(map(str, outcome.failures)))


@pytest.mark.usefixtures("forked")
def test_a_wrong_result_is_found() -> None:
    chosen = [case for case in small(2) if case.collective in ("broadcast", "gather") and not case.part]
    outcome = selftest.run("cpu", 2, make=wrong_on_rank_1, cases=chosen, limit_s=60)
    assert not outcome.passed
    assert not outcome.ended
    assert {(f.case.variant, f.rank) for f in outcome.failures} == {("pull", 1)}
    assert {f.case.collective for f in outcome.failures} == {"broadcast"}
    assert "bytes are wrong" in str(outcome.failures[0])
    rows = {(row["collective"], row["variant"]): row["failed"] for row in outcome.rows()}
    assert rows["broadcast", "pcpy"] == rows["gather", "pull"] == 0 < rows["broadcast", "pull"]


@pytest.mark.usefixtures("forked")
def test_a_case_that_is_refused_does_not_end_the_others() -> None:
    chosen = [replace(case, mode="blocking") for case in small(2) if case.collective in ("scatter", "gather")][::4]
    outcome = selftest.run("cpu", 2, make=refusing_on_all, cases=chosen, limit_s=60)
    assert not outcome.ended
    assert {f.case.collective for f in outcome.failures} == {"scatter"}
    assert "no such thing" in outcome.failures[0].text


@pytest.mark.usefixtures("forked")
def test_a_rank_that_fails_ends_it_with_the_cause() -> None:
    chosen = [case for case in small(2) if case.collective in ("all_gather", "all_reduce")][::6]
    outcome = selftest.run("cpu", 2, make=dying, cases=chosen, limit_s=60)
    assert not outcome.passed
    assert outcome.ended.startswith("rank 1 stopped at all_reduce")
    assert "an illegal memory access" in outcome.ended


@pytest.mark.usefixtures("forked")
def test_time_is_bounded() -> None:
    outcome = selftest.run("cpu", 2, make=Stuck, cases=small(2)[:3], limit_s=1)
    assert outcome.ended == "not done after 1 s, at the start"
    assert outcome.seconds < 9
