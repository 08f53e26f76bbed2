"""Runs two on a CPU, by the same strategies: threads instead of streams, cores instead of multiprocessors.

Owns the thread that communicates where cores move the bytes, and which cores each side may use. Engines are our
software ones. A process may not raise its own priority, so `priority` is the launch order alone: the computation
begins once the communication has.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dovetail import env
from dovetail.errors import NotSupported
from dovetail.overlap.strategy import PARTITIONED, Setting, Strategy
from dovetail.overlap.tasks import Begun, Communication, Launched, Mark, Mover, Pending, Side

_TOLD_S = 5.0  # a callback that comes later than this is not waited for
_URGENT = frozenset({Strategy.PRIORITY, Strategy.PRIORITY_PARTITION})


class CpuPlace:
    """The cores of this process. An owner: `close()`, or `with`."""

    backend = "cpu"
    core_step = idle_step = 1

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        turn = (env.rank() or 0) % len(cores)
        self._all = cores[turn:] + cores[:turn]  # ranks that share their cores keep different ones for themselves
        self.num_cores = len(self._all)
        self._pool: ThreadPoolExecutor | None = None
        self._worker = 0  # the pool's thread, as the kernel numbers it
        self._closed = False

    @property
    def has_partition(self) -> bool:
        """Are there cores to share out?"""
        return self.num_cores > 1

    def prepare(self, setting: Setting) -> None:
        """What costs time once. Raises `NotSupported` where the setting can't be."""
        if self._closed:
            raise ValueError("this place is closed")
        if setting.strategy in PARTITIONED and not 1 <= setting.cores < self.num_cores:
            raise NotSupported(f"{setting}: {self.num_cores} cores can't be shared out so")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "dovetail overlap")
            self._worker = self._pool.submit(threading.get_native_id).result()

    def compute_cores(self, setting: Setting) -> list[int]:
        """Those that a computation has."""
        return self._all[: self.num_cores - setting.cores] if setting.strategy in PARTITIONED else self._all

    @contextlib.contextmanager
    def _shared_out(self, setting: Setting) -> Iterator[None]:
        """The last cores for whoever communicates, the others for all other threads; then all is as it was.

        Threads that have begun meanwhile, with the cores of who began them, get those that the calling thread had.
        """
        if setting.strategy not in PARTITIONED:
            yield
            return
        import torch

        mine, number = self.compute_cores(setting), torch.get_num_threads()
        theirs = self._all[len(mine) :]
        before = _bound_to(_threads())
        home = before[threading.get_native_id()]
        try:
            _bind(dict.fromkeys(before, mine) | {self._worker: theirs})
            torch.set_num_threads(min(number, len(mine)))
            yield
        finally:
            torch.set_num_threads(number)
            _bind(before)
            born = _bound_to(_threads() - before.keys())
            _bind({thread: home for thread, cores in born.items() if cores in (set(mine), set(theirs))})

    def launch(
        self, compute: Callable[[], Any], comm: Communication, setting: Setting, main: int = 0, mark: Mark | None = None
    ) -> Launched:
        """Both; they are over when this returns. `mark` is called when each has ended, from any thread."""
        self.prepare(setting)
        with self._shared_out(setting):
            return self._launch(compute, comm, setting, main, mark or _nobody)

    def _launch(
        self, compute: Callable[[], Any], comm: Communication, setting: Setting, main: int, ended: Mark
    ) -> Launched:
        if setting.strategy is Strategy.SERIAL:
            value = compute()
            ended(Side.COMPUTE, main)
            _finish(comm.start(setting.moved_by, cores=setting.cores))
            ended(Side.COMM, main)
            return value, None
        wait = self._begin(comm, setting, ended)
        try:
            value = compute()
            ended(Side.COMPUTE, main)
        finally:
            wait()
        return value, None

    @contextlib.contextmanager
    def beside(self, comm: Communication, setting: Setting, main: int = 0) -> Iterator[Begun]:
        """The communication beside what is done inside; over at the end."""
        self.prepare(setting)
        if setting.strategy is Strategy.SERIAL:
            yield Begun()
            _finish(comm.start(setting.moved_by, cores=setting.cores))
            return
        with self._shared_out(setting):
            wait = self._begin(comm, setting, _nobody)
            try:
                yield Begun()
            finally:
                wait()

    def _begin(self, comm: Communication, setting: Setting, ended: Mark) -> Any:
        """Starts the communication; returns what waits for it."""
        if setting.moved_by is Mover.ENGINES:
            return _told(comm.start(Mover.ENGINES), ended)
        begun = threading.Event()

        def communicate() -> None:
            begun.set()
            _finish(comm.start(Mover.CORES, cores=setting.cores))
            ended(Side.COMM, 0)

        assert self._pool is not None  # prepared
        future = self._pool.submit(communicate)
        if setting.strategy in _URGENT:
            begun.wait()
        return future.result

    def close(self) -> None:
        """Ends the thread. Safe to call twice."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self._closed = None, True

    def __enter__(self) -> CpuPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nobody(_side: Side, _stream: int) -> None:
    """Nobody wants to know."""


def _finish(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()


def _told(pending: Pending | None, ended: Mark) -> Callable[[], None]:
    """Has the end told by whoever comes to it, if that can be; else it is seen when it is waited for.

    Returns what waits: for the end, and until it was told, which may come a moment later.
    """
    over = threading.Event()

    def tell(_: object = None) -> None:
        ended(Side.COMM, 0)
        over.set()

    later = getattr(pending, "add_done_callback", None)
    if later is not None:
        later(tell)

    def wait() -> None:
        _finish(pending)
        if later is None or not over.wait(_TOLD_S):
            tell()

    return wait


def _threads() -> set[int]:
    """Of this process, as the kernel numbers them."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def _bound_to(threads: Iterable[int]) -> dict[int, Collection[int]]:
    """The cores of each."""
    found: dict[int, Collection[int]] = {}
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            found[thread] = os.sched_getaffinity(thread)
    return found


def _bind(cores: Mapping[int, Collection[int]]) -> None:
    for thread, wanted in cores.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, wanted)
