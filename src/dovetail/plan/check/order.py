"""Happens-before, with vector clocks, and the proof that no run deadlocks.

Edges within a run: the order of each chain; the start of rank r before the first row of each of r's queues, their last
rows before the end of rank r; and what releases a wait before that wait. Edges between runs: the end of rank r in run k
before its start in run k+1. All edges stay in a run or lead to the next, and every run has the same ones. So:

- runs finish one after the other if one run alone has no cycle: only one is simulated;
- `a` of run k happens before `b` of run k iff it does in run 1 (`before`);
- `a` of run k happens before `b` of run k+1 iff some rank r has a -> end of r (in k) and start of r -> b (in k+1)
  (`before_next`): a path can change runs only from an end to a start;
- a linear extension of one run, repeated, is one of all runs.

Two runs are thus enough to prove any number. With several runs in flight each has its lane (its own signals, staging
and user buffers) and no edge joins two lanes, so a lane is again the case of one run after the other.

A clock has a column per chain (how many of its rows are known to be done) and one per rank (whether its start is). Only
waits change a clock, so it is kept per *epoch*: the rows of a chain from one wait to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dovetail.plan.check.chains import Bools, Chains, Ints
from dovetail.plan.check.signals import Releases
from dovetail.plan.check.text import Text


@dataclass(slots=True, eq=False)
class Order:
    """Happens-before of one run, and from one run to the next."""

    chains: Chains
    position: Ints  #: of each node in a linear extension
    epoch: Ints  #: of each node
    clock: NDArray[np.int32]  #: [epoch, column], then a row per rank: what its end knows
    num_epochs: int
    _next: tuple[Ints, NDArray[np.int32]] | None = field(default=None, repr=False)

    def before(self, a: Ints, b: Ints) -> Bools:
        """Does node a happen before node b of the same run?"""
        ca = self.chains.chain[a]
        known: Bools = self.clock[self.epoch[b], ca] > self.chains.index[a]
        known |= (ca == self.chains.chain[b]) & (a < b)
        return known

    def before_next(self, a: Ints, b: Ints) -> Bools:
        """Does node a of a run happen before node b of the next?"""
        if self._next is None:
            self._next = self._inherited()
        kind, clock = self._next
        known: Bools = clock[kind[self.epoch[b]], self.chains.chain[a]] > self.chains.index[a]
        return known

    def started(self, rank: Ints, b: Ints) -> Bools:
        """Does the start of `rank` happen before node b?"""
        return self.clock[self.epoch[b], len(self.chains) + rank] > 0

    def ended(self, a: Ints, rank: Ints) -> Bools:
        """Does node a happen before the end of `rank`?"""
        return self.clock[self.num_epochs + rank, self.chains.chain[a]] > self.chains.index[a]

    def _inherited(self) -> tuple[Ints, NDArray[np.int32]]:
        """For each epoch, which clock of the run before it knows: one per set of ranks whose start it knows."""
        starts = self.clock[: self.num_epochs, len(self.chains) :] > 0
        packed = np.ascontiguousarray(np.packbits(starts, axis=1))
        keys = packed.view(np.dtype((np.void, packed.shape[1]))).reshape(-1)
        _, example, kind = np.unique(keys, return_index=True, return_inverse=True)
        ends = self.clock[self.num_epochs :]
        clock = np.zeros((len(example), self.clock.shape[1]), np.int32)
        for row, epoch in enumerate(example.tolist()):
            if starts[epoch].any():
                clock[row] = ends[starts[epoch]].max(axis=0)
        return kind.reshape(-1).astype(np.int64), clock


def order(chains: Chains, released: Releases, world: int, text: Text, *, together: bool) -> Order:
    """Simulates one run. `together`: every rank has started before any step (a run by itself).

    Raises:
        PlanError: the run deadlocks; names a blocked wait of each queue in the circle, or the wait nobody releases.
    """
    num_waits = np.bincount(chains.chain[released.waits], minlength=len(chains))
    is_wait = np.zeros(len(chains.rows) + 1, np.int64)
    is_wait[released.waits + 1] = 1
    seen = np.cumsum(is_wait)
    epoch = chains.chain + seen[1:]
    columns = len(chains) + world
    clock = np.zeros((len(chains) + len(released.waits) + world, columns), np.int32)
    for c in range(len(chains)):
        row = clock[c + int(seen[chains.first[c]])]
        if together:
            row[len(chains) :] = 1
        elif c < chains.num_queues or chains.outside[c - chains.num_queues].after is None:
            row[len(chains) + int(chains.rank[c])] = 1
    run = _Run(chains, released, epoch, clock, num_waits)
    run.simulate()
    if run.stuck():
        raise _deadlock(chains, run, text)
    num_epochs = len(chains) + len(released.waits)
    _ends(chains, clock, epoch, num_epochs, world)
    return Order(chains, run.positions(), epoch, clock, num_epochs)


class _Run:
    """Runs every chain as far as its waits allow, and joins clocks on the way."""

    def __init__(
        self, chains: Chains, released: Releases, epoch: Ints, clock: NDArray[np.int32], num_waits: Ints
    ) -> None:
        self.chains, self.released, self.clock = chains, released, clock
        self.chain, self.index, self.epoch = chains.chain.tolist(), chains.index.tolist(), epoch.tolist()
        self.waits = released.waits.tolist()
        ends = np.cumsum(num_waits)
        self.next_wait, self.last_wait = (ends - num_waits).tolist(), ends.tolist()
        self.length = np.diff(chains.first).tolist()
        self.done = [0] * len(chains)
        self.parked: list[list[tuple[int, int]]] = [[] for _ in range(len(chains))]
        self.blocks: list[tuple[int, int, int]] = []

    def simulate(self) -> None:
        ready = list(range(len(self.chains)))[::-1]
        while ready:
            c = ready.pop()
            begin = self.done[c]
            self._advance(c)
            if self.done[c] > begin:
                self.blocks.append((c, begin, self.done[c]))
                if self.parked[c]:
                    ready += [waiter for index, waiter in self.parked[c] if index < self.done[c]]
                    self.parked[c] = [p for p in self.parked[c] if p[0] >= self.done[c]]

    def _advance(self, c: int) -> None:
        done, index, chain = self.done, self.index, self.chain
        for w in range(self.next_wait[c], self.last_wait[c]):
            node = self.waits[w]
            done[c] = index[node]
            needs = self.released.needs[w]
            if needs is None:
                self.next_wait[c] = w
                return
            for need in needs:
                if index[need] >= done[chain[need]]:
                    self.next_wait[c] = w
                    self.parked[chain[need]].append((index[need], c))
                    return
            self._join(w, node, needs)
        self.next_wait[c] = self.last_wait[c]
        done[c] = self.length[c]

    def _join(self, w: int, node: int, needs: tuple[int, ...]) -> None:
        row = self.clock[self.epoch[node]]
        row[:] = self.clock[self.epoch[node] - 1]
        for need in needs:
            column, count = self.chain[need], self.index[need] + 1
            if row[column] < count:
                np.maximum(row, self.clock[self.epoch[need]], out=row)
                row[column] = count
        gate = self.released.gates[w]
        if gate >= 0:
            row[len(self.chains) + gate] = 1

    def stuck(self) -> list[int]:
        return [c for c in range(len(self.chains)) if self.next_wait[c] < self.last_wait[c]]

    def positions(self) -> Ints:
        position = np.zeros(len(self.chains.rows), np.int64)
        count = 0
        first = self.chains.first.tolist()
        for c, begin, end in self.blocks:
            position[first[c] + begin : first[c] + end] = np.arange(count, count + end - begin)
            count += end - begin
        return position


def _ends(chains: Chains, clock: NDArray[np.int32], epoch: Ints, num_epochs: int, world: int) -> None:
    """The end of a rank knows its start, its queues, and what is outside until the rank's end."""
    for r in range(world):
        clock[num_epochs + r, len(chains) + r] = 1
    for c in range(len(chains)):
        length = int(chains.first[c + 1] - chains.first[c])
        if not length or (c >= chains.num_queues and chains.outside[c - chains.num_queues].before):
            continue
        row = clock[num_epochs + int(chains.rank[c])]
        np.maximum(row, clock[epoch[chains.first[c + 1] - 1]], out=row)
        row[c] = length


def _deadlock(chains: Chains, run: _Run, text: Text) -> Exception:
    """Follows who waits for whom until it closes, or ends at a wait that nothing releases."""
    at, path = run.stuck()[0], list[int]()
    while at not in path:
        path.append(at)
        needs = run.released.needs[run.next_wait[at]]
        if needs is None:
            step = text.step(run.waits[run.next_wait[at]])
            return text.error(f"deadlock: {step}: nobody raises the signal to this value", [step])
        at = next(run.chain[n] for n in needs if run.index[n] >= run.done[run.chain[n]])
    circle = path[path.index(at) :]
    steps = [text.step(run.waits[run.next_wait[c]]) for c in circle]
    return text.error("deadlock: each of these waits for a step behind the next: " + "; ".join(steps), steps)
