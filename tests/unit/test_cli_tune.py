"""`dovetail tune` around the measuring: what is kept when it is ended, its time, and what it does to an old profile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dovetail import cli, profile
from dovetail.bench import runner, tune
from dovetail.bench.fused import ranks as fused_ranks
from dovetail.bench.spec import OUT_OF_TIME
from dovetail.errors import PeerError
from dovetail.measure import machine, record


def row(ranks: int, size_bytes: int = 1024, **more: Any) -> dict[str, Any]:
    same = {"collective": "all_gather", "backend": "cpu", "variant": "pcpy", "requested": "pcpy", "ranks": ranks}
    return same | {"size_bytes": size_bytes, "time_us": 3.0, "correct": True} | more


def fused(ranks: int) -> dict[str, Any]:
    return {"op": "gemm_all_to_all", "backend": "cpu", "ranks": ranks, "operations": 64, "size_bytes": 64,
            "dtype": "float32", "times_us": {"unfused": 100.0, "store": 50.0}, "correct": True}  # fmt: skip


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "profile.json"
    monkeypatch.setenv("DOVETAIL_PROFILE", str(path))
    return path


def ranks_that_end(monkeypatch: pytest.MonkeyPatch, last: int, error: BaseException) -> None:
    """Measures numbers of ranks below `last`; with that many it ends."""

    def rows_of(spec: Any, made: Any) -> list[dict[str, Any]]:
        if spec.ranks == last:
            raise error
        return [made(spec.ranks)]

    monkeypatch.setattr(runner, "run", lambda spec, *_: runner.Outcome(rows=rows_of(spec, row)))
    monkeypatch.setattr(fused_ranks, "measure", lambda spec, _: fused_ranks.Measured(rows_of(spec, fused), []))


def ended(*words: str) -> int:
    with pytest.raises(SystemExit) as ends:
        cli.main(["tune", *words])
    return int(ends.value.code or 0)


@pytest.mark.parametrize("only", ["coll", "fused"])
def test_numbers_of_ranks_that_were_done_are_kept(
    only: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ranks_that_end(monkeypatch, 4, KeyboardInterrupt())
    out = tmp_path / "tune.json"
    assert ended("--only", only, "--ranks", "2,3,4,8", "--json", str(out)) == cli.INTERRUPTED
    found, _ = profile.load(file, machine.profile_key())
    assert found is not None
    table = found.sections[only]["cpu"]["all_gather" if only == "coll" else "gemm_all_to_all"]
    assert set(table) == {"2", "3"}
    said = capsys.readouterr().err
    assert "ended early: what was measured with 2, 3 ranks is kept; with 4, 8 it is not done" in said
    assert f"dovetail: interrupted; what was done is in {tmp_path / 'tune.partial.json'}, {file}" in said
    assert not out.exists()  # a part is no record of all
    assert [row["ranks"] for row in record.read(tmp_path / "tune.partial.json").rows] == [2, 3]


@pytest.mark.parametrize("only", ["coll", "fused"])
def test_interrupted_in_the_first_nothing_is_saved(
    only: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks_that_end(monkeypatch, 2, KeyboardInterrupt())
    assert ended("--only", only, "--ranks", "2,4") == cli.INTERRUPTED
    assert "dovetail: interrupted; nothing was saved" in capsys.readouterr().err
    assert not file.exists()


def test_a_rank_that_fails_does_not_lose_the_others(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks_that_end(monkeypatch, 4, PeerError("rank 3 is gone", rank=3))
    assert ended("--ranks", "2,4") == cli.FAILED
    said = capsys.readouterr().err
    assert "with 2 ranks is kept; with 4 it is not done" in said
    assert "dovetail: rank 3 is gone" in said
    assert set(json.loads(file.read_text())["sections"]["coll"]["cpu"]["all_gather"]) == {"2"}


@pytest.mark.parametrize(
    ("words", "seconds"),
    [("", 120.0), ("--ranks 2", 60.0), ("--ranks 2,4,8", 180.0), ("--ranks 2,4 --budget 60s", 60.0)],
    ids=["usual", "one", "three", "given"],
)
def test_the_usual_time_grows_with_the_numbers_of_ranks(
    words: str, seconds: float, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def measure(ranks: list[int], sizes: list[int], budget_s: float, *_: Any) -> None:
        asked.append(budget_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "measure", measure)
    assert ended(*words.split()) == cli.INTERRUPTED
    assert asked == [seconds]
    assert not file.exists()


def test_cases_that_no_time_was_left_for_name_the_budget(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the choices beyond them are told as the shipped default's."""
    note = f"{OUT_OF_TIME}: 1 of 2 cases were not measured"
    monkeypatch.setattr(runner, "run", lambda spec, *_: runner.Outcome(rows=[row(spec.ranks)], notes=[note]))
    assert ended("--ranks", "4", "-b", "1K", "-e", "4K") == cli.OK
    assert f"note: 4 ranks: {note}; a longer --budget has them" in capsys.readouterr().err
    here, _ = profile.load(file, machine.profile_key())
    assert here is not None
    assert profile.choose("all_gather", 4, 1024, profile=here).reason.endswith("up to 1 KiB, measured 3 us at 1 KiB")
    beyond = profile.choose("all_gather", 4, 2048, profile=here)
    assert beyond.variant == profile.choose("all_gather", 4, 2048).variant
    assert "not measured above 1 KiB (tune ran out of time), shipped default" in beyond.reason


def test_a_truncated_profile_is_kept_under_another_name(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ranks_that_end(monkeypatch, 0, KeyboardInterrupt())
    assert ended("--ranks", "2") == cli.OK
    part = file.read_text()[:50]
    file.write_text(part)
    assert ended("--ranks", "4") == cli.OK
    assert file.with_name("profile.old.json").read_text() == part
    assert f"{file} is kept as profile.old.json: it cannot be read" in caplog.text
    assert set(json.loads(file.read_text())["sections"]["coll"]["cpu"]["all_gather"]) == {"4"}
