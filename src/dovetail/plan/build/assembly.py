"""Collects buffers, signals, queues and goals while a builder works; `plan()` freezes them.

Owns only the bookkeeping of indices. A builder reads as the movement it describes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.plan import Buffer, Param, Partition, Plan, Queue, Role, Signal, SignalKind, Space
from dovetail.plan.step import NONE, Rows


class Assembly:
    """A plan in the making."""

    def __init__(self, name: str, world: int) -> None:
        if world < 1:
            raise ValueError(f"{name}: world must be at least 1, not {world}")
        self.name = name
        self.world = world
        self._buffers: list[Buffer] = []
        self._signals: list[Signal] = []
        self._queues: list[Queue] = []
        self._goal: list[Rows] = []
        self._sources: list[Rows] = []
        self._num_sources = 0
        self._params: list[Param] = []
        self._partitions: list[Partition] = []
        self._equal: list[tuple[int, int]] = []

    def buffer(
        self,
        name: str,
        role: Role,
        sizes: int | Sequence[int],
        spaces: Space | Sequence[Space] = Space.HEAP,
        *,
        of: int = NONE,
        staged: Sequence[bool] = (),
    ) -> int:
        """Declares a buffer; a single size or space is that of every rank. Returns its index."""
        every_size = (sizes,) * self.world if isinstance(sizes, int) else tuple(sizes)
        every_space = (spaces,) * self.world if isinstance(spaces, Space) else tuple(spaces)
        self._buffers.append(
            Buffer(name=name, role=role, sizes=every_size, spaces=every_space, of=of, staged=tuple(staged))
        )
        return len(self._buffers) - 1

    def signal(self, name: str, rank: int, kind: SignalKind = SignalKind.INTERNAL) -> int:
        """Declares a signal that lives on `rank`. Returns its index."""
        self._signals.append(Signal(name=name, rank=rank, kind=kind))
        return len(self._signals) - 1

    def pair_signals(self, name: str) -> dict[tuple[int, int], int]:
        """One signal for each ordered pair of ranks (writer, reader), in the reader's memory."""
        ranks = range(self.world)
        return {(i, j): self.signal(f"{name} {i}->{j}", j) for i in ranks for j in ranks if i != j}

    def param(self, name: str, rank: int) -> int:
        """Declares a parameter that `rank` posts. Returns its index."""
        self._params.append(Param(name=name, rank=rank))
        return len(self._params) - 1

    def partition(self, rank: int, buffer: int, name: str) -> tuple[list[int], list[int]]:
        """Cuts a buffer into one run-time piece per rank. Returns the parameters of offsets and lengths."""
        offsets = [self.param(f"{name}_offset {rank}:{k}", rank) for k in range(self.world)]
        lengths = [self.param(f"{name}_length {rank}:{k}", rank) for k in range(self.world)]
        self._partitions.append(Partition(rank=rank, buffer=buffer, offsets=tuple(offsets), lengths=tuple(lengths)))
        return offsets, lengths

    def equal(self, a: int, b: int) -> None:
        """Demands that two parameters be equal."""
        self._equal.append((a, b))

    def queue(self, rank: int, engine: int, *blocks: Rows, name: str = "") -> None:
        """Adds a queue of `rank`; empty ones are dropped."""
        steps = st.sequence(*blocks)
        if len(steps):
            self._queues.append(Queue(rank=rank, engine=engine, steps=steps, name=name))

    def sources(self, rank: Any, buffer: Any, offset: Any, alt: Any = None) -> int:
        """Adds rows to the source table. Returns the index of the first."""
        rows = st.sources(rank, buffer, offset, alt=alt)
        first = self._num_sources
        self._sources.append(rows)
        self._num_sources += len(rows)
        return first

    def goal(self, rows: Rows) -> None:
        """States what must hold at the end."""
        self._goal.append(rows)

    def peers(self, rank: int) -> list[int]:
        """The other ranks, the next one first: rank + 1, rank + 2, ... around the ring."""
        return [(rank + d) % self.world for d in range(1, self.world)]

    def plan(self) -> Plan:
        """The frozen plan."""
        return Plan(
            name=self.name,
            world=self.world,
            buffers=tuple(self._buffers),
            signals=tuple(self._signals),
            queues=tuple(self._queues),
            goal=st.sequence(*self._goal),
            sources=np.concatenate(self._sources) if self._sources else np.zeros(0, st.SOURCE),
            params=tuple(self._params),
            partitions=tuple(self._partitions),
            equal=tuple(self._equal),
        )
