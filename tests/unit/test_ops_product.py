"""Products on the CPU: 16-bit floats in fp32 where the CPU has no arithmetic for them, with the same result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.ops.cpu import product
from dovetail.ops.cpu.product import FEWEST_ROWS, is_long, mm, ready

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("without", [frozenset(), frozenset(HALVES)], ids=["has it", "has it not"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("most", [64 << 20, 5 * 4 * 24])
@settings(max_examples=25, deadline=None)
@given(some.integers(0, 3 * FEWEST_ROWS), some.integers(1, 24), some.integers(0, 24), some.integers(0, 9))
def test_it_is_the_product_of_all_and_of_parts(
    without: frozenset[torch.dtype], dtype: torch.dtype, most: int, m: int, n: int, k: int, cut: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product, "slow", lambda: without)
        patch.setattr(product, "_BLOCK_BYTES", most)
        patch.setattr(product, "_KEPT_BYTES", most)
        random = torch.Generator().manual_seed(m + 100 * n + 10_000 * k)
        x, w = (torch.randn((rows, k), generator=random, dtype=torch.float64).to(dtype) for rows in (m, n))
        wanted = (x.double() @ w.double().t()).to(dtype)
        whole, parts = mm(x, w), torch.full((m, n), float("nan"), dtype=dtype)
        multiply = ready(w, m)
        for rows in (slice(0, min(cut, m)), slice(min(cut, m), m)):
            assert multiply(x[rows], parts[rows]).data_ptr() == parts[rows].data_ptr()
    assert whole.dtype is dtype
    bits = torch.finfo(dtype).eps
    for found in (whole, parts, multiply(x)):
        torch.testing.assert_close(found, wanted, rtol=2 * bits, atol=2 * bits * max(k, 1))


@pytest.mark.parametrize("without", [frozenset(), frozenset(HALVES)])
def test_what_is_multiplied_in_fp32(without: frozenset[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "slow", lambda: without)
    near, far = (torch.empty((1024, k), dtype=torch.bfloat16) for k in (256, 257))
    assert is_long(near, FEWEST_ROWS) is is_long(far, 2 * FEWEST_ROWS) is bool(without)
    assert not is_long(near, FEWEST_ROWS - 1)
    assert not is_long(far, 2 * FEWEST_ROWS - 1)
    assert not any(is_long(near.to(dtype), 1000) for dtype in (torch.float32, torch.float64))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f\n", set(HALVES)),
        ("flags : fpu avx512_bf16\n", {torch.float16}),
        ("flags : fpu amx_bf16 avx512_fp16\n", set()),
        ("Features : fp asimd bf16\n", set()),
        (None, set()),
    ],
)
def test_what_a_cpu_has(monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: set[torch.dtype]) -> None:
    def read(_: Path) -> str:
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read)
    product.slow.cache_clear()
    try:
        assert product.slow() == wanted
    finally:
        product.slow.cache_clear()
