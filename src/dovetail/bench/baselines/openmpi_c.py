"""The C figure beside Open MPI's: the same collectives, sizes, flags and protocol without Python.

Compiles ``mpi_time.c`` with the ``mpicc`` of the Open MPI in use and runs it under its ``mpirun``. Owns the field
`c_time_us` of the rows whose backend is ``openmpi``: null where there is no compiler, and one line says so.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.bench import mpirun
from dovetail.bench.spec import Spec
from dovetail.measure.openmpi import OpenMPI

SOURCE = Path(__file__).with_name("mpi_time.c")
_REDUCES = ("all_reduce", "reduce_scatter")
_HALF = ("float16", "bfloat16")
_COMPILE_S, _START_S, _SLOWER = 60.0, 60.0, 4.0


def add(rows: list[dict[str, Any]], spec: Spec, mpi: OpenMPI, flags: Sequence[str], folder: Path) -> list[str]:
    """Set `c_time_us` in the rows of Open MPI; the lines returned say why, where it could not be measured."""
    own = [row for row in rows if row["backend"] == "openmpi"]
    for row in own:
        row["c_time_us"] = None
    cases = [f"{row['collective']}:{row['size_bytes']}" for row in own if _has_type(row)]
    if not cases:
        return []
    try:
        program = _compile(mpi, folder)
        times = _run(program, cases, spec, mpi, flags, folder)
    except _NotMeasured as problem:
        return [f"openmpi: no C figure: {problem}"]
    for row in own:
        row["c_time_us"] = times.get((row["collective"], row["size_bytes"]))
    return []


class _NotMeasured(Exception):
    """Why there is no C figure."""


def _compile(mpi: OpenMPI, folder: Path) -> Path:
    """The program, made by the compiler that stands beside mpirun."""
    compiler = Path(mpi.mpirun).with_name("mpicc")
    found = str(compiler) if compiler.exists() else None
    if found is None and mpi.source == "system":
        found = shutil.which("mpicc")
    if found is None:
        raise _NotMeasured("no mpicc beside mpirun (apt-get install libopenmpi-dev)")
    program = folder / "mpi_time"
    command = [found, "-O2", "-std=gnu11", "-o", str(program), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in error.stderr.splitlines() if line.strip("- ")]
        raise _NotMeasured(f"mpicc failed: {said[0] if said else f'status {error.returncode}'}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _NotMeasured(f"mpicc failed: {error}") from None
    return program


def _run(
    program: Path, cases: list[str], spec: Spec, mpi: OpenMPI, flags: Sequence[str], folder: Path
) -> dict[tuple[str, int], float]:
    """Times in microseconds by collective and size."""
    result = folder / "mpi_time.txt"
    words = [str(program), str(result), str(spec.seconds), spec.dtype, *cases]
    limit_s = _START_S + _SLOWER * spec.seconds * len(cases)
    with mpirun.start(mpi, flags, words, env={}, log=folder / "mpi_time.log") as job:
        try:
            status = job.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise _NotMeasured(f"the program took longer than {limit_s:.0f} s") from None
        if status != 0:
            raise _NotMeasured(f"the program ended with status {status}: {job.last_words(1)}")
    return parse(result.read_text(encoding="utf-8"))


def parse(text: str) -> dict[tuple[str, int], float]:
    """Read the lines ``COLLECTIVE BYTES MICROSECONDS``."""
    words = (line.split() for line in text.splitlines())
    return {(collective, int(size_bytes)): float(time_us) for collective, size_bytes, time_us in words}


def _has_type(row: dict[str, Any]) -> bool:
    """Whether C can run it: MPI moves 16-bit floats as bytes but cannot sum them."""
    return not (row["dtype"] in _HALF and row["collective"] in _REDUCES)
