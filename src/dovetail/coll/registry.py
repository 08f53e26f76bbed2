"""Counts of what was called: `stats()`. Owns the list of bound calls of this process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from dovetail.coll.bound import Bound


class Registry:
    """Every bound call, and the calls that went to the baseline."""

    def __init__(self) -> None:
        self._bound: list[Bound] = []
        self._baseline: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def add(self, bound: Bound) -> None:
        """A new bound call."""
        with self._lock:
            self._bound.append(bound)

    def count_baseline(self, collective: str, reason: str) -> None:
        """A call that ran on the caller's process group."""
        with self._lock:
            self._baseline[collective, reason] += 1

    def stats(self) -> dict[str, Any]:
        """Calls, bytes, engines and fall-backs since the process began, blocking calls included."""
        rows: list[dict[str, Any]] = []
        with self._lock:
            for b in self._bound:
                runs, direct = int(b.caller.num_runs), int(b.caller.num_direct)
                for variant, calls in ((b.shape.variant, direct), (b.variant_of(1), runs - direct)):
                    if calls:
                        rows.append(_row(b, variant, calls))
            falls = [{"collective": c, "variant": "torch", "calls": n, "reason": r} for (c, r), n in self._baseline.items()]
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


def _row(b: Bound, variant: str, calls: int) -> dict[str, Any]:
    return {
        "collective": b.shape.collective.name.lower(),
        "variant": variant,
        "calls": calls,
        "bytes": calls * b.shape.size_bytes,
    }


registry = Registry()
