"""Wrong arguments, ranks that disagree, die or fail inside a fused operator: an error on every rank, soon, no hang."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dovetail
from dovetail import ops as fused
from dovetail.errors import DovetailError, HardwareError, MismatchError, NotSupported, PeerError
from tests.ranks import workers
from tests.ranks.ops_cases import COMPUTATIONS, OPS, some, transports

X, W = torch.ones(6, 4), torch.ones(3, 4)
FP8 = torch.float8_e4m3fn
VALUES, OFFSETS = torch.zeros(6, dtype=torch.int64), torch.arange(7)


def _gemm(x: Any = X, w: Any = W, *splits: Any, **more: Any) -> Any:
    return fused.gemm_all_to_all(x, w, *splits, **more)


def _pool(weights: Any = (W,), values: Any = VALUES, offsets: Any = OFFSETS, **more: Any) -> Any:
    return fused.embedding_all_to_all(weights, values, offsets, **more)


#: What rank 1 does wrong; what it is told; a right call of the same operator for the others.
WRONG: dict[str, tuple[type[Exception], str, Callable[[], Any], Callable[[], Any]]] = {
    "inner dimension": (ValueError, r"these are \(6, 4\) and \(3, 5\)", lambda: _gemm(w=torch.ones(3, 5)), _gemm),
    "one dimension": (ValueError, r"x is \[rows, k\] and w \[n, k\]", lambda: _gemm(x=torch.ones(4)), _gemm),
    "two dtypes": (TypeError, "must be of one dtype", lambda: _gemm(w=W.double()), _gemm),
    "whole numbers": (NotSupported, "operators compute in", lambda: _gemm(X.int(), W.int()), _gemm),
    "fp8": (NotSupported, "e4m3fn; operators compute in", lambda: _gemm(*(t.to(FP8) for t in (X, W))), _gemm),
    "meta": (NotSupported, "x is on meta", lambda: _gemm(X.to("meta"), W.to("meta")), _gemm),
    "no tensor": (TypeError, "w must be a tensor, not NoneType", lambda: _gemm(X, None), _gemm),
    "sparse": (NotSupported, "dense tensor", lambda: _gemm(X.to_sparse()), _gemm),
    "rows": (ValueError, "5 rows, which 2 ranks can't share", lambda: _gemm(torch.ones(5, 4)), _gemm),
    "sum of splits": (ValueError, "sum to 5, x has 6 rows", lambda: _gemm(X, W, [3, 3], [2, 3]), _gemm),
    "one kind of splits": (ValueError, "give output_splits and input_splits", lambda: _gemm(X, W, [3, 3]), _gemm),
    "number of splits": (ValueError, "2 whole numbers", lambda: _gemm(X, W, [3, 3], [2, 3, 1]), _gemm),
    "negative splits": (ValueError, "2 whole numbers", lambda: _gemm(X, W, [3, 3], [7, -1]), _gemm),
    "splits on meta": (
        Exception, "meta", lambda: _gemm(X, W, torch.zeros(2, device="meta"), torch.zeros(2, device="meta")), _gemm,
    ),
    "transport": (ValueError, "no transport 'fast'", lambda: _gemm(transport="fast"), _gemm),
    "a list as transport": (TypeError, "transport is one of auto", lambda: _gemm(transport=["store"]), _gemm),
    "huge splits": (ValueError, r"less than 2\^62", lambda: _gemm(X, W, [1, 1 << 63], [3, 3]), _gemm),
    "lacking transport": (
        NotSupported, "gemv_all_reduce on cpu has the transports unfused, decomposed, store, not 'dma'",
        lambda: fused.gemv_all_reduce(X, W, transport="dma"), lambda: fused.gemv_all_reduce(X, W),
    ),
    "gemv's rows": (
        ValueError, "x has 65 rows; gemv_all_reduce takes up to 64",
        lambda: fused.gemv_all_reduce(X[:1].repeat(65, 1), W),
        lambda: fused.gemv_all_reduce(X, W),
    ),
    "shared rows": (
        ValueError, "5 rows, which 2 ranks can't share equally",
        lambda: fused.matmul_reduce_scatter(torch.ones(5, 4), W),
        lambda: fused.matmul_reduce_scatter(X, W),
    ),
    "no tables": (ValueError, "every rank pools at least one", lambda: _pool([]), _pool),
    "no list": (TypeError, "weights is a list of tables, not NoneType", lambda: _pool(None), _pool),
    "one tensor": (TypeError, "weights is a list of tables, not Tensor", lambda: _pool(W), _pool),
    "two dims": (ValueError, "of one dim and dtype", lambda: _pool([W, torch.ones(3, 5)]), _pool),
    "row above": (IndexError, r"row 3 for weights\[0\], which has rows 0..2", lambda: _pool(values=VALUES + 3), _pool),
    "row below": (IndexError, "row -1 for", lambda: _pool(values=VALUES - 1), _pool),
    "floats": (TypeError, "values must be whole numbers", lambda: _pool(values=VALUES.float()), _pool),
    "falling offsets": (ValueError, "never fall", lambda: _pool(offsets=torch.tensor([0, 2, 1, 3, 4, 5, 6])), _pool),
    "offsets' end": (ValueError, "go from 0 to 5", lambda: _pool(offsets=torch.tensor([0, 1, 2, 3, 4, 5, 5])), _pool),
    "offsets and lengths": (ValueError, "one of them", lambda: _pool(lengths=torch.ones(6).long()), _pool),
    "negative lengths": (
        ValueError, "negative", lambda: _pool(offsets=None, lengths=torch.tensor([1, 2, -1, 2, 1, 1])), _pool,
    ),
    "batch": (ValueError, "a batch of 5", lambda: _pool(values=VALUES[:5], offsets=OFFSETS[:6]), _pool),
    "number of bags": (ValueError, "it needs 2 tables times", lambda: _pool([W, W], VALUES[:5], OFFSETS[:6]), _pool),
    "mode": (ValueError, "mode is 'sum' or 'mean'", lambda: _pool(mode="max"), _pool),
    "weights of a mean": (
        ValueError, "go with mode='sum'", lambda: _pool(mode="mean", per_sample_weights=torch.ones(6)), _pool,
    ),
    "weights' shape": (ValueError, "per_sample_weights is", lambda: _pool(per_sample_weights=torch.ones(5)), _pool),
    "optimizer": (ValueError, "optimizer is ''", lambda: _pool(optimizer="adam"), _pool),
    "no optimizer": (TypeError, "optimizer is a text", lambda: _pool(optimizer=["sgd"]), _pool),
    "lr": (ValueError, "lr is a finite number, not None", lambda: _pool(lr=None), _pool),
    "eps": (ValueError, "eps is a finite number, not nan", lambda: _pool(optimizer="sgd", eps=float("nan")), _pool),
    "num_tables": (ValueError, "num_tables is a whole number", lambda: _pool(num_tables="1"), _pool),
    "huge num_tables": (ValueError, "num_tables is a whole number", lambda: _pool(num_tables=1 << 70), _pool),
    "state": (ValueError, "needs 1 tensors of state", lambda: _pool(optimizer="rowwise_adagrad"), _pool),
    "no state": (TypeError, "state is a list", lambda: _pool(state=None), _pool),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("world", [2])
def test_wrong_arguments(pools: Any, world: int, grad: bool) -> None:
    """One rank's are wrong: it is told what, the other one is told by whom; nothing moved and the group goes on."""

    def job() -> dict[str, BaseException | None]:
        g = workers.world()
        said: dict[str, BaseException | None] = {}
        for t in (X, W):
            t.requires_grad_(grad)
        for name, (_, _, wrong, right) in WRONG.items():
            said[name] = _raised(wrong if g.rank else right)
            problem = some("gemm_all_to_all", 2, len(said))
            assert problem.is_right(g, problem.run(g)), name
        for t in (X, W):
            t.requires_grad_(False)
        return said

    first, second = pools.get(world).run(job)
    for name, (kind, text, _, _) in WRONG.items():
        assert isinstance(second[name], kind), (name, second[name])
        assert re.search(text, str(second[name])), (name, second[name])
        assert isinstance(first[name], MismatchError), (name, first[name])
        assert "rank 1 of Group(world, rank 0 of 2) refused its arguments" in str(first[name]), name
        assert str(second[name])[:60].rstrip() in str(first[name]), name


