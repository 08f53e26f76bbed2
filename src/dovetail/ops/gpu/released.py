"""A sliced plan beside the computation that raises its flags, run again and again.

Owns the order of launches: the computation is launched first and the copies are issued while it runs, behind an event
that was recorded before it; the caller's stream then waits for the last copy. Nothing here waits on the host. It knows
no operator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.local import LocalRunner
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.ops.gpu.exchange import Buffers, Pace
from dovetail.ops.gpu.tiles import RowTiles
from dovetail.plan.plan import Plan

if TYPE_CHECKING:
    import torch

#: Queues in each direction, which take slices in turn: a stream that waits for a flag sees it some 10 us late, while
#: the other one copies.
LANES = 2
#: Where flags lie: a kernel's store to its own memory is over sooner than one over the link.
WORDS_ON_DEVICE = True


@dataclass(frozen=True, slots=True, eq=False)
class Flags:
    """What a computation raises in one run: it stores `value`, 64 bits, to the address of a slice that is finished.

    All bytes of the slice must be visible to the system before (a release store at system scope). The addresses are
    those of the plan's imported signals in their order, which is that of the slices.
    """

    addresses: torch.Tensor  #: int64, on the device
    words: Sequence[int]  #: the same numbers, for whoever raises them from a stream
    base: int  #: what this run's signals count from
    value: int  #: base + 1

    def __len__(self) -> int:
        return len(self.words)


class Sliced(Protocol):
    """A computation that raises a flag for each of its slices."""

    def launch(self, flags: Flags, stream: int) -> None:
        """Puts it into the raw stream, which is torch's current one, and returns at once.

        It must not wait for anything that comes later in that stream, and must raise every flag.
        """


class SlicedRun:
    """A sliced plan over given buffers, run again and again, each time beside a computation. An owner: `close()`."""

    def __init__(
        self, device: Device, plan: Plan, buffers: Mapping[tuple[int, str], Any], *, host_ranks: frozenset[int],
        timeout_s: float | None = None, lanes: int = 1, words_on_device: bool = False,
    ) -> None:  # fmt: skip
        """`plan`: of `plan.build.sliced`; `buffers` by rank and name, those of `host_ranks` in pinned host memory.

        `lanes`: those of the plan; `words_on_device`: the flags lie in the GPU's memory.
        """
        import torch

        device.enter()
        self._device = device
        self._runner = LocalRunner(
            device, plan, host_ranks=host_ranks, timeout_s=timeout_s, most_streams=2 * lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        try:
            self._run = self._runner.bind(buffers)
        except BaseException:
            self._runner.close()
            raise
        self._error: BaseException | None = None
        where = f"cuda:{device.index}" if torch.cuda.is_available() else "cpu"
        self._words = self._runner.imported()
        self._addresses = torch.tensor(self._words, dtype=torch.int64).to(where)

    @property
    def num_flags(self) -> int:
        """How many flags a computation raises."""
        return len(self._words)

    def start(self, compute: Sliced, stream: int) -> GpuTicket:
        """Launches the computation into the raw stream and issues the copies; the stream goes on behind both.

        Returns before anything is done. The ticket's wait blocks the host until all slices are where they belong.

        Raises:
            NotSupported: the stream is capturing a graph.
            DovetailError: an earlier run could not be issued as a whole: close this and make another.
        """
        self.refuse(stream)
        is_launched = False

        def launch(base: int) -> None:
            nonlocal is_launched
            compute.launch(Flags(self._addresses, self._words, base, base + 1), stream)
            is_launched = True

        try:
            return self._run.submit(after=stream, launch=launch)
        except BaseException as error:
            if is_launched:  # in part, it may still read and write the buffers: there is no other run after it
                self._error = error
            raise

    def refuse(self, stream: int, error: BaseException | None = None) -> None:
        """Raises what `start` does before it launches anything; `error`: of an earlier run, besides its own."""
        self._device.enter()
        error = error or self._error
        if error is not None:
            raise DovetailError(f"an earlier run was not issued as a whole: {error!r}") from error
        if self._device.driver.stream_capturing(stream):
            raise NotSupported("the stream is capturing a graph: copies behind flags would be lost. Run it outside")

    def close(self) -> None:
        """Waits for the last run. Safe to call twice."""
        self._runner.close()

    def __enter__(self) -> SlicedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Headed:
    """A sliced run whose first slice has a launch of its own: its copies begin behind an event.

    A queue sees an event some microseconds sooner than a word, and the link waits for nothing but the first slice. An
    owner: `close()`.
    """

    def __init__(
        self, device: Device, tiles: RowTiles, buffers: Buffers, *, pace: Pace | str,
        timeout_s: float | None, lanes: int, words_on_device: bool,
    ) -> None:  # fmt: skip
        """`tiles`: the table of all slices; see `Exchange.headed`."""
        exchange = buffers.exchange
        plan, rest = exchange.headed(tiles, pace=pace, lanes=lanes)
        self._device = device
        self._error: BaseException | None = None
        self._early: GpuTicket | None = None
        self._runner = LocalRunner(
            device, plan, host_ranks=exchange.peers, timeout_s=timeout_s, most_streams=2 * lanes
        )  # fmt: skip
        try:
            self._head = self._runner.bind(buffers.of(plan))
            self.rest = SlicedRun(
                device, rest, buffers.of(rest), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
                words_on_device=words_on_device,
            )  # fmt: skip
        except BaseException:
            self._runner.close()
            raise

    def start(self, first: Callable[[], object], compute: Sliced, stream: int) -> Tickets:
        """`first` launches the first slice into the raw stream, torch's current one; then as `SlicedRun.start`."""
        self.rest.refuse(stream, self._error)
        driver, before = self._device.driver, self._early
        if before is not None and not before.is_over():
            driver.stream_wait_event(stream, before.event)  # its copies still read what is computed anew
        first()
        try:
            early = self._early = self._head.submit(after=stream, joins=False)
        except BaseException as error:
            self._error = error  # some of its copies may be under way: there is no other run after it
            raise
        try:
            return Tickets(early, self.rest.start(compute, stream))
        finally:
            driver.stream_wait_event(stream, early.event)

    def close(self) -> None:
        """Waits for the last run. Safe to call twice."""
        try:
            self.rest.close()
        finally:
            self._runner.close()


class Tickets(NamedTuple):
    """Of a run in two parts."""

    first: GpuTicket
    rest: GpuTicket

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks the host until both are over; raises the error of either."""
        begin = time.monotonic()
        try:
            self.first.wait(timeout_s)
        finally:
            self.rest.wait(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begin)))

    def is_over(self) -> bool:
        """True once all of it is done, well or not."""
        return self.first.is_over() and self.rest.is_over()


def run_of(
    device: Device, buffers: Buffers, tiles: RowTiles, head: bool, *, pace: Pace | str, timeout_s: float | None,
    lanes: int, words_on_device: bool,
) -> SlicedRun | Headed:  # fmt: skip
    """All slices behind flags, or all but the first."""
    exchange = buffers.exchange
    if head:
        return Headed(
            device, tiles, buffers, pace=pace, timeout_s=timeout_s, lanes=lanes, words_on_device=words_on_device
        )
    plan = exchange.sliced(tiles, pace=pace, lanes=lanes)
    return SlicedRun(
        device, plan, buffers.of(plan), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
        words_on_device=words_on_device,
    )  # fmt: skip
