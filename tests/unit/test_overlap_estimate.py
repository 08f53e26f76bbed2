"""The estimate that the runtime makes for each new pair against a plain one, which looks everything up anew."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dovetail.overlap import ideal
from dovetail.overlap.estimate import Prediction
from dovetail.overlap.policy import NEAR, candidates, choose
from dovetail.overlap.strategy import ALL, BY_ENGINES, PARTITIONED, Setting, Strategy
from dovetail.overlap.tables import LOCAL, Beside, ByCores, BySize, Tables
from dovetail.overlap.tasks import Bound, Mover, Traffic

CORES, STEP = 64, 8
KINDS = ("all_gather", "all_to_all", "reduce_scatter", "fetch", LOCAL)
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 26)
BOTH = candidates(
    Traffic(kind="fetch", size_bytes=1), frozenset(Mover), num_cores=CORES, core_step=STEP, idle_step=2,
    has_partition=True,
)  # fmt: skip
FIGURE, TIME = some.floats(0.5, 8.0), some.floats(0.01, 1e6)


# --- the plain one


def on_the_line(points: list[tuple[float, float]], x: float) -> float:
    """Between two neighbours; beyond the last as there."""
    if x <= points[0][0]:
        return points[0][1]
    for (left, below), (right, above) in itertools.pairwise(points):
        if left <= x < right:
            share = (x - left) / (right - left)
            return below * (1 - share) + above * share
    return points[-1][1]


def slowdowns(setting: Setting, bound: Bound, traffic: Traffic, known: Tables) -> tuple[Beside, float, float] | None:
    """Measured beside, at this size, and whose figures these are."""
    like = known.both(setting, bound, traffic)
    if like is None:
        return None
    rows = [
        (math.log(r.size_bytes), r)
        for r in known.beside
        if (r.strategy, r.cores, r.bound, r.kind) == (like.strategy, like.cores, like.bound, like.kind)
    ]
    rows.sort(key=lambda row: row[0])
    x = math.log(max(traffic.size_bytes, 1))
    compute = on_the_line([(at, row.compute_slowdown) for at, row in rows], x)
    comm = on_the_line([(at, row.comm_slowdown) for at, row in rows], x)
    assert (like.compute_slowdown, like.comm_slowdown) == (compute, comm)
    return like, compute, comm


def together(
    setting: Setting, bound: Bound, compute_us: float, comm_us: float, traffic: Traffic, known: Tables
) -> tuple[float, tuple[str, ...]] | None:
    compute_own: float | None = 1.0
    if setting.strategy in PARTITIONED:
        compute_own = known.compute_slowdown(bound, CORES - setting.cores)
    comm_own: float | None = 1.0
    if setting.moved_by is Mover.CORES and setting.cores:
        by_cores = known.comm_slowdown(traffic, setting.cores)
        comm_own = by_cores.value if by_cores else None
    found = slowdowns(setting, bound, traffic, known)
    if found is None:
        if setting.strategy not in PARTITIONED or setting.strategy in BY_ENGINES:
            return None
        if compute_own is None or comm_own is None:
            return None
        return max(compute_us * compute_own, comm_us * comm_own), (f"{setting}: from slowdowns by cores",)
    row, compute, comm = found
    if setting.strategy not in PARTITIONED:
        compute = max(compute, 1.0)
    comm = max(comm, 1.0)
    compute_lasts = min(compute, math.inf if compute_own is None else compute_own)
    comm_lasts = min(comm, math.inf if comm_own is None else comm_own)
    time_us = ideal.together_us(
        compute_us * compute_lasts, comm_us * comm_lasts, compute / compute_lasts, comm / comm_lasts
    )
    notes = []
    if not traffic.local and row.kind != traffic.kind:
        notes.append(f"{traffic.kind} was not measured: figures of {row.kind}")
    if row.bound is not bound:
        notes.append(f"{setting} was not measured beside a computation of the sort {bound}: figures of {row.bound}")
    if row.cores != setting.cores and setting.strategy is not Strategy.DMA:
        notes.append(f"{setting} was not measured: figures of {row.cores} cores")
    return time_us, tuple(notes)


def plain(
    traffic: Traffic, known: Tables, available: list[Setting], compute_us: float | None,
    given: dict[Mover, float], bound: Bound | None,
) -> list[Prediction]:  # fmt: skip
    """Of each setting that has figures, the fastest first."""
    alone: dict[Mover, tuple[float, tuple[str, ...]]] = {}
    for mover in {setting.moved_by for setting in available}:
        measured = known.comm_us(traffic, mover)
        if mover in given:
            alone[mover] = given[mover], ()
        elif measured:
            same = traffic.local or measured.kind == traffic.kind
            note = f"{traffic.kind} was not measured: figures of {measured.kind}"
            alone[mover] = measured.value, (() if same else (note,))
    if compute_us is None:
        compute_us = min((time_us for time_us, _ in alone.values()), default=0.0)
    found = []
    for setting in available:
        mover = setting.moved_by
        if mover not in alone or (traffic.local and setting.strategy in BY_ENGINES):
            continue
        comm_us, notes = alone[mover]
        if setting.strategy is Strategy.SERIAL:
            worst: tuple[float, tuple[str, ...]] | None = (compute_us + comm_us, ())
        else:
            bounds = [bound] if bound else [Bound.COMPUTE, Bound.MEMORY]
            every = [together(setting, each, compute_us, comm_us, traffic, known) for each in bounds]
            worst = max((one for one in every if one), default=None)
        if worst is not None:
            joules = known.joules_per_gb.get(Mover.CORES if traffic.local else mover)
            energy = None if joules is None else joules * traffic.size_bytes / 1e9
            found.append(Prediction(setting, worst[0], energy, notes + worst[1]))
    return sorted(found, key=lambda p: (p.time_us, ALL.index(p.setting.strategy)))


def best_of(ranked: list[Prediction], traffic: Traffic) -> Setting:
    near = [p for p in ranked if p.time_us <= ranked[0].time_us * (1 + NEAR)]
    if all(p.joules is not None for p in near):
        least = min(p.joules for p in near)
        thrifty = [p for p in near if p.joules == least]
    else:
        by_cores = [p for p in near if p.setting.moved_by is Mover.CORES or traffic.local]
        thrifty = [p for p in near if p not in by_cores] or near
    return min(thrifty, key=lambda p: (p.setting.strategy is Strategy.DMA_PARTITION, p.time_us)).setting


# --- tables and traffic of anything


@some.composite
def tables(draw: Any) -> Tables:
    cases = some.tuples(some.sampled_from(BOTH[2:]), some.sampled_from(Bound), some.sampled_from(KINDS))
    by_size = some.dictionaries(some.sampled_from(SIZES), some.tuples(FIGURE, FIGURE), min_size=1)
    rows = draw(some.dictionaries(cases, by_size, max_size=12))
    compute = some.builds(lambda a, b: ByCores(((32, a), (56, b), (CORES, 1.0))), FIGURE, FIGURE)
    comm = some.builds(lambda a: ByCores(((8, 1 + a), (16, 1.0))), FIGURE)
    times = some.lists(TIME, min_size=1, max_size=len(SIZES)).map(
        lambda found: BySize(tuple((size, time_us, 0) for size, time_us in zip(SIZES, found, strict=False)))
    )
    return Tables(
        num_cores=CORES, core_step=STEP, flops=8e14, memory_bytes_per_s=4e12, link_bytes_per_s=5.5e10,
        compute_by_cores=draw(some.dictionaries(some.sampled_from(Bound), compute)),
        comm_by_cores=draw(some.dictionaries(some.sampled_from(KINDS), comm)),
        alone=draw(some.dictionaries(some.tuples(some.sampled_from(KINDS), some.sampled_from(Mover)), times)),
        beside=tuple(
            Beside(s.strategy, s.cores, bound, kind, size, *figures)
            for (s, bound, kind), sizes in rows.items()
            for size, figures in sizes.items()
        ),
        joules_per_gb=draw(some.dictionaries(some.sampled_from(Mover), some.floats(0.1, 10))),
    )  # fmt: skip


TRAFFIC = some.builds(
    Traffic, kind=some.sampled_from([*KINDS[:4], "broadcast"]), size_bytes=some.integers(0, 1 << 28),
    reduces=some.booleans(), local=some.booleans(),
)  # fmt: skip
LISTS = some.lists(some.sampled_from(BOTH), min_size=1, unique=True)
ASKED = some.tuples(
    TRAFFIC, some.none() | TIME, some.dictionaries(some.sampled_from(Mover), TIME), some.sampled_from([None, *Bound])
)


@some.composite
def questions(draw: Any) -> list[Any]:
    """Some that differ in everything, some in but one thing."""
    available, asked = draw(LISTS), draw(ASKED)
    found = [(available, *asked)]
    for _ in range(draw(some.integers(0, 5))):
        at = draw(some.integers(0, 4))
        other = [draw(LISTS), *draw(ASKED)]
        found.append((*found[-1][:at], other[at], *found[-1][at + 1 :]))
    return [*found, (draw(LISTS), *draw(ASKED))]


@settings(max_examples=200)
@given(known=tables(), every=questions())
def test_the_estimate_is_the_plain_one_whatever_was_asked_before(known: Tables, every: list[Any]) -> None:
    """What is kept between choices is of the sort of traffic and of the settings, not of one choice."""
    for available, traffic, compute_us, given_us, bound in every:
        found = choose(traffic, known, available, compute_us=compute_us, comm_us=given_us, bound=bound)
        wanted = plain(traffic, known, available, compute_us, given_us, bound)
        assert list(found.predictions) == wanted
        assert set(found.order) == set(available)
        assert len(found.order) == len(available)
        if wanted:
            assert found.choice == best_of(wanted, traffic)
            rest = [p.setting for p in wanted if p.setting != found.choice]
            assert list(found.order[1 : len(wanted)]) == rest


@given(known=tables(), every=questions())
def test_reasons_do_not_depend_on_what_was_asked_before(known: Tables, every: list[Any]) -> None:
    for available, traffic, compute_us, given_us, bound in every:
        asked: dict[str, Any] = {"compute_us": compute_us, "comm_us": given_us, "bound": bound}
        fresh = dataclasses.replace(known)
        assert choose(traffic, known, available, **asked).reason == choose(traffic, fresh, available, **asked).reason


# --- what a setting keeps of itself


@pytest.mark.parametrize("setting", [*BOTH, Setting(Strategy.FUSED)], ids=str)
def test_who_moves_and_the_hash_are_of_the_setting(setting: Setting) -> None:
    assert (setting.moved_by is Mover.ENGINES) == (
        setting.strategy in BY_ENGINES or (setting.strategy is Strategy.SERIAL and setting.mover is Mover.ENGINES)
    )
    for same in (
        Setting(setting.strategy, setting.cores, setting.mover), copy.copy(setting),
        pickle.loads(pickle.dumps(setting)), dataclasses.replace(setting),
    ):  # fmt: skip
        assert same == setting
        assert hash(same) == hash(setting)
        assert same.moved_by is setting.moved_by
    other = dataclasses.replace(setting, cores=setting.cores + 1)
    assert other != setting
    assert repr(setting) == f"Setting(strategy={setting.strategy!r}, cores={setting.cores}, mover={setting.mover!r})"
