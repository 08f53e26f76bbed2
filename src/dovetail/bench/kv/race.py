"""Contenders that move the same blocks, timed in turn round by round and checked before and after."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dovetail.bench.kv.load import Load
from dovetail.bench.kv.places import Bytes, Place
from dovetail.bench.kv.spec import Row
from dovetail.errors import HardwareError
from dovetail.kv.choose import Path
from dovetail.kv.layout import Layout
from dovetail.kv.learn import SETTLED
from dovetail.kv.mover import Transfer
from dovetail.kv.planner import Direction
from dovetail.measure.interleave import orders
from dovetail.measure.stats import median

logger = logging.getLogger(__name__)
_POISON = 0xA5
_SAMPLES = 64
_TIMEOUT_S = 120.0
_SHORT_US, _MOST_ROUNDS = 400_000.0, 4  # rounds go on for so long, up to so many times their number
_MOST_WARM_US = 250_000.0
_MOST_WINDOWS = 6  # beside a computation


@dataclass(slots=True, kw_only=True)
class Part:
    """One direction of a contender."""

    direction: Direction
    submit: Callable[[], Transfer]
    sample: Sample


@dataclass(slots=True, kw_only=True)
class Contender:
    """One way to move the same blocks, in one direction or in both at once."""

    name: str
    entries: int | None
    size_bytes: int
    copies: int
    plan_us: float
    parts: list[Part]
    right: bool = True
    took: Counter[str] = field(default_factory=Counter)  #: of auto: the paths of its timed runs
    submits_us: list[float] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)  #: share of its speed that a computation had beside it

    def once(self) -> tuple[float, float]:
        """Microseconds until everything was submitted, and until it had landed."""
        began = time.perf_counter_ns()
        transfers = [part.submit() for part in self.parts]
        submitted = time.perf_counter_ns()
        for transfer in transfers:
            _watch(transfer)
        ended = time.perf_counter_ns()
        if (path := getattr(getattr(transfers[0], "choice", None), "path", None)) is not None:
            self.took[str(path)] += 1
        return (submitted - began) / 1e3, (ended - began) / 1e3

    def arrives(self) -> bool:
        """Whether what is at the source of each row is at its destination afterwards."""
        wanted, took = [part.sample.begin(part.direction) for part in self.parts], self.took.copy()
        self.once()
        self.took = took
        return all(part.sample.arrived(part.direction, w) for part, w in zip(self.parts, wanted, strict=True))

    def row(self) -> Row:
        """Its part of a row; a contender whose bytes came changed has no time."""
        measured = self.right and bool(self.times_us)
        time_us = round(median(self.times_us), 1) if measured else None
        return {
            "size_bytes": self.size_bytes, "path": self.name, "took": dict(self.took.most_common()) or None,
            "chosen": max(self.took, key=lambda path: self.took[path], default=None),
            "entries_per_call": self.entries, "copies": self.copies, "plan_us": round(self.plan_us, 1),
            "submit_us": round(median(self.submits_us), 1) if measured else None, "time_us": time_us,
            "bandwidth_gbps": self.size_bytes / time_us / 1e3 if time_us else None, "correct": self.right,
            "compute_kept": round(median(self.kept), 4) if self.kept and self.right else None,
            "iterations": len(self.times_us),
        }  # fmt: skip


def _watch(transfer: Transfer) -> None:
    """Waits without sleeping, which would round times up to its grain."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not transfer.is_over():
        if time.monotonic() > deadline:
            transfer.wait(0)


