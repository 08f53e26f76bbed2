"""The native module against its Python mirror: layouts, and reductions of every type, length and alignment."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.ranks import workers

from dovetail.coll.dtypes import DTYPES
from dovetail.plan import step as st
from dovetail.plan.step import DType, ReduceOp

native = pytest.importorskip("dovetail.hw.cpu._native", reason="the native part is not built")


def test_layouts_are_those_of_the_tables() -> None:
    assert st.STEP.itemsize == native.STEP_BYTES
    assert st.SOURCE.itemsize == native.SOURCE_BYTES
    assert [d.size_bytes for d in DType] == [dtype.itemsize for dtype in DTYPES]
    assert list(DTYPES.values()) == list(DType)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", [o.name.lower() for o in ReduceOp])
def test_reduce(dtype: torch.dtype, op: str) -> None:
    """Lengths around vector widths, unaligned starts, 1 to 17 sources, the destination also being a source."""
    if (op.startswith("b") and dtype.is_floating_point) or (dtype is torch.bool and op == "avg"):
        pytest.skip("no such reduction")
    for seed, (items, count) in enumerate(itertools.product((1, 7, 64, 1023, 2050), (1, 2, 3, 8, 17))):
        parts = [workers.data(seed, r, items + 1, dtype)[1:] for r in range(count)]
        want = workers.reduced([p.clone() for p in parts], op)
        for out in (torch.empty(items, dtype=dtype), parts[count // 2]):
            native.reduce(
                int(DTYPES[dtype]), int(ReduceOp[op.upper()]), out.data_ptr(), [p.data_ptr() for p in parts], items
            )
            assert workers.same(out, want), (items, count)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.itemsize == 1 and d.is_floating_point], ids=str)
def test_every_value_of_the_8_bit_floats(dtype: torch.dtype) -> None:
    """All 65,536 sums of two values: decoding, rounding, overflow, NaN and zero as torch has them."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    a = codes.repeat_interleave(256).view(dtype)
    b = codes.repeat(256).view(dtype)
    out = torch.empty_like(a)
    native.reduce(int(DTYPES[dtype]), int(ReduceOp.SUM), out.data_ptr(), [a.data_ptr(), b.data_ptr()], a.numel())
    want = (a.float() + b.float()).to(dtype)
    both_nan = out.float().isnan() & want.float().isnan()
    assert bool(((workers.bits(out) == workers.bits(want)) | both_nan).all())


def test_16_bit_floats_round_once() -> None:
    """1 + eps/2 + eps/2: rounding after each addition would lose both halves."""
    for dtype, eps in ((torch.float16, 2.0**-10), (torch.bfloat16, 2.0**-7)):
        parts = [torch.full((40,), v, dtype=dtype) for v in (1.0, eps / 2, eps / 2)]
        out = torch.empty(40, dtype=dtype)
        native.reduce(int(DTYPES[dtype]), 0, out.data_ptr(), [p.data_ptr() for p in parts], 40)
        assert bool((out == 1.0 + eps).all())


def test_nan_wins_minimum_and_maximum() -> None:
    nan = float("nan")
    parts = [torch.tensor([1.0, nan, 2.0]), torch.tensor([nan, 1.0, 3.0]), torch.tensor([0.0, 0.0, 0.0])]
    for op in ("min", "max"):
        out = torch.empty(3)
        native.reduce(
            int(DType.FLOAT32), int(ReduceOp[op.upper()]), out.data_ptr(), [p.data_ptr() for p in parts], 3
        )
        assert out.isnan().tolist() == [True, True, False]