def _raised(call: Callable[[], Any]) -> BaseException | None:
    """What a call raises: a test that stopped there would leave the other ranks waiting."""
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize("world", [2])
def test_both_are_wrong(pools: Any, world: int) -> None:
    """Each rank gets its own error."""

    def job() -> str:
        g = workers.world()
        with pytest.raises((ValueError, TypeError)) as caught:
            _gemm(X, None) if g.rank else _gemm(torch.ones(5, 4))
        problem = some("gemm_all_to_all", 2, 1)
        assert problem.is_right(g, problem.run(g))
        return type(caught.value).__name__

    assert pools.get(world).run(job) == ["ValueError", "TypeError"]


DISAGREE: dict[str, Callable[[int], Any]] = {
    "operators": lambda r: fused.gemv_all_reduce(X, W) if r else fused.all_gather_matmul(X, W),
    "rows": lambda r: _gemm(torch.ones(6 + 6 * r, 4)),
    "n": lambda r: _gemm(w=torch.ones(3 + r, 4)),
    "dtypes": lambda r: _gemm(*((X, W) if r else (X.double(), W.double()))),
    "modes": lambda r: _pool(mode="sum" if r else "mean"),
    "numbers of tables": lambda r: _pool(num_tables=3 if r else 4),
    "batches": lambda r: _pool() if r else _pool(values=VALUES[:3], offsets=OFFSETS[:4]),
    "equal and given splits": lambda r: _gemm(X, W, *(([2] * 3, [2] * 3) if r else ())),
}


