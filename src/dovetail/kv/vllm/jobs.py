"""From a job of vLLM to strided copies.

A job names blocks of the cache and *chunks* of the host: a chunk holds `blocks_per_chunk` blocks that follow each other
in a prompt. It has a part for each KV cache group; of the first chunk of a part the leading blocks may be left out, of
the last one the rest. Pure; moves nothing.

On the host a block is one slot, all its layers one after the other: chunk c has the slots from `c * blocks_per_chunk`
on. Memory that vLLM reads too has its format: a slot is a chunk, in which each tensor has its pages together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dovetail.kv.layout import Layout, of_tensors
from dovetail.kv.planner import Direction, Ints, Pieces, Table, table

#: vLLM's placeholder for blocks that nobody reads: it may stand in a job any number of times.
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What is to be moved: as vLLM says it, with plain arrays."""

    blocks: Ints  #: of the cache, those of group 0 first
    chunks: Ints  #: of the host, likewise
    group_sizes: Sequence[int]  #: blocks of each group
    block_indices: Sequence[int]  #: where in its prompt the first block of each group stands


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Page:
    """The cache of one layer, or of some layers together."""

    tensor: Any  #: [block, byte]: the bytes that count
    padded_bytes: int  #: of a block in vLLM's format
    offset: int  #: the padded bytes of a block that lie before it in that format


class Caches:
    """The caches of all groups, and how their blocks lie on the host.

    Args:
        groups: for each KV cache group its pages.
        shared: the host memory has vLLM's format.
    """

    def __init__(self, groups: Sequence[Sequence[Page]], *, blocks_per_chunk: int = 1, shared: bool = False) -> None:
        if blocks_per_chunk < 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}; it must be 1 or more")
        if not any(groups):
            raise ValueError(f"{len(groups)} KV cache groups have no tensors: there is nothing to move")
        self.blocks_per_chunk = blocks_per_chunk
        self.slots_per_chunk = 1 if shared else blocks_per_chunk
        self.base: int = min(page.tensor.data_ptr() for pages in groups for page in pages)  #: address
        # Of each group a layout for each place that a block can have in a slot, and where it begins.
        places = range(blocks_per_chunk) if shared else [None]
        self._groups = [
            [_layout(f"group {n}", pages, blocks_per_chunk, place) for place in places if pages]
            for n, pages in enumerate(groups)
        ]

    @property
    def _blocks_per_slot(self) -> int:
        return self.blocks_per_chunk // self.slots_per_chunk

    @property
    def slot_bytes(self) -> int:
        """What the largest group needs."""
        return max(layout.slot_bytes for layouts in self._groups for layout, _ in layouts)

    @property
    def strided_rows(self) -> frozenset[int]:
        """Lengths of the rows that can be staged."""
        return frozenset[int]().union(*(layout.strided_rows for layouts in self._groups for layout, _ in layouts))

    @property
    def size_bytes(self) -> int:
        """From `base` to the last byte of a cache."""
        return max(begin - self.base + layout.size_bytes for layouts in self._groups for layout, begin in layouts)

    def table(self, direction: Direction, job: Job, pieces: Pieces) -> Table:
        """The copies of a job.

        Raises:
            ValueError: numbers that do not fit each other, an id out of range, or a place that would be written twice.
        """
        parts = []
        for layouts, (blocks, ordinals) in zip(self._groups, self._pairs(job), strict=True):
            for k, (layout, begin) in enumerate(layouts):
                mine = ordinals % self._blocks_per_slot == k
                if direction is Direction.FETCH:
                    mine &= blocks != NULL_BLOCK
                part = table(direction, layout, blocks[mine], ordinals[mine] // self._blocks_per_slot, pieces)
                moved = begin - self.base
                parts.append(dataclasses.replace(part, device=part.device + moved) if moved else part)
        if len(parts) == 1:
            return parts[0]
        columns = ([getattr(part, field.name) for part in parts] for field in dataclasses.fields(Table))
        return Table(*(np.concatenate(column) for column in columns))

    def _pairs(self, job: Job) -> list[tuple[Ints, Ints]]:
        """Of each group its blocks, and for each of them which block of all chunks it is on the host."""
        if not len(job.group_sizes) == len(job.block_indices) == len(self._groups):
            raise ValueError(
                f"a job has {len(job.group_sizes)} group sizes and {len(job.block_indices)} block indices; "
                f"there are {len(self._groups)} groups"
            )
        each = np.arange(self.blocks_per_chunk)
        found, block, chunk = [], 0, 0
        for size, index in zip(job.group_sizes, job.block_indices, strict=True):
            skipped = index % self.blocks_per_chunk if size else 0
            num_chunks = -(-(size + skipped) // self.blocks_per_chunk)
            mine = np.asarray(job.chunks, np.int64)[chunk : chunk + num_chunks]
            there = (mine[:, None] * self.blocks_per_chunk + each).ravel()[skipped : skipped + size]
            found.append((np.asarray(job.blocks, np.int64)[block : block + size], there))
            block, chunk = block + size, chunk + num_chunks
        if (block, chunk) != (len(job.blocks), len(job.chunks)):
            raise ValueError(
                f"a job of {len(job.blocks)} blocks and {len(job.chunks)} chunks: its groups need {block} and {chunk}, "
                f"with {self.blocks_per_chunk} blocks to a chunk"
            )
        return found


def _layout(name: str, pages: Sequence[Page], blocks_per_chunk: int, at: int | None) -> tuple[Layout, int]:
    """Of one group; layers that share a cache count once. `at`: the place of the block in a chunk of vLLM's format."""
    different = {(p.tensor.data_ptr(), p.tensor.shape, p.tensor.stride()): p for p in pages}.values()
    places = None
    if at is not None:
        places = [[page.offset * blocks_per_chunk + at * page.padded_bytes] for page in different]
    return of_tensors(name, [[page.tensor] for page in different], places=places)
