"""The fused operators as part of torch: gradients, `opcheck`, `torch.compile`, process groups and meshes, modules.

A gradient is checked as that of a function of all ranks' inputs: both ranks have all of it, `Slice` takes a rank's part
and `Gather` puts results together, so that `gradcheck` sees an ordinary function and is exact.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config

import dovetail
from dovetail import ops as fused
from dovetail.ops import reference
from dovetail.ops.group import ops_group
from tests.ranks import workers
from tests.ranks.ops_cases import OPS, Postponed, embedding, poison_scratch, some, transports


def _gathered(t: torch.Tensor, dim: int) -> torch.Tensor:
    g = workers.world()
    every = torch.empty((g.size, *t.shape), dtype=t.dtype)
    dovetail.all_gather_into_tensor(every, t.contiguous())
    return torch.cat(list(every), dim)


class Slice(torch.autograd.Function):
    """This rank's part of what all ranks have; going back, everybody's gradients."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, dim: int) -> torch.Tensor:
        g = workers.world()
        ctx.dim = dim
        return full.chunk(g.size, dim)[g.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _gathered(grad.to_dense() if grad.is_sparse else grad, ctx.dim), None


class Gather(torch.autograd.Function):
    """All ranks' parts; going back, this rank's."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        return _gathered(part, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        g = workers.world()
        return grad.chunk(g.size, ctx.dim)[g.rank].contiguous(), None


def _full(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


#: Of full inputs x and w: how each is shared, and the result.
SHARED: dict[str, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gemm_all_to_all": (0, 0, lambda y: Gather.apply(y, 0)),
    "gemv_all_reduce": (1, 1, lambda y: y),  # every rank has it, and its gradient
    "all_gather_matmul": (0, 0, lambda y: Gather.apply(y, 1)),
    "matmul_reduce_scatter": (1, 1, lambda y: Gather.apply(y, 0)),
}


@pytest.mark.parametrize("op", SHARED)
@pytest.mark.parametrize("world", [2])
def test_gradcheck(pools: Any, world: int, op: str) -> None:
    def job() -> None:
        of_x, of_w, whole = SHARED[op]
        for transport in transports(op):

            def call(x: torch.Tensor, w: torch.Tensor, transport: str = transport) -> torch.Tensor:
                return whole(getattr(fused, op)(Slice.apply(x, of_x), Slice.apply(w, of_w), transport=transport))

            assert torch.autograd.gradcheck(call, (_full(4, 4), _full(2, 4)))
            for frozen in range(2) if transport == "auto" else ():  # one gradient that nobody asks for
                inputs = [_full(4, 4), _full(2, 4)]
                inputs[frozen].requires_grad_(False)
                assert torch.autograd.gradcheck(call, tuple(inputs))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_gradcheck_uneven(pools: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        sends = [[0, 2], [3, 1]]
        receive = [s[g.rank] for s in sends]

        def call(x0: torch.Tensor, x1: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            # `Slice` of equal parts does not fit: every rank has both, and gives none of the other's.
            mine = Own.apply((x0, x1)[g.rank], (x0, x1)[1 - g.rank])
            y = fused.gemm_all_to_all(mine, Slice.apply(w, 0), receive, sends[g.rank])
            return Gather.apply(torch.nn.functional.pad(y, (0, 0, 0, 3 - y.shape[0])), 0)

        assert torch.autograd.gradcheck(call, (_full(2, 3), _full(4, 3), _full(4, 3)))

    class Own(torch.autograd.Function):
        """The first of two tensors; going back, each rank gets the gradient of what the other one owns."""

        @staticmethod
        def forward(ctx: Any, mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            ctx.rows = mine.shape[0], other.shape[0]
            return mine.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            most = max(ctx.rows)
            every = _gathered(torch.nn.functional.pad(grad, (0, 0, 0, most - grad.shape[0])), 0)
            theirs = every.view(2, most, -1)[1 - workers.world().rank]
            return grad.clone(), theirs[: ctx.rows[1]].clone()

    pools.get(world).run(job)


@pytest.mark.parametrize("transport", ["unfused", "store", "dma"])
@pytest.mark.parametrize("world", [2])
def test_gradcheck_embedding(pools: Any, world: int, transport: str) -> None:
    """Tables and weights of the values; rows that are looked up twice, or never; an empty bag."""

    def job() -> None:
        g = workers.world()
        values = [torch.tensor([0, 2, 2, 1, 0, 1, 1]), torch.tensor([3, 3, 0, 1, 2, 2, 3])][g.rank]
        lengths = torch.tensor([2, 1, 0, 2, 1, 0, 0, 1])  # two tables, four samples

        def call(mode: str, tables: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
            two = Slice.apply(tables, 0).unbind(0)
            mine = None if scales is None else Slice.apply(scales, 0)[0]
            out = fused.embedding_all_to_all(
                list(two), values, lengths=lengths, mode=mode, per_sample_weights=mine, transport=transport
            )
            return Gather.apply(out, 0)

        if transport != "dma":
            assert torch.autograd.gradcheck(lambda t: call("mean", t), (_full(4, 4, 2),))
        if transport != "unfused":
            assert torch.autograd.gradcheck(lambda t, s: call("sum", t, s), (_full(4, 4, 2), _full(2, 7)))

    pools.get(world).run(job)


def _loss(out: torch.Tensor, rank: int) -> torch.Tensor:
    """Its gradient differs in every place."""
    return (out * (torch.arange(out.numel(), dtype=out.dtype).view_as(out) + rank) / 7).sum()


def _step(problem: Any, more: dict[str, Any], tables: list[torch.Tensor]) -> None:
    """Forward and backward."""
    g = workers.world()
    _, values = problem.arguments[g.rank]
    _loss(fused.embedding_all_to_all(tables, values, **problem.keywords[g.rank], **more), g.rank).backward()


def _dense(problem: Any, tables: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Dense gradients of all ranks' tables, by torch over all ranks' arguments."""
    values = [v.to(torch.int64) for _, v in problem.arguments]
    bags = [k["offsets"].to(torch.int64) for k in problem.keywords]
    scales = [k.get("per_sample_weights") for k in problem.keywords]
    full = [[t.detach().clone().requires_grad_() for t in of_rank] for of_rank in tables]
    outs = reference.embedding_all_to_all(
        full, values, bags, mode=problem.keywords[0]["mode"], per_sample_weights=None if scales[0] is None else scales
    )
    sum(_loss(out, r) for r, out in enumerate(outs)).backward()  # type: ignore[union-attr]
    return [[torch.zeros_like(t) if t.grad is None else t.grad for t in of_rank] for of_rank in full]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sparse_gradients(pools: Any, world: int) -> None:
    """Equal to torch's dense ones; repeated rows add up."""

    def job() -> None:
        g = workers.world()
        for seed, (mode, scaled) in enumerate([("sum", False), ("mean", False), ("sum", True)] * 2):
            numbers_of = (torch.int64, torch.int32)[seed % 2]
            problem = embedding(world, 4, 5, torch.float64, seed, mode=mode, scaled=scaled, numbers_of=numbers_of)
            tables = [t.clone().requires_grad_() for t in problem.arguments[g.rank][0]]
            _step(problem, {}, tables)
            want = _dense(problem, [a[0] for a in problem.arguments])[g.rank]
            for table, dense in zip(tables, want, strict=True):
                assert table.grad is not None
                assert table.grad.is_sparse
                torch.testing.assert_close(table.grad.to_dense(), dense)

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [1, 2])
def test_in_place_optimizers(pools: Any, world: int) -> None:
    """SGD as torch.optim.SGD, row-wise Adagrad as written out here, over several steps with repeated rows."""

    def job() -> None:
        g = workers.world()
        for optimizer, scaled in itertools.product(("sgd", "rowwise_adagrad"), (False, True)):
            problem = embedding(world, 6, 5, torch.float32, 3, scaled=scaled, exact=False)
            every = [[torch.nn.Parameter(t.clone()) for t in a[0]] for a in problem.arguments]
            moments = [[torch.zeros(t.shape[0]) for t in of_rank] for of_rank in every]
            tables = [t.detach().clone().requires_grad_() for t in every[g.rank]]
            state = [torch.zeros(t.shape[0]) for t in tables if optimizer == "rowwise_adagrad"]
            for _ in range(3):
                grads = _dense(problem, every)
                for r, t in ((r, t) for r, of_rank in enumerate(every) for t in range(len(of_rank))):
                    want, grad = every[r][t], grads[r][t]
                    if optimizer == "sgd":
                        want.grad = grad
                        torch.optim.SGD([want], lr=0.05).step()
                    else:
                        moments[r][t] += grad.square().mean(1)
                        want.data -= 0.05 * grad / (moments[r][t].sqrt() + 1e-6)[:, None]
                _step(problem, {"optimizer": optimizer, "state": state, "lr": 0.05, "eps": 1e-6}, tables)
                assert all(t.grad is None for t in tables)
                torch.testing.assert_close([t.data for t in tables], [t.data for t in every[g.rank]])
                torch.testing.assert_close(state, moments[g.rank] if state else [])

    pools.get(world).run(job)


