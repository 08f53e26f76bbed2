"""`dovetail bench fused` and `dovetail tune --only fused` between ranks on a CPU, in miniature; no time is asserted."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import cli
from dovetail.bench.fused import cases, grid
from dovetail.bench.fused import ranks as between
from dovetail.measure import record
from dovetail.ops import choose

BESIDE = {"compute", "comm", "gloo", "torch+ours"}


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
    file = tmp_path / "fused.json"
    assert run("bench", "fused", "--op", "all", "--quick", "--iters", "2", "--json", str(file)) == 0
    rows = rows_of(file)
    assert [(row["op"], row["shape"], row["dtype"]) for row in rows] == [
        (shape.op, shape.name, dtype) for shape in grid.quick() for dtype in grid.DTYPES
    ]
    for row in rows:
        ours = {*choose.TRANSPORTS["cpu"][row["op"]], "auto"}
        assert set(row["times_us"]) - {"fbgemm+gloo", "fbgemm+ours"} == ours | BESIDE
        assert row["correct"]
        assert row["ranks"] == 2
        assert row["rounds"] == 2
        assert all(t > 0 and math.isfinite(t) for t in row["times_us"].values())
        assert row["over_unfused"]["unfused"] == 1
        assert row["auto"]["transport"] == "store"
        assert "dovetail tune --only fused" in row["auto"]["reason"]
    said = capsys.readouterr()
    assert "all correct" in said.out
    for op in grid.OPS:
        assert f"{op}: best transport " in said.out
        assert f"{op}: auto at least " in said.out


@pytest.mark.usefixtures("forked")
def test_ablations_are_rows_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    file = tmp_path / "fused.json"
    words = ("--op", "gemm_all_to_all,gemv_all_reduce", "--transport", "store", "--ablate", "--iters", "1", "--quick")
    assert run("bench", "fused", *words, "--json", str(file)) == 0
    rows = rows_of(file)
    assert all(row["correct"] for row in rows)
    shapes = [row for row in rows if row["row"] == "shape"]
    assert {"unfused", "store", "auto"} | BESIDE == set(shapes[0]["times_us"])
    kinds = {op: {row["row"] for row in rows if row["op"] == op} for op in (grid.GEMM, grid.GEMV)}
    assert kinds == {grid.GEMM: {"shape", "order", "slices", "skew"}, grid.GEMV: {"shape", "order", "skew"}}
    for row in rows:
        if row["row"] == "order" and row["op"] == grid.GEMM:
            assert list(row["times_us"]) == [
                "store, remote first", "store, local first", "dma, remote first", "dma, local first",
            ]  # fmt: skip
        if row["row"] == "slices":
            assert list(row["times_us"]) == [f"{n} slices" for n in (1, 2, 4, 8, 16)]
        if row["row"] == "skew":
            assert row["late_us"] > 0
            late = [t for name, t in row["times_us"].items() if name != "unfused, together"]
            assert min(late) > row["late_us"]  # nobody is done before the late rank has come
    said = capsys.readouterr().out
    assert "gemm_all_to_all, order: " in said
    assert "gemm_all_to_all, skew: " in said


@pytest.mark.usefixtures("forked")
def test_tuning_is_what_auto_chooses_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, file = tmp_path / "profile.json", tmp_path / "tune.json"
    monkeypatch.setenv("DOVETAIL_PROFILE", str(profile))
    assert run("tune", "--only", "fused", "--budget", "4s", "--json", str(file)) == 0
    rows = rows_of(file, "tune")
    assert all(row["correct"] for row in rows)
    sections = json.loads(profile.read_text())["sections"]
    table = sections["fused"]["cpu"]
    for op, by_ranks in table.items():
        assert list(by_ranks) == ["2"]
        for _, size, times, dtype in by_ranks["2"]:
            assert "unfused" in times
            assert set(times) <= set(choose.TRANSPORTS["cpu"][op])
            assert size >= 0
            assert dtype in grid.DTYPES
    # Doctored, so that the choice does not depend on times: then `auto` must follow the table.
    op = next(name for name in table if name != grid.EMBEDDING)
    for entry in table[op]["2"]:
        entry[2] = {name: 10.0 if name == "store" else 100.0 for name in entry[2]}
    data = json.loads(profile.read_text()) | {"sections": sections}
    profile.write_text(json.dumps(data))
    assert run("bench", "fused", "--op", op, "--quick", "--iters", "1", "--json", str(file)) == 0
    for row in rows_of(file):
        assert row["auto"]["transport"] == "store"
        assert "10.00 times as fast as unfused" in row["auto"]["reason"]


class Spoiled(cases.ProductCase):
    """A case whose `store` gives rank 1 a wrong number."""

    def fused(self, transport: str) -> cases.Run:
        right = super().fused(transport)
        if transport != "store" or self._rank != 1:
            return right

        def wrong() -> torch.Tensor:
            found = right().clone()
            found.view(-1)[0] += 1
            return found

        return wrong


def _spoiled(spec: between.RankSpec, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    between.case_of = lambda shape, dtype, rank, ranks, where: Spoiled(shape, getattr(torch, dtype), rank, ranks, where)  # type: ignore[assignment, arg-type]
    return between._rank(name, spec)


@pytest.mark.usefixtures("forked")
def test_a_wrong_result_has_no_time_and_ends_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    monkeypatch.setattr(between, "_rank", lambda name, spec: _spoiled(spec, name))
    file = tmp_path / "fused.json"
    assert run("bench", "fused", "--op", "gemv_all_reduce", "--quick", "--iters", "1", "--json", str(file)) == 1
    rows = rows_of(file)
    for row in rows:
        assert not row["correct"]
        assert row["wrong"] == ["store"]  # on both ranks, though one has seen it; `auto` calls another function
        assert "store" not in row["times_us"]
        assert "unfused" in row["times_us"]


@pytest.mark.usefixtures("forked")
def test_more_ranks_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    file = tmp_path / "fused.json"
    words = ("--op", "embedding_all_to_all,gemm_all_to_all", "--ranks", "3", "--quick", "--iters", "1")
    assert run("bench", "fused", *words, "--json", str(file)) == 0
    assert all(row["correct"] and row["ranks"] == 3 for row in rows_of(file))
