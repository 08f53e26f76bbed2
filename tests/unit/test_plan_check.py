"""The checker, rule by rule: what it accepts, what it rejects, and what the error says."""

from __future__ import annotations

import dataclasses
import pickle
import random
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

from dovetail.errors import PlanError
from dovetail.plan import (
    ABSENT,
    AT_RUN,
    Buffer,
    DType,
    External,
    Op,
    Param,
    Partition,
    Plan,
    Queue,
    ReduceOp,
    Region,
    Role,
    Signal,
    SignalKind,
)
from dovetail.plan import step as st
from dovetail.plan.check import Proof, check
from dovetail.plan.step import UNBOUNDED, Rows

from .planlib import LOCAL, buffer, changed, faults, find, queue, rejection, signals, with_steps, without

ENTRY, IMPORTED, EXPORTED = SignalKind.ENTRY, SignalKind.IMPORTED, SignalKind.EXPORTED
INPUT, OUTPUT, INOUT, SCRATCH, OUTSIDE = Role.INPUT, Role.OUTPUT, Role.INOUT, Role.SCRATCH, Role.OUTSIDE


def alone(
    *rows: Rows, goal: Rows | None = None, roles: tuple[Role, ...] = (INPUT, OUTPUT, SCRATCH), **more: Any
) -> Plan:
    """One rank, one queue, a buffer of 64 bytes per role."""
    buffers = tuple(buffer(str(r), r, [64]) for r in roles)
    fields: dict[str, Any] = {"buffers": buffers, "signals": (), "queues": (queue(0, *rows),)}
    return Plan(name="alone", world=1, goal=st.blank(0) if goal is None else goal, **(fields | more))


def push(n: int = 64) -> Plan:
    """Rank 0 copies its input into rank 1's output, with the handshake."""
    return Plan(
        name="push",
        world=2,
        buffers=(buffer("input", INPUT, [n, ABSENT]), buffer("output", OUTPUT, [ABSENT, n])),
        signals=(*signals("entry", rank=1, kind=ENTRY), *signals("done", rank=1)),
        queues=(
            queue(0, st.wait(0), st.copy((0, 0, 0), (1, 1, 0), n), st.signal(1), name="send"),
            queue(1, st.signal(0), st.wait(1)),
        ),
        goal=st.copy((0, 0, 0), (1, 1, 0), n),
    )


def rejects(plan: Plan, message: str, **options: int) -> PlanError:
    with pytest.raises(PlanError, match=message) as error:
        check(plan, **options)
    return error.value


# --- the call --------------------------------------------------------------------------------------------------------


def test_proof_says_what_was_proved() -> None:
    proof = check(push())
    assert (proof.num_steps, proof.num_accesses, proof.runs) == (5, 2, 2)
    assert proof.elapsed_ms > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        proof.runs = 3  # type: ignore[misc]
    assert isinstance(proof, Proof)


@pytest.mark.parametrize("options", [{"runs": 0}, {"in_flight": 0}, {"lanes": 0}], ids=str)
def test_bad_arguments(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        check(push(), **options)


def test_empty_plan() -> None:
    assert check(alone()).num_steps == 0
    check(Plan(name="none", world=3, buffers=(), signals=(), queues=(), goal=st.blank(0)))


def test_errors_survive_pickling() -> None:
    error = rejects(without(push(), 0, 0), "race")
    assert pickle.loads(pickle.dumps(error)).steps == error.steps


def test_a_run_by_itself_needs_no_handshake() -> None:
    """With runs=1 all ranks have entered; the end must still be known to the one who reads."""
    plan = without(without(push(), 0, 0), 1, 0)
    check(plan, runs=1)
    rejects(plan, "after the start of the caller of rank 1")
    rejects(without(plan, 1, 0), "before the end of the caller of rank 1", runs=1)


# --- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            st.copy((0, 0, 32), (0, 1, 0), 64),
            r"touches rank 0 buffer input bytes \[32, 96\), but the buffer has 64",
        ),
        (st.copy((0, 0, 0), (0, 1, 1), 64), r"buffer output bytes \[1, 65\), but"),
        (st.copy((0, 0, 0), (0, 1, -1), 8), r"output bytes \[-1, 7\), but"),
        (st.copy((0, 0, 0), (0, 1, 0), UNBOUNDED), "but the buffer has 64"),
        (st.copy2d((0, 0, 0), (0, 1, 0), 8, 4, 16, 24), r"output bytes \[0, 80\)"),
        (st.copy2d((0, 0, 0), (0, 1, 0), 8, 4, 24, 16), r"input bytes \[0, 80\)"),
        (st.copy2d((0, 0, 0), (0, 1, 0), 8, 4, 16, 4), "dst_pitch < length"),
        (st.copy2d((0, 0, 32), (0, 1, 0), 8, 4, -8, 8), "src_pitch must not be negative"),
        (st.copy2d((0, 0, 0), (0, 1, 0), 8, 1 << 40, 1 << 40, 1 << 40), "more than memory can hold"),
        (st.copy((0, 1, 0), (0, 0, 0), 8), r"input bytes \[0, 8\), which is an input"),
    ],
)
def test_operands_stay_inside(row: Rows, message: str) -> None:
    error = rejects(alone(row), message)
    assert error.steps
    assert str(error.steps[0]).startswith("rank 0 queue 0 step 0: copy")


