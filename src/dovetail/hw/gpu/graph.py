"""A plan over fixed buffers as one graph: a repeated run is then a single launch.

For plans whose ranks all belong to this process. Captured are single and strided copies, since the driver drops batches
from a capture without a word; signals between queues become edges. A plan that waits for somebody else is refused: its
words would keep the values of the run that was captured.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.gpu.bind import Binder, Script
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.execution import Where
from dovetail.hw.gpu.program import Program
from dovetail.hw.gpu.ticket import GpuTicket, RunInfo
from dovetail.hw.gpu.words import WordTable
from dovetail.plan.step import DType, Op, ReduceOp


class GraphRun:
    """A captured run. `submit()` launches it; runs follow each other on one stream."""

    def __init__(
        self, device: Device, program: Program, words: WordTable, where: Where, *, timeout_s: float, hold: Any
    ) -> None:
        if program.waits_outside:
            raise NotSupported(
                f"plan {program.plan.name} waits for a gate or for another process; a graph would keep the values of "
                "the run that was captured: submit the plan instead"
            )
        if (program.steps["op"] == Op.STAMP).any():
            raise NotSupported(f"plan {program.plan.name} takes stamps, which a graph does not keep")
        reduces = program.steps[program.steps["op"] == Op.REDUCE]
        for row in reduces:  # loaded before the capture
            device.reducer.warm(DType(int(row["dtype"])), ReduceOp(int(row["reduce_op"])), int(row["num_sources"]))
        self._device, self._hold, self._timeout_s = device, hold, timeout_s
        driver = device.driver
        device.enter()
        streams = [driver.stream_create() for _ in range(program.num_streams)]
        events = [driver.event_create() for _ in range(program.num_events + program.num_streams + 1)]
        fork, ends = events[program.num_events], events[program.num_events + 1 :]
        binder = Binder(
            program, driver, device.reducer if len(reduces) else None, streams=streams,
            events=events[: program.num_events], stamps={}, entries_per_call=0,
        )  # fmt: skip
        places, params, boundaries = where
        script = binder.bind(places, params, words.address, boundaries)
        self._info = RunInfo(plan=program.plan, words=words, waits=(), stamps=(), bytes_by_path=script.bytes_by_path)
        try:
            self._graph = self._captured(script, streams, fork, ends)
        finally:
            for stream in streams:
                driver.stream_destroy(stream)
            for event in events:
                driver.event_destroy(event)
        self._last: GpuTicket | None = None

    def _captured(self, script: Script, streams: list[int], fork: int, ends: list[int]) -> int:
        driver = self._device.driver
        driver.graph_begin(streams[0])
        try:
            driver.event_record(fork, streams[0])
            for stream in streams[1:]:
                driver.stream_wait_event(stream, fork)
            script.issue(0, driver)
            for stream, event in zip(streams[1:], ends, strict=False):
                driver.event_record(event, stream)
                driver.stream_wait_event(streams[0], event)
        except BaseException:
            with contextlib.suppress(DovetailError):  # what went wrong before says more
                driver.graph_destroy(driver.graph_end(streams[0]))
            raise
        return driver.graph_end(streams[0])

    def submit(self, *, after: int | None = None) -> GpuTicket:
        """Launches it; `after` as for `Execution.start`."""
        device, driver = self._device, self._device.driver
        device.enter()
        if after is not None and driver.stream_capturing(after):
            raise NotSupported("the stream is capturing a graph: launch this one outside of the capture")
        stream = device.streams(1)[0]
        held = (self, self._hold)  # until the run is over, also if nobody else has them any more
        ticket = GpuTicket(
            device, self._info, 0, device.take_event(), stream, time.monotonic(), self._timeout_s, None, held, None
        )
        if after is not None:
            begin = device.take_event()
            driver.event_record(begin, after)
            driver.stream_wait_event(stream, begin)
            device.give_event(begin)
        driver.graph_launch(self._graph, stream)
        driver.event_record(ticket.event, stream)
        if after is not None:
            driver.stream_wait_event(after, ticket.event)
        self._last = ticket
        device.watchdog.add(ticket)
        return ticket

    def close(self) -> None:
        """Waits for the last run and destroys the graph. Safe to call twice."""
        if self._last is not None:
            with contextlib.suppress(DovetailError):  # whoever waits for the ticket is told
                self._last.wait()
        if self._graph:
            self._device.driver.graph_destroy(self._graph)
        self._graph = 0
