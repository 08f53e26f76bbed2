"""What ranks on a GPU do to try the fused operators; each function runs in every rank and raises if one is wrong."""

from __future__ import annotations

import time
from typing import Any

import torch

import dovetail
import dovetail.ops as ops
from dovetail.coll.session import group_of
from dovetail.errors import DovetailError, NotSupported, Timeout
from dovetail.ops import reference
from dovetail.ops.choose import TRANSPORTS

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def rand(seed: int, *shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    """The same on every rank, on the GPU."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()
    return made.requires_grad_(grad)


def near(what: str, got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest number, which sums over K make large."""
    assert got.shape == want.shape, (what, got.shape, want.shape)
    if not want.numel():
        return
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert error <= TOLERANCE[dtype], f"{what}: {error:.2e}"  # a NaN is not


def poison() -> None:
    """Fills free memory of the heap with NaN, so that a byte that nobody wrote shows."""
    group = group_of(None)
    side = group.world.gpu
    if side is not None:
        held = [side.heap.empty((1 << 20,), torch.float32).fill_(float("nan")) for _ in range(8)]
        torch.cuda.synchronize()
        del held


def all_operators(dtype: torch.dtype, seed: int, ragged: bool, transport: str = "store") -> int:
    """Forward and backward of all that have the transport against the reference; returns how many were compared."""
    group = group_of(None)
    rank, world = group.rank, group.size
    m, n, k = (72 * world, 200, 136) if ragged else (256 * world, 512, 256)
    count = 0
    for name in ("gemm_all_to_all", "all_gather_matmul", "matmul_reduce_scatter", "gemv_all_reduce"):
        if transport not in TRANSPORTS["cuda"][name]:
            continue
        rows = min(m, 48) if name == "gemv_all_reduce" else m
        splits = [[rows // world] * world for _ in range(world)]
        if name == "gemm_all_to_all" and ragged:
            gen = torch.Generator().manual_seed(seed)
            splits = torch.randint(0, 90, (world, world), generator=gen).tolist()
            splits[0][world - 1] = 0
        xs = [
            rand(seed + i, sum(splits[i]) if name == "gemm_all_to_all" else rows, k, dtype=dtype, grad=True)
            for i in range(world)
        ]
        ws = [(rand(seed + 50 + i, n, k, dtype=dtype) / k**0.5).requires_grad_() for i in range(world)]
        if name == "gemm_all_to_all":
            wants = reference.gemm_all_to_all(xs, ws, splits)
        else:
            wants = getattr(reference, name)(xs, ws)
        x, w = xs[rank].detach().clone().requires_grad_(), ws[rank].detach().clone().requires_grad_()
        poison()
        if rank == world - 1:
            time.sleep(0.002 * (seed % 3))  # a late peer
        if name == "gemm_all_to_all" and ragged:
            receive = [splits[i][rank] for i in range(world)]
            got = ops.gemm_all_to_all(x, w, receive, splits[rank], transport=transport)
        else:
            got = getattr(ops, name)(x, w, transport=transport)
        near(f"{name} {dtype}", got, wants[rank], dtype)
        grads = [rand(seed + 90 + r, *wants[r].shape, dtype=dtype) for r in range(world)]
        if name == "gemv_all_reduce":
            wants[0].backward(grads[0])  # one value that every rank has
            got.backward(grads[0])
        else:
            torch.autograd.backward(list(wants), grads)
            got.backward(grads[rank])
        near(f"{name} {dtype} dx", x.grad, xs[rank].grad, dtype)
        near(f"{name} {dtype} dw", w.grad, ws[rank].grad, dtype)
        if name == "gemv_all_reduce":
            every = got.new_empty((world * rows, n))
            dovetail.all_gather_into_tensor(every, got.detach(), variant="pcpy")
            assert all(torch.equal(part, every[:rows]) for part in every.chunk(world)), "ranks have other bits"
        count += 3
    return count + (embedding(dtype, seed, transport) if transport in TRANSPORTS["cuda"]["embedding_all_to_all"] else 0)


def embedding(dtype: torch.dtype, seed: int, transport: str = "store") -> int:
    """Pooled bags with sparse gradients, and an update in place, against the reference."""
    group = group_of(None)
    rank, world = group.rank, group.size
    dim, batch = 96, 40 * world
    tables = [1 + r for r in range(world)]
    weights = [
        [rand(seed + 7 * r + t, 50 + t, dim, dtype=dtype, grad=True) for t in range(tables[r])] for r in range(world)
    ]
    values, offsets, scales = [], [], []
    for r in range(world):
        gen = torch.Generator().manual_seed(seed + r)
        lengths = torch.randint(0, 9, (tables[r] * batch,), generator=gen)
        offsets.append(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).cuda())
        values.append(torch.randint(0, 50, (int(lengths.sum()),), generator=gen).cuda())
        scales.append(rand(seed + 70 + r, values[-1].numel(), dtype=dtype))
    count = 0
    kinds = [("sum", False), ("mean", False), *([("sum", True)] if dtype is torch.float32 else [])]
    for mode, scaled in kinds:  # torch's own gradient of the scales is there for fp32 only
        given = [s.detach().requires_grad_() for s in scales] if scaled else None
        for row in weights:
            for w in row:
                w.grad = None
        wants = reference.embedding_all_to_all(weights, values, offsets, mode=mode, per_sample_weights=given)
        mine = [w.detach().clone().requires_grad_() for w in weights[rank]]
        scale = None if given is None else scales[rank].detach().clone().requires_grad_()
        poison()
        got = ops.embedding_all_to_all(
            mine, values[rank], offsets[rank], mode=mode, per_sample_weights=scale, transport=transport
        )
        near(f"embedding {mode} {dtype}", got, wants[rank], dtype)
        grads = [rand(seed + 30 + r, *wants[r].shape, dtype=dtype) for r in range(world)]
        torch.autograd.backward(list(wants), grads)
        got.backward(grads[rank])
        for t, w in enumerate(mine):
            assert w.grad.is_sparse
            dense = w.grad.float().to_dense() if dtype is torch.bfloat16 else w.grad.to_dense()
            near(f"embedding {mode} {dtype} dw[{t}]", dense, weights[rank][t].grad, dtype)
            count += 1
        if scale is not None and given is not None:
            near(f"embedding {dtype} scales", scale.grad, given[rank].grad, dtype)
    before = [w.detach().clone().requires_grad_() for w in weights[rank]]
    out = ops.embedding_all_to_all(before, values[rank], offsets[rank], optimizer="sgd", lr=0.5, transport=transport)
    out.backward(grads[rank])
    for row in weights:
        for w in row:
            w.grad = None
    torch.autograd.backward(list(reference.embedding_all_to_all(weights, values, offsets)), grads)
    for t, w in enumerate(before):
        near(f"sgd {dtype} [{t}]", w, weights[rank][t] - 0.5 * weights[rank][t].grad, dtype)
    return count + 4


def repeats(rounds: int) -> int:
    """Products whose like was run before, fused and not, with new data each, in two streams in turn; ranks come late,
    earlier results stay. Returns how many went the shortest way."""
    from dovetail.ops import unfused
    from dovetail.ops.gpu.repeated import Repeated

    group = group_of(None)
    rank, world = group.rank, group.size
    m, n, k, dtype = 16 * world, 192, 128, torch.bfloat16
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    real, short = (Repeated.__call__, unfused.Repeated.__call__), [0]

    def counted(call: Any) -> Any:
        def run(self: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
            out = call(self, x, w)
            short[0] += out is not None
            return out

        return run

    Repeated.__call__, unfused.Repeated.__call__ = map(counted, real)  # type: ignore[method-assign]
    try:
        kept = []
        for turn in range(rounds):
            for transport in ("store", "unfused"):
                for name in ("gemm_all_to_all", "gemv_all_reduce", "all_gather_matmul", "matmul_reduce_scatter"):
                    xs = [rand(1000 * turn + r, m, k, dtype=dtype) for r in range(world)]
                    ws = [rand(1000 * turn + 50 + r, n, k, dtype=dtype) / k**0.5 for r in range(world)]
                    streams[turn % 2].wait_stream(streams[0])  # for the arguments; earlier calls may still run
                    with torch.cuda.stream(streams[turn % 2]):
                        if rank == turn % world:
                            torch.cuda._sleep(200_000)  # a late kernel
                        out = getattr(ops, name)(xs[rank], ws[rank], transport=transport)
                        xs[rank].fill_(float("nan"))  # behind the call: who still reads it sees this
                    kept.append((name, turn, out, xs, ws))  # their memory too is nobody else's until the end
        torch.cuda.synchronize()
        for name, turn, out, *_ in kept:
            xs = [rand(1000 * turn + r, m, k, dtype=dtype) for r in range(world)]
            ws = [rand(1000 * turn + 50 + r, n, k, dtype=dtype) / k**0.5 for r in range(world)]
            more = ([[m // world] * world] * world,) if name == "gemm_all_to_all" else ()
            near(f"{name}, turn {turn}", out, getattr(reference, name)(xs, ws, *more)[rank], dtype)
    finally:
        Repeated.__call__, unfused.Repeated.__call__ = real  # type: ignore[method-assign]
    return short[0]


def few_rows(dtype: torch.dtype) -> None:
    """`gemv_all_reduce` with more tiles than programs, and fewer; rows in one step and in several; ragged sizes."""
    group = group_of(None)
    rank, world = group.rank, group.size
    sizes = (1, 9001, 300), (2, 2048, 512), (5, 20000, 257), (17, 33, 1000), (64, 12345, 520)
    for seed, (m, n, k) in enumerate(sizes):
        xs = [rand(seed + 5 * i, m, k, dtype=dtype) for i in range(world)]
        ws = [rand(seed + 50 + i, n, k, dtype=dtype) / k**0.5 for i in range(world)]
        want = reference.gemv_all_reduce(xs, ws)[rank]
        for turn in range(3):
            poison()
            if rank == turn % world:
                time.sleep(0.002)
            got = ops.gemv_all_reduce(xs[rank], ws[rank], transport="store")
            near(f"gemv_all_reduce {m}x{n}x{k} {dtype}", got, want, dtype)


def replays(times: int) -> float:
    """Three operators in one captured graph, replayed with changing inputs; the worst error over all replays."""
    group = group_of(None)
    rank, world = group.rank, group.size
    m, n, k = 64 * world, 256, 128
    dtype = torch.bfloat16
    few, rows, part = (torch.zeros(s, k, dtype=dtype, device="cuda") for s in (16, 64, m))
    w = [(rand(3 + i, n, k, dtype=dtype) / k**0.5) for i in range(world)]
    fresh = [torch.zeros(world, *t.shape, dtype=dtype, device="cuda") for t in (few, rows, part)]
    worst = torch.zeros((), device="cuda", dtype=torch.float64)

    def inputs() -> None:
        for mine, every in zip((few, rows, part), fresh, strict=True):
            mine.copy_(every[rank])

    def run() -> tuple[Any, ...]:
        a = ops.gemv_all_reduce(few, w[rank], transport="store")
        b = ops.all_gather_matmul(rows, w[rank], transport="store")
        c = ops.matmul_reduce_scatter(part, w[rank], transport="store")
        return a, b, c

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    dovetail.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    torch.cuda.synchronize()
    dovetail.barrier()
    gen = torch.Generator(device="cuda").manual_seed(5)  # the same numbers on every rank
    for turn in range(times):
        for every in fresh:
            every.normal_(generator=gen)
        inputs()
        for out in outs:
            out.fill_(float("nan")) if turn % 2 else out.zero_()
        torch.cuda.synchronize()  # what is poisoned here may not come after a peer's store
        dovetail.barrier()
        graph.replay()
        want = (
            sum((fresh[0][i] @ w[i].t()).double() for i in range(world)),
            fresh[1].reshape(-1, k).double() @ w[rank].double().t(),
            sum((fresh[2][i] @ w[i].t()).double() for i in range(world))[rank * 64 : (rank + 1) * 64],
        )
        for out, right in zip(outs, want, strict=True):
            error = (out.double() - right).abs().max() / right.abs().max()
            worst = torch.where(error.isfinite(), torch.maximum(worst, error), torch.full_like(worst, 1e9))
    return float(worst)


def too_many() -> str:
    """A kernel that would fill the GPU is refused before it is launched."""
    from dovetail.ops.gpu.store import Store

    many = torch.cuda.get_device_properties(0).multi_processor_count
    try:
        Store(group_of(None), torch.device("cuda", 0), programs=many // group_of(None).size + 1)
    except NotSupported as error:
        return str(error)
    return "not refused"


def out_of_range() -> list[str]:
    """A row number that a table has not: no wild read, an error on every rank at the next call; the group goes on."""
    group = group_of(None)
    weight = rand(1, 10, 32)
    values = torch.tensor([1, 10_000_000 if group.rank == 0 else 2] * group.size, device="cuda")
    offsets = torch.arange(0, 2 * group.size + 1, 2, device="cuda")
    ops.embedding_all_to_all([weight], values, offsets, transport="store")
    torch.cuda.synchronize()
    dovetail.barrier()
    said = []
    for _ in range(2):
        try:
            out = ops.embedding_all_to_all([weight], values % 10, offsets, transport="store")
            said.append(str(tuple(out.shape)))
        except (IndexError, DovetailError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def late() -> str:
    """A rank that does not come: the others' kernels end, and say so. Breaks the group."""
    group = group_of(None)
    x, w = rand(2, 8, 64), rand(3, 64, 64)
    ops.gemv_all_reduce(x, w, transport="store")
    torch.cuda.synchronize()
    dovetail.barrier()
    group.set_timeout(3)
    try:
        if group.rank == 0:
            torch.cuda._sleep(int(1.7e9) * 6)  # this rank's kernel begins some 6 s late
        out = ops.gemv_all_reduce(x, w, transport="store")
        torch.cuda.synchronize()
        time.sleep(1)
        ops.gemv_all_reduce(x, w, transport="store")
    except (Timeout, DovetailError) as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, {float(out.sum())}"
