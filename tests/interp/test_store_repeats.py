"""Fused operators of GPUs whose like was run before, under Triton's interpreter: the short ways, and when they must not
be taken.

A child process starts 2 and then 3 ranks, as in `test_store_edges`.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from dovetail.errors import MismatchError
from tests.interp import fusedlib as lib

CASES: dict[str, Callable[[Any], str]] = {}


@pytest.fixture(scope="module")
def outcome(need: Callable[[str, object], None]) -> dict[str, str]:
    need("triton", importlib.util.find_spec("triton"))
    pytest.importorskip("dovetail.hw.cpu._native", reason="the native part is not built")
    return lib.outcomes(__file__)


def _case(work: Callable[[Any], str]) -> Callable[[Any], str]:
    CASES[work.__name__.strip("_").replace("_", " ")] = work
    return work


# --- the ranks --------------------------------------------------------------------------------------------------------


@_case
def _calls_whose_like_was_run_before_go_the_short_way(group: Any) -> str:
    """New data in each, ranks late, memory poisoned; earlier results stay. A report of an earlier kernel is told."""
    from dovetail.ops import calls, quick
    from dovetail.ops.gpu.repeated import Repeated

    short: list[str] = []
    real = quick._run, Repeated.__call__

    def short_way(ranks: Any, known: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        short.append(known.call.op)
        return real[0](ranks, known, x, w)

    def shortest(self: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        short.append(f"{self._op}, repeated")
        return real[1](self, x, w)

    def product(op: str, run: int) -> tuple[torch.Tensor, torch.Tensor]:
        world, rank, m, n, k = group.size, group.rank, 2 * group.size, 5, 8
        xs = [lib.numbers(r, run, m, k, dtype=torch.float32) for r in range(world)]
        ws = [lib.numbers(r, run + 50, n, k, dtype=torch.float32) for r in range(world)]
        parts = [lib.product(x, w) for x, w in zip(xs, ws, strict=True)]
        out = lib.call(op, group, xs[rank], ws[rank])
        if op == "all_gather_matmul":
            return out, lib.product(torch.cat(xs), ws[rank])
        if op == "gemm_all_to_all":
            return out, torch.cat([part.chunk(world)[rank] for part in parts])
        total = lib.summed(parts)
        return out, total if op == "gemv_all_reduce" else total.chunk(world)[rank]

    ops = ("all_gather_matmul", "gemv_all_reduce", "gemm_all_to_all", "matmul_reduce_scatter")
    quick._run, Repeated.__call__ = short_way, shortest  # type: ignore[method-assign]
    try:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run in range(4):
            for op in ops:
                lib.nap(group.rank, run, 0.01)
                kept.append(product(op, run))
                store = lib.only_store(group)
                store._addresses.barrier()
                for state in store._states.values():
                    for memory in (state.stage, state.result):
                        if memory is not None:
                            memory.tensor.fill_(float("nan"))
                store._addresses.barrier()
        found = "; ".join(filter(None, (lib.differs(*each) for each in kept)))
        later = [f"{op}, repeated" for op in ops]
        if found or short != [*ops, *later, *later]:
            return found or f"short were {short}"
        values, in_range = torch.zeros(group.size, dtype=torch.int64), calls._in_range
        values[0] = 10**12 if group.rank == 1 else 0
        calls._in_range = lambda call: None
        try:
            lib.call("embedding_all_to_all", group, [torch.ones(4, 4)], values, torch.arange(group.size + 1))
        finally:
            calls._in_range = in_range
        kind, text = (IndexError, "values[0]") if group.rank == 1 else (MismatchError, "refused its arguments")
        if found := lib.raises(kind, text, lambda: product("gemv_all_reduce", 7)):
            return found
        return lib.differs(*product("gemv_all_reduce", 8))
    finally:
        quick._run, Repeated.__call__ = real  # type: ignore[method-assign]


@_case
def _small_outputs_are_copies_of_memory_that_peers_know(group: Any) -> str:
    """Of all ranks, of some or of none: rows are sent to the output itself where one rank's is too large for that."""
    from dovetail.ops.gpu import store as module

    world, rank, real = group.size, group.rank, module.COPIED_BYTES
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for run in range(9):
            module.COPIED_BYTES = (1 << 20, 0, 5 * 4 * 4 * world)[run % 3]
            rows = [[(3 * i + 2 * j * j + run) % 7 for j in range(world)] for i in range(world)]
            if run == 8:
                rows = [[0] * world for _ in range(world)]
            xs = [lib.numbers(r, run, sum(rows[r]), 8, dtype=torch.float32) for r in range(world)]
            ws = [lib.numbers(r, run + 50, 5, 8, dtype=torch.float32) for r in range(world)]
            parts = [lib.product(x, w).split(rows[r])[rank] for r, (x, w) in enumerate(zip(xs, ws, strict=True))]
            lib.nap(rank, run, 0.005)
            received = [rows[r][rank] for r in range(world)]
            out = lib.call("gemm_all_to_all", group, xs[rank], ws[rank], received, rows[rank])
            kept.append((out, torch.cat(parts)))
            for state in lib.only_store(group)._states.values():
                if state.result is not None:
                    group.ops.barrier()
                    state.result.tensor.fill_(float("nan"))
                    group.ops.barrier()
    finally:
        module.COPIED_BYTES = real
    return "; ".join(filter(None, (lib.differs(*each) for each in kept)))


