"""The measuring commands of the GPU against the stand-in driver: rows, checks that can fail, bounds, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import standin

from dovetail import cli
from dovetail.bench.gpu import beside, energy, verdict
from dovetail.bench.gpu.phases import Phases, split, well_placed
from dovetail.bench.gpu.plans import crossing_plan
from dovetail.bench.gpu.spec import VARIANTS, Bounds, CollectiveSpec
from dovetail.cli import _gpu
from dovetail.errors import DovetailError
from dovetail.measure.energy import Energy
from dovetail.plan import passes
from dovetail.plan.check import check

ROOT = Path(__file__).parents[2]

#: Everything that needs the stand-in, in one process: it prints one JSON object.
WORK = """
import ctypes, json, sys, time
from pathlib import Path
from dovetail import cli
from dovetail.bench.gpu import beside, collectives, copies, energy, phases
from dovetail.bench.gpu.session import Session
from dovetail.bench.gpu.spec import Bounds, CollectiveSpec, Effort
from dovetail.errors import NotSupported
from dovetail.hw.gpu.cuda import CudaDriver

folder, few, found = Path(sys.argv[1]), Effort(iterations=2), {}


class Fill:
    title = "fill"

    def __init__(self, session, size_bytes):
        self._memory = session.arena("device", size_bytes).take(size_bytes)
        self._fill, self._size = session.driver.fill, size_bytes

    def launch(self, stream):
        self._fill(self._memory.data_ptr(), 7, self._size, stream)

    def is_right(self):
        return bool((self._memory == 7).all())


class Clockwork:
    name, settle_s = "clockwork", 0.0

    def joules(self):
        return int(time.perf_counter() * 200) * 0.5

    def watts(self):
        return 100.0

    def close(self): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass


def gathered(**settings):
    settings = {"collective": "all_gather", "sizes": (1000,), "ranks": 3, "effort": few} | settings
    with Session("cuda", settings.pop("bounds", None)) as session:
        return collectives.measure(session, CollectiveSpec(**settings))


def patched(name, replacement):
    kept = getattr(CudaDriver, name)
    setattr(CudaDriver, name, replacement(kept))
    try:
        return gathered()[0]
    finally:
        setattr(CudaDriver, name, kept)


def off_by_one(copy):
    def wrong(self, dst, src, size, stream):
        copy(self, dst, src, size - 1, stream)
    return wrong


def lossy(prepare):
    def wrong(self, dst, src, size, order, stream):
        return prepare(self, dst[1:], src[1:], size[1:], order, stream)
    return wrong


def command(name, *words):
    file = folder / f"{name}.json"
    try:
        cli.main([*words, "--backend", "cuda", "--json", str(file)])
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    return {"status": status, "record": json.loads(file.read_text()) if file.exists() else None}


found["all_gather"] = gathered(sizes=(1000, 4096))
found["all_to_all"] = gathered(collective="all_to_all", sizes=(1024,), ranks=4)
found["bounded"] = gathered(sizes=(1000, 1 << 20), bounds=Bounds(pin_bytes=1 << 20))
found["wrong copy"] = patched("copy", off_by_one)
found["wrong batch"] = patched("prepared_batch", lossy)
with Session("cuda") as session:
    found["copies"] = copies.measure(session, (1, 1000), few)
    found["phases"] = phases.measure(session, [1000, 1 << 20], 5)
    rows, notes = beside.measure(
        session, ranks=3, piece_bytes=1 << 16, rounds=2, computation=Fill(session, 1 << 20)
    )
    found["beside"], found["beside lines"] = (rows, notes), beside.lines(rows)
    found["energy"] = energy.measure(
        session, "all_to_all", ranks=3, piece_bytes=1 << 14, seconds=0.1, pause_s=0.0, meter=Clockwork()
    )
    try:
        beside.measure(session)
    except NotSupported as error:
        found["no torch"] = str(error)
    session.close()
line = "bench all_gather --ranks 3 -b 1K -e 1K --iters 2 --variant pcpy,graph --energy"
found["bench"] = command("bench", *line.split())
found["bench copies"] = command("copies", *"bench copies -b 1K -e 1K --iters 2".split())
found["bench beside"] = command("beside", *"bench beside".split())
found["phases command"] = command("phases", *"phases -b 1K -e 1K --iters 2".split())
print("FOUND", json.dumps(found))
"""


def environment(**more: str) -> dict[str, str]:
    """The stand-in for the driver, and no GPU for torch."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    given = {"DOVETAIL_CUDA_LIBRARY": str(standin.build("cuda")), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    return {**os.environ, **given, **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench_gpu")
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(folder)], env=environment(DOVETAIL_CHECK="1", STANDIN_DELAY_US="50"),
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    line = next((text for text in done.stdout.splitlines() if text.startswith("FOUND ")), None)
    assert line is not None, done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return result | {"stdout": done.stdout, "stderr": done.stderr}


