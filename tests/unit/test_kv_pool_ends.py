"""How stores, fetches and the pool end: dropped, too late, in another thread, or in the middle of a call."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from dovetail.errors import DovetailError, HardwareError
from dovetail.kv import memory as kv_memory
from dovetail.kv.handles import NotStored, PoolError, PoolFull
from dovetail.kv.index import block_hashes
from dovetail.kv.memory import HostMemory
from dovetail.kv.policy import LRU
from dovetail.kv.pool import Pool, Stats

SLOT_BYTES = 64


def keys(number: int, prompt: int = 0) -> list[bytes]:
    return block_hashes([prompt] * number, 1, salt=b"salt")


def make(num_slots: int = 8, per_piece: int = 8, **more: Any) -> Pool:
    return Pool(HostMemory(num_slots, SLOT_BYTES, piece_bytes=per_piece * SLOT_BYTES), **more)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with make() as made:
        yield made


def fill(pool: Pool, number: int, prompt: int = 0) -> None:
    pool.begin_store(keys(number, prompt)).commit()


def test_store_lookup_fetch(pool: Pool) -> None:
    store = pool.begin_store(keys(3))
    assert (len(store), store.slots.tolist(), store.indices.tolist()) == (3, [0, 1, 2], [0, 1, 2])
    assert pool.lookup(keys(3)) == 0, "a block being written was served"
    with pytest.raises(NotStored, match="block 0 of a fetch of 3 is being written: fetch the first 0, or pass partial"):
        pool.begin_fetch(keys(3))
    assert len(pool.begin_store(keys(3))) == 0, "what another store writes is not written twice"
    store.commit()
    assert pool.lookup(keys(5)) == 3
    with pytest.raises(NotStored, match=r"block 3 of a fetch of 5 is not stored \(never, or evicted\)"):
        pool.begin_fetch(keys(5))
    fetch = pool.begin_fetch(keys(5), partial=True)
    assert (len(fetch), fetch.keys) == (3, keys(3))
    assert pool.stats().held == 3
    fetch.release()
    assert pool.stats() == Stats(
        hits=6, misses=7, stored=3, evicted=0, fetched=3, num_fetches=1, num_fetch_runs=1, slot_bytes=SLOT_BYTES,
        num_slots=8, free=5, writing=0, ready=3, held=0, quarantined=0,
    )  # fmt: skip


def test_a_longer_prompt_goes_on_where_the_shorter_ended() -> None:
    with make(20, per_piece=20) as pool:
        gap = pool.begin_store(keys(6))
        fill(pool, 2, prompt=1)
        gap.abort()
        store = pool.begin_store(keys(5, prompt=1))
        assert store.slots.tolist() == [8, 9, 10], "the gap of 6 is the tighter fit, and would cost a run"
        store.commit()
        pool.begin_fetch(keys(5, prompt=1)).release()
        assert pool.stats().runs_per_fetch == 1


def test_full_changes_nothing(pool: Pool) -> None:
    fill(pool, 4)
    fill(pool, 2, prompt=1)
    fetch, store = pool.begin_fetch(keys(2)), pool.begin_store(keys(1, prompt=2))
    before = pool.stats()
    with pytest.raises(PoolFull, match="needs 7 slots: of 8 are 1 free and 4 can be evicted") as caught:
        pool.begin_store(keys(7, prompt=3))
    assert "2 are held by fetches, 1 are being written, 0 wait" in str(caught.value)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (7, 1, 4)
    assert pool.stats() == before
    with pytest.raises(PoolFull):
        pool.begin_store(keys(9))
    store.abort()
    fetch.release()
    large = pool.begin_store(keys(7, prompt=3))
    assert len(large) == 7
    large.abort()
    assert pool.lookup(keys(4)) == 1, "the beginning of the prefix that was fetched last goes last"


def test_a_store_does_not_evict_its_own_prefix(pool: Pool) -> None:
    fill(pool, 8)
    with pytest.raises(PoolFull, match="needs 1 slots: of 8 are 0 free and 0 can be evicted"):
        pool.begin_store(keys(9))
    assert pool.lookup(keys(8)) == 8


def test_errors_travel() -> None:
    for error in (PoolFull("full", needed=3, free=2, evictable=1), NotStored("gone", num_ready=4)):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        assert isinstance(error, DovetailError)


@pytest.mark.parametrize("call", ["lookup", "begin_store", "begin_fetch"])
def test_bad_keys(pool: Pool, call: str) -> None:
    for wrong in (b"key", "key", [1, 2], ["key"]):
        with pytest.raises(TypeError, match="a sequence of bytes, one per block"):
            getattr(pool, call)(wrong)
    with pytest.raises(ValueError, match="3 keys, 2 of them different"):
        getattr(pool, call)([b"a", b"b", b"a"])
    assert pool.stats().free == 8


# --- dropped


def test_dropped_before_the_slots_were_seen(pool: Pool) -> None:
    store = pool.begin_store(keys(2))
    with pytest.warns(ResourceWarning, match="a store of 2 blocks was dropped and not ended$"):
        del store
    assert pool.stats().free == 8
    fill(pool, 2)
    fetch = pool.begin_fetch(keys(2))
    with pytest.warns(ResourceWarning, match="a fetch of 2 blocks was dropped and not ended$"):
        del fetch
    assert pool.stats().held == 0


def test_dropped_with_copies_that_nobody_can_see(caplog: pytest.LogCaptureFixture) -> None:
    pool = make()
    fill(pool, 2)
    store, fetch = pool.begin_store(keys(2, prompt=1)), pool.begin_fetch(keys(2))
    mapping = pool.memory.pieces[0].mapping
    assert len(store.slots) == len(fetch.slots) == 2
    with pytest.warns(ResourceWarning, match="a store of 2 blocks .*: its slots stay out of use, since copies may be"):
        del store
    with pytest.warns(ResourceWarning, match="a fetch of 2 blocks .*: its slots stay out of use"):
        del fetch
    now = pool.stats()
    assert (now.quarantined, now.held, now.writing) == (2, 2, 0)
    with pytest.raises(PoolFull, match="2 wait for the copies of stores that were given up"):
        pool.begin_store(keys(5, prompt=2))
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert "in flight: its memory stays" in caplog.text
    del pool
    gc.collect()
    assert not mapping.closed
    assert kv_memory._abandoned == [mapping]
    kv_memory._abandoned.clear()


def test_dropped_pool_asks_whether_copies_are_over() -> None:
    pool = make()
    over: list[int] = []
    pool.begin_store(keys(1)).abort(lambda: bool(over))
    pool.close()
    mapping = pool.memory.pieces[0].mapping
    over.append(1)
    with pytest.warns(ResourceWarning, match="8 slots of host memory were not closed"):
        del pool
    assert mapping.closed


def test_a_pool_that_was_never_made() -> None:
    nothing: Any = None
    with pytest.raises(AttributeError):
        Pool(nothing)


# --- closed


def test_use_after_close() -> None:
    pool = make()
    store = pool.begin_store(keys(1))
    pool.close()
    assert pool.closed
    for use in (pool.lookup, pool.begin_store, pool.begin_fetch):
        with pytest.raises(PoolError, match="the pool is closed: make a new one"):
            use(keys(1))  # type: ignore[operator]
    with pytest.raises(PoolError, match="closed"):
        pool.stats()
    with pytest.raises(PoolError, match=r"the pool is closed: abort\(\) this store"):
        store.commit()
    assert pool.memory.pieces, "a copy may still write"
    store.abort()
    assert not pool.memory.pieces
    pool.close()


def test_memory_closed_by_somebody_else(pool: Pool) -> None:
    pool.memory.close()
    with pytest.raises(HardwareError, match="closed"):
        pool.lookup(keys(1))


def test_a_forked_child_has_no_pool(pool: Pool) -> None:
    store = pool.begin_store(keys(1))
    with pool._lock:  # as if another thread held it at the fork
        child = os.fork()
        if not child:
            try:
                threading.Thread(target=pool.close).start()
                store.__del__()
                pool.lookup(keys(1))
            except HardwareError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.abort()


# --- called in the middle of a call


def test_a_done_that_fails_is_not_done(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception | bool] = [RuntimeError("lost device"), False, True]

    def done() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    pool.begin_store(keys(2)).abort(done)
    assert pool.stats().quarantined == 2
    assert "`done` of 2 blocks failed" in caplog.text
    assert pool.stats().quarantined == 2
    assert pool.stats().quarantined == 0


def test_a_store_waits_for_copies_only_as_it_must(pool: Pool) -> None:
    """Slots in quarantine are asked after before anything is evicted."""
    fill(pool, 4)
    asked: list[int] = []
    pool.begin_store(keys(4, prompt=1)).abort(lambda: bool(asked.append(1)) or len(asked) > 1)
    store = pool.begin_store(keys(2, prompt=2))
    assert (len(asked), pool.lookup(keys(4))) == (1, 2)
    store.abort()
    pool.begin_store(keys(6, prompt=3)).abort()
    assert len(asked) == 2
    assert pool.stats().evicted == 2


def test_reentry_is_refused_and_harmless(pool: Pool) -> None:
    caught: list[PoolError] = []

    def done() -> bool:
        for call in (pool.stats, pool.close, lambda: pool.lookup(keys(1))):
            with pytest.raises(PoolError, match="called by its own policy") as refused:
                call()
            caught.append(refused.value)
        held.release()  # ending is allowed anywhere
        return True

    fill(pool, 1)
    held = pool.begin_fetch(keys(1))
    pool.begin_store(keys(1, prompt=1)).abort(done)
    assert pool.stats().held == 1, "acted on only when the call that was in the way is over"
    assert len(caught) == 3
    assert not pool.closed
    assert pool.stats().held == 0


@pytest.mark.parametrize(
    "give",
    [lambda n, all_: all_[:1] * n, lambda n, all_: [b"unknown"] * n, lambda n, all_: all_[: n + 1]],
    ids=["one twice", "unknown", "too many"],
)
def test_a_policy_that_misbehaves(give: Callable[[int, list[bytes]], list[bytes]]) -> None:
    class Odd(LRU):
        def victims(self, number: int, allowed: Callable[[bytes], bool]) -> Sequence[bytes]:
            return give(number, list(super().victims(99, allowed)))

    with make(policy=Odd()) as pool:
        fill(pool, 8)
        before = pool.stats()
        with pytest.raises(PoolError, match=r"Odd.victims\(2\) gave . keys, . of them allowed: it may give 2"):
            pool.begin_store(keys(2, prompt=1))
        assert pool.stats() == before
        assert pool.lookup(keys(8)) == 8


def test_another_policy_decides() -> None:
    class MRU(LRU):
        def victims(self, number: int, allowed: Callable[[bytes], bool]) -> Sequence[bytes]:
            return list(super().victims(1 << 30, allowed))[-number:]

    with make(policy=MRU()) as pool:
        fill(pool, 4)
        fill(pool, 4, prompt=1)
        fill(pool, 2, prompt=2)
        assert [pool.lookup(keys(4, prompt)) for prompt in range(3)] == [4, 0, 2]


# --- threads


def test_threads() -> None:
    """Writers, readers and copies that end late, all at once: every block read is whole, nothing is lost."""
    pool = make(48, per_piece=10)
    failures: list[BaseException] = []
    prompts = [block_hashes([k % 3, k, *range(9)], 1, salt=b"salt") for k in range(12)]
    deadline = time.monotonic() + 1.0
    late: list[threading.Event] = []
    counts = {"read": 0, "written": 0, "full": 0}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        while time.monotonic() < deadline and not failures:
            chain = rng.choice(prompts)
            fetch = pool.begin_fetch(chain, partial=True)
            for key, slot in zip(fetch.keys, fetch.slots, strict=True):
                view = pool.memory.view(int(slot))
                assert view.tobytes() == key * 2
            counts["read"] += len(fetch)
            fetch.release()
            try:
                store = pool.begin_store(chain[: rng.randint(1, len(chain))])
            except PoolFull:
                counts["full"] += 1
                continue
            half = [pool.memory.view(int(slot)) for slot in store.slots]
            for view, key in zip(half, store.keys, strict=True):
                view[:32] = np.frombuffer(key, np.uint8)
            if rng.random() < 0.2:
                flag = threading.Event()
                store.abort(flag.is_set)
                for view in half:
                    view[:] = 255  # still ours: it is not over
                flag.set()
                late.append(flag)
                continue
            for view, key in zip(half, store.keys, strict=True):
                view[32:] = np.frombuffer(key, np.uint8)
            store.commit()
            counts["written"] += len(store)

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    print(counts, f"{len(late)} ended late")
    now = pool.stats()
    assert (now.writing, now.held, now.quarantined, now.stored) == (0, 0, 0, now.evicted + now.ready)
    assert now.free + now.ready == 48
    assert now.evicted > 0
    assert counts["read"] > 0
    pool.close()
    assert not pool.memory.pieces


def test_ending_does_not_wait_for_the_lock(pool: Pool) -> None:
    fill(pool, 1)
    fetch, holding, go_on = pool.begin_fetch(keys(1)), threading.Event(), threading.Event()
    let_go: list[bool] = []

    def hold() -> bool:
        holding.set()
        let_go.append(go_on.wait(10))
        return True

    pool.begin_store(keys(1, prompt=1)).abort(hold)
    thread = threading.Thread(target=pool.stats)
    thread.start()
    assert holding.wait(20)
    fetch.release()
    go_on.set()
    thread.join(20)
    assert let_go == [True], "release() waited for the lock"
    assert not pool._ended, "whoever held the lock acts on it"
    assert pool.stats().held == 0
