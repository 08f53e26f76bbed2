"""Transfers between a GPU and host memory, both ways at once, that a stream can be given: by engines or by kernels.

Owns who moves the bytes. A transfer begins after what is in the stream and the stream goes on after it. The kernel
(`hw/gpu/cores.py`) moves as many bytes as the collective in two contiguous pieces, the easier job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dovetail.bench.gpu.collectives import check_one
from dovetail.bench.gpu.contenders import PLAIN, Contender
from dovetail.bench.gpu.peers import Peers
from dovetail.bench.gpu.plans import crossing_plan, streams_of
from dovetail.bench.gpu.session import Session
from dovetail.errors import NotSupported
from dovetail.hw.gpu.cores import copier
from dovetail.hw.gpu.local import LocalRunner

PROGRAMS = (8, 16, 32)
"""Programs of the copy kernel; each takes about a multiprocessor."""
VARIANT = "pcpy"


class Waits(Protocol):
    """What a launch gives back: to be waited for."""

    def wait(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One way to move the bytes."""

    backend: str
    """``cuda``: a plan on copy engines; ``sm``: a kernel."""
    name: str
    programs: int
    """Of the kernel; 0 for copy engines."""
    size_bytes: int
    """Moved by one launch, both directions together."""
    launch: Callable[[int], Waits | None]
    """Puts it behind what is in the raw stream, and the stream behind it."""
    check: Callable[[], bool]
    """Runs it once on fresh data and says whether all of it arrived."""

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name}, {self.programs} programs" if self.programs else self.name


@contextmanager
def by_engines(session: Session, peers: Peers) -> Iterator[Transfer]:
    """The collective as a plan: a stream per direction."""
    plan = crossing_plan(peers.case.collective, VARIANT, peers.ranks, peers.piece_bytes)
    host_ranks = frozenset(range(1, peers.ranks))
    with LocalRunner(session.device, plan, host_ranks=host_ranks, most_streams=streams_of(VARIANT)) as runner:
        run = runner.bind(peers.bound_to(plan))
        checked = Contender(backend="cuda", variant=VARIANT, streams=2, call=lambda: run.submit().wait())
        yield Transfer(
            backend="cuda",
            name=peers.case.collective,
            programs=0,
            size_bytes=2 * peers.crossing_bytes,
            launch=lambda stream: run.submit(after=stream),
            check=_checks(session, peers, checked),
        )


def by_kernel(session: Session, peers: Peers, programs: int) -> Transfer:
    """The same bytes by a kernel of so many programs, both directions at once, in a stream of high priority.

    Raises `NotSupported` without Triton or a GPU that torch sees.
    """
    if not session.has_torch:
        raise NotSupported("the copy kernel needs a GPU that torch sees")
    pairs, driver = (peers.plain_in, peers.plain_out), session.driver
    high = session.urgent()
    dst, src = (np.array([getattr(pair, side).data_ptr() for pair in pairs], np.int64) for side in ("dst", "src"))
    size = np.full(len(pairs), peers.crossing_bytes, np.int64)
    copy = copier(driver, programs).prepare(dst, src, size, high)

    def launch(raw: int) -> None:
        session.device.order(raw, high)
        copy()
        session.device.order(high, raw)

    def once() -> None:
        (raw,) = session.streams(1)
        launch(raw)
        session.driver.stream_synchronize(raw)

    once()  # compiled and loaded
    checked = Contender(backend=PLAIN, variant=PLAIN, streams=2, call=once)
    return Transfer(
        backend="sm",
        name="copy kernel",
        programs=programs,
        size_bytes=2 * peers.crossing_bytes,
        launch=launch,
        check=_checks(session, peers, checked),
    )


def _checks(session: Session, peers: Peers, contender: Contender) -> Callable[[], bool]:
    iteration = 0

    def check() -> bool:
        nonlocal iteration
        iteration += 1
        return check_one(session, peers, contender, peers.fresh(iteration))

    return check