def named(rows: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["variant"], row["streams"]): row for row in rows}


@pytest.mark.parametrize("collective", list(VARIANTS))
def test_every_variant_stands_beside_every_baseline(found: dict[str, Any], collective: str) -> None:
    rows, notes = found[collective]
    ours = {(row["variant"]) for row in rows if row["backend"] == "cuda"}
    assert ours == set(VARIANTS[collective])
    theirs = {(row["backend"], row["streams"]) for row in rows if row["backend"] != "cuda"}
    assert theirs == {("loop", 1), ("loop", 2), ("plain", 2)}
    assert notes == ["torch left out: torch sees no GPU here"]
    assert all(row["correct"] and row["time_us"] > 0 and row["iterations"] == 2 for row in rows)


def test_rows_have_what_crosses_the_link(found: dict[str, Any]) -> None:
    rows = named(found["all_to_all"][0])
    for (variant, _), row in rows.items():
        assert (row["size_bytes"], row["piece_bytes"], row["ranks"]) == (1024, 256, 4)
        assert (row["h2d_bytes"], row["d2h_bytes"]) == (3 * 256, 3 * 256)
        assert row["d2d_bytes"] == (3 * 256 if variant == "swap" else 0)
        assert row["link_gbps"] == pytest.approx(6 * 256 / row["time_us"] / 1e3, rel=1e-3)
        assert row["limit_share"] == pytest.approx(row["limit_us"] / row["time_us"], rel=1e-3)
    assert rows["pcpy", 2]["algbw_gbps"] == pytest.approx(1024 / rows["pcpy", 2]["time_us"] / 1e3, rel=1e-3)
    assert ("b2b", 1) in rows
    gather = named([row for row in found["all_gather"][0] if row["size_bytes"] == 1000])
    assert all(row["h2d_bytes"] == row["piece_bytes"] * 2 == 2000 for row in gather.values())


def test_wrong_copies_are_found_and_not_timed(found: dict[str, Any]) -> None:
    copied, batched = (found[name] for name in ("wrong copy", "wrong batch"))
    wrong = {row["variant"] for row in copied if not row["correct"]}
    assert {"loop", "plain", "graph"} <= wrong
    assert "b2b" not in wrong
    assert {row["variant"] for row in batched if not row["correct"]} == {"pcpy", "bcst", "b2b", "pull"}
    for row in (*copied, *batched):
        assert row["correct"] == (row["time_us"] is not None) == (row["iterations"] > 0)
    assert any("WRONG" in line for line in verdict.lines(copied))


def test_pinned_memory_is_bounded(found: dict[str, Any]) -> None:
    rows, notes = found["bounded"]
    assert {row["size_bytes"] for row in rows} == {1000}
    assert notes[0].startswith("all_gather of 1M left out: its peers need 10 MiB of pinned memory; at most 1048576 ")


def test_copies(found: dict[str, Any]) -> None:
    rows, notes = found["copies"]
    assert notes == []
    seen = {(row["backend"], row["direction"], row["size_bytes"]) for row in rows}
    assert seen == {(by, way, size) for by in ("cuda", "driver") for way in ("h2d", "d2h") for size in (1, 1000)}
    assert all(row["correct"] and row["share"] > 0 for row in rows)
    assert all(row["share"] == 1 for row in rows if row["backend"] == "driver")


def test_phases_add_up(found: dict[str, Any]) -> None:
    for row in found["phases"]:
        assert (row["backend"], row["direction"], row["correct"]) == ("cuda", "h2d", True)
        assert row["clock_error_us"] > 0
        assert row["submit_us"] > 0
        assert sum(row[f"{phase}_share"] for phase in ("control", "schedule", "copy", "sync")) == pytest.approx(1)
        assert 1 <= row["iterations"] <= 5


def test_split_of_the_time_of_a_copy() -> None:
    def us(phases: Phases) -> tuple[float, ...]:
        return phases.control_us, phases.schedule_us, phases.copy_us, phases.sync_us

    assert us(split(0, 3000, 5000, 9000, 12000, copy_us=4, error_ns=1)) == (3, 2, 4, 3)
    # It began before its call had returned: nothing is left to schedule, and control ends there.
    assert us(split(0, 3000, 5000, 6000, 12000, copy_us=4, error_ns=1)) == (2, 0, 4, 6)
    # Placed after the host has seen it, by an error of the clocks.
    assert us(split(0, 3000, 5000, 13000, 12000, copy_us=4, error_ns=2000)) == (3, 5, 4, 0)


def test_badly_placed_copies_are_left_out() -> None:
    placed = [Phases(1, 1, 1, 1, 1, error) for error in (5.0, 2.0, 4.0)]
    assert [copy.clock_error_us for copy in well_placed(placed)] == [2.0, 4.0]


