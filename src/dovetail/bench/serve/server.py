"""A server of one model, as small as can be: admits a prompt, computes what is missing of it, and decodes.

Owns model, blocks and pool. All is computed in one stream; what is admitted ahead is fetched meanwhile. Blocks are
scattered over the cache, as after a while of serving.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
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
        taken = free[self._rng.choice(len(free), number, replace=False)]
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

    def compute(self, prompt: Tokens, cache: PagedCache) -> torch.Tensor:
        """Computes what is missing of a prompt; the logits of its last token, on the device."""
        tokens = prompt[cache.get_seq_length() :]
        return _logits(self.model, tokens, cache) if self._steps is None else self._steps(tokens, cache)

    def first(self, prompt: Tokens, cache: PagedCache) -> torch.Tensor:
        """The same, on the host."""
        return Landing(self.compute(prompt, cache)).wait()

    def decode(self, tokens: torch.Tensor, caches: Sequence[PagedCache]) -> torch.Tensor:
        """One more token of each request, all of them on the device: their logits."""
        if self._steps is not None:
            return self._steps.decode(tokens, caches)
        return torch.stack([_logits(self.model, tokens[n : n + 1], cache) for n, cache in enumerate(caches)])

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
    return Landing(_logits(model, tokens, cache)).wait()


def _logits(model: Any, tokens: Tokens | torch.Tensor, cache: Any) -> torch.Tensor:
    ids = tokens if isinstance(tokens, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(tokens))
    if model.device.type == "cuda" and ids.device.type == "cpu":  # pinned: a pageable copy would wait for the stream
        ids = ids.pin_memory().to(model.device, non_blocking=True)
    with torch.inference_mode():
        out = model(input_ids=ids.unsqueeze(0), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cast(torch.Tensor, out.logits[0, -1].float())


class Landing:
    """Something of the device on its way to the host."""

    def __init__(self, found: torch.Tensor) -> None:
        self._here = found
        self._landed: Any = None
        if found.device.type != "cpu":
            self._here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._here.copy_(found, non_blocking=True)
            cuda: Any = torch.cuda
            self._landed = cuda.Event()
            self._landed.record()

    def wait(self) -> torch.Tensor:
        """It, once it is there; raises `Timeout`."""
        deadline = time.monotonic() + TIMEOUT_S
        while self._landed is not None and not self._landed.query():
            if time.monotonic() > deadline:
                raise Timeout(f"the logits of a step were not there after {TIMEOUT_S:g} s: a copy did not land")
        return self._here
