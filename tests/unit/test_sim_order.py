"""Signals, threads and phases of a replay, to the nanosecond; and what a move uses."""

from __future__ import annotations

import itertools

import pytest
from tests.unit import simlib

from dovetail.plan import External, Plan, Region, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.step import DType, ReduceOp
from dovetail.sim import Phase, Program, chrome_trace, price
from dovetail.sim.machine import Steps, Threads, Wiring

LANDED = 340  # latency of engine and link of the test machine
APART = 50  # its command_ns


def test_a_value_from_outside_waits_for_all_that_must_come_before_it() -> None:
    def plan(*external: External) -> Plan:
        a = Assembly("outside", 1)
        a.buffer("data", Role.INOUT, 8000)
        ready = [a.signal(f"ready {n}", 0, SignalKind.EXPORTED) for n in range(2)]
        made = a.signal("made", 0, SignalKind.IMPORTED)
        a.queue(0, 0, st.copy((0, 0, 0), (0, 0, 1000), 1000), st.signal(ready[0]), name="early")
        a.queue(0, 1, st.copy((0, 0, 2000), (0, 0, 4000), 2000), st.signal(ready[1]), name="late")
        a.queue(0, 2, st.wait(made), st.copy((0, 0, 6000), (0, 0, 7000), 10), st.wait(made, 2), name="after")
        return a.plan().replace(external=external)

    region = Region(rank=0, buffer=0, offset=6000, length=10)

    def begin(*external: External) -> int:
        spans = price(plan(*external), simlib.machine(), timeline=True).spans
        return next(s.begin_ns for s in spans if s.track == "rank 0 engine 2")

    def at(value: int, after: tuple[int, int] | None) -> External:
        return External(write=region, before=(2, value), after=after)

    free = begin()
    early, late = begin(at(1, (0, 1))), begin(at(1, (1, 1)))
    assert free < early < late
    assert begin(at(1, (0, 1)), at(1, (1, 1))) == late  # both, so the later one
    assert begin(at(1, None), at(2, (1, 1))) == free  # the first value needs nothing
    assert price(plan(at(1, None), at(2, (1, 1))), simlib.machine()).time_ns >= price(plan(), simlib.machine()).time_ns


def chain() -> Plan:
    """Two ranks: a copy, a signal, a wait, a copy back."""
    a = Assembly("there and back", 2)
    data = a.buffer("data", Role.INOUT, 8000)
    there, back = a.signal("there", 1), a.signal("back", 0)
    a.queue(0, 0, st.copy((0, data, 0), (1, data, 0), 1000), st.signal(there), st.wait(back), name="there")
    a.queue(1, 0, st.wait(there), st.copy((1, data, 0), (0, data, 2000), 3000), st.signal(back), name="back")
    return a.plan()


@pytest.mark.parametrize(("poll_ns", "threads"), [(500, Threads.ONE), (0, Threads.ONE), (500, Threads.RANK)])
def test_the_phases_of_a_chain_are_those_of_its_steps(poll_ns: int, threads: Threads) -> None:
    machine = simlib.machine(engine={"poll_ns": poll_ns}, host={"threads": threads})
    control = 107 if threads is Threads.ONE else 100  # one thread turns from ring to ring
    assert price(chain(), machine).phases_ns == {
        Phase.CONTROL: control,
        Phase.SCHEDULE: 1000,
        Phase.COPY: 1340 + 3340,
        Phase.SYNC: 200 + poll_ns + 200 + 20,
    }
    assert price(passes.prelaunch(chain()), machine).phases_ns == {
        Phase.CONTROL: 3,
        Phase.SCHEDULE: poll_ns,
        Phase.COPY: 1340 + 3340,
        Phase.SYNC: 200 + poll_ns + 200 + 20,
    }


def test_every_thread_opens_the_gates_of_its_own_rank() -> None:
    plan = passes.prelaunch(all_gather.pcpy(4, 64, own_copy=False))
    one = price(plan, simlib.machine(), timeline=True).spans
    own = price(plan, simlib.machine(host={"threads": Threads.RANK}), timeline=True).spans
    assert [s.end_ns for s in one if s.name.startswith("open")] == [3, 6, 9, 12]
    opened = [(s.track, s.end_ns) for s in own if s.name.startswith("open")]
    assert opened == [(f"host of rank {r}", 3) for r in range(4)]


