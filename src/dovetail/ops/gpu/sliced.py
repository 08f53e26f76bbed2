"""Transports `dma` and `decomposed` on the GPUs of ranks: an operator's rows go to their owners slice by slice.

Both run one plan (`plan.build.sliced`), whose copies wait for the flags of their slices. With `dma` a kernel of ours
raises them while it computes (`launch.py`); with `decomposed` torch's operator computes one slice after the other, and
the stream writes the word behind each. Rows that stay are copied into the output in the caller's stream.

A rank's plan and memory are made at the first call of a shape and kept. Nothing here can be captured in a graph: copies
behind flags would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dovetail.coll import arguments, gpu
from dovetail.hw import memory
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.call import GpuRunner
from dovetail.hw.gpu.driver import WORD, WRITE
from dovetail.hw.gpu.group import GpuGroup
from dovetail.ops import calls
from dovetail.ops.gpu import tiles
from dovetail.ops.gpu.exchange import first_rows_of, slice_rows_of
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch, PoolShape, SplitK
from dovetail.ops.gpu.tiles import END, FIRST, Order, RowTiles, across, row_tiles
from dovetail.ops.group import NUM_WORDS, OpsGroup
from dovetail.plan import passes
from dovetail.plan.build.sliced import Own, Slice, sliced_all_to_all

#: Queues that take slices in turn, see `dma.LANES`.
LANES = 2
#: Slices end at multiples of this many rows, so that tiles of most shapes are whole.
_STEP = 128
_MOST_KEPT = 32
_ALIGN = 4096


class Pattern(NamedTuple):
    """Which rows go where, for all ranks: they make one plan of it."""

    send: tuple[tuple[int, ...], ...]  #: rows from each rank to each; they lie in the order of the destinations
    row_bytes: tuple[int, ...]  #: of each source's rows
    places: tuple[tuple[tuple[int, int], ...], ...]  #: [source][destination]: byte of its output, pitch of the rows
    output_bytes: tuple[int, ...]

    def slice_rows(self, rank: int) -> int:
        """Rows of a slice of a rank, the same whoever asks."""
        away = sum(self.send[rank]) - self.send[rank][rank]
        return slice_rows_of(away, self.row_bytes[rank], _STEP)

    def cut(self, rank: int, height: int, order: Order | str) -> RowTiles:
        """A rank's tiles of so many rows, and its slices."""
        rows = self.slice_rows(rank)
        first = first_rows_of(rows, _STEP)
        return row_tiles(self.send[rank], rank, height, slice_rows=rows, first_rows=first, order=order)

    def slices(self, rank: int, order: Order | str) -> list[Slice]:
        """What a rank sends, in its order, and what stays."""
        found, width = [], self.row_bytes[rank]
        for begin, end, to, row, _ in self.cut(rank, _STEP, order).slices.tolist():
            offset, pitch = self.places[rank][to]
            found.append(
                Slice(
                    source=rank, destination=to, source_offset=begin * width, rows=end - begin, row_bytes=width,
                    destination_offset=offset + row * pitch, destination_pitch=pitch,
                )
            )  # fmt: skip
        return found


class Sliced:
    """A pattern on this rank's GPU: its plan and flags. Every member makes one and runs it in the same order."""

    def __init__(self, group: GpuGroup, pattern: Pattern, order: Order | str) -> None:
        size, rank = len(pattern.send), group.group.rank
        every = [pattern.slices(r, order) for r in range(size)]
        plan = sliced_all_to_all(
            size, [s for slices in every for s in slices], own=Own.LEFT, lanes=LANES, output_bytes=pattern.output_bytes,
            y_bytes=[sum(rows) * width for rows, width in zip(pattern.send, pattern.row_bytes, strict=True)],
        )  # fmt: skip
        self.pattern, self._world = pattern, group.world
        self.rows: list[tuple[int, int]] = pattern.cut(rank, _STEP, order).slices[:, [FIRST, END]].tolist()
        self._runner = GpuRunner(group, passes.entry(plan), most_streams=LANES, check=False)
        first = sum(len(slices) for slices in every[:rank])
        numbers = [first + n for n, s in enumerate(every[rank]) if s.size_bytes]
        words = self._runner.words([f"slice {n}" for n in numbers])
        at = iter(words)
        self.words = [next(at) if s.size_bytes else 0 for s in every[rank]]  #: of this rank's slices; 0: no flag
        self._sizes = sum(pattern.send[rank]) * pattern.row_bytes[rank], pattern.output_bytes[rank]
        self._kernels: dict[Any, tuple[Any, torch.Tensor]] = {}

    def kernel(self, key: Any, make: Callable[[], Any], where: torch.device) -> tuple[Any, torch.Tensor]:
        """What computes, made once for a key, and where its flags are, on the device."""
        if key not in self._kernels:
            while len(self._kernels) >= _MOST_KEPT:
                del self._kernels[next(iter(self._kernels))]
            self._kernels[key] = make(), torch.tensor(self.words, dtype=torch.int64).to(where)
        return self._kernels[key]

    def run(self, y: torch.Tensor, out: torch.Tensor, launch: Callable[[int, int], None]) -> None:
        """Launches what raises the flags into torch's current stream, which goes on behind the arrival of all rows.

        `launch` takes what a flag is set to, and the raw stream.
        """
        device = self._world.device
        device.enter()
        stream = tensors.current_stream(device.index)
        y_bytes, out_bytes = self._sizes
        given = {"y": y} if y_bytes else {}
        if out_bytes:
            given["output"] = out
        current = torch.cuda.current_stream(device.index) if torch.cuda.is_available() else None

        def launched(base: int) -> None:
            with torch.no_grad(), torch.cuda.stream(current):  # it may be the issuer's thread
                launch(base + 1, stream)

        ticket = self._world.issuer.run(lambda: self._runner.submit(given, after=stream, launch=launched))
        if current is None:
            ticket.wait()  # a stand-in's memory is the host's, which no stream orders

    def raised_behind(self, compute: Callable[[int, int], None]) -> Callable[[int, int], None]:
        """A `launch` that computes rows [first, end) slice by slice; the stream writes the word behind each."""
        word = np.zeros(1, WORD)
        word["kind"] = WRITE

        def launch(value: int, stream: int) -> None:
            word["value"] = value
            for (first, end), address in zip(self.rows, self.words, strict=True):
                compute(first, end)
                if address:
                    word["address"] = address
                    self._world.device.driver.stream_words(word, stream)

        return launch

    def close(self) -> None:
        """Waits for the last run, bounded by its deadline."""
        self._runner.close()


