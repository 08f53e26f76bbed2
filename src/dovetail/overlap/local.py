"""A plan between a GPU and host memory as a communication: by copy engines, or by a kernel of so many programs.

Owns the two forms of one plan. It is proved once; the bytes and their order are the same, whoever moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.local import LocalRun, LocalRunner
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.overlap.tasks import Mover, Traffic
from dovetail.plan import step as st
from dovetail.plan.plan import Plan
from dovetail.plan.step import Op

#: Programs of the kernel, if nothing else is asked for: with fewer it does not fill a PCIe 5.0 link both ways.
CORES = 16
_MOST_RUNS = 32  # streams and numbers of cores that are bound at a time


class LocalCommunication:
    """One process, one GPU, peers in host memory. An owner: `close()`, or `with`."""

    movers = frozenset(Mover)
    group = None

    def __init__(
        self, device: Device, plan: Plan, buffers: Mapping[tuple[int, str], Any], *, host_ranks: frozenset[int],
        kind: str, cores: int = CORES,
    ) -> None:  # fmt: skip
        """`buffers` as `LocalRunner.submit` takes them; `cores`: programs of the kernel if nothing else is said."""
        self.device, self._plan, self._buffers, self._host = device, plan, dict(buffers), host_ranks
        self._cores = cores
        self._runners: list[LocalRunner] = []
        self._runs: dict[tuple[int, int], LocalRun] = {}
        self._engines = self._bound(most_streams=2)
        self.traffic = traffic_of(plan, host_ranks, kind)

    def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> GpuTicket:
        """Begins behind what is in the raw stream, and the stream goes on behind it."""
        if mover is Mover.ENGINES:
            return self._engines.submit(after=stream)
        key = (stream, cores or self._cores)
        run = self._runs.get(key)
        if run is None:
            while len(self._runs) >= _MOST_RUNS:  # of streams that are gone, most likely
                self._runs.pop(next(iter(self._runs)))
                self._runners.pop(1).close()
            run = self._runs[key] = self._bound(most_streams=1, cores=key[1], streams=[stream])
        return run.submit(after=stream)

    def start_apart(self, stream: int) -> GpuTicket:
        """By engines, behind what is in the raw stream, which does not wait for it."""
        return self._engines.submit(after=stream, joins=False)

    def _bound(self, **how: Any) -> LocalRun:
        runner = LocalRunner(self.device, self._plan, host_ranks=self._host, **how)
        self._runners.append(runner)
        return runner.bind(self._buffers)

    def close(self) -> None:
        """Waits for what is under way. Safe to call twice."""
        for runner in self._runners:
            runner.close()
        self._runners, self._runs = [], {}

    def __enter__(self) -> LocalCommunication:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def traffic_of(plan: Plan, host_ranks: frozenset[int], kind: str) -> Traffic:
    """What a plan moves over the link."""
    steps = np.concatenate([queue.steps for queue in plan.queues])
    moves = steps[st.among(steps["op"], st.MOVES) & (steps["op"] != Op.REDUCE)]
    size = moves["length"] * np.maximum(moves["rows"], 1)
    hosts = list(host_ranks)
    into = np.isin(moves["src_rank"], hosts) & ~np.isin(moves["dst_rank"], hosts)
    out = ~np.isin(moves["src_rank"], hosts) & np.isin(moves["dst_rank"], hosts)
    return Traffic(
        kind=kind, size_bytes=int(max(size[into].sum(), size[out].sum())), num_pieces=int((into | out).sum()),
        reduces=bool((steps["op"] == Op.REDUCE).any()),
    )  # fmt: skip
