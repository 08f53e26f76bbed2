"""What `overlap.run` costs the host: over launching the same two by hand, for a pair that is known and for a new one.

Owns the two rivals. By hand is what a user would write: two streams and the events that correctness needs. Both are
called in turn, on an idle GPU, and run in the same setting; the difference of medians is the cost. A pair that is known
is measured in the setting that was kept, and in two that take two streams.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dovetail.bench.overlap.gpu import GpuSite
from dovetail.bench.overlap.spec import Compute, Job, Make, Row
from dovetail.measure.stats import median
from dovetail.overlap.calls import close, run
from dovetail.overlap.calls import runtime as runtime_of
from dovetail.overlap.contenders import ROUNDS_BEFORE_KEPT
from dovetail.overlap.runtime import Runtime
from dovetail.overlap.strategy import COMMUNICATION_FIRST, Setting, Strategy
from dovetail.overlap.tasks import Bound, Call, Communication, Load, apart_of
from dovetail.overlap.trials import Trials

ROUNDS = 1000
PIECE_BYTES = 64 << 10
_JOB = Job(name="all_gather", kind="all_gather", small="all_gather")
_COMPUTE = Compute(name="add", bound=Bound.STREAM, make=Make.ADD, shape=(4096,), small=(4096,))
#: In which a known pair is launched too, whatever is fastest here: both run beside each other, with events.
_TWO_STREAMS = (Setting(Strategy.DMA), Setting(Strategy.STREAMS))
Step = Callable[[], Any]


def measure(site: GpuSite, session: Any, rounds: int = ROUNDS) -> list[Row]:
    """A row for each; `correct` says whether the bytes arrived."""
    work, made = site.work(_COMPUTE), site.link(_JOB, PIECE_BYTES)
    made.fresh()
    right = all(site.check(made, mover) for mover in sorted(made.comm.movers))
    runtime = runtime_of(session.device)
    try:
        with site.place.current(site.timer.main):
            rows = [
                _known(runtime, work, made.comm, session, rounds),
                *(_known(runtime, work, made.comm, session, rounds, setting) for setting in _TWO_STREAMS),
                _new(runtime, work, lambda _: made.comm, session, rounds, "new"),
                _new(runtime, work, lambda number: _sized(made.comm, number), session, rounds, "new, of new sizes"),
            ]
    finally:
        close()
    right = right and all(site.check(made, mover) for mover in sorted(made.comm.movers))
    same = {"collective": "overlap", "backend": site.backend, "row": "cost", "iterations": rounds, "correct": right}
    return [same | row for row in rows]


def _known(
    runtime: Runtime, work: Any, comm: Communication, session: Any, rounds: int, setting: Setting | None = None
) -> Row:  # fmt: skip
    """`setting`: as if it had won; by default the one that has."""
    pair = Call(work, Load(name="known" if setting is None else f"known as {setting}"))
    for _ in range(ROUNDS_BEFORE_KEPT + 1):
        run(pair, comm).wait()
    if setting is not None:
        key = pair.load, comm.traffic
        runtime._pairs[key] = replace(runtime._pairs[key], trials=Trials([setting]), num_unread=0)
    kept = run(pair, comm).setting
    with _by_hand(runtime, kept, work, comm, session) as by_hand:
        hand_us, run_us = _in_turn([by_hand, lambda: run(pair, comm)], session, rounds)
    return {"pair": "known", "setting": str(kept), "hand_us": hand_us, "run_us": run_us, "over_us": run_us - hand_us}


def _sized(comm: Any, number: int) -> Any:
    """The same that says to be of another size: the policy has not been asked for it."""
    other = copy.copy(comm)
    other.traffic = comm.traffic._replace(size_bytes=comm.traffic.size_bytes + number)
    return other


def _new(
    runtime: Runtime, work: Any, comm: Callable[[int], Any], session: Any, rounds: int, pair: str
) -> Row:  # fmt: skip
    """Each a computation of a new name; of communications that have new sizes each, the policy knows none."""
    comms, numbers = [comm(number) for number in range(rounds + 2)], itertools.count(1)
    chosen = runtime.explain(Call(work, Load(name="new")), comms[0]).choice

    def new() -> None:
        number = next(numbers)
        run(Call(work, Load(name=f"{pair} {number}")), comms[number])

    with _by_hand(runtime, chosen, work, comms[0], session) as by_hand:
        hand_us, run_us = _in_turn([by_hand, new], session, rounds)
    return {"pair": pair, "setting": str(chosen), "hand_us": hand_us, "run_us": run_us, "over_us": run_us - hand_us}


@contextlib.contextmanager
def _by_hand(runtime: Runtime, setting: Setting, work: Any, comm: Communication, session: Any) -> Iterator[Step]:
    """The same two in the same setting. Streams are the runtime's: by hand they would be made once too."""
    driver, main, lanes = session.driver, runtime.main(), runtime.place.lanes(setting)  # type: ignore[union-attr]
    there, here = lanes.comm or main, lanes.compute or main
    before, after, beside = (driver.event_create() for _ in range(3))
    mover, cores = setting.moved_by, setting.cores
    compute, apart = _in_lane(runtime, work, here, main), apart_of(comm, setting.moved_by)

    def serial() -> None:
        compute()
        comm.start(mover, stream=main, cores=cores)

    def both() -> None:
        driver.event_record(before, main)
        driver.stream_wait_event(there, before)
        if here != main:
            driver.stream_wait_event(here, before)
        if setting.strategy in COMMUNICATION_FIRST:
            comm.start(mover, stream=there, cores=cores)
            compute()
        else:
            compute()
            comm.start(mover, stream=there, cores=cores)
        if here != main:
            driver.event_record(beside, here)
            driver.stream_wait_event(main, beside)
        driver.event_record(after, there)
        driver.stream_wait_event(main, after)

    def engines() -> None:
        copies = apart(main)  # type: ignore[misc]
        if here != main:
            driver.event_record(before, main)
            driver.stream_wait_event(here, before)
        compute()
        if here != main:
            driver.event_record(beside, here)
            driver.stream_wait_event(main, beside)
        driver.stream_wait_event(main, copies.event)

    yield serial if setting.strategy is Strategy.SERIAL else both if apart is None else engines
    session.synchronize()
    for event in (before, after, beside):
        driver.event_destroy(event)


def _in_lane(runtime: Runtime, work: Any, here: int, main: int) -> Step:
    place: Any = runtime.place

    def compute() -> None:
        place.stream = here
        if here == main:
            work()
        else:
            with place.current(here):
                work()

    return compute


def _in_turn(calls: Sequence[Step], session: Any, rounds: int) -> list[float]:
    """The host's microseconds of each, medians; the GPU is idle when each begins."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for times, call in zip(found, calls, strict=True):
            session.synchronize()
            begin = time.perf_counter_ns()
            call()
            if turn:  # the first one warms up
                times.append((time.perf_counter_ns() - begin) / 1e3)
    session.synchronize()
    return [median(times) for times in found]


def lines(rows: Sequence[Row]) -> list[str]:
    """For people."""
    found = [
        f"pair that is {row['pair']}, {row['setting']}: {row['run_us']:.1f} us of host time, "
        f"by hand {row['hand_us']:.1f}: {row['over_us']:.1f} us over it"
        for row in rows
    ]
    return [*found, "all correct" if all(row["correct"] for row in rows) else "results WRONG"]
