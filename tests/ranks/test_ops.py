"""Every fused operator on every transport of the CPU gives what plain torch computes, on real processes.

Data differ per rank and call. Memory is poisoned with NaN before it is used again; peers are delayed before and inside
their computation; and each wait, once removed, is seen to be needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import dovetail
from dovetail import ops as fused
from dovetail.errors import MismatchError
from dovetail.hw.cpu import native
from dovetail.ops.cpu import dma, repeated, store
from dovetail.ops.cpu import product as products
from dovetail.ops.group import OpsGroup, ops_group
from tests.ranks import workers
from tests.ranks.ops_cases import (
    DTYPES,
    OPS,
    PRODUCTS,
    Postponed,
    Problem,
    delays,
    embedding,
    forget,
    poison_scratch,
    poisoned_memory,
    product,
    slow,
    some,
    step_by_step,
    transports,
    two_meetings,
    uneven,
)

WORLDS = (1, 2, 3, 4)

#: Rows of a rank (times ranks where they are shared), n, k: none of each, one, ragged, and what takes every branch:
#: a product per destination from 48 rows on, a result added up by owners above 32 KB, several slices from 512 KB on.
SHAPES = {
    "gemm_all_to_all": ((0, 5, 3), (1, 1, 1), (3, 7, 0), (5, 33, 17), (50, 33, 17), (70, 2100, 2)),
    "matmul_reduce_scatter": ((0, 5, 3), (1, 1, 1), (3, 7, 0), (5, 33, 17), (50, 33, 17), (70, 2100, 2)),
    "all_gather_matmul": ((0, 5, 3), (1, 1, 1), (3, 7, 0), (5, 33, 17), (50, 33, 17), (5, 0, 4)),
    "gemv_all_reduce": ((0, 5, 3), (1, 1, 1), (3, 7, 0), (64, 3, 9), (5, 1001, 17), (63, 701, 5)),
}


def _checked(problem: Problem, transport: str) -> torch.Tensor:
    """Runs it in poisoned memory and compares; what is returned may be poisoned by the caller."""
    g = workers.world()
    found = problem.run(g, transport)
    assert problem.is_right(g, found), (problem.op, transport, g.rank, found, problem.want[g.rank])
    return found


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("world", WORLDS)
def test_products(pools: Any, world: int, op: str) -> None:
    def job() -> None:
        shared = op in ("gemm_all_to_all", "matmul_reduce_scatter")
        with poisoned_memory():
            for seed, (shape, transport) in enumerate(itertools.product(SHAPES[op], transports(op))):
                m, n, k = shape
                dtype = DTYPES[seed % 4] if n < 2000 else torch.float32
                for again in range(2):  # into the block that the first left, and poisoned
                    problem = product(op, world, (m * world if shared else m, n, k), dtype, seed + 100 * again)
                    workers.poison(_checked(problem, transport))
                    poison_scratch(workers.world())

    pools.get(world).run(job)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_dtype(pools: Any, world: int, op: str) -> None:
    """Random numbers, within what the dtype allows; where all ranks get one result, with the same bits."""

    def job() -> list[bytes]:
        found = []
        for seed, (dtype, transport) in enumerate(itertools.product(DTYPES, transports(op))):
            if op == "embedding_all_to_all":
                problem = embedding(world, 3, 20, dtype, seed, exact=False, scaled=dtype.itemsize > 2)
            else:
                m, n = (9, 2001) if op == "gemv_all_reduce" else (4 * world, 30)
                problem = product(op, world, (m, n, 21), dtype, seed, exact=False)
            out = _checked(problem, transport)
            found.append(bytes(workers.bits(out).numpy().tobytes()))
            workers.poison(out)
        return found

    results = pools.get(world).run(job)
    if op == "gemv_all_reduce":
        assert all(r == results[0] for r in results), "ranks differ in their bits"


@pytest.mark.parametrize("world", WORLDS)
def test_sums_are_rounded_once(pools: Any, world: int) -> None:
    """Partial products in bf16, added up in the order of ranks in fp32: large terms that cancel show another order."""

    def job() -> None:
        g = workers.world()
        rows = [[1.0], [256.0], [-256.0], [3.0]][:world]  # 1 + 256 is 256 in bf16
        xs = [torch.tensor([row], dtype=torch.bfloat16) for row in rows]
        for op, n in itertools.product(("gemv_all_reduce", "matmul_reduce_scatter"), (1, 40_000)):
            m = g.size if op == "matmul_reduce_scatter" else 1
            want = torch.full((1, n), sum(r[0] for r in rows)).bfloat16()
            for transport in transports(op):
                x, w = xs[g.rank].expand(m, 1), torch.ones(n, 1, dtype=torch.bfloat16)
                assert workers.same(getattr(fused, op)(x, w, transport=transport), want), (op, transport)

    pools.get(world).run(job)


@pytest.mark.parametrize("world", WORLDS)
def test_uneven_splits(pools: Any, world: int) -> None:
    """Zeros among them, ranks that send or receive nothing, splits as a tensor."""

    def job() -> None:
        with poisoned_memory():
            for seed, transport in itertools.product(range(9), transports("gemm_all_to_all")):
                sends = uneven(world, seed, most=70 if seed > 6 else 9)
                problem = product("gemm_all_to_all", world, (0, 11, 6), DTYPES[seed % 4], seed, sends=sends)
                if seed % 2:
                    problem.arguments = [
                        (x, w, torch.tensor(receive), torch.tensor(send, dtype=torch.int32))
                        for x, w, receive, send in problem.arguments
                    ]
                workers.poison(_checked(problem, transport))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 3])
def test_few_uneven_rows_take_one_meeting(pools: Any, world: int) -> None:
    """Other splits each time, ranks late; two where a rank has too many rows, and one again behind that."""

    def job() -> list[list[int]]:
        g, most = workers.world(), store.COPIED_BYTES
        met: list[list[int]] = [[], [], []]
        barriers = mock.patch.object(OpsGroup, "barrier", autospec=True, side_effect=OpsGroup.barrier)
        with poisoned_memory(), barriers as counted:
            for seed in range(24):
                sends = uneven(world, seed) if seed % 4 else [[5] * world, *[[1] * world] * (world - 1)]
                kind = seed // 8
                before = ops_group(g).meetings + counted.call_count
                with mock.patch.object(store, "COPIED_BYTES", 4 * world * 9 * 4 if kind == 1 else most):
                    problem = product("gemm_all_to_all", world, (0, 9, 5), torch.float32, seed, sends=sends)
                    with slow(functools.partial(float, 0.01 * ((seed + g.rank) % 3 == 0))):
                        workers.poison(_checked(problem, "store"))
                met[kind].append(ops_group(g).meetings + counted.call_count - before)
                poison_scratch(g)
        return met

    found = pools.get(world).run(job)
    assert all(met == found[0] for met in found)
    first, mixed, again = found[0]
    assert first[0] in (1, 2)  # a stage may be there from other calls
    assert first[2:] + again == [1] * (len(first) - 2 + len(again))
    assert max(mixed) == 3  # two exchanges and the wait for what was written
    assert set(mixed) <= {1, 2, 3}


def test_other_splits_of_the_same_rows(pools: Any) -> None:
    """A shape that was run before: right with any splits, and wrong ones are refused as they were the first time."""

    def job() -> None:
        g = workers.world()
        for seed, (a, b) in enumerate([(3, 5), (8, 2), (0, 4), (8, 8), (5, 1), (3, 5)]):
            problem = product("gemm_all_to_all", 2, (0, 7, 3), torch.float32, seed, sends=[[a, 8 - a], [b, 8 - b]])
            _checked(problem, "store")
        x, w, receive, send = problem.arguments[g.rank]
        for wrong in ([9, -1], [3, 4], [8.0, 0], [8], "80"):
            error = ValueError if g.rank == 0 else MismatchError
            with pytest.raises((error, TypeError) if g.rank == 0 else error):
                fused.gemm_all_to_all(x, w, receive, wrong if g.rank == 0 else send, transport="store")
        with pytest.raises(MismatchError, match="sends 4 rows to rank"):
            fused.gemm_all_to_all(x, w, receive, [4, 4], transport="store")
        assert workers.same(fused.gemm_all_to_all(x, w, receive, send, transport="store"), problem.want[g.rank])

    pools.get(2).run(job)


@pytest.mark.parametrize("world", WORLDS)
def test_embedding(pools: Any, world: int) -> None:
    """Ranks with 1 to 3 tables, empty bags, both kinds of numbers, offsets and lengths, sum, mean, weights."""

    def job() -> None:
        kinds = [("sum", False), ("mean", False), ("sum", True)]
        cases = itertools.product(kinds, (torch.int64, torch.int32), (False, True))
        with poisoned_memory():
            for seed, ((mode, scaled), numbers_of, by_lengths) in enumerate(cases):
                local, dim = ((0, 4), (1, 1), (5, 3), (7, 130))[seed % 4]
                bits = {}
                for transport in transports("embedding_all_to_all"):
                    problem = embedding(
                        world, local, dim, DTYPES[seed % 4 if mode == "sum" else seed % 2], seed, mode=mode,
                        scaled=scaled, numbers_of=numbers_of, by_lengths=by_lengths,
                    )  # fmt: skip
                    out = _checked(problem, transport)
                    bits[transport] = bytes(workers.bits(out).numpy().tobytes())
                    workers.poison(out)
                assert bits["store"] == bits["dma"]  # the same code pools for both

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_embedding_in_slices(pools: Any, world: int) -> None:
    """Pieces that are sent slice by slice, and bags that two threads share."""

    def job() -> None:
        torch.set_num_threads(2)
        try:
            for seed, transport in enumerate(transports("embedding_all_to_all") * 2):
                problem = embedding(world, 600, 130, torch.float32, seed, most=12)
                workers.poison(_checked(problem, transport))
        finally:
            torch.set_num_threads(1)

    pools.get(world).run(job)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 3])
def test_many_calls(pools: Any, world: int, op: str) -> None:
    """Shapes, data and transports change from call to call; ranks are late at random; earlier results stay."""

    def job() -> None:
        g = workers.world()
        draw = random.Random(g.rank)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []
        some(op, world, 0).run(g)
        with delays(g, 100), slow(lambda: draw.choice((0, 0, 0.002))):
            for seed in range(40):
                problem = some(op, world, seed, DTYPES[seed % 4])
                time.sleep(draw.choice((0, 0, 0.003)))
                out = _checked(problem, transports(op)[seed % len(transports(op))])
                held.append((out, out.clone()))
                if len(held) > 6:
                    workers.poison(held.pop(draw.randrange(3))[0])
        assert all(workers.same(out, copy) for out, copy in held)

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [3])
def test_operators_take_turns(pools: Any, world: int) -> None:
    """They share scratch and blocks, also with collectives in between; a view keeps its block."""

    def job() -> None:
        g = workers.world()
        draw, views = random.Random(1), []
        for seed in range(60):
            op = draw.choice(OPS)
            out = _checked(some(op, world, seed), draw.choice(transports(op)))
            if out.numel():
                views.append((out[-1:], out[-1:].clone()))
            if seed % 7 == 0:
                workers.all_reduce("auto", "mixed", 100, torch.float32, "sum", seed)
            if len(views) > 9:
                views.pop(0)
            assert all(workers.same(a, b) for a, b in views), (seed, op, g.rank)

    pools.get(world).run(job)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2])
def test_a_rank_goes_on_at_once(pools: Any, world: int, op: str) -> None:
    """Rank 1 has its result and ends, or gives its memory back, while rank 0 is still at work on its own."""

    def job() -> None:
        g = workers.world()
        add_up = store.add_up

        def late(*args: Any) -> None:
            time.sleep(0.03)
            add_up(*args)

        small = some(op, 2, 5) if op not in PRODUCTS else product(op, 2, (2, 9, 5), torch.float32, 5)
        for problem in (_prepared(op, 2), small):
            problem.run(g, "store")
            with mock.patch.object(store, "add_up", late if g.rank == 0 else add_up):
                found = problem.run(g, "store")
            if g.rank == 1:
                mine = ops_group(g)
                for t in (*mine._scratch.values(), *([] if mine._stage is None else [mine._stage])):
                    workers.poison(t)
            assert problem.is_right(g, found)
            dovetail.barrier()

    pools.get(world).run(job)


# --- removed waits ---------------------------------------------------------------------------------------------------


def _prepared(op: str, seed: int) -> Problem:
    """Large enough for every wait: all ranks write to all others, and a result has an owner per part."""
    if op == "embedding_all_to_all":
        return embedding(2, 4, 40, torch.float32, seed)
    m, n = (60, 200) if op == "gemv_all_reduce" else (100, 20)
    return product(op, 2, (m, n, 8), torch.float32, seed)


#: Operators whose last wait is for what peers write here.
WRITTEN = tuple(op for op in OPS if op != "all_gather_matmul")


@pytest.mark.parametrize("removed", [False, True], ids=["waits", "removed"])
@pytest.mark.parametrize("op", [*WRITTEN, "small gemv_all_reduce"])
@pytest.mark.parametrize("world", [2])
def test_wait_for_what_peers_write(pools: Any, world: int, op: str, removed: bool) -> None:
    """Rank 0 does not wait for the late rank 1: its result is wrong. With the wait, the same delay does no harm."""

    def body() -> bool:
        g = workers.world()
        named, small = op.removeprefix("small "), op.startswith("small")
        problems = [product(named, 2, (2, 9, 5), torch.float32, s) if small else _prepared(named, s) for s in (1, 2)]
        workers.poison(_checked(problems[0], "store"))
        poison_scratch(g)
        if g.rank == 1:
            with slow(lambda: 0.05), _late_sends():
                problems[1].run(g, "store")
            return True
        if not removed:
            return problems[1].is_right(g, problems[1].run(g, "store"))
        with Postponed(g):
            return problems[1].is_right(g, problems[1].run(g, "store"))

    def job() -> bool:
        with two_meetings(workers.world()), _owners(op == "gemv_all_reduce"):
            return body()

    assert pools.get(world).run(job) == [not removed, True]


@contextlib.contextmanager
def _owners(wanted: bool = True) -> Iterator[None]:
    """Each column of a `gemv_all_reduce` is added up by the rank that owns it, however small the result."""
    with mock.patch.object(store, "ONESHOT_BYTES", 0 if wanted else store.ONESHOT_BYTES):
        yield


@pytest.mark.parametrize("world", [2, 3, 4])
def test_columns_with_owners(pools: Any, world: int) -> None:
    """What a large `gemv_all_reduce` does, with ranks that come late and memory that is poisoned."""

    def job() -> list[int]:
        g, wrong = workers.world(), []
        with step_by_step(g), _owners():
            for seed, (m, n) in enumerate(((1, 4), (6, 9), (5, 40), (64, 33), (6, 9))):
                poison_scratch(g)
                problem = product("gemv_all_reduce", g.size, (m, n, 7), torch.bfloat16, seed)
                with slow(functools.partial(float, 0.01 * ((seed + g.rank) % 2))), poisoned_memory():
                    found = problem.run(g, "store")
                if not problem.is_right(g, found):
                    wrong.append(seed)
        return wrong

    assert pools.get(world).run(job) == [[]] * world


#: Operators that send to stages which peers have posted before.
PUSHED = (
    "gemv_all_reduce", "gemm_all_to_all", "all_gather_matmul", "matmul_reduce_scatter", "embedding_all_to_all"
)  # fmt: skip


@pytest.mark.parametrize("removed", [False, True], ids=["waits", "removed"])
@pytest.mark.parametrize("op", [*PUSHED, "uneven"])
@pytest.mark.parametrize("world", [2])
def test_wait_for_what_peers_pushed(pools: Any, world: int, op: str, removed: bool) -> None:
    """The one meeting of a call is after it was sent: without it, rank 0 does not see what the late rank 1 sends."""

    def job() -> bool:
        g = workers.world()
        problems = [
            embedding(2, 4, 5, torch.float32, s, tables=2) if op == "embedding_all_to_all"
            else product("gemm_all_to_all", 2, (0, 9, 5), torch.float32, s, sends=[[2, 4], [3, 1]]) if op == "uneven"
            else product(op, 2, (6, 9, 5), torch.float32, s)
            for s in (1, 2, 3)
        ]  # fmt: skip
        workers.poison(_checked(problems[0], "store"))
        _checked(problems[1], "store")
        poison_scratch(g)
        agree, push = OpsGroup.agree, OpsGroup.push
        used: list[bool] = []
        missed: list[tuple[Any, ...]] = []

        def pushing(self: OpsGroup, size_bytes: int) -> Any:
            found = push(self, size_bytes)
            used.append(found is not None)
            return found

        def postponed(self: OpsGroup, *args: Any, copies: Any = ()) -> Any:
            given = iter(copies)
            for copy in zip(given, given, given, strict=True):
                native.load().copy(*copy)
            missed.append(args)
            return [(*args[1], *(0,) * 4)] * 2 if len(args) == 2 else []  # what both say of their tables

        with contextlib.ExitStack() as stack:
            stack.enter_context(step_by_step(g))
            stack.enter_context(mock.patch.object(OpsGroup, "push", pushing))
            if g.rank == 1:
                stack.enter_context(slow(lambda: 0.05))
                stack.enter_context(_late_sends())
            elif removed:
                stack.enter_context(mock.patch.object(OpsGroup, "agree", postponed))
            right = problems[2].is_right(g, problems[2].run(g, "store"))
        for args in missed:
            ops_group(g).transport = "store"
            agree(ops_group(g), *args)
        ops_group(g).transport = ""
        assert used == [True]
        return right

    assert pools.get(world).run(job) == [not removed, True]


#: The short way of each operator, and whether its wait is removed.
SHORT = [(op, False) for op in (*PUSHED, "direct") if op != "embedding_all_to_all"] + [("gemv_all_reduce", True)]


@pytest.mark.parametrize(("op", "removed"), SHORT)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("most_rows", [0, 1 << 40], ids=["torch multiplies", "we multiply"])
def test_a_call_like_an_earlier_one(pools: Any, world: int, op: str, removed: bool, most_rows: int) -> None:
    """The same shape again and again, others and a larger stage between, ranks late: the short way is taken, and right.

    Without its meeting, rank 0 adds up what the late ranks have not sent.
    """

    def job() -> tuple[int, list[int]]:
        g, wrong, taken = workers.world(), [], 0
        forget(g)  # who multiplied before
        kinds = (repeated._InPlace, repeated._Scattered, repeated._Gathered, repeated._Direct)

        def counted(self: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
            nonlocal taken
            found = short[type(self)](self, x, w)
            taken += found is not None
            return found

        def alone(self: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
            nonlocal taken
            if self._repeat.is_over:
                return None
            taken += 1
            out = torch.mm(x, w.t())
            kept = out.clone()
            self._repeat.finish(out.data_ptr(), kept.data_ptr(), ops_group(g).meetings & 1)
            self._repeat.send(kept.data_ptr())
            return out

        short: dict[type, Any] = {kind: kind.__call__ for kind in kinds}
        poison_scratch(g)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(products, "_most_rows", return_value=most_rows))
            for kind in kinds:
                changed = alone if removed and g.rank == 0 and kind is repeated._InPlace else counted
                stack.enter_context(mock.patch.object(kind, "__call__", changed))
            for seed in range(12):
                shape = (6 if op == "gemv_all_reduce" else 2 * g.size, 2000 if seed == 6 else 9, 5)
                problem = (
                    product("matmul_reduce_scatter", g.size, (100 * g.size, *shape[1:]), torch.float32, seed)
                    if op == "direct" else product(op, g.size, shape, torch.bfloat16, seed)
                )  # fmt: skip
                late_s = 0.02 * ((seed + g.rank) % 3 == 0)
                with slow(functools.partial(float, late_s)):
                    found = problem.run(g, "store")
                if not problem.is_right(g, found):
                    wrong.append(seed)
                if seed % 4 == 1:
                    other = product("matmul_reduce_scatter", g.size, (4 * g.size, 7, 3), torch.float32, seed)
                    _checked(other, "store")
        return taken, wrong

    for rank, (taken, wrong) in enumerate(pools.get(world).run(job)):
        assert taken >= 4, taken
        assert bool(wrong) == (removed and rank == 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_what_torch_would_make_of_arguments(pools: Any, threads: int) -> None:
    """Under autocast operators stay in the dtype of their arguments, and a tensor that is negated lazily is negated;
    also where a call like it was made before."""

    def job() -> list[str]:
        g, wrong = workers.world(), []
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for op in ("gemv_all_reduce", "gemm_all_to_all", "all_gather_matmul", "matmul_reduce_scatter"):
            call = getattr(fused, op)
            x, w = (torch.randn(4 * g.size, 64, generator=torch.Generator().manual_seed(g.rank + n)) for n in (0, 9))
            for transport in ("store", "unfused"):
                plain = [call(x, w, group=g, transport=transport).clone() for _ in range(3)][-1]
                with torch.autocast("cpu", torch.bfloat16):
                    if not torch.equal(call(x, w, group=g, transport=transport), plain):
                        wrong.append(f"{op} by {transport}: autocast")
                if not torch.equal(call(torch._neg_view(x), w, group=g, transport=transport), -plain):
                    wrong.append(f"{op} by {transport}: negated")
        torch.set_num_threads(before)
        return wrong

    assert pools.get(2).run(job) == [[], []]


@contextlib.contextmanager
def _late_sends() -> Iterator[None]:
    """A peer's memory is found late, and so comes what is written there; so does what `agree` copies."""
    agree = OpsGroup.agree

    def late_copies(self: OpsGroup, *args: Any, **more: Any) -> Any:
        time.sleep(0.05 * bool(more.get("copies")))
        return agree(self, *args, **more)

    def late(found: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: OpsGroup, rank: int, *more: Any) -> Any:
            if rank != self.group.rank:
                time.sleep(0.05)
            return found(self, rank, *more)

        return wrapped

    with contextlib.ExitStack() as stack:
        for name, changed in (("at", late(OpsGroup.at)), ("base", late(OpsGroup.base)), ("agree", late_copies)):
            stack.enter_context(mock.patch.object(OpsGroup, name, changed))
        yield


