"""`dovetail doctor` and the frame of the command: first line, exit status, record."""

import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from dovetail import __version__, cli
from dovetail.coll.cases import Case
from dovetail.coll.selftest import Failure, Outcome
from dovetail.errors import NotSupported
from dovetail.hw.gpu import proof
from dovetail.measure import doctor, evidence, openmpi, record
from dovetail.measure import gpu as gpu_state


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


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("name", ["DOVETAIL_TRANSPORT", "DOVETAIL_VARIANT"])
def test_a_forced_choice_that_there_is_none_of(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding(check="gpu", value="none")])
    assert run("doctor") == 0
    monkeypatch.setenv(name, "quick")
    assert run("doctor") == 1
    assert f"{name}='quick' is " in capsys.readouterr().out


def test_a_broken_profile_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.json").write_text("{}")
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "p.json"))
    finding = doctor.profile_in_force()
    assert finding.state == "warning"
    assert str(tmp_path / "p.json") in finding.value


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dovetail {__version__}\n"


def test_runs_without_being_installed() -> None:
    command = [sys.executable, "-m", "dovetail", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"dovetail {__version__}\n"


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


def test_terminated_is_like_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the command has made is put away, and a second signal does not disturb that."""
    put_away = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            put_away.append(True)

    monkeypatch.setattr(doctor, "examine", work)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert run("doctor") == cli.TERMINATED == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "dovetail: terminated; nothing was saved\n"
    assert put_away == [True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_the_gpu_library_says_is_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    line = gpu_state.Line("gpu 0 processes", "warning", "python (pid 7)", "wait")
    monkeypatch.setattr(gpu_state, "findings", lambda: [line])
    found = doctor.gpu_details()
    assert [(f.check, f.state, f.value, f.mend) for f in found] == [tuple(line)]


class Driver:
    version = 13000

    def device_name(self, device: int) -> str:
        return "H200"

    def num_devices(self) -> int:
        return 1

    def device_uuid(self, device: int) -> bytes:
        return bytes(16)

    def num_multiprocessors(self, device: int) -> int:
        return 132


@pytest.fixture
def h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU for the doctor's eyes, and a profile of its own."""
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "p.json"))
    monkeypatch.setattr("dovetail.hw.gpu.driver.load", lambda _: Driver())
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)


@pytest.mark.usefixtures("h200")
def test_proof_and_self_test_are_asked_for_until_they_hold() -> None:
    before = doctor.gpu_evidence()
    assert [(f.check, f.state) for f in before] == [("engines", "warning"), ("self-test", "warning")]
    assert "dovetail doctor --prove" in before[0].mend
    assert "dovetail doctor --selftest" in before[1].mend
    paths = {"h2d": "copy engine", "d2d": "SM kernel"}
    evidence.save(evidence.ENGINES, "cuda", evidence.stamped("H200", 13000, {"paths": paths}))
    evidence.save(evidence.SELFTEST, "cuda", evidence.stamped("H200", 13000, {"passed": True, "ranks": 4}))
    after = doctor.gpu_evidence()
    assert [f.state for f in after] == ["ok", "ok"]
    assert "h2d: copy engine, d2d: SM kernel" in after[0].value
    assert "4 ranks" in after[1].value
    evidence.save(evidence.SELFTEST, "cuda", evidence.stamped("H200", 13000, {"passed": False, "failures": ["x"]}))
    assert doctor.gpu_evidence()[1].value.endswith(": x")
    evidence.save(evidence.ENGINES, "cuda", evidence.stamped("H200", 12080, {"paths": paths}))
    assert doctor.gpu_evidence()[0].state == "warning"


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("who", "status"), [("copy engine", 0), ("SM kernel", 0), ("unproved", 1)])
def test_prove(
    who: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = proof.Trial(path="h2d", form="batch", size_bytes=4096, who=proof.Who(who))
    device = SimpleNamespace(name="H200", driver=Driver())
    monkeypatch.setattr("dovetail.hw.gpu.device.Device", lambda backend: nullcontext(device))
    monkeypatch.setattr("dovetail.hw.gpu.proof.prove", lambda device: {"h2d": proof.summed("h2d", [trial])})
    assert run("doctor", "--prove", "--json", str(tmp_path / "r.json")) == status
    assert f"h2d: {who}" in capsys.readouterr().out
    assert evidence.found(evidence.ENGINES, "cuda")["paths"] == {"h2d": who}
    made = record.read(tmp_path / "r.json", kind="proof")
    assert made.rows == [{"path": "h2d", "form": "batch", "size_bytes": 4096, "who": who, "why": ""}]
    assert made.machine["gpu"]["num_multiprocessors"] == 132
    assert "uuid" not in made.machine["gpu"]


@pytest.mark.usefixtures("h200")
def test_prove_refuses_while_others_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = gpu_state.GpuProcess(pid=7, name="python", used_bytes=None)
    monkeypatch.setattr(gpu_state, "processes", lambda device, ours=(): [other])
    assert run("doctor", "--prove") == 1
    assert "in use by python (pid 7" in capsys.readouterr().err


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("backend", ["cuda", "cpu"])
@pytest.mark.parametrize("good", [True, False])
def test_selftest(
    backend: str, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Case(collective="gather", variant="pull")
    failures = [] if good else [Failure(case=case, rank=1, text="3 of 8 bytes are wrong")]

    def run_it(backend: str, ranks: int, **_: object) -> Outcome:
        return Outcome(backend=backend, ranks=ranks, seed=1, cases=[case], failures=failures)

    monkeypatch.setattr("dovetail.coll.selftest.run", run_it)
    words = ["doctor", "--selftest", "--backend", backend, "--json", str(tmp_path / "r.json")]
    assert run(*words) == (0 if good else 1)
    out = capsys.readouterr().out
    assert ("self-test passed" if good else "FAILED gather pull") in out
    entry = evidence.found(evidence.SELFTEST, backend)
    if backend == "cpu":
        assert not entry  # no gate is closed on the CPU
    else:
        assert (entry["passed"], entry["ranks"], entry["device"], entry["driver"]) == (good, 2, "H200", 13000)
    (row,) = record.read(tmp_path / "r.json", kind="selftest").rows
    assert (row["cases"], row["failed"]) == (1, 0 if good else 1)


@pytest.mark.parametrize(
    "words",
    [
        ("--prove", "--backend", "tpu"),
        ("--prove", "--backend", "cpu"),
        ("--selftest", "--backend", "cpu", "--ranks", "1"),
        ("--selftest", "--prove", "--json", "r.json"),
    ],
)
def test_bad_options_end_with_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", *words) == 2
    assert capsys.readouterr().err.startswith("dovetail: ")


@pytest.mark.parametrize(
    ("words", "others"),
    [
        ("--ranks 4", "--selftest"),
        ("--prove --ranks 4", "--selftest"),
        ("--timeout 5", "--selftest"),
        ("--selftest --backend cpu --force", "--prove"),
        ("--backend cpu", "--prove and --selftest"),
    ],
)
def test_an_option_without_what_it_is_for_is_refused(
    words: str, others: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", *words.split()) == 2
    assert capsys.readouterr().err.strip().endswith(f" is for {others}")


@pytest.mark.usefixtures("healthy")
def test_record_that_cannot_be_written_ends_with_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run("doctor", "--json", str(tmp_path / "file" / "d.json")) == 2
