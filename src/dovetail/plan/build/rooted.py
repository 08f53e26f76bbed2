"""Broadcast, gather and scatter: one rank is the root. And the barrier, which moves nothing.

`pcpy` and `bcst` let the root's (gather: each rank's) engines push; `pull` lets the readers fetch, through a ring where
the tensor is not on the heap.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.build.ring import Chunks
from dovetail.plan.plan import ABSENT, Plan, Role, Space


def _root(a: Assembly, root: int) -> None:
    if not 0 <= root < a.world:
        raise ValueError(f"{a.name}: root must be in 0..{a.world - 1}, not {root}")


def _only(world: int, ranks: Sequence[int], size: int) -> list[int]:
    return [size if r in ranks else ABSENT for r in range(world)]


def broadcast_pcpy(world: int, size_bytes: int, root: int, *, pairs: bool = False) -> Plan:
    """The root copies to each peer; with `pairs` to two at a time (`bcst`)."""
    a = Assembly("broadcast bcst" if pairs else "broadcast pcpy", world)
    _root(a, root)
    n, peers = size_bytes, a.peers(root)
    inp = a.buffer("input", Role.INPUT, _only(world, [root], n))
    out = a.buffer("output", Role.OUTPUT, _only(world, peers, n))
    width = 2 if pairs else 1
    for e in range(0, len(peers), width):
        dsts = [(j, out, 0) for j in peers[e : e + width]]
        move = (
            st.broadcast((root, inp, 0), dsts[0], dsts[1], n) if len(dsts) == 2 else st.copy((root, inp, 0), dsts[0], n)
        )
        done = a.signal(f"done {e // width}", dsts[0][0])
        a.queue(root, e // width, move, st.signal(done), name=f"to {', '.join(str(d[0]) for d in dsts)}")
        for j, _, _ in dsts:
            a.queue(j, 0, st.wait(done), name=f"from {root}")
    for j in peers:
        a.goal(st.copy((root, inp, 0), (j, out, 0), n))
    return a.plan()


def broadcast_pull(
    world: int, size_bytes: int, root: int, *, ordinary: Sequence[bool] | None = None, chunks: Chunks | None = None
) -> Plan:
    """Every peer reads the root's tensor."""
    a = Assembly("broadcast pull", world)
    _root(a, root)
    n, ch, peers = size_bytes, chunks or Chunks(size_bytes=size_bytes), a.peers(root)
    plain = tuple(ordinary or (False,) * world)
    spaces = [Space.LOCAL if o else Space.HEAP for o in plain]
    inp = a.buffer("input", Role.INPUT, _only(world, [root], n), spaces)
    out = a.buffer("output", Role.OUTPUT, _only(world, peers, n), spaces)
    view = a.buffer("view", Role.VIEW, _only(world, [root], ch.ring_bytes), of=inp, staged=plain)
    ready = a.signal("ready", root)
    freed = {j: a.signal(f"freed {j}", root) for j in peers}
    if peers:
        fill = st.signal(ready, ch.count)
        if plain[root]:
            fill = ch.fill((root, inp, 0), (root, view, 0), ready, list(freed.values()))
        a.queue(root, 0, fill, *(st.wait(f, ch.count) for f in freed.values()), name="root")
    for j in peers:
        a.queue(j, 0, ch.drain((root, view, 0), 0, (j, out, 0), ready, freed[j]), name=f"from {root}")
        a.goal(st.copy((root, inp, 0), (j, out, 0), n))
    return a.plan()


def gather_pcpy(world: int, size_bytes: int, root: int) -> Plan:
    """Every rank pushes its part into the root's output, one buffer of world x size_bytes."""
    a = Assembly("gather pcpy", world)
    _root(a, root)
    n = size_bytes
    inp = a.buffer("input", Role.INPUT, n)
    out = a.buffer("output", Role.OUTPUT, _only(world, [root], n * world))
    for i in range(world):
        copy = st.copy((i, inp, 0), (root, out, i * n), n)
        a.goal(copy)
        if i == root:
            a.queue(i, 0, copy, name="own")
            continue
        done = a.signal(f"done {i}", root)
        a.queue(i, 0, copy, st.signal(done), name=f"to {root}")
        a.queue(root, 1 + i, st.wait(done), name=f"from {i}")
    return a.plan()


