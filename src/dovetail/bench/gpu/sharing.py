"""Ranks on GPUs as the runner sees them before it starts any: how many GPUs, who shares them, what cannot run there.

Owns the lines about it. Everything but `survey` and `facts` is a function of a `Site`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.bench.spec import CUDA
from dovetail.errors import NotSupported

CE_SINCE = (2, 28)
"""The NCCL from which on its collectives can run on copy engines."""
_NCCL, _NCCL_CE = "nccl", "nccl-ce"


@dataclass(frozen=True, kw_only=True)
class Site:
    """What ranks find."""

    gpus: int = 0
    """GPUs that a process sees; 0 where tensors are in host memory."""
    mps: str = "off"
    """`measure.gpu.mps`: begins with "on" if kernels of several processes run at the same time."""
    nccl: tuple[int, ...] | None = None
    """The version of torch's NCCL; None without one."""

    @property
    def has_mps(self) -> bool:
        """Whether MPS runs."""
        return self.mps.startswith("on")


def survey(ranks: int, *, force: bool) -> Site:
    """Look at the GPUs that `ranks` would use, without a context on any.

    Raises:
        NotSupported: there is no GPU, or somebody else uses one of them and `force` is not set.
    """
    from dovetail.hw.gpu.driver import load
    from dovetail.measure import gpu

    driver = load(CUDA)
    gpus = driver.num_devices()
    if not gpus:
        raise NotSupported("the cuda driver is here, but shows this process no GPU")
    for index in range(min(ranks, gpus)):
        gpu.refuse_if_busy(driver.device_uuid(index), force)
    return Site(gpus=gpus, mps=gpu.mps(), nccl=_nccl_version())


def facts() -> dict[str, Any]:
    """The first GPU for a record, without what names this very one."""
    from dovetail.hw.gpu.driver import load
    from dovetail.measure import gpu

    driver = load(CUDA)
    found = gpu.describe(driver.device_uuid(0), num_multiprocessors=driver.num_multiprocessors(0))
    found.pop("uuid", None)
    found["name"] = found["name"] or driver.device_name(0)
    return found | {"driver_api": driver.version, "gpus": driver.num_devices()}


def _nccl_version() -> tuple[int, ...] | None:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return None
    nccl: Any = torch.cuda.nccl
    with contextlib.suppress(AttributeError, RuntimeError):
        return tuple(int(number) for number in nccl.version()[:3])
    return None


def mps_notes(ranks: int, site: Site) -> list[str]:
    """A line where ranks that share a GPU have no MPS."""
    if not site.gpus or ranks <= site.gpus or site.has_mps:
        return []
    why = site.mps.removeprefix("off").removeprefix(": ")
    line = (
        f"{ranks} ranks share {counted(site.gpus)} and MPS is off{f' ({why})' if why else ''}: their kernels run in "
        "turns, a time slice each, so small sizes are far slower (1 KB all_gather, 4 ranks on an H200: 0.85 ms, "
        "with MPS 0.25 ms). Before the run: nvidia-cuda-mps-control -d; after it: echo quit | nvidia-cuda-mps-control"
    )
    return [line]


def describe(rows: list[dict[str, Any]], gpus: int, site: Site) -> None:
    """Say in the rows what the ranks ran on, and in NCCL's which one it was."""
    for row in rows:
        row.update(peers="ranks", gpus=gpus, mps=site.has_mps)
        if row["backend"] in (_NCCL, _NCCL_CE) and site.nccl:
            row["library"] = f"NCCL {_version(site.nccl)}"


def fitting(
    baselines: Sequence[str], ranks: int, site: Site, required: Collection[str] = ()
) -> tuple[tuple[str, ...], list[str]]:
    """The baselines that can run on `site`, and a line for each that cannot.

    Raises:
        NotSupported: one that cannot is in `required`.
    """
    kept, notes = [], []
    for name in baselines:
        problem = _problem(name, ranks, site)
        if problem is None:
            kept.append(name)
        elif name in required:
            raise NotSupported(f"DOVETAIL_REQUIRE names {name}, but {problem}")
        else:
            notes.append(f"{name} left out: {problem}")
    return tuple(kept), notes


def _problem(name: str, ranks: int, site: Site) -> str | None:
    if name not in (_NCCL, _NCCL_CE):
        return None
    if site.nccl is None:
        return "this torch has no NCCL"
    if ranks > site.gpus:
        return f"NCCL needs a GPU for each rank, and {ranks} ranks share {counted(site.gpus)}"
    if name == _NCCL_CE and site.nccl < CE_SINCE:
        return f"NCCL {_version(site.nccl)} has no collectives on copy engines, 2.28 and newer have"
    return None


def _version(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def counted(gpus: int) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{gpus} GPU{'s' if gpus != 1 else ''}"
