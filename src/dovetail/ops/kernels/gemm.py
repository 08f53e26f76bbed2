# mypy: ignore-errors
"""GEMM kernels, y = x @ w.T, that tell slice by slice what is finished, in the order of a table made on the host.

Owns the tile product, the kernel of persistent programs that walk over tiles, and the one with a program to each part
of K of a tile; the fused ones are in `fused_gemm.py`.

Legend: x [M, K], w [N, K], y [M, N], rows contiguous. A tile is BM x BN, of depth BK. The table of row tiles
(`dovetail.ops.gpu.tiles`) has five int64 per row tile: first_row, end_row, destination, row in the destination's
buffer, slice. EVEN_M: every row tile has BM rows; EVEN_N, EVEN_K: N, K are multiples of BN, BK.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, fence, signal
from dovetail.ops.kernels.rounding import narrow, widen

FIRST, END, DESTINATION, ROW, SLICE, FIELDS = (tl.constexpr(n) for n in range(6))
# Columns of a table of tasks: rows from first to end - 1; which columns of w, in tiles; K from begin to stop - 1, in
# steps of BK; how many parts the tile has if this is the last one, otherwise -1; where in `sums` this part is put, or
# the first of its tile if it is the last; which of `arrivals` is the tile's; the slices of its first and last rows.
TASK_FIRST, TASK_END, TASK_COLUMN, TASK_BEGIN, TASK_STOP, TASK_PARTS, TASK_SUM, TASK_TILE, TASK_SLICE, TASK_ALSO = (
    tl.constexpr(n) for n in range(10)
)
TASK_FIELDS = tl.constexpr(10)


@triton.jit
def locate(tile, first, end, columns, GROUP: tl.constexpr):
    """(row tile, column tile) of the tile-th of the row tiles first..end-1.

    Tiles go in groups of GROUP row tiles, column by column, so that programs side by side share what they load. Two
    row tiles, three columns, GROUP 2: (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2).
    """
    group = GROUP * columns
    begin = first + tile // group * GROUP
    size = tl.minimum(end - begin, GROUP)
    inside = tile % group
    return begin + inside % size, inside // size


@triton.jit
def product(
    x, w, num_rows, num_columns, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """One tile in fp32. `x` and `w` point to its first row in either; `num_rows` and `num_columns` of it are there."""
    return product_of_part(
        x, w, num_rows, num_columns, K, K, BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT
    )  # fmt: skip


@triton.jit
def product_of_part(
    x, w, num_rows, num_columns, K, stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """`product` over K elements of rows that are `stride` apart; EVEN_K is about these K.

    Rows and columns that are not there repeat the last one and are not stored: loads need no mask for them.
    """
    rows, columns, depth = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    if not EVEN_M:
        rows = tl.minimum(rows, num_rows - 1)
    if not EVEN_N:
        columns = tl.minimum(columns, num_columns - 1)
    a_at = x + (rows[:, None] * stride + depth[None, :])
    b_at = w + (columns[None, :] * stride + depth[:, None])
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=depth[None, :] < K - k, other=0.0)
            b = tl.load(b_at, mask=depth[:, None] < K - k, other=0.0)
        if SOFT:
            a, b = widen(a, SOFT), widen(b, SOFT)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += BK
        b_at += BK
    return acc


@triton.jit
def product_of_boxes(
    x, w, row, column, begin, stop,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The same by tensor descriptors, x of boxes BM x BK and w of BN x BK: a tile from `row` and `column` on.

    `begin` and `stop` are of K, multiples of BK (`stop` may be K itself); what lies outside of a tensor is zero. No
    thread makes addresses, and what is on its way needs no registers.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(begin, stop, BK):
        a, b = x.load([row, k]), w.load([column, k])
        if SOFT:
            a, b = widen(a, SOFT), widen(b, SOFT)
        acc = tl.dot(a, b.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_tile(
    y, acc, num_rows, num_columns, N, DTYPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Stores what is there of a tile, rounded; `y` points to its first element, rows are N apart."""
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    at = y + (rows[:, None] * N + columns[None, :])
    value = narrow(acc, DTYPE, SOFT)
    if EVEN_M and EVEN_N:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=(rows[:, None] < num_rows) & (columns[None, :] < num_columns))


