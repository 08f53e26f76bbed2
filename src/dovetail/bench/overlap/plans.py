"""Plans of a host link: copies between a GPU (rank 0) and host memory, and a reduction of pieces that lie there.

Only what crosses the link is copied; the reduction is done where its result is wanted, on the GPU.
"""

from __future__ import annotations

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.plan import ABSENT, Plan, Role
from dovetail.plan.step import DType, ReduceOp

GPU, HOST = 0, 1
INTO, OUT = "into", "out"  #: of the GPU


def copies(ways: tuple[str, ...], num_pieces: int, piece_bytes: int) -> Plan:
    """`num_pieces` copies of `piece_bytes` each way that is named; buffers "into from", "into to", "out from", ..."""
    a = Assembly("host link " + " ".join(ways), 2)
    size, at = num_pieces * piece_bytes, np.arange(num_pieces) * piece_bytes
    for engine, way in enumerate(ways):
        ends = (HOST, GPU) if way == INTO else (GPU, HOST)
        src, dst = (
            a.buffer(f"{way} {name}", role, [size if rank == end else ABSENT for rank in (GPU, HOST)])
            for name, role, end in (("from", Role.INPUT, ends[0]), ("to", Role.OUTPUT, ends[1]))
        )
        moves = st.copy((ends[0], src, at), (ends[1], dst, at), piece_bytes)
        a.goal(moves)
        landed = a.signal(f"{way} landed", HOST)
        a.queue(GPU, engine, moves, st.signal(landed), name=way)
        a.queue(HOST, engine, st.wait(landed), name=f"until {way} has landed")
        a.queue(GPU, len(ways) + engine, st.wait(landed), name=f"until {way} has landed")
    return a.plan()


def reduce_scatter(ranks: int, piece_bytes: int, dtype: DType) -> Plan:
    """The GPU's part: its piece of every peer's input comes to it, then it sums them and its own, in rank order."""
    a = Assembly("reduce_scatter host peers", ranks)
    peers = np.arange(1, ranks)
    inp = a.buffer("input", Role.INPUT, piece_bytes)
    out = a.buffer("output", Role.OUTPUT, [piece_bytes] + [ABSENT] * (ranks - 1))
    pieces = a.buffer("pieces", Role.SCRATCH, [piece_bytes * (ranks - 1)] + [ABSENT] * (ranks - 1))
    at = (peers - 1) * piece_bytes
    moves = st.copy((peers, inp, 0), (GPU, pieces, at), piece_bytes)
    first = a.sources([GPU, *[GPU] * len(peers)], [inp, *[pieces] * len(peers)], [0, *at.tolist()])
    total = st.reduce((GPU, out, 0), piece_bytes, first, ranks, dtype, ReduceOp.SUM)
    wanted = a.sources(np.arange(ranks), inp, 0)
    a.goal(st.reduce((GPU, out, 0), piece_bytes, wanted, ranks, dtype, ReduceOp.SUM))
    read = [a.signal(f"read {rank}", rank) for rank in peers.tolist()]
    a.queue(GPU, 0, moves, *(st.signal(signal) for signal in read), total, name="fetch and sum")
    for rank, signal in zip(peers.tolist(), read, strict=True):
        a.queue(rank, 0, st.wait(signal), name="until it was read")
    return a.plan()
