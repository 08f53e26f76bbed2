"""The replay of plans: exact times of small ones, closed forms, order, contention, phases, errors."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tests.unit import randomplans, simlib

from dovetail.errors import PlanError
from dovetail.plan import External, Op, Plan, Region, Role, SignalKind, passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all, reduction, rooted
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.step import DType, ReduceOp
from dovetail.sim import Case, MachineError, Phase, Program, chrome_trace, closed, load, names, plan_of, price
from dovetail.sim.collectives import collectives, program_of, unit_bytes, variants
from dovetail.sim.machine import Steps, Threads, Wiring
from dovetail.sim.replay import native


def one_copy(n: int = 1000) -> Plan:
    return plan_of(Case(collective="copy", variant="pcpy", total_bytes=n, ranks=2))


def test_one_copy_takes_each_cost_once() -> None:
    found = price(one_copy(), simlib.machine())
    assert found.phases_ns == {
        Phase.CONTROL: 100,  # one ring: nothing to switch from
        Phase.SCHEDULE: 1000,
        Phase.COPY: 1000 + 300 + 40,
        Phase.SYNC: 200 + 20,
    }
    assert found.time_ns == 2660
    assert found.limit_ns == 1000
    assert found.simulated


def test_a_prelaunched_copy_leaves_control_and_the_doorbell_behind() -> None:
    found = price(passes.prelaunch(one_copy()), simlib.machine())
    assert found.phases_ns == {Phase.CONTROL: 3, Phase.SCHEDULE: 500, Phase.COPY: 1340, Phase.SYNC: 220}


A_CASES = [
    (collective, variant) for collective in ("all_gather", "all_to_all") for variant in ("pcpy", "bcst", "swap", "b2b")
    if variant in variants(collective)
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    case=some.sampled_from(A_CASES),
    ranks=some.integers(2, 8),
    chunk=some.integers(1, 200_000),
    prelaunch=some.booleans(),
    costs=some.lists(some.integers(0, 3000), min_size=10, max_size=10),
    paired=some.floats(0.3, 2.5),
    link=some.floats(0.5, 3.0),
)
def test_the_replay_equals_the_closed_form(
    case: tuple[str, str], ranks: int, chunk: int, prelaunch: bool, costs: list[int], paired: float, link: float
) -> None:
    machine = simlib.machine(
        host=dict(zip(("submit_ns", "command_ns", "switch_ns", "trigger_ns", "observe_ns"), costs[:5], strict=True)),
        engine={
            **dict(zip(("schedule_ns", "poll_ns", "command_ns", "start_ns", "signal_ns"), costs[5:], strict=True)),
            "paired_gbps": paired,
        },
        link={"bandwidth_gbps": link},
    )
    asked = Case(
        collective=case[0], variant=case[1], total_bytes=chunk * ranks, ranks=ranks, prelaunch=prelaunch
    )
    assert price(plan_of(asked), machine).time_ns == closed.time_ns(machine, asked)


@settings(max_examples=60, deadline=None)
@given(data=some.data(), ranks=some.integers(2, 8), factor=some.integers(1, 1 << 20), name=some.sampled_from(names()))
def test_a_scaled_program_is_that_of_the_plan(data: some.DataObject, ranks: int, factor: int, name: str) -> None:
    """What is priced is the plan of just this size, although it was not built anew."""
    collective = data.draw(some.sampled_from(collectives()))
    steps = native(load(name))
    case = Case(
        collective=collective,
        variant=data.draw(some.sampled_from(variants(collective))),
        total_bytes=factor * unit_bytes(collective, ranks),
        ranks=ranks,
        prelaunch=data.draw(some.booleans()),
        complete=data.draw(some.booleans()),
    )
    assert program_of(case, steps).rings == Program(passes.lower(plan_of(case), steps)).rings


BUILDERS: list[Callable[[], Plan]] = [
    lambda: all_gather.pcpy(4, 4096),
    lambda: all_gather.bcst(4, 4096),
    lambda: all_gather.pull(4, 4096),
    lambda: all_gather.pull(4, 400_000, ordinary=(True, False, True, False)),
    lambda: passes.b2b(all_gather.pcpy(4, 4096)),
    lambda: all_to_all.swap(4, 4096),
    lambda: all_to_all.swap_copied(4, 4096),
    lambda: all_to_all.swap_staged(4, 400_000),
    lambda: all_to_all.pull(4, 4096),
    lambda: reduction.twoshot(4, 400_000, DType.FLOAT32, ReduceOp.SUM),
    lambda: reduction.oneshot(4, 400_000, DType.FLOAT32, ReduceOp.SUM),
    lambda: reduction.reduce_scatter(4, 4096, DType.FLOAT32, ReduceOp.SUM),
    lambda: rooted.broadcast_pcpy(4, 4096, 1, pairs=True),
    lambda: rooted.gather_pull(4, 4096, 1),
    lambda: rooted.scatter_pcpy(4, 4096, 1),
    lambda: passes.entry(rooted.barrier(4)),
]


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("form", ["plain", "entry", "entry prelaunch", "chunk"])
def test_every_builder_on_every_machine(name: str, form: str) -> None:
    machine = load(name)
    for build in BUILDERS:
        plan = build()
        if plan.world > machine.ranks:
            continue
        plan = passes.chunk(plan, 64 << 10) if form == "chunk" else plan
        plan = passes.entry(plan) if "entry" in form and "entry" not in plan.passes else plan
        plan = passes.prelaunch(plan) if "prelaunch" in form else plan
        found = price(plan, machine, timeline=True)
        assert found.time_ns > 0
        assert found.time_ns >= found.limit_ns
        assert sum(found.phases_ns.values()) == found.time_ns
        assert all(ns >= 0 for ns in found.phases_ns.values())
        assert found.time_ns == price(plan, machine).time_ns, "a timeline changes nothing"
        assert all(0 <= s.begin_ns <= s.end_ns <= found.time_ns for s in found.spans)


@settings(max_examples=40, deadline=None)
@given(seed=some.integers(0, 1 << 32), threads=some.sampled_from(Threads), wiring=some.sampled_from(Wiring))
def test_random_plans_obey_their_own_order(seed: int, threads: Threads, wiring: Wiring) -> None:
    """Every engine has one move at a time, and all bytes of the plan are on the links' tracks."""
    plan = randomplans.random_plan(seed, ranks=3, moves=12, buffer_bytes=4096)
    machine = simlib.machine(host={"threads": threads}, link={"wiring": wiring}, engine={"count": 2})
    found = price(plan, machine, timeline=True)
    assert sum(found.phases_ns.values()) == found.time_ns >= found.limit_ns
    tracks: dict[str, list[tuple[int, int]]] = {}
    for span in found.spans:
        if "engine" in span.track or span.track.startswith("host"):
            tracks.setdefault(span.track, []).append((span.begin_ns, span.end_ns))
    for busy in tracks.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(busy)))
    on_links = sum(s.size_bytes for s in found.spans if s.track.startswith("link"))
    links = {Wiring.FULLY_CONNECTED: 1, Wiring.SWITCH: 2, Wiring.SHARED_MEMORY: 0}[wiring]  # that a byte crosses
    program = Program(passes.lower(plan, set(Op)))
    assert on_links == links * sum(program.traffic().values())
    assert price(plan, machine).time_ns == found.time_ns