@triton.jit
def in_runs(row_tile, begin_0, end_0, num_0, begin_1, end_1, BM: tl.constexpr):
    """(first row, how many) of a row tile where rows lie in two runs, the first of `num_0` row tiles.

    What a table would say, without the microsecond for which the first loads of a tile would wait for it.
    """
    in_0 = row_tile < num_0
    first = tl.where(in_0, begin_0 + row_tile * BM, begin_1 + (row_tile - num_0) * BM)
    return first.to(tl.int64), tl.minimum(tl.where(in_0, end_0, end_1) - first, BM)


@triton.jit
def is_last(number, slice_tiles, counters, columns, has_rows):
    """Counts a tile that is stored into a slice, if it `has_rows` of it; True for who counts the slice's last one.

    What it loads is loaded here: before the product it would take registers from that, which then is up to 20 % slower.
    """
    fence()
    count = tl.atomic_add(counters + number, 1, mask=has_rows, sem="acq_rel", scope="gpu") + 1
    return has_rows & (count % (tl.load(slice_tiles + number) * columns) == 0)


@triton.jit
def raise_flag(number, flags, value, here):
    """The flag of a slice, if it has one and `here`."""
    flag = tl.load(flags + number)
    signal(flag.to(tl.pointer_type(tl.int64)), value, here & (flag != 0))


@triton.jit(do_not_specialize=["num_tiles", "value", "begin_0", "end_0", "num_0", "begin_1", "end_1"])
def gemm_slices_kernel(
    x, w, y, tiles, also, slice_tiles, counters, flags, value: tl.int64, num_tiles: tl.int32, N, K,
    begin_0, end_0, num_0, begin_1, end_1,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    ACROSS: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, SOFT: tl.constexpr, BOXES: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """y = x @ w.T on this rank; whoever finishes a slice of rows raises that slice's flag. It waits for nobody.

    Args:
        x, w, y: pointers, of one dtype; y lies on this rank, row r of it is row r of x.
        BOXES: x and w are tensor descriptors, see `product_of_boxes`.
        tiles: the table of row tiles, int64 [num_tiles, 5], in the order in which they are computed. Columns
            `destination` and `row` are not read.
        also: int64 [num_tiles], the slice of a row tile's last rows, read if ACROSS: some are of two slices.
        slice_tiles: int64, how many row tiles have rows of each slice.
        counters: int64, one per slice, zero before the first run; they count on from run to run.
        flags: int64, one per slice: the address of its 64-bit word, in device or pinned host memory; 0 if nobody
            waits for it.
        value: what a finished slice's word is set to, a release at system scope.
        num_tiles: row tiles.
        begin_0 and so on: first and end of runs of rows, and row tiles in them, if RUNS; see `in_runs`.
        PROGRAMS: the grid, at most one per multiprocessor.

    Two slices of one row tile each, N of three tiles: the program that finishes the third tile of a row raises a flag.
    """
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_tiles * columns, PROGRAMS, flatten=True):
        row_tile, column_tile = locate(tile, 0, num_tiles, columns, GROUP)
        entry = tiles + row_tile * FIELDS
        if RUNS:
            first, num_rows = in_runs(row_tile, begin_0, end_0, num_0, begin_1, end_1, BM)
        else:
            first = tl.load(entry + FIRST)
            num_rows = (tl.load(entry + END) - first).to(tl.int32)
        part = tl.load(entry + SLICE)
        column = column_tile * BN
        if BOXES:
            acc = product_of_boxes(x, w, first.to(tl.int32), column, 0, K, BM, BN, BK, PRECISION, SOFT)
        else:
            acc = product(
                x + first * K, w + column.to(tl.int64) * K, num_rows, N - column, K,
                BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
            )  # fmt: skip
        at = y + first * N + column
        store_tile(at, acc, num_rows, N - column, N, y.dtype.element_ty, BM, BN, EVEN_M, EVEN_N, SOFT)
        raise_flag(part, flags, value, is_last(part, slice_tiles, counters, columns, num_rows > 0))
        if ACROSS:
            other = tl.load(also + row_tile)
            raise_flag(other, flags, value, is_last(other, slice_tiles, counters, columns, other != part))


