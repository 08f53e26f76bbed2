"""Prefixes across requests: what is fetched gives the logits of what is computed, and nothing is used too early."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.llama import LateMover, differ, generate, llama, prompt, same

from dovetail.bench.serve.server import Scattered
from dovetail.errors import HardwareError
from dovetail.kv import prefixes
from dovetail.kv.memory import HostMemory
from dovetail.kv.pool import Pool
from dovetail.kv.prefixes import Prefixes, _flat
from dovetail.kv.transformers import CacheFull, KVShape, PagedCache, PagedMemory, PrefixStore, order, prefix
from dovetail.kv.transformers.pages import Pages

MODEL = llama()
IDS = prompt(50)
ROUNDING = 1e-4  # of logits around 10: attention over a part of a prompt sums in another order


pytestmark = pytest.mark.usefixtures("one_thread")


def memory(num_blocks: int = 32) -> PagedMemory:
    return PagedMemory.for_model(MODEL, num_blocks, allocator=Scattered(num_blocks, 5))


def poison(blocks: PagedMemory) -> None:
    blocks.tokens.fill_(float("nan"))


def late(blocks: PagedMemory, layers: int | None = None, slots: int = 16) -> tuple[PrefixStore, LateMover]:
    """A store whose bytes land when somebody waits for them, no sooner."""
    host = HostMemory(slots, blocks.layout.slot_bytes)
    mover = LateMover(blocks.bytes(), _flat(host))
    kept = Prefixes(blocks.layout, Pool(host), mover, "cpu")
    return PrefixStore(blocks, kept=kept, layers=layers), mover


def serve(store: PrefixStore, ids: torch.Tensor, **options: Any) -> Any:
    """A request, kept afterwards."""
    with store.begin(ids, **options) as cache:
        said = generate(MODEL, ids, cache)
        store.keep(cache, said.sequences, **options).wait()
    return said


@pytest.mark.parametrize("layers", [None, 1, 3, 9])
def test_a_fetched_prefix_gives_the_logits_of_a_computed_one(layers: int | None) -> None:
    blocks = memory()
    plain = generate(MODEL, IDS)
    with PrefixStore(blocks, pool_bytes=1 << 20, layers=layers) as store:
        assert same(serve(store, IDS), plain)
        poison(blocks)
        with store.begin(IDS, room=20) as cache:
            assert cache.get_seq_length() == 48
            ours = generate(MODEL, IDS, cache)
        assert torch.equal(ours.sequences, plain.sequences)
        assert differ(ours, plain) < ROUNDING
        # The same two steps without a fetch have the same bits.
        with PagedCache(blocks) as cache, torch.inference_mode():
            MODEL(input_ids=IDS[:, :48], past_key_values=cache)
            assert same(generate(MODEL, IDS, cache), ours)


def test_answers_are_kept_too_and_a_token_is_always_left() -> None:
    with PrefixStore(memory(), pool_bytes=1 << 20) as store:
        said = serve(store, IDS)
        longer = torch.cat([said.sequences, prompt(9, 1)], dim=1)
        with store.begin(longer) as cache:
            assert cache.get_seq_length() == 64  # of 69 that were computed, the full blocks
            assert differ(generate(MODEL, longer, cache), generate(MODEL, longer)) < ROUNDING
        with store.begin(IDS[:, :48]) as cache:
            assert cache.get_seq_length() == 32
        with store.begin(IDS[0, :1].tolist()) as cache:
            assert cache.get_seq_length() == 0
        with pytest.raises(ValueError, match="at least one token"):
            store.begin([])
        with pytest.raises(ValueError, match="one row of token ids"):
            store.begin(prompt(8, batch=2))


def test_tenants_do_not_meet_and_eviction_costs_only_time() -> None:
    blocks = memory()
    one, two = prompt(40, 1), prompt(40, 2)
    with PrefixStore(blocks, pool_bytes=4 * blocks.layout.slot_bytes) as store:
        serve(store, one, salt=b"a")
        with store.begin(one, salt=b"b") as cache:
            assert cache.get_seq_length() == 0
        serve(store, two, salt=b"a")  # 3 of 4 slots: evicts most of the first
        assert store.kept.stats().evicted == 2
        poison(blocks)
        with store.begin(one, salt=b"a") as cache:
            assert cache.get_seq_length() == 16
            assert differ(generate(MODEL, one, cache), generate(MODEL, one)) < ROUNDING


@pytest.mark.parametrize("layers", [None, 1, 2])
def test_bytes_that_come_late_are_waited_for(layers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = memory()
    store, mover = late(blocks, layers)
    plain = serve(store, IDS)
    poison(blocks)
    with store.begin(IDS) as cache:
        assert all(direction == "store" for direction, _ in mover.log)
        assert differ(generate(MODEL, IDS, cache), plain) < ROUNDING
    poison(blocks)
    with monkeypatch.context() as patched:
        patched.setattr(order, "join", lambda *_: None)
        with store.begin(IDS) as cache:
            assert differ(generate(MODEL, IDS, cache), plain) == float("inf")  # so the wait is what made it right
    blocks.take(blocks.num_free)  # lands what was not waited for
    store.kept.close()


def test_each_layer_waits_for_its_own_part_only() -> None:
    blocks = memory()
    store, mover = late(blocks, layers=1)
    serve(store, IDS)
    mover.log.clear()
    seen = []
    hooks = [
        layer.mlp.register_forward_hook(lambda *_: seen.append(len(mover.log))) for layer in MODEL.model.layers
    ]
    with store.begin(IDS) as cache, torch.inference_mode():
        MODEL(input_ids=IDS[:, 48:], past_key_values=cache)
    for hook in hooks:
        hook.remove()
    assert seen == [1, 2, 3, 4]
    store.kept.close()


@pytest.mark.parametrize("layers", [None, 1])
def test_what_is_kept_before_it_has_arrived_is_stored_behind_it(layers: int | None) -> None:
    blocks = memory()
    store, _ = late(blocks, layers)
    plain = serve(store, IDS, salt=b"a")
    poison(blocks)
    with store.begin(IDS, salt=b"a") as cache:
        store.keep(cache, IDS, salt=b"b").wait()
    with store.begin(IDS, salt=b"b") as cache:
        assert cache.get_seq_length() == 48
        assert differ(generate(MODEL, IDS, cache), plain) < ROUNDING
    store.kept.close()


def test_blocks_under_a_store_are_not_used_before_it_has_landed() -> None:
    blocks = memory(8)
    store, mover = late(blocks)
    with store.begin(IDS) as cache:
        said = generate(MODEL, IDS, cache, new=2)
        mine = cache.blocks
        move = store.keep(cache, IDS)
    assert blocks.num_free == 8
    others = blocks.take(4)
    assert not set(others) & set(mine)
    assert not move.is_over()
    rest = blocks.take(4)  # these are under the store: whoever writes them comes after it
    assert set(rest) == set(mine)
    assert mover.log == [("store", 1)]
    poison(blocks)
    blocks.give(others + rest)
    with store.begin(IDS) as cache:
        assert cache.get_seq_length() == 48
        assert differ(generate(MODEL, IDS, cache, new=2), said) < ROUNDING
    store.kept.close()


def test_tokens_under_a_store_are_not_overwritten_after_a_crop() -> None:
    store, mover = late(memory())
    with store.begin(IDS) as cache:
        said = generate(MODEL, IDS, cache, new=2)
        store.keep(cache, IDS)
        cache.crop(-30)
        other = torch.cat([IDS[:, :21], prompt(20, 9)], dim=1)
        generate(MODEL, other, cache, new=2)  # writes into blocks that are being stored
        assert ("store", 1) in mover.log
    with store.begin(IDS) as cache:
        assert cache.get_seq_length() == 48
        assert differ(generate(MODEL, IDS, cache, new=2), said) < ROUNDING
    store.kept.close()


@pytest.mark.parametrize("error", [HardwareError, KeyboardInterrupt])
def test_a_fetch_that_fails_half_way_has_landed_before_others_get_its_blocks(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = memory(8)
    store, mover = late(blocks, layers=1)
    serve(store, IDS)
    mover.log.clear()
    submit, left = mover.submit, [2]

    def refuses(*given: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return submit(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(mover, "submit", refuses)
        with pytest.raises(error):
            store.begin(IDS)
    assert [direction for direction, _ in mover.log] == ["fetch", "fetch"]
    assert blocks.num_free == 8
    store.kept.close()


def test_blocks_of_a_fetch_that_does_not_land_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = memory(8)
    store, mover = late(blocks, layers=1)
    serve(store, IDS)
    monkeypatch.setattr(prefixes, "_LAND_S", 0.01)
    submit, busy = mover.submit, [True]

    def fails(*given: Any, **options: Any) -> Any:
        raise HardwareError("the driver refused")

    monkeypatch.setattr(mover, "is_idle", lambda direction: not busy[0])
    monkeypatch.setattr(mover, "submit", fails)
    with pytest.raises(HardwareError, match="the driver refused"):
        store.begin(IDS)
    assert blocks.num_free == 4
    monkeypatch.setattr(mover, "submit", submit)
    store.begin(prompt(20, 3)).close()
    assert blocks.num_free == 4
    busy[0] = False
    with store.begin(IDS, room=70):  # all of them
        assert blocks.num_free == 0
    store.kept.close()


def test_a_begin_that_is_interrupted_behind_its_fetch_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = memory(8)
    store, mover = late(blocks)
    serve(store, IDS)
    mover.log.clear()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Pages, "expect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.begin(IDS)
    assert mover.log == []
    blocks.give(blocks.take(8))
    assert [direction for direction, _ in mover.log] == ["fetch"]
    store.kept.close()


def test_a_full_memory_moves_nothing() -> None:
    blocks = memory(3)
    store, mover = late(blocks)
    with pytest.raises(CacheFull, match="4 more blocks of 16 tokens are needed and 3 of 3 are free"):
        store.begin(IDS)
    assert mover.log == []
    assert store.kept.stats().misses == 0
    with pytest.raises(ValueError, match="each block of the cache once|salt is 1 to 64 bytes"):
        store.begin(IDS[:, :20], salt=b"")
    assert blocks.num_free == 3  # the failed fetch holds nothing
    store.kept.close()


def test_arguments_that_make_no_sense() -> None:
    blocks = memory()
    with pytest.raises(ValueError, match="either pool_bytes or kept"):
        PrefixStore(blocks)
    with pytest.raises(ValueError, match="layers is 0"):
        PrefixStore(blocks, pool_bytes=1 << 20, layers=0)
    with PrefixStore(blocks, pool_bytes=1 << 20) as store, pytest.raises(ValueError, match="of its own memory"):
        store.keep(PagedCache(memory()), IDS)


def test_only_a_cache_that_is_open_and_has_these_tokens_is_kept() -> None:
    """Blocks of a closed cache are somebody else's by now; tokens of another prompt would be found by it later."""
    with PrefixStore(memory(), pool_bytes=1 << 20) as store:
        cache = store.begin(IDS, room=8)
        said = generate(MODEL, IDS, cache).sequences
        with pytest.raises(ValueError, match="it was begun with another prompt"):
            store.keep(cache, torch.zeros_like(said))
        cache.close()
        with pytest.raises(ValueError, match="the cache is closed, others have its blocks"):
            store.keep(cache, said)
        assert store.kept.stats().stored == 0


