"""Operators whose rows go to their owners slice by slice, on the GPUs of ranks: processes over the stand-in driver.

There are no kernels here: what stands for one computes on the host and raises the flags of its slices late, in any
order, as a kernel would; `decomposed` is as it is on a GPU.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from dovetail.errors import DovetailError, MismatchError
from dovetail.hw.world import Group
from dovetail.ops import calls, unfused
from dovetail.ops.gpu import sliced
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch
from dovetail.ops.group import ops_group
from tests.ranks import ops_cases as cases
from tests.ranks import workers
from tests.ranks.gpuranks import Ready, set_up

OPERATORS: dict[str, Any] = {
    "gemm_all_to_all": sliced.gemm_all_to_all,
    "matmul_reduce_scatter": sliced.matmul_reduce_scatter,
    "embedding_all_to_all": sliced.embedding_all_to_all,
}
WAYS = [(op, fused) for op in ("gemm_all_to_all", "matmul_reduce_scatter") for fused in (True, False)]
WAYS.append(("embedding_all_to_all", True))


def call_of(problem: cases.Problem, g: Group) -> calls.Call:
    """The checked call of this rank."""
    given = problem.arguments[g.rank]
    if problem.op == "gemm_all_to_all":
        return calls.gemm_all_to_all(*given[:2], *(given[2:] or (None, None)), g.size)
    if problem.op == "matmul_reduce_scatter":
        return calls.matmul_reduce_scatter(*given, g.size)
    more = dict.fromkeys(("per_sample_weights", "offsets", "lengths", "batch")) | problem.keywords[g.rank]
    return calls.embedding_all_to_all(*given, **more, world=g.size)


class Kernels:
    """Stands for both kernels of this rank. `early`: a fault, flags are raised before anything is computed."""

    def __init__(self, seed: int, early: bool = False) -> None:
        self._draw, self._early = random.Random(seed), early
        self.threads: list[threading.Thread] = []

    def gemm(self, _: GemmLaunch, x: Any, w: Any, y: Any, flags: Any, value: int) -> None:
        self._run(lambda: torch.mm(x, w.t(), out=y), flags, value)

    def bags(self, kernel: BagLaunch, values: Any, offsets: Any, y: Any, flags: Any, value: int, scales: Any) -> None:
        mode = "mean" if kernel._mean else "sum"
        c = calls.EmbeddingAllToAll(
            kernel._weights, values, offsets, kernel.B, mode, scales, 1, kernel.D
        )  # fmt: skip
        cuts = offsets[:: kernel.B].tolist()

        def compute() -> None:
            for t in range(kernel.T):
                y[:, t].copy_(unfused.bags(c, t, *cuts[t : t + 2]))

        self._run(compute, flags, value)

    def _run(self, compute: Any, flags: torch.Tensor, value: int) -> None:
        addresses = [address for address in flags.tolist() if address]
        self._draw.shuffle(addresses)
        pauses = [self._draw.choice((0.0, 0.002)) for _ in addresses]

        def raise_all() -> None:
            for address, pause in zip(addresses, pauses, strict=True):
                time.sleep(pause)
                ctypes.c_uint64.from_address(address).value = value

        if self._early:
            raise_all()
            self.threads.append(threading.Thread(target=lambda: (time.sleep(0.2), compute())))
        else:
            compute()
            self.threads.append(threading.Thread(target=raise_all))
        self.threads[-1].start()

    @contextmanager
    def instead(self) -> Iterator[None]:
        def gemm(*given: Any) -> None:
            self.gemm(*given)

        def bags(*given: Any) -> None:
            self.bags(*given)

        with mock.patch.object(GemmLaunch, "__call__", gemm), mock.patch.object(BagLaunch, "__call__", bags):
            yield
        for thread in self.threads:
            thread.join(20)


def run(g: Group, problem: cases.Problem, fused: bool, seed: int, **fault: bool) -> torch.Tensor:
    """One call; the stand-in's rows are there when it returns."""
    more = {} if problem.op == "embedding_all_to_all" else {"fused": fused}
    with Kernels(seed, **fault).instead():
        found: torch.Tensor = OPERATORS[problem.op](ops_group(g), call_of(problem, g), **more)
    return found


