"""Measures one scenario: scaled, checked, every setting warmed, then timed side by side, then checked again.

Owns the order of a measurement. On several ranks each runs this with the same settings in the same order; `slowest`
makes one sample of theirs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dovetail.bench.overlap import scale
from dovetail.bench.overlap.spec import Compute, Job, Scenario, Spec
from dovetail.bench.overlap.work import Work
from dovetail.errors import NotSupported
from dovetail.measure.interleave import schedule
from dovetail.measure.stats import median
from dovetail.overlap import policy
from dovetail.overlap.contenders import contenders
from dovetail.overlap.local import CORES
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tables import Tables
from dovetail.overlap.tasks import Communication, Computation, Load, Mover, Traffic
from dovetail.overlap.timing import Times

_PROBES = (32 << 10, 4 << 20)  # bytes in a direction: two points of a line
_TRIES = 5
_NEAR_EDGE = (0.28, 3.6)  # what is aimed at instead of 1/4 and 4: sizes are rounded, and beyond there is little to gain
_WARM_US, _MOST_WARM = 10_000.0, 16
#: Who decides: we, by hints and tables; we, of a few that the runtime has tried; C; and three habits.
AUTO, TRIED, CONCCL = "auto", "auto, tried", "conccl"
ALWAYS_DMA, ALWAYS_SERIAL, ALWAYS_STREAMS = "always dma", "always serial", "always streams"
POLICIES = (AUTO, TRIED, CONCCL, ALWAYS_DMA, ALWAYS_SERIAL, ALWAYS_STREAMS)


class Linked(Protocol):
    """A communication that can be checked."""

    @property
    def comm(self) -> Communication: ...
    @property
    def crossing_bytes(self) -> int: ...
    def fresh(self) -> None: ...


class Site(Protocol):
    """Where a measurement is made: `gpu.GpuSite`, or `cpu.CpuSite` in each rank."""

    backend: str
    device_name: str
    ranks: int

    @property
    def place(self) -> Any: ...
    def work(self, compute: Compute) -> Work: ...
    def make(self, compute: Compute) -> Work: ...
    def pieces(self, job: Job) -> int: ...
    def link(self, job: Job, piece_bytes: int) -> Any: ...
    def check(self, made: Any, mover: Mover) -> bool: ...
    def warm(self, work: Computation, comm: Communication, setting: Setting | None) -> None: ...
    def repeat(self, work: Computation, comm: Communication, setting: Setting, number: int) -> None: ...
    def compute_us(self, work: Computation) -> float: ...
    def comm_us(self, comm: Communication, mover: Mover) -> float: ...
    def both(self, work: Computation, comm: Communication, setting: Setting) -> Times: ...
    def agree(self, values: list[float]) -> list[float]: ...
    def memory_bytes_per_s(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was measured of a scenario, round by round, in microseconds; without times if something was wrong."""

    scenario: Scenario
    backend: str
    ranks: int
    piece_bytes: int
    crossing_bytes: int  #: both directions together
    repeats: int
    load: Load
    traffic: Traffic
    right: bool
    compute_us: list[float] = field(default_factory=list)  #: alone
    comm_us: Mapping[Mover, list[float]] = field(default_factory=dict)  #: alone
    both: Mapping[Setting, list[Times]] = field(default_factory=dict)
    choices: Mapping[str, Setting] = field(default_factory=dict)  #: by policy; made before the rounds
    tried: tuple[Setting, ...] = ()  #: what the runtime tries of a pair that comes again
    reason: str = ""  #: of `auto`
    joules: Mapping[Setting, tuple[float, float]] = field(default_factory=dict)  #: of one pair above idle, and error
    notes: tuple[str, ...] = ()


#: Of a pair that stands in its link and is right: joules and their error by setting, and notes.
Joules = dict[Setting, tuple[float, float]]
Gauge = Callable[[Site, Work, Communication, Sequence[Setting], float], tuple[Joules, list[str]]]


