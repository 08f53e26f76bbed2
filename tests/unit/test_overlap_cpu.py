"""Two on a CPU without ranks: when each ended is told before a run is over, however late a callback comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from dovetail.overlap import Call, Mover, Setting, Strategy, Traffic
from dovetail.overlap.cpu import CpuPlace
from dovetail.overlap.timing import CpuTimer

PAUSE_S = 0.03


class Late:
    """A communication of `PAUSE_S` whose callback comes as much later than its end."""

    traffic = Traffic(kind="all_gather", size_bytes=1)
    movers = frozenset(Mover)
    group = device = None

    def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> Any:
        if mover is Mover.CORES:
            time.sleep(PAUSE_S)
            return None
        return Work()


class Work:
    def __init__(self) -> None:
        self._over = threading.Event()
        self._callbacks: list[Callable[[Any], None]] = []
        threading.Thread(target=self._serve).start()

    def _serve(self) -> None:
        time.sleep(PAUSE_S)
        self._over.set()
        time.sleep(PAUSE_S)
        for callback in self._callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    def wait(self) -> bool:
        return self._over.wait(10)


@pytest.mark.parametrize("setting", [
    Setting(Strategy.SERIAL), Setting(Strategy.STREAMS), Setting(Strategy.PRIORITY), Setting(Strategy.DMA),
], ids=str)  # fmt: skip
def test_the_end_of_this_run_is_told_not_that_of_the_last(setting: Setting) -> None:
    with CpuPlace() as place, CpuTimer(place) as timer:
        for _ in range(3):
            times = timer.both(Call(lambda: None), Late(), setting)
            assert times.comm_us is not None
            assert times.compute_us is not None
            assert times.comm_us >= PAUSE_S * 1e6  # not before it began
            assert times.total_us >= times.compute_us >= 0
