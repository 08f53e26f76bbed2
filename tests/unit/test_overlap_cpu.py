"""Two on a CPU without ranks: when each ended is told before a run is over, however late a callback comes."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("strategy", [Strategy.PARTITION, Strategy.DMA_PARTITION])
def test_threads_that_begin_meanwhile_are_not_left_with_a_share(strategy: Strategy) -> None:
    """Neither those of the computation nor those of the communication; one that binds itself stays where it is."""
    every = os.sched_getaffinity(0)
    if len(every) < 2:
        pytest.skip("one core can't be shared out")
    over, found = threading.Event(), []

    class Threaded(Late):
        def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> Any:
            begin()
            return super().start(mover, stream=stream, cores=cores)

    def begin(own: set[int] | None = None) -> None:
        begun = threading.Event()

        def live() -> None:
            if own:
                os.sched_setaffinity(0, own)
            share = os.sched_getaffinity(0)
            begun.set()
            over.wait(10)
            found.append((own, share, os.sched_getaffinity(0)))

        threads.append(threading.Thread(target=live))
        threads[-1].start()
        assert begun.wait(10)

    def compute() -> None:
        begin()
        if len(every) > 3:
            begin(set(sorted(every)[:2]))

    threads: list[threading.Thread] = []
    with CpuPlace() as place:
        place.launch(compute, Threaded(), Setting(strategy, 1))
        over.set()
        for thread in threads:
            thread.join()
        assert len(found) >= 2
        for own, share, then in found:
            assert share < every
            assert then == (own or every)
        assert os.sched_getaffinity(0) == every


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