def test_absent_buffers() -> None:
    rejects(changed(push(), 0, 1, dst_rank=0), "rank 0 buffer output .* but the buffer is absent")
    check(changed(push(0), 0, 1, dst_rank=0))  # no byte, no touch


def test_local_buffers_are_out_of_reach() -> None:
    plan = push()
    local = dataclasses.replace(plan.buffers[1], spaces=(LOCAL, LOCAL))
    rejects(plan.replace(buffers=(plan.buffers[0], local)), r"rank 1 buffer output bytes \[0, 64\), which is local")
    source = dataclasses.replace(plan.buffers[0], spaces=(LOCAL, LOCAL))
    check(plan.replace(buffers=(source, plan.buffers[1])))


@pytest.mark.parametrize(
    "row",
    [
        st.copy((0, 0, 0), (0, 0, 8), 16),
        st.copy((0, 0, 0), (0, 0, 0), 16),
        st.swap((0, 0, 0), (0, 0, 15), 16),
        st.broadcast((0, 0, 0), (0, 0, 16), (0, 0, 24), 16),
        st.broadcast((0, 0, 0), (0, 0, 16), (0, 0, 12), 4 + 4),
        st.copy2d((0, 0, 0), (0, 0, 12), 8, 3, 16, 16),
    ],
    ids=lambda r: Op(int(r["op"][0])).name,
)
def test_operands_of_a_step_must_not_overlap(row: Rows) -> None:
    error = rejects(alone(row, roles=(INOUT,)), r"overlap: rank 0 queue 0 step 0: .* rank 0 buffer inout bytes")
    assert len(error.steps) == 2


def test_interleaved_rows_do_not_overlap() -> None:
    row = st.copy2d((0, 0, 0), (0, 0, 8), 8, 4, 16, 16)
    check(alone(row, goal=row, roles=(INOUT,)))


def test_reduce_in_place_only_element_by_element() -> None:
    def plan(second: int) -> Plan:
        row = st.reduce((0, 0, 0), 16, 0, 2, DType.INT32, ReduceOp.SUM)
        return alone(row, goal=row, roles=(INOUT,), sources=st.sources(0, 0, [0, second]))

    check(plan(32))
    check(plan(0))
    rejects(plan(4), r"overlap: .* rank 0 buffer inout bytes \[4, 16\)")


def test_goal_is_about_what_was_filled() -> None:
    rejects(alone(goal=st.swap((0, 0, 0), (0, 1, 0), 8)), "a goal is a copy or a reduction")
    rejects(alone(goal=st.copy((0, 2, 0), (0, 1, 0), 8)), "its source is filled by nobody")
    rejects(alone(goal=st.copy((0, 0, 0), (0, 1, 60), 8)), r"goal 0: .* output bytes \[60, 68\)")


def test_reductions_are_well_formed() -> None:
    row = st.reduce((0, 1, 0), 6, 0, 2, DType.FLOAT32, ReduceOp.SUM)
    sources = st.sources(0, 0, [0, 8])
    rejects(alone(row, sources=sources), "whole elements")
    row["length"] = 8
    check(alone(row, sources=sources))
    rejects(alone(row, sources=st.sources([0, 3], 0, 0)), "source names a rank")
    row["dtype"] = 99
    rejects(alone(row, sources=sources), "unknown dtype or op")


def test_views_show_buffers() -> None:
    view = Buffer(name="v", role=Role.VIEW, sizes=(8,), spaces=(LOCAL,), of=0, staged=(False,))
    again = dataclasses.replace(view, name="w", of=2)
    plan = alone(st.copy((0, 2, 4), (0, 1, 0), 8), goal=st.copy((0, 0, 4), (0, 1, 0), 8))
    check(plan.replace(buffers=(*plan.buffers[:2], view)))
    rejects(plan.replace(buffers=(*plan.buffers[:2], view, again)), "view w shows a view")


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queues", "message"),
    [
        ((queue(0, st.signal(0, 1), st.signal(0, 1)),), "values of a signal must grow: .* step 0: .* and .* step 1"),
        ((queue(0, st.signal(0, 2), st.signal(0, 1)),), "values of a signal must grow"),
        (
            (queue(0, st.signal(0, 1)), queue(0, st.signal(0, 2))),
            "by one queue only: .*queue 0 .* and .*queue 1",
        ),
        ((queue(0, st.signal(0, 0)),), "values start at 1"),
        ((queue(0, st.wait(0, 0)),), "values start at 1"),
        ((queue(0, st.signal(1)),), "imported signal is raised from outside only"),
        ((queue(0, st.reset(0)),), "only a captured plan resets"),
    ],
)
def test_signal_rules(queues: tuple[Queue, ...], message: str) -> None:
    names = (*signals("s"), *signals("i", kind=IMPORTED))
    rejects(alone(queues=queues, signals=names), message)


