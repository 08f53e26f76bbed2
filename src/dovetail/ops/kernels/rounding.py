# mypy: ignore-errors
"""Values in fp32, kept in 16 bits: the one place where an operator widens and rounds.

SOFT spells bf16 in integer operations, for Triton's interpreter, whose own bf16 arithmetic is wrong; the bits are those
of the GPU's instructions.
"""

import triton
import triton.language as tl

from dovetail.hw.gpu.kernels.reduce import decode, encode


@triton.jit
def widen(value, SOFT: tl.constexpr):
    """To fp32, exactly."""
    if SOFT and value.dtype == tl.bfloat16:
        return decode(value.to(tl.uint16, bitcast=True), "bfloat16")
    else:
        return value.to(tl.float32)


@triton.jit
def narrow(value, dtype: tl.constexpr, SOFT: tl.constexpr):
    """From fp32, to nearest, ties to even."""
    if SOFT and dtype == tl.bfloat16:
        return encode(value, "bfloat16").to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)
