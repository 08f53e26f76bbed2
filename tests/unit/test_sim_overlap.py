"""Which moves of a ring overlap and which must wait for an earlier one, a case for each kind of move."""

from __future__ import annotations

import pytest
from tests.unit import simlib

from dovetail.plan import Plan, Role
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.step import DType, ReduceOp
from dovetail.sim import Program, price

LANDED = 340  # latency of engine and link of the test machine
APART = 50  # its command_ns


def begins(*rows: st.Rows, buffers: int = 1, **more: object) -> list[int]:
    """When the moves of one ring of rank 0 begin, after the first."""
    a = Assembly("moves", 4)
    for n in range(buffers):
        a.buffer(f"data {n}", Role.INOUT, 1 << 20)
    done = a.signal("done", 0)
    a.queue(0, 0, *rows, st.signal(done), st.wait(done), name="ring")
    machine = simlib.machine(engine={"copy_gbps": 1000.0, "paired_gbps": 1000.0}, link={"bandwidth_gbps": 1000.0})
    spans = [s for s in price(a.plan(), machine, timeline=True, **more).spans if s.track == "rank 0 engine 0"]
    first = min(s.begin_ns for s in spans)
    return sorted(s.begin_ns - first for s in spans)[1:]


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        (st.copy2d((2, 0, 0), (1, 0, 64), 64, 4, 64, 256), False),  # another window of the same pitch
        (st.copy2d((2, 0, 0), (1, 0, 32), 64, 4, 64, 256), True),  # windows that overlap
        (st.copy2d((2, 0, 0), (1, 0, 224), 64, 4, 64, 256), True),  # round the pitch into the first window
        (st.copy2d((2, 0, 0), (1, 0, 5000), 64, 4, 64, 256), False),  # the same window, behind the last row
        (st.copy2d((2, 0, 0), (1, 0, 64), 64, 4, 64, 128), True),  # another pitch: the hulls decide
        (st.copy((2, 0, 0), (1, 0, 128), 64), True),  # between two rows: the hulls decide
        (st.copy((2, 0, 0), (1, 0, 4096), 64), False),
        (st.copy((1, 0, 0), (2, 0, 0), 64), True),  # reads what is written
        (st.copy((2, 0, 0), (0, 0, 0), 64), True),  # overwrites what is read
        (st.copy((2, 0, 0), (0, 0, 4096), 64), False),
        (st.broadcast((2, 0, 0), (3, 0, 0), (1, 0, 0), 64), True),  # its second destination
        (st.broadcast((2, 0, 0), (3, 0, 0), (3, 0, 4096), 64), False),
        (st.swap((2, 0, 0), (1, 0, 0), 64), True),
        (st.swap((0, 0, 0), (2, 0, 0), 64), True),  # a swap writes its source too
        (st.swap((2, 0, 0), (3, 0, 0), 64), False),
        (st.copy((2, 0, 0), (1, 0, 0), 0), False),  # no byte, no hazard
    ],
)
def test_what_meets_a_strided_copy_waits_for_it(second: st.Rows, waits: bool) -> None:
    first = st.copy2d((0, 0, 0), (1, 0, 0), 64, 4, 64, 256)
    (begin,) = begins(first, second)
    assert begin == (1 + LANDED if waits else APART)


def test_a_swap_is_met_at_both_its_ends() -> None:
    for second in (st.copy((0, 0, 0), (3, 0, 0), 64), st.copy((1, 0, 0), (3, 0, 0), 64)):
        (begin,) = begins(st.swap((0, 0, 0), (1, 0, 0), 64), second)
        assert begin == 1 + LANDED


def test_after_a_drain_the_slate_is_clean() -> None:
    first = st.copy((0, 0, 0), (1, 0, 0), 64)
    second = st.copy((0, 0, 4096), (1, 0, 32), 64)  # meets the first
    third = st.copy((0, 0, 8192), (1, 0, 0), 32)  # meets the first too, which has landed by then
    assert begins(first, second, third) == [1 + LANDED, 1 + LANDED + APART]


def test_a_copy_over_its_own_source_is_no_part_of_a_broadcast() -> None:
    a = Assembly("over its source", 2)
    data = a.buffer("data", Role.INOUT, 4000)
    done = a.signal("done", 0)
    rows = (st.copy((0, data, 0), (1, data, 0), 64), st.copy((0, data, 0), (0, data, 32), 64))
    a.queue(0, 0, *rows, st.signal(done), st.wait(done), name="ring")
    assert [r.commands for r in Program(a.plan()).widened(7)] == [2]


def test_long_and_short_ranges_together() -> None:
    """The search for what meets a range must look back as far as the longest one."""
    rows = [st.copy((0, 0, 0), (1, 0, 0), 100_000), st.copy((0, 0, 0), (1, 0, 200_000), 8)]
    found = begins(*rows, st.copy((2, 0, 0), (1, 0, 99_999), 1))
    assert found[1] > LANDED


