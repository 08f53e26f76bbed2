"""Requests per second with several in flight, by contender and share of requests whose prefix is kept.

A request is a prefix, a suffix that is never kept, and a few tokens to decode. What follows is admitted, and so
fetched, while the one before is computed; who has missed keeps his prefix afterwards, under a salt of the pass, so that
the next contender misses it too. Contenders have turns, pass by pass, over the same requests; the first pass of each
does not count.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dovetail.bench.serve.contender import Contender, keeper
from dovetail.bench.serve.likeness import Likeness
from dovetail.bench.serve.server import EVERYBODY, TIMEOUT_S, Server, Tokens
from dovetail.bench.serve.spec import Spec
from dovetail.kv.prefixes import Move
from dovetail.kv.transformers import PagedCache
from dovetail.measure.stats import median

Row = dict[str, Any]
SECTION = "requests"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, whether its prefix is kept, and the logits of its first token."""

    prompt: Tokens
    hit: bool
    whole: torch.Tensor | None = None
    stepped: torch.Tensor | None = None


@dataclass(slots=True)
class _Entry:
    contender: Contender
    likeness: Likeness
    seconds: list[float] = field(default_factory=list)
    fetched: int = 0  #: tokens, in one pass


def measure(spec: Spec, server: Server, contenders: list[Contender], hit_rate: float) -> list[Row]:
    """A row for each contender."""
    keeps = keeper(contenders)
    requests = _requests(spec, server, hit_rate, keeps)
    entries = [_Entry(c, Likeness(server.shape.dtype)) for c in contenders]
    once = _Entry(Contender(name="reference"), Likeness(server.shape.dtype))
    _serve(spec, server, requests, once, salt=b"reference")  # also warms up
    server.use(keeps)
    for request in requests:
        request.stepped = _alone(server, request, keeps) if request.hit else request.whole
    for n in range(1 + spec.passes):
        for entry in entries:
            if entry.contender.fetch is None and n != 1:  # once is enough: it takes the longest by far
                continue
            server.poison()
            server.use(entry.contender)
            _serve(spec, server, requests, entry, salt=f"{hit_rate}, {n}, {entry.contender.name}".encode())
    for entry in entries:
        if entry.contender.fetch is not None:
            del entry.seconds[0]  # there paths were tried, and kernels compiled
    return [_row(spec, entry, hit_rate, requests) for entry in entries]


def _requests(spec: Spec, server: Server, hit_rate: float, keeps: Contender) -> list[Request]:
    rng = np.random.default_rng([spec.seed, round(hit_rate * 1000), spec.serve_tokens])
    words, count = server.shape.vocabulary, spec.num_requests
    prefixes = [rng.integers(0, words, spec.serve_tokens) for _ in range(spec.num_prefixes)]
    hits = rng.permutation(np.arange(count) < round(hit_rate * count)).tolist()
    server.use(keeps)
    for prefix in prefixes if any(hits) else ():
        with server.admit(prefix, Contender(name="whole"), room=0) as cache:
            server.first(prefix, cache)
            server.store.keep(cache, prefix).wait(TIMEOUT_S)
    made = []
    for n, hit in enumerate(hits):
        prefix = prefixes[n % len(prefixes)] if hit else rng.integers(0, words, spec.serve_tokens)
        made.append(Request(np.concatenate([prefix, rng.integers(0, words, spec.suffix_tokens)]), hit))
    return made


def _alone(server: Server, request: Request, keeps: Contender) -> torch.Tensor:
    """The first token of a request whose prefix is fetched and there before anything else begins."""
    server.poison()
    with server.admit(request.prompt, keeps, room=0) as cache:
        server.synchronize()
        return server.first(request.prompt, cache)


def _serve(spec: Spec, server: Server, requests: list[Request], entry: _Entry, *, salt: bytes) -> None:
    """One pass."""
    contender = entry.contender
    waiting, flying = deque(requests), deque[tuple[Request, PagedCache]]()
    results: list[torch.Tensor] = []
    moves: list[Move] = []
    fetched = 0
    server.synchronize()
    began = time.perf_counter()
    try:
        while waiting or flying:
            while waiting and len(flying) < spec.in_flight:
                request = waiting.popleft()
                mine = EVERYBODY if request.hit else salt
                flying.append((request, server.admit(request.prompt, contender, room=spec.new_tokens, salt=mine)))
            request, cache = flying.popleft()
            with cache:
                fetched += cache.get_seq_length()
                results.append(_answer(server, request, cache, spec.new_tokens))
                if contender.store is not None and not request.hit:
                    moves.append(server.store.keep(cache, request.prompt[: spec.serve_tokens], salt=salt))
    finally:
        for _, cache in flying:
            cache.close()
    entry.seconds.append(time.perf_counter() - began)
    for move in moves:
        move.wait(TIMEOUT_S)
    entry.fetched = fetched
    for request, logits in zip(requests, results, strict=True):
        if request.whole is None:
            request.whole = logits
        stepped = request.whole if contender.fetch is None else request.stepped
        assert stepped is not None
        entry.likeness.add(logits, request.whole, stepped)


def _answer(server: Server, request: Request, cache: PagedCache, new_tokens: int) -> torch.Tensor:
    """Computes and decodes a request; the logits of its first token."""
    first = logits = server.first(request.prompt, cache)
    for _ in range(new_tokens - 1):
        logits = server.step(np.array([int(logits.argmax())]), cache)
    return first


def _row(spec: Spec, entry: _Entry, hit_rate: float, requests: list[Request]) -> Row:
    hits = sum(request.hit for request in requests)
    wanted = 0 if entry.contender.fetch is None else hits * (spec.serve_tokens // 16 * 16)
    found = entry.likeness.row()
    right = found["correct"] and entry.fetched == wanted
    seconds = median(entry.seconds)
    return {
        "section": SECTION, "tokens": spec.serve_tokens, "suffix_tokens": spec.suffix_tokens,
        "new_tokens": spec.new_tokens, "hit_rate": hit_rate, "num_hits": hits, "num_requests": len(requests),
        "in_flight": spec.in_flight, "contender": entry.contender.name, "path": entry.contender.path,
        "fetched_tokens": entry.fetched, "requests_per_s": len(requests) / seconds if right else None,
        "time_us": round(seconds * 1e6 / len(requests), 1) if right else None,
        "passes_s": [round(s, 4) for s in entry.seconds], "iterations": len(entry.seconds), **found, "correct": right,
    }  # fmt: skip