def two_hops(*, waits: bool = True) -> Plan:
    """Rank 0 copies to rank 1, whose own ring passes it on to rank 2."""
    a = Assembly("two hops", 3)
    data = a.buffer("data", Role.INOUT, 1000)
    there, end = a.signal("there", 1), a.signal("end", 2)
    a.queue(0, 0, st.copy((0, data, 0), (1, data, 0), 1000), st.signal(there), name="first")
    wait = [st.wait(there)] if waits else []
    a.queue(1, 0, *wait, st.copy((1, data, 0), (2, data, 0), 1000), st.signal(end), name="second")
    a.queue(2, 0, st.wait(end), name="last")
    return a.plan()


def test_a_wait_holds_its_ring_until_the_signal_was_polled() -> None:
    machine = simlib.machine()
    spans = {s.track: s for s in price(two_hops(), machine, timeline=True).spans if "engine" in s.track}
    landed = spans["rank 0 engine 0"].end_ns + 340
    assert spans["rank 1 engine 0"].begin_ns == landed + 200 + 500
    assert price(two_hops(waits=False), machine).time_ns < price(two_hops(), machine).time_ns


def test_a_signal_that_nobody_raises_is_a_deadlock() -> None:
    plan = two_hops()
    first = dataclasses.replace(plan.queues[0], steps=plan.queues[0].steps[:1])
    with pytest.raises(PlanError, match=r"deadlock: rank 1 \(second\) waits for there >= 1, which nobody raises"):
        price(plan.replace(queues=(first, *plan.queues[1:])), simlib.machine())
    last = dataclasses.replace(plan.queues[1], steps=plan.queues[1].steps[:2])
    with pytest.raises(PlanError, match=r"deadlock: rank 2 \(last\) waits for end"):
        price(plan.replace(queues=(plan.queues[0], last, plan.queues[2])), simlib.machine())


