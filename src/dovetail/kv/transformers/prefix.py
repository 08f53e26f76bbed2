"""Prefixes across requests: what one call of `generate()` has computed, a later one with the same beginning fetches.

Owns the meeting of `Prefixes` (blocks in host memory, by their tokens) and `PagedCache` (blocks on the device). A fetch
is joined layer by layer by the stream that computes: nothing blocks the CPU.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.hw.gpu.device import Device
from dovetail.kv.choose import Path
from dovetail.kv.prefixes import Move, Prefixes
from dovetail.kv.transformers import order, serving
from dovetail.kv.transformers.memory import PagedMemory
from dovetail.kv.transformers.paged import PagedCache
from dovetail.kv.transformers.pages import Pages
from dovetail.kv.transformers.shape import KVShape

Tokens = torch.Tensor | Sequence[int] | NDArray[Any]
_EVERYBODY = b"everybody"
AUTO: Literal["auto"] = "auto"
_LONG_BYTES = 64 << 20  # about a millisecond of a fast link
_MOST_PARTS = 4
_COPY_BYTES = 512 << 10  # shorter ones take longer to issue than to move
_ROW_BYTES = 64 << 10  # of a copy: what an engine takes for each row is a tenth of its bytes' time


class PrefixStore:
    """Prefixes of prompts for one model. `with PrefixStore(memory, pool_bytes=...) as store:`, or `close()`.

    Args:
        memory: the blocks that requests compute in.
        pool_bytes: host memory to keep prefixes in, pinned if the blocks are on a GPU; the oldest go when it is full.
        path: how bytes move to and from a GPU.
        layers: so many layers are fetched at a time, and a layer is computed while the next ones arrive; None: all at
            once, in the fewest copies; "auto": a few at a time if the fetch is long and no other is waited for, for
            steps that are graphs (`Steps`): where the host launches kernel by kernel, fewer copies are better.
        kept: instead of `pool_bytes` and `path`, prefixes of the same blocks that exist; the caller closes them.
    """

    def __init__(
        self,
        memory: PagedMemory,
        *,
        pool_bytes: int | None = None,
        path: Path | str = Path.AUTO,
        layers: int | Literal["auto"] | None = None,
        kept: Prefixes | None = None,
    ) -> None:
        if (pool_bytes is None) == (kept is None):
            raise ValueError("a PrefixStore needs either pool_bytes or kept")
        if layers not in (None, AUTO) and (not isinstance(layers, int) or layers < 1):
            raise ValueError(f"layers is {layers!r}; it must be 1 or more, None for all at once, or {AUTO!r}")
        self.memory, self.layers = memory, layers
        self._begun: weakref.WeakSet[Pages] = weakref.WeakSet()  # caches whose fetch may not be waited for yet
        self._torn: list[PagedCache] = []  # whose fetch failed, and may still write into their blocks
        self._device: Device | None = None
        self._owns = kept is None
        self.kept = kept if kept is not None else self._made(pool_bytes or 0, path)

    def _made(self, pool_bytes: int, path: Path | str) -> Prefixes:
        memory = self.memory
        if memory.device.type != "cuda":
            return Prefixes.on_cpu(memory.layout, memory.bytes(), pool_bytes=pool_bytes)
        self._device = open_device(memory.device)
        return serving.prefixes(memory, self._device, pool_bytes, path, serving.ServingMover)[0]

    def begin(self, token_ids: Tokens, *, room: int = 0, salt: bytes = _EVERYBODY) -> PagedCache:
        """A cache for a prompt, with what is kept of it under way: pass it and the whole prompt to `generate()`.

        At least one token of the prompt is left to compute. Returns before the bytes have landed.

        Args:
            token_ids: the prompt: [S], or [1, S].
            room: tokens that will be generated: blocks for them are taken now.
            salt: tells tenants apart, and models of one shape with other weights; say the same to `keep`.

        Raises:
            CacheFull: there are too few blocks; nothing has moved.
        """
        prompt = row_of(token_ids)
        if not len(prompt):
            raise ValueError("a prompt has at least one token")
        self._close_torn()
        beside = order.is_computing(self.memory.device)  # asked before the stream is told to wait for blocks
        cache = PagedCache(self.memory, num_tokens=len(prompt) + room)
        move: Move | None = None
        try:
            after = self.memory.fence.after
            move = self.kept.fetch(
                prompt[:-1], cache.blocks, salt=salt, after=after, beside=beside, layers=self._step()
            )
            cache.prompt = prompt
            if move.num_tokens:
                cache.pages.expect(move)
                cache.begin_at(move.num_tokens)
                self._begun.add(cache.pages)
        except BaseException:
            if move is not None:
                cache.pages.hold(move)
            self._torn.append(cache)
            self._close_torn()
            raise
        return cache

    def _close_torn(self) -> None:
        """Gives back the blocks of fetches that failed, once nothing writes into them."""
        while self._torn and not self.kept.is_torn:
            self._torn.pop().close()

    def _step(self) -> int | Callable[[int, int], int | None] | None:
        """Layers that the next fetch brings at a time."""
        if self.layers != AUTO:
            return self.layers
        self._begun = weakref.WeakSet(pages for pages in self._begun if pages.is_expecting)
        return None if self._begun else functools.partial(few_layers, self.memory.shape)

    def keep(self, cache: PagedCache, token_ids: Tokens, *, salt: bytes = _EVERYBODY) -> Move:
        """Keeps the full blocks of a cache: of `token_ids`, as far as the cache has them, what is not kept yet.

        Returns before the bytes have landed; the cache may be closed or go on meanwhile.

        Raises:
            ValueError: a cache of several sequences, of another memory, of another prompt, or closed; or its last pass
                did not come through all layers, as a model of fewer layers does. Nothing is kept.
            PoolFull: there is no room; nothing has changed.
        """
        if cache.pages.num_sequences != 1 or cache.pages.memory is not self.memory:
            raise ValueError("a PrefixStore keeps caches of one sequence, in blocks of its own memory")
        if not cache.pages.is_open:
            raise ValueError("the cache is closed, others have its blocks: keep it before it is closed")
        given = row_of(token_ids)
        if cache.prompt is not None and not np.array_equal(given[: len(cache.prompt)], cache.prompt[: len(given)]):
            raise ValueError("these are not the tokens of the cache: it was begun with another prompt")
        cache.require_all_layers()
        tokens = given[: cache.get_seq_length()]
        for _, part in cache.pages.expected():  # what is stored from those blocks comes behind them
            order.join(part, self.memory.device)
        move = self.kept.store(tokens, cache.blocks, salt=salt, after=order.computing(self.memory.device))
        cache.pages.hold(move, len(tokens))
        return move

    def close(self) -> None:
        """Waits for what is under way and gives the pool back. Safe to call twice."""
        try:
            if self._owns:
                self.kept.close()
            self._close_torn()
        finally:
            if self._device is not None:
                self._device.close()
                self._device = None

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def few_layers(shape: KVShape, num_blocks: int, num_copies: int) -> int | None:
    """How many to fetch at a time so that computing can begin; None: all, since waiting for them takes no time.

    Args:
        num_copies: how few can bring a part of all blocks.
    """
    layer_bytes = num_blocks * shape.row_bytes
    if layer_bytes * shape.num_layers < _LONG_BYTES:
        return None
    long_copies = -(-_COPY_BYTES * num_copies // layer_bytes)
    step = max(-(-shape.num_layers // _MOST_PARTS), -(-_ROW_BYTES // shape.row_bytes), long_copies)
    return step if step < shape.num_layers else None


def open_device(device: torch.device) -> Device:
    """The driver's side of a GPU of torch."""
    torch.zeros(1, device=device)  # torch makes its context first: both share it
    return Device("hip" if torch.version.hip else "cuda", device.index or 0)


def row_of(token_ids: Tokens) -> Any:
    """Token ids as one row of numbers."""
    given = token_ids.cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)
    if given.ndim == 2 and len(given) == 1:
        given = given[0]
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"a prompt is one row of token ids, not {given.dtype} of shape {given.shape}")
    return given.astype(np.int64, copy=False)
