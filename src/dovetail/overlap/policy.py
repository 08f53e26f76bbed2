"""Which way two should run together: pure functions of what is known of them and of what was measured.

Owns the estimate of each setting, the choice among them, and C's (ConCCL's) heuristics for comparison. It starts
nothing; what it remembers, with the tables that it belongs to, only saves time.

An estimate is `together_us` of the two times alone and of the slowdowns that were measured beside each other.
What a setting's own cores cost (a partition, a kernel of few programs) lasts until each is over; the rest ends with
the other. What reduces: engines have figures of their own, measured with a reduction, or none, as their sums take
cores; without any it is `serial`. What is local (inside one GPU): engines do nothing there, so `dma` is never chosen,
and only figures of the kind "local" hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dovetail.measure.sizes import format_bytes
from dovetail.overlap.ideal import together_us
from dovetail.overlap.strategy import ALL, BY_ENGINES, PARTITIONED, Setting, Strategy
from dovetail.overlap.tables import TUNE, Beside, BySize, Tables, log_of, spot
from dovetail.overlap.tasks import Bound, Load, Mover, Traffic

#: From here on `dma` is the default where nothing was measured: four fifths of such a copy are copying (A, MI300X).
DEFAULT_DMA_BYTES = 1 << 20
NEAR = 0.02  #: two estimates that differ by less are equal, and energy decides
_PRODUCTS = (Bound.COMPUTE, Bound.MEMORY)  # the worse of them stands for a computation of which nothing is known
_STREAM_FLOPS_PER_BYTE = 0.3  # a sum of vectors has a sixth in bf16; a product of one row has one, in fp32 a half
_SPLITS = (1, 2, 4, 8)  # times core_step: the partitions that are tried
_SHOWN = 4  # in a reason
_SPLIT = 2  # times core_step: the partition of `few`
_WIDE = 4  # times core_step: a kernel of more programs


class Prediction(NamedTuple):
    """The estimated time of a setting. A tuple: many are made for each choice."""

    setting: Setting
    time_us: float  #: until both are over
    joules: float | None = None  #: for moving the bytes
    notes: tuple[str, ...] = ()  #: what it was estimated with, where that is not what was asked


class Ranking(NamedTuple):
    """Settings by their estimates, and why the first was chosen. What few ask for is made when it is asked for."""

    order: tuple[Setting, ...]  #: all that are available: the chosen one, the others by time, those without figures
    words: Callable[[], str]  #: makes the reason
    estimates: Callable[[], tuple[Prediction, ...]] = tuple

    def __repr__(self) -> str:
        return f"Ranking({self.choice}: {self.reason})"

    @property
    def choice(self) -> Setting:
        """The one to run."""
        return self.order[0]

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """The fastest first; none where nothing was measured."""
        return self.estimates()

    @property
    def reason(self) -> str:
        """Why, with the figures."""
        return self.words()


# --- what is known of a computation ----------------------------------------------------------------------------------


def bound_of(load: Load, tables: Tables | None) -> Bound | None:
    """What a computation waits for: its FLOPs for each byte against the machine's; None unless both are known."""
    if tables is None or not load.flops or not load.size_bytes:
        return None
    flops_per_byte = load.flops / load.size_bytes
    if flops_per_byte >= tables.flops / tables.memory_bytes_per_s:
        return Bound.COMPUTE
    return Bound.STREAM if flops_per_byte < _STREAM_FLOPS_PER_BYTE else Bound.MEMORY


def alone_us(load: Load, tables: Tables | None) -> float | None:
    """The time of a computation, of what is known of it; None if nothing is.

    By the roofline, and not less than kernels of its sort and size were measured to take: short ones do not reach the
    machine's rates.
    """
    if tables is None or not (load.flops or load.size_bytes):
        return None
    roofline_us = 1e6 * max(load.flops / tables.flops, load.size_bytes / tables.memory_bytes_per_s)
    bound, launches = bound_of(load, tables), max(load.launches, 1)
    measured_us = tables.compute_us(bound, load.flops / launches, load.size_bytes / launches) if bound else None
    return roofline_us if measured_us is None else max(roofline_us, launches * measured_us)


def regret(chosen_us: float, best_us: float) -> float:
    """How much longer the chosen one took than the best, as a share of the best."""
    return chosen_us / best_us - 1


# --- the heuristics of C ---------------------------------------------------------------------------------------------


def communication_first(load: Load, comm_groups: int) -> bool:
    """C's order of launches: ascending in work-groups. A computation of which they are not known has many."""
    return not load.groups or comm_groups < load.groups


