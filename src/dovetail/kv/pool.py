"""The pool of KV blocks in host memory: what is stored, who writes and reads it, and what goes when it is full.

Owns memory, slots, index and policy, and the rules between them. A block is WRITING from `begin_store` to `commit` and
is not served; READY after it. A fetch holds its blocks from `begin_fetch` to `release`, and a block that is held is
not evicted. A slot is used again only when nothing can still write or read it: the owner of the copies says so, by
ending a `Store` or `Fetch` after them, or with a `done` that is asked until it says true. It moves no bytes itself.

All calls are thread-safe. Ending a store or fetch takes no lock, so it is safe in a finaliser. `done` and the policy
are called with the pool's lock held, and may not call the pool.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dovetail.kv.handles import End, Fetch, Held, NotStored, PoolError, PoolFull, Store, slots_of
from dovetail.kv.index import Block, PrefixIndex, State
from dovetail.kv.memory import HostMemory
from dovetail.kv.policy import LRU, Policy
from dovetail.kv.slots import SlotAllocator

logger = logging.getLogger(__name__)

@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts in blocks since the pool was made, and where its slots are now."""

    hits: int  #: asked for by `lookup`, or by a fetch of what is there, and READY
    misses: int  #: the same, and not
    stored: int  #: committed
    evicted: int
    fetched: int
    num_fetches: int  #: of one block or more
    num_fetch_runs: int  #: contiguous runs of slots in them
    slot_bytes: int
    num_slots: int
    free: int
    writing: int
    ready: int
    held: int  #: of the ready ones: by fetches in flight
    quarantined: int  #: of stores that were aborted or dropped, whose copies may still write

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are not free."""
        return (self.num_slots - self.free) * self.slot_bytes

    @property
    def runs_per_fetch(self) -> float:
        """1.0 is best: each fetch read one run of slots."""
        return self.num_fetch_runs / self.num_fetches if self.num_fetches else 0.0


class Pool:
    """Blocks in `memory`, which it owns from now on. `with Pool(memory) as pool:`, or `close()`.

    Keys are those of `block_hashes`, the first block of a prompt first.
    """

    def __init__(self, memory: HostMemory, *, policy: Policy | None = None) -> None:
        self.memory = memory
        self._allocator = SlotAllocator(memory.num_slots, slots_per_piece=memory.slots_per_piece)
        self._index, self._policy = PrefixIndex(), policy or LRU()
        self._open: set[Held] = set()
        self._ended: deque[tuple[Held, End]] = deque()  # told, not yet acted on
        self._waiting: list[Held] = []  # over when their `done` says so
        self._lost: list[Held] = []  # dropped without a word: never safe
        self._lock, self._busy, self._closed = threading.RLock(), False, False
        self._hits = self._misses = self._stored = self._evicted = 0
        self._fetched = self._num_fetches = self._num_fetch_runs = 0

    # --- what callers do

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many leading blocks can be fetched now. It holds nothing: the next store may evict them."""
        keys = _checked(keys)
        with self._working():
            return len(self._found(keys))

    def begin_store(self, keys: Sequence[bytes]) -> Store:
        """Slots for the blocks that are not stored or being stored; evicts others for them if it must.

        Raises:
            PoolFull: too little is free or can be evicted; nothing has changed.
        """
        keys = _checked(keys)
        with self._working():
            missing = [k for k, key in enumerate(keys) if key not in self._index]
            self._make_room(len(missing), keys)
            before = self._index.get(keys[missing[0] - 1]) if missing and missing[0] else None
            slots = self._allocator.alloc(len(missing), after=before.slot if before else None)
            blocks = [Block(keys[k], slot) for k, slot in zip(missing, slots.tolist(), strict=True)]
            self._index.add(blocks)
            self._touch(keys)  # who stores meanwhile takes others first
            return Store(self, self._begun(blocks, storing=True, request=keys), missing)

    def begin_fetch(self, keys: Sequence[bytes], *, partial: bool = False) -> Fetch:
        """Holds blocks so that they can be copied.

        Args:
            partial: take the leading blocks that are READY, perhaps none, and count the others as misses.

        Raises:
            NotStored: not all are READY, and `partial` is false; nothing is held.
        """
        keys = _checked(keys)
        with self._working():
            blocks = self._found(keys) if partial else self._index.prefix(keys)
            if not partial and len(blocks) < len(keys):
                raise self._not_stored(keys, len(blocks))
            self._policy.touched(keys[: len(blocks)])
            for block in blocks:
                block.num_readers += 1
            fetch = Fetch(self, self._begun(blocks, storing=False))
            fetch.num_runs = self._allocator.num_runs(fetch._slots)
            self._fetched += len(blocks)
            self._num_fetches += bool(blocks)
            self._num_fetch_runs += fetch.num_runs
            return fetch

    def stats(self) -> Stats:
        """Exact at this moment."""
        with self._working():
            self._poll()
            return self._count()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """No more stores and fetches. Gives the memory back: at once, or when what is in flight has ended.

        Safe to call twice; a later call asks again whether waiting copies are over.
        """
        if self.memory.is_forked:
            return
        with self._working(closing=True):
            self._closed = True
            self._poll()
            self._give_memory_back()
            if self._in_flight():
                logger.warning("a pool is closed with stores or fetches in flight: its memory stays until they end")

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_closed") and self._in_flight():
            self._poll()
            if self._in_flight():
                self.memory.abandon()  # a copy may still write: the memory must outlive it

    # --- rules between the parts; the lock is held

    @contextlib.contextmanager
    def _working(self, *, closing: bool = False) -> Iterator[None]:
        if not (closing or self._closed):
            self.memory.ensure_open()  # before the lock: in a forked child nobody would open that
        try:
            with self._lock:
                if self._busy:
                    raise PoolError("the pool was called by its own policy, by a `done` or a finaliser, while it works")
                if self._closed and not closing:
                    raise PoolError("the pool is closed: make a new one")
                self._busy = True
                try:
                    self._act()
                    yield
                finally:
                    self._busy = False
        finally:
            self._settle()

    def _settle(self) -> None:
        """Acts on what has ended, unless somebody holds the lock: he does so when he has let go of it."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                if self._busy:  # in this thread: a finaliser, in the middle of something
                    return
                self._busy = True
                try:
                    self._act()
                finally:
                    self._busy = False
            finally:
                self._lock.release()

    def _begun(self, blocks: list[Block], *, storing: bool, request: Sequence[bytes] = ()) -> Held:
        transfer = Held(blocks, storing, list(request))
        self._open.add(transfer)
        return transfer

    def _touch(self, keys: list[bytes]) -> None:
        """Makes what can be fetched of a request recent as a whole: no block is older than one behind it."""
        self._policy.touched([block.key for block in self._index.prefix(keys)])

    def _found(self, keys: list[bytes]) -> list[Block]:
        blocks = self._index.prefix(keys)
        self._hits += len(blocks)
        self._misses += len(keys) - len(blocks)
        return blocks

    def _make_room(self, needed: int, keys: list[bytes]) -> None:
        """Evicts until `needed` slots are free, none of them of `keys`; or raises and changes nothing."""
        if needed <= self._allocator.num_free:
            return
        self._poll()
        short = needed - self._allocator.num_free
        if short <= 0:
            return
        own = set(keys)

        def allowed(key: bytes) -> bool:
            block = self._index.get(key)
            return block is not None and block.state is State.READY and not block.num_readers and key not in own

        victims = list(self._policy.victims(short, allowed))
        if len(victims) < short:
            raise self._full(needed, len(victims))
        if len(victims) > short or len(set(victims)) < short or not all(map(allowed, victims)):
            raise PoolError(
                f"{type(self._policy).__name__}.victims({short}) gave {len(victims)} keys, "
                f"{len(set(filter(allowed, victims)))} of them allowed: it may give {short}, each once and allowed"
            )
        self._policy.removed(victims)
        self._allocator.free(slots_of(self._index.remove(victims)))
        self._evicted += short

    def _finished(self, transfer: Held, end: End) -> None:
        """A handle ends; takes no lock. Whoever calls the pool from now on finds it done."""
        self._ended.append((transfer, end))
        self._settle()

    def _act(self) -> None:
        while self._ended:
            transfer, end = self._ended.popleft()
            self._open.discard(transfer)
            if end is End.COMMITTED:
                for block in transfer.blocks:
                    block.state = State.READY
                self._stored += len(transfer.blocks)
                self._policy.inserted([block.key for block in transfer.blocks])
                self._touch(transfer.request)
                continue
            if transfer.storing:
                self._index.remove([block.key for block in transfer.blocks])
            if transfer.done is not None:
                self._waiting.append(transfer)
            elif end is End.DROPPED and transfer.taken:
                self._lost.append(transfer)
            else:
                self._let_go(transfer)
        if self._closed:
            self._give_memory_back()

    def _in_flight(self) -> bool:
        return bool(self._open or self._ended or self._waiting or self._lost)

    def _give_memory_back(self) -> None:
        if not self._in_flight():
            self.memory.close()

    def _let_go(self, transfer: Held) -> None:
        if transfer.storing:
            self._allocator.free(slots_of(transfer.blocks))
        else:
            for block in transfer.blocks:
                block.num_readers -= 1

    def _poll(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            if _is_done(transfer):
                self._let_go(transfer)
            else:
                self._waiting.append(transfer)

    def _count(self) -> Stats:
        ready = sum(block.state is State.READY for block in self._index)
        free = self._allocator.num_free
        return Stats(
            hits=self._hits, misses=self._misses, stored=self._stored, evicted=self._evicted, fetched=self._fetched,
            num_fetches=self._num_fetches, num_fetch_runs=self._num_fetch_runs,
            slot_bytes=self.memory.slot_bytes, num_slots=self.memory.num_slots, free=free,
            writing=len(self._index) - ready, ready=ready, held=sum(block.num_readers > 0 for block in self._index),
            quarantined=self.memory.num_slots - free - len(self._index),
        )  # fmt: skip

    def _full(self, needed: int, evictable: int) -> PoolFull:
        now = self._count()
        return PoolFull(
            f"a store needs {needed} slots: of {now.num_slots} are {now.free} free and {evictable} can be evicted "
            f"({now.held} are held by fetches, {now.writing} are being written, {now.quarantined} wait for the copies "
            "of stores that were given up); end fetches and stores, store less at a time, or make a larger pool",
            needed=needed, free=now.free, evictable=evictable,
        )  # fmt: skip

    def _not_stored(self, keys: list[bytes], num_ready: int) -> NotStored:
        block = self._index.get(keys[num_ready])
        state = "is being written" if block else "is not stored (never, or evicted)"
        return NotStored(
            f"block {num_ready} of a fetch of {len(keys)} {state}: fetch the first {num_ready}, or pass partial=True "
            "for those that are there",
            num_ready=num_ready,
        )


def _is_done(transfer: Held) -> bool:
    assert transfer.done is not None
    try:
        return bool(transfer.done())
    except Exception:  # nobody knows whether a copy still runs: wait
        logger.exception("`done` of %d blocks failed: their slots stay out of use", len(transfer.blocks))
        return False


def _checked(keys: Any) -> list[bytes]:
    if isinstance(keys, bytes | str) or not all(isinstance(key, bytes) for key in keys):
        raise TypeError("keys are a sequence of bytes, one per block, as block_hashes gives them")
    if len(set(keys)) < len(keys):
        raise ValueError(f"{len(keys)} keys, {len(set(keys))} of them different: a prefix has each block once")
    return list(keys)
