"""Plans as programs for a few streams: which signals vanish, which become events or words, and that order is kept."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.errors import NotSupported, PlanError
from dovetail.hw.capabilities import Capabilities
from dovetail.hw.gpu.local import by_direction
from dovetail.hw.gpu.program import MOST_GATED_STREAMS, Program, Work, compile_plan
from dovetail.plan import Op, Plan, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.build.assembly import Assembly

from .randomplans import _conflict, random_plan, touched

CAPS = Capabilities(
    backend="cuda",
    engine="copy engine",
    native_ops=frozenset((Op.COPY, Op.COPY2D, Op.REDUCE)),
    runs_captured=False,
    most_signals=512,
    runs_in_flight=4,
    compute_cores=0,
)


def works(program: Program, stream: int | None = None) -> list[Work]:
    return [b.work for b in program.blocks if stream in (None, b.stream)]


def two_queues(*second: st.Rows, kind: SignalKind = SignalKind.INTERNAL) -> Plan:
    """Queue 0 copies a to b and raises `done`; queue 1 waits for it, then `second`."""
    a = Assembly("two queues", 1)
    a.buffer("a", Role.INPUT, 64)
    a.buffer("b", Role.INOUT, 64)
    a.buffer("c", Role.OUTPUT, 64)
    done = a.signal("done", 0, kind)
    a.queue(0, 0, st.copy((0, 0, 0), (0, 1, 0), 64), st.signal(done))
    a.queue(0, 1, st.wait(done), *second)
    return passes.entry(a.plan())


def by_engine(queue: object) -> int:
    return int(queue.engine)  # type: ignore[attr-defined]


@pytest.mark.parametrize("most", [1, 2, 4])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("build", [all_gather.pcpy, all_gather.bcst, all_to_all.pcpy, all_to_all.swap])
def test_queues_fold_to_few_streams(build: Callable[..., Plan], world: int, most: int) -> None:
    """However many queues a plan has: 28 of them at 8 ranks."""
    plan = passes.prelaunch(passes.entry(build(world, 4096)))
    for driven in ({0}, set(range(world))):
        program = compile_plan(plan, driven, CAPS, most_streams=most)
        assert program.num_streams <= most <= MOST_GATED_STREAMS
        assert {b.stream for b in program.blocks} <= set(range(most))
        gates = [n for n, s in enumerate(program.plan.signals) if s.kind is SignalKind.GATE]
        words = [(b.stream, program.steps[n]) for b in program.blocks if b.work is Work.WORDS for n in b.steps]
        waits = {stream for stream, row in words if row["op"] == Op.WAIT and row["signal"] in gates}
        assert len(waits) <= most, "more streams stand at a gate than are allowed"


@pytest.mark.parametrize("most", [0, 5, 16])
def test_more_streams_than_may_be_gated(most: int) -> None:
    with pytest.raises(NotSupported, match=f"1 to 4 streams for plans, not {most}"):
        compile_plan(passes.entry(all_gather.pcpy(8, 64)), {0}, CAPS, most_streams=most)


def test_plans_that_are_refused() -> None:
    plan = passes.entry(all_gather.pcpy(2, 64))
    with pytest.raises(NotSupported, match="fixed signal values"):
        compile_plan(plan.replace(captured=True), {0}, CAPS)
    with pytest.raises(PlanError, match="no entry handshake"):
        compile_plan(all_gather.pcpy(2, 64), {0}, CAPS)
    compile_plan(all_gather.pcpy(2, 64), {0, 1}, CAPS)  # nobody else to shake hands with


def test_an_operation_that_a_gpu_lacks() -> None:
    caps = Capabilities(
        backend="cuda", engine="e", native_ops=frozenset((Op.COPY, Op.BROADCAST)), runs_captured=False,
        most_signals=512, runs_in_flight=4, compute_cores=0,
    )  # fmt: skip
    with pytest.raises(NotSupported, match="BROADCAST"):
        compile_plan(passes.entry(all_gather.bcst(3, 64)), {0, 1, 2}, caps)


def test_one_process_needs_no_words() -> None:
    program = compile_plan(passes.entry(all_to_all.pcpy(4, 256)), range(4), CAPS, most_streams=1)
    assert set(works(program)) == {Work.COPIES}
    assert program.num_events == 0
    assert not program.waits_outside


def test_a_signal_between_streams_is_an_event() -> None:
    program = compile_plan(two_queues(st.copy((0, 1, 0), (0, 2, 0), 64)), {0}, CAPS, most_streams=2, lane_of=by_engine)
    assert works(program, 0) == [Work.COPIES, Work.RECORD]
    assert works(program, 1) == [Work.JOIN, Work.COPIES]
    assert program.num_events == 1
    record, join = (b for b in program.blocks if b.event >= 0)
    assert (record.work, join.work, record.event) == (Work.RECORD, Work.JOIN, join.event)


def test_in_one_stream_the_order_is_enough() -> None:
    plan = two_queues(st.copy((0, 1, 0), (0, 2, 0), 64))
    program = compile_plan(plan, {0}, CAPS, most_streams=1)
    assert works(program) == [Work.COPIES]
    assert program.steps["dst_buffer"][program.blocks[0].steps].tolist() == [1, 2]


def test_a_wait_that_nothing_follows_is_dropped() -> None:
    """The end of a run joins all streams anyway."""
    program = compile_plan(two_queues(), {0}, CAPS, most_streams=2, lane_of=by_engine)
    assert works(program) == [Work.COPIES]


def test_joins_that_are_known_already() -> None:
    """Who has joined an event of a stream has joined all earlier ones."""
    a = Assembly("known", 1)
    a.buffer("a", Role.INPUT, 64)
    a.buffer("b", Role.OUTPUT, 128)
    first, second = a.signal("first", 0), a.signal("second", 0)
    a.queue(0, 0, st.copy((0, 0, 0), (0, 1, 0), 8), st.signal(first), st.signal(second))
    a.queue(0, 1, st.wait(second), st.wait(first), st.copy((0, 0, 0), (0, 1, 64), 8))
    program = compile_plan(passes.entry(a.plan()), {0}, CAPS, most_streams=2, lane_of=by_engine)
    assert works(program, 1) == [Work.JOIN, Work.COPIES]


def test_words_are_for_others() -> None:
    """Exported signals are written, imported ones and peers' are waited for."""
    a = Assembly("outside", 2)
    a.buffer("a", Role.INPUT, 64)
    a.buffer("b", Role.OUTPUT, 64)
    flag, told = a.signal("flag", 0, SignalKind.IMPORTED), a.signal("told", 0, SignalKind.EXPORTED)
    done = a.signal("done", 1)
    a.queue(0, 0, st.wait(flag), st.copy((0, 0, 0), (1, 1, 0), 64), st.signal(done), st.signal(told))
    a.queue(1, 0, st.wait(done))
    plan = passes.entry(a.plan())
    mine = compile_plan(plan, {0}, CAPS)
    shown = [(Op(int(mine.steps["op"][n])).name, plan.signals[mine.steps["signal"][n]].name) for b in mine.blocks
             if b.work is Work.WORDS for n in b.steps]  # fmt: skip
    assert shown == [
        ("SIGNAL", "entry 0"),
        ("WAIT", "entry 1"),
        ("WAIT", "flag"),
        ("SIGNAL", "done"),
        ("SIGNAL", "told"),
    ]
    assert mine.waits_outside
    assert mine.places[mine.blocks[0].steps[0]] == (0, 0)
    both = compile_plan(plan, {0, 1}, CAPS, most_streams=1)
    shown = [plan.signals[both.steps["signal"][n]].name for b in both.blocks if b.work is Work.WORDS for n in b.steps]
    assert shown == ["flag", "told"]
    theirs = compile_plan(plan, {1}, CAPS)
    assert works(theirs) == [Work.WORDS]