@contextmanager
def small_slices(rows: int) -> Iterator[None]:
    """Many slices of few rows, instead of megabytes."""
    with mock.patch.object(sliced, "_STEP", rows), mock.patch.object(sliced, "slice_rows_of", return_value=rows):
        yield


@pytest.mark.parametrize(("op", "fused"), WAYS)
@pytest.mark.parametrize("world", [2, 3])
def test_rows_arrive(ready: Ready, world: int, op: str, fused: bool) -> None:
    """Shapes that change, some seen before; zero splits; ranks that come late; outputs poisoned."""

    def job() -> list[str]:
        g, wrong = set_up(), []
        with small_slices(3):
            for seed in (0, 1, 2, 3, 4, 5, 1, 0):
                problem = cases.some(op, g.size, seed, (torch.float32, torch.bfloat16)[seed % 2])
                for m in ops_group(g).known.values():
                    if isinstance(m, sliced.Memory):
                        for t in m._scratch.values():
                            workers.poison(t)
                if (seed + g.rank) % g.size == 0:
                    time.sleep(0.01)
                with cases.poisoned_memory():
                    found = run(g, problem, fused, seed)
                if not problem.is_right(g, found):
                    wrong.append(f"{op} {seed}")
        return wrong

    assert ready.run(world, job) == [[]] * world


@pytest.mark.parametrize("world", [2])
def test_a_flag_that_comes_too_early_is_seen(ready: Ready, world: int) -> None:
    def job() -> bool:
        g = set_up()
        problem = cases.product("gemm_all_to_all", g.size, (40, 30, 20), torch.float32, 3)
        before = sliced.Memory.of(ops_group(g), torch.device("cpu")).scratch("y", (40, 30), torch.float32)
        workers.poison(before)
        with small_slices(4):
            return problem.is_right(g, run(g, problem, True, 1, early=True))

    assert ready.run(world, job) == [False] * world


@pytest.mark.parametrize("world", [2])
def test_ranks_that_disagree(ready: Ready, world: int) -> None:
    """Other shapes on one rank: every rank is told, nothing moved, and the next call is in order."""

    def job() -> bool:
        g = set_up()
        problem = cases.product("gemm_all_to_all", g.size, (4 + 4 * g.rank, 8, 8), torch.float32, 5)
        with pytest.raises(MismatchError):
            run(g, problem, False, 0)
        problem = cases.product("gemm_all_to_all", g.size, (8, 8, 8), torch.float32, 5)
        return problem.is_right(g, run(g, problem, False, 0))

    assert ready.run(world, job) == [True] * world


@pytest.mark.parametrize("world", [2])
def test_a_launch_that_fails_ends_the_call_everywhere(ready: Ready, world: int) -> None:
    def job() -> str:
        g = set_up()
        problem = cases.product("matmul_reduce_scatter", g.size, (8, 8, 8), torch.float32, 5)
        run(g, problem, True, 0)
        try:
            if g.rank == 1:
                with mock.patch.object(GemmLaunch, "__call__", side_effect=RuntimeError("no kernel image")):
                    sliced.matmul_reduce_scatter(ops_group(g), call_of(problem, g))  # type: ignore[arg-type]
            else:
                run(g, problem, True, 0)
        except (DovetailError, RuntimeError) as error:
            return type(error).__name__
        return "nothing"

    found = ready.get(world).run(job)
    ready.close()
    assert found == ["PeerError", "RuntimeError"]


def test_what_there_is_covers_the_cpu() -> None:
    """Whatever the CPU has by `dma`, GPUs have too."""
    from dovetail.ops.choose import DMA, TRANSPORTS

    for backend in TRANSPORTS.values():
        assert {op for op, has in backend.items() if DMA in has} == set(OPERATORS)
