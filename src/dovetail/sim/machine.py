"""A machine as data: engines, links and costs, each number with where it comes from.

Owns the form of a machine, its checks, and changing single constants; `files` reads and writes it as TOML. A constant
is named `section.name` (``host.submit_ns``); its `Source` says whether it was published, measured, fitted or assumed.

Times are nanoseconds, rates 10^9 bytes per second, which is bytes per nanosecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.sim.net.topology import Network


class MachineError(ValueError):
    """A machine file that can't be used, or a plan that does not fit the machine."""


class Origin(StrEnum):
    """How a constant came to be known."""

    PUBLISHED = "published"  #: stands in a paper, a data sheet or a public measurement
    MEASURED = "measured"  #: by this project, in a record
    FITTED = "fitted"  #: chosen so that the model fits a table; what `fit` may change
    INFERRED = "inferred"  #: arithmetic on published or measured figures
    ASSUMED = "assumed"  #: an educated guess


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a constant comes from."""

    origin: Origin
    note: str  #: which table, paper or reasoning


class Threads(StrEnum):
    """Who submits and who watches for completions."""

    ONE = "one"  #: one thread of the host drives all ranks, as A's artifact does
    RANK = "rank"  #: every rank has its own


class Wiring(StrEnum):
    """What joins the ranks."""

    FULLY_CONNECTED = "fully_connected"  #: a link for each ordered pair of ranks
    SWITCH = "switch"  #: a link out of each rank and one into it; the switch never blocks
    SHARED_MEMORY = "shared_memory"  #: no links: all ranks share one memory


class Steps(StrEnum):
    """Moves that an engine may have in hardware; others are lowered to copies, as executors do it."""

    COPY = "copy"
    COPY2D = "copy2d"
    BROADCAST = "broadcast"
    SWAP = "swap"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the submitting threads cost."""

    threads: Threads
    submit_ns: float  #: build one command, put it into a ring, ring the doorbell
    command_ns: float  #: each further command of the same submission
    switch_ns: float  #: turn to another ring than that of the last submission
    trigger_ns: float  #: open one gate of a prelaunched plan
    observe_ns: float  #: notice one completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An in-order DMA engine. Back-to-back moves overlap: only their bytes, or `command_ns`, keep them apart."""

    count: int  #: engines of a rank
    steps: tuple[Steps, ...]  #: what it has in hardware
    schedule_ns: float  #: from the doorbell to the first command's start
    poll_ns: float  #: from a signal's arrival to the start of what waited for it
    command_ns: float  #: the least time between the starts of two moves
    start_ns: float  #: latency of a move: first byte read to last byte landed, less the time of the bytes
    signal_ns: float  #: from the last byte to the moment at which the signal can be seen
    copy_gbps: float  #: bytes that a copy moves
    paired_gbps: float  #: bytes that a broadcast or a swap writes, over both its ends
    broadcast_ways: int = 2  #: copies of one source that one command can make


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the ranks."""

    wiring: Wiring
    bandwidth_gbps: float  #: of one link in one direction
    latency_ns: float  #: added to every move between two ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A rank's memory, or, with shared memory, that of all ranks together."""

    bandwidth_gbps: float  #: bytes read plus bytes written
    cache_bytes: int = 0  #: moves up to this size stay in a cache and do not use the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """What reductions cost; engines do no arithmetic."""

    start_ns: float  #: of one REDUCE
    reduce_gbps: float  #: bytes read plus bytes written


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A collective library whose kernels move the bytes, as RCCL does: for whole collectives on the machine's links."""

    launch_ns: float = 0.0  #: what a call of it takes besides the bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that plans can be priced on."""

    name: str
    title: str
    ranks: int
    host: Host
    engine: Engine
    link: Link
    memory: Memory
    compute: Compute
    library: Library = Library()
    sources: Mapping[str, Source] = field(repr=False, default_factory=dict)  #: by name of constant

    def __post_init__(self) -> None:
        _check(self)

    def require(self, ranks: int, what: str) -> None:
        """Raises MachineError if the machine has fewer ranks than `what` needs."""
        if ranks > self.ranks:
            raise MachineError(f"{what} is for {ranks} ranks, machine {self.name} has {self.ranks}")

    def value(self, name: str) -> float:
        """A numeric constant by its name, such as ``host.submit_ns``."""
        section, key = _split(self, name)
        return float(getattr(getattr(self, section), key))

    def replace(self, values: Mapping[str, float], source: Source | None = None) -> Machine:
        """This machine with other values; their `source`, if given, replaces the old one."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, key = _split(self, name)
            parts.setdefault(section, {})[key] = round(value) if NUMBERS[name][1] else float(value)
        changed = {s: dataclasses.replace(getattr(self, s), **change) for s, change in parts.items()}
        sources = {**self.sources, **(dict.fromkeys(values, source) if source else {})}
        return dataclasses.replace(self, **changed, sources=sources)

    def network(self, ranks: int | None = None) -> Network:
        """Its links as a network, for collectives at scale."""
        from dovetail.sim.net.topology import Dimension, Kind, Network

        if self.link.wiring is Wiring.SHARED_MEMORY:
            raise MachineError(f"machine {self.name} has no links: its ranks share one memory")
        self.require(ranks or self.ranks, "this network")
        link = Dimension(
            kind=Kind(self.link.wiring),
            ranks=ranks or self.ranks,
            bandwidth_gbps=self.link.bandwidth_gbps,
            latency_ns=self.link.latency_ns,
        )
        return Network(dimensions=(link,))

    def constants(self) -> dict[str, float]:
        """Every numeric constant by name."""
        return {name: self.value(name) for name in NUMBERS}

    def fitted(self) -> tuple[str, ...]:
        """The constants of plans that were fitted, and that `fit` changes unless told otherwise."""
        origin = {name: source.origin for name, source in self.sources.items()}
        return tuple(n for n in NUMBERS if origin.get(n) is Origin.FITTED and not n.startswith("library."))


SECTIONS: dict[str, type] = {
    "host": Host, "engine": Engine, "link": Link, "memory": Memory, "compute": Compute, "library": Library,
}  # fmt: skip
#: Constants that are words.
WORDS: dict[str, type[StrEnum]] = {"host.threads": Threads, "link.wiring": Wiring}
#: Constants that are lists of words.
LISTS: dict[str, type[StrEnum]] = {"engine.steps": Steps}
_WHOLE = {"count": (1, True), "broadcast_ways": (2, True), "cache_bytes": (0, True)}
_MOST = 1e15  # of any constant: beyond it arithmetic in nanoseconds makes no sense
_LEAST_GBPS = 1e-6
#: Constants that are numbers, and what they are: the least value, and whether it is whole.
NUMBERS: dict[str, tuple[float, bool]] = {
    f"{section}.{f.name}": _limits
    for section, cls in SECTIONS.items()
    for f in dataclasses.fields(cls)
    if f"{section}.{f.name}" not in {**WORDS, **LISTS}
    for _limits in [_WHOLE.get(f.name, (0, False))]
}


def _split(machine: Machine, name: str) -> tuple[str, str]:
    if name not in NUMBERS:
        raise MachineError(f"machine {machine.name} has no constant {name!r}; it has {', '.join(NUMBERS)}")
    section, _, key = name.partition(".")
    return section, key


def _check(machine: Machine) -> None:
    if machine.ranks < 1:
        raise MachineError(f"machine {machine.name}: ranks must be at least 1, not {machine.ranks}")
    if Steps.COPY not in machine.engine.steps:
        raise MachineError(f"machine {machine.name}: engine.steps must have copy; all else can be lowered to it")
    for name, (least, _) in NUMBERS.items():
        section, _, key = name.partition(".")
        value = getattr(getattr(machine, section), key)
        rate = key.endswith("_gbps")
        if not least <= value <= _MOST or (rate and value < _LEAST_GBPS):
            low = _LEAST_GBPS if rate else least
            raise MachineError(f"machine {machine.name}: {name} must be from {low:g} to {_MOST:g}, not {value}")
