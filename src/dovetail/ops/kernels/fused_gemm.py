# mypy: ignore-errors
"""GEMMs that store to peers, or read from them, while they run. Persistent: every program must be on the GPU at once.

Owns the three operators; the tile product is in `gemm.py`, the words in `protocol.py`. Each goes through its segments
(the rows of one destination or source) in the order of a table. A program waits for the peer of a segment before its
first tile of it, never inside: there its tiles are one flattened loop, as in `gemm_slices_kernel`, whose loads Triton
moves forward past anything that they don't depend on.

Legend: as in `gemm.py`. `segments` is int64 [world, 3]: rank, first row tile, end row tile.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, epoch, peer, signal
from dovetail.ops.kernels.gemm import END, FIELDS, FIRST, ROW, SLICE, locate, product, store_tile
from dovetail.ops.kernels.protocol import (
    ARRIVED,
    DONE,
    ENTRY,
    LOCAL,
    enter,
    expect,
    first_of,
    leave,
    tell_done,
)
from dovetail.ops.kernels.protocol import word as word_of
from dovetail.ops.kernels.rounding import narrow, widen


@triton.jit(do_not_specialize=["rank", "world", "status", "bound"])
def gemm_all_to_all_kernel(
    x, w, outs, tiles, segments, signals, local, counters, status: tl.int64, bound: tl.int64,
    rank: tl.int32, world: tl.int32, N, K, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Row tiles of x @ w.T, each stored where it belongs: in the output of its destination.

    ENTRY of a destination: its output may be written. DONE to a destination, from the last program that stored to it:
    all rows of this rank are there. The kernel ends when all peers' rows are here.

    Args:
        outs: int64 [world], the addresses of the ranks' outputs [rows, N].
        tiles: `tiles.row_tiles`, with the rows in the destinations' outputs.
        counters: int64, one per rank, zero before the first run; a table of tiles has its own.
    """
    columns = tl.cdiv(N, BN)
    run = epoch(local)
    program = tl.program_id(0)
    status_at = status.to(tl.pointer_type(tl.int64))
    enter(signals, rank, world, run)
    for k in range(world):
        to = tl.load(segments + k * 3).to(tl.int32)
        first = tl.load(segments + k * 3 + 1).to(tl.int32)
        end = tl.load(segments + k * 3 + 2).to(tl.int32)
        here = True
        if (to != rank) & (first < end):
            here = expect(word_of(signals, rank, ENTRY, world, to), run, local, status_at, bound, to, ENTRY)
        if here:
            out = peer(outs, to, DTYPE)
            done = word_of(signals, to, DONE, world, rank)
            total = (end - first) * columns
            if (total == 0) & (program == 0) & (to != rank):
                tell_done(signals, rank, world, to, run)
            begin = first * columns
            for tile in tl.range(first_of(program, begin, PROGRAMS), end * columns, PROGRAMS, flatten=True):
                row_tile, column_tile = locate(tile - begin, first, end, columns, GROUP)
                entry = tiles + row_tile * FIELDS
                row = tl.load(entry + FIRST)
                num_rows = (tl.load(entry + END) - row).to(tl.int32)
                column = column_tile * BN
                acc = product(
                    x + row * K, w + column.to(tl.int64) * K, num_rows, N - column, K,
                    BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
                )  # fmt: skip
                at = out + tl.load(entry + ROW) * N + column
                store_tile(at, acc, num_rows, N - column, N, DTYPE, BM, BN, EVEN_M, EVEN_N, SOFT)
                last = arrive(counters + to, total)
                signal(done, run, last & (to != rank))
    leave(signals, local, status_at, bound, rank, world, run)


