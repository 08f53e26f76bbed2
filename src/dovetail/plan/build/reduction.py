"""All-reduce and reduce-scatter. Every variant reads all ranks' values in rank order in one pass: the same bits.

`oneshot`: each rank reduces everything for itself from staged copies; few steps, for small sizes.
`twoshot`: each rank reduces its own segment straight from the peers' tensors and pushes the result to all; only the
owner of a segment ever reads it, so it may overwrite it in place and one handshake and one signal per pair suffice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.build.ring import Chunks
from dovetail.plan.plan import Plan, Role, Space
from dovetail.plan.step import DType, ReduceOp


def segments(size_bytes: int, world: int, item_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each rank's share: whole elements, the longer shares first."""
    items = size_bytes // item_bytes
    cuts = [(items * r + world - 1) // world * item_bytes for r in range(world + 1)]
    return [(cuts[r], cuts[r + 1] - cuts[r]) for r in range(world)]


def _reduce_goal(a: Assembly, src: int, dst: int, size: int, dtype: DType, op: ReduceOp) -> None:
    first = a.sources(np.arange(a.world), src, 0)
    for r in range(a.world):
        a.goal(st.reduce((r, dst, 0), size, first, a.world, dtype, op))


def twoshot(world: int, size_bytes: int, dtype: DType, op: ReduceOp, *, chunk_bytes: int = 64 << 10) -> Plan:
    """In place on the heap; reduce and push alternate in chunks that stay in cache."""
    a = Assembly("all_reduce twoshot", world)
    data = a.buffer("data", Role.INOUT, size_bytes)
    _reduce_goal(a, data, data, size_bytes, dtype, op)
    done = [a.signal(f"done {i}", i) for i in range(world)]
    for i, (offset, length) in enumerate(segments(size_bytes, world, dtype.size_bytes)):
        ch = Chunks(size_bytes=length, chunk_bytes=chunk_bytes)
        at = offset + ch.offsets
        first = a.sources(np.tile(np.arange(world), ch.count), data, np.repeat(at, world))
        firsts = first + np.arange(ch.count) * world
        blocks = [st.reduce((i, data, at), ch.lengths, firsts, world, dtype, op)]
        peers = a.peers(i)
        for k in range(0, len(peers) - 1, 2):
            blocks.append(st.broadcast((i, data, at), (peers[k], data, at), (peers[k + 1], data, at), ch.lengths))
        if len(peers) % 2:
            blocks.append(st.copy((i, data, at), (peers[-1], data, at), ch.lengths))
        says = [st.signal(done[i])] if peers else []
        a.queue(i, 0, st.interleave(*blocks), *says, *(st.wait(done[j]) for j in peers), name="own segment")
    return a.plan()


def oneshot(
    world: int, size_bytes: int, dtype: DType, op: ReduceOp, *, ordinary: bool = True, chunks: Chunks | None = None
) -> Plan:
    """Through staging rings; takes any tensor (`ordinary`: assume none of them is on the heap)."""
    a = Assembly("all_reduce oneshot", world)
    ch = chunks or Chunks(size_bytes=size_bytes)
    data = a.buffer("data", Role.INOUT, size_bytes, Space.LOCAL if ordinary else Space.HEAP)
    ring = a.buffer("ring", Role.SCRATCH, ch.ring_bytes)
    _reduce_goal(a, data, data, size_bytes, dtype, op)
    ready = [a.signal(f"ready {i}", i) for i in range(world)]
    freed = [a.signal(f"freed {i}", i) for i in range(world)]
    for i in range(world):
        if world == 1:
            a.queue(i, 0, st.reduce((i, data, 0), size_bytes, 0, 1, dtype, op), name="own")
            continue
        peers = a.peers(i)
        first = a.sources(np.tile(np.arange(world), ch.count), ring, np.repeat(ch.in_ring, world))
        firsts = first + np.arange(ch.count) * world
        reduces = st.reduce((i, data, ch.offsets), ch.lengths, firsts, world, dtype, op)
        waits = [st.wait(np.full(ch.count, ready[j]), ch.numbers) for j in [i, *peers]]
        a.queue(i, 0, ch.fill((i, data, 0), (i, ring, 0), ready[i], [freed[j] for j in [i, *peers]]), name="stage")
        says = st.signal(np.full(ch.count, freed[i]), ch.numbers)
        a.queue(i, 1, st.interleave(*waits, reduces, says), name="reduce")
    return a.plan()


def reduce_scatter(world: int, size_bytes: int, dtype: DType, op: ReduceOp) -> Plan:
    """Rank r reduces piece r of everybody's input on the heap. `size_bytes` is one piece."""
    a = Assembly("reduce_scatter oneshot", world)
    n = size_bytes
    inp = a.buffer("input", Role.INPUT, n * world)
    out = a.buffer("output", Role.OUTPUT, n)
    done = a.pair_signals("done")
    for i in range(world):
        first = a.sources(np.arange(world), inp, i * n)
        move = st.reduce((i, out, 0), n, first, world, dtype, op)
        a.goal(move)
        peers = a.peers(i)
        says = [st.signal(done[i, j]) for j in peers]
        a.queue(i, 0, move, *says, *(st.wait(done[j, i]) for j in peers), name="own piece")
    return a.plan()


def reduce_scatter_staged(
    world: int,
    size_bytes: int,
    dtype: DType,
    op: ReduceOp,
    *,
    ordinary: Sequence[bool] | None = None,
    chunks: Chunks | None = None,
) -> Plan:
    """As `reduce_scatter` for any tensors: a ring per peer where a rank's input is not on the heap."""
    a = Assembly("reduce_scatter staged", world)
    n, ch = size_bytes, chunks or Chunks(size_bytes=size_bytes)
    plain = tuple(ordinary or (True,) * world)
    spaces = [Space.LOCAL if o else Space.HEAP for o in plain]
    inp = a.buffer("input", Role.INPUT, n * world, spaces)
    out = a.buffer("output", Role.OUTPUT, n, spaces)
    view = a.buffer("view", Role.VIEW, ch.ring_bytes * world, of=inp, staged=plain)
    ready = a.pair_signals("ready")
    freed = a.pair_signals("freed")
    ranks = np.arange(world)
    for i in range(world):
        a.goal(st.reduce((i, out, 0), n, a.sources(ranks, inp, i * n), world, dtype, op))
        peers = a.peers(i)
        for e, j in enumerate(peers):
            ring = j * ch.ring_bytes
            fill = st.signal(ready[i, j], ch.count)
            if plain[i]:
                fill = ch.fill((i, inp, j * n), (i, view, ring), ready[i, j], [freed[j, i]])
            a.queue(i, 1 + e, fill, name=f"to {j}")
        first = a.sources(
            np.tile(ranks, ch.count),
            np.tile(np.where(ranks == i, inp, view), ch.count),
            i * n + np.repeat(ch.offsets, world),
            alt=i * ch.ring_bytes + np.repeat(ch.in_ring, world),
        )
        firsts = first + np.arange(ch.count) * world
        blocks = [st.wait(np.full(ch.count, ready[j, i]), ch.numbers) for j in peers]
        blocks.append(st.reduce((i, out, ch.offsets), ch.lengths, firsts, world, dtype, op))
        blocks += [st.signal(np.full(ch.count, freed[i, j]), ch.numbers) for j in peers]
        ends = [st.wait(freed[j, i], ch.count) for j in peers]
        a.queue(i, 0, st.interleave(*blocks), *ends, name="reduce")
    return a.plan()
