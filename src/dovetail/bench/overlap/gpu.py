"""The site of the bench on one GPU: its streams and clock, computations by torch, links to host memory.

Owns the arenas, which grow as scenarios need them, and the one computation that is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dovetail.bench.gpu.session import Arena, Session
from dovetail.bench.overlap.links import Link, arena_bytes, link, pieces_of
from dovetail.bench.overlap.spec import Compute, Job, Make
from dovetail.bench.overlap.work import TorchWork, Work
from dovetail.errors import HardwareError, NotSupported
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.strategy import Setting
from dovetail.overlap.tasks import Bound, Communication, Computation, Mover
from dovetail.overlap.timing import GpuTimer, Times

_ATTEMPTS = 3
_STREAM = Compute(name="memory", bound=Bound.STREAM, make=Make.ADD, shape=(192 << 20,), small=(1 << 20,))


class GpuSite:
    """One GPU with peers in host memory. An owner: `close()`, or `with`."""

    def __init__(self, session: Session, ranks: int, make: Callable[[Compute], Work] | None = None) -> None:
        """`make`: computations, if not by torch. Raises `NotSupported` without a GPU that torch sees, or that."""
        if make is None and not session.has_torch:
            raise NotSupported("the computations need a GPU that torch sees; torch sees none here")
        self._session, self.ranks, self._make = session, ranks, make
        self.backend, self.device_name = "cuda", session.device.name
        self.place = GpuPlace(session.device)
        self.timer = GpuTimer(self.place)
        self._arenas: tuple[Arena, Arena] | None = None
        self._arena_bytes = 0
        self._work: tuple[Compute, Work] | None = None
        self._link: Link | None = None

    def work(self, compute: Compute) -> Work:
        """The computation; the one before it is given back."""
        if self._work is None or self._work[0] != compute:
            self._work = None
            self._work = compute, self.make(compute)
        return self._work[1]

    def make(self, compute: Compute) -> Work:
        """A new one."""
        return self._make(compute) if self._make else TorchWork(compute, self.backend)

    def pieces(self, job: Job) -> int:
        """In a direction."""
        return pieces_of(job, self.ranks)

    def link(self, job: Job, piece_bytes: int) -> Link:
        """The communication; the one before it is given back. `NotSupported` if it needs more than may be pinned."""
        if self._link is not None:
            self._link.close()
            self._link = None
        needed = arena_bytes(job, self.ranks, piece_bytes)
        if self._arenas is None or needed > self._arena_bytes:
            # The next power of two: what was taken before stays with the session, and is no more than this.
            size = min(1 << (needed - 1).bit_length(), self._session.pin_limit_bytes - self._session.pinned_bytes)
            size = max(size, needed)
            self._arenas = self._session.arena("device", size), self._session.arena("host", size)
            self._arena_bytes = size
        self._link = link(self._session, job, self.ranks, piece_bytes, *self._arenas)
        return self._link

    def check(self, made: Link, mover: Mover) -> bool:
        """Moves it once, and looks."""
        return made.check(mover, self.timer.main)

    # --- runs

    def warm(self, work: Computation, comm: Communication, setting: Setting | None) -> None:
        """Runs it without a gate: first launches load and allocate, which would wait for ever behind a closed one.

        None: the computation alone.
        """
        with self.place.current(self.timer.main):
            self.place.stream = self.timer.main
            if setting is None:
                work()
            else:
                _, pending = self.place.launch(work, comm, setting, self.timer.main)
                if pending is not None:
                    pending.wait()
        self._session.driver.stream_synchronize(self.timer.main)

    def repeat(self, work: Computation, comm: Communication, setting: Setting, number: int) -> None:
        """The pair so often, one after the other, without a gate; returns when the GPU is done."""
        driver = self._session.driver
        with self.place.current(self.timer.main):
            for _ in range(number):
                _, last = self.place.launch(work, comm, setting, self.timer.main)
        if last is not None:
            last.wait()
        driver.stream_synchronize(self.timer.main)

    def compute_us(self, work: Computation) -> float:
        """Alone."""
        return float(self._timed(lambda: self.timer.compute(work)))

    def comm_us(self, comm: Communication, mover: Mover) -> float:
        """Alone."""
        return float(self._timed(lambda: self.timer.comm(comm, mover)))

    def both(self, work: Computation, comm: Communication, setting: Setting) -> Times:
        """Together."""
        found: Times = self._timed(lambda: self.timer.both(work, comm, setting))
        return found

    def _timed(self, call: Callable[[], Any]) -> Any:
        """A run of the timer; one whose gate has opened by itself is not counted but repeated."""
        for _ in range(_ATTEMPTS):
            found = call()
            # Copies by the host, on a stand-in driver, always wait.
            if not self.timer.was_opened or not self._session.has_torch:
                return found
        raise HardwareError(f"a run waited on the host for what it had launched, {_ATTEMPTS} times: it can't be timed")

    def agree(self, values: list[float]) -> list[float]:
        """There is but one rank."""
        return values

    def memory_bytes_per_s(self) -> float | None:
        """What a kernel that streams reaches; None without torch."""
        if not self._session.has_torch:
            return None
        work = TorchWork(_STREAM, self.backend)
        self.warm(work, None, None)  # type: ignore[arg-type]
        times = sorted(self.compute_us(work) for _ in range(5))
        return float(work.load.size_bytes / times[2] * 1e6)

    def close(self) -> None:
        """Gives everything but the session back. Safe to call twice."""
        if self._link is not None:
            self._link.close()
        self._link, self._work = None, None
        self.timer.close()
        self.place.close()

    def __enter__(self) -> GpuSite:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
