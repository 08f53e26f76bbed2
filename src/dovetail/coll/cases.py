"""What the self-test tries: one table of cases, and for each the call, its tensors and what it must give.

Owns the cases, the random data, the plain reference on the CPU and the comparison, bit for bit. Who starts ranks, and
what a failure means, is `selftest.py`'s. Data differ by rank and by iteration; every rank can draw everybody's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from dovetail.coll import api, session
from dovetail.coll.recipes import VARIANTS, Collective
from dovetail.hw.world import Group

REDUCTIONS = ("all_reduce", "reduce_scatter")
KINDS = ("symmetric", "ordinary", "mixed")
MODES = ("blocking", "async", "armed")
#: 8 MB of float32: from here on `items` are those of a rank's whole input, below those of one piece of it.
LARGE = 2 << 20
_F32, _F16, _BF16, _U8 = torch.float32, torch.float16, torch.bfloat16, torch.uint8
_MOVED = ((0, _F32), (1, _U8), (7, _BF16), (1000, _F32), (70001, _U8), (LARGE, _F32))
_REDUCED = ((0, _F32), (1, _F32), (7, _BF16), (1000, _F32), (70001, _F16), (LARGE, _F32))
_MIXED_ITEMS = (7, 1000, 70001)
_SUMMED = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
_OPS = ("product", "min", "max", "avg")
_BITWISE = ("band", "bor", "bxor")
ITERATIONS = 2
#: One rank comes this late, another one each time: who does not wait for it is found out.
_LATE_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call to try."""

    collective: str
    variant: str
    tensors: str = "symmetric"  #: one of `KINDS`; mixed is by the parity of the rank
    items: int = 1000
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    mode: str = "blocking"  #: one of `MODES`
    root: int = 0
    uneven: bool = False
    in_place: bool = False
    part: bool = False  #: in a group of some of the ranks

    @property
    def moves(self) -> bool:
        """True if bytes are moved and not combined, so that they may be any."""
        return self.collective not in REDUCTIONS

    def __str__(self) -> str:
        words = [self.tensors, f"{self.items} x {str(self.dtype).removeprefix('torch.')}", self.mode]
        words += [self.op] * (not self.moves) + [f"root {self.root}"] * (self.collective in _ROOTED)
        words += ["uneven"] * self.uneven + ["in place"] * self.in_place + ["subgroup"] * self.part
        return f"{self.collective} {self.variant}: {', '.join(words)}"


_ROOTED = ("broadcast", "gather", "scatter")


def table(ranks: int) -> list[Case]:
    """Every case for a number of ranks."""
    found = []
    for collective, variants in VARIANTS.items():
        for variant in variants:
            case = Case(collective=collective.name.lower(), variant=variant)
            if collective is Collective.BARRIER:
                found += [replace(case, items=0, mode=mode) for mode in MODES]
                continue
            found += _spread(case, ranks)
            if not case.moves:
                found += _numbers(case)
    swap = Case(collective="all_to_all", variant="swap", in_place=True)
    uneven = [Case(collective="all_to_all", variant=variant, uneven=True) for variant in ("pcpy", "pull")]
    return found + [c for case in (swap, *uneven) for c in _spread(case, ranks)]


def _spread(case: Case, ranks: int) -> list[Case]:
    """A case in all sizes, kinds of tensors and modes, and in a subgroup."""
    found = []
    for index, (items, dtype) in enumerate(_MOVED if case.moves else _REDUCED):
        root = index % ranks if case.collective in _ROOTED else 0
        sized = replace(case, items=items, dtype=dtype, root=root)
        found += [replace(sized, tensors=kind) for kind in KINDS if kind != "mixed" or items in _MIXED_ITEMS]
    for kind in KINDS[:2]:
        found += [replace(case, tensors=kind, mode=mode) for mode in MODES[1:]]
        found.append(replace(case, tensors=kind, part=True))
    return found


def _numbers(case: Case) -> list[Case]:
    """A reduction with every dtype, and with every operation."""
    found = [replace(case, dtype=dtype, items=1007) for dtype in _SUMMED]
    found += [replace(case, dtype=dtype, op=op) for dtype in (_F32, _BF16, torch.int32) for op in _OPS]
    return found + [replace(case, dtype=torch.int32, op=op, tensors="ordinary") for op in _BITWISE]


# --- data and what must come of them


