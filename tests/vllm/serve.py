"""One vLLM engine on the CPU with a tiny Llama of random weights, for one scenario; prints one line of JSON.

`python -m tests.vllm.serve SCENARIO`, where SCENARIO is JSON: `transfer`, vLLM's --kv-transfer-config or null;
`between`, what happens between the two rounds: "nothing" (the engine's own prefix cache serves the second one), "reset"
(only the host can), or "corrupt" (and some bytes of its slots are changed); `model`, a folder for the model; `sliding`,
whether every other layer sees a window of two blocks, which makes two KV cache groups.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 32
MARK = "result: "
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: Bytes of a block: K and V of all layers, in 32-bit numbers.
BLOCK_BYTES = 4 * 2 * 2 * 32 * BLOCK_TOKENS * 4
#: Tokens of the prompts: an even number of blocks and something more, so that chunks of two cover all blocks.
LENGTHS = (70, 133, 333)


def save_model(folder: Path, sliding: bool) -> None:
    """Weights large enough that each cached token changes the logits; those of load_format=dummy are not."""
    import torch
    from safetensors.torch import save_file

    random_bits = torch.Generator().manual_seed(5)
    hidden, wide, kv = 128, 256, 64
    shapes = {"model.embed_tokens.weight": (512, hidden), "lm_head.weight": (512, hidden)}
    for n in range(4):
        layer = f"model.layers.{n}."
        shapes |= {layer + f"self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {layer + f"self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {layer + f"mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        shapes[layer + "mlp.down_proj.weight"] = (hidden, wide)
    weights = {name: torch.randn(shape, generator=random_bits) / shape[1] ** 0.5 for name, shape in shapes.items()}
    norms = [f"model.layers.{n}.{which}_layernorm.weight" for n in range(4) for which in ("input", "post_attention")]
    weights |= {name: torch.ones(hidden) for name in [*norms, "model.norm.weight"]}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    window = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 2 * BLOCK_TOKENS}
    (folder / "config.json").write_text(json.dumps(CONFIG | (window if sliding else {})))


def prompts() -> list[list[int]]:
    some = random.Random(7)
    return [[some.randrange(3, CONFIG["vocab_size"]) for _ in range(length)] for length in LENGTHS]  # type: ignore[call-overload]


def engine(folder: Path, sliding: bool, transfer: dict[str, Any] | None) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    if not (folder / "config.json").exists():
        save_model(folder, sliding)
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=3,
        block_size=BLOCK_TOKENS,
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,
        enable_prefix_caching=True,
        num_gpu_blocks_override=128,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
    )


def round_of(llm: Any) -> list[dict[str, Any]]:
    """Tokens and logprobs of each prompt, one after the other, and how many tokens were not computed."""
    from vllm import SamplingParams

    found = []
    for prompt in prompts():
        asked = SamplingParams(temperature=0.0, max_tokens=8, logprobs=4, ignore_eos=True, detokenize=False)
        (out,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        (answer,) = out.outputs
        logprobs = [{str(token): of.logprob for token, of in step.items()} for step in answer.logprobs]
        found.append({"tokens": list(answer.token_ids), "logprobs": logprobs, "cached": out.num_cached_tokens})
    return found


def worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().connector_worker.worker


def settle(llm: Any) -> None:
    """Requests of less than a block: a store begins a step after the one that made it, and then its tiers are told."""
    from vllm import SamplingParams

    asked = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    for _ in range(3):
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], asked, use_tqdm=False)
        time.sleep(0.1)


def metrics() -> dict[str, float]:
    """What Prometheus would read of offloading, vLLM's and ours; labels of ours as name{a,b,c}."""
    from prometheus_client import REGISTRY

    found = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if "kv_offload" in sample.name or sample.name.startswith("dovetail"):
                own = [sample.labels[k] for k in ("direction", "path", "reason") if k in sample.labels]
                found[sample.name + ("{" + ",".join(own) + "}" if own else "")] = sample.value
    return found


def main() -> None:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    scenario = json.loads(sys.argv[1])
    llm = engine(Path(scenario["model"]), scenario["sliding"], scenario["transfer"])
    result: dict[str, Any] = {"first": round_of(llm)}
    settle(llm)
    if scenario["between"] != "nothing":
        assert llm.reset_prefix_cache()
    if scenario["between"] == "corrupt":
        memory = worker().transfers.memory
        for slot in range(memory.num_slots):
            memory.view(slot)[3::64] ^= 0x80  # the sign of some numbers
    result["second"] = round_of(llm)
    settle(llm)
    result["metrics"] = metrics()
    if scenario["transfer"]:
        made = worker()
        counts, memory = made.transfers.counts, made.transfers.memory
        result |= {"worker": type(made).__name__, "memory": type(memory).__name__, "slots": memory.num_slots}
        result["transfers"] = {",".join(cause): n for cause, n in counts.transfers.items()}
        result["bytes"] = {",".join(cause): n for cause, n in counts.size_bytes.items()}
    llm.llm_engine.engine_core.shutdown()
    result["closed"] = not (scenario["transfer"] and memory.pieces)
    print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
