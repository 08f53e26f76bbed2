"""Caches of transformers that take K and V of one model only, and whose layers all have the same tokens.

Where they don't, the last pass was of a model with fewer layers, or was cut off, and its tokens are forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dovetail.kv.transformers.pages import Pair
from dovetail.kv.transformers.shape import KVShape


class GuardedCache(Cache):  # type: ignore[misc]
    """A cache whose layers have a `length`, in tokens. `remedy` says how to make what it keeps them in for a model."""

    remedy = ""

    def __init__(self, shape: KVShape, layers: Sequence[CacheLayerMixin]) -> None:
        self.shape = shape
        self._known: set[int] = set()  # layers whose K and V were looked at
        super().__init__(layers=list(layers))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        """Keeps new tokens of a layer; K and V of all.

        Raises:
            ValueError: they are of another model than the cache is; it has the tokens from before this pass.
            CacheFull: there is no room; nothing is written.
        """
        layers = self.layers
        if not layer_idx and not self.is_even:
            self.require_all_layers()
        if layer_idx >= len(layers):
            self._forget(max(0, layers[0].length - key_states.shape[-2]))
            raise self.shape.misfit(f"a model of {layer_idx + 1} or more layers came", self.remedy)
        if layer_idx not in self._known:
            self.shape.require(key_states, value_states, layer_idx, self.remedy)
            if layer_idx:  # the first layer is looked at in each pass: it may be another model's
                self._known.add(layer_idx)
        found: Pair = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return found

    @property
    def is_even(self) -> bool:
        """Whether the last layer has as many tokens as the first: cheaper than `require_all_layers`, for each pass."""
        return bool(self.layers[0].length == self.layers[-1].length)

    def require_all_layers(self) -> None:
        """Raises `ValueError` if the last pass did not come through all layers; its tokens are forgotten then."""
        lengths = [layer.length for layer in self.layers]
        if (shortest := min(lengths)) != max(lengths):
            self._forget(shortest)
            passed = sum(length > shortest for length in lengths)
            raise self.shape.misfit(
                f"the last pass came through {passed} of these layers, so it was another model's, or was cut off (its "
                f"tokens are forgotten, compute them again)",
                self.remedy,
            )

    def _forget(self, num_tokens: int) -> None:
        """All tokens but the first ones."""
        for layer in self.layers:
            layer.length = min(layer.length, num_tokens)
