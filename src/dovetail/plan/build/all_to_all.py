"""All-to-all: piece j of rank i's input becomes piece i of rank j's output.

Variants: `pcpy` pushes, an engine per peer; `swap` exchanges in place, each pair of ranks once; `pull` reads from the
peers, through a ring per peer where their tensors are not on the heap. `*_uneven`: the splits are parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.build.ring import Chunks
from dovetail.plan.plan import AT_RUN, Plan, Role, Space
from dovetail.plan.step import UNBOUNDED


def _goal(a: Assembly, inp: int, out: int, n: int) -> None:
    r, i = np.divmod(np.arange(a.world**2), a.world)
    a.goal(st.copy((i, inp, r * n), (r, out, i * n), n))


def pcpy(world: int, size_bytes: int, *, own_copy: bool = True) -> Plan:
    """`size_bytes` is one piece. Without `own_copy` the rank's own piece is left to the caller."""
    a = Assembly("all_to_all pcpy", world)
    n = size_bytes
    inp = a.buffer("input", Role.INPUT, n * world)
    out = a.buffer("output", Role.OUTPUT, n * world)
    if own_copy:
        _goal(a, inp, out, n)
    else:
        of, to = np.divmod(np.arange(world**2), world)
        of, to = of[of != to], to[of != to]
        a.goal(st.copy((of, inp, to * n), (to, out, of * n), n))
    done = a.pair_signals("done")
    for i in range(world):
        own = [st.copy((i, inp, i * n), (i, out, i * n), n)] if own_copy else []
        if world == 1:
            a.queue(i, 0, *own, name="own")
        for e, j in enumerate(a.peers(i)):
            copy = st.copy((i, inp, j * n), (j, out, i * n), n)
            a.queue(i, e, copy, st.signal(done[i, j]), *(own if e == 0 else []), st.wait(done[j, i]), name=f"to {j}")
    return a.plan()


def pcpy_uneven(world: int) -> Plan:
    """As `pcpy`, with splits that each rank posts when it enters."""
    a = Assembly("all_to_all pcpy uneven", world)
    inp, out, sends, receives = _uneven(a, Space.HEAP)
    done = a.pair_signals("done")
    for i in range(world):
        own = _piece(i, i, inp, out, sends, receives)
        if world == 1:
            a.queue(i, 0, own, name="own")
        for e, j in enumerate(a.peers(i)):
            copy = _piece(i, j, inp, out, sends, receives)
            a.queue(i, e, copy, st.signal(done[i, j]), *([own] if e == 0 else []), st.wait(done[j, i]), name=f"to {j}")
    return a.plan()


_Pieces = list[tuple[list[int], list[int]]]


def _uneven(a: Assembly, spaces: Space | Sequence[Space]) -> tuple[int, int, _Pieces, _Pieces]:
    """Buffers, and the offset and length parameters of each rank's sends and receipts, with the goal stated."""
    inp = a.buffer("input", Role.INPUT, AT_RUN, spaces)
    out = a.buffer("output", Role.OUTPUT, AT_RUN, spaces)
    sends, receives = [], []
    for r in range(a.world):  # a rank's parameters in the order in which it posts them
        sends.append(a.partition(r, inp, "send"))
        receives.append(a.partition(r, out, "receive"))
    for i in range(a.world):
        for j in range(a.world):
            a.equal(sends[i][1][j], receives[j][1][i])
            a.goal(_piece(i, j, inp, out, sends, receives))
    return inp, out, sends, receives


def _piece(i: int, j: int, inp: int, out: int, sends: _Pieces, receives: _Pieces) -> st.Rows:
    """The copy of rank i's piece j to rank j's piece i."""
    return st.copy((i, inp, 0, sends[i][0][j]), (j, out, 0, receives[j][0][i]), UNBOUNDED, length_param=sends[i][1][j])


def pull_uneven(world: int, *, ordinary: Sequence[bool] | None = None) -> Plan:
    """As `pull` with run-time splits. A rank that stages does so in one copy of its input: lengths are not known."""
    a = Assembly("all_to_all pull uneven", world)
    plain = tuple(ordinary or (False,) * world)
    inp, out, sends, receives = _uneven(a, [Space.LOCAL if o else Space.HEAP for o in plain])
    view = a.buffer("view", Role.VIEW, AT_RUN, of=inp, staged=plain)
    ready = a.pair_signals("ready")
    freed = a.pair_signals("freed")
    for i in range(world):
        a.queue(i, 0, _piece(i, i, inp, out, sends, receives), name="own")
        for e, j in enumerate(a.peers(i)):
            fill = []
            if plain[i]:
                offset, length = sends[i][0][j], sends[i][1][j]
                fill = [st.copy((i, inp, 0, offset), (i, view, 0, offset), UNBOUNDED, length_param=length)]
            a.queue(i, 1 + e, *fill, st.signal(ready[i, j]), name=f"to {j}")
            copy = _piece(j, i, view, out, sends, receives)
            waits = st.wait(freed[j, i])
            a.queue(i, world + e, st.wait(ready[j, i]), copy, st.signal(freed[i, j]), waits, name=f"from {j}")
    return a.plan()


