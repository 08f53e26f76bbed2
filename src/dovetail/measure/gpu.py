"""What is on a GPU and how it is set: other processes, link, clocks, power limit, MPS.

Owns the way to the management libraries, NVML (package nvidia-ml-py) and AMD SMI (package amdsmi), both optional and
loaded when first asked. Everything here reads: no clock, limit or mode is ever set, and no GPU context is made.

A `Device` is what the driver calls it, the 16 bytes of `Driver.device_uuid`, because CUDA_VISIBLE_DEVICES gives devices
other numbers than NVML does. Text works too: "GPU-...", "MIG-..." or a PCI bus id.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from dovetail.errors import NotSupported
from dovetail.hw.memory import available_bytes
from dovetail.measure import cgroup, machine
from dovetail.measure.sizes import approximate_bytes

Device = bytes | str

_log = logging.getLogger(__name__)

#: Memory in use that no listed process owns is somebody's from here on; drivers keep a little for themselves.
_SOMEBODY_BYTES = 64 << 20
_PINNED_SHARE = 0.1
_PINNED_UNKNOWN_BYTES = 256 << 20
_BUSY_PERCENT = 10


class Nvml:
    """One NVIDIA device as NVML sees it; an int is NVML's own index. `NotSupported` says what is missing."""

    def __init__(self, device: Device | int) -> None:
        try:
            self.library: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NotSupported("NVML needs the package nvidia-ml-py: pip install nvidia-ml-py") from None
        mismatch = getattr(self.library, "NVMLLibraryMismatchError", AttributeError)
        self._errors = (self.library.NVMLError, mismatch, AttributeError)
        try:
            self.library.nvmlInit()
        except self._errors as error:
            mend = "is the NVIDIA driver loaded, and its libnvidia-ml.so.1 in this container?"
            raise NotSupported(f"NVML does not start ({error}); {mend}") from None
        self._open = True
        try:
            self._handle = self._find(device)
        except BaseException:
            self.close()
            raise

    def _find(self, device: Device | int) -> Any:
        names: list[str | int] = [device] if not isinstance(device, bytes) else []
        if isinstance(device, bytes):
            names = [prefix + str(uuid.UUID(bytes=device)) for prefix in ("GPU-", "MIG-")]
        for name in names:
            kind = "Index" if isinstance(name, int) else "UUID" if name.startswith(("GPU-", "MIG-")) else "PciBusId"
            with contextlib.suppress(*self._errors):
                look_up = getattr(self.library, f"nvmlDeviceGetHandleBy{kind}")
                return look_up(name if isinstance(name, int) else name.encode())
        raise NotSupported(f"NVML knows no device {names[0]}; `nvidia-smi -L` lists those it knows")

    def ask(self, name: str, *arguments: object) -> Any:
        """The answer of ``nvmlDeviceNAME(device, ...)``, or None where device, driver or package does not have it."""
        try:
            answer = getattr(self.library, f"nvmlDevice{name}")(self._handle, *arguments)
        except self._errors:
            return None
        return answer.decode() if isinstance(answer, bytes) else answer

    def ask_system(self, name: str, *arguments: object) -> Any:
        """As `ask`, of ``nvmlSystemNAME(...)``."""
        try:
            answer = getattr(self.library, f"nvmlSystem{name}")(*arguments)
        except self._errors:
            return None
        return answer.decode(errors="replace") if isinstance(answer, bytes) else answer

    def memory(self) -> Any:
        """An object with ``total`` and ``used``, without the driver's own part where NVML tells it apart; or None."""
        version = getattr(self.library, "nvmlMemory_v2", None)
        return (self.ask("GetMemoryInfo", version) if version else None) or self.ask("GetMemoryInfo")

    def close(self) -> None:
        """Let NVML go; it counts its users, so others in this process keep theirs."""
        if self._open:
            self._open = False
            with contextlib.suppress(*self._errors):
                self.library.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Amd:
    """One AMD device as AMD SMI sees it, found by its serial number, which is what HIP gives as 16 characters.

    Written to the documented interface of amdsmi (ROCm 6 and 7).
    """

    def __init__(self, device: bytes) -> None:
        try:
            self.library: Any = importlib.import_module("amdsmi")
        except (ImportError, OSError, AttributeError, KeyError) as error:
            # The package raises any of these when ROCm's library is missing.
            raise NotSupported(f"AMD SMI needs the package amdsmi, a part of ROCm; it did not load: {error}") from None
        try:
            self.library.amdsmi_init()
            handles = self.library.amdsmi_get_processor_handles()
        except self.library.AmdSmiException as error:
            raise NotSupported(f"AMD SMI does not start ({error}); is the amdgpu driver loaded?") from None
        serial = device.decode("ascii").lower()
        for handle in handles:
            self._handle = handle
            found = str((self.ask("get_gpu_asic_info") or {}).get("asic_serial", "")).lower()
            if found.removeprefix("0x").zfill(16)[-16:] == serial:
                return
        raise NotSupported(f"AMD SMI knows no device of serial number {serial}; `amd-smi list` lists those it knows")

    def ask(self, name: str, *arguments: object) -> Any:
        """The answer of ``amdsmi_NAME(device, ...)``, or None where device, driver or package does not have it."""
        try:
            return getattr(self.library, f"amdsmi_{name}")(self._handle, *arguments)
        except (self.library.AmdSmiException, AttributeError):
            return None

    def close(self) -> None:
        """Nothing: AMD SMI does not count its users, and torch may be one of them."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def card(device: Device) -> Nvml | Amd:
    """The device in its vendor's management library, to be closed; raises `NotSupported` that says what is missing."""
    if isinstance(device, bytes):
        if len(device) != 16:
            raise ValueError(f"a device is named by 16 bytes, the driver's device_uuid, got {len(device)}")
        # HIP's 16 bytes are hexadecimal digits, CUDA's are random.
        if all(chr(byte) in "0123456789abcdefABCDEF" for byte in device):
            return Amd(device)
    return Nvml(device)


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """Somebody else who uses the GPU."""

    pid: int
    name: str
    """The program, without its path; "?" where it cannot be seen from here."""
    used_bytes: int | None
    """Memory of the GPU; None where the driver does not tell."""
    visible: bool = True
    """False for a process of another container or the host: the driver numbers it there. It may be this very one."""

    def __str__(self) -> str:
        used = "memory unknown" if self.used_bytes is None else approximate_bytes(self.used_bytes)
        return f"{self.name} (pid {self.pid}, {used})"


