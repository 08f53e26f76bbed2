"""Products on the CPU: some by a kernel of ours, 16-bit floats in fp32 where the CPU has no arithmetic for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.coll.dtypes import DTYPES
from dovetail.hw.cpu import native
from dovetail.ops.cpu import product
from dovetail.ops.cpu.product import FEWEST_ROWS, is_long, is_ours, mm, ready

HALVES = (torch.bfloat16, torch.float16)
#: Those of the kernel, oldest first. A CPU that lacks one takes the newest that it has.
INSTRUCTION_SETS = ("base", "avx2", "avx512", "avx512 with bf16")


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


def _multiplied(x: torch.Tensor, w: torch.Tensor, isa: int) -> torch.Tensor:
    """By the kernel, into memory between two guards."""
    (m, k), n = x.shape, w.shape[0]
    around = torch.full((m * n + 2,), 7.0, dtype=x.dtype)
    out = around[1:-1].view(m, n).fill_(float("nan"))
    number = int(DTYPES[x.dtype])
    native.load().multiply(number, x.data_ptr(), w.data_ptr(), out.data_ptr(), m, n, k, isa)
    assert around[0] == around[-1] == 7.0
    return out


@pytest.mark.parametrize("isa", range(len(INSTRUCTION_SETS)), ids=INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@settings(max_examples=60, deadline=None)
@given(some.integers(1, 11), some.integers(1, 19), some.integers(0, 150), some.integers(0, 3))
def test_every_instruction_set_gives_the_product(isa: int, dtype: torch.dtype, m: int, n: int, k: int, at: int) -> None:
    random = torch.Generator().manual_seed(m + 100 * n + 10_000 * k)
    x, w = (torch.randn(rows * k + at, generator=random).to(dtype)[at:].view(rows, k) for rows in (m, n))
    found = _multiplied(x, w, isa)
    bits = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), x.double() @ w.double().t(), rtol=2 * bits, atol=2e-7 * max(k, 1))
    alone = torch.cat([_multiplied(row, w, isa) for row in x.split(1)])
    assert torch.equal(found, alone), "a row's bits depend on the others"
    assert torch.equal(found, torch.cat([_multiplied(x, part, isa) for part in w.split(3)], 1))


@pytest.mark.parametrize("isa", range(len(INSTRUCTION_SETS)), ids=INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("at", [0, 31, 32, 70])
def test_what_is_no_number_stays_so(isa: int, dtype: torch.dtype, at: int) -> None:
    x, w = torch.ones((3, 71), dtype=dtype), torch.ones((5, 71), dtype=dtype)
    x[1, at], w[2, at] = float("nan"), float("inf")
    found = _multiplied(x, w, isa).float()
    wanted = torch.full((3, 5), 71.0)
    wanted[:, 2], wanted[1] = float("inf"), float("nan")
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_many_rows_are_multiplied_in_blocks() -> None:
    x, w, newest = torch.randn(300, 40), torch.randn(21, 40), len(INSTRUCTION_SETS) - 1
    for dtype in (torch.float32, *HALVES):
        one, other = x.to(dtype), w.to(dtype)
        found = _multiplied(one, other, newest)
        assert torch.equal(found, torch.cat([_multiplied(part, other, newest) for part in one.split(7)]))


def test_threads_multiply_at_once() -> None:
    """Each has memory of its own for rows that are made longer."""
    problems = [(torch.randn(9, 70 + 40 * n), torch.randn(33, 70 + 40 * n)) for n in range(8)]
    given = [(x.to(dtype), w.to(dtype)) for x, w in problems for dtype in HALVES]
    wanted = [_multiplied(x, w, 3) for x, w in given]
    with ThreadPoolExecutor(len(given)) as pool:
        for _ in range(30):
            found = pool.map(lambda pair: _multiplied(*pair, 3), given)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_rows_that_ours_is_made_for() -> None:
    """Whatever the CPU: none of no dtype that it has, few everywhere else, and short rows never without end."""
    most = native.load().most_rows
    for dtype in (torch.float32, *HALVES):
        kind = int(DTYPES[dtype])
        few = most(kind, 1024, 256)
        assert few >= 4 or few == 0
        assert most(kind, 1024, 0) == 0
        assert most(kind, 1, 256) <= 16
        assert most(kind, 1024, 17) <= 16
    assert most(int(DTYPES[torch.float64]), 1024, 256) == 0


def test_who_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_most_rows", lambda dtype, n, k: {torch.float32: 4, torch.float64: 0}[dtype])
    small, large = torch.empty(64, 1024), torch.empty(1024, 1024)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert [is_ours(large, rows) for rows in (0, 1, 4, 5)] == [False, True, True, False]
        assert not is_ours(large.double(), 1)
        torch.set_num_threads(2)  # torch's product has both of them
        assert not is_ours(large, 1)
        assert is_ours(small, 4)
    finally:
        torch.set_num_threads(threads)
