"""The fused kernels with stores to peers under Triton's interpreter, one process per rank; no GPU needed.

A child process starts 2 and then 3 ranks, each of which runs its cases and says what was wrong. Outputs and staging
memory are poisoned with NaN, ranks are delayed, sizes are ragged, and with a wait removed a comparison must fail.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from dovetail.errors import DovetailError, MismatchError, NotSupported, PeerError, Timeout
from dovetail.ops.gpu import tiles
from tests.interp import fusedlib as lib

OPS = ("gemm_all_to_all", "gemv_all_reduce", "all_gather_matmul", "matmul_reduce_scatter", "embedding_all_to_all")
#: Waits whose loss a comparison must see, by operator. The numbers are those of `kernels.protocol`.
ENTRY, DONE, ARRIVED = range(3)
WAITS = {
    "gemm_all_to_all": (ENTRY, DONE),
    "gemv_all_reduce": (ARRIVED, DONE),
    "all_gather_matmul": (ENTRY, DONE),
    "matmul_reduce_scatter": (ENTRY, ARRIVED),
    "embedding_all_to_all": (ENTRY, DONE),
}
NAMES = ("entry", "done", "arrived", "local", "nothing")
ALONE = ("slices-gemm", "slices-embedding")
TOGETHER = {
    2: (
        *(f"{op}-{dtype}" for op in OPS for dtype in ("fp32", "bf16")),
        "gemm_all_to_all-fp16",
        "all_gather_matmul-copied",
        "replays",
        "captured",
        "natural-order",
        "refused",
        "row-out-of-range",
        "late-rank",
    ),
    3: (*(f"{op}-bf16" for op in OPS), "all_gather_matmul-copied", "replays", "late-rank"),
}
MUTATED = [f"{op}-without-{NAMES[what]}" for op in OPS for what in WAITS[op]]
WHOLE = [f"{op}-without-nothing" for op in OPS]


@pytest.fixture(scope="module")
def outcome(need: Callable[[str, object], None]) -> dict[str, str]:
    need("triton", importlib.util.find_spec("triton"))
    pytest.importorskip("dovetail.hw.cpu._native", reason="the native part is not built")
    return lib.outcomes(__file__)


@pytest.mark.parametrize(("world", "case"), [(world, case) for world, cases in TOGETHER.items() for case in cases])
def test_ranks(outcome: dict[str, str], world: int, case: str) -> None:
    assert outcome[f"{world} {case}"] == ""


@pytest.mark.parametrize("case", MUTATED)
def test_a_removed_wait_is_seen(outcome: dict[str, str], case: str) -> None:
    assert "differ" in outcome[case]


@pytest.mark.parametrize("case", WHOLE)
def test_with_all_waits_nothing_is(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""


@pytest.mark.parametrize("case", ALONE)
def test_one_rank(outcome: dict[str, str], case: str) -> None:
    assert outcome[case] == ""


# --- the tables, which need no Triton ---------------------------------------------------------------------------------


def test_tiles_cover_every_row_once_and_cross_nothing() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        world = int(rng.integers(1, 6))
        rank, height = int(rng.integers(world)), int(rng.integers(1, 9))
        rows = rng.integers(0, 30, world).tolist()
        before = rng.integers(0, 9, world).tolist()
        slice_rows = int(rng.integers(1, 20)) if rng.integers(2) else None
        order = str(rng.choice(["remote", "local", "natural"]))
        made = tiles.row_tiles(rows, rank, height, slice_rows=slice_rows, order=order, rows_before=before)
        begin = np.concatenate([[0], np.cumsum(rows)])
        seen = np.zeros(sum(rows), int)
        for first, end, to, row, part in made.tiles.tolist():
            seen[first:end] += 1
            assert 1 <= end - first <= height
            assert begin[to] <= first < end <= begin[to + 1]
            assert row == first - begin[to] + before[to]
            assert made.slices[part, tiles.FIRST] <= first < end <= made.slices[part, tiles.END]
        assert (seen == 1).all()
        assert np.array_equal(np.bincount(made.tiles[:, tiles.SLICE], minlength=len(made.slices)), made.slice_tiles)
        assert made.segments[:, 0].tolist() == tiles.destinations(world, rank, order)
        assert made.segments[0, 1] == 0
        assert made.segments[-1, 2] == len(made.tiles)
        assert np.array_equal(made.segments[1:, 1], made.segments[:-1, 2])
        for to, first, end in made.segments.tolist():
            assert (made.tiles[first:end, tiles.DESTINATION] == to).all()


def test_order_of_destinations() -> None:
    assert tiles.destinations(4, 1, "remote") == [2, 3, 0, 1]
    assert tiles.destinations(4, 1, "local") == [1, 2, 3, 0]
    assert tiles.destinations(4, 1, "natural") == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="rank must be in"):
        tiles.destinations(2, 2)
    with pytest.raises(ValueError, match="not negative"):
        tiles.row_tiles([1, -1], 0, 2)


def test_blocks_fit_the_problem() -> None:
    assert tiles.gemm_blocks([8192], 8192, 8192, 2, 132).width == 256
    assert tiles.gemm_blocks([1024], 1024, 8192, 2, 132).width == 128
    assert tiles.gemm_blocks([64, 3], 8192, 8192, 2, 132).height == 64
    assert tiles.gemm_blocks([8192], 8192, 8192, 4, 132).height == 64
    assert tiles.gemm_blocks([8192], 8192, 8191, 2, 132).height == 64
    assert tiles.bag_shape(64, 100, 100) == (64, 1, 64)
    assert tiles.bag_shape(128, 10_000, 100) == (8, 16, 128)
    assert tiles.bag_shape(20, 0, 0) == (64, 1, 32)


def test_few_rows_are_shared_out_evenly() -> None:
    """Two ranks with 66 programs each, as on half a GPU; an owner has half of the columns."""
    assert [tiles.gemv_blocks(m, 8192, 2, 66, 2).height for m in (1, 17, 64)] == [16, 32, 64]
    assert [tiles.gemv_blocks(m, 8192, 4, 66, 2).height for m in (1, 2, 3, 17, 64)] == [1, 2, 4, 16, 16]
    widths = {n: tiles.gemv_blocks(1, n, 2, 66, 2).width for n in (2048, 4096, 6144, 8192, 8704, 16384)}
    # 4096: 64 programs with 32 columns each rather than 32 with 64; 8704: two tiles of 64 for two of them, or three of
    # 32 for four.
    assert widths == {2048: 16, 4096: 32, 6144: 64, 8192: 64, 8704: 32, 16384: 64}
    for m in (1, 2, 5, 16, 64):
        b = tiles.gemv_blocks(m, 8192, 4, 66, 2)
        assert b.height * b.width * b.depth <= 128 * 32 * b.warps, "sums of a thread that its registers don't hold"


# --- the child process: operators on ranks ----------------------------------------------------------------------------


class Rank:
    """A rank's side of the cases. `inputs` and `want` of a run can be made for any rank, on any rank."""

    def __init__(self, group: Any, dtype: torch.dtype = torch.float32) -> None:
        from dovetail.ops.gpu.store import Store

        self.group, self.dtype = group, dtype
        self.rank, self.world = group.rank, group.size
        self.store = Store(group, "cpu")
        self.recorded = lib.Recorded(self.store)
        self.order = "remote"

    def splits(self, rank: int, run: int) -> list[int]:
        rows = [[5, 0, 19], [17, 3, 11], [0, 20, 2]]
        return [rows[(rank + run) % 3][(to + run) % 3] for to in range(self.world)]

    def xw(self, rank: int, run: int, rows: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            lib.numbers(rank, run, rows, k, dtype=self.dtype),
            lib.numbers(rank, run + 77, n, k, dtype=self.dtype),
        )

    def call(self, op: str, run: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """(result, what it must be, inputs that scale it) of this rank."""
        everybody = range(self.world)
        if op == "gemm_all_to_all":
            inputs = [self.xw(r, run, sum(self.splits(r, run)), 39, 40) for r in everybody]
            receive = [self.splits(r, run)[self.rank] for r in everybody]
            out = self.store.gemm_all_to_all(
                *inputs[self.rank], self.splits(self.rank, run), receive, order=self.order
            )
            parts = [lib.product(x, w).split(self.splits(r, run))[self.rank] for r, (x, w) in enumerate(inputs)]
            return out, torch.cat(parts), [inputs[self.rank][0]]
        if op == "gemv_all_reduce":
            inputs = [self.xw(r, run, (5, 21)[run % 2], 37, 136) for r in everybody]
            out = self.store.gemv_all_reduce(*inputs[self.rank], order=self.order)
            return out, lib.summed([lib.product(x, w) for x, w in inputs]), [inputs[self.rank][0]]
        if op == "matmul_reduce_scatter":
            inputs = [self.xw(r, run, 19 * self.world, 33, 40) for r in everybody]
            out = self.store.matmul_reduce_scatter(*inputs[self.rank], slice_rows=10, order=self.order)
            parts = [lib.product(x, w).chunk(self.world)[self.rank] for x, w in inputs]
            return out, lib.summed(parts), [inputs[self.rank][0]]
        if op.startswith("all_gather_matmul"):
            inputs = [self.xw(r, run, 19, 33, 40) for r in everybody]
            x, w = inputs[self.rank]
            x = self.store._addresses.empty(tuple(x.shape), x.dtype).copy_(x) if run % 2 else x
            everything = torch.cat([other for other, _ in inputs])
            if op.endswith("copied"):
                out, gathered = self.store.all_gather_matmul_with_input(x, w)
                wrong = lib.differs(gathered, everything)
                assert not wrong, wrong
            else:
                out = self.store.all_gather_matmul(x, w, copy=False)
            return out, lib.product(everything, w), [x]
        return self.pool(run)

    def pool(self, run: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        batch, dim, mode = 6 * self.world, 20, ("sum", "mean")[run % 2]
        counts = [1 + (r + 1) % 2 for r in range(self.world)]
        wants = []
        for r in range(self.world):
            rows = [7, 30][: counts[r]]
            weights = [lib.numbers(r, run + t, n, dim, dtype=self.dtype) for t, n in enumerate(rows)]
            values, offsets = lib.bags(r, run, counts[r], batch, rows, 5)
            scales = lib.numbers(r, run, len(values), dtype=self.dtype) if mode == "sum" and run % 4 else None
            wants.append(lib.pooled(weights, values, offsets, batch, mode, scales))
            if r == self.rank:
                mine = (weights, values.to(torch.int32) if run % 3 else values, offsets, batch, mode, scales)
        out = self.store.embedding_all_to_all(*mine, counts if run % 2 else None, order=self.order)
        want = torch.cat(wants, dim=1)[6 * self.rank :][:6]
        if mode == "mean":  # a third has no exact form
            close = torch.allclose(out.float(), want.float(), rtol=2 * torch.finfo(self.dtype).eps, atol=1e-6)
            want = out.clone() if close else want
        return out, want, list(mine[0])

    def poison(self) -> None:
        """Memory of this rank that peers write to, while nobody runs."""
        self.store._addresses.barrier()
        for state in self.store._states.values():
            for memory in (state.stage, state.result):
                if memory is not None:
                    memory.tensor.fill_(float("nan"))
        self.store._addresses.barrier()

    def several(self, op: str, dtype: str, runs: int = 2) -> str:
        """Runs in a row with other inputs each, ranks delayed."""
        self.dtype = lib.DTYPES[dtype]
        for run in range(runs):
            if run == 1:
                self.poison()
            lib.nap(self.rank, run)
            got, want, _ = self.call(op, run)
            if wrong := lib.differs(got, want):
                return f"run {run}: {wrong}"
        return ""

    def first(self, op: str) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """A call for `again`: its inputs lie where peers read them, and the result is exact."""
        self.dtype = torch.float32
        got, want, inputs = self.call(op, 4 if op == "embedding_all_to_all" else 1)
        wrong = lib.differs(got, want)
        assert not wrong, wrong
        return got, want, inputs

    def again(self, inputs: list[torch.Tensor], factor: float, got: torch.Tensor) -> torch.Tensor:
        """What a captured graph does: the same launch, inputs changed in place, nothing exchanged. Returns the result:
        `got`, where it is always the same memory."""
        kept = [t.clone() for t in inputs]
        for t in inputs:
            t.mul_(factor)
        made = self.recorded.again()
        for t, before in zip(inputs, kept, strict=True):
            t.fill_(float("nan"))  # who still reads it sees this
            t.copy_(before)
        return got if made is None else made

    def replays(self, op: str) -> str:
        """Rank 0 is late before each launch, and looks at its result late."""
        got, want, inputs = self.first(op)
        for run in range(2):
            if self.rank == 0:
                time.sleep(0.02)
            got = self.again(inputs, run + 2.0, got)
            self.store.check()
            if self.rank == 0:
                time.sleep(0.02)
            if wrong := lib.differs(got, want * (run + 2.0)):
                return f"replay {run}: {wrong}"
        return ""


def _case(me: Rank, case: str) -> str:
    op, _, how = case.partition("-")
    if how in lib.DTYPES:
        return me.several(op, how, 3 if me.world == 2 and how == "bf16" else 2)
    if case == "all_gather_matmul-copied":
        return me.several(case, "fp32")
    if case == "replays":
        return "; ".join(filter(None, map(me.replays, OPS)))
    if case == "natural-order":
        me.order = "natural"
        try:
            return "; ".join(filter(None, (me.several(o, "fp32", 1) for o in OPS)))
        finally:
            me.order = "remote"
    if case == "captured":
        return _captured(me)
    return {"refused": _refused, "row-out-of-range": _out_of_range, "late-rank": _late}[case](me)


def _refused(me: Rank) -> str:
    """Wrong calls raise on every rank before anything moves, and the next call works."""
    from dovetail.ops.gpu.store import Store

    x, w = torch.ones(4, 8), torch.ones(3, 8)

    def wrong(kind: type[BaseException], text: str, call: Callable[[], object]) -> str:
        try:
            call()
        except kind as error:
            return "" if text in str(error) else f"says {error}"
        return f"no {kind.__name__} for {text}"

    store, world = me.store, me.world
    eight = torch.float8_e4m3fn
    found = [
        wrong(NotSupported, "float8", lambda: store.gemv_all_reduce(x.to(eight), w.to(eight))),
        wrong(NotSupported, "both alike", lambda: store.gemv_all_reduce(x, w.half())),
        wrong(ValueError, "[rows, k]", lambda: store.gemv_all_reduce(x, w[:, :3])),
        wrong(ValueError, "up to 64", lambda: store.gemv_all_reduce(torch.ones(65, 8), w)),
        wrong(ValueError, "add", lambda: store.gemm_all_to_all(x, w, [1] * world, [1] * world)) if world != 4 else "",
        wrong(ValueError, "share equally", lambda: store.matmul_reduce_scatter(torch.ones(world + 1, 8), w)),
        wrong(NotSupported, "one after the other", lambda: Store(me.group, "cpu", programs=2)),
        wrong(MismatchError, "same call", lambda: store.gemv_all_reduce(x[: 1 + me.rank], w)),
        wrong(
            MismatchError,
            "nothing was moved",
            lambda: store.gemm_all_to_all(x[:world], w, [1] * world, [2] * world),
        ),
    ]
    return "; ".join(filter(None, [*found, me.several("gemm_all_to_all", "fp32", 1)]))


def _captured(me: Rank) -> str:
    """Calls while a graph is captured: shapes that ran before, on memory that is there; others are refused."""
    capturable = ("gemv_all_reduce", "all_gather_matmul", "matmul_reduce_scatter")
    before = [me.several(op, "bf16", 2) for op in capturable]
    me.store.is_capturing = lambda: True  # type: ignore[method-assign]
    try:
        found = [me.several(op, "bf16", 1) for op in capturable]
        for call in (
            lambda: me.store.gemm_all_to_all(torch.ones(me.world, 4), torch.ones(2, 4), [1] * me.world, [1] * me.world),
            lambda: me.store.gemv_all_reduce(torch.ones(3, 8), torch.ones(5, 8)),
        ):
            try:
                call()
                found.append("taken")
            except NotSupported as error:
                found.append("" if "captured" in str(error) else f"says {error}")
    finally:
        del me.store.is_capturing
    return "; ".join(filter(None, [*before, *found]))


def _out_of_range(me: Rank) -> str:
    """A row that is not there pools nothing, reads nothing, and is told: to its rank, or in the next call to all."""
    batch = 2 * me.world
    offsets = torch.arange(batch + 1)

    def pool(rank: int) -> torch.Tensor:
        values = torch.zeros(batch, dtype=torch.int64)
        if me.rank == rank:
            values[1] = 4_000_000_000_000
        return me.store.embedding_all_to_all([torch.ones(4, 16)], values, offsets, batch, "sum")

    out = pool(0)
    want = torch.ones(2, me.world, 16)
    want[1, 0] = 0 if me.rank == 0 else 1
    if wrong := lib.differs(out, want):
        return wrong
    try:
        pool(-1)
        return "no error"
    except IndexError as error:
        if "values[1] of rank 0" not in str(error):
            return f"says {error}"
    pool(1)
    try:
        me.store.check()
        wrong = "no error from check" if me.rank == 1 else ""
    except IndexError:
        wrong = "an error on another rank" if me.rank != 1 else ""
    return wrong or me.several("embedding_all_to_all", "fp32", 2)


def _late(me: Rank) -> str:
    """A rank that does not come: the others name it, and the group is broken. Runs last."""
    words = me.store._words
    me.store._words = lambda *args: (*words(*args)[:-1], 1000)  # type: ignore[method-assign]
    if me.rank == me.world - 1:
        me.store._launch = lambda *args, **more: torch.zeros(0)  # type: ignore[method-assign]
    try:
        me.call("gemv_all_reduce", 0)
        if me.rank < me.world - 1:
            return "no error"
    except Timeout as error:
        if f"rank {me.world - 1} " not in str(error):
            return f"says {error}"
    except PeerError as error:  # another rank found out before this one did
        if me.world == 2 or f"failed on rank {1 - me.rank} " not in str(error):
            return f"says {error}"
    if me.rank == me.world - 1:
        deadline = time.monotonic() + 60  # it is late, not dead
        while not me.group.native.abort and time.monotonic() < deadline:
            time.sleep(0.01)
        return "" if me.group.native.abort else "was not told"
    try:
        me.call("gemv_all_reduce", 1)
    except DovetailError:
        return ""
    return "the group is not broken"


def _all_cases() -> dict[str, str]:
    import dovetail

    group = dovetail.new_group(range(_world_size()))
    group.set_timeout(20)
    lib.wait_politely()
    me = Rank(group)
    found = {f"{me.world} {case}": _guarded(lambda case=case: _case(me, case)) for case in TOGETHER[me.world]}
    return found | (_mutations() if me.world == 2 else {})


def _guarded(work: Callable[[], str]) -> str:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _world_size() -> int:
    return int(os.environ["DOVETAIL_WORLD_SIZE"])


# --- mutations --------------------------------------------------------------------------------------------------------


def _mutations() -> dict[str, str]:
    """Two ranks, rank 0 late; each with one kind of wait removed. Says what the comparison found on either rank."""
    import dovetail

    out = {}
    for case in (*MUTATED, *WHOLE):
        op, _, name = case.partition("-without-")
        group = dovetail.new_group(range(2))
        group.set_timeout(5)
        out[case] = _guarded(lambda group=group, op=op, name=name: _mutated(Rank(group), op, NAMES.index(name)))
    return out


BEFORE, AFTER = -1, -2
#: Where rank 0 is held up without a wait, and until when: (operator, lost wait) -> (the wait after which it stops, or
#: before or after its launch; what it then sees of rank 1, which ran ahead).
HELD = {
    ("gemm_all_to_all", ENTRY): (AFTER, "done, next run"),  # its output is overwritten before it was read
    ("gemm_all_to_all", DONE): (ENTRY, "ended"),  # rank 1 reads its output before rank 0 has stored to it
    ("gemv_all_reduce", ARRIVED): (BEFORE, "done"),  # rank 1 sums parts that are not there
    ("gemv_all_reduce", DONE): (ARRIVED, "ended"),
    ("all_gather_matmul", ENTRY): (BEFORE, "done"),  # rank 1 reads an input that is not there
    ("all_gather_matmul", DONE): (ENTRY, "ended"),  # rank 1 overwrites its input before rank 0 has read it
    ("matmul_reduce_scatter", ENTRY): (ARRIVED, "arrived, next run"),  # parts are overwritten before they are summed
    ("matmul_reduce_scatter", ARRIVED): (ENTRY, "ended"),
    ("embedding_all_to_all", ENTRY): (AFTER, "done, next run"),
    ("embedding_all_to_all", DONE): (ENTRY, "ended"),
}


def _mutated(me: Rank, op: str, removed: int) -> str:
    """Relaunches without one kind of wait; rank 0 is held up until it sees that rank 1 did not wait."""
    from dovetail.language import Symmetric

    got, want, inputs = me.first(op)
    (state,) = me.store._states.values()
    words, ended = state.signals.tensor, Symmetric(me.group, (1,), torch.int64, "cpu")
    where, until = HELD.get((op, removed), (None, ""))
    found = ""

    def hold(at: int, run: int) -> None:
        if at != where or me.rank != 0 or run == 3:
            return
        wanted = run + until.endswith("next run")
        theirs = {
            "done": lambda: int(words[2 + 1]),
            "arrived": lambda: int(words[4:].chunk(2)[1].min()),
            "ended": lambda: ctypes.c_int64.from_address(int(ended.table[1])).value,
        }[until.partition(",")[0]]
        deadline = time.monotonic() + 5
        while theirs() < wanted and time.monotonic() < deadline:
            time.sleep(0.001)

    def replace(what: int, wait: Callable[[], Any]) -> Any:
        here = what == removed or wait()
        hold(what, int(state.local[0]) + 1)
        return here

    with lib.expecting(replace):
        for run in (2, 3):
            if removed != ENTRY:  # otherwise ranks run ahead of each other: that is what the wait is for
                me.poison()
                got.fill_(float("nan"))
            me.store._addresses.barrier() if removed != ENTRY or run == 2 else None
            hold(BEFORE, run)
            got = me.again(inputs, float(run), got)
            ended.tensor[0] = run
            hold(AFTER, run)
            found = found or lib.differs(got, want * float(run))
    return found


# --- kernels of one rank ----------------------------------------------------------------------------------------------


def _gemm_slices() -> str:
    """Flags of finished slices, in host memory; run after run, the own slice without one; tiles across slices."""
    from dovetail.ops.kernels.gemm import gemm_slices_kernel

    rows, n, k, rank = [21, 0, 40], 50, 40, 0
    made = tiles.across(tiles.row_tiles(rows, rank, 16, slice_rows=12), 16)
    assert made.also is not None
    words = torch.zeros(len(made.slices), dtype=torch.int64)
    flags = torch.tensor([words.data_ptr() + 8 * s for s in range(len(words))])
    own = torch.from_numpy(made.slices[:, tiles.DESTINATION].copy()) == rank
    flags[own] = 0
    counters = torch.zeros(len(words), dtype=torch.int64)
    runs = tiles.runs_of(made, 16)
    assert runs is not None
    for run, (programs, by_runs) in enumerate(((1, False), (3, True)), 1):
        x = lib.numbers(0, run, sum(rows), k, dtype=torch.bfloat16)
        w = lib.numbers(1, run, n, k, dtype=torch.bfloat16)
        y = torch.full((sum(rows), n), float("nan"), dtype=torch.bfloat16)
        tables = [torch.from_numpy(t.copy()) for t in (made.tiles, made.also, made.slice_tiles)]
        gemm_slices_kernel[(programs,)](
            x, w, y, *tables, counters, flags, (run << 40) + 5, len(made.tiles), n, k,
            *(runs if by_runs else tiles.NO_RUNS),
            16, 32, 32, 2, programs, True, False, False, False, "ieee", True, False, by_runs,
        )  # fmt: skip
        wrong = lib.differs(y, lib.product(x, w))
        if wrong or words[~own].tolist() != [(run << 40) + 5] * int((~own).sum()) or words[own].any():
            return f"run {run}: {wrong or words.tolist()}"
    return ""


def _embedding_slices() -> str:
    import triton.language as tl

    from dovetail.ops.kernels.embedding import embedding_slices_kernel

    batch, dim, sizes = 12, 20, [7, 30, 4]
    made = tiles.row_tiles([4, 4, 4], 1, 4, slice_rows=3)
    words = torch.zeros(len(made.slices), dtype=torch.int64)
    flags = torch.tensor([words.data_ptr() + 8 * s for s in range(len(words))])
    counters, error = torch.zeros(len(words), dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for run, mode in enumerate(("sum", "mean"), 1):
        weights = [lib.numbers(t, run, n, dim, dtype=torch.float32) for t, n in enumerate(sizes)]
        values, offsets = lib.bags(0, run, 3, batch, sizes, 6)
        scales = lib.numbers(9, run, len(values), dtype=torch.float32)
        send = torch.full((batch, 3, dim), float("nan"))
        embedding_slices_kernel[(2,)](
            torch.tensor([w.data_ptr() for w in weights]), torch.tensor(sizes), values, offsets, scales, send,
            torch.from_numpy(made.tiles), torch.from_numpy(made.slice_tiles), counters, flags, error,
            run, len(made.tiles), 3, batch, dim, tl.float32, 4, 2, 32, mode == "mean", True, True,
        )  # fmt: skip
        want = lib.pooled(weights, values, offsets, batch, mode, scales)
        if not torch.allclose(send, want, rtol=1e-6, atol=1e-6) or words.tolist() != [run] * len(words) or error.any():
            return f"run {run}: {lib.differs(send, want)} {words.tolist()} {error.tolist()}"
    return ""


def _main() -> None:
    import dovetail

    alone = {
        "slices-gemm": _gemm_slices,
        "slices-embedding": _embedding_slices,
    }
    import dovetail.language

    found = {name: _guarded(work) for name, work in alone.items()}
    for world in TOGETHER:
        for rank, cases in enumerate(dovetail.launch(_all_cases, world, timeout=180)):
            for name, wrong in cases.items():
                found[name] = found.get(name, "") or (wrong and f"rank {rank}: {wrong}")
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