@pytest.mark.parametrize("world", [3])
def test_ranks_disagree(pools: Any, world: int) -> None:
    """Every rank is shown both calls; nothing moved."""

    def job() -> list[dict[int, str]]:
        g = workers.world()
        found = []
        for call in DISAGREE.values():
            with pytest.raises(MismatchError) as caught:
                call(g.rank)
            found.append(caught.value.calls)
            workers.all_reduce("auto", "mixed", 10, torch.float32, "sum", 1)
        return found

    for rank, all_calls in enumerate(pools.get(world).run(job)):
        for name, calls in zip(DISAGREE, all_calls, strict=True):
            assert rank in calls, name
            assert len(set(calls.values())) == 2, (name, calls)


@pytest.mark.parametrize("transport", transports("gemm_all_to_all"))
@pytest.mark.parametrize("world", [3])
def test_splits_disagree(pools: Any, world: int, transport: str) -> None:
    def job() -> str:
        g = workers.world()
        receive = [2, 2, 2]
        if g.rank == 1:
            receive[0] = 3
        with pytest.raises(MismatchError) as caught:
            _gemm(X, W, receive, [2, 2, 2], transport=transport)
        problem = some("gemm_all_to_all", 3, 2)
        assert problem.is_right(g, problem.run(g, transport))
        return str(caught.value)

    for text in pools.get(world).run(job):
        assert "rank 0 sends 2 rows to rank 1, which expects 3" in text
        assert "output_splits [3, 2, 2]" in text


def _replace_computation(by: Callable[..., Any]) -> None:
    """In this process, for good: it belongs to the test."""
    for owner, name in (*COMPUTATIONS, (torch.nn.functional, "embedding_bag")):
        setattr(owner, name, by)


def _fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("no product today")


#: Everything is sent before anything is computed: others may have their result when a rank fails.
SENT_FIRST = tuple(("all_gather_matmul", t) for t in ("unfused", "decomposed", "store"))
FAILING = [(op, t) for op in OPS for t in transports(op) if t != "auto"]


