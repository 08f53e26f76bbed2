"""Paths that a command would write to: one that can't be written is refused before there is any work."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from dovetail import cli
from dovetail.cli import _output
from dovetail.measure import doctor, record

COMMANDS = [
    "doctor --json",
    "doctor --selftest --backend cpu --json",
    "bench all_gather --json",
    "bench kv --json",
    "bench overlap --json",
    "bench fused --json",
    "bench fused --backend cuda --json",
    "phases --json",
    "tune --json",
    "tune --only fused --json",
    "simulate collective --json",
    "simulate whatif --json",
    "simulate network --shape ring:4 --json",
    "simulate fit --table none.json --json",
    "simulate fit --table none.json --output",
    "simulate astra --network none.yml --json",
    "simulate machines --json",
    "simulate collective --plot",
    "simulate whatif --plot",
    "simulate network --shape ring:4 --plot",
    "trace --machine mi300x -o",
]
LAUNCHERS = ("dovetail.launch", "dovetail.coll.launch", "dovetail.coll.spawn.launch")  # in this order: it is lazy
WORK = (
    *LAUNCHERS, "dovetail.bench.runner.run", "dovetail.measure.doctor.examine",
    "dovetail.bench.phases.measure", "dovetail.bench.kv.measure", "dovetail.bench.gpu.session.Session.__init__",
    "dovetail.sim.files.load", "dovetail.sim.files.names", "dovetail.sim.net.simulate", "dovetail.sim.tables.load",
)  # fmt: skip


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_refused_before_any_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("work has begun")

    for name in WORK:
        monkeypatch.setattr(name, work)
    (tmp_path / "file").touch()
    suffix = ".html" if command.endswith("--plot") else ".json"
    words = command.split()
    option = "--output" if words[-1] == "-o" else words[-1]
    for path in (tmp_path / f"file/out{suffix}", tmp_path / f"file/deeper/out{suffix}"):
        assert run(*words, str(path)) == cli.USAGE
        said = capsys.readouterr().err
        assert f"{option}: {path} can't be written: Not a directory" in said
    (tmp_path / f"folder{suffix}").mkdir()
    assert run(*words, str(tmp_path / f"folder{suffix}")) == cli.USAGE
    assert f"{option}: {tmp_path / f'folder{suffix}'} is a directory" in capsys.readouterr().err
    missing = tmp_path / f"none/deeper/out{suffix}"
    assert run(*words, str(missing)) == cli.USAGE
    said = capsys.readouterr().err
    told = f"can't be written: there is no folder {missing.parent}; make it, or name another"
    assert said == f"dovetail: {option}: {missing} {told}\n"
    if suffix != ".html":
        assert run(*words, "-") == cli.USAGE
        assert f"{option}: '-' is no file" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"file", f"folder{suffix}"}


@pytest.mark.parametrize("command", ["tune", "tune --only fused", "doctor --selftest --backend cpu"])
def test_a_profile_that_cannot_be_saved(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "file/p.json"))
    for name in LAUNCHERS:
        monkeypatch.setattr(name, None)
    assert run(*command.split()) == cli.USAGE
    assert f"DOVETAIL_PROFILE: {tmp_path / 'file/p.json'} can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/null", "--json: /dev/null is no ordinary file"),
        ("/proc/out.json", "--json: /proc/out.json can't be written"),
        ("x" * 300, "can't be written: File name too long"),
    ],
)
def test_places_that_take_no_file(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _output.check_file("--json", Path(path))
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_an_old_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    _output.check_file("--json", out)
    assert not list(tmp_path.iterdir())
    for _ in range(2):
        assert run("simulate", "machines", "--json", str(out)) == 0
    assert record.read(out).simulated
    monkeypatch.chdir(tmp_path)
    assert run("simulate", "collective", "-b", "1K", "-e", "1K", "--plot", "page.html") == 0
    assert (tmp_path / "page.html").exists()


def test_folders_above_the_profile_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its usual place are missing on a fresh machine."""
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "a/b/profile.json"))
    _output.profile_can_be_saved()
    assert not list(tmp_path.iterdir())


def test_a_folder_of_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for path, message in ((tmp_path / "file", "is no folder"), (tmp_path / "file/in", "can't be written")):
        assert run("bench", "overlap", "--plot", str(path)) == cli.USAGE
        assert f"--plot: {path} {message}" in capsys.readouterr().err
        assert run("simulate", "astra", "--network", "none.yml", "--write", str(path)) == cli.USAGE
        assert f"--write: {path} {message}" in capsys.readouterr().err


def test_an_error_at_the_end_names_the_path_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that of the file that is renamed in the end."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", ".out.json.7.tmp")

    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding(check="gpu", value="none")])
    monkeypatch.setattr(record, "write_json", full)
    out = tmp_path / "out.json"
    assert run("doctor", "--json", str(out)) == cli.USAGE
    assert capsys.readouterr().err == f"dovetail: --json: {out} can't be written: No space left on device\n"
