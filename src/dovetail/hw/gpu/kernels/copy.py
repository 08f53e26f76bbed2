# mypy: ignore-errors
"""Copies by multiprocessors: what copy engines are measured against, and what moves bytes where those can't.

Owns the device code only. Between device and pinned host memory, both ways, and inside a GPU or between two.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table", "num_pieces"])
def copies_kernel(table: tl.int64, num_pieces: tl.int64, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Many copies, by a few programs that stay: each takes every `num_programs`-th piece.

    `table` is the address of three columns of `num_pieces` numbers: destination, source, number of words. With
    WORD = tl.int64 all addresses are multiples of 16 bytes and all numbers are even; tl.int8 takes anything.
    """
    lanes = tl.arange(0, BLOCK)
    column = table.to(tl.pointer_type(tl.int64))
    ALIGN: tl.constexpr = 16 if WORD.primitive_bitwidth == 64 else 1
    PAIR: tl.constexpr = 2 if WORD.primitive_bitwidth == 64 else 1
    piece = tl.program_id(0).to(tl.int64)
    while piece < num_pieces:
        to = tl.load(column + piece)
        of = tl.load(column + num_pieces + piece)
        words = tl.load(column + 2 * num_pieces + piece)
        done = tl.zeros((), tl.int64)
        while done < words:
            # Of two words, both are moved or none: so that the compiler may move 16 bytes at once.
            left = tl.minimum(words - done, BLOCK).to(tl.int32) // PAIR * PAIR
            source = tl.multiple_of(of.to(tl.pointer_type(WORD)) + done, ALIGN)
            target = tl.multiple_of(to.to(tl.pointer_type(WORD)) + done, ALIGN)
            mask = lanes < tl.multiple_of(left, PAIR)
            tl.store(target + lanes, tl.load(source + lanes, mask=mask), mask=mask)
            done += BLOCK
        piece += tl.num_programs(0)