def test_a_later_value_releases_an_earlier_wait() -> None:
    check(alone(queues=(queue(0, st.signal(0, 5)), queue(0, st.wait(0, 3))), signals=signals("s")))


def test_deadlock_without_a_signal() -> None:
    plan = alone(queues=(queue(0, st.signal(0, 2)), queue(0, st.wait(0, 3))), signals=signals("s"))
    error = rejects(plan, "deadlock: rank 0 queue 1 step 0: wait s >= 3: nobody raises")
    assert error.steps == ("rank 0 queue 1 step 0: wait s >= 3",)


def test_deadlock_in_a_circle_names_its_waits_only() -> None:
    names = ("a", "b", "c", "d")
    queues = (
        queue(0, st.wait(3), name="bystander"),
        queue(0, st.wait(1), st.signal(0)),
        queue(0, st.wait(2), st.signal(1)),
        queue(0, st.wait(0), st.signal(2), st.signal(3)),
    )
    error = rejects(alone(queues=queues, signals=signals(*names)), "deadlock: each of these waits for a step behind")
    assert {str(s) for s in error.steps} == {f"rank 0 queue {q} step 0: wait {'abca'[q]} >= 1" for q in (1, 2, 3)}


def test_a_queue_that_waits_for_itself() -> None:
    rejects(alone(st.wait(0), st.signal(0), signals=signals("s")), "deadlock: .*step 0: wait s >= 1")
    check(alone(st.signal(0), st.wait(0), signals=signals("s")))


# --- races -----------------------------------------------------------------------------------------------------------


def two(first: tuple[Rows, ...], second: tuple[Rows, ...], num_signals: int = 2) -> Plan:
    names = [f"s{k}" for k in range(num_signals)]
    return alone(queues=(queue(0, *first), queue(0, *second)), signals=signals(*names))


def test_unordered_steps_of_one_run() -> None:
    write, read = st.copy((0, 0, 0), (0, 2, 8), 24), st.copy((0, 2, 16), (0, 1, 0), 16)
    error = rejects(two((write,), (read,)), r"are not ordered on rank 0 buffer scratch bytes \[16, 32\)")
    assert [str(s)[:21] for s in error.steps] == ["rank 0 queue 0 step 0", "rank 0 queue 1 step 0"]
    check(two((write, st.signal(0), st.wait(1)), (st.wait(0), read, st.signal(1))))
    rejects(two((write,), (write,)), r"\(run 1, writes\) and .*\(run 1, writes\) are not ordered")
    check(two((write,), (st.copy((0, 0, 0), (0, 2, 32), 8),)))


def test_reads_may_be_unordered() -> None:
    check(two((st.copy((0, 0, 0), (0, 1, 0), 32),), (st.copy((0, 0, 0), (0, 1, 32), 32),)))


def test_order_is_transitive() -> None:
    names = signals("a", "b", "c")
    write, read = st.copy((0, 0, 0), (0, 2, 0), 8), st.copy((0, 2, 0), (0, 1, 0), 8)
    queues = [queue(0, write, st.signal(0)), queue(0, st.wait(0), st.signal(1)), queue(0, st.wait(1), read)]
    check(alone(queues=tuple(queues), signals=names))
    queues[1] = queue(0, st.signal(1), st.wait(0))
    rejects(alone(queues=tuple(queues), signals=names), "not ordered")


def test_a_swap_writes_both_sides() -> None:
    plan = alone(
        queues=(queue(0, st.swap((0, 0, 0), (0, 0, 32), 32)), queue(0, st.copy((0, 0, 0), (0, 1, 0), 8))),
        roles=(INOUT, OUTPUT),
    )
    rejects(plan, r"inout bytes \[0, 8\)")