def test_rings_are_submitted_rank_by_rank_and_begin_in_that_order() -> None:
    a = Assembly("mixed", 2)
    data = a.buffer("data", Role.INOUT, 100)
    for rank in (1, 0, 1, 0):
        a.queue(rank, 0, st.copy((rank, data, 0), (1 - rank, data, 50), 10), name="x")
    spans = price(a.plan(), simlib.machine(), timeline=True).spans
    assert [s.name for s in spans if s.name.startswith("submit")] == ["submit rank 0 x"] * 2 + ["submit rank 1 x"] * 2
    engine = [s.begin_ns for s in spans if s.track == "rank 1 engine 0"]
    assert engine == sorted(engine)


def test_a_ring_that_ends_with_a_move_is_known_after_a_signal_of_its_own() -> None:
    a = Assembly("no signal", 2)
    data = a.buffer("data", Role.INOUT, 4000)
    a.queue(0, 0, st.copy((0, data, 0), (1, data, 0), 1000), name="x")
    assert price(a.plan(), simlib.machine()).time_ns == 100 + 1000 + 1340 + 200 + 20


@pytest.mark.parametrize("last", [st.reset(0), st.stamp(0)], ids=["reset", "stamp"])
def test_what_stands_behind_the_last_wait_hides_no_wait(last: st.Rows) -> None:
    a = Assembly("captured", 2)
    data = a.buffer("data", Role.INOUT, 4000)
    done = a.signal("done", 1)
    a.queue(0, 0, st.copy((0, data, 0), (1, data, 0), 1000), st.signal(done), name="x")
    a.queue(1, 0, st.wait(done), last, name="y")
    machine = simlib.machine(host={"threads": Threads.RANK})
    assert price(a.plan(), machine).time_ns == 100 + 1000 + 1340 + 200 + 20


def test_a_ring_with_a_stamp_behind_its_last_wait() -> None:
    a = Assembly("stamped", 2)
    data = a.buffer("data", Role.INOUT, 4000)
    done = a.signal("done", 1)
    rows = (st.copy((0, data, 0), (1, data, 0), 1000), st.signal(done), st.wait(done), st.stamp(0))
    a.queue(0, 0, *rows, name="x")
    assert price(a.plan(), simlib.machine(engine={"poll_ns": 9000})).time_ns == 100 + 1000 + 1340 + 200 + 20


def test_a_rank_notices_what_it_waits_for_and_not_what_it_raises() -> None:
    plan = all_gather.pcpy(2, 1000, own_copy=False)
    machine = simlib.machine(host={"threads": Threads.RANK})
    assert price(plan, machine).time_ns == 100 + 1000 + 1340 + 200 + 20


def test_an_engine_serves_first_who_asked_first() -> None:
    a = Assembly("first come", 2)
    data = a.buffer("data", Role.INOUT, 1 << 16)
    early, late = a.signal("early", 0), a.signal("late", 0)
    a.queue(0, 0, st.wait(late), st.copy((0, data, 0), (1, data, 0), 10), name="asks late")
    a.queue(0, 0, st.wait(early), st.copy((0, data, 100), (1, data, 100), 11), name="asks early")
    a.queue(0, 0, st.copy((0, data, 200), (1, data, 200), 20_000), name="keeps the engine busy")
    a.queue(1, 0, st.signal(early), name="early")
    a.queue(1, 1, st.copy((1, data, 0), (1, data, 30_000), 3000), st.signal(late), name="late")
    spans = price(a.plan(), simlib.machine(), timeline=True).spans
    served = sorted((s.begin_ns, s.size_bytes) for s in spans if s.track == "rank 0 engine 0")
    assert [size for _, size in served] == [20_000, 11, 10]


