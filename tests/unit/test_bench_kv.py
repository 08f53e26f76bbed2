"""`dovetail bench kv` on host memory and on a stand-in driver; a mover that loses a row is found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.standin import build

from dovetail import cli
from dovetail.bench import kv
from dovetail.hw.gpu import driver
from dovetail.kv.models import model
from dovetail.kv.mover import CpuMover
from dovetail.measure import record


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


WORDS = ("bench", "kv", "--layout", "llama-70b-tp8", "--tokens", "64,128", "--cache", "32M", "--quick")


def test_on_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kv.json"
    assert run(*WORDS, "--json", str(out)) == 0
    rows = record.read(out, kind="bench").rows
    assert [row["path"] for row in rows] == ["contiguous", "cpu"] * 4
    assert all(row["correct"] and row["bandwidth_gbps"] > 0 for row in rows)
    assert {row["size_bytes"] for row in rows} == {4 * 80 * 8192, 8 * 80 * 8192}
    assert "all correct" in capsys.readouterr().out


def test_on_a_stand_in_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(build("cuda")))
    driver.load.cache_clear()
    out = tmp_path / "kv.json"
    try:
        assert run(*WORDS, "--backend", "cuda", "--json", str(out), "--outermost", "block") == 0
    finally:
        driver.load.cache_clear()
    rows = record.read(out, kind="bench").rows
    paths = {row["path"] for row in rows}
    assert paths == {
        "contiguous", "auto", "dma-2d", "dma-loop", "dma-batch 128", "dma-batch 512", "dma-batch 2048",
        "dma-batch one call",
    }  # fmt: skip
    assert all(row["correct"] for row in rows)


def test_a_mover_that_loses_a_row_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = CpuMover.submit

    def lossy(self: CpuMover, direction: str, table: kv.Table, path: str = "cpu") -> object:
        cut = kv.Table(*(getattr(table, name)[: len(table) // 2] for name in kv.Table.__dataclass_fields__))
        return submit(self, direction, cut, path)

    monkeypatch.setattr(CpuMover, "submit", lossy)
    spec = kv.Spec(models=(model("llama-70b-tp8"),), tokens=(64,), cache_bytes=8 << 20, paths=("cpu",), rounds=1)
    rows, _ = kv.measure(spec, kv.CpuPlace())
    assert not any(row["correct"] for row in rows)
    assert all(row["time_us"] is None for row in rows)
    assert kv.lines(rows) == ["4 of 4 results WRONG"]


def test_what_does_not_fit_is_named() -> None:
    spec = kv.Spec(models=(model("llama-8b"),), tokens=(1 << 20,), cache_bytes=1 << 20, paths=("cpu",))
    assert kv.measure(spec, kv.CpuPlace()) == ([], ["llama-8b: 1048576 tokens do not fit into the cache"])
    with pytest.raises(ValueError, match="needs layouts, numbers of tokens above 0, and paths"):
        kv.Spec(models=(), tokens=(1,), cache_bytes=1, paths=("cpu",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench kv --layout llama", "layout must be one of llama-8b"),
        ("bench kv --path dma-2d", "--path: 'dma-2d' is not one of cpu, which cpu has"),
        ("bench kv --outermost row", "--outermost: 'row' must be layer or block"),
        ("bench kv --ranks 4", "--ranks is for collectives"),
        ("bench kv --pin 1G", "--force and --pin are for --backend cuda"),
        ("bench all_gather --layout mla", "--layout is for kv"),
    ],
)
def test_errors_of_usage(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert message in capsys.readouterr().err

