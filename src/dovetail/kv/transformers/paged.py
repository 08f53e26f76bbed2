"""A cache of transformers in blocks: of one call of `generate()`, in any blocks of a `PagedMemory`.

A layer writes new tokens into the request's `Pages` and hands K and V to attention: as they lie if the blocks follow
each other, otherwise gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from dovetail.errors import NotSupported
from dovetail.kv.transformers.guarded import GuardedCache
from dovetail.kv.transformers.memory import PagedMemory
from dovetail.kv.transformers.pages import Pages, Pair
from dovetail.kv.transformers.shape import PAGED


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of it; its `length` is how many tokens it has."""

    is_compileable, is_croppable, is_sliding = False, True, False

    def __init__(self, pages: Pages, index: int, length: int) -> None:
        super().__init__()
        self.pages, self.index, self.length = pages, index, length
        self.is_initialized, self.batch_size = True, pages.num_sequences

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Pair:
        """Keeps new tokens; K and V of all. Raises `CacheFull` before it writes if there is no room."""
        number, _heads, count, _width = key_states.shape
        begin = self.length
        if number != self.pages.num_sequences:
            raise ValueError(f"this cache is of {self.pages.num_sequences} sequences, a batch of {number} came")
        end = begin + count
        self.pages.reserve(end)
        self.pages.arrive(self.index)
        self.pages.write(self.index, begin, key_states, value_states)
        self.length = end
        return self.pages.read(self.index, end) if begin else (key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens of K and V, where they begin)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens."""
        return self.length

    def get_max_length(self) -> int:
        """As many as there are blocks."""
        return -1

    def reset(self) -> None:
        """Forgets its tokens and keeps its blocks."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; the number is given below 0, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a number below 0, of tokens to remove, not {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence n becomes a copy of sequence beam_idx[n]."""
        if self.length:
            self.pages.arrive(self.index)
            keys, values = self.pages.read(self.index, self.length)
            chosen = beam_idx.to(keys.device)
            self.pages.write(self.index, 0, keys.index_select(0, chosen), values.index_select(0, chosen))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Not here: the number of sequences is fixed."""
        raise NotSupported("a PagedCache has a fixed number of sequences: make it with the larger num_sequences")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Not here: the number of sequences is fixed."""
        raise NotSupported("a PagedCache has a fixed number of sequences: make a new one")


class PagedCache(GuardedCache):
    """The cache of one call: `with PagedCache(memory) as cache: model.generate(..., past_key_values=cache)`.

    Use it in one stream. A call of a batch, or of beams, needs `num_sequences` of them.
    """

    remedy = PAGED

    def __init__(self, memory: PagedMemory, *, num_sequences: int = 1, num_tokens: int = 0) -> None:
        """`num_tokens`: room for so many is taken now; more is taken as it is needed.

        Raises:
            CacheFull: there is no such room.
        """
        if num_sequences < 1:
            raise ValueError(f"num_sequences is {num_sequences}; it must be 1 or more")
        self.pages = Pages(memory, num_sequences)
        self.prompt: Any = None  #: token ids that it was begun with, where that is known
        self.pages.reserve(num_tokens)
        self._given = 0  # so many tokens are there by `begin_at`
        super().__init__(memory.shape, [PagedLayer(self.pages, n, 0) for n in range(memory.shape.num_layers)])

    def begin_at(self, num_tokens: int) -> None:
        """The first tokens are there already, or under way."""
        self._given = num_tokens
        for layer in self.layers:
            layer.length = num_tokens

    @property
    def has_arrived(self) -> bool:
        """False while a fetch into it is under way: a step would wait for it."""
        return all(part.is_over() for _, part in self.pages.expected())

    @property
    def blocks(self) -> list[int]:
        """Of the first sequence, in order."""
        return self.pages.blocks[0]

    def close(self) -> None:
        """Gives the blocks back; others use them behind what is queued. Safe to call twice."""
        self.pages.close()

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Raises `ValueError` if the only pass behind a fetched prefix, which read it, was not through all layers."""
        self.close()
        if kind is None and 0 < self._given == min(layer.length for layer in self.layers):
            self.require_all_layers()
