"""A cache of transformers for contexts that are longer than the device's memory: layers live in pinned host memory.

The first layers may stay on the device; the others take turns in the buffers of a `Rotation`. Legend: N sequences,
S tokens, H heads, D their width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from dovetail.errors import NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.memory import lasting
from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.transformers.guarded import GuardedCache
from dovetail.kv.transformers.memory import CacheFull
from dovetail.kv.transformers.prefix import open_device
from dovetail.kv.transformers.rotation import Rotation
from dovetail.kv.transformers.shape import KVShape

Pair = tuple[torch.Tensor, torch.Tensor]


class OffloadedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: its `length`, and where its tokens are."""

    is_compileable, is_croppable, is_sliding = False, True, False

    def __init__(self, cache: OffloadedCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = cache, index
        self.batch_size, self._most = cache.num_sequences, cache.max_tokens
        self.length, self.is_initialized = 0, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Pair:
        """Keeps new tokens; K and V of all. Raises `CacheFull` before it writes if there is no room."""
        begin, end = self.length, self.length + key_states.shape[-2]
        if len(key_states) != self.batch_size:
            raise ValueError(f"this cache is of {self.batch_size} sequences, a batch of {len(key_states)} came")
        if end > self._most:
            raise CacheFull(f"this cache holds {self._most} tokens of a sequence, {end} are needed: make a larger one")
        tokens = self._cache.enter(self._index)
        mine = tokens.view(self.batch_size, -1, *tokens.shape[1:])  # [N, S, 2, H, D]
        for n, states in enumerate((key_states, value_states)):
            mine[:, begin:end, n].copy_(states.detach().transpose(1, 2))
        self.length = end
        self._cache.leave(self._index, self.blocks(begin))
        if not begin:
            return key_states, value_states
        return mine[:, :end, 0].transpose(1, 2), mine[:, :end, 1].transpose(1, 2)

    def blocks(self, begin: int = 0) -> Any:
        """Those with tokens from `begin` on, of all sequences."""
        per_sequence = -(-self._most // BLOCK_TOKENS)
        some = np.arange(begin // BLOCK_TOKENS, -(-self.length // BLOCK_TOKENS))
        return (np.arange(self.batch_size)[:, None] * per_sequence + some).reshape(-1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens of K and V, where they begin)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens."""
        return self.length

    def get_max_length(self) -> int:
        """Tokens that fit."""
        return self._most

    def reset(self) -> None:
        """Forgets its tokens."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; the number is given below 0, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a number below 0, of tokens to remove, not {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Not here."""
        raise NotSupported("an OffloadedCache has no beam search: use a PagedCache, or one beam")


class OffloadedCache(GuardedCache):
    """A cache of one call: `with OffloadedCache.for_model(model, max_tokens=...) as cache: model.generate(...)`.

    Args:
        max_tokens: of a sequence; host memory and buffers are taken for so many.
        resident_layers: the first ones stay on the device; the others share `num_buffers` buffers, 2 or more.
    """

    remedy = "make a cache for each model, OffloadedCache.for_model(model, max_tokens)"

    def __init__(
        self,
        shape: KVShape,
        max_tokens: int,
        *,
        device: torch.device | str = "cpu",
        num_sequences: int = 1,
        resident_layers: int = 0,
        num_buffers: int = 2,
    ) -> None:
        rotating = shape.num_layers - resident_layers
        if min(max_tokens, num_sequences) < 1 or not 0 <= resident_layers <= shape.num_layers or num_buffers < 2:
            raise ValueError(
                f"max_tokens {max_tokens} and num_sequences {num_sequences} must be 1 or more, num_buffers "
                f"{num_buffers} 2 or more, resident_layers {resident_layers} at most {shape.num_layers}"
            )
        if rotating <= num_buffers:  # nothing to gain
            resident_layers, rotating, num_buffers = shape.num_layers, 0, 0
        self.max_tokens, self.num_sequences = max_tokens, num_sequences
        self.resident_layers = resident_layers
        tokens = num_sequences * -(-max_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
        size = (resident_layers + num_buffers, tokens, 2, shape.num_heads, shape.head_dim)
        with lasting():
            self._tokens = torch.zeros(size, dtype=shape.dtype, device=device)
        self._is_open = True
        self._gpu: Device | None = None
        self.rotation: Rotation | None = None
        if rotating:
            self._gpu = open_device(self._tokens.device) if self._tokens.device.type == "cuda" else None
            self.rotation = Rotation(shape, self._tokens[resident_layers:], rotating, self._gpu)
        super().__init__(shape, [OffloadedLayer(self, n) for n in range(shape.num_layers)])

    @classmethod
    def for_model(
        cls,
        model: Any,
        max_tokens: int,
        *,
        device_bytes: int | None = None,
        num_sequences: int = 1,
        num_buffers: int = 2,
    ) -> OffloadedCache:
        """For a model of transformers, on its device. `device_bytes`: as many layers stay there as fit into this.

        Raises:
            ValueError: not even the buffers fit.
        """
        shape, resident = KVShape.of(model), 0
        if device_bytes is not None:
            layer_bytes = num_sequences * -(-max_tokens // BLOCK_TOKENS) * shape.row_bytes
            fitting = device_bytes // layer_bytes
            if fitting < min(num_buffers, shape.num_layers):
                need = num_buffers * layer_bytes
                raise ValueError(f"device_bytes is {device_bytes}: {num_buffers} buffers of a layer need {need}")
            resident = shape.num_layers if fitting >= shape.num_layers else fitting - num_buffers
        return cls(
            shape, max_tokens, device=model.device, num_sequences=num_sequences, resident_layers=resident,
            num_buffers=num_buffers,
        )  # fmt: skip

    @property
    def device_bytes(self) -> int:
        """What it takes of the device."""
        return self._tokens.nbytes

    def enter(self, index: int) -> torch.Tensor:
        """The tokens of a layer, for the current stream."""
        if not self._is_open:
            raise ValueError("this cache is closed: make a new one")
        if self.rotation is None or index < self.resident_layers:
            return self._tokens[index]
        return self.rotation.enter(index - self.resident_layers, self._filled)

    def leave(self, index: int, blocks: Any) -> None:
        """The current stream has written blocks of a layer."""
        if self.rotation is not None and index >= self.resident_layers:
            self.rotation.store(index - self.resident_layers, blocks)

    def _filled(self, layer: int) -> Any:
        return self.layers[self.resident_layers + layer].blocks()

    def close(self) -> None:
        """Waits for what is under way and gives the host memory back. Safe to call twice."""
        if self.rotation is not None:
            self.rotation.close()
        if self._gpu is not None:
            self._gpu.close()
        self.rotation = self._gpu = None
        self._is_open = False

    def __enter__(self) -> OffloadedCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
