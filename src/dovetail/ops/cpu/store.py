"""Transport `store` on the CPU: a rank computes straight into its peers' memory, their pieces first.

Memory is shared, so a peer's piece of the output is an ordinary tensor here and the operator writes it without a copy.
A call is: agree (where everybody's memory is), compute, meet again. Between `agree` and the end of a call no rank
touches what the call was given; the exchange that opens the next call is what makes scratch free again.

Where what is sent is small, or is only added up, it goes to a stage that the peers have posted before
(`OpsGroup.push`): compute into it, then agree, and that is the only meeting. Nobody reads a peer's memory after the
last meeting of a call, when that peer may be gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from dovetail.ops import calls
from dovetail.ops.cpu import lookups
from dovetail.ops.cpu.product import is_long, is_ours, mm, ready
from dovetail.ops.cpu.shared import (
    COPIED_BYTES,
    CPU,
    STAGED,
    Order,
    add_up,
    loaded,
    local_first,
    remote_first,
    unfinished,
)
from dovetail.ops.group import NUM_WORDS, OpsGroup

#: Rows of a destination below which one product for all of them, and copies, beat a product per destination: each reads
#: all of w.
_FEW_ROWS = 96
#: Bytes that come from the other ranks up to which every rank adds up all of a result, which saves a meeting.
ONESHOT_BYTES = 1 << 20
#: Bytes that a stage takes from all ranks at most.
STAGE_BYTES = 16 << 20
#: Bytes of an input up to which it is copied to the peers.
COPIED_INPUT = 2 << 20
#: Bytes that are still in a cache when they are copied.
_CACHED_BYTES = 2 << 20


def in_one(c: calls.Product, rows: int, copied: int) -> bool:
    """Whether one product for all ranks' rows is the faster, although so many bytes are copied then: of few rows; of
    16-bit floats, if w is made longer in each, or what is copied stays in a cache; and where w, which each reads, is
    larger than what is copied."""
    others = c.world - 1
    if others == 0:
        return False
    every = rows * c.world
    is_anew = c.dtype.itemsize < 4 and (copied <= _CACHED_BYTES or (is_long(c.w, every) and not is_ours(c.w, every)))
    return rows < _FEW_ROWS or is_anew or c.n * c.k * c.dtype.itemsize * others > copied


def gemm_all_to_all(g: OpsGroup, c: calls.GemmAllToAll, *, order: Order = remote_first) -> torch.Tensor:
    """Each destination's rows, written where they end."""
    rank, size, n = g.group.rank, g.group.size, c.n
    whole: torch.Tensor | None = None
    if c.even and size > 1 and (out := _gemm_small(g, c)) is not None:
        return out
    if not c.even and size > 1 and (found := _gemm_few(g, c)) is not None:
        whole, is_there = found
        if is_there:
            return whole
    out = g.blocks.empty((sum(c.receive), n), c.dtype)
    splits, words = (*c.send, *c.receive), (g.blocks.offset(out), _region_of(c) or 0)
    slots = g.agree(c.text, words, splits)
    if whole is None and any(row[0] == STAGED for row in slots):
        slots = g.agree(c.text, words, splits)  # once more: who sent to stages had said nothing of its memory
    g.push(size * max(row[1] for row in slots))  # the smallest stage decides for all: next time it is large enough
    starts = [sum(c.send[:d]) for d in range(size)]
    copied = c.rows * n * c.dtype.itemsize
    if whole is None and c.rows and in_one(c, c.rows // size, copied):
        whole = mm(c.x, c.w)
    multiply = ready(c.w, c.rows if whole is None else 0)
    with unfinished(g, out):
        for d in order(rank, size):
            if not c.send[d]:
                continue
            receive = slots[d][NUM_WORDS + size :]
            there = out if d == rank else g.at(d, slots[d][0], (sum(receive), n), c.dtype)
            first = sum(receive[:rank])
            piece = there[first : first + c.send[d]]
            rows = slice(starts[d], starts[d] + c.send[d])
            if whole is None:
                multiply(c.x[rows], piece)
            else:
                piece.copy_(whole[rows])
        g.barrier()
    return out


def _gemm_small(g: OpsGroup, c: calls.GemmAllToAll) -> torch.Tensor | None:
    """One product, its pieces into the peers' stages, one meeting."""
    rank, size = g.group.rank, g.group.size
    m, n = c.rows // size, c.n
    part = m * n * c.dtype.itemsize
    if not 0 < part * size <= COPIED_BYTES or (stages := g.push(part * size)) is None:
        return None
    whole = mm(c.x, c.w)
    here, at = whole.data_ptr(), rank * part
    copies = [v for d, stage in enumerate(stages) for v in (stage + at, here + d * part, part)]
    g.agree(c.text, (), (*c.send, *c.receive), copies=copies)
    loaded().copy(here, stages[rank], size * part)
    return whole


def _gemm_few(g: OpsGroup, c: calls.GemmAllToAll) -> tuple[torch.Tensor, bool] | None:
    """The same with rows that are shared out unevenly: each source has a region of every stage.

    (the result, True), or (the product, False) if some rank has more rows than that: then all look for memory. None if
    this one has; it says so in the exchange that follows.
    """
    rank, size, row = g.group.rank, g.group.size, c.n * c.dtype.itemsize
    most, region = _region_of(c), g.region
    if most is None or (stages := g.push(size * most)) is None or most > region:
        return None
    whole = mm(c.x, c.w)
    here = whole.data_ptr()
    begins = [here + row * first for first in itertools.accumulate(c.send, initial=0)]
    copies = [
        v for d, stage in enumerate(stages) if d != rank and c.send[d] * row
        for v in (stage + rank * region, begins[d], c.send[d] * row)
    ]  # fmt: skip
    slots = g.agree(c.text, (STAGED, most), (*c.send, *c.receive), copies=copies)
    if not all(slot[0] == STAGED for slot in slots):
        return whole, False
    out = whole.new_empty((sum(c.receive), c.n))
    to, copy = out.data_ptr(), loaded().copy
    for s, rows in enumerate(c.receive):
        if rows:
            copy(to, begins[rank] if s == rank else stages[rank] + s * region, rows * row)
            to += rows * row
    return out, True


def _region_of(c: calls.GemmAllToAll) -> int | None:
    """Bytes of a source's region of a stage that a call with splits needs; None if it does not go by stages."""
    row = c.n * c.dtype.itemsize
    return None if c.even or c.rows * row > COPIED_BYTES else max(c.send) * row


def all_gather_matmul(g: OpsGroup, c: calls.AllGatherMatmul, *, order: Order = local_first) -> torch.Tensor:
    """Peers' rows are read where they are; its own come first, while late ranks arrive. A small x is sent around."""
    rank, size, m = g.group.rank, g.group.size, c.rows
    part = c.x.nbytes
    if size > 1 and 0 < part <= COPIED_INPUT and (stages := g.push(part * size)) is not None:
        here, at = c.x.data_ptr(), rank * part
        g.agree(c.text, copies=[v for stage in stages for v in (stage + at, here, part)])
        return mm(g.at(rank, stages[rank] - g.base(rank), (size * m, c.k), c.dtype), c.w)
    offset = g.blocks.offset(c.x)
    if offset < 0 and size > 1 and c.x.numel():
        shared = g.scratch("x", part)[:part].view(c.dtype).view(c.x.shape)
        shared.copy_(c.x)
        offset = g.blocks.offset(shared)
    slots = g.agree(c.text, (offset,))
    rows = [c.x if s == rank else g.at(s, slots[s][0], (m, c.k), c.dtype) for s in range(size)]
    if in_one(c, m, part * size):
        out = mm(torch.cat(rows), c.w)
    else:
        out, multiply = torch.empty((size * m, c.n), dtype=c.dtype, device=CPU), ready(c.w, size * m)
        for s in order(rank, size):
            multiply(rows[s], out[s * m : (s + 1) * m])
    g.barrier()  # everybody has read x
    return out


def matmul_reduce_scatter(g: OpsGroup, c: calls.MatmulReduceScatter, *, order: Order = remote_first) -> torch.Tensor:
    """Partial rows go to their owner, which adds them up in the order of ranks."""
    rank, size = g.group.rank, g.group.size
    m, n = c.rows // size, c.n
    part = m * n * c.dtype.itemsize
    if m and in_one(c, m, part * size):
        return _reduce_scatter_of_one(g, c, m, part)

    def send(stages: Sequence[int]) -> None:
        multiply = ready(c.w, c.rows)
        for d in order(rank, size) if part else ():
            there = g.at(d, stages[d] - g.base(d) + rank * part, (m, n), c.dtype)
            multiply(c.x[d * m : (d + 1) * m], there)

    stage = _sent(g, c, part * size, send)
    out = torch.empty((m, n), dtype=c.dtype, device=CPU)
    add_up(out, [stage + s * part for s in range(size)])
    return out


def _reduce_scatter_of_one(g: OpsGroup, c: calls.MatmulReduceScatter, m: int, part: int) -> torch.Tensor:
    """One product for all rows; its pieces to their owners."""
    rank, size = g.group.rank, g.group.size
    whole = mm(c.x, c.w)
    here = whole.data_ptr()

    def copies(stages: Sequence[int]) -> list[int]:
        at = rank * part
        return [v for d, stage in enumerate(stages) if d != rank for v in (stage + at, here + d * part, part)]

    stage = _copied(g, c, part * size, copies)
    # Not our piece of `whole`: a tracer expects memory of its own.
    out = torch.empty((m, c.n), dtype=c.dtype, device=CPU)
    add_up(out, [here + rank * part if s == rank else stage + s * part for s in range(size)])
    return out


def _sent(g: OpsGroup, c: calls.Call, size_bytes: int, send: Callable[[Sequence[int]], None]) -> int:
    """Has `send` write parts into all ranks' stages, given where those begin; returns where ours does."""
    if size_bytes <= STAGE_BYTES and (stages := g.push(size_bytes)) is not None:
        send(stages)
        g.agree(c.text)
        return stages[g.group.rank]
    return _sent_later(g, c, size_bytes, send)


def _copied(g: OpsGroup, c: calls.Call, size_bytes: int, copies: Callable[[Sequence[int]], list[int]]) -> int:
    """The same with parts that are only copied."""
    if size_bytes <= STAGE_BYTES and (stages := g.push(size_bytes)) is not None:
        g.agree(c.text, copies=copies(stages))
        return stages[g.group.rank]

    def send(stages: Sequence[int]) -> None:
        given = iter(copies(stages))
        for copy in zip(given, given, given, strict=True):
            loaded().copy(*copy)

    return _sent_later(g, c, size_bytes, send)


def _sent_later(g: OpsGroup, c: calls.Call, size_bytes: int, send: Callable[[Sequence[int]], None]) -> int:
    """Where no stage is large enough: first everybody says where its memory is."""
    stage = g.scratch("partial", size_bytes)
    slots = g.agree(c.text, (g.blocks.offset(stage),))
    with unfinished(g, stage):
        send([g.base(d) + row[0] for d, row in enumerate(slots)])
        g.barrier()
    return int(stage.data_ptr())


def gemv_all_reduce(g: OpsGroup, c: calls.GemvAllReduce, *, order: Order = remote_first) -> torch.Tensor:
    """Each rank owns some columns: it gets everybody's partial ones, adds them up in the order of ranks, and writes
    the sum into every rank's output. A small result is added up by every rank; the bits are the same."""
    size, m, n, item = c.world, c.rows, c.n, c.dtype.itemsize
    if m * n * item * (size - 1) <= ONESHOT_BYTES or n < size:
        return _oneshot(g, c, m * n * item)
    rank = g.group.rank
    cuts = [n * d // size for d in range(size + 1)]
    wide = max(b - a for a, b in itertools.pairwise(cuts)) * m * item
    stage = g.scratch("partial", wide * size)
    out = g.blocks.empty((m, n), c.dtype)
    slots = g.agree(c.text, (g.blocks.offset(stage), g.blocks.offset(out)))
    with unfinished(g, stage, out):
        for d in order(rank, size):
            there = g.at(d, slots[d][0] + rank * wide, (m, cuts[d + 1] - cuts[d]), c.dtype)
            ready(c.w[cuts[d] : cuts[d + 1]], m)(c.x, there)
        g.barrier()
        mine = torch.empty((m, cuts[rank + 1] - cuts[rank]), dtype=c.dtype, device=CPU)
        add_up(mine, [stage.data_ptr() + s * wide for s in range(size)])
        for d in order(rank, size):
            there = out if d == rank else g.at(d, slots[d][1], (m, n), c.dtype)
            there[:, cuts[rank] : cuts[rank + 1]].copy_(mine)
        g.barrier()
    return out


def _oneshot(g: OpsGroup, c: calls.GemvAllReduce, part: int) -> torch.Tensor:
    """Partial products of `part` bytes go to everybody; each adds them up in the memory of its own."""
    rank, size = g.group.rank, c.world
    out = mm(c.x, c.w)
    here = out.data_ptr()

    def copies(stages: Sequence[int]) -> list[int]:
        at = rank * part
        return [v for d, stage in enumerate(stages) if d != rank for v in (stage + at, here, part)]

    stage = _copied(g, c, part * size, copies)
    add_up(out, [here if s == rank else stage + s * part for s in range(size)])
    return out


Forward = Callable[..., torch.Tensor]
FORWARD: dict[type[calls.Call], Forward] = {
    calls.GemmAllToAll: gemm_all_to_all,
    calls.GemvAllReduce: gemv_all_reduce,
    calls.AllGatherMatmul: all_gather_matmul,
    calls.MatmulReduceScatter: matmul_reduce_scatter,
    calls.EmbeddingAllToAll: lookups.embedding_all_to_all,
}
