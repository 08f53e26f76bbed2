"""The statistics against their definitions."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.measure import stats

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)
positive = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(numbers)
def test_median(values: list[float]) -> None:
    assert stats.median(values) == pytest.approx(statistics.median(values))


@given(numbers, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert stats.percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@given(positive)
def test_geometric_mean_of_inverses_is_the_inverse(values: list[float]) -> None:
    mean = stats.geometric_mean(values)
    assert stats.geometric_mean(1 / value for value in values) == pytest.approx(1 / mean)
    assert min(values) * (1 - 1e-9) <= mean <= max(values) * (1 + 1e-9)


def test_geometric_mean_cancels_twice_as_fast_with_twice_as_slow() -> None:
    assert stats.geometric_mean([2, 0.5]) == pytest.approx(1)


def test_slowest_rank_median_forgives_an_outlier_and_takes_the_slowest() -> None:
    assert stats.slowest_rank_median([[1, 1, 900], [3, 2, 4]]) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.median([]),
        lambda: stats.median([math.nan]),
        lambda: stats.percentile([1], 101),
        lambda: stats.geometric_mean([1, 0]),
        lambda: stats.geometric_mean([]),
        lambda: stats.slowest_rank_median([]),
        lambda: stats.slowest_rank_median([[1, 2], [1]]),
    ],
    ids=["median-none", "median-nan", "percent", "geomean-zero", "geomean-none", "no-rank", "ragged"],
)
def test_what_has_no_answer_raises(call) -> None:
    with pytest.raises(ValueError, match="got|lies between"):
        call()
