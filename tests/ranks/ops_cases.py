"""Calls of the fused operators that every rank can make for all others: arguments, what plain torch gives, delays.

Data are small whole numbers unless asked otherwise: their products and sums are exact, so results of every transport
must have the reference's bits, and the order of a sum hides nothing.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import dovetail
from dovetail import ops
from dovetail.hw.world import Group
from dovetail.ops import reference
from dovetail.ops.choose import TRANSPORTS
from dovetail.ops.cpu import lookups, pooling
from dovetail.ops.cpu import product as products
from dovetail.ops.cpu.repeated import Repeated
from dovetail.ops.group import OpsGroup, ops_group
from dovetail.ops.repeat import Lookup, Repeat
from tests.ranks import workers

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OPS = tuple(TRANSPORTS["cpu"])
PRODUCTS = tuple(op for op in OPS if op != "embedding_all_to_all")


def transports(op: str) -> tuple[str, ...]:
    """All that the CPU has for it, and `auto`."""
    return (*TRANSPORTS["cpu"][op], "auto")


@dataclass
class Problem:
    """One call: every rank's arguments and every rank's result in plain torch."""

    op: str
    arguments: list[tuple[Any, ...]]
    want: list[torch.Tensor]
    keywords: list[dict[str, Any]] = field(default_factory=list)
    exact: bool = True

    def run(self, group: Group, transport: str = "auto") -> torch.Tensor:
        """This rank's result."""
        more = self.keywords[group.rank] if self.keywords else {}
        operator = getattr(ops, self.op)
        found: torch.Tensor = operator(*self.arguments[group.rank], **more, group=group, transport=transport)
        return found

    def is_right(self, group: Group, found: torch.Tensor) -> bool:
        """Bit by bit where data are whole numbers; else within what the dtype allows."""
        want = self.want[group.rank]
        if self.exact:
            return workers.same(found + 0.0, want + 0.0)  # no -0
        # Partial results are rounded, and may cancel: what is left can be off by as much as large ones are.
        least = 2 * torch.finfo(want.dtype).eps * float(want.abs().max()) if want.numel() else 0.0
        try:
            torch.testing.assert_close(found, want, rtol=2 * torch.finfo(want.dtype).eps, atol=max(least, 1e-7))
        except AssertionError:
            return False
        return True


def numbers(
    generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, *, exact: bool = True
) -> torch.Tensor:
    """Whole numbers -3..3, or normal ones."""
    if exact:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def product(
    op: str, world: int, shape: tuple[int, int, int], dtype: torch.dtype, seed: int, *, exact: bool = True,
    sends: list[list[int]] | None = None,
) -> Problem:  # fmt: skip
    """`shape` is (rows, n, k) of each rank; `sends` are rows from rank to rank. Every second x is on the heap."""
    g = torch.Generator().manual_seed(seed * 31 + 7)
    m, n, k = shape
    rows = [sum(send) for send in sends] if sends is not None else [m] * world
    xs = [numbers(g, (r, k), dtype, exact=exact) for r in rows]
    ws = [numbers(g, (n, k), dtype, exact=exact) for _ in range(world)]
    if op == "gemm_all_to_all":
        want = reference.gemm_all_to_all(xs, ws, sends)
    else:
        want = getattr(reference, op)(xs, ws)
    me = dovetail.init().rank
    if me < world and (me + seed) % 2 and xs[me].numel():
        xs[me] = dovetail.empty(*xs[me].shape, dtype=dtype).copy_(xs[me])
    arguments: list[tuple[Any, ...]] = list(zip(xs, ws, strict=True))
    if sends is not None:
        arguments = [(*a, [s[r] for s in sends], sends[r]) for r, a in enumerate(arguments)]
    return Problem(op, arguments, want, exact=exact)


def uneven(world: int, seed: int, most: int = 9) -> list[list[int]]:
    """Rows from rank to rank, with zeros; one rank may send nothing, one receive nothing."""
    draw = random.Random(seed)
    sends = [[draw.choice((0, 1, 1)) * draw.randint(1, most) for _ in range(world)] for _ in range(world)]
    if seed % 3 == 1:
        sends[seed % world] = [0] * world
    if seed % 3 == 2:
        for send in sends:
            send[seed % world] = 0
    return sends


