"""Which way two should run together: pure functions of what is known of them and of what was measured.

Owns the estimate of each setting, the choice among them, and C's (ConCCL's) heuristics for comparison. It starts
nothing and remembers nothing.

An estimate is `ideal.together_us` of the two times alone and of the slowdowns that were measured beside each other.
What a setting's own cores cost (a partition, a kernel of few programs) lasts until each is over; the rest ends with
the other. What reduces: engines have figures of their own, measured with a reduction, or none, as their sums take
cores; without any it is `serial`. What is local (inside one GPU): engines do nothing there, so `dma` is never chosen,
and only figures of the kind "local" hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.measure.sizes import format_bytes
from dovetail.overlap import ideal
from dovetail.overlap.strategy import ALL, BY_ENGINES, PARTITIONED, Setting, Strategy
from dovetail.overlap.tables import TUNE, Beside, Lines, Tables
from dovetail.overlap.tasks import Bound, Load, Mover, Traffic

#: From here on `dma` is the default where nothing was measured: four fifths of such a copy are copying (A, MI300X).
DEFAULT_DMA_BYTES = 1 << 20
NEAR = 0.02  #: two estimates that differ by less are equal, and energy decides
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Settings by their estimates, and why the first was chosen."""

    order: tuple[Setting, ...]  #: all that are available: the chosen one, the others by time, those without figures
    predictions: tuple[Prediction, ...]  #: the fastest first; none where nothing was measured
    words: Callable[[], str]  #: makes the reason, which few ask for

    @property
    def choice(self) -> Setting:
        """The one to run."""
        return self.order[0]

    @property
    def reason(self) -> str:
        """Why, with the figures."""
        return self.words()


# --- what is known of a computation ----------------------------------------------------------------------------------


def bound_of(load: Load, tables: Tables | None) -> Bound | None:
    """What a computation waits for: its FLOPs for each byte against the machine's; None unless both are known."""
    if tables is None or not load.flops or not load.size_bytes:
        return None
    compute = load.flops / load.size_bytes >= tables.flops / tables.memory_bytes_per_s
    return Bound.COMPUTE if compute else Bound.MEMORY


def alone_us(load: Load, tables: Tables | None) -> float | None:
    """The time of a computation by the roofline, of what is known of it; None if nothing is."""
    if tables is None or not (load.flops or load.size_bytes):
        return None
    return 1e6 * max(load.flops / tables.flops, load.size_bytes / tables.memory_bytes_per_s)


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
    every = [tables.compute_slowdown(each, cores) for each in ([bound] if bound else Bound)]
    return max((slowdown for slowdown in every if slowdown is not None), default=None)


# --- ours ------------------------------------------------------------------------------------------------------------


def candidates(
    traffic: Traffic, movers: Collection[Mover], *, num_cores: int, core_step: int, has_partition: bool
) -> tuple[Setting, ...]:
    """The settings that there are for a pair, `serial` first.

    Args:
        movers: who can move the traffic. Inside one GPU engines only do so in `serial`: it is the driver's own copy.
        core_step: a partition is a multiple of it; 1 on a CPU.
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
        found += [Setting(Strategy.DMA), *(Setting(Strategy.DMA_PARTITION, k) for k in splits[:1])]
    return tuple(found)


def few(every: Sequence[Setting], core_step: int) -> tuple[Setting, ...]:
    """Those that the runtime chooses among: a choice among all would take it longer than it saves.

    Of a strategy one number of cores, and priority without a partition.
    """
    split = max({s.cores for s in every if s.cores <= _SPLIT * core_step}, default=0)
    cores = {Strategy.PARTITION: split, Strategy.STREAMS: 0, Strategy.PRIORITY: 0}
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
    if not all(time_us >= 0 for time_us in (compute_us or 0.0, *(comm_us or {}).values())):
        raise ValueError(f"times cannot be negative: compute_us={compute_us}, comm_us={comm_us}")
    if tables is None:
        return _default(traffic, available, f"nothing was measured here (`{TUNE}` does)")
    movers = {setting.moved_by for setting in available}
    alone = {mover: known for mover in movers if (known := _comm_us(traffic, mover, comm_us or {}, tables))}
    notes = []
    if compute_us is None:
        compute_us = min((time_us for time_us, _ in alone.values()), default=0.0)
        notes.append("the computation's time is not known: taken to be the communication's")
    if bound is None:
        notes.append("what bounds the computation is not known: the worse case")
    found = (_predict(s, compute_us, alone, bound, traffic, tables) for s in dict.fromkeys(available))
    ranked = sorted((p for p in found if p), key=lambda p: (p.time_us, ALL.index(p.setting.strategy)))
    if not ranked:
        return _default(traffic, available, f"nothing like it is in the {tables.source} (`{TUNE}` measures)")
    return _ranking(ranked, traffic, available, tables, notes)


def _comm_us(
    traffic: Traffic, mover: Mover, given: Mapping[Mover, float], tables: Tables
) -> tuple[float, tuple[str, ...]] | None:
    """The time alone, and what to note of it."""
    if mover in given:
        return given[mover], ()
    known = tables.comm_us(traffic, mover)
    return (known.value, _other_kind(traffic, known.kind)) if known else None


def _predict(
    setting: Setting,
    compute_us: float,
    alone: Mapping[Mover, tuple[float, tuple[str, ...]]],
    bound: Bound | None,
    traffic: Traffic,
    tables: Tables,
) -> Prediction | None:
    """None if there are no figures, or if engines should work inside one GPU."""
    mover = setting.moved_by
    if mover not in alone or (traffic.local and setting.strategy in BY_ENGINES):
        return None
    comm_us, notes = alone[mover]
    if setting.strategy is Strategy.SERIAL:
        time_us: float | None = compute_us + comm_us
    else:
        every = [_together(setting, compute_us, comm_us, b, traffic, tables) for b in ([bound] if bound else Bound)]
        known = [one for one in every if one]
        time_us, more = max(known, default=(None, ()))
        notes += more
    if time_us is None:
        return None
    joules = tables.joules_per_gb.get(Mover.CORES if traffic.local else mover)
    return Prediction(
        setting=setting,
        time_us=time_us,
        joules=None if joules is None else joules * traffic.size_bytes / 1e9,
        notes=notes,
    )


def _together(
    setting: Setting, compute_us: float, comm_us: float, bound: Bound, traffic: Traffic, tables: Tables
) -> tuple[float, tuple[str, ...]] | None:
    """Until both are over, and what to note of it.

    A partition that was not measured beside is estimated as C does, from the slowdowns by cores. A figure below 1 is
    noise, but for a computation that goes without some cores: one that waits for memory may gain by it.
    """
    fit = tables.served((setting, bound), traffic, lambda: _fit(setting, bound, traffic, tables))
    compute_own, comm_own = fit.compute_own, fit.comm_own
    if fit.lines is None:
        if setting.strategy not in PARTITIONED - BY_ENGINES or compute_own is None or comm_own is None:
            return None
        return max(compute_us * compute_own, comm_us * comm_own), fit.notes
    compute, comm = fit.lines.at(traffic.size_bytes)
    compute, comm = compute if setting.strategy in PARTITIONED else max(compute, 1.0), max(comm, 1.0)
    compute_lasts = compute if compute_own is None else min(compute_own, compute)
    comm_lasts = comm if comm_own is None else min(comm_own, comm)
    time_us = ideal.together_us(
        compute_us * compute_lasts, comm_us * comm_lasts, compute / compute_lasts, comm / comm_lasts
    )
    return time_us, fit.notes


@dataclass(frozen=True, slots=True)
class _Fit:
    """All that a setting's estimate needs and that does not depend on sizes and times: found out once."""

    compute_own: float | None
    comm_own: float | None
    lines: Lines | None
    notes: tuple[str, ...]