def swap(world: int, size_bytes: int) -> Plan:
    """In place: each unordered pair of ranks is one swap, done by the lower of the two around the ring."""
    a = Assembly("all_to_all swap", world)
    n = size_bytes
    data = a.buffer("data", Role.INOUT, n * world)
    _goal(a, data, data, n)
    for i in range(world):
        for e, j in enumerate(swap_partners(i, world)):
            done = a.signal(f"done {i}-{j}", j)
            a.queue(i, e, st.swap((i, data, j * n), (j, data, i * n), n), st.signal(done), name=f"with {j}")
            a.queue(j, world + e, st.wait(done), name=f"by {i}")
    return a.plan()


def swap_partners(rank: int, world: int) -> list[int]:
    """Whom `rank` swaps with: at most ceil((world - 1) / 2) others, every pair exactly once over all ranks."""
    half = [(rank + d) % world for d in range(1, (world - 1) // 2 + 1)]
    opposite = (rank + world // 2) % world
    if world % 2 == 0 and rank < opposite:
        half.append(opposite)
    return half


def swap_copied(world: int, size_bytes: int) -> Plan:
    """`swap` for an output that is not the input: each rank first copies its input over."""
    a = Assembly("all_to_all swap copied", world)
    n = size_bytes
    inp = a.buffer("input", Role.INPUT, n * world)
    out = a.buffer("output", Role.OUTPUT, n * world)
    _goal(a, inp, out, n)
    filled = [a.signal(f"filled {i}", i) for i in range(world)]
    for i in range(world):
        says = [st.signal(filled[i])] if world > 1 else []
        a.queue(i, 0, st.copy((i, inp, 0), (i, out, 0), n * world), *says, name="own")
        for e, j in enumerate(swap_partners(i, world)):
            done = a.signal(f"done {i}-{j}", j)
            waits = st.wait(np.array([filled[i], filled[j]]))
            a.queue(i, 1 + e, waits, st.swap((i, out, j * n), (j, out, i * n), n), st.signal(done), name=f"with {j}")
            a.queue(j, world + e, st.wait(done), name=f"by {i}")
    return a.plan()


def swap_staged(world: int, size_bytes: int, *, ordinary: bool = True, chunks: Chunks | None = None) -> Plan:
    """In place for any tensors: a chunk is overwritten only after it was put into the ring of the peer it goes to."""
    a = Assembly("all_to_all swap staged", world)
    n, ch = size_bytes, chunks or Chunks(size_bytes=size_bytes)
    data = a.buffer("data", Role.INOUT, n * world, Space.LOCAL if ordinary else Space.HEAP)
    rings = a.buffer("rings", Role.SCRATCH, ch.ring_bytes * world)
    ready = a.pair_signals("ready")
    freed = a.pair_signals("freed")
    _goal(a, data, data, n)
    for i in range(world):
        for e, j in enumerate(a.peers(i)):
            fill = ch.fill((i, data, j * n), (i, rings, j * ch.ring_bytes), ready[i, j], [freed[j, i]])
            a.queue(i, e, fill, name=f"to {j}")
            ring = i * ch.ring_bytes
            drain = ch.drain((j, rings, ring), ring, (i, data, j * n), ready[j, i], freed[i, j])
            drain["src_offset"] = drain["src_alt"]  # always staged
            waits = st.wait(np.full(ch.count, ready[i, j]), ch.numbers)
            rows = st.interleave(waits, drain[0::3], drain[1::3], drain[2::3])
            a.queue(i, world + e, rows, name=f"from {j}")
    return a.plan()


def pull(
    world: int,
    size_bytes: int,
    *,
    ordinary: Sequence[bool] | None = None,
    chunks: Chunks | None = None,
) -> Plan:
    """Every rank reads its pieces from its peers. `ordinary[r]`: rank r's tensors are not on the heap: it stages."""
    a = Assembly("all_to_all pull", world)
    n, ch = size_bytes, chunks or Chunks(size_bytes=size_bytes)
    plain = tuple(ordinary or (False,) * world)
    spaces = [Space.LOCAL if o else Space.HEAP for o in plain]
    inp = a.buffer("input", Role.INPUT, n * world, spaces)
    out = a.buffer("output", Role.OUTPUT, n * world, spaces)
    view = a.buffer("view", Role.VIEW, ch.ring_bytes * world, of=inp, staged=plain)
    ready = a.pair_signals("ready")
    freed = a.pair_signals("freed")
    _goal(a, inp, out, n)
    for i in range(world):
        for e, j in enumerate(a.peers(i)):
            ring = j * ch.ring_bytes
            if plain[i]:
                fill = ch.fill((i, inp, j * n), (i, view, ring), ready[i, j], [freed[j, i]])
            else:
                fill = st.signal(ready[i, j], ch.count)
            a.queue(i, 1 + e, fill, name=f"to {j}")
        for e, j in enumerate(a.peers(i)):
            drain = ch.drain((j, view, i * n), i * ch.ring_bytes, (i, out, j * n), ready[j, i], freed[i, j])
            a.queue(i, world + e, drain, st.wait(freed[j, i], ch.count), name=f"from {j}")
        a.queue(i, 0, st.copy((i, inp, i * n), (i, out, i * n), n), name="own")
    return a.plan()
