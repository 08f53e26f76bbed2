"""The `dma` transport: a finished slice raises a flag, the flag releases a copy by an engine, no core moves a byte.

Owns the run of a sliced plan beside the computation that raises its flags, and the two operators on one GPU whose peers
are in host memory. The computation is launched first and the copies are issued while it runs, behind an event that was
recorded before it; the caller's stream then waits for the last copy. Nothing here waits on the host.

Peers in host memory have no computation of their own. What they send is read by the GPU's engines, so the bytes that
cross the link are those of a real all-to-all, both ways: `paced` peers are in step with the GPU (their n-th slice is
there when the GPU's n-th one is), others have everything ready at the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from dovetail.errors import DovetailError, NotSupported
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.local import LocalRunner
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.ops.gpu.exchange import GPU, Buffers, Exchange, Layout, Pace, slice_rows_of
from dovetail.ops.gpu.place import Placing
from dovetail.ops.gpu.tiles import Order, RowTiles, row_tiles
from dovetail.plan.plan import Plan

if TYPE_CHECKING:
    import torch

#: Queues in each direction, which take slices in turn: a stream that waits for a flag sees it some 10 us late, while
#: the other one copies.
LANES = 2
#: Where flags lie: a kernel's store to its own memory is over sooner than one over the link. A balanced product
#: of 200 MB takes 4.62 to 4.66 ms on an H200 with this and two queues, 4.70 to 4.83 without one of them.
WORDS_ON_DEVICE = True
_ONE = "the buffers"  # an execution remembers what it bound by a key; here there is but one


@dataclass(frozen=True, slots=True, eq=False)
class Flags:
    """What a computation raises in one run: it stores `value`, 64 bits, to the address of a slice that is finished.

    All bytes of the slice must be visible to the system before (a release store at system scope). The addresses are
    those of the plan's imported signals in their order, which is that of the slices.
    """

    addresses: torch.Tensor  #: int64, on the device
    words: Sequence[int]  #: the same numbers, for whoever raises them from a stream
    base: int  #: what this run's signals count from
    value: int  #: base + 1

    def __len__(self) -> int:
        return len(self.words)


class Sliced(Protocol):
    """A computation that raises a flag for each of its slices."""

    def launch(self, flags: Flags, stream: int) -> None:
        """Puts it into the raw stream, which is torch's current one, and returns at once.

        It must not wait for anything that comes later in that stream, and must raise every flag.
        """


class SlicedRun:
    """A sliced plan over given buffers, run again and again, each time beside a computation. An owner: `close()`."""

    def __init__(
        self, device: Device, plan: Plan, buffers: Mapping[tuple[int, str], Any], *, host_ranks: frozenset[int],
        timeout_s: float | None = None, lanes: int = 1, words_on_device: bool = False,
    ) -> None:  # fmt: skip
        """`plan`: of `plan.build.sliced`; `buffers` by rank and name, those of `host_ranks` in pinned host memory.

        `lanes`: those of the plan; `words_on_device`: the flags lie in the GPU's memory.
        """
        import torch

        device.enter()
        self._device = device
        self._runner = LocalRunner(
            device, plan, host_ranks=host_ranks, timeout_s=timeout_s, most_streams=2 * lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        try:
            self._run = self._runner.bind(buffers)
        except BaseException:
            self._runner.close()
            raise
        self._error: BaseException | None = None
        where = f"cuda:{device.index}" if torch.cuda.is_available() else "cpu"
        self._words = self._runner.imported()
        self._addresses = torch.tensor(self._words, dtype=torch.int64).to(where)

    @property
    def num_flags(self) -> int:
        """How many flags a computation raises."""
        return len(self._words)

    def start(self, compute: Sliced, stream: int) -> GpuTicket:
        """Launches the computation into the raw stream and issues the copies; the stream goes on behind both.

        Returns before anything is done. The ticket's wait blocks the host until all slices are where they belong.

        Raises:
            NotSupported: the stream is capturing a graph.
            DovetailError: an earlier run could not be issued as a whole: close this and make another.
        """
        self._device.enter()
        if self._error is not None:
            raise DovetailError(f"an earlier run was not issued as a whole: {self._error!r}") from self._error
        if self._device.driver.stream_capturing(stream):
            raise NotSupported("the stream is capturing a graph: copies behind flags would be lost. Run it outside")
        is_launched = False

        def launch(base: int) -> None:
            nonlocal is_launched
            compute.launch(Flags(self._addresses, self._words, base, base + 1), stream)
            is_launched = True

        try:
            return self._run.submit(after=stream, launch=launch)
        except BaseException as error:
            if is_launched:  # in part, it may still read and write the buffers: there is no other run after it
                self._error = error
            raise

    def close(self) -> None:
        """Waits for the last run. Safe to call twice."""
        self._runner.close()

    def __enter__(self) -> SlicedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmShape:
    """How the kernel cuts a product. The default is as fast as cuBLAS on an H200; smaller tiles end sooner."""

    height: int = 128
    width: int = 256
    depth: int = 64
    group: int = 8  #: row tiles that are computed column by column together; slices of fewer tiles end together
    warps: int = 8
    stages: int = 3
    programs: int = 1  #: for each multiprocessor; all must fit at once


def gemm_exchange(
    x_shape: Sequence[int], w_shape: Sequence[int], dtype: torch.dtype, send: Sequence[int], receive: Sequence[int]
) -> Exchange:
    """Rows of y = x @ w.T, `send[j]` for rank j; `receive[j]` rows come from rank j."""
    if len(x_shape) != 2 or len(w_shape) != 2 or x_shape[1] != w_shape[1] or sum(send) != x_shape[0]:
        given = f"x {tuple(x_shape)}, w {tuple(w_shape)}, send {tuple(send)}"
        raise ValueError(f"{given}: x is [M, K], w is [N, K], and all of M rows are sent")
    width = w_shape[0] * dtype.itemsize
    return Exchange(send=tuple(send), receive=tuple(receive), row_bytes=(width,) * len(send))


#: Steps of a tile's depth that each part of K has at least: several programs to a tile must be worth the sum.
_PART_STEPS = 4
#: Waves of tiles up to which a whole product is computed in parts: it takes memory for each of them, in fp32.
_MOST_WAVES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first row tiles of a product, which are to be finished early: several programs to a tile, a part of K each.

    How many row tiles it has follows from the product (`head_tiles`), or it is the whole of it.
    """

    parts: int = 2
    is_whole: bool = False


