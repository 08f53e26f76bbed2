"""`embedding_all_to_all` by `store` on the CPU. Owns how bags get to the rank of their sample, and the short way of a
call whose like was made before.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence

import torch

from dovetail.errors import DovetailError
from dovetail.ops import calls
from dovetail.ops.cpu import pooling
from dovetail.ops.cpu.shared import CPU, NUMBERS, STAGED, Order, loaded, remote_first, unfinished
from dovetail.ops.group import OpsGroup
from dovetail.ops.repeat import Lookup

#: Bytes of a result up to which bags go by stages: of more, none is in a cache any more when it is copied.
STAGED_BYTES = 4 << 20
#: Under which a group knows how many tables every rank had, by what a rank says of a call and how many it has itself;
#: and how many such calls it knows.
_TABLES, _MOST_TABLES = "tables", 1024


def embedding_all_to_all(g: OpsGroup, c: calls.EmbeddingAllToAll, *, order: Order = remote_first) -> torch.Tensor:
    """Bags are pooled straight into the row of the sample's rank; or, if they are few, those of others are sent to its
    stage, where each source has a part [samples, its tables].

    How many tables every rank has is taken to be as it was last time, and posted: then one exchange is enough.
    """
    rank = g.group.rank
    every, shape = _tables_of(g, c), _output_of(g, c)
    whole = math.prod(shape) * c.dtype.itemsize
    is_as_known = len(c.weights) == every[rank]  # otherwise its bags have no place in a stage
    if is_as_known and 0 < whole <= STAGED_BYTES and (stages := g.push(whole)) is not None:
        out = torch.empty(shape, dtype=c.dtype, device=CPU)
        parts = torch.empty((c.world, *shape[:1], len(c.weights), c.dim), dtype=c.dtype, device=CPU)
        slots = g.agree(c.text, _words(c, every), copies=_pooled(g, c, stages, out, parts, order))
        if _are_there(slots, every):
            _put_beside(out, stages[rank], every, rank)
            return out
        return _pool_there(g, c, slots, order=order)
    out = g.blocks.empty(shape, c.dtype)
    slots = g.agree(c.text, (g.blocks.offset(out), len(c.weights), hash(every)))
    return _pool_there(g, c, slots, out, order=order)


def _tables_of(g: OpsGroup, c: calls.EmbeddingAllToAll) -> tuple[int, ...]:
    """How many tables every rank had when this one had as many and said the same; at first, as many as this one."""
    return _known(g).get((c.text, len(c.weights))) or (len(c.weights),) * c.world


def _known(g: OpsGroup) -> dict[tuple[str, int], tuple[int, ...]]:
    found: dict[tuple[str, int], tuple[int, ...]] = g.known.setdefault(_TABLES, {})
    return found


def _learn(g: OpsGroup, c: calls.EmbeddingAllToAll, every: tuple[int, ...]) -> None:
    known = _known(g)
    if len(known) >= _MOST_TABLES:
        known.clear()  # here only: within a call it has to stay what it is
    known[c.text, len(c.weights)] = every


def _output_of(g: OpsGroup, c: calls.EmbeddingAllToAll) -> tuple[int, int, int]:
    """The shape of a call's result."""
    return c.batch // c.world, sum(_tables_of(g, c)), c.dim


def _words(c: calls.EmbeddingAllToAll, every: tuple[int, ...]) -> tuple[int, ...]:
    """What a rank says whose bags are in the others' stages."""
    return STAGED, len(c.weights), hash(every)


def _pooled(
    g: OpsGroup, c: calls.EmbeddingAllToAll, stages: Sequence[int], out: torch.Tensor, parts: torch.Tensor, order: Order
) -> list[int]:
    """Pools everything: this rank's own straight into `out`, that of others into their `parts`. Returns the copies of
    these to their stages: a line of a peer's memory takes long to get, so it is written once, and as a whole."""
    rank, size, mine = g.group.rank, c.world, len(c.weights)
    local, total, dim = out.shape
    first, row, pooled = sum(_tables_of(g, c)[:rank]), dim * c.dtype.itemsize, pooling.Pooling(c)
    begin, part, before = parts.data_ptr(), local * mine * row, local * first * row
    copies: list[int] = []
    for d in order(rank, size):
        if d == rank:
            pooled(d * local, (d + 1) * local, out.data_ptr() + first * row, total * dim)
        else:
            pooled(d * local, (d + 1) * local, begin + d * part, mine * dim)
            copies += stages[d] + before, begin + d * part, part
    return copies


