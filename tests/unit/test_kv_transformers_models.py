"""One memory, one model: another is refused, nothing of it is kept, and the right one goes on as if it never came."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.llama import differ, generate, llama, prompt, same

from dovetail.kv.transformers import KVShape, OffloadedCache, PagedCache, PagedMemory, PrefixStore, Steps

MODEL = llama()
IDS = prompt(50)
ROUNDING = 1e-4  # of logits around 10
FEWER, MORE = llama(2), llama(6)
STRANGERS = {
    "fewer layers": (FEWER, "2 layers, 2 KV heads, head dim 16, torch.float32"),
    "more layers": (MORE, "6 layers, 2 KV heads, head dim 16, torch.float32"),
    "one head, which would be copied to all": (
        llama(num_key_value_heads=1), "4 layers, 1 KV heads, head dim 16, torch.float32"
    ),
    "more heads": (llama(num_key_value_heads=4), "4 layers, 4 KV heads, head dim 16, torch.float32"),
    "wider heads": (llama(head_dim=32), "4 layers, 2 KV heads, head dim 32, torch.float32"),
    "bfloat16": (llama().to(torch.bfloat16), "4 layers, 2 KV heads, head dim 16, torch.bfloat16"),
}  # fmt: skip
SEEN = {  # where it shows in K and V
    "fewer layers": "the last pass came through 2 of these layers",
    "more layers": "a model of 5 or more layers came",
}
MADE_FOR = "this memory was made for a model of 4 layers, 2 KV heads, head dim 16, torch.float32; "
ADVICE = ": make a memory for each model, PagedMemory.for_model(model, num_blocks)"

pytestmark = pytest.mark.usefixtures("one_thread")
each = pytest.mark.parametrize("name", STRANGERS)


def refused(found: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(MADE_FOR) + ".*" + re.escape(found) + ".*" + re.escape(ADVICE))


def seen(name: str) -> str:
    return SEEN.get(name, "layer 0 came with " + STRANGERS[name][1].partition(", ")[2])


def memory(num_blocks: int = 32) -> PagedMemory:
    """Full of no-numbers: what is read before it is written shows."""
    made = PagedMemory.for_model(MODEL, num_blocks)
    made.tokens.fill_(float("nan"))
    return made


def step(model: Any, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
    """One forward pass."""
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, past_key_values=cache).logits
    return found


@each
def test_generate_with_another_model_is_refused_and_nothing_is_kept(name: str) -> None:
    plain = generate(MODEL, IDS)
    with PrefixStore(memory(), pool_bytes=1 << 20) as store:
        with store.begin(IDS, room=20) as cache:
            with refused(seen(name)):
                generate(STRANGERS[name][0], IDS, cache)
            assert cache.get_seq_length() == 0
            store.keep(cache, IDS)
        assert store.kept.stats().stored == 0
        with store.begin(IDS, room=20) as cache:
            assert cache.get_seq_length() == 0
            assert same(generate(MODEL, IDS, cache), plain)
            store.keep(cache, plain.sequences)


@each
def test_what_is_kept_is_not_for_another_model(name: str) -> None:
    """And it stays as it was: the cache that the stranger had, and a new one, still give the right logits."""
    plain = generate(MODEL, IDS)
    with PrefixStore(memory(), pool_bytes=1 << 20) as store:
        with store.begin(IDS, room=20) as cache:
            generate(MODEL, IDS, cache)
            store.keep(cache, IDS)
        with store.begin(IDS, room=20) as cache:
            with refused(seen(name)):
                generate(STRANGERS[name][0], IDS, cache)
            assert cache.get_seq_length() == 48
            assert differ(generate(MODEL, IDS, cache), plain) < ROUNDING
        assert store.kept.stats().stored == 3
        with store.begin(IDS, room=20) as cache:
            assert differ(generate(MODEL, IDS, cache), plain) < ROUNDING


def test_keep_refuses_a_pass_through_a_part_of_the_layers() -> None:
    """Blocks would be kept whose last layers were never written."""
    with PrefixStore(memory(), pool_bytes=1 << 20) as store, store.begin(IDS) as cache:
        step(FEWER, IDS, cache)
        with refused("the last pass came through 2 of these layers"):
            store.keep(cache, IDS)
        assert (store.kept.stats().stored, cache.get_seq_length()) == (0, 0)


def test_a_single_pass_behind_a_fetched_prefix_is_refused_at_the_end() -> None:
    """Nothing else is asked of the cache: what the pass has read was another model's, and its token is wrong."""
    with PrefixStore(memory(), pool_bytes=1 << 20) as store:
        with store.begin(IDS) as cache:
            generate(MODEL, IDS, cache)
            store.keep(cache, IDS)
        with refused("the last pass came through 2 of these layers"), store.begin(IDS) as cache:
            generate(FEWER, IDS, cache, new=1)
        assert not cache.pages.is_open

        def fail() -> None:
            with store.begin(IDS) as cache:
                step(FEWER, IDS[:, 48:], cache)
                raise KeyError("the caller's own error")

        with pytest.raises(KeyError, match="the caller's own error"):
            fail()
        with store.begin(prompt(50, 9)) as cache:  # nothing was read: its token is right
            assert same(generate(FEWER, prompt(50, 9), cache, new=1), generate(FEWER, prompt(50, 9), new=1))


