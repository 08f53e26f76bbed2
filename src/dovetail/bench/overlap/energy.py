"""Joules of a pair, run again and again by engines and by a kernel: windows of `dovetail.measure.energy`, less idle.

Owns how many pairs a repetition has, and which scenarios are too short for a window to say anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from dovetail.bench.overlap.sample import Site
from dovetail.bench.overlap.work import Work
from dovetail.measure import energy
from dovetail.measure.energy import Meter
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tasks import Communication, Computation, Mover

STRATEGIES = (Strategy.STREAMS, Strategy.DMA)
LEAST_US = 250.0  #: of a pair: below, the GPU waits for the host between two
_PAUSE_S = 3.0  # clocks fall slowly after work
_WINDOW_S, _TICKS = 0.4, 4
_REPETITION_US = 10_000.0


class PairGauge:
    """Measures joules with one meter. Idle power is taken when it is made: the GPU must be at rest then."""

    def __init__(self, meter: Meter, *, pause_s: float = _PAUSE_S, window_s: float = _WINDOW_S) -> None:
        self._meter, self._window_s = meter, window_s
        self._period_s = energy.period(meter)
        time.sleep(pause_s)
        self._idle = energy.idle(meter, max(window_s, 0.1), ticks=_TICKS, period_s=self._period_s)
        self._turn = 0

    def __call__(
        self, site: Site, work: Work, comm: Communication, ready: Sequence[Setting], pair_us: float
    ) -> tuple[dict[Setting, tuple[float, float]], list[str]]:
        """Joules of one pair above idle and their error, by setting; the order changes from scenario to scenario."""
        if pair_us < LEAST_US:
            return {}, [f"no energy of pairs below {LEAST_US:.0f} us: the GPU would wait for the host between them"]
        wanted = [setting for setting in ready if setting.strategy in STRATEGIES]
        self._turn += 1
        number = max(1, math.ceil(_REPETITION_US / pair_us))
        found, notes = {}, []
        for setting in wanted[:: 1 if self._turn % 2 else -1]:
            window = energy.measure(
                lambda s=setting: site.repeat(work, comm, s, number),  # type: ignore[misc]
                meter=self._meter, seconds=self._window_s, ticks=_TICKS, idle_w=self._idle, period_s=self._period_s,
            )  # fmt: skip
            pairs = window.repetitions * number
            found[setting] = window.net_joules / pairs, window.net_error_j / pairs
            notes += [f"{setting}: {window.note}"] if window.note else []
        return found, notes


def moving(site: Site, nothing: Computation, comm: Communication, meter: Meter) -> tuple[dict[Mover, float], list[str]]:
    """Joules above idle for 10^9 bytes in the busier direction, by mover; and what has to be said of them."""
    period_s = energy.period(meter)
    time.sleep(_PAUSE_S)
    idle = energy.idle(meter, _WINDOW_S, ticks=_TICKS, period_s=period_s)
    found, notes = {}, []
    for mover in Mover:
        setting = Setting(Strategy.SERIAL, mover=mover)
        site.warm(nothing, comm, setting)
        number = max(1, math.ceil(_REPETITION_US / max(site.comm_us(comm, mover), 1.0)))
        window = energy.measure(
            lambda s=setting, n=number: site.repeat(nothing, comm, s, n),  # type: ignore[misc]
            meter=meter, seconds=_WINDOW_S, ticks=_TICKS, idle_w=idle, period_s=period_s,
        )  # fmt: skip
        joules = window.joules_per_gb(comm.traffic.size_bytes * number)
        if joules > 0:
            found[mover] = joules
        notes += [f"energy by {mover}: {window.note}"] if window.note else []
    return found, notes