@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize("world", [2])
def test_a_stage_is_used_in_turn(pools: Any, world: int, halves: int) -> None:
    """Rank 1 reads its stage late, while rank 0 sends what belongs to the next call: to the other half."""

    def job() -> bool:
        g = workers.world()
        problems = [product("gemv_all_reduce", 2, (6, 9, 5), torch.float32, s) for s in range(4)]
        for problem in problems[:2]:
            _checked(problem, "store")
        dovetail.barrier()  # what is spoiled from here on is looked at below
        push, add_up = OpsGroup.push, store.add_up

        def first_half(self: OpsGroup, size_bytes: int) -> Any:
            return None if push(self, size_bytes) is None else self._halves[0]

        def late(*args: Any) -> None:
            time.sleep(0.1)
            add_up(*args)

        with contextlib.ExitStack() as stack:
            stack.enter_context(step_by_step(g))
            if halves == 1:
                stack.enter_context(mock.patch.object(OpsGroup, "push", first_half))
            if g.rank == 1:
                stack.enter_context(mock.patch.object(store, "add_up", late))
            right = [problem.is_right(g, problem.run(g, "store")) for problem in problems[2:]]
        return all(right)

    found = pools.get(world).run(job)
    assert found[1] == (halves == 2)


@pytest.mark.parametrize("removed", [False, True], ids=["waits", "removed"])
@pytest.mark.parametrize("world", [2])
def test_wait_until_peers_have_read(pools: Any, world: int, removed: bool) -> None:
    """Rank 0 goes on and writes its x while rank 1 still has to read it."""

    def body() -> bool:
        g = workers.world()
        problem = _prepared("all_gather_matmul", 1)
        problem.run(g, "store")
        x, w = problem.arguments[g.rank]
        if g.rank == 1:
            with slow(lambda: 0.05):
                return problem.is_right(g, problem.run(g, "store"))
        shared = dovetail.empty(*x.shape).copy_(x)
        problem.arguments[0] = (shared, w)
        if not removed:
            problem.run(g, "store")
            workers.poison(shared)
            return True
        with Postponed(g):
            problem.run(g, "store")
            workers.poison(shared)
        return True

    def job() -> bool:
        with two_meetings(workers.world()):
            return body()

    assert pools.get(world).run(job) == [True, not removed]


