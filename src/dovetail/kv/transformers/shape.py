"""What a model keeps of each token: layers, heads, their width, the type of the numbers.

Read from a configuration of transformers. A model with layers of another kind than full attention is refused here, and
so is one that does not fit what a memory was made for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.errors import NotSupported
from dovetail.kv.models import BLOCK_TOKENS

LEAST_VERSION = (5, 17)
#: What to do where a memory is another model's.
PAGED = "make a memory for each model, PagedMemory.for_model(model, num_blocks)"
_FULL = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """K and V of one token in each layer: `num_heads` of `head_dim` numbers."""

    num_layers: int
    num_heads: int  #: of K and V
    head_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_heads, self.head_dim) < 1:
            raise ValueError(f"a cache needs at least one layer, head and number, not {self}")

    def __str__(self) -> str:
        return f"{self.num_layers} layers, {_token(self.num_heads, self.head_dim, self.dtype)}"

    @property
    def row_bytes(self) -> int:
        """Of a block in one layer: K and V of its tokens."""
        return BLOCK_TOKENS * 2 * self.num_heads * self.head_dim * self.dtype.itemsize

    @classmethod
    def of(cls, model: Any) -> KVShape:
        """Of a model of transformers.

        Raises:
            NotSupported: it has layers that are not full attention, or layers that share their K and V.
        """
        config = model.config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or []
        if getattr(config, "sliding_window", None) is not None and not kinds:
            kinds = ["sliding_attention"]
        others = sorted({str(kind) for kind in kinds} - {_FULL})
        if others:
            raise NotSupported(f"a paged cache is for layers of {_FULL}; this model has {', '.join(others)}")
        if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_lora_rank", None):
            raise NotSupported("a paged cache needs K and V of their own, of one width, in every layer")
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            num_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
        )

    def require_model(self, model: Any) -> None:
        """Raises `ValueError` if a model keeps something else of a token, and `NotSupported` as `of` does."""
        found = KVShape.of(model)
        if found != self and not (_casts(model.device) and replace(found, dtype=self.dtype) == self):
            raise self.misfit(f"{type(model).__name__} has {found}")

    def require(self, keys: torch.Tensor, values: torch.Tensor, layer: int, remedy: str = PAGED) -> None:
        """Raises `ValueError` if a layer gives something else, [N, H, S, D] each. Compares numbers, reads no tensor."""
        _, heads, _, width = keys.shape
        fits = heads == self.num_heads and width == self.head_dim and values.shape == keys.shape
        if fits and (keys.dtype == values.dtype == self.dtype or _casts(keys.device)):
            return
        came = [_token(states.shape[1], states.shape[3], states.dtype) for states in (keys, values)]
        shown = came[0] if came[0] == came[1] else f"K {came[0]}; V {came[1]}"
        raise self.misfit(f"layer {layer} came with {shown}", remedy)

    def misfit(self, found: str, remedy: str = PAGED) -> ValueError:
        """What to raise where another model came: `found` says how that shows, `remedy` what to make instead."""
        return ValueError(f"this memory was made for a model of {self}; {found}: {remedy}")


def _token(num_heads: int, head_dim: int, dtype: torch.dtype) -> str:
    return f"{num_heads} KV heads, head dim {head_dim}, {dtype}"


def _casts(device: torch.device) -> bool:
    """Under autocast K and V may have types of their own, and attention makes one of them."""
    return torch.is_autocast_enabled(device.type)


def require_version() -> None:
    """Raises `NotSupported` if transformers is missing or too old."""
    wanted = ".".join(map(str, LEAST_VERSION))
    hint = "pip install 'dovetail-ml[transformers]'"
    try:
        import transformers
    except ImportError as error:
        raise NotSupported(f"this adapter needs transformers {wanted} or newer: {hint}") from error
    found = tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2])
    if found < LEAST_VERSION:
        raise NotSupported(f"this adapter needs transformers {wanted} or newer, not {transformers.__version__}: {hint}")
