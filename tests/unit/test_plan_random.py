"""Random plans: the checker proves them, refuses their broken twins, and no legal order or folding changes a byte."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from dovetail.errors import PlanError
from dovetail.hw.layout import layout_of
from dovetail.plan import DType, Op, Plan, ReduceOp, Role, passes
from dovetail.plan import step as st
from dovetail.plan.check import check
from dovetail.plan.linear import Linear, linearize

from .planlib import buffer, faults, queue, rejection
from .randomplans import Contents, contents_of, random_plan, reference, steps_before, touched, without_wait

seeds = some.integers(0, 1 << 32)
COPIES = (Op.COPY, Op.COPY2D, Op.BROADCAST, Op.SWAP)


@some.composite
def plans(draw: some.DrawFn) -> Plan:
    return random_plan(
        draw(seeds),
        ranks=draw(some.integers(1, 5)),
        moves=draw(some.sampled_from([1, 4, 12, 40])),
        buffer_bytes=draw(some.sampled_from([8, 60, 1000])),
    )


def _same(a: Contents, b: Contents) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[place], b[place]) for place in a)


def _any_order(plan: Plan, seed: int) -> Linear:
    """Some legal order, by running queues at random."""
    rng, at, level = random.Random(seed), [0] * len(plan.queues), [0] * len(plan.signals)
    done: list[tuple[int, int]] = []

    def ready(q: int) -> bool:
        if at[q] == len(plan.queues[q]):
            return False
        row = plan.queues[q].steps[at[q]]
        return bool(row["op"] != Op.WAIT or level[row["signal"]] >= row["value"])

    while choices := [q for q in range(len(at)) if ready(q)]:
        q = rng.choice(choices)
        for _ in range(rng.choice((1, 3, 10))):
            if not ready(q):
                break
            row = plan.queues[q].steps[at[q]]
            if row["op"] == Op.SIGNAL:
                level[row["signal"]] = int(row["value"])
            done.append((q, at[q]))
            at[q] += 1
    assert len(done) == sum(len(q) for q in plan.queues)
    return Linear(queue=np.array([q for q, _ in done]), index=np.array([i for _, i in done]))


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_the_checker_proves_them(plan: Plan) -> None:
    check(plan)
    layout_of(plan)  # peers touch no more of the caller's buffers than the CPU executor lets them


@settings(max_examples=40, deadline=None)
@given(plan=plans(), seed=seeds)
def test_any_order_and_any_folding_gives_the_same_bytes(plan: Plan, seed: int) -> None:
    filled = contents_of(plan, seed)
    want = reference(plan, filled)
    for n in range(2):
        assert _same(reference(plan, filled, _any_order(plan, seed + n)), want)
    for most in (1, 2):
        folded = passes.fold(plan, most)
        check(folded)
        assert _same(reference(folded, filled), want)
        assert _same(reference(folded, filled, _any_order(folded, seed)), want)


@settings(max_examples=20, deadline=None)
@given(plan=plans(), seed=seeds)
def test_folding_by_random_lanes(plan: Plan, seed: int) -> None:
    rng = random.Random(seed)
    folded = passes.fold(passes.prelaunch(plan), 3, lane_of=lambda _: rng.randrange(3))
    check(folded)
    filled = contents_of(plan, seed)
    assert _same(reference(folded, filled), reference(plan, filled))


@settings(max_examples=40, deadline=None)
@given(plan=plans(), seed=seeds)
def test_the_checker_refuses_them_without_a_wait_that_matters(plan: Plan, seed: int) -> None:
    broken = without_wait(plan, seed)
    assume(broken is not None)
    assert broken is not None
    assert sum(len(q) for q in broken.queues) == sum(len(q) for q in plan.queues) - 1
    with pytest.raises(PlanError, match="race|nobody has written|wrong result"):
        check(broken)


@settings(max_examples=30, deadline=None)
@given(plan=plans())
def test_linearize_respects_what_must_come_before(plan: Plan) -> None:
    """The set of bits of what comes before a step only names places before its own, and all of its queue's."""
    order = linearize(plan)
    place = {(q, i): n for n, (q, i) in enumerate(zip(order.queue.tolist(), order.index.tolist(), strict=True))}
    assert len(place) == len(order) == sum(len(q) for q in plan.queues)
    for n, (q, i, before) in enumerate(steps_before(plan)):
        assert place[q, i] == n
        assert before < 1 << n
        assert all(before >> place[q, k] & 1 for k in range(i))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, ranks=some.integers(2, 4), moves=some.sampled_from([4, 12, 30]))
