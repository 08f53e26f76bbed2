"""Counts of what was called: `stats()`. Owns the counters of this process, not the calls, which may be gone."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from dovetail.coll.recipes import Shape
from dovetail.hw.capabilities import CPU


class Registry:
    """Every bound call's counter, and the calls that went to the baseline."""

    def __init__(self) -> None:
        self._counters: dict[int, tuple[Shape, str, Any, Callable[[], str]]] = {}
        self._past: Counter[tuple[Shape, str, str]] = Counter()  #: runs of bound calls that are gone
        self._baseline: Counter[tuple[str, str]] = Counter()
        self._operators: dict[tuple[str, str, str], list[int]] = {}
        self._lock = threading.Lock()

    def add(self, bound: Any) -> None:
        """A new bound call, of a CPU or a GPU."""
        counter, staged = bound.caller.counter, bound.variant_of(1)
        with self._lock:
            self._counters[id(counter)] = (bound.shape, staged, counter, bound.namer())
        weakref.finalize(bound, self._fold, id(counter))

    def _fold(self, number: int) -> None:
        """A bound call is gone; its runs still count."""
        with self._lock:
            shape, staged, counter, namer = self._counters.pop(number)
            self._past[shape, shape.variant, namer()] += int(counter.direct)
            self._past[shape, staged, namer()] += int(counter.runs) - int(counter.direct)

    def count_baseline(self, collective: str, reason: str) -> None:
        """A call that ran on the caller's process group."""
        with self._lock:
            self._baseline[collective, reason] += 1

    def tally(self, op: str, transport: str, reason: str) -> list[int]:
        """How often a fused operator ran in this way: one number, to be counted up by whoever runs it."""
        with self._lock:
            return self._operators.setdefault((op, transport, reason), [0])

    def stats(self) -> dict[str, Any]:
        """Calls, bytes, engines and fall-backs since the process began, blocking calls included."""
        with self._lock:
            counts = self._past.copy()
            for shape, staged, counter, namer in self._counters.values():
                counts[shape, shape.variant, namer()] += int(counter.direct)
                counts[shape, staged, namer()] += int(counter.runs) - int(counter.direct)
            rows = [_row(shape, variant, calls) for (shape, variant, _), calls in counts.items() if calls]
            engines: Counter[str] = Counter()
            for (_, _, engine), calls in counts.items():
                engines[engine] += calls
            falls: list[dict[str, Any]] = [
                {"collective": c, "variant": "torch", "calls": n, "reason": r} for (c, r), n in self._baseline.items()
            ]
            operators = [
                {"operator": o, "transport": t, "calls": n, "reason": r} for (o, t, r), [n] in self._operators.items()
            ]
        merged: dict[tuple[str, str], dict[str, Any]] = {}
        for row in rows:
            into = merged.setdefault((row["collective"], row["variant"]), {**row, "calls": 0, "bytes": 0})
            into["calls"] += row["calls"]
            into["bytes"] += row["bytes"]
        ours = list(merged.values())
        return {
            "calls": sum(r["calls"] for r in ours) + sum(f["calls"] for f in falls),
            "bytes": sum(r["bytes"] for r in ours),
            "by_variant": ours,
            "engines": {CPU.engine: 0, **engines},
            "fall_backs": falls,
            "operators": operators,
        }


def _row(shape: Shape, variant: str, calls: int) -> dict[str, Any]:
    return {
        "collective": shape.collective.name.lower(),
        "variant": variant,
        "calls": calls,
        "bytes": calls * shape.size_bytes,
    }


registry = Registry()
