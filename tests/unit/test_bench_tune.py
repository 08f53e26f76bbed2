"""From rows to a profile: the fastest correct variant by size, in ranges."""

from typing import Any

import pytest

from dovetail import profile
from dovetail.bench.tune import points, save, section, winners
from dovetail.cli.tune import parse_seconds
from dovetail.measure import machine
from dovetail.sim import tables


def row(size_bytes: int, variant: str, time_us: float | None, ranks: int = 2, backend: str = "cpu") -> dict[str, Any]:
    return {"collective": "all_gather", "backend": backend, "variant": variant, "requested": variant, "ranks": ranks,
            "size_bytes": size_bytes, "time_us": time_us, "correct": time_us is not None}  # fmt: skip


ROWS = [
    row(1024, "pcpy", 3.0), row(1024, "b2b", 2.0), row(1024, "torch", 300.0),
    row(4096, "pcpy", 4.0), row(4096, "b2b", 3.0),
    row(65536, "pcpy", 9.0), row(65536, "b2b", 12.0), row(65536, "swap", None), row(65536, "gloo", 1.0, backend="gloo"),
    row(1024, "torch", 5.0, ranks=4), row(1024, "pcpy", 6.0, ranks=4),
]  # fmt: skip


def test_winners_are_correct_and_ours() -> None:
    found = winners(ROWS)
    assert [(w.ranks, w.size_bytes, w.variant) for w in found] == [
        (2, 1024, "b2b"), (2, 4096, "b2b"), (2, 65536, "pcpy"), (4, 1024, "torch"),
    ]  # fmt: skip
    assert found[0].runner_up == "pcpy"
    assert found[0].lead == pytest.approx(1.5)


def test_section_joins_neighbours_and_ends_open() -> None:
    table = section(winners(ROWS))
    assert table == {
        "cpu": {"all_gather": {"2": [[16384, "b2b", 3.0], [None, "pcpy", 9.0]], "4": [[None, "torch", 5.0]]}}
    }


def test_beyond_what_was_measured_the_shipped_default_serves() -> None:
    table = section(winners(ROWS), up_to=1 << 24)["cpu"]["all_gather"]
    shipped = profile.choose("all_gather", 2, 65537).variant
    assert table["2"] == [[16384, "b2b", 3.0], [65536, "pcpy", 9.0], [None, shipped]]
    assert table["4"][0] == [1024, "torch", 5.0]


def test_a_shorter_run_does_not_replace_a_longer_one(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 ranks three sizes are known; a run that got to one of them leaves those, and adds what is new."""
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "p.json"))
    two = [found for found in ROWS if found["ranks"] == 2]
    _, notes = save(winners(two), two)
    assert not notes
    short = [row(1024, "torch", 1.0), row(1024, "pcpy", 2.0), row(1024, "torch", 5.0, ranks=4)]
    path, notes = save(winners(short), short)
    assert notes == ["all_gather, 2 ranks: the profile keeps its 3 sizes; this run has 1"]
    loaded, _ = profile.load(path, machine.profile_key([2, 4]))
    assert profile.choose("all_gather", 2, 1024, profile=loaded).variant == "b2b"
    assert profile.choose("all_gather", 4, 1024, profile=loaded).variant == "torch"
    only = [row(1024, "torch", 1.0)]
    assert save(winners(only), only) == (path, notes)  # nothing better: the file stays


def test_section_is_what_a_profile_takes(tmp_path: Any) -> None:
    key = profile.Key(device="d", driver="k", ranks=(2, 4))
    path = profile.save(profile.Profile(key=key, sections={"coll": section(winners(ROWS))}), tmp_path / "p.json")
    loaded, _ = profile.load(path, key)
    assert profile.choose("all_gather", 2, 16384, profile=loaded).variant == "b2b"
    assert profile.choose("all_gather", 2, 16385, profile=loaded).variant == "pcpy"


def test_points_are_all_that_was_measured_and_a_model_reads_them(tmp_path: Any) -> None:
    sections = {"coll": section(winners(ROWS)), "points": points(ROWS)}
    assert sections["points"]["cpu"]["all_gather"]["4"] == [[1024, "torch", 5.0], [1024, "pcpy", 6.0]]
    key = profile.Key(device="d", driver="k", ranks=(2, 4))
    path = profile.save(profile.Profile(key=key, sections=sections), tmp_path / "p.json")
    found = tables.load(path)
    assert len(found) == 7  # all but torch's, the wrong one and gloo's
    assert (found[0].case.ranks, found[0].case.total_bytes, found[0].value) == (2, 2048, 3.0)


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("2m", 120), ("90", 90), ("0.5h", 1800)])
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0s", "-1s", "1d", "fast"])
def test_no_seconds(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time; write seconds"):
        parse_seconds(text)
