"""Messages with dependencies, as columns: what every algorithm is, and what a caller can write by hand.

Owns the table and its two forms: whole (every rank's messages), and a pattern (what rank 0 sends, every other rank
sending the same with all ranks translated). `spread` makes a whole schedule of a pattern; `fold` proves that a schedule
is translation-invariant and gives its pattern.

Every rank has numbered slots, each of which counts. A message starts when slot `wait` of its sender is complete. When
its last byte arrives it counts once for slot `deliver` of its receiver; when its last byte has left, once for slot
`sent` of its sender. A slot is complete when everything that names it has counted. `NONE` stands for no slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dovetail.sim.net.topology import Floats, Ints, Network

NONE = -1

#: sender, receiver, bytes, then slots: wait, deliver, sent
Message = tuple[int, int, float, int, int, int]

_ROW = np.dtype([("src", "i8"), ("dst", "i8"), ("size_bytes", "f8"), ("wait", "i8"), ("deliver", "i8"), ("sent", "i8")])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A row per message. A message to its own sender takes no time."""

    src: Ints
    dst: Ints
    size_bytes: Floats
    wait: Ints  #: slot of the sender
    deliver: Ints  #: slot of the receiver
    sent: Ints  #: slot of the sender

    @classmethod
    def of(cls, messages: Iterable[Message]) -> Schedule:
        """From rows (src, dst, size_bytes, wait, deliver, sent)."""
        rows = np.array(list(messages), _ROW)
        return cls(**{name: np.ascontiguousarray(rows[name]) for name in _ROW.names or ()})

    def __len__(self) -> int:
        return len(self.src)

    @property
    def slots(self) -> int:
        """How many slots a rank needs."""
        return 1 + max((int(c.max(initial=NONE)) for c in (self.wait, self.deliver, self.sent)), default=NONE)

    def check(self, network: Network) -> None:
        """Raises ValueError for a rank, size or slot that cannot be."""
        for name in ("src", "dst"):
            column: Ints = getattr(self, name)
            _refuse(self, (column < 0) | (column >= network.ranks), f"{name} must be in 0..{network.ranks - 1}")
        bad = ~np.isfinite(self.size_bytes) | (self.size_bytes < 0)
        _refuse(self, bad, "size_bytes must be finite and zero or more")
        for name in ("wait", "deliver", "sent"):
            _refuse(self, getattr(self, name) < NONE, f"slot {name} must be zero or more, or NONE ({NONE})")

    def row(self, index: int) -> str:
        """One message, for people."""
        return (
            f"message {index} (rank {self.src[index]} to {self.dst[index]}, {self.size_bytes[index]:g} bytes, "
            f"wait {self.wait[index]}, deliver {self.deliver[index]}, sent {self.sent[index]})"
        )


def _refuse(schedule: Schedule, bad: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], rule: str) -> None:
    if bad.any():
        raise ValueError(f"{rule}: {schedule.row(int(np.flatnonzero(bad)[0]))}")


def spread(network: Network, pattern: Schedule) -> Schedule:
    """The whole schedule of a pattern: rank r sends what rank 0 sends, with r added to all coordinates."""
    ranks = np.arange(network.ranks)
    there = network.coordinates(ranks)[:, None] + network.coordinates(pattern.dst)[None]
    return Schedule(
        src=np.repeat(ranks, len(pattern)),
        dst=network.ranks_at(there).ravel(),
        size_bytes=np.tile(pattern.size_bytes, network.ranks),
        wait=np.tile(pattern.wait, network.ranks),
        deliver=np.tile(pattern.deliver, network.ranks),
        sent=np.tile(pattern.sent, network.ranks),
    )


def fold(network: Network, schedule: Schedule) -> Schedule | None:
    """The pattern of a schedule if every rank sends the same up to translation, else None.

    Every column is compared for every rank, so an answer is a proof. Networks here are products of dimensions with
    equal links, hence translations also keep links, bandwidths and routes.
    """
    each = len(schedule) // network.ranks
    if each * network.ranks != len(schedule):
        return None
    relative = network.ranks_at(network.coordinates(schedule.dst) - network.coordinates(schedule.src))
    s = schedule
    order = np.lexsort((s.sent, s.deliver, s.wait, s.size_bytes, relative, s.src))
    if not np.array_equal(s.src[order], np.repeat(np.arange(network.ranks), each)):
        return None
    for column in (relative, s.size_bytes, s.wait, s.deliver, s.sent):
        by_rank = column[order].reshape(network.ranks, each)
        if (by_rank != by_rank[0]).any():
            return None
    mine = order[:each]
    return Schedule(
        src=s.src[mine], dst=relative[mine], size_bytes=s.size_bytes[mine],
        wait=s.wait[mine], deliver=s.deliver[mine], sent=s.sent[mine],
    )  # fmt: skip
