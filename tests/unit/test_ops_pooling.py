"""Pooled bags in C++ against torch.nn.functional.embedding_bag, over shapes, dtypes, bags and threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.ops import calls, reference
from dovetail.ops.cpu import pooling

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def three_threads() -> Iterator[None]:
    before, fewest = torch.get_num_threads(), pooling._FEW_LOOKUPS
    torch.set_num_threads(3)
    pooling._FEW_LOOKUPS = 4
    pooling._threads.cache_clear()
    yield
    torch.set_num_threads(before)
    pooling._FEW_LOOKUPS = fewest
    pooling._threads.cache_clear()


def _call(
    seed: int, dim: int, tables: int, batch: int, dtype: torch.dtype, numbers_of: torch.dtype, kind: str, most: int = 5
) -> tuple[calls.EmbeddingAllToAll, torch.Tensor]:
    """A call on one rank and its result by torch: small whole numbers, so that sums are exact."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 30, (tables,), generator=g).tolist()
    weights = [torch.randint(-3, 4, (n, dim), generator=g).to(dtype) for n in rows]
    bags = (tables * batch,)
    lengths = torch.randint(0, most, bags, generator=g) * torch.randint(0, 2, bags, generator=g)  # half of them empty
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    per_table = lengths.view(tables, batch).sum(1).tolist()
    values = torch.cat([torch.randint(0, n, (c,), generator=g) for n, c in zip(rows, per_table, strict=True)])
    scales = torch.randint(-2, 3, values.shape, generator=g).to(dtype) if kind == "scaled" else None
    mode = "mean" if kind == "mean" else "sum"
    want = reference.embedding_all_to_all(
        [weights], [values], [offsets], mode=mode, per_sample_weights=None if scales is None else [scales]
    )
    call = calls.embedding_all_to_all(weights, values.to(numbers_of), offsets, None, None, mode, scales, 1)
    return call, want[0]


def _check(call: calls.EmbeddingAllToAll, found: torch.Tensor, want: torch.Tensor) -> None:
    if call.mode == "sum":
        assert torch.equal(found, want)
    else:
        torch.testing.assert_close(found, want)


CASES = {
    "seed": st.integers(0, 1 << 30), "dim": st.integers(1, 300), "tables": st.integers(1, 3),
    "batch": st.integers(1, 70),
    "dtype": st.sampled_from(DTYPES), "numbers_of": st.sampled_from([torch.int32, torch.int64]),
    "kind": st.sampled_from(["sum", "mean", "scaled"]),
}  # fmt: skip


@given(**CASES)
@settings(max_examples=120, deadline=None)
def test_against_torch(
    seed: int, dim: int, tables: int, batch: int, dtype: torch.dtype, numbers_of: torch.dtype, kind: str
) -> None:
    call, want = _call(seed, dim, tables, batch, dtype, numbers_of, kind)
    out = torch.full_like(want, torch.nan)
    pooling.pool(call, 0, batch, out)
    _check(call, out, want)


@given(seed=st.integers(0, 1 << 30), batch=st.integers(1, 40), data=st.data())
@settings(max_examples=40, deadline=None)
def test_part_of_a_batch_into_part_of_a_row(seed: int, batch: int, data: st.DataObject) -> None:
    """Samples [first, end) into columns of a wider output: what lies around is left alone."""
    call, want = _call(seed, 5, 2, batch, torch.float32, torch.int64, "sum")
    first = data.draw(st.integers(0, batch))
    end = data.draw(st.integers(first, batch))
    wide = torch.full((end - first, 5, 5), torch.nan)
    pooling.pool(call, first, end, wide[:, 1:3])
    assert torch.equal(wide[:, 1:3], want[first:end])
    assert wide[:, :1].isnan().all()
    assert wide[:, 3:].isnan().all()


@pytest.mark.parametrize("kind", ["sum", "mean", "scaled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_three_threads(
    three_threads: None, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The same bits as one thread's, and samples between two threads are done once."""
    for seed, batch in enumerate((1, 2, 3, 64, 131)):
        call, want = _call(seed, 33, 2, batch, dtype, torch.int32, kind, most=9)
        out = torch.full_like(want, torch.nan)
        pooling.pool(call, 0, batch, out)
        _check(call, out, want)
        alone = torch.full_like(want, torch.nan)
        with monkeypatch.context() as m:
            m.setattr(torch, "get_num_threads", lambda: 1)
            pooling.pool(call, 0, batch, alone)
        assert torch.equal(out, alone)


def test_rounded_once() -> None:
    """Sums of bf16 are kept in fp32: 256 + 1 + 1 is 258, where bf16 would stay at 256."""
    table = torch.tensor([[256.0], [1.0]]).bfloat16()
    values, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 3])
    call = calls.embedding_all_to_all([table], values, offsets, None, None, "sum", None, 1)
    out = torch.empty(1, 1, 1, dtype=torch.bfloat16)
    pooling.pool(call, 0, 1, out)
    assert out.item() == 258.0


def test_each_sample_is_pooled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By several threads, and in a forked child by threads of its own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(pooling, "_FEW_LOOKUPS", 1)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(pooling, "_pool", lambda given, first, end, *where: seen.append((first, end)))
    call = calls.embedding_all_to_all(
        [torch.zeros(4, 2)], torch.zeros(12, dtype=torch.int64), torch.arange(13), None, None, "sum", None, 1
    )
    pooling.pool(call, 0, 12, torch.zeros(12, 1, 2))
    assert sorted(seen) == [(0, 4), (4, 8), (8, 12)]
    before = pooling._threads()
    if (child := os.fork()) == 0:
        os._exit(int(pooling._threads() is before))
    assert os.waitpid(child, 0)[1] == 0