class Memory:
    """What a group's sliced operators keep on this rank."""

    def __init__(self, g: OpsGroup, device: torch.device) -> None:
        # By the collectives' own rule, which tells a stand-in driver from a CPU.
        backend, index = arguments.one_device([torch.empty(0, device=device)])
        self.group = gpu.group_of(g.group, backend, index)
        self.cores = self.group.world.device.driver.num_multiprocessors(index)
        self._patterns: dict[Any, Sliced] = {}
        #: Set by a kernel to 1 + the place of a value that names no row of its table.
        with memory.lasting():
            self.wrong = torch.zeros(1, dtype=torch.int64, pin_memory=device.type != "cpu")
        self._scratch: dict[str, torch.Tensor] = {}
        self._sums = torch.empty(0, dtype=torch.float32, device=device)

    @staticmethod
    def of(g: OpsGroup, device: torch.device) -> Memory:
        """That of a group and a device; made by all members in their first call."""
        key = "sliced", device
        if key not in g.known:
            g.known[key] = Memory(g, device)
        found: Memory = g.known[key]
        return found

    def sliced(self, pattern: Pattern, order: Order | str) -> Sliced:
        """The run of a pattern."""
        key = pattern, Order(order)
        if key not in self._patterns:
            while len(self._patterns) >= _MOST_KEPT:
                self._patterns.pop(next(iter(self._patterns))).close()
            self._patterns[key] = Sliced(self.group, pattern, order)
        return self._patterns[key]

    @property
    def is_quiet(self) -> bool:
        """Whether `check` has nothing to raise."""
        return not int(self.wrong)

    def check(self) -> None:
        """Raises what a kernel that has ended reported; returns at once."""
        if place := int(self.wrong):
            self.wrong.zero_()
            raise IndexError(f"values[{place - 1}] was not a row of its table; nothing was pooled for it")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory that peers write to."""
        found: torch.Tensor = self.group.world.heap.empty(shape, dtype)
        return found

    def sums(self, number: int) -> torch.Tensor:
        """So many numbers for kernels to work in, the same for all: their launches follow each other on the GPU."""
        if self._sums.numel() < number:
            self._sums = self._sums.new_empty(number)
        return self._sums

    def scratch(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The same, used again by the next call: runs of a group follow each other on the GPU."""
        items = int(np.prod(shape, dtype=np.int64))
        size = -(-max(1, items * dtype.itemsize) // _ALIGN) * _ALIGN
        found = self._scratch.get(name)
        if found is None or found.numel() < size:
            found = self._scratch[name] = self.empty((size,), torch.uint8)
        return found[: items * dtype.itemsize].view(dtype).view(*shape)


def _products(
    m: Memory, c: calls.Product, pattern: Pattern, y: torch.Tensor, out: torch.Tensor, own: torch.Tensor, fused: bool,
    order: Order | str,
) -> None:  # fmt: skip
    """y = x @ w.T, its rows by the pattern to everybody's `out`; those that stay to `own`, a part of `out`."""
    sliced = m.sliced(pattern, order)
    rank = m.group.group.rank
    first = sum(pattern.send[rank][:rank])
    x, w = c.x.contiguous(), c.w.contiguous()

    def placed() -> None:
        own.copy_(y[first : first + len(own)])

    def behind(begin: int, end: int) -> None:
        torch.mm(x[begin:end], w.t(), out=y[begin:end])

    if not fused:
        launched = sliced.raised_behind(behind)

        def launch(value: int, stream: int) -> None:
            launched(value, stream)
            placed()

        sliced.run(y, out, launch)
        return
    rows = pattern.send[rank]
    blocks = tiles.gemm_blocks(rows, c.n, c.k, c.dtype.itemsize, m.cores)

    def made() -> GemmLaunch:
        cut = across(pattern.cut(rank, blocks.height, order), blocks.height)
        return GemmLaunch(cut, c.n, c.k, m.cores, y.device, blocks=blocks, split=SplitK.TAIL, scratch=m.sums)

    kernel, flags = sliced.kernel((c.n, c.k, c.dtype), made, y.device)

    def start(value: int, _stream: int) -> None:
        kernel(x, w, y, flags, value)
        placed()

    sliced.run(y, out, start)


def gemm_all_to_all(
    g: OpsGroup, c: calls.GemmAllToAll, *, fused: bool = True, order: Order | str = Order.REMOTE
) -> torch.Tensor:
    """Rows of the product straight into the peers' outputs."""
    size, rank, width = g.group.size, g.group.rank, c.n * c.dtype.itemsize
    slots = g.agree(c.text, (), (*c.send, *c.receive))
    send = tuple(tuple(row[NUM_WORDS : NUM_WORDS + size]) for row in slots)
    receive = [row[NUM_WORDS + size :] for row in slots]
    m = Memory.of(g, c.device)
    out = m.empty((sum(c.receive), c.n), c.dtype)
    places = tuple(tuple((sum(receive[d][:i]) * width, width) for d in range(size)) for i in range(size))
    pattern = Pattern(send, (width,) * size, places, tuple(sum(r) * width for r in receive))
    if any(map(any, send)) and width:
        before = sum(c.receive[:rank])
        own = out[before : before + c.receive[rank]]
        _products(m, c, pattern, m.scratch("y", (c.rows, c.n), c.dtype), out, own, fused, order)
    return out


def matmul_reduce_scatter(
    g: OpsGroup, c: calls.MatmulReduceScatter, *, fused: bool = True, order: Order | str = Order.REMOTE
) -> torch.Tensor:
    """Partial rows to their owner, which adds them up in the order of ranks, in fp32, and rounds once."""
    size, rank = g.group.size, g.group.rank
    rows = c.rows // size
    part = rows * c.n * c.dtype.itemsize
    g.agree(c.text)
    out = torch.empty((rows, c.n), dtype=c.dtype, device=c.device)
    if not part:
        return out
    m = Memory.of(g, c.device)
    width = c.n * c.dtype.itemsize
    places = tuple(((i * part, width),) * size for i in range(size))
    pattern = Pattern(((rows,) * size,) * size, (width,) * size, places, (size * part,) * size)
    stage = m.scratch("stage", (size, rows, c.n), c.dtype)
    y = m.scratch("y", (c.rows, c.n), c.dtype)
    _products(m, c, pattern, y, stage, stage[rank], fused, order)
    total = stage[0].to(torch.float32, copy=True)
    for other in stage[1:]:
        total += other
    return out.copy_(total)


def embedding_all_to_all(
    g: OpsGroup, c: calls.EmbeddingAllToAll, *, order: Order | str = Order.REMOTE
) -> torch.Tensor:
    """Pooled rows of a sample to its rank: a sample's tables are one row of a strided copy."""
    size, rank, item = g.group.size, g.group.rank, c.dtype.itemsize
    local, mine = c.batch // size, len(c.weights)
    every = [row[0] for row in g.agree(c.text, (mine,))]
    wide = sum(every) * c.dim * item
    m = Memory.of(g, c.device)
    out = m.empty((local, sum(every), c.dim), c.dtype)
    places = tuple(((sum(every[:i]) * c.dim * item, wide),) * size for i in range(size))
    widths = tuple(number * c.dim * item for number in every)
    pattern = Pattern(((local,) * size,) * size, widths, places, (local * wide,) * size)
    if not local * wide:
        return out
    sliced = m.sliced(pattern, order)
    y = m.scratch("y", (c.batch, mine, c.dim), c.dtype)
    values, offsets = c.values.contiguous(), c.offsets.contiguous()

    def made() -> BagLaunch:
        shape = PoolShape()
        cut = pattern.cut(rank, shape.bags, order)
        return BagLaunch(cut, c.weights, c.batch, m.cores, y.device, mode=c.mode, shape=shape, error=m.wrong)

    key = tuple((w.data_ptr(), len(w)) for w in c.weights), c.dim, c.dtype, c.mode
    kernel, flags = sliced.kernel(key, made, y.device)
    first = sum(every[:rank])

    def launch(value: int, _stream: int) -> None:
        kernel(values, offsets, y, flags, value, c.per_sample_weights)
        out[:, first : first + mine].copy_(y[rank * local : (rank + 1) * local])

    sliced.run(y, out, launch)
    return out
