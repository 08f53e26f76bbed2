"""`dovetail bench kv` on host memory and on a stand-in driver; a mover that loses a row is found out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.standin import build

from dovetail import cli, profile
from dovetail.bench import kv
from dovetail.bench.kv import tune
from dovetail.bench.kv.load import Load
from dovetail.hw.gpu import driver
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.kv import costs
from dovetail.kv.choose import Costs, Samples, Shape, choose
from dovetail.kv.choose import Path as Form
from dovetail.kv.models import model
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Table
from dovetail.measure import machine, record


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


WORDS = ("bench", "kv", "--layout", "llama-70b-tp8", "--tokens", "64,128", "--cache", "32M", "--quick")


def test_on_host_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kv.json"
    assert run(*WORDS, "--json", str(out)) == 0
    rows = record.read(out, kind="bench").rows
    assert [row["path"] for row in rows] == ["one copy", "contiguous", "cpu"] * 4
    assert all(row["correct"] and row["bandwidth_gbps"] > 0 for row in rows)
    assert {row["size_bytes"] for row in rows} == {4 * 80 * 8192, 8 * 80 * 8192}
    assert "all correct" in capsys.readouterr().out


def test_on_a_stand_in_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(build("cuda")))
    driver.load.cache_clear()
    out = tmp_path / "kv.json"
    try:
        words = ("--outermost", "block", "--direction", "fetch,store,both")
        assert run(*WORDS, "--backend", "cuda", "--json", str(out), *words) == 0
    finally:
        driver.load.cache_clear()
    rows = record.read(out, kind="bench").rows
    paths = {row["path"] for row in rows}
    assert paths == {
        "one copy", "contiguous", "auto", "dma-2d", "dma-loop", "dma-batch 128", "dma-batch 512", "dma-batch 2048",
        "dma-batch one call",
    }  # fmt: skip
    assert all(row["correct"] for row in rows)
    assert {row["direction"] for row in rows} == {"fetch", "store", "both"}
    for row in rows:
        if row["path"] == "auto":  # by the timed runs alone: neither the checks nor the warm-up count
            assert set(row["took"]) <= {"dma-2d", "dma-batch"}
            assert row["took"][row["chosen"]] == max(row["took"].values())
            assert sum(row["took"].values()) == row["iterations"]
    sizes = {row["direction"]: row["size_bytes"] for row in rows if row["tokens"] == 64}
    assert sizes["both"] == 2 * sizes["fetch"]


def cell(beside: str, **paths: tuple[float, float | None]) -> list[dict[str, object]]:
    """Rows of one request: path -> (time, what a computation kept)."""
    same = {"layout": "x", "outermost": "layer", "tokens": 64, "cache_bytes": 1, "direction": "fetch", "beside": beside}
    return [
        same | {"path": name.replace("_", "-"), "time_us": time_us, "compute_kept": kept, "share": 1.0, "correct": True,
                "bandwidth_gbps": 1 / time_us, "chosen": "staged"}
        for name, (time_us, kept) in paths.items()
    ]  # fmt: skip


def test_the_verdict_on_auto() -> None:
    """Beside a computation the best path is the fastest of those that leave it 97 %."""
    idle = cell("idle", contiguous=(1, None), auto=(10.0, None), dma_2d=(9.8, None), staged=(10.2, None))
    busy = cell("gemm", auto=(11.0, 0.98), dma_2d=(20.0, 1.0), staged=(11.0, 0.98), kernel=(8.0, 0.5))
    text = "\n".join(kv.lines([*idle, *busy]))
    assert "auto is within 5% of the best path in 2 of 2 cells" in text
    assert "computation keeps 98%, the copies 91% of auto's idle speed, 93% of that of its path (staged)" in text
    assert "beside computation, in 1 of 1 cells computation keeps 97%, and copies 90%" in text
    slow = cell("gemm", auto=(20.0, 1.0), dma_2d=(20.0, 1.0), staged=(11.0, 0.98))
    text = "\n".join(kv.lines(slow))
    assert "in 0 of 1 cells" in text
    assert "x, 64 tokens, fetch, gemm: 82% behind staged" in text


def test_a_mover_that_loses_a_row_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = CpuMover.submit

    def lossy(self: CpuMover, direction: str, table: Table, path: str = "cpu") -> object:
        return submit(self, direction, table.where(np.arange(len(table)) < len(table) // 2), path)

    monkeypatch.setattr(CpuMover, "submit", lossy)
    spec = kv.Spec(models=(model("llama-70b-tp8"),), tokens=(64,), cache_bytes=8 << 20, paths=("cpu",), rounds=1)
    rows, _ = kv.measure(spec, kv.CpuPlace())
    assert not any(row["correct"] for row in rows)
    assert all(row["time_us"] is None for row in rows)
    assert kv.lines(rows) == ["6 of 6 results WRONG"]


def test_what_does_not_fit_is_named() -> None:
    spec = kv.Spec(models=(model("llama-8b"),), tokens=(1 << 20,), cache_bytes=1 << 20, paths=("cpu",))
    assert kv.measure(spec, kv.CpuPlace()) == ([], ["llama-8b: 1048576 tokens do not fit into the cache"])
    with pytest.raises(ValueError, match="needs layouts, numbers of tokens above 0, and paths"):
        kv.Spec(models=(), tokens=(1,), cache_bytes=1, paths=("cpu",))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench kv --layout llama", "layout must be one of llama-8b"),
        ("bench kv --path dma-2d", "--path: 'dma-2d' is not one of cpu; others need --backend cuda"),
        ("bench kv --variant pcpy", "--variant is for collectives"),
        ("bench kv --dtype float16", "--dtype is for collectives"),
        ("bench kv --json /", "is a directory"),
        ("bench kv --direction up", "--direction: 'up' is not one of fetch, store, both"),
        ("bench kv --beside lunch", "--beside: 'lunch' is not one of idle, gemm, decode"),
        ("bench kv --beside gemm", "--beside gemm needs --backend cuda"),
        ("tune --only kv", "--only kv needs --backend cuda"),
        ("tune --only kv --backend cuda --ranks 4", "--ranks is for --only coll"),
        ("tune --cache 4G", "--cache is for --only kv"),
        ("bench kv --iters 0", "--iters: 0 must be at least 1"),
        ("bench kv --cache 1M", "nothing was measured: --cache is too small for --tokens"),
        ("tune --only coll,kv", "--only: measure kv by itself"),
        ("bench kv --outermost row", "--outermost: 'row' must be layer or block"),
        ("bench kv --ranks 4", "--ranks is for collectives"),
        ("bench kv --pin 1G", "--force and --pin are for --backend cuda"),
        ("bench all_gather --layout mla", "--layout is for kv"),
    ],
)
def test_errors_of_usage(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert message in capsys.readouterr().err


def test_tuning_on_a_stand_in_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Idle only, without torch's GPU: the costs go into the profile, and `auto` says whose figures it took."""
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(build("cuda")))
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    monkeypatch.setattr(tune, "_FEW_TOKENS", (64,))
    monkeypatch.setattr(tune, "_ROUNDS", 1)
    driver.load.cache_clear()
    try:
        assert run("tune", "--only", "kv", "--backend", "cuda", "--cache", "64M") == 0
        assert run("tune", "--only", "kv", "--backend", "cuda", "--cache", "1M") == 2
    finally:
        driver.load.cache_clear()
    shown = capsys.readouterr()
    assert "fetch idle, rows of 4K: " in shown.out
    assert "too few to measure with" in shown.err
    found = costs.current("cuda", CudaDriver(build("cuda")).device_name(0))
    assert costs.current("cuda", "another GPU") == costs.shipped()
    assert set(found.samples) == {(d, False, p) for d in Direction for p in (Form.DMA_2D, Form.DMA_BATCH)}
    assert found.source.startswith("profile of ")


