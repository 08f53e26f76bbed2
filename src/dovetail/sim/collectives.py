"""Collectives as plans to be priced: by name, variant, ranks and size.

The plans are those that executors run, by default without the entry handshake and without the copy of a rank's own
piece: A's tables have neither.
`total_bytes` is chunk x ranks for all_gather and all_to_all, as in A's tables; for all_reduce it is a rank's tensor,
for reduce_scatter a rank's input, for broadcast and for one copy what is sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dovetail.plan import passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all, reduction, rooted
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.build.ring import Chunks
from dovetail.plan.plan import Plan, Role
from dovetail.plan.step import DType, Op, ReduceOp
from dovetail.sim.program import Program

COPY = "copy"  #: one copy to a peer
_REDUCE_CHUNK_BYTES = 8 << 20  # what a GPU reduces before it sends that on: as the GPU executor does


def _whole(n: int) -> Chunks:
    return Chunks(size_bytes=n, chunk_bytes=max(n, 64))


def _oneshot(w: int, n: int, own: bool) -> Plan:
    chunks = Chunks(size_bytes=n, chunk_bytes=_REDUCE_CHUNK_BYTES)
    return reduction.oneshot(w, n, DType.FLOAT32, ReduceOp.SUM, ordinary=False, chunks=chunks)


def _twoshot(w: int, n: int, own: bool) -> Plan:
    return reduction.twoshot(w, n, DType.FLOAT32, ReduceOp.SUM, chunk_bytes=_REDUCE_CHUNK_BYTES)


def _copy(w: int, n: int, own: bool) -> Plan:
    """One copy to a peer, whose completion the host waits for: what A's phase table takes apart."""
    a = Assembly("one copy", w)
    src = a.buffer("input", Role.INPUT, n)
    dst = a.buffer("output", Role.OUTPUT, n)
    done = a.signal("done", 0)
    move = st.copy((0, src, 0), (1, dst, 0), n)
    a.goal(move)
    a.queue(0, 0, move, st.signal(done), st.wait(done), name="copy")
    return a.plan()


#: How a plan is made: ranks, bytes of a piece, and whether a rank's own piece is copied too (pull always does).
_MAKERS: dict[str, dict[str, Callable[[int, int, bool], Plan]]] = {
    "all_gather": {
        "pcpy": lambda w, n, own: all_gather.pcpy(w, n, own_copy=own),
        "bcst": lambda w, n, own: all_gather.bcst(w, n, own_copy=own),
        "b2b": lambda w, n, own: passes.b2b(all_gather.pcpy(w, n, own_copy=own)),
        "pull": lambda w, n, own: all_gather.pull(w, n, chunks=_whole(n)),
    },
    "all_to_all": {
        "pcpy": lambda w, n, own: all_to_all.pcpy(w, n, own_copy=own),
        "swap": lambda w, n, own: all_to_all.swap(w, n),
        "b2b": lambda w, n, own: passes.b2b(all_to_all.pcpy(w, n, own_copy=own)),
        "pull": lambda w, n, own: all_to_all.pull(w, n, chunks=_whole(n)),
    },
    "all_reduce": {"oneshot": _oneshot, "twoshot": _twoshot},
    "reduce_scatter": {"oneshot": lambda w, n, own: reduction.reduce_scatter(w, n, DType.FLOAT32, ReduceOp.SUM)},
    COPY: {"pcpy": _copy},
    "broadcast": {
        "pcpy": lambda w, n, own: rooted.broadcast_pcpy(w, n, 0),
        "bcst": lambda w, n, own: rooted.broadcast_pcpy(w, n, 0, pairs=True),
        "pull": lambda w, n, own: rooted.broadcast_pull(w, n, 0, chunks=_whole(n)),
    },
}
#: Collectives whose total is ranks times a piece.
_PIECES = ("all_gather", "all_to_all", "reduce_scatter")
_REDUCES = ("all_reduce", "reduce_scatter")
#: Collectives whose plans never cut a piece.
_WHOLE = ("all_gather", "all_to_all", "reduce_scatter", "broadcast", COPY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of a collective."""

    collective: str
    variant: str
    total_bytes: int
    ranks: int
    prelaunch: bool = False
    complete: bool = False  #: as executors run it: with the opening handshake and the copy of a rank's own piece

    @property
    def name(self) -> str:
        """``bcst_prelaunch``, as A's tables name their columns."""
        return f"{self.variant}_prelaunch" if self.prelaunch else self.variant


def collectives() -> tuple[str, ...]:
    """The collectives that can be priced."""
    return tuple(_MAKERS)


def baseline(collective: str) -> str:
    """The variant that the speed of the others is compared with."""
    return variants(collective)[0]


def variants(collective: str) -> tuple[str, ...]:
    """The variants of a collective, the baseline first."""
    if collective not in _MAKERS:
        raise ValueError(f"collective must be one of {', '.join(_MAKERS)}, not {collective!r}")
    return tuple(_MAKERS[collective])


def unit_bytes(collective: str, ranks: int) -> int:
    """What a total must be a multiple of: a byte for each rank's piece, an element where something is reduced."""
    variants(collective)
    pieces = ranks if collective in _PIECES else 1
    return pieces * (DType.FLOAT32.size_bytes if collective in _REDUCES else 1)


def baseline_of(case: Case) -> Case:
    """The case that a speedup compares with: the baseline variant, launched when it is called."""
    return dataclasses.replace(case, variant=baseline(case.collective), prelaunch=False)


def plan_of(case: Case) -> Plan:
    """The plan of a case.

    Raises:
        ValueError: an unknown collective or variant, or a size that can't be cut into the ranks' pieces.
    """
    if case.variant not in variants(case.collective):
        allowed = ", ".join(variants(case.collective))
        raise ValueError(f"variant of {case.collective} must be one of {allowed}, not {case.variant!r}")
    if case.ranks < 2:
        raise ValueError(f"a collective needs at least 2 ranks, not {case.ranks}")
    pieces = case.ranks if case.collective in _PIECES else 1
    unit = unit_bytes(case.collective, case.ranks)
    if case.total_bytes < unit or case.total_bytes % unit:
        raise ValueError(
            f"total_bytes of {case.collective} must be a positive multiple of {unit} with {case.ranks} ranks, "
            f"not {case.total_bytes}"
        )
    plan = _MAKERS[case.collective][case.variant](case.ranks, case.total_bytes // pieces, case.complete)
    if case.complete:
        plan = passes.entry(plan)
    return passes.prelaunch(plan) if case.prelaunch else plan


@lru_cache(maxsize=1024)
def program_of(case: Case, steps: frozenset[Op]) -> Program:
    """The plan of a case in `steps`, ready to be replayed; kept, since fits price the same plans again and again.

    Plans that copy whole pieces differ between sizes in nothing but a factor: they are built once.
    """
    unit = unit_bytes(case.collective, case.ranks)
    if case.collective not in _WHOLE or case.total_bytes <= unit or case.total_bytes % unit:
        return Program(passes.lower(plan_of(case), steps))
    smallest = program_of(dataclasses.replace(case, total_bytes=unit), steps)
    return smallest.scaled(case.total_bytes // unit)
