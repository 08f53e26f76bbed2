"""Every collective, variant, dtype, size and kind of tensor gives what plain torch computes, on real processes.

Data are random and differ per rank and iteration; outputs are poisoned first; plans are checked on first use.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import dovetail
from dovetail.coll import dispatch, variants
from tests.ranks import workers

WORLDS = (1, 2, 3, 5, 8)
KINDS = ("symmetric", "ordinary", "mixed")
SIZES = (0, 1, 3, 7, 1000, 70_001)  # elements: none, fewer than ranks, odd, several chunks
FEW = (3, 1000, 70_001)  # with many ranks: fewer than ranks, and several chunks of an equal and an unequal share
#: Plans of every number of ranks are proved without processes: 5 are run with what has both kinds of tensors in it.
CASES = [(world, kind) for world in WORLDS for kind in KINDS if world != 5 or kind == "mixed"]
in_every_world = pytest.mark.parametrize(("world", "kind"), CASES)


def sizes(world: int) -> tuple[int, ...]:
    return SIZES if world < 5 else FEW


def dtypes(world: int) -> list[torch.dtype]:
    """All of them; one of each width with many ranks, which move bytes as few do."""
    found = workers.all_dtypes()
    return found if world < 5 else list({dtype.itemsize: dtype for dtype in found}.values())


@in_every_world
def test_all_gather(pools: Any, world: int, kind: str) -> None:
    def job() -> None:
        for seed, (variant, items) in enumerate(itertools.product((*variants("all_gather"), "auto"), sizes(world))):
            workers.all_gather(variant, kind, items, torch.float32, seed)
        for seed, dtype in enumerate([*dtypes(world), torch.complex64]):
            workers.all_gather("auto", kind, 33, dtype, seed)

    pools.get(world).run(job)


@in_every_world
def test_all_to_all(pools: Any, world: int, kind: str) -> None:
    def job() -> None:
        for seed, (variant, items) in enumerate(itertools.product((*variants("all_to_all"), "auto"), sizes(world))):
            workers.all_to_all(variant, kind, items, torch.float32, seed)
        for seed, dtype in enumerate(dtypes(world)):
            workers.all_to_all("auto", kind, 33, dtype, seed)

    pools.get(world).run(job)


@in_every_world
def test_all_reduce(pools: Any, world: int, kind: str) -> None:
    def job() -> list[bytes]:
        found = []
        for seed, items in enumerate(sizes(world)):
            both = {
                v: workers.all_reduce(v, kind, items, torch.bfloat16, "sum", seed)
                for v in ("oneshot", "twoshot", "auto")
            }
            assert len(set(both.values())) == 1, "variants differ in their bits"
            found.append(both["auto"])
        return found

    assert len({tuple(bits) for bits in pools.get(world).run(job)}) == 1, "ranks differ in their bits"


OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def _allowed(dtype: torch.dtype, op: str) -> bool:
    if op.startswith("b"):
        return not dtype.is_floating_point
    return not (dtype is torch.bool and op == "avg")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_reductions_of_every_dtype(pools: Any, world: int) -> None:
    def job() -> None:
        ops = OPS if world == 3 else ("sum", "avg", "bxor")  # the reduction itself is tested without ranks
        for seed, (dtype, op) in enumerate(itertools.product(dtypes(world), ops)):
            if _allowed(dtype, op):
                workers.all_reduce("twoshot", "symmetric", 1025, dtype, op, seed)
                workers.all_reduce("oneshot", "ordinary", 67, dtype, op, seed)
                workers.reduce_scatter("mixed", 65, dtype, op, seed)

    pools.get(world).run(job)


@in_every_world
def test_reduce_scatter(pools: Any, world: int, kind: str) -> None:
    def job() -> None:
        for seed, items in enumerate(sizes(world)):
            workers.reduce_scatter(kind, items, torch.float32, "sum", seed)

    pools.get(world).run(job)


@in_every_world
def test_rooted(pools: Any, world: int, kind: str) -> None:
    def job() -> None:
        for seed, items in enumerate((0, 1, 1000, 70_001) if world < 5 else (1, 70_001)):
            workers.rooted(kind, items, torch.float32, seed)

    pools.get(world).run(job)


@in_every_world
def test_uneven_all_to_all(pools: Any, world: int, kind: str) -> None:
    """Splits change from call to call, zeros among them, and no new plan is made for them."""

    def job() -> int:
        g = workers.world()
        before = len(g.calls)
        for variant in ("auto", "pcpy", "pull"):
            for seed in range(6):
                rng = torch.Generator().manual_seed(seed)
                rows = torch.randint(0, 9, (g.size, g.size), generator=rng)  # rows[i, j]: from i to j
                send, receive = rows[g.rank].tolist(), rows[:, g.rank].tolist()
                inp = workers.make(kind, g.rank, sum(send) * 5, torch.float32).view(-1, 5)
                inp.copy_(workers.data(seed, g.rank, sum(send) * 5, torch.float32).view(-1, 5))
                out = workers.make(kind, g.rank, sum(receive) * 5, torch.float32).view(-1, 5)
                given = torch.tensor([receive, send]) if seed % 2 else (receive, send)
                dovetail.all_to_all_single(out, inp, *given, variant=variant)
                parts = []
                for i in range(g.size):
                    theirs = workers.data(seed, i, int(rows[i].sum()) * 5, torch.float32).view(-1, 5)
                    parts.append(theirs.split(rows[i].tolist())[g.rank])
                assert workers.same(out, torch.cat(parts)), (variant, kind, seed)
        return len(g.calls) - before

    assert set(pools.get(world).run(job)) <= {0, 3}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_in_place(pools: Any, world: int) -> None:
    """all_gather with the input inside the output, reduce_scatter the other way, all_to_all by swapping."""

    def job() -> None:
        g = workers.world()
        for kind in ("symmetric", "ordinary"):
            whole = workers.make(kind, g.rank, 100 * g.size, torch.float32)
            mine = whole[100 * g.rank : 100 * (g.rank + 1)]
            for variant in variants("all_gather"):
                workers.poison(whole)
                mine.copy_(workers.data(1, g.rank, 100, torch.float32))
                dovetail.all_gather_into_tensor(whole, mine, variant=variant)
                assert workers.same(whole, torch.cat([workers.data(1, r, 100, torch.float32) for r in range(g.size)]))
            for variant in ("auto", "swap", "pcpy"):
                whole.copy_(workers.data(2, g.rank, 100 * g.size, torch.float32))
                dovetail.all_to_all_single(whole, whole, variant=variant)
                theirs = [workers.data(2, r, 100 * g.size, torch.float32) for r in range(g.size)]
                assert workers.same(whole, torch.cat([t[100 * g.rank : 100 * g.rank + 100] for t in theirs])), (
                    variant,
                    kind,
                )
            whole.copy_(workers.data(3, g.rank, 100 * g.size, torch.float32))
            dovetail.reduce_scatter_tensor(mine, whole)
            theirs = [workers.data(3, r, 100 * g.size, torch.float32) for r in range(g.size)]
            parts = [t[100 * g.rank : 100 * g.rank + 100] for t in theirs]
            assert workers.same(mine, workers.reduced(parts, "sum"))

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 5])
def test_not_contiguous(pools: Any, world: int) -> None:
    """A strided input gives the right result, a strided output a clear error on every rank."""

    def job() -> None:
        g = workers.world()
        wide = workers.data(5, g.rank, 40, torch.float32).view(20, 2)
        out = torch.empty(20 * g.size)
        dovetail.all_gather_into_tensor(out, wide[:, 0])
        want = torch.cat([workers.data(5, r, 40, torch.float32).view(20, 2)[:, 0] for r in range(g.size)])
        assert workers.same(out, want)
        with pytest.raises(ValueError, match="output_tensor must be contiguous"):
            dovetail.all_gather_into_tensor(torch.empty(20 * g.size, 2)[:, 0], wide[:, 0].contiguous())
        with pytest.raises(ValueError, match="tensor must be contiguous"):
            dovetail.all_reduce(wide[:, 0])

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [3, 5, 8])
def test_subgroups(pools: Any, world: int) -> None:
    """Groups that are subsets, overlapping and in another order, used in turn."""

    def job() -> None:
        w = workers.world().world
        groups = [list(range(0, w.size, 2)), list(range(w.size - 1, -1, -1)), [0, w.size - 1]]
        mine = [w.new_group(ranks) for ranks in groups if w.rank in ranks]
        for seed in range(3):
            for g in mine:
                workers.all_gather("auto", "mixed", 130, torch.float32, seed, g)
                workers.all_reduce("auto", "symmetric", 130, torch.float32, "sum", seed, g)
        for g in mine:
            g.close()

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2, 4])
def test_random_calls(pools: Any, world: int) -> None:
    """A long random mixture, with random delays before every step."""

    def job() -> None:
        g = workers.world()
        rng = torch.Generator().manual_seed(7)

        def pick(options: Any) -> Any:
            return options[int(torch.randint(len(options), (1,), generator=rng))]

        g.inject_delay(20)
        for seed in range(120):
            kind, items = pick(KINDS), int(torch.randint(1, 40_000, (1,), generator=rng))
            match pick(("ag", "aa", "ar", "rs")):
                case "ag":
                    workers.all_gather(pick(variants("all_gather")), kind, items, torch.float16, seed)
                case "aa":
                    workers.all_to_all(pick(variants("all_to_all")), kind, items, torch.float16, seed)
                case "ar":
                    workers.all_reduce(pick(variants("all_reduce")), kind, items, torch.float16, "sum", seed)
                case _:
                    workers.reduce_scatter(kind, items, torch.float16, "sum", seed)
        g.inject_delay(0)

    pools.get(world).run(job)


@pytest.mark.parametrize("forced", [{"DOVETAIL_VARIANT": "pcpy"}, {"DOVETAIL_DISABLE": "1"}], ids=["pcpy", "disabled"])
def test_in_place_all_to_all_with_another_variant(spare_pool: Any, forced: dict[str, str]) -> None:
    def job() -> list[float]:
        g = workers.world()
        t = dovetail.empty(4).copy_(torch.arange(4.0) + 10 * g.rank)
        for _ in range(2):
            dovetail.all_to_all_single(t, t)  # twice is the identity
        dovetail.all_to_all_single(t, t)
        return t.tolist()

    assert spare_pool(2, forced).run(job) == [[0, 1, 10, 11], [2, 3, 12, 13]]


@pytest.mark.parametrize("world", [2])
def test_lazily_negated_tensors(pools: Any, world: int) -> None:
    """Views that torch negates or conjugates when they are read arrive as what they show, on every call."""

    def job() -> None:
        g = workers.world()
        shown = torch.tensor([1 + 2j]).conj().imag
        out = torch.empty(g.size)
        for _ in range(3):
            dovetail.all_gather_into_tensor(out, shown)
            assert out.tolist() == [-2.0] * g.size
        both = torch.tensor([1 + 2j, 3 + 4j]).conj()
        whole = torch.empty(2 * g.size, dtype=torch.complex64)
        dovetail.all_gather_into_tensor(whole, both)
        assert whole[:2].tolist() == [1 - 2j, 3 - 4j]
        with pytest.raises(ValueError, match="negated or conjugated"):
            dovetail.all_gather_into_tensor(whole.conj(), both)

    pools.get(world).run(job)


@pytest.mark.parametrize("world", [2])
def test_more_shapes_than_are_remembered(pools: Any, world: int) -> None:
    def job() -> int:
        g = workers.world().world.new_group([0, 1])
        dispatch._MOST_CALLS, most = 20, dispatch._MOST_CALLS
        for items in (*range(2, 60), *range(2, 12)):  # the last ones are forgotten, and made again
            t = torch.full((items,), float(g.rank + 1))
            dovetail.all_reduce(t, group=g)
            assert t[-1] == 3.0
        dispatch._MOST_CALLS = most
        kept = len(g.calls)
        g.close()
        return kept

    assert pools.get(world).run(job) == [20, 20]