def conccl(
    compute_us: float, comm_us: float, bound: Bound | None, traffic: Traffic, tables: Tables, *, first: bool = True
) -> Prediction | None:
    """C's partition: k cores, a multiple of `core_step`, for which max(Tg * s_g(total - k), Tc * s_c(k)) is least.

    Args:
        compute_us: alone, with all cores.
        comm_us: alone, moved by cores.
        bound: if None, the computation that suffers more.
        first: see `communication_first`; then it is `priority+partition`, else `partition`.

    Returns the fewest cores of several that are as good, and at least `core_step` are left to the computation; None if
    that cannot be, or if slowdowns by cores were not measured.
    """
    strategy = Strategy.PRIORITY_PARTITION if first else Strategy.PARTITION
    found: list[Prediction] = []
    for cores in range(tables.core_step, tables.num_cores - tables.core_step + 1, tables.core_step):
        compute, comm = _slower(tables, bound, tables.num_cores - cores), tables.comm_slowdown(traffic, cores)
        if compute is None or comm is None:
            return None
        words = f"{cores} of {tables.num_cores} cores: computation x{compute:.2f}, communication x{comm.value:.2f}"
        time_us = max(compute_us * compute, comm_us * comm.value)
        notes = (words, *_other_kind(traffic, comm.kind))
        found.append(Prediction(setting=Setting(strategy, cores), time_us=time_us, notes=notes))
    return min(found, key=lambda p: (p.time_us, p.setting.cores), default=None)


def _slower(tables: Tables, bound: Bound | None, cores: int) -> float | None:
    """The computation's slowdown on so many cores, the larger of the two if its bound is not known."""
    every = [tables.compute_slowdown(each, cores) for each in ([bound] if bound else _PRODUCTS)]
    return max((slowdown for slowdown in every if slowdown is not None), default=None)


# --- ours ------------------------------------------------------------------------------------------------------------


def candidates(
    traffic: Traffic, movers: Collection[Mover], *, num_cores: int, core_step: int, idle_step: int, has_partition: bool
) -> tuple[Setting, ...]:
    """The settings that there are for a pair, `serial` first.

    Args:
        movers: who can move the traffic. Inside one GPU engines only do so in `serial`: it is the driver's own copy.
        core_step: a partition is a multiple of it; 1 on a CPU.
        idle_step: the same of cores that stay idle, in `dma+partition`.
        has_partition: can cores be kept from the computation? It never loses more than half of them.
    """
    splits = [step * core_step for step in _SPLITS if 2 * step * core_step <= num_cores] if has_partition else []
    found = [Setting(Strategy.SERIAL, mover=mover) for mover in Mover if mover in movers]
    if Mover.CORES in movers:
        found += [Setting(Strategy.STREAMS), Setting(Strategy.PRIORITY)]
        if 2 * _WIDE * core_step <= num_cores:  # more of them get in beside a computation that has all cores
            found += [Setting(strategy, _WIDE * core_step) for strategy in (Strategy.STREAMS, Strategy.PRIORITY)]
        found += [Setting(s, k) for s in (Strategy.PARTITION, Strategy.PRIORITY_PARTITION) for k in splits]
    if Mover.ENGINES in movers and not traffic.local:
        idle = [k for k in (idle_step, 2 * idle_step) if k < core_step] if splits else []
        found += [Setting(Strategy.DMA), *(Setting(Strategy.DMA_PARTITION, k) for k in (*idle, *splits[:1]))]
    return tuple(found)


def few(every: Sequence[Setting], core_step: int) -> tuple[Setting, ...]:
    """Those that the runtime chooses among: a choice among all would take it longer than it saves.

    Of a strategy one number of cores, of idle ones the fewest, and priority without a partition.
    """
    split = max({s.cores for s in every if s.cores <= _SPLIT * core_step}, default=0)
    idle = min((s.cores for s in every if s.strategy is Strategy.DMA_PARTITION), default=0)
    cores = {Strategy.PARTITION: split, Strategy.DMA_PARTITION: idle, Strategy.STREAMS: 0, Strategy.PRIORITY: 0}
    some = (s for s in every if s.strategy is not Strategy.PRIORITY_PARTITION)
    return tuple(s for s in some if s.cores == cores.get(s.strategy, s.cores))


