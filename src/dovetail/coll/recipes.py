"""Which plans serve a collective: by name of collective and variant, for a size, a dtype and a number of ranks.

A recipe has a `direct` plan, for tensors that are all on the heap, and a `staged` one that takes any mixture. Which of
the two runs is decided by the slots at entry, the same on every rank. Pure: no torch, no hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from dovetail.plan import passes
from dovetail.plan.build import all_gather, all_to_all, reduction, rooted
from dovetail.plan.build.ring import CHUNK_BYTES, Chunks
from dovetail.plan.plan import Plan
from dovetail.plan.step import DType, ReduceOp


class Collective(IntEnum):
    """The collectives; the number stands in the slot that ranks compare."""

    ALL_GATHER = 1
    ALL_TO_ALL = 2
    ALL_REDUCE = 3
    REDUCE_SCATTER = 4
    BROADCAST = 5
    GATHER = 6
    SCATTER = 7
    BARRIER = 8


#: Variants of each collective, besides `auto` and `torch`. The number of a variant is its place here.
VARIANTS: dict[Collective, tuple[str, ...]] = {
    Collective.ALL_GATHER: ("pcpy", "bcst", "b2b", "pull"),
    Collective.ALL_TO_ALL: ("pcpy", "swap", "b2b", "pull"),
    Collective.ALL_REDUCE: ("oneshot", "twoshot"),
    Collective.REDUCE_SCATTER: ("oneshot",),
    Collective.BROADCAST: ("pcpy", "bcst", "pull"),
    Collective.GATHER: ("pull",),
    Collective.SCATTER: ("pull",),
    Collective.BARRIER: ("entry",),
}

#: What c10d, and so a public function, calls a collective where that is not its own name.
C10D_NAMES = {
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
}

AS_INPUT = -1  #: scratch as large as the input


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """All that a plan depends on."""

    collective: Collective
    variant: str
    world: int
    size_bytes: int  #: what c10d counts: the input of a rank, for all_to_all and reduce_scatter one piece of it
    dtype: DType = DType.UINT8
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    uneven: bool = False
    in_place: bool = False
    backend: str = "cpu"

    def chunks(self) -> Chunks:
        """How a message of `size_bytes` goes through a staging ring."""
        return Chunks(size_bytes=self.size_bytes, chunk_bytes=_STAGING.get(self.backend, GPU_CHUNK_BYTES))

    @property
    def reduce_chunk_bytes(self) -> int:
        """How much of its segment a rank reduces before it sends that on."""
        return 64 << 10 if self.backend == "cpu" else GPU_CHUNK_BYTES


#: What a GPU stages, or reduces, at a time. A chunk costs a few driver calls and no cache has to hold it; chosen, not
#: swept.
GPU_CHUNK_BYTES = 8 << 20
_STAGING = {"cpu": CHUNK_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Plans of one shape, made when asked for."""

    direct: Callable[[], Plan] | None
    staged: Callable[[bool], Plan]  #: argument: are this rank's tensors ordinary?
    staged_name: str  #: the variant that the staged plan is
    scratch_heap: int = 0  #: bytes that a rank with heap tensors gives to the staged plan
    scratch_ordinary: int = 0


def recipe(s: Shape) -> Recipe:
    """The recipe of a shape; the variant must be one of `VARIANTS`."""
    return _MAKERS[s.collective](s)


def _whole(n: int) -> Chunks:
    """One chunk: where nothing is staged there is nothing to overlap."""
    return Chunks(size_bytes=n, chunk_bytes=max(n, 64))