def gather_pull(
    world: int, size_bytes: int, root: int, *, ordinary: Sequence[bool] | None = None, chunks: Chunks | None = None
) -> Plan:
    """The root reads everybody's part into its own tensors, `output 0` .. `output N-1`."""
    a = Assembly("gather pull", world)
    _root(a, root)
    n, ch = size_bytes, chunks or Chunks(size_bytes=size_bytes)
    plain = tuple(ordinary or (False,) * world)
    spaces = [Space.LOCAL if o else Space.HEAP for o in plain]
    inp = a.buffer("input", Role.INPUT, n, spaces)
    view = a.buffer("view", Role.VIEW, ch.ring_bytes, of=inp, staged=plain)
    outs = [a.buffer(f"output {i}", Role.OUTPUT, _only(world, [root], n), Space.LOCAL) for i in range(world)]
    for i in range(world):
        a.goal(st.copy((i, inp, 0), (root, outs[i], 0), n))
    a.queue(root, 0, st.copy((root, inp, 0), (root, outs[root], 0), n), name="own")
    for e, i in enumerate(a.peers(root)):
        ready, freed = a.signal(f"ready {i}", root), a.signal(f"freed {i}", i)
        fill = st.signal(ready, ch.count)
        if plain[i]:
            fill = ch.fill((i, inp, 0), (i, view, 0), ready, [freed])
        a.queue(i, 0, fill, st.wait(freed, ch.count), name=f"to {root}")
        a.queue(root, 1 + e, ch.drain((i, view, 0), 0, (root, outs[i], 0), ready, freed), name=f"from {i}")
    return a.plan()


def scatter_pcpy(world: int, size_bytes: int, root: int) -> Plan:
    """The root pushes piece i of its input, one buffer of world x size_bytes, to rank i."""
    a = Assembly("scatter pcpy", world)
    _root(a, root)
    n = size_bytes
    inp = a.buffer("input", Role.INPUT, _only(world, [root], n * world))
    out = a.buffer("output", Role.OUTPUT, n)
    for e, i in enumerate([*a.peers(root), root]):
        copy = st.copy((root, inp, i * n), (i, out, 0), n)
        a.goal(copy)
        if i == root:
            a.queue(i, e, copy, name="own")
            continue
        done = a.signal(f"done {i}", i)
        a.queue(root, e, copy, st.signal(done), name=f"to {i}")
        a.queue(i, 0, st.wait(done), name=f"from {root}")
    return a.plan()


def scatter_pull(world: int, size_bytes: int, root: int, *, chunks: Chunks | None = None) -> Plan:
    """The root stages its tensors, `input 0` .. `input N-1`, each through its own ring; every rank reads its own."""
    a = Assembly("scatter pull", world)
    _root(a, root)
    n, ch = size_bytes, chunks or Chunks(size_bytes=size_bytes)
    ins = [a.buffer(f"input {i}", Role.INPUT, _only(world, [root], n), Space.LOCAL) for i in range(world)]
    out = a.buffer("output", Role.OUTPUT, n, Space.LOCAL)
    rings = a.buffer("rings", Role.SCRATCH, _only(world, [root], ch.ring_bytes * world))
    for i in range(world):
        a.goal(st.copy((root, ins[i], 0), (i, out, 0), n))
    a.queue(root, 0, st.copy((root, ins[root], 0), (root, out, 0), n), name="own")
    for e, i in enumerate(a.peers(root)):
        ready, freed = a.signal(f"ready {i}", i), a.signal(f"freed {i}", root)
        ring = i * ch.ring_bytes
        a.queue(root, 1 + e, ch.fill((root, ins[i], 0), (root, rings, ring), ready, [freed]), name=f"to {i}")
        drain = ch.drain((root, rings, ring), ring, (i, out, 0), ready, freed)
        drain["src_offset"] = drain["src_alt"]  # always staged
        a.queue(i, 0, drain, name=f"from {root}")
    return a.plan()


def barrier(world: int) -> Plan:
    """Nothing moves; the entry handshake is the barrier."""
    return Assembly("barrier", world).plan()
