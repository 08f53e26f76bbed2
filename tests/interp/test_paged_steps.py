"""Steps of whole models with attention over blocks, under Triton's interpreter; and models that it does not fit."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.interp.child import printed

CASES = ["llama", "qwen3", "diffllama", "falcon", "threads"]


def test_the_logits_of_the_model(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    need("transformers", importlib.util.find_spec("transformers"))
    assert printed(__file__) == ["right"] * len(CASES)


SIZE: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZE |= {"initializer_range": 0.2}
LLAMA = {**SIZE, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}


def model(name: str) -> tuple[Any, bool]:
    """And whether its attention may be over blocks: if not, that must be found out."""
    import transformers as of

    torch.manual_seed(3)
    match name:
        case "qwen3":
            return of.Qwen3ForCausalLM(of.Qwen3Config(**LLAMA)).eval(), True
        case "diffllama":  # rearranges V
            return of.DiffLlamaForCausalLM(of.DiffLlamaConfig(**LLAMA)).eval(), False
        case "falcon":  # does not look attention up
            return of.FalconForCausalLM(of.FalconConfig(**SIZE, multi_query=False, alibi=False)).eval(), False
        case _:
            return of.LlamaForCausalLM(of.LlamaConfig(**LLAMA)).eval(), True


def run(name: str) -> str:
    """What is wrong, or "right"."""
    from dovetail.bench.serve.server import Scattered
    from dovetail.kv.transformers import PagedCache, PagedMemory, Steps, attention

    made, paged = model(name)
    attention.fits = lambda model, memory: True  # type: ignore[assignment]
    memory = PagedMemory.for_model(made, 16, allocator=Scattered(16, 1))
    memory.tokens.fill_(float("nan"))
    steps = Steps(made, memory)
    ids = torch.randint(1, 128, (1, 60), generator=torch.Generator().manual_seed(1))
    if name == "threads":
        return threads(steps, made, ids)
    with PagedCache(memory) as cache, torch.inference_mode():
        begin = 0
        for end in (40, 45, 46, 60):
            found = steps(ids[:, begin:end], cache)
            error = (found - made(input_ids=ids[:, :end]).logits[0, -1]).abs().nan_to_num(float("inf")).max().item()
            if error > 1e-3:
                return f"{name} to {end}: off by {error}"
            begin = end
        if error := together(steps, made, ids):
            return f"{name}: {error}"
    return "right" if steps.paged is paged else f"{name}: paged is {steps.paged}"


def together(steps: Any, made: Any, ids: torch.Tensor) -> str:
    """Requests of different lengths, decoded at once: three, then more than a step may have."""
    for lengths, most in ([30, 5, 47], 256), ([3, 20, 9, 17, 2], 2):
        steps.most_tokens = most
        if error := decoded(steps, made, ids, lengths):
            return f"{error} ({lengths})"
        apart = {tokens for tokens, _, apart in steps._forms if apart}
        if steps.paged and apart != ({4} if most == 256 else {4, 2}):
            return f"decoded together: {apart}"
    return ""


def decoded(steps: Any, made: Any, ids: torch.Tensor, lengths: list[int]) -> str:
    from dovetail.kv.transformers import PagedCache

    caches = [PagedCache(steps.memory) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        steps(ids[:, :length], cache)
    for turn in range(3):
        found = steps.decode(ids[0, [length + turn for length in lengths]], caches)
        right = torch.stack([made(input_ids=ids[:, : length + turn + 1]).logits[0, -1] for length in lengths])
        error = (found - right).abs().nan_to_num(float("inf")).max().item()
        if error > 1e-3:
            return f"together, turn {turn}: off by {error}"
    for cache in caches:
        cache.close()
    return ""


def threads(steps: Any, made: Any, ids: torch.Tensor) -> str:
    """The model itself in another thread, while a step has changed its attention: padded, and behind a cache."""
    from transformers import DynamicCache

    from dovetail.kv.transformers import PagedCache, attention

    found: list[torch.Tensor] = []
    mask = torch.ones_like(ids)
    mask[0, :9] = 0

    def plain() -> None:
        with torch.inference_mode():
            padded = made(input_ids=ids, attention_mask=mask).logits[0, -1]
            made(input_ids=ids[:, :20], past_key_values=(cache := DynamicCache(config=made.config)))
            found.append(torch.stack([padded, made(input_ids=ids[:, 20:], past_key_values=cache).logits[0, -1]]))

    plain()
    attend, others = attention.attend, []

    def meanwhile(*args: Any) -> torch.Tensor:
        if not others:
            others.append(threading.Thread(target=plain))
            others[0].start()
            others[0].join()
        return attend(*args)

    attention.attend = meanwhile  # type: ignore[assignment]
    with PagedCache(steps.memory) as cache:
        steps(ids[:, :4], cache)
    return "right" if len(found) == 2 and torch.equal(*found) else f"threads: {len(found)} results, or others"


if __name__ == "__main__":
    for case in CASES:
        print(run(case))
