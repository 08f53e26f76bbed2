"""Attention of a model of transformers over tokens where they lie: no K and V are gathered, none repeated.

transformers looks attention up by name; while a step is computed its name is ours. A model that does something else
with K and V than to hand them to attention is found out then: each layer must come here once, with what its cache
returned and no other mask.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from dovetail.errors import NotSupported
from dovetail.kv.transformers.memory import PagedMemory

_NAME = "dovetail_paged"
_INSTEAD_OF = "sdpa"
_KINDS = (torch.float16, torch.bfloat16)
_LEAST_CAPABILITY = (8, 0)
_KEYS = 64  # tokens at a time
_LEAST_TILE, _MOST_TILE = 16, 64  # queries of a program
_WIDE = 256  # heads for which less fits into a multiprocessor
_MOST_PARTS = 64
#: What changes the weights of attention, and is not in the kernel.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "sliding_window")


class Unfit(NotSupported):
    """The model's attention is not of a kind that the kernel computes."""


class Context:
    """Tokens that a step sees: those of `rows`, in a memory; query s sees them up to positions[s] (see `attend`)."""

    def __init__(self, memory: PagedMemory, rows: torch.Tensor, positions: torch.Tensor) -> None:
        self.memory, self.rows, self.positions = memory, rows, positions
        #: Stands for a mask, which is not needed: a model that makes another one of it is found out.
        self.mask = torch.zeros((1, 1, 1, 1), dtype=memory.shape.dtype, device=rows.device)
        self._handed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._seen: set[int] = set()

    def hand(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """What the cache returns to a layer."""
        self._handed[layer] = keys, values

    def check(self, layer: int, keys: Any, values: Any, mask: Any) -> None:
        """Raises `Unfit` unless a layer's attention was given that."""
        handed = self._handed.pop(layer, (None, None))
        if keys is not handed[0] or values is not handed[1] or mask is not self.mask:
            raise Unfit("attention over blocks needs K, V and the mask as they are, this model changes them")
        self._seen.add(layer)

    def finish(self) -> None:
        """Raises `Unfit` if a layer did not come."""
        if len(self._seen) != self.memory.shape.num_layers:
            raise Unfit("attention over blocks needs layers that look it up in transformers, this model's don't")


_current: ContextVar[Context | None] = ContextVar("tokens that attention sees", default=None)
_turn = threading.RLock()  # a configuration is changed by one at a time


def fits(model: Any, memory: PagedMemory) -> bool:
    """Whether the kernel runs here, and may compute what the model's own attention would."""
    shape, config = memory.shape, model.config.get_text_config(decoder=True)
    width = shape.head_dim
    return (
        _has_kernel(memory.device)
        and shape.dtype in _KINDS
        and width == 1 << (width.bit_length() - 1)
        and 16 <= width <= _WIDE
        and config._attn_implementation == _INSTEAD_OF
        and config.num_attention_heads % shape.num_heads == 0
    )


def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False  # not yet run with HIP
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


@contextlib.contextmanager
def over(context: Context, model: Any) -> Iterator[None]:
    """Within it the attention of `model` is over these tokens.

    Raises:
        Unfit: it was not, in some layer.
    """
    config = model.config.get_text_config(decoder=True)
    with _turn:
        before, config._attn_implementation = config._attn_implementation, _NAME
        token = _current.set(context)
        try:
            yield
        finally:
            _current.reset(token)
            config._attn_implementation = before
    context.finish()


def _forward(
    module: Any,
    query: torch.Tensor,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: [1, heads, S, D] to [1, S, heads, D]."""
    context = _current.get()
    if context is None:  # another thread computes with the same model
        plain: Any = sdpa_attention_forward
        found: tuple[torch.Tensor, None] = plain(module, query, key, value, attention_mask, scaling=scaling, **rest)
        return found
    context.check(module.layer_idx, key, value, attention_mask)
    strange = [name for name in _UNKNOWN if rest.get(name) is not None]
    if strange:
        raise Unfit(f"attention with {', '.join(strange)} can't be over blocks")
    tokens = context.memory.tokens[module.layer_idx]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(query[0], tokens, context.rows, context.positions, scale).unsqueeze(0), None


def attend(
    queries: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Queries [heads, S, D] over `tokens` [any, 2, H, D]; [S, heads, D].

    `rows` is [1, C], and rows[0, n] is token n of the sequence that all queries are of; or [S, C], and query s is of
    the sequence whose token n is rows[s, n].
    """
    from dovetail.kv.kernels.attend import attend_kernel, merge_kernel

    num_query_heads, num_tokens, width = queries.shape
    num_heads = tokens.shape[2]
    group = num_query_heads // num_heads
    if queries.stride(2) != 1:
        queries = queries.contiguous()
    apart = len(rows) > 1
    most = _MOST_TILE if width < _WIDE else _MOST_TILE // 2
    together = group if apart else num_tokens * group
    tile = min(most, max(_LEAST_TILE, 1 << (together - 1).bit_length()))
    tiles = -(-together // tile) * (num_tokens if apart else 1)
    parts = num_parts(tiles * num_heads, tokens.device)
    same: dict[str, Any] = {
        "NUM_TOKENS": num_tokens, "NUM_HEADS": num_heads, "GROUP": group, "WIDTH": width, "PARTS": parts
    }  # fmt: skip
    size = (parts, num_heads, num_tokens * group)
    found = torch.empty((*size, width), dtype=torch.float32, device=tokens.device)
    weights = torch.empty(size, dtype=torch.float32, device=tokens.device)
    attend_kernel[(tiles, num_heads, parts)](
        queries, queries.stride(0), queries.stride(1), tokens, rows, rows.stride(0), positions, found, weights,
        scale * math.log2(math.e), **same, TILE=tile, KEYS=_KEYS, APART=apart, num_warps=4,
        num_stages=3 if width < _WIDE else 2,
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
AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[_INSTEAD_OF])  # for those other threads
