"""Which way two should run together: pure functions of what is known of them and of what was measured.

Owns what is known of a computation, the choice among settings, and C's (ConCCL's) heuristics for comparison; what each
setting would take is `estimate`'s. It starts nothing; what it remembers, with the tables that it belongs to, only saves
time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from dovetail.measure.sizes import format_bytes
from dovetail.overlap.estimate import PRODUCTS, Estimate, Prediction, Sheet, estimates, other_kind, sheet_of, standing
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tables import TUNE, Tables
from dovetail.overlap.tasks import Bound, Load, Mover, Traffic

#: From here on `dma` is the default where nothing was measured: four fifths of such a copy are copying (A, MI300X).
DEFAULT_DMA_BYTES = 1 << 20
NEAR = 0.02  #: two estimates that differ by less are equal, and energy decides
_STREAM_FLOPS_PER_BYTE = 0.3  # a sum of vectors has a sixth in bf16; a product of one row has one, in fp32 a half
_SPLITS = (1, 2, 4, 8)  # times core_step: the partitions that are tried
_SHOWN = 4  # in a reason
_SPLIT = 2  # times core_step: the partition of `few`
_WIDE = 4  # times core_step: a kernel of more programs


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
        notes = (words, *other_kind(traffic, comm.kind))
        found.append(Prediction(setting=Setting(strategy, cores), time_us=time_us, notes=notes))
    return min(found, key=lambda p: (p.time_us, p.setting.cores), default=None)


def _slower(tables: Tables, bound: Bound | None, cores: int) -> float | None:
    """The computation's slowdown on so many cores, the larger of the two if its bound is not known."""
    every = [tables.compute_slowdown(each, cores) for each in ([bound] if bound else PRODUCTS)]
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
    sheet = tables.served((settings, bound, *given), traffic, lambda: sheet_of(traffic, tables, settings, bound, given))
    comm = {mover: given[mover] if curve is None else curve.time_us(traffic.size_bytes) for mover, curve in sheet.alone}
    notes: list[str] = []
    if compute_us is None:
        compute_us = min(comm.values(), default=0.0)
        notes.append("the computation's time is not known: taken to be the communication's")
    if bound is None:
        notes.append("what bounds the computation is not known: the worse case")
    if not sheet.entries:
        return _default(traffic, settings, f"nothing like it is in the {tables.source} (`{TUNE}` measures)")
    return _ranking(estimates(sheet, compute_us, comm, traffic.size_bytes), traffic, sheet, tables.source, notes)


def _ranking(
    ranked: list[Estimate], traffic: Traffic, sheet: Sheet, source: str, notes: Iterable[str]
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
    order = sorted(dict.fromkeys(available), key=lambda s: (not (free and s.strategy is Strategy.DMA), *standing(s)))
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
