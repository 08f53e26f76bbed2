# mypy: ignore-errors
"""Embedding bags that go straight to the rank that wants them. Persistent: every program must be on the GPU at once.

Owns the operator; the bag is in `embedding.py`, the words in `protocol.py`. Legend: as in `embedding.py`.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, epoch, peer, put, signal
from dovetail.ops.kernels.embedding import END, FIELDS, FIRST, ROW, pool
from dovetail.ops.kernels.protocol import DONE, ENTRY, enter, expect, first_of, leave, tell_done
from dovetail.ops.kernels.protocol import word as word_of
from dovetail.ops.kernels.rounding import narrow


@triton.jit(do_not_specialize=["rank", "world", "status", "bound", "first_table", "all_tables"])
def embedding_all_to_all_kernel(
    tables, num_rows, values, offsets, scales, outs, units, segments, signals, local, counters, error,
    status: tl.int64, bound: tl.int64, rank: tl.int32, world: tl.int32, first_table: tl.int32, all_tables: tl.int32,
    T, B, D, DTYPE: tl.constexpr, BAGS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_D: tl.constexpr,
    MEAN: tl.constexpr, SCALED: tl.constexpr, SOFT: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Pools every bag of this rank's tables and stores it in its destination's out [B / world, all_tables, D].

    ENTRY of a destination: its output may be written. DONE to it, from the last program that stored there: all tables
    of this rank are in. The kernel ends when all peers' tables are here.

    Args:
        outs: int64 [world], the addresses of the ranks' outputs.
        units: `tiles.row_tiles` of the B bags with BAGS as height; `row` is the bag's number at its destination.
        segments: int64 [world, 3]: destination, first unit, end unit.
        counters: int64, one per rank, zero before the first run; a table of tiles has its own.

    The others as in `embedding_slices_kernel`.
    """
    run = epoch(local)
    program = tl.program_id(0)
    status_at = status.to(tl.pointer_type(tl.int64))
    bags, dims = tl.arange(0, BAGS), tl.arange(0, BLOCK_D)
    enter(signals, rank, world, run)
    for k in range(world):
        to = tl.load(segments + k * 3).to(tl.int32)
        first_unit = tl.load(segments + k * 3 + 1).to(tl.int32)
        end_unit = tl.load(segments + k * 3 + 2).to(tl.int32)
        total = (end_unit - first_unit) * T
        here = True
        if (to != rank) & (total > 0):
            here = expect(word_of(signals, rank, ENTRY, world, to), run, local, status_at, bound, to, ENTRY)
        if (total == 0) & (program == 0) & (to != rank):
            tell_done(signals, rank, world, to, run)
        if here:
            out = peer(outs, to, DTYPE)
            for unit in range(first_of(program, first_unit * T, PROGRAMS), end_unit * T, PROGRAMS):
                table = unit % T
                entry = units + unit // T * FIELDS
                first = tl.load(entry + FIRST)
                bag = first + bags
                there = bag < tl.load(entry + END)
                at = offsets + table.to(tl.int64) * B + bag
                begin = tl.load(at, mask=there, other=0).to(tl.int64)
                end = tl.load(at + 1, mask=there, other=0).to(tl.int64)
                weights = tl.multiple_of(tl.load(tables + table).to(tl.pointer_type(DTYPE)), 16)
                acc = pool(
                    weights, tl.load(num_rows + table), values, scales, begin, end, D, error,
                    DTYPE, BAGS, DEPTH, BLOCK_D, MEAN, SCALED, SOFT,
                )  # fmt: skip
                row = tl.load(entry + ROW) + bags
                place = (row[:, None] * all_tables + first_table + table) * D + dims[None, :]
                put(out, place, narrow(acc, DTYPE, SOFT), there[:, None] & (dims[None, :] < D))
                last = arrive(counters + to, total)
                signal(word_of(signals, to, DONE, world, rank), run, last & (to != rank))
    leave(signals, local, status_at, bound, rank, world, run)
