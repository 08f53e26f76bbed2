# mypy: ignore-errors
"""A copy by multiprocessors: what a copy engine is measured against. Between device and pinned host memory, both ways.

Owns the device code only. Both addresses are multiples of 16 bytes; the size is a whole number of 16 bytes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["dst", "src", "num_vectors"])
def copy_kernel(dst: tl.int64, src: tl.int64, num_vectors: tl.int64, BLOCK: tl.constexpr):
    """Copies `num_vectors` times 16 bytes; the programs, however many, stride over blocks of BLOCK 8-byte words.

    With BLOCK = 64 * num_warps a thread moves 16 bytes at a time:
    `copy_kernel[(16,)](dst.data_ptr(), src.data_ptr(), size_bytes // 16, BLOCK=512, num_warps=8)`.
    """
    VECTORS: tl.constexpr = BLOCK // 2
    lanes = tl.arange(0, BLOCK)
    tile = tl.program_id(0).to(tl.int64)
    while tile * VECTORS < num_vectors:
        left = tl.minimum(num_vectors - tile * VECTORS, VECTORS).to(tl.int32) * 2
        source = tl.multiple_of((src + tile * BLOCK * 8).to(tl.pointer_type(tl.int64)), 16)
        target = tl.multiple_of((dst + tile * BLOCK * 8).to(tl.pointer_type(tl.int64)), 16)
        tl.store(target + lanes, tl.load(source + lanes, mask=lanes < left), mask=lanes < left)
        tile += tl.num_programs(0)
