"""The pool against a naive model: what it serves, what it evicts, where every slot is, and the bytes in them."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as some
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from dovetail.kv.handles import Fetch, NotStored, PoolError, PoolFull, Store
from dovetail.kv.index import block_hashes
from dovetail.kv.memory import HostMemory
from dovetail.kv.pool import Pool

NUM_SLOTS, SLOT_BYTES, BLOCK_TOKENS = 5, 64, 2

#: Prompts of up to 4 blocks over 2 kinds of block: many share a beginning, two of them often fill the pool.
prompts = some.lists(some.integers(0, 1), max_size=4).map(
    lambda kinds: [token for kind in kinds for token in (kind, 5)]
)


@dataclass
class Entry:
    """A stored block as the model has it."""

    data: bytes = b""
    ready: bool = False
    readers: int = 0


@dataclass
class Flag:
    """A `done` that says what it is told to."""

    value: bool = False
    after: list[Any] = field(default_factory=list)  #: what the model does when it is asked and true


class PoolMachine(RuleBasedStateMachine):
    """Stores and fetches by several owners at once, ended in every way there is."""

    stores: Bundle[Any] = Bundle("stores")
    fetches: Bundle[Any] = Bundle("fetches")
    flags: Bundle[Any] = Bundle("flags")

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(HostMemory(NUM_SLOTS, SLOT_BYTES, piece_bytes=2 * SLOT_BYTES))
        self.model: dict[bytes, Entry] = {}
        self.order: list[bytes] = []  # the first to go first
        self.quarantined: set[int] = set()
        self.waiting: list[Flag] = []
        self.hits = self.misses = self.stored = self.evicted = self.fetched = 0
        self.bytes = random.Random(0)
        self.handles: list[Store | Fetch] = []
        self.requests: dict[Store, list[bytes]] = {}

    def keys(self, prompt: list[int]) -> list[bytes]:
        return block_hashes(prompt, BLOCK_TOKENS, salt=b"one tenant")

    def num_ready(self, keys: list[bytes]) -> int:
        ready = [key in self.model and self.model[key].ready for key in keys]
        return len(list(itertools.takewhile(bool, ready)))

    def touch(self, keys: list[bytes]) -> None:
        """The leading blocks that are ready become the last to go, the first of them the very last."""
        for key in reversed(keys[: self.num_ready(keys)]):
            self.order.remove(key)
            self.order.append(key)

    def poll(self) -> None:
        for flag in [flag for flag in self.waiting if flag.value]:
            self.waiting.remove(flag)
            for act in flag.after:
                act()

    @property
    def free(self) -> int:
        return NUM_SLOTS - len(self.model) - len(self.quarantined)

    @rule(prompt=prompts, target=stores)
    def begin_store(self, prompt: list[int]) -> Any:
        keys = self.keys(prompt)
        missing = [k for k, key in enumerate(keys) if key not in self.model]
        if len(missing) > self.free:
            self.poll()
        short = max(0, len(missing) - self.free)
        idle = [k for k in self.order if not self.model[k].readers and k not in keys]
        if short > len(idle):
            with pytest.raises(PoolFull) as caught:
                self.pool.begin_store(keys)
            assert (caught.value.needed, caught.value.free, caught.value.evictable) == (
                len(missing), self.free, len(idle),
            )  # fmt: skip
            return multiple()
        for key in idle[:short]:
            del self.model[key]
            self.order.remove(key)
        self.evicted += short
        store = self.pool.begin_store(keys)
        assert store.indices.tolist() == missing
        assert store.keys == [keys[k] for k in missing]
        assert not set(store._slots.tolist()) & self.quarantined, "a slot that copies may still write was used again"
        self.touch(keys)
        self.requests[store] = keys
        self.model.update({key: Entry() for key in store.keys})
        self.handles.append(store)
        return store

    @rule(store=stores)
    def write(self, store: Store) -> None:
        """What a copy does; blocks whose store has ended are not touched any more."""
        if store._end is None:
            for key, slot in zip(store.keys, store.slots, strict=True):
                self.model[key].data = self.bytes.randbytes(SLOT_BYTES)
                self.pool.memory.view(int(slot))[:] = np.frombuffer(self.model[key].data, np.uint8)

    @rule(store=consumes(stores))
    def commit(self, store: Store) -> None:
        self.write(store)
        store.commit()
        for key in store.keys:
            self.model[key].ready = True
        self.order += reversed(store.keys)
        self.touch(self.requests[store])
        self.stored += len(store)
        for again in (store.commit, store.abort):
            with pytest.raises(PoolError, match="committed already"):
                again()

    def forget(self, store: Store) -> set[int]:
        for key in store.keys:
            del self.model[key]
        return set(store._slots.tolist())

    @rule(store=consumes(stores))
    def abort(self, store: Store) -> None:
        store.abort()
        self.forget(store)
        with pytest.raises(PoolError, match="aborted already"):
            store.commit()

    @rule(store=consumes(stores), guarded=some.booleans(), dropped=some.booleans(), target=flags)
    def abort_later(self, store: Store, guarded: bool, dropped: bool) -> Flag:
        """Copies are still under way when the store is given up, or lost."""
        flag = Flag()
        slots = self.forget(store)
        self.quarantined |= slots
        flag.after.append(lambda: self.quarantined.difference_update(slots))
        self.waiting.append(flag)
        if guarded or dropped:
            store.guard(lambda: flag.value)
            if len(store):
                with pytest.raises(PoolError, match="not over"):
                    store.commit()
        if dropped:
            self.drop(store)
        else:
            store.abort(None if guarded else lambda: flag.value)
        return flag

    def drop(self, handle: Store | Fetch) -> None:
        """What the garbage collector does; hypothesis itself keeps a reference."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            handle.__del__()
        noun = type(handle).__name__.lower()
        assert [str(w.message) for w in said] == [f"a {noun} of {len(handle)} blocks was dropped and not ended"] * bool(
            len(handle)
        )

    @rule(prompt=prompts, partial=some.booleans(), target=fetches)
    def begin_fetch(self, prompt: list[int], partial: bool) -> Any:
        keys = self.keys(prompt)
        ready = self.num_ready(keys)
        if ready < len(keys) and not partial:
            with pytest.raises(NotStored, match=f"block {ready} of a fetch of {len(keys)} is") as caught:
                self.pool.begin_fetch(keys)
            assert caught.value.num_ready == ready
            return multiple()
        fetch = self.pool.begin_fetch(keys, partial=partial)
        assert fetch.keys == keys[:ready]
        self.handles.append(fetch)
        if partial:
            self.hits += ready
            self.misses += len(keys) - ready
        self.fetched += ready
        for key in fetch.keys:
            self.model[key].readers += 1
        self.touch(keys)
        return fetch

    @rule(fetch=fetches)
    def read(self, fetch: Fetch) -> None:
        """Held blocks have their bytes, whatever happened to others."""
        if fetch._end is None:
            for key, slot in zip(fetch.keys, fetch.slots, strict=True):
                assert self.model[key].ready
                assert self.pool.memory.view(int(slot)).tobytes() == self.model[key].data

    def let_go(self, keys: list[bytes]) -> None:
        for key in keys:
            self.model[key].readers -= 1

    @rule(fetch=consumes(fetches))
    def release(self, fetch: Fetch) -> None:
        self.read(fetch)
        fetch.release()
        self.let_go(fetch.keys)
        with pytest.raises(PoolError, match="released already"):
            fetch.release()

    @rule(fetch=consumes(fetches), dropped=some.booleans(), target=flags)
    def release_later(self, fetch: Fetch, dropped: bool) -> Flag:
        flag = Flag()
        keys = fetch.keys
        flag.after.append(lambda: self.let_go(keys))
        self.waiting.append(flag)
        if dropped:
            fetch.guard(lambda: flag.value)
            self.drop(fetch)
        else:
            fetch.release(lambda: flag.value)
        return flag

    @rule(flag=consumes(flags))
    def copies_are_over(self, flag: Flag) -> None:
        flag.value = True

    @rule(prompt=prompts)
    def lookup(self, prompt: list[int]) -> None:
        keys = self.keys(prompt)
        ready = self.num_ready(keys)
        assert self.pool.lookup(keys) == ready
        self.hits += ready
        self.misses += len(keys) - ready
        other = block_hashes(prompt, BLOCK_TOKENS, salt=b"another tenant")
        assert self.pool.lookup(other) == 0
        self.misses += len(other)

    @rule()
    def accounting_is_exact(self) -> None:
        self.poll()
        now = self.pool.stats()
        ready = [entry for entry in self.model.values() if entry.ready]
        assert (now.hits, now.misses, now.stored, now.evicted) == (self.hits, self.misses, self.stored, self.evicted)
        assert now.fetched == self.fetched
        assert (now.num_slots, now.free, now.quarantined) == (NUM_SLOTS, self.free, len(self.quarantined))
        assert (now.ready, now.writing) == (len(ready), len(self.model) - len(ready))
        assert now.held == sum(entry.readers > 0 for entry in ready)
        assert list(self.pool._policy._order) == self.order  # type: ignore[attr-defined]
        assert now.used_bytes == (NUM_SLOTS - self.free) * SLOT_BYTES
        assert bool(now.num_fetches) == bool(now.fetched)
        assert now.num_fetches <= now.num_fetch_runs <= now.fetched
        assert (now.runs_per_fetch >= 1) == bool(now.num_fetches)

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        slots = [block.slot for block in self.pool._index]
        assert len(slots) == len(set(slots))
        assert not self.pool._allocator.is_free(slots).any()

    def teardown(self) -> None:
        """Whatever is in flight ends after the pool was closed; then, and not before, the memory goes."""
        self.accounting_is_exact()
        self.pool.close()
        for handle in [handle for handle in self.handles if handle._end is None]:
            assert self.pool.memory.pieces
            handle.abort() if isinstance(handle, Store) else handle.release()
        for flag in self.waiting:
            assert self.pool.memory.pieces
            flag.value = True
        self.pool.close()
        assert not self.pool.memory.pieces
        assert self.pool._allocator.num_free == NUM_SLOTS - sum(entry.ready for entry in self.model.values())
        assert not any(block.num_readers for block in self.pool._index)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def stored(pool: Pool, keys: list[bytes]) -> None:
    pool.begin_store(keys).commit()


