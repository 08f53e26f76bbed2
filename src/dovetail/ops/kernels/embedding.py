# mypy: ignore-errors
"""Pooled embedding bags over several tables, and the updates of their weights.

Owns the arithmetic of a bag and of an update, and the kernel that tells slice by slice what is pooled; the one that
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


@triton.jit
def _gradient(
    addresses, bags, scales, grad, place, num_values, D,
    BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The sum of the gradients of the values from `place` on that name the same row, in their order, fp32."""
    dims, depth = tl.arange(0, BLOCK_D), tl.arange(0, DEPTH)
    address = tl.load(addresses + place)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    same = tl.full((), 1, tl.int32)
    while same == 1:
        at = place + depth
        there = at < num_values
        mine = there & (tl.load(addresses + at, mask=there, other=0) == address)
        bag = tl.load(bags + at, mask=mine, other=0).to(tl.int64)
        inside = mine[:, None] & (dims[None, :] < D)
        part = widen(tl.load(grad + bag[:, None] * D + dims[None, :], mask=inside, other=0.0), SOFT)
        if SCALED:
            part = part * widen(tl.load(scales + at, mask=mine, other=0.0), SOFT)[:, None]
        acc += tl.sum(part, axis=0)
        same = tl.min(mine.to(tl.int32), axis=0)
        place += DEPTH
    return acc


@triton.jit
def _is_head(addresses, place):
    """True if the value at `place` is the first that names its row; address 0 is no row."""
    before = tl.load(addresses + place - 1, mask=place > 0, other=0)
    return before != tl.load(addresses + place)


@triton.jit(do_not_specialize=["num_values", "lr"])
def sgd_update_kernel(
    addresses, bags, scales, grad, lr: tl.float32, num_values: tl.int64, D,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """row -= lr * gradient, in place, for every row that some value names; nothing of a table's size is made.

    A program takes every `num_programs`-th value and does the whole row if that value is the first of its row, so the
    result does not depend on who is faster. A row in many bags is one program's work.

    Args:
        addresses: int64 [num_values], the address of the row of weights of each value, sorted; equal ones in the order
            of `values`. Those at address 0 are passed over.
        bags: integers [num_values], in the same order: which row of `grad` a value's gradient is.
        scales: a factor per value in the same order if SCALED (1 / length of the bag, a per-sample weight).
        grad: pointer to rows of D.
    """
    dims = tl.arange(0, BLOCK_D)
    place = tl.program_id(0).to(tl.int64)
    while place < num_values:
        if _is_head(addresses, place):
            total = _gradient(addresses, bags, scales, grad, place, num_values, D, BLOCK_D, DEPTH, SCALED, SOFT)
            at = tl.load(addresses + place).to(tl.pointer_type(DTYPE)) + dims
            value = widen(tl.load(at, mask=dims < D, other=0.0), SOFT) - lr * total
            tl.store(at, narrow(value, DTYPE, SOFT), mask=dims < D)
        place += tl.num_programs(0)


@triton.jit(do_not_specialize=["num_values", "lr", "eps"])
def rowwise_adagrad_update_kernel(
    addresses, states, bags, scales, grad, lr: tl.float32, eps: tl.float32, num_values: tl.int64, D,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, SCALED: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """state += mean(gradient ** 2); row -= lr * gradient / (sqrt(state) + eps), in place; one fp32 state per row.

    Args:
        states: int64 [num_values], the address of the state of each value's row, in the order of `addresses`.

    The others as in `sgd_update_kernel`.
    """
    dims = tl.arange(0, BLOCK_D)
    place = tl.program_id(0).to(tl.int64)
    while place < num_values:
        if _is_head(addresses, place):
            total = _gradient(addresses, bags, scales, grad, place, num_values, D, BLOCK_D, DEPTH, SCALED, SOFT)
            state_at = tl.load(states + place).to(tl.pointer_type(tl.float32))
            state = tl.load(state_at) + tl.sum(total * total, axis=0) / D
            tl.store(state_at, state)
            at = tl.load(addresses + place).to(tl.pointer_type(DTYPE)) + dims
            value = widen(tl.load(at, mask=dims < D, other=0.0), SOFT) - lr * total / (tl.sqrt(state) + eps)
            tl.store(at, narrow(value, DTYPE, SOFT), mask=dims < D)
        place += tl.num_programs(0)