@triton.jit(do_not_specialize=["rank", "world", "status", "bound", "num_slices", "slice_rows", "M"])
def matmul_reduce_scatter_kernel(
    x, w, out, stages, tiles, slice_tiles, segments, signals, local, counters, status: tl.int64, bound: tl.int64,
    rank: tl.int32, world: tl.int32, num_slices: tl.int32, slice_rows: tl.int32, M: tl.int32, N, K,
    DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
    SUM_ROWS: tl.constexpr, SUM_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Partial products x @ w.T of all ranks, summed; rank r gets rows r * M up to (r + 1) * M.

    A partial tile is rounded to DTYPE and stored in its owner's staging memory, at this rank's place; when a slice of
    it is complete, the owner is told (`arrived`). The owner sums in the order of the ranks in fp32 and rounds once: the
    bits of "round each partial, then a reduce-scatter". ENTRY of an owner: it has summed its last run, so its staging
    may be written.

    Args:
        out: [M, N], on this rank.
        stages: int64 [world], the addresses of the ranks' staging memory [world, M, N].
        tiles: `tiles.row_tiles` with slices of `slice_rows`; `row` is that in the owner's M rows.
        slice_tiles: int64, how many row tiles each slice has.
        num_slices: of one owner. Its words ARRIVED are [world, num_slices].
        counters: int64, one per slice of `tiles`, zero before the first run.
    """
    columns = tl.cdiv(N, BN)
    run = epoch(local)
    program = tl.program_id(0)
    status_at = status.to(tl.pointer_type(tl.int64))
    enter(signals, rank, world, run)
    for k in range(world):
        to = tl.load(segments + k * 3).to(tl.int32)
        first = tl.load(segments + k * 3 + 1).to(tl.int32)
        end = tl.load(segments + k * 3 + 2).to(tl.int32)
        here = True
        if to != rank:
            here = expect(word_of(signals, rank, ENTRY, world, to), run, local, status_at, bound, to, ENTRY)
        if here:
            stage = peer(stages, to, DTYPE) + rank.to(tl.int64) * M * N
            arrived = word_of(signals, to, ARRIVED, world, rank * num_slices - k * num_slices)
            begin = first * columns
            for tile in tl.range(first_of(program, begin, PROGRAMS), end * columns, PROGRAMS, flatten=True):
                row_tile, column_tile = locate(tile - begin, first, end, columns, GROUP)
                entry = tiles + row_tile * FIELDS
                row = tl.load(entry + FIRST)
                num_rows = (tl.load(entry + END) - row).to(tl.int32)
                part = tl.load(entry + SLICE)
                column = column_tile * BN
                acc = product(
                    x + row * K, w + column.to(tl.int64) * K, num_rows, N - column, K,
                    BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
                )  # fmt: skip
                at = stage + tl.load(entry + ROW) * N + column
                store_tile(at, acc, num_rows, N - column, N, DTYPE, BM, BN, EVEN_M, EVEN_N, SOFT)
                last = arrive(counters + part, tl.load(slice_tiles + part) * columns)
                signal(arrived + part, run, last)
    here = True
    wide = tl.cdiv(N, SUM_COLUMNS)
    high = tl.cdiv(slice_rows, SUM_ROWS)
    mine = peer(stages, rank, DTYPE)
    rows, cols = tl.arange(0, SUM_ROWS), tl.arange(0, SUM_COLUMNS)
    ready = 0
    for unit in range(program, num_slices * high * wide, PROGRAMS):
        part = unit // (high * wide)
        if part >= ready:
            for source in range(world):
                at = word_of(signals, rank, ARRIVED, world, source * num_slices + part)
                here = expect(at, run, local, status_at, bound, source, ARRIVED) & here
            ready = part + 1
        if here:
            row = part * slice_rows + unit // wide % high * SUM_ROWS + rows
            column = unit % wide * SUM_COLUMNS + cols
            inside = (row[:, None] < tl.minimum((part + 1) * slice_rows, M)) & (column[None, :] < N)
            offset = row.to(tl.int64)[:, None] * N + column[None, :]
            at = mine + offset
            acc = widen(tl.load(at, mask=inside, other=0.0), SOFT)
            for _ in range(1, world):
                at += M.to(tl.int64) * N
                acc += widen(tl.load(at, mask=inside, other=0.0), SOFT)
            tl.store(out + offset, narrow(acc, DTYPE, SOFT), mask=inside)
    leave(signals, local, status_at, bound, rank, 1, run)


@triton.jit(do_not_specialize=["rank", "world", "status", "bound", "M"])
def all_gather_matmul_kernel(
    w, y, gathered, xs, tiles, segments, signals, local, counters, status: tl.int64, bound: tl.int64,
    rank: tl.int32, world: tl.int32, M: tl.int32, N, K, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
    GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = concatenation of all ranks' x [M, K], times w.T; rank r's rows are read where they lie.

    ENTRY of a source: its x is there. DONE to a source, from the last program that read it: x may be written again; a
    rank ends when all have read its own. With GATHER the rows are first copied to `gathered` [world * M, K], part by
    part by all programs, and read from there: once over the link, however many columns y has.

    Args:
        xs: int64 [world], the addresses of the ranks' x.
        tiles: `tiles.row_tiles` of world * M rows; `row` is that in the source's x.
        counters: int64, two per rank, zero before the first run; a table of tiles has its own.
    """
    columns = tl.cdiv(N, BN)
    run = epoch(local)
    program = tl.program_id(0)
    status_at = status.to(tl.pointer_type(tl.int64))
    enter(signals, rank, world, run)
    for k in range(world):
        source = tl.load(segments + k * 3).to(tl.int32)
        first = tl.load(segments + k * 3 + 1).to(tl.int32)
        end = tl.load(segments + k * 3 + 2).to(tl.int32)
        here = True
        if source != rank:
            here = expect(word_of(signals, rank, ENTRY, world, source), run, local, status_at, bound, source, ENTRY)
        x = peer(xs, source, DTYPE)
        if GATHER:
            copied = counters + world + source
            copy = gathered + source.to(tl.int64) * M * K
            items = M.to(tl.int64) * K
            if here:
                lanes = tl.arange(0, BLOCK)
                at = program.to(tl.int64) * BLOCK + lanes
                for _ in range(program, tl.cdiv(items, BLOCK).to(tl.int32), PROGRAMS):
                    tl.store(copy + at, tl.load(x + at, mask=at < items), mask=at < items)
                    at += PROGRAMS * BLOCK
                last = arrive(counters + source, PROGRAMS)
                signal(word_of(signals, source, DONE, world, rank), run, last & (source != rank))
                signal(copied, run, last)
            here = expect(copied, run, local, status_at, bound, rank, LOCAL) & here
            x = copy
        if here:
            done = word_of(signals, source, DONE, world, rank)
            if not GATHER:
                is_first = (program == 0) & (source != rank)
                if ((end - first) * columns == 0) & is_first:
                    tell_done(signals, rank, world, source, run)  # no tile will
            begin = first * columns
            for tile in tl.range(first_of(program, begin, PROGRAMS), end * columns, PROGRAMS, flatten=True):
                row_tile, column_tile = locate(tile - begin, first, end, columns, GROUP)
                entry = tiles + row_tile * FIELDS
                row = tl.load(entry + FIRST)
                num_rows = (tl.load(entry + END) - row).to(tl.int32)
                column = column_tile * BN
                acc = product(
                    x + tl.load(entry + ROW) * K, w + column.to(tl.int64) * K, num_rows, N - column, K,
                    BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
                )  # fmt: skip
                at = y + row * N + column
                store_tile(at, acc, num_rows, N - column, N, DTYPE, BM, BN, EVEN_M, EVEN_N, SOFT)
                if not GATHER:
                    last = arrive(counters + source, (end - first) * columns)
                    signal(done, run, last & (source != rank))
    leave(signals, local, status_at, bound, rank, world, run)