def processes(device: Device, *, ours: Collection[int] = ()) -> list[GpuProcess] | None:
    """Who else uses the device, for computing or graphics; None when that cannot be told.

    It cannot be told without the management library, where the driver refuses, or where memory is in use and nobody is
    listed for it: inside containers the driver often hides processes. This process, those in `ours` and the MPS server
    (its clients are listed themselves) are left out.
    """
    try:
        with card(device) as found:
            return _others(found, {os.getpid(), *ours})
    except NotSupported:
        return None


def _others(found: Nvml | Amd, own: Collection[int]) -> list[GpuProcess] | None:
    rows = _nvidia_rows(found) if isinstance(found, Nvml) else _amd_rows(found)
    if rows is None:
        return None
    listed = any(pid in own for pid, _, _ in rows)
    others = []
    for pid, name, used_bytes in rows:
        if pid in own or name == "nvidia-cuda-mps-server":
            continue
        visible = listed or Path(f"/proc/{pid}").exists()
        others.append(GpuProcess(pid=pid, name=name, used_bytes=used_bytes, visible=visible))
    return others


def _nvidia_rows(found: Nvml) -> list[tuple[int, str, int | None]] | None:
    """(pid, name, used_bytes) of all processes, ours too, once each; None when NVML hides them."""
    kinds = [found.ask(f"Get{kind}RunningProcesses") for kind in ("Compute", "Graphics", "MPSCompute")]
    if kinds[0] is None:
        return None
    used = {process.pid: process.usedGpuMemory for kind in kinds for process in kind or ()}
    memory = found.memory()
    if not used and memory is not None and memory.used > _SOMEBODY_BYTES:
        return None
    return [(pid, _program(found.ask_system("GetProcessName", pid)), used[pid]) for pid in sorted(used)]


def _amd_rows(found: Amd) -> list[tuple[int, str, int | None]] | None:
    listed = found.ask("get_gpu_process_list")
    if listed is None or not all(isinstance(row, dict) for row in listed):
        return None
    rows = []
    for row in listed:
        used = row.get("memory_usage", {}).get("vram_mem")
        if used:  # a process of another GPU is listed with no memory of this one
            rows.append((int(row["pid"]), _program(row.get("name")), int(used)))
    return sorted(rows)


def _program(path: str | None) -> str:
    return Path(path).name if path and path != "N/A" else "?"


