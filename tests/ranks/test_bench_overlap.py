"""`dovetail bench overlap` and `dovetail tune --only overlap` between ranks on a CPU; no time is asserted."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

from dovetail import cli
from dovetail.bench.overlap import tune
from dovetail.measure import record
from dovetail.overlap import section
from dovetail.overlap.ideal import C_LONG, EQUAL, G_LONG
from dovetail.overlap.tasks import Mover

NAMES = "70b-attn+all_gather@1,stream+optimizer@1,70b-decode-tp8+all_to_all-4K@1/2,residual+reduce_scatter-1M@2"
EVERY = ("serial", "streams", "priority", "dma")
PARTITIONED = ("partition", "priority+partition", "dma+partition")


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0)


def rows_of(path: Path, kind: str = "bench") -> list[dict[str, Any]]:
    return record.read(path, kind=kind).rows


@pytest.mark.usefixtures("forked")
def test_quick_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    file, plots = tmp_path / "overlap.json", tmp_path / "plots"
    assert run("bench", "overlap", "--quick", "--scenario", NAMES, "--json", str(file), "--plot", str(plots)) == 0
    found = rows_of(file)
    settings = [row for row in found if row["row"] == "setting"]
    assert sorted({row["scenario"] for row in found}) == sorted(NAMES.split(","))
    assert all(row["correct"] and row["ranks"] == 2 and row["iterations"] == 3 for row in found)
    strategies = {*EVERY, *(PARTITIONED if len(os.sched_getaffinity(0)) > 1 else ())}
    for name in NAMES.split(","):
        assert {row["strategy"] for row in settings if row["scenario"] == name} == strategies
    for row in settings:
        assert row["class"] in (G_LONG, C_LONG, EQUAL)
        assert math.isfinite(row["share_of_ideal"])
        assert row["ideal_speedup"] > 1
        assert row["total_us"] >= max(row["compute_us"], row["comm_us"])  # in each round both have ended by then
        assert set(row["alone_comm_us"]) == set(Mover)
    kinds = {row["scenario"]: row["kind"] for row in found}
    assert set(kinds.values()) == {"all_gather", "all_reduce", "all_to_all", "reduce_scatter"}
    policies = {row["policy"] for row in found if row["row"] == "policy"}
    assert policies == {"auto", "auto, tried", "always dma", "always serial", "always streams"}
    assert all(math.isfinite(row["regret"]) for row in found if row["row"] == "policy")
    said = capsys.readouterr()
    assert "all correct" in said.out
    assert "of another machine: C (ConCCL" in said.err
    assert sorted(path.name for path in plots.iterdir()) == ["regret.html", "share_of_ideal.html", "slowdowns.html"]


@pytest.mark.usefixtures("forked")
def test_tuning_is_what_auto_estimates_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "tune.json"
    monkeypatch.setenv("DOVETAIL_PROFILE", str(profile))
    assert run("tune", "--only", "overlap", "--budget", "2s", "--json", str(file)) == 0
    assert all(row["correct"] for row in rows_of(file, "tune"))
    known = section.current("cpu")
    assert known is not None
    assert {kind for kind, _ in known.alone} == {"all_gather", "all_to_all", "all_reduce", "reduce_scatter"}
    assert known.beside
    words = ("--scenario", "70b-attn+all_gather@1", "--iters", "2", "--strategy", "streams,dma", "--json", str(file))
    assert run("bench", "overlap", *words) == 0
    found = rows_of(file)
    assert {row["strategy"] for row in found} == {"serial", "streams", "dma"}
    (auto,) = (row for row in found if row["row"] == "policy" and row["policy"] == "auto")
    assert "profile of " in auto["reason"]


def test_sizes_of_tuning_are_covered() -> None:
    """The coarsest grid has every kind at a large size."""
    assert tune.PIECES[0] == max(tune.PIECES[:4])