def test_scratch_is_shared_with_the_next_run() -> None:
    """Rank 1 reads rank 0's box; without a word back, rank 0 may fill it again in run 2."""
    n = 16
    plan = Plan(
        name="box",
        world=2,
        buffers=(buffer("in", INPUT, [n] * 2), buffer("box", SCRATCH, [n] * 2), buffer("out", OUTPUT, [n] * 2)),
        signals=signals("full", "empty"),
        queues=(
            queue(0, st.copy((0, 0, 0), (0, 1, 0), n), st.signal(0), st.wait(1)),
            queue(1, st.wait(0), st.copy((0, 1, 0), (1, 2, 0), n), st.signal(1)),
        ),
        goal=st.copy((0, 0, 0), (1, 2, 0), n),
    )
    check(plan)
    broken = without(plan, 0, 2)
    check(broken, runs=1)
    error = rejects(
        broken, r"\(run 1, reads\) and .* \(run 2, writes\) are not ordered on rank 0 buffer box bytes \[0, 16\)"
    )
    assert [str(s)[:21] for s in error.steps] == ["rank 1 queue 0 step 1", "rank 0 queue 0 step 0"]


def test_the_caller_is_a_party() -> None:
    early = rejects(
        without(push(), 0, 0), r"writes rank 1 buffer output bytes \[0, 64\).* after the start of the caller of rank 1"
    )
    assert early.steps[1] == "caller of rank 1 at the start of run 2"
    late = rejects(without(push(), 1, 1), "before the end of the caller of rank 1")
    assert str(late.steps[0]).startswith("rank 0 queue 0 (send) step 1: copy 64 B")
    assert late.steps[1] == "caller of rank 1 at the end of run 1"


def test_an_input_must_be_free_at_the_end() -> None:
    """Rank 1 pulls from rank 0, which does not wait for it: fine once, not with another run."""
    n = 8
    plan = Plan(
        name="pull",
        world=2,
        buffers=(buffer("in", INPUT, [n, ABSENT]), buffer("out", OUTPUT, [ABSENT, n])),
        signals=signals("ready"),
        queues=(queue(0, st.signal(0)), queue(1, st.wait(0), st.copy((0, 0, 0), (1, 1, 0), n))),
        goal=st.copy((0, 0, 0), (1, 1, 0), n),
    )
    check(plan, runs=1)
    rejects(plan, "reads rank 0 buffer in .* before the end of the caller of rank 0")


# --- results ---------------------------------------------------------------------------------------------------------


def test_undefined_bytes() -> None:
    fill, use = st.copy((0, 0, 0), (0, 2, 0), 16), st.copy((0, 2, 8), (0, 1, 0), 16)
    error = rejects(
        alone(fill, use), r"step 1: .* reads rank 0 buffer scratch bytes \[16, 24\), which nobody has written"
    )
    assert len(error.steps) == 1
    rejects(alone(st.copy((0, 1, 0), (0, 2, 0), 8)), "reads rank 0 buffer output")  # stale from the run before


def test_wrong_results() -> None:
    goal = st.copy((0, 0, 0), (0, 1, 0), 64)
    check(alone(goal, goal=goal))
    rejects(alone(goal=goal), r"wrong result: no step writes rank 0 buffer output bytes \[0, 64\); goal 0: copy 64 B")
    shifted = st.copy((0, 0, 8), (0, 1, 0), 56), st.copy((0, 0, 0), (0, 1, 56), 8)
    error = rejects(
        alone(*shifted, goal=goal), "wrong result: rank 0 buffer output .* what was filled into rank 0 buffer input"
    )
    assert [str(s).split(":")[0] for s in error.steps] == ["rank 0 queue 0 step 0", "goal 0"]
    rejects(alone(goal, st.copy((0, 0, 0), (0, 1, 32), 8), goal=goal), r"output bytes \[32, 40\) ends with")


def test_bytes_outside_the_goal_are_free() -> None:
    check(alone(st.copy((0, 0, 0), (0, 1, 0), 64), goal=st.copy((0, 0, 0), (0, 1, 0), 8)))


def test_a_goal_outside_the_callers_buffers_must_be_reached_by_the_end() -> None:
    goal = st.copy((0, 0, 0), (1, 1, 0), 8)
    buffers = (buffer("in", INPUT, [8, ABSENT]), buffer("box", SCRATCH, [ABSENT, 8]))
    queues = (queue(0, goal, st.signal(0), st.wait(1)), queue(1, st.wait(0), st.signal(1)))
    plan = Plan(name="g", world=2, buffers=buffers, signals=signals("a", "b"), queues=queues, goal=goal)
    check(plan)
    late = (queue(0, goal, st.signal(0), st.wait(1)), queue(1, st.signal(1)))
    rejects(plan.replace(queues=late), "may do so after its rank's end", runs=1)


def _sum(dst: int, sources: list[tuple[int, int]], number: list[Rows]) -> Rows:
    """A two-byte reduction of (buffer, offset) sources into (0, 1, dst); its sources go to `number`."""
    first = sum(len(n) for n in number)
    number.append(st.sources(0, [b for b, _ in sources], [o for _, o in sources]))
    return st.reduce((0, 1, dst), 2, first, len(sources), DType.BFLOAT16, ReduceOp.SUM)


