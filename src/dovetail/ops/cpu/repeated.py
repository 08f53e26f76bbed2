"""Small products by `store` whose like was run before, in few steps.

What was found out then about shapes, stages and who multiplies still holds, so a call is a product, and native code
that sends, meets and adds up. Owns which calls can be repeated like that, and how each is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from dovetail.ops import calls
from dovetail.ops.cpu import store
from dovetail.ops.cpu.product import mm, most_threads, ready
from dovetail.ops.cpu.shared import COPIED_BYTES, NUMBERS, remote_first
from dovetail.ops.group import OpsGroup
from dovetail.ops.repeat import Repeat


class Repeated(ABC):
    """A small product whose like was run before, with few steps in Python. `of` makes one, or None if there is none."""

    __slots__ = ("_most_threads", "_repeat", "_sizes")

    def __init__(self, repeat: Repeat, c: calls.Product) -> None:
        self._repeat = repeat
        self._sizes = c.rows, c.n, c.k
        self._most_threads = most_threads(c.dtype, *self._sizes)

    @staticmethod
    def of(g: OpsGroup, c: calls.Product) -> Repeated | None:
        """For a call that was just made by this transport."""
        part, number = c.rows * c.n * c.dtype.itemsize, NUMBERS[c.dtype]
        if c.world == 1 or not part or not c.k:
            return None
        if isinstance(c, calls.GemvAllReduce) and part * (c.world - 1) <= store.ONESHOT_BYTES:
            repeat = g.repeat(c.text, (), part=part, step=0, sums=True, dtype=number)
            return None if repeat is None else _InPlace(repeat, c)
        if isinstance(c, calls.AllGatherMatmul) and c.x.nbytes <= store.COPIED_INPUT:
            repeat = g.repeat(c.text, (), part=c.x.nbytes, step=0, sums=False, dtype=number)
            shape = (c.world * c.rows, c.k)
            return None if repeat is None else _Gathered(repeat, c, g.stage_halves(g.group.rank, shape, c.dtype))
        one = part // c.world
        if isinstance(c, calls.GemmAllToAll) and c.even and part <= COPIED_BYTES:
            repeat = g.repeat(c.text, (*c.send, *c.receive), part=one, step=one, sums=False, dtype=number)
            return None if repeat is None else _InPlace(repeat, c)
        if isinstance(c, calls.MatmulReduceScatter) and part <= store.STAGE_BYTES:
            rank, shape = g.group.rank, (c.rows // c.world, c.n)
            repeat = g.repeat(c.text, (), part=one, step=one, sums=True, dtype=number)
            if repeat is None:
                return None
            if store.in_one(c, shape[0], part):
                return _Scattered(repeat, c, shape, rank * one)
            order = remote_first(rank, c.world)
            there = [g.stage_halves(d, shape, c.dtype, rank * one) for d in order[:-1]]
            return _Direct(repeat, c, order, (shape[0], c.k), there)
        return None

    @abstractmethod
    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        """None, and nothing was done, if it can't be done like that any more."""

    def _whole(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None, own: int = 0) -> torch.Tensor:
        """One product for everybody; what comes of all ranks' goes to `out`, or to where it was. This rank's part of it
        begins at byte `own`."""
        repeat, ours = self._repeat, torch.get_num_threads() <= self._most_threads
        whole = x.new_empty(self._sizes[:2]) if ours else mm(x, w)
        here = whole.data_ptr()
        there = here if out is None else out.data_ptr()
        if ours:
            repeat.multiply((x.data_ptr(), w.data_ptr(), here), self._sizes, there, here + own)
        else:
            repeat.run(here, there, here + own)
        return whole if out is None else out


class _InPlace(Repeated):
    """What comes from the others goes to where this rank's product was."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        return None if self._repeat.is_over else self._whole(x, w)


class _Scattered(Repeated):
    """This rank's rows of the sum."""

    __slots__ = ("_own", "_shape")

    def __init__(self, repeat: Repeat, c: calls.Product, shape: tuple[int, int], own: int) -> None:
        super().__init__(repeat, c)
        self._shape, self._own = shape, own

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        return None if self._repeat.is_over else self._whole(x, w, x.new_empty(self._shape), self._own)


class _Direct(Repeated):
    """This rank's rows of the sum; those of others are computed straight into their stages."""

    __slots__ = ("_order", "_shape", "_there")

    def __init__(
        self, repeat: Repeat, c: calls.Product, order: list[int], shape: tuple[int, int],
        there: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:  # fmt: skip
        """`order`: this rank last; `shape`: of each rank's rows of x; `there`: in both halves of the others' stages."""
        super().__init__(repeat, c)
        self._order, self._shape, self._there = order, shape, there

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        repeat = self._repeat
        if repeat.is_over:
            return None
        shape, multiply, half, begin = self._shape, ready(w, len(x)), repeat.half, x.storage_offset()
        stride, step = (shape[1], 1), shape[0] * shape[1]
        # As strided: the view that takes the least of torch, little of which is in a cache between two calls.
        *parts, own = [x.as_strided(shape, stride, begin + d * step) for d in self._order]
        for part, halves in zip(parts, self._there, strict=True):
            multiply(part, halves[half])
        out = multiply(own)
        here = out.data_ptr()
        repeat.run(0, here, here)
        return out


class _Gathered(Repeated):
    """Everybody's rows are multiplied where they came."""

    __slots__ = ("_halves",)

    def __init__(self, repeat: Repeat, c: calls.Product, halves: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__(repeat, c)
        self._halves = halves

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        repeat = self._repeat
        if repeat.is_over:
            return None
        return mm(self._halves[repeat.send(x.data_ptr())], w)
