"""`generate()` with caches in blocks: the tokens and logits of a plain cache, in whatever blocks, after whatever."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.llama import differ, generate, llama, prompt, same
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from dovetail.bench.serve.server import Scattered
from dovetail.errors import NotSupported
from dovetail.kv.transformers import CacheFull, KVShape, PagedCache, PagedMemory, shape

MODEL = llama()


pytestmark = pytest.mark.usefixtures("one_thread")


def memory(num_blocks: int = 32, *, scattered: bool = True) -> PagedMemory:
    """Full of no-numbers: what is read before it is written shows."""
    made = PagedMemory.for_model(MODEL, num_blocks, allocator=Scattered(num_blocks, 5) if scattered else None)
    made.tokens.fill_(float("nan"))
    return made


@pytest.mark.parametrize("scattered", [False, True], ids=["in a row", "scattered"])
@pytest.mark.parametrize("count", [1, 15, 16, 50])
def test_the_logits_of_a_plain_cache(count: int, scattered: bool) -> None:
    ids = prompt(count)
    blocks = memory(scattered=scattered)
    with PagedCache(blocks) as cache:
        assert same(generate(MODEL, ids, cache), generate(MODEL, ids))
        assert cache.get_seq_length() == count + 19
        assert len(cache.blocks) == -(-(count + 19) // 16)
    assert blocks.num_free == 32


def test_two_requests_in_turn_do_not_meet() -> None:
    blocks = memory()
    one, two = prompt(20, 1), prompt(30, 2)
    wanted = generate(MODEL, one), generate(MODEL, two)
    with PagedCache(blocks) as a, PagedCache(blocks) as b, torch.inference_mode():
        logits: list[list[Any]] = [[], []]
        for ids, cache, mine in ((one, a, logits[0]), (two, b, logits[1])):
            mine.append(MODEL(input_ids=ids, past_key_values=cache).logits[:, -1])
        for _ in range(19):
            for cache, mine in ((a, logits[0]), (b, logits[1])):
                step = mine[-1].argmax(-1, keepdim=True)
                mine.append(MODEL(input_ids=step, past_key_values=cache).logits[:, -1])
    for mine, right in zip(logits, wanted, strict=True):
        assert max((a - b).abs().max() for a, b in zip(mine, right.logits, strict=True)) < 1e-5


def test_a_batch_with_padding_and_beams() -> None:
    ids = prompt(24, 4, batch=2)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with PagedCache(memory(), num_sequences=2) as cache:
        assert same(generate(MODEL, ids, cache, attention_mask=mask), generate(MODEL, ids, attention_mask=mask))
    ids = prompt(24, 6)
    with PagedCache(memory(), num_sequences=3) as cache:
        ours = MODEL.generate(ids, past_key_values=cache, num_beams=3, max_new_tokens=12, do_sample=False)
    plain = MODEL.generate(ids, past_key_values=DynamicCache(), num_beams=3, max_new_tokens=12, do_sample=False)
    assert torch.equal(ours, plain)
    with PagedCache(memory()) as cache, pytest.raises(ValueError, match="of 1 sequences, a batch of 2 came"):
        generate(MODEL, prompt(4, batch=2), cache)


def test_crop_and_reset_go_back() -> None:
    ids = prompt(40, 7)
    with PagedCache(memory()) as cache:
        first = generate(MODEL, ids, cache)
        cache.crop(-(cache.get_seq_length() - 33))
        assert cache.get_seq_length() == 33
        assert differ(generate(MODEL, ids, cache), first) < 1e-5
        cache.reset()
        assert same(generate(MODEL, ids, cache), first)
        with pytest.raises(ValueError, match="crop takes a number below 0"):
            cache.crop(3)


def test_a_full_memory_says_so_before_anything_is_written() -> None:
    blocks = memory(4)
    before = blocks.tokens.clone()
    with PagedCache(blocks, num_tokens=33) as other:
        assert blocks.num_free == 1
        with PagedCache(blocks) as cache, pytest.raises(CacheFull, match="2 more blocks .* and 1 of 4 are free"):
            generate(MODEL, prompt(20), cache)
        with pytest.raises(CacheFull):
            PagedCache(blocks, num_tokens=17)
        assert (blocks.num_free, len(other.blocks)) == (1, 3)
    assert torch.equal(before.nan_to_num(1), blocks.tokens.nan_to_num(1))
    with pytest.raises(ValueError, match="the cache is closed"):
        other.pages.reserve(100)


def test_a_dropped_cache_gives_its_blocks_back() -> None:
    blocks = memory(4)
    with pytest.warns(ResourceWarning, match="dropped and not closed"):
        PagedCache(blocks, num_tokens=20)
    assert blocks.num_free == 4


def test_models_that_do_not_fit_are_refused() -> None:
    config = MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=16,
    )  # fmt: skip
    with pytest.raises(NotSupported, match="this model has sliding_attention"):
        PagedMemory.for_model(MistralForCausalLM(config), 4)
    with pytest.raises(ValueError, match="at least one layer"):
        KVShape(num_layers=0, num_heads=1, head_dim=8, dtype=torch.float32)
    with pytest.raises(ValueError, match="num_blocks is 0"):
        memory(0)


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    monkeypatch.setattr(transformers, "__version__", "5.16.9")
    with pytest.raises(NotSupported, match=r"needs transformers 5.17 or newer, not 5.16.9: pip install"):
        shape.require_version()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(NotSupported, match=r"needs transformers 5.17 or newer: pip install"):
        shape.require_version()


def test_importing_kv_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, dovetail.kv; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
