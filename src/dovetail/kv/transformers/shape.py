"""What a model keeps of each token: layers, heads, their width, the type of the numbers.

Read from a configuration of transformers. A model with layers of another kind than full attention is refused here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.errors import NotSupported
from dovetail.kv.models import BLOCK_TOKENS

LEAST_VERSION = (5, 17)
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
