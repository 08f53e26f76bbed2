"""What ranks do in tests: random data that every rank can compute for all others, and the collectives over it."""

from __future__ import annotations

import functools
from typing import Any

import torch

import dovetail
from dovetail.coll import session
from dovetail.coll.dtypes import DTYPES
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.world import world_of
from dovetail.hw.world import Group

#: Where `make` puts tensors: "cpu", "cuda", or "standin": device memory of a stand-in driver, which is the host's.
DEVICE = "cpu"

#: How many random numbers are drawn at least, and how far apart the data of two ranks begin in them: a prime.
_DRAWN, _APART = 1_200_007, 7919

FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@functools.cache
def _drawn(num: int, floats: bool) -> torch.Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(num, generator=g) * 2 if floats else torch.randint(0, 100, (num,), generator=g)


def data(seed: int, rank: int, items: int, dtype: torch.dtype) -> torch.Tensor:
    """Different for every seed and rank, the same on whoever computes it: a stretch of numbers drawn once."""
    if dtype.is_complex:
        return data(seed, rank, 2 * items, dtype.to_real()).view(dtype)
    num = _DRAWN * (1 + 2 * items // _DRAWN)
    begin = (seed * 1009 + rank) * _APART % (num - items)
    part = _drawn(num, dtype.is_floating_point)[begin : begin + items]
    return part % 2 == 1 if dtype is torch.bool else part.to(dtype, copy=True)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals itself and -0 differs from 0."""
    return t.contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    settle()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a).cpu(), bits(b).cpu())


def use(device: str) -> None:
    """From now on tensors are made on `device`; with "standin" CPU tensors count as a GPU's."""
    global DEVICE
    DEVICE = device
    if device == "standin":
        from dovetail.coll import arguments

        arguments.one_device = lambda tensors: ("cuda", 0) if list(tensors) else ("cpu", -1)


def settle() -> None:
    """A stand-in's tensors are the CPU's, which no stream orders: the host waits for what is in flight."""
    if DEVICE == "standin":
        for g in list(session.world()._groups.values()):
            if g.gpu is not None:
                g.gpu.settle()


def _empty(heap: bool, items: int, dtype: torch.dtype) -> torch.Tensor:
    if DEVICE == "cpu":
        return dovetail.empty(items, dtype=dtype) if heap else torch.empty(items, dtype=dtype)
    if DEVICE == "cuda":
        make = dovetail.empty if heap else torch.empty
        return make(items, dtype=dtype, device="cuda")
    side = world_of(session.world(), "cuda", 0)
    if heap:
        return side.heap.empty((items,), dtype)
    if side not in _ordinary:
        _ordinary[side] = Heap(side.device)  # not the world's heap: its tensors are ordinary ones
    return _ordinary[side].empty((items,), dtype)


_ordinary: dict[Any, Heap] = {}


def poison(t: torch.Tensor) -> torch.Tensor:
    """Fills it with bytes that are NaN in every float type."""
    if t.numel():
        bits(t).fill_(0xFF) if t.dtype is not torch.bool else t.fill_(True)
    return t


def make(kind: str, rank: int, items: int, dtype: torch.dtype) -> torch.Tensor:
    """A poisoned tensor: on the heap, ordinary, or by the parity of the rank."""
    heap = kind == "symmetric" or (kind == "mixed" and rank % 2 == 0)
    return poison(_empty(heap, items, dtype))


def reduced(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reference, in plain torch: rank order, small floats in fp32 and rounded once."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        stack = torch.stack(parts)
        if op == "bxor":
            return stack.sum(0) % 2 == 1
        return stack.all(0) if op in ("product", "min", "band") else stack.any(0)
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize <= 2 else dtype
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        wide = torch.int64
    acc = parts[0].to(wide)
    for p in (q.to(wide) for q in parts[1:]):
        if op in ("sum", "avg"):
            acc = acc + p
        elif op == "product":
            acc = acc * p
        elif op == "min":
            acc = torch.minimum(acc, p)
        elif op == "max":
            acc = torch.maximum(acc, p)
        elif op == "band":
            acc = acc & p
        elif op == "bor":
            acc = acc | p
        else:
            acc = acc ^ p
    if op == "avg" and len(parts) > 1:
        acc = acc / len(parts) if dtype.is_floating_point else torch.div(acc, len(parts), rounding_mode="trunc")
    return acc.to(dtype)


def world() -> Group:
    return dovetail.init()


def all_gather(variant: str, kind: str, items: int, dtype: torch.dtype, seed: int, group: Any = None) -> None:
    g = group or world()
    inp, out = make(kind, g.rank, items, dtype), make(kind, g.rank, items * g.size, dtype)
    for it in range(3):
        inp.copy_(data(seed + it, g.rank, items, dtype))
        poison(out)
        dovetail.all_gather_into_tensor(out, inp, group=g, variant=variant)
        want = torch.cat([data(seed + it, r, items, dtype) for r in range(g.size)])
        assert same(out, want), (variant, kind, items, dtype, it)


def all_to_all(variant: str, kind: str, items: int, dtype: torch.dtype, seed: int, group: Any = None) -> None:
    g = group or world()
    inp, out = make(kind, g.rank, items * g.size, dtype), make(kind, g.rank, items * g.size, dtype)
    for it in range(3):
        inp.copy_(data(seed + it, g.rank, items * g.size, dtype))
        poison(out)
        dovetail.all_to_all_single(out, inp, group=g, variant=variant)
        theirs = [data(seed + it, r, items * g.size, dtype) for r in range(g.size)]
        want = torch.cat([t[items * g.rank : items * (g.rank + 1)] for t in theirs])
        assert same(out, want), (variant, kind, items, dtype, it)


def all_reduce(variant: str, kind: str, items: int, dtype: torch.dtype, op: str, seed: int, group: Any = None) -> bytes:
    g = group or world()
    t = make(kind, g.rank, items, dtype)
    for it in range(3):
        t.copy_(data(seed + it, g.rank, items, dtype))
        dovetail.all_reduce(t, op, group=g, variant=variant)
        want = reduced([data(seed + it, r, items, dtype) for r in range(g.size)], op)
        assert same(t, want), (variant, kind, items, dtype, op, it, t[:8], want[:8])
    return bytes(bits(t).cpu().numpy().tobytes())


def reduce_scatter(kind: str, items: int, dtype: torch.dtype, op: str, seed: int) -> None:
    g = world()
    inp, out = make(kind, g.rank, items * g.size, dtype), make(kind, g.rank, items, dtype)
    for it in range(3):
        inp.copy_(data(seed + it, g.rank, items * g.size, dtype))
        poison(out)
        dovetail.reduce_scatter_tensor(out, inp, op)
        parts = [
            data(seed + it, r, items * g.size, dtype)[items * g.rank : items * (g.rank + 1)] for r in range(g.size)
        ]
        assert same(out, reduced(parts, op)), (kind, items, dtype, op, it)


def rooted(kind: str, items: int, dtype: torch.dtype, seed: int) -> None:
    """broadcast (every variant), gather and scatter, from every root."""
    g = world()
    for root in range(g.size):
        for variant in ("pcpy", "bcst", "pull", "auto"):
            t = make(kind, g.rank, items, dtype)
            if g.rank == root:
                t.copy_(data(seed, root, items, dtype))
            dovetail.broadcast(t, root, variant=variant)
            assert same(t, data(seed, root, items, dtype)), ("broadcast", variant, root)
        t = make(kind, g.rank, items, dtype).copy_(data(seed, g.rank, items, dtype))
        outs = [make(kind, r, items, dtype) for r in range(g.size)] if g.rank == root else None
        dovetail.gather(t, outs, root)
        for r in range(g.size) if outs else ():
            assert same(outs[r], data(seed, r, items, dtype)), ("gather", root, r)
        ins = [make(kind, r, items, dtype).copy_(data(seed, r, items, dtype)) for r in range(g.size)]
        t = make(kind, g.rank, items, dtype)
        dovetail.scatter(t, ins if g.rank == root else None, root)
        assert same(t, data(seed, g.rank, items, dtype)), ("scatter", root)
        dovetail.barrier()


def all_dtypes() -> list[torch.dtype]:
    return list(DTYPES)