def test_beside_covers_the_window(found: dict[str, Any]) -> None:
    (first, *others), notes = found["beside"]
    assert notes == ["copy kernel left out: the copy kernel needs a GPU that torch sees"]
    assert (first["backend"], first["transfer"], first["compute_kept"]) == ("gemm", "none", 1)
    assert [row["transfer"] for row in others] == ["all_gather", "all_to_all"]
    for row in others:
        assert row["correct"]
        assert row["gbps"] > 0 < row["alone_gbps"]
        assert row["compute_kept"] == pytest.approx(row["compute_alone_us"] / row["compute_us"], rel=1e-3)
    assert len(found["beside lines"]) == 3
    assert found["no torch"] == "the GEMM needs a GPU that torch sees; torch sees none here"


def test_bytes_inside_a_window() -> None:
    runs = [beside.Span(0, 10), beside.Span(10, 20), beside.Span(20, 40)]
    assert beside.bytes_inside(beside.Span(5, 30), runs, 100) == 50 + 100 + 50
    assert beside.bytes_inside(beside.Span(41, 50), runs, 100) == 0
    assert beside.Span(0, 40).covers(beside.Span(5, 40))
    assert not beside.Span(0, 40).covers(beside.Span(5, 41))


def test_a_transfer_that_cannot_last_is_an_error() -> None:
    """Events of a GPU whose computation always outlasts the transfers."""
    clock = {"comp": 0.0, "comm": 0.0}
    events: dict[int, float] = {}

    def create(timing: bool) -> int:
        events[len(events) + 1] = 0.0
        return len(events)

    def record(event: int, stream: str) -> None:
        events[event] = clock[stream]

    driver: Any = SimpleNamespace(
        event_create=create, event_record=record, event_elapsed_us=lambda a, b: events[b] - events[a],
        stream_synchronize=lambda stream: None,
    )  # fmt: skip
    computation: Any = SimpleNamespace(launch=lambda stream: clock.__setitem__(stream, clock[stream] + 1e9))
    launches: list[str] = []
    transfer: Any = SimpleNamespace(title="t", size_bytes=1, launch=launches.append)
    window = beside.Window(driver, ["comp", "comm"], computation)  # type: ignore[list-item]
    with pytest.raises(beside.HardwareError, match="did not last as long"):
        window.beside(transfer)
    assert len(launches) > 100


def test_energy_rows(found: dict[str, Any]) -> None:
    rows, notes = found["energy"]
    (row,) = rows
    assert notes == ["copy kernel left out: the copy kernel needs a GPU that torch sees"]
    assert (row["kind"], row["backend"], row["programs"], row["correct"]) == ("energy", "cuda", 0, True)
    # The stand-in's meter gives 100 W whatever runs: nothing is left above idle, within the error.
    assert row["watts"] == pytest.approx(100, rel=0.2)
    assert row["idle_w"] == pytest.approx(100, rel=0.2)
    assert row["joules_per_gb"] <= 3 * row["error"]
    assert energy.lines(rows)[0].startswith("all_to_all on copy engines: ")