def test_reductions_are_flat_and_ordered() -> None:
    table: list[Rows] = []
    goal = _sum(0, [(0, 0), (0, 2), (0, 4)], table)
    flat = _sum(0, [(0, 0), (0, 2), (0, 4)], table)
    other = _sum(0, [(0, 2), (0, 0), (0, 4)], table)
    inner, outer = _sum(8, [(0, 0), (0, 2)], table), _sum(0, [(1, 8), (0, 4)], table)
    sources = np.concatenate(table)
    check(alone(flat, goal=goal, sources=sources))
    for wrong in ((other,), (inner, outer)):
        rejects(alone(*wrong, goal=goal, sources=sources), "ends with another reduction")


def test_a_reduction_of_reductions_can_be_traced() -> None:
    """Through a copy, two levels deep, chunk by chunk: read by a goal that asks for the inner one."""
    table: list[Rows] = []
    inner = _sum(8, [(0, 0), (0, 2)], table)
    outer = _sum(0, [(1, 8), (1, 8)], table)
    goal = _sum(16, [(0, 0), (0, 2)], table)
    move = st.copy((0, 1, 8), (0, 1, 16), 2)
    check(alone(inner, outer, move, goal=goal, sources=np.concatenate(table)))


@pytest.mark.parametrize("op", ReduceOp, ids=lambda o: o.name)
def test_a_reduction_of_one_source_is_a_copy(op: ReduceOp) -> None:
    row = st.reduce((0, 1, 0), 64, 0, 1, DType.FLOAT32, op)
    check(alone(row, goal=st.copy((0, 0, 0), (0, 1, 0), 64), sources=st.sources(0, 0, 0)))


def test_elements_must_not_be_cut() -> None:
    """A sum of 4-byte elements over bytes that were brought in shifted by two is not the sum that was asked for."""
    sources = np.concatenate([st.sources(0, 0, [0, 32]), st.sources(0, [2, 0], [0, 34])])
    goal = st.reduce((0, 1, 0), 32, 0, 2, DType.FLOAT32, ReduceOp.SUM)
    bring = st.copy((0, 0, 2), (0, 2, 0), 28)
    shifted = st.reduce((0, 1, 2), 28, 2, 2, DType.FLOAT32, ReduceOp.SUM)
    rejects(alone(bring, shifted, goal=goal, sources=sources), "its elements are cut by others")


def test_an_odd_copy_elsewhere_cuts_no_elements() -> None:
    row = st.reduce((0, 1, 0), 32, 0, 2, DType.FLOAT32, ReduceOp.SUM)
    odd = st.copy((0, 3, 1), (0, 2, 0), 7)
    plan = alone(row, odd, goal=row, roles=(INPUT, OUTPUT, SCRATCH, INPUT), sources=st.sources(0, 0, [0, 32]))
    check(plan)


# --- from outside ----------------------------------------------------------------------------------------------------


def region(number: int, offset: int = 0, length: int = 8) -> Region:
    return Region(rank=0, buffer=number, offset=offset, length=length)


def test_a_gate_is_raised_by_somebody() -> None:
    check(alone(st.wait(0), st.copy((0, 0, 0), (0, 1, 0), 8), signals=signals("gate", kind=IMPORTED)))


@pytest.mark.parametrize(
    ("external", "message"),
    [
        (External(before=(0, 1)), "neither reads nor writes"),
        (External(write=region(9)), "names rank 0 buffer 9"),
        (External(read=region(0), write=region(1, 0, 4)), "copies 8 bytes to 4"),
        (External(write=region(1), before=(1, 1)), "must be an imported one"),
        (External(write=region(1), after=(0, 1)), "must be an exported one"),
        (External(write=region(1, 60)), "external access that writes .* but the buffer has 64"),
        (External(write=region(0)), "is an input"),
    ],
)
def test_externals_are_well_formed(external: External, message: str) -> None:
    names = (*signals("i", kind=IMPORTED), *signals("e", kind=EXPORTED))
    rejects(alone(signals=names, external=(external,)), message)


def test_an_external_without_before_ends_with_its_rank() -> None:
    plan = alone(roles=(OUTSIDE, OUTPUT), goal=st.copy((0, 0, 0), (0, 0, 0), 8), external=(External(write=region(0)),))
    check(plan)
    rejects(with_steps(plan, 0, st.copy((0, 0, 0), (0, 1, 0), 8)), "not ordered on rank 0 buffer outside")


def test_an_external_that_never_begins() -> None:
    names = (*signals("e", kind=EXPORTED), *signals("i", kind=IMPORTED))
    external = External(read=region(0), after=(0, 1), before=(1, 1))
    rejects(alone(st.wait(1), signals=names, external=(external,)), "deadlock: external access that reads")
    circle = alone(st.wait(1), st.signal(0), signals=names, external=(external,))
    rejects(circle, "deadlock: each of these")
    check(alone(st.signal(0), st.wait(1), signals=names, external=(external,)))