def test_stamps_stand_alone() -> None:
    a = Assembly("stamps", 1)
    a.buffer("a", Role.INPUT, 64)
    a.buffer("b", Role.OUTPUT, 64)
    a.queue(0, 0, st.stamp(0), st.copy((0, 0, 0), (0, 1, 0), 64), st.stamp(1))
    assert works(compile_plan(passes.entry(a.plan()), {0}, CAPS)) == [Work.STAMP, Work.COPIES, Work.STAMP]


# --- order -----------------------------------------------------------------------------------------------------------


def _before(program: Program) -> dict[int, set[int]]:
    """For each step: the steps that the streams and events of a program put before it."""
    done: dict[int, set[int]] = {}  # stream -> steps that are before whatever comes next in it
    events: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for block in program.blocks:
        mine = done.setdefault(block.stream, set())
        if block.work is Work.RECORD:
            events[block.event] = set(mine)
        elif block.work is Work.JOIN:
            mine |= events[block.event]  # a KeyError here: a stream waits for an event that is recorded later
        for n in block.steps:
            before[n] = set(mine)
            mine.add(n)
    return before


@settings(max_examples=60, deadline=None)
@given(
    seed=some.integers(0, 1 << 32),
    ranks=some.integers(1, 4),
    most=some.integers(1, 4),
    moves=some.sampled_from([3, 10, 30]),
)
def test_what_must_be_ordered_is_ordered(seed: int, ranks: int, most: int, moves: int) -> None:
    """One process, random lanes: two moves that touch the same bytes are ordered by streams and events alone."""
    rng = random.Random(seed)
    plan = random_plan(seed, ranks=ranks, moves=moves, buffer_bytes=100)
    program = compile_plan(plan, range(ranks), CAPS, most_streams=most, lane_of=lambda _: rng.randrange(most))
    before = _before(program)
    rows = [n for n in sorted(before) if program.steps["op"][n] in st.MOVES]
    assert len(rows) == sum(np.isin(q.steps["op"], list(st.MOVES)).sum() for q in program.plan.queues)
    operands = {n: touched(program.plan, program.steps[n]) for n in rows}
    for k, n in enumerate(rows):
        for m in rows[:k]:
            if _conflict(operands[m], operands[n]):
                assert m in before[n], (program.places[m], program.places[n])


def test_a_stream_that_has_nothing_to_do_is_not_there() -> None:
    """What goes one way only is in one stream: whoever waits for two would wait for the second in vain."""
    plan = passes.crossing(passes.entry(all_gather.pcpy(4, 64, own_copy=False)), 0)
    host = frozenset({1, 2, 3})
    both = compile_plan(plan, range(4), CAPS, most_streams=2, lane_of=by_direction(host, 2))
    assert (both.lanes, {block.stream for block in both.blocks}) == ((0, 1), {0, 1})
    one_way = two_queues(st.copy((0, 1, 0), (0, 2, 0), 64))
    for lane in range(2):
        found = compile_plan(one_way, {0}, CAPS, most_streams=2, lane_of=lambda _, lane=lane: lane)
        assert (found.lanes, {block.stream for block in found.blocks}) == ((lane,), {0})
