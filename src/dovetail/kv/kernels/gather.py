# mypy: ignore-errors
"""Many copies by multiprocessors: what copy engines are measured against, and a fall-back where rows are very short.

Owns the device code only. Addresses are multiples of 16 bytes; every copy has the same whole number of 16 bytes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_copies", "num_vectors"])
def gather_kernel(dst, src, num_copies: tl.int64, num_vectors: tl.int64, BLOCK: tl.constexpr):
    """Copies `num_vectors` times 16 bytes from src[k] to dst[k] for every k; `dst` and `src` are tables of addresses.

    The programs, however many, stride over tiles of BLOCK 8-byte words, so a few of them serve any number of copies:
    `gather_kernel[(12,)](dst, src, len(dst), row_bytes // 16, BLOCK=1024, num_warps=8)`.
    """
    VECTORS: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, BLOCK)
    tiles = (num_vectors + VECTORS - 1) // VECTORS
    tile = tl.program_id(0).to(tl.int64)
    while tile < num_copies * tiles:
        copy, part = tile // tiles, tile % tiles
        left = tl.minimum(num_vectors - part * VECTORS, VECTORS).to(tl.int32) * 2
        source = tl.multiple_of((tl.load(src + copy) + part * BLOCK * 8).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of((tl.load(dst + copy) + part * BLOCK * 8).to(tl.pointer_type(tl.int64)), 16)
        tl.store(target + lanes, tl.load(source + lanes, mask=lanes < left), mask=lanes < left)
        tile += tl.num_programs(0)