@pytest.mark.parametrize("optimizer", ["", "sgd", "rowwise_adagrad"])
@pytest.mark.parametrize("world", [2])
def test_no_gradient_as_large_as_a_table(pools: Any, world: int, optimizer: str) -> None:
    """Tables of 4 MB; whatever backward makes is far smaller, in torch's count of memory too."""

    def job() -> int:
        rows, dim = 1 << 16, 16
        table = torch.randn(rows, dim).requires_grad_()
        state = [torch.zeros(rows)] if optimizer == "rowwise_adagrad" else []
        values = torch.randint(0, rows, (32,))
        out = fused.embedding_all_to_all([table], values, torch.arange(33), optimizer=optimizer, state=state)
        with torch.profiler.profile(profile_memory=True) as profile:
            out.sum().backward()
        sizes = [e.cpu_memory_usage for e in profile.events()]
        assert (table.grad is None) == bool(optimizer)
        return max(sizes)

    for most in pools.get(world).run(job):
        assert 0 < most < 1 << 20


@pytest.mark.parametrize("removed", [False, True], ids=["waits", "removed"])
@pytest.mark.parametrize("world", [2])
def test_gradients_wait_until_peers_have_read(pools: Any, world: int, removed: bool) -> None:
    """Rank 0 goes on and writes its gradient's memory while rank 1 still has to read it."""

    def job() -> bool:
        g = workers.world()
        grad = torch.full((4, 2, 8), 1.0 + g.rank)
        exchange = fused.library.backward.exchange
        exchange(g, grad, 1)
        poison_scratch(g)
        if g.rank == 1:
            copied = torch.Tensor.copy_

            def late(self: torch.Tensor, *args: Any) -> torch.Tensor:
                if self.shape == (1, 4, 8):
                    time.sleep(0.03)
                return copied(self, *args)

            with mock.patch.object(torch.Tensor, "copy_", late):
                found = exchange(g, grad, 1)
            return bool((found[0, :4] == 1).all())
        if not removed:
            exchange(g, grad, 1)
            return True
        with Postponed(g):
            exchange(g, grad, 1)
            for t in ops_group(g)._scratch.values():
                workers.poison(t)
        return True

    assert pools.get(world).run(job) == [True, not removed]


