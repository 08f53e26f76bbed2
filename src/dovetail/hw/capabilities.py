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

    # What GPUs differ in.
    batched_copy: bool = False  #: many copies in one call
    most_batched: int = 0  #: entries that one such call may have
    strided_batch: bool = False  #: many strided copies in one call
    stream_gates: bool = False  #: streams can wait for, and write, 64-bit words in memory
    ipc: bool = False  #: processes can map each other's device memory by handles
    vmm: bool = False  #: device memory can be exported as file descriptors
    partition: bool = False  #: multiprocessors (compute units) can be reserved
    engine_choice: bool = False  #: a copy can be put on a chosen engine, behind dependency signals


CPU = Capabilities(
    backend="cpu",
    engine="software DMA engine",
    native_ops=frozenset(MOVES),
    runs_captured=False,
    most_signals=512,
    runs_in_flight=4,
    compute_cores=1,
)
