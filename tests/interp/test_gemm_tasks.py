"""A product with several programs to a tile under Triton's interpreter, each over a part of K; no GPU needed."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
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
]
#: With tiles that have rows of two slices, or none such.
FORMS = ((torch.float32, True), (torch.bfloat16, False))
MUTATIONS = ("late", "early", "flags", "missing")
RUNS = 3


def test_parts_are_the_product(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    assert printed(__file__) == ["right"] * (len(SHAPES) * len(FORMS)) + ["found"] * len(MUTATIONS)


class _Product:
    """Tables, counters and flags, kept from run to run; memory to work in is NaN at first."""

    def __init__(
        self, rows: tuple[int, ...], n: int, k: int, parts: tuple[int, ...], slice_rows: int, dtype: torch.dtype,
        is_across: bool,
    ) -> None:  # fmt: skip
        from dovetail.ops.gpu import tiles
        from dovetail.ops.gpu.launch import GemmLaunch

        self.n, self.k, self.m, self.dtype = n, k, sum(rows), dtype
        self.made = tiles.row_tiles(rows, 0, 16, slice_rows=slice_rows)
        if is_across:
            self.made = tiles.across(self.made, 16)
        self.words = torch.zeros(len(self.made.slices), dtype=torch.int64)
        self.flags = torch.tensor([self.words.data_ptr() + 8 * s for s in range(len(self.words))])
        every = [number for number, _ in zip(itertools.cycle(parts), self.made.tiles, strict=False)]
        blocks = tiles.Blocks(height=16, width=32, depth=32, group=2, warps=4, stages=1)
        self.launch = GemmLaunch(self.made, n, k, 4, torch.device("cpu"), blocks=blocks, parts=every)
        if self.launch._tasks is not None:
            self.launch._sums.fill_(float("nan"))
        self.y = torch.empty(self.m, n, dtype=dtype)

    def wrong(self, run: int) -> str:
        """One run: every element, and the flag of every slice. Whole numbers: their sums are exact in any order."""
        made = torch.Generator().manual_seed(run)
        x, w = (torch.randint(-4, 5, (r, self.k), generator=made).to(self.dtype) for r in (self.m, self.n))
        want = (x.float() @ w.float().T).to(self.dtype)
        self.y.fill_(float("nan"))
        value = (run << 40) + 5
        self.launch(x, w, self.y, self.flags, value)
        if not torch.equal(self.y, want):
            return f"run-{run}-y"
        return "" if self.words.tolist() == [value] * len(self.words) else f"run-{run}-flags"


def _early(product: _Product) -> str:
    """Flags of a product whose last task is missing: those of complete slices, no other."""
    launch, x, w = product.launch, torch.ones(product.m, product.k), torch.ones(product.n, product.k)
    assert launch._tasks is not None
    cut = int(launch._tasks[-1, 8])
    launch._tasks = launch._tasks[:-1].clone()
    launch(x, w, product.y, product.flags, 7)
    return "" if product.words.tolist() == [0 if s == cut else 7 for s in range(len(product.words))] else "early"


def _case(shape: Any, form: Any) -> str:
    product = _Product(*shape, *form)
    wrong = [product.wrong(run) for run in range(1, RUNS + 1)]
    return next((w for w in wrong if w), "right")


def _mutation(name: str) -> str:
    """What a wrong order or count of parts, or a slice that lacks a tile, leads to."""
    from dovetail.ops.gpu import launch

    launch._LOOKS = 3
    product = _Product(*SHAPES[0], *FORMS[0])
    tasks = product.launch._tasks
    assert tasks is not None
    parts = tasks[:, 5]
    if name == "late":  # the last part of a tile runs before the others, and does not wait long
        tasks.copy_(tasks.flip(0).clone())
    elif name == "early":  # it thinks that all others are there
        parts[parts > 1] = 1
    elif name == "missing":  # the other part of a tile is not computed
        tasks[:, 4] = torch.where(parts == -1, tasks[:, 3], tasks[:, 4])
    else:
        product.launch._tables.counters += 1
        return "found" if not _early(_Product(*SHAPES[0], *FORMS[0])) and _early(product) else f"not-found:{name}"
    return "found" if product.wrong(1) else f"not-found:{name}"


if __name__ == "__main__":
    print(*(_case(*given) for given in itertools.product(SHAPES, FORMS)), *(_mutation(name) for name in MUTATIONS))
