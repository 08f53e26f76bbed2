"""Every plan that the builders make is proved, over two runs in sequence, and has the counts of A's table."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import PlanError
from dovetail.plan import DType, Op, Plan, ReduceOp, passes
from dovetail.plan.build import all_gather, all_to_all, reduction, rooted
from dovetail.plan.build.ring import Chunks
from dovetail.plan.check import check

WORLDS = (1, 2, 3, 5, 8, 16)
BF16, SUM = DType.BFLOAT16, ReduceOp.SUM


def _mixed(world: int) -> tuple[bool, ...]:
    return tuple(r % 2 == 0 for r in range(world))


def _chunks(n: int) -> Chunks:
    return Chunks(size_bytes=n, chunk_bytes=128, slots=2)


#: (world, bytes of a rank or piece, root) -> plan
BUILDERS: dict[str, Callable[[int, int, int], Plan]] = {
    "all_gather pcpy": lambda w, n, _: all_gather.pcpy(w, n),
    "all_gather pcpy in place": lambda w, n, _: all_gather.pcpy(w, n, own_copy=False),
    "all_gather bcst": lambda w, n, _: all_gather.bcst(w, n),
    "all_gather bcst in place": lambda w, n, _: all_gather.bcst(w, n, own_copy=False),
    "all_gather b2b": lambda w, n, _: passes.b2b(all_gather.pcpy(w, n)),
    "all_gather pull": lambda w, n, _: all_gather.pull(w, n, chunks=_chunks(n)),
    "all_gather pull mixed": lambda w, n, _: all_gather.pull(w, n, ordinary=_mixed(w), chunks=_chunks(n)),
    "all_to_all pcpy": lambda w, n, _: all_to_all.pcpy(w, n),
    "all_to_all b2b": lambda w, n, _: passes.b2b(all_to_all.pcpy(w, n)),
    "all_to_all swap": lambda w, n, _: all_to_all.swap(w, n),
    "all_to_all swap copied": lambda w, n, _: all_to_all.swap_copied(w, n),
    "all_to_all swap staged": lambda w, n, _: all_to_all.swap_staged(w, n, chunks=_chunks(n)),
    "all_to_all pull mixed": lambda w, n, _: all_to_all.pull(w, n, ordinary=_mixed(w), chunks=_chunks(n)),
    "all_to_all pcpy uneven": lambda w, _n, _: all_to_all.pcpy_uneven(w),
    "all_to_all pull uneven": lambda w, _n, _: all_to_all.pull_uneven(w, ordinary=_mixed(w)),
    "all_reduce twoshot": lambda w, n, _: reduction.twoshot(w, n, BF16, SUM, chunk_bytes=64),
    "all_reduce oneshot": lambda w, n, _: reduction.oneshot(w, n, BF16, SUM, chunks=_chunks(n)),
    "reduce_scatter": lambda w, n, _: reduction.reduce_scatter(w, n, BF16, SUM),
    "reduce_scatter staged": lambda w, n, _: reduction.reduce_scatter_staged(
        w, n, BF16, SUM, ordinary=_mixed(w), chunks=_chunks(n)
    ),
    "broadcast pcpy": rooted.broadcast_pcpy,
    "broadcast bcst": lambda w, n, r: rooted.broadcast_pcpy(w, n, r, pairs=True),
    "broadcast pull": lambda w, n, r: rooted.broadcast_pull(w, n, r, ordinary=_mixed(w), chunks=_chunks(n)),
    "gather pcpy": rooted.gather_pcpy,
    "gather pull": lambda w, n, r: rooted.gather_pull(w, n, r, ordinary=_mixed(w), chunks=_chunks(n)),
    "scatter pcpy": rooted.scatter_pcpy,
    "scatter pull": lambda w, n, r: rooted.scatter_pull(w, n, r, chunks=_chunks(n)),
    "barrier": lambda w, _n, _r: rooted.barrier(w),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", BUILDERS)
def test_proved(name: str, world: int) -> None:
    plan = BUILDERS[name](world, 1000, world - 1)
    check(plan, runs=1)
    check(passes.entry(plan), runs=2)
    check(passes.prelaunch(passes.entry(plan)), runs=2)
    check(passes.entry(plan), runs=4, in_flight=2)


@settings(max_examples=60, deadline=None)
@given(
    name=some.sampled_from(sorted(BUILDERS)), world=some.integers(1, 9), half=some.integers(0, 700), data=some.data()
)
def test_proved_for_any_size(name: str, world: int, half: int, data: some.DataObject) -> None:
    root = data.draw(some.integers(0, world - 1))
    check(passes.entry(BUILDERS[name](world, 2 * half, root)))  # whole bf16 elements


@settings(max_examples=40, deadline=None)
@given(world=some.integers(2, 6), half=some.integers(1, 300), data=some.data())
def test_a_removed_wait_is_found(world: int, half: int, data: some.DataObject) -> None:
    """In plans without staging every wait for a peer's signal is needed, except for doubled entries."""
    name = data.draw(some.sampled_from(["all_gather pcpy", "all_to_all pcpy", "all_reduce twoshot", "reduce_scatter"]))
    plan = passes.entry(BUILDERS[name](world, 2 * half * world, 0))
    waits = [
        (q, i) for q in range(len(plan.queues)) for i, op in enumerate(plan.queues[q].steps["op"]) if op == Op.WAIT
    ]
    q, i = data.draw(some.sampled_from(waits))
    queue = plan.queues[q]
    rows = [k for k in range(len(queue)) if k != i]
    shorter = type(queue)(rank=queue.rank, engine=queue.engine, steps=queue.steps[rows], name=queue.name)
    broken = plan.replace(queues=tuple(shorter if n == q else other for n, other in enumerate(plan.queues)))
    redundant = len(plan.of_rank(queue.rank)) > 1 and "entry" in plan.signals[int(queue.steps[i]["signal"])].name
    try:
        check(broken)
    except PlanError:
        return
    assert redundant or world == 1, f"{name}: {plan.describe(q, i)} was removed and nothing was found"


