"""Runs a communication beside a computation, in the way that is fastest here; says which, and why.

Owns the choice for each pair: first by the policy and what was measured on this machine (`dovetail tune --only
overlap`), then by what the pair itself took. A pair that comes again is tried in the chosen way, one after the other
and as plain streams, a few times each; the fastest is kept, so that nobody is slower for using this. Times come from
events and are read when they are there: nothing is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dovetail import env
from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.overlap import policy, section
from dovetail.overlap.contenders import agreed, baseline, contenders, slowest
from dovetail.overlap.cpu import CpuPlace
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.strategy import AUTO, BY_ENGINES, PARTITIONED, Setting, Strategy, named
from dovetail.overlap.tables import Tables
from dovetail.overlap.tasks import (
    Communication,
    Computation,
    Load,
    Mover,
    Pending,
    Traffic,
    check,
    check_load,
    computation,
    several,
)
from dovetail.overlap.trials import ROUNDS, Trials

logger = logging.getLogger(__name__)
#: Pairs that are remembered.
_MOST_PAIRS = 256

Key = tuple[Load | str, Traffic]


@dataclass(slots=True)
class Outcome:
    """What came of two that ran together. On a GPU the caller's stream goes on behind both."""

    value: Any  #: what the computation returned
    setting: Setting
    why: Callable[[], str]  #: makes the reason, which few ask for
    pending: Pending | None = None

    @property
    def reason(self) -> str:
        """Why this setting."""
        return self.why()

    @property
    def strategy(self) -> Strategy:
        """How they ran."""
        return self.setting.strategy

    def wait(self) -> Any:
        """Blocks the host until the communication is over; raises its error. Returns `value`."""
        if self.pending is not None:
            self.pending.wait()
        return self.value


@dataclass(slots=True)
class _Pair:
    """What is known of two that belong together."""

    trials: Trials
    why: Callable[[], str]
    num_unread: int = 0  #: runs whose times were not there yet

    def decide(self, figures: list[float]) -> None:
        """Keeps the fastest, or tries again."""
        self.trials.decide(figures)
        reason = f"{'tried again' if self.trials.is_trying else 'measured'}: {self.trials.why()}"
        self.why = lambda: reason


def _forced() -> str:
    return "asked for"


def _on_trial(pair: _Pair) -> str:
    others = ", ".join(map(str, pair.trials.settings))
    return f"on trial: {others} are run in turn, {ROUNDS} times each; so far {pair.trials.kept}: {pair.why()}"


def _refuse(cores: int) -> None:
    if cores:
        raise ValueError("cores: auto chooses them; name a strategy to choose them yourself")


def _disabled() -> str:
    return "DOVETAIL_DISABLE is set"


def _of_rank_0() -> str:
    return "chosen on rank 0, which knows other figures; its outcome says why"