def _put_beside(out: torch.Tensor, stage: int, every: Sequence[int], rank: int) -> None:
    """Copies what the others have sent to this rank's stage to their tables' columns."""
    local, total, dim = out.shape
    row, to = dim * out.dtype.itemsize, out.data_ptr()
    for s, (tables, first) in enumerate(zip(every, itertools.accumulate(every, initial=0), strict=False)):
        if s != rank:
            loaded().copy_rows(to + first * row, stage + local * first * row, local, tables * row, total * row)


def _pool_there(
    g: OpsGroup, c: calls.EmbeddingAllToAll, slots: list[tuple[int, ...]], out: torch.Tensor | None = None,
    *, order: Order = remote_first,
) -> torch.Tensor:  # fmt: skip
    """Behind an exchange in which not all have sent to stages: into everybody's output. `out`: this rank has said where
    it is."""
    rank, local, dim, item = g.group.rank, c.batch // c.world, c.dim, c.dtype.itemsize
    every = _tables_of(g, c)
    if out is None or any(row[0] == STAGED for row in slots) or not _have(slots, every):
        every = tuple(row[1] for row in slots)
        _learn(g, c, every)
        out = g.blocks.empty(_output_of(g, c), c.dtype)
        slots = g.agree(f"{c.text}, with tables {list(every)}", (g.blocks.offset(out),))
    if out.numel() and min(row[0] for row in slots) < 0:
        raise DovetailError(f"a rank of {g.group} has posted no memory for {c.text}; nothing was moved")
    total, first, pooled = sum(every) * dim, sum(every[:rank]) * dim * item, pooling.Pooling(c)
    with unfinished(g, out):
        for d in order(rank, c.world) if local else ():
            pooled(d * local, (d + 1) * local, g.base(d) + slots[d][0] + first, total)
        g.barrier()
    return out


def _are_there(slots: list[tuple[int, ...]], every: tuple[int, ...]) -> bool:
    """Whether all have sent to stages, and as this rank took it that they would."""
    return all(row[0] == STAGED for row in slots) and _have(slots, every)


def _have(slots: list[tuple[int, ...]], every: tuple[int, ...]) -> bool:
    """Whether the ranks have so many tables each, and all of them knew."""
    return tuple(row[1] for row in slots) == every and all(row[2] == hash(every) for row in slots)


class Repeated:
    """Batches like one that went by stages: one native call. `of` makes one, or None if there is none."""

    __slots__ = ("_dtype", "_every", "_group", "_lookup", "_mode", "_num_tables", "_shape")

    def __init__(self, g: OpsGroup, lookup: Lookup, c: calls.EmbeddingAllToAll) -> None:
        self._group, self._lookup, self._mode, self._dtype = g, lookup, c.mode, c.dtype
        self._num_tables = c.num_tables
        self._every, self._shape = _tables_of(g, c), _output_of(g, c)

    @staticmethod
    def of(g: OpsGroup, c: calls.EmbeddingAllToAll) -> Repeated | None:
        """For a call that was just made by this transport."""
        every, whole = _tables_of(g, c), math.prod(_output_of(g, c)) * c.dtype.itemsize
        if c.world == 1 or c.dim < 2 or c.per_sample_weights is not None or not 0 < whole <= STAGED_BYTES:
            return None
        said = g.said(c.text, _words(c, every), ())
        if said is None or not _are_there(said.told, every):
            return None  # somebody's bags came another way, though this rank's went to stages
        lookup = g.lookup(
            said, whole, tables=every, batch=c.batch, dim=c.dim, dtype=NUMBERS[c.dtype], mean=c.mode == "mean"
        )
        return None if lookup is None else Repeated(g, lookup, c)

    @property
    def is_over(self) -> bool:
        """Whether no call can be made like that any more."""
        return self._lookup.is_over

    def __call__(self, tables: list[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor | None:
        """None, and nothing was done, if it can't be done like that."""
        g, lookup = self._group, self._lookup
        if lookup.is_over:
            return None
        out = torch.empty(self._shape, dtype=self._dtype, device=CPU)
        half = lookup.half
        most = pooling.MANY_LOOKUPS if torch.get_num_threads() > 1 else sys.maxsize
        is_done, rows = lookup.run(tables, values, offsets, most, out.data_ptr())
        if not is_done or rows is None:
            return out if is_done else None
        if _are_there(rows, self._every):
            lookup.finish(out.data_ptr(), half)
            return out
        call = calls.embedding_all_to_all(
            tables, values, offsets, None, None, self._mode, None, g.group.size, self._num_tables
        )  # fmt: skip
        return _pool_there(g, call, rows)
