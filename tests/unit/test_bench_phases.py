"""Phases become shares of the whole."""

from types import SimpleNamespace

import pytest

from dovetail.bench.phases import row


def copies(*times: tuple[float, float, float, float]) -> list[SimpleNamespace]:
    return [SimpleNamespace(control_us=a, schedule_us=b, copy_us=c, sync_us=d) for a, b, c, d in times]


def test_row_has_medians_and_shares() -> None:
    found = row(1024, copies((1, 2, 5, 2), (1, 2, 5, 2), (9, 9, 9, 9)))
    assert found["total_us"] == 10
    assert [found[f"{phase}_share"] for phase in ("control", "schedule", "copy", "sync")] == [0.1, 0.2, 0.5, 0.2]
    assert (found["backend"], found["size_bytes"], found["iterations"]) == ("cpu", 1024, 3)


def test_impossible_times_are_refused() -> None:
    with pytest.raises(ValueError, match="take time"):
        row(1024, copies((-1, 2, 5, 2)))