def test_crossing_keeps_what_the_rank_sees(seed: int, ranks: int, moves: int) -> None:
    plan = random_plan(seed, ranks=ranks, moves=moves, buffer_bytes=200, ops=COPIES)
    rank = seed % ranks
    crossed = passes.crossing(plan, rank)
    check(crossed)
    filled = contents_of(plan, seed)
    want, got = reference(plan, filled), reference(crossed, filled)
    for place in want:
        if place[0] == rank:
            assert np.array_equal(got[place], want[place])
    for row in crossed.goal:
        _, ((place, begin, end),) = touched(crossed, row)
        assert np.array_equal(got[place][begin:end], want[place][begin:end])


@settings(max_examples=8, deadline=None)
@given(seed=some.integers(0, 1000), ranks=some.integers(1, 3))
def test_the_machine_finds_no_fault(seed: int, ranks: int) -> None:
    """Two runs, byte by byte, under schedules that starve queues; folded ones too."""
    plan = random_plan(seed, ranks=ranks, moves=8, buffer_bytes=40, ops=COPIES)
    assert not faults(plan, schedules=3, seed=seed)
    assert not faults(passes.fold(plan, 1), schedules=3, seed=seed)


def test_they_have_all_that_plans_have() -> None:
    """Every op, role and kind of element, over a few plans."""
    some_plans = [random_plan(seed, ranks=3, moves=60, buffer_bytes=400) for seed in range(8)]
    rows = st.sequence(*(q.steps for plan in some_plans for q in plan.queues))
    assert {Op(int(o)) for o in rows["op"]} == {*st.MOVES, Op.SIGNAL, Op.WAIT}
    roles = {b.role for plan in some_plans for b in plan.buffers}
    assert roles == {Role.INPUT, Role.OUTPUT, Role.INOUT, Role.SCRATCH}
    reduces = rows[rows["op"] == Op.REDUCE]
    assert len(set(reduces["dtype"].tolist())) == 12
    assert len(set(reduces["reduce_op"].tolist())) == 7
    assert set(reduces["num_sources"].tolist()) == {1, 2, 3, 4, 5}
    assert (rows["length"] % 2 == 1).any()
    assert all(len(plan.goal) for plan in some_plans)
    assert all(plan.passes == ("entry",) for plan in some_plans)


def test_same_seed_same_plan() -> None:
    a, b = (random_plan(11, ranks=3, moves=30, buffer_bytes=300) for _ in range(2))
    assert a.fingerprint() == b.fingerprint()
    assert a.fingerprint() != random_plan(12, ranks=3, moves=30, buffer_bytes=300).fingerprint()


def test_few_ops() -> None:
    plan = random_plan(5, ranks=2, moves=30, buffer_bytes=300, ops=(Op.SWAP,))
    assert {int(o) for q in plan.queues for o in q.steps["op"]} <= {Op.SWAP, Op.SIGNAL, Op.WAIT}


@pytest.mark.parametrize(
    ("dtype", "op", "values", "want"),
    [
        (DType.INT8, ReduceOp.SUM, [[127], [1]], [-128]),
        (DType.UINT16, ReduceOp.PRODUCT, [[300], [300]], [90000 % 65536]),
        (DType.INT32, ReduceOp.MIN, [[-5], [3]], [-5]),
        (DType.UINT64, ReduceOp.BXOR, [[6], [3]], [5]),
        (DType.FLOAT16, ReduceOp.SUM, [[2048.0], [1.0], [1.0]], [2050.0]),  # rounded once
        (DType.FLOAT32, ReduceOp.SUM, [[2.0**24], [1.0], [1.0]], [2.0**24]),  # first to last
    ],
)
def test_reference_reduces(dtype: DType, op: ReduceOp, values: list[list[float]], want: list[float]) -> None:
    kind = np.dtype(dtype.name.lower())
    assert _reduced(dtype, op, [np.array(v, kind) for v in values]).view(kind).tolist() == want


def test_reference_reduces_bfloat16() -> None:
    """256 + 1 + 1 in fp32 is 258, which bf16 has; summed in bf16 it would be 256."""
    got = _reduced(DType.BFLOAT16, ReduceOp.SUM, [np.array([v], np.uint16) for v in (0x4380, 0x3F80, 0x3F80)])
    assert got.view(np.uint16).tolist() == [0x4381]


def _reduced(dtype: DType, op: ReduceOp, values: list[np.ndarray]) -> np.ndarray:
    size = values[0].nbytes
    plan = Plan(
        name="reduce",
        world=1,
        buffers=(buffer("input", Role.INPUT, [size * len(values)]), buffer("output", Role.OUTPUT, [size])),
        signals=(),
        queues=(queue(0, st.reduce((0, 1, 0), size, 0, len(values), dtype, op)),),
        goal=st.blank(0),
        sources=st.sources(0, 0, np.arange(len(values)) * size),
    )
    assert rejection(plan) is None
    filled = {(0, 0): np.concatenate(values).view(np.uint8), (0, 1): np.zeros(size, np.uint8)}
    return reference(plan, filled)[0, 1]
