"""Stand-in driver libraries: the published calls of a vendor's driver, run by a device in software.

`build("cuda")` compiles one and gives its path, for `DOVETAIL_CUDA_LIBRARY` or a driver's `path` argument.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("cuda", "hip", "hsa")
COMMAND = ("-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")


def compiler() -> str:
    """This machine's, for C++."""
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if found is None:
        raise FileNotFoundError("tests need a C++ compiler (c++ or g++)")
    return found


def build(name: str) -> Path:
    """The stand-in library for a vendor's driver, compiled once per state of its sources, by whoever comes first."""
    if name not in NAMES:
        raise ValueError(f"there are stand-ins for {', '.join(NAMES)}, not {name!r}")
    command = [compiler(), *COMMAND]
    sources = [HERE / f"{name}.cpp", HERE / "device.cpp"]
    state = hashlib.sha256(" ".join(command).encode())
    for path in (*sources, *sorted(HERE.glob("*.h"))):
        state.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"dovetail-standin-{os.getuid()}" / state.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"lib{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            fresh = library.with_suffix(f".{os.getpid()}.tmp")
            done = subprocess.run(
                [*command, "-o", str(fresh), *map(str, sources)], capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{name}.cpp does not compile:\n{done.stderr}")
            fresh.replace(library)
    return library