def _fit(setting: Setting, bound: Bound, traffic: Traffic, tables: Tables) -> _Fit:
    lines = tables.like(setting, bound, traffic)
    notes = _notes(setting, bound, traffic, lines.first) if lines else (f"{setting}: from slowdowns by cores",)
    return _Fit(*_own(setting, bound, traffic, tables), lines, notes)


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
        notes.append(f"{setting} was not measured beside what {bound} bounds: figures of {row.bound}")
    if row.cores != setting.cores and setting.strategy is not Strategy.DMA:
        notes.append(f"{setting} was not measured: figures of {row.cores} cores")
    return tuple(notes)


def _other_kind(traffic: Traffic, kind: str) -> tuple[str, ...]:
    return () if traffic.local or kind == traffic.kind else (f"{traffic.kind} was not measured: figures of {kind}",)


def _ranking(
    ranked: list[Prediction], traffic: Traffic, available: Collection[Setting], tables: Tables, notes: list[str]
) -> Ranking:
    """The choice."""
    best = _thriftiest([p for p in ranked if p.time_us <= ranked[0].time_us * (1 + NEAR)], traffic)
    order = [best.setting, *(p.setting for p in ranked if p is not best)]
    unknown = sorted(set(available) - set(order), key=_standing)
    words = functools.partial(_words, tuple(ranked), best, unknown, tables.source, tuple(notes))
    return Ranking(order=(*order, *unknown), predictions=tuple(ranked), words=words)


def _words(
    ranked: Sequence[Prediction], best: Prediction, unknown: Sequence[Setting], source: str, notes: Iterable[str]
) -> str:
    """The fastest few and `serial`, and what to know of them."""
    serial = [p for p in ranked if p.setting.strategy is Strategy.SERIAL][:1]
    shown = list({id(p): p for p in (*ranked[:_SHOWN], best, *serial)}.values())
    if best is not ranked[0]:
        notes = [f"{best.setting} is within {NEAR:.0%} of the fastest and takes less energy", *notes]
    if unknown:
        notes = [*notes, f"without figures: {', '.join(map(str, unknown))}"]
    notes = [*notes, *(note for p in shown for note in p.notes)]
    figures = ", ".join(f"{p.setting} {_microseconds(p.time_us)}" for p in shown)
    return "; ".join((f"{figures} ({source})", *dict.fromkeys(notes)))


def _thriftiest(near: Iterable[Prediction], traffic: Traffic) -> Prediction:
    """The one of the least energy: by joules if they are known of all, else engines before cores; then the fastest."""
    every = list(near)
    if all(p.joules is not None for p in every):
        return min(every, key=lambda p: (p.joules, p.time_us))
    return min(every, key=lambda p: (p.setting.moved_by is Mover.CORES or traffic.local, p.time_us))


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
    return Ranking(order=tuple(order), predictions=(), words=lambda: f"{order[0]}: {why}; {words}")


def _standing(setting: Setting) -> tuple[bool, int, bool, int]:
    """Where a setting without figures stands: `serial` by cores, by engines; what cores move; what engines move."""
    return (
        setting.strategy in BY_ENGINES,
        ALL.index(setting.strategy),
        setting.moved_by is Mover.ENGINES,
        setting.cores,
    )