def draw(key: Sequence[int], items: int, dtype: torch.dtype, *, any_bits: bool) -> torch.Tensor:
    """Random data, the same for the same key: of any bits, or numbers that can be combined."""
    random = np.random.default_rng(key)
    if not items:
        return torch.empty(0, dtype=dtype)
    if any_bits:
        return torch.frombuffer(bytearray(random.bytes(items * dtype.itemsize)), dtype=torch.uint8).view(dtype)
    if dtype.is_floating_point:
        wide = np.float64 if dtype is torch.float64 else np.float32
        return (torch.from_numpy(random.standard_normal(items, dtype=wide)) * 2).to(dtype)
    return torch.from_numpy(random.integers(0, 2 if dtype is torch.bool else 100, items)).to(dtype)


_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduced(parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reference: in rank order, small floats in float32 and rounded once; the sum of bools is "any"."""
    dtype = parts[0].dtype
    combine = torch.logical_or if dtype is torch.bool and op == "sum" else _COMBINE[op]
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize <= 2 else dtype
    acc = functools.reduce(combine, [part.to(wide) for part in parts])
    if op == "avg" and len(parts) > 1:
        acc = torch.div(acc, len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    return acc.to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, so that NaN equals itself and -0 is not 0."""
    return t.view(-1).view(torch.uint8)


def difference(out: torch.Tensor, want: torch.Tensor) -> str | None:
    """What is wrong with a result; None if nothing."""
    got, right = bits(out.cpu()), bits(want)
    if torch.equal(got, right):
        return None
    wrong = (got != right).nonzero().flatten()
    first, last = (int(wrong[n]) // out.dtype.itemsize for n in (0, -1))
    return f"{len(wrong)} of {len(right)} bytes are wrong, first and last in elements {first} and {last}"


# --- calls

Data = Callable[[int], torch.Tensor]  #: what a rank of the group gives
Right = Callable[[Data], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call with its tensors, to be made again and again."""

    run: Callable[..., Any]  #: takes `async_op` and `armed`
    length: Callable[[int], int]  #: elements that a rank gives
    inputs: Sequence[tuple[torch.Tensor, Right]] = ()
    outputs: Sequence[tuple[torch.Tensor, Right]] = ()


class Maker(Protocol):
    """Makes a rank's tensors and knows when they can be used."""

    def empty(self, items: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor: ...
    def flush(self) -> None:
        """Blocks until what was written to tensors is there."""

    def settle(self) -> None:
        """Called after a call that is over: blocks where reading the outputs would not wait by itself."""


class Tensors:
    """Tensors on the CPU ("cpu") or on this rank's GPU ("cuda")."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        if self.device.type != "cpu":
            group = session.world().group
            self.device = torch.device(device, group.rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)

    def empty(self, items: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor:
        """A tensor that is not initialised."""
        make: Callable[..., torch.Tensor] = session.empty if symmetric else torch.empty
        return make(items, dtype=dtype, device=self.device)

    def flush(self) -> None:
        """Of the GPU's current stream."""
        if self.device.type != "cpu":
            torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        """Nothing: a result is read in the order of the current stream, and that has to be right."""


def call_of(case: Case, group: Group, maker: Maker) -> Call:
    """The call of a case, with new tensors."""
    symmetric = case.tensors == "symmetric" or (case.tensors == "mixed" and group.rank % 2 == 0)
    made = functools.partial(maker.empty, dtype=case.dtype, symmetric=symmetric)
    return _CALLS[case.collective](case, group, made, {"group": group, "variant": case.variant})


Made = Callable[[int], torch.Tensor]


def _piece(case: Case, group: Group) -> int:
    return case.items if case.items < LARGE else case.items // group.size


def _all_gather(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    inp, out = made(c.items), made(c.items * g.size)
    return Call(
        run=functools.partial(api.all_gather_into_tensor, out, inp, **how), length=lambda _: c.items,
        inputs=[(inp, lambda d: d(g.rank))],
        outputs=[(out, lambda d: torch.cat([d(r) for r in range(g.size)])), (inp, lambda d: d(g.rank))],
    )  # fmt: skip


def _all_to_all(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    """Uneven: some pieces are empty, some half as long as others."""
    n, size, me = _piece(c, g), g.size, g.rank
    sends = [[(n * ((i + 2 * j) % 3)) // 2 if c.uneven else n for j in range(size)] for i in range(size)]
    receives = [sends[i][me] for i in range(size)]
    inp = made(sum(sends[me]))
    out = inp if c.in_place else made(sum(receives))
    splits = (receives, sends[me]) if c.uneven else (None, None)

    def right(d: Data) -> torch.Tensor:
        starts = [sum(sends[r][:me]) for r in range(size)]
        return torch.cat([d(r)[at : at + sends[r][me]] for r, at in enumerate(starts)])

    kept = [] if c.in_place else [(inp, lambda d: d(me))]
    return Call(
        run=functools.partial(api.all_to_all_single, out, inp, *splits, **how), length=lambda r: sum(sends[r]),
        inputs=[(inp, lambda d: d(me))], outputs=[(out, right), *kept],
    )  # fmt: skip


def _all_reduce(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    t = made(c.items)
    return Call(
        run=functools.partial(api.all_reduce, t, c.op, **how), length=lambda _: c.items,
        inputs=[(t, lambda d: d(g.rank))], outputs=[(t, lambda d: reduced([d(r) for r in range(g.size)], c.op))],
    )  # fmt: skip


def _reduce_scatter(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    n = _piece(c, g)
    inp, out = made(n * g.size), made(n)

    def right(d: Data) -> torch.Tensor:
        return reduced([d(r)[n * g.rank : n * (g.rank + 1)] for r in range(g.size)], c.op)

    return Call(
        run=functools.partial(api.reduce_scatter_tensor, out, inp, c.op, **how), length=lambda _: n * g.size,
        inputs=[(inp, lambda d: d(g.rank))], outputs=[(out, right), (inp, lambda d: d(g.rank))],
    )  # fmt: skip


def _broadcast(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    t = made(c.items)
    return Call(
        run=functools.partial(api.broadcast, t, group_src=c.root, **how), length=lambda _: c.items,
        inputs=[(t, lambda d: d(c.root))] if g.rank == c.root else [], outputs=[(t, lambda d: d(c.root))],
    )  # fmt: skip


def _gather(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    t = made(c.items)
    outs = [made(c.items) for _ in range(g.size)] if g.rank == c.root else []
    rights = [(out, functools.partial(_given, rank=r)) for r, out in enumerate(outs)]
    return Call(
        run=functools.partial(api.gather, t, outs or None, group_dst=c.root, **how), length=lambda _: c.items,
        inputs=[(t, lambda d: d(g.rank))], outputs=[*rights, (t, lambda d: d(g.rank))],
    )  # fmt: skip


def _scatter(c: Case, g: Group, made: Made, how: dict[str, Any]) -> Call:
    n = _piece(c, g)
    t = made(n)
    ins = [made(n) for _ in range(g.size)] if g.rank == c.root else []

    def cut(d: Data, rank: int) -> torch.Tensor:
        return d(c.root)[n * rank : n * (rank + 1)]

    given = [(inp, functools.partial(cut, rank=r)) for r, inp in enumerate(ins)]
    return Call(
        run=functools.partial(api.scatter, t, ins or None, group_src=c.root, **how), length=lambda _: n * g.size,
        inputs=given, outputs=[(t, functools.partial(cut, rank=g.rank)), *given],
    )  # fmt: skip


def _barrier(_c: Case, _g: Group, _made: Made, how: dict[str, Any]) -> Call:
    return Call(run=functools.partial(api.barrier, **how), length=lambda _: 0)


def _given(d: Data, rank: int) -> torch.Tensor:
    return d(rank)


_CALLS: dict[str, Callable[[Case, Group, Made, dict[str, Any]], Call]] = {
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def check(case: Case, group: Group, maker: Maker, seed: Sequence[int]) -> str | None:
    """Makes the call of a case a few times, always with new data and a poisoned output; what was wrong, or None.

    All calls are made whatever comes of them: the other ranks make theirs.
    """
    call = call_of(case, group, maker)
    found = []
    for iteration in range(ITERATIONS):

        @functools.cache
        def data(rank: int, iteration: int = iteration) -> torch.Tensor:
            return draw((*seed, iteration, rank), call.length(rank), case.dtype, any_bits=case.moves)

        fresh = [(t, right(data).to(t.device)) for t, right in call.inputs]
        for t, _ in call.outputs:
            bits(t).fill_(0xFF) if t.dtype is not torch.bool else t.fill_(True)
        if iteration % group.size == group.rank:
            time.sleep(_LATE_S)
        _make(case.mode, call, fresh, maker)
        for t, right in call.outputs:
            if wrong := difference(t, right(data)):
                found.append(f"call {iteration + 1}: {wrong}")
    return "; ".join(found) or None


def _make(mode: str, call: Call, fresh: Sequence[tuple[torch.Tensor, torch.Tensor]], maker: Maker) -> None:
    """One call. What an armed call moves is written after it was armed."""
    work = call.run(async_op=True, armed=True) if mode == "armed" else None
    for t, given in fresh:
        t.copy_(given)
    if work is not None:
        maker.flush()
        work.fire()
    else:
        work = call.run(async_op=mode == "async")
    if work is not None:
        work.wait()
    maker.settle()