def test_how_many_layers_at_a_time() -> None:
    """A few of a long fetch that nobody else waits before; all of a short one, or behind others."""

    def shape(row_bytes: int, num_layers: int = 32) -> KVShape:
        heads = row_bytes // (16 * 2 * 128 * 2)
        return KVShape(num_layers=num_layers, num_heads=heads, head_dim=128, dtype=torch.bfloat16)

    # A copy for each block.
    assert [prefix.few_layers(shape(64 << 10), blocks, blocks) for blocks in (0, 16, 64, 512)] == [None, None, 8, 8]
    assert [prefix.few_layers(shape(32 << 10), blocks, blocks) for blocks in (64, 512)] == [16, 16]
    assert prefix.few_layers(shape(16 << 10), 4096, 4096) is None  # copies would be too short
    assert prefix.few_layers(shape(16 << 10, 80), 4096, 4096) == 32
    assert prefix.few_layers(shape(128 << 10, 5), 4096, 4096) == 4
    # Copies of several blocks.
    assert [prefix.few_layers(shape(16 << 10), 4096, runs) for runs in (1, 1024, 1536, 2048)] == [8, 8, 12, 16]
    assert prefix.few_layers(shape(8 << 10, 20), 4096, 1) == 8  # rows would be too short


def test_a_fetch_by_few_layers_is_told_how_few_copies_can_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(prefix, "few_layers", lambda shape, *given: told.append(given))
    store, mover = late(memory())
    store.layers = "auto"
    monkeypatch.setattr(mover, "fewest_copies", lambda path, num_blocks, num_runs: 100 * num_blocks + num_runs)
    serve(store, IDS)
    with store.begin(IDS):
        pass
    assert told == [(0, 0), (3, 301)]  # three blocks, in one run of slots


