"""Moves the blocks of vLLM's jobs between its caches and host memory, and tells which jobs are over.

Owns the host memory, the mover and the jobs under way; knows nothing of vLLM's classes. Jobs of one direction run one
after the other, in the order in which they were submitted. A chunk is not used again before its job is over: vLLM's
manager waits for that, and `close` waits before the memory goes. Called by one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dovetail.errors import Timeout
from dovetail.hw.gpu.device import Device
from dovetail.kv.choose import Path
from dovetail.kv.memory import DriverPinner, HostMemory
from dovetail.kv.mover import GpuMover, Transfer
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Pieces
from dovetail.kv.vllm.counts import Counts
from dovetail.kv.vllm.jobs import Caches, Job
from dovetail.kv.vllm.options import Options
from dovetail.kv.vllm.timing import Clock, CpuClock, GpuClock, Span

logger = logging.getLogger(__name__)

#: A load of all there is takes seconds: what takes longer is broken, and vLLM would wait for ever.
WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A job whose last byte has landed."""

    job_id: int
    size_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Underway:
    job_id: int
    size_bytes: int
    transfer: Transfer
    span: Span


class Extent(Protocol):
    """One registration of host memory."""

    @property
    def base(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class Host(Protocol):
    """Slots on the host: `HostMemory`, or memory that vLLM made."""

    num_slots: int
    slot_bytes: int
    slots_per_piece: int

    @property
    def pieces(self) -> Sequence[Extent]: ...
    def close(self) -> None:
        """Nothing copies to or from it any more. Safe to call twice."""

    def abandon(self) -> None:
        """Something may: it stays until the process ends."""


class Transfers:
    """Stores and loads. Made by `on_gpu` or `on_cpu`; owns `memory` from then on, `close()` gives everything back."""

    def __init__(self, caches: Caches, memory: Host, mover: Any, clock: Clock, path: Path) -> None:
        self.memory, self.counts = memory, Counts()
        self._caches, self._mover, self._clock, self._path = caches, mover, clock, path
        self._start: Callable[..., Transfer] = mover.submit
        if isinstance(mover, GpuMover):  # the model computes meanwhile, also where it has not begun to
            self._start = functools.partial(mover.submit, beside=True)
        self._pieces = Pieces(
            num_slots=memory.num_slots, slot_bytes=memory.slot_bytes, slots_per_piece=memory.slots_per_piece
        )
        self._underway: dict[Direction, deque[_Underway]] = {direction: deque() for direction in Direction}

    @classmethod
    def on_gpu(
        cls, device: Device, caches: Caches, memory: Host, path: Path, current_stream: Callable[[], int]
    ) -> Transfers:
        """For caches in a GPU's memory. `current_stream` gives the one on which the model runs."""
        with contextlib.ExitStack() as made:  # what was made goes again if the rest is refused
            made.callback(memory.close)
            mover = made.enter_context(GpuMover(device, caches.base, [piece.base for piece in memory.pieces]))
            mover.prepare(path, caches.strided_rows)
            found = cls(caches, memory, mover, GpuClock(device, current_stream), path)
            made.pop_all()
        return found

    @classmethod
    def on_cpu(cls, caches: Caches, memory: Host, path: Path) -> Transfers:
        """For caches in host memory.

        Raises:
            ValueError: a path that needs a GPU.
        """
        if path not in (Path.AUTO, Path.CPU):
            memory.close()
            raise ValueError(f"caches in host memory are moved by the path {Path.CPU}, not {path}")
        pieces = [_bytes_at(piece.base, piece.size_bytes) for piece in memory.pieces]
        mover = CpuMover(_bytes_at(caches.base, caches.size_bytes), pieces)
        return cls(caches, memory, mover, CpuClock(), Path.CPU)

    def submit(self, job_id: int, direction: Direction, job: Job) -> None:
        """Starts a job; returns before its bytes have landed.

        Raises:
            ValueError: the job's numbers do not fit; nothing was moved.
            HardwareError: the driver refused; some copies may be under way.
        """
        copies = self._caches.table(direction, job, self._pieces)
        after = self._clock.begin(direction)
        transfer = self._start(direction, copies, self._path, after=after)
        span = self._clock.end(direction, transfer)
        choice = getattr(transfer, "choice", None)
        path, reason = (choice.path, choice.reason) if choice else (Path.CPU, "the cache is in host memory")
        self.counts.add(direction, path, reason, copies.size_bytes)
        logger.debug(
            "%s of job %d: %d bytes in %d copies by %s: %s",
            direction, job_id, copies.size_bytes, len(copies), path, reason,
        )  # fmt: skip
        self._underway[direction].append(_Underway(job_id, copies.size_bytes, transfer, span))

    def finished(self) -> list[Finished]:
        """The jobs that are over and were not told of before."""
        found = []
        for waiting in self._underway.values():
            while waiting and waiting[0].transfer.is_over() and waiting[0].span.is_over():
                one = waiting.popleft()
                found.append(Finished(job_id=one.job_id, size_bytes=one.size_bytes, time_s=one.span.seconds()))
        return found

    def wait(self, job_ids: Collection[int], timeout_s: float = WAIT_S) -> None:
        """Blocks until these jobs are over; unknown ones are. Raises `Timeout`."""
        for waiting in self._underway.values():
            for one in waiting:
                if one.job_id in job_ids:
                    one.transfer.wait(timeout_s)

    def close(self, timeout_s: float = WAIT_S) -> None:
        """Waits for what is under way and gives the memory back; if it does not end, the memory stays as it is.

        Safe to call twice.
        """
        try:
            for waiting in self._underway.values():
                for one in waiting:
                    one.transfer.wait(timeout_s)
                waiting.clear()
            if isinstance(self._mover, GpuMover):
                self._mover.close(timeout_s)
        except Timeout:
            self.memory.abandon()  # copies may still write it
            raise
        self._clock.close()
        self.memory.close()


def private_memory(
    caches: Caches, num_chunks: int, options: Options, device: Device | None = None
) -> HostMemory:
    """Memory of this worker alone; pinned if there is a device.

    Raises:
        ValueError: no chunk fits into it.
    """
    if num_chunks < 1:
        raise ValueError(
            f"the host holds {num_chunks} chunks of {caches.blocks_per_chunk} blocks: cpu_bytes_to_use must be at "
            f"least {caches.slot_bytes * caches.blocks_per_chunk} for each worker"
        )
    pinner = DriverPinner(device.driver, device.enter) if device else None
    slots = num_chunks * caches.slots_per_chunk
    return HostMemory(slots, caches.slot_bytes, piece_bytes=options.piece_bytes, pinner=pinner)


def _bytes_at(address: int, size_bytes: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
