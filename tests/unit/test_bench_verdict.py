"""Ratios and verdicts, from rows alone."""

from typing import Any

import pytest

from dovetail.bench.verdict import verdicts


def row(backend: str, size_bytes: int, time_us: float | None, **more: Any) -> dict[str, Any]:
    requested = more.pop("requested", "auto" if backend == "cpu" else backend)
    return {"collective": "all_gather", "backend": backend, "requested": requested, "size_bytes": size_bytes,
            "time_us": time_us, "correct": time_us is not None, **more}  # fmt: skip


def test_geometric_mean_least_and_number_faster() -> None:
    rows = [row("cpu", 1024, 2.0), row("openmpi", 1024, 8.0), row("gloo", 1024, 200.0),
            row("cpu", 4096, 4.0), row("openmpi", 4096, 1.0), row("gloo", 4096, 400.0)]  # fmt: skip
    (verdict,) = verdicts(rows)
    openmpi, gloo = verdict.ratios
    assert openmpi.mean == pytest.approx(1.0)
    assert openmpi.least == (4096, 0.25)
    assert openmpi.num_faster == 1
    assert gloo.mean == pytest.approx(100.0)
    assert verdict.correct
    assert verdict.line() == (
        "all_gather auto: openmpi takes 1.00x our time (faster at 1 of 2 sizes, least 0.25x at 4K); "
        "gloo takes 100.00x our time (faster at 2 of 2 sizes, least 100.00x at 1K); all correct"
    )


def test_wrong_results_enter_no_ratio() -> None:
    rows = [row("cpu", 1024, None), row("openmpi", 1024, 8.0), row("cpu", 4096, 4.0), row("openmpi", 4096, 8.0)]
    (verdict,) = verdicts(rows)
    assert verdict.ratios[0].by_size == {4096: 2.0}
    assert not verdict.correct
    assert verdict.line().endswith("1 of 4 results WRONG")


def test_all_wrong_has_no_ratio_at_all() -> None:
    (verdict,) = verdicts([row("cpu", 1024, None), row("openmpi", 1024, 8.0)])
    assert verdict.ratios == ()
    assert verdict.line() == "all_gather auto: 1 of 2 results WRONG"


def test_verdict_is_about_the_first_variant() -> None:
    rows = [row("cpu", 1024, 2.0), row("cpu", 1024, 4.0, requested="b2b"), row("gloo", 1024, 8.0)]
    assert verdicts(rows)[0].ratios[0].mean == pytest.approx(4.0)
    assert verdicts(rows, "b2b")[0].ratios[0].mean == pytest.approx(2.0)


def test_one_verdict_per_collective() -> None:
    rows = [row("cpu", 1024, 2.0), row("cpu", 1024, 2.0) | {"collective": "broadcast"}]
    assert [verdict.collective for verdict in verdicts(rows)] == ["all_gather", "broadcast"]


def test_baselines_alone() -> None:
    (verdict,) = verdicts([row("gloo", 1024, 8.0)])
    assert verdict.line() == "all_gather baselines only: all correct"
