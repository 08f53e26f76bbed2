"""The operators of `dovetail bench fused` in one rank: random arguments, results to compare with, and every way to run.

Owns the data. Arguments differ between ranks and with every `fresh`; each rank makes those of all ranks, so what is
right is told by `dovetail.ops.reference` without a message. Tensors stay where they are: calls that were made once run
on the newest data. All ranks call everything in the same order.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import embedding_bag

import dovetail
from dovetail import ops
from dovetail.bench.fused.grid import EMBEDDING, GATHER, GEMM, GEMV, Lookup, Product, Shape
from dovetail.ops import calls, reference
from dovetail.ops.choose import Choice

Run = Callable[[], torch.Tensor]


class Case(ABC):
    """What both kinds have: `made` is the call as operators take it, `expected` what it has to give this rank."""

    inner: int  #: numbers that are added up for one of the result
    dtype: torch.dtype

    @abstractmethod
    def fresh(self, iteration: int) -> None:
        """New arguments."""

    @abstractmethod
    def expected(self) -> torch.Tensor:
        """By the reference, for the newest arguments."""

    @abstractmethod
    def made(self) -> calls.Call:
        """The checked call, of the newest arguments."""

    @abstractmethod
    def fused(self, transport: str) -> Run:
        """Our operator."""

    @abstractmethod
    def compute(self) -> Run:
        """torch's operator alone."""

    @abstractmethod
    def then(self, by: Any, compute: Run | None = None) -> Run:
        """torch's operator, or another, then the collective of `by`: torch.distributed, or dovetail."""

    @abstractmethod
    def comm(self) -> Run:
        """Our collective alone, on a result that is ready."""

    @abstractmethod
    def explain(self) -> Choice:
        """What `auto` takes."""

    def is_right(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        """Within what the order of additions may change, numbers being of [-1, 1]: sums are made in fp32 and rounded to
        the dtype. Old data or another rank's is off by about the root of `inner`."""
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return False
        step, sums = torch.finfo(self.dtype).eps, torch.finfo(torch.float32).eps
        allowed = 4 * step * math.sqrt(self.inner) + 4 * sums * self.inner
        return bool(torch.allclose(found.float(), wanted.float(), rtol=2 * step, atol=allowed))


def random_(t: torch.Tensor, *numbers: int) -> torch.Tensor:
    """Fills a tensor with what the numbers give, which is the same in every process."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    made = torch.empty(t.shape, dtype=t.dtype).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    return t.copy_(made)


class ProductCase(Case):
    """x [m, k] with w [n, k]."""

    def __init__(self, shape: Product, dtype: torch.dtype, rank: int, ranks: int, where: str) -> None:
        self.shape, self.dtype, self._rank, self._ranks = shape, dtype, rank, ranks
        if shape.op != GATHER and shape.m % ranks:
            shape = Product(op=shape.op, m=-(-shape.m // ranks) * ranks, n=shape.n, k=shape.k, uneven=shape.uneven)
        self.inner = shape.k
        self._xs = [torch.empty(shape.m, shape.k, dtype=dtype, device=where) for _ in range(ranks)]
        self._ws = [random_(torch.empty(shape.n, shape.k, dtype=dtype, device=where), 7, r) for r in range(ranks)]
        self.x, self.w = self._xs[rank], self._ws[rank]
        self._sends = [_uneven(shape.m, ranks, r) for r in range(ranks)] if shape.uneven else None
        self.fresh(0)

    def fresh(self, iteration: int) -> None:
        for rank, x in enumerate(self._xs):
            random_(x, iteration, rank)

    def expected(self) -> torch.Tensor:
        if self.shape.op == GEMM:
            return reference.gemm_all_to_all(self._xs, self._ws, self._sends)[self._rank]
        found: list[torch.Tensor] = getattr(reference, self.shape.op)(self._xs, self._ws)
        return found[self._rank]

    @property
    def splits(self) -> tuple[list[int] | None, list[int] | None]:
        """Received, sent."""
        if self._sends is None:
            return None, None
        return [send[self._rank] for send in self._sends], self._sends[self._rank]

    def made(self) -> calls.Call:
        if self.shape.op == GEMM:
            return calls.gemm_all_to_all(self.x, self.w, *self.splits, self._ranks)
        call: calls.Call = getattr(calls, self.shape.op)(self.x, self.w, self._ranks)
        return call

    def explain(self) -> Choice:
        more = self.splits if self.shape.op == GEMM else ()
        return ops.explain(self.shape.op, self.x, self.w, *more)

    def fused(self, transport: str) -> Run:
        operator: Callable[..., torch.Tensor] = getattr(ops, self.shape.op)
        x, w, more = self.x, self.w, self.splits if self.shape.op == GEMM else ()
        return lambda: operator(x, w, *more, transport=transport)

    def _input(self) -> torch.Tensor:
        """What the product is taken of: with an all-gather before it, everybody's rows."""
        return self.x if self.shape.op != GATHER else torch.cat(self._xs)

    def compute(self) -> Run:
        x, w = self._input(), self.w
        return lambda: torch.mm(x, w.t())

    def then(self, by: Any, compute: Run | None = None) -> Run:
        if self.shape.op == GATHER:
            x, w, rows = self.x, self.w, self.shape.m * self._ranks
            gather = getattr(by, "all_gather_single", by.all_gather_into_tensor)  # torch's newer name

            def gather_first() -> torch.Tensor:
                every = x.new_empty((rows, x.shape[1]))
                gather(every, x)
                return torch.mm(every, w.t())

            return gather_first
        product, send = compute or self.compute(), self._sender(by)
        return lambda: send(product())

    def comm(self) -> Run:
        if self.shape.op == GATHER:
            x, every = self.x, self.x.new_empty((self.shape.m * self._ranks, self.shape.k))

            def gather() -> torch.Tensor:
                dovetail.all_gather_into_tensor(every, x)
                return every

            return gather
        y, send = self.compute()(), self._sender(dovetail, kept=True)
        return lambda: send(y)

    def _sender(self, by: Any, *, kept: bool = False) -> Callable[[torch.Tensor], torch.Tensor]:
        """The collective on a product; the result is a new tensor, or always the same."""
        n, ranks, x = self.shape.n, self._ranks, self.x
        received, sent = self.splits
        rows = sum(received) if received is not None else x.shape[0] if self.shape.op == GEMM else x.shape[0] // ranks
        place = x.new_empty((rows, n)) if kept else None
        scatter = getattr(by, "reduce_scatter_single", by.reduce_scatter_tensor)  # torch's newer name

        def all_reduce(y: torch.Tensor) -> torch.Tensor:
            by.all_reduce(y)
            return y

        def all_to_all(y: torch.Tensor) -> torch.Tensor:
            out = y.new_empty((rows, n)) if place is None else place
            by.all_to_all_single(out, y, received, sent)
            return out

        def reduce_scatter(y: torch.Tensor) -> torch.Tensor:
            out = y.new_empty((rows, n)) if place is None else place
            scatter(out, y)
            return out

        return {GEMV: all_reduce, GEMM: all_to_all}.get(self.shape.op, reduce_scatter)


def _uneven(rows: int, ranks: int, rank: int) -> list[int]:
    """One destination gets three times as much as the next; which one differs between ranks."""
    shares = [1 + 2 * ((rank + d) % 2) for d in range(ranks)]
    cuts = [rows * sum(shares[:d]) // sum(shares) for d in range(ranks + 1)]
    return [b - a for a, b in itertools.pairwise(cuts)]


class LookupCase(Case):
    """Bags out of tables. Lengths of bags are random; `bag` is their mean."""

    def __init__(self, shape: Lookup, dtype: torch.dtype, rank: int, ranks: int, where: str) -> None:
        self.shape, self.dtype, self._rank, self._ranks = shape, dtype, rank, ranks
        self.inner, self._batch = 2 * shape.bag, -(-shape.batch // ranks) * ranks
        sizes = (shape.tables, shape.rows, shape.dim)
        whole = [random_(torch.empty(sizes, dtype=dtype, device=where), 7, r) for r in range(ranks)]
        self._tables = [list(w.unbind(0)) for w in whole]
        bags = shape.tables * self._batch
        self._values = [torch.zeros(bags * shape.bag, dtype=torch.int64) for _ in range(ranks)]
        self._offsets = [torch.zeros(bags + 1, dtype=torch.int64) for _ in range(ranks)]
        for r, offsets in enumerate(self._offsets):
            random = torch.Generator().manual_seed(r)
            inside = torch.randint(0, bags * shape.bag + 1, (bags - 1,), generator=random)
            even = torch.arange(1, bags) * shape.bag
            # Halfway between equal bags and bags cut anywhere: some are empty, some long. Bags of one row stay equal.
            offsets[1:bags] = even if shape.bag == 1 else (even + even + inside.sort().values) // 3
            offsets[bags] = bags * shape.bag
        self._values, self._offsets = ([t.to(where) for t in side] for side in (self._values, self._offsets))
        self.fresh(0)

    @property
    def tables(self) -> list[torch.Tensor]:
        """This rank's."""
        return self._tables[self._rank]

    @property
    def values(self) -> torch.Tensor:
        """This rank's row numbers."""
        return self._values[self._rank]

    @property
    def offsets(self) -> torch.Tensor:
        """Where this rank's bags begin."""
        return self._offsets[self._rank]

    def fresh(self, iteration: int) -> None:
        for rank, values in enumerate(self._values):
            random = torch.Generator().manual_seed(iteration * 1009 + rank)
            values.copy_(torch.randint(0, self.shape.rows, values.shape, generator=random))

    def expected(self) -> torch.Tensor:
        return reference.embedding_all_to_all(self._tables, self._values, self._offsets)[self._rank]

    def made(self) -> calls.Call:
        return calls.embedding_all_to_all(
            self.tables, self.values, self.offsets, None, None, "sum", None, self._ranks
        )  # fmt: skip

    def explain(self) -> Choice:
        return ops.explain(EMBEDDING, self.tables, self.values, self.offsets)

    def fused(self, transport: str) -> Run:
        tables, values, offsets = self.tables, self.values, self.offsets
        return lambda: ops.embedding_all_to_all(tables, values, offsets, transport=transport)

    def compute(self) -> Run:
        """Each table's part is cut out beforehand, as a user would have it."""
        batch, parts = self._batch, []
        for t, w in enumerate(self.tables):
            bounds = self.offsets[t * batch : (t + 1) * batch + 1]
            parts.append((self.values[int(bounds[0]) : int(bounds[-1])], w, bounds - bounds[0]))

        def pooled() -> torch.Tensor:
            return torch.stack([embedding_bag(v, w, o, mode="sum", include_last_offset=True) for v, w, o in parts], 1)

        return pooled

    def then(self, by: Any, compute: Run | None = None) -> Run:
        pooled = compute or self.compute()
        local, ranks, tables, dim = self._batch // self._ranks, self._ranks, self.shape.tables, self.shape.dim

        def run() -> torch.Tensor:
            y = pooled()
            out = torch.empty_like(y)
            by.all_to_all_single(out, y)
            return out.view(ranks, local, tables, dim).transpose(0, 1).reshape(local, ranks * tables, dim)

        return run

    def comm(self) -> Run:
        y = self.compute()()
        out = torch.empty_like(y)

        def exchange() -> torch.Tensor:
            dovetail.all_to_all_single(out, y)
            return out

        return exchange


def case_of(shape: Shape, dtype: str, rank: int, ranks: int, where: str = "cpu") -> Case:
    """The case of a shape, with tensors on a device."""
    kind = getattr(torch, dtype)
    if isinstance(shape, Lookup):
        return LookupCase(shape, kind, rank, ranks, where)
    return ProductCase(shape, kind, rank, ranks, where)
