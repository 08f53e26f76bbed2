"""The self-test without ranks: what it covers, its reference, what it makes of the answers, and the profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dovetail import coll, profile
from dovetail.coll import cases, choose, selftest
from dovetail.coll.cases import Case
from dovetail.coll.selftest import Failure, Outcome, _End, _judged, _Part
from dovetail.measure import evidence, machine

NAMES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast", "gather", "scatter", "barrier")
CASE = Case(collective="all_gather", variant="pcpy")


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_table_has_everything(ranks: int) -> None:
    table = cases.table(ranks)
    assert len(table) == len(set(table))
    every = {(name, variant) for name in NAMES for variant in coll.variants(name)}
    assert {(c.collective, c.variant) for c in table} == every
    for name, variant in every - {("barrier", "entry")}:
        own = [c for c in table if (c.collective, c.variant) == (name, variant)]
        for kind in ("symmetric", "ordinary"):
            assert {c.items for c in own if c.tensors == kind} >= {0, 1, 7, 1000, 70001, cases.LARGE}
            assert {c.mode for c in own if c.tensors == kind} == {"blocking", "async", "armed"}
            assert any(c.part for c in own if c.tensors == kind)
        assert any(c.tensors == "mixed" for c in own)
    reductions = [c for c in table if not c.moves]
    assert len({c.dtype for c in reductions}) >= 12
    assert {c.op for c in reductions} == {"sum", "product", "min", "max", "avg", "band", "bor", "bxor"}
    assert any(c.uneven for c in table)
    assert any(c.in_place for c in table)
    assert {c.root for c in table if c.collective == "gather"} == set(range(ranks))


def test_data_differ_by_rank_and_iteration() -> None:
    draws = [cases.draw((5, 1, it, rank), 100, torch.float32, any_bits=any_bits) for it in (0, 1) for rank in (0, 1)
             for any_bits in (True, False)]  # fmt: skip
    assert all(cases.difference(a, b) for i, a in enumerate(draws) for b in draws[:i])
    again = cases.draw((5, 1, 0, 0), 100, torch.float32, any_bits=True)
    assert cases.difference(draws[0], again) is None


@pytest.mark.parametrize(
    ("op", "dtype", "parts", "want"),
    [
        ("sum", torch.float16, [[2048.0], [1.0], [1.0]], [2050.0]),  # in float32, rounded once
        ("avg", torch.int32, [[-3], [0]], [-1]),
        ("avg", torch.float32, [[1.0], [2.0]], [1.5]),
        ("sum", torch.bool, [[True, False], [True, False]], [True, False]),
        ("sum", torch.int8, [[100], [100]], [-56]),
        ("max", torch.bfloat16, [[1.0], [-2.0]], [1.0]),
        ("bxor", torch.int32, [[6], [3]], [5]),
    ],
)
def test_the_reference(op: str, dtype: torch.dtype, parts: list[list[float]], want: list[float]) -> None:
    found = cases.reduced([torch.tensor(part, dtype=dtype) for part in parts], op)
    assert cases.difference(found, torch.tensor(want, dtype=dtype)) is None


def test_a_difference_is_of_bits() -> None:
    nan = torch.tensor([float("nan")])
    assert cases.difference(nan, nan.clone()) is None
    assert "elements 1 and 2" in str(cases.difference(torch.tensor([1.0, 0.0, 2.0]), torch.tensor([1.0, -0.0, 3.0])))


def test_the_cause_comes_before_its_consequences() -> None:
    parts = [
        _Part(0, broken=_End(3, "PeerError: rank 1 died", True)),
        _Part(1, failed=[(1, "wrong")], broken=_End(4, "RuntimeError: an illegal memory access", False)),
    ]
    failures, ended = _judged([replace(CASE, items=n) for n in range(6)], parts)
    assert [(f.case.items, f.rank) for f in failures] == [(1, 1)]
    assert ended.startswith("rank 1 stopped at all_gather pcpy: symmetric, 4 x float32")
    assert "an illegal memory access" in ended
    assert _judged([CASE], [_Part(0), _Part(1)]) == ([], "")


def test_ranks() -> None:
    assert [selftest.default_ranks(n) for n in (0, 1, 2, 8, 16)] == [2, 2, 2, 8, 8]
    with pytest.raises(ValueError, match="2 to 1024 ranks, not 1"):
        selftest.run("cpu", 1)
    with pytest.raises(ValueError, match="2 to 1024 ranks, not 5000"):
        selftest.run("cpu", 5000)
    with pytest.raises(ValueError, match="limit_s must be seconds above 0, not 0"):
        selftest.run("cpu", 2, limit_s=0)
    with pytest.raises(ValueError, match="there are the backends"):
        selftest.run("tpu", 2)


def outcome(**more: object) -> Outcome:
    chosen = [CASE, replace(CASE, items=7), Case(collective="gather", variant="pull")]
    return Outcome(backend="cuda", ranks=4, seed=5, cases=chosen, **more)


def test_passed_means_all_of_it() -> None:
    assert outcome().passed
    assert not outcome(ended="not done").passed
    assert not outcome(failures=[Failure(case=CASE, rank=0, text="wrong")]).passed
    assert not Outcome(backend="cuda", ranks=2, seed=0, cases=[]).passed


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("DOVETAIL_PROFILE", str(path))
    return path


def gpu(version: int = 13000, gpus: int = 1) -> SimpleNamespace:
    driver = SimpleNamespace(version=version, num_devices=lambda: gpus)
    return SimpleNamespace(caps=SimpleNamespace(backend="cuda"), name="H200", driver=driver)


def test_what_is_saved_opens_the_gate(saved: Path) -> None:
    """The section that the doctor writes is the one that `auto` reads."""
    figures = {"cpu": {"all_reduce": {"2": [[None, "oneshot", 3.0]]}}}
    profile.save(profile.Profile(key=machine.profile_key([2]), sections={"coll": figures}, date="then"))
    failed = outcome(failures=[Failure(case=CASE, rank=1, text="wrong")])
    evidence.save(evidence.SELFTEST, "cuda", failed.entry("H200", 13000))
    found = evidence.found(evidence.SELFTEST, "cuda")
    assert found["collectives"] == {"all_gather": {"cases": 2, "failed": 1}, "gather": {"cases": 1, "failed": 0}}
    assert found["failures"] == ["all_gather pcpy: symmetric, 1000 x float32, blocking; rank 1: wrong"]
    assert "failed on H200" in str(choose.untested({"cuda": found}, gpu()))

    evidence.save(evidence.ENGINES, "cuda", evidence.stamped("H200", 13000, {"paths": {"p2p": "copy engine"}}))
    evidence.save(evidence.ENGINES, "cuda", evidence.stamped("H200", 13000, {"paths": {"h2d": "copy engine"}}))
    evidence.save(evidence.SELFTEST, "cuda", outcome().entry("H200", 13000))
    here, _ = profile.load(saved, machine.profile_key([2]))
    assert here is not None
    assert here.date == "then"
    assert here.sections["coll"] == figures
    assert here.sections["engines"]["cuda"]["paths"] == {"h2d": "copy engine"}  # the older proof is gone as a whole
    assert choose.untested(here.sections["selftest"], gpu()) is None
    assert "not here" in str(choose.untested(here.sections["selftest"], gpu(13010)))
    assert "on one H200 only" in str(choose.untested(here.sections["selftest"], gpu(gpus=2)))


def test_ranks_without_figures_still_see_the_self_test(saved: Path) -> None:
    evidence.save(evidence.SELFTEST, "cuda", outcome().entry("H200", 13000))
    told = choose.notice().decode()
    assert '"passed": true' in told


def test_evidence_of_another_gpu_does_not_hold() -> None:
    entry = evidence.stamped("H200", 13000, {})
    assert evidence.misfit(evidence.ENGINES, entry, "H200", 13000) is None
    assert "has not run on H200" in str(evidence.misfit(evidence.ENGINES, {}, "H200", 13000))
    assert "another" in str(evidence.misfit(evidence.SELFTEST, entry, "H200", 13010))
    assert "another" in str(evidence.misfit(evidence.SELFTEST, entry, "B200", 13000))