def choose(
    traffic: Traffic,
    tables: Tables | None,
    available: Collection[Setting],
    *,
    compute_us: float | None = None,
    comm_us: Mapping[Mover, float] | None = None,
    bound: Bound | None = None,
) -> Ranking:
    """The setting of the least estimated time; of those within `NEAR` of it, the one of the least energy.

    Args:
        tables: None if nothing was measured: then `dma` for what engines can move alone and is not small, else
            `serial`.
        available: those that can run; the estimate leaves out what has no figures, the order has it last.
        compute_us: of the computation alone; if not known, as long as the communication, where the choice matters most.
        comm_us: of the communication alone, by mover; what is missing is estimated from `tables`.
        bound: of the computation; if not known, each setting has the worse of both estimates.
    """
    if not available:
        raise ValueError("there must be a setting to choose from")
    given = comm_us or {}
    if (compute_us is not None and not compute_us >= 0) or (given and not all(us >= 0 for us in given.values())):
        raise ValueError(f"times cannot be negative: compute_us={compute_us}, comm_us={comm_us}")
    if tables is None:
        return _default(traffic, available, f"nothing was measured here (`{TUNE}` does)")
    settings = tuple(available)
    sheet = tables.served((settings, bound, *given), traffic, lambda: _sheet(traffic, tables, settings, bound, given))
    comm = {mover: given[mover] if curve is None else curve.time_us(traffic.size_bytes) for mover, curve in sheet.alone}
    notes: list[str] = []
    if compute_us is None:
        compute_us = min(comm.values(), default=0.0)
        notes.append("the computation's time is not known: taken to be the communication's")
    if bound is None:
        notes.append("what bounds the computation is not known: the worse case")
    if not sheet.entries:
        return _default(traffic, settings, f"nothing like it is in the {tables.source} (`{TUNE}` measures)")
    return _ranking(_estimates(sheet, compute_us, comm, traffic.size_bytes), traffic, sheet, tables.source, notes)


_Estimate = tuple[float, int, tuple[str, ...]]  # microseconds, which entry, what to note of it


def _estimates(sheet: _Sheet, compute_us: float, comm: Mapping[Mover, float], size_bytes: int) -> list[_Estimate]:
    """Of all entries, the fastest first, of equal ones in their order. All at once: a call for each takes as long.

    A figure below 1 is noise, but for a computation without some cores: one that waits for memory may gain by it.
    """
    x = log_of(size_bytes)
    spots = [spot(grid, x) for grid in sheet.grids]
    found: list[_Estimate] = []
    for n, (_, mover, _, notes, fits) in enumerate(sheet.entries):
        comm_us = comm[mover]
        if not fits:  # serial
            found.append((compute_us + comm_us, n, notes))
            continue
        time_us = -1.0
        for compute_own, comm_own, at, computes, comms, may_gain, words in fits:  # of two bounds the worse
            if at is None:
                one_us = max(compute_us * compute_own, comm_us * comm_own)  # type: ignore[operator]
            else:
                left, right, share = spots[at]
                compute = computes[left] * (1 - share) + computes[right] * share
                slowed = comms[left] * (1 - share) + comms[right] * share
                if compute < 1.0 and not may_gain:
                    compute = 1.0
                if slowed < 1.0:
                    slowed = 1.0
                lasts = compute if compute_own is None or compute_own > compute else compute_own
                comm_lasts = slowed if comm_own is None or comm_own > slowed else comm_own
                one_us = together_us(compute_us * lasts, comm_us * comm_lasts, compute / lasts, slowed / comm_lasts)
            if one_us > time_us or (one_us == time_us and words > notes):
                time_us, notes = one_us, words
        found.append((time_us, n, notes))
    found.sort()
    return found


class _Fit(NamedTuple):
    """Of a setting beside what is bound so, all that does not depend on sizes and times."""

    compute_own: float | None  #: see `_own`
    comm_own: float | None
    at: int | None  #: the grid of the lines; None: only slowdowns by cores are known, and it is estimated as C does
    compute: tuple[float, ...]
    comm: tuple[float, ...]
    may_gain: bool
    notes: tuple[str, ...]  #: those of the communication alone too


class _Entry(NamedTuple):
    """A setting that has figures."""

    setting: Setting
    mover: Mover
    joules_per_gb: float | None
    notes: tuple[str, ...]  #: of the communication alone
    fits: tuple[_Fit, ...]  #: for each bound that it may have; none of `serial`


