"""Two prompts that begin alike, and a context in host memory. Run: python examples/06_transformers_cache.py

A Llama of a few kilobytes with random weights, on the CPU, so it runs anywhere; for a model on a GPU the code is the
same. Needs transformers 5.17 or newer.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail.kv.transformers import OffloadedCache, PagedMemory, PrefixStore


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    system = torch.randint(0, 128, (1, 100))
    questions = [torch.cat([system, torch.randint(0, 128, (1, 20))], dim=1) for _ in range(2)]

    # Blocks for all requests, and prefixes of prompts in host memory (pinned, where the blocks are on a GPU).
    memory = PagedMemory.for_model(model, num_blocks=64)
    with PrefixStore(memory, pool_bytes=16 << 20) as store:
        for question in questions:
            with store.begin(question, room=8) as cache:
                print(f"{cache.get_seq_length()} of {question.shape[1]} tokens are kept from before")
                answer = model.generate(question, past_key_values=cache, **greedy)
                store.keep(cache, answer)
            assert torch.equal(answer, model.generate(question, **greedy))

    # A context in host memory: two layers of it are on the device at a time, the next one arrives meanwhile.
    with OffloadedCache.for_model(model, max_tokens=128) as cache:
        answer = model.generate(questions[0], past_key_values=cache, **greedy)
        print(f"{cache.device_bytes} bytes on the device hold {cache.get_seq_length()} tokens of 6 layers in turn")
    assert torch.equal(answer, model.generate(questions[0], **greedy))


if __name__ == "__main__":
    main()
