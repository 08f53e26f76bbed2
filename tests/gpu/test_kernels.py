"""The Triton kernels on a real GPU: reductions bit for bit as the CPU's, the kernel that holds, the copy."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dovetail.hw.gpu.hold import MOST_S, Holder
from dovetail.hw.gpu.reduce import Reducer, form
from dovetail.plan.step import DType, ReduceOp
from tests.gpu import reference

PAIRS = [(d, op) for d in DType for op in reference.ops(d)]
TINY = [d for d in DType if d.name.startswith("FLOAT8")]
#: (elements, shift of each array in elements, in turn, index of the source that is the destination or None)
SHAPES: list[tuple[int, tuple[int, ...], int | None]] = [
    (1, (0,), None),
    (7, (1,), -1),
    (1023, (3,), None),
    (20_011, (0,), 0),
    (20_011, (1,), 1),
    (2_049, (0, 1, 2), None),
]
#: Compiling is what takes time here: each of these starts a Python of its own.
COMPILERS = max(1, min(14, (os.cpu_count() or 2) - 2))
_COMPILE = """
import json, sys
from dovetail.hw.gpu.reduce import Reducer
from dovetail.plan.step import DType, ReduceOp
reducer = Reducer()
for dtype, op, num in json.loads(sys.argv[1]):
    reducer.warm(DType(dtype), ReduceOp(op), num)
"""


def counts(dtype: DType, op: ReduceOp) -> tuple[int, ...]:
    """Numbers of sources: every pair with 2 and a table of 17; one operation of a dtype with all."""
    return (1, 2, 3, 8, 17) if reference.ops(dtype)[int(dtype) % 5] is op else (2, 17)


@pytest.fixture(scope="module")
def reducer(need: Callable[[str, object], None]) -> Reducer:
    """A reducer whose kernels lie compiled in Triton's cache."""
    need("triton", importlib.util.find_spec("triton"))
    if reference.cpu_code() is None:
        pytest.fail("neither the native module nor a C++ compiler is here to compare with")
    kernels = {form(d, op, n): (int(d), int(op), n) for d, op in PAIRS for n in counts(d, op)}
    # The kernels of the 8-bit floats take longest: dealt out first, they fall to all compilers alike.
    todo = sorted(kernels.values(), key=lambda k: (-k[0], k[2]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    begin = time.monotonic()
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _COMPILE, json.dumps(todo[i::COMPILERS])],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for i in range(COMPILERS)
    ]  # fmt: skip
    for process in running:
        try:
            _, said = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.kill()
            said = "took longer than 180 s"
        if process.returncode:  # not fatal: the tests compile what is missing, and fail where it is at fault
            print(f"a compiler process failed: {said[-2000:]}")
    print(f"{len(todo)} kernels by {COMPILERS} processes: {time.monotonic() - begin:.1f} s")
    return Reducer()


@pytest.fixture
def stream() -> Iterator[int]:
    made = torch.cuda.Stream()
    yield made.cuda_stream
    made.synchronize()


def _reduce(
    reducer: Reducer,
    stream: int,
    dtype: DType,
    op: ReduceOp,
    parts: list[reference.Bits],
    shifts: tuple[int, ...] = (0,),
    alias: int | None = None,
) -> str:
    """Runs one reduction; "" or what is wrong with it, bytes around the destination included."""
    size, items, num = dtype.size_bytes, len(parts[0]), len(parts)
    pitch = ((items + max(shifts)) * size // 256 + 2) * 256
    room = np.full((num + 1, pitch), 0xA5, np.uint8)
    begin = [shifts[k % len(shifts)] * size for k in range(num + 1)]
    for k, part in enumerate(parts):
        room[k, begin[k] : begin[k] + items * size] = part.view(np.uint8)
    target = num if alias is None else alias % num
    there = torch.from_numpy(room).cuda()
    torch.cuda.synchronize()
    addresses = [there.data_ptr() + k * pitch + begin[k] for k in range(num + 1)]
    reducer.launch(addresses[target], addresses[:num], items * size, dtype, op, stream)
    torch.cuda.synchronize()
    after = there.cpu().numpy()
    got = after[target, begin[target] : begin[target] + items * size].copy().view(parts[0].dtype)
    after[target, begin[target] : begin[target] + items * size] = room[
        target, begin[target] : begin[target] + items * size
    ]
    stray = "" if np.array_equal(after, room) else f"bytes outside of dst changed at {np.argwhere(after != room)[:3]}; "
    return stray + reference.differences(dtype, op, parts, got)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda v: v.name.lower())