def embedding(
    world: int, local: int, dim: int, dtype: torch.dtype, seed: int, *, exact: bool = True, mode: str = "sum",
    scaled: bool = False, numbers_of: torch.dtype = torch.int64, by_lengths: bool = False, most: int = 6,
    tables: int = 0,
) -> Problem:  # fmt: skip
    """Ranks differ in their number of tables, or have `tables`; many bags are empty."""
    g, draw = torch.Generator().manual_seed(seed * 37 + 5), random.Random(seed)
    weights, values, lengths, scales = [], [], [], []
    for r in range(world):
        many = tables or 1 + (seed + 2 * r) % 3
        rows = [draw.randint(1, 40) for _ in range(many)]
        weights.append([numbers(g, (n, dim), dtype, exact=exact) for n in rows])
        count = torch.randint(0, most + 1, (many * local * world,), generator=g)
        lengths.append(count * torch.randint(0, 2, count.shape, generator=g))
        per_table = lengths[-1].view(many, -1).sum(1).tolist() if local else [0] * many
        values.append(torch.cat([torch.randint(0, n, (c,), generator=g) for n, c in zip(rows, per_table, strict=True)]))
        scales.append(numbers(g, (values[-1].numel(),), dtype, exact=exact))
    offsets = [torch.nn.functional.pad(count.cumsum(0), (1, 0)) for count in lengths]
    given = scales if scaled else None
    want = reference.embedding_all_to_all(weights, values, offsets, mode=mode, per_sample_weights=given)
    arguments: list[tuple[Any, ...]] = [(w, v.to(numbers_of)) for w, v in zip(weights, values, strict=True)]
    keywords: list[dict[str, Any]] = [{"mode": mode} for _ in range(world)]
    for r in range(world):
        bags = lengths[r] if by_lengths else offsets[r]
        keywords[r]["lengths" if by_lengths else "offsets"] = bags.to(numbers_of)
        if scaled:
            keywords[r]["per_sample_weights"] = scales[r]
    return Problem("embedding_all_to_all", arguments, want, keywords, exact=exact and mode == "sum")


def some(op: str, world: int, seed: int, dtype: torch.dtype = torch.float32) -> Problem:
    """A call whose shape changes with the seed."""
    draw = random.Random(seed)
    if op == "embedding_all_to_all":
        return embedding(
            world, draw.randint(0, 9), draw.choice((1, 5, 33)), dtype, seed, scaled=seed % 2 == 0,
            numbers_of=(torch.int64, torch.int32)[seed // 2 % 2], by_lengths=seed % 3 == 0,
        )  # fmt: skip
    n, k = draw.randint(1, 40), draw.randint(1, 20)
    if op == "gemm_all_to_all" and seed % 3:
        return product(op, world, (0, n, k), dtype, seed, sends=uneven(world, seed))
    rows = draw.randint(1, 12) if op in ("gemv_all_reduce", "all_gather_matmul") else world * draw.randint(0, 60)
    return product(op, world, (rows, draw.choice((n, 20 * n)), k), dtype, seed)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors of torch are NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def poison_scratch(group: Group) -> None:
    """What the operators keep for their next call; nobody is in one, so nobody reads it."""
    dovetail.barrier(group=group)
    g = ops_group(group)
    for t in (*g._scratch.values(), *([] if g._stage is None else [g._stage])):
        workers.poison(t)
    dovetail.barrier(group=group)


def forget(group: Group) -> None:
    """The calls that were made: the next ones are looked at."""
    g = ops_group(group)
    g.products.clear()
    g.lookups.clear()


@contextlib.contextmanager
def step_by_step(group: Group) -> Iterator[None]:
    """Calls whose like was run before take no shorter way."""
    forget(group)
    with (
        mock.patch.object(Repeated, "of", return_value=None),
        mock.patch.object(lookups.Repeated, "of", return_value=None),
    ):
        yield
    forget(group)


@contextlib.contextmanager
def two_meetings(group: Group) -> Iterator[None]:
    """Operators don't use what peers posted before: they agree, compute, and meet again."""
    with step_by_step(group), mock.patch.object(OpsGroup, "push", return_value=None):
        yield


@contextlib.contextmanager
def slow(seconds: Callable[[], float]) -> Iterator[None]:
    """Every product, and every pooled stretch of bags, of this rank begins late."""
    with contextlib.ExitStack() as patches:
        for owner, name in COMPUTATIONS:
            patches.enter_context(mock.patch.object(owner, name, _late(getattr(owner, name), seconds)))
        yield


#: What computes: torch's product and ours, alone and with what follows it, and pooling.
COMPUTATIONS: tuple[tuple[Any, str], ...] = (
    (torch, "mm"), (products, "_ours"), (Repeat, "multiply"), (pooling, "_pool"), (Lookup, "run"),
)  # fmt: skip


def _late(call: Callable[..., Any], seconds: Callable[[], float]) -> Callable[..., Any]:
    def late(*args: Any, **more: Any) -> Any:
        time.sleep(seconds())
        return call(*args, **more)

    return late


@contextlib.contextmanager
def delays(group: Group, most_us: float) -> Iterator[None]:
    """Random delays before every step of this rank's engines, in the group and in the operators' own meetings."""
    both = [group, ops_group(group)._meeting._companion]
    for g in both:
        g.inject_delay(most_us)
    try:
        yield
    finally:
        for g in both:
            g.inject_delay(0)


class Postponed:
    """A removed wait: `OpsGroup.barrier` does nothing while this is entered; the peers' barriers are met afterwards."""

    def __init__(self, group: Group) -> None:
        self._ops = ops_group(group)

    def __enter__(self) -> Postponed:
        self._patch = mock.patch.object(OpsGroup, "barrier")
        self._missed = self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()
        for _ in range(self._missed.call_count):
            self._ops.barrier()
