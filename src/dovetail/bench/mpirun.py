"""Starts programs under ``mpirun`` by the rules of the comparison, and ends them.

The rules: ranks bound to cores, single copies by CMA on, and `mpi_yield_when_idle` where ranks outnumber cores: without
it a waiting rank holds the core that its peer needs, a call takes milliseconds, and the comparison is void. Ranks that
share cores stay bound, which favours Open MPI: four ranks on two cores took 0.4 to 0.6 of the time of unbound ones
with 4.1.4, and 0.8 to 0.9 with 5.0.11 (all_gather, one run of each).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dovetail.measure.openmpi import OpenMPI

_PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux only, and looked up before there are children
_GRACE_S = 5.0


def flags(mpi: OpenMPI, ranks: int, *, num_cores: int, root: bool) -> list[str]:
    """What ``mpirun`` is told, but for the program.

    Args:
        num_cores: ranks that can run at the same time.
        root: whether the caller is the superuser, whom Open MPI turns away unless told.
    """
    words = ["--allow-run-as-root"] if root else []
    words += ["-n", str(ranks)]
    if ranks > num_cores:
        words += ["--map-by", "core:OVERSUBSCRIBE", "--bind-to", "core:overload-allowed"]
        words += ["--mca", "mpi_yield_when_idle", "1"]
    else:
        words += ["--map-by", "core", "--bind-to", "core"]
    words += ["--mca", "pml", "ob1"]
    if int(mpi.version.split(".")[0]) >= 5:
        return [*words, "--mca", "btl", "self,sm", "--mca", "smsc", "cma"]
    return [*words, "--mca", "btl", "self,vader", "--mca", "btl_vader_single_copy_mechanism", "cma"]


def start(mpi: OpenMPI, words: Sequence[str], program: Sequence[str], *, env: dict[str, str], log: Path) -> Job:
    """Start `program` on the ranks that `words` describe; what it prints goes to `log`. The caller has one thread."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [mpi.mpirun, *words, *program],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **mpi.env, **env},
            # A session of its own: Ctrl-C reaches us alone, and we end it by its id.
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - callers have no other thread
        )
    return Job(process, log)


class Job:
    """A running ``mpirun``; `end` and leaving a ``with`` block leave nothing of it behind."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Its exit status; `subprocess.TimeoutExpired` when it takes longer."""
        return self._process.wait(timeout_s)

    def last_words(self, num_lines: int = 12) -> str:
        """The end of what it printed."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip("- ")][-num_lines:])

    def end(self) -> None:
        """Ask it to end its ranks and itself; after a few seconds, make it. Its ranks die with it."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _die_with_parent() -> None:
    """In the child, before it becomes mpirun: should we be killed, it is asked to end."""
    if _prctl:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def die_with_mpirun() -> None:
    """In a rank: should mpirun be killed, the rank is, too."""
    if _prctl:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