def test_energy_is_the_mean_of_the_windows() -> None:
    def window(joules: float) -> Energy:
        return Energy(
            meter="m", joules=joules, seconds=2.0, repetitions=10, resolution_j=1.0, idle_w=50.0, idle_error_w=0.5,
            period_s=0.02,
        )  # fmt: skip

    transfer: Any = SimpleNamespace(backend="sm", name="copy kernel", programs=8, size_bytes=10**9 // 4)
    row = energy.row(transfer, [window(200.0), window(220.0)])
    assert row["joules_per_gb"] == pytest.approx((100 + 120) / 2 / 10)
    assert row["error"] == pytest.approx(1.0)
    assert (row["watts"], row["idle_w"], row["gbps"]) == (pytest.approx(105), 50, pytest.approx(5))


def test_commands_write_records(found: dict[str, Any]) -> None:
    bench, copies, phases = (found[name] for name in ("bench", "bench copies", "phases command"))
    assert [each["status"] for each in (bench, copies, phases)] == [0, 0, 0]
    assert {row["variant"] for row in bench["record"]["rows"]} == {"pcpy", "graph", "loop", "plain"}
    for each in (bench, copies, phases):
        gpu = each["record"]["machine"]["gpu"]
        assert gpu["name"] == "stand-in 0"
        assert "uuid" not in gpu
        assert gpu["pinned_bytes"] > 0
        assert each["record"]["versions"]["torch"]
    assert phases["record"]["schema"] == "dovetail.phases/1"
    assert "the loop of copies takes of our best variant's time: 1K " in found["stdout"]
    assert "note: no energy figures: " in found["stderr"]


def test_beside_without_a_gpu_for_torch_fails(found: dict[str, Any]) -> None:
    assert found["bench beside"] == {"status": cli.FAILED, "record": None}
    assert "dovetail: the GEMM needs a GPU that torch sees" in found["stderr"]


def test_a_run_that_measured_nothing_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as when all sizes need more pinned memory than there may be."""
    outcome = _gpu.Outcome(title="t", rows=[], columns={}, share="share", lines=[], notes=["1G left out"], facts={})
    with pytest.raises(DovetailError, match="nothing was measured; the notes say why"):
        _gpu.show(outcome, tmp_path / "bench.json")
    assert "note: 1G left out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def rows_of(times: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    backends = {"loop": "loop", "plain": "plain"}
    return [
        {"collective": "all_gather", "ranks": 4, "backend": backends.get(name, "cuda"), "variant": name,
         "size_bytes": size, "time_us": time_us, "correct": True}
        for name, by_size in times.items() for size, time_us in by_size.items()
    ]  # fmt: skip


def test_verdict() -> None:
    small, large = 1 << 10, 16 << 20
    found = verdict.lines(
        rows_of({
            "pcpy": {small: 10.0, 4 * small: 10.0, large: 100.0}, "b2b": {small: 5.0, 4 * small: 20.0, large: 200.0},
            "loop": {small: 20.0, 4 * small: 10.0, large: 120.0}, "plain": {small: 1.0, 4 * small: 1.0, large: 90.0},
        })
    )  # fmt: skip
    assert found == [
        "all_gather, 4 ranks: the loop of copies takes of our best variant's time: 1K 4.00x, 4K 1.00x, 16M 1.20x",
        "all_gather, 4 ranks: the loop of copies, geometric mean up to 64K: 2.00x",
        "all_gather, 4 ranks: pcpy alone: 1.41x up to 64K",
        "all_gather, 4 ranks: b2b alone: 1.41x up to 64K",
        "all_gather, 4 ranks: our best variant reaches of two plain copies' speed: 16M 90.0%",
        "all_gather, 4 ranks: all correct",
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(("collective", "variant"), [(c, v) for c, vs in VARIANTS.items() for v in vs])
def test_plans_are_proved(collective: str, variant: str, ranks: int) -> None:
    check(passes.entry(crossing_plan(collective, variant, ranks, 64)), runs=2)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench all_gather --backend rocm", "backend: 'rocm' is not known; there are cpu, cuda"),
        ("bench all_reduce --backend cuda", "is not known; there are all_gather, all_to_all, copies, beside"),
        ("bench all_gather --backend cuda --ranks 1", "--ranks: 1 must be 2 to 64"),
        ("bench all_gather --backend cuda --variant swap", "'swap' is not known; there are pcpy, bcst"),
        ("bench all_gather --backend cuda --dtype int8", "--dtype is for --backend cpu"),
        ("bench all_gather --backend cuda --pin 0", "memory to pin must be above 0"),
        ("bench all_gather --backend cuda --iters 0", "iterations is 0"),
        ("bench copies --backend cuda --energy", "--energy is for collectives and beside"),
        ("bench all_gather --energy", "--energy is for --backend cuda"),
        ("bench copies", "add --backend cuda"),
        ("phases --pin 1G", "--force and --pin are for --backend cuda"),
        ("phases --backend gpu", "backend: 'gpu' is not known"),
    ],
)  # fmt: skip
def test_usage(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == cli.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "make", [lambda: Bounds(pin_bytes=0), lambda: CollectiveSpec(collective="all_gather", sizes=())]
)
def test_wrong_options_are_refused_when_made(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from dovetail.hw.gpu import driver

    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", "/nowhere/libcuda.so")
    driver.load.cache_clear()
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "all_gather", "--backend", "cuda"])
    assert ended.value.code == cli.FAILED
    assert "the CUDA driver (/nowhere/libcuda.so) cannot be loaded" in capsys.readouterr().err


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    line = "bench all_gather --backend cuda --ranks 3 -b 1K -e 1K --iters 100000 --variant pcpy,graph"
    running = subprocess.Popen(
        [sys.executable, "-m", "dovetail", *line.split()], env=environment(STANDIN_LOG=str(log)),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not log.exists() or log.read_text().count("cuGraphLaunch") < 20:
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)
    finally:
        running.kill()
        running.communicate()
    assert running.returncode in (1, 130)
    calls = Counter(text.split()[0] for text in log.read_text().splitlines())

    def number(*names: str) -> int:
        return sum(count for name, count in calls.items() if name.startswith(names))

    # Memory under a tensor that the traceback still holds goes with the process; streams and graphs are given back.
    assert number("cuMemHostAlloc") >= number("cuMemFreeHost") > 0
    assert number("cuStreamCreate") == number("cuStreamDestroy") > 0
    assert number("cuGraphInstantiate") == number("cuGraphExecDestroy") > 0
