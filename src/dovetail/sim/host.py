"""The host side of a replay: threads that submit rings one by one, open gates, and notice completions one by one.

Owns who submits what, in which order and when; it knows nothing of engines and links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.plan.plan import Signal, SignalKind
from dovetail.sim.causes import START, Causes
from dovetail.sim.machine import Machine, Threads
from dovetail.sim.program import Ring
from dovetail.sim.result import Phase

#: (track, name, begin_ns, end_ns)
Show = Callable[[str, str, int, int], None]


@dataclass(frozen=True, slots=True)
class Launched:
    """What the host did before it began to watch."""

    rings: list[tuple[int, int]]  #: (ring, the moment at which its engine takes it up)
    gates: list[tuple[int, int]]  #: (signal, the moment at which it is up)
    watching: dict[int, int]  #: thread -> the moment at which it begins to watch


class Host:
    """The submitting threads of a machine."""

    def __init__(self, machine: Machine, world: int, causes: Causes, show: Show | None) -> None:
        self._costs, self._causes, self._show = machine.host, causes, show
        self._schedule_ns = round(machine.engine.schedule_ns)
        self._one = machine.host.threads is Threads.ONE
        self._threads = [0] if self._one else list(range(world))

    def thread_of(self, rank: int) -> int:
        """The thread that drives a rank."""
        return 0 if self._one else rank

    def launch(self, rings: Sequence[Ring], signals: Sequence[Signal], prelaunched: bool) -> Launched:
        """Submits all rings, rank after rank; or, if they were queued beforehand, opens the gates."""
        done = Launched([], [], {})
        for thread in self._threads:
            mine = [n for n, ring in enumerate(rings) if ring.actions and (self._one or ring.rank == thread)]
            mine.sort(key=lambda n: rings[n].rank)
            if prelaunched:
                done.rings.extend((n, START) for n in mine)
                done.watching[thread] = self._open(thread, signals, done.gates)
            else:
                done.watching[thread] = self._submit(thread, rings, mine, done.rings)
        return done

    def _submit(self, thread: int, rings: Sequence[Ring], mine: list[int], taken: list[tuple[int, int]]) -> int:
        at, last = 0, START
        for n in mine:
            cost = self._costs.submit_ns + max(rings[n].commands - 1, 0) * self._costs.command_ns
            begin, at = at, at + round(cost + (self._costs.switch_ns if len(mine) > 1 else 0))
            last = self._causes.add(at, last, Phase.CONTROL)
            if self._show:
                self._show(self._track(thread), f"submit rank {rings[n].rank} {rings[n].name}", begin, at)
            taken.append((n, self._causes.add(at + self._schedule_ns, last, Phase.SCHEDULE)))
        return last

    def _open(self, thread: int, signals: Sequence[Signal], gates: list[tuple[int, int]]) -> int:
        at, last = 0, START
        for number, signal in enumerate(signals):
            if signal.kind is SignalKind.GATE and self.thread_of(signal.rank) == thread:
                begin, at = at, at + round(self._costs.trigger_ns)
                last = self._causes.add(at, last, Phase.CONTROL)
                if self._show:
                    self._show(self._track(thread), f"open gate {signal.rank}", begin, at)
                gates.append((number, last))
        return last

    def notice(self, watching: dict[int, int], arrivals: dict[int, list[int]]) -> int:
        """Every thread notices its arrivals, the earliest first; returns the moment at which the last one is done."""
        end = START
        observe_ns = round(self._costs.observe_ns)
        for thread, last in watching.items():
            for arrived in sorted(arrivals.get(thread, ()), key=self._causes.when_ns.__getitem__):
                cause = self._causes.later(last, arrived)
                begin = self._causes.when_ns[cause]
                last = self._causes.add(begin + observe_ns, cause, Phase.SYNC)
                if self._show:
                    self._show(self._track(thread), "notice", begin, begin + observe_ns)
            end = self._causes.later(last, end)
        return end

    def _track(self, thread: int) -> str:
        return "host" if self._one else f"host of rank {thread}"
