"""What `dovetail bench overlap` measures, as data. Imports neither torch nor a driver.

A scenario is a computation, a communication (a `Job`) and the ratio of their times that is aimed at. Shapes and sizes
are of the GPU; `small` is the same on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dovetail.overlap.strategy import Strategy
from dovetail.overlap.tasks import Bound

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
SMALL_BYTES = 1 << 20  #: a message of so much and less, for each peer, is a small one
LEAST_IDEAL = 1.24  #: speedup of a scenario, as it came out: with less the share of it is noise
RATIOS = (1 / 4, 1 / 2, 1.0, 2.0, 4.0)  #: of the communication's time to the computation's
ROUNDS, QUICK_ROUNDS = 7, 3
LEAST_US, MOST_US = 300.0, 1e5
FEWEST_ROUNDS = 2  #: the best is found in one half of them and judged in the other


class Make(StrEnum):
    """What a computation does."""

    MM = "mm"  #: (m, k, n): a matrix product
    ADD = "add"  #: (elements,): one sum of two vectors


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """A computation; it is repeated as often as the ratio of a scenario wants."""

    name: str
    bound: Bound
    make: Make
    shape: tuple[int, ...]
    small: tuple[int, ...]
    operands: int = 1  #: sets of operands that are used in turn, so that no cache holds the next one

    def of(self, backend: str) -> tuple[int, ...]:
        """The shape there."""
        return self.small if backend == "cpu" else self.shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A communication.

    On a GPU: a collective with peers in host memory, or copies over the host link ("fetch" to the GPU, "store" from it,
    "offload" both ways). On a CPU: `small`, a collective between ranks.
    """

    name: str
    kind: str  #: of `Traffic`
    small: str  #: the collective that stands for it on a CPU
    piece_bytes: int = 0  #: for each peer, or of each copy; 0: sized to the ratio
    num_pieces: int = 1  #: copies in each direction, where they are not one for each peer

    @property
    def with_peers(self) -> bool:
        """Is it a collective?"""
        return self.kind in ("all_gather", "all_to_all", "reduce_scatter")

    @property
    def is_small(self) -> bool:
        """Is its size given, and small?"""
        return 0 < self.piece_bytes <= SMALL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A computation beside a communication."""

    compute: Compute
    job: Job
    ratio: float  #: of the communication's time to the computation's, that is aimed at

    def __post_init__(self) -> None:
        if self.ratio not in RATIOS:
            raise ValueError(f"ratio is {self.ratio}; there are {', '.join(map(str, RATIOS))}")

    @property
    def name(self) -> str:
        """Unique in a suite: `70b-up+all_gather@1/2`."""
        ratio = f"{self.ratio:g}" if self.ratio >= 1 else f"1/{1 / self.ratio:g}"
        return f"{self.compute.name}+{self.job.name}@{ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What is measured."""

    scenarios: tuple[Scenario, ...]
    strategies: tuple[Strategy, ...] = ()  #: beside `serial`, which is always measured; none: all
    rounds: int = ROUNDS
    ranks: int = 4  #: on a GPU it is one of them, the others are host memory
    energy: bool = False
    least_us: float = LEAST_US  #: of a computation whose communication is sized to it

    def __post_init__(self) -> None:
        if not self.scenarios:
            raise ValueError("a bench of overlap needs a scenario")
        if self.rounds < FEWEST_ROUNDS:
            raise ValueError(f"--iters: {self.rounds} must be at least {FEWEST_ROUNDS}: one half judges the other")
        if not 1 <= self.least_us <= MOST_US:
            raise ValueError(f"--least: {self.least_us:g} us must be 1 to {MOST_US:g}")
        if not 2 <= self.ranks <= 64:
            raise ValueError(f"--ranks: {self.ranks} must be 2 to 64")
        if Strategy.FUSED in self.strategies:
            raise ValueError("--strategy: fused belongs to an operator; it is not measured here")
