# mypy: ignore-errors
"""GEMM kernels, y = x @ w.T: persistent programs that walk over tiles in the order of a table made on the host.

Owns the tile product, the kernel that tells slice by slice what is finished, and the one for tiles that are
to be finished early; the fused ones are in `fused_gemm.py`.

Legend: x [M, K], w [N, K], y [M, N], rows contiguous. A tile is BM x BN, of depth BK. The table of row tiles
(`dovetail.ops.gpu.tiles`) has five int64 per row tile: first_row, end_row, destination, row in the destination's
buffer, slice. EVEN_M: every row tile has BM rows; EVEN_N, EVEN_K: N, K are multiples of BN, BK.
"""

import triton
import triton.language as tl

from dovetail.language.kernels.device import arrive, signal
from dovetail.ops.kernels.rounding import narrow, widen

FIRST, END, DESTINATION, ROW, SLICE, FIELDS = (tl.constexpr(n) for n in range(6))


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


@triton.jit(do_not_specialize=["num_tiles", "value"])
def gemm_slices_kernel(
    x, w, y, tiles, slice_tiles, counters, flags, value: tl.int64, num_tiles: tl.int32, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """y = x @ w.T on this rank; whoever finishes a slice of rows raises that slice's flag. It waits for nobody.

    Args:
        x, w, y: pointers, of one dtype; y lies on this rank, row r of it is row r of x.
        tiles: the table of row tiles, int64 [num_tiles, 5], in the order in which they are computed. Columns
            `destination` and `row` are not read.
        slice_tiles: int64, how many row tiles each slice has.
        counters: int64, one per slice, zero before the first run; they count on from run to run.
        flags: int64, one per slice: the address of its 64-bit word, in device or pinned host memory; 0 if nobody
            waits for it.
        value: what a finished slice's word is set to, a release at system scope.
        num_tiles: row tiles.
        PROGRAMS: the grid, at most one per multiprocessor.

    Two slices of one row tile each, N of three tiles: the program that finishes the third tile of a row raises a flag.
    """
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_tiles * columns, PROGRAMS, flatten=True):
        row_tile, column_tile = locate(tile, 0, num_tiles, columns, GROUP)
        entry = tiles + row_tile * FIELDS
        first = tl.load(entry + FIRST)
        num_rows = (tl.load(entry + END) - first).to(tl.int32)
        part = tl.load(entry + SLICE)
        column = column_tile * BN
        acc = product(
            x + first * K, w + column.to(tl.int64) * K, num_rows, N - column, K,
            BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
        )  # fmt: skip
        at = y + first * N + column
        store_tile(at, acc, num_rows, N - column, N, y.dtype.element_ty, BM, BN, EVEN_M, EVEN_N, SOFT)
        last = arrive(counters + part, tl.load(slice_tiles + part) * columns)
        flag = tl.load(flags + part)
        signal(flag.to(tl.pointer_type(tl.int64)), value, last & (flag != 0))


@triton.jit(do_not_specialize=["num_tiles", "value"])
def gemm_parts_kernel(
    x, w, y, tiles, slice_tiles, counters, flags, sums, arrivals, value: tl.int64, num_tiles: tl.int32, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """The same for the first row tiles of a table, sooner: PARTS programs to a tile, each over its part of K.

    Nobody waits: who comes last adds all parts, in their order, so the bits don't depend on who it is.
    `gemm_slices_kernel` has the other arguments and computes the other row tiles, with the same counters: a slice may
    have tiles of both.

    Args:
        tiles: the table; its first `num_tiles` row tiles are computed. The grid is PARTS programs for each of their
            tiles, and K has at least PARTS * BK elements.
        sums: fp32 [tiles, PARTS, BM, BN], memory to work in; nothing of it is read that was not written in this run.
        arrivals: int64, one per tile, zero before the first run; they count on from run to run.

    K 224, BK 64, three parts: 64, 64 and 96 elements.
    """
    columns = tl.cdiv(N, BN)
    tile, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    row_tile, column_tile = locate(tile, 0, num_tiles, columns, GROUP)
    entry = tiles + row_tile * FIELDS
    first = tl.load(entry + FIRST)
    num_rows = (tl.load(entry + END) - first).to(tl.int32)
    column = column_tile * BN
    steps = tl.cdiv(K, BK)
    begin = part * steps // PARTS * BK
    extent = tl.minimum((part + 1) * steps // PARTS * BK, K) - begin
    acc = product_of_part(
        x + first * K + begin, w + column.to(tl.int64) * K + begin, num_rows, N - column, extent, K,
        BM, BN, BK, EVEN_M, EVEN_N, EVEN_K, PRECISION, SOFT,
    )  # fmt: skip
    mine = sums + tile.to(tl.int64) * (PARTS * BM * BN)
    tl.store(mine + part * (BM * BN) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], acc)
    if arrive(arrivals + tile, PARTS):
        # A few rows at a time, also its own: a tile's sum and another part beside it would not fit the registers.
        ROWS: tl.constexpr = min(BM, 32)
        some = tl.arange(0, ROWS)[:, None] * BN + tl.arange(0, BN)[None, :]
        for row in range(0, BM, ROWS):
            total = tl.load(mine + row * BN + some, cache_modifier=".cg")
            for other in tl.static_range(1, PARTS):
                total += tl.load(mine + (other * BM + row) * BN + some, cache_modifier=".cg")
            at = y + (first + row) * N + column
            left = num_rows - row
            store_tile(at, total, left, N - column, N, y.dtype.element_ty, ROWS, BN, EVEN_M, EVEN_N, SOFT)
        number = tl.load(entry + SLICE)
        last = arrive(counters + number, tl.load(slice_tiles + number) * columns)
        flag = tl.load(flags + number)
        signal(flag.to(tl.pointer_type(tl.int64)), value, last & (flag != 0))
