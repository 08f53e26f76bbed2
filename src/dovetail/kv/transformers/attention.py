"""Attention of a model of transformers over tokens where they lie: no K and V are gathered, none repeated.

transformers looks attention up by name; while a step is computed its name is ours. Where the kernel does not fit, the
model's own attention is given K and V as tensors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from dovetail.errors import NotSupported
from dovetail.kv.transformers.memory import PagedMemory

_NAME = "dovetail_paged"
_KINDS = (torch.float16, torch.bfloat16)
_KEYS = 64  # tokens at a time
_LEAST_TILE, _MOST_TILE = 16, 64  # queries of a program
_MOST_PARTS = 64
#: What changes the weights of attention, and is not in the kernel.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens that a step sees: token n is number rows[n] of a memory; query s sees those up to positions[s]."""

    memory: PagedMemory
    rows: torch.Tensor
    positions: torch.Tensor


_current: ContextVar[Context] = ContextVar("tokens that attention sees")


def fits(model: Any, memory: PagedMemory) -> bool:
    """Whether the kernel computes what the model's own attention would."""
    shape, config = memory.shape, model.config.get_text_config(decoder=True)
    width = shape.head_dim
    return (
        memory.device.type == "cuda"
        and shape.dtype in _KINDS
        and width == 1 << (width.bit_length() - 1)
        and 16 <= width <= 256
        and config._attn_implementation == "sdpa"
        and config.num_attention_heads % shape.num_heads == 0
    )


@contextlib.contextmanager
def over(context: Context, model: Any) -> Iterator[None]:
    """Within it the attention of `model` is over these tokens."""
    config = model.config.get_text_config(decoder=True)
    before, config._attn_implementation = config._attn_implementation, _NAME
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
        config._attn_implementation = before


def _forward(
    module: Any, query: torch.Tensor, key: Any, value: Any, mask: Any, *, scaling: float | None = None, **rest: Any
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: [1, heads, S, D] to [1, S, heads, D]."""
    strange = [name for name in _UNKNOWN if rest.get(name) is not None]
    if strange:
        raise NotSupported(f"attention with {', '.join(strange)} can't be over blocks: Steps(..., paged=False)")
    context = _current.get()
    tokens = context.memory.tokens[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query[0], tokens, context.rows, context.positions, scale).unsqueeze(0), None


def attend(
    queries: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Queries [heads, S, D] over `tokens` [any, 2, H, D], of which rows[n] is token n; [S, heads, D]."""
    from dovetail.kv.kernels.attend import attend_kernel, merge_kernel

    num_query_heads, num_tokens, width = queries.shape
    num_heads = tokens.shape[2]
    group = num_query_heads // num_heads
    if queries.stride(2) != 1:
        queries = queries.contiguous()
    tile = min(_MOST_TILE, max(_LEAST_TILE, 1 << (num_tokens * group - 1).bit_length()))
    tiles = -(-num_tokens * group // tile)
    parts = num_parts(tiles * num_heads, tokens.device)
    same: dict[str, Any] = {
        "NUM_TOKENS": num_tokens, "NUM_HEADS": num_heads, "GROUP": group, "WIDTH": width, "PARTS": parts
    }  # fmt: skip
    size = (parts, num_heads, num_tokens * group)
    found = torch.empty((*size, width), dtype=torch.float32, device=tokens.device)
    weights = torch.empty(size, dtype=torch.float32, device=tokens.device)
    attend_kernel[(tiles, num_heads, parts)](
        queries, queries.stride(0), queries.stride(1), tokens, rows, positions, found, weights,
        scale * math.log2(math.e), **same, TILE=tile, KEYS=_KEYS, num_warps=4, num_stages=3,
    )  # fmt: skip
    out = torch.empty((num_tokens, num_query_heads, width), dtype=queries.dtype, device=tokens.device)
    merge_kernel[(num_tokens, num_query_heads)](found, weights, out, **same)
    return out


def num_parts(programs: int, device: torch.device) -> int:
    """A power of two, such that two programs come to a multiprocessor."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    wanted = max(1, 2 * cores // programs)
    return min(_MOST_PARTS, 1 << (wanted.bit_length() - 1))


AttentionInterface.register(_NAME, _forward)
