"""Plans whose ranks all belong to one process: rank 0 a GPU, the others regions of pinned host memory, for instance.

With a single GPU this is where copy engines work: its peers are in host memory. The plan is that of any other machine;
here one process drives every rank's queues, so signals become the order of streams, or events between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from dovetail import env
from dovetail.errors import NotSupported, PlanError
from dovetail.hw.gpu.bind import ENTRIES_PER_CALL, Place
from dovetail.hw.gpu.cores import copier
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import Kind
from dovetail.hw.gpu.execution import Execution, Launch, Where
from dovetail.hw.gpu.graph import GraphRun
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.program import MOST_GATED_STREAMS, LaneOf, compile_plan
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.hw.gpu.words import DeviceWords, WordTable
from dovetail.plan import passes
from dovetail.plan import step as st
from dovetail.plan.check import check
from dovetail.plan.plan import ABSENT, AT_RUN, Plan, Queue, Role, SignalKind

Buffers = Mapping[tuple[int, str], Any]


def by_direction(host_ranks: frozenset[int], most_streams: int) -> LaneOf:
    """A stream per direction: what goes to the GPU beside what comes from it, each link direction at full speed.

    With more streams, the queues of a direction are spread over several: those of engines 0 and 1 on the first of
    each direction, 2 and 3 on the second, and so on.
    """

    def lane(queue: Queue) -> int:
        moves = queue.steps[st.among(queue.steps["op"], st.MOVES)]
        if most_streams == 1 or not len(moves):
            return 0
        from_host = np.isin(moves["src_rank"], list(host_ranks))
        direction = int((moves["length"] * np.where(from_host, 1, -1)).sum() > 0)
        return direction + 2 * (queue.engine // 2 % (most_streams // 2))

    return lane


class LocalRunner:
    """A plan on one GPU and host memory. Each rank's buffers are given by (rank, name)."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        *,
        host_ranks: frozenset[int] = frozenset(),
        most_streams: int = 2,
        timeout_s: float | None = None,
        entries_per_call: int = ENTRIES_PER_CALL,
        cores: int = 0,
        streams: Sequence[int] | None = None,
        words_on_device: bool = False,
    ) -> None:
        """A plan, to be bound to buffers.

        Args:
            cores: copies are done by a kernel of so many programs; 0: by engines.
            words_on_device: imported signals are words in the GPU's memory, for a kernel that raises them.
            streams: the caller's, to run in; by default the device's own.
        """
        if not 1 <= most_streams <= MOST_GATED_STREAMS:
            raise NotSupported(f"a process has 1 to {MOST_GATED_STREAMS} streams for plans, not {most_streams}")
        if plan.params:
            raise NotSupported(f"plan {plan.name} has parameters that ranks post: it needs ranks of their own")
        plan = plan if "entry" in plan.passes else passes.entry(plan)  # costs nothing here, and it can be proved
        if env.check():
            check(plan, runs=2)
        device.enter()
        self.device, self.plan, self._by_cores = device, plan, bool(cores)
        lanes = by_direction(host_ranks, most_streams)
        program = compile_plan(plan, range(plan.world), device.caps, most_streams=most_streams, lane_of=lanes)
        self.program = program
        self._words = (DeviceWords if words_on_device else WordTable).of_one_process(device, program.plan)
        self._heaps = [Heap(device, "device"), Heap(device, "host")]
        self._scratch = self._make_scratch(program.plan, host_ranks)
        self._names = {b.name: n for n, b in enumerate(program.plan.buffers)}
        limit_s = env.timeout_s() if timeout_s is None else timeout_s
        self._execution = Execution(
            device, program, self._words, timeout_s=limit_s, entries_per_call=entries_per_call, streams=streams,
            copier=copier(device.driver, cores) if cores else None,
        )  # fmt: skip

    def _make_scratch(self, plan: Plan, host_ranks: frozenset[int]) -> dict[tuple[int, int], Place]:
        made = {}
        for n, b in enumerate(plan.buffers):
            if b.role is not Role.SCRATCH:
                continue
            for r, size in enumerate(b.sizes):
                if size == AT_RUN:
                    raise NotSupported(f"plan {plan.name}: scratch {b.name} has a size that is known at a run only")
                if size > 0:
                    heap = self._heaps[r in host_ranks]
                    made[r, n] = Place(heap.alloc(size), size, heap.kind)
        return made

    def submit(self, buffers: Buffers, *, after: int | None = None, gated: bool = False) -> GpuTicket:
        """Starts a run. `buffers`: tensors (torch, or NumPy over pinned memory) by rank and name.

        `after`: see `Execution.start`. Without it the run begins at once and the host waits for the ticket.
        """
        return self.bind(buffers).submit(after=after, gated=gated)

    def bind(self, buffers: Buffers) -> LocalRun:
        """The run over these buffers, to be submitted again and again at little cost; it keeps them alive."""
        return LocalRun(self._execution, dict(buffers), functools.partial(self._places, dict(buffers)))

    def imported(self) -> list[int]:
        """Addresses of the imported signals' words, in their order, for a kernel that raises them."""
        signals = self.program.plan.signals
        return [self._words.address(n) for n, s in enumerate(signals) if s.kind is SignalKind.IMPORTED]

    def graph(self, buffers: Buffers) -> GraphRun:
        """The run over these buffers as one graph, for repeated launches. Close it before the runner."""
        held = dict(buffers)
        execution = self._execution
        return GraphRun(
            self.device, self.program, execution.words, self._places(held), timeout_s=execution.timeout_s, hold=held
        )

    def _places(self, buffers: Buffers) -> tuple[dict[tuple[int, int], Place], list[int], list[int]]:
        plan = self.program.plan
        wanted = {
            (r, b.name)
            for b in plan.buffers
            for r in range(plan.world)
            if b.role not in (Role.SCRATCH, Role.VIEW) and b.sizes[r] not in (ABSENT, 0)
        }
        if wrong := {k for k in buffers if k not in wanted and nbytes_of(buffers[k])} | (wanted - set(buffers)):
            raise ValueError(f"plan {plan.name} takes {sorted(wanted)}; wrong or missing: {sorted(wrong)}")
        places, boundaries = dict(self._scratch), set()
        for (r, name), t in buffers.items():
            n, size = self._names[name], nbytes_of(t)
            least = plan.buffers[n].sizes[r]
            if size < least:
                raise ValueError(f"{name} of rank {r} has {size} bytes, plan {plan.name} needs {least}")
            if size:
                kind, cuts = self.device.boundaries(address_of(t), size)
                places[r, n] = Place(address_of(t), size, kind)
                boundaries.update(cuts)
        for n, b in enumerate(plan.buffers):
            if b.role is Role.VIEW:
                for r in range(plan.world):
                    if b.staged[r]:
                        raise PlanError(f"plan {plan.name} stages {b.name}: ranks of one process share their memory")
                    if (r, b.of) in places:
                        places[r, n] = places[r, b.of]
        self._no_host_to_host(places)
        return places, [], sorted(boundaries)

    def _no_host_to_host(self, places: Mapping[tuple[int, int], Place]) -> None:
        host = np.zeros((self.plan.world, len(self.program.plan.buffers)), bool)
        for (r, n), p in places.items():
            host[r, n] = p.kind is not Kind.DEVICE
        moves = self.program.steps[st.among(self.program.steps["op"], st.MOVES)]
        both = host[moves["src_rank"], moves["src_buffer"]] & host[moves["dst_rank"], moves["dst_buffer"]]
        if not self._by_cores and (both & (moves["num_sources"] == 0) & (moves["length"] > 0)).any():
            raise NotSupported(
                f"plan {self.plan.name} moves bytes from host memory to host memory, which no engine of a GPU does: "
                "keep what crosses the link (dovetail.plan.passes.crossing), or run it on the CPU"
            )

    def close(self) -> None:
        """Waits for the last run and gives everything back. Safe to call twice."""
        self._execution.close()
        if isinstance(self._words, DeviceWords):
            self._words.close()
        for heap in self._heaps:
            heap.close()

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LocalRun:
    """A plan over given buffers."""

    __slots__ = ("_buffers", "_execution", "_key", "_places", "_prepared")

    def __init__(self, execution: Execution, buffers: Buffers, places: Callable[[], Where]) -> None:
        self._execution, self._buffers, self._places = execution, buffers, places
        self._key = tuple((*name, address_of(t), nbytes_of(t)) for name, t in buffers.items())
        self._prepared = execution.prepare(self._key, places)

    def submit(
        self, *, after: int | None = None, joins: bool = True, gated: bool = False, launch: Launch | None = None
    ) -> GpuTicket:
        """Starts a run; see `Execution.start`."""
        execution, prepared = self._execution, self._prepared
        if gated or prepared.generation != execution.device.generation:
            prepared = execution.prepare(self._key, self._places, gated=gated)
            if not gated:
                self._prepared = prepared
        return execution.start(prepared, after=after, joins=joins, gated=gated, hold=self._buffers, launch=launch)


def address_of(t: Any) -> int:
    """Of a torch tensor or a NumPy array."""
    return int(t.data_ptr()) if hasattr(t, "data_ptr") else int(t.ctypes.data)


def nbytes_of(t: Any) -> int:
    """Of a torch tensor or a NumPy array."""
    return int(t.nbytes)
