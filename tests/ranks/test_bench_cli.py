"""`dovetail bench`, `phases` and `tune` for real: several processes, tiny sizes, no time asserted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import cli, profile
from dovetail.bench import runner, tune
from dovetail.bench.spec import COLLECTIVES
from dovetail.cli import bench
from dovetail.measure import machine, openmpi, record

LIMIT_S = 120
MAIN = (sys.executable, "-c", "from dovetail.cli import main; main()")
Need = Callable[[str, object], None]


@pytest.fixture
def open_mpi(need: Need) -> openmpi.OpenMPI:
    found = openmpi.find()
    need("openmpi", found)
    assert found is not None
    return found


def dovetail(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run([*MAIN, *words], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def inside(*words: str) -> None:
    """Run the command in this process, which has imported torch; it must succeed."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code in (None, cli.OK)


def rows_of(path: Path, kind: str = "bench") -> list[dict[str, Any]]:
    return record.read(path, kind=kind).rows


def test_every_collective_beside_open_mpi_and_gloo(tmp_path: Path, open_mpi: openmpi.OpenMPI, need: Need) -> None:
    file = tmp_path / "bench.json"
    done = dovetail("bench", "all", "-b", "4K", "-e", "4K", "--quick", "--iters", "5", "--json", str(file))
    assert done.returncode == 0, done.stderr
    found = rows_of(file)
    assert [(row["collective"], row["backend"]) for row in found] == [
        (collective, backend) for collective in COLLECTIVES for backend in ("cpu", "openmpi", "gloo")
    ]
    assert all(row["correct"] and row["time_us"] > 0 and row["size_bytes"] == 4096 for row in found)
    assert {row["requested"] for row in found if row["backend"] == "cpu"} == {"auto"}
    assert {row["tensors"] for row in found if row["backend"] == "cpu"} == {"symmetric"}
    theirs = [row for row in found if row["backend"] == "openmpi"]
    assert {row["library"] for row in theirs} == {f"Open MPI v{open_mpi.version} ({open_mpi.source})"}
    assert all("--bind-to core" in row["flags"] and "cma" in row["flags"] for row in theirs)
    assert all(row["variant"] == row["requested"] == "openmpi" for row in theirs)
    assert all(row["limit_us"] > 0 for row in found if row["collective"] == "all_gather")
    assert [line.split()[0] for line in done.stdout.splitlines() if line.endswith("all correct")] == list(COLLECTIVES)
    need("mpicc", Path(open_mpi.mpirun).with_name("mpicc").exists())
    assert all(row["c_time_us"] > 0 for row in theirs)


