"""Time of a decoded token with a long context in host memory, beside transformers' own offloading.

`device` keeps everything on the device: what offloading costs is seen against it. `stock` is
`DynamicCache(offloading=True)`; it needs a GPU, and runs in the default stream, which its waits are about.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dovetail.bench.serve.likeness import Likeness
from dovetail.bench.serve.server import Tokens, step
from dovetail.bench.serve.shapes import ServedModel
from dovetail.bench.serve.spec import Spec
from dovetail.kv.transformers import KVShape, OffloadedCache
from dovetail.measure.stats import median

Row = dict[str, Any]
SECTION = "offload"
DEVICE, STOCK, OURS = "device", "stock", "offloaded"
_STEPS = 6  #: tokens that are decoded; the first warms up


def measure(spec: Spec, shape: ServedModel, model: Any, tokens: int) -> list[Row]:
    """A row for each way to hold the context."""
    rng = np.random.default_rng([spec.seed, tokens])
    prompt, decoded = rng.integers(0, shape.vocabulary, tokens), rng.integers(0, shape.vocabulary, _STEPS)
    wanted: list[torch.Tensor] = []
    rows = []
    for name, make in _ways(model, tokens + _STEPS).items():
        with make() as cache, _stream(name, model.device):
            logits, times_us = _run(model, cache, prompt, decoded)
            device_bytes = _device_bytes(cache, model.device)
        wanted = wanted or logits
        likeness = Likeness(shape.dtype)
        for mine, right in zip(logits, wanted, strict=True):
            likeness.add(mine, right, right)
        rows.append(_row(name, tokens, times_us, likeness, device_bytes))
    return rows


def _ways(model: Any, tokens: int) -> dict[str, Callable[[], Any]]:
    from transformers import DynamicCache

    shape = KVShape.of(model)
    found: dict[str, Callable[[], Any]] = {DEVICE: lambda: contextlib.nullcontext(DynamicCache(config=model.config))}
    if model.device.type == "cuda":
        found[STOCK] = lambda: contextlib.nullcontext(DynamicCache(config=model.config, offloading=True))
    found[OURS] = lambda: OffloadedCache(shape, tokens, device=model.device)
    return found


def _run(model: Any, cache: Any, prompt: Tokens, decoded: Tokens) -> tuple[list[torch.Tensor], list[float]]:
    """Logits and microseconds, of the prompt and of each token behind it."""
    logits, times_us = [], []
    for tokens in (prompt, *np.split(decoded, len(decoded))):
        began = time.perf_counter_ns()
        logits.append(step(model, tokens, cache))
        times_us.append((time.perf_counter_ns() - began) / 1e3)
    return logits, times_us


@contextlib.contextmanager
def _stream(name: str, device: torch.device) -> Iterator[None]:
    if name != STOCK:
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        yield
    torch.cuda.synchronize(device)


def _device_bytes(cache: Any, device: torch.device) -> int:
    """What is on the device between two steps; a part of a step may take more."""
    if isinstance(cache, OffloadedCache):
        return cache.device_bytes
    return sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values) if t.device.type == device.type)


def _row(name: str, tokens: int, times_us: list[float], likeness: Likeness, device_bytes: int) -> Row:
    found = likeness.row()
    return {
        "section": SECTION, "tokens": tokens, "contender": name, "path": "", "device_bytes": device_bytes,
        "prefill_us": round(times_us[0], 1) if found["correct"] else None,
        "time_us": round(median(times_us[2:]), 1) if found["correct"] else None,
        "times_us": [round(t, 1) for t in times_us[2:]], "iterations": len(times_us) - 2, **found,
    }  # fmt: skip
