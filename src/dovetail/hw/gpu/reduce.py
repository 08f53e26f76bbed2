"""Launches reductions: a Triton kernel on a GPU, the CPU's own code where device memory is a stand-in.

Owns the choice of kernel for a dtype, an operation and a number of sources, and how elements are cut into an aligned
body and the rest. The arithmetic is in `kernels/reduce.py`; both reducers give the same bits. A reducer acts on the
device that was current when it was made, on raw addresses and raw streams, and returns before the work is done.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dovetail.errors import NotSupported
from dovetail.hw.cpu import native
from dovetail.hw.gpu.driver import Driver
from dovetail.plan.step import DType, ReduceOp

_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
#: Operations that are the same for signed and unsigned integers: fewer kernels to compile.
_SIGNLESS = (ReduceOp.SUM, ReduceOp.PRODUCT, *_BITWISE)
#: bool as NCCL has it; 0 and 1 stay 0 and 1.
_BOOL = {
    ReduceOp.SUM: ReduceOp.BOR,
    ReduceOp.MAX: ReduceOp.BOR,
    ReduceOp.PRODUCT: ReduceOp.BAND,
    ReduceOp.MIN: ReduceOp.BAND,
}
_SIGNED = (DType.INT8, DType.INT16, DType.INT32, DType.INT64)

_VECTOR_BYTES = 16
_NUM_WARPS = 8
#: Programs per multiprocessor: 256 threads each, so no more than these can run at once.
_PER_MULTIPROCESSOR = 8
_TABLE_WORDS = 1 << 17
#: Elements of one block in the part of the kernel that goes element by element.
_SMALL = 1024


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is compiled for. `element` is the integer that an element is kept as: "uint16", "int32"."""

    element: str
    kind: str  #: "int" or the name of a float format
    op: str
    num: int  #: sources, 0 if they stand in a table


def form(dtype: DType, op: ReduceOp, num_sources: int, most_scalars: int = 8) -> Form:
    """The kernel for a reduction; dtypes that are combined alike share one.

    Raises:
        TypeError: the operation has no meaning for the dtype.
        ValueError: there is no source.
    """
    if num_sources < 1:
        raise ValueError(f"a reduction has at least one source, not {num_sources}")
    is_float = dtype >= DType.FLOAT16
    if is_float and op in _BITWISE:
        raise TypeError(f"{op.name} combines bits; it takes integers and bool, not {dtype.name}")
    if dtype is DType.BOOL and op is ReduceOp.AVG:
        raise TypeError("AVG of bool has no meaning; use MAX for 'any', MIN for 'all'")
    num = num_sources if num_sources <= most_scalars else 0
    unsigned = f"uint{8 * dtype.size_bytes}"
    if num == 1:  # a copy: nothing is rounded, no NaN changes
        return Form(unsigned, "int", "bor", 1)
    if is_float:
        return Form(unsigned, dtype.name.lower(), op.name.lower(), num)
    if dtype is DType.BOOL:
        op = _BOOL.get(op, op)
    signed = dtype in _SIGNED and op not in _SIGNLESS
    return Form(dtype.name.lower() if signed else unsigned, "int", op.name.lower(), num)