def test_who_waits_for_an_engine_waits_for_what_is_before_it() -> None:
    """The critical path goes through the move that kept the engine, not through the ring's own submission."""
    a = Assembly("one engine", 2)
    data = a.buffer("data", Role.INOUT, 1 << 16)
    for n in range(2):
        a.queue(0, 0, st.copy((0, data, n * 9000), (1, data, n * 9000), 8000), name=f"r{n}")
    found = price(a.plan(), simlib.machine()).phases_ns
    assert found == {Phase.CONTROL: 107, Phase.SCHEDULE: 1000, Phase.COPY: 16_000 + LANDED, Phase.SYNC: 220}


def test_a_link_is_busy_a_latency_later_than_the_engine() -> None:
    spans = {s.track: s for s in price(chain(), simlib.machine(), timeline=True).spans}
    engine, link = spans["rank 0 engine 0"], spans["link 0 -> 1"]
    assert (link.begin_ns, link.end_ns) == (engine.begin_ns + LANDED, engine.end_ns + LANDED)


def test_reductions_of_two_rings_share_the_cores() -> None:
    a = Assembly("two reductions", 1)
    data = a.buffer("data", Role.INOUT, 1 << 16)
    for n in range(2):
        first = a.sources([0, 0], data, [n * 20_000, n * 20_000 + 4000])
        reduce = st.reduce((0, data, n * 20_000 + 8000), 3000, first, 2, DType.FLOAT32, ReduceOp.SUM)
        a.queue(0, n * 14, reduce, name="x")  # both on engine 0, and on no engine at all
    machine = simlib.machine(host={"submit_ns": 0, "switch_ns": 0})
    assert price(a.plan(), machine).phases_ns[Phase.COPY] == 2 * 3000 * 3 // 90 + 600


def test_an_engine_asks_for_a_link_what_its_fastest_move_takes() -> None:
    """Slow moves behind fast ones must not hide that the fast ones fill the link together."""
    machine = simlib.machine(
        host={"threads": Threads.RANK}, link={"wiring": Wiring.SWITCH}, engine={"paired_gbps": 0.2}
    )
    a = Assembly("fast, then slow", 4)
    data = a.buffer("data", Role.INOUT, 8000)
    for r in (1, 2):
        slow = st.broadcast((r, data, 4000), (0, data, 6000 + r * 10), (3, data, 6000 + r * 10), 1)
        a.queue(r, 0, st.copy((r, data, 0), (0, data, r * 1000), 1000), slow, name="x")
    spans = [s for s in price(a.plan(), machine, timeline=True).spans if "engine" in s.track and s.size_bytes == 1000]
    assert [s.end_ns - s.begin_ns for s in spans] == [2000, 2000]


def test_values_of_one_signal_are_waited_for_one_by_one() -> None:
    a = Assembly("two values", 2)
    data = a.buffer("data", Role.INOUT, 8000)
    done, end = a.signal("done", 1), a.signal("end", 1)
    copy = [st.copy((0, data, n * 2000), (1, data, n * 2000), 2000) for n in range(2)]
    a.queue(0, 0, copy[0], st.signal(done, 1), copy[1], st.signal(done, 2), name="x")
    late = st.copy((1, data, 0), (1, data, 6000), 10)
    a.queue(1, 0, st.wait(done, 2), late, st.signal(end), st.wait(end), name="y")
    spans = price(a.plan(), simlib.machine(), timeline=True).spans
    ends = [s.end_ns for s in spans if s.track == "rank 0 engine 0"]
    begin = next(s.begin_ns for s in spans if s.track == "rank 1 engine 0")
    assert begin == ends[1] + LANDED + 200 + 500


def test_rings_that_ask_at_one_time_are_served_in_the_plan_s_order() -> None:
    a = Assembly("together", 2)
    data = a.buffer("data", Role.INOUT, 8000)
    gates = [a.signal(f"gate {n}", 0) for n in range(3)]
    for n in (2, 0, 1):  # woken in another order than they stand in the plan
        a.queue(1, n, st.signal(gates[n]), name="opens")
    for n in range(3):
        a.queue(0, 0, st.wait(gates[n]), st.copy((0, data, n * 100), (1, data, n * 100), 10 + n), name=f"r{n}")
    machine = simlib.machine(host={"threads": Threads.RANK, "switch_ns": 0, "submit_ns": 0})
    spans = price(a.plan(), machine, timeline=True).spans
    served = sorted((s.begin_ns, s.size_bytes) for s in spans if s.track == "rank 0 engine 0")
    assert [size for _, size in served] == [10, 11, 12]


