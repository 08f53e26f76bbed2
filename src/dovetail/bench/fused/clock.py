"""The clock of the benchmark on a GPU: runs a form once, times it, times several side by side.

Owns the streams and events of timing. Times are the GPU's own: everything is queued behind a gate and begins when it
opens, so no launch is in them. What a call takes with its launches is asked for apart, on the host's clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from dovetail.bench.fused.rows import Cell
from dovetail.bench.fused.spec import Spec
from dovetail.bench.fused.work import TIMEOUT_S, Contender
from dovetail.bench.gpu.session import Session
from dovetail.errors import HardwareError
from dovetail.measure.interleave import some_orders
from dovetail.measure.stats import median, percentile
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.tasks import Load
from dovetail.overlap.timing import GpuTimer

_ATTEMPTS = 3
_FEWEST_HOST = 7


class Clock:
    """Times on one GPU. An owner: `close()`, or `with`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stack = contextlib.ExitStack()
        try:
            self._place = GpuPlace(session.device)
            self._stack.callback(self._place.close)
            self._timer = GpuTimer(self._place)
            self._stack.callback(self._timer.close)
        except BaseException:
            self._stack.close()
            raise

    def run(self, contender: Contender) -> float:
        """Once, without a gate; returns microseconds of the host's clock when the GPU is done."""
        began = time.perf_counter()
        with self._place.current(self._timer.main):
            ticket = contender.start(self._timer.main)
        self._session.driver.stream_synchronize(self._timer.main)
        took_us = (time.perf_counter() - began) * 1e6
        if ticket is not None:
            ticket.wait(TIMEOUT_S)
        return took_us

    def us(self, contender: Contender) -> float:
        """Once, behind the gate: microseconds of the GPU's clock.

        Raises:
            HardwareError: it waits on the host for what it has launched, time after time.
        """
        for _ in range(_ATTEMPTS):
            call = _Call(contender, self._timer.main)
            time_us = self._timer.compute(call)
            if call.ticket is not None:
                call.ticket.wait(TIMEOUT_S)
            if not self._timer.was_opened or not self._session.has_torch:
                return time_us
        raise HardwareError(f"{contender.name} waited on the host for what it had launched: it can't be timed")

    def quick_us(self, contender: Contender, number: int) -> float:
        """The median of so many, after a run that warms up."""
        self.run(contender)
        return median(self.us(contender) for _ in range(number))

    def timed(self, contenders: Sequence[Contender], spec: Spec, seed: str) -> list[Cell]:
        """Side by side, in orders that favour none; `seed` settles which."""
        about = [self.quick_us(contender, 1) for contender in contenders]
        rounds = min(max(int(spec.seconds * 1e6 / sum(about)), spec.fewest_rounds), spec.most_rounds)
        times: list[list[float]] = [[] for _ in contenders]
        for order in some_orders(len(contenders), rounds, seed):
            for number in order:
                times[number].append(self.us(contenders[number]))
        return [
            Cell(
                kind=c.kind, name=c.name, time_us=median(found), iterations=len(found), setting=c.setting, role=c.role,
                quartiles_us=(percentile(found, 25), percentile(found, 75)),
            )
            for c, found in zip(contenders, times, strict=True)
        ]  # fmt: skip

    def with_host(self, cells: Sequence[Cell], contenders: Sequence[Contender], which: Sequence[Cell]) -> list[Cell]:
        """The cells, those of `which` with their times on the host's clock, launches included, side by side."""
        mine = [n for n, cell in enumerate(cells) if cell in which]
        times: dict[int, list[float]] = {n: [] for n in mine}
        for order in some_orders(len(mine), _FEWEST_HOST + 1, "host"):
            for place in order:
                times[mine[place]].append(self.run(contenders[mine[place]]))
        return [
            replace(cell, host_us=median(times[n][1:])) if n in times else cell for n, cell in enumerate(cells)
        ]  # fmt: skip

    def close(self) -> None:
        """Gives streams and events back. Safe to call twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Call:
    """A contender as the timer takes a computation."""

    def __init__(self, contender: Contender, stream: int) -> None:
        self.load = Load(name=contender.name)
        self._contender, self._stream = contender, stream
        self.ticket: Any = None

    def __call__(self) -> None:
        self.ticket = self._contender.start(self._stream)