@pytest.mark.parametrize("op", WRITTEN)
@pytest.mark.parametrize("world", [2])
def test_agreement_comes_first(pools: Any, world: int, op: str) -> None:
    """Rank 0 writes to where rank 1's memory was last time, before rank 1 has begun: rank 1 misses it."""

    def body() -> bool:
        g = workers.world()
        before, problem = _prepared(op, 1), _prepared(op, 4)  # of one shape
        slots: list[Any] = []
        agree, barrier = OpsGroup.agree, OpsGroup.barrier

        def recorded(self: OpsGroup, *args: Any, **more: Any) -> Any:
            slots.append(agree(self, *args, **more))
            return slots[-1]

        with mock.patch.object(OpsGroup, "agree", recorded):
            _checked(before, "store")
            spare, held = _checked(before, "store"), _checked(before, "store")
        copy = held.clone()
        workers.poison(spare)
        del spare  # where the next result will be
        poison_scratch(g)
        if g.rank == 1:
            time.sleep(0.05)
            scratch = ops_group(g)._scratch.values()
            if op in ("gemv_all_reduce", "matmul_reduce_scatter"):  # what came before its own call is not kept there
                for t in scratch:
                    workers.poison(t)
            return problem.is_right(g, problem.run(g, "store")) and workers.same(held, copy)
        waiting: list[tuple[Any, ...]] = []

        def early(self: OpsGroup, *args: Any) -> Any:
            waiting.append(args)
            return slots[-1]

        def late(self: OpsGroup) -> None:
            while waiting:
                agree(self, *waiting.pop(0))
            barrier(self)

        with mock.patch.object(OpsGroup, "agree", early), mock.patch.object(OpsGroup, "barrier", late):
            problem.run(g, "store")
        return True

    def job() -> bool:
        with two_meetings(workers.world()):
            return body()

    assert pools.get(world).run(job) == [True, False]


