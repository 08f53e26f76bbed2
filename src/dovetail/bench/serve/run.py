"""Runs a bench of serving: each model in turn; first tokens, requests per second, contexts in host memory."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from dovetail.bench.serve import first_token, offload, throughput
from dovetail.bench.serve.contender import Contender, contender
from dovetail.bench.serve.server import Server
from dovetail.bench.serve.shapes import ServedModel, build
from dovetail.bench.serve.spec import Spec
from dovetail.errors import DovetailError, NotSupported

if TYPE_CHECKING:
    from dovetail.bench.gpu.session import Session

logger = logging.getLogger(__name__)

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]


def measure(spec: Spec, session: Session | None, progress: Progress | None = None) -> tuple[list[Row], list[str]]:
    """Rows of all models, and a line for each part that failed; without a session on the CPU.

    Raises:
        ValueError: a cache that is too small; nothing was measured.
        NotSupported: more memory would be pinned than the session allows; nothing was measured.
    """
    blocks = {model.name: spec.cache_blocks(model) for model in spec.models}
    most = max(spec.pinned_bytes(model) for model in spec.models)
    if session is not None and most > session.pin_limit_bytes:
        raise NotSupported(f"{most} bytes of pinned memory are needed; {session.limit_text()}")
    run = _Run(spec, session, progress)
    for shape in spec.models:
        run.model(shape, blocks[shape.name])
        gc.collect()
        if session is not None:
            torch.cuda.empty_cache()
    return run.rows, run.notes


class _Run:
    """What is measured so far: a part that fails does not take the others with it."""

    def __init__(self, spec: Spec, session: Session | None, progress: Progress | None) -> None:
        self._spec, self._session, self._progress = spec, session, progress
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self._done = 0

    def model(self, shape: ServedModel, num_blocks: int) -> None:
        """All parts of one model."""
        spec, session = self._spec, self._session
        backend = "cpu" if session is None else "cuda"
        contenders = [
            contender(
                name, backend, row_bytes=shape.row_bytes, num_layers=shape.num_layers, graphs=spec.graphs
            )
            for name in spec.contenders
        ]  # fmt: skip
        if all(c.fetch is None for c in contenders):
            raise ValueError("--path: name at least one that fetches")
        pool_blocks = spec.pool_blocks(shape)
        with _threads(session), _stream(session):
            self._tell(shape, "weights")
            model = build(shape, "cpu" if session is None else "cuda:0", spec.seed)
            with Server(
                shape, model, num_blocks=num_blocks, pool_blocks=pool_blocks, session=session, seed=spec.seed,
                graphs=spec.graphs,
            ) as server:  # fmt: skip
                for n in spec.tokens:
                    self._part(shape, f"first token, {n} tokens", first_token.measure, spec, server, contenders, n)
                for rate in spec.hit_rates:
                    here = _serving(contenders)
                    self._part(shape, f"requests, {rate:.0%} kept", throughput.measure, spec, server, here, rate)
            del server  # and its memory
            for n in spec.offload_tokens:
                self._part(shape, f"offload, {n} tokens", offload.measure, spec, shape, model, n)

    def _part(self, shape: ServedModel, what: str, part: Callable[..., list[Row]], *arguments: Any) -> None:
        self._tell(shape, what)
        spec = self._spec
        same = {
            "collective": "kv", "backend": "cpu" if self._session is None else "cuda", "model": shape.name,
            "num_layers": shape.num_layers, "row_bytes": shape.row_bytes, "cache_bytes": spec.cache_bytes,
            "pool_bytes": spec.pool_blocks(shape) * shape.block_bytes, "transformers": version("transformers"),
            "steps": "graph" if spec.graphs else "plain",
        }  # fmt: skip
        try:
            self.rows += [same | row for row in part(*arguments)]
        except (DovetailError, RuntimeError) as error:  # of torch too
            logger.exception("%s, %s failed", shape.name, what)
            self.notes.append(f"{shape.name}, {what} failed: {type(error).__name__}: {error}")
        self._done += 1

    def _tell(self, shape: ServedModel, what: str) -> None:
        spec = self._spec
        parts = len(spec.models) * (len(spec.tokens) + len(spec.hit_rates) + len(spec.offload_tokens))
        if self._progress:
            self._progress(self._done, parts, f"{shape.name}, {what}")


def _serving(contenders: list[Contender]) -> list[Contender]:
    """For requests per second; dma-2d is auto's choice in nearly all cases, and passes take long."""
    names = {c.name for c in contenders}
    return [c for c in contenders if c.name != "dma-2d" or "auto" not in names]


def _stream(session: Session | None) -> contextlib.AbstractContextManager[Any]:
    """A stream of our own: the default one takes part in waits that nobody asked for."""
    if session is None:
        return contextlib.nullcontext()
    make: Any = torch.cuda.Stream
    return torch.cuda.stream(make())


@contextlib.contextmanager
def _threads(session: Session | None) -> Iterator[None]:
    """On the CPU one thread: several wait for the slowest of them wherever others work too."""
    before = torch.get_num_threads()
    if session is None:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
