"""Profiles: what is loaded, what is named and ignored, and what is chosen."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail import profile
from dovetail.profile import Key, Profile

KEY = Key(device="cpu A, 2 cores", driver="Linux 6", ranks=(2, 4), versions={"dovetail": "0.1.0", "torch": "2.13.0"})
COLL = {
    "cpu": {
        "all_gather": {
            "2": [[32768, "b2b", 2.5], [None, "pcpy", 900.0]],
            "4": [[1 << 20, "bcst", 9], [None, "b2b"]],
            "8": [[None, "pull"]],
        }
    }
}
POINTS = {
    "cpu": {
        "all_gather": {
            "2": [[1024, "b2b", 2.5], [1024, "pcpy", 3.0], [16384, "b2b", 4.125], [65536, "pcpy", 9.0],
                  [65536, "b2b", 12.0], [16 << 20, "pcpy", 12345.6]],
            "4": [[1 << 20, "bcst", 9]],
        }
    }
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return profile.save(Profile(key=KEY, sections={"coll": COLL, "kv": {"x": 1}}), tmp_path / "d" / "p.json")


def test_round_trip(saved: Path) -> None:
    found, reason = profile.load(saved, replace(KEY, ranks=(2,)))
    assert found is not None
    assert (found.key, dict(found.sections)) == (KEY, {"coll": COLL, "kv": {"x": 1}})
    assert found.date in reason
    assert os.listdir(saved.parent) == ["p.json"]


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (replace(KEY, device="cpu B"), "another device"),
        (replace(KEY, driver="Linux 7"), "stale.*Linux 6.*Linux 7"),
        (replace(KEY, versions={"dovetail": "0.2.0", "torch": "2.13.0"}), "stale.*dovetail 0.1.0.*0.2.0"),
        (replace(KEY, versions={"dovetail": "0.1.0"}), "stale.*torch 2.13.0.*none"),
    ],
    ids=["foreign", "driver", "version", "gone"],
)
def test_stale_or_foreign_is_named_and_ignored(saved: Path, wanted: Key, reason: str) -> None:
    found, why = profile.load(saved, wanted)
    assert found is None
    assert str(saved) in why
    assert "ignored" in why
    assert re.search(reason, why)


def test_a_profile_serves_numbers_of_ranks_that_it_has_no_figures_for(saved: Path) -> None:
    found, _ = profile.load(saved, replace(KEY, ranks=(3, 8)))
    assert found is not None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": "dovetail.profile/2"}', '{"schema": "dovetail.profile/1"}', "\xff"],
)
def test_broken_file_is_named_and_ignored(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_bytes(text.encode("latin-1"))
    found, why = profile.load(path, KEY)
    assert found is None
    assert str(path) in why
    assert "ignored" in why


@pytest.mark.parametrize(
    "rows",
    [[], [[1024, "a"]], [[None, "a"], [None, "b"]], [[2, "a"], [1, "b"], [None, "c"]], [["x", "a"]], [[None, 3]], 7],
)
def test_a_wrong_table_is_neither_saved_nor_loaded(saved: Path, rows: Any) -> None:
    wrong = {"coll": {"cpu": {"all_gather": {"2": rows}}}}
    with pytest.raises(ValueError, match=r"coll\.cpu\.all_gather\.2"):
        profile.save(Profile(key=KEY, sections=wrong), saved)
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"sections": wrong}))
    found, why = profile.load(saved, KEY)
    assert found is None
    assert "coll.cpu.all_gather.2" in why


@pytest.mark.parametrize("rows", [[[None, "a", 1.0]], [[1, "a"]], [[1, "a", "b"]], [7], 7])
def test_wrong_points_are_neither_saved_nor_loaded(saved: Path, rows: Any) -> None:
    wrong = {"points": {"cpu": {"all_gather": {"2": rows}}}}
    with pytest.raises(ValueError, match=r"points\.cpu\.all_gather\.2"):
        profile.save(Profile(key=KEY, sections=wrong), saved)


def test_current_follows_the_environment(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(saved))
    assert profile.current(KEY)[0].origin == str(saved)
    found, why = profile.current(replace(KEY, device="cpu B"))
    assert found.origin == "default"
    assert found.sections == profile.default().sections
    assert "shipped default" in why
    assert "another device" in why
    monkeypatch.setenv("DOVETAIL_PROFILE", str(saved.with_name("none.json")))
    none, why = profile.current(KEY)
    assert "no profile at" in why
    assert none.ignored == ""


def test_save_without_a_path_goes_where_current_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "x" / "p.json"))
    profile.save(Profile(key=KEY, sections={}))
    assert profile.current(KEY)[0].key == KEY


@pytest.mark.parametrize("text", ['{"schema": "dovet', "\xff", None], ids=["truncated", "unreadable", "foreign"])
def test_a_profile_that_does_not_hold_is_kept_beside_the_new_one(
    saved: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    if text is not None:
        saved.write_bytes(text.encode("latin-1"))
    old, key = saved.read_bytes(), replace(KEY, device="cpu B")
    assert profile.save(Profile(key=key, sections={}), saved) == saved
    assert saved.with_name("p.old.json").read_bytes() == old
    assert f"{saved} is kept as p.old.json: it " in caplog.text
    assert ("cannot be read" in caplog.text) == (text is not None)
    assert profile.load(saved, key)[0] is not None
    saved.write_text("again")
    profile.save(Profile(key=key, sections={}), saved)
    assert saved.with_name("p.old1.json").read_text() == "again"
    assert saved.with_name("p.old.json").read_bytes() == old


def test_a_profile_that_holds_is_replaced_in_its_place(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    profile.save(Profile(key=KEY, sections={}), saved)
    assert os.listdir(saved.parent) == ["p.json"]
    assert not caplog.text


def test_merge_keeps_what_the_newer_did_not_measure() -> None:
    old = Profile(key=KEY, sections={"coll": COLL})
    table = {"cpu": {"all_gather": {"4": [[None, "pcpy"]]}, "broadcast": {"8": [[None, "pcpy"]]}}}
    both = old.merged(Profile(key=replace(KEY, ranks=(8,)), sections={"coll": table}))
    assert both.key.ranks == (2, 4, 8)
    gathered = both.sections["coll"]["cpu"]["all_gather"]
    assert gathered == COLL["cpu"]["all_gather"] | {"4": [[None, "pcpy"]]}
    with pytest.raises(ValueError, match="another device"):
        old.merged(Profile(key=replace(KEY, device="cpu B"), sections={}))


@pytest.mark.parametrize(
    ("ranks", "size_bytes", "variant", "reason"),
    [
        (2, 0, "b2b", "2 ranks, up to 32 KiB, measured 2.5 us at 1 KiB"),
        (2, 4000, "b2b", "2 ranks, up to 32 KiB, measured 2.5 us at 1 KiB"),
        (2, 4200, "b2b", "2 ranks, up to 32 KiB, measured 4.125 us at 16 KiB"),
        (2, 32768, "b2b", "2 ranks, up to 32 KiB, measured 4.125 us at 16 KiB"),
        (2, 32769, "pcpy", "2 ranks, larger sizes, measured 9 us at 64 KiB"),
        (2, 1 << 30, "pcpy", "2 ranks, larger sizes, measured 12346 us at 16 MiB"),
        (3, 1, "b2b", "2 ranks (nearest to 3), up to 32 KiB, measured 2.5 us at 1 KiB"),
        (4, 1, "bcst", "4 ranks, up to 1 MiB, measured 9 us at 1 MiB"),
        (4, 1 << 21, "b2b", "4 ranks, not measured above 1 MiB (tune ran out of time), shipped default"),
        (7, 1, "pull", "8 ranks (nearest to 7), not measured (tune ran out of time), shipped default"),
        (1, 1, "b2b", "2 ranks (nearest to 1), up to 32 KiB, measured 2.5 us at 1 KiB"),
    ],
)
def test_choose(ranks: int, size_bytes: int, variant: str, reason: str) -> None:
    mine = Profile(key=KEY, sections={"coll": COLL, "points": POINTS}, date="then")
    assert profile.choose("all_gather", ranks, size_bytes, profile=mine) == (variant, f"profile of then, {reason}")


def test_without_points_no_time_is_quoted() -> None:
    mine = Profile(key=KEY, sections={"coll": COLL}, date="then")
    choice = profile.choose("all_gather", 2, 1 << 20, profile=mine)
    assert choice == ("pcpy", "profile of then, 2 ranks, larger sizes")


def test_what_ranks_are_told_of_the_points_is_what_reasons_quote() -> None:
    mine = Profile(key=KEY, sections={"coll": COLL, "points": POINTS}, date="then")
    told = profile.quoted(mine)
    assert told["cpu"]["all_gather"]["2"] == [
        [1024, "b2b", 2.5], [16384, "b2b", 4.125], [65536, "pcpy", 9.0], [16 << 20, "pcpy", 12345.6],
    ]  # fmt: skip
    short = replace(mine, sections={"coll": COLL, "points": told})
    for ranks, size_bytes in ((2, 1), (2, 40000), (4, 1), (4, 1 << 30), (8, 1)):
        whole = profile.choose("all_gather", ranks, size_bytes, profile=mine)
        assert profile.choose("all_gather", ranks, size_bytes, profile=short) == whole


def test_the_reason_says_why_it_is_not_the_profile_that_chose() -> None:
    mine = Profile(key=KEY, sections={"coll": COLL}, date="then")
    there = profile.choose("broadcast", 2, 1, profile=mine).reason
    assert there == "shipped default, 2 ranks, up to 64 KiB; the profile of then has no figures for it"
    other = replace(profile.default(), ignored="it is of another device (A; this is B)")
    ignored = profile.choose("broadcast", 3, 1, profile=other).reason
    wanted = "shipped default, 2 ranks (nearest to 3), up to 64 KiB; the profile is ignored: it is of another device"
    assert ignored == f"{wanted} (A; this is B)"
    assert profile.choose("broadcast", 2, 1).reason == "shipped default, 2 ranks, up to 64 KiB"


def test_an_unknown_collective_falls_to_the_default_then_raises() -> None:
    mine = Profile(key=KEY, sections={"coll": COLL})
    assert "shipped default" in profile.choose("broadcast", 2, 1, profile=mine).reason
    with pytest.raises(ValueError, match="all_sing.*known are all_gather"):
        profile.choose("all_sing", 2, 1, profile=mine)


@pytest.mark.parametrize(("ranks", "size_bytes"), [(0, 1), (2, -1)])
def test_numbers_out_of_range(ranks: int, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        profile.choose("all_gather", ranks, size_bytes)


@given(
    collective=st.sampled_from(
        ["all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast", "gather", "scatter"]
    ),
    ranks=st.integers(1, 64),
    size_bytes=st.integers(0, 1 << 40),
)
def test_the_default_has_an_answer_for_every_call(collective: str, ranks: int, size_bytes: int) -> None:
    choice = profile.choose(collective, ranks, size_bytes)
    assert choice.variant
    assert "shipped default" in choice.reason
