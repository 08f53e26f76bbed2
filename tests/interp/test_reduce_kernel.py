"""The reduction kernel under Triton's interpreter against the CPU's code, bit for bit; no GPU needed.

One child process runs all cases (the interpreter is chosen by the environment, before Triton is imported) and prints
what differed. The interpreter's bf16 arithmetic is wrong, but the kernel has none: bf16 is decoded to fp32 and encoded
with integer operations.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dovetail.hw.gpu.reduce import HostReducer, form, reducer, split
from dovetail.plan.step import DType, ReduceOp

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.gpu import reference

TINY = [d for d in DType if d.name.startswith("FLOAT8")]
EVERY = "every pair of codes"


def cases() -> list[tuple[str, DType, ReduceOp]]:
    some = [("mixed", d, op) for d in DType for op in reference.ops(d)]
    return some + [(EVERY, d, op) for d in TINY for op in (ReduceOp.SUM, ReduceOp.PRODUCT)]


def _id(kind: str, dtype: DType, op: ReduceOp) -> str:
    return f"{kind}-{dtype.name.lower()}-{op.name.lower()}".replace(" ", "-")


@pytest.fixture(scope="module")
def outcome(need: Callable[[str, object], None]) -> dict[str, str]:
    need("triton", importlib.util.find_spec("triton"))
    if reference.cpu_code() is None:
        pytest.skip("neither the native module nor a C++ compiler is here to compare with")
    root = Path(__file__).parents[2]
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("kind", "dtype", "op"), cases(), ids=[_id(*c) for c in cases()])
def test_bits_of_the_cpu(outcome: dict[str, str], kind: str, dtype: DType, op: ReduceOp) -> None:
    assert outcome[_id(kind, dtype, op)] == ""


# --- the launchers' own arithmetic, which needs no Triton -----------------------------------------------------------


def test_forms() -> None:
    """Dtypes that are combined alike share a kernel; one source is a copy."""
    assert form(DType.INT32, ReduceOp.SUM, 2) == form(DType.UINT32, ReduceOp.SUM, 2)
    assert form(DType.INT32, ReduceOp.MIN, 2) != form(DType.UINT32, ReduceOp.MIN, 2)
    assert form(DType.BOOL, ReduceOp.MAX, 3) == form(DType.UINT8, ReduceOp.BOR, 3)
    assert form(DType.BFLOAT16, ReduceOp.AVG, 1) == form(DType.UINT16, ReduceOp.BOR, 1)
    assert form(DType.FLOAT32, ReduceOp.SUM, 9) == form(DType.FLOAT32, ReduceOp.SUM, 17)
    with pytest.raises(TypeError, match="combines bits"):
        form(DType.FLOAT16, ReduceOp.BXOR, 2)
    with pytest.raises(TypeError, match="AVG of bool"):
        form(DType.BOOL, ReduceOp.AVG, 2)


def test_split() -> None:
    assert split(0x100A, [0x200A, 0x300A], 40, 2) == (3, 2, 4)
    assert split(0x100A, [0x200A, 0x3008], 40, 2) == (0, 0, 20)
    assert split(0x1004, [0x2004], 8, 4) == (2, 0, 2)
    assert split(0x1000, [0x2000], 32, 8) == (0, 2, 0)
    with pytest.raises(ValueError, match="multiple"):
        split(0x1001, [0x2000], 32, 2)


def test_host_reducer_waits_for_the_stream_then_reduces() -> None:
    pytest.importorskip("dovetail.hw.cpu._native", reason="the native part is not built")

    class Late:
        """A driver whose stream writes the second source only when it is waited for."""

        name = "standin"

        def stream_synchronize(self, stream: int) -> None:
            assert stream == 7
            parts[1][:] = 2

    parts = [np.full(10, 1, np.float32), np.zeros(10, np.float32)]
    made = reducer(Late())  # type: ignore[arg-type]
    assert isinstance(made, HostReducer)
    made.warm(DType.FLOAT32, ReduceOp.AVG, 2)
    made.launch(parts[0].ctypes.data, [p.ctypes.data for p in parts], 40, DType.FLOAT32, ReduceOp.AVG, 7)
    assert parts[0].tolist() == [1.5] * 10


# --- the child process ------------------------------------------------------------------------------------------------


def _run(dtype: DType, op: ReduceOp, parts: list[reference.Bits], lead: int, alias: int | None) -> reference.Bits:
    """The kernel on host memory; `lead` elements shift every array off its alignment, each alike."""
    import triton.language as tl

    from dovetail.hw.gpu.kernels.reduce import MOST_SCALARS, reduce_kernel

    size, items, num = dtype.size_bytes, len(parts[0]), len(parts)
    room = np.zeros((num + 1, (items * size + 16 * 5) // 16 * 16), np.uint8)
    room = room[:, -room.ctypes.data % 16 :]
    arrays = [row[lead * size :][: items * size].view(parts[0].dtype) for row in room]
    for array, part in zip(arrays, parts, strict=False):
        array[:] = part
    dst = arrays[num if alias is None else alias]
    addresses = [a.ctypes.data for a in arrays[:num]]
    table = np.array(addresses, np.int64)
    wanted = form(dtype, op, num)
    scalars = (addresses if wanted.num else []) + [0] * (MOST_SCALARS - wanted.num)
    head, body, rest = split(dst.ctypes.data, addresses, items * size, size)
    element = getattr(tl, wanted.element)
    reduce_kernel[(2,)](
        dst.ctypes.data, *scalars, table.ctypes.data, num, head, body, rest,
        element, wanted.kind, wanted.op, wanted.num, 4096 // size,
    )  # fmt: skip
    return dst.copy()


def _mixed(dtype: DType, op: ReduceOp) -> str:
    """A block and a bit, begun off alignment; then few elements, more sources, the destination among them."""
    shapes = [(2, 4096 // dtype.size_bytes + 37, 1), (9, 21, 0)]
    if op in (ReduceOp.SUM, ReduceOp.BOR):
        shapes += [(1, 19, 1), (3, 40, 2)]
    for seed, (num, items, lead) in enumerate(shapes):
        parts = [reference.data(dtype, items, seed, part) for part in range(num)]
        got = _run(dtype, op, parts, lead, num // 2 if num > 2 else None)
        wrong = reference.differences(dtype, op, parts, got)
        if wrong:
            return f"{num} sources, {items} elements: {wrong}"
    return ""


def _every(dtype: DType, op: ReduceOp) -> str:
    codes = np.arange(256, dtype=np.uint8)
    parts: list[reference.Bits] = [np.repeat(codes, 256), np.tile(codes, 256)]
    return reference.differences(dtype, op, parts, _run(dtype, op, parts, 0, None))


def _main() -> None:
    out = {}
    with np.errstate(all="ignore"):
        for kind, dtype, op in cases():
            out[_id(kind, dtype, op)] = (_every if kind == EVERY else _mixed)(dtype, op)
    print(json.dumps(out))


if __name__ == "__main__":
    _main()