def race(contenders: Sequence[Contender], rounds: int, load: Load | None) -> None:
    """Checks all, times them round by round, in orders that favour none, and checks them again.

    Whoever comes second to touch the same pages finds their translations at hand: in a fixed order that would always
    be the same contender, and it would look 10 % faster than it is.
    """
    for contender in contenders:
        contender.right = contender.arrives()
    going = [contender for contender in contenders if contender.right]
    _warm_up(going, load)
    for contender in going:
        contender.took.clear()
    for order in _orders(going, rounds, load):
        for contender in order:
            if load is None:
                found = [contender.once()]
            else:
                try:
                    found, kept = load.beside(contender.once, contender.times_us[0])
                except HardwareError as error:  # the others go on; this one has no time
                    logger.warning("%s: %s", contender.name, error)
                    continue
                contender.kept.append(kept)
            contender.submits_us += [submit_us for submit_us, _ in found]
            contender.times_us += [time_us for _, time_us in found]
    for contender in going:
        contender.submits_us, contender.times_us = contender.submits_us[1:], contender.times_us[1:]
        contender.right = contender.arrives()


def _warm_up(going: Sequence[Contender], load: Load | None) -> None:
    """Runs all, and leaves with each about how long it takes.

    `auto` runs as often as it needs to have tried its paths: in the state that is measured, since what it learns is of
    that. If it takes very long, less often.
    """
    for contender in going:
        learns, taken = contender.name == Path.AUTO, [contender.once()]
        if learns and load:
            number = 0
            for _ in range(_MOST_WINDOWS):
                try:
                    found = load.beside(contender.once, taken[0][1])[0]
                except HardwareError as error:
                    logger.info("%s, to warm up: %s", contender.name, error)
                    break
                number += len(found)
                if number >= SETTLED:
                    break
        elif learns:
            while len(taken) < SETTLED and sum(time_us for _, time_us in taken) < _MOST_WARM_US:
                taken.append(contender.once())
        contender.submits_us, contender.times_us = ([t] for t in taken[-1])


def _orders(going: list[Contender], rounds: int, load: Load | None) -> Iterator[list[Contender]]:
    """The orders of all rounds: at least `rounds`, more of them where a round is short."""
    if not going:
        return
    square, about_us = orders(len(going)), sum(contender.times_us[0] for contender in going)
    if load is None and about_us:
        most = max(_MOST_ROUNDS * rounds, len(square))  # in as many each has come behind each other one
        rounds = max(rounds, min(most, int(_SHORT_US / about_us)))
    for order in itertools.islice(itertools.cycle(square), rounds):
        yield [going[n] for n in order]


class Sample:
    """Random rows of the blocks that are moved: fresh random bytes at the source, poison at the destination."""

    def __init__(self, place: Place, layout: Layout, blocks: Any, slots: Any, rng: np.random.Generator) -> None:
        self._place, self._rng = place, rng
        group = layout.groups[0]
        k = rng.integers(0, len(blocks), _SAMPLES)
        row = rng.integers(0, group.num_rows, _SAMPLES)
        pairs = set(zip(k.tolist(), row.tolist(), strict=True))
        self._size = group.row_bytes
        self._rows = [
            (int(group.bases[r] + blocks[n] * group.strides[r]), int(slots[n] * layout.slot_bytes + r * self._size))
            for n, r in sorted(pairs)
        ]

    def begin(self, direction: Direction) -> list[Bytes]:
        """Fresh bytes at the source of each row, others at its destination; returns what must arrive."""
        wanted = []
        fetch = direction is Direction.FETCH
        for device, host in self._rows:
            there = self._place.host(host, self._size)
            if fetch:
                there[:] = self._rng.integers(0, 256, self._size, dtype=np.uint8)
                wanted.append(there.copy())
                self._place.fill(device, self._size, _POISON)
            else:
                byte = int(self._rng.integers(0, 256))
                self._place.fill(device, self._size, byte)
                wanted.append(np.full(self._size, byte, np.uint8))
                there[:] = byte ^ 0xFF
        return wanted

    def arrived(self, direction: Direction, wanted: list[Bytes]) -> bool:
        """Whether it is there now."""
        fetch = direction is Direction.FETCH
        for (device, host), right in zip(self._rows, wanted, strict=True):
            came = self._place.read(device, self._size) if fetch else self._place.host(host, self._size)
            if not np.array_equal(came, right):
                return False
        return True