def _all_gather(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    direct = {
        "pcpy": lambda: all_gather.pcpy(w, n),
        "bcst": lambda: all_gather.bcst(w, n),
        "b2b": lambda: passes.b2b(all_gather.pcpy(w, n)),
        "pull": lambda: all_gather.pull(w, n, chunks=_whole(n)),
    }[s.variant]
    return Recipe(
        direct=direct,
        staged=lambda ordinary: all_gather.pull(w, n, ordinary=(ordinary,) * w, chunks=s.chunks()),
        staged_name="pull",
        scratch_ordinary=s.chunks().ring_bytes,
    )


def _all_to_all(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    if s.uneven:
        return Recipe(
            direct=lambda: all_to_all.pull_uneven(w) if s.variant == "pull" else all_to_all.pcpy_uneven(w),
            staged=lambda ordinary: all_to_all.pull_uneven(w, ordinary=(ordinary,) * w),
            staged_name="pull",
            scratch_ordinary=AS_INPUT,
        )
    rings = s.chunks().ring_bytes * w
    if s.in_place:
        return Recipe(
            direct=lambda: all_to_all.swap(w, n),
            staged=lambda ordinary: all_to_all.swap_staged(w, n, ordinary=ordinary, chunks=s.chunks()),
            staged_name="pull",
            scratch_heap=rings,
            scratch_ordinary=rings,
        )
    direct = {
        "pcpy": lambda: all_to_all.pcpy(w, n),
        "b2b": lambda: passes.b2b(all_to_all.pcpy(w, n)),
        "swap": lambda: all_to_all.swap_copied(w, n),
        "pull": lambda: all_to_all.pull(w, n, chunks=_whole(n)),
    }[s.variant]
    return Recipe(
        direct=direct,
        staged=lambda ordinary: all_to_all.pull(w, n, ordinary=(ordinary,) * w, chunks=s.chunks()),
        staged_name="pull",
        scratch_ordinary=rings,
    )


def _all_reduce(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    ring = s.chunks().ring_bytes
    direct = {
        "twoshot": lambda: reduction.twoshot(w, n, s.dtype, s.op, chunk_bytes=s.reduce_chunk_bytes),
        "oneshot": lambda: reduction.oneshot(w, n, s.dtype, s.op, ordinary=False, chunks=s.chunks()),
    }[s.variant]
    return Recipe(
        direct=direct,
        staged=lambda ordinary: reduction.oneshot(w, n, s.dtype, s.op, ordinary=ordinary, chunks=s.chunks()),
        staged_name="oneshot",
        scratch_heap=ring,
        scratch_ordinary=ring,
    )


def _reduce_scatter(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    return Recipe(
        direct=lambda: reduction.reduce_scatter(w, n, s.dtype, s.op),
        staged=lambda ordinary: reduction.reduce_scatter_staged(
            w, n, s.dtype, s.op, ordinary=(ordinary,) * w, chunks=s.chunks()
        ),
        staged_name="oneshot",
        scratch_ordinary=s.chunks().ring_bytes * w,
    )


def _broadcast(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    direct = {
        "pcpy": lambda: rooted.broadcast_pcpy(w, n, s.root),
        "bcst": lambda: rooted.broadcast_pcpy(w, n, s.root, pairs=True),
        "pull": lambda: rooted.broadcast_pull(w, n, s.root, chunks=_whole(n)),
    }[s.variant]
    return Recipe(
        direct=direct,
        staged=lambda ordinary: rooted.broadcast_pull(w, n, s.root, ordinary=(ordinary,) * w, chunks=s.chunks()),
        staged_name="pull",
        scratch_ordinary=s.chunks().ring_bytes,
    )


def _gather(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    return Recipe(
        direct=None,
        staged=lambda ordinary: rooted.gather_pull(w, n, s.root, ordinary=(ordinary,) * w, chunks=s.chunks()),
        staged_name="pull",
        scratch_ordinary=s.chunks().ring_bytes,
    )


def _scatter(s: Shape) -> Recipe:
    w, n = s.world, s.size_bytes
    rings = s.chunks().ring_bytes * w
    return Recipe(
        direct=None,
        staged=lambda _: rooted.scatter_pull(w, n, s.root, chunks=s.chunks()),
        staged_name="pull",
        scratch_heap=rings,
        scratch_ordinary=rings,
    )


def _barrier(s: Shape) -> Recipe:
    return Recipe(direct=lambda: rooted.barrier(s.world), staged=lambda _: rooted.barrier(s.world), staged_name="entry")


_MAKERS: dict[Collective, Callable[[Shape], Recipe]] = {
    Collective.ALL_GATHER: _all_gather,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.ALL_REDUCE: _all_reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.BROADCAST: _broadcast,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.BARRIER: _barrier,
}


def word_of(s: Shape) -> int:
    """What ranks compare: collective, dtype, reduction, variant, root, uneven and in-place, in 64 bits."""
    variant = VARIANTS[s.collective].index(s.variant)
    flags = int(s.uneven) | int(s.in_place) << 1
    return s.collective | s.dtype << 8 | s.op << 16 | variant << 24 | s.root << 32 | flags << 56


def describe_call(state: dict[str, Any], size: int) -> str:
    """A call as its slot shows it: `all_gather(1024 bytes, variant pcpy)`. The reverse of `word_of`."""
    word, size_bytes, params = state["call"], state["size_bytes"], state["params"]
    if word & 0xFF not in set(VARIANTS):
        return f"a plan of its own, or the first call with GPU tensors (fingerprint {word >> 8:x})"
    collective = Collective(word & 0xFF)
    parts = [f"{size_bytes} bytes"] if not params else []
    if params:
        sends, receives = params[size : 2 * size], params[3 * size : 4 * size]
        parts.append(f"sends {sends} and receives {receives} bytes")
    if collective not in (Collective.GATHER, Collective.SCATTER, Collective.BARRIER):
        parts.append(DType(word >> 8 & 0xFF).name.lower())
    if collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
        parts.append(ReduceOp(word >> 16 & 0xFF).name.lower())
    if collective in (Collective.BROADCAST, Collective.GATHER, Collective.SCATTER):
        parts.append(f"root {word >> 32 & 0xFFFFFF}")
    names = VARIANTS.get(collective, ())
    number = word >> 24 & 0xFF
    if number < len(names):
        parts.append(f"variant {names[number]}")
    return f"{collective.name.lower()}({', '.join(parts)})"
