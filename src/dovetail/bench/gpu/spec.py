"""What a benchmark on a GPU is to run: frozen objects, checked when made. Imports neither torch nor a driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BACKENDS = ("cpu", "cuda")
PEERS = ("host", "ranks")
"""Who stands on the other side: pinned memory of this process, or processes with GPU tensors of their own."""
COPIES, BESIDE = "copies", "beside"
"""What can be measured on a GPU besides collectives: single copies, and copies beside a GEMM."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "all_gather": ("pcpy", "bcst", "b2b", "pull", "graph"),
    "all_to_all": ("pcpy", "swap", "b2b", "pull", "graph"),
}
"""``b2b`` is all of ``pcpy`` in one stream, ``graph`` is ``pcpy`` captured and launched as one."""
WORK = (*VARIANTS, COPIES, BESIDE)
FEWEST_RANKS, MOST_RANKS = 2, 64


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a measurement may take of the machine."""

    force: bool = False
    """Measure although others use the GPU."""
    pin_bytes: int | None = None
    """The most host memory to pin; a tenth of the machine's if not given."""

    def __post_init__(self) -> None:
        if self.pin_bytes is not None and self.pin_bytes < 1:
            raise ValueError(f"memory to pin must be above 0, got {self.pin_bytes} bytes")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much time a figure is given."""

    seconds: float = 0.25
    """Time for each contender at each size; the least number of iterations may take longer."""
    iterations: int | None = None
    """Calls of each contender at each size; None takes as many as fit into `seconds`."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """A collective with host peers at several sizes."""

    collective: str
    sizes: tuple[int, ...]
    """Bytes that each rank contributes: for all_to_all, a rank's whole input of `ranks` pieces."""
    ranks: int = 4
    variants: tuple[str, ...] = ()
    """Variants of ours; all that the collective has if none is given."""
    effort: Effort = Effort()

    def __post_init__(self) -> None:
        one_of("collective", self.collective, tuple(VARIANTS))
        if not FEWEST_RANKS <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks is {self.ranks}; with host peers there are {FEWEST_RANKS} to {MOST_RANKS}")
        check_sizes(self.sizes)
        for variant in self.variants:
            one_of(f"variant of {self.collective}", variant, VARIANTS[self.collective])
        if len(set(self.variants)) != len(self.variants):
            raise ValueError(f"variant: {', '.join(self.variants)} names one twice")

    @property
    def wanted(self) -> tuple[str, ...]:
        """The variants to run."""
        return self.variants or VARIANTS[self.collective]


def check_sizes(sizes: Sequence[int]) -> None:
    """Raise `ValueError` unless there are sizes, all above zero."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sizes must be given and be at least 1 byte, got {list(sizes)}")


def one_of(what: str, given: str, allowed: Sequence[str]) -> None:
    """Raise `ValueError` that lists what is allowed."""
    if given not in allowed:
        raise ValueError(f"{what}: {given!r} is not known; there are {', '.join(allowed)}")