# --- torch.ops -------------------------------------------------------------------------------------------------------


def _operator(op: str) -> Any:
    """By a function of the module: torch.ops itself can't be sent to a rank."""
    return getattr(torch.ops.dovetail, op).default


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2])
def test_opcheck(pools: Any, world: int, op: str) -> None:
    def job() -> None:
        g = workers.world()
        name = fused.name_of(g)
        operator = _operator(op)
        if op == "embedding_all_to_all":
            problem = embedding(world, 2, 3, torch.float32, 1)
            tables, values = problem.arguments[g.rank]
            total = problem.want[0].shape[1]
            offsets = problem.keywords[g.rank]["offsets"]
            for grad in (False, True):
                tables = [t.clone().requires_grad_(grad) for t in tables]
                args = (tables, values, offsets, None, "sum", total, [], "sgd", 0.1, 1e-8, name, "auto")
                checks = ("test_schema", "test_faketensor", *(("test_autograd_registration",) if grad else ()))
                torch.library.opcheck(operator, args, test_utils=checks)
            return
        x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
        for splits in ((None, None), ([1, 3], [1, 3])) if op == "gemm_all_to_all" else ((),):
            given = splits if g.rank == 0 or not splits or splits[0] is None else ([3, 1], [3, 1])
            torch.library.opcheck(operator, (x, w, *given, name, "auto"))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_compiled(pools: Any, world: int) -> None:
    """One graph, forward and backward, with shapes that change; values and gradients of eager mode."""

    def job() -> None:
        g = workers.world()
        torch._dynamo.reset()

        def model(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            y = fused.all_gather_matmul(x.relu(), w)  # [2m, 6]
            y = fused.gemm_all_to_all(y * 2, v)  # [2m, 4]
            u = v.t()[:4].contiguous()
            return fused.matmul_reduce_scatter(y, u) + fused.gemv_all_reduce(y[: x.shape[0]], u)

        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
        for seed, rows in enumerate((4, 6)):
            made = torch.Generator().manual_seed(10 * seed + g.rank)
            x, w, v = (torch.randn(s, generator=made) for s in ((rows, 3), (6, 3), (4, 6)))
            both = []
            for call in (model, compiled):
                leaves = [t.clone().requires_grad_() for t in (x, w, v)]
                out = call(*leaves)
                out.square().sum().backward()
                both.append([out.detach(), *(t.grad for t in leaves)])
            torch.testing.assert_close(both[1], both[0])

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_inductor(pools: Any, world: int) -> None:
    """torch's own compiler takes it; what comes before and after is its code."""
    if not shutil.which("g++"):
        pytest.skip("needs a C++ compiler")

    pools.get(world).run(_by_inductor)


def _by_inductor() -> None:
    g = workers.world()
    torch._dynamo.reset()
    x, w = torch.full((2, 3), 1.0 + g.rank), torch.ones(4, 3, requires_grad=True)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return fused.gemv_all_reduce(x * 2, w).relu() + 1

    with torch._inductor.config.patch(compile_threads=1):
        out = torch.compile(model, fullgraph=True)(x, w)
        out.sum().backward()
    assert workers.same(out, torch.full((2, 4), 19.0))
    assert w.grad is not None
    assert workers.same(w.grad, torch.full((4, 3), 4.0 + 4 * g.rank))


@pytest.mark.parametrize("world", [2])
def test_compiled_embedding(pools: Any, world: int) -> None:
    """With the tables updated in place inside the graph's backward."""

    def job() -> None:
        g = workers.world()
        torch._dynamo.reset()
        torch.manual_seed(g.rank)
        modules = [fused.EmbeddingAllToAll([7, 9], 4, optimizer="rowwise_adagrad", lr=0.1) for _ in range(2)]
        modules[1].load_state_dict(modules[0].state_dict())
        compiled = torch.compile(modules[1], fullgraph=True, backend="aot_eager", dynamic=True)
        for batch in (4, 6, 4):
            lengths = torch.randint(0, 4, (2 * batch,))
            values = torch.randint(0, 7, (int(lengths.sum()),))
            outs = [call(values, lengths=lengths) for call in (modules[0], compiled)]
            torch.testing.assert_close(outs[1], outs[0])
            for out in outs:
                out.square().sum().backward()
        for a, b in zip(modules[0].state_dict().values(), modules[1].state_dict().values(), strict=True):
            torch.testing.assert_close(b, a)

    pools.get(world).run(job)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_groups_of_torch(spare_pool: Any, tmp_path: Any) -> None:
    """A `ProcessGroup`, a `DeviceMesh` and a `Group` of two of three ranks."""
    pool = spare_pool(3)
    store = f"file://{tmp_path}/store"

    def job() -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        g = workers.world()
        dist.init_process_group("gloo", init_method=store, rank=g.rank, world_size=g.size)
        mesh = init_device_mesh("cpu", (3,))
        pair, ours = dist.new_group([0, 2]), g.world.new_group([0, 2]) if g.rank != 1 else None
        for group, members in ((dist.group.WORLD, 3), (mesh, 3), (pair, 2), (ours, 2)):
            if members == 2 and g.rank == 1:
                continue
            rank = g.rank if members == 3 else g.rank // 2
            for op in OPS:
                problem = some(op, members, 4)
                more = problem.keywords[rank] if problem.keywords else {}
                found = getattr(fused, op)(*problem.arguments[rank], **more, group=group)
                assert workers.same(found + 0.0, problem.want[rank] + 0.0), (op, members)
            x = torch.ones(2, 3, requires_grad=True)
            w = torch.full((4, 3), 1.0 + rank, requires_grad=True)
            fused.matmul_reduce_scatter(torch.cat([x] * members), w, group=group).sum().backward()
            assert x.grad is not None
            assert x.grad[0, 0] == 4 * members * (1.0 + rank)
        dist.destroy_process_group()

    pool.run(job)


@pytest.mark.parametrize("world", [3])
def test_two_of_three(pools: Any, world: int) -> None:
    """A group's ranks are not the world's; the other rank takes no part."""

    def job() -> None:
        w = workers.world().world
        if w.rank != 1:
            pair = dovetail.new_group([2, 0])
            for seed, op in enumerate(OPS):
                for transport in transports(op):
                    problem = some(op, 2, seed)
                    assert problem.is_right(pair, problem.run(pair, transport)), (op, transport)
        dovetail.barrier()

    pools.get(world).run(job)


# --- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2])
def test_modules(pools: Any, world: int) -> None:
    """Each gives what its operator gives, in the shapes that a model has; a bias is added once."""

    def job() -> None:
        g = workers.world()
        torch.manual_seed(g.rank)
        row = fused.RowParallelLinear(8, 5, bias=True)
        assert row.weight.shape == (5, 4)
        torch.nn.init.constant_(row.bias, 2.0)
        x = torch.randn(2, 3, 4)
        y = row(x)
        xs, ws = _gathered(x.reshape(6, 4), 1), _gathered(row.weight.detach(), 1)
        torch.testing.assert_close(y, (xs @ ws.t() + 2).view(2, 3, 5))
        y.sum().backward()
        torch.testing.assert_close(row.weight.grad, x.reshape(6, 4).sum(0).expand(5, 4))
        with pytest.raises(ValueError, match="in_features 7 can't be shared equally by 2 ranks"):
            fused.RowParallelLinear(7, 5)

        expert = fused.ExpertParallelLinear(4, 3, dtype=torch.float64)
        sends = [[1, 2], [3, 0]]
        mine = torch.randn(3, 4, dtype=torch.float64)
        found = expert(mine, [s[g.rank] for s in sends], torch.tensor(sends[g.rank]))
        every = (_gathered(mine, 0).view(2, 3, 4) @ _gathered(expert.weight.detach(), 0).view(2, 3, 4).transpose(1, 2))
        want = [torch.cat([every[0][:1], every[1]]), every[0][1:]]
        torch.testing.assert_close(found, want[g.rank])

        bags = fused.EmbeddingAllToAll([4] * (1 + g.rank), 6, mode="mean")
        assert bags.num_tables == 3
        values = torch.arange(4).repeat(1 + g.rank)
        out = bags(values, torch.arange(4 * (1 + g.rank) + 1))
        assert out.shape == (2, 3, 6)
        first = 0 if g.rank == 0 else 1
        assert workers.same(out[:, first], bags.weights[0][2 * g.rank : 2 * g.rank + 2])

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_state_dict(pools: Any, world: int) -> None:
    """Tables and the optimizer's state go out and in; training goes on where it was."""

    def job() -> None:
        g = workers.world()
        torch.manual_seed(5 + g.rank)
        first, second = (fused.EmbeddingAllToAll([6, 5], 3, optimizer="rowwise_adagrad", lr=0.1) for _ in range(2))
        values, lengths = torch.randint(0, 5, (8,)), torch.ones(8, dtype=torch.int64)

        def step(module: torch.nn.Module) -> torch.Tensor:
            out = module(values, lengths=lengths)
            out.square().sum().backward()
            return out.detach()  # type: ignore[no-any-return]

        step(first)
        saved = first.state_dict()
        assert sorted(saved) == ["state_0", "state_1", "weights.0", "weights.1"]
        second.load_state_dict(saved)
        for _ in range(2):
            assert workers.same(step(first), step(second))
        assert all(workers.same(a, b) for a, b in zip(first.state, second.state, strict=True))

    pools.get(world).run(job)


# --- what was chosen, and what was told ------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2])
def test_explained_and_counted(pools: Any, world: int) -> None:
    def job() -> None:
        g = workers.world()
        x, w = torch.ones(4, 3), torch.ones(2, 3)

        def calls(operator: str, transport: str) -> int:
            rows = dovetail.stats()["operators"]
            return sum(r["calls"] for r in rows if (r["operator"], r["transport"]) == (operator, transport))

        choice = fused.explain("gemm_all_to_all", x, w)
        assert choice.transport == "store"
        assert "not measured here" in choice.reason
        before = calls("gemm_all_to_all", "store"), calls("gemm_all_to_all", "unfused")
        fused.gemm_all_to_all(x, w)
        fused.gemm_all_to_all(x.requires_grad_(), w, transport="unfused")
        after = calls("gemm_all_to_all", "store"), calls("gemm_all_to_all", "unfused")
        assert after == (before[0] + 1, before[1] + 1)
        if g.rank == 0:  # others take no part
            assert fused.explain("gemv_all_reduce", x, w, transport="decomposed") == ("decomposed", "asked for")
            assert fused.explain("gemm_all_to_all", x, w, [2, 2], input_splits=[1, 3]).transport == "store"
            one = [torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1, 1])]
            assert fused.explain("embedding_all_to_all", [w], *one).transport == "store"
            assert fused.explain("embedding_all_to_all", [w], one[0], lengths=torch.tensor([1, 0])).transport == "store"
            with pytest.raises(TypeError, match="gemv_all_reduce takes x and w, of which 1 came"):
                fused.explain("gemv_all_reduce", torch.zeros(2, 4))
            with pytest.raises(ValueError, match="there are the operators gemm_all_to_all, gemv.* not 'gemm'"):
                fused.explain("gemm", x, w)

    pools.get(world).run(job)