@triton.jit
def halves(acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right columns of a tile: two values, for what must not be in registers at once."""
    return tl.split(acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1))


@triton.jit
def others_added(acc, sums, column, num_others, BM: tl.constexpr, BN: tl.constexpr, WIDTH: tl.constexpr):
    """`acc`, WIDTH columns of a tile from `column` on, and the same of `num_others` tiles in `sums`, in their order."""
    at = sums + tl.arange(0, BM)[:, None] * BN + (column + tl.arange(0, WIDTH)[None, :])
    for _ in range(num_others):
        acc += tl.load(at, cache_modifier=".cg")
        at += BM * BN
    return acc


@triton.jit(do_not_specialize=["value", "bound"])
def gemm_tasks_kernel(
    x, w, y, tasks, slice_tiles, counters, flags, sums, arrivals, spoiled, value: tl.int64, bound: tl.int64, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr, BOXES: tl.constexpr,
):  # fmt: skip
    """The same by one program to a task, a tile or a part of K of it; `gemm_slices_kernel` has the other arguments.

    The program with the last part of a tile adds the others to its own, in their order, so the bits are always the
    same. It waits for them: they have lower numbers, so they began before and wait for nobody. If one does not come
    within `bound` looks, the tile is not stored and no flag of its slices is raised in this run; the next one is right.

    Args:
        tasks: int64 [programs, 10], see the columns at the top.
        sums: fp32 [parts but the last of each tile, BM, BN], memory to work in.
        arrivals: int64, one per tile of several parts, zero before the first run; they count on from run to run.
        spoiled: int64, one per slice: the `value` of the last run in which a tile of it failed.
    """
    task = tasks + tl.program_id(0) * TASK_FIELDS
    first, end = tl.load(task + TASK_FIRST), tl.load(task + TASK_END)
    column, begin = tl.load(task + TASK_COLUMN) * BN, tl.load(task + TASK_BEGIN) * BK
    extent = tl.minimum(tl.load(task + TASK_STOP) * BK, K) - begin
    parts, place = tl.load(task + TASK_PARTS).to(tl.int32), tl.load(task + TASK_SUM)
    arrival = arrivals + tl.load(task + TASK_TILE)
    number, other = tl.load(task + TASK_SLICE), tl.load(task + TASK_ALSO)
    num_rows, num_columns = (end - first).to(tl.int32), (N - column).to(tl.int32)
    if BOXES:
        at_k = begin.to(tl.int32)
        stop = at_k + extent.to(tl.int32)
        acc = product_of_boxes(
            x, w, first.to(tl.int32), column.to(tl.int32), at_k, stop, BM, BN, BK, PRECISION, SOFT
        )  # fmt: skip
    else:
        acc = product_of_part(
            x + first * K + begin, w + column * K + begin, num_rows, num_columns, extent.to(tl.int32), K,
            BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
        )  # fmt: skip
    mine = sums + place * (BM * BN)
    if parts < 0:  # not the last part of its tile
        tl.store(mine + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], acc)
        arrive(arrival, 1)
    else:
        there = tl.full((), 1, tl.int1)
        if parts > 1:
            seen = tl.atomic_add(arrival, 0, sem="acquire", scope="gpu")
            looks = tl.full((), 1, tl.int64)
            while (seen % parts != parts - 1) & (looks < bound):
                seen = tl.atomic_add(arrival, 0, sem="acquire", scope="gpu")
                looks += 1
            there = seen % parts == parts - 1
            fence()
        if there:
            at = y + first * N + column
            WIDTH: tl.constexpr = BN // 4
            left, right = halves(acc, BM, BN)
            a, b = halves(left, BM, BN // 2)
            c, d = halves(right, BM, BN // 2)
            quarters = (a, b, c, d)
            for k in tl.static_range(4):
                part = others_added(quarters[k], mine, k * WIDTH, parts - 1, BM, BN, WIDTH)
                wide = num_columns - k * WIDTH
                store_tile(
                    at + k * WIDTH, part, num_rows, wide, N, y.dtype.element_ty, BM, WIDTH, EVEN_M, EVEN_N, SOFT
                )  # fmt: skip
        else:
            tl.store(spoiled + number, value)
            tl.store(spoiled + other, value)
        if parts > 1:
            arrive(arrival, parts)
        columns = tl.cdiv(N, BN)
        last = is_last(number, slice_tiles, counters, columns, num_rows > 0)
        raise_flag(number, flags, value, last & (tl.load(spoiled + number) != value))
        last = is_last(other, slice_tiles, counters, columns, other != number)
        raise_flag(other, flags, value, last & (tl.load(spoiled + other) != value))