def test_shared_memory_is_one_for_all_ranks() -> None:
    machine = simlib.machine(
        host={"threads": Threads.RANK}, link={"wiring": Wiring.SHARED_MEMORY}, memory={"bandwidth_gbps": 1.0}
    )
    a = Assembly("apart", 4)
    data = a.buffer("data", Role.INOUT, 4000)
    for r in range(2):  # ranks 0 and 1 each copy within themselves: 2 bytes of memory for each byte
        a.queue(r, 0, st.copy((r, data, 0), (r, data, 1000), 1000), name="x")
    assert price(a.plan(), machine).phases_ns[Phase.COPY] == 4000 + 300
    assert price(a.plan(), machine).limit_ns == 0
    own = simlib.machine(host={"threads": Threads.RANK}, memory={"bandwidth_gbps": 1.0})
    assert price(a.plan(), own).phases_ns[Phase.COPY] == 2000 + 300


def test_a_broadcast_and_a_swap_write_at_the_rate_of_pairs() -> None:
    machine = simlib.machine(link={"bandwidth_gbps": 10.0}, engine={"paired_gbps": 0.5})
    pair = st.broadcast((0, 0, 0), (1, 0, 0), (2, 0, 0), 1000)
    for row, ranks in ((pair, 3), (st.swap((0, 0, 0), (1, 0, 0), 1000), 2)):
        a = Assembly("pair", ranks)
        a.buffer("data", Role.INOUT, 4000)
        a.queue(0, 0, row, name="x")
        assert price(a.plan(), machine).phases_ns[Phase.COPY] == 4000 + 340
        traffic = Program(a.plan()).traffic()
        assert traffic == ({(0, 1): 1000, (0, 2): 1000} if ranks == 3 else {(0, 1): 1000, (1, 0): 1000})


def test_strided_copies_count_all_their_rows() -> None:
    assert Program(copies_2d()).traffic() == {(0, 1): 4 * 64}
    assert price(copies_2d(), simlib.machine()).phases_ns[Phase.COPY] == 256 + 340


def copies_2d() -> Plan:
    a = Assembly("strided", 2)
    data = a.buffer("data", Role.INOUT, 4000)
    a.queue(0, 0, st.copy2d((0, data, 0), (1, data, 0), 64, 4, 64, 256), name="x")
    return a.plan()


def test_only_copies_of_one_source_become_one_broadcast() -> None:
    uneven = passes.b2b(all_to_all.pcpy_uneven(4))
    values = {p.name: 100 for p in uneven.params}
    program = Program(uneven, values)
    assert [len(r.actions) for r in program.widened(7)] == [len(r.actions) for r in program.rings]
    plan = passes.b2b(all_gather.pcpy(8, 64, own_copy=False))
    assert [r.commands for r in Program(plan).widened(3)] == [3] * 8
    copies_only = simlib.machine(engine={"steps": (Steps.COPY,), "broadcast_ways": 7})
    plain = simlib.machine(engine={"steps": (Steps.COPY,)})
    assert price(plan, copies_only).time_ns == price(plan, plain).time_ns


def test_a_program_has_its_parameters() -> None:
    with pytest.raises(ValueError, match="a program has its parameters already"):
        price(Program(chain()), simlib.machine(), params={})


def test_a_trace_puts_what_shares_a_link_side_by_side() -> None:
    a = Assembly("two engines", 2)
    data = a.buffer("data", Role.INOUT, 8000)
    for e in range(2):
        a.queue(0, e, st.copy((0, data, 0), (1, data, e * 2000), 2000), name="x")
    found = price(a.plan(), simlib.machine(), timeline=True)
    trace = chrome_trace(found)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"link 0 -> 1", "link 0 -> 1 (2)"} <= names
    busy: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            busy.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in busy.values():
        assert all(one[1] <= two[0] + 1e-9 for one, two in itertools.pairwise(sorted(spans)))
