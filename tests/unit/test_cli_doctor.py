"""`dovetail doctor` and the frame of the command: first line, exit status, record."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail import __version__, cli
from dovetail.errors import NotSupported
from dovetail.measure import doctor, openmpi, record


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "native", lambda: doctor.Finding(check="native part", value="built"))


@pytest.mark.usefixtures("healthy")
def test_doctor_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json", str(tmp_path / "d.json")) == 0
    rows = record.read(tmp_path / "d.json", kind="doctor").rows
    checks = [row["check"] for row in rows]
    assert checks[0] == "gpu"
    assert {"torch", "native part", "cores", "memory", "memlock", "container", "Open MPI", "profile"} <= set(checks)
    assert capsys.readouterr().out.startswith("gpu: ")


def test_an_essential_part_that_is_missing_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.system, "try_memfd", lambda: "Function not implemented")
    assert run("doctor") == 1
    assert "Function not implemented" in capsys.readouterr().out


TORCH_CPU = SimpleNamespace(__version__="2.13.0+cpu", version=SimpleNamespace(cuda=None, hip=None))
TORCH_BLIND = SimpleNamespace(
    __version__="2.13.0",
    version=SimpleNamespace(cuda="13.0", hip="7.1"),
    cuda=SimpleNamespace(is_available=lambda: False),
)
TORCH_GPU = SimpleNamespace(
    __version__="2.13.0",
    version=SimpleNamespace(cuda="13.0", hip=None),
    cuda=SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: "H200"),
)


@pytest.mark.parametrize(
    ("file", "torch", "state", "words"),
    [
        (None, TORCH_CPU, "ok", ["none found"]),
        ("dev/nvidia0", TORCH_CPU, "warning", ["NVIDIA GPU present", "built without CUDA", "make setup PYTHON="]),
        ("proc/driver/nvidia/version", TORCH_CPU, "warning", ["built without CUDA"]),
        ("dev/kfd", TORCH_CPU, "warning", ["AMD GPU present", "built without ROCm"]),
        ("dev/nvidia0", TORCH_BLIND, "warning", ["finds no device", "CUDA_VISIBLE_DEVICES"]),
        ("dev/kfd", TORCH_BLIND, "warning", ["finds no device", "HIP_VISIBLE_DEVICES"]),
        ("dev/nvidia0", TORCH_GPU, "ok", ["2 x H200", "CUDA 13.0"]),
        ("dev/nvidia0", None, "warning", ["no torch"]),
    ],
)
def test_gpu_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, torch: object, state: str, words: list[str]
) -> None:
    if file:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    finding = doctor.gpu(tmp_path)
    assert finding.state == state
    for word in words:
        assert word in f"{finding.value} {finding.mend}"


def test_native_part_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dovetail.hw.cpu._native", None)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    assert doctor.native().state == "failed"
    assert "C++ compiler" in doctor.native().mend
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    assert doctor.native().state == "warning"
    assert "needs Linux" in doctor.native().value


@pytest.mark.parametrize(("required", "state"), [("", "warning"), ("openmpi", "failed")])
def test_missing_open_mpi_fails_only_when_required(monkeypatch: pytest.MonkeyPatch, required: str, state: str) -> None:
    monkeypatch.setattr(openmpi, "find", lambda: None)
    monkeypatch.setenv("DOVETAIL_REQUIRE", required)
    assert doctor.open_mpi().state == state


def test_environment_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_ENGNIES", "2")
    assert "DOVETAIL_ENGNIES" in doctor.environment().value
    monkeypatch.setenv("DOVETAIL_TIMEOUT", "soon")
    assert doctor.environment().state == "failed"


def test_a_broken_profile_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.json").write_text("{}")
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "p.json"))
    finding = doctor.profile_in_force()
    assert finding.state == "warning"
    assert str(tmp_path / "p.json") in finding.value


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dovetail {__version__}\n"


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in cli.verbs())


@pytest.mark.parametrize("words", [("nonsense",), ("doctor", "--nonsense"), ("doctor", "--json")])
def test_usage_ends_with_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotSupported("not here"), 1), (ValueError("not so"), 2), (FileNotFoundError("not there"), 2)],
)
def test_an_error_that_escapes_is_a_message_and_a_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert run("doctor") == status
    assert capsys.readouterr().err == f"dovetail: {error}\n"


@pytest.mark.usefixtures("healthy")
def test_record_that_cannot_be_written_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run("doctor", "--json", str(tmp_path / "file" / "d.json")) == 2
