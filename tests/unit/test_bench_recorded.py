"""The cases under benchmarks/ are commands that work, and the recorded results are records of them."""

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dovetail import cli
from dovetail.bench import phases, runner
from dovetail.bench.fused import ranks as between
from dovetail.bench.gpu import session, sharing
from dovetail.cli import doctor
from dovetail.measure import record

FOLDER = Path(__file__).parents[2] / "benchmarks"
CASES = tomllib.loads((FOLDER / "cases.toml").read_text())["case"]
NAMES = [case["name"] for case in CASES]


class Accepted(Exception):
    """The command line was understood."""


def accept(*_: object, **__: object) -> Any:
    raise Accepted


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_command_is_understood(case: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "run", accept)
    monkeypatch.setattr(phases, "measure", accept)
    monkeypatch.setattr(session, "Session", accept)
    monkeypatch.setattr(sharing, "survey", accept)
    monkeypatch.setattr(between, "measure", accept)
    monkeypatch.setattr(doctor, "_gpu_backend", lambda: "cuda")
    monkeypatch.setattr(doctor, "_prove", accept)
    monkeypatch.setattr(doctor, "_selftest", accept)
    program, *words = shlex.split(case["command"])
    if program == "python":
        assert (FOLDER.parent / (words[1].replace(".", "/") + ".py")).is_file()
        return
    assert program == "dovetail"
    with pytest.raises(Accepted):
        cli.main(words)


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def test_results_are_records_of_their_cases() -> None:
    commands = {case["name"]: case["command"] for case in CASES}
    for path in (FOLDER / "results").glob("*.json"):
        found = record.read(path)
        assert found.command.startswith(commands[path.stem])
        assert not found.simulated
        assert found.rows
        assert all(row.get("correct", True) for row in found.rows)