def test_a_longer_prompt_makes_its_kept_beginning_as_recent_as_its_end() -> None:
    """One turn of a talk after the other: what is kept of it must stay a prefix."""
    talk, other = [b"0", b"1", b"2", b"3"], [b"a", b"b"]
    with Pool(HostMemory(6, SLOT_BYTES)) as pool:
        stored(pool, talk[:2])
        stored(pool, talk)
        stored(pool, [b"x", b"y"])
        stored(pool, other)
        assert pool.lookup(talk) == 2  # the end of the talk went
        assert pool.stats().evicted == 2


def test_the_kept_beginning_is_recent_as_soon_as_a_store_begins() -> None:
    talk = [b"0", b"1", b"2", b"3"]
    with Pool(HostMemory(6, SLOT_BYTES)) as pool:
        stored(pool, talk[:2])
        stored(pool, [b"x", b"y"])
        store = pool.begin_store(talk)
        stored(pool, [b"a", b"b"])
        store.commit()
        assert (pool.lookup(talk), pool.lookup([b"x", b"y"])) == (4, 0)


def test_what_is_stored_again_is_recent() -> None:
    with Pool(HostMemory(4, SLOT_BYTES)) as pool:
        stored(pool, [b"0", b"1"])
        stored(pool, [b"x", b"y"])
        stored(pool, [b"0", b"1"])
        stored(pool, [b"a", b"b"])
        assert (pool.lookup([b"0", b"1"]), pool.lookup([b"x", b"y"])) == (2, 0)