@_case
def _unfused_calls_whose_like_was_run_before(group: Any) -> str:
    """Products and splits that change; a rank that makes another call is told of."""
    from dovetail import ops

    world, rank = group.size, group.rank
    for run in range(4):
        lib.nap(rank, run, 0.005)
        splits = [[(3 * i + 2 * j + run) % 4 for j in range(world)] for i in range(world)]
        for rows in (None, splits):
            many = [2 * world if rows is None else sum(rows[r]) for r in range(world)]
            xs = [lib.numbers(r, run, many[r], 8, dtype=torch.float32) for r in range(world)]
            ws = [lib.numbers(r, run + 50, 5, 8, dtype=torch.float32) for r in range(world)]
            products = [lib.product(x, w) for x, w in zip(xs, ws, strict=True)]
            given = () if rows is None else ([rows[r][rank] for r in range(world)], rows[rank])
            out = ops.gemm_all_to_all(xs[rank], ws[rank], *given, group=group, transport="unfused")
            parts = [p.chunk(world) if rows is None else p.split(rows[r]) for r, p in enumerate(products)]
            if wrong := lib.differs(out, torch.cat([part[rank] for part in parts])):
                return f"run {run}, splits {rows}: {wrong}"
            if rows is None:
                out = ops.gemv_all_reduce(xs[rank], ws[rank], group=group, transport="unfused")
                if wrong := lib.differs(out, lib.summed(products)):
                    return f"run {run}: {wrong}"
    x, w = xs[rank].new_ones(2 * world, 8), ws[rank]
    call = ops.gemv_all_reduce if rank else ops.matmul_reduce_scatter
    wrong = lib.raises(MismatchError, "same call", lambda: call(x, w, group=group, transport="unfused"))
    return wrong or lib.works(group)


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """Operators whose calls went the shortest way."""
    from dovetail.ops.gpu.repeated import Repeated

    short: list[str] = []
    real = Repeated.__call__

    def counting(self: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor | None:
        out = real(self, x, w)
        if out is not None:
            short.append(self._op)
        return out

    Repeated.__call__ = counting  # type: ignore[method-assign]
    try:
        yield short
    finally:
        Repeated.__call__ = real  # type: ignore[method-assign]


@_case
def _memory_that_is_new_in_each_call_is_told_in_each(group: Any) -> str:
    """Rank 1 gives an x on the heap, in a segment that others do not know by name: they meet once more for it."""
    import dovetail

    kept = []
    for run in range(6):
        xs = [lib.numbers(r, run, 4, 8, dtype=torch.float32) for r in range(group.size)]
        ws = [lib.numbers(r, run + 50, 5, 8, dtype=torch.float32) for r in range(group.size)]
        x = xs[group.rank]
        if group.rank == 1:
            kept.append(dovetail.empty(4, 8, dtype=torch.float32).copy_(x))
            x = kept[-1]
            if run:
                lib.only_store(group)._addresses.short = lambda _: 0  # as of a segment that is new
        out = lib.call("all_gather_matmul", group, x, ws[group.rank])
        if wrong := lib.differs(out, lib.product(torch.cat(xs), ws[group.rank])):
            return f"run {run}: {wrong}"
    return ""


@_case
def _a_time_limit_that_was_changed_holds(group: Any) -> str:
    """Also in calls that were made under the same limit before another one was in force."""
    import dovetail

    x, w = torch.ones(2 * group.size, 8), torch.ones(5, 8)

    def others() -> None:
        lib.call("matmul_reduce_scatter", group, x, w)

    others()
    with _counted() as short:
        for _ in range(4):
            lib.works(group)
        group.set_timeout(0.5)
        others()
        group.set_timeout(lib.TIMEOUT_S)
        dovetail.barrier(group=group)  # not the operators' own, which puts the limit in force
        if group.rank == 1:
            time.sleep(1.5)
        wrong = lib.works(group) or lib.works(group) or lib.works(group)
    return wrong or ("" if short.count("gemv_all_reduce") >= 3 else f"short were {short}")


@_case
def _kernels_wait_as_long_as_the_limit_that_is_in_force(group: Any) -> str:
    """Their bound is an argument: the first other call puts a new limit in force where ranks meet, not there."""
    from dovetail.ops.gpu.launcher import Launcher

    x, w, bounds, real = torch.ones(2 * group.size, 8), torch.ones(5, 8), [], Launcher.launch

    def noted(self: Any, launch: Any, first: Any) -> Any:
        bounds.append(next(a for a in launch.rest if a in wanted))
        return real(self, launch, first)

    limits = (lib.TIMEOUT_S, 2 * lib.TIMEOUT_S, lib.TIMEOUT_S)
    wanted = {round(seconds * 5_000): seconds for seconds in limits}  # looks of the interpreter in a second
    Launcher.launch = noted  # type: ignore[method-assign]
    try:
        with _counted() as short:
            for seconds in limits:
                group.set_timeout(seconds)
                lib.call("matmul_reduce_scatter", group, x, w)
                for _ in range(3):
                    if wrong := lib.works(group):
                        return wrong
                found = [wanted[bound] for bound in bounds]
                if found != [seconds] * len(found):
                    return f"with {seconds} s kernels waited {found}"
                bounds.clear()
    finally:
        Launcher.launch = real  # type: ignore[method-assign]
    return "" if len(short) >= 5 else f"short were {short}"


@_case
def _a_call_that_began_at_an_odd_address_is_not_the_model_of_others(group: Any) -> str:
    """A kernel that takes any address is slower: calls of aligned tensors do not go by it."""
    x, w = torch.ones(2, 8), torch.ones(5, 8)
    odd = torch.ones(17)[1:].view(2, 8)
    with _counted() as short:
        for _ in range(3):
            lib.call("gemv_all_reduce", group, odd, w)
        made = len(lib.only_store(group).repeats)
        for _ in range(4):
            out = lib.call("gemv_all_reduce", group, x, w)
    wrong = lib.differs(out, torch.full((2, 5), 8.0 * group.size))
    return wrong or ("" if (made, len(short)) == (0, 3) else f"{made} were made of odd ones, {len(short)} were short")


@_case
def _memory_of_this_rank_alone_is_not_held(group: Any) -> str:
    """torch keeps it for the stream: held until a kernel has ended, outputs of a host that is ahead would add up."""
    from dovetail.ops.gpu.launcher import Launcher

    x, w, held, real = torch.ones(2 * group.size, 8), torch.ones(5, 8), [], Launcher._launched

    def keeping(self: Any, kernel: Any, args: Any, kept: Any, then: Any) -> Any:
        held.append(kept)  # as where no kernel has ended yet
        return real(self, kernel, args, kept, then)

    outputs: list[weakref.ref[torch.Tensor]] = []
    Launcher._launched = keeping  # type: ignore[method-assign]
    try:
        with _counted() as short:
            for _ in range(4):
                for op in ("matmul_reduce_scatter", "all_gather_matmul", "gemv_all_reduce"):
                    outputs.append(weakref.ref(lib.call(op, group, x, w)))
    finally:
        Launcher._launched = real  # type: ignore[method-assign]
    lib.only_store(group).launcher.latest = None
    gc.collect()
    alive = sum(output() is not None for output in outputs)
    return "" if not alive and len(short) >= 6 else f"{alive} of {len(outputs)} are alive, short were {short}"


@_case
def _what_is_made_in_inference_mode_serves_later_calls(group: Any) -> str:
    """Memory that is kept is written to in place by calls that come after it."""
    from dovetail import ops

    world, rank = group.size, group.rank
    values, offsets, table = torch.zeros(world, dtype=torch.int64), torch.arange(world + 1), torch.ones(4, 4)
    for inference in (True, False, True, False):
        with torch.inference_mode(inference):
            for run in range(3):
                xs = [lib.numbers(r, run, 2 * world, 8, dtype=torch.float32) for r in range(world)]
                ws = [lib.numbers(r, run + 50, 5, 8, dtype=torch.float32) for r in range(world)]
                out = lib.call("all_gather_matmul", group, xs[rank], ws[rank])
                pooled = ops.embedding_all_to_all([table], values, offsets, group=group, transport="store")
                wrong = lib.differs(out, lib.product(torch.cat(xs), ws[rank]))
                wrong = wrong or lib.differs(pooled, torch.ones(1, world, 4)) or lib.works(group, run=run)
                if wrong:
                    return f"inference mode {inference}, run {run}: {wrong}"
    return ""


@_case
def _a_wrong_row_that_is_reported_meanwhile_is_told(group: Any) -> str:
    """An embedding's kernel ends while ranks meet for a call like an earlier one, and some rank says something new."""
    from dovetail import ops
    from dovetail.ops.gpu.status import WRONG_ROW
    from dovetail.ops.repeat import Same

    for _ in range(4):
        lib.works(group)
    store, meet = lib.only_store(group), Same.meet

    def late(self: Any) -> Any:
        store._status._array[WRONG_ROW] = 8
        return meet(self)

    if group.rank == 1:
        Same.meet = late  # type: ignore[method-assign]
    else:
        group.ops.push(1 << 20)  # this rank has another stage from here on, and says so
    try:
        wrong = lib.works(group)
    finally:
        Same.meet = meet  # type: ignore[method-assign]
    if wrong or group.rank != 1:
        return wrong
    return lib.raises(IndexError, "values[7]", lambda: ops.check(group))


@_case
def _shared_memory_that_was_outgrown_is_let_go(group: Any) -> str:
    """Though calls whose like was run before had used it; and they find the new one."""
    stages: list[weakref.ref[torch.Tensor]] = []
    with _counted() as short:
        for m in (2, 8, 16, 24):
            for _ in range(3):
                if wrong := lib.works(group, m=m, n=64):
                    return wrong
            state = next(s for s in lib.only_store(group)._states.values() if s.stage is not None)
            stages.append(weakref.ref(state.stage.tensor))
        if wrong := lib.works(group, m=2, n=64) or lib.works(group, m=2, n=64):
            return wrong
    lib.works(group, run=3)  # launches of before have ended
    gc.collect()
    alive = [n for n, stage in enumerate(stages) if stage() is not None]
    return "" if alive == [3] and len(short) >= 5 else f"alive are {alive}, {len(short)} calls were short"


@_case
def _a_rank_that_says_something_new_is_followed(group: Any) -> str:
    """Once: then the others' short way is that of what it says now."""
    from dovetail.ops.gpu.repeated import Repeated

    long, real = [0], Repeated._at_length

    def counted(self: Any, *args: Any) -> Any:
        long[0] += 1
        return real(self, *args)

    for _ in range(4):
        lib.works(group)
    if group.rank == 0:
        group.ops.push(1 << 20)
    Repeated._at_length = counted  # type: ignore[method-assign]
    try:
        with _counted() as short:
            wrong = "".join(lib.works(group, run=run) for run in range(6))
    finally:
        Repeated._at_length = real  # type: ignore[method-assign]
    return wrong or ("" if long[0] <= 1 and len(short) >= 4 else f"{long[0]} at length, {len(short)} short")


def _all_cases() -> dict[str, str]:
    import dovetail

    lib.wait_politely()
    world, found = range(int(os.environ["DOVETAIL_WORLD_SIZE"])), {}
    with lib.as_on_a_gpu():
        for name, work in CASES.items():
            found[name] = lib.guarded(lambda work=work: work(lib.new_group(dovetail, world)))  # type: ignore[misc]
    return found


def _main() -> None:
    import dovetail
    import dovetail.language

    found: dict[str, str] = {}
    for world in (2, 3):
        for number, cases in enumerate(dovetail.launch(_all_cases, world, timeout=180)):
            for name, wrong in cases.items():
                found[name] = found.get(name, "") or (wrong and f"rank {number} of {world}: {wrong}")
    print(json.dumps(found))


@pytest.mark.parametrize("case", CASES)
def test_ranks(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""


if __name__ == "__main__":
    _main()
