"""Which plans executors prove before they run, and that each is proved once."""

from __future__ import annotations

import dataclasses

import pytest

from dovetail.errors import PlanError
from dovetail.hw import proved
from dovetail.plan import Plan, passes
from dovetail.plan import check as checker
from dovetail.plan.build import all_gather


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the plans that were proved."""
    names: list[str] = []

    def check(plan: Plan, *, runs: int) -> checker.Proof:
        names.append(plan.name)
        return checker.check(plan, runs=runs)

    monkeypatch.setattr(proved, "check", check)
    proved._prove.cache_clear()
    return names


def plan(name: str, size_bytes: int = 64) -> Plan:
    return passes.entry(all_gather.pcpy(2, size_bytes)).replace(name=name)


@pytest.mark.parametrize(
    ("forced", "expected"), [("", ["a caller's"]), ("0", []), ("1", ["a caller's", "the library's"])],
    ids=["unset", "0", "1"],
)  # fmt: skip
def test_which_plans(forced: str, expected: list[str], seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CHECK", forced)
    for _ in range(2):
        proved.prove_first(plan("a caller's"), wanted=True)
        proved.prove_first(plan("the library's"), wanted=False)
    assert seen == expected


def test_a_plan_that_differs_in_what_it_promises_is_another_one(
    seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps, and so what ranks compare, are the same."""
    monkeypatch.delenv("DOVETAIL_CHECK", raising=False)
    good = plan("good")
    more = good.replace(goal=good.goal[::-1].copy())
    assert more.fingerprint() == good.fingerprint()
    proved.prove_first(good, wanted=True)
    proved.prove_first(more, wanted=True)
    assert seen == ["good", "good"]


def test_a_wrong_plan_is_refused_every_time(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOVETAIL_CHECK", raising=False)
    good = plan("bad")
    first = good.queues[0]
    bad = good.replace(queues=(dataclasses.replace(first, steps=first.steps[:-1]), *good.queues[1:]))
    for _ in range(2):
        with pytest.raises(PlanError, match="race"):
            proved.prove_first(bad, wanted=True)
    assert seen == ["bad", "bad"]
