# mypy: ignore-errors
"""Pooled embedding bags over several tables.

Owns the arithmetic of a bag, and the kernel that tells slice by slice what is pooled; the one that
stores to peers is in `fused_embedding.py`.

Legend: T tables of this rank, of one dim D and dtype; B bags per table, those of all ranks: bag b goes to rank
b // (B / world). `values` are row numbers; those of bag b of table t are values[offsets[t * B + b]] up to
values[offsets[t * B + b + 1] - 1] (a KeyedJaggedTensor's layout). A unit is BAGS neighbouring bags of one table.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, signal
from dovetail.ops.kernels.rounding import narrow, widen

FIRST, END, DESTINATION, ROW, SLICE, FIELDS = (tl.constexpr(n) for n in range(6))


@triton.jit
def pool(
    weights, num_rows, values, scales, begin, end, D, error,
    DTYPE: tl.constexpr, BAGS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_D: tl.constexpr,
    MEAN: tl.constexpr, SCALED: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """[BAGS, BLOCK_D] in fp32: the sum (or mean) of the rows that `values[begin..end)` name, bag by bag.

    DEPTH rows of each bag are loaded at a time. A row number that the table has not adds nothing and sets `error`
    (one int64) to 1 + its place in `values`. A mean divides by the bag's length; an empty bag is zero.
    """
    dims = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BAGS, BLOCK_D), tl.float32)
    longest = tl.max(end - begin, axis=0)
    done = longest * 0
    while done < longest:
        place = begin[:, None] + done + tl.arange(0, DEPTH)[None, :]
        there = place < end[:, None]
        row = tl.load(values + place, mask=there, other=0).to(tl.int64)
        good = there & (row >= 0) & (row < num_rows)
        wrong = tl.max(tl.max(tl.where(there & ~good, place + 1, 0), axis=1), axis=0)
        tl.store(error, wrong, mask=wrong > 0)
        at = weights + row[:, :, None] * D + dims[None, None, :]
        part = widen(tl.load(at, mask=good[:, :, None] & (dims[None, None, :] < D), other=0.0), SOFT)
        if SCALED:
            part = part * widen(tl.load(scales + place, mask=good, other=0.0), SOFT)[:, :, None]
        acc += tl.sum(part, axis=1)
        done += DEPTH
    if MEAN:
        acc = acc / tl.maximum(end - begin, 1).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_units", "value"])
def embedding_slices_kernel(
    tables, num_rows, values, offsets, scales, send, units, slice_units, counters, flags, error,
    value: tl.int64, num_units: tl.int32, T, B, D,
    DTYPE: tl.constexpr, BAGS: tl.constexpr, DEPTH: tl.constexpr, BLOCK_D: tl.constexpr,
    MEAN: tl.constexpr, SCALED: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Pools every bag into `send` [B, T, D]; whoever finishes a slice of bags raises that slice's flag.

    `send` is [destination][bag of the destination][table][dim], so a slice is one run of memory. It waits for nobody;
    any number of programs share the work.

    Args:
        tables: int64 [T], the addresses of the tables' weights, of DTYPE.
        num_rows: int64 [T].
        values, offsets: integers (32 or 64 bits), see the legend.
        scales: a factor per value if SCALED, any float dtype; otherwise not read (pass `values`).
        send: pointer to DTYPE.
        units: int64 [num_units, 5], a row per BAGS bags in the order in which they are pooled (`tiles.row_tiles` with
            BAGS as the height): first bag, end bag, destination, not read, slice. Each is done for all T tables.
        slice_units: int64, how many rows of `units` each slice has.
        counters: int64 per slice, zero before the first run; they count on.
        flags: int64 per slice, the address of a 64-bit word in device or pinned host memory; 0 if nobody waits for it.
        error: one int64, zero; set if a row number is out of range.
        value: what a finished slice's word is set to, a release at system scope.
    """
    bags, dims = tl.arange(0, BAGS), tl.arange(0, BLOCK_D)
    for unit in range(tl.program_id(0), num_units * T, tl.num_programs(0)):
        table = unit % T
        entry = units + unit // T * FIELDS
        first, last_bag, part = tl.load(entry + FIRST), tl.load(entry + END), tl.load(entry + SLICE)
        bag = first + bags
        there = bag < last_bag
        begin = tl.load(offsets + table.to(tl.int64) * B + bag, mask=there, other=0).to(tl.int64)
        end = tl.load(offsets + table.to(tl.int64) * B + bag + 1, mask=there, other=0).to(tl.int64)
        weights = tl.multiple_of(tl.load(tables + table).to(tl.pointer_type(DTYPE)), 16)
        acc = pool(
            weights, tl.load(num_rows + table), values, scales, begin, end, D, error,
            DTYPE, BAGS, DEPTH, BLOCK_D, MEAN, SCALED, SOFT,
        )  # fmt: skip
        at = send + (bag[:, None] * T + table) * D + dims[None, :]
        tl.store(at, narrow(acc, DTYPE, SOFT), mask=there[:, None] & (dims[None, :] < D))
        last = arrive(counters + part, tl.load(slice_units + part) * T)
        flag = tl.load(flags + part)
        signal(flag.to(tl.pointer_type(tl.int64)), value, last & (flag != 0))