class _Sheet(NamedTuple):
    """What an estimate of these settings needs and that does not depend on sizes and times: found out once.

    A choice would take longer than it saves if it looked all of it up.
    """

    alone: tuple[tuple[Mover, BySize | None], ...]  #: of the movers of which the time alone is known; None: it is given
    entries: tuple[_Entry, ...]  #: in the order of strategies, which decides between equal times
    grids: tuple[tuple[float, ...], ...]  #: the sizes that lines have points at: most lines have them in common
    unknown: tuple[Setting, ...]  #: those without figures

    def predictions(self, ranked: Iterable[_Estimate], size_bytes: int) -> tuple[Prediction, ...]:
        """Estimates in full."""
        found = []
        for time_us, n, notes in ranked:
            setting, _, joules_per_gb, *_ = self.entries[n]
            joules = None if joules_per_gb is None else joules_per_gb * size_bytes / 1e9
            found.append(Prediction(setting, time_us, joules, notes))
        return tuple(found)


def _sheet(
    traffic: Traffic, tables: Tables, available: Iterable[Setting], bound: Bound | None, given: Collection[Mover]
) -> _Sheet:
    """`given`: the movers of which the time is told with each question. Engines inside one GPU have no figures."""
    every = sorted(dict.fromkeys(available), key=lambda setting: ALL.index(setting.strategy))
    alone: dict[Mover, tuple[BySize | None, tuple[str, ...]]] = {}
    for mover in {setting.moved_by for setting in every}:
        if mover in given:
            alone[mover] = None, ()
        elif by := tables.alone_by_size(traffic, mover):
            alone[mover] = by[1], _other_kind(traffic, by[0])
    grids: dict[tuple[float, ...], int] = {}
    entries = []
    for setting in every:
        mover, is_serial = setting.moved_by, setting.strategy is Strategy.SERIAL
        if mover not in alone or (traffic.local and setting.strategy in BY_ENGINES):
            continue
        notes = alone[mover][1]
        bounds = [] if is_serial else [bound] if bound else _PRODUCTS
        known = [_fit(setting, each, traffic, tables, grids) for each in bounds]
        fits = tuple(dict.fromkeys(fit._replace(notes=notes + fit.notes) for fit in known if fit is not None))
        if fits or is_serial:
            joules_per_gb = tables.joules_per_gb.get(Mover.CORES if traffic.local else mover)
            entries.append(_Entry(setting, mover, joules_per_gb, notes, fits))
    unknown = set(every) - {entry.setting for entry in entries}
    curves = tuple((mover, curve) for mover, (curve, _) in alone.items())
    return _Sheet(curves, tuple(entries), tuple(grids), tuple(sorted(unknown, key=_standing)))


def _fit(
    setting: Setting, bound: Bound, traffic: Traffic, tables: Tables, grids: dict[tuple[float, ...], int]
) -> _Fit | None:
    """None if there are no figures. Notes its grid in `grids`."""
    lines = tables.like(setting, bound, traffic)
    compute_own, comm_own = _own(setting, bound, traffic, tables)
    may_gain = setting.strategy in PARTITIONED
    if lines is None:
        if setting.strategy not in PARTITIONED - BY_ENGINES or compute_own is None or comm_own is None:
            return None
        return _Fit(compute_own, comm_own, None, (), (), may_gain, (f"{setting}: from slowdowns by cores",))
    at = grids.setdefault(lines.sizes, len(grids))
    notes = _notes(setting, bound, traffic, lines.first)
    return _Fit(compute_own, comm_own, at, lines.compute, lines.comm, may_gain, notes)


def _own(setting: Setting, bound: Bound, traffic: Traffic, tables: Tables) -> tuple[float | None, float | None]:
    """How much longer each takes on the cores that it has, for as long as it runs; None if not measured."""
    compute: float | None = 1.0
    if setting.strategy in PARTITIONED:
        if setting.cores >= tables.num_cores:
            raise ValueError(f"{setting} leaves none of {tables.num_cores} cores to the computation")
        compute = tables.compute_slowdown(bound, tables.num_cores - setting.cores) if setting.cores else None
    if setting.moved_by is Mover.ENGINES or not setting.cores:
        return compute, 1.0
    comm = tables.comm_slowdown(traffic, setting.cores)
    return compute, comm.value if comm else None


def _notes(setting: Setting, bound: Bound, traffic: Traffic, row: Beside) -> tuple[str, ...]:
    """What a row was measured with, where that is not what was asked."""
    notes = list(_other_kind(traffic, row.kind))
    if row.bound is not bound:
        notes.append(f"{setting} was not measured beside a computation of the sort {bound}: figures of {row.bound}")
    if row.cores != setting.cores and setting.strategy is not Strategy.DMA:
        notes.append(f"{setting} was not measured: figures of {row.cores} cores")
    return tuple(notes)