def test_disabled_and_forced(spare_pool: Any) -> None:
    """DOVETAIL_DISABLE and DOVETAIL_TRANSPORT, those of rank 0; an operator that lacks the transport goes its way."""

    def job() -> list[tuple[str, str]]:
        g = workers.world()
        found = []
        for seed, op in enumerate(("gemm_all_to_all", "gemv_all_reduce")):
            problem = some(op, 2, 3 + seed)
            assert problem.is_right(g, problem.run(g))
            found.append(tuple(fused.explain(op, *problem.arguments[g.rank])))
        return found  # type: ignore[return-value]

    assert spare_pool(2, {"DOVETAIL_DISABLE": "1"}).run(job) == [[("unfused", "DOVETAIL_DISABLE")] * 2] * 2
    forced = spare_pool(2, {"DOVETAIL_TRANSPORT": "dma"}).run(job)
    assert forced[0] == forced[1]
    assert forced[0][0] == ("dma", "DOVETAIL_TRANSPORT")
    assert forced[0][1][0] == "store"


def _told(transport: str) -> tuple[str, str]:
    dovetail.finalize()
    os.environ["DOVETAIL_TRANSPORT"] = transport if int(os.environ["DOVETAIL_RANK"]) == 0 else "decomposed"
    g = workers.world()
    problem = some("gemm_all_to_all", 2, 3)
    assert problem.is_right(g, problem.run(g))
    choice = fused.explain("gemm_all_to_all", *problem.arguments[g.rank])
    return choice.transport, choice.reason