@pytest.mark.parametrize(("op", "transport"), FAILING, ids=[f"{op}-{t}" for op, t in FAILING])
def test_computation_fails(spare_pool: Callable[..., Any], op: str, transport: str) -> None:
    """An exception inside the computation of one rank: it is raised there, and the others do not wait for it."""
    pool = spare_pool(3)

    def well() -> bool:
        return some(op, 3, 3).is_right(workers.world(), some(op, 3, 3).run(workers.world(), transport))

    def job() -> list[BaseException | None]:
        g = workers.world()
        problem = some(op, 3, 3)
        if g.rank == 1:
            _replace_computation(_fail)
        said = [_raised(lambda: problem.run(g, transport)) for _ in range(2)]
        said.append(_raised(lambda: dovetail.all_reduce(torch.zeros(3))))
        g.close()
        return said

    assert all(pool.run(well))  # over on all ranks: a group that breaks ends what is not
    for rank, (now, again, other) in enumerate(pool.run(job)):
        assert isinstance(again, DovetailError), (rank, again)
        assert isinstance(other, DovetailError), (rank, other)
        if rank == 1:
            assert str(now) == "no product today"
        elif now is not None or (op, transport) not in SENT_FIRST:
            assert isinstance(now, PeerError), (rank, now)  # no Timeout: nobody waited for that
            assert "rank 1" in str(now)


#: Each operator, and each way to wait.
DYING = [
    ("gemm_all_to_all", "dma"), ("embedding_all_to_all", "store"), ("gemv_all_reduce", "store"),
    ("gemv_all_reduce", "decomposed"), ("all_gather_matmul", "store"), ("matmul_reduce_scatter", "unfused"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "transport"), DYING, ids=[f"{op}-{t}" for op, t in DYING])
def test_rank_dies(spare_pool: Callable[..., Any], op: str, transport: str) -> None:
    """A rank is gone in the middle of an operator: `PeerError` on the others, in seconds; survivors go on together."""
    pool = spare_pool(3)

    def job() -> list[BaseException | None]:
        g = workers.world()
        pair = g.world.new_group([0, 2]) if g.rank != 1 else None
        problem = some(op, 3, 3)
        if g.rank == 1:
            _replace_computation(lambda *_, **__: os._exit(3))
        said = [_raised(lambda: problem.run(g, transport)) for _ in range(2)]
        two = some(op, 2, 5)
        assert pair is not None
        assert two.is_right(pair, two.run(pair, transport))
        return said

    pool.run(lambda: some(op, 3, 3).run(workers.world(), transport) is not None)
    pool.start(job)
    for now, again in pool.finish([0, 2]).values():
        for error in [again] if now is None and (op, transport) in SENT_FIRST else [now, again]:
            assert isinstance(error, PeerError), error
            assert "rank 1 died" in str(error)


def test_no_room(spare_pool: Callable[..., Any]) -> None:
    """A rank whose heap is full has an error, and so have the others."""
    pool = spare_pool(2, {"DOVETAIL_HEAP": "64M"})

    def job() -> str:
        g = workers.world()
        x, w = torch.ones(1 << 10, 1), torch.ones(1 << 12, 1)  # a result of 16 MB
        held = [dovetail.empty(1 << 20) for _ in range(13)] if g.rank else []
        with pytest.raises(DovetailError) as caught:
            fused.gemm_all_to_all(x, w, transport="store")
        assert isinstance(caught.value, HardwareError if g.rank else PeerError)
        del held
        return str(caught.value)

    assert "no room" in pool.run(job)[1]


def test_a_group_that_is_closed(spare_pool: Callable[..., Any]) -> None:
    pool = spare_pool(2)

    def job() -> str:
        g = workers.world()
        sub = g.world.new_group([0, 1])
        problem = some("gemm_all_to_all", 2, 1)
        assert problem.is_right(sub, problem.run(sub))
        if g.rank == 1:
            sub.close()
            with pytest.raises(DovetailError, match="is closed"):
                problem.run(sub)
            dovetail.barrier()
            return ""
        with pytest.raises(PeerError) as caught:
            problem.run(sub)
        dovetail.barrier()
        return str(caught.value)

    assert "rank 1" in pool.run(job)[0]
