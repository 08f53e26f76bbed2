"""What `dovetail bench fused` says around its figures: transports that were left out, misses, and doubts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dovetail import cli
from dovetail.bench.fused import ranks as between
from dovetail.bench.fused.rows import Cell, Kind, Row
from dovetail.cli.bench import progress_bar
from dovetail.measure import record

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


@pytest.mark.parametrize("done", [0, 2])
def test_what_was_measured_is_kept_if_it_is_ended(
    done: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a GPU, where all of it takes minutes: shapes that are done are shown and recorded, the status is Ctrl-C's."""

    class Session:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def facts(self) -> dict[str, Any]:
            return {"name": "a GPU"}

    def ended(_: object, spec: Any, tell: Any, into: Any) -> None:
        for shape in spec.shapes[:done]:
            cells = [Cell(kind=kind, name="x", time_us=10.0, iterations=3, setting={}) for kind in Kind]
            into.rows.append(
                Row(
                    op=shape.op, shape=shape.name, size_bytes=1, out_bytes=1, in_bytes=1, split="equal", ratio=0.5,
                    sizes={}, dtype="bfloat16", ranks=4, link="a link", pace="step", lanes=2, words="device", checks=1,
                    cells=cells,
                )
            )  # fmt: skip
            tell(shape.name)
        raise KeyboardInterrupt

    monkeypatch.setattr("dovetail.bench.gpu.session.Session", Session)
    monkeypatch.setattr("dovetail.bench.fused.gpu.measure", ended)
    file = tmp_path / "some.json"
    with pytest.raises(SystemExit) as ends:
        cli.main(["bench", "fused", "--backend", "cuda", "--json", str(file)])
    assert ends.value.code == 130
    said = capsys.readouterr()
    assert ("ended after 2 of 40 shapes" in said.err) == (done > 0)
    assert said.out.count("gemm_all_to_all 16M") == done
    assert not file.exists()  # a part is no record of all
    part = tmp_path / "some.partial.json"
    assert part.exists() == (done > 0)
    assert ("nothing was saved" in said.err) == (not done)
    assert (f"interrupted; what was done is in {part}" in said.err) == (done > 0)
    if done:
        shapes = [row["shape"] for row in record.read(part).rows]
        assert shapes == ["gemm_all_to_all 16M equal @0.25", "gemm_all_to_all 16M equal @0.5"]


def test_progress_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line once in a while, not one for each step."""
    clock = [100.0]
    monkeypatch.setattr("dovetail.cli.bench.time.monotonic", lambda: clock[0])
    with progress_bar() as progress:
        assert progress is not None
        for step in range(1, 9):
            clock[0] += 10
            progress(step, 8, f"shape {step}")
    assert capsys.readouterr().err.splitlines() == ["3 of 8: shape 3", "6 of 8: shape 6"]
