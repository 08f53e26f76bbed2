"""Transfers between a GPU and host memory, both ways at once, that a stream can be given: by engines or by kernels.

Owns who moves the bytes. A transfer begins after what is in the stream and the stream goes on after it. The kernel
(`hw/gpu/kernels/copy.py`) moves as many bytes as the collective in two contiguous pieces, the easier job.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.bench.gpu.collectives import check_one
from dovetail.bench.gpu.contenders import PLAIN, Contender
from dovetail.bench.gpu.peers import Pair, Peers
from dovetail.bench.gpu.plans import crossing_plan, streams_of
from dovetail.bench.gpu.session import Session
from dovetail.errors import NotSupported
from dovetail.hw.gpu.local import LocalRunner

PROGRAMS = (8, 16, 32)
"""Programs of the copy kernel, half of them for each direction; each takes about a multiprocessor."""
VARIANT = "pcpy"
_VECTOR_BYTES = 16
_BLOCK, _NUM_WARPS = 512, 8


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
    """The same bytes by a Triton kernel per direction, each with half of the programs, in a stream of high priority.

    Raises `NotSupported` without Triton or a GPU that torch sees.
    """
    if not session.has_torch:
        raise NotSupported("the copy kernel needs a GPU that torch sees")
    if importlib.util.find_spec("triton") is None:
        raise NotSupported("the copy kernel needs Triton, which is not installed: pip install triton")
    if programs < 2 or programs % 2 or peers.crossing_bytes % _VECTOR_BYTES:
        raise ValueError(
            f"a copy kernel each way takes an even number of programs and whole {_VECTOR_BYTES} bytes, "
            f"got {programs} and {peers.crossing_bytes}"
        )
    import torch

    from dovetail.hw.gpu.kernels.copy import copy_kernel

    cuda: Any = torch.cuda
    kernel: Any = copy_kernel
    here, beside = cuda.Stream(priority=-1), cuda.Stream(priority=-1)
    vectors = peers.crossing_bytes // _VECTOR_BYTES

    def copy(pair: Pair, stream: Any) -> None:
        with cuda.stream(stream):
            dst, src = (tensor.data_ptr() for tensor in pair)
            kernel[(programs // 2,)](dst, src, vectors, BLOCK=_BLOCK, num_warps=_NUM_WARPS)

    def launch(raw: int) -> None:
        given = cuda.ExternalStream(raw)
        for stream, pair in ((here, peers.plain_in), (beside, peers.plain_out)):
            stream.wait_stream(given)
            copy(pair, stream)
        given.wait_stream(here)
        given.wait_stream(beside)

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
