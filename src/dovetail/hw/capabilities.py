"""What an executor can do, as data. Passes and choosers ask here, in one place, and nowhere test for a vendor."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.plan.step import MOVES, Op


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """One executor's abilities."""

    backend: str  #: "cpu", "cuda", "hip"
    engine: str  #: who moves the bytes, for tickets and tables
    native_ops: frozenset[Op]  #: moves it runs as they are; `plan.passes.lower` rewrites the others
    runs_captured: bool  #: plans whose signal values are fixed
    most_signals: int  #: per rank
    runs_in_flight: int  #: of one group
    compute_cores: int  #: cores that a transfer takes from computation


CPU = Capabilities(
    backend="cpu",
    engine="software DMA engine",
    native_ops=frozenset(MOVES),
    runs_captured=False,
    most_signals=512,
    runs_in_flight=4,
    compute_cores=1,
)
