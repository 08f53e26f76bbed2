"""How often which path moved blocks, and why it was taken: beside vLLM's own metrics, which do not know paths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dovetail.kv.planner import Direction

TRANSFERS = "dovetail:kv_transfers"
BYTES = "dovetail:kv_bytes"
#: Of both metrics, in this order; the values of `Cause`.
LABELS = ("direction", "path", "reason")

#: A direction in vLLM's words, a path, and the first words of its reason: few different ones, as labels must be.
Cause = tuple[str, str, str]
_WORDS = {Direction.FETCH: "load", Direction.STORE: "store"}


@dataclass(slots=True)
class Counts:
    """Since the worker was made."""

    transfers: Counter[Cause] = field(default_factory=Counter)
    size_bytes: Counter[Cause] = field(default_factory=Counter)
    _told: tuple[Counter[Cause], Counter[Cause]] = field(default_factory=lambda: (Counter(), Counter()))

    def add(self, direction: Direction, path: str, reason: str, size_bytes: int) -> None:
        """One transfer. Of a reason what stands before the colon counts; the rest are figures of that transfer."""
        cause = (_WORDS[direction], str(path), reason.partition(":")[0])
        self.transfers[cause] += 1
        self.size_bytes[cause] += size_bytes

    def take(self) -> dict[str, dict[Cause, int]]:
        """What was added since the last call, by metric; empty if nothing was."""
        before, before_bytes = self._told
        self._told = (Counter(self.transfers), Counter(self.size_bytes))
        new = {cause: number - before[cause] for cause, number in self.transfers.items() if number > before[cause]}
        if not new:
            return {}
        return {TRANSFERS: new, BYTES: {cause: self.size_bytes[cause] - before_bytes[cause] for cause in new}}

    def __str__(self) -> str:
        lines = (
            f"{number} {direction}s by {path} ({reason}), {self.size_bytes[direction, path, reason]} bytes"
            for (direction, path, reason), number in sorted(self.transfers.items())
        )
        return "; ".join(lines) or "no transfers"
