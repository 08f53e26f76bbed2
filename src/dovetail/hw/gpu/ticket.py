"""A plan in flight on a GPU: what to wait for, who moved the bytes, and how it ends when nobody opens its gate."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.errors import DovetailError, HardwareError, PlanError, Timeout
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.words import WordTable
from dovetail.plan.plan import Plan, SignalKind

#: A wait asks without a pause for this long, then lets other threads run in between, then with pauses.
_SPIN_NS = 200_000
_YIELD_NS = 50_000_000
_PAUSE_S = 50e-6
#: Streams that were opened drain within this, or the GPU itself has stopped.
_DRAIN_S = 10.0


@dataclass(frozen=True, slots=True)
class OutsideWait:
    """A word that a run waits for and that somebody else raises."""

    signal: int
    value: int
    place: tuple[int, int]  #: queue and step, for messages


class Peers(Protocol):
    """The other ranks of a run."""

    def gone(self, *, waiting: bool) -> DovetailError | None:
        """Why the run can't end well: a rank died or gave up; or left, while this one is still `waiting` for words."""

    def gave_up(self) -> DovetailError | None:
        """A rank ended the run early and opened its waits, perhaps ours with them: what was moved is undefined."""

    def fail(self, error: DovetailError) -> None:
        """Tells them that it ended early here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunInfo:
    """What all runs of one bound program have in common."""

    plan: Plan
    words: WordTable
    waits: Sequence[OutsideWait]
    stamps: Sequence[int]
    bytes_by_path: dict[str, int]


_ending = threading.Lock()  # ends are rare: one lock for all tickets


class GpuTicket:
    """A submitted plan. Destinations are undefined if it ends with an error."""

    __slots__ = (
        "_armed", "_begun_s", "_device", "_error", "_hold", "_info", "_lost", "_opened_s", "_over", "_peers",
        "_timeout_s", "base", "event", "issuing", "stream",
    )  # fmt: skip

    def __init__(
        self,
        device: Device,
        info: RunInfo,
        base: int,
        event: int,
        stream: int,
        begun_s: float,
        timeout_s: float,
        armed: Sequence[int] | None,
        hold: Any,
        peers: Peers | None,
    ) -> None:
        self._device, self._info, self._begun_s, self._timeout_s = device, info, begun_s, timeout_s
        self.base = base  #: what this run's signals count from
        self.event = event  #: recorded when all of the run is done: what another stream waits for
        self.stream = stream  #: in which it is recorded
        self.issuing = False  #: its event is not recorded yet, and may be done from an earlier run
        self._armed, self._hold, self._peers = armed, hold, peers
        self._over = False
        self._error: DovetailError | None = None
        self._opened_s = 0.0
        self._lost = False  # given up before its streams drained

    def __del__(self) -> None:
        if self._over and not self._lost:  # otherwise the driver may still record it
            self._device.give_event(self.event)

    # --- for callers

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until the run is over; raises its error. `timeout_s` leaves the run going on."""
        begin = time.monotonic_ns()
        while not self.is_over():
            waited = time.monotonic_ns() - begin
            if timeout_s is not None and waited > timeout_s * 1e9:
                raise Timeout(f"plan {self._info.plan.name} was not over after {timeout_s:g} s; it goes on")
            if waited > _SPIN_NS:
                self.look()
                if waited > _YIELD_NS:
                    time.sleep(_PAUSE_S)
                else:
                    os.sched_yield()  # not a sleep, which ends 50 us late; asking the driver lets other threads run
        if self._error is not None:
            raise self._error

    def is_over(self) -> bool:
        """True once all of it is done, well or not."""
        if self._over:
            return True
        self._device.enter()
        if self.issuing or not self._device.driver.event_done(self.event):
            return False
        self._settle()
        return True

    @property
    def error(self) -> DovetailError | None:
        """Why it failed, if it did."""
        return self._error

    def fire(self) -> None:
        """Opens the gates of a plan with the `prelaunch` pass: those of this process, a peer's are its own."""
        for w in self._info.waits:
            if self._info.plan.signals[w.signal].kind is SignalKind.GATE:
                self._info.words.raise_to(w.signal, self.base + w.value)

    def is_open(self) -> bool:
        """True once all its gates are open, by whomever."""
        gates = {w.signal for w in self._info.waits if self._info.plan.signals[w.signal].kind is SignalKind.GATE}
        return all(self._info.words.read(n) > self.base for n in gates)

    def gate(self) -> tuple[int, int]:
        """(address, value): what a kernel writes to open the gate, 64 bits, after its results are visible."""
        gates = [n for n, s in enumerate(self._info.plan.signals) if s.kind is SignalKind.GATE]
        mine = [w for w in self._info.waits if w.signal in gates]
        if not mine:
            raise PlanError(f"plan {self._info.plan.name} has no gate: apply dovetail.plan.passes.prelaunch")
        return self._info.words.address(mine[0].signal), self.base + 1

    def raise_signal(self, name: str, value: int = 1) -> None:
        """Raises an imported signal. One value after the other, growing."""
        for n, s in enumerate(self._info.plan.signals):
            if s.name == name and s.kind is SignalKind.IMPORTED:
                self._info.words.raise_to(n, self.base + value)
                return
        raise PlanError(f"plan {self._info.plan.name} imports no signal {name!r}")

    def signal_address(self, name: str) -> tuple[int, int]:
        """(address, what to add to a value): for a kernel that raises an imported signal itself."""
        for n, s in enumerate(self._info.plan.signals):
            if s.name == name:
                return self._info.words.address(n), self.base
        raise PlanError(f"plan {self._info.plan.name} has no signal {name!r}")

    @property
    def bytes_by_path(self) -> dict[str, int]:
        """Bytes moved from host to device ("h2d"), "d2h", inside a GPU ("d2d") and between two ("p2p"); bytes that the
        kernel of reductions read ("reduce")."""
        return dict(self._info.bytes_by_path)

    def stamps_us(self) -> list[float]:
        """Times of the STAMP steps after the first of them. For a run that is over."""
        if not self._info.stamps:
            return []
        first, *rest = self._info.stamps
        return [0.0, *(self._device.driver.event_elapsed_us(first, e) for e in rest)]

    # --- for the watchdog

    def look(self) -> None:
        """Ends the run if its time is over or somebody it needs is gone."""
        with _ending:
            if self._over:
                return
            if self._opened_s:
                late = time.monotonic() > self._opened_s + _DRAIN_S
                if late and (self.issuing or not self._device.driver.event_done(self.event)):
                    self._error = HardwareError(f"{self._error}; its streams did not drain within {_DRAIN_S:g} s")
                    self._over = self._lost = True  # its streams stay armed, its event is not used again
                    self._device.keep(self._hold)
                return
            error = self._peers.gone(waiting=bool(self._short())) if self._peers is not None else None
            if error is None and time.monotonic() > self._begun_s + self._timeout_s:
                error = Timeout(f"{self._late()}; it was opened from outside, what it should have written is undefined")
            if error is None:
                return
            self._open(error)

    def give_up(self, why: str) -> None:
        """Ends a run whose gate is still closed; others go on."""
        if not self.is_over() and not self.is_open():
            self.abandon(DovetailError(f"plan {self._info.plan.name} {why}"))

    def abandon(self, error: DovetailError) -> None:
        """Ends a run that could not be issued as a whole: nobody may stand at its waits for ever."""
        with _ending:
            self._open(error)

    def _open(self, error: DovetailError) -> None:
        self._error = error
        self._opened_s = time.monotonic()
        if self._peers is not None:
            self._peers.fail(error)  # before the waits open: who comes through them can know
        for w in self._info.waits:
            self._info.words.raise_to(w.signal, self.base + w.value)

    def _short(self) -> list[OutsideWait]:
        """Waits whose words are not raised yet."""
        info = self._info
        return [w for w in info.waits if info.words.read(w.signal) < self.base + w.value]

    def _late(self) -> str:
        info = self._info
        text = f"plan {info.plan.name} made no progress for {self._timeout_s:g} s"
        short = self._short()
        if not short:
            return f"{text}: its copies did not end"
        signal = info.plan.signals[short[0].signal]
        what = "gate" if signal.kind is SignalKind.GATE else "signal"
        full = ", and the driver took no more of the run's calls: let it have fewer, larger copies"
        late = f"{what} {signal.name!r} was not raised{full if self.issuing else ''}"
        return f"{text}: {late}; {info.plan.describe(*short[0].place)}"

    def _settle(self) -> None:
        with _ending:
            if self._over:
                return
            if self._error is None and self._peers is not None:
                self._error = self._peers.gave_up()
            self._over = True
            if self._armed is not None:
                self._device.disarm(self._armed)
            hold, self._hold = self._hold, None
            if self._error is not None and self._peers is not None:
                self._device.keep(hold)  # a peer that is only late may still write there
        del hold  # outside of the lock: what it frees may run any code