class Runtime:
    """Chooses and runs, on one GPU or on the CPU. An owner: `close()`, or `with`. Not for several threads at once."""

    def __init__(self, device: Device | None = None, *, known: Tables | None = None) -> None:
        """`known`: what was measured; by default this machine's profile."""
        self.place: GpuPlace | CpuPlace = CpuPlace() if device is None else GpuPlace(device)
        self._device = device
        self._tables = known or section.current(self.place.backend, device.name if device else "")
        self._pairs: dict[Key, _Pair] = {}  # of communications without a group
        self._of_groups: weakref.WeakKeyDictionary[Any, dict[Key, _Pair]] = weakref.WeakKeyDictionary()
        self._unread: deque[tuple[_Pair, Setting, int, int]] = deque()  # the events of runs, in their order
        self._settings: dict[tuple[frozenset[Mover], bool, bool], tuple[Setting, ...]] = {}
        self._estimates: dict[Any, tuple[policy.Ranking, list[Setting]]] = {}  # by what they depend on

    def run(
        self, compute: Computation | Callable[[], Any], comm: Communication, strategy: str = AUTO, *, cores: int = 0
    ) -> Outcome:
        """Both; see `dovetail.overlap.run`."""
        load = getattr(compute, "load", None)
        if type(load) is not Load:
            compute, load = computation(compute, alike=several(getattr(comm, "group", None)))
        main = self.main()
        if strategy != AUTO:
            check(comm)
            setting = self.forced(comm, strategy, cores)
            value, pending = self.place.launch(compute, comm, setting, main)
            return Outcome(value, setting, _forced, pending)
        if cores:
            _refuse(cores)
        setting, why, timed = self._chosen(load, comm, main)
        if timed is None:
            value, pending = self.place.launch(compute, comm, setting, main)
        else:
            begin = self._stamp(main)
            try:
                value, pending = self.place.launch(compute, comm, setting, main)
            except BaseException:
                self._drop(begin)
                raise
            self._note(timed, setting, begin, self._stamp(main))
        return Outcome(value, setting, why, pending)

    @contextlib.contextmanager
    def beside(self, comm: Communication, strategy: str = AUTO, *, cores: int = 0, name: str = "") -> Iterator[Outcome]:
        """The communication beside what is launched inside; see `dovetail.overlap.beside`."""
        check(comm)
        main = self.main()
        if strategy != AUTO:
            setting, why, timed = self.forced(comm, strategy, cores), _forced, None
        else:
            _refuse(cores)
            setting, why, timed = self._chosen(Load(name=name), comm, main)
        clock = self._timed(timed, setting, main) if timed is not None else contextlib.nullcontext()
        outcome = Outcome(None, setting, why)
        with clock, self.place.beside(comm, setting, main) as begun:
            yield outcome
        outcome.pending = begun.pending

    def forced(self, comm: Communication, strategy: str, cores: int = 0) -> Setting:
        """The setting of a strategy that was asked for.

        Raises:
            ValueError: an unknown name, or a number of cores that there is not.
            NotSupported: it can't run here.
        """
        wanted = named(strategy)
        if wanted is Strategy.FUSED:
            raise NotSupported("fused is for operators that have it: dovetail.ops")
        if type(cores) is not int or not 0 <= cores < self.place.num_cores:
            raise ValueError(f"cores: a number from 0 to {self.place.num_cores - 1}, not {cores!r}")
        if cores and wanted is Strategy.DMA:
            raise ValueError("cores: dma takes none; dma+partition keeps some idle")
        if wanted in PARTITIONED:
            if not self.place.has_partition:
                raise NotSupported(f"{wanted}: the cores of this {self.place.backend} can't be shared out")
            cores = cores or (self.place.idle_step if wanted in BY_ENGINES else self.place.core_step)
        mover = Mover.ENGINES if Mover.ENGINES in comm.movers else Mover.CORES
        setting = Setting(wanted, cores, mover if wanted is Strategy.SERIAL else Mover.CORES)
        if setting.moved_by not in comm.movers:
            raise NotSupported(f"{wanted}: this {comm.traffic.kind} can't be moved by {setting.moved_by}")
        return setting

    def explain(self, compute: Computation | Callable[[], Any] | None, comm: Communication) -> policy.Ranking:
        """What `auto` would choose for a new pair, and why; nothing runs."""
        load = Load() if compute is None else computation(compute)[1]
        check_load(load)
        return self._estimate(load, comm)[0]

    # --- pairs

    def _estimate(self, load: Load, comm: Communication) -> tuple[policy.Ranking, list[Setting]]:
        """What is estimated for a new pair, and what is to be tried. Many pairs have the same: it is made once."""
        key = (load.flops, load.size_bytes, load.launches, comm.traffic, comm.movers, self._by_threads(comm))
        found = self._estimates.get(key)
        if found is None:
            known = self._tables
            ranking = policy.choose(
                comm.traffic, known, self._available(comm), compute_us=policy.alone_us(load, known),
                bound=policy.bound_of(load, known),
            )  # fmt: skip
            while len(self._estimates) >= _MOST_PAIRS:
                self._estimates.pop(next(iter(self._estimates)))
            found = self._estimates[key] = ranking, contenders(ranking)
        return found

    def _by_threads(self, comm: Communication) -> bool:
        """On a CPU a thread of ours would make a group's call at any time beside those of the caller, in another order
        on each rank: only what the calling thread starts is left."""
        return self._device is None and several(comm.group)

    def _available(self, comm: Communication) -> tuple[Setting, ...]:
        """What `auto` chooses among."""
        by_threads = self._by_threads(comm)
        key = (comm.movers, comm.traffic.local, by_threads)
        found = self._settings.get(key)
        if found is None:
            place = self.place
            every = policy.candidates(
                comm.traffic, comm.movers, num_cores=place.num_cores, core_step=place.core_step,
                idle_step=place.idle_step, has_partition=place.has_partition,
            )  # fmt: skip
            if by_threads:
                every = tuple(s for s in every if s.strategy is Strategy.SERIAL or s.moved_by is Mover.ENGINES)
            found = self._settings[key] = policy.few(every, place.core_step)
        return found

    def _chosen(
        self, load: Load, comm: Communication, main: int
    ) -> tuple[Setting, Callable[[], str], _Pair | None]:
        """The setting of the next run, why, and the pair if it is to be timed.

        A capture tries nothing: its events have no times, and a driver asked for others would end it. Where there is
        nothing to time and to decide, nobody asks whether it is one, or whether earlier times are there.
        """
        pairs = self._pairs
        try:
            group, traffic = comm.group, comm.traffic
        except AttributeError:
            check(comm)
            raise
        key: Key = (load, traffic)
        if several(group):
            # What all ranks have alike: a name and the traffic, not what one of them computes.
            pairs, key = self._of_groups.setdefault(group, {}), (load.name, traffic)
        try:
            pair = pairs.get(key)
        except TypeError:  # nothing that a dict takes: a hint that can't be is told as such
            check_load(load)
            raise
        if pair is not None and (kept := pair.trials.plain()):
            return kept, pair.why, None
        check(comm)
        if pair is None:
            check_load(load)
        if self._device is not None and self._device.driver.stream_capturing(main):
            if pair is not None:
                return pair.trials.kept, pair.why, None
            ranking, _ = self._estimate(load, comm)
            return next(s for s in ranking.order if s.strategy not in PARTITIONED), ranking.words, None
        if pair is None:
            pair = self._new(load, comm)
            while len(pairs) >= _MOST_PAIRS:
                pairs.pop(next(iter(pairs)))
            pairs[key] = pair
        setting = self._next(pair, comm)
        why = functools.partial(_on_trial, pair) if pair.trials.is_trying else pair.why
        return setting, why, pair if pair.trials.wants_time else None

    def _new(self, load: Load, comm: Communication) -> _Pair:
        ranking, wanted = self._estimate(load, comm)
        why: Callable[[], str] = ranking.words
        if env.disable():
            wanted, why = [baseline(ranking)], _disabled
        if not several(comm.group):
            wanted = [s for s in wanted if self._can(s)]
        else:
            mine, wanted = wanted, agreed(wanted, comm.group, self._can)
            why = why if wanted[0] == mine[0] else _of_rank_0
        pair = _Pair(Trials(wanted), why)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s beside %s: %s (%s)", comm.traffic.kind, load.name or "?", pair.trials.kept, pair.why())
        return pair

    def _can(self, setting: Setting) -> bool:
        if setting.strategy not in PARTITIONED:
            return True
        try:
            self.place.prepare(setting)
        except (NotSupported, HardwareError) as error:
            logger.warning("auto leaves out %s: %s", setting, error)
            return False
        return True

    def _next(self, pair: _Pair, comm: Communication) -> Setting:
        trials = pair.trials
        if self._unread:
            self._read()
        if trials.is_due:
            self._decide(pair, comm)
        return trials.next()

    def _decide(self, pair: _Pair, comm: Communication) -> None:
        trials = pair.trials
        if not several(comm.group):
            if not pair.num_unread or not trials.is_trying:
                pair.decide(trials.figures())
            return
        self._read(until=pair)  # all ranks decide at the same call
        pair.decide(slowest(trials.figures(), comm.group))

    # --- times

    def main(self) -> int:
        """The stream that both begin behind: torch's current one; 0 on a CPU."""
        if self._device is None:
            return 0
        self._device.enter()
        return self.place.current_stream()  # type: ignore[union-attr]  # a GPU's

    def _stamp(self, main: int) -> int:
        """Now: an event on a GPU, nanoseconds on a CPU."""
        if self._device is None:
            return time.perf_counter_ns()
        event = self._device.take_event(timed=True)
        self._device.driver.event_record(event, main)
        return event

    @contextlib.contextmanager
    def _timed(self, pair: _Pair, setting: Setting, main: int) -> Iterator[None]:
        begin = self._stamp(main)
        try:
            yield
        except BaseException:
            self._drop(begin)
            raise
        self._note(pair, setting, begin, self._stamp(main))

    def _drop(self, begin: int) -> None:
        """Of a run that failed."""
        if self._device is not None:
            self._device.give_event(begin, timed=True)

    def _note(self, pair: _Pair, setting: Setting, begin: int, end: int) -> None:
        if self._device is None:
            pair.trials.note(setting, (end - begin) / 1e3)
        else:
            pair.num_unread += 1
            self._unread.append((pair, setting, begin, end))

    def _read(self, until: _Pair | None = None) -> None:
        """The times of runs that are over; with `until` it waits for those of that pair."""
        device = self._device
        if device is None:
            return  # a CPU's are read at once
        driver, left = device.driver, self._unread
        self._unread = deque()
        for pair, setting, begin, end in left:
            if pair is until:
                driver.event_synchronize(end)
            elif not driver.event_done(end):
                self._unread.append((pair, setting, begin, end))
                continue
            pair.num_unread -= 1
            with contextlib.suppress(HardwareError):  # then there is one time less
                pair.trials.note(setting, driver.event_elapsed_us(begin, end))
            device.give_event(begin, timed=True)
            device.give_event(end, timed=True)

    def close(self) -> None:
        """Waits for what is under way. Safe to call twice; nothing runs afterwards."""
        for pair in {id(entry[0]): entry[0] for entry in self._unread}.values():
            self._read(until=pair)
        self.place.close()
        self._pairs.clear()
        self._of_groups.clear()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