def test_ranks_were_told_different_transports(forked: None) -> None:
    """That of rank 0 holds."""
    assert dovetail.launch(_told, ranks=2, args=("unfused",)) == [("unfused", "DOVETAIL_TRANSPORT")] * 2


def test_a_mean_of_a_long_bag(pools: Any) -> None:
    """The length of a bag need not fit into the dtype: 70000 is infinite in fp16."""

    def job() -> float:
        weight = torch.zeros(4, 2, dtype=torch.float16, requires_grad=True)
        world = workers.world().size
        values = torch.zeros(70_000 * world, dtype=torch.int64)
        offsets = torch.arange(world + 1) * 70_000
        out = fused.embedding_all_to_all([weight], values, offsets, mode="mean")
        out.sum().backward()
        return float(weight.grad._values().float().min())

    for found in pools.get(2).run(job):
        assert found == pytest.approx(1 / 70_000, rel=0.05)  # what fp16 has near it


def test_an_optimizer_needs_a_gradient(pools: Any) -> None:
    """Tables that require none would never be updated, and nobody would be told."""

    def job() -> None:
        offsets = torch.arange(workers.world().size + 1)
        with pytest.raises(ValueError, match="none of them requires one"):
            fused.embedding_all_to_all([torch.zeros(4, 2)], torch.zeros(2, dtype=torch.int64), offsets, optimizer="sgd")

    pools.get(2).run(job)