def test_who_filled_it() -> None:
    both = (External(write=region(0), before=(0, 1)), External(write=region(0), after=(1, 1), before=(0, 2)))
    names = (*signals("i", kind=IMPORTED), *signals("e", kind=EXPORTED))
    plan = alone(st.wait(0), st.signal(1), st.wait(0, 2), roles=(OUTSIDE,), signals=names, external=both)
    rejects(plan, "both fill rank 0 buffer outside")


# --- captured --------------------------------------------------------------------------------------------------------


def test_a_captured_gate() -> None:
    names = signals("gate", kind=IMPORTED)
    check(alone(st.wait(0), st.reset(0), signals=names, captured=True))
    rejects(alone(st.wait(0), signals=names, captured=True), "must reset gate")
    rejects(alone(st.wait(0), st.reset(0), st.reset(0), signals=names, captured=True), "reset twice")
    rejects(alone(st.reset(0), st.wait(0), signals=names, captured=True), "may come before")


def test_a_gate_must_be_down_before_its_rank_starts_again() -> None:
    queues = (queue(0, st.signal(1)), queue(1, st.wait(0), st.reset(0), st.wait(1), st.reset(1)))
    names = (*signals("gate", kind=IMPORTED), *signals("s"))
    plan = Plan(name="g", world=2, buffers=(), signals=names, queues=queues, goal=st.blank(0), captured=True)
    rejects(plan, "reset s of run 1 may come after .* signal s = 1 of run 2|after rank 0 has started run 2")
    gated = plan.replace(signals=names[:1], queues=(queue(1, st.wait(0), st.reset(0)),))
    rejects(gated, "reset gate of run 1 may come after rank 0 has started run 2")
    check(gated, runs=1)


def test_signals_nobody_waits_for_need_no_reset() -> None:
    check(alone(st.signal(0), signals=signals("s"), captured=True))


# --- parameters ------------------------------------------------------------------------------------------------------


def split(*rows: Rows, goal: Rows, world: int = 1, **more: Any) -> Plan:
    """Input and output cut in two pieces: p0, p1 offsets and p2, p3 lengths; p4..p7 those of the output."""
    names = [f"{b} {w} {k}" for b in ("in", "out") for w in ("offset", "length") for k in (0, 1)]
    fields: dict[str, Any] = {
        "buffers": (buffer("in", INPUT, [AT_RUN]), buffer("out", OUTPUT, [AT_RUN]), buffer("box", SCRATCH, [16])),
        "partitions": (
            Partition(rank=0, buffer=0, offsets=(0, 1), lengths=(2, 3)),
            Partition(rank=0, buffer=1, offsets=(4, 5), lengths=(6, 7)),
        ),
        "equal": ((2, 7), (3, 6)),
        "params": tuple(Param(name=n, rank=0) for n in names),
    }
    return alone(*rows, goal=goal, **(fields | more))


def crossed(length: int = UNBOUNDED, skip: int = 0) -> list[Rows]:
    """Piece 0 to piece 1 and the other way round."""
    return [
        st.copy((0, 0, skip, 0), (0, 1, skip, 5), length, length_param=2, skip=skip),
        st.copy((0, 0, skip, 1), (0, 1, skip, 4), length, length_param=6, skip=skip),
    ]


def test_pieces_of_a_partition() -> None:
    goal = st.sequence(*crossed())
    check(split(*crossed(), goal=goal))
    check(split(*crossed(8), *crossed(UNBOUNDED, 8), goal=goal))
    rejects(split(*crossed(8), *crossed(UNBOUNDED, 16), goal=goal), "wrong result: no step writes")
    rejects(split(*crossed(), goal=goal, equal=()), "length must be that of the piece")
    rejects(split(*crossed(), goal=goal, partitions=split(goal=goal).partitions[:1]), "needs a partition")
    twice = split(goal=goal).partitions
    rejects(split(*crossed(), goal=goal, partitions=(*twice, twice[0])), "has another one already")
    rejects(
        split(*crossed(), goal=goal, partitions=(dataclasses.replace(twice[0], offsets=(0, 0)),)),
        "one offset parameter",
    )


def test_fixed_places_in_a_split_buffer_are_not_provable() -> None:
    goal = st.sequence(*crossed())
    rejects(split(st.copy((0, 0, 0), (0, 2, 0), 8), goal=goal), "its length must be that of the piece at 0")
    rejects(split(st.copy((0, 0, 0, 1), (0, 2, 0), 8), goal=goal), "its length must be that of the piece at p1")
    rejects(split(st.copy((0, 0, 0, 4), (0, 2, 0), 8, length_param=2), goal=goal), "p4 is not the offset")
    rejects(split(st.copy2d((0, 0, 0, 0), (0, 2, 0), 8, 2, 8, 8), goal=goal), "strided copy takes no parameters")
    check(
        split(st.copy((0, 0, 0), (0, 1, 0, 5), UNBOUNDED, length_param=2), crossed()[1], goal=goal)
    )  # piece 0 is at 0