def refuse_if_busy(device: Device, force: bool = False, *, ours: Collection[int] = ()) -> None:
    """Raise `NotSupported` when somebody else uses the device: neither their work nor our figures should suffer.

    Call it before the ranks start, or name them in `ours`. What cannot be told is logged and does not refuse; nor does
    anything with `force`.
    """
    others = processes(device, ours=ours)
    if others is None:
        _log.warning("whether other processes use the GPU cannot be told here; figures may be disturbed")
        return
    if hidden := [str(process) for process in others if not process.visible]:
        _log.warning("the GPU is used from outside of what can be seen here, or by this process: %s", ", ".join(hidden))
    if seen := [str(process) for process in others if process.visible]:
        message = f"the GPU is in use by {', '.join(seen)}"
        if not force:
            raise NotSupported(f"{message}; wait for it, choose another GPU, or measure nevertheless with --force")
        _log.warning("%s; measuring nevertheless, figures may be disturbed", message)


def pin_limit_bytes(asked: int | None = None) -> int:
    """How much host memory a measurement may pin: what was `asked` for, otherwise a tenth of this machine's memory.

    A container's limit counts as the machine's memory. Pinned memory cannot be swapped, so the rest of the machine has
    to live without it; for several ranks this is the sum.

    Raises:
        ValueError: `asked` is not above zero, or is more than there is.
    """
    known = [size for size in (machine.memory_bytes(), cgroup.limits().memory_bytes) if size is not None]
    if asked is not None:
        if asked <= 0 or (known and asked > min(known)):
            most = f", at most {approximate_bytes(min(known))} here" if known else ""
            raise ValueError(f"memory to pin must be above 0{most}, got {asked} bytes")
        return asked
    if not known:
        return _PINNED_UNKNOWN_BYTES
    left = available_bytes()
    share = int(min(known) * _PINNED_SHARE)
    return share if left is None else min(share, left)


def mps(default: Path = Path("/tmp/nvidia-mps")) -> str:
    """Whether CUDA's Multi-Process Service runs for this process: "on ...", "off", or why it is neither."""
    given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
    folder = Path(given) if given else default
    if (folder / "control").exists():
        return f"on (control daemon at {folder})"
    return f"off: CUDA_MPS_PIPE_DIRECTORY is {given}, but no control daemon is there" if given else "off"


def describe(device: Device, *, num_multiprocessors: int | None = None) -> dict[str, Any]:
    """The device as plain JSON for a record; what cannot be found is None, and all is None without the library.

    Clocks and link are those of this moment: at idle both are low. `num_multiprocessors` is the driver's to tell.
    """
    facts: dict[str, Any] = dict.fromkeys(_FACTS)
    facts.update(num_multiprocessors=num_multiprocessors, mps=mps())
    try:
        with card(device) as found:
            facts.update(_nvidia_facts(found) if isinstance(found, Nvml) else _amd_facts(found, device))
    except NotSupported as error:
        facts["missing"] = str(error)
    return facts


_FACTS = (
    "name", "uuid", "driver", "cuda", "memory_bytes", "pcie_generation", "pcie_width", "pcie_max_generation",
    "pcie_max_width", "power_limit_w", "power_default_limit_w", "sm_clock_mhz", "sm_max_clock_mhz", "memory_clock_mhz",
    "memory_max_clock_mhz", "persistence", "compute_mode", "mig", "energy_counter",
)  # fmt: skip


_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


def _nvidia_facts(found: Nvml) -> dict[str, Any]:
    ask, library = found.ask, found.library
    cuda, memory, mig = found.ask_system("GetCudaDriverVersion"), found.memory(), ask("GetMigMode")
    limit, default = ask("GetEnforcedPowerLimit"), ask("GetPowerManagementDefaultLimit")
    persistence = ask("GetPersistenceMode")
    return {
        "name": ask("GetName"),
        "uuid": ask("GetUUID"),
        "driver": found.ask_system("GetDriverVersion"),
        "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "memory_bytes": None if memory is None else memory.total,
        "pcie_generation": ask("GetCurrPcieLinkGeneration"),
        "pcie_width": ask("GetCurrPcieLinkWidth"),
        "pcie_max_generation": ask("GetMaxPcieLinkGeneration"),
        "pcie_max_width": ask("GetMaxPcieLinkWidth"),
        "power_limit_w": None if limit is None else limit / 1000,
        "power_default_limit_w": None if default is None else default / 1000,
        "sm_clock_mhz": ask("GetClockInfo", library.NVML_CLOCK_SM),
        "sm_max_clock_mhz": ask("GetMaxClockInfo", library.NVML_CLOCK_SM),
        "memory_clock_mhz": ask("GetClockInfo", library.NVML_CLOCK_MEM),
        "memory_max_clock_mhz": ask("GetMaxClockInfo", library.NVML_CLOCK_MEM),
        "persistence": None if persistence is None else bool(persistence),
        "compute_mode": _COMPUTE_MODES.get(ask("GetComputeMode")),
        "mig": None if mig is None else bool(mig[0]),
        "energy_counter": ask("GetTotalEnergyConsumption") is not None,
    }


