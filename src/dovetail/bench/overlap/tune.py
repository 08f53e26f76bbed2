"""Measures the tables that `auto` of `dovetail.overlap` estimates with: the section "overlap" of a profile.

Owns the shapes and sizes that are measured: others than those of the suites, which stay unseen. What matters most is
measured first; when the time is up, the rest is left out and a note says so.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail import env, profile
from dovetail.bench.gpu.spec import Bounds
from dovetail.bench.overlap import scale
from dovetail.bench.overlap.sample import Site, alone_us, compute_us, settings
from dovetail.bench.overlap.spec import Compute, Job, Make, Progress, Row, Scenario, Spec
from dovetail.bench.overlap.work import Work
from dovetail.errors import NotSupported
from dovetail.measure import machine
from dovetail.measure.interleave import schedule
from dovetail.measure.sizes import approximate_bytes, format_bytes
from dovetail.measure.stats import median
from dovetail.overlap import section
from dovetail.overlap.local import CORES
from dovetail.overlap.strategy import PARTITIONED, Setting, Strategy
from dovetail.overlap.tables import Beside, ByCores, BySize, Tables
from dovetail.overlap.tasks import Bound, Call, Communication, Load, Mover, Traffic
from dovetail.overlap.timing import Times

MOST_SLOWDOWN = 50.0  #: one that had to wait until the other was over
_K, _M = 1 << 10, 1 << 20
#: Of a piece, what matters most first; at the first ones pairs are measured too. No scenario has elevenths.
PIECES = tuple(11 * part for part in (512 * _K, 32 * _K, 2 * _K, 128 * _K, 8 * _K, 512, 2 * _M, 128, 8 * _M))
BESIDE = 4  #: so many of them, all with enough time
_LARGEST_WITH_PEERS = 22 * _M  # their peers take several times as much pinned memory
_KINDS = {
    "cuda": ("all_gather", "reduce_scatter", "fetch", "all_to_all", "store", "offload"),
    "cpu": ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"),
}
_WITH_PEERS = 3  # pieces of a host link job: as many as a collective of 4 ranks has
_LONG_S, _FEW_ROUNDS = 45.0, 3
_SHORT_US = 150.0  # a communication that is shorter stands beside a short computation
_SHORT_ROUNDS = 15  # such pairs cost little, and engines take 8 us more or less from run to run
_ENERGY_S = 30.0  # a budget for that too
#: By bound, and whether it is short.
COMPUTES = {
    (Bound.COMPUTE, False): Compute(
        name="tune-mm", bound=Bound.COMPUTE, make=Make.MM, shape=(6144, 5120, 5120), small=(112, 320, 320)
    ),
    (Bound.COMPUTE, True): Compute(
        name="tune-mm-short", bound=Bound.COMPUTE, make=Make.MM, shape=(640, 1280, 7168), small=(48, 48, 48)
    ),
    (Bound.MEMORY, False): Compute(
        name="tune-decode", bound=Bound.MEMORY, make=Make.MM, shape=(24, 12288, 12288), small=(3, 640, 640), operands=2
    ),
    (Bound.MEMORY, True): Compute(
        name="tune-decode-short", bound=Bound.MEMORY, make=Make.MM, shape=(24, 6144, 6144), small=(3, 192, 192),
        operands=6,
    ),
    (Bound.STREAM, False): Compute(
        name="tune-add", bound=Bound.STREAM, make=Make.ADD, shape=(48 << 20,), small=(96 << 10,), operands=2
    ),
    (Bound.STREAM, True): Compute(
        name="tune-add-short", bound=Bound.STREAM, make=Make.ADD, shape=(6 << 20,), small=(12 << 10,), operands=12
    ),
}  # fmt: skip
#: What fewer cores cost depends on how many tiles a product has: more shapes, of which the worst counts.
SHAPES = {
    Bound.COMPUTE: ((4096, 5120, 7168), (10240, 5120, 2560)),
    Bound.MEMORY: ((8, 14336, 7168), (40, 10240, 20480)),
    Bound.STREAM: (),
}


@dataclass(kw_only=True)
class Outcome:
    """What came of it."""

    tables: Tables
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def correct(self) -> bool:
        """Whether everything arrived as it should."""
        return all(row["correct"] for row in self.rows)


@dataclass(frozen=True, slots=True)
class End:
    """One side of a pair: its time alone, when it ended beside the other, and what its cores alone cost it."""

    alone_us: float
    end_us: float
    own: float = 1.0


def while_both(compute: End, comm: End) -> tuple[float, float]:
    """How many times longer each takes for as long as both run.

    The one that ends first ran beside the other all the time. The other did what was left at the pace that its cores
    allow, once it was alone; one that had not begun by then has `MOST_SLOWDOWN`.
    """
    first_us = min(compute.end_us, comm.end_us)
    compute_slowdown, comm_slowdown = (_slowdown(side, first_us) for side in (compute, comm))
    return compute_slowdown, comm_slowdown


def _slowdown(side: End, first_us: float) -> float:
    done = 1 - (side.end_us - first_us) / (side.alone_us * side.own)
    if done * side.alone_us * MOST_SLOWDOWN <= first_us:
        return MOST_SLOWDOWN
    return first_us / (side.alone_us * done)


class _Nothing:
    """No communication."""

    traffic = Traffic(kind="nothing", size_bytes=0)
    movers = frozenset(Mover)
    group = device = None

    def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> None:
        """Nothing to wait for."""


_NOTHING, _IDLE = _Nothing(), Call(lambda: None, Load(name="nothing"))


class Tuner:
    """Fills the tables on one site."""

    def __init__(self, site: Site, budget_s: float, began: float) -> None:
        """`began`: on the monotonic clock, which all processes share."""
        self._site, self._deadline = site, began + budget_s
        self._rounds = 5 if budget_s >= _LONG_S else _FEW_ROUNDS
        self._works: dict[tuple[Bound, bool], tuple[Work, float]] = {}
        self._own_by_cores: dict[tuple[Bound, bool], ByCores] = {}  # of each of these
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._alone: dict[tuple[str, Mover], list[tuple[int, float, int]]] = {}
        self._beside: list[Beside] = []
        self._compute_by_cores: dict[Bound, ByCores] = {}
        self._comm_by_cores: dict[str, ByCores] = {}
        self._link_bytes_per_s = 0.0

    def run(self, progress: Progress | None, joules: dict[Mover, float] | None = None) -> Tables:
        """Everything that there is time for."""
        site = self._site
        if progress:
            progress(0, 1, "computations")
        for key, compute in COMPUTES.items():
            work = site.make(compute)
            self._works[key] = work, compute_us(site, work)
        rate = {bound: self._works[bound, False] for bound in Bound}
        for bound in Bound:
            self._by_cores(bound)
        cells = [(piece, kind) for piece in PIECES for kind in _KINDS[site.backend]]
        cells = [(piece, kind) for piece, kind in cells if piece <= _LARGEST_WITH_PEERS or not _job(kind).with_peers]
        for done, (piece_bytes, kind) in enumerate(cells):
            late = site.agree([time.monotonic() - self._deadline])[0] > 0
            if late and done >= len(_KINDS[site.backend]):  # each kind at one size, however little time there is
                self.notes.append(f"out of time: {len(cells) - done} of {len(cells)} sizes and kinds were not measured")
                break
            if progress:
                progress(done, len(cells), f"{kind} of {format_bytes(piece_bytes)}")
            self._cell(piece_bytes, kind)
        memory = site.memory_bytes_per_s() or rate[Bound.STREAM][0].load.size_bytes / rate[Bound.STREAM][1] * 1e6
        place, mm = site.place, rate[Bound.COMPUTE]
        return Tables(
            num_cores=place.num_cores, core_step=place.core_step, flops=mm[0].load.flops / mm[1] * 1e6,
            memory_bytes_per_s=memory, link_bytes_per_s=self._link_bytes_per_s,
            compute_alone={bound: self._kernels(bound) for bound in Bound},
            compute_by_cores=self._compute_by_cores, comm_by_cores=self._comm_by_cores,
            alone={key: BySize(tuple(sorted(points))) for key, points in self._alone.items()},
            beside=tuple(self._beside), joules_per_gb=joules or {}, source="this run", device=site.device_name,
        )  # fmt: skip

    # --- cores

    def _kept(self) -> list[int]:
        """Numbers of cores that are kept from a computation."""
        place, splits = self._site.place, self._splits()
        return [*(k for k in (place.idle_step, 2 * place.idle_step) if splits and k < place.core_step), *splits]

    def _splits(self) -> list[int]:
        """Numbers of cores that have something to do."""
        place = self._site.place
        if not place.has_partition:
            return []
        steps = [step * place.core_step for step in (1, 2, 4, 8, 12)]
        return [k for k in steps if k <= place.num_cores - place.core_step]

    def _kernels(self, bound: Bound) -> BySize:
        """The times of its computations alone, by what they do."""
        points = {}
        for short in (True, False):
            work, us = self._works[bound, short]
            amount = work.load.flops if bound is Bound.COMPUTE else work.load.size_bytes
            points[int(amount)] = us
        return BySize(tuple((amount, us, self._site.place.num_cores) for amount, us in sorted(points.items())))

    def _by_cores(self, bound: Bound) -> None:
        """Computations on fewer cores, nothing beside them."""
        for short in (False, True):
            self._own_by_cores[bound, short] = self._work_by_cores(bound, self._works[bound, short][0])
        long = [self._own_by_cores[bound, False]]  # what a short one loses beside is in the pairs
        if self._site.backend != "cpu":
            long += [self._work_by_cores(bound, self._site.make(_of_shape(bound, shape))) for shape in SHAPES[bound]]
        worst = {cores: max(curve.at(cores) for curve in long) for cores, _ in long[0].points}
        if len(worst) > 1:
            self._compute_by_cores[bound] = ByCores(tuple(worst.items()))

    def _work_by_cores(self, bound: Bound, work: Work) -> ByCores:
        found, alone, _ = self._timed(work, _NOTHING, [Setting(Strategy.DMA_PARTITION, k) for k in self._kept()])
        points = {self._site.place.num_cores: 1.0}
        for setting, times in found.items():
            left = self._site.place.num_cores - setting.cores
            points[left] = (times.compute_us or alone) / alone
            self._row(
                "by cores", bound=str(bound), computation=work.load.name, cores=left, us=times.compute_us,
                alone_compute_us=alone,
            )  # fmt: skip
        return ByCores(tuple(sorted(points.items())))

    def _moved_by(self, comm: Communication, kind: str) -> None:
        """A communication on few cores, nothing beside it."""
        if Mover.CORES not in comm.movers:
            return
        wanted = [Setting(Strategy.PARTITION, k) for k in self._splits()]
        found, _, _ = self._timed(_IDLE, comm, wanted)  # type: ignore[arg-type]
        took = {setting.cores: times.comm_us for setting, times in found.items() if times.comm_us}
        if took:
            least = min(took.values())
            self._comm_by_cores[kind] = ByCores(tuple((k, took[k] / least) for k in sorted(took)))
            for k, us in took.items():
                self._row("by cores", kind=kind, cores=k, us=us)

    # --- one kind at one size

    def _cell(self, piece_bytes: int, kind: str) -> None:
        site, job = self._site, _job(kind)
        try:
            made = site.link(job, piece_bytes)
        except NotSupported as error:
            self.notes.append(f"{kind} of {format_bytes(piece_bytes)} left out: {error}")
            return
        comm: Communication = made.comm
        made.fresh()
        movers = [mover for mover in Mover if mover in comm.movers]
        wrong = site.agree([0.0 if site.check(made, mover) else 1.0 for mover in movers])
        size, alone = comm.traffic.size_bytes, alone_us(site, comm, movers)
        if not any(wrong):
            alone = self._in_turn(comm, piece_bytes, alone)
        for mover, is_wrong in zip(movers, wrong, strict=True):
            cores = CORES if mover is Mover.CORES and site.backend != "cpu" else int(mover is Mover.CORES)
            self._row("alone", kind=kind, size_bytes=size, mover=str(mover), us=alone[mover], correct=not is_wrong)
            if not is_wrong:
                self._alone.setdefault((comm.traffic.kind, mover), []).append((size, alone[mover], cores))
                self._link_bytes_per_s = max(self._link_bytes_per_s, size / alone[mover] * 1e6)

    def _in_turn(self, comm: Communication, piece_bytes: int, alone: dict[Mover, float]) -> dict[Mover, float]:
        """The communication alone, in turn with computations at any size; at the first ones, pairs in the same rounds.

        `alone`: about what it takes.
        """
        if piece_bytes == PIECES[0]:
            self._moved_by(comm, comm.traffic.kind)
        if piece_bytes in PIECES[: BESIDE if self._rounds > _FEW_ROUNDS else BESIDE - 1]:
            beside = [self._together(comm, bound, alone) for bound in Bound]
            return {mover: statistics.fmean(each[mover] for each in beside) for mover in alone}
        short = min(alone.values()) < _SHORT_US
        return self._timed(self._works[Bound.COMPUTE, short][0], comm, (), list(alone), self._rounds_of(short))[2]

    def _together(self, comm: Communication, bound: Bound, alone: dict[Mover, float]) -> dict[Mover, float]:
        """Every setting beside a computation that takes about as long; the communication alone in the same rounds."""
        site, least = self._site, min(alone.values())
        short = least < _SHORT_US
        work, unit_us = self._works[bound, short]
        work.repeats = scale.repeats(unit_us, least, 1.0)
        wanted = [s for s in settings(site, comm, _EVERY) if s.strategy is not Strategy.SERIAL]
        found, compute, alone = self._timed(work, comm, wanted, list(alone), self._rounds_of(short))
        for setting, times in found.items():
            own = self._own(setting, self._own_by_cores[bound, short], comm.traffic.kind)
            slow = while_both(
                End(compute, times.compute_us or compute, own[0]),
                End(alone[setting.moved_by], times.comm_us or least, own[1]),
            )
            slow = slow[0] * self._shape_risk(setting, bound), slow[1]
            row = Beside(setting.strategy, setting.cores, bound, comm.traffic.kind, comm.traffic.size_bytes, *slow)
            self._beside.append(row)
            self._row(
                "beside", kind=row.kind, bound=str(bound), strategy=str(row.strategy), cores=row.cores,
                size_bytes=row.size_bytes, compute_us=times.compute_us, comm_us=times.comm_us,
                alone_compute_us=compute, alone_comm_us=alone[setting.moved_by], compute_slowdown=slow[0],
                comm_slowdown=slow[1],
            )  # fmt: skip
        work.repeats = 1
        return alone

    def _rounds_of(self, short: bool) -> int:
        return _SHORT_ROUNDS if short and self._rounds > _FEW_ROUNDS else self._rounds

    def _own(self, setting: Setting, compute: ByCores, kind: str) -> tuple[float, float]:
        """What the cores of each side cost it, whoever is beside."""
        if setting.strategy not in PARTITIONED:
            return 1.0, 1.0
        comm = self._comm_by_cores.get(kind) if setting.moved_by is Mover.CORES else None
        return compute.at(self._site.place.num_cores - setting.cores), comm.at(setting.cores) if comm else 1.0

    def _shape_risk(self, setting: Setting, bound: Bound) -> float:
        """How much more its cores cost the worst of the shapes than the one that pairs are measured with."""
        worst = self._compute_by_cores.get(bound)
        if worst is None or setting.strategy not in PARTITIONED:
            return 1.0
        left = self._site.place.num_cores - setting.cores
        return max(worst.at(left) / self._own_by_cores[bound, False].at(left), 1.0)

    # --- runs

    def _timed(
        self, work: Work, comm: Communication, wanted: Sequence[Setting], movers: Sequence[Mover] = (), rounds: int = 0
    ) -> tuple[dict[Setting, Times], float, dict[Mover, float]]:
        """Medians that all ranks agree on, of settings that can run here, warmed first; and of each side alone.

        All in the same rounds: clocks and the link are not the same at other times.
        """
        site, ready = self._site, []
        for setting in wanted:
            try:
                site.warm(work, comm, setting)
            except NotSupported as error:
                note = f"{setting} left out: {error}"
                self.notes += [note] if note not in self.notes else []
            else:
                ready.append(setting)
        calls: list[Callable[[], Times]] = [functools.partial(site.both, work, comm, setting) for setting in ready]
        calls.append(lambda: Times(compute_us=site.compute_us(work)))
        calls += [lambda m=mover: Times(comm_us=site.comm_us(comm, m)) for mover in movers]  # type: ignore[misc]
        every: list[list[Times]] = [[] for _ in calls]
        for turn in schedule([rounds or self._rounds] * len(calls)):
            every[turn].append(calls[turn]())
        flat = [median(getattr(t, side) or 0.0 for t in times) for times in every for side in ("compute_us", "comm_us")]
        told = site.agree(flat)
        pairs = [Times(compute_us=a, comm_us=b) for a, b in zip(told[::2], told[1::2], strict=True)]
        compute, *comms = pairs[len(ready) :]
        alone = {mover: times.comm_us or 0.0 for mover, times in zip(movers, comms, strict=True)}
        return dict(zip(ready, pairs, strict=False)), compute.compute_us or 0.0, alone

    def _row(self, what: str, *, correct: bool = True, **more: Any) -> None:
        same = {"collective": "overlap", "backend": self._site.backend, "row": what, "correct": correct}
        self.rows.append(same | more)


_EVERY = Spec(
    scenarios=(Scenario(compute=COMPUTES[Bound.COMPUTE, False], job=Job(name="", kind="fetch", small=""), ratio=1.0),)
)  # only its strategies are looked at: all


def _of_shape(bound: Bound, shape: tuple[int, int, int]) -> Compute:
    m, k, n = shape
    return Compute(name=f"tune-{m}x{k}x{n}", bound=bound, make=Make.MM, shape=shape, small=shape)


def _job(kind: str) -> Job:
    return Job(name=kind, kind=kind, small=kind, num_pieces=_WITH_PEERS)


def measure(site: Site, progress: Progress | None, budget_s: float, began: float) -> Outcome:
    """On a site, in each rank."""
    tuner = Tuner(site, budget_s, began)
    return Outcome(tables=tuner.run(progress), rows=tuner.rows, notes=tuner.notes)


def on_ranks(ranks: int, budget_s: float, progress: Progress | None) -> Outcome:
    """On a CPU; all ranks have found the same."""
    from dovetail.bench.overlap.ranks import on_ranks as start

    found: Outcome = start(ranks, measure, (budget_s, time.monotonic()), progress)[0]
    return found


def on_gpu(ranks: int, budget_s: float, bounds: Bounds, progress: Progress | None) -> tuple[Outcome, Row]:
    """On a GPU with peers in host memory, and the GPU for a record."""
    from dovetail.bench.gpu.session import Session
    from dovetail.bench.overlap.gpu import GpuSite

    began = time.monotonic()
    with Session("cuda", bounds) as session, GpuSite(session, ranks) as site:
        joules, notes = _joules(site, session.uuid) if budget_s >= _ENERGY_S else ({}, ["no time for energy"])
        tuner = Tuner(site, budget_s, began)
        found = Outcome(tables=tuner.run(progress, joules), rows=tuner.rows, notes=[*notes, *tuner.notes])
        return found, session.facts()


def _joules(site: Any, uuid: Any) -> tuple[dict[Mover, float], list[str]]:
    """For a GB each way, by mover; nothing without a meter."""
    from dovetail.bench.overlap.energy import moving
    from dovetail.measure import energy

    made = site.link(_job("all_gather"), PIECES[0])
    made.fresh()
    if not all(site.check(made, mover) for mover in Mover):
        return {}, ["no energy figures: a result was wrong"]
    try:
        with energy.require(uuid) as meter:
            return moving(site, _IDLE, made.comm, meter)
    except NotSupported as error:
        return {}, [f"no energy figures: {error}"]


def lines(found: Tables) -> list[str]:
    """What was found, for people."""
    rates = f"memory {found.memory_bytes_per_s / 1e9:.0f} GB/s, link {found.link_bytes_per_s / 1e9:.1f} GB/s"
    cores = f"{found.num_cores} cores in steps of {found.core_step}"
    shown = [f"{cores}; {found.flops / 1e12:.3g} TFLOP/s, {rates}"]
    for bound, curve in found.compute_by_cores.items():
        points = ", ".join(f"{cores} x{slowdown:.2f}" for cores, slowdown in curve.points)
        shown.append(f"a computation of the sort {bound}, by cores: {points}")
    for kind, curve in found.comm_by_cores.items():
        points = ", ".join(f"{cores} x{slowdown:.2f}" for cores, slowdown in curve.points)
        shown.append(f"{kind} by cores: {points}")
    for (kind, mover), by_size in found.alone.items():
        points = ", ".join(f"{approximate_bytes(size)} {us:.0f}" for size, us, _ in by_size.points)
        shown.append(f"{kind} alone by {mover}, us: {points}")
    for strategy in dict.fromkeys(row.strategy for row in found.beside):
        mine = [row for row in found.beside if row.strategy is strategy]
        compute, comm = (median(getattr(row, f"{side}_slowdown") for row in mine) for side in ("compute", "comm"))
        slower = f"computation {_times(compute)}, communication {_times(comm)}"
        shown.append(f"{strategy}, while both run: {slower} (medians)")
    if found.joules_per_gb:
        shown.append("joules for a GB: " + ", ".join(f"{mover} {j:.3g}" for mover, j in found.joules_per_gb.items()))
    return shown


def _times(slowdown: float) -> str:
    """``x1.05``; one that waited until the other was over has no figure."""
    return f"x{slowdown:.2f}" if slowdown < MOST_SLOWDOWN else f"x{MOST_SLOWDOWN:.0f} or more"


def save(found: Tables, backend: str) -> Path:
    """Into the profile of this machine; what else it has stays in it, but not older figures of this backend."""
    old, _ = profile.load(env.profile_path(), machine.profile_key())
    kept = dict(old.sections) if old else {}
    before = kept.get(section.SECTION)
    kept[section.SECTION] = (before if isinstance(before, dict) else {}) | {backend: section.section(found)}
    key = old.key if old else machine.profile_key()
    return profile.save(profile.Profile(key=key, sections=kept))
