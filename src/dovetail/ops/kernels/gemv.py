# mypy: ignore-errors
"""GEMV + all-reduce: few rows, so that reading the weights is all the work. Persistent, one kernel for both.

Owns a direct reduce-scatter and all-gather by column tiles: tile t belongs to rank t % world, who sums it and stores it
in everybody's output.

Legend: x [M, K], w [N, K], the K of this rank; out [M, N]. A column tile is BN wide.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, epoch, peer, put, remote_first, signal
from dovetail.ops.kernels.gemm import product
from dovetail.ops.kernels.protocol import ARRIVED, expect, leave, tell_done
from dovetail.ops.kernels.protocol import word as word_of
from dovetail.ops.kernels.rounding import narrow, widen


@triton.jit
def _tile_of(index, tiles, rank, world, REMOTE_FIRST: tl.constexpr):
    """The index-th tile that this rank computes: those of other owners first, owner by owner.

    Rank 0 of 2, five tiles: 1, 3, 0, 2, 4.
    """
    owner = remote_first(0, rank, world, REMOTE_FIRST)
    many = (tiles - owner + world - 1) // world
    k = 1
    while index >= many:
        index -= many
        owner = remote_first(k, rank, world, REMOTE_FIRST)
        many = (tiles - owner + world - 1) // world
        k += 1
    return index * world + owner


@triton.jit(do_not_specialize=["rank", "world", "status", "bound", "M"])
def gemv_all_reduce_kernel(
    x, w, outs, stages, signals, local, counters, status: tl.int64, bound: tl.int64, rank: tl.int32, world: tl.int32,
    M: tl.int32, N, K, DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
    REMOTE_FIRST: tl.constexpr,
):  # fmt: skip
    """out = sum over the ranks of x @ w.T, the same bits on every rank.

    A rank rounds its part of a tile to DTYPE, stores it in the owner's staging memory and raises the tile's word there.
    The owner sums the parts in the order of the ranks in fp32, rounds once and stores the tile in every output; after
    its last tile it tells everybody (DONE), and a rank ends when all have told it.

    No rank waits for another to begin. A part in the owner's staging: this rank ended its last run, so that owner had
    summed everything of it. A tile in a peer's output: its part of this run came, so its run has begun.

    Args:
        outs: int64 [world], the addresses of the ranks' outputs.
        stages: int64 [world], the addresses of their staging memory [world, ceil(tiles / world), M, BN].
        counters: one int64, zero before the first run.
    """
    tiles = tl.cdiv(N, BN)
    room = tl.cdiv(tiles, world)  # tiles of one source in staging memory
    run = epoch(local)
    program = tl.program_id(0)
    status_at = status.to(tl.pointer_type(tl.int64))
    rows, cols = tl.arange(0, BM), tl.arange(0, BN)
    inside = (rows[:, None] < M) & (cols[None, :] >= 0)
    flat = rows[:, None] * BN + cols[None, :]
    for index in range(program, tiles, tl.num_programs(0)):
        tile = _tile_of(index, tiles, rank, world, REMOTE_FIRST)
        column = tile * BN
        acc = product(
            x, w + column.to(tl.int64) * K, M, N - column, K,
            BM, BN, BK, False, EVEN_N, EVEN_K, PRECISION, SOFT,
        )  # fmt: skip
        owner, place = tile % world, tile // world
        stage = peer(stages, owner, DTYPE) + (rank * room + place).to(tl.int64) * M * BN
        put(stage, flat, narrow(acc, DTYPE, SOFT), inside)
        signal(word_of(signals, owner, ARRIVED, world, rank * room + place), run)

    mine = (tiles - rank + world - 1) // world
    here = True
    for place in range(program, mine, tl.num_programs(0)):
        for source in range(world):
            at = word_of(signals, rank, ARRIVED, world, source * room + place)
            here = expect(at, run, local, status_at, bound, source, ARRIVED) & here
        if here:
            part = peer(stages, rank, DTYPE) + M.to(tl.int64) * BN * place
            acc = widen(tl.load(part + flat, mask=inside, other=0.0), SOFT)
            for _ in range(1, world):
                part += M.to(tl.int64) * BN * room
                acc += widen(tl.load(part + flat, mask=inside, other=0.0), SOFT)
            column = (place * world + rank) * BN + cols
            value = narrow(acc, DTYPE, SOFT)
            wanted = (rows[:, None] < M) & (column[None, :] < N)
            for k in range(world):
                put(peer(outs, (rank + 1 + k) % world, DTYPE), rows[:, None] * N + column[None, :], value, wanted)
            if arrive(counters, mine):
                for k in range(1, world):
                    tell_done(signals, rank, world, (rank + k) % world, run)
    if (mine == 0) & (program == 0):
        for k in range(1, world):
            tell_done(signals, rank, world, (rank + k) % world, run)
    leave(signals, local, status_at, bound, rank, world, run)