def _amd_facts(found: Amd, device: Device) -> dict[str, Any]:
    asic, driver = found.ask("get_gpu_asic_info") or {}, found.ask("get_gpu_driver_info") or {}
    vram = found.ask("get_gpu_vram_usage") or {}
    total = vram.get("vram_total")
    return {
        "name": asic.get("market_name"),
        "uuid": device.decode("ascii") if isinstance(device, bytes) else device,
        "driver": driver.get("driver_version"),
        "memory_bytes": total << 20 if isinstance(total, int) else None,  # AMD SMI counts in MiB
        "energy_counter": found.ask("get_energy_count") is not None,
        "mps": None,
    }


class Line(NamedTuple):
    """One line for the doctor, in the order of its `Finding`: state is "ok" or "warning"."""

    check: str
    state: str
    value: str
    mend: str = ""


def findings(driver_there: bool | None = None) -> list[Line]:
    """What the doctor says of each NVIDIA GPU that NVML knows, by NVML's numbers; nothing where there is no driver."""
    if driver_there is None:
        driver_there = any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl")))
    try:
        with Nvml(0) as first:
            count = first.library.nvmlDeviceGetCount()
    except NotSupported as error:
        return [Line("gpu state", "warning", f"unknown: {error}")] if driver_there else []
    lines: list[Line] = []
    for index in range(count):
        with Nvml(index) as found:
            lines += _lines(f"gpu {index}", found)
    return [*lines, Line("MPS", "warning" if mps().startswith("off:") else "ok", mps())]


def _lines(label: str, found: Nvml) -> Iterator[Line]:
    facts = _nvidia_facts(found)
    size = approximate_bytes(facts["memory_bytes"]) if facts["memory_bytes"] else "memory unknown"
    limit = f", power limit {facts['power_limit_w']:g} W" if facts["power_limit_w"] else ""
    yield Line(label, "ok", f"{facts['name']}, {size}, driver {facts['driver']}, CUDA {facts['cuda']}{limit}")
    if facts["compute_mode"] not in (None, "default"):
        mend = "several ranks on this GPU need MPS, or the mode default, which its administrator can set"
        yield Line(f"{label} compute mode", "warning", facts["compute_mode"], mend)
    yield _link(f"{label} link", facts, found.ask("GetUtilizationRates"))
    if facts["energy_counter"]:
        yield Line(f"{label} energy", "ok", "NVML has a counter of joules")
    elif found.ask("GetPowerUsage") is not None:
        yield Line(f"{label} energy", "warning", "no counter of joules; power is sampled instead, which is coarser")
    else:
        yield Line(f"{label} energy", "warning", "neither joules nor watts can be read; no energy figures here")
    others = _others(found, {os.getpid()})
    if others is None:
        yield Line(f"{label} processes", "ok", "unknown: the driver does not show them here")
    elif others:
        mend = "measure when they are gone; a bench refuses meanwhile unless --force is given"
        yield Line(f"{label} processes", "warning", ", ".join(map(str, others)), mend)
    else:
        yield Line(f"{label} processes", "ok", "no others")


def _link(check: str, facts: dict[str, Any], utilization: Any) -> Line:
    """The PCIe link. Below its best it is a warning only when the GPU is busy: an idle link slows down by itself."""
    now, most = ((facts[f"pcie_{m}generation"], facts[f"pcie_{m}width"]) for m in ("", "max_"))
    if None in now or None in most:
        return Line(check, "ok", "unknown: NVML does not tell it here")
    if now == most:
        return Line(check, "ok", f"PCIe generation {now[0]} x{now[1]}")
    value = f"PCIe generation {now[0]} x{now[1]} now, at most {most[0]} x{most[1]}"
    if utilization is not None and utilization.gpu >= _BUSY_PERCENT:
        mend = "the GPU is busy and its link is below its best: look at the slot, the riser and the BIOS"
        return Line(check, "warning", value, mend)
    return Line(check, "ok", f"{value} (an idle link slows down)")