def test_layers_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_LONG_BYTES", 1)
    monkeypatch.setattr(prefix, "_COPY_BYTES", 1)
    monkeypatch.setattr(prefix, "_ROW_BYTES", 1)
    blocks = memory()
    plain = generate(MODEL, IDS)
    store, _ = late(blocks)
    with store:
        store.layers = "auto"
        serve(store, IDS)
        poison(blocks)
        one, two = store.begin(IDS, room=20), store.begin(IDS, room=20)
        assert [len(cache.pages.moves[0].parts) for cache in (one, two)] == [4, 1]
        for cache in (one, two):
            with cache:
                assert differ(generate(MODEL, IDS, cache), plain) < ROUNDING
        with store.begin(IDS) as three:  # nobody waits any more
            assert len(three.pages.moves[0].parts) == 4
    for wrong in (0, "all", 1.5):
        with pytest.raises(ValueError, match="it must be 1 or more, None for all at once, or 'auto'"):
            PrefixStore(blocks, pool_bytes=1 << 20, layers=wrong)  # type: ignore[arg-type]


def test_whether_the_gpu_computes_is_asked_before_the_stream_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that was just told to wait for blocks looks as if it had work to do."""
    blocks = memory()
    store, mover = late(blocks)
    with store:
        serve(store, IDS)
        told: list[object] = []
        submit, enter = mover.submit, order.Fence.enter
        monkeypatch.setattr(order, "is_computing", lambda device: (told.append("asked"), False)[1])
        monkeypatch.setattr(order.Fence, "enter", lambda fence: (told.append("waits"), enter(fence))[1])
        monkeypatch.setattr(
            mover, "submit", lambda *a, beside, **rest: (told.append(beside), submit(*a, beside=beside, **rest))[1]
        )
        store.begin(IDS).close()
    assert told == ["asked", "waits", False]
