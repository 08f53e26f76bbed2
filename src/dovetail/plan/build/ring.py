"""Staging: how an input reaches peers that may not read it where it is.

An input on the heap is read in place. An ordinary one goes through a ring of chunks in its rank's scratch memory that
stays in cache: the rank fills a slot and says `ready`, a peer empties it and says `freed`. What a peer does is the same
in both cases, so no rank needs to know how the others hold their tensors before the run begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.plan import step as st
from dovetail.plan.step import Rows

#: Defaults of the staging ring: chosen to fit a second-level cache, not yet swept (docs/design/plan.md).
CHUNK_BYTES = 128 << 10
SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """`size_bytes` cut into chunks that go through a ring of `slots`."""

    size_bytes: int
    chunk_bytes: int = CHUNK_BYTES
    slots: int = SLOTS

    @property
    def count(self) -> int:
        """How many chunks; at least one, so that every message has a signal."""
        return max(1, -(-self.size_bytes // self.chunk_bytes))

    @property
    def ring_bytes(self) -> int:
        """What the ring takes."""
        return min(self.size_bytes, self.chunk_bytes * min(self.slots, self.count))

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each chunk begins."""
        return np.arange(self.count, dtype=np.int64) * self.chunk_bytes

    @property
    def lengths(self) -> NDArray[np.int64]:
        """How long each chunk is."""
        return np.minimum(self.chunk_bytes, self.size_bytes - self.offsets)

    @property
    def in_ring(self) -> NDArray[np.int64]:
        """Where each chunk stands in the ring."""
        return (np.arange(self.count, dtype=np.int64) % self.slots) * self.chunk_bytes

    @property
    def numbers(self) -> NDArray[np.int64]:
        """1, 2, ...: the signal value that goes with each chunk."""
        return np.arange(1, self.count + 1, dtype=np.int64)

    def fill(self, src: tuple[int, int, int], dst: tuple[int, int, int], ready: int, freed: list[int]) -> Rows:
        """Copies src through the ring at dst: waits until the slot is free for all of `freed`, fills it, says so."""
        copies = st.copy((src[0], src[1], src[2] + self.offsets), (dst[0], dst[1], dst[2] + self.in_ring), self.lengths)
        waits = [st.wait(np.full(self.count, f), self.numbers - self.slots) for f in freed]
        rows = st.interleave(*waits, copies, st.signal(np.full(self.count, ready), self.numbers))
        needed: Rows = rows[~((rows["op"] == st.Op.WAIT) & (rows["value"] <= 0))]
        return needed

    def drain(
        self, src: tuple[int, int, int], ring_offset: int, dst: tuple[int, int, int], ready: int, freed: int
    ) -> Rows:
        """Pulls chunk by chunk from a view to dst. `src` is where the data are if the view is not staged."""
        copies = st.copy(
            (src[0], src[1], src[2] + self.offsets),
            (dst[0], dst[1], dst[2] + self.offsets),
            self.lengths,
            alt=ring_offset + self.in_ring,
        )
        return st.interleave(
            st.wait(np.full(self.count, ready), self.numbers),
            copies,
            st.signal(np.full(self.count, freed), self.numbers),
        )
