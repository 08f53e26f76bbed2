"""The collectives, with c10d's names and keywords.

Each function is a fast path (a shape seen before, blocking, contiguous: one look-up and one native call) and a slow one
that checks its arguments and binds. Tensors on the heap (`dovetail.empty`) move without a copy; ordinary ones are
staged; ranks may differ in which. Blocking calls return when this rank's output is complete and its input may
be changed; asynchronous ones (`async_op=True`) return a `Work` at once.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dovetail.coll import arguments as args
from dovetail.coll import choose, dispatch
from dovetail.coll.arguments import Alias
from dovetail.coll.dispatch import Request
from dovetail.coll.dtypes import DTYPES, reduce_op, reducible
from dovetail.coll.recipes import C10D_NAMES, VARIANTS, Collective
from dovetail.coll.registry import registry
from dovetail.coll.session import group_of, index_of, session
from dovetail.errors import NotSupported
from dovetail.hw.gpu.driver import load
from dovetail.hw.world import Group
from dovetail.plan.step import DType, ReduceOp

_AG, _AA, _AR, _RS = (
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
)
_SUM, _TORCH_SUM = ReduceOp.SUM, torch.distributed.ReduceOp.SUM


def all_gather_into_tensor(
    output_tensor: Any,
    input_tensor: Any,
    group: Any = None,
    async_op: bool = False,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Gathers every rank's `input_tensor` into `output_tensor` of every rank, in rank order.

    Args:
        output_tensor: contiguous, world times the elements of the input; the input may be this rank's part of it.
        variant: "auto", "pcpy", "bcst", "b2b", "pull" or "torch".
        armed: with `async_op`, hold the call behind a gate that `Work.fire()` opens.

    Raises:
        ValueError, TypeError, NotSupported: bad arguments; nothing was moved.
        MismatchError: ranks made different calls; nothing was moved.
        PeerError, Timeout: a rank died, or made no progress; the group is broken.
    """
    g = (session.group or group_of(None)) if group is None else group_of(group)
    if not (async_op or armed) and 1 in g.fast and variant in g.fast[1]:
        status = g.fast[1][variant](output_tensor, input_tensor)
        if status == 1:
            return None
        if status != -1:
            raise dispatch.failed(g)
    out = args.target("output_tensor", output_tensor)
    inp = args.source("input_tensor", input_tensor)
    args.same_dtype("output_tensor", out, "input_tensor", inp)
    args.times("output_tensor", out, "input_tensor", inp, g.size)
    args.apart(out, inp, Alias.INPUT_IN_OUTPUT, g.rank)
    n = inp.nbytes
    request = Request(
        group=g, collective=_AG, key=(1, inp.numel(), inp.dtype, variant), fast=1, requested=variant, size_bytes=n,
        plan_bytes=n,
        pointers=[inp.data_ptr(), out.data_ptr()], bytes=[n, out.nbytes], tensors=(out, inp), params=[],
        dtype=DTYPES.get(inp.dtype, DType.UINT8),
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def all_to_all_single(
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Sends piece j of `input` to rank j, whose `output` has it as piece i. Pieces are along the first dimension.

    Split sizes count rows, as numbers or as a tensor of them (one on a GPU is read with a synchronisation); either both
    are given (on every rank) or pieces are equal. If `output` is `input` on every rank, pieces are swapped in place.
    Variants: "auto", "pcpy", "swap", "b2b", "pull", "torch". Raises as `all_gather_into_tensor`.
    """
    g = (session.group or group_of(None)) if group is None else group_of(group)
    if output_split_sizes is not None or input_split_sizes is not None:
        receives = args.split_sizes("output_split_sizes", output_split_sizes)
        sends = args.split_sizes("input_split_sizes", input_split_sizes)
        if receives or sends:
            return _all_to_all_uneven(output, input, receives, sends, g, async_op, variant, armed)
    if not (async_op or armed) and 2 in g.fast and variant in g.fast[2]:
        status = g.fast[2][variant](output, input)
        if status == 1:
            return None
        if status != -1:
            raise dispatch.failed(g)
    out = args.target("output", output)
    inp = args.source("input", input)
    args.same_dtype("output", out, "input", inp)
    args.times("output", out, "input", inp, 1)
    if inp.numel() % g.size:
        raise ValueError(
            f"input has {inp.numel()} elements, which {g.size} ranks can't share equally: give split sizes"
        )
    args.apart(out, inp, Alias.SAME, g.rank)
    in_place = inp.data_ptr() == out.data_ptr() and inp.numel() > 0
    place = args.one_device((out, inp)) if in_place else ("cpu", -1)
    choice = dispatch.choice_for(g, _AA, inp.nbytes, variant, in_place, place) if in_place else None
    swaps = choice is not None and choice.variant == "swap"
    if in_place and not swaps:
        inp = inp.clone()  # the others write while they read
    request = Request(
        group=g, collective=_AA, key=(2, inp.numel(), inp.dtype, variant, swaps), fast=2, requested=variant,
        size_bytes=inp.nbytes, plan_bytes=inp.nbytes // g.size,
        pointers=[inp.data_ptr()] if swaps else [inp.data_ptr(), out.data_ptr()],
        bytes=[inp.nbytes] if swaps else [inp.nbytes, out.nbytes], tensors=(out, inp), params=[], in_place=swaps,
        dtype=DTYPES.get(inp.dtype, DType.UINT8),
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def _all_to_all_uneven(
    output: Any, input: Any, out_sizes: Any, in_sizes: Any, g: Group, async_op: bool, variant: str, armed: bool
) -> Any:
    out = args.target("output", output)
    inp = args.source("input", input)
    args.same_dtype("output", out, "input", inp)
    sends = args.splits("input", in_sizes, inp, g.size)
    receives = args.splits("output", out_sizes, out, g.size)
    params = [*_starts(sends), *sends, *_starts(receives), *receives]
    args.apart(out, inp, Alias.NONE, g.rank)
    if variant in ("swap", "b2b"):
        raise ValueError(f"all_to_all with split sizes has the variants auto, pcpy, pull and torch, not {variant!r}")
    rows = [[n // max(1, t.nbytes // max(1, t.shape[0])) for n in s] for t, s in ((out, receives), (inp, sends))]
    request = Request(
        group=g, collective=_AA, key=(2, "uneven", inp.dtype, variant), requested=variant,
        size_bytes=0,  # a choice by size would differ between ranks
        plan_bytes=0, pointers=[inp.data_ptr(), out.data_ptr()], bytes=[inp.nbytes, out.nbytes], tensors=(out, inp),
        params=params, uneven=True, splits=rows,
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def _starts(lengths: list[int]) -> list[int]:
    out, at = [], 0
    for n in lengths:
        out.append(at)
        at += n
    return out


def all_reduce(
    tensor: Any,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Reduces `tensor` over all ranks, in place; every rank gets the same bits.

    Sums go in rank order; 8- and 16-bit floats are summed in fp32 and rounded once. Variants: "auto", "oneshot",
    "twoshot", "torch". Raises as `all_gather_into_tensor`.
    """
    g = (session.group or group_of(None)) if group is None else group_of(group)
    if (op is _SUM or op is _TORCH_SUM) and not (async_op or armed) and 3 in g.fast and variant in g.fast[3]:
        status = g.fast[3][variant](tensor)
        if status == 1:
            return None
        if status != -1:
            raise dispatch.failed(g)
    ours = reduce_op(op)
    t = args.target("tensor", tensor)
    request = Request(
        group=g, collective=_AR, key=(3, t.numel(), t.dtype, ours, variant), fast=3, requested=variant,
        size_bytes=t.nbytes, plan_bytes=t.nbytes, pointers=[t.data_ptr()], bytes=[t.nbytes], tensors=(t,), params=[],
        dtype=reducible(t.dtype, ours), op=ours,
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def reduce_scatter_tensor(
    output: Any,
    input: Any,
    op: Any = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Reduces piece r of every rank's `input` into `output` of rank r. Raises as `all_gather_into_tensor`."""
    g = (session.group or group_of(None)) if group is None else group_of(group)
    if (op is _SUM or op is _TORCH_SUM) and not (async_op or armed) and 4 in g.fast and variant in g.fast[4]:
        status = g.fast[4][variant](output, input)
        if status == 1:
            return None
        if status != -1:
            raise dispatch.failed(g)
    ours = reduce_op(op)
    out = args.target("output", output)
    inp = args.source("input", input)
    args.same_dtype("output", out, "input", inp)
    args.times("input", inp, "output", out, g.size)
    args.apart(out, inp, Alias.OUTPUT_IN_INPUT, g.rank)
    request = Request(
        group=g, collective=_RS, key=(4, inp.numel(), inp.dtype, ours, variant), fast=4, requested=variant,
        size_bytes=inp.nbytes, plan_bytes=out.nbytes, pointers=[inp.data_ptr(), out.data_ptr()],
        bytes=[inp.nbytes, out.nbytes], tensors=(out, inp), params=[], dtype=reducible(inp.dtype, ours), op=ours,
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def broadcast(
    tensor: Any,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Copies the root's `tensor` to all ranks. `src` is its rank in the world, `group_src` that in the group."""
    g = (session.group or group_of(None)) if group is None else group_of(group)
    root = args.root_rank(g, "src", src, group_src)
    if not (async_op or armed) and (fast := g.fast.get((5, root))) is not None and variant in fast:
        status = fast[variant](tensor)
        if status == 1:
            return None
        if status != -1:
            raise dispatch.failed(g)
    t = args.source("tensor", tensor) if g.rank == root else args.target("tensor", tensor)
    request = Request(
        group=g, collective=Collective.BROADCAST, key=(5, t.nbytes, t.dtype, root, variant), fast=(5, root),
        requested=variant, size_bytes=t.nbytes, plan_bytes=t.nbytes, pointers=[t.data_ptr(), t.data_ptr()],
        bytes=[t.nbytes, t.nbytes],
        tensors=(t,), params=[],
        root=root, dtype=DTYPES.get(t.dtype, DType.UINT8),
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def gather(
    tensor: Any,
    gather_list: Any = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Collects every rank's `tensor` in the root's `gather_list`, one tensor per rank."""
    g = (session.group or group_of(None)) if group is None else group_of(group)
    root = args.root_rank(g, "dst", dst, group_dst)
    t = args.source("tensor", tensor)
    outs = args.tensor_list("gather_list", gather_list, t, g.size, written=True) if g.rank == root else []
    if g.rank != root and gather_list:
        raise ValueError(f"gather_list is for the root (rank {root} of the group) only; this is rank {g.rank}")
    return _with_list(g, Collective.GATHER, t, outs, root, variant, async_op, armed)


def scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    variant: str = "auto",
    armed: bool = False,
) -> Any:
    """Gives tensor i of the root's `scatter_list` to rank i, into its `tensor`."""
    g = (session.group or group_of(None)) if group is None else group_of(group)
    root = args.root_rank(g, "src", src, group_src)
    t = args.target("tensor", tensor)
    ins = args.tensor_list("scatter_list", scatter_list, t, g.size, written=False) if g.rank == root else []
    if g.rank != root and scatter_list:
        raise ValueError(f"scatter_list is for the root (rank {root} of the group) only; this is rank {g.rank}")
    return _with_list(g, Collective.SCATTER, t, ins, root, variant, async_op, armed)


def _with_list(
    g: Group, collective: Collective, t: Any, many: list[Any], root: int, variant: str, async_op: bool, armed: bool
) -> Any:
    """gather: [tensor, list...]; scatter: [list..., tensor]: the order of the plans' buffers."""
    pointers = [m.data_ptr() for m in many] or [0] * g.size
    sizes = [m.nbytes for m in many] or [0] * g.size
    first = collective is Collective.GATHER
    request = Request(
        group=g, collective=collective, key=(int(collective), t.nbytes, root, variant), requested=variant,
        size_bytes=t.nbytes, plan_bytes=t.nbytes,
        pointers=[t.data_ptr(), *pointers] if first else [*pointers, t.data_ptr()],
        bytes=[t.nbytes, *sizes] if first else [*sizes, t.nbytes], tensors=(t, many), params=[], root=root,
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def barrier(
    group: Any = None, async_op: bool = False, device_ids: Any = None, *, variant: str = "auto", armed: bool = False
) -> Any:
    """Returns when all ranks have called it and their GPUs are done with what was called before in this group."""
    g = (session.group or group_of(None)) if group is None else group_of(group)
    if g.gpu is not None:
        g.gpu.settle()
    if not (async_op or armed) and (bound := g.barriers.get(variant)) is not None:
        if bound.caller.run_empty() == 1:
            return None
        raise bound.fail(bound.caller.failure())
    request = Request(
        group=g, collective=Collective.BARRIER, key=(8, variant), fast=8, requested=variant, size_bytes=0, plan_bytes=0,
        pointers=[], bytes=[], tensors=(), params=[],
    )  # fmt: skip
    return dispatch.run(request, async_op, armed)


def arm(collective: Any, *arguments: Any, **keywords: Any) -> Any:
    """Prepares a call behind a gate: `work = arm(all_reduce, t)`, then `work.fire()` and `work.wait()`.

    Everything is planned, bound and enqueued now; peers see this rank's tensors only after `fire()`.
    """
    return collective(*arguments, async_op=True, armed=True, **keywords)


def explain(
    collective: str, size_bytes: int, *, group: Any = None, variant: str = "auto", device: Any = None
) -> choose.Choice:
    """What a call would run and why, without running it. `size_bytes` is what each rank contributes.

    `collective` is a name of ours, such as "all_gather", or the function's, such as "all_gather_into_tensor".

    `device` is where the tensors would be, such as "cuda"; by default on the CPU. Other ranks take no part, and a GPU
    is asked for its name only: no context is made, and this rank may still use another.
    """
    wanted = _named(collective)
    if not hasattr(size_bytes, "__index__"):
        raise TypeError(f"size_bytes must be an int, what each rank contributes, such as 1 << 20, not {size_bytes!r}")
    where = torch.device("cpu" if device is None else device)
    if where.type == "cpu":
        return choose.variant_for(group_of(group), wanted, size_bytes, variant)
    if where.type != "cuda":
        raise ValueError(f"device must be the CPU or a GPU, such as 'cuda', not {where}")
    backend = "hip" if torch.version.hip else "cuda"
    gpu = _named_gpu(backend, index_of(where))
    return choose.variant_for(group_of(group), wanted, size_bytes, variant, backend=backend, device=gpu)


def _named_gpu(backend: str, index: int) -> Any:
    """As much of a `Device` as a choice depends on."""
    driver = load(backend)
    if not 0 <= index < driver.num_devices():
        raise NotSupported(f"there is no {backend} device {index}: this process sees {driver.num_devices()}")
    return SimpleNamespace(name=driver.device_name(index), driver=driver, caps=SimpleNamespace(backend=backend))


def variants(collective: str) -> tuple[str, ...]:
    """The variants of a collective, by either name, besides "auto" and "torch"."""
    return VARIANTS[_named(collective)]


def _named(collective: str) -> Collective:
    names = {c.name.lower(): c for c in VARIANTS} | C10D_NAMES
    if collective not in names:
        raise ValueError(f"no collective {collective!r}; there are {', '.join(names)}")
    return names[collective]


def stats() -> dict[str, Any]:
    """Calls, bytes, engines and fall-backs of this process so far."""
    return registry.stats()
