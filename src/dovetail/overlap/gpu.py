"""Runs two on one GPU, by any strategy: streams, priorities, shares of the multiprocessors.

Owns the streams and the order: both begin behind what the caller's stream has been given, and what it is given later
comes behind both. The computation stays in the caller's stream unless it is given a share of the multiprocessors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dovetail.errors import NotSupported
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Share
from dovetail.overlap.strategy import COMMUNICATION_FIRST, PARTITIONED, Setting, Strategy
from dovetail.overlap.tasks import Begun, Communication, Launched, Mark, Mover, Run, Side, apart_of

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
        #: torch's current stream, where torch sees the GPU; else the default one, 0
        self.current_stream: Callable[[], int] = self._current_stream
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

    @functools.cached_property
    def idle_step(self) -> int:
        """The granularity of shares that stay idle."""
        return self._driver.idle_step(self.device.index) if self.has_partition else 1

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
        small, large = self._split(setting.cores, idle=setting.moved_by is Mover.ENGINES)
        if setting.moved_by is Mover.ENGINES:
            return Lanes(large.stream(), self._plain)
        urgent = min(self._driver.stream_priorities()) if strategy in _URGENT else 0
        try:
            comm = small.stream(priority=urgent)
        except NotSupported as error:
            raise NotSupported(f"{strategy}: {error}") from error
        return Lanes(large.stream(), comm)

    def _split(self, cores: int, *, idle: bool) -> tuple[Share, Share]:
        step = self.idle_step if idle else self.core_step
        cores = -(-cores // step) * step  # what it gives anyway
        if cores not in self._shares:  # as many that stay idle are those that work, where so many can work
            self.device.enter()
            self._shares[cores] = self._driver.split_cores(self.device.index, cores, idle=idle)
        return self._shares[cores]

    def launch(
        self, compute: Callable[[], Any], comm: Communication, setting: Setting, main: int, mark: Mark | None = None
    ) -> Launched:
        """Both, behind what is in `main`; returns before they are done. `main` goes on behind both.

        `mark` is called with the stream of each when all of it was launched, before anything else is.
        """
        lanes = self._lanes.get(setting) or self.lanes(setting)
        there, here = lanes.comm or main, lanes.compute or main
        self.stream = here
        do = compute if here == main else functools.partial(self._in_lane, compute, here)
        if there == main:
            value = do()
            if mark:
                mark(Side.COMPUTE, main)
            pending = comm.start(setting.moved_by, stream=main, cores=setting.cores)
            if mark:
                mark(Side.COMM, main)
            return value, pending
        start = getattr(comm, "start_apart", None) if setting.moved_by is Mover.ENGINES else None  # `apart_of`
        if start is not None:
            return self._launch_apart(do, start, main, here, mark)
        return self._launch_both(do, comm, setting, (main, there, here), mark)

    def _launch_apart(
        self, do: Callable[[], Any], start: Callable[[int], Run], main: int, here: int, mark: Mark | None
    ) -> Launched:
        """Engines in streams of their own: nothing but their end and the computation's is waited for."""
        run = start(main)  # first: if it is refused, no lane waits for anything
        try:
            if here != main:
                self._follow(here, main)
            value = do()
            if mark:
                mark(Side.COMPUTE, here)
                mark(Side.COMM, run.stream)
        finally:  # whoever fails, the caller's stream comes behind what was begun
            self._driver.stream_wait_event(main, run.event)
            if here != main:
                self._follow(main, here)
        return value, run

    def _launch_both(
        self, do: Callable[[], Any], comm: Communication, setting: Setting, streams: tuple[int, int, int],
        mark: Mark | None,
    ) -> Launched:  # fmt: skip
        """`streams`: the caller's, the communication's, the computation's, which may be the caller's."""
        main, there, here = streams
        mover, cores = setting.moved_by, setting.cores
        self._follow(there, main)
        if here != main:
            self._follow(here, main)
        try:
            if setting.strategy in COMMUNICATION_FIRST:
                pending = comm.start(mover, stream=there, cores=cores)
                value = do()
            else:
                value = do()
                pending = comm.start(mover, stream=there, cores=cores)
            if mark:
                mark(Side.COMPUTE, here)
                mark(Side.COMM, there)
        finally:  # not before both were launched: HIP's masked streams wait for what the default stream has by then
            if here != main:
                self._follow(main, here)
            self._follow(main, there)
        return value, pending

    @contextlib.contextmanager
    def beside(self, comm: Communication, setting: Setting, main: int) -> Iterator[Begun]:
        """The communication beside what is launched inside; `main` goes on behind both."""
        lanes = self.lanes(setting)
        there, here = lanes.comm or main, lanes.compute or main
        mover, cores, begun = setting.moved_by, setting.cores, Begun()
        self.stream = here
        if there == main:
            yield begun
            begun.pending = comm.start(mover, stream=main, cores=cores)
        elif (start := apart_of(comm, mover)) is not None:
            run = begun.pending = start(main)
            try:
                if here != main:
                    self._follow(here, main)
                with self.current(here) if here != main else contextlib.nullcontext():
                    yield begun
            finally:
                self._driver.stream_wait_event(main, run.event)
                if here != main:
                    self._follow(main, here)
        else:
            self._follow(there, main)
            if here != main:
                self._follow(here, main)
            try:
                begun.pending = comm.start(mover, stream=there, cores=cores)
                with self.current(here) if here != main else contextlib.nullcontext():
                    yield begun
            finally:
                if here != main:
                    self._follow(main, here)
                self._follow(main, there)

    def _in_lane(self, compute: Callable[[], Any], here: int) -> Any:
        with self.current(here):
            return compute()

    def _follow(self, stream: int, other: int) -> None:
        """What `stream` is given from now on comes after what `other` was given.

        A wait is for what was recorded when it was asked for, so one event does for all, again and again.
        """
        self._driver.event_record(self._event, other)
        self._driver.stream_wait_event(stream, self._event)

    def _current_stream(self) -> int:
        """Of the first calls: finds torch's short way, 0.2 us, where `torch.cuda.current_stream` takes 4
        (pytorch/pytorch#78165)."""
        import torch

        raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) if torch.cuda.is_available() else None
        if raw_stream is not None:
            self.current_stream = functools.partial(raw_stream, self.device.index)
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
