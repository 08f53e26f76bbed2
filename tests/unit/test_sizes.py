"""Sizes: the grammar, its inverse and the ranges."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.measure.sizes import approximate_bytes, format_bytes, geometric, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0), ("512", 512), ("1K", 1024), ("1k", 1024), ("16M", 16 << 20), ("2G", 2 << 30), ("1T", 1 << 40),
        ("1.5K", 1536), ("2GiB", 2 << 30), ("3 KB", 3072), (" 7B ", 7), ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_parse(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "M", "-1", "1X", "1.5", "0.3K", "1e3", "K1", "1 2"])
def test_parse_rejects_and_repeats_what_was_given(text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is asserted below
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_parse_undoes_format(size_bytes: int) -> None:
    assert parse_bytes(format_bytes(size_bytes)) == size_bytes


def test_format_refuses_a_negative_size() -> None:
    with pytest.raises(ValueError, match="-1"):
        format_bytes(-1)


def test_approximate() -> None:
    assert approximate_bytes(25274793984) == "23.54 GiB"
    assert approximate_bytes(12) == "12 B"


def test_range_in_the_manner_of_nccl_tests() -> None:
    assert geometric("1K", "16M", 4) == [1 << shift for shift in range(10, 25, 2)]
    assert geometric(1000, 5000) == [1000, 2000, 4000]
    assert geometric("8", "8") == [8]


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 40), st.floats(1.01, 64))
def test_range_grows_and_stays_inside(begin: int, end: int, factor: float) -> None:
    if begin > end:
        with pytest.raises(ValueError, match="not above the last"):
            geometric(begin, end, factor)
        return
    sizes = geometric(begin, end, factor)
    assert sizes[0] == begin
    assert sizes[-1] <= end
    assert all(low < high for low, high in itertools.pairwise(sizes))


@pytest.mark.parametrize("factor", [1, 0, -2, float("nan")])
def test_range_needs_a_factor_that_grows(factor: float) -> None:
    with pytest.raises(ValueError, match="above 1"):
        geometric(1, 2, factor)
