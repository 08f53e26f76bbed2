"""Runs two on one GPU, by any strategy: streams, priorities, shares of the multiprocessors.

Owns the streams and the order: both begin behind what the caller's stream has been given, and what it is given later
comes behind both. The computation stays in the caller's stream unless it is given a share of the multiprocessors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.errors import NotSupported
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Share
from dovetail.overlap.strategy import COMMUNICATION_FIRST, PARTITIONED, Setting, Strategy
from dovetail.overlap.tasks import Communication, Computation, Launched, Mark, Mover, Run, Side, apart_of

_URGENT = frozenset({Strategy.PRIORITY, Strategy.PRIORITY_PARTITION})


@dataclass(frozen=True, slots=True)
class Lanes:
    """The streams of a setting."""

    compute: int  #: 0: the caller's
    comm: int


class GpuPlace:
    """One GPU. An owner: `close()`, or `with`."""

    def __init__(self, device: Device) -> None:
        device.enter()
        self.device, self._driver = device, device.driver
        self.num_cores = device.driver.num_multiprocessors(device.index)
        self.stream = 0  #: where a computation is to be launched: torch's current stream too, if torch sees the GPU
        self._plain = self._driver.stream_create()
        self._urgent = self._driver.stream_create(priority=min(self._driver.stream_priorities()))
        self._event = self._driver.event_create()
        self._raw_stream: Callable[[int], int] | None = None
        self._shares: dict[int, tuple[Share, Share]] = {}
        self._lanes: dict[Setting, Lanes] = {}
        self._torch_streams: dict[int, Any] = {}

    @property
    def backend(self) -> str:
        """ "cuda" or "hip"."""
        return self._driver.name

    @property
    def has_partition(self) -> bool:
        """Can its multiprocessors be shared out?"""
        return self.device.caps.partition

    @property
    def core_step(self) -> int:
        """The granularity of shares."""
        return self._driver.core_step(self.device.index) if self.has_partition else 1

    def prepare(self, setting: Setting) -> None:
        """What costs time once. Raises `NotSupported` where the setting can't be."""
        self.lanes(setting)

    def lanes(self, setting: Setting) -> Lanes:
        """The streams of a setting, made when first asked for. Raises `NotSupported` where there are no shares."""
        found = self._lanes.get(setting)
        if found is None:
            found = self._lanes[setting] = self._made(setting)
        return found

    def _made(self, setting: Setting) -> Lanes:
        strategy = setting.strategy
        if not self._plain:
            raise ValueError("this place is closed")
        if strategy is Strategy.SERIAL:
            return Lanes(0, 0)
        if strategy not in PARTITIONED:
            return Lanes(0, self._urgent if strategy in _URGENT else self._plain)
        if not self.has_partition:
            raise NotSupported(f"{self.device.name}: this driver can't share out multiprocessors, as {strategy} needs")
        if setting.cores < 1:
            raise ValueError(f"{strategy} needs a number of cores, of which the computation goes without")
        small, large = self._split(setting.cores)
        if setting.moved_by is Mover.ENGINES:
            return Lanes(large.stream(), self._plain)
        urgent = min(self._driver.stream_priorities()) if strategy in _URGENT else 0
        try:
            comm = small.stream(priority=urgent)
        except NotSupported as error:
            raise NotSupported(f"{strategy}: {error}") from error
        return Lanes(large.stream(), comm)

    def _split(self, cores: int) -> tuple[Share, Share]:
        step = self.core_step
        cores = -(-cores // step) * step  # what it gives anyway
        if cores not in self._shares:
            self.device.enter()
            self._shares[cores] = self._driver.split_cores(self.device.index, cores)
        return self._shares[cores]

    def launch(
        self, compute: Computation, comm: Communication, setting: Setting, main: int, mark: Mark | None = None
    ) -> Launched:
        """Both, behind what is in `main`; returns before they are done. `main` goes on behind both.

        `mark` is called with the stream of each when all of it was launched, before anything else is.
        """
        lanes = self._lanes.get(setting) or self.lanes(setting)
        there, here = lanes.comm or main, lanes.compute or main
        mover, cores = setting.moved_by, setting.cores
        if there == main:
            value = self._compute(compute, here, main)
            if mark:
                mark(Side.COMPUTE, main)
            pending = comm.start(mover, stream=main, cores=cores)
            if mark:
                mark(Side.COMM, main)
            return Launched(value, pending)
        if (apart := apart_of(comm, mover)) is not None:
            return self._launch_apart(apart, compute, main, here, mark)
        self._fork(main, there, here)
        try:
            if setting.strategy in COMMUNICATION_FIRST:
                pending = comm.start(mover, stream=there, cores=cores)
                value = self._compute(compute, here, main)
            else:
                value = self._compute(compute, here, main)
                pending = comm.start(mover, stream=there, cores=cores)
            if mark:
                mark(Side.COMPUTE, here)
                mark(Side.COMM, there)
        finally:  # whoever fails, the caller's stream comes behind what was begun
            self._join(main, there, here)
        return Launched(value, pending)

    def _launch_apart(
        self, start: Callable[[int], Run], compute: Computation, main: int, here: int, mark: Mark | None
    ) -> Launched:
        """Engines in streams of their own: nothing but their end and the computation's is waited for."""
        run = self._start_apart(start, main, here)
        try:
            value = self._compute(compute, here, main)
            if mark:
                mark(Side.COMPUTE, here)
                mark(Side.COMM, run.stream)
        finally:  # whoever fails, the caller's stream comes behind what was begun
            self._join_apart(run, main, here)
        return Launched(value, run)

    @contextlib.contextmanager
    def beside(self, comm: Communication, setting: Setting, main: int) -> Iterator[Launched]:
        """The communication beside what is launched inside; `main` goes on behind both."""
        lanes = self.lanes(setting)
        there, here = lanes.comm or main, lanes.compute or main
        mover, cores, launched = setting.moved_by, setting.cores, Launched(None)
        if there == main:
            self.stream = main
            yield launched
            launched.pending = comm.start(mover, stream=main, cores=cores)
            return
        self.stream = here
        if (apart := apart_of(comm, mover)) is not None:
            run = launched.pending = self._start_apart(apart, main, here)
            try:
                with self.current(here) if here != main else contextlib.nullcontext():
                    yield launched
            finally:
                self._join_apart(run, main, here)
            return
        self._fork(main, there, here)
        try:
            launched.pending = comm.start(mover, stream=there, cores=cores)
            with self.current(here) if here != main else contextlib.nullcontext():
                yield launched
        finally:
            self._join(main, there, here)

    def _start_apart(self, start: Callable[[int], Run], main: int, here: int) -> Run:
        run = start(main)  # first: if it is refused, no lane waits for anything
        if here != main:
            self._driver.event_record(self._event, main)
            self._driver.stream_wait_event(here, self._event)
        return run

    def _join_apart(self, run: Run, main: int, here: int) -> None:
        if here != main:
            self._driver.event_record(self._event, here)
            self._driver.stream_wait_event(main, self._event)
        self._driver.stream_wait_event(main, run.event)

    def _fork(self, main: int, there: int, here: int) -> None:
        """What both lanes are given from now on comes after what `main` was given.

        A wait is for what was recorded when it was asked for, so one event does for all, again and again.
        """
        driver, event = self._driver, self._event
        driver.event_record(event, main)
        driver.stream_wait_event(there, event)
        if here != main:
            driver.stream_wait_event(here, event)

    def _join(self, main: int, there: int, here: int) -> None:
        """What `main` is given from now on comes after what both lanes were given."""
        driver, event = self._driver, self._event
        if here != main:
            driver.event_record(event, here)
            driver.stream_wait_event(main, event)
        driver.event_record(event, there)
        driver.stream_wait_event(main, event)

    def _compute(self, compute: Computation, stream: int, main: int) -> Any:
        self.stream = stream
        if stream == main:
            return compute()
        with self.current(stream):
            return compute()

    def current_stream(self) -> int:
        """torch's, where torch sees the GPU; else the default one, 0.

        By torch's short way to it: 0.2 us, where `torch.cuda.current_stream` takes 4 (pytorch/pytorch#78165).
        """
        raw_stream = self._raw_stream
        if raw_stream is not None:
            return raw_stream(self.device.index)
        import torch

        if torch.cuda.is_available():
            self._raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        return tensors.current_stream(self.device.index)

    @contextlib.contextmanager
    def current(self, stream: int) -> Iterator[None]:
        """Makes a raw stream torch's current one, where torch sees the GPU."""
        import torch

        if not torch.cuda.is_available():
            yield
            return
        cuda: Any = torch.cuda
        if stream not in self._torch_streams:
            self._torch_streams[stream] = cuda.ExternalStream(stream, device=self.device.index)
        with cuda.stream(self._torch_streams[stream]):
            yield

    def close(self) -> None:
        """Waits for the streams and gives them back. Safe to call twice."""
        own = [stream for stream in (self._plain, self._urgent) if stream]
        for stream in {*own, *(s for lanes in self._lanes.values() for s in (lanes.compute, lanes.comm) if s)}:
            self._driver.stream_synchronize(stream)
        for stream in own:
            self._driver.stream_destroy(stream)
        for shares in self._shares.values():
            for share in shares:
                share.close()
        if self._event:
            self._driver.event_destroy(self._event)
        self._plain = self._urgent = self._event = 0
        self._shares, self._lanes, self._torch_streams = {}, {}, {}

    def __enter__(self) -> GpuPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