def copies(*places: tuple[int, int, int]) -> Plan:
    """One ring of rank 0 with copies (from, to, destination offset) of 1000 bytes of one buffer."""
    a = Assembly("copies", 4)
    data = a.buffer("data", Role.INOUT, 8000)
    done = a.signal("done", 0)
    rows = [st.copy((src, data, 0), (dst, data, offset), 1000) for src, dst, offset in places]
    a.queue(0, 0, *rows, st.signal(done), st.wait(done), name="ring")
    return a.plan()


def test_back_to_back_moves_overlap_in_their_latency() -> None:
    machine = simlib.machine()
    one, three = price(copies((0, 1, 0)), machine), price(copies((0, 1, 0), (0, 2, 0), (0, 3, 0)), machine)
    assert three.time_ns - one.time_ns == 2 * 1000 + 2 * 10  # bytes, and two commands more to build
    small = simlib.machine(engine={"command_ns": 5000})
    assert price(copies((0, 1, 0), (0, 2, 0)), small).time_ns - price(copies((0, 1, 0)), small).time_ns == 5010


@pytest.mark.parametrize(
    ("second", "waits"),
    [((1, 2, 0), True), ((0, 1, 500), True), ((2, 0, 500), True), ((2, 0, 1000), False), ((0, 1, 1000), False)],
    ids=["reads what was written", "overwrites it", "overwrites its source", "beside its source", "beside it"],
)
def test_a_move_that_depends_on_the_one_before_waits_for_it(second: tuple[int, int, int], waits: bool) -> None:
    spans = [s for s in price(copies((0, 1, 0), second), simlib.machine(), timeline=True).spans if "engine" in s.track]
    begins = sorted(s.begin_ns for s in spans)
    assert begins[1] - begins[0] == (1340 if waits else 1000)


def fan_in() -> Plan:
    """Ranks 1 and 2 both send to rank 0."""
    a = Assembly("fan in", 3)
    data = a.buffer("data", Role.INOUT, 4000)
    done = {r: a.signal(f"done {r}", 0) for r in (1, 2)}
    for r in (1, 2):
        a.queue(r, 0, st.copy((r, data, 0), (0, data, 1000 * r), 1000), st.signal(done[r]), name="send")
        a.queue(0, r, st.wait(done[r]), name="receive")
    return a.plan()


def test_moves_into_one_rank_share_its_link_of_a_switch() -> None:
    apart = simlib.machine(host={"threads": Threads.RANK})
    shared = simlib.machine(host={"threads": Threads.RANK}, link={"wiring": Wiring.SWITCH})
    assert price(fan_in(), shared).time_ns - price(fan_in(), apart).time_ns == 1000
    assert (price(fan_in(), shared).limit_ns, price(fan_in(), apart).limit_ns) == (2000, 1000)