def _other_kind(traffic: Traffic, kind: str) -> tuple[str, ...]:
    return () if traffic.local or kind == traffic.kind else (f"{traffic.kind} was not measured: figures of {kind}",)


def _ranking(
    ranked: list[_Estimate], traffic: Traffic, sheet: _Sheet, source: str, notes: Iterable[str]
) -> Ranking:
    """The choice."""
    limit_us, best = ranked[0][0] * (1 + NEAR), 0
    if len(ranked) > 1 and ranked[1][0] <= limit_us:
        near = sheet.predictions((one for one in ranked if one[0] <= limit_us), traffic.size_bytes)
        best = near.index(_thriftiest(near, traffic))
    order = [sheet.entries[n].setting for _, n, _ in ranked]
    chosen = order.pop(best)
    estimates = functools.partial(sheet.predictions, ranked, traffic.size_bytes)
    words = functools.partial(_words, estimates, best, sheet.unknown, source, notes)
    return Ranking((chosen, *order, *sheet.unknown), words, estimates)


def _words(
    estimates: Callable[[], Sequence[Prediction]], at: int, unknown: Sequence[Setting], source: str,
    notes: Iterable[str],
) -> str:  # fmt: skip
    """The fastest few and `serial`, and what to know of them; the one `at` is the chosen one."""
    ranked = estimates()
    best = ranked[at]
    serial = [p for p in ranked if p.setting.strategy is Strategy.SERIAL][:1]
    shown = list({id(p): p for p in (*ranked[:_SHOWN], best, *serial)}.values())
    if best is not ranked[0]:
        less = "less energy" if best.setting.moved_by is not ranked[0].setting.moved_by else "fewer cores"
        notes = [f"{best.setting} is within {NEAR:.0%} of the fastest and takes {less}", *notes]
    if unknown:
        notes = [*notes, f"without figures: {', '.join(map(str, unknown))}"]
    notes = [*notes, *(note for p in shown for note in p.notes)]
    figures = ", ".join(f"{p.setting} {_microseconds(p.time_us)}" for p in shown)
    return "; ".join((f"{figures} ({source})", *dict.fromkeys(notes)))


def _thriftiest(near: Sequence[Prediction], traffic: Traffic) -> Prediction:
    """The one of the least energy: by joules if they are known of all, else engines before cores.

    Of those that engines move the one that keeps no cores from the computation: what that costs differs from shape to
    shape, as tiles come in waves. Then the fastest.
    """
    told = all(p.joules is not None for p in near)

    def standing(p: Prediction) -> tuple[float, bool, float]:
        by_cores = p.setting.moved_by is Mover.CORES or traffic.local
        joules = p.joules if told and p.joules is not None else float(by_cores)
        return joules, p.setting.strategy is Strategy.DMA_PARTITION, p.time_us

    return min(near, key=standing)


def _microseconds(time_us: float) -> str:
    return f"{time_us:.0f} us" if time_us >= 100 else f"{time_us:.1f} us"


def _default(traffic: Traffic, available: Collection[Setting], why: str) -> Ranking:
    """What is safe without figures: `dma` for what engines can move alone and is not small, else `serial`."""
    free = not (traffic.local or traffic.reduces or traffic.size_bytes < DEFAULT_DMA_BYTES)
    order = sorted(dict.fromkeys(available), key=lambda s: (not (free and s.strategy is Strategy.DMA), *_standing(s)))
    if order[0].strategy is Strategy.DMA and free:
        words = f"engines can move it beside a computation, and it has {format_bytes(DEFAULT_DMA_BYTES)} or more"
    elif traffic.local:
        words = "inside one GPU engines do nothing"
    elif traffic.reduces:
        words = "its sums take cores"
    elif not free:
        words = f"it has less than {format_bytes(DEFAULT_DMA_BYTES)}"
    else:
        words = "engines cannot move it"
    return Ranking(tuple(order), lambda: f"{order[0]}: {why}; {words}")


def _standing(setting: Setting) -> tuple[bool, int, bool, int]:
    """Where a setting without figures stands: `serial` by cores, by engines; what cores move; what engines move."""
    return (
        setting.strategy in BY_ENGINES,
        ALL.index(setting.strategy),
        setting.moved_by is Mover.ENGINES,
        setting.cores,
    )
