"""Steps of a model as graphs: hundreds of kernels are one launch, so that the GPU does not wait for the host.

A step computes a few tokens behind those that a cache has. Its form is fixed, so many tokens and room for so many in
all; ids, positions and the places of tokens are read from buffers. So one graph serves all requests of a size, in
whatever blocks they lie. Where there are no graphs (on a CPU) the same form is computed directly.

Legend: S tokens of a step, C tokens that a form has room for, H heads, D their width.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dovetail.errors import NotSupported
from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.mover import Transfer
from dovetail.kv.transformers import attention, order
from dovetail.kv.transformers.memory import PagedMemory
from dovetail.kv.transformers.paged import PagedCache
from dovetail.kv.transformers.pages import Pair
from dovetail.kv.transformers.prefix import Tokens, row_of

_LEAST_ROOM = 256
_PARTS = 8  # forms to each doubling of the room: what is read in vain is an eighth at most


class Steps:
    """Computes steps of a model: `steps = Steps(model, memory)`, `logits = steps(token_ids, cache)`.

    A form is made when it is first needed, which takes as long as a few steps. Use it in one stream.

    Args:
        memory: the blocks that the caches are in.
        most_tokens: a step of more is computed as the model does it: the GPU is busy long enough.
        most_forms: so many are kept, those that were used last.
        paged: attention reads blocks where they lie, by a kernel of ours; otherwise it is the model's own, over all
            tokens that a form has room for. If not given, where the kernel fits: on a GPU, 16-bit numbers, `sdpa`.
    """

    def __init__(
        self,
        model: Any,
        memory: PagedMemory,
        *,
        most_tokens: int = 256,
        most_forms: int = 64,
        paged: bool | None = None,
    ) -> None:
        if model.training:
            raise ValueError("steps are for a model that answers: call model.eval() first")
        if min(most_tokens, most_forms) < 1:
            raise ValueError(f"most_tokens is {most_tokens} and most_forms {most_forms}; both must be 1 or more")
        self.model, self.memory, self.most_tokens, self.most_forms = model, memory, most_tokens, most_forms
        fits = attention.fits(model, memory)
        if paged and not fits:
            raise NotSupported("attention over blocks is for 16-bit numbers, heads of 16 to 256, sdpa, and a GPU")
        self.paged = fits if paged is None else paged
        self._forward = model.forward  # as it was before `generating`
        self._forms: OrderedDict[tuple[int, int], _Form] = OrderedDict()
        self._pool: Any = torch.cuda.graph_pool_handle() if memory.device.type == "cuda" else None

    def __call__(self, token_ids: Tokens, cache: PagedCache) -> torch.Tensor:
        """Computes tokens behind those that a cache has, and keeps them in it; the logits of the last one, float32.

        Raises:
            ValueError: no tokens, or a cache of several sequences, of another memory, or closed; nothing has changed.
            CacheFull: there are too few blocks; nothing has changed.
        """
        if cache.pages.num_sequences != 1 or cache.pages.memory is not self.memory:
            raise ValueError("steps are for caches of one sequence, in blocks of their own memory")
        ids = token_ids.reshape(-1) if isinstance(token_ids, torch.Tensor) else torch.from_numpy(row_of(token_ids))
        if not len(ids):
            raise ValueError("a step has at least one token")
        with torch.inference_mode():
            if len(ids) > self.most_tokens:
                return self._whole(ids, cache)
            begin, end = cache.get_seq_length(), cache.get_seq_length() + len(ids)
            rows = cache.pages.enter(begin, end)
            form = self._form(_octave(len(ids)), self.memory.num_blocks * BLOCK_TOKENS if self.paged else _room(end))
            form.fill(ids, begin, rows)
            form.expect(cache.pages.expected())
            logits = form.run(self._pool)
        cache.begin_at(end)
        return logits

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Within it `generate()` of this model uses these steps, where it is given a cache that fits."""
        model = self.model

        @functools.wraps(self._forward)  # generate() asks for its arguments
        def forward(*args: Any, **given: Any) -> Any:
            ids, cache = given.get("input_ids"), given.get("past_key_values")
            if args or not self._fits(ids, cache, given.get("attention_mask"), given.get("logits_to_keep", 0)):
                return self._forward(*args, **given)
            from transformers.modeling_outputs import CausalLMOutputWithPast

            logits = self(cast(torch.Tensor, ids), cast(PagedCache, cache)).view(1, 1, -1)
            return CausalLMOutputWithPast(logits=cast(Any, logits), past_key_values=cache)

        before = model.__dict__.get("forward")
        model.forward = forward
        try:
            yield
        finally:
            if before is None:
                del model.forward
            else:
                model.forward = before

    def _fits(self, ids: Any, cache: Any, mask: Any, keep: Any) -> bool:
        """Whether a call of `generate()` is one of ours: one sequence, nothing masked, the last logits alone."""
        if ids is None or not isinstance(cache, PagedCache) or cache.pages.memory is not self.memory:
            return False
        if len(ids) != 1 or cache.pages.num_sequences != 1 or ids.shape[1] > self.most_tokens:
            return False
        if mask is not None and (mask.ndim != 2 or not bool(mask.all())):
            return False
        return bool(ids.shape[1] == 1 or (isinstance(keep, int) and keep == 1))

    def _whole(self, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        there = _to(ids, self.memory.device).unsqueeze(0)
        out = self._forward(input_ids=there, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast(torch.Tensor, out.logits[0, -1].float())

    def _form(self, num_tokens: int, room: int) -> _Form:
        """From the shelf, or new."""
        key = num_tokens, room
        form = self._forms.pop(key, None) or _Form(self, num_tokens, room)
        self._forms[key] = form
        if len(self._forms) > self.most_forms:
            self._forms.popitem(last=False)
        return form


class _Form:
    """A step of S tokens with room for C: its buffers, and its graph once it has one."""

    def __init__(self, steps: Steps, num_tokens: int, room: int) -> None:
        memory, device = steps.memory, steps.memory.device
        self.memory, self.room, self._num_tokens = memory, room, num_tokens
        self._model, self._forward, self.paged = steps.model, steps._forward, steps.paged
        with torch.inference_mode(False):
            self._ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self._positions = torch.zeros_like(self._ids)
            self._rows = torch.zeros(room, dtype=torch.int64, device=device)  # where each token lies
            self._order = torch.arange(room, device=device)
        self._cache = Cache(layers=[_FormLayer(self, n) for n in range(memory.shape.num_layers)])
        self._graph: Any = None
        self._ended: Any = None  # of the last run
        self._arrivals: order.Arrivals | None = None
        self._logits: torch.Tensor | None = None
        #: Within `_compute`: where the new tokens go, and where all are read.
        self.places, self.seen = self._rows, self._rows

    def fill(self, ids: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
        """What the next run computes. Its last token is there as often as the form has room for more."""
        device, count, extra = self.memory.device, len(ids), self._num_tokens - len(ids)
        if ids.device != device and extra:
            ids = torch.cat([ids, ids[-1:].expand(extra)])
        self._ids[: len(ids)].copy_(_to(ids, device), non_blocking=True)
        if len(ids) < self._num_tokens:
            self._ids[count:].copy_(ids[-1:].expand(extra))
        positions = np.minimum(np.arange(begin, begin + self._num_tokens), begin + count - 1)
        self._positions.copy_(_to(torch.from_numpy(positions), device), non_blocking=True)
        known = min(self.room, len(rows))
        self._rows[:known].copy_(rows[:known])

    def expect(self, parts: list[tuple[int, Transfer]]) -> None:
        """What the next run computes comes behind these, each layer behind its own if the last run is over."""
        gates = self._arrivals if len(parts) > 1 else None
        if gates is not None and not self._ended.query():
            gates = None
        for layer, part in parts:
            if gates is not None:
                gates.expect(layer, part)
            else:
                order.join(part, self.memory.device)

    def run(self, pool: Any) -> torch.Tensor:
        """Computes what was filled in; the logits of the last token."""
        if self._graph is None:
            logits = self._compute()  # also what a first run makes for later ones
            if pool is not None:
                self._capture(pool)
            return logits
        self._graph.replay()
        self._ended.record()
        assert self._logits is not None
        return self._logits.clone()  # the next graph writes there too

    def _capture(self, pool: Any) -> None:
        cuda: Any = torch.cuda
        graph, self._ended = torch.cuda.CUDAGraph(), cuda.Event()
        self._arrivals = order.Arrivals(self.memory.device, self.memory.shape.num_layers)
        # Other threads may go on calling the driver; they have nothing to do with this stream.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = self._compute()
        self._ended.record()
        self._graph = graph

    def arrive(self, layer: int) -> None:
        """What is captured from now on waits for a layer; without a graph the stream has waited before."""
        if self._arrivals is not None:
            self._arrivals.wait(layer)

    def _compute(self) -> torch.Tensor:
        positions, dtype = self._positions, self.memory.shape.dtype
        self.places = self._rows.index_select(0, positions)
        if self.paged:
            mask = torch.zeros((1, 1, 1, 1), dtype=dtype, device=positions.device)  # none is made
            context = attention.Context(self.memory, self._rows, positions)
            with attention.over(context, self._model):
                return self._logits_of(mask)
        # Behind the last token the first one is read again: it is a number, and its weight is 0.
        self.seen = torch.where(self._order <= positions[-1], self._rows, self._rows[0])
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
        mask = torch.where(self._order <= positions.unsqueeze(1), torch.zeros_like(hidden), hidden)  # [S, C]
        return self._logits_of(mask.view(1, 1, *mask.shape))

    def _logits_of(self, mask: torch.Tensor) -> torch.Tensor:
        out = self._forward(
            input_ids=self._ids.unsqueeze(0), attention_mask=mask, position_ids=self._positions.unsqueeze(0),
            past_key_values=self._cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return cast(torch.Tensor, out.logits[0, -1].float())


class _FormLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a form's cache: writes the new tokens where they belong, and reads all of them."""

    is_compileable, is_croppable, is_sliding = False, False, False

    def __init__(self, form: _Form, index: int) -> None:
        super().__init__()
        self._form, self._index = form, index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Pair:
        """[1, H, S, D] each; K and V of all tokens, [1, H, C, D], unless attention reads them where they lie."""
        form = self._form
        form.arrive(self._index)
        tokens, words = form.memory.tokens[self._index], form.memory.words[self._index]
        for n, states in enumerate((key_states, value_states)):
            tokens[:, n].index_copy_(0, form.places, states[0].transpose(0, 1))
        if form.paged:
            return key_states, value_states
        found = words.index_select(0, form.seen).view(tokens.dtype).view(1, len(form.seen), *tokens.shape[1:])
        return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens of K and V, where they begin)."""
        return self._form.room, 0

    def get_seq_length(self) -> int:
        """Not known here: positions are given."""
        return 0

    def get_max_length(self) -> int:
        """All that there is room for."""
        return self._form.room


def _octave(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _room(count: int) -> int:
    """Of the rooms that forms have, the least for so many tokens: all of them are whole numbers of blocks."""
    part = max(_LEAST_ROOM, (1 << (count.bit_length() - 1)) // _PARTS)
    return -(-count // part) * part


def _to(given: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device, in stream order; from pinned memory, since a pageable copy would wait for the stream."""
    if given.device == device:
        return given
    return given.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else given.to(device)
