"""A record is written whole, read back equal, and rejected with the field's name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dovetail.measure import record

ROWS = [{"collective": "all_gather", "time_us": 3.5}]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return record.write(record.new("bench", ["dovetail", "bench", "a b"], ROWS), tmp_path / "new" / "r.json")


def test_round_trip(written: Path) -> None:
    again = record.read(written, kind="bench")
    assert (again.kind, again.rows, again.simulated) == ("bench", ROWS, False)
    assert again.command == "dovetail bench 'a b'"
    assert again.machine["cores"] >= 1
    assert {"dovetail", "python"} <= set(again.versions)
    assert os.listdir(written.parent) == ["r.json"], "no temporary file stays"


def test_fields_are_those_of_the_design(written: Path) -> None:
    fields = {"schema", "command", "date", "machine", "versions", "simulated", "rows"}
    assert set(json.loads(written.read_text())) == fields


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": "dovetail.bench/2"}, "dovetail.bench/2"),
        ({"schema": "other"}, "other"),
        ({"rows": {}}, "'rows' must be list, found dict"),
        ({"rows": [1]}, r"rows\[0\]"),
        ({"simulated": 0}, "'simulated' must be bool"),
        ({"date": "yesterday"}, "yesterday"),
        ({"date": "2026-11-15T10:00:00"}, "time zone"),
        ({"extra": 1}, "unknown fields extra"),
    ],
)
def test_broken_file_is_named_with_the_fault(written: Path, change: dict[str, Any], message: str) -> None:
    written.write_text(json.dumps(json.loads(written.read_text()) | change))
    with pytest.raises(ValueError, match=message) as caught:
        record.read(written)
    assert str(caught.value).startswith(str(written))


@pytest.mark.parametrize("name", ["schema", "command", "date", "machine", "versions", "simulated", "rows"])
def test_missing_field(written: Path, name: str) -> None:
    data = json.loads(written.read_text())
    del data[name]
    written.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"'{name}' is missing"):
        record.read(written)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not JSON|expected a JSON object"):
        record.read(path)


def test_another_kind_is_refused(written: Path) -> None:
    with pytest.raises(ValueError, match="not a 'phases' record"):
        record.read(written, kind="phases")


def test_a_failed_write_leaves_the_old_file(written: Path) -> None:
    before = written.read_text()
    broken = record.new("bench", "dovetail bench", [{"time_us": float("nan")}])
    with pytest.raises(ValueError, match="JSON compliant"):
        record.write(broken, written)
    assert written.read_text() == before
    assert os.listdir(written.parent) == ["r.json"]
