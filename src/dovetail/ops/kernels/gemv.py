# mypy: ignore-errors
"""GEMV + all-reduce: few rows, so that reading the weights is all the work. Persistent, one kernel for both.

Owns a direct reduce-scatter and all-gather by column tiles: tile t belongs to rank t % world, who sums it and stores it
in everybody's output.

Legend: x [M, K], w [N, K], the K of this rank; out [M, N]. A tile is BM rows of a column tile, BN wide.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, epoch, peer, put, remote_first, signal
from dovetail.ops.kernels.gemm import product
from dovetail.ops.kernels.protocol import ARRIVED, expect, leave, tell_done
from dovetail.ops.kernels.protocol import word as word_of
from dovetail.ops.kernels.rounding import narrow, widen


@triton.jit
def thin_product(
    x, w, num_rows, num_columns, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SOFT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile in fp32 without tensor cores, for up to 16 rows; arguments as those of `gemm.product`.

    BM x BN x BK sums are kept and added up at the end, so threads lie along K as what they load does. A product by
    `tl.dot` in fp32 takes 2.5 to 8 times as long, since it goes through shared memory number by number.
    """
    rows, columns, depth = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    rows = tl.minimum(rows, num_rows - 1)
    if not EVEN_N:
        columns = tl.minimum(columns, num_columns - 1)
    a_at = x + (rows[:, None] * K + depth[None, :])
    b_at = w + (columns[:, None] * K + depth[None, :])
    acc = tl.zeros((BM, BN, BK), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):  # Triton looks ahead by itself only for `tl.dot`
        if EVEN_K:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=depth[None, :] < K - k, other=0.0)
            b = tl.load(b_at, mask=depth[None, :] < K - k, other=0.0)
        acc += widen(a, SOFT)[:, None, :] * widen(b, SOFT)[None, :, :]
        a_at += BK
        b_at += BK
    return tl.sum(acc, axis=2)


@triton.jit(do_not_specialize=["rank", "world", "walkers", "status", "bound", "M"])
def gemv_all_reduce_kernel(
    x, w, outs, stages, signals, local, counters, status: tl.int64, bound: tl.int64, rank: tl.int32, world: tl.int32,
    walkers: tl.int32, M: tl.int32, N, K, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr, THIN: tl.constexpr,
    REMOTE_FIRST: tl.constexpr,
):  # fmt: skip
    """out = sum over the ranks of x @ w.T, the same bits on every rank.

    A program of a rank rounds its parts of an owner's tiles to DTYPE, stores them in the owner's staging memory and
    raises one word there for all of them: to raise a word takes some microseconds, as long as many a tile. The owner's
    program of that number sums the parts in the order of the ranks in fp32, rounds once and stores the tiles in every
    output; the last of its programs tells everybody (DONE), and a rank ends when all have told it.

    No rank waits for another to begin. A part in the owner's staging: this rank ended its last run, so that owner had
    summed everything of it. A tile in a peer's output: its part of this run came, so its run has begun.

    Args:
        outs: int64 [world], the addresses of the ranks' outputs.
        stages: int64 [world], the addresses of their staging memory [world, ceil(tiles / world), M, BN].
        counters: one int64, zero before the first run.
        walkers: programs among which tiles are shared out, the same on all ranks; each of them has so many or more.
        THIN: no tensor cores, see `thin_product`: how many of its steps are loaded ahead. 0: by `tl.dot`; BM >= M then.
    """
    tiles = tl.cdiv(N, BN)
    room = tl.cdiv(tiles, world)  # tiles of one source in staging memory
    size = M.to(tl.int64) * BN
    run = epoch(local)
    program = tl.program_id(0)
    status_at = status.to(tl.pointer_type(tl.int64))
    rows, cols = tl.arange(0, BM), tl.arange(0, BN)
    flat = rows[:, None] * BN + cols[None, :]
    for k in range(world):
        owner = remote_first(k, rank, world, REMOTE_FIRST)
        many = (tiles - owner + world - 1) // world
        stage = peer(stages, owner, DTYPE) + rank * room * size
        for place in range(program, tl.where(program < walkers, many, 0), walkers):
            column = (place * world + owner) * BN
            at = w + column.to(tl.int64) * K
            for row in range(0, M, BM):
                if THIN:
                    acc = thin_product(
                        x + row * K, at, M - row, N - column, K, BM, BN, BK, EVEN_N, EVEN_K, SOFT, THIN
                    )  # fmt: skip
                else:
                    acc = product(
                        x, at, M, N - column, K, BM, BN, BK, False, EVEN_N, EVEN_K, PRECISION, SOFT
                    )  # fmt: skip
                inside = (rows[:, None] < M - row) & (cols[None, :] >= 0)
                put(stage + place * size + row * BN, flat, narrow(acc, DTYPE, SOFT), inside)
        if program < tl.minimum(walkers, many):
            signal(word_of(signals, owner, ARRIVED, world, rank * walkers + program), run)

    mine = (tiles - rank + world - 1) // world
    busy = tl.minimum(walkers, mine)
    if program < busy:
        here = True
        for source in range(world):
            at = word_of(signals, rank, ARRIVED, world, source * walkers + program)
            here = expect(at, run, local, status_at, bound, source, ARRIVED) & here
        if here:
            for place in range(program, mine, walkers):
                column = (place * world + rank) * BN + cols
                for row in range(0, M, BM):
                    inside = (rows[:, None] < M - row) & (cols[None, :] >= 0)
                    part = peer(stages, rank, DTYPE) + place * size + row * BN
                    acc = widen(tl.load(part + flat, mask=inside, other=0.0), SOFT)
                    for _ in range(1, world):
                        part += room * size
                        acc += widen(tl.load(part + flat, mask=inside, other=0.0), SOFT)
                    value = narrow(acc, DTYPE, SOFT)
                    wanted = inside & (column[None, :] < N)
                    for k in range(world):
                        out = peer(outs, (rank + 1 + k) % world, DTYPE) + row * N
                        put(out, rows[:, None] * N + column[None, :], value, wanted)
            if arrive(counters, busy):
                for k in range(1, world):
                    tell_done(signals, rank, world, (rank + k) % world, run)
    if (mine == 0) & (program == 0):
        for k in range(1, world):
            tell_done(signals, rank, world, (rank + k) % world, run)
    leave(signals, local, status_at, bound, rank, world, run)
