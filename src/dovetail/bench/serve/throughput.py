"""Requests per second with several in flight, by contender and share of requests whose prefix is kept.

A request is a prefix, a suffix that is never kept, and a few tokens to decode. The server goes in rounds: it admits,
and so fetches, what it has room for, computes the prompt of one whose prefix has arrived, and decodes a token of all
that have begun, together where steps are graphs: with one prompt a round, of as many at most as each has tokens to
decode. Tokens stay on the device; the host is one round ahead. Who has missed keeps his prefix afterwards, under a salt
of the pass, so that the next contender misses it too. Contenders have turns, pass by pass, over the same requests; the
first pass of each does not count.
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
from dovetail.bench.serve.server import EVERYBODY, TIMEOUT_S, Landing, Server, Tokens
from dovetail.bench.serve.spec import Spec
from dovetail.kv.prefixes import Move
from dovetail.kv.transformers import PagedCache
from dovetail.measure.stats import median

Row = dict[str, Any]
SECTION = "requests"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, whether its prefix is kept, the logits of its first token, and what follows."""

    prompt: Tokens
    hit: bool
    whole: torch.Tensor | None = None
    stepped: torch.Tensor | None = None
    text: torch.Tensor | None = None  #: of each token behind the first: its logit, and which it is


@dataclass(slots=True, eq=False)
class _Flight:
    """A request in flight."""

    request: Request
    cache: PagedCache
    left: int  #: tokens to decode
    last: torch.Tensor | None = None  #: token, on the device
    text: list[torch.Tensor] = field(default_factory=list)  #: logit and token of each decoded one, likewise


@dataclass(slots=True)
class _Entry:
    contender: Contender
    likeness: Likeness
    seconds: list[float] = field(default_factory=list)
    fetched: int = 0  #: tokens, in one pass
    together: list[int] = field(default_factory=list)  #: requests of each decoding, in one pass


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
    waiting, coming, decoding = deque(requests), list[_Flight](), list[_Flight]()
    firsts: dict[int, Landing] = {}  # of a request, by its id: the logits of its first token
    texts: dict[int, Landing] = {}  # and what came behind it
    rounds = deque[Landing]()
    moves: list[Move] = []
    fetched = 0
    entry.together = []

    def leave(flight: _Flight) -> None:
        decoding.remove(flight)
        if flight.text:
            texts[id(flight.request)] = Landing(torch.stack(flight.text))
        with flight.cache:
            if contender.store is not None and not flight.request.hit:
                prefix = flight.request.prompt[: spec.serve_tokens]
                moves.append(server.store.keep(flight.cache, prefix, salt=salt))

    server.synchronize()
    began = time.perf_counter()
    try:
        while waiting or coming or decoding:
            while waiting and len(coming) + len(decoding) < spec.in_flight:
                request = waiting.popleft()
                mine = EVERYBODY if request.hit else salt
                cache = server.admit(request.prompt, contender, room=spec.new_tokens, salt=mine)
                fetched += cache.get_seq_length()
                coming.append(_Flight(request, cache, spec.new_tokens - 1))
            if flight := _next(coming, is_urgent=not decoding):
                coming.remove(flight)
                decoding.append(flight)
                logits = server.compute(flight.request.prompt, flight.cache)
                firsts[id(flight.request)] = Landing(logits)
                flight.last = logits.argmax()
            rounds.append(Landing(_decode(server, decoding, entry.together)))
            for flight in [flight for flight in decoding if not flight.left]:
                leave(flight)
            if len(rounds) > 1:
                rounds.popleft().wait()
        for landing in (*rounds, *firsts.values(), *texts.values()):
            landing.wait()
    finally:
        for flight in (*coming, *decoding):
            flight.cache.close()
    entry.seconds.append(time.perf_counter() - began)
    for move in moves:
        move.wait(TIMEOUT_S)
    entry.fetched = fetched
    for request in requests:
        logits = firsts[id(request)].wait()
        text = texts[id(request)].wait() if id(request) in texts else torch.empty(0, 2)
        if request.whole is None or request.text is None:
            request.whole, request.text = logits, text
        stepped = request.whole if contender.fetch is None else request.stepped
        assert stepped is not None
        entry.likeness.add(logits, request.whole, stepped)
        entry.likeness.add_text(text, request.text, logits, request.whole)


def _decode(server: Server, flights: list[_Flight], together: list[int]) -> torch.Tensor:
    """One more token of each that wants one; the last tokens of all. `together` gets how many those were."""
    if going := [flight for flight in flights if flight.left]:
        together.append(len(going))
        largest, tokens = server.decode(_last(going), [flight.cache for flight in going]).max(1)
        said = torch.stack((largest, tokens), 1)  # as floats, which tell all tokens apart
        for flight, token, text in zip(going, tokens, said, strict=True):
            flight.last, flight.left = token, flight.left - 1
            flight.text.append(text)
    return _last(flights)


def _last(flights: list[_Flight]) -> torch.Tensor:
    return torch.stack([flight.last for flight in flights if flight.last is not None])


def _next(coming: list[_Flight], *, is_urgent: bool) -> _Flight | None:
    """Whose prompt is computed next: of the first whose prefix is there. It is waited for if nothing else is to do."""
    here = next((flight for flight in coming if flight.cache.has_arrived), None)
    return here or (coming[0] if is_urgent and coming else None)


def _row(spec: Spec, entry: _Entry, hit_rate: float, requests: list[Request]) -> Row:
    hits = sum(request.hit for request in requests)
    wanted = 0 if entry.contender.fetch is None else hits * (spec.serve_tokens // 16 * 16)
    found = entry.likeness.row()
    right = found["correct"] and entry.fetched == wanted
    seconds = median(entry.seconds)
    return {
        "section": SECTION, "tokens": spec.serve_tokens, "suffix_tokens": spec.suffix_tokens,
        "new_tokens": spec.new_tokens, "hit_rate": hit_rate, "num_hits": hits, "num_requests": len(requests),
        "in_flight": spec.in_flight, "decoded": "together" if spec.graphs else "one by one",
        "decoded_at_once": max(entry.together, default=0),
        "contender": entry.contender.name, "path": entry.contender.path,
        "fetched_tokens": entry.fetched, "requests_per_s": len(requests) / seconds if right else None,
        "time_us": round(seconds * 1e6 / len(requests), 1) if right else None,
        "passes_s": [round(s, 4) for s in entry.seconds], "iterations": len(entry.seconds), **found, "correct": right,
    }  # fmt: skip