def test_a_box_for_a_piece_must_hold_the_longest() -> None:
    goal = st.blank(0)
    check(split(st.copy((0, 0, 0, 0), (0, 2, 0), 16, length_param=2), goal=goal))
    rejects(split(st.copy((0, 0, 0, 0), (0, 2, 0), 17, length_param=2), goal=goal), "but the buffer has 16 bytes")


def test_a_fixed_length_behind_a_split_one_reads_too_much() -> None:
    """Through the box, 8 bytes whatever the piece holds: right when pieces are long, so a short binding is tried."""
    into = st.copy((0, 0, 0, 0), (0, 2, 0), 8, length_param=2)
    on = st.copy((0, 2, 0), (0, 2, 8), 8)
    check(split(into, goal=st.blank(0)))
    error = rejects(split(into, on, goal=st.blank(0)), r"which nobody has written|box")
    assert "in length 0 = " in str(error)


# --- size ------------------------------------------------------------------------------------------------------------


def test_cost_does_not_depend_on_bytes() -> None:
    """Odd sizes without a common divisor, 16 MB, at shifted places."""
    n = (16 << 20) + 13
    plan = push(n)
    parts = [st.copy((0, 0, a), (1, 1, a), b - a) for a, b in ((0, 1_000_003), (1_000_003, 9_000_017), (9_000_017, n))]
    steps = st.sequence(st.wait(0), *parts, st.signal(1))
    assert min(check(with_steps(plan, 0, steps)).elapsed_ms for _ in range(3)) < 2_000
    short = with_steps(plan, 0, st.sequence(st.wait(0), *parts[:2], st.signal(1)))
    rejects(short, re.escape(f"no step writes rank 1 buffer output bytes [9000017, {n})"))


def test_cuts_are_carried_through_a_chain_of_copies() -> None:
    """The output is cut where only the last of a chain of copies, each at another place, is cut."""
    sizes, n = 1 << 20, 99_991
    roles = [INPUT, OUTPUT, *[SCRATCH] * 6]
    buffers = tuple(buffer(f"b{k}", r, [sizes]) for k, r in enumerate(roles))
    path = [0, 2, 3, 4, 5, 6, 7]
    moves = [st.copy((0, a, 17 * a), (0, b, 17 * b), n) for a, b in pairwise(path)]
    last = [st.copy((0, 7, 17 * 7 + at), (0, 1, at), to - at) for at, to in ((0, 101), (101, 50_021), (50_021, n))]
    goal = st.copy((0, 0, 0), (0, 1, 0), n)
    check(alone(*moves, *last, goal=goal, buffers=buffers))
    error = rejects(
        alone(*moves, *last[:2], last[0], goal=goal, buffers=buffers), r"no step writes .* \[50021, 99991\)"
    )
    assert error.steps


def test_bytes_shifted_too_finely() -> None:
    """One byte on, again and again, over a big buffer: given up with a word, not with the machine's memory."""
    n = 1 << 26
    buffers = (buffer("in", INOUT, [n]), buffer("s", SCRATCH, [n]))
    rows = [st.copy((0, 0, 0), (0, 1, 1), n - 1), st.copy((0, 1, 1), (0, 0, 1), n - 1)]
    rejects(alone(*rows, goal=st.copy((0, 0, 0), (0, 0, 1), n - 1), buffers=buffers), "too finely to be followed")


def test_eight_ranks_in_milliseconds() -> None:
    """All-gather of eight ranks, a queue per peer, with handshake: the size of what builders make."""
    world, n = 8, 4096
    done = {(i, j): world + k for k, (i, j) in enumerate((i, j) for i in range(world) for j in range(world) if i != j)}
    names = [Signal(name=f"entry {r}", rank=r, kind=ENTRY) for r in range(world)]
    names += [Signal(name=f"done {i}.{j}", rank=j) for i, j in done]
    queues = []
    for i in range(world):
        peers = np.array([j for j in range(world) if j != i])
        for e, j in enumerate(peers.tolist()):
            opening = [st.signal(i)] if e == 0 else []
            own = [st.copy((i, 0, 0), (i, 1, i * n), n)] if e == 0 else []
            moves = [st.copy((i, 0, 0), (j, 1, i * n), n), st.signal(done[i, j]), *own, st.wait(done[j, i])]
            queues.append(queue(i, *opening, st.wait(peers), *moves))
    goal = st.sequence(*(st.copy((i, 0, 0), (r, 1, i * n), n) for r in range(world) for i in range(world)))
    buffers = (buffer("in", INPUT, [n] * world), buffer("out", OUTPUT, [world * n] * world))
    plan = Plan(name="ag", world=world, buffers=buffers, signals=tuple(names), queues=tuple(queues), goal=goal)
    assert min(check(plan).elapsed_ms for _ in range(5)) < 2_000


