"""What is on a GPU, asked of management libraries made up for the test."""

import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dovetail.errors import NotSupported
from dovetail.measure import cgroup, gpu, machine

CUDA_UUID = bytes(range(0xF0, 0x100))
CUDA_TEXT = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff"
HIP_UUID = b"18f68e602b8a790f"
OTHER_PID = 1 << 22  # above what Linux gives out by default, so that nobody has it


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """The calls that `gpu` makes; what is not defined here raises AttributeError, as an older package does."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.nvmlMemory_v2 = 0x02000028
        self.users = 0
        self.used_bytes = 0
        self.compute: list[tuple[int, int | None]] | None = []
        self.graphics: list[tuple[int, int | None]] = []
        self.link = (5, 16)
        self.busy = 0
        self.compute_mode = 0
        self.energy: int | None = 1000
        self.names = {OTHER_PID: "/usr/bin/python3", 1: "/sbin/init"}

    def nvmlInit(self) -> None:
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        assert index == 0
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, text: bytes) -> str:
        if text != CUDA_TEXT.encode():
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetHandleByPciBusId(self, text: bytes) -> str:
        if text != b"0000:9b:00.0":
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return CUDA_TEXT

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetMemoryInfo(self, handle: str, version: int | None = None) -> Any:
        assert version == self.nvmlMemory_v2
        return SimpleNamespace(total=141 << 30, used=self.used_bytes)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return self.link[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return self.link[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=self.busy, memory=0)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return {1: 345, 2: 3201}[kind]

    def nvmlDeviceGetComputeMode(self, handle: str) -> int:
        return self.compute_mode

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [0, 0]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if self.energy is None:
            raise NVMLError("Not Supported")
        return self.energy

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if self.compute is None:
            raise NVMLError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.graphics]

    def nvmlSystemGetProcessName(self, pid: int) -> bytes:
        if pid not in self.names:
            raise NVMLError("Not Found")
        return self.names[pid].encode()


class FakeAmdSmi(ModuleType):
    AmdSmiException = NVMLError

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.processes = [
            {"pid": os.getpid(), "name": "us", "memory_usage": {"vram_mem": 1 << 30}},
            {"pid": 1, "name": "/sbin/init", "memory_usage": {"vram_mem": 1 << 30}},
            {"pid": 2, "name": "of another GPU", "memory_usage": {"vram_mem": 0}},
        ]

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["0x1", "0x18F68E602B8A790F"]

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, Any]:
        return {"asic_serial": handle, "market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_vram_usage(self, handle: str) -> dict[str, int]:
        return {"vram_total": 196592, "vram_used": 300}

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[dict[str, Any]]:
        assert handle == "0x18F68E602B8A790F"
        return self.processes


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> FakeAmdSmi:
    fake = FakeAmdSmi()
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    return fake


@pytest.mark.parametrize("device", [CUDA_UUID, CUDA_TEXT, "0000:9b:00.0"], ids=["bytes", "uuid", "bus-id"])
def test_a_device_is_found_by_any_of_its_names(nvml: FakeNvml, device: gpu.Device) -> None:
    with gpu.card(device) as found:
        assert isinstance(found, gpu.Nvml)
        assert found.ask("GetName") == "NVIDIA H200"
        assert found.ask("GetSomethingNew") is None
        assert nvml.users == 1
    found.close()
    assert nvml.users == 0


def test_an_unknown_device_lets_nvml_go(nvml: FakeNvml) -> None:
    with pytest.raises(NotSupported, match="GPU-00010203.*nvidia-smi -L"):
        gpu.card(bytes(range(16)))
    assert nvml.users == 0


@pytest.mark.usefixtures("nvml")
def test_a_name_of_another_length_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="16 bytes.*got 3"):
        gpu.card(b"abc")


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NotSupported, match="pip install nvidia-ml-py"):
        gpu.card(CUDA_UUID)
    assert gpu.processes(CUDA_UUID) is None
    assert "nvidia-ml-py" in gpu.describe(CUDA_UUID)["missing"]


def test_no_driver(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    with pytest.raises(NotSupported, match="Driver Not Loaded.*libnvidia-ml"):
        gpu.card(CUDA_UUID)


def test_processes_once_each_and_without_us(nvml: FakeNvml) -> None:
    nvml.compute = [(os.getpid(), 5), (OTHER_PID, 2 << 30), (7, 1)]
    nvml.graphics = [(OTHER_PID, 2 << 30)]
    nvml.names[7] = "/usr/bin/nvidia-cuda-mps-server"
    assert gpu.processes(CUDA_UUID) == [gpu.GpuProcess(pid=OTHER_PID, name="python3", used_bytes=2 << 30)]
    assert gpu.processes(CUDA_UUID, ours=[OTHER_PID]) == []


def test_numbers_of_another_namespace_are_marked(nvml: FakeNvml) -> None:
    nvml.compute, nvml.names = [(OTHER_PID, None)], {}
    assert gpu.processes(CUDA_UUID) == [gpu.GpuProcess(pid=OTHER_PID, name="?", used_bytes=None, visible=False)]


@pytest.mark.parametrize("hidden", ["refused", "memory-without-owner"])
def test_hidden_processes_are_unknown_and_do_not_refuse(
    nvml: FakeNvml, hidden: str, caplog: pytest.LogCaptureFixture
) -> None:
    if hidden == "refused":
        nvml.compute = None
    else:
        nvml.used_bytes = 1 << 30
    assert gpu.processes(CUDA_UUID) is None
    with caplog.at_level(logging.WARNING):
        gpu.refuse_if_busy(CUDA_UUID)
    assert "cannot be told" in caplog.text


def test_a_busy_gpu_is_refused_unless_forced(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.compute = [(1, 3 << 30)]
    with pytest.raises(NotSupported, match=r"init \(pid 1, 3 GiB\).*--force"):
        gpu.refuse_if_busy(CUDA_UUID)
    with caplog.at_level(logging.WARNING):
        gpu.refuse_if_busy(CUDA_UUID, force=True)
    assert "nevertheless" in caplog.text


def test_what_may_be_ourselves_does_not_refuse(nvml: FakeNvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.compute = [(OTHER_PID, 3 << 30)]
    with caplog.at_level(logging.WARNING):
        gpu.refuse_if_busy(CUDA_UUID)
    assert str(OTHER_PID) in caplog.text


def test_a_free_gpu_is_taken(nvml: FakeNvml) -> None:
    nvml.used_bytes = 4 << 20
    gpu.refuse_if_busy(CUDA_UUID)


@pytest.mark.usefixtures("amd")
def test_amd_processes_and_facts() -> None:
    assert gpu.processes(HIP_UUID) == [gpu.GpuProcess(pid=1, name="init", used_bytes=1 << 30)]
    facts = gpu.describe(HIP_UUID, num_multiprocessors=304)
    assert (facts["name"], facts["num_multiprocessors"]) == ("AMD Instinct MI300X", 304)
    assert facts["memory_bytes"] == 196592 << 20
    assert facts["energy_counter"] is False


def test_amd_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(NotSupported, match="amdsmi"):
        gpu.card(HIP_UUID)


def test_describe(nvml: FakeNvml) -> None:
    facts = gpu.describe(CUDA_UUID, num_multiprocessors=132)
    assert (facts["name"], facts["uuid"], facts["driver"], facts["cuda"]) == ("NVIDIA H200", CUDA_TEXT, "580.1", "13.1")
    assert (facts["pcie_generation"], facts["pcie_max_width"], facts["power_limit_w"]) == (5, 16, 700)
    assert (facts["sm_clock_mhz"], facts["memory_clock_mhz"], facts["sm_max_clock_mhz"]) == (345, 3201, None)
    assert (facts["compute_mode"], facts["mig"], facts["persistence"]) == ("default", False, None)
    assert facts["energy_counter"] is True
    assert facts["num_multiprocessors"] == 132
    assert nvml.users == 0


@pytest.mark.parametrize(
    ("memory", "limit", "available", "expected"),
    [(100, None, None, 10), (100, 50, None, 5), (100, 50, 3, 3), (None, None, None, 256 << 20)],
    ids=["machine", "container", "little-left", "unknown"],
)
def test_a_tenth_of_the_memory_may_be_pinned(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, limit: int | None, available: int | None, expected: int
) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: memory)
    monkeypatch.setattr(cgroup, "limits", lambda: cgroup.Limits(memory_bytes=limit))
    monkeypatch.setattr(gpu, "available_bytes", lambda: available)
    assert gpu.pin_limit_bytes() == expected


def test_as_much_as_asked_may_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1 << 30)
    assert gpu.pin_limit_bytes(1 << 29) == 1 << 29
    for asked in (0, 1 << 31):
        with pytest.raises(ValueError, match="at most 1 GiB"):
            gpu.pin_limit_bytes(asked)


def test_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert gpu.mps(tmp_path / "none") == "off"
    (tmp_path / "control").touch()
    assert gpu.mps(tmp_path).startswith("on ")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "elsewhere"))
    assert gpu.mps(tmp_path).startswith("off: CUDA_MPS_PIPE_DIRECTORY")


@pytest.mark.parametrize(
    ("link", "busy", "state", "words"),
    [((5, 16), 0, "ok", "generation 5 x16"), ((1, 16), 0, "ok", "idle"), ((5, 8), 90, "warning", "at most 5 x16")],
    ids=["best", "idle", "busy"],
)
def test_a_slow_link_is_a_warning_only_when_busy(
    nvml: FakeNvml, link: tuple[int, int], busy: int, state: str, words: str
) -> None:
    nvml.link, nvml.busy = link, busy
    found = {line.check: line for line in gpu.findings()}["gpu 0 link"]
    assert found.state == state
    assert words in found.value


def test_findings(nvml: FakeNvml) -> None:
    nvml.compute, nvml.energy, nvml.compute_mode = [(1, None)], None, 3
    lines = {line.check: line for line in gpu.findings()}
    assert "H200" in lines["gpu 0"].value
    assert "580.1" in lines["gpu 0"].value
    assert lines["gpu 0 energy"].state == "warning"
    assert "init (pid 1, memory unknown)" in lines["gpu 0 processes"].value
    assert lines["gpu 0 compute mode"].value == "exclusive process"
    assert "MPS" in lines
    assert nvml.users == 0


def test_findings_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.findings(driver_there=False) == []
    (line,) = gpu.findings(driver_there=True)
    assert line.state == "warning"
    assert "pip install nvidia-ml-py" in line.value