class Scaler:
    """What is known of a site's communications: the time of each kind by size, measured once."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lines: dict[tuple[str, str, int], scale.Line] = {}

    def piece_bytes(self, job: Job, want_us: float) -> int:
        """Of a job that is to take `want_us`."""
        number = self._site.pieces(job)
        key = (job.kind, job.small, number)
        if key not in self._lines:
            points = [self._point(job, -(-size // number // 4096) * 4096) for size in _PROBES]
            self._lines[key] = scale.Line.through(points[0], points[1])
        return scale.piece_bytes(self._lines[key], want_us, number)

    def _point(self, job: Job, piece_bytes: int) -> tuple[int, float]:
        made = self._site.link(job, piece_bytes)
        made.fresh()
        movers = [mover for mover in Mover if mover in made.comm.movers]
        for mover in movers:
            self._site.check(made, mover)
        times = alone_us(self._site, made.comm, movers)
        return piece_bytes * self._site.pieces(job), min(times.values())


def alone_us(site: Site, comm: Communication, movers: Sequence[Mover]) -> dict[Mover, float]:
    """The communication alone, by each mover: medians that all ranks agree on.

    Not at once: a link that was idle is at first at half of its speed.
    """
    took = 0.0
    for _ in range(_MOST_WARM):
        took += sum(site.agree([site.comm_us(comm, mover) for mover in movers]))
        if took >= _WARM_US:
            break
    found = site.agree([median(site.comm_us(comm, mover) for _ in range(_TRIES)) for mover in movers])
    return dict(zip(movers, found, strict=True))


def compute_us(site: Site, work: Work) -> float:
    """The computation alone, warmed first: a median that all ranks agree on."""
    site.warm(work, None, None)  # type: ignore[arg-type]
    return site.agree([median(site.compute_us(work) for _ in range(_TRIES))])[0]


def sample(
    site: Site, scenario: Scenario, spec: Spec, scaler: Scaler, tables: Tables | None, gauge: Gauge | None = None
) -> Sampled:
    """Measures a scenario. Raises `NotSupported` if its communication cannot be made here."""
    work = site.work(scenario.compute)
    work.repeats = 1
    unit_us = compute_us(site, work)
    piece_bytes = scenario.job.piece_bytes
    if not piece_bytes:
        want_us = min(max(scenario.ratio, _NEAR_EDGE[0]), _NEAR_EDGE[1]) * max(unit_us, spec.least_us)
        piece_bytes = scaler.piece_bytes(scenario.job, want_us)
    made: Any = site.link(scenario.job, piece_bytes)
    comm: Communication = made.comm
    movers = [mover for mover in Mover if mover in comm.movers]
    right = _check(site, made, movers)
    comm_us = alone_us(site, comm, movers)
    work.repeats = scale.repeats(unit_us, min(comm_us.values()), scenario.ratio)
    alone = compute_us(site, work)
    work.forget()
    site.warm(work, comm, None)
    right &= work.is_right()
    found = Sampled(
        scenario=scenario, backend=site.backend, ranks=site.ranks, piece_bytes=piece_bytes,
        crossing_bytes=made.crossing_bytes, repeats=work.repeats, load=work.load, traffic=comm.traffic, right=right,
    )  # fmt: skip
    if not _all_right(site, right):
        return replace(found, right=False)
    wanted = settings(site, comm, spec)
    ranking = rank(policy.few(wanted, site.place.core_step), comm.traffic, work.load, tables)
    choices = {AUTO: ranking.choice} | others(wanted, comm.traffic, work.load, tables, alone, comm_us)
    ready, notes = _warmed(site, work, comm, list(dict.fromkeys([*wanted, *choices.values()])))
    found = _timed(site, work, comm, ready, movers, spec.rounds, found)
    joules, more = gauge(site, work, comm, ready, alone + min(comm_us.values())) if gauge else ({}, [])
    work.forget()
    site.repeat(work, comm, ready[-1], 1)
    right = work.is_right() and _check(site, made, movers)
    return replace(
        found, right=_all_right(site, right), choices={n: s for n, s in choices.items() if s in ready},
        tried=tuple(s for s in contenders(ranking) if s in ready), reason=ranking.reason, joules=joules,
        notes=(*notes, *more),
    )  # fmt: skip


def settings(site: Site, comm: Communication, spec: Spec) -> list[Setting]:
    """The sweep: all that there are, or those of the strategies that were asked for and `serial`."""
    place = site.place
    found = policy.candidates(
        comm.traffic, comm.movers, num_cores=place.num_cores, core_step=place.core_step, idle_step=place.idle_step,
        has_partition=place.has_partition,
    )  # fmt: skip
    wanted = {Strategy.SERIAL, *(spec.strategies or Strategy)}
    return [setting for setting in found if setting.strategy in wanted]


def rank(available: Sequence[Setting], traffic: Traffic, load: Load, tables: Tables | None) -> policy.Ranking:
    """What `auto` chooses for a new pair, as the runtime asks for it: by what is known before it has run."""
    return policy.choose(
        traffic, tables, available, compute_us=policy.alone_us(load, tables), bound=policy.bound_of(load, tables)
    )


def others(
    available: Sequence[Setting], traffic: Traffic, load: Load, tables: Tables | None, compute_us: float,
    comm_us: Mapping[Mover, float],
) -> dict[str, Setting]:  # fmt: skip
    """What the other policies would run, given both times alone; one that has nothing to say is not among them."""
    found: dict[str, Setting] = {}
    if tables is not None and any(s.strategy is Strategy.PARTITION for s in available):
        first, bound = policy.communication_first(load, CORES), policy.bound_of(load, tables)
        theirs = policy.conccl(compute_us, comm_us[Mover.CORES], bound, traffic, tables, first=first)
        if theirs is not None:
            found[CONCCL] = theirs.setting
    faster = min(comm_us, key=lambda mover: comm_us[mover])
    habits = {
        ALWAYS_DMA: Setting(Strategy.DMA), ALWAYS_SERIAL: Setting(Strategy.SERIAL, mover=faster),
        ALWAYS_STREAMS: Setting(Strategy.STREAMS),
    }  # fmt: skip
    return found | {name: setting for name, setting in habits.items() if setting in available}


def _check(site: Site, made: Linked, movers: Sequence[Mover]) -> bool:
    made.fresh()
    right = [site.check(made, mover) for mover in movers]  # each of them, on all ranks
    return all(right)


def _all_right(site: Site, right: bool) -> bool:
    return site.agree([0.0 if right else 1.0])[0] == 0


def _warmed(site: Site, work: Work, comm: Communication, wanted: Sequence[Setting]) -> tuple[list[Setting], list[str]]:
    """Every setting run once; those that cannot be here are left out, with a note."""
    ready, notes = [], []
    for setting in wanted:
        try:
            site.warm(work, comm, setting)
        except NotSupported as error:
            notes.append(f"{setting} left out: {error}")
        else:
            ready.append(setting)
    return ready, notes


def _timed(
    site: Site, work: Work, comm: Communication, ready: Sequence[Setting], movers: Sequence[Mover], rounds: int,
    found: Sampled,
) -> Sampled:  # fmt: skip
    """All rounds, in orders that favour none."""
    alone: list[float] = []
    alone_comm: dict[Mover, list[float]] = {mover: [] for mover in movers}
    both: dict[Setting, list[Times]] = {setting: [] for setting in ready}
    calls: list[Callable[[], None]] = [lambda: alone.append(site.compute_us(work))]
    calls += [lambda m=mover: alone_comm[m].append(site.comm_us(comm, m)) for mover in movers]  # type: ignore[misc]
    calls += [lambda s=setting: both[s].append(site.both(work, comm, s)) for setting in ready]  # type: ignore[misc]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for contender in schedule([rounds] * len(calls)):
            calls[contender]()
    finally:
        if collecting:
            gc.enable()
    return replace(found, compute_us=alone, comm_us=alone_comm, both=both)


def slowest(samples: Sequence[Sampled]) -> Sampled:
    """One of several ranks': in each round the time of the slowest of them; right if it was on all."""
    first = samples[0]
    return replace(
        first,
        right=all(each.right for each in samples),
        compute_us=_greatest([each.compute_us for each in samples]),
        comm_us={mover: _greatest([each.comm_us[mover] for each in samples]) for mover in first.comm_us},
        both={
            setting: [_together(times) for times in zip(*(each.both[setting] for each in samples), strict=True)]
            for setting in first.both
        },
    )


def _together(times: Sequence[Times]) -> Times:
    return Times(compute_us=max(t.compute_us or 0.0 for t in times), comm_us=max(t.comm_us or 0.0 for t in times))


def _greatest(times: Sequence[Sequence[float]]) -> list[float]:
    return [max(together) for together in zip(*times, strict=True)]