def test_a_section_that_is_not_understood_is_named_and_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    for section in ({"cuda": {"fetch": 1}}, ["cuda"]):
        caplog.clear()
        profile.save(profile.Profile(key=machine.profile_key(), sections={"kv": section}))
        assert costs.current() == costs.shipped()
        assert "section 'kv' of the profile of" in caplog.text
        assert "until then: shipped figures of an H200" in caplog.text


def test_figures_of_an_idle_gpu_serve_where_there_are_no_others() -> None:
    """As after a tuning without torch: a transfer beside computation is not bound to dma-2d."""
    samples = {
        (Direction.FETCH, False, p): Samples([(4096, 1 << 20, t)]) for p, t in ((Form.DMA_2D, 9), (Form.STAGED, 2))
    }
    found = choose(
        Direction.FETCH, Shape(row_bytes=4096, size_bytes=1 << 20),
        Costs(samples=samples, entries_per_call=1, source="a test"), beside=True,
    )  # fmt: skip
    assert found.path is Form.STAGED
    assert found.reason == "estimated on an idle GPU: dma-2d 9 us, staged 2 us (a test)"


def test_batches_that_came_changed_do_not_win() -> None:
    same = {"direction": "fetch", "beside": "idle", "outermost": "layer", "blocks": 1, "num_layers": 1}
    times = {"dma-batch 128": (10.0, 20.0), "dma-batch 512": (9.0, None)}
    rows = [
        same | {"path": p, "size_bytes": 64, "time_us": t, "submit_us": t, "correct": t is not None}
        for p, found in times.items()
        for t in found
    ]
    assert tune.found_in(rows, "a test").entries_per_call == 128


class Timeline:
    """A GPU in virtual time: computations in a row, at half speed while a transfer runs."""

    def __init__(self) -> None:
        self.now_us = self.done_us = self.queued_us = 0.0
        self.marks: list[Mark] = []

    def advance(self, us: float, pace: float) -> None:
        for mark in self.marks:
            if mark.at_us is None and mark.place_us <= self.done_us + us * pace:
                mark.at_us = self.now_us + (mark.place_us - self.done_us) / pace
        self.now_us, self.done_us = self.now_us + us, self.done_us + us * pace

    def transfer(self) -> tuple[float, float]:
        self.advance(39_000, 0.5)
        return 1.0, 39_000.0


class Mark:
    at_us: float | None = None
    place_us = 0.0

    def __init__(self, line: Timeline) -> None:
        self.line = line

    def record(self, _: object) -> None:
        self.place_us = self.line.queued_us
        self.line.marks.append(self)

    def query(self) -> bool:
        return self.at_us is not None

    def synchronize(self) -> None:
        self.line.advance(max(self.place_us - self.line.done_us, 0.0), 1.0)

    def elapsed_time(self, other: Mark) -> float:
        assert self.at_us is not None
        assert other.at_us is not None
        return (other.at_us - self.at_us) / 1e3


def test_what_computation_keeps_is_not_taken_from_a_time_with_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that take much longer beside it: the last one is not over when it was expected to be."""
    line, load = Timeline(), object.__new__(Load)
    load.name, load._one_us, load._stream = "gemm", 1000.0, None
    monkeypatch.setattr(load, "_marks", lambda number: [Mark(line) for _ in range(number)])
    monkeypatch.setattr(load, "_compute", lambda n: setattr(line, "queued_us", line.queued_us + 1000.0 * n))
    found, kept = load.beside(line.transfer, 4_000.0)
    assert len(found) == 2
    assert kept == pytest.approx(0.5)
