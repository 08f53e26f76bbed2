"""A product with a head under Triton's interpreter: its first row tiles in parts of K; no GPU needed."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.interp.child import printed

#: Rows for each rank, N, K, row tiles of the head, its parts, rows of a slice. A tile is 16 x 32 of depth 32.
SHAPES = [
    ((21, 0, 40), 50, 72, 1, 2, 24),  # ragged everywhere; the head ends inside a slice
    ((32, 32), 64, 128, 2, 4, 32),  # even: no mask at all; the head is a slice
    ((16, 48, 16), 33, 33, 3, 2, 48),  # the second part of K has one element
    ((5, 30), 7, 95, 1, 3, 20),
    ((16, 17), 40, 160, 3, 4, 16),  # nothing is left for the other kernel; parts of one and of two steps
]
DTYPES = (torch.float32, torch.bfloat16)
MUTATIONS = ("parts", "flags")
RUNS = 3


def test_head_and_rest_are_the_product(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    assert printed(__file__) == ["right"] * (len(SHAPES) * len(DTYPES)) + ["found"] * len(MUTATIONS) + ["right"]


class _Product:
    """Tables, counters and flags, kept from run to run; memory to work in is NaN at first."""

    def __init__(
        self, rows: tuple[int, ...], n: int, k: int, head: int, parts: int, slice_rows: int, dtype: torch.dtype
    ) -> None:  # fmt: skip
        from dovetail.ops.gpu import tiles

        self.n, self.k, self.m, self.head, self.parts, self.dtype = n, k, sum(rows), head, parts, dtype
        self.made = tiles.row_tiles(rows, 0, 16, slice_rows=slice_rows)
        self.table = torch.from_numpy(self.made.tiles.copy())
        self.slice_tiles = torch.from_numpy(self.made.slice_tiles.copy())
        self.words, self.counters = (torch.zeros(len(self.made.slices), dtype=torch.int64) for _ in range(2))
        self.flags = torch.tensor([self.words.data_ptr() + 8 * s for s in range(len(self.words))])
        self.columns = -(-n // 32)
        self.sums = torch.full((head * self.columns, parts, 16, 32), float("nan"))
        self.arrivals = torch.zeros(head * self.columns, dtype=torch.int64)
        self.y = torch.empty(self.m, n, dtype=dtype)

    def operands(self, run: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Whole numbers: sums are exact in any order, so that bits can be compared."""
        made = torch.Generator().manual_seed(run)
        x, w = (torch.randint(-4, 5, (r, self.k), generator=made).to(self.dtype) for r in (self.m, self.n))
        return x, w

    def how(self) -> dict[str, Any]:
        even = [self.made.is_even(16), self.n % 32 == 0, self.k % 32 == 0]
        return {"BM": 16, "BN": 32, "BK": 32, "GROUP": 2, "PRECISION": "ieee", "SOFT": True} | dict(
            zip(("EVEN_M", "EVEN_N", "EVEN_K"), even, strict=True)
        )

    def compute(self, x: torch.Tensor, w: torch.Tensor, value: int) -> Iterator[int]:
        """Yields how many row tiles are finished: those of the head, then all."""
        from dovetail.ops.kernels.gemm import gemm_parts_kernel, gemm_slices_kernel

        gemm_parts_kernel[(self.parts * self.head * self.columns,)](
            x, w, self.y, self.table, self.slice_tiles, self.counters, self.flags, self.sums, self.arrivals, value,
            self.head, self.n, self.k, PARTS=self.parts, **self.how(),
        )  # fmt: skip
        yield self.head
        if rest := len(self.table) - self.head:
            gemm_slices_kernel[(3,)](
                x, w, self.y, self.table[self.head :].clone(), self.slice_tiles, self.counters, self.flags, value, rest,
                self.n, self.k, PROGRAMS=3, **self.how(),
            )  # fmt: skip
        yield len(self.table)

    def wrong(self, run: int) -> str:
        """One run: every element that is to be there, no other, and flags of exactly the slices that are complete."""
        from dovetail.ops.gpu import tiles

        x, w = self.operands(run)
        want = (x.float() @ w.float().T).to(self.dtype)
        self.y.fill_(float("nan"))
        before, value = self.words.clone(), (run << 40) + 5
        for finished in self.compute(x, w, value):
            done = torch.zeros(self.m, dtype=torch.bool)
            for first, end, *_ in self.made.tiles[:finished].tolist():
                done[first:end] = True
            if not torch.equal(self.y[done], want[done]) or not self.y[~done].isnan().all():
                return f"run-{run}-y-after-{finished}"
            complete = [bool(done[s[tiles.FIRST] : s[tiles.END]].all()) for s in self.made.slices]
            if self.words.tolist() != torch.where(torch.tensor(complete), value, before).tolist():
                return f"run-{run}-flags-after-{finished}"
        return ""


def _case(shape: Any, dtype: torch.dtype) -> str:
    product = _Product(*shape, dtype)
    wrong = [product.wrong(run) for run in range(1, RUNS + 1)]
    return next((w for w in wrong if w), "right")


def _mutation(name: str) -> str:
    """A head that adds up before all parts are there, or a slice that lacks a tile, is seen."""
    product = _Product(*SHAPES[0], torch.float32)
    if name == "parts":
        product.arrivals += 1
    else:
        product.counters += product.columns
    return "found" if product.wrong(1) else f"not-found:{name}"


def _failed_launch() -> str:
    """Of the kernel behind a head: what the head counted is forgotten, and the next runs are right."""
    from dovetail.ops.gpu.launch import GemmLaunch, Head
    from dovetail.ops.gpu.tiles import Blocks
    from dovetail.ops.kernels import gemm

    product = _Product((21, 0, 40), 50, 300, 0, 2, 24, torch.float32)
    blocks = Blocks(height=16, width=32, depth=32, group=2, warps=4, stages=1)
    made = GemmLaunch(product.made, product.n, product.k, 4, torch.device("cpu"), blocks=blocks, head=Head())
    x, w = product.operands(1)
    kernel = gemm.gemm_slices_kernel
    for value, fails in ((5, False), (6, True), (7, False), (8, False)):
        gemm.gemm_slices_kernel = {} if fails else kernel
        product.y.fill_(float("nan"))
        with contextlib.suppress(KeyError):
            made(x, w, product.y, product.flags, value)
        if not fails and (product.words.tolist() != [value] * len(product.words) or product.y.isnan().any()):
            return f"run-{value}"
    return "right" if 0 < made.head < len(product.table) else f"head-of-{made.head}"


if __name__ == "__main__":
    cases = [_case(*given) for given in itertools.product(SHAPES, DTYPES)]
    print(*cases, *(_mutation(name) for name in MUTATIONS), _failed_launch())
