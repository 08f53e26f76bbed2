"""What a reduction kernel is held against: the CPU's own code, on data with every kind of special value.

The CPU's code is the native module where it is installed; else `native/reduce_kernels.cpp` is compiled as it stands.
Elements are handled as bits: unsigned NumPy integers of the element's width.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.plan.step import DType, ReduceOp

Bits = NDArray[np.unsignedinteger]

NATIVE = Path(__file__).parents[2] / "native"
_SHIM = """
#include "reduce_kernels.cpp"
extern "C" void dovetail_reduce(int type, int op, char* dst, const char* const* sources, int num, size_t n) {
  dovetail::base::reduce_items(static_cast<dovetail::DType>(type), static_cast<dovetail::ReduceOp>(op), dst, sources,
                               num, n);
}
"""

#: (bits of exponent, bits of mantissa) of the floats that have infinities in the usual place.
_IEEE = {
    DType.FLOAT16: (5, 10),
    DType.BFLOAT16: (8, 7),
    DType.FLOAT32: (8, 23),
    DType.FLOAT64: (11, 52),
    DType.FLOAT8_E5M2: (5, 2),
}
_FNUZ = (DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ)


def ops(dtype: DType) -> list[ReduceOp]:
    """The operations that the dtype has."""
    bitwise = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    return [
        op
        for op in ReduceOp
        if not (dtype >= DType.FLOAT16 and op in bitwise) and not (dtype is DType.BOOL and op is ReduceOp.AVG)
    ]


@functools.cache
def cpu_code() -> Callable[[int, int, int, list[int], int], None] | None:
    """(dtype, op, dst, sources, items) -> None, on host addresses; None where it can be neither loaded nor built."""
    try:
        from dovetail.hw.cpu import _native

        found: Callable[[int, int, int, list[int], int], None] = _native.reduce
        return found
    except ImportError:
        pass
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not (NATIVE / "reduce_kernels.cpp").exists():
        return None
    folder = Path(tempfile.mkdtemp(prefix="dovetail-reduce-"))
    (folder / "shim.cpp").write_text(_SHIM)
    flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-shared", "-fPIC", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, "shim.cpp", "-o", "shim.so"], cwd=folder, check=True)
    call = ctypes.CDLL(str(folder / "shim.so")).dovetail_reduce

    def reduce(dtype: int, op: int, dst: int, sources: list[int], items: int) -> None:
        table = (ctypes.c_void_p * len(sources))(*sources)
        call(dtype, op, ctypes.c_void_p(dst), table, len(sources), ctypes.c_size_t(items))

    return reduce


def expected(dtype: DType, op: ReduceOp, parts: Sequence[Bits]) -> Bits:
    """What the CPU makes of these sources."""
    code = cpu_code()
    assert code is not None
    parts = [np.ascontiguousarray(p) for p in parts]
    out = np.empty_like(parts[0])
    code(int(dtype), int(op), out.ctypes.data, [p.ctypes.data for p in parts], len(out))
    return out


def data(dtype: DType, items: int, seed: int, part: int) -> Bits:
    """Half of it numbers of ordinary size, a quarter any bits, the rest zeros, infinities, NaN, limits, subnormals."""
    rng = np.random.default_rng((int(dtype), seed, part))
    kind = np.dtype(f"u{dtype.size_bytes}")
    if dtype is DType.BOOL:
        return rng.integers(0, 2, items, dtype=np.uint8)
    wild = rng.integers(0, 256, items * kind.itemsize, dtype=np.uint8).view(kind)
    if dtype < DType.BOOL:
        return np.where(rng.random(items) < 0.7, wild, rng.integers(0, 5, items).astype(kind))
    if kind.itemsize == 1:  # any bits are of ordinary size; NaN and infinity are among 256
        return wild
    exponent, mantissa = _IEEE[dtype]
    inf, sign, quiet = ((1 << exponent) - 1) << mantissa, 1 << (exponent + mantissa), 1 << (mantissa - 1)
    special = [0, 1, (1 << mantissa) - 1, 1 << mantissa, inf - 1, inf, inf | quiet, inf | quiet | 5]
    some = np.array(special + [s | sign for s in special], kind)[rng.integers(0, 2 * len(special), items)]
    # Exponents around the bias: magnitudes of 2**-3 to 2**4.
    middle = (wild & kind.type(sign | ((1 << mantissa) - 1))) | (
        rng.integers((1 << (exponent - 1)) - 4, (1 << (exponent - 1)) + 3, items).astype(kind) << kind.type(mantissa)
    )
    choice = rng.random(items)
    out = np.where(choice < 0.5, middle, np.where(choice < 0.75, wild, some)).astype(kind)
    if dtype is DType.FLOAT16:  # whether the CPU makes a signalling fp16 NaN quiet hangs on the number of sources
        out = np.where(is_nan(dtype, out), out | kind.type(quiet), out)
    return out


def is_nan(dtype: DType, bits: Bits) -> NDArray[np.bool_]:
    if dtype < DType.FLOAT16:
        return np.zeros(bits.shape, bool)
    if dtype in _FNUZ:
        return bits == 0x80
    if dtype is DType.FLOAT8_E4M3FN:
        return (bits & 0x7F) == 0x7F
    return _magnitude(dtype, bits) > _infinity(dtype)


def differences(dtype: DType, op: ReduceOp, parts: Sequence[Bits], got: Bits) -> str:
    """The first few elements that are not the CPU's, "" if there are none.

    Where a sum or product meets two NaN, the CPU's own answer differs between the vector loop and its tail; any NaN
    is right there.
    """
    want = expected(dtype, op, parts)
    wrong = got != want
    if wrong.any() and op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT) and len(parts) > 1:
        num_nan = np.sum([is_nan(dtype, p) for p in parts], axis=0)
        makes_one = np.zeros(len(want), bool)  # a NaN may come of numbers, beside the one among the sources
        if len(parts) > 2:
            makes_one |= op is ReduceOp.PRODUCT
            if dtype in _IEEE:
                makes_one |= np.any([_magnitude(dtype, p) == _infinity(dtype) for p in parts], axis=0)
        free = (num_nan > 1) | ((num_nan == 1) & makes_one)
        wrong &= ~(free & is_nan(dtype, got) & is_nan(dtype, want))
    where = np.flatnonzero(wrong)
    if not len(where):
        return ""
    lines = [
        f"[{i}] got {int(got[i]):#x}, want {int(want[i]):#x} of {', '.join(hex(int(p[i])) for p in parts[:8])}"
        for i in where[:3]
    ]
    return f"{len(where)} of {len(want)} differ: " + "; ".join(lines)


def _magnitude(dtype: DType, bits: Bits) -> Bits:
    exponent, mantissa = _IEEE[dtype]
    return bits & bits.dtype.type((1 << (exponent + mantissa)) - 1)


def _infinity(dtype: DType) -> int:
    exponent, mantissa = _IEEE[dtype]
    return ((1 << exponent) - 1) << mantissa
