"""The form of a step: so many tokens, room for so many in all, and a graph that computes it.

Ids, positions and the places of tokens are read from buffers, so one graph serves all requests of a size, in whatever
blocks they lie. The tokens of a step follow each other in one sequence; or they are *apart*, each behind a sequence of
its own: to the model they are one row of tokens all the same, only places and attention over blocks tell them apart.
Owns those buffers, the capture, and the cache that the model is given meanwhile.

Legend: S tokens of a step, N sequences (1 or S), C tokens of each that a form has room for, H heads, D their width.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dovetail.errors import NotSupported
from dovetail.kv.mover import Transfer
from dovetail.kv.transformers import attention, order
from dovetail.kv.transformers.memory import PagedMemory
from dovetail.kv.transformers.pages import Pair


class Recorder:
    """What the graphs of one `Steps` share: memory between them, a stream to capture in and one that waits."""

    def __init__(self, memory: PagedMemory) -> None:
        make: Any = torch.cuda.Stream
        self.device, self._num_layers = memory.device, memory.shape.num_layers
        self._stream, self._arriving = make(memory.device), make(memory.device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, form: Form) -> None:
        """Makes the form's graph.

        Raises:
            NotSupported: the model can't be captured.
        """
        cuda: Any = torch.cuda
        before = cuda.current_stream(self.device)
        graph, arrivals = cuda.CUDAGraph(), order.Arrivals(self.device, self._num_layers, self._arriving)
        form.arrivals = arrivals
        try:
            # Other threads may go on calling the driver; they have nothing to do with this stream.
            capture = cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with _no_collection(), capture:
                form.logits = form.compute()
        except BaseException as error:
            cuda.set_stream(before)  # torch stays in the stream of a capture that fails
            form.arrivals = None
            if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
                raise NotSupported(f"the model can't be captured ({error}): Steps(..., graphs=False)") from error
            raise
        form.graph, form.ended = graph, cuda.Event()
        form.ended.record()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No cache that was dropped is closed meanwhile: what that queues would be captured."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class Form:
    """A step of S tokens of N sequences: its buffers, and its graph once it has one."""

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        memory: PagedMemory,
        recorder: Recorder | None,
        *,
        num_tokens: int,
        room: int,
        apart: bool,
        paged: bool,
    ) -> None:
        """`forward` is that of the model; without a recorder there is no graph; `paged`: attention is over blocks, and
        must be where tokens are `apart`."""
        device = memory.device
        self.memory, self.room, self.num_tokens, self.apart, self.paged = memory, room, num_tokens, apart, paged
        self._model, self._forward, self._recorder = model, forward, recorder
        with torch.inference_mode(False):
            self._ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self._positions = torch.zeros_like(self._ids)
            size = (num_tokens if apart else 1, room)
            self._rows = torch.zeros(size, dtype=torch.int64, device=device)  # [N, C]: where each token lies
            self._order = None if self.paged else torch.arange(room, device=device)
        self._cache = Cache(layers=[FormLayer(self, n) for n in range(memory.shape.num_layers)])
        self.graph: Any = None
        self.ended: Any = None  #: of the last run
        self.arrivals: order.Arrivals | None = None
        self.logits: torch.Tensor | None = None  #: of the graph, [N, words]
        self._filled: list[Any] = [None] * len(self._rows)  # weak: whose places the rows are
        #: Within `compute`: where the new tokens go, where all are read, and what attention is over.
        self.places, self.seen = self._rows, self._rows
        self.context: attention.Context | None = None

    def fill(self, ids: torch.Tensor, positions: Sequence[int], rows: Sequence[torch.Tensor]) -> None:
        """What the next run computes. Its last token is there as often as the form has room for more.

        Args:
            positions: of each token.
            rows: of each sequence, where its tokens lie, on the device; they don't change.
        """
        device, count = self.memory.device, len(ids)
        self._ids[:count].copy_(pinned(ids, device), non_blocking=True)
        if count < self.num_tokens:
            self._ids[count:].copy_(self._ids[count - 1])
        where = np.full(self.num_tokens, positions[-1], np.int64)
        where[:count] = positions
        self._positions.copy_(pinned(torch.from_numpy(where), device), non_blocking=True)
        for n, filled in enumerate(self._filled):
            mine = rows[min(n, len(rows) - 1)]
            if filled is None or filled() is not mine:
                known = min(self.room, len(mine))
                self._rows[n, :known].copy_(mine[:known])
                self._filled[n] = weakref.ref(mine)

    def expect(self, parts: list[tuple[int, Transfer]]) -> None:
        """What the next run computes comes behind these, each layer behind its own if the last run is over."""
        gates = self.arrivals if len(parts) > 1 and self.is_over() else None
        for layer, part in parts:
            if gates is not None:
                gates.expect(layer, part)
            else:
                order.join(part, self.memory.device)

    def is_over(self) -> bool:
        """Whether its graph does not run."""
        return self.ended is None or bool(self.ended.query())

    def run(self) -> torch.Tensor:
        """Computes what was filled in; the logits of the last token of each sequence, until the next graph runs."""
        if self.graph is None:
            logits = self.compute()  # also what a first run makes for later ones
            if self._recorder is not None:
                self._recorder.record(self)
            return logits
        self.graph.replay()
        self.ended.record()
        assert self.logits is not None
        return self.logits

    def arrive(self, layer: int) -> None:
        """What is captured from now on waits for a layer; without a graph the stream has waited before."""
        if self.arrivals is not None:
            self.arrivals.wait(layer)

    def compute(self) -> torch.Tensor:
        """The step itself: launches, or is captured."""
        positions, dtype = self._positions, self.memory.shape.dtype
        self.places = self._rows.expand(len(positions), -1).gather(1, positions.unsqueeze(1)).squeeze(1)
        if self.paged:
            self.context = attention.Context(self.memory, self._rows, positions)
            with attention.over(self.context, self._model):
                return self._logits_of(self.context.mask)
        assert self._order is not None
        # Behind the last token the first one is read again: it is a number, and its weight is 0.
        visible = self._order <= positions.unsqueeze(1)  # [S, C]
        self.seen = torch.where(visible[-1], self._rows[0], self._rows[0, :1])
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=positions.device)
        mask = torch.where(visible, torch.zeros_like(hidden), hidden)
        return self._logits_of(mask.view(1, 1, *mask.shape))

    def _logits_of(self, mask: torch.Tensor) -> torch.Tensor:
        out = self._forward(
            input_ids=self._ids.unsqueeze(0), attention_mask=mask, position_ids=self._positions.unsqueeze(0),
            past_key_values=self._cache, use_cache=True, logits_to_keep=len(self._rows),
        )  # fmt: skip
        return cast(torch.Tensor, out.logits[0, -len(self._rows) :].float())


class FormLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a form's cache: writes the new tokens where they belong, and reads all of them."""

    is_compileable, is_croppable, is_sliding = False, False, False

    def __init__(self, form: Form, index: int) -> None:
        super().__init__()
        self._form: Any = weakref.proxy(form)  # which has this layer: without a cycle both go at once
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Pair:
        """[1, H, S, D] each; K and V of all tokens, [1, H, C, D], unless attention reads them where they lie."""
        form = self._form
        form.memory.shape.require(key_states, value_states, self._index)
        form.arrive(self._index)
        tokens, words = form.memory.tokens[self._index], form.memory.words[self._index]
        for n, states in enumerate((key_states, value_states)):
            tokens[:, n].index_copy_(0, form.places, states[0].detach().transpose(0, 1))
        if form.paged:
            form.context.hand(self._index, key_states, value_states)
            return key_states, value_states
        found = words.index_select(0, form.seen).view(tokens.dtype).view(1, len(form.seen), *tokens.shape[1:])
        return found[:, :, 0].transpose(1, 2), found[:, :, 1].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens of K and V, where they begin)."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> int:
        """Not known here: positions are given."""
        return 0

    def get_max_length(self) -> int:
        """All that there is room for."""
        return cast(int, self._form.room)


def pinned(given: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As a copy to the device in stream order needs it: a pageable one would wait for the stream."""
    return given.pin_memory() if device.type == "cuda" and given.device.type == "cpu" else given
