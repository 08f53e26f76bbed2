"""One legal order of a plan, its queues on fewer streams, and what crosses one rank's link."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from dovetail.errors import NotSupported, PlanError
from dovetail.plan import DType, External, Op, Plan, Queue, ReduceOp, Region, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all, reduction
from dovetail.plan.check import check
from dovetail.plan.linear import linearize

from .planlib import buffer, queue, signals, with_steps
from .randomplans import contents_of, reference
from .test_plan_build import BUILDERS

COLLECTIVES = sorted(BUILDERS)


def _trace(plan: Plan, number: int) -> list[str]:
    """The steps of a queue, without where they stand."""
    return [plan.describe(number, i).split(": ", 1)[1] for i in range(len(plan.queues[number]))]


def _legal(plan: Plan) -> bool:
    """Every step once, queues in order, no wait before its signal was raised (externals aside)."""
    at, level = [0] * len(plan.queues), [0] * len(plan.signals)
    order = linearize(plan)
    for q, i in zip(order.queue.tolist(), order.index.tolist(), strict=True):
        row = plan.queues[q].steps[i]
        held = row["op"] == Op.WAIT and not plan.signals[row["signal"]].kind.from_outside
        if at[q] != i or (held and level[row["signal"]] < row["value"]):
            return False
        if row["op"] == Op.SIGNAL:
            level[row["signal"]] = int(row["value"])
        at[q] += 1
    return at == [len(q) for q in plan.queues]


# --- linearize -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLLECTIVES)
def test_order_is_legal(name: str) -> None:
    for world in (1, 2, 5):
        assert _legal(passes.prelaunch(passes.entry(BUILDERS[name](world, 640, world - 1))))


def test_queues_take_turns() -> None:
    for plan in (all_gather.pcpy(3, 64), passes.prelaunch(passes.entry(all_gather.pcpy(3, 64)))):
        order = linearize(plan)
        steps = list(zip(order.queue.tolist(), order.index.tolist(), strict=True))
        moves = [q for q, i in steps if plan.queues[q].steps["op"][i] == Op.COPY]
        assert moves == [0, 1, 2, 3, 4, 5, 0, 2, 4]  # to the peers, then the own copies
        ops = [int(plan.queues[q].steps["op"][i]) for q, i in steps]
        assert ops[-21:] == [Op.COPY] * 6 + [Op.SIGNAL] * 6 + [Op.COPY] * 3 + [Op.WAIT] * 6


def test_empty() -> None:
    assert len(linearize(BUILDERS["barrier"](3, 0, 0))) == 0


def _exchange(*queues: Queue) -> Plan:
    """`out` goes outside after `exported`; what comes back is there when `imported` says so."""
    regions = [Region(rank=0, buffer=n, offset=0, length=64) for n in range(3)]
    return Plan(
        name="exchange",
        world=1,
        buffers=(
            buffer("input", Role.INPUT, [64]),
            buffer("out", Role.SCRATCH, [64]),
            buffer("back", Role.OUTSIDE, [64]),
            buffer("output", Role.OUTPUT, [64]),
        ),
        signals=signals("exported", kind=SignalKind.EXPORTED) + signals("imported", kind=SignalKind.IMPORTED),
        queues=queues,
        goal=st.copy((0, 0, 0), (0, 3, 0), 64),
        external=(External(read=regions[1], write=regions[2], after=(0, 1), before=(1, 1)),),
    )


SEND = st.sequence(st.copy((0, 0, 0), (0, 1, 0), 64), st.signal(0))
RECEIVE = st.sequence(st.wait(1), st.copy((0, 2, 0), (0, 3, 0), 64))


def test_order_goes_through_what_is_outside() -> None:
    plan = _exchange(queue(0, RECEIVE), queue(0, SEND))
    order = linearize(plan)
    assert order.queue.tolist() == [1, 1, 0, 0]
    folded = passes.fold(plan, 1)
    assert [Op(int(o)) for o in folded.queues[0].steps["op"]] == [Op.COPY, Op.SIGNAL, Op.WAIT, Op.COPY]
    check(folded, runs=1)


def test_deadlock_names_a_wait() -> None:
    plan = _exchange(queue(0, RECEIVE, SEND, name="both"))
    with pytest.raises(PlanError, match=r"deadlock: rank 0 queue 0 \(both\) step 0: wait imported >= 1") as caught:
        linearize(plan)
    assert len(caught.value.steps) == 1
    with pytest.raises(PlanError, match="deadlock"):
        passes.fold(plan, 1)
    pcpy = all_gather.pcpy(2, 64)
    steps = pcpy.queues[0].steps.copy()
    steps["value"][-1] = 2
    with pytest.raises(PlanError, match="deadlock: rank 0 .* wait done 1->0 >= 2"):
        linearize(with_steps(pcpy, 0, steps))


def test_an_import_without_an_access_holds_nothing_up() -> None:
    plan = _exchange(queue(0, RECEIVE, SEND)).replace(external=())
    assert len(linearize(plan)) == 4


def test_twenty_thousand_steps_are_quick() -> None:
    plan = passes.entry(passes.chunk(all_gather.pcpy(8, 64 * 340), 64))
    assert sum(len(q) for q in plan.queues) > 20_000
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        linearize(plan)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1


# --- fold ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_builder_folds(name: str) -> None:
    for world in (1, 2, 3, 4, 8):
        plan = passes.entry(BUILDERS[name](world, 640, world - 1))
        for most in (1, 2, 4):
            folded = passes.fold(plan, most)
            assert max(len(folded.of_rank(r)) for r in range(world)) <= most
            assert folded.passes[-1] == f"fold {most}"
            _same_bodies(plan, folded)
            check(folded)


def _same_bodies(plan: Plan, folded: Plan) -> None:
    """Every rank still has the same steps, but for repeated waits of the handshake; and it stands at the head."""
    kinds = [s.kind in (SignalKind.ENTRY, SignalKind.GATE) for s in plan.signals] + [False]
    opening = np.array(kinds)
    for r in range(plan.world):
        bodies = []
        for each in (plan, folded):
            heads = [opening[q.steps["signal"]] for q in each.of_rank(r)]
            assert all((np.diff(h.astype(int)) <= 0).all() for h in heads)
            bodies.append(sorted(s.tobytes() for q in each.of_rank(r) for s in q.steps[~opening[q.steps["signal"]]]))
        assert bodies[0] == bodies[1]


def _lowered(plan: Plan) -> Plan:
    try:
        return passes.lower(plan, {Op.COPY})
    except NotSupported:
        return plan


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("most", [1, 2])
def test_folds_what_other_passes_made(name: str, most: int) -> None:
    plan = BUILDERS[name](3, 640, 1)
    cut = passes.merge(passes.chunk(plan, 64))
    for each in (
        passes.prelaunch(passes.entry(plan)),
        passes.entry(passes.prelaunch(cut)),
        passes.entry(_lowered(cut)),
    ):
        folded = passes.fold(each, most)
        _same_bodies(each, folded)
        check(folded)
    check(passes.entry(passes.fold(plan, most)))


@pytest.mark.parametrize(
    "name", ["all_gather bcst", "all_to_all swap copied", "all_reduce oneshot", "all_reduce twoshot"]
)
def test_folding_moves_the_same_bytes(name: str) -> None:
    plan = passes.entry(BUILDERS[name](4, 640, 0))
    filled = contents_of(plan, 7)
    want = reference(plan, filled)
    for most in (1, 2, 4):
        got = reference(passes.fold(plan, most), filled)
        assert all(np.array_equal(got[place], want[place]) for place in want)


def test_heads_are_joined() -> None:
    plan = passes.fold(passes.prelaunch(passes.entry(all_gather.pcpy(3, 64))), 1)
    assert _trace(plan, 1) == [
        "wait gate 1 >= 1",
        "signal entry 1 = 1",
        "wait entry 0 >= 1",
        "wait entry 2 >= 1",
        "copy 64 B r1.input+0 -> r2.output+64",
        "copy 64 B r1.input+0 -> r0.output+64",
        "signal done 1->2 = 1",
        "signal done 1->0 = 1",
        "copy 64 B r1.input+0 -> r1.output+64",  # of the first queue, before the wait of the second
        "wait done 0->1 >= 1",
        "wait done 2->1 >= 1",
    ]


def test_gates_come_first_whatever_the_order_of_passes() -> None:
    plan = passes.fold(passes.entry(passes.prelaunch(all_gather.pcpy(2, 64))), 1)
    assert _trace(plan, 0)[:3] == ["wait gate 0 >= 1", "signal entry 0 = 1", "wait entry 1 >= 1"]


def test_queues_of_one_engine_stay_together() -> None:
    plan = passes.fold(all_to_all.pull(4, 64), 2)
    names = {q.engine: q.name for q in plan.of_rank(0)}
    assert names == {0: "fold of 4", 1: "fold of 3"}
    a = [Queue(rank=0, engine=e, steps=st.stamp(n), name=str(n)) for n, e in enumerate((5, 9, 5, 7))]
    base = all_gather.pcpy(1, 64)
    folded = passes.fold(base.replace(queues=tuple(a)), 2)
    assert [q.steps["value"].tolist() for q in folded.queues] == [[0, 2, 3], [1]]


def test_lanes_by_choice() -> None:
    plan = passes.entry(all_to_all.pull(4, 64))
    folded = passes.fold(plan, 2, lane_of=lambda q: int(q.name.startswith("from")))
    for r in range(4):
        moves = [st.among(q.steps["op"], st.MOVES).sum() for q in folded.of_rank(r)]
        assert moves == [1, 3]
    check(folded)
    with pytest.raises(ValueError, match=r"lane_of must be in 0\.\.1, not 2"):
        passes.fold(plan, 2, lane_of=lambda _: 2)


def test_folding_twice() -> None:
    plan = passes.fold(passes.fold(passes.entry(all_to_all.pcpy(5, 64)), 3), 1)
    assert plan.passes == ("entry", "fold 3", "fold 1")
    check(plan)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="most must be at least 1, not 0"):
        passes.fold(all_gather.pcpy(2, 64), 0)


def test_a_late_entry_is_refused() -> None:
    plan = passes.entry(all_gather.pcpy(2, 64))
    rows = plan.queues[0].steps
    plan = with_steps(plan, 0, st.sequence(rows[2:3], rows[0:2], rows[3:]))
    with pytest.raises(PlanError, match="signal entry 0 = 1: an entry is raised behind the head of its queue"):
        passes.fold(plan, 1)


# --- crossing --------------------------------------------------------------------------------------------------------

CROSSED: dict[str, Callable[[int], Plan]] = {
    "all_gather pcpy": lambda w: all_gather.pcpy(w, 640),
    "all_gather bcst": lambda w: all_gather.bcst(w, 640),
    "all_gather b2b": lambda w: passes.b2b(all_gather.pcpy(w, 640)),
    "all_gather pull": lambda w: all_gather.pull(w, 640),
    "all_to_all pcpy": lambda w: all_to_all.pcpy(w, 640),
    "all_to_all b2b": lambda w: passes.b2b(all_to_all.pcpy(w, 640)),
    "all_to_all swap": lambda w: all_to_all.swap(w, 640),
    "all_to_all swap copied": lambda w: all_to_all.swap_copied(w, 640),
    "all_to_all swap staged": lambda w: BUILDERS["all_to_all swap staged"](w, 640, 0),
    "all_to_all pull": lambda w: all_to_all.pull(w, 640),
    "all_to_all pull staged": lambda w: BUILDERS["all_to_all pull mixed"](w, 640, 0),
    "all_to_all in chunks": lambda w: passes.chunk(all_to_all.pcpy(w, 640), 64),
}


def _bytes_across(plan: Plan, rank: int) -> int:
    """What goes from `rank` to others or back."""
    paths = {Op.BROADCAST: [("src", "dst"), ("src", "dst2")], Op.SWAP: [("src", "dst"), ("dst", "src")]}
    total = 0
    for q in plan.queues:
        for row in q.steps[st.among(q.steps["op"], st.MOVES)]:
            ends = paths.get(Op(int(row["op"])), [("src", "dst")])
            across = [(row[f"{a}_rank"] == rank) != (row[f"{b}_rank"] == rank) for a, b in ends]
            total += int(row["length"]) * sum(map(int, across))
    return total


@pytest.mark.parametrize("name", CROSSED)
def test_what_crosses(name: str) -> None:
    for world in (2, 3, 4, 8):
        plan = CROSSED[name](world)
        for rank in {0, world - 1}:
            crossed = passes.crossing(plan, rank)
            assert crossed.passes[-1] == f"crossing {rank}"
            assert _bytes_across(crossed, rank) == 2 * 640 * (world - 1) == _bytes_across(plan, rank)
            assert len(crossed.goal) == 2 * world - 1
            assert ((crossed.goal["src_rank"] == rank) | (crossed.goal["dst_rank"] == rank)).all()
            check(passes.entry(crossed))
            check(passes.fold(passes.crossing(passes.entry(plan), rank), 2))


def test_only_what_touches_the_rank_is_left() -> None:
    crossed = passes.crossing(all_gather.bcst(5, 64), 0)
    rows = st.sequence(*(q.steps for q in crossed.queues))
    moves = rows[st.among(rows["op"], st.MOVES)]
    assert ((moves["src_rank"] == 0) | (moves["dst_rank"] == 0)).all()
    assert sorted(moves["op"].tolist()) == [Op.COPY] * 5 + [Op.BROADCAST] * 2
    assert (moves["dst2_rank"][moves["op"] == Op.COPY] == st.NONE).all()


def test_what_feeds_a_kept_move_is_cut_to_what_that_reads() -> None:
    crossed = passes.crossing(all_to_all.swap_copied(4, 64), 1)
    own = [q.steps[0] for q in crossed.queues if q.name == "own"]
    assert [(int(s["dst_offset"]), int(s["length"])) for s in own] == [(64, 64), (0, 256), (64, 64), (64, 64)]


def test_a_goal_that_needs_other_links_is_dropped() -> None:
    """0 -> 1 -> 2: what rank 2 gets does not come over rank 0's link."""
    a = Plan(
        name="relay",
        world=3,
        buffers=(buffer("input", Role.INPUT, [64] * 3), buffer("output", Role.OUTPUT, [64] * 3)),
        signals=signals("there", "done"),
        queues=(
            queue(0, st.copy((0, 0, 0), (1, 1, 0), 64), st.signal(0)),
            queue(1, st.wait(0), st.copy((1, 1, 0), (2, 1, 0), 64), st.signal(1)),
            queue(2, st.wait(1)),
        ),
        goal=st.copy((0, 0, 0), (np.array([1, 2]), 1, 0), 64),
    )
    check(passes.entry(a))
    for rank, goals in ((0, [1]), (1, [1]), (2, [2])):
        crossed = passes.crossing(a, rank)
        assert crossed.goal["dst_rank"].tolist() == goals
        check(passes.entry(crossed))


