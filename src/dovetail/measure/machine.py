"""Describes the machine and the versions, for the record.

Owns facts about where a figure was measured. It imports neither torch nor a driver, and leaves out what would name
a person or a host. A fact that cannot be found is left out or None, never guessed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dovetail import __version__
from dovetail.measure import cgroup, openmpi
from dovetail.profile import Key

_DISTRIBUTIONS = ("torch", "triton", "numpy", "mpi4py")


def describe() -> dict[str, Any]:
    """CPU, cores, memory, kernel and limits of this machine, as plain JSON."""
    limits = cgroup.limits()
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": num_cores(),
        "cores_online": os.cpu_count(),
        "memory_bytes": memory_bytes(),
        "system": platform.system(),
        "kernel": platform.release(),
        "container": container(),
        "cgroup_memory_bytes": limits.memory_bytes,
        "cgroup_cpus": limits.cpus,
        "memlock_bytes": memlock_bytes(),
    }


def versions() -> dict[str, str]:
    """Versions of Dovetail and of what it is measured with; what is not installed is left out."""
    found = {"dovetail": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if baseline := openmpi.find():
        found["openmpi"] = f"{baseline.version} ({baseline.source})"
    return found


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's name as the system gives it."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or None
    for key in ("model name", "Processor", "uarch"):
        if found := re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or None


def num_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def memlock_bytes() -> int | None:
    """How much memory this process may lock; None is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def container(root: Path = Path("/")) -> str | None:
    """What kind of container this is, or None outside of one."""
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    try:
        groups = (root / "proc/1/cgroup").read_text()
    except OSError:
        return None
    found = re.search(r"kubepods|docker|containerd|lxc|libpod", groups)
    return found[0] if found else None


def profile_key(ranks: Iterable[int] = ()) -> Key:
    """The key of a profile that is measured on this machine's CPU, or wanted for it."""
    found = {"dovetail": __version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["torch"] = importlib.metadata.version("torch")
    return Key(
        # All cores, not those that this process may use: a launcher that binds ranks does not make another machine.
        device=f"{cpu_model() or platform.machine()}, {os.cpu_count() or 1} cores",
        driver=f"{platform.system()} {platform.release()}",
        ranks=tuple(sorted(ranks)),
        versions=found,
    )
