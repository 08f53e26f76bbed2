"""What a move uses on a machine: its own cap, and the links, memories and cores that it shares with others.

Owns the numbering of resources. One that can't become full, because all engines that ever cross it together ask for
less, is left out beforehand: on a fully connected node every link has one engine, and nothing has to be shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dovetail.plan.step import Op
from dovetail.sim.flows import Use
from dovetail.sim.machine import Machine, Wiring
from dovetail.sim.program import Kind, Move, Ring

_MARGIN = 1 + 1e-9


class Resources:
    """The links, memories and cores of a machine, for the rings of one program."""

    def __init__(self, machine: Machine, world: int, rings: Sequence[Ring], num_rows: int) -> None:
        self._machine, self._world = machine, world
        self._shared = machine.link.wiring is Wiring.SHARED_MEMORY
        self._latency_ns = round(machine.link.latency_ns)
        self._start_ns, self._reduce_ns = round(machine.engine.start_ns), round(machine.compute.start_ns)
        links = [machine.link.bandwidth_gbps] * self._num_links()
        memories = [machine.memory.bandwidth_gbps] * (1 if self._shared else world)
        cores = [machine.compute.reduce_gbps] * world
        self._memory, self._cores = len(links), len(links) + len(memories)
        self.capacity = [*links, *memories, *cores]  #: bytes per ns
        self._copy_gbps, self._paired_gbps = machine.engine.copy_gbps, machine.engine.paired_gbps
        self._cache_bytes = machine.memory.cache_bytes
        self._of: list[tuple[float, tuple[Use, ...]]] = [(1.0, ())] * num_rows  # by number of move
        self._find(rings)

    def of(self, move: Move) -> tuple[float, tuple[Use, ...]]:
        """The most bytes per ns of its payload that a move can reach, and what can hold it up further."""
        return self._of[move.number]

    def latency_ns(self, move: Move) -> int:
        """From the last byte's start to its landing."""
        start = self._reduce_ns if move.op is Op.REDUCE else self._start_ns
        return start + (self._latency_ns if move.pairs else 0)

    def limit_ns(self, traffic: Mapping[tuple[int, int], int]) -> int:
        """What the links alone need for these bytes."""
        load: dict[int, int] = {}
        for (a, b), size in traffic.items():
            for link in self._links(a, b):
                load[link] = load.get(link, 0) + size
        return max((math.ceil(size / self.capacity[link]) for link, size in load.items()), default=0)

    def _num_links(self) -> int:
        wiring = self._machine.link.wiring
        return {Wiring.FULLY_CONNECTED: self._world**2, Wiring.SWITCH: 2 * self._world}.get(wiring, 0)

    def _links(self, a: int, b: int) -> tuple[int, ...]:
        if self._machine.link.wiring is Wiring.FULLY_CONNECTED:
            return (a * self._world + b,)
        return (a, self._world + b) if self._machine.link.wiring is Wiring.SWITCH else ()

    def _all(self, move: Move) -> tuple[float, list[Use]]:
        """Its cap, and everything that it uses."""
        used = [link for a, b in move.pairs for link in self._links(a, b)]
        if move.size_bytes > self._cache_bytes:
            used += [self._memory + (0 if self._shared else rank) for rank in (*move.reads, *move.writes)]
        weight: dict[int, float] = {}
        for r in used:
            weight[r] = weight.get(r, 0.0) + 1.0
        cap = self._copy_gbps
        if move.op is Op.REDUCE:
            cap = math.inf
            weight[self._cores + move.writes[0]] = len(move.reads) + 1.0
        elif len(move.writes) > 1:
            cap = self._paired_gbps / len(move.writes)
        for r, w in weight.items():
            if self.capacity[r] < cap * w:
                cap = self.capacity[r] / w
        return cap, list(weight.items())

    def _find(self, rings: Sequence[Ring]) -> None:
        """What each move uses, without what its users can't fill together; an engine has one move at a time."""
        most: dict[int, dict[tuple[int, ...], float]] = {}
        engines = self._machine.engine.count
        every: list[tuple[int, float, list[Use]]] = []
        for n, ring in enumerate(rings):
            engine = (ring.rank, ring.engine % engines)
            for kind, move in ring.actions:
                if kind is not Kind.MOVE:
                    continue
                who = (n,) if move.op is Op.REDUCE else engine
                cap, uses = self._all(move)
                every.append((move.number, cap, uses))
                for r, w in uses:
                    asked = most.setdefault(r, {})
                    asked[who] = max(asked.get(who, 0.0), cap * w)
        binding = {r for r, asked in most.items() if sum(asked.values()) > self.capacity[r] * _MARGIN}
        for number, cap, uses in every:
            self._of[number] = (cap, tuple(use for use in uses if use[0] in binding))
