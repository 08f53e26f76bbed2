"""Passes rewrite plans without changing what they move: the checker proves it again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import NotSupported, PlanError
from dovetail.plan import DType, Op, Plan, ReduceOp, Role, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all, reduction
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.check import check


def _ops(plan: Plan) -> dict[Op, int]:
    rows = np.concatenate([q.steps["op"] for q in plan.queues])
    return {op: int((rows == op).sum()) for op in Op if (rows == op).any()}


def test_lower_broadcast_and_swap() -> None:
    plan = passes.entry(passes.lower(all_gather.bcst(5, 100), {Op.COPY}))
    assert Op.BROADCAST not in _ops(plan)
    assert plan.passes[0] == "lower broadcast"
    check(plan)
    plan = passes.entry(passes.lower(all_to_all.swap(4, 100), {Op.COPY}))
    assert Op.SWAP not in _ops(plan)
    check(plan)
    check(passes.entry(passes.lower(all_to_all.swap(4, 0), {Op.COPY})))


def test_lower_leaves_what_is_native() -> None:
    plan = all_gather.bcst(4, 100)
    assert passes.lower(plan, {Op.COPY, Op.BROADCAST}) is plan


def test_lower_can_not_reduce() -> None:
    with pytest.raises(NotSupported, match="REDUCE"):
        passes.lower(reduction.twoshot(2, 64, DType.FLOAT32, ReduceOp.SUM), {Op.COPY})


@pytest.mark.parametrize("chunk_bytes", [64, 128, 1024])
def test_chunk(chunk_bytes: int) -> None:
    for plan in (
        all_gather.pcpy(3, 1000),
        all_gather.bcst(3, 1000),
        all_to_all.swap(4, 1000),
        reduction.reduce_scatter(3, 1000, DType.FLOAT32, ReduceOp.SUM),
        reduction.twoshot(3, 1200, DType.FLOAT32, ReduceOp.SUM, chunk_bytes=1 << 20),
    ):
        cut = passes.chunk(plan, chunk_bytes)
        moves = np.concatenate([q.steps["length"][np.isin(q.steps["op"], st.MOVES)] for q in cut.queues])
        assert moves.max() <= chunk_bytes
        check(passes.entry(cut))


def test_chunks_of_a_reduction_and_its_copy_alternate() -> None:
    plan = passes.chunk(reduction.twoshot(2, 512, DType.FLOAT32, ReduceOp.SUM, chunk_bytes=1 << 20), 64)
    ops = [Op(int(o)) for o in plan.queues[0].steps["op"]][:4]
    assert ops == [Op.REDUCE, Op.COPY, Op.REDUCE, Op.COPY]


def test_chunk_must_keep_elements_whole() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        passes.chunk(all_gather.pcpy(2, 1000), 100)


def _copies(offsets: list[tuple[int, int]], length: int, size: int) -> Plan:
    a = Assembly("copies", 1)
    src, dst = a.buffer("input", Role.INPUT, size), a.buffer("output", Role.OUTPUT, size)
    rows = [st.copy((0, src, s), (0, dst, d), length) for s, d in offsets]
    a.queue(0, 0, *rows)
    for row in rows:
        a.goal(row)
    return a.plan()


def test_merge_joins_and_folds() -> None:
    joined = passes.merge(_copies([(k * 8, k * 8) for k in range(10)], 8, 80))
    assert _ops(joined) == {Op.COPY: 1}
    assert joined.queues[0].steps["length"][0] == 80
    folded = passes.merge(_copies([(k * 16, k * 8) for k in range(10)], 8, 160))
    assert _ops(folded) == {Op.COPY2D: 1}
    assert folded.queues[0].steps["rows"][0] == 10
    check(folded, runs=1)
    assert _ops(passes.merge(folded.replace(queues=folded.queues), fold=False)) == {Op.COPY2D: 1}


@settings(max_examples=80, deadline=None)
@given(gaps=some.lists(some.tuples(some.integers(0, 2), some.integers(0, 2)), min_size=1, max_size=30))
def test_merge_moves_the_same_bytes(gaps: list[tuple[int, int]]) -> None:
    """Random runs of equal copies, some contiguous, some equally spaced, some neither; rows are moved once each."""
    offsets, s, d = [], 0, 0
    for more_src, more_dst in gaps:
        offsets.append((s, d))
        s, d = s + 8 * (1 + more_src), d + 8 * (1 + more_dst)
    plan = _copies(offsets, 8, 8 + max(s, d))
    merged = passes.merge(plan)
    check(merged, runs=1)
    back = passes.lower(merged, {Op.COPY})
    lengths = sum(int(q.steps["length"].sum()) for q in back.queues)
    assert lengths == 8 * len(gaps)


def test_b2b_refuses_queues_that_depend_on_each_other() -> None:
    with pytest.raises(PlanError, match="b2b can't merge"):
        passes.b2b(all_gather.pull(3, 1000))
    with pytest.raises(PlanError, match="b2b can't merge"):
        passes.b2b(all_to_all.swap_copied(3, 1000))


def test_passes_are_applied_once() -> None:
    plan = passes.entry(all_gather.pcpy(2, 8))
    with pytest.raises(PlanError, match="already"):
        passes.entry(plan)
    gated = passes.prelaunch(plan)
    assert gated.passes == ("entry", "prelaunch")
    with pytest.raises(PlanError, match="already"):
        passes.prelaunch(gated)