def test_more_ranks_than_cores(tmp_path: Path, open_mpi: openmpi.OpenMPI) -> None:
    file = tmp_path / "bench.json"
    ranks = machine.num_cores() + 1
    words = ("--ranks", str(ranks), "-b", "1000", "-e", "1000", "--variant", "auto,pcpy", "--baseline", "openmpi")
    inside("bench", "all_to_all", *words, "--quick", "--iters", "3", "--json", str(file))
    found = rows_of(file)
    assert [row["requested"] for row in found] == ["auto", "pcpy", "openmpi"]
    assert all(row["correct"] and row["ranks"] == ranks for row in found)
    assert all(row["size_bytes"] == 1000 // 4 // ranks * ranks * 4 for row in found)
    assert "mpi_yield_when_idle 1" in found[-1]["flags"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("tensors", "dtype"), [("symmetric", "bfloat16"), ("ordinary", "float32")])
def test_without_open_mpi_ranks_are_launched(tmp_path: Path, tensors: str, dtype: str) -> None:
    file = tmp_path / "bench.json"
    words = ("--ranks", "2", "-b", "2K", "-e", "2K", "--baseline", "gloo", "--tensors", tensors, "--dtype", dtype)
    inside("bench", "all", *words, "--quick", "--iters", "3", "--json", str(file))
    found = rows_of(file)
    assert len(found) == 2 * len(COLLECTIVES)
    assert all(row["correct"] and row["dtype"] == dtype for row in found)
    assert {row["tensors"] for row in found if row["backend"] == "cpu"} == {tensors}
    assert {row["tensors"] for row in found if row["backend"] == "gloo"} == {"ordinary"}


def test_sum_that_mpi_cannot_is_left_out_with_a_line(
    open_mpi: openmpi.OpenMPI, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-b", "1K", "-e", "1K", "--dtype", "float16", "--baseline", "openmpi", "--quick", "--iters", "2")
    inside("bench", "all_reduce", *words)
    assert "note: all_reduce: openmpi left out: MPI has no type for float16" in capsys.readouterr().err


@pytest.mark.usefixtures("forked")
def test_a_run_that_measured_nothing_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_QUICK_LIMIT_S", 1e-9)  # over before the ranks are there
    file = tmp_path / "bench.json"
    words = ["--ranks", "2", "-b", "1K", "-e", "1K", "--quick", "--baseline", "none", "--json", str(file)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "all_gather", *words])
    assert ended.value.code == cli.FAILED
    said = capsys.readouterr().err
    assert "note: out of time: 1 of 1 cases were not measured; leave out --quick to have them" in said
    assert "dovetail: nothing was measured; the notes say why" in said
    assert not file.exists()


def worker(tmp_path: Path, text: str) -> tuple[str, ...]:
    """A rank's program that does `text` before it becomes a worker."""
    path = tmp_path / "worker.py"
    path.write_text(textwrap.dedent(text) + "\nfrom dovetail.bench import worker\nworker.main()\n")
    return sys.executable, str(path)


def left_running(folder: Path) -> list[int]:
    """Processes whose command line names `folder`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def gone(folder: Path) -> bool:
    deadline = time.monotonic() + 10
    while left_running(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not left_running(folder)


def test_corrupted_result_is_reported_and_fails(
    tmp_path: Path, open_mpi: openmpi.OpenMPI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoils_one_byte_on_rank_1 = """
        import os
        import torch
        from dovetail.bench import ours
        right = ours._call
        def wrong(case, inp, out, requested):
            call = right(case, inp, out, requested)
            def spoilt():
                call()
                if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
                    out.view(torch.uint8)[-1] ^= 1
            return spoilt
        ours._call = wrong
    """
    monkeypatch.setattr(runner, "WORKER", worker(tmp_path, spoils_one_byte_on_rank_1))
    file = tmp_path / "bench.json"
    words = ["-b", "1K", "-e", "1K", "--baseline", "openmpi", "--quick", "--iters", "3", "--json", str(file)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "all_gather", *words])
    assert ended.value.code == cli.FAILED
    assert "all_gather auto: 1 of 2 results WRONG" in capsys.readouterr().out
    ours, theirs = rows_of(file)
    assert (ours["correct"], ours["time_us"], theirs["correct"]) == (False, None, True)


def test_failing_rank_ends_the_run_with_its_message(
    tmp_path: Path, open_mpi: openmpi.OpenMPI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails_on_rank_1 = """
        from dovetail.bench import cell
        right = cell.Cell.measure
        def wrong(self, wanted):
            if self.rank == 1:
                raise RuntimeError("out of luck")
            return right(self, wanted)
        cell.Cell.measure = wrong
    """
    monkeypatch.setattr(runner, "WORKER", worker(tmp_path, fails_on_rank_1))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "all_gather", "-b", "1K", "-e", "1K", "--quick"])
    assert ended.value.code == cli.FAILED
    assert "rank 1 failed: RuntimeError: out of luck" in capsys.readouterr().err
    assert gone(tmp_path)


def test_interrupt_leaves_nothing_running(tmp_path: Path, open_mpi: openmpi.OpenMPI) -> None:
    words = [*MAIN, "bench", "all", "--ranks", "2", "-b", "1K", "-e", "16M", "--iters", "100000"]
    command = subprocess.Popen(words, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("dovetail-bench-*/progress")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left_running(tmp_path)
        command.send_signal(signal.SIGINT)
        assert command.wait(30) != 0
    finally:
        command.kill()
        command.communicate()
    assert gone(tmp_path)
    assert not list(tmp_path.glob("dovetail-bench-*"))


def test_phases(tmp_path: Path) -> None:
    file = tmp_path / "phases.json"
    inside("phases", "-b", "1K", "-e", "4K", "--iters", "20", "--json", str(file))
    found = rows_of(file, "phases")
    assert [row["size_bytes"] for row in found] == [1024, 4096]
    for row in found:
        assert sum(row[f"{phase}_share"] for phase in ("control", "schedule", "copy", "sync")) == pytest.approx(1)


@pytest.mark.usefixtures("forked")
def test_tune_writes_a_profile_that_auto_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, kept = tmp_path / "profile.json", tmp_path / "tune.json"
    monkeypatch.setenv("DOVETAIL_PROFILE", str(file))
    monkeypatch.setattr(tune, "_MOST_S", 0.02)
    inside("tune", "--ranks", "2", "-b", "1K", "-e", "1K", "--budget", "100s", "--json", str(kept))
    loaded, reason = profile.load(file, machine.profile_key([2]))
    assert loaded is not None, reason
    assert set(loaded.sections["coll"]["cpu"]) == set(COLLECTIVES)
    measured = {(row["collective"], row["variant"]) for row in rows_of(kept, "tune")}
    assert {("all_gather", "torch"), ("all_gather", "pcpy"), ("all_reduce", "twoshot")} <= measured
    # Doctored, so that the choice can only come from this file.
    data = json.loads(file.read_text())
    data["sections"]["coll"]["cpu"]["all_gather"]["2"] = [[None, "bcst"]]
    file.write_text(json.dumps(data))
    words = ("-b", "1K", "-e", "1K", "--baseline", "none", "--quick", "--iters", "2", "--json", str(kept))
    done = dovetail("bench", "all_gather", *words)
    assert done.returncode == 0, done.stderr
    (row,) = rows_of(kept)
    assert row["variant"] == "bcst"
    assert row["reason"].startswith("profile of ")


def test_an_interrupt_of_the_terminal_is_one_line(tmp_path: Path) -> None:
    """It reaches the ranks too, here while they still import: no word from them, and it ends at once."""
    words = [*MAIN, "bench", "all_gather", "--ranks", "2", "--baseline", "gloo", "--iters", "100000"]
    command = subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}, start_new_session=True
    )
    children = Path(f"/proc/{command.pid}/task/{command.pid}/children")
    deadline = time.monotonic() + 60
    while len(children.read_text().split()) < 3 and time.monotonic() < deadline:  # a tracker and two ranks
        time.sleep(0.01)
    os.killpg(command.pid, signal.SIGINT)
    try:
        _, said = command.communicate(timeout=30)
    finally:
        command.kill()
    assert command.returncode == cli.INTERRUPTED
    assert said.strip().splitlines()[-1] == "dovetail: interrupted; nothing was saved"
    assert "Traceback" not in said
