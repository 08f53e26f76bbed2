"""What `dovetail bench fused` says around its figures: transports that were left out, misses, and doubts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dovetail import cli
from dovetail.bench.fused import ranks as between

BUSY = "the machine was busy: others took 40% of its cores' time; measure again"


def _row(op: str, store_us: float) -> dict[str, Any]:
    return {
        "row": "shape", "op": op, "shape": "1x2x3", "dtype": "float32", "ranks": 2, "threads": 1, "correct": True,
        "times_us": {"unfused": 10.0, "store": store_us, "auto": store_us}, "wrong": [],
        "over_unfused": {"store": 10.0 / store_us, "auto": 10.0 / store_us}, "auto": {"transport": "store"},
    }  # fmt: skip


def _shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, store_us: float, notes: list[str]
) -> tuple[str, str]:
    def measured(spec: between.RankSpec, _: object) -> between.Measured:
        ops = dict.fromkeys(shape.op for shape in spec.shapes)
        return between.Measured([_row(op, store_us) for op in ops], list(notes))

    monkeypatch.setattr(between, "measure", measured)
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "fused", "--quick", *words.split()])
    assert ended.value.code in (None, cli.OK)
    said = capsys.readouterr()
    return said.out, said.err


def test_a_miss_is_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _shown(monkeypatch, capsys, "--op gemm_all_to_all", 20.0, [])
    assert "MISSES" in out
    assert out.count("A figure that misses it is no failure: the exit status stays 0") == 1
    out, _ = _shown(monkeypatch, capsys, "--op gemm_all_to_all", 5.0, [])
    assert "MISSES" not in out
    assert "no failure" not in out


def test_doubts_stand_beside_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = _shown(monkeypatch, capsys, "--op gemm_all_to_all", 20.0, ["fbgemm left out: it is missing", BUSY])
    assert f"note: {BUSY}" in err
    assert out.splitlines()[-1] == f"(these figures are doubtful: {BUSY})"
    assert "fbgemm" not in out


def test_a_transport_that_some_lack(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--op gemm_all_to_all,gemv_all_reduce,all_gather_matmul --transport store,dma"
    _, err = _shown(monkeypatch, capsys, words, 5.0, [])
    found = re.findall(r"^note: (.*)$", err, re.MULTILINE)
    assert found == [f"{op} has no transport dma: left out" for op in ("gemv_all_reduce", "all_gather_matmul")]
    _, err = _shown(monkeypatch, capsys, "--op gemv_all_reduce --transport auto,unfused", 5.0, [])
    assert "note:" not in err


def test_ranks_that_share_gpus_have_other_transports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("dovetail.bench.gpu.sharing.survey", None)
    words = "bench fused --backend cuda --peers ranks --op gemv_all_reduce --transport decomposed"
    with pytest.raises(SystemExit) as ended:
        cli.main([*words.split(), "--json", str(tmp_path / "out.json")])
    assert ended.value.code == cli.USAGE
    assert "none of these has 'decomposed' on cuda: gemv_all_reduce has unfused, store" in capsys.readouterr().err
