"""Steps of a model as graphs: hundreds of kernels are one launch, so that the GPU does not wait for the host.

A step computes a few tokens behind those that a cache has. Its form is fixed, so many tokens and room for so many in
all; ids, positions and the places of tokens are read from buffers. So one graph serves all requests of a size, in
whatever blocks they lie. Where there are no graphs (on a CPU, or if they are not wanted) the same form is computed
directly.

Legend: S tokens of a step, C tokens that a form has room for, H heads, D their width.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import weakref
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

logger = logging.getLogger(__name__)

_LEAST_ROOM = 256
_PARTS = 8  # forms to each doubling of the room: what is read in vain is an eighth at most
_ATTENTION = ("sdpa", "eager")  # those that a mask of numbers can be given to
#: Rotary embeddings that look at positions from the host, in one version of transformers or another.
_HOST_ROPE = ("dynamic", "longrope")
#: What `generate()` may say and mean nothing new by it.
_USUAL = {"input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "logits_to_keep"}
_USUAL |= {"cache_position"}


class Steps:
    """Computes steps of a model: `steps = Steps(model, memory)`, `logits = steps(token_ids, cache)`.

    A form is made when it is first needed: a step is computed, then captured, for which all work of the GPU is waited
    for. Graphs know the addresses of the weights: make new steps after a model was moved or its adapters changed. Use
    them in one stream and one thread.

    Args:
        memory: the blocks that the caches are in.
        most_tokens: a step of more is computed as the model does it: the GPU is busy long enough.
        most_forms: so many are kept, those that were used last.
        paged: attention reads blocks where they lie, by a kernel of ours; otherwise it is the model's own, over all
            tokens that a form has room for. If not given, where the kernel fits: on an NVIDIA GPU with Triton, 16-bit
            numbers, `sdpa`, and a model that hands K and V to attention as its cache returns them.
        graphs: False for a model that can't be captured, since it looks at numbers of the GPU from the host.

    Raises:
        NotSupported: another attention than sdpa and eager, a model that takes no positions, or `paged` where that
            does not fit.
    """

    def __init__(
        self,
        model: Any,
        memory: PagedMemory,
        *,
        most_tokens: int = 256,
        most_forms: int = 64,
        paged: bool | None = None,
        graphs: bool = True,
    ) -> None:
        if model.training:
            raise ValueError("steps are for a model that answers: call model.eval() first")
        if min(most_tokens, most_forms) < 1:
            raise ValueError(f"most_tokens is {most_tokens} and most_forms {most_forms}; both must be 1 or more")
        config = model.config.get_text_config(decoder=True)
        if config._attn_implementation not in _ATTENTION:
            raise NotSupported(f"steps need attn_implementation sdpa or eager, not {config._attn_implementation}")
        if "position_ids" not in inspect.signature(model.forward).parameters:
            raise NotSupported(f"steps say where tokens stand, and {type(model).__name__} takes no position_ids")
        fits = attention.fits(model, memory)
        if paged and not fits:
            raise NotSupported(
                "attention over blocks is for NVIDIA GPUs from sm_80 on with Triton, 16-bit numbers, heads as wide as "
                "a power of two from 16 to 256, and attn_implementation sdpa"
            )
        self.model, self.memory, self.most_tokens, self.most_forms = model, memory, most_tokens, most_forms
        self.paged = fits if paged is None else paged
        self._asked = paged
        self._forward = model.forward  # as it was before `generating`
        self._forms: OrderedDict[tuple[int, int], _Form] = OrderedDict()
        rope = getattr(config, "rope_parameters", None) or {}
        can_capture = memory.device.type == "cuda" and not torch.version.hip  # not yet run with HIP
        captures = graphs and can_capture and rope.get("rope_type") not in _HOST_ROPE
        self._recorder = _Recorder(memory) if captures else None

    def __call__(self, token_ids: Tokens, cache: PagedCache) -> torch.Tensor:
        """Computes tokens behind those that a cache has, and keeps them in it; the logits of the last one, float32.

        Raises:
            ValueError: no row of tokens, or a cache of several sequences, of another memory, or closed; nothing has
                changed.
            CacheFull: there are too few blocks; nothing has changed.
            NotSupported: the model can't be captured; the cache has as many tokens as before.
        """
        if cache.pages.num_sequences != 1 or cache.pages.memory is not self.memory:
            raise ValueError("steps are for caches of one sequence, in blocks of their own memory")
        ids = _row(token_ids)
        if not len(ids):
            raise ValueError("a step has at least one token")
        with _current(self.memory.device):
            with torch.inference_mode():
                logits = self._whole(ids, cache) if len(ids) > self.most_tokens else self._short(ids, cache)
            return logits.clone()  # the next graph writes there too; and not a tensor of inference mode

    def _short(self, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        begin, end = cache.get_seq_length(), cache.get_seq_length() + len(ids)
        rows = cache.pages.enter(begin, end)
        try:
            logits = self._run(ids, begin, rows, cache.pages.expected())
        except attention.Unfit as error:
            if self._asked:
                raise
            logger.info("%s: its own attention is used", error)
            self.paged, self._forms = False, OrderedDict()
            logits = self._run(ids, begin, rows, cache.pages.expected())
        cache.pages.all_arrived()
        cache.begin_at(end)
        return logits

    def _run(
        self, ids: torch.Tensor, begin: int, rows: torch.Tensor, parts: list[tuple[int, Transfer]]
    ) -> torch.Tensor:
        room = self.memory.num_blocks * BLOCK_TOKENS if self.paged else _room(begin + len(ids))
        key = _octave(len(ids)), room
        form = self._forms.pop(key, None) or _Form(self, *key)
        self._forms[key] = form
        form.fill(ids, begin, rows)
        form.expect(parts)
        logits = form.run()
        if (extra := len(self._forms) - self.most_forms) > 0:  # behind the capture: graphs share memory with the last
            over = [old for old, other in self._forms.items() if other is not form and other.is_over()]
            for old in over[:extra]:
                del self._forms[old]
        return logits

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        """Within it `generate()` of this model uses these steps, where a call is of one sequence, in a cache that fits.

        A call with anything else to say (images, hidden states, padding, positions of its own) goes to the model.
        """
        model = self.model

        @functools.wraps(self._forward)  # generate() asks for its arguments
        def forward(*args: Any, **given: Any) -> Any:
            if args or not self._fits(given):
                return self._forward(*args, **given)
            from transformers.modeling_outputs import CausalLMOutputWithPast

            cache = given["past_key_values"]
            logits: Any = self(given["input_ids"], cache).view(1, 1, -1)
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

        before = model.__dict__.get("forward")
        model.forward = forward
        try:
            yield
        finally:
            if before is None:
                del model.forward
            else:
                model.forward = before

    def _fits(self, given: dict[str, Any]) -> bool:
        """Whether a call of `generate()` is one of ours."""
        ids, cache, keep = given.get("input_ids"), given.get("past_key_values"), given.get("logits_to_keep", 0)
        said = {name for name, value in given.items() if value is not None and value is not False}
        if ids is None or said - _USUAL - {"return_dict"} or given.get("return_dict") is False:
            return False
        if not isinstance(cache, PagedCache) or cache.pages.memory is not self.memory:
            return False
        if len(ids) != 1 or cache.pages.num_sequences != 1 or ids.shape[1] > self.most_tokens:
            return False
        if ids.shape[1] > 1 and not (isinstance(keep, int) and keep == 1):
            return False
        return _is_plain(given.get("attention_mask"), given.get("position_ids"), cache.get_seq_length(), ids.shape[1])

    def _whole(self, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        there = _pinned(ids, self.memory.device).to(self.memory.device, non_blocking=True).unsqueeze(0)
        out = self._forward(input_ids=there, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast(torch.Tensor, out.logits[0, -1].float())


class _Recorder:
    """What the graphs of one `Steps` share: memory between them, a stream to capture in and one that waits."""

    def __init__(self, memory: PagedMemory) -> None:
        make: Any = torch.cuda.Stream
        self.device, self._num_layers = memory.device, memory.shape.num_layers
        self._stream, self._arriving = make(memory.device), make(memory.device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, form: _Form) -> None:
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


class _Form:
    """A step of S tokens with room for C: its buffers, and its graph once it has one."""

    def __init__(self, steps: Steps, num_tokens: int, room: int) -> None:
        memory, device = steps.memory, steps.memory.device
        self.memory, self.room, self.num_tokens, self.paged = memory, room, num_tokens, steps.paged
        self._model, self._forward, self._recorder = steps.model, steps._forward, steps._recorder
        with torch.inference_mode(False):
            self._ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
            self._positions = torch.zeros_like(self._ids)
            self._rows = torch.zeros(room, dtype=torch.int64, device=device)  # where each token lies
            self._order = None if self.paged else torch.arange(room, device=device)
        self._cache = Cache(layers=[_FormLayer(self, n) for n in range(memory.shape.num_layers)])
        self.graph: Any = None
        self.ended: Any = None  #: of the last run
        self.arrivals: order.Arrivals | None = None
        self.logits: torch.Tensor | None = None  #: of the graph
        #: Within `compute`: where the new tokens go, where all are read, and what attention is over.
        self.places, self.seen = self._rows, self._rows
        self.context: attention.Context | None = None

    def fill(self, ids: torch.Tensor, begin: int, rows: torch.Tensor) -> None:
        """What the next run computes. Its last token is there as often as the form has room for more."""
        device, count = self.memory.device, len(ids)
        self._ids[:count].copy_(_pinned(ids, device), non_blocking=True)
        if count < self.num_tokens:
            self._ids[count:].copy_(self._ids[count - 1])
        positions = np.minimum(np.arange(begin, begin + self.num_tokens), begin + count - 1)
        self._positions.copy_(_pinned(torch.from_numpy(positions), device), non_blocking=True)
        known = min(self.room, len(rows))
        self._rows[:known].copy_(rows[:known])

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
        """Computes what was filled in; the logits of the last token, until the next graph runs."""
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
        self.places = self._rows.index_select(0, positions)
        if self.paged:
            self.context = attention.Context(self.memory, self._rows, positions)
            with attention.over(self.context, self._model):
                return self._logits_of(self.context.mask)
        assert self._order is not None
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
        self._form: Any = weakref.proxy(form)  # which has this layer: without a cycle both go at once
        self._index = index
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
            form.context.hand(self._index, key_states, value_states)
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
        return cast(int, self._form.room)


def _row(token_ids: Tokens) -> torch.Tensor:
    """One row of token ids, where they are."""
    if not isinstance(token_ids, torch.Tensor):
        return torch.from_numpy(row_of(token_ids))
    given = token_ids[0] if token_ids.ndim == 2 and len(token_ids) == 1 else token_ids
    if given.ndim != 1 or given.dtype.is_floating_point or given.dtype.is_complex or given.dtype is torch.bool:
        raise ValueError(f"a step is one row of token ids, not {token_ids.dtype} of shape {tuple(token_ids.shape)}")
    return given


def _is_plain(mask: Any, positions: Any, begin: int, count: int) -> bool:
    """Nothing is masked, and positions are those that follow what is there."""
    right = []
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
            return False
        right.append(mask.bool().all())
    if positions is not None:
        if positions.shape != (1, count):
            return False
        right.append((positions[0] == torch.arange(begin, begin + count, device=positions.device)).all())
    return bool(torch.stack(right).all()) if right else True


def _octave(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _room(count: int) -> int:
    """Of the rooms that forms have, the least for so many tokens: all of them are whole numbers of blocks."""
    part = max(_LEAST_ROOM, (1 << (count.bit_length() - 1)) // _PARTS)
    return -(-count // part) * part


def _pinned(given: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As a copy to the device in stream order needs it: a pageable one would wait for the stream."""
    return given.pin_memory() if device.type == "cuda" and given.device.type == "cpu" else given


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device that launches and events are of."""
    made: Any = torch.cuda.device
    return cast("contextlib.AbstractContextManager[Any]", made(device)) if device.type == "cuda" else _NOTHING


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
