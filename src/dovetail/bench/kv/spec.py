"""What `dovetail bench kv` measures, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.kv.models import Model

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
BOTH = "both"  #: directions at once
DIRECTIONS = ("fetch", "store", BOTH)
IDLE = "idle"
LOADS = (IDLE, "gemm", "decode")  #: what runs beside
CONTIGUOUS, PLAIN = "contiguous", "one copy"  #: yardsticks: a contiguous copy for each block, and one for all bytes
ENTRIES = (128, 512, 2048, 0)  #: of a batch; 0 is all in one call, as vLLM calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What is measured."""

    models: tuple[Model, ...]
    tokens: tuple[int, ...]
    cache_bytes: int
    paths: tuple[str, ...]
    directions: tuple[str, ...] = ("fetch", "store")
    loads: tuple[str, ...] = (IDLE,)
    entries: tuple[int, ...] = ENTRIES
    outermost: str = "layer"
    yardsticks: bool = True  #: also measure those
    rounds: int = 5
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.models or not self.tokens or not self.paths or min(self.tokens) < 1:
            raise ValueError("a bench of kv needs layouts, numbers of tokens above 0, and paths")
        for name, given, known in (("direction", self.directions, DIRECTIONS), ("beside", self.loads, LOADS)):
            for word in given:
                if word not in known:
                    raise ValueError(f"--{name}: {word!r} is not one of {', '.join(known)}")
