# mypy: ignore-errors
"""Many copies by multiprocessors: what copy engines are measured against, and a fall-back where rows are very short.

Owns the device code only. Addresses and pitches are multiples of 16 bytes; every copy has the same rows of the same
whole number of 16 bytes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_copies", "num_rows", "num_vectors"])
def gather_kernel(table, num_copies: tl.int64, num_rows: tl.int64, num_vectors: tl.int64, BLOCK: tl.constexpr):
    """Strided copies of `num_rows` rows of `num_vectors` times 16 bytes.

    `table` has four columns of `num_copies` numbers: destination, its pitch, source, its pitch. The programs, however
    many, stride over tiles of BLOCK 8-byte words, so a few of them serve any number of copies:
    `gather_kernel[(12,)](table, table.shape[1], rows, row_bytes // 16, BLOCK=2048, num_warps=8)`.
    """
    VECTORS: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, BLOCK)
    tiles = (num_vectors + VECTORS - 1) // VECTORS
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_copies * num_rows * tiles:
        row, part = tile // tiles, tile % tiles
        copy, row = row // num_rows, row % num_rows
        left = tl.minimum(num_vectors - part * VECTORS, VECTORS).to(tl.int32) * 2
        column = table + copy
        to = tl.load(column) + row * tl.load(column + num_copies) + part * BLOCK * 8
        of = tl.load(column + 2 * num_copies) + row * tl.load(column + 3 * num_copies) + part * BLOCK * 8
        source = tl.multiple_of(of.to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of(to.to(tl.pointer_type(tl.int64)), 16)
        tl.store(target + lanes, tl.load(source + lanes, mask=lanes < left), mask=lanes < left)
        tile += tl.num_programs(0)
