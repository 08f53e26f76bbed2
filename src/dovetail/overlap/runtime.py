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
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dovetail import env
from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.overlap import policy, tables
from dovetail.overlap.cpu import CpuPlace
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.strategy import ALL, AUTO, BY_ENGINES, PARTITIONED, Setting, Strategy, named
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
)
from dovetail.overlap.trials import ROUNDS, Trials

logger = logging.getLogger(__name__)
#: Pairs that are remembered.
_MOST_PAIRS = 256
_MOST_CONTENDERS = 5
ROUNDS_BEFORE_KEPT = ROUNDS * _MOST_CONTENDERS  #: runs of a pair after which it runs in the way that is kept

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
        self._tables = known or tables.current(self.place.backend, device.name if device else "")
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
            compute, load = computation(compute)
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
        return self._device is None and comm.group is not None and comm.group.size > 1

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
        if group is not None and group.size > 1:
            # What all ranks have alike: a name and the traffic, not what one of them computes.
            pairs, key = self._of_groups.setdefault(group, {}), (load.name, traffic)
        pair = pairs.get(key)
        if pair is not None and (kept := pair.trials.plain()):
            return kept, pair.why, None
        check(comm)
        if self._device is not None and self._device.driver.stream_capturing(main):
            if pair is not None:
                return pair.trials.kept, pair.why, None
            ranking, _ = self._estimate(load, comm)
            return next(s for s in ranking.order if s.strategy not in PARTITIONED), ranking.words, None
        if pair is None:
            check_load(load)
            pair = self._new(load, comm)
            while len(pairs) >= _MOST_PAIRS:
                pairs.pop(next(iter(pairs)))
            pairs[key] = pair
        setting = self._next(pair, comm)
        why = pair.why if setting is pair.trials.kept else functools.partial(_on_trial, pair)
        return setting, why, pair if pair.trials.wants_time else None

    def _new(self, load: Load, comm: Communication) -> _Pair:
        ranking, wanted = self._estimate(load, comm)
        why: Callable[[], str] = ranking.words
        if env.disable():
            wanted, why = [_baseline(ranking)], _disabled
        if comm.group is None or comm.group.size == 1:
            wanted = [s for s in wanted if self._can(s)]
        else:
            mine, wanted = wanted, _agreed(wanted, comm.group, self._can)
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
        if comm.group is None or comm.group.size == 1:
            if not pair.num_unread or not trials.is_trying:
                pair.decide(trials.figures())
            return
        self._read(until=pair)  # all ranks decide at the same call
        pair.decide(_slowest(trials.figures(), comm.group))

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


def contenders(ranking: policy.Ranking) -> list[Setting]:
    """What is tried of a pair that comes again, the chosen one first.

    It and the second; `dma`, which most often wins, in case it was estimated wrongly; one after the other, and plain
    streams: what the user would have without us.
    """
    order = ranking.order
    found = list(order[: _MOST_CONTENDERS - len(_ALWAYS)])
    first = {setting.strategy: setting for setting in reversed(order)}
    for strategy in _ALWAYS:
        setting = first.get(strategy)
        if setting is not None and setting not in found:
            found.append(setting)
    return found


_PLAIN = (Strategy.SERIAL, Strategy.STREAMS)
_ALWAYS = (Strategy.DMA, *_PLAIN)


def _baseline(ranking: policy.Ranking) -> Setting:
    return next(s for s in ranking.order if s.strategy in _PLAIN)


def _agreed(mine: list[Setting], group: Any, can: Callable[[Setting], bool]) -> list[Setting]:
    """Rank 0's settings, those that all ranks can run. At least one is left: `serial` is among them everywhere."""
    import torch

    from dovetail import coll

    told = torch.full((_MOST_CONTENDERS, 3), -1, dtype=torch.int64)
    for n, s in enumerate(mine):
        told[n] = torch.tensor([ALL.index(s.strategy), s.cores, list(Mover).index(s.mover)])
    coll.broadcast(told, group_src=0, group=group)
    settings = [Setting(ALL[a], cores, list(Mover)[b]) for a, cores, b in told.tolist() if a >= 0]
    able = torch.tensor([int(can(s)) for s in settings])
    coll.all_reduce(able, coll.ReduceOp.MIN, group=group)
    return [s for s, is_able in zip(settings, able.tolist(), strict=True) if is_able]


def _slowest(figures: list[float], group: Any) -> list[float]:
    """Of all ranks, for each setting."""
    import torch

    from dovetail import coll

    tensor = torch.tensor(figures, dtype=torch.float64)
    coll.all_reduce(tensor, coll.ReduceOp.MAX, group=group)
    return [float(figure) for figure in tensor]


# --- one for each device ----------------------------------------------------------------------------------------------

_lock = threading.Lock()
_runtimes: dict[int, Runtime] = {}


def runtime(device: Device | None = None) -> Runtime:
    """The runtime of a device (None: the CPU), made when first asked for."""
    with _lock:
        found = _runtimes.get(id(device))
        if found is None:
            found = _runtimes[id(device)] = Runtime(device)
        return found


def _drop_after_fork() -> None:
    """A child has none of its parent's threads and contexts."""
    _runtimes.clear()


os.register_at_fork(after_in_child=_drop_after_fork)


def explain(compute: Computation | Callable[[], Any] | None, comm: Communication) -> policy.Ranking:
    """What `auto` would choose for a pair that is new, and why; nothing runs. None: a computation of unknown length.

    `.choice` is the setting, `.reason` says why, `.predictions` has the estimates.
    """
    check(comm)
    return runtime(comm.device).explain(compute, comm)


def run(
    compute: Computation | Callable[[], Any], comm: Communication, strategy: str = AUTO, *, cores: int = 0
) -> Outcome:
    """Runs a communication beside a computation.

    On a GPU both begin behind torch's current stream, which goes on behind both; the call returns at once. On a CPU
    both are over when it returns. All ranks of the communication's group must make the same calls.

    Args:
        compute: launches work on torch's current stream; a callable, or a `Computation`, which may say what is known.
        comm: a `Collective`, a `LocalCommunication`, or anything of that protocol.
        strategy: "auto" or one of `dovetail.overlap.Strategy`.
        cores: for a strategy that was asked for: how many cores move the bytes, or the computation goes without.

    Raises:
        ValueError, NotSupported: an unknown strategy, or one that can't run here; nothing was started.
    """
    found = _runtimes.get(id(getattr(comm, "device", None)))  # without the lock, which only who makes one needs
    if found is None:
        check(comm)
        found = runtime(comm.device)
    return found.run(compute, comm, strategy, cores=cores)


def beside(
    comm: Communication, strategy: str = AUTO, *, cores: int = 0, name: str = ""
) -> contextlib.AbstractContextManager[Outcome]:
    """A communication that runs beside what is launched inside a `with`, and is waited for at its end.

    On a GPU it is torch's current stream that waits, not the host. `name` is by which the computation is known; by
    default the place of the call.
    """
    if not name and strategy == AUTO:
        caller = sys._getframe(1)
        name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    check(comm)
    return runtime(comm.device).beside(comm, strategy, cores=cores, name=name)


def close() -> None:
    """Gives back what `run` and `beside` have made; they make it anew."""
    with _lock:
        for made in _runtimes.values():
            made.close()
        _runtimes.clear()
