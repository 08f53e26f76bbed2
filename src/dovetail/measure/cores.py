"""Cores as a launcher counts them: physical ones that this process may use, and how many of them it really gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from dovetail.measure import cgroup

_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical(topology: Path = _TOPOLOGY) -> list[set[int]]:
    """The physical cores that this process may run on, each as the set of its hardware threads."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return [{cpu} for cpu in range(os.cpu_count() or 1)]
    cores: dict[str, set[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            siblings = (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.setdefault(siblings, set()).add(cpu)
    return list(cores.values())


def usable() -> int:
    """Ranks that can run at the same time: cores, less what a container's CPU quota takes away."""
    quota = cgroup.limits().cpus
    number = len(physical())
    return number if quota is None else max(1, min(number, int(quota)))


def bind(rank: int) -> None:
    """Bind this process to one core, as ``mpirun --bind-to core`` does; ranks beyond the cores share them."""
    available = physical()
    os.sched_setaffinity(0, available[rank % len(available)])


@contextlib.contextmanager
def on(cpus: Collection[int]) -> Iterator[None]:
    """Threads that begin meanwhile may run on any of these, wherever this one is bound; none: where this one may."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def allowed() -> tuple[int, ...]:
    """The CPUs that this process may run on; none where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