def test_the_second_of_two_sharers_speeds_up_when_the_first_is_done() -> None:
    """One thread submits them 107 ns apart: alone, together at half speed, alone."""
    shared = simlib.machine(link={"wiring": Wiring.SWITCH})
    spans = sorted(
        (s for s in price(fan_in(), shared, timeline=True).spans if "engine" in s.track), key=lambda s: s.begin_ns
    )
    assert spans[1].begin_ns - spans[0].begin_ns == 107
    assert spans[0].end_ns == spans[0].begin_ns + 107 + 2 * (1000 - 107)
    assert spans[1].end_ns == spans[0].begin_ns + 2000


def test_memory_is_shared_and_a_cache_spares_it() -> None:
    slow = simlib.machine(host={"threads": Threads.RANK}, memory={"bandwidth_gbps": 1.0})
    assert price(fan_in(), slow).phases_ns[Phase.COPY] == 2000 + 340  # rank 0's memory takes one byte per nanosecond
    cached = dataclasses.replace(slow, memory=dataclasses.replace(slow.memory, cache_bytes=1000))
    assert price(fan_in(), cached).phases_ns[Phase.COPY] == 1340


def test_reductions_run_on_cores_and_drain_their_ring() -> None:
    plan = reduction.reduce_scatter(2, 4096, DType.FLOAT32, ReduceOp.SUM)
    fast, slow = simlib.machine(), simlib.machine(compute={"reduce_gbps": 0.5})
    assert price(plan, slow).time_ns > price(plan, fast).time_ns
    spans = price(plan, fast, timeline=True).spans
    assert {s.track for s in spans if "cores" in s.track} == {"rank 0 cores", "rank 1 cores"}
    assert not any("engine" in s.track for s in spans)


def test_engines_are_shared_by_rings_beyond_their_number() -> None:
    one = simlib.machine(engine={"count": 1})
    many = simlib.machine()
    plan = all_gather.pcpy(4, 100_000, own_copy=False)
    assert price(plan, one).phases_ns[Phase.COPY] > 2.9 * price(plan, many).phases_ns[Phase.COPY]


def test_a_wider_broadcast_makes_one_command_of_copies() -> None:
    plan = passes.b2b(all_gather.pcpy(8, 64, own_copy=False))
    two, seven = simlib.machine(), simlib.machine(engine={"broadcast_ways": 7})
    assert max(len(r.actions) for r in Program(plan).widened(7)) == 2  # one broadcast, one signal
    assert price(plan, seven).time_ns < price(plan, two).time_ns
    other = passes.b2b(all_to_all.pcpy(8, 64, own_copy=False))  # different sources: nothing to join
    assert price(other, seven).time_ns == price(other, two).time_ns


def test_steps_that_the_engines_lack_are_lowered_or_refused() -> None:
    copies_only = simlib.machine(engine={"steps": (Steps.COPY,)})
    plan = all_to_all.swap(4, 4096)
    assert price(plan, copies_only).time_ns > price(plan, simlib.machine()).time_ns
    with pytest.raises(MachineError, match="has swap steps, which engines of test lack: lower it"):
        price(Program(plan), copies_only)


def test_a_plan_for_more_ranks_than_the_machine_has() -> None:
    with pytest.raises(MachineError, match="plan all_gather pcpy is for 9 ranks, machine test has 8"):
        price(all_gather.pcpy(9, 64), simlib.machine())


