"""All-gather: every rank's `size_bytes` to every rank, in rank order.

Variants: `pcpy` (a copy per peer, an engine per peer), `bcst` (a broadcast per two destinations) push into the peers'
outputs; `pull` reads the peers' inputs, through a staging ring where they are not on the heap.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.build.ring import Chunks
from dovetail.plan.plan import Plan, Role, Space


def _goal(a: Assembly, inp: int, out: int, n: int) -> None:
    r, i = np.divmod(np.arange(a.world**2), a.world)
    a.goal(st.copy((i, inp, 0), (r, out, i * n), n))


def pcpy(world: int, size_bytes: int, *, own_copy: bool = True) -> Plan:
    """Rank i copies to (i+1 .. i+N-1) mod N, an engine each. Without `own_copy` the input is its part of the output."""
    a = Assembly("all_gather pcpy", world)
    n = size_bytes
    inp, out = _direct_buffers(a, n, own_copy)
    done = a.pair_signals("done")
    for i in range(world):
        own = [st.copy((i, inp, 0), (i, out, i * n), n)] if own_copy else []
        if world == 1:
            a.queue(i, 0, *own, name="own")
        for e, j in enumerate(a.peers(i)):
            copy = st.copy((i, inp, 0 if own_copy else i * n), (j, out, i * n), n)
            a.queue(i, e, copy, st.signal(done[i, j]), *(own if e == 0 else []), st.wait(done[j, i]), name=f"to {j}")
    return a.plan()


def bcst(world: int, size_bytes: int, *, own_copy: bool = True) -> Plan:
    """As `pcpy` with two destinations per command; the rank's own output takes the odd place."""
    a = Assembly("all_gather bcst", world)
    n = size_bytes
    inp, out = _direct_buffers(a, n, own_copy)
    targets = {i: a.peers(i) + ([i] if own_copy else []) for i in range(world)}
    pairs = {i: [t[k : k + 2] for k in range(0, len(t), 2)] for i, t in targets.items()}
    done = {(i, e): a.signal(f"done {i}.{e}", i) for i in range(world) for e, p in enumerate(pairs[i]) if p != [i]}
    heard = {(i, j): done[i, e] for i in range(world) for e, p in enumerate(pairs[i]) for j in p if j != i}
    for i in range(world):
        src = (i, inp, 0 if own_copy else i * n)
        for e, pair in enumerate(pairs[i]):
            dsts = [(j, out, i * n) for j in pair]
            move = st.broadcast(src, dsts[0], dsts[1], n) if len(pair) == 2 else st.copy(src, dsts[0], n)
            says = [st.signal(done[i, e])] if (i, e) in done else []
            waits = [st.wait(heard[j, i]) for j in pair if j != i]
            a.queue(i, e, move, *says, *waits, name=f"to {', '.join(map(str, pair))}")
    return a.plan()


def _direct_buffers(a: Assembly, n: int, own_copy: bool) -> tuple[int, int]:
    if own_copy:
        inp = a.buffer("input", Role.INPUT, n)
        out = a.buffer("output", Role.OUTPUT, n * a.world)
        _goal(a, inp, out, n)
        return inp, out
    data = a.buffer("data", Role.INOUT, n * a.world)
    r, i = np.divmod(np.arange(a.world**2), a.world)
    a.goal(st.copy((i, data, i * n), (r, data, i * n), n))
    return data, data


def pull(
    world: int,
    size_bytes: int,
    *,
    ordinary: Sequence[bool] | None = None,
    chunks: Chunks | None = None,
) -> Plan:
    """Every rank reads its peers' inputs. `ordinary[r]`: rank r's tensors are not on the heap, so it stages."""
    a = Assembly("all_gather pull", world)
    n, ch = size_bytes, chunks or Chunks(size_bytes=size_bytes)
    plain = tuple(ordinary or (False,) * world)
    spaces = [Space.LOCAL if o else Space.HEAP for o in plain]
    inp = a.buffer("input", Role.INPUT, n, spaces)
    out = a.buffer("output", Role.OUTPUT, n * world, spaces)
    view = a.buffer("view", Role.VIEW, ch.ring_bytes, of=inp, staged=plain)
    ready = [a.signal(f"ready {i}", i) for i in range(world)]
    freed = a.pair_signals("freed")  # (reader, owner), in the owner's memory
    _goal(a, inp, out, n)
    for i in range(world):
        peers = a.peers(i)
        own = st.copy((i, inp, 0), (i, out, i * n), n)
        if plain[i] and peers:
            a.queue(i, 0, ch.fill((i, inp, 0), (i, view, 0), ready[i], [freed[j, i] for j in peers]), name="stage")
            a.queue(i, world, own, name="own")
        else:
            says = [st.signal(ready[i], ch.count)] if peers else []
            a.queue(i, 0, *says, own, name="own")
        for e, j in enumerate(peers):
            drain = ch.drain((j, view, 0), 0, (i, out, j * n), ready[j], freed[i, j])
            a.queue(i, 1 + e, drain, st.wait(freed[j, i], ch.count), name=f"from {j}")
    return a.plan()
