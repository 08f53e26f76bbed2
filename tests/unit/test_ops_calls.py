"""Calls of the fused operators: what they take, what they say to that, and what ranks compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dovetail.errors import NotSupported
from dovetail.ops import calls

X, W = torch.zeros(6, 4), torch.zeros(5, 4)
VALUES, OFFSETS = torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 1, 3, 4])


def _pool(
    weights: Any = (W,), values: Any = VALUES, offsets: Any = OFFSETS, lengths: Any = None, batch: Any = None,
    mode: str = "sum", scales: Any = None, world: int = 2,
) -> calls.EmbeddingAllToAll:  # fmt: skip
    return calls.embedding_all_to_all(weights, values, offsets, lengths, batch, mode, scales, world)


def test_splits() -> None:
    equal = calls.gemm_all_to_all(X, W, None, None, 3)
    assert (equal.send, equal.receive, equal.even) == ((2, 2, 2), (2, 2, 2), True)
    given = calls.gemm_all_to_all(X, W, torch.tensor([1, 0, 9]), (0, 6, 0), 3)
    assert (given.send, given.receive, given.even) == ((0, 6, 0), (1, 0, 9), False)


def test_what_ranks_compare() -> None:
    """All that must be equal on all of them, and nothing that may differ."""
    one = calls.gemm_all_to_all(X, W, [6, 0], [2, 4], 2)
    other = calls.gemm_all_to_all(X[:3], W, [1, 2], [0, 3], 2)
    assert one.text == other.text == "gemm_all_to_all(x [uneven, 4], w [5, 4], torch.float32)"
    assert one.load == other.load
    assert calls.gemm_all_to_all(X, W, None, None, 2).text != calls.gemm_all_to_all(X[:4], W, None, None, 2).text
    texts = {
        calls.gemv_all_reduce(X, W, 2).text,
        calls.gemv_all_reduce(X.double(), W.double(), 2).text,
        calls.gemv_all_reduce(X[:4], W, 2).text,
        calls.gemv_all_reduce(X, W[:3], 2).text,
        calls.all_gather_matmul(X, W, 2).text,
        calls.matmul_reduce_scatter(X, W, 2).text,
    }
    assert len(texts) == 6
    two = _pool([W, W], torch.zeros(8, dtype=torch.int64), torch.arange(9))
    assert _pool().text == two.text
    assert _pool().load == two.load
    assert len({_pool().text, _pool(mode="mean").text, _pool([W[:, :2]]).text, _pool([W.double()]).text}) == 4


def test_load() -> None:
    """Operations, and bytes that a rank sends."""
    assert calls.gemm_all_to_all(X, W, None, None, 2).load == (2 * 6 * 5 * 4, 6 * 5 * 4)
    assert calls.all_gather_matmul(X, W, 3).load == (2 * 18 * 5 * 4, 6 * 4 * 4)
    assert _pool().load == (0, 4 * 4 * 4)


@pytest.mark.parametrize("numbers_of", [torch.int32, torch.int64])
def test_bags(numbers_of: torch.dtype) -> None:
    lengths = torch.tensor([1, 0, 2, 1], dtype=numbers_of)
    values = VALUES.to(numbers_of)
    for call in (_pool(values=values, offsets=None, lengths=lengths), _pool(offsets=OFFSETS.to(numbers_of))):
        assert call.offsets.dtype is torch.int64
        assert call.offsets.tolist() == [0, 1, 1, 3, 4]
        assert (call.batch, call.dim, call.dtype) == (4, 4, torch.float32)
    empty = _pool(values=VALUES[:0].to(numbers_of), offsets=OFFSETS[:1])
    assert empty.batch == 0


def test_contiguous_copies() -> None:
    """What is not contiguous is copied, and only that."""
    call = calls.gemv_all_reduce(torch.zeros(4, 6).t(), W, 2)
    assert call.x.is_contiguous()
    assert call.w is W


FP8 = torch.float8_e5m2
WRONG: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "x of three dimensions": (ValueError, r"these are \(1, 6, 4\)", lambda: calls.gemv_all_reduce(X[None], W, 2)),
    "k": (ValueError, r"\(6, 4\) and \(5, 3\)", lambda: calls.gemv_all_reduce(X, W[:, :3], 2)),
    "dtypes": (TypeError, "x is torch.float32 and w is torch.float64", lambda: calls.gemv_all_reduce(X, W.double(), 2)),
    "fp8": (NotSupported, "operators compute in", lambda: calls.gemv_all_reduce(X.to(FP8), W.to(FP8), 2)),
    "complex": (NotSupported, "complex64", lambda: calls.gemv_all_reduce(X.cfloat(), W.cfloat(), 2)),
    "meta": (NotSupported, "is on meta", lambda: calls.gemv_all_reduce(X, W.to("meta"), 2)),
    "none": (TypeError, "x must be a tensor", lambda: calls.gemv_all_reduce(None, W, 2)),
    "65 rows": (
        ValueError, "up to 64: for more, matmul_reduce_scatter",
        lambda: calls.gemv_all_reduce(W.new_zeros(65, 4), W, 2),
    ),
    "rows": (ValueError, "can't share equally: give splits", lambda: calls.gemm_all_to_all(X, W, None, None, 4)),
    "shared": (ValueError, "4 ranks can't share equally", lambda: calls.matmul_reduce_scatter(X, W, 4)),
    "one of them": (ValueError, "or neither", lambda: calls.gemm_all_to_all(X, W, None, [3, 3], 2)),
    "sum": (ValueError, r"\[3, 2\] sum to 5, x has 6 rows", lambda: calls.gemm_all_to_all(X, W, [1, 1], [3, 2], 2)),
    "length": (ValueError, "2 whole numbers", lambda: calls.gemm_all_to_all(X, W, [1, 1], [6], 2)),
    "fractions": (ValueError, "2 whole numbers", lambda: calls.gemm_all_to_all(X, W, [1, 1], [5.5, 0.5], 2)),
    "tables": (ValueError, "no table", lambda: _pool([])),
    "a tensor": (TypeError, "a list of tables, not Tensor", lambda: _pool(W)),
    "dims": (ValueError, r"weights\[1\] is torch.float32 \(5, 3\)", lambda: _pool([W, W[:, :3]])),
    "mode": (ValueError, "not 'max'", lambda: _pool(mode="max")),
    "bools": (TypeError, "values must be whole numbers", lambda: _pool(values=VALUES.bool())),
    "two dimensions": (TypeError, "in one dimension", lambda: _pool(values=VALUES[None])),
    "neither": (ValueError, "give offsets or lengths", lambda: _pool(offsets=None)),
    "no offsets": (ValueError, "offsets has 0 numbers", lambda: _pool(offsets=OFFSETS[:0])),
    "odd bags": (ValueError, "needs 3 tables times the batch", lambda: _pool([W, W, W])),
    "batch": (ValueError, "a batch of 4 can't be shared equally by 3", lambda: _pool(world=3)),
    "stated batch": (ValueError, "1 tables times 5", lambda: _pool(batch=5)),
    "negative": (ValueError, "negative", lambda: _pool(offsets=None, lengths=torch.tensor([1, 3, -1, 1]))),
    "first": (ValueError, "from 1 to 4", lambda: _pool(offsets=torch.tensor([1, 1, 1, 3, 4]))),
    "falling": (ValueError, "never fall", lambda: _pool(offsets=torch.tensor([0, 3, 1, 3, 4]))),
    "last": (ValueError, "from 0 to 5", lambda: _pool(offsets=torch.tensor([0, 1, 1, 3, 5]))),
    "above": (IndexError, r"row 5 for weights\[0\], which has rows 0..4", lambda: _pool(values=VALUES + 3)),
    "below": (IndexError, "row -1", lambda: _pool(values=VALUES - 1)),
    "above, second table": (
        IndexError, r"row 2 for weights\[1\], which has rows 0..1",
        lambda: _pool([W, W[:2]], torch.tensor([4, 1, 2, 0])),
    ),
    "scales' shape": (ValueError, r"is \(3,\), values \(4,\)", lambda: _pool(scales=torch.ones(3))),
    "scales' dtype": (TypeError, "one dtype", lambda: _pool(scales=torch.ones(4).double())),
    "scaled mean": (ValueError, "go with mode='sum'", lambda: _pool(mode="mean", scales=torch.ones(4))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    kind, text, call = WRONG[name]
    with pytest.raises(kind, match=text):
        call()
