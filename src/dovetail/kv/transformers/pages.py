"""The blocks of a request: who writes and reads tokens in them, and what is still under way to or from them.

Owns the waits of one request: a layer is used behind its part of a fetch, and what a store reads is overwritten behind
it. Legend: N sequences, S tokens, H heads, D their width.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch

from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.mover import Transfer
from dovetail.kv.prefixes import Move
from dovetail.kv.transformers import order
from dovetail.kv.transformers.memory import PagedMemory

Pair = tuple[torch.Tensor, torch.Tensor]


class Pages:
    """The blocks of N sequences of one length."""

    def __init__(self, memory: PagedMemory, num_sequences: int) -> None:
        self.memory, self.num_sequences = memory, num_sequences
        self.blocks: list[list[int]] = [[] for _ in range(num_sequences)]
        self._rows = torch.zeros((num_sequences, 0), dtype=torch.int64)  # [N, tokens]: where each token lies
        self._first = self._rows[0]
        self._begin: int | None = None  # the first token, if the blocks of one sequence follow each other
        self._expected: dict[int, Transfer] = {}  # layer -> the part of a fetch that brings it
        self.moves: list[Move] = []  #: fetches and stores of these blocks that were begun
        self._kept_tokens = 0  # so many of the first may be read by a store
        self.is_open = True

    def missing(self, num_tokens: int) -> int:
        """Blocks that it lacks for so many tokens of each sequence."""
        return self.num_sequences * max(0, -(-num_tokens // BLOCK_TOKENS) - len(self.blocks[0]))

    def reserve(self, num_tokens: int) -> None:
        """Blocks for so many tokens of each sequence; raises `CacheFull` and changes nothing if there are too few."""
        if not self.is_open:
            raise ValueError("the cache is closed: make a new one")
        more = self.missing(num_tokens) // self.num_sequences
        if not more:
            return
        last = self.blocks[0][-1] if self.num_sequences == 1 and self.blocks[0] else None
        taken = self.memory.take(more * self.num_sequences, after=last)
        for n, mine in enumerate(self.blocks):
            mine.extend(taken[n * more : (n + 1) * more])
        ids = np.array(self.blocks, np.int64)
        rows = torch.from_numpy((ids[..., None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(len(ids), -1))
        if self.memory.device.type == "cuda":  # pinned: a pageable copy would wait for the stream
            rows = rows.pin_memory().to(self.memory.device, non_blocking=True)
        self._rows, self._first = rows, rows[0]
        together = len(ids) == 1 and bool((np.diff(ids[0]) == 1).all())
        self._begin = int(ids[0, 0]) * BLOCK_TOKENS if together else None

    def expect(self, move: Move) -> None:
        """A fetch into these blocks is under way."""
        self.hold(move)
        layers = move.layers or self.memory.shape.num_layers
        for layer in range(self.memory.shape.num_layers):
            self._expected[layer] = move.parts[min(layer // layers, len(move.parts) - 1)]

    def hold(self, move: Move, kept_tokens: int = 0) -> None:
        """Copies from or to these blocks are under way: others get them afterwards.

        `kept_tokens`: so many of the first tokens are read by it: they are overwritten afterwards.
        """
        self.moves.append(move)
        self._kept_tokens = max(self._kept_tokens, kept_tokens)

    def arrive(self, layer: int) -> None:
        """What is done with a layer from now on comes after its bytes."""
        part = self._expected.get(layer)
        if part is not None:
            order.join(part, self.memory.device)
            self._expected = {n: other for n, other in self._expected.items() if other is not part}

    def enter(self, begin: int, end: int) -> torch.Tensor:
        """Room for the tokens from `begin` to `end`, in all layers; they are written behind stores that read there.

        Returns where the tokens of the first sequence lie, on the device: the same tensor until there are more blocks.
        Raises `CacheFull` and changes nothing if there are too few.
        """
        self.reserve(end)
        self._behind_stores(begin)
        return self._first

    @property
    def is_expecting(self) -> bool:
        """Is a fetch under way that no layer, or not every one, has waited for?"""
        return self.is_open and bool(self._expected)

    def expected(self) -> list[tuple[int, Transfer]]:
        """Parts of a fetch that not all layers have waited for: (first layer, part), in order."""
        parts: dict[int, tuple[int, Transfer]] = {}
        for layer, part in sorted(self._expected.items()):
            parts.setdefault(id(part), (layer, part))
        return list(parts.values())

    def all_arrived(self) -> None:
        """Somebody has seen to it that all layers wait for their parts."""
        self._expected = {}

    def write(self, layer: int, begin: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """New tokens from `begin` on, as attention gives them: [N, H, S, D]."""
        tokens, end = self.memory.tokens[layer], begin + keys.shape[-2]
        self._behind_stores(begin)
        for n, states in enumerate((keys, values)):
            new = states.detach().transpose(1, 2).flatten(0, 1)  # [N * S, H, D]; the memory is part of no graph
            if self._begin is not None:
                tokens[self._begin + begin : self._begin + end, n].copy_(new)
            else:
                tokens[:, n].index_copy_(0, self._rows[:, begin:end].reshape(-1), new)

    def _behind_stores(self, begin: int) -> None:
        """What is written from `begin` on may still be read by a store, after a crop: behind that."""
        if begin < self._kept_tokens:
            for move in self.moves:
                order.join(move.transfer, self.memory.device)

    def read(self, layer: int, end: int) -> Pair:
        """K and V of the tokens before `end`: [N, H, S, D]."""
        tokens = self.memory.tokens[layer]
        if self._begin is not None:
            found = tokens[self._begin : self._begin + end]
        else:
            found = self.memory.words[layer].index_select(0, self._rows[:, :end].reshape(-1)).view(tokens.dtype)
        found = found.view(self.num_sequences, end, *tokens.shape[1:])  # [N, S, 2, H, D]
        return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)

    def close(self) -> None:
        """Gives the blocks back. Safe to call twice."""
        if self.is_open:
            self.is_open = False
            self.memory.give([block for mine in self.blocks for block in mine], self.moves)

    def __del__(self) -> None:
        if getattr(self, "is_open", False) and self.blocks[0]:
            self.close()
            warnings.warn("a PagedCache was dropped and not closed: `with` it, or close() it", ResourceWarning)