def split(dst: int, sources: Sequence[int], size_bytes: int, item_bytes: int) -> tuple[int, int, int]:
    """(head, body, rest): elements before the first multiple of 16 bytes, 16-byte vectors after it, other elements.

    The body is empty where the arrays don't lie alike. Raises `ValueError` for a size or address of half an element.
    """
    num_items = size_bytes // item_bytes
    together, alike = dst, True
    for source in sources:
        together |= source
        alike = alike and not (source ^ dst) % _VECTOR_BYTES
    if (together | size_bytes) % item_bytes:
        raise ValueError(
            f"elements of {item_bytes} bytes: the size ({size_bytes}) and every address must be a multiple of that, "
            f"but dst is {dst:#x} and the sources {', '.join(map(hex, sources))}"
        )
    if not alike:
        return 0, 0, num_items
    head = min(-dst % _VECTOR_BYTES // item_bytes, num_items)
    body = (num_items - head) * item_bytes // _VECTOR_BYTES
    return head, body, num_items - body * _VECTOR_BYTES // item_bytes


class _Tables:
    """Source tables in pinned host memory, which kernels read where it lies: no copy that a gate could hold up.

    A table is written once and never again: kernels in flight and captured graphs hold its address.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], int] = {}
        self._chunks: list[torch.Tensor] = []
        self._used = _TABLE_WORDS

    def address(self, sources: tuple[int, ...]) -> int:
        """Where the table of these sources is; the same sources share one."""
        found = self._found.get(sources)
        if found is None:
            if self._used + len(sources) > _TABLE_WORDS:
                self._chunks.append(torch.empty(max(_TABLE_WORDS, len(sources)), dtype=torch.int64, pin_memory=True))
                self._used = 0
            chunk = self._chunks[-1]
            chunk[self._used : self._used + len(sources)] = torch.tensor(sources, dtype=torch.int64)
            found = self._found[sources] = chunk.data_ptr() + 8 * self._used
            self._used += len(sources)
        return found


@dataclass(frozen=True, slots=True)
class _Ready:
    """A loaded kernel and what its launches have in common."""

    kernel: Any
    constants: tuple[Any, ...]
    vectors: int  #: 16-byte vectors of one block


class Reducer:
    """Reductions by a Triton kernel. Not for several threads at once.

    Args:
        num_programs: the most programs of one launch; fewer leave multiprocessors to others. All that fit, by default.
    """

    def __init__(self, *, num_programs: int | None = None) -> None:
        from dovetail.hw.gpu.kernels import reduce as kernels

        self._jit = kernels.reduce_kernel
        self._most_scalars: int = kernels.MOST_SCALARS
        self.device = torch.cuda.current_device()
        many = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._most = num_programs or _PER_MULTIPROCESSOR * many
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()
        self._dummy = torch.zeros(256, dtype=torch.uint8, device="cuda")
        self._tables = _Tables()
        self._ready: dict[Form, _Ready] = {}
        self._found: dict[tuple[int, int, int], _Ready] = {}
        torch.cuda.synchronize()

    def warm(self, dtype: DType, op: ReduceOp, num_sources: int) -> None:
        """Compiles, loads and runs the kernel once, on data of its own, and waits for it.

        Do this before any stream waits on a gate: a first launch loads code, which waits for the whole device.
        Raises `TypeError` for an operation that the dtype has not.
        """
        wanted = form(dtype, op, num_sources, self._most_scalars)
        if wanted not in self._ready:
            self._ready[wanted] = self._load(wanted, num_sources)
        self._found[dtype, op, num_sources] = self._ready[wanted]

    def launch(
        self, dst: int, sources: Sequence[int], size_bytes: int, dtype: DType, op: ReduceOp, stream: int
    ) -> None:
        """Queues `dst = op(sources)` over `size_bytes` on the raw stream; returns before it runs.

        Args:
            dst: may be one of the sources; may not overlap one otherwise.
            sources: addresses that the device can read, in the order in which they are combined.

        Raises:
            TypeError: the operation has no meaning for the dtype.
            ValueError: no source, or a size or address that is not a multiple of the element.
        """
        num = len(sources)
        ready = self._found.get((dtype, op, num))
        if ready is None:
            self.warm(dtype, op, num)
            ready = self._found[dtype, op, num]
        head, body, rest = split(dst, sources, size_bytes, dtype.size_bytes)
        if not size_bytes or (num == 1 and sources[0] == dst):
            return
        if num <= self._most_scalars:
            addresses = (*sources, *(0,) * (self._most_scalars - num), 0)
        else:
            addresses = (*(0,) * self._most_scalars, self._tables.address(tuple(sources)))
        blocks = max(-(-body // ready.vectors), -(-rest // _SMALL))
        grid = (min(blocks, self._most), 1, 1)
        ready.kernel[grid](dst, *addresses, num, head, body, rest, *ready.constants, stream=stream)

    def _load(self, wanted: Form, num_sources: int) -> _Ready:
        import triton.language as tl

        element = getattr(tl, wanted.element)
        item_bytes = element.primitive_bitwidth // 8
        # 16 bytes per thread; twice that for wide elements, which need fewer registers for it.
        block_bytes = _NUM_WARPS * 32 * _VECTOR_BYTES * (1 if item_bytes < 4 else 2)
        constants = (element, wanted.kind, wanted.op, wanted.num, block_bytes // item_bytes)
        dst, src = self._dummy.data_ptr(), self._dummy.data_ptr() + 128
        if wanted.num:
            addresses = (*(src,) * wanted.num, *(0,) * (self._most_scalars - wanted.num), 0)
        else:
            addresses = (*(0,) * self._most_scalars, self._tables.address((src,) * num_sources))
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            # One vector and one element: both parts of the kernel run.
            kernel = self._jit[(1,)](
                dst, *addresses, num_sources, 0, 1, 1, *constants, num_warps=_NUM_WARPS, enable_fp_fusion=False
            )
            self._stream.synchronize()
        return _Ready(kernel, constants, block_bytes // _VECTOR_BYTES)


class Synchronizes(Protocol):
    """The one call of a driver that `HostReducer` makes."""

    def stream_synchronize(self, stream: int) -> None: ...


class HostReducer:
    """Reductions by the CPU's own code, on memory that the host can reach. Waits for the stream, then computes.

    It is for drivers whose device memory is host memory; a stream that waits for a later call of the same thread
    would wait for ever.
    """

    def __init__(self, driver: Synchronizes) -> None:
        self._driver = driver
        self._reduce = native.load().reduce

    def warm(self, dtype: DType, op: ReduceOp, num_sources: int) -> None:
        """Only checks the arguments, as `Reducer.warm` does."""
        form(dtype, op, num_sources)

    def launch(
        self, dst: int, sources: Sequence[int], size_bytes: int, dtype: DType, op: ReduceOp, stream: int
    ) -> None:
        """As `Reducer.launch`, but done when it returns."""
        form(dtype, op, len(sources))
        split(dst, sources, size_bytes, dtype.size_bytes)
        self._driver.stream_synchronize(stream)
        self._reduce(int(dtype), int(op), dst, list(sources), size_bytes // dtype.size_bytes)


def reducer(driver: Driver) -> Reducer | HostReducer:
    """The reducer for a driver: Triton on a real GPU, else the CPU's code.

    Raises `NotSupported` on a GPU without Triton: the host can't reach its memory.
    """
    if driver.name not in ("cuda", "hip") or not torch.cuda.is_available():
        return HostReducer(driver)
    if importlib.util.find_spec("triton") is None:
        raise NotSupported("reductions on a GPU need Triton, which is not installed: pip install triton")
    return Reducer()
