"""What a benchmark is to run: one frozen object, checked when made, that travels to the ranks as JSON.

Owns the names that may be given. It imports neither torch nor the collectives, so a wrong argument is refused at once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLLECTIVES = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast")
BASELINES = ("openmpi", "gloo")
GPU_BASELINES = ("gloo", "nccl", "nccl-ce")
"""``nccl`` as torch ships it, ``nccl-ce`` with its collectives on copy engines; both need a GPU for each rank."""
CPU, CUDA = "cpu", "cuda"
OURS: dict[str, tuple[str, ...]] = {CPU: BASELINES, CUDA: GPU_BASELINES}
"""Where Dovetail runs, which is what its rows have as their backend, and what it can be compared with there."""
TENSORS = ("symmetric", "ordinary")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
AUTO, TORCH = "auto", "torch"
"""Variants that every collective has: the one that is chosen, and the caller's own process group."""
OUT_OF_TIME = "out of time"
"""How a note about cases that `limit_s` left out begins."""
SWAP = "swap"
"""The variant of all_to_all that exchanges in place: it is measured with one tensor as input and output."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run: every collective at every size, each variant beside each baseline."""

    collectives: tuple[str, ...]
    ranks: int
    sizes: tuple[int, ...]
    """Bytes that each rank contributes."""
    variants: tuple[str, ...] = (AUTO,)
    """What is asked of Dovetail, the one that verdicts are about first; none measures the baselines alone."""
    backend: str = CPU
    """Where the tensors are: in host memory, or each rank's on its GPU."""
    baselines: tuple[str, ...] = ()
    tensors: str = "symmetric"
    """Where Dovetail's inputs and outputs lie; the baselines always have ordinary memory."""
    dtype: str = "float32"
    iterations: int | None = None
    """Calls of each contender at each size; None takes as many as fit into `seconds`."""
    seconds: float = 0.25
    """Time for each contender at each size; the least number of iterations may take longer."""
    limit_s: float | None = None
    """Time from the start of the run after which no further case is begun."""
    give_up: float | None = None
    """A contender that is this many times slower than the fastest in the first few calls is not called again."""
    share_cores: bool = False
    """Whether ranks outnumber cores; the runner knows."""
    cpus: tuple[int, ...] = ()
    """CPUs of the run, on each of which threads of a baseline may be; the runner knows."""
    gpus: int = 0
    """GPUs that the ranks have, which they share in turn if there are fewer than ranks; the runner knows."""
    began_s: float = 0.0
    """When the run began, on the clock that processes share (`time.monotonic`); the runner knows."""

    def __post_init__(self) -> None:
        _all_in("collective", self.collectives, COLLECTIVES)
        _all_in("backend", (self.backend,), tuple(OURS))
        _all_in("baseline", self.baselines, OURS[self.backend])
        _all_in("tensors", (self.tensors,), TENSORS)
        _all_in("dtype", (self.dtype,), DTYPES)
        if not self.collectives or not self.sizes or not (self.variants or self.baselines):
            raise ValueError("there is nothing to run: give a collective, a size and a variant or a baseline")
        if self.ranks < 1:
            raise ValueError(f"ranks is {self.ranks}; it must be at least 1")
        if min(self.sizes) < 1:
            raise ValueError(f"a size is {min(self.sizes)} bytes; it must be at least 1")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"iterations is {self.iterations}; it must be at least 1")
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; it must be above 0")

    def variants_of(self, collective: str, known: Sequence[str]) -> tuple[str, ...]:
        """Those of the wanted variants that `collective` has, `known` being all it has."""
        return tuple(variant for variant in self.variants if variant in (AUTO, TORCH, *known))

    def check_variants(self, known: Mapping[str, Sequence[str]]) -> None:
        """Raise `ValueError` when a wanted variant is one of none of the collectives; `known` is all they have."""
        allowed = [AUTO, *dict.fromkeys(variant for name in self.collectives for variant in known[name])]
        _all_in(f"variant of {', '.join(self.collectives)}", self.variants, allowed)

    def lacking(self, known: Mapping[str, Sequence[str]]) -> list[str]:
        """A line for each collective that has not all of the wanted variants, and runs without them."""
        lines = []
        for name in self.collectives:
            if missing := [v for v in self.variants if v not in self.variants_of(name, known[name])]:
                lines.append(f"{name} has no variant {', '.join(missing)}: left out; it has {', '.join(known[name])}")
        return lines

    @property
    def shares_gpus(self) -> bool:
        """Whether some ranks have a GPU in common."""
        return self.backend == CUDA and self.ranks > self.gpus

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Spec:
        """The spec that `to_json` wrote."""
        given = json.loads(text).items()
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
        return Spec(**fields)


def _all_in(what: str, given: Sequence[str], allowed: Sequence[str]) -> None:
    for name in given:
        if name not in allowed:
            raise ValueError(f"{what}: {name!r} is not known; there are {', '.join(allowed)}")
    if len(set(given)) != len(given):
        raise ValueError(f"{what}: {', '.join(given)} names one twice")
