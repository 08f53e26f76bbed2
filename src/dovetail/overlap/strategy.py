"""The ways to run a communication beside a computation, by name.

Owns the words. A `Setting` is a strategy with its one number: for those in which cores move the bytes, how many; for
`dma+partition`, how many the computation goes without.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.overlap.tasks import Mover, Name


class Strategy(Name):
    """How two are run."""

    SERIAL = "serial"  #: one after the other
    STREAMS = "streams"  #: two streams, the communication by a kernel, as a library does it
    PRIORITY = "priority"  #: the communication is launched first, in a stream of high priority
    PARTITION = "partition"  #: each has cores of its own
    PRIORITY_PARTITION = "priority+partition"
    DMA = "dma"  #: engines move the bytes, the computation has all cores
    DMA_PARTITION = "dma+partition"  #: the same, and some cores are kept idle: less noise for memory
    FUSED = "fused"  #: one kernel, of an operator that has it


AUTO = "auto"
#: In the order in which they are shown.
ALL = tuple(Strategy)
BY_ENGINES = frozenset({Strategy.DMA, Strategy.DMA_PARTITION})
PARTITIONED = frozenset({Strategy.PARTITION, Strategy.PRIORITY_PARTITION, Strategy.DMA_PARTITION})
COMMUNICATION_FIRST = frozenset({Strategy.PRIORITY, Strategy.PRIORITY_PARTITION}) | BY_ENGINES


@dataclass(frozen=True, slots=True)
class Setting:
    """A strategy and its number of cores (0: as many as the communication thinks best; no matter for `dma`)."""

    strategy: Strategy
    cores: int = 0
    mover: Mover = Mover.CORES  #: of `serial`: whoever is faster alone; others have theirs by name
    moved_by: Mover = field(init=False, repr=False, compare=False)  #: who moves the bytes
    _hash: int = field(init=False, repr=False, compare=False)  # made once: a setting is looked up at each run

    def __post_init__(self) -> None:
        own = self.mover if self.strategy is Strategy.SERIAL else Mover.CORES
        object.__setattr__(self, "moved_by", Mover.ENGINES if self.strategy in BY_ENGINES else own)
        # Of numbers: a hash of text would be another one in a process that it is sent to.
        object.__setattr__(self, "_hash", hash((ALL.index(self.strategy), self.cores, self.mover is Mover.ENGINES)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.strategy is Strategy.SERIAL:
            return f"{self.strategy} by {self.mover}"
        return f"{self.strategy} {self.cores}" if self.cores else str(self.strategy)


def named(text: str) -> Strategy:
    """The strategy of a name; ValueError that says which there are."""
    try:
        return Strategy(text)
    except ValueError:
        every = ", ".join(strategy for strategy in ALL if strategy is not Strategy.FUSED)  # an operator's own
        raise ValueError(f"there are the strategies {every}, not {text!r}") from None