def test_what_is_overwritten_before_it_is_read_feeds_nothing() -> None:
    plan = Plan(
        name="twice",
        world=2,
        buffers=(
            buffer("input", Role.INPUT, [128] * 2),
            buffer("scratch", Role.SCRATCH, [64] * 2),
            buffer("output", Role.OUTPUT, [64] * 2),
        ),
        signals=signals("there"),
        queues=(
            queue(
                1, st.copy((1, 0, np.array([0, 64])), (1, 1, 0), 64), st.copy((1, 1, 0), (0, 2, 0), 64), st.signal(0)
            ),
            queue(0, st.wait(0)),
        ),
        goal=st.copy((1, 0, 64), (0, 2, 0), 64),
    )
    crossed = passes.crossing(passes.entry(plan), 0)
    assert [s for s in _trace(crossed, 0) if s.startswith("copy")] == [
        "copy 64 B r1.input+64 -> r1.scratch+0",
        "copy 64 B r1.scratch+0 -> r0.output+0",
    ]
    check(crossed)


def test_crossing_refuses() -> None:
    with pytest.raises(PlanError, match="this one reduces"):
        passes.crossing(reduction.twoshot(2, 64, DType.FLOAT32, ReduceOp.SUM), 0)
    with pytest.raises(PlanError, match="no parameters"):
        passes.crossing(all_to_all.pcpy_uneven(2), 0)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, not 2"):
        passes.crossing(all_gather.pcpy(2, 64), 2)