def test_reduction_has_the_bits_of_the_cpu(reducer: Reducer, stream: int, dtype: DType, op: ReduceOp) -> None:
    wrong = []
    for num in counts(dtype, op):
        for seed, (items, shifts, alias) in enumerate(SHAPES):
            parts = [reference.data(dtype, items, seed + 10 * num, part) for part in range(num)]
            found = _reduce(reducer, stream, dtype, op, parts, shifts, alias)
            if found:
                wrong.append(f"{num} sources, {items} elements, shifts {shifts}, dst {alias}: {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", TINY, ids=lambda v: v.name.lower())
def test_every_pair_of_8_bit_floats(reducer: Reducer, stream: int, dtype: DType) -> None:
    codes = np.arange(256, dtype=np.uint8)
    parts: list[reference.Bits] = [np.repeat(codes, 256), np.tile(codes, 256)]
    found = {op.name: _reduce(reducer, stream, dtype, op, parts) for op in reference.ops(dtype)}
    wrong = [f"{name}: {text}" for name, text in found.items() if text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("num", [2, 17])
def test_captured_reduction_replays(reducer: Reducer, num: int) -> None:
    reducer.warm(DType.FLOAT32, ReduceOp.SUM, num)
    parts = torch.randn(num, 1000, device="cuda")
    out, want = torch.empty(1000, device="cuda"), parts[0].clone()
    for k in range(1, num):
        want += parts[k]
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        sources = [parts[k].data_ptr() for k in range(num)]
        reducer.launch(out.data_ptr(), sources, 4000, DType.FLOAT32, ReduceOp.SUM, side.cuda_stream)
    for _ in range(2):
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_more_than_2_gib(reducer: Reducer, stream: int) -> None:
    """Offsets past 32 bits, in both parts of the kernel."""
    items = (1 << 31) + 4099
    a = torch.full((items + 1,), 3, dtype=torch.uint8, device="cuda")
    b = torch.full((items,), 4, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    reducer.launch(b.data_ptr(), [a.data_ptr(), b.data_ptr()], items, DType.UINT8, ReduceOp.SUM, stream)
    torch.cuda.synchronize()
    assert bool((b == 7).all())
    reducer.launch(b.data_ptr(), [a.data_ptr() + 1, b.data_ptr()], items, DType.UINT8, ReduceOp.SUM, stream)
    torch.cuda.synchronize()
    assert bool((b == 10).all())


def test_cost(reducer: Reducer, stream: int, record_property: Callable[[str, object], None]) -> None:
    """Prints what a launch costs the host and what the kernel moves (`-s` shows it); fails only far off."""
    torch.cuda.empty_cache()
    a, b = (torch.zeros(1 << 26, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    for num, dtype in ((2, DType.FLOAT32), (17, DType.FLOAT32), (2, DType.BFLOAT16), (2, DType.FLOAT8_E4M3FN)):
        sources = [(a if k % 2 else b).data_ptr() for k in range(num)]
        reducer.warm(dtype, ReduceOp.SUM, num)
        spent = []
        for _ in range(200):
            begin = time.perf_counter()
            reducer.launch(b.data_ptr(), sources, 4096, dtype, ReduceOp.SUM, stream)
            spent.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        size = a.nbytes
        times = []
        outer = torch.cuda.ExternalStream(stream)
        for _ in range(7):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record(outer)
            reducer.launch(b.data_ptr(), sources, size, dtype, ReduceOp.SUM, stream)
            last.record(outer)
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last))
        launch_us = sorted(spent)[100] * 1e6
        gbps = (num + 1) * size / sorted(times)[3] / 1e6
        line = f"{dtype.name.lower()} x{num}: launch {launch_us:.1f} us, {gbps:.0f} GB/s of reads and writes"
        print(line)
        record_property(f"{dtype.name}x{num}", line)
        assert launch_us < 100, line


def test_what_can_not_be_reduced(reducer: Reducer, stream: int) -> None:
    a = torch.zeros(16, device="cuda").data_ptr()
    with pytest.raises(TypeError, match="combines bits"):
        reducer.launch(a, [a, a], 64, DType.FLOAT32, ReduceOp.BAND, stream)
    with pytest.raises(ValueError, match="multiple"):
        reducer.launch(a, [a + 2, a], 32, DType.FLOAT32, ReduceOp.SUM, stream)
    with pytest.raises(ValueError, match="at least one source"):
        reducer.launch(a, [], 64, DType.FLOAT32, ReduceOp.SUM, stream)


# --- hold -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def holder(need: Callable[[str, object], None]) -> Holder:
    need("triton", importlib.util.find_spec("triton"))
    return Holder()


def _done_within(event: torch.cuda.Event, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not event.query():
        if time.monotonic() > end:
            return False
    return True


def test_a_held_gpu_runs_no_kernel_but_copies(holder: Holder, stream: int) -> None:
    x = torch.zeros(1 << 20, device="cuda")
    y = torch.empty(1 << 20, device="cuda")
    h = torch.ones(1 << 20, pin_memory=True)
    compute, copies = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(compute):
        x.add_(1)  # loads the kernel
    with torch.cuda.stream(copies):
        y.copy_(h, non_blocking=True)
    ran, copied = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    for _ in range(3):
        y.zero_()
        torch.cuda.synchronize()
        with holder.hold(stream) as num_up:
            with torch.cuda.stream(compute):
                x.add_(1)
                ran.record()
            with torch.cuda.stream(copies):
                y.copy_(h, non_blocking=True)
                copied.record()
            moved = _done_within(copied, MOST_S / 4)
            computed = _done_within(ran, MOST_S / 20)
        assert num_up == holder.num_programs
        assert moved, "a copy from pinned memory waited for the multiprocessors"
        assert not computed, "a kernel ran although every multiprocessor was held"
        assert _done_within(ran, 5.0)
        assert bool((y == 1).all())
    assert float(x[0]) == 4.0


def test_a_hold_ends_by_itself(holder: Holder, stream: int) -> None:
    ended = torch.cuda.Event()
    begin = time.monotonic()
    with holder.hold(stream):
        ended.record(torch.cuda.ExternalStream(stream))
        assert _done_within(ended, 5.0)
        held_s = time.monotonic() - begin
    assert MOST_S / 2 < held_s < 2 * MOST_S + 0.3, held_s


def test_one_hold_at_a_time(holder: Holder, stream: int) -> None:
    with holder.hold(stream), pytest.raises(RuntimeError, match="holds already"), holder.hold(stream):
        pass
    with holder.hold(stream) as num_up:
        assert num_up == holder.num_programs


# --- copy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_programs", [1, 16, 132])
@pytest.mark.parametrize("sizes", [(16,), (4080, 65536, 32), (1_600_048, 1_600_048), (1, 7, 65537, 100_003)])
def test_copies_between_host_and_device(
    need: Callable[[str, object], None], sizes: tuple[int, ...], num_programs: int
) -> None:
    """Both ways; sizes and places that are no multiples of 16 bytes take the other form of the kernel."""
    need("triton", importlib.util.find_spec("triton"))
    from dovetail.hw.gpu.cores import Copier

    size = np.array(sizes, np.int64)
    begin = np.cumsum(size) - size
    total = int(size.sum())
    start = torch.randint(0, 256, (total,), dtype=torch.uint8).pin_memory()
    device = torch.zeros(total + 64, dtype=torch.uint8, device="cuda")
    back = torch.zeros(total + 64, dtype=torch.uint8).pin_memory()
    copier = Copier(num_programs)
    for to, of in ((device, start), (back, device)):
        copier.prepare(to.data_ptr() + begin, of.data_ptr() + begin, size, 0)()
        torch.cuda.synchronize()
    assert torch.equal(back[:total], start)
    assert not back[total:].any()
    assert not device[total:].any()
