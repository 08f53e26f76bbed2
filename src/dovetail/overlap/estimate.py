"""What each setting would take, beside a computation of known time and bound: pure functions of what was measured.

An estimate is `together_us` of the two times alone and of the slowdowns that were measured beside each other.
What a setting's own cores cost (a partition, a kernel of few programs) lasts until each is over; the rest ends with
the other. What reduces: engines have figures of their own, measured with a reduction, or none, as their sums take
cores; without any it is `serial`. What is local (inside one GPU): engines do nothing there, so `dma` is never chosen,
and only figures of the kind "local" hold.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from dovetail.overlap.ideal import together_us
from dovetail.overlap.strategy import ALL, BY_ENGINES, PARTITIONED, Setting, Strategy
from dovetail.overlap.tables import Beside, BySize, Tables, log_of, spot
from dovetail.overlap.tasks import Bound, Mover, Traffic

PRODUCTS = (Bound.COMPUTE, Bound.MEMORY)  #: the worse of them stands for a computation of which nothing is known


class Prediction(NamedTuple):
    """The estimated time of a setting. A tuple: many are made for each choice."""

    setting: Setting
    time_us: float  #: until both are over
    joules: float | None = None  #: for moving the bytes
    notes: tuple[str, ...] = ()  #: what it was estimated with, where that is not what was asked


Estimate = tuple[float, int, tuple[str, ...]]  # microseconds, which entry, what to note of it


def estimates(sheet: Sheet, compute_us: float, comm: Mapping[Mover, float], size_bytes: int) -> list[Estimate]:
    """Of all entries, the fastest first, of equal ones in their order. All at once: a call for each takes as long.

    A figure below 1 is noise, but for a computation without some cores: one that waits for memory may gain by it.
    """
    x = log_of(size_bytes)
    spots = [spot(grid, x) for grid in sheet.grids]
    found: list[Estimate] = []
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


class Sheet(NamedTuple):
    """What an estimate of these settings needs and that does not depend on sizes and times: found out once.

    A choice would take longer than it saves if it looked all of it up.
    """

    alone: tuple[tuple[Mover, BySize | None], ...]  #: of the movers of which the time alone is known; None: it is given
    entries: tuple[_Entry, ...]  #: in the order of strategies, which decides between equal times
    grids: tuple[tuple[float, ...], ...]  #: the sizes that lines have points at: most lines have them in common
    unknown: tuple[Setting, ...]  #: those without figures

    def predictions(self, ranked: Iterable[Estimate], size_bytes: int) -> tuple[Prediction, ...]:
        """Estimates in full."""
        found = []
        for time_us, n, notes in ranked:
            setting, _, joules_per_gb, *_ = self.entries[n]
            joules = None if joules_per_gb is None else joules_per_gb * size_bytes / 1e9
            found.append(Prediction(setting, time_us, joules, notes))
        return tuple(found)


def sheet_of(
    traffic: Traffic, tables: Tables, available: Iterable[Setting], bound: Bound | None, given: Collection[Mover]
) -> Sheet:
    """`given`: the movers of which the time is told with each question. Engines inside one GPU have no figures."""
    every = sorted(dict.fromkeys(available), key=lambda setting: ALL.index(setting.strategy))
    alone: dict[Mover, tuple[BySize | None, tuple[str, ...]]] = {}
    for mover in {setting.moved_by for setting in every}:
        if mover in given:
            alone[mover] = None, ()
        elif by := tables.alone_by_size(traffic, mover):
            alone[mover] = by[1], other_kind(traffic, by[0])
    grids: dict[tuple[float, ...], int] = {}
    entries = []
    for setting in every:
        mover, is_serial = setting.moved_by, setting.strategy is Strategy.SERIAL
        if mover not in alone or (traffic.local and setting.strategy in BY_ENGINES):
            continue
        notes = alone[mover][1]
        bounds = [] if is_serial else [bound] if bound else PRODUCTS
        known = [_fit(setting, each, traffic, tables, grids) for each in bounds]
        fits = tuple(dict.fromkeys(fit._replace(notes=notes + fit.notes) for fit in known if fit is not None))
        if fits or is_serial:
            joules_per_gb = tables.joules_per_gb.get(Mover.CORES if traffic.local else mover)
            entries.append(_Entry(setting, mover, joules_per_gb, notes, fits))
    unknown = set(every) - {entry.setting for entry in entries}
    curves = tuple((mover, curve) for mover, (curve, _) in alone.items())
    return Sheet(curves, tuple(entries), tuple(grids), tuple(sorted(unknown, key=standing)))


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
    notes = list(other_kind(traffic, row.kind))
    if row.bound is not bound:
        notes.append(f"{setting} was not measured beside a computation of the sort {bound}: figures of {row.bound}")
    if row.cores != setting.cores and setting.strategy is not Strategy.DMA:
        notes.append(f"{setting} was not measured: figures of {row.cores} cores")
    return tuple(notes)


def other_kind(traffic: Traffic, kind: str) -> tuple[str, ...]:
    return () if traffic.local or kind == traffic.kind else (f"{traffic.kind} was not measured: figures of {kind}",)


def standing(setting: Setting) -> tuple[bool, int, bool, int]:
    """Where a setting without figures stands: `serial` by cores, by engines; what cores move; what engines move."""
    return (
        setting.strategy in BY_ENGINES,
        ALL.index(setting.strategy),
        setting.moved_by is Mover.ENGINES,
        setting.cores,
    )
