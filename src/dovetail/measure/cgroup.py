"""The limits that a control group puts on this process: memory and CPU time, versions 1 and 2.

Owns reading them, nothing else. A limit on any group above ours binds too, so the least one on the way up counts.
`root` stands for the file system's root, so that tests can bring their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MOUNT = "sys/fs/cgroup"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the control groups allow; None where they set no limit."""

    memory_bytes: int | None = None
    cpus: float | None = None


def limits(root: Path = Path("/")) -> Limits:
    """The limits in force for this process; no limits where there are no control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return Limits()
    memory: list[int] = []
    cpus: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",") if controllers else []
        if not names:
            mount = root / _MOUNT if (root / _MOUNT / "cgroup.controllers").exists() else root / _MOUNT / "unified"
            for folder in _upwards(mount, path):
                memory += _number(folder / "memory.max")
                cpus += _share(_words(folder / "cpu.max"))
        if "memory" in names:
            for folder in _upwards(root / _MOUNT / "memory", path):
                memory += _number(folder / "memory.limit_in_bytes")
        if "cpu" in names:
            for folder in _upwards(_first(root / _MOUNT, "cpu", "cpu,cpuacct"), path):
                cpus += _share(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))
    # Version 1 writes "no limit" as the greatest page-aligned number.
    memory = [size_bytes for size_bytes in memory if size_bytes < 1 << 62]
    return Limits(memory_bytes=min(memory, default=None), cpus=min(cpus, default=None))


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it, up to the mount. Inside a container ours may be mounted as the root."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _first(mount: Path, *names: str) -> Path:
    return next((mount / name for name in names if (mount / name).exists()), mount / names[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> list[int]:
    return [int(word) for word in _words(path) if word.isdecimal()]


def _share(words: list[str]) -> list[float]:
    """CPUs from (quota, period); ``max`` or -1 is no limit."""
    if len(words) != 2 or not words[0].isdecimal():
        return []
    return [int(words[0]) / int(words[1])]