def test_a_view_that_is_not_staged_is_the_buffer_itself() -> None:
    a = Assembly("view", 2)
    data = a.buffer("data", Role.INOUT, 4096)
    view = a.buffer("view", Role.VIEW, 4096, of=data, staged=(False, False))
    done = a.signal("done", 0)
    rows = (st.copy((1, data, 0), (0, data, 0), 512), st.copy((0, view, 0), (1, data, 1024), 512))
    a.queue(0, 0, *rows, st.signal(done), st.wait(done), name="ring")
    spans = [s.begin_ns for s in price(a.plan(), simlib.machine(), timeline=True).spans if "engine" in s.track]
    assert max(spans) - min(spans) == 512 + LANDED


def test_a_staged_view_is_read_where_it_is_staged() -> None:
    def plan(alt: int) -> Plan:
        a = Assembly("view", 2)
        data = a.buffer("data", Role.INPUT, 4096)
        view = a.buffer("view", Role.VIEW, 4096, of=data, staged=(True, False))
        out = a.buffer("out", Role.OUTPUT, 4096)
        done = a.signal("done", 0)
        fill = st.copy((0, data, 0), (0, view, 1024), 512)
        read = st.copy((0, view, 0), (1, out, 0), 512, alt=alt)
        a.queue(0, 0, fill, read, st.signal(done), st.wait(done), name="ring")
        return a.plan()

    def second(alt: int) -> int:
        spans = [s.begin_ns for s in price(plan(alt), simlib.machine(), timeline=True).spans if "engine" in s.track]
        return max(spans) - min(spans)

    assert second(1024) == 512 + 300  # a copy within a rank has no link's latency
    assert second(2048) == 512


def test_parameters_move_and_cut_ranges() -> None:
    a = Assembly("uneven", 2)
    data = a.buffer("data", Role.INOUT, 1 << 16)
    offset, length = a.param("offset", 0), a.param("length", 0)
    done = a.signal("done", 0)
    first = st.copy((0, data, 0, offset), (1, data, 0, offset), 4096, length_param=length, skip=96)
    second = st.copy((0, data, 0), (1, data, 1000), 1000)
    a.queue(0, 0, first, second, st.signal(done), st.wait(done), name="ring")

    def apart(**params: int) -> int:
        spans = price(a.plan(), simlib.machine(), params=params, timeline=True).spans
        engine = sorted((s.begin_ns, s.size_bytes) for s in spans if "engine" in s.track)
        assert engine[0][1] == min(4096, max(params["length"] - 96, 0))
        return engine[1][0] - engine[0][0]

    assert apart(offset=0, length=1096) == 1000  # [0, 1000) and [1000, 2000)
    assert apart(offset=0, length=1097) == 1001 + LANDED
    assert apart(offset=500, length=1096) == 1000 + LANDED
    assert apart(offset=5000, length=9999) == 4096
    assert apart(offset=0, length=50) == APART  # nothing is left of it


def test_a_reduction_waits_for_its_ring_and_its_ring_for_it() -> None:
    a = Assembly("reduce between", 2)
    data = a.buffer("data", Role.INOUT, 4096)
    done = a.signal("done", 0)
    first = a.sources([0, 1], data, [0, 0])
    reduce = st.reduce((0, data, 2048), 900, first, 2, DType.FLOAT32, ReduceOp.SUM)
    rows = (st.copy((1, data, 3000), (0, data, 3000), 100), reduce, st.copy((0, data, 1024), (1, data, 1024), 120))
    a.queue(0, 0, *rows, st.signal(done), st.wait(done), name="ring")
    found = price(a.plan(), simlib.machine(link={"bandwidth_gbps": 100.0}), timeline=True)
    spans = {(s.track, s.name): (s.begin_ns, s.end_ns) for s in found.spans if "link" not in s.track}
    copies = sorted(v for (track, _), v in spans.items() if "engine" in track)
    (cores,) = [v for (track, _), v in spans.items() if "cores" in track]
    assert cores[0] == copies[0][1] + LANDED
    assert cores[1] - cores[0] == 900 * 3 // 90  # two sources and a destination, at 90 bytes per nanosecond
    assert copies[1][0] == cores[1] + 600 + 40
    assert Program(a.plan()).traffic() == {(1, 0): 100 + 900, (0, 1): 120}
    assert found.limit_ns == 10  # one remote source: 900 bytes one way and 100, at 100 per nanosecond


def test_moves_of_no_bytes_still_take_a_command() -> None:
    found = begins(*(st.copy((0, 0, 0), (1, 0, 64 * n), 0) for n in range(3)))
    assert found == [APART, 2 * APART]
