"""Steps of a model as graphs: hundreds of kernels are one launch, so that the GPU does not wait for the host.

A step computes a few tokens behind those that a cache has, in a `Form` that serves all steps of its size. Where there
are no graphs (on a CPU, or if they are not wanted) the same form is computed directly. Owns which form a step has, and
which calls of `generate()` are steps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from dovetail.errors import NotSupported
from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.transformers import attention
from dovetail.kv.transformers.form import Form, Recorder, pinned
from dovetail.kv.transformers.memory import PagedMemory
from dovetail.kv.transformers.paged import PagedCache
from dovetail.kv.transformers.prefix import Tokens, row_of

logger = logging.getLogger(__name__)

_LEAST_ROOM = 256
_TABLE_BYTES = 16 << 20  # of the places that a form knows: no more, unless a request is longer
_PARTS = 8  # forms to each doubling of the room: what is read in vain is an eighth at most
_ATTENTION = ("sdpa", "eager")  # those that a mask of numbers can be given to
#: Rotary embeddings that depend on the largest position of a row, and look at it from the host in some versions of
#: transformers.
_HOST_ROPE = ("dynamic", "longrope")
#: What `generate()` may say and mean nothing new by it.
_USUAL = {
    "input_ids", "past_key_values", "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep",
    "return_dict",
}  # fmt: skip


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
        ValueError: the memory was made for another model.
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
        memory.shape.require_model(model)
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
        self._forms: OrderedDict[tuple[int, int, bool], Form] = OrderedDict()
        self._by_longest = not _rope_types(config).isdisjoint(_HOST_ROPE)
        can_capture = memory.device.type == "cuda" and not torch.version.hip  # not yet run with HIP
        captures = graphs and can_capture and not self._by_longest
        self._recorder = Recorder(memory) if captures else None

    def __call__(self, token_ids: Tokens, cache: PagedCache) -> torch.Tensor:
        """Computes tokens behind those that a cache has, and keeps them in it; the logits of the last one, float32.

        Raises:
            ValueError: no row of tokens, or a cache of several sequences, of another memory, or closed; nothing has
                changed.
            CacheFull: there are too few blocks; nothing has changed.
            NotSupported: the model can't be captured; the cache has as many tokens as before.
        """
        self._check(cache)
        ids = _row(token_ids)
        if not len(ids):
            raise ValueError("a step has at least one token")
        with _current(self.memory.device):
            with torch.inference_mode():
                logits = self._whole(ids, cache) if len(ids) > self.most_tokens else self._short(ids, [cache])[0]
            return logits.clone()  # the next graph writes there too; and not a tensor of inference mode

    def decode(self, token_ids: Tokens, caches: Sequence[PagedCache]) -> torch.Tensor:
        """Computes one more token of each of several requests at once: `token_ids[n]` behind what `caches[n]` has.

        With attention over blocks up to `most_tokens` of them are one step, and the model's weights are read once for
        all. With the model's own attention they are computed one after the other: it would go over the tokens of all
        for each, and a number in one request that is none would be one in all. So are those of a model whose rotation
        depends on the longest. Returns the logits, [requests, words] in float32: those of each request alone, but for
        rounding.

        Raises:
            ValueError: not a token for each cache, none, a cache that is there twice, or one as of a step; nothing has
                changed.
            CacheFull: there are too few blocks for all of them; nothing has changed.
            NotSupported: the model can't be captured; caches whose token was not computed have as many as before.
        """
        ids = _row(token_ids)
        if not 1 <= len(ids) == len(caches):
            raise ValueError(f"decoding needs a token for each cache, not {len(ids)} tokens and {len(caches)} caches")
        if len({id(cache) for cache in caches}) < len(caches):
            raise ValueError("a cache is there twice: each request has one")
        for cache in caches:
            self._check(cache)
        self.memory.ensure(sum(cache.pages.missing(cache.get_seq_length() + 1) for cache in caches))
        with _current(self.memory.device):
            with torch.inference_mode():
                logits = self._decoded(ids, caches)
            return logits.clone()

    def _decoded(self, ids: torch.Tensor, caches: Sequence[PagedCache]) -> torch.Tensor:
        """One token of each: as many at once as may be."""
        parts = []
        while len(caches) > (most := self._most_together):
            parts.append(self._short(ids[:most], caches[:most])[:most].clone())  # the next graph writes there too
            ids, caches = ids[most:], caches[most:]
        parts.append(self._short(ids, caches)[: len(caches)])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    @property
    def _most_together(self) -> int:
        return self.most_tokens if self.paged and not self._by_longest else 1

    def _check(self, cache: PagedCache) -> None:
        if cache.pages.num_sequences != 1 or cache.pages.memory is not self.memory:
            raise ValueError("steps are for caches of one sequence, in blocks of their own memory")
        if not cache.pages.is_open:
            raise ValueError("the cache is closed: make a new one")
        if not cache.is_even:
            cache.require_all_layers()

    def _short(self, ids: torch.Tensor, caches: Sequence[PagedCache]) -> torch.Tensor:
        """Tokens of one cache, or one of each of several; the logits of the last token of each, and perhaps more."""
        each = len(ids) if len(caches) == 1 else 1
        begins = [cache.get_seq_length() for cache in caches]
        rows = [cache.pages.enter(begin, begin + each) for cache, begin in zip(caches, begins, strict=True)]
        positions = [begin + n for begin in begins for n in range(each)]
        try:
            logits = self._run(ids, positions, rows, caches)
        except attention.Unfit as error:
            if self._asked:
                raise
            logger.info("%s: its own attention is used", error)
            self.paged, self._forms = False, OrderedDict()
            return self._short(ids, caches) if len(caches) == 1 else self._decoded(ids, caches)
        for cache, begin in zip(caches, begins, strict=True):
            cache.pages.all_arrived()
            cache.begin_at(begin + each)
        return logits

    def _run(
        self, ids: torch.Tensor, positions: list[int], rows: list[torch.Tensor], caches: Sequence[PagedCache]
    ) -> torch.Tensor:
        number, apart = _octave(len(ids)), len(caches) > 1
        key = number, self._room_for(max(positions) + 1, number if apart else 1), apart
        form = self._forms.pop(key, None) or Form(
            self.model, self._forward, self.memory, self._recorder,
            num_tokens=number, room=key[1], apart=apart, paged=self.paged,
        )  # fmt: skip
        self._forms[key] = form
        form.fill(ids, positions, rows)
        parts = [part for cache in caches for part in cache.pages.expected()]
        form.expect(sorted(parts, key=lambda part: part[0]))
        logits = form.run()
        if (extra := len(self._forms) - self.most_forms) > 0:  # behind the capture: graphs share memory with the last
            over = [old for old, other in self._forms.items() if other is not form and other.is_over()]
            for old in over[:extra]:
                del self._forms[old]
        return logits

    def _room_for(self, count: int, num_sequences: int) -> int:
        """Tokens that a form has room for, in each of its sequences. Over blocks it costs only the table of places."""
        if not self.paged:
            return _room(count)
        every = self.memory.num_blocks * BLOCK_TOKENS
        return every if num_sequences == 1 else min(every, max(_octave(count), _TABLE_BYTES // (8 * num_sequences)))

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
        if ids is None or said - _USUAL or given.get("return_dict") is False:
            return False
        if not isinstance(cache, PagedCache) or cache.pages.memory is not self.memory:
            return False
        if len(ids) != 1 or cache.pages.num_sequences != 1 or ids.shape[1] > self.most_tokens:
            return False
        if ids.shape[1] > 1 and not (isinstance(keep, int) and keep == 1):
            return False
        return _is_plain(given.get("attention_mask"), given.get("position_ids"), cache.get_seq_length(), ids.shape[1])

    def _whole(self, ids: torch.Tensor, cache: PagedCache) -> torch.Tensor:
        there = pinned(ids, self.memory.device).to(self.memory.device, non_blocking=True).unsqueeze(0)
        out = self._forward(input_ids=there, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast(torch.Tensor, out.logits[0, -1].float())


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


def _rope_types(config: Any) -> set[Any]:
    """The rotary embeddings of a model; some have others in other layers."""
    given = getattr(config, "rope_parameters", None) or {}
    return {of.get("rope_type") for of in (given, *given.values()) if isinstance(of, dict)}


def _octave(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


def _room(count: int) -> int:
    """Of the rooms that forms have, the least for so many tokens: all of them are whole numbers of blocks."""
    part = max(_LEAST_ROOM, (1 << (count.bit_length() - 1)) // _PARTS)
    return -(-count // part) * part


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The device that launches and events are of."""
    made: Any = torch.cuda.device
    return cast("contextlib.AbstractContextManager[Any]", made(device)) if device.type == "cuda" else _NOTHING


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
