"""Models to serve, by shape: random weights, since what they say is of no matter here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.kv.models import BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A Llama of some shape."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    dtype: str
    note: str

    @property
    def row_bytes(self) -> int:
        """Of a block in one layer: the page that engines copy."""
        return BLOCK_TOKENS * 2 * self.num_kv_heads * self.head_dim * (4 if self.dtype == "float32" else 2)

    @property
    def block_bytes(self) -> int:
        """Of a block, over all layers."""
        return self.num_layers * self.row_bytes

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // BLOCK_TOKENS)


def _llama_8b(name: str, num_kv_heads: int, note: str) -> ServedModel:
    return ServedModel(
        name=name, num_layers=32, hidden=4096, intermediate=14336, num_heads=32, num_kv_heads=num_kv_heads,
        head_dim=128, vocabulary=128256, dtype="bfloat16", note=note,
    )  # fmt: skip


MODELS = {
    m.name: m
    for m in (
        _llama_8b("llama-8b", 8, "Llama-8B: pages of 64 KB"),
        _llama_8b("llama-8b-tp4", 2, "Llama-8B with 2 KV heads: pages of 16 KB as on a rank of four, the rest whole"),
        ServedModel(
            name="tiny", num_layers=4, hidden=256, intermediate=512, num_heads=8, num_kv_heads=4, head_dim=32,
            vocabulary=1000, dtype="float32", note="for a CPU: pages of 16 KB",
        ),
    )
}  # fmt: skip


def served_model(name: str) -> ServedModel:
    """A model by name."""
    if name not in MODELS:
        raise ValueError(f"--model: {name!r} is not one of {', '.join(MODELS)}")
    return MODELS[name]


def build(shape: ServedModel, device: str, seed: int) -> Any:
    """The model of transformers, with random weights made on the device. No download."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads, head_dim=shape.head_dim, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        made: Any = LlamaForCausalLM._from_config(config, dtype=getattr(torch, shape.dtype))
    return made.eval()
