"""Layouts of a paged KV cache, as data: where each row of each block lies.

A cache is one range of addresses. A *group* is a set of rows with one page size: row r of block b is `row_bytes` bytes
at `bases[r] + b * strides[r]`. Layer-outermost caches, block-outermost ones, K and V apart or packed, MLA, and groups
of layers with different pages are all of this form; nothing assumes that rows are equally spaced, `runs` finds out.

On the host a block is one *slot*: its groups one after the other, the rows of each without gaps, unless `places` say
where each row lies in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows of a group that are equally spaced on both sides: one strided copy moves them."""

    first: int  #: row
    count: int
    pitch: int  #: bytes between two of them on the device; `row_bytes` if they are contiguous
    stride: int  #: from one block to the next
    host_pitch: int  #: in a slot


class Group:
    """Rows of one page size."""

    def __init__(
        self, name: str, row_bytes: int, bases: Any, strides: Any, num_blocks: int, *, places: Any = None
    ) -> None:
        """`bases`: offset of each row of block 0 in the cache; `strides`: one for all rows, or one each.

        `places`: offset of each row in a slot; None puts them one after the other, behind the group before.
        """
        self.name, self.row_bytes, self.num_blocks = name, int(row_bytes), int(num_blocks)
        self.bases: Ints = np.array(bases, np.int64).reshape(-1)
        self.strides: Ints = np.broadcast_to(np.array(strides, np.int64), self.bases.shape).copy()
        if self.row_bytes < 1 or self.num_blocks < 1 or not len(self.bases):
            raise ValueError(
                f"group {name}: needs rows, and row_bytes and num_blocks of at least 1; it has {len(self.bases)} rows, "
                f"row_bytes {row_bytes}, num_blocks {num_blocks}"
            )
        if (self.bases < 0).any() or (self.strides < self.row_bytes).any():
            raise ValueError(f"group {name}: bases must not be negative, and blocks at least {row_bytes} bytes apart")
        self.packed = places is None
        packed = np.arange(len(self.bases)) * self.row_bytes
        self.places: Ints = packed if places is None else np.array(places, np.int64).reshape(-1)
        self._refuse_overlap()

    def _refuse_overlap(self) -> None:
        """Raises ValueError if two rows share bytes: one would be written over the other."""
        gaps = np.diff(np.sort(self.places))
        if self.places.shape != self.bases.shape or (self.places < 0).any() or (gaps < self.row_bytes).any():
            raise ValueError(f"group {self.name}: each row needs a place of its own, {self.row_bytes} bytes, in a slot")
        order = np.argsort(self.bases, kind="stable")
        bases, strides = self.bases[order], self.strides[order]
        ends = bases + (self.num_blocks - 1) * strides + self.row_bytes
        for a in range(len(order) - 1):
            meet = slice(a + 1, int(np.searchsorted(bases, ends[a])))  # those that begin before its last block ends
            gap = (bases[meet] - bases[a]) % strides[a]
            apart = (self.row_bytes <= gap) & (gap <= strides[a] - self.row_bytes)  # they interleave
            wrong = np.flatnonzero((strides[meet] != strides[a]) | ~apart)
            if len(wrong):
                first, other = order[a], order[a + 1 + wrong[0]]
                raise ValueError(f"group {self.name}: rows {first} and {other} share bytes of the cache")

    @property
    def num_rows(self) -> int:
        """Rows of a block."""
        return len(self.bases)

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes that a block of this group takes in a slot."""
        return int(self.places.max()) + self.row_bytes

    @functools.cached_property
    def runs(self) -> tuple[RowRun, ...]:
        """The rows in maximal stretches of one ascending pitch on each side and one stride, in order."""
        return self.runs_between(0, self.num_rows)

    def runs_between(self, first: int, end: int) -> tuple[RowRun, ...]:
        """The same of rows `first` to `end`, without `end`."""
        found = []
        steps = np.stack([np.diff(self.bases), np.diff(self.places)])
        same = self.strides[1:] == self.strides[:-1]
        while first < end:
            last = first
            if first + 1 < end and same[first] and steps[:, first].min() >= self.row_bytes:
                while last + 1 < end and same[last] and (steps[:, last] == steps[:, first]).all():
                    last += 1
            pitch, host = steps[:, first].tolist() if last > first else (self.row_bytes, self.row_bytes)
            found.append(RowRun(first, last - first + 1, pitch, int(self.strides[first]), host))
            first = last + 1
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Layout:
    """A cache: its groups, and the layer that each row belongs to."""

    name: str
    groups: tuple[Group, ...]
    layers: tuple[tuple[int, ...], ...] = ()  #: of each group, the layer of each row; for fetches layer by layer

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError(f"layout {self.name}: it needs at least one group")
        if len({g.num_blocks for g in self.groups}) > 1:
            found = ", ".join(f"{g.name} {g.num_blocks}" for g in self.groups)
            raise ValueError(f"layout {self.name}: all groups need the same number of blocks, found {found}")
        if len({g.packed for g in self.groups}) > 1:
            raise ValueError(f"layout {self.name}: either all groups have places in a slot or none has")
        if not self.groups[0].packed:
            taken = sorted((int(at), int(at) + g.row_bytes, g.name) for g in self.groups for at in g.places)
            for (_, end, one), (begin, _, other) in itertools.pairwise(taken):
                if begin < end:
                    raise ValueError(f"layout {self.name}: rows of groups {one} and {other} share bytes of a slot")
        if self.layers and [len(of) for of in self.layers] != [g.num_rows for g in self.groups]:
            raise ValueError(f"layout {self.name}: `layers` needs an entry for each row of each group")

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return self.groups[0].num_blocks

    @property
    def num_layers(self) -> int:
        """Layers, where the layout tells them apart; otherwise 0."""
        return max((layer for of in self.layers for layer in of), default=-1) + 1

    @property
    def strided_rows(self) -> frozenset[int]:
        """Lengths of the rows that do not follow each other on the device, but on the host: what can be staged."""
        return frozenset(
            group.row_bytes
            for group in self.groups
            if any(run.count > 1 and run.host_pitch == group.row_bytes < run.pitch for run in group.runs)
        )

    def runs_of(self, group: int, first: int, end: int) -> tuple[RowRun, ...]:
        """The runs of a group's rows that belong to layers `first` to `end`, without `end`."""
        of = self.layers[group]
        inside = np.flatnonzero([first <= layer < end for layer in of])
        found: list[RowRun] = []
        for rows in np.split(inside, np.flatnonzero(np.diff(inside) != 1) + 1):
            if len(rows):
                found += self.groups[group].runs_between(int(rows[0]), int(rows[-1]) + 1)
        return tuple(found)

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes of a block, over all groups: what it takes on the host."""
        return max(offset + g.block_bytes for offset, g in zip(self.slot_offsets, self.groups, strict=True))

    @functools.cached_property
    def slot_offsets(self) -> tuple[int, ...]:
        """Where the places of each group are counted from in a slot."""
        if not self.groups[0].packed:
            return (0,) * len(self.groups)
        ends = np.cumsum([g.block_bytes for g in self.groups]).tolist()
        return (0, *ends[:-1])

    @functools.cached_property
    def size_bytes(self) -> int:
        """From the start of the cache to its last byte."""
        return max(int((g.bases + (g.num_blocks - 1) * g.strides).max()) + g.row_bytes for g in self.groups)


def layer_outermost(
    name: str, *, num_layers: int, row_bytes: int, num_blocks: int, split: bool = False, gap_bytes: int = 0
) -> Layout:
    """[layer][K, V][block][row]: with `split` K and V are rows of their own, otherwise a row has both (or is MLA's).

    `gap_bytes` lies between layers, as where each layer is an allocation of its own.
    """
    parts = 2 if split else 1
    layer = parts * num_blocks * row_bytes + gap_bytes
    bases = [n * layer + p * num_blocks * row_bytes for n in range(num_layers) for p in range(parts)]
    group = Group("kv", row_bytes, bases, row_bytes, num_blocks)
    return Layout(name, (group,), (tuple(n for n in range(num_layers) for _ in range(parts)),))


def block_outermost(name: str, *, num_layers: int, row_bytes: int, num_blocks: int, split: bool = False) -> Layout:
    """[block][layer][K, V][row]: a block is contiguous."""
    parts = 2 if split else 1
    rows = num_layers * parts
    group = Group("kv", row_bytes, np.arange(rows) * row_bytes, rows * row_bytes, num_blocks)
    return Layout(name, (group,), (tuple(n for n in range(num_layers) for _ in range(parts)),))


def of_tensors(
    name: str,
    layers: Sequence[Sequence[Any]],
    *,
    block_dim: int = 0,
    places: Sequence[Sequence[int]] | None = None,
) -> tuple[Layout, int]:
    """The layout of caches that already exist, and the address at which it begins.

    Args:
        layers: for each layer its tensors (K and V, or one of both), anywhere in one device's memory.
        block_dim: the dimension of blocks. What a block has in a tensor must be contiguous.
        places: for each tensor where it lies in a slot; None puts them one after the other, those of a size together.

    Raises:
        ValueError: a tensor whose blocks are not contiguous, or tensors with different numbers of blocks.
    """
    rows: dict[int, list[tuple[int, int, int, int]]] = {}  # row_bytes -> (address, stride, layer, place)
    blocks = set()
    for layer, tensors in enumerate(layers):
        for n, t in enumerate(tensors):
            count, stride = t.shape[block_dim], t.stride(block_dim) * t.element_size()
            inner = t.select(block_dim, 0)
            if not inner.is_contiguous():
                raise ValueError(
                    f"layout {name}: layer {layer}: a block of a tensor of shape {tuple(t.shape)} is not contiguous"
                )
            blocks.add(count)
            rows.setdefault(inner.numel() * t.element_size(), []).append(
                (t.data_ptr(), stride, layer, places[layer][n] if places else 0)
            )
    if len(blocks) != 1:
        raise ValueError(f"layout {name}: all tensors need the same number of blocks, found {sorted(blocks)}")
    base = min(address for found in rows.values() for address, *_ in found)
    (num_blocks,) = blocks
    groups, of_layer = [], []
    for row_bytes, found in rows.items():
        addresses, strides, layer_of, place_of = zip(*found, strict=True)
        bases = [address - base for address in addresses]
        placed = place_of if places else None
        groups.append(Group(f"{row_bytes} B", row_bytes, bases, strides, num_blocks, places=placed))
        of_layer.append(layer_of)
    return Layout(name, tuple(groups), tuple(of_layer)), base
