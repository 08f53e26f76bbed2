"""Runs a compiled program again and again: streams, events and the calls for addresses seen before.

A run is ordered after a stream that the caller names and before whatever the caller puts into it later; its own copies
go to streams of ours, since the legacy default stream takes no batches and a capturing one would lose them. Runs of
one execution follow each other on the GPU. What can be done once is done when addresses are bound: a run of two batches
is then a handful of driver calls and little Python.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.errors import DovetailError, HardwareError, NotSupported
from dovetail.hw.gpu.bind import ENTRIES_PER_CALL, Binder, Copying, Place, Script
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.program import Program, Work
from dovetail.hw.gpu.ticket import GpuTicket, OutsideWait, Peers, RunInfo
from dovetail.hw.gpu.words import VALUE_BITS, WordTable
from dovetail.plan.plan import SignalKind
from dovetail.plan.step import DType, Op, ReduceOp

#: Bound address sets that an execution remembers.
_MOST_BOUND = 64

Where = tuple[Mapping[tuple[int, int], Place], Sequence[int], Sequence[int]]
#: Launches a computation, given what the signals of the run count from.
Launch = Callable[[int], None]


class Prepared:
    """A program bound to addresses and streams: its calls, and what its tickets have in common."""

    __slots__ = ("generation", "info", "script", "streams")

    def __init__(self, streams: list[int], generation: int, script: Script, info: RunInfo) -> None:
        self.streams, self.generation, self.script, self.info = streams, generation, script, info


class Execution:
    """A program with what it needs to run on `device`."""

    def __init__(
        self,
        device: Device,
        program: Program,
        words: WordTable,
        *,
        timeout_s: float,
        entries_per_call: int = ENTRIES_PER_CALL,
        copier: Copying | None = None,
        streams: Sequence[int] | None = None,
    ) -> None:
        """`copier` copies instead of engines. `streams`: the caller's, to run in; by default the device's own."""
        self.device, self.program, self.words, self.timeout_s = device, program, words, timeout_s
        if program.waits_outside and not device.caps.stream_gates:
            raise NotSupported(f"{device.name} has no stream memory operations: plans that wait for others can't run")
        plan, steps, driver = program.plan, program.steps, device.driver
        self._entries, self._copier, self._streams = entries_per_call, copier, streams
        self._has_gate = any(s.kind is SignalKind.GATE for s in plan.signals)
        self._events = [driver.event_create() for _ in range(program.num_events)]
        self._ends = [driver.event_create() for _ in range(program.num_streams)]
        self._start = driver.event_create()
        numbers = sorted(set(steps["value"][steps["op"] == Op.STAMP].tolist()))
        self._stamps = {n: driver.event_create(timing=True) for n in numbers}
        self._waits = [
            OutsideWait(int(steps["signal"][n]), int(steps["value"][n]), program.places[n])
            for b in program.blocks
            if b.work is Work.WORDS
            for n in b.steps
            if steps["op"][n] == Op.WAIT
        ]
        reduces = steps[steps["op"] == Op.REDUCE]
        kinds = {(int(r["dtype"]), int(r["reduce_op"]), int(r["num_sources"])) for r in reduces}
        for kind, how, number in sorted(kinds):
            device.reducer.warm(DType(kind), ReduceOp(how), number)
        self._reduces = bool(kinds)
        self._bound: dict[Any, Prepared] = {}
        self._last: GpuTicket | None = None
        self._flying: deque[GpuTicket] = deque()
        self.runs = 0
        device.streams(1)  # made and warmed before anything is armed

    def prepare(
        self, key: Any, places: Callable[[], Where], *, gated: bool = False, armed: list[int] | None = None
    ) -> Prepared:
        """Binds addresses, once per `key`.

        Args:
            key: names the addresses.
            places: (places, params, boundaries), asked for when the key is new.
            gated: on streams of its own, behind a gate; each run takes new ones.
            armed: such streams, if the caller has them already (it gives them back if this fails).
        """
        device = self.device
        if gated and not self._has_gate:
            raise NotSupported(f"plan {self.program.plan.name} has no gate: apply dovetail.plan.passes.prelaunch")
        found = self._bound.get(key)
        if found is not None and found.generation == device.generation and not gated:
            return found
        number = self.program.num_streams
        streams = armed or self._take(number, gated)
        try:
            made = self._prepare(streams, places)
        except BaseException:
            if gated and not armed:
                device.disarm(streams)
            raise
        if not gated:
            while len(self._bound) >= _MOST_BOUND:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = made
        return made

    def _take(self, number: int, gated: bool) -> list[int]:
        if self._streams is None:
            if gated:
                return self.device.arm(number, self.timeout_s)
            lanes = self.program.lanes  # what goes the other way has another lane, in other runs too
            streams = self.device.streams(lanes[-1] + 1)
            return [streams[lane] for lane in lanes]
        if gated or len(self._streams) < number:
            given = f"{len(self._streams)} streams of the caller"
            raise NotSupported(f"plan {self.program.plan.name}: {given} serve no gate and at most as many streams")
        return list(self._streams[:number])

    def _prepare(self, streams: list[int], places: Callable[[], Where]) -> Prepared:
        device = self.device
        binder = Binder(
            self.program, device.driver, device.reducer if self._reduces else None, streams=streams,
            events=self._events, stamps=self._stamps, entries_per_call=self._entries,
            most_batched=device.caps.most_batched if device.caps.batched_copy else 0,
            engines_of=device.index if device.caps.engine_choice else None, copier=self._copier,
        )  # fmt: skip
        where, params, boundaries = places()
        script = binder.bind(where, params, self.words.address, boundaries)
        info = RunInfo(
            plan=self.program.plan, words=self.words, waits=self._waits, stamps=list(self._stamps.values()),
            bytes_by_path=script.bytes_by_path,
        )  # fmt: skip
        return Prepared(streams, device.generation, script, info)

    def start(
        self,
        prepared: Prepared,
        *,
        run: int | None = None,
        after: int | None = None,
        joins: bool = True,
        after_event: int | None = None,
        previous: GpuTicket | None = None,
        gated: bool = False,
        hold: Any = None,
        peers: Peers | None = None,
        launch: Launch | None = None,
    ) -> GpuTicket:
        """Issues a run and returns before it is done.

        Args:
            run: number of the run, the same on all ranks; counted here if not given.
            after: a stream: the run begins after what is in it now, and what is put into it later comes after the run.
            joins: False: nothing that is put into `after` later comes after the run; whoever must waits for its event.
            after_event: an event instead: the run begins after it, and no stream waits for the run.
            previous: the run that this one follows on the GPU; by default the last of this execution.
            gated: leave the gates closed until `fire`; `prepared` was made for that.
            hold: what must live until the run is over.
            peers: the other ranks, if the run has any.
            launch: puts what raises the run's imported signals into `after`. It is called before any copy is issued:
                streams may share a queue of the hardware, and a kernel behind a wait that only this kernel opens would
                never run. If it raises, nothing of the run was issued, and the number of the run is burnt.
        """
        device, driver, streams = self.device, self.device.driver, prepared.streams
        device.enter()
        if after is not None and driver.stream_capturing(after):
            if gated:
                device.disarm(streams)
            raise NotSupported(
                "the stream is capturing a graph: copies would be lost. Run the plan outside of the capture, or make a "
                "graph of the plan (dovetail.hw.gpu.graph)"
            )
        self.runs = number = self.runs + 1 if run is None else run
        previous = previous or self._last
        follows = after is not None or after_event is not None or (previous is not None and not previous.is_over())
        if launch is not None:  # nothing of the run is there yet: if this fails, there is nothing to open
            self._begin(streams, after, after_event, previous)
            if after is not None and previous is not None and not previous.is_over():
                driver.stream_wait_event(after, previous.event)  # its copies still read what is computed anew
            launch(number << VALUE_BITS)
        ticket = GpuTicket(
            device, prepared.info, number << VALUE_BITS, device.take_event(), streams[0], time.monotonic(),
            self.timeout_s, streams if gated else None, hold, peers,
        )  # fmt: skip
        if gated:
            device.armed_for(streams, ticket)
        ticket.issuing = True
        try:
            if self.program.waits_outside:  # from now on: a full stream (1022 launches) blocks us until it goes on
                device.watchdog.add(ticket)
            if follows and launch is None:
                self._begin(streams, after, after_event, previous)
            if self._has_gate and not gated:
                ticket.fire()
            prepared.script.issue(number << VALUE_BITS, driver)
            self._end(streams, ticket)
            if after is not None and joins:
                driver.stream_wait_event(after, ticket.event)
        except BaseException as error:
            self._abandon(streams, ticket, error)
            raise
        self._last = ticket
        if not self.program.waits_outside:
            self._keep(ticket)
        return ticket

    def _end(self, streams: Sequence[int], ticket: GpuTicket) -> None:
        """Records the event of the ticket behind all streams."""
        driver, first = self.device.driver, streams[0]
        for stream, event in zip(streams[1:], self._ends, strict=False):
            driver.event_record(event, stream)
            driver.stream_wait_event(first, event)
        driver.event_record(ticket.event, first)
        ticket.issuing = False

    def _abandon(self, streams: Sequence[int], ticket: GpuTicket, error: BaseException) -> None:
        """Part of a run is in the streams: its waits are opened, and its memory is held until they have drained."""
        known = error if isinstance(error, DovetailError) else HardwareError(f"a run was not issued: {error!r}")
        ticket.abandon(known)
        with contextlib.suppress(DovetailError):  # a driver that fails for good: the watchdog gives the run up
            self._end(streams, ticket)
        ticket.issuing = False
        self._last = ticket
        if not self.program.waits_outside:
            self.device.watchdog.add(ticket)

    def _keep(self, ticket: GpuTicket) -> None:
        """Runs in flight hold their memory although nobody may hold their tickets; they end in order."""
        while self._flying and self._flying[0].is_over():
            self._flying.popleft()
        self._flying.append(ticket)

    def _begin(
        self, streams: Sequence[int], after: int | None, after_event: int | None, previous: GpuTicket | None
    ) -> None:
        driver = self.device.driver
        waits = [] if after_event is None else [after_event]
        if after is not None:
            driver.event_record(self._start, after)
            waits.append(self._start)
        if previous is not None and not previous.is_over():
            waits.append(previous.event)
        for event in waits:
            for stream in streams:
                driver.stream_wait_event(stream, event)

    def close(self) -> None:
        """Waits for the last run, bounded by its own deadline, and gives the events back. One behind a gate ends."""
        if self._last is not None:
            self._last.give_up("was closed before it was fired")
            with contextlib.suppress(DovetailError):  # whoever waits for the ticket is told
                self._last.wait()
        self._flying.clear()
        driver = self.device.driver
        for prepared in self._bound.values():
            for queues in prepared.script.owned:
                queues.close()
        events = (*self._events, *self._ends, *self._stamps.values(), *([self._start] if self._start else []))
        for event in events:
            driver.event_destroy(event)
        self._events, self._ends, self._stamps, self._start, self._bound = [], [], {}, 0, {}
