"""Counts of what was called: `stats()`. Owns the counters of this process, not the calls, which may be gone."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from dovetail.coll.bound import Bound
from dovetail.coll.recipes import Shape


class Registry:
    """Every bound call's counter, and the calls that went to the baseline."""

    def __init__(self) -> None:
        self._counters: list[tuple[Shape, str, Any]] = []
        self._baseline: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, bound: Bound) -> None:
        """A new bound call."""
        with self._lock:
            self._counters.append((bound.shape, bound.variant_of(1), bound.caller.counter))

    def count_baseline(self, collective: str, reason: str) -> None:
        """A call that ran on the caller's process group."""
        with self._lock:
            self._baseline[collective, reason] += 1

    def stats(self) -> dict[str, Any]:
        """Calls, bytes, engines and fall-backs since the process began, blocking calls included."""
        rows: list[dict[str, Any]] = []
        with self._lock:
            for shape, staged, counter in self._counters:
                runs, direct = int(counter.runs), int(counter.direct)
                for variant, calls in ((shape.variant, direct), (staged, runs - direct)):
                    if calls:
                        rows.append(_row(shape, variant, calls))
            falls: list[dict[str, Any]] = [
                {"collective": c, "variant": "torch", "calls": n, "reason": r} for (c, r), n in self._baseline.items()
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
            "engines": {"software DMA engine": sum(r["calls"] for r in ours)},
            "fall_backs": falls,
        }


def _row(shape: Shape, variant: str, calls: int) -> dict[str, Any]:
    return {
        "collective": shape.collective.name.lower(),
        "variant": variant,
        "calls": calls,
        "bytes": calls * shape.size_bytes,
    }


registry = Registry()
