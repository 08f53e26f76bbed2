"""The kernel that copies by cores under Triton's interpreter, against plain copies; no GPU needed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np

from tests.interp.child import printed

NUM_CASES = 20


def test_it_copies_every_byte_and_no_other(need: Callable[[str, object], None]) -> None:
    need("triton", importlib.util.find_spec("triton"))
    assert printed(__file__) == ["right"] * NUM_CASES


def _case(seed: int) -> str:
    """Copies of random lengths to random places, in pieces, by a few programs; aligned or not."""
    import triton.language as tl

    from dovetail.hw.gpu.cores import pieces
    from dovetail.hw.gpu.kernels.copy import copies_kernel

    rng = np.random.default_rng(seed)
    aligned = bool(seed % 2)
    unit = 16 if aligned else 1
    size = rng.integers(1, 200, rng.integers(1, 7)) * unit
    begin = np.cumsum(size + unit) - size  # a gap before each
    source = rng.integers(0, 256, int(begin[-1] + size[-1]) + 64, dtype=np.uint8)
    target = np.full(len(source) + 16, 0xA5, np.uint8)
    src, dst = (-array.ctypes.data % 16 + begin + array.ctypes.data for array in (source, target))
    to, of, length = pieces(dst, src, size, piece_bytes=int(rng.integers(1, 40)) * unit)
    words = length // 8 if aligned else length
    table = np.stack([to, of, words])
    copies_kernel[(int(rng.integers(1, 6)),)](
        table.ctypes.data, len(to), tl.int64 if aligned else tl.int8, int(rng.choice([4, 16, 64]))
    )
    want = np.full(len(target), 0xA5, np.uint8)
    for d, s, n in zip(dst - target.ctypes.data, src - source.ctypes.data, size, strict=True):
        want[d : d + n] = source[s : s + n]
    return "right" if np.array_equal(target, want) else f"wrong:{seed}"


if __name__ == "__main__":
    print(*[_case(seed) for seed in range(NUM_CASES)])