@pytest.mark.parametrize("early", [False, True], ids=["waits", "removed"])
@pytest.mark.parametrize("op", ["gemm_all_to_all", "embedding_all_to_all", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world", [2])
def test_flags_follow_the_slices(pools: Any, world: int, op: str, early: bool) -> None:
    """Rank 1 raises the flags of all slices before it has computed them: rank 0 gets what was in memory."""

    def raised_first(bound: Any, tensors: Any, compute: Any) -> None:
        ticket = bound.runner.submit(tensors)
        for part in bound.parts:
            ticket.raise_signal(part.signal, part.value)
        ticket.wait()
        for part in bound.parts:
            compute(part)

    def job() -> bool:
        g = workers.world()
        problems = [_prepared(op, seed) for seed in (1, 2)]
        workers.poison(_checked(problems[0], "dma"))
        poison_scratch(g)
        with poisoned_memory():
            if g.rank == 0:
                return problems[1].is_right(g, problems[1].run(g, "dma"))
            with mock.patch.object(dma, "_run", raised_first if early else dma._run), slow(lambda: 0.01):
                problems[1].run(g, "dma")
        return True

    assert pools.get(world).run(job) == [not early, True]


# --- what a review found ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["gemm_all_to_all", "matmul_reduce_scatter"])
@pytest.mark.parametrize("world", [2])
def test_fewer_rows_than_slices(pools: Any, world: int, op: str) -> None:
    """Rows of 400 KB, three for each rank: a slice is a row, and its flag releases no other one."""

    def job() -> None:
        g = workers.world()
        for seed in range(3):
            problem = product(op, 2, (6, 100_000, 2), torch.float32, seed)
            with slow(lambda: 0.002):
                assert problem.is_right(g, problem.run(g, "dma")), seed

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_ranks_use_one_transport(pools: Any, world: int) -> None:
    """Also where nothing else of the call differs: one would read what the other has not sent."""

    def job() -> str:
        g = workers.world()
        problem = product("gemm_all_to_all", 2, (6, 9, 5), torch.float32, 1)
        for _ in range(3):
            _checked(problem, "store")
        with pytest.raises(MismatchError) as caught:
            problem.run(g, "store" if g.rank else "unfused")
        _checked(problem, "store")  # the group goes on
        return str(caught.value)

    assert all("by store" in said and "by unfused" in said for said in pools.get(world).run(job))


@pytest.mark.parametrize("world", [2])
def test_a_result_that_moves_to_other_memory(pools: Any, world: int) -> None:
    """`share_memory_` gives a storage memory of torch's own; the block is not used again."""

    def job() -> None:
        g = workers.world()
        problem = product("gemm_all_to_all", 2, (400, 40, 5), torch.float32, 1)
        for _ in range(3):
            found = problem.run(g, "store")
            found.share_memory_()
            assert problem.is_right(g, found)
            del found

    pools.get(world).run(job)
