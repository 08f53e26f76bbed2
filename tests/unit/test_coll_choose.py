"""What `auto` takes for a call by rank 0's profile, and how `explain` says it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dovetail
from dovetail import profile
from dovetail.coll import api, choose
from dovetail.measure import doctor, machine

COLL = {"cpu": {"all_to_all": {"2": [[None, "pull", 896.358]], "4": [[None, "pcpy", 5.0]]}}}
POINTS = {"cpu": {"all_to_all": {"2": [[65536, "pull", 1.733], [65536, "b2b", 2.0], [16 << 20, "pull", 896.358]]}}}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    sections = {"coll": COLL, "points": POINTS}
    return profile.save(profile.Profile(key=machine.profile_key([2, 4]), sections=sections, date="then"))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of as many ranks as a test says, of which rank 0 has told what it has."""
    for name in ("DOVETAIL_DISABLE", "DOVETAIL_VARIANT"):
        monkeypatch.delenv(name, raising=False)
    made = SimpleNamespace(size=2, world=SimpleNamespace(local=True, notices=[b"{}"]))
    monkeypatch.setattr(api, "group_of", lambda _: made)
    return made


def explained(group: SimpleNamespace, ranks: int, *call: Any) -> choose.Choice:
    group.size, group.world.notices = ranks, [choose.notice()]
    return dovetail.explain(*call)


@pytest.mark.usefixtures("tuned")
def test_a_time_is_quoted_with_the_size_that_it_was_measured_at(group: SimpleNamespace) -> None:
    assert explained(group, 2, "all_to_all", 65536) == (
        "pull", "profile of then, 2 ranks, larger sizes, measured 1.733 us at 64 KiB"
    )  # fmt: skip
    assert explained(group, 2, "all_to_all", 8 << 20).reason.endswith("measured 896.4 us at 16 MiB")


@pytest.mark.usefixtures("tuned")
def test_the_nearest_number_of_ranks_chooses_and_is_named(group: SimpleNamespace) -> None:
    assert explained(group, 3, "all_to_all", 1024).variant == "pull"
    assert explained(group, 3, "all_to_all", 1024).reason.startswith("profile of then, 2 ranks (nearest to 3), ")
    wanted = "profile of then, 4 ranks (nearest to 16), larger sizes"
    assert explained(group, 16, "all_to_all", 1024) == ("pcpy", wanted)


def test_why_a_profile_is_ignored_is_in_the_reason_and_told_by_the_doctor(
    tuned: Path, group: SimpleNamespace
) -> None:
    data = json.loads(tuned.read_text())
    data["key"]["versions"]["torch"] = "1.0"
    tuned.write_text(json.dumps(data))
    reason = explained(group, 3, "all_to_all", 1024).reason
    wanted = "shipped default, 2 ranks (nearest to 3), larger sizes; the profile is ignored: it is stale: measured with"
    assert reason.startswith(f"{wanted} torch 1.0, ")
    found = doctor.profile_in_force()
    assert found.state is doctor.State.WARNING
    assert f"profile {tuned} ignored: it is stale: measured with torch 1.0" in found.value
    tuned.write_text(tuned.read_text()[:100])
    assert "the profile is ignored: it cannot be read" in explained(group, 3, "all_to_all", 1024).reason
    assert "it cannot be read" in doctor.profile_in_force().value


def test_without_a_profile_there_is_nothing_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: SimpleNamespace
) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "none.json"))
    assert explained(group, 2, "all_to_all", 1).reason == "shipped default, 2 ranks, larger sizes"


def test_only_other_sections_were_measured(tuned: Path, group: SimpleNamespace) -> None:
    """Such as the self-test: the shipped default chooses, and it is not said to be the profile's choice."""
    here, _ = profile.load(tuned, machine.profile_key())
    assert here is not None
    profile.save(replace(here, sections={"selftest": {}}))
    wanted = "shipped default, 2 ranks, larger sizes; the profile of then has no figures for it"
    assert explained(group, 2, "all_to_all", 1).reason == wanted


@pytest.mark.usefixtures("tuned")
@pytest.mark.parametrize(
    ("ours", "function"),
    [
        ("all_gather", dovetail.all_gather_into_tensor),
        ("all_to_all", dovetail.all_to_all_single),
        ("all_reduce", dovetail.all_reduce),
        ("reduce_scatter", dovetail.reduce_scatter_tensor),
        ("broadcast", dovetail.broadcast),
        ("gather", dovetail.gather),
        ("scatter", dovetail.scatter),
        ("barrier", dovetail.barrier),
    ],
)
def test_a_function_is_explained_by_its_name_too(ours: str, function: Any, group: SimpleNamespace) -> None:
    name = function.__name__
    assert explained(group, 2, name, 4096) == explained(group, 2, ours, 4096)
    assert api.variants(name) == api.variants(ours)


def test_an_unknown_name_lists_both_sorts(group: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="no collective 'all_sing'; there are all_gather, .*all_gather_into_tensor"):
        explained(group, 2, "all_sing", 1)