def _most(plan: Plan) -> tuple[int, int, int]:
    found = [plan.counts(r) for r in range(plan.world)]
    return max(c.commands for c in found), max(c.syncs for c in found), max(c.engines for c in found)


@pytest.mark.parametrize("world", [w for w in WORLDS if w > 1])
def test_counts_of_the_table(world: int) -> None:
    """FACTS: commands, syncs and engines per GPU, before the entry pass."""
    peers, half = world - 1, -(-(world - 1) // 2)
    assert _most(all_gather.pcpy(world, 64, own_copy=False)) == (peers, peers, peers)
    assert _most(all_to_all.pcpy(world, 64, own_copy=False)) == (peers, peers, peers)
    assert _most(all_gather.bcst(world, 64, own_copy=False)) == (half, half, half)
    assert _most(all_to_all.swap(world, 64)) == (half, half, half)
    assert _most(passes.b2b(all_gather.pcpy(world, 64, own_copy=False))) == (peers, 1, 1)
    assert _most(passes.b2b(all_to_all.pcpy(world, 64, own_copy=False))) == (peers, 1, 1)


def test_swaps_are_each_pair_once() -> None:
    for world in range(1, 20):
        pairs = [frozenset((r, p)) for r in range(world) for p in all_to_all.swap_partners(r, world)]
        assert len(pairs) == len(set(pairs)) == world * (world - 1) // 2


def test_segments_cover_whole_elements() -> None:
    for world in range(1, 9):
        for items in range(40):
            parts = reduction.segments(items * 4, world, 4)
            assert parts[0][0] == 0
            assert sum(n for _, n in parts) == items * 4
            assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(parts))


def test_bad_root_and_world() -> None:
    with pytest.raises(ValueError, match="root must be in 0..2, not 3"):
        rooted.broadcast_pcpy(3, 8, 3)
    with pytest.raises(ValueError, match="world must be at least 1"):
        all_gather.pcpy(0, 8)