@each
def test_steps_of_another_model_are_refused(name: str) -> None:
    model, shape = STRANGERS[name]
    with refused(f"LlamaForCausalLM has {shape}"):
        Steps(model, memory())


@pytest.mark.parametrize("count", [3, 40], ids=["short", "long"])
def test_steps_of_a_model_that_was_cast_are_refused(count: int) -> None:
    taken = Steps(model := llama(), blocks := memory(), most_tokens=16)
    model.to(torch.bfloat16)
    with PagedCache(blocks) as cache:
        with refused("layer 0 came with 2 KV heads, head dim 16, torch.bfloat16"):
            taken(prompt(count), cache)
        assert cache.get_seq_length() == 0
    assert bool(blocks.tokens.isnan().all())


def test_steps_do_not_go_on_behind_another_model() -> None:
    taken = Steps(MODEL, blocks := memory())
    with PagedCache(blocks) as cache, PagedCache(blocks) as other:
        right = taken(IDS, cache)
        taken([1], other)
        step(FEWER, IDS, cache)
        with refused("the last pass came through 2 of these layers"):
            taken.decode([1, 2], [other, cache])
        assert (cache.get_seq_length(), other.get_seq_length()) == (50, 1)
        cache.reset()
        assert torch.equal(taken(IDS, cache), right)


def test_a_pass_that_was_cut_off_is_called_again() -> None:
    """Its tokens would be there twice in the first layers."""
    with PagedCache(memory()) as cache:
        right = step(MODEL, IDS, cache)
        cache.reset()
        hook = MODEL.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(MODEL, IDS, cache)
        hook.remove()
        with refused("or was cut off (its tokens are forgotten, compute them again)"):
            step(MODEL, IDS, cache)
        assert torch.equal(step(MODEL, IDS, cache), right)


def test_k_and_v_of_different_widths_are_refused() -> None:
    states = [torch.ones(1, 2, 5, width) for width in (16, 1)]
    with PagedCache(blocks := memory()) as cache:
        with refused("layer 0 came with K 2 KV heads, head dim 16, torch.float32; V 2 KV heads, head dim 1, torch."):
            cache.update(*states, 0)
        assert blocks.num_free == 32


def test_autocast_is_no_other_model() -> None:
    """It gives V in bfloat16 and K, behind the rotation, in float32."""
    with torch.autocast("cpu", torch.bfloat16), PagedCache(blocks := memory()) as cache:
        assert same(generate(MODEL, IDS, cache), generate(MODEL, IDS))
        Steps(llama().to(torch.bfloat16), blocks)  # what it gives K and V in shows in its first step


@each
def test_an_offloaded_cache_is_for_one_model(name: str) -> None:
    """A model with one KV head for the cache's two would have been taken: a copy of one into two is none to torch."""
    advice = ": make a cache for each model, OffloadedCache.for_model(model, max_tokens)"
    with OffloadedCache.for_model(MODEL, 80, device_bytes=2 * 5 * KVShape.of(MODEL).row_bytes) as cache:
        first = generate(MODEL, IDS, cache, new=2)
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match=re.escape(seen(name)) + ".*" + re.escape(advice)):
            generate(STRANGERS[name][0], torch.cat([IDS, IDS[:, :9]], dim=1), cache)
        assert {layer.length for layer in cache.layers} == {before}
        longer = torch.cat([first.sequences, prompt(5, 3)], dim=1)
        assert differ(generate(MODEL, longer, cache, new=3), generate(MODEL, longer, new=3)) < ROUNDING


def test_an_offloaded_cache_after_a_pass_through_a_part_of_the_layers() -> None:
    with OffloadedCache.for_model(MODEL, 80) as cache:
        with torch.inference_mode():
            FEWER(input_ids=IDS, past_key_values=cache)
        with pytest.raises(ValueError, match="the last pass came through 2 of these layers"):
            generate(MODEL, torch.cat([IDS, IDS[:, :1]], dim=1), cache)
        assert cache.get_seq_length() == 0
        assert same(generate(MODEL, IDS, cache), generate(MODEL, IDS))
