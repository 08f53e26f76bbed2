"""A server of one model, as small as can be: admits a prompt, computes what is missing of it, and decodes.

Owns model, blocks and pool. Requests are computed one at a time, in one stream; what is admitted ahead is fetched
meanwhile. Blocks are scattered over the cache, as after a while of serving.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.bench.serve.contender import Contender, SwitchedMover
from dovetail.bench.serve.shapes import ServedModel
from dovetail.errors import NotSupported, Timeout
from dovetail.kv.choose import Path
from dovetail.kv.prefixes import Prefixes
from dovetail.kv.transformers import PagedCache, PagedMemory, PrefixStore, Steps, serving

if TYPE_CHECKING:
    from dovetail.bench.gpu.session import Session

Tokens = NDArray[np.int64]
EVERYBODY = b"everybody"
TIMEOUT_S = 120.0


class Scattered:
    """Hands out blocks in random order; or in a row where there is one, while `together` is set."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self._rng, self._is_free = np.random.default_rng(seed), np.ones(num_blocks, np.bool_)
        self.together = False

    @property
    def num_free(self) -> int:
        """Blocks that nobody has."""
        return int(np.count_nonzero(self._is_free))

    def alloc(self, number: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Any blocks."""
        free = np.flatnonzero(self._is_free)
        taken = self._rng.permutation(free)[:number]
        if self.together and number:
            first = np.flatnonzero(free[number - 1 :] - free[: len(free) - number + 1] == number - 1)
            taken = free[first[0]] + np.arange(number) if len(first) else taken
        self._is_free[taken] = False
        return taken

    def free(self, slots: Any) -> None:
        """Takes them back."""
        self._is_free[slots] = True


class Server:
    """`with Server(shape, model, num_blocks=..., pool_blocks=..., session=...) as server:`; no session: on the CPU.

    `graphs`: short steps are graphs; otherwise the host launches their kernels one by one.
    """

    def __init__(
        self, shape: ServedModel, model: Any, *, num_blocks: int, pool_blocks: int, session: Session | None, seed: int,
        graphs: bool = False,
    ) -> None:  # fmt: skip
        self.shape, self.model, self._session = shape, model, session
        self._blocks = Scattered(num_blocks, seed)
        self.memory = PagedMemory.for_model(model, num_blocks, allocator=self._blocks)
        self.device = self.memory.device
        self._mover: SwitchedMover | None = None
        self._kept = self._prefixes(pool_blocks * shape.block_bytes)
        self.store = PrefixStore(self.memory, kept=self._kept)
        self._steps = Steps(model, self.memory) if graphs else None

    def _prefixes(self, pool_bytes: int) -> Prefixes:
        layout, session = self.memory.layout, self._session
        if session is None:
            return Prefixes.on_cpu(layout, self.memory.bytes(), pool_bytes=pool_bytes)
        if session.pinned_bytes + pool_bytes > session.pin_limit_bytes:
            raise NotSupported(f"{pool_bytes} bytes of pinned memory are over the limit; {session.limit_text()}")
        kept, self._mover = serving.prefixes(self.memory, session.device, pool_bytes, Path.AUTO, SwitchedMover)
        return kept

    def use(self, contender: Contender) -> None:
        """From now on bytes move as this contender does it."""
        if self._mover is not None:
            self._mover.turn = contender
        self.store.layers, self._blocks.together = contender.layers, contender.runs

    def admit(self, prompt: Tokens, contender: Contender, *, room: int, salt: bytes = EVERYBODY) -> PagedCache:
        """A cache for a prompt; what is kept of it is under way."""
        if contender.fetch is None:
            return PagedCache(self.memory, num_tokens=len(prompt) + room)
        return self.store.begin(prompt, room=room, salt=salt)

    def step(self, tokens: Tokens, cache: PagedCache) -> torch.Tensor:
        """Computes tokens behind those that a cache has; the logits of the last one, on the host."""
        if self._steps is None:
            return step(self.model, tokens, cache)
        return _on_host(self._steps(tokens, cache))

    def first(self, prompt: Tokens, cache: PagedCache) -> torch.Tensor:
        """Computes what is missing of a prompt; its logits."""
        return self.step(prompt[cache.get_seq_length() :], cache)

    def poison(self) -> None:
        """Writes no-numbers over all blocks: what reads one that nobody has filled shows. No cache may be open."""
        self.memory.tokens.fill_(float("nan"))
        self.memory.fence.behind_compute()
        self.synchronize()

    def synchronize(self) -> None:
        """Waits until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Waits for what is under way and gives the pool back."""
        self._kept.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def step(model: Any, tokens: Tokens, cache: Any) -> torch.Tensor:
    """Computes tokens behind those that a cache has; the logits of the last one, on the host.

    Raises:
        Timeout: they have not come after two minutes.
    """
    ids = torch.from_numpy(np.ascontiguousarray(tokens)).unsqueeze(0)
    if model.device.type == "cuda":  # pinned: a pageable copy would wait for the stream
        ids = ids.pin_memory().to(model.device, non_blocking=True)
    with torch.inference_mode():
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = cast(torch.Tensor, out.logits[0, -1].float())
    return _on_host(logits)


def _on_host(found: torch.Tensor) -> torch.Tensor:
    if found.device.type == "cpu":
        return found
    here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
    here.copy_(found, non_blocking=True)
    cuda: Any = torch.cuda
    landed, deadline = cuda.Event(), time.monotonic() + TIMEOUT_S
    landed.record()
    while not landed.query():
        if time.monotonic() > deadline:
            raise Timeout(f"the logits of a step were not there after {TIMEOUT_S:g} s: a copy did not land")
    return here
