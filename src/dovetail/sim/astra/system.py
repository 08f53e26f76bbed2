"""The system layer's settings: how collectives are cut, which algorithm serves a dimension, what an endpoint costs.

Owns values and their meaning, no time. The comment at each field gives the key of ASTRA-sim's system file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from dovetail.errors import NotSupported
from dovetail.sim.net.algorithms import Collective


class Algorithm(StrEnum):
    """What a dimension runs; `one` algorithms take all NPUs as one ring and ignore the dimensions after theirs."""

    RING = "ring"
    ONE_RING = "oneRing"
    DIRECT = "direct"
    ONE_DIRECT = "oneDirect"
    HALVING_DOUBLING = "halvingDoubling"
    ONE_HALVING_DOUBLING = "oneHalvingDoubling"
    DOUBLE_BINARY_TREE = "doubleBinaryTree"


class Optimization(StrEnum):
    """How an all-reduce crosses several dimensions."""

    LOCAL_BW_AWARE = "localBWAware"  #: reduce-scatter up, all-reduce on the last dimension, all-gather down
    BASELINE = "baseline"  #: a whole all-reduce on every dimension in turn


class Policy(StrEnum):
    """Which of several waiting collectives goes first; without effect, since an NPU runs one at a time."""

    LIFO = "LIFO"
    FIFO = "FIFO"
    EXPLICIT = "EXPLICIT"


@dataclass(frozen=True, slots=True)
class Implementation:
    """An algorithm, and for the direct ones how many peers it talks to at once (None: all)."""

    algorithm: Algorithm
    window: int | None = None

    @classmethod
    def parse(cls, text: str) -> Implementation:
        """From the word in a system file: `ring`, `direct`, `direct4`, ..."""
        match = re.fullmatch(r"(direct|oneDirect)(\d{1,5})?|([A-Za-z]+)", text) if isinstance(text, str) else None
        name = match and (match[1] or match[3])
        if match is None or name not in list(Algorithm) or (match[2] and int(match[2]) < 1):
            raise ValueError(
                f"an implementation must be one of {', '.join(Algorithm)}, or direct or oneDirect followed by a window "
                f"of 1 or more, not {text!r}"
            )
        return cls(Algorithm(name), int(match[2]) if match[2] else None)

    def __str__(self) -> str:
        return self.algorithm + ("" if self.window is None else str(self.window))


@dataclass(frozen=True, slots=True, kw_only=True)
class AstraSystem:
    """Settings of the system layer.

    An implementation is a list with a word per dimension of the network. A shorter list is legal and means what
    ASTRA-sim makes of it: the collective stays inside the first dimensions.
    """

    all_reduce: tuple[str, ...] = ("ring",)  #: all-reduce-implementation
    all_gather: tuple[str, ...] = ("ring",)  #: all-gather-implementation
    reduce_scatter: tuple[str, ...] = ("ring",)  #: reduce-scatter-implementation
    all_to_all: tuple[str, ...] = ("ring",)  #: all-to-all-implementation
    splits: int = 1  #: preferred-dataset-splits: chunks of a collective
    active_chunks: int = 1  #: active-chunks-per-dimension: chunks that a dimension serves at a time
    endpoint_delay_ns: int = 10  #: endpoint-delay: before each send and after each receive
    local_mem_bw_gbps: float = 1600.0  #: local-mem-bw, 10^9 bytes per second: three passes per reduced message
    optimization: Optimization = Optimization.LOCAL_BW_AWARE  #: collective-optimization
    policy: Policy = Policy.LIFO  #: scheduling-policy
    roofline: bool = False  #: roofline-enabled: compute nodes take their time from num_ops and tensor_size
    peak_perf_tflops: float = 0.0  #: peak-perf
    replay_only: bool = False  #: replay-only: every node takes its recorded duration, collectives too
    inert: Mapping[str, object] = field(default_factory=dict, hash=False)  #: keys of the file that change nothing here

    def __post_init__(self) -> None:
        for collective in Collective:
            words = getattr(self, collective)
            words = (words,) if isinstance(words, str) else tuple(words)
            object.__setattr__(self, collective, tuple(str(Implementation.parse(word)) for word in words))
        object.__setattr__(self, "optimization", _choice(Optimization, "optimization", self.optimization))
        object.__setattr__(self, "policy", _choice(Policy, "policy", self.policy))
        object.__setattr__(self, "inert", dict(self.inert))
        for name, least in (("splits", 1), ("active_chunks", 1), ("endpoint_delay_ns", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, not {value!r}")
        for name, value in (
            ("local_mem_bw_gbps", self.local_mem_bw_gbps),
            ("peak_perf_tflops", self.peak_perf_tflops),
        ):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be zero or more and finite, not {value}")
            object.__setattr__(self, name, float(value))

    @classmethod
    def uniform(cls, implementation: str, *, dimensions: int, splits: int = 1, active_chunks: int = 1) -> AstraSystem:
        """One implementation for every collective on every dimension; other fields through `dataclasses.replace`."""
        words = (implementation,) * dimensions
        return cls(
            all_reduce=words,
            all_gather=words,
            reduce_scatter=words,
            all_to_all=words,
            splits=splits,
            active_chunks=active_chunks,
        )

    def implementations(self, collective: Collective) -> tuple[Implementation, ...]:
        """What serves each dimension."""
        return tuple(Implementation.parse(word) for word in getattr(self, collective))

    def reduce_ns(self, size_bytes: int) -> int:
        """Three passes over a message in local memory (two reads, one write), each cut to whole ns."""
        if self.local_mem_bw_gbps <= 0:
            raise NotSupported("a reduction needs local_mem_bw_gbps above zero: ASTRA-sim has no defined answer for 0")
        return 3 * int(size_bytes / (self.local_mem_bw_gbps * 1_000_000_000) * 1e9)

    @classmethod
    def from_file(cls, path: str | Path) -> AstraSystem:
        """Reads a system file (JSON); raises ValueError that names file, key, what was found and what is allowed."""
        from dovetail.sim.astra.system_file import read_system

        return read_system(path)

    def to_file(self, path: str | Path) -> None:
        """Writes a system file that ASTRA-sim reads."""
        from dovetail.sim.astra.system_file import write_system

        write_system(self, path)


_Choice = TypeVar("_Choice", bound=StrEnum)


def _choice(kind: type[_Choice], name: str, value: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {', '.join(kind)}, not {value!r}") from None