def test_parameters_need_values() -> None:
    plan = all_to_all.pcpy_uneven(2)
    with pytest.raises(PlanError, match="needs a value before the plan can be priced"):
        price(plan, simlib.machine())
    values = {p.name: 0 if "offset" in p.name else 5000 for p in plan.params}
    with pytest.raises(PlanError, match="has no parameter 'x'"):
        price(plan, simlib.machine(), params={**values, "x": 1})
    with pytest.raises(PlanError, match="must not be negative"):
        price(plan, simlib.machine(), params={**values, plan.params[0].name: -1})
    short = {name: value and 500 for name, value in values.items()}
    longer = price(plan, simlib.machine(), params=values).time_ns - price(plan, simlib.machine(), params=short).time_ns
    assert longer >= 4500


def test_an_imported_signal_is_up_or_follows_the_exported_one() -> None:
    a = Assembly("kernel between", 1)
    data = a.buffer("data", Role.INOUT, 4000)
    ready = a.signal("ready", 0, SignalKind.EXPORTED)
    made = a.signal("made", 0, SignalKind.IMPORTED)
    a.queue(0, 0, st.copy((0, data, 0), (0, data, 1000), 1000), st.signal(ready), name="before")
    a.queue(0, 1, st.wait(made), st.copy((0, data, 2000), (0, data, 3000), 1000), name="after")
    plan = a.plan()
    region = Region(rank=0, buffer=0, offset=2000, length=1000)
    follows = plan.replace(external=(External(write=region, after=(ready, 1), before=(made, 1)),))
    assert price(follows, simlib.machine()).time_ns > price(plan, simlib.machine()).time_ns + 1000


def test_threads_of_their_own_submit_at_once() -> None:
    one, own = simlib.machine(), simlib.machine(host={"threads": Threads.RANK})
    plan = all_gather.pcpy(8, 64, own_copy=False)
    assert price(plan, one).phases_ns[Phase.CONTROL] == 56 * 107
    tracks = {s.track for s in price(plan, own, timeline=True).spans if s.track.startswith("host")}
    assert tracks == {f"host of rank {r}" for r in range(8)}
    assert price(plan, own).time_ns < price(plan, one).time_ns


def test_a_trace_says_that_it_is_simulated() -> None:
    found = price(all_gather.bcst(4, 4096), simlib.machine(), timeline=True)
    trace = chrome_trace(found)
    assert trace["otherData"]["simulated"] is True
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes
    assert all("simulated" in name for name in processes)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(found.spans)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.time_us)
    assert {"host", "links", "rank 0"} == {p.split(" (")[0] for p in processes if "rank" not in p or "rank 0" in p}


@pytest.mark.parametrize("collective", collectives())
def test_cases_that_make_no_sense(collective: str) -> None:
    good = Case(collective=collective, variant=variants(collective)[0], total_bytes=1 << 20, ranks=2)
    assert plan_of(good).world == 2
    with pytest.raises(ValueError, match="variant of .* must be one of"):
        plan_of(dataclasses.replace(good, variant="nope"))
    with pytest.raises(ValueError, match="at least 2 ranks"):
        plan_of(dataclasses.replace(good, ranks=1))
    with pytest.raises(ValueError, match="positive multiple"):
        plan_of(dataclasses.replace(good, total_bytes=0))


def test_an_unknown_collective() -> None:
    with pytest.raises(ValueError, match="collective must be one of all_gather, "):
        variants("all_gathr")


def test_closed_forms_say_what_they_are_not_for() -> None:
    case = Case(collective="all_gather", variant="pcpy", total_bytes=800, ranks=8)
    with pytest.raises(MachineError, match="one submitting thread and a link per pair"):
        closed.time_ns(simlib.machine(host={"threads": Threads.RANK}), case)
    with pytest.raises(MachineError, match="has 2 engines, pcpy wants more"):
        closed.time_ns(simlib.machine(engine={"count": 2}), case)
    with pytest.raises(ValueError, match="no closed form of all_gather pull"):
        closed.time_ns(simlib.machine(), dataclasses.replace(case, variant="pull"))
    with pytest.raises(ValueError, match="no closed form of all_gather complete"):
        closed.time_ns(simlib.machine(), dataclasses.replace(case, complete=True))
