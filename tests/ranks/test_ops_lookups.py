"""`embedding_all_to_all` whose like was made before: one native call, and what must not go that way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import dovetail
from dovetail import ops as fused
from dovetail.errors import DovetailError, MismatchError
from dovetail.ops.cpu import lookups
from tests.ranks import workers
from tests.ranks.ops_cases import DTYPES, embedding, forget, poison_scratch, poisoned_memory, slow

_CALL = lookups.Repeated.__call__


@contextlib.contextmanager
def counted(call: Callable[..., Any] = _CALL) -> Iterator[list[bool]]:
    """Whether each call that could go the short way did so; `call` in its place."""
    taken: list[bool] = []

    def counting(*args: Any) -> Any:
        found = call(*args)
        taken.append(found is not None)
        return found

    with mock.patch.object(lookups.Repeated, "__call__", counting):
        yield taken


def _before_the_meeting(self: Any, tables: Any, values: Any, offsets: Any) -> Any:
    """A removed wait: what peers send is taken from the stage before they are here."""
    early = torch.empty(self._shape, dtype=tables[0].dtype)
    self._lookup.finish(early.data_ptr(), self._lookup.half)
    out = _CALL(self, tables, values, offsets)
    if out is None:
        return None
    first, mine = sum(self._every[: self._group.group.rank]), len(tables)
    early[:, first : first + mine] = out[:, first : first + mine]
    return early


@pytest.mark.parametrize("removed", [False, True], ids=["waits", "removed"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_batch_like_an_earlier_one(pools: Any, world: int, removed: bool) -> None:
    """Bags of other lengths each time, ranks late, a larger stage between; ranks differ in their number of tables.

    Without the meeting, rank 0 takes what the late ranks have not sent.
    """

    def job() -> tuple[list[bool], list[int]]:
        g, wrong = workers.world(), []
        forget(g)
        poison_scratch(g)
        with poisoned_memory(), counted(_before_the_meeting if removed and g.rank == 0 else _CALL) as taken:
            for seed in range(0, 48, 3):  # the number of tables goes by the seed
                for dtype in DTYPES[seed // 3 % 2 :: 2]:
                    mode, numbers_of = ("sum", "mean")[seed % 2], (torch.int64, torch.int32)[seed // 6 % 2]
                    local = 900 if seed == 24 else 20
                    problem = embedding(world, local, 34, dtype, seed, mode=mode, numbers_of=numbers_of)
                    for keywords in problem.keywords:
                        keywords["offsets"] = keywords["offsets"].to(torch.int64)
                    with slow(functools.partial(float, 0.02 * ((seed + g.rank) % 4 == 0))):
                        found = problem.run(g, "store")
                    if not problem.is_right(g, found):
                        wrong.append(seed)
        return taken, wrong

    for rank, (taken, wrong) in enumerate(pools.get(world).run(job)):
        assert taken.count(True) >= 12
        assert bool(wrong) == (removed and rank == 0), wrong


def test_blocks(pools: Any) -> None:
    """Batches that are pooled in several blocks, the last one shorter, and samples that are larger than a block."""

    def job() -> tuple[list[bool], list[tuple[int, int]]]:
        g, short, wrong = workers.world(), [], []
        for local, dim in ((333, 64), (7, 9001), (1, 2)):
            with poisoned_memory(), counted() as taken:
                for seed in (3, 6, 9, 12):  # in the first call a stage may have to grow
                    problem = embedding(2, local, dim, torch.float32, seed)
                    if not problem.is_right(g, problem.run(g, "store")):
                        wrong.append((local, dim))
            short.append(taken[-1])
        return short, wrong

    for short, wrong in pools.get(2).run(job):
        assert short == [True] * 3
        assert not wrong


#: What rank 1 gives in the place of [tables, values, offsets, keywords].
OTHERS: dict[str, Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "apart": lambda w, v, o: ([t.t().contiguous().t() for t in w], v, o, {}),
    "negated": lambda w, v, o: ([torch._neg_view(-t) for t in w], v, o, {}),
    "strided offsets": lambda w, v, o: (w, v, o.repeat_interleave(2)[::2], {}),
    "lengths": lambda w, v, o: (w, v, None, {"lengths": o.diff()}),
    "weighted": lambda w, v, o: (w, v, o, {"per_sample_weights": torch.ones(v.numel())}),
    "a tuple": lambda w, v, o: (tuple(w), v, o, {}),
    "parameters": lambda w, v, o: ([torch.nn.Parameter(t, requires_grad=False) for t in w], v, o, {}),
    "small offsets": lambda w, v, o: (w, v, o.int(), {}),
}
SHORT = ("a tuple", "parameters")


@pytest.mark.parametrize("other", OTHERS)
def test_one_rank_goes_the_long_way(pools: Any, other: str) -> None:
    """The others do not notice, and the next call is short again."""

    def job() -> tuple[list[int], list[bool]]:
        g, short, right = workers.world(), [], []
        for seed in (3, 6, 9, 12, 15, 18):
            problem = embedding(2, 5, 8, torch.float32, seed, most=6)
            (tables, values), offsets = problem.arguments[g.rank], problem.keywords[g.rank]["offsets"]
            more: dict[str, Any] = {}
            if g.rank == 1 and seed in (12, 15):
                tables, values, offsets, more = OTHERS[other](tables, values, offsets)
            with poisoned_memory(), counted() as taken:
                out = fused.embedding_all_to_all(tables, values, offsets, transport="store", **more)
            right.append(problem.is_right(g, out))
            short.append(taken.count(True))
        return short[2:], right

    for rank, (short, right) in enumerate(pools.get(2).run(job)):
        assert all(right)
        assert short == ([1, 0, 0, 1] if rank == 1 and other not in SHORT else [1] * 4)


def test_wrong_arguments_are_told_by_who_was_to_go_the_short_way(pools: Any) -> None:
    """An error on every rank, nothing moved, and the group goes on."""
    errors = (IndexError, MismatchError)

    def job() -> tuple[list[str], list[bool]]:
        g, said, right = workers.world(), [], []
        with counted() as taken:
            for seed in (3, 6, 9, 12, 15, 18):
                problem = embedding(2, 5, 8, torch.float32, seed, tables=2)
                right.append(problem.is_right(g, problem.run(g, "store")))
                (tables, values), keywords = problem.arguments[g.rank], problem.keywords[g.rank]
                if g.rank == seed % 2:
                    values = values.clone()
                    values[-1] = 1000
                with pytest.raises(errors) as caught:
                    fused.embedding_all_to_all(tables, values, **keywords, transport="store")
                said.append(f"{type(caught.value).__name__}: {caught.value}")
        return said, [*right, any(taken)]

    for rank, (said, right) in enumerate(pools.get(2).run(job)):
        assert all(right)
        for seed, text in zip((3, 6, 9, 12, 15, 18), said, strict=True):
            wanted = "IndexError: values has row 1000 for weights[" if rank == seed % 2 else "MismatchError: rank "
            assert text.startswith(wanted), text


def test_other_numbers_of_tables(pools: Any) -> None:
    """A rank that has more tables than last time, or fewer: what was known is known anew, and no stage is overrun."""

    def job() -> list[tuple[int, ...]]:
        g, wrong = workers.world(), []
        to_and_fro = (3, 6, 4, 7, 5, 8, 8, 3, 4, 3, 4, 3, 3, 4, 3, 4, 4, 3, 3, 3)
        for turn, seed in enumerate(to_and_fro):
            problem = embedding(2, 8190, 2, torch.float32, seed, most=2)  # of up to three tables: most of a stage
            with poisoned_memory(), counted() as taken:
                right = problem.is_right(g, problem.run(g, "store"))
            if not right or (turn == len(to_and_fro) - 1 and taken != [True]):
                wrong.append((turn, right, *taken))
        return wrong

    assert pools.get(2).run(job) == [[], []]


def test_many_lookups_are_shared_by_threads(pools: Any) -> None:
    """With threads of torch the long way is the faster one."""

    def job() -> list[bool]:
        before = torch.get_num_threads()
        problem = embedding(2, 600, 4, torch.float32, 3, most=40)
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with counted() as taken:
                for _ in range(3):
                    assert problem.is_right(workers.world(), problem.run(workers.world(), "store"))
            found.append(taken[-1])
        torch.set_num_threads(before)
        return found

    assert pools.get(2).run(job) == [[True, False]] * 2


def test_a_peer_that_dies_is_told(spare_pool: Callable[..., Any]) -> None:
    """As in every other meeting."""
    pool = spare_pool(2)

    def job() -> str:
        import os

        g, problem = workers.world(), embedding(2, 4, 8, torch.float32, 3)
        for _ in range(4):
            assert problem.is_right(g, problem.run(g, "store"))
        if g.rank == 1:
            os._exit(3)
        with pytest.raises(dovetail.errors.PeerError) as caught, counted() as taken:
            problem.run(g, "store")
        assert g.broken is not None
        assert not taken
        return str(caught.value)

    pool.start(job)
    assert "rank 1" in pool.finish([0])[0]


def test_tables_that_want_gradients(pools: Any) -> None:
    """A call that has to be remembered goes the long way, though its like was made before."""

    def job() -> bool:
        g, problem = workers.world(), embedding(2, 4, 8, torch.float32, 3)
        (tables, values), keywords = problem.arguments[g.rank], problem.keywords[g.rank]
        for _ in range(3):
            problem.run(g, "store")
        wanted = [t.clone().requires_grad_() for t in tables]
        with counted() as taken:
            fused.embedding_all_to_all(wanted, values, **keywords, transport="store").sum().backward()
        return not taken and all(t.grad is not None and t.grad.is_sparse for t in wanted)

    assert pools.get(2).run(job) == [True, True]


@pytest.mark.parametrize("turns", ["2323", "22323", "222323322"])
def test_numbers_of_tables_that_one_rank_has_in_turn(pools: Any, turns: str) -> None:
    """Rank 0 says the same in all calls, and was told of stages in some of them only."""

    def job() -> list[int]:
        g, wrong, batch, dim = workers.world(), [], 8, 4
        forget(g)
        values, offsets = torch.zeros(batch, dtype=torch.int64), torch.arange(batch + 1)
        for turn, many in enumerate(map(int, turns * 2)):
            tables = [torch.full((2, dim), 1.0 + turn + 10 * t) for t in range(many if g.rank else 1)]
            bags = torch.cat([offsets[:-1] + batch * t for t in range(len(tables))])
            ends = torch.cat([bags, bags[-1:] + 1])
            with poisoned_memory(), slow(functools.partial(float, 0.01 * ((turn + g.rank) % 3 == 0))):
                out = fused.embedding_all_to_all(tables, values.repeat(len(tables)), ends, transport="store")
            want = torch.tensor([1.0 + turn, *(1.0 + turn + 10 * t for t in range(many))])
            if not torch.equal(out, want[None, :, None].expand(batch // 2, -1, dim)):
                wrong.append(turn)
        return wrong

    assert pools.get(2).run(job) == [[], []]


def _freed(t: torch.Tensor) -> torch.Tensor:
    """Without memory, as FSDP leaves what it has sharded."""
    made = t.clone()
    made.untyped_storage().resize_(0)
    return made


#: Tables that can't be pooled, in the place of one that was pooled before.
UNFIT: dict[str, Callable[[torch.Tensor], Any]] = {
    "nested": lambda t: torch.nested.as_nested_tensor([t, t], layout=torch.strided),
    "jagged": lambda t: torch.nested.as_nested_tensor([t, t], layout=torch.jagged),
    "freed": _freed,
    "sparse": lambda t: t.to_sparse(),
    "no list": lambda t: object(),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_tables_that_can_not_be_pooled_are_told(pools: Any, unfit: str) -> None:
    """In the place of tables that were: every rank has an error, nothing moved, and the group goes on."""

    def job() -> list[str]:
        g, said = workers.world(), []
        problem = embedding(2, 5, 8, torch.float32, 3, tables=1)
        (tables, values), keywords = problem.arguments[g.rank], problem.keywords[g.rank]
        for turn in range(8):
            if turn % 4 != 3:
                said.append(str(problem.is_right(g, problem.run(g, "store"))))
                continue
            wrong = UNFIT[unfit](tables[0])
            given: Any = tables if not g.rank else [wrong] if isinstance(wrong, torch.Tensor) else wrong
            with pytest.raises((TypeError, ValueError, DovetailError)) as caught:
                fused.embedding_all_to_all(given, values, **keywords, transport="store")
            said.append(type(caught.value).__name__)
        return said

    first, second = pools.get(2).run(job)
    assert first == [*(["True"] * 3 + ["MismatchError"]) * 2]
    assert [said == "True" for said in second] == [True, True, True, False] * 2


def test_defaults_of_the_program_and_modes_of_torch(pools: Any) -> None:
    """Memory of ours is the CPU's, whatever torch's default device is; a mode of torch sees the operator."""

    def job() -> tuple[list[bool], list[str]]:
        from torch._subclasses.fake_tensor import FakeTensorMode

        g, right, fake = workers.world(), [], []
        problem = embedding(2, 5, 8, torch.float32, 3, tables=1)
        by_lengths = embedding(2, 5, 8, torch.float32, 3, tables=1, by_lengths=True)
        x, w = torch.ones(4, 8), torch.ones(6, 8)
        for turn in range(6):
            with torch.device("meta" if turn % 2 else "cpu"):
                outs = [each.run(g, "store") for each in (problem, by_lengths)]
                out = fused.gemv_all_reduce(x, w, transport="store")
                reduced = fused.matmul_reduce_scatter(x, w, transport="store")
            right += [each.is_right(g, found) for each, found in zip((problem, by_lengths), outs, strict=True)]
            right.append(torch.equal(out, torch.full((4, 6), 16.0)) and torch.equal(reduced, out[:2]))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            made = fused.gemv_all_reduce(mode.from_tensor(x), mode.from_tensor(w), transport="store")
            fake.append(f"{type(made).__name__} {tuple(made.shape)}")
        right.append(problem.is_right(g, problem.run(g, "store")))
        return right, fake

    for right, fake in pools.get(2).run(job):
        assert all(right)
        assert fake == ["FakeTensor (4, 6)"]


def test_more_calls_than_are_known(pools: Any) -> None:
    """What is known of tables is forgotten between calls, never within one."""

    def job() -> list[int]:
        g, wrong = workers.world(), []
        forget(g)
        with mock.patch.object(lookups, "_MOST_TABLES", 2):
            for turn, local in enumerate((3, 4, 5, 6, 3, 7, 4, 5, 3, 6, 7)):
                problem = embedding(2, local, 4, torch.float32, 3)  # ranks have one and three tables
                with poisoned_memory():
                    found = problem.run(g, "store")
                if not problem.is_right(g, found):
                    wrong.append(turn)
        return wrong

    assert pools.get(2).run(job) == [[], []]