def test_ten_thousand_rows_of_a_ring() -> None:
    """Copy, signal, wait through four slots."""
    count, n = 1667, 64
    number = np.arange(count)

    def word(make: Any, index: int, shift: int) -> Rows:
        rows: Rows = make(np.full(count, index), number + shift)
        return rows

    slot = number % 4 * n
    fill = st.interleave(word(st.wait, 1, -3), st.copy((0, 0, number * n), (0, 1, slot), n), word(st.signal, 0, 1))
    fill = fill[(fill["op"] != Op.WAIT) | (fill["value"] > 0)]
    drain = st.interleave(word(st.wait, 0, 1), st.copy((0, 1, slot), (0, 2, number * n), n), word(st.signal, 1, 1))
    plan = alone(
        buffers=(
            buffer("in", INPUT, [count * n]),
            buffer("ring", SCRATCH, [4 * n]),
            buffer("out", OUTPUT, [count * n]),
        ),
        signals=signals("ready", "freed"),
        queues=(queue(0, fill), queue(0, drain)),
        goal=st.copy((0, 0, 0), (0, 2, 0), count * n),
    )
    assert min(check(plan).elapsed_ms for _ in range(3)) < 10_000
    for w in (find(plan, Op.WAIT)[k] for k in (0, 700, 2500)):
        rejects(without(plan, *w), "not ordered on rank 0 buffer ring")


# --- against a machine -----------------------------------------------------------------------------------------------


@hs.composite
def random_plans(draw: hs.DrawFn) -> Plan:
    """A few moves of all kinds over two or three ranks, each with a signal that others may wait for."""
    rng = random.Random(draw(hs.integers(0, 1 << 30)))
    world, n = rng.choice((1, 2, 3)), 8
    roles = (INPUT, OUTPUT, SCRATCH, INOUT)
    ranks = [*range(world), *(rng.randrange(world) for _ in range(rng.randint(0, 2)))]
    rows: list[list[Rows]] = [[st.signal(q)] if q < world else [] for q in range(len(ranks))]
    names = [Signal(name=f"entry {r}", rank=r, kind=ENTRY) for r in range(world)]
    for q, r in enumerate(ranks):
        rows[q] += [st.wait(p) for p in range(world) if p != r and rng.random() < 0.95]
    sources: list[Rows] = []
    goal: list[Rows] = []
    for _ in range(rng.randint(1, 5)):
        q, length = rng.randrange(len(ranks)), rng.choice((2, 4, 8))
        move = _random_move(rng, world, n, length, sources)
        rows[q].append(move)
        if move["op"][0] == Op.COPY and move["src_buffer"][0] in (0, 3) and move["dst_buffer"][0] != 2:
            goal.append(move)
        names.append(Signal(name=f"s{len(names)}", rank=0))
        rows[q].append(st.signal(len(names) - 1))
        for p in range(len(ranks)):
            if p != q and rng.random() < 0.85:
                rows[p].append(st.wait(len(names) - 1))
    return Plan(
        name="random",
        world=world,
        buffers=tuple(buffer(str(r), r, [n] * world) for r in roles),
        signals=tuple(names),
        queues=tuple(queue(r, *b) for r, b in zip(ranks, rows, strict=True)),
        goal=st.sequence(*goal[:2]),
        sources=np.concatenate(sources) if sources else np.zeros(0, st.SOURCE),
    )


def _random_move(rng: random.Random, world: int, n: int, length: int, sources: list[Rows]) -> Rows:
    def at(*buffers: int) -> tuple[int, int, int]:
        return rng.randrange(world), rng.choice(buffers), rng.randrange(0, n - length + 1, 2)

    match rng.choice(("copy", "copy", "copy", "swap", "broadcast", "reduce")):
        case "swap":
            return st.swap(at(3), at(3), length)
        case "broadcast":
            return st.broadcast(at(0, 3), at(1, 2), at(1, 2), length)
        case "reduce":
            first = sum(len(s) for s in sources)
            sources.append(np.concatenate([st.sources(*at(0, 0, 3)) for _ in range(2)]))
            return st.reduce(at(1, 2, 3), length, first, 2, DType.UINT16, ReduceOp.SUM)
        case _:
            return st.copy(at(0, 0, 2, 3), at(1, 1, 2, 3), length)


@settings(max_examples=200, deadline=None)
@given(plan=random_plans(), seed=hs.integers(0, 1000))
def test_random_plans(plan: Plan, seed: int) -> None:
    error = rejection(plan)
    if error is not None:
        assert error.steps
    else:
        assert faults(plan, runs=3, schedules=8, seed=seed) == ""
