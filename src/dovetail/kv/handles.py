"""A store and a fetch as a caller holds them, and the errors of a pool.

Owns how they end: once, by a word of the caller, or, if the caller drops them, as safely as is known. The pool does
what follows from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError
from dovetail.kv.index import Block

if TYPE_CHECKING:
    from dovetail.kv.pool import Pool

Done = Callable[[], bool]


class PoolError(DovetailError):
    """The pool, a store or a fetch is not in a state that allows the call; nothing has changed."""


class PoolFull(PoolError):
    """There is no room, and too little can be evicted; nothing has changed.

    Attributes:
        needed: slots that the store asked for.
        free: slots that nobody holds.
        evictable: slots of blocks that could be evicted for it.
    """

    def __init__(self, message: str, *, needed: int = 0, free: int = 0, evictable: int = 0) -> None:
        super().__init__(message)
        self.needed, self.free, self.evictable = needed, free, evictable


class NotStored(PoolError):
    """Not all blocks of a fetch are READY. `num_ready` of them, from the first on, are."""

    def __init__(self, message: str, *, num_ready: int = 0) -> None:
        super().__init__(message)
        self.num_ready = num_ready


class End(StrEnum):
    COMMITTED = "committed"
    ABORTED = "aborted"
    RELEASED = "released"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Held:
    """What the pool keeps of a store or fetch, also when the caller has dropped it."""

    blocks: list[Block]
    storing: bool
    request: list[bytes] = field(default_factory=list)  #: of a store: the keys of all its blocks, the kept ones too
    taken: bool = False  #: the caller has seen the slots, so copies may be under way
    done: Done | None = None


class Handle:
    """A store or fetch as the caller holds it; it ends once."""

    _noun: ClassVar[str]

    def __init__(self, pool: Pool, transfer: Held) -> None:
        self._pool, self._transfer = pool, transfer
        self._slots = slots_of(transfer.blocks)
        self._live = [transfer]  # popped by whoever ends it: atomic
        self._end: End | None = None

    @property
    def slots(self) -> NDArray[np.int64]:
        """The slot of each block, in the order of the prefix."""
        self._transfer.taken = True
        return self._slots

    @property
    def keys(self) -> list[bytes]:
        """The key of each block."""
        return [block.key for block in self._transfer.blocks]

    def guard(self, done: Done) -> None:
        """Tells how to see that the copies are over, once they are submitted: `event.query`, `flag.is_set`.

        From now on the slots are safe whatever happens: they are not used again before `done` says true.
        """
        self._transfer.done = done

    def _finish(self, end: End, done: Done | None = None) -> None:
        try:
            transfer = self._live.pop()
        except IndexError:
            raise PoolError(
                f"this {self._noun} of {len(self._slots)} blocks is {self._end or 'over'} already: end it once"
            ) from None
        self._end = end
        transfer.done = done or transfer.done
        self._pool._finished(transfer, end)

    def __len__(self) -> int:
        return len(self._slots)

    def __del__(self) -> None:
        if not self._live or self._pool.memory.is_forked:
            return
        self._finish(End.DROPPED)
        if not len(self):
            return
        known = self._transfer.done is not None or not self._transfer.taken
        fate = "" if known else ": its slots stay out of use, since copies may be in flight"
        warnings.warn(f"a {self._noun} of {len(self)} blocks was dropped and not ended{fate}", ResourceWarning)


class Store(Handle):
    """Slots to copy blocks into: those of the request that were not stored yet. Ends with `commit` or `abort`."""

    _noun = "store"

    def __init__(self, pool: Pool, transfer: Held, indices: list[int]) -> None:
        super().__init__(pool, transfer)
        self.indices = np.array(indices, np.int64)  #: where in the request each of these blocks stands

    def commit(self) -> None:
        """The copies into all slots are over: the blocks can be fetched.

        Raises:
            PoolError: it ended before, the pool is closed, or the `guard` says that copies are under way.
        """
        if self._live and self._pool.closed:
            raise PoolError("the pool is closed: abort() this store")
        if self._live and self._transfer.done and not self._transfer.done():
            raise PoolError("the copies of this store are not over, its guard says: commit when they are")
        self._finish(End.COMMITTED)

    def abort(self, done: Done | None = None) -> None:
        """Forgets the blocks and gives the slots back: at once, or when `done` (or the guard) says true.

        Without either the caller vouches that nothing writes to the slots any more.
        """
        self._finish(End.ABORTED, done)


class Fetch(Handle):
    """Slots to copy blocks from; they are not evicted before `release`."""

    _noun = "fetch"
    num_runs = 0  #: contiguous ones of its slots; the pool says

    def release(self, done: Done | None = None) -> None:
        """Lets go of the blocks: at once, or when `done` (or the guard) says that the copies are over."""
        self._finish(End.RELEASED, done)


def slots_of(blocks: Sequence[Block]) -> NDArray[np.int64]:
    return np.fromiter((block.slot for block in blocks), np.int64, len(blocks))