def waves(num_tiles: int, columns: int, programs: int, head: int = 0, parts: int = 2) -> float:
    """How often a tile's time a product takes: `num_tiles` row tiles of so many columns on so many programs.

    The first `head` row tiles are computed by `parts` programs to a tile, in that part of the time.

    >>> waves(20, 16, 132), waves(20, 16, 132, head=4), waves(20, 16, 132, head=20, parts=4)
    (3.0, 2.5, 2.5)
    """
    return -(-parts * head * columns // programs) / parts + -(-(num_tiles - head) * columns // programs)


def head_tiles(num_tiles: int, columns: int, programs: int, parts: int = 2) -> int:
    """How many row tiles a head has: as many as make the fewest waves, the most of those, in a wave at most.

    >>> head_tiles(20, 16, 132), head_tiles(132, 32, 132), head_tiles(20, 16, 132, parts=4)
    (4, 2, 4)
    """
    most = min(num_tiles, programs // max(columns, 1))
    if most < 1:
        return 0
    return -min((waves(num_tiles, columns, programs, head, parts), -head) for head in range(1, most + 1))[1]


class DmaGemm:
    """y = x @ w.T on the GPU, rows sent to peers in host memory slice by slice. An owner: `close()`.

    Nothing can be sent before the first tiles are finished, and a last wave that is not full leaves programs idle.
    A head helps with both.
    """

    def __init__(
        self, device: Device, buffers: Buffers, x_shape: Sequence[int], w_shape: Sequence[int], dtype: torch.dtype, *,
        slice_rows: int | None = None, order: Order | str = Order.REMOTE, pace: Pace | str = Pace.STEP,
        shape: GemmShape | None = None, head: Head | None = None, timeout_s: float | None = None, lanes: int = LANES,
        words_on_device: bool = WORDS_ON_DEVICE,
    ) -> None:  # fmt: skip
        """`buffers` of `gemm_exchange`; `slice_rows`: rows that one flag stands for, whole tiles are best.

        `head`: none by default, nor if K is too short for its parts or there are too many tiles for a whole one.
        """
        import torch

        exchange, self.shape = buffers.exchange, shape or GemmShape()
        gemm_exchange(x_shape, w_shape, dtype, exchange.send, exchange.receive)
        (self.M, self.K), self.N, self.dtype = x_shape, w_shape[0], dtype
        height = self.shape.height
        rows = slice_rows or slice_rows_of(sum(exchange.send[1:]), exchange.row_bytes[GPU], height)
        self.slice_rows, self.tiles = rows, row_tiles(exchange.send, GPU, height, slice_rows=rows, order=order)
        self.y = buffers.y[GPU][: exchange.y_bytes(GPU)].view(dtype).view(self.M, self.N)
        self._tables = _Tables(self.tiles, self.y.device)
        self._programs = device.driver.num_multiprocessors(device.index) * self.shape.programs
        columns, num_tiles = -(-self.N // self.shape.width), len(self.tiles.tiles)
        #: Row tiles of the head, and programs to each of their tiles.
        self.head, self.parts = 0, 1
        if head and head.parts * _PART_STEPS * self.shape.depth <= self.K:
            self.parts = head.parts
            if not head.is_whole:
                self.head = head_tiles(num_tiles, columns, self._programs, head.parts)
            elif num_tiles * columns <= _MOST_WAVES * self._programs:
                self.head = num_tiles
        self._rest = self._tables.tiles[self.head :].clone()
        sums = (self.head * columns, self.parts, height, self.shape.width)
        self._sums = torch.empty(sums, dtype=torch.float32, device=self.y.device)
        self._arrivals = torch.zeros(self.head * columns, dtype=torch.int64, device=self.y.device)
        self._operands: tuple[torch.Tensor, torch.Tensor] | None = None
        plan = exchange.sliced(self.tiles, pace=pace, lanes=lanes)
        self.run = SlicedRun(
            device, plan, buffers.of(plan), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
            words_on_device=words_on_device,
        )  # fmt: skip

    def start(self, x: torch.Tensor, w: torch.Tensor, stream: int) -> GpuTicket:
        """Puts it all into the raw stream, torch's current one, and returns. `y` and the peers' outputs are written."""
        self._check(x, w)
        self._operands = x, w
        return self.run.start(self, stream)

    def compute(self, x: torch.Tensor, w: torch.Tensor) -> None:
        """The product alone, with nobody waiting for it."""
        self._check(x, w)
        self._operands = x, w
        self._launch(self._tables.no_flags, 0)

    def _check(self, x: torch.Tensor, w: torch.Tensor) -> None:
        for name, given, shape in (("x", x, (self.M, self.K)), ("w", w, (self.N, self.K))):
            if tuple(given.shape) != shape or given.dtype != self.dtype or not given.is_contiguous():
                found = f"{tuple(given.shape)} of {given.dtype}{'' if given.is_contiguous() else ', with gaps'}"
                raise ValueError(f"{name} is {found}; this one was made for {shape} of {self.dtype}, contiguous")

    def launch(self, flags: Flags, stream: int) -> None:
        """See `Sliced`."""
        self._launch(flags.addresses, flags.value)

    def _launch(self, flags: torch.Tensor, value: int) -> None:
        from dovetail.ops.kernels.gemm import gemm_parts_kernel, gemm_slices_kernel

        assert self._operands is not None
        (x, w), s, t = self._operands, self.shape, self._tables
        how = {
            "BM": s.height, "BN": s.width, "BK": s.depth, "GROUP": s.group, "EVEN_M": self.tiles.is_even(s.height),
            "EVEN_N": self.N % s.width == 0, "EVEN_K": self.K % s.depth == 0, "PRECISION": "ieee",
            "SOFT": not x.is_cuda, "num_warps": s.warps, "num_stages": s.stages,
        }  # fmt: skip
        if self.head:
            gemm_parts_kernel[(self.parts * len(self._arrivals),)](
                x, w, self.y, t.tiles, t.slice_tiles, t.counters, flags, self._sums, self._arrivals, value,
                self.head, self.N, self.K, PARTS=self.parts, **how,
            )  # fmt: skip
        if len(self._rest):
            gemm_slices_kernel[(self._programs,)](
                x, w, self.y, self._rest, t.slice_tiles, t.counters, flags, value, len(self._rest), self.N, self.K,
                PROGRAMS=self._programs, **how,
            )  # fmt: skip

    def close(self) -> None:
        """Waits for the last run."""
        self.run.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How the kernel cuts bags."""

    bags: int = 4  #: pooled at a time by one program
    depth: int = 4  #: rows of each that are loaded at a time
    warps: int = 4
    programs: int = 8  #: for each multiprocessor, at most: the more, the more loads are on their way


def embedding_exchange(
    num_tables: Sequence[int], dim: int, dtype: torch.dtype, batch: Sequence[int],
    layout: Layout | str = Layout.PACKED,
) -> Exchange:  # fmt: skip
    """Pooled rows: rank r has `num_tables[r]` tables and gets the bags of all tables for its `batch[r]` samples."""
    widths = tuple(number * dim * dtype.itemsize for number in num_tables)
    return Exchange(
        send=tuple(batch), receive=(batch[GPU],) * len(batch), row_bytes=widths, layout=Layout(layout)
    )  # fmt: skip


class DmaEmbedding:
    """Bags of the GPU's tables, pooled and sent to peers in host memory slice by slice. An owner: `close()`.

    The GPU's finished output, [its samples][tables of all ranks][dim], is `buffers.wide`. Packed rows are put there in
    the caller's stream behind the last copy, the GPU's own while copies still run. Peers put theirs in place
    themselves: they are other ranks, and what they do costs this one nothing.
    """

    def __init__(
        self, device: Device, buffers: Buffers, weights: Sequence[torch.Tensor], *, slice_rows: int | None = None,
        order: Order | str = Order.REMOTE, pace: Pace | str = Pace.STEP, mode: str = "sum",
        shape: PoolShape | None = None, timeout_s: float | None = None, lanes: int = LANES,
        words_on_device: bool = WORDS_ON_DEVICE,
    ) -> None:  # fmt: skip
        """`buffers` of `embedding_exchange`; `weights`: this rank's tables [rows, dim]; `slice_rows`: in samples."""
        import torch

        exchange, self.shape = buffers.exchange, shape or PoolShape()
        self.T, self.D, self.B = len(weights), weights[0].shape[1], sum(exchange.send)
        self.dtype = weights[0].dtype
        if any(w.shape[1] != self.D or w.dtype != self.dtype or not w.is_contiguous() for w in weights):
            raise ValueError("tables of one rank have one dim and dtype, and are contiguous")
        if mode not in ("sum", "mean") or self.T * self.D * self.dtype.itemsize != exchange.row_bytes[GPU]:
            given = f"mode {mode!r}, {self.T} tables of dim {self.D} and {self.dtype}"
            raise ValueError(f"{given}: mode is sum or mean, and rows to send have {exchange.row_bytes[GPU]} bytes")
        self._mean, self._weights = mode == "mean", list(weights)
        height = self.shape.bags
        rows = slice_rows or slice_rows_of(sum(exchange.send[1:]), exchange.row_bytes[GPU], height)
        self.slice_rows, self.tiles = rows, row_tiles(exchange.send, GPU, height, slice_rows=rows, order=order)
        self.y = buffers.y[GPU][: exchange.y_bytes(GPU)].view(self.dtype).view(self.B, self.T, self.D)
        where = self.y.device
        self._tables = _Tables(self.tiles, where)
        self._addresses = torch.tensor([w.data_ptr() for w in weights], dtype=torch.int64, device=where)
        self._num_rows = torch.tensor([len(w) for w in weights], dtype=torch.int64, device=where)
        self._error = torch.zeros(1, dtype=torch.int64, device=where)
        self._cores = device.driver.num_multiprocessors(device.index)
        self._programs = 0  # not known before the kernel was compiled
        self._bags: tuple[torch.Tensor, torch.Tensor] | None = None
        self._kept = exchange.send[GPU]
        plan = exchange.sliced(self.tiles, pace=pace, lanes=lanes)
        self.run = SlicedRun(
            device, plan, buffers.of(plan), host_ranks=exchange.peers, timeout_s=timeout_s, lanes=lanes,
            words_on_device=words_on_device,
        )  # fmt: skip
        self._placing = Placing(device, buffers)

    @property
    def programs(self) -> int:
        """For each multiprocessor, those that it holds at once; 0 before the first launch."""
        return self._programs // self._cores

    def start(self, values: torch.Tensor, offsets: torch.Tensor, stream: int) -> GpuTicket:
        """Puts it all into the raw stream, torch's current one. Bag b of table t: values[offsets[t * B + b]:...].

        The ticket tells that all slices arrived; the output is finished behind that, in the stream.
        """
        self._take(values, offsets)
        self._placing.begin(stream)
        ticket = self.run.start(self, stream)
        self._placing.end(stream)
        return ticket

    def compute(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        """The bags alone, with nobody waiting for them."""
        self._take(values, offsets)
        self._launch(self._tables.no_flags, 0)

    def _take(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        if offsets.numel() != self.T * self.B + 1 or not (values.is_contiguous() and offsets.is_contiguous()):
            given = f"{offsets.numel()} offsets for {self.T} tables and {self.B} bags of each"
            raise ValueError(f"{given}: one for each bag and one behind the last, and no gaps in memory")
        self._bags = values, offsets

    def check(self) -> None:
        """Waits for the GPU. IndexError if some value named a row that its table has not; it added nothing."""
        if place := int(self._error.item()):
            self._error.zero_()
            raise IndexError(f"values[{place - 1}] names a row that its table has not")

    def launch(self, flags: Flags, stream: int) -> None:
        """See `Sliced`."""
        self._launch(flags.addresses, flags.value)
        self._placing.own(self.y[: self._kept], 0, stream)

    def _launch(self, flags: torch.Tensor, value: int) -> None:
        import triton

        from dovetail.ops.kernels.embedding import embedding_slices_kernel

        assert self._bags is not None
        (values, offsets), s, t = self._bags, self.shape, self._tables
        if not len(t.tiles):
            return
        dtype = getattr(triton.language, str(self.dtype).removeprefix("torch."))
        kernel = embedding_slices_kernel[(min(self._programs or self._cores, len(t.tiles) * self.T),)](
            self._addresses, self._num_rows, values, offsets, values, self.y, t.tiles, t.slice_tiles, t.counters, flags,
            self._error, value, len(t.tiles), self.T, self.B, self.D,
            DTYPE=dtype, BAGS=s.bags, DEPTH=s.depth, BLOCK_D=triton.next_power_of_2(self.D),
            MEAN=self._mean, SCALED=False, SOFT=not self.y.is_cuda, num_warps=s.warps,
        )  # fmt: skip
        if not self._programs:
            shared_bytes = getattr(getattr(kernel, "metadata", None), "shared", 0)
            held = resident(getattr(kernel, "n_regs", 0), s.warps, shared_bytes)
            self._programs = self._cores * min(s.programs, held)

    def close(self) -> None:
        """Waits for the last run."""
        self.run.close()
        self._placing.close()


def resident(num_registers: int, warps: int, shared_bytes: int = 0) -> int:
    """Programs of so many registers a thread that a multiprocessor holds at once; one if that is not known.

    A program that has no place begins when another has ended, and what it has to pool is then late for its slice.
    The figures are NVIDIA's: 65,536 registers, given in blocks of 256 a warp; 64 warps; 32 programs; of shared memory
    the 164 KiB of an A100 (later ones have more), of which a program takes one more than it asks for.

    >>> resident(96, 4)
    5
    """
    if not num_registers:
        return 1
    a_warp = -(-num_registers * 32 // 256) * 256
    return max(1, min(65536 // (a_warp * warps), 64 // warps, 32, (164 << 10) // (shared_bytes + 1024)))


class _Tables:
    """The tables of a kernel on its device."""

    def __init__(self, tiles: RowTiles, where: torch.device) -> None:
        import torch

        self.tiles, self.slice_tiles = (torch.from_numpy(a.copy()).to(where) for a in (tiles.tiles, tiles.slice_tiles))
        self.counters = torch.zeros(max(1, len(tiles.slices)), dtype=torch.int64, device=where)
        self.no_flags = torch.zeros_like(self.counters)
