"""Time to the first token of a prompt whose prefix is kept, by contender and length of the prefix.

From the request to its logits on the host. Contenders have turns, round by round; before each the cache is poisoned,
and each result is compared.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dovetail.bench.serve.contender import Contender, keeper
from dovetail.bench.serve.likeness import Likeness
from dovetail.bench.serve.server import TIMEOUT_S, Server, Tokens
from dovetail.bench.serve.spec import Spec
from dovetail.kv.choose import Path
from dovetail.kv.learn import SETTLED
from dovetail.kv.transformers import PagedCache
from dovetail.measure.stats import median

Row = dict[str, Any]
SECTION = "first token"
_WARM = 2


@dataclass(slots=True)
class _Entry:
    contender: Contender
    likeness: Likeness
    times_us: list[float] = field(default_factory=list)
    admits_us: list[float] = field(default_factory=list)
    fetched: int = 0  #: tokens
    chose: str | None = None  #: the path that the first part of a fetch took


def measure(spec: Spec, server: Server, contenders: list[Contender], tokens: int) -> list[Row]:
    """A row for each contender."""
    rng = np.random.default_rng([spec.seed, tokens])
    prompt = rng.integers(0, server.shape.vocabulary, tokens + spec.suffix_tokens)
    keeps = keeper(contenders)
    whole, stepped = references(server, prompt, tokens, keeps)
    entries = [_Entry(c, Likeness(server.shape.dtype)) for c in contenders]
    for entry in entries:
        for _ in range(warm_ups(entry.contender)):
            _once(server, prompt, entry, warm=True, references=(whole, stepped))
    for _ in range(spec.rounds):
        for entry in entries:
            _once(server, prompt, entry, warm=False, references=(whole, stepped))
    return [_row(spec, entry, tokens, server) for entry in entries]


def warm_ups(contender: Contender) -> int:
    """Requests before those that count: a model's first steps are slow, and `auto` tries what is near the best."""
    learns = contender.fetch is not None and contender.fetch.path is Path.AUTO
    return _WARM + (SETTLED if learns else 0)


def references(server: Server, prompt: Tokens, tokens: int, keeps: Contender) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a whole computation, and of prefix and rest one after the other; the prefix is kept afterwards."""
    server.poison()
    with server.admit(prompt, Contender(name="whole"), room=0) as cache:
        whole = server.first(prompt, cache)
    server.poison()
    server.use(keeps)
    with server.admit(prompt, Contender(name="steps"), room=0) as cache:
        server.first(prompt[:tokens], cache)
        server.store.keep(cache, prompt[:tokens]).wait(TIMEOUT_S)
        stepped = server.first(prompt, cache)
    return whole, stepped


def _once(
    server: Server, prompt: Tokens, entry: _Entry, *, warm: bool, references: tuple[torch.Tensor, torch.Tensor]
) -> None:
    server.poison()
    server.use(entry.contender)
    began = time.perf_counter_ns()
    with server.admit(prompt, entry.contender, room=0) as cache:
        admitted = time.perf_counter_ns()
        entry.fetched, entry.chose = cache.get_seq_length(), _chosen(cache)
        logits = server.first(prompt, cache)
        ended = time.perf_counter_ns()
    whole, stepped = references
    entry.likeness.add(logits, whole, whole if entry.contender.fetch is None else stepped)
    if not warm:
        entry.admits_us.append((admitted - began) / 1e3)
        entry.times_us.append((ended - began) / 1e3)


def _chosen(cache: PagedCache) -> str | None:
    """The path of a transfer on a GPU."""
    choice = getattr(cache.pages.moves[0].parts[0], "choice", None) if cache.pages.moves else None
    return None if choice is None else str(choice.path)


def _row(spec: Spec, entry: _Entry, tokens: int, server: Server) -> Row:
    wanted = 0 if entry.contender.fetch is None else tokens // 16 * 16
    found = entry.likeness.row()
    right = found["correct"] and entry.fetched == wanted
    return {
        "section": SECTION, "tokens": tokens, "suffix_tokens": spec.suffix_tokens, "contender": entry.contender.name,
        "path": entry.contender.path, "chose": entry.chose, "fetched_tokens": entry.fetched,
        "fetched_bytes": server.shape.blocks(entry.fetched) * server.shape.block_bytes,
        "admit_us": round(median(entry.admits_us), 1) if right else None,
        "time_us": round(median(entry.times_us), 1) if right else None,
        "times_us": [round(t, 1) for t in entry.times_us], "iterations": len(entry.times_us),
        **found, "correct": right,
    }  # fmt: skip
