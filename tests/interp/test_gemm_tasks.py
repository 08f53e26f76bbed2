"""A product with several programs to a tile under Triton's interpreter, each over a part of K; no GPU needed."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.interp.child import printed

#: Rows for each rank, N, K, programs to a tile of each row tile in turn, rows of a slice. A tile is 16 x 32 x 32.
SHAPES = [
    ((21, 0, 40), 50, 72, (2, 1, 2, 1, 1), 24),  # ragged everywhere; a slice has tiles of both kinds
    ((32, 32), 64, 128, (4, 4, 1, 1), 32),  # even: no mask at all
    ((16, 48, 16), 33, 33, (2, 2, 2, 1, 1), 48),  # the second part of K has one element
    ((5, 30, 20, 3), 7, 95, (3, 1, 2, 1), 20),
    ((16, 17), 40, 160, (4,), 16),  # parts of one and of two steps
    ((16, 7, 19, 20), 40, 160, (1,), 16),
    ((21, 0, 40), 50, 72, (1,), 24),
    ((32, 64), 64, 128, (1,), 32),
]
ON_THE_WAY = [SHAPES[0], SHAPES[3]]  #: those that are also looked at program by program
#: With tiles that have rows of two slices, or none such; loads by tensor descriptors, where rows are 16 bytes apart.
FORMS = ((torch.float32, True, 0), (torch.bfloat16, False, 2), (torch.bfloat16, True, 2))
MUTATIONS = ("early", "flags", "missing", "across")
RUNS = 2


def test_parts_are_the_product(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    number = len(SHAPES) * len(FORMS) + 2 * len(ON_THE_WAY)
    wanted = ["right"] * number + ["found"] * len(MUTATIONS) + ["right"] * 3
    assert printed(__file__) == wanted


class _Product:
    """Tables, counters and flags, kept from run to run; memory to work in is NaN in each."""

    def __init__(
        self, rows: tuple[int, ...], n: int, k: int, parts: tuple[int, ...], slice_rows: int, dtype: torch.dtype,
        is_across: bool, boxes: int, *, headed: bool = False,
    ) -> None:  # fmt: skip
        """`headed`: the first slice is somebody else's."""
        from dovetail.ops.gpu import tiles
        from dovetail.ops.gpu.launch import GemmLaunch

        self.n, self.k, self.m, self.dtype = n, k, sum(rows), dtype
        self.made = tiles.row_tiles(rows, 0, 16, slice_rows=slice_rows)
        self.head = slice(*self.made.slices[0, :2].tolist()) if headed else slice(0, 0)
        self.made = tiles.behind(self.made, int(headed))
        if is_across:
            self.made = tiles.across(self.made, 16)
        self.words = torch.zeros(len(self.made.slices), dtype=torch.int64)
        self.flags = torch.tensor([self.words.data_ptr() + 8 * s for s in range(len(self.words))])
        every = [number for number, _ in zip(itertools.cycle(parts), self.made.tiles, strict=False)]
        blocks = tiles.Blocks(height=16, width=32, depth=32, group=2, warps=4, stages=1, boxes=boxes)
        self.launch = GemmLaunch(
            self.made, n, k, 4, torch.device("cpu"), blocks=blocks, parts=every, scratch=self.scratch
        )  # fmt: skip
        self._kept: torch.Tensor | None = None  # for launches that are parts of a run
        self.y = torch.empty(self.m, n, dtype=dtype)

    def scratch(self, number: int) -> torch.Tensor:
        """NaN, unless it is kept."""
        return torch.full((number,), float("nan")) if self._kept is None else self._kept

    def operands(self, run: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """With their product. Whole numbers: their sums are exact in any order."""
        made = torch.Generator().manual_seed(run)
        x, w = (torch.randint(-4, 5, (r, self.k), generator=made).to(self.dtype) for r in (self.m, self.n))
        self.y.fill_(float("nan"))
        want = (x.float() @ w.float().T).to(self.dtype)
        self.y[self.head] = want[self.head]
        return x, w, want

    def wrong(self, run: int) -> str:
        """One run: every element, and the flag of every slice."""
        x, w, want = self.operands(run)
        value = (run << 40) + 5
        self.launch(x, w, self.y, self.flags, value)
        if not torch.equal(self.y, want):
            return f"run-{run}-y"
        return "" if self.words.tolist() == [value] * len(self.words) else f"run-{run}-flags"

    def wrong_on_the_way(self, run: int) -> str:
        """One run, a program at a time: a slice's flag is up when all of its rows are there, and not before."""
        launch, (x, w, want) = self.launch, self.operands(run)
        tasks, value = launch._tasks, (run << 40) + 5
        if tasks is None:
            return ""
        self._kept = self.scratch(launch._num_sums)
        for n in range(len(tasks)):
            launch._tasks = tasks[n : n + 1].clone()
            launch(x, w, self.y, self.flags, value)
            for first, end, _, _, number in ((*s[:4], k) for k, s in enumerate(self.made.slices.tolist())):
                if torch.equal(self.y[first:end], want[first:end]) != (int(self.words[number]) == value):
                    return f"run-{run}-task-{n}-slice-{number}"
        launch._tasks, self._kept = tasks, None
        return "" if torch.equal(self.y, want) else f"run-{run}-y"


def _case(shape: Any, form: Any) -> str:
    product = _Product(*shape, *form)
    with _boxed() as boxed:
        product.wrong(0)
    if len(boxed) != (2 if form[2] and shape[2] % 8 == 0 else 0):
        return "boxes"
    wrong = [product.wrong(run) for run in range(1, RUNS + 1)]
    return next((w for w in wrong if w), "right")


def _way(shape: Any, headed: bool = False) -> str:
    product = _Product(*shape, *FORMS[0], headed=headed)
    return product.wrong_on_the_way(1) or product.wrong_on_the_way(2) or "right"


def _mutation(name: str) -> str:
    """What a wrong order or count of parts, or a slice that lacks a tile, leads to."""
    product = _Product(*SHAPES[0], *FORMS[0])
    tasks = product.launch._tasks
    assert tasks is not None
    parts = tasks[:, 5]
    if name == "early":  # the last part thinks that there are no others
        parts[parts > 1] = 1
    elif name == "missing":  # the other part of a tile is not computed
        tasks[:, 4] = torch.where(parts == -1, tasks[:, 3], tasks[:, 4])
    elif name == "across":  # a tile of two slices counts for the first alone
        assert (tasks[:, 8] != tasks[:, 9]).any()
        tasks[:, 9] = tasks[:, 8]
    else:
        product.launch._tables.counters += 1
        return "found" if product.wrong_on_the_way(1) else f"not-found:{name}"
    return "found" if product.wrong(1) else f"not-found:{name}"


def _late_part() -> str:
    """A last part that waits in vain stores nothing and lets no flag rise; the next run is right."""
    from dovetail.ops.gpu import launch

    product = _Product(*SHAPES[0], *FORMS[0])
    tasks, looks = product.launch._tasks, launch._LOOKS
    assert tasks is not None
    right = tasks.clone()
    at = int((tasks[:, 5] > 1).nonzero()[0])
    first, end, column, number, also = (int(tasks[at, field]) for field in (0, 1, 2, 8, 9))
    before = next(n for n in range(at) if tasks[n, [0, 2]].tolist() == [first, column])
    tasks[[before, at]] = tasks[[at, before]]
    launch._LOOKS = 3
    x, w, _ = product.operands(1)
    product.launch(x, w, product.y, product.flags, 7)
    launch._LOOKS = looks
    tile = slice(first, end), slice(32 * column, min(32 * column + 32, product.n))
    if not product.y[tile].isnan().all() or product.y.isnan().sum() != product.y[tile].numel():
        return "stored"
    if product.words.tolist() != [0 if s in (number, also) else 7 for s in range(len(product.words))]:
        return "raised"
    tasks.copy_(right)
    return product.wrong(2) or product.wrong_on_the_way(3) or "right"


@contextlib.contextmanager
def _boxed() -> Iterator[list[torch.Tensor]]:
    """The matrices that descriptors are made of meanwhile."""
    from dovetail.ops.gpu import launch

    made: list[torch.Tensor] = []
    box = launch.box
    launch.box = lambda matrix, *size: (made.append(matrix), box(matrix, *size))[1]
    try:
        yield made
    finally:
        launch.box = box


def _odd_places() -> str:
    """Matrices that begin between two multiples of 16 bytes are loaded by pointers; one row may have any stride."""
    shape, form = ((32, 64), 64, 128, (1,), 32), FORMS[2]
    for which in (0, 1):
        product = _Product(*shape, *form)
        operands = list(product.operands(1))
        wide = torch.empty(operands[which].numel() + 1, dtype=product.dtype)
        operands[which] = wide[1:].view(operands[which].shape).copy_(operands[which])
        x, w, want = operands
        with _boxed() as boxed:
            product.launch(x, w, product.y, product.flags, 7)
        if boxed or not torch.equal(product.y, want):
            return f"odd-{which}"
    product = _Product((0, 1), 64, 128, (1,), 32, *form[:2], form[2])
    x, w, want = product.operands(1)
    x = torch.empty(8, 4097, dtype=product.dtype)[:1, :128].copy_(x)
    with _boxed() as boxed:
        product.launch(x, w, product.y, product.flags, 7)
    return "right" if len(boxed) == 2 and torch.equal(product.y, want) else "one-row"


def _tables_are_read_both_ways() -> str:
    """Rows that lie in a few runs are computed from these, others are loaded: both kinds are among the cases."""
    made = [_Product(*given, *form) for given, form in itertools.product(SHAPES, FORMS)]
    return "right" if {each.launch._runs is None for each in made} == {True, False} else "one-way"


if __name__ == "__main__":
    cases = [_case(*given) for given in itertools.product(SHAPES, FORMS)]
    ways = [_way(*given) for given in itertools.product(ON_THE_WAY, (False, True))]
    print(*cases, *ways, *map(_mutation, MUTATIONS), _late_part(), _tables_are_read_both_ways(), _odd_places())
