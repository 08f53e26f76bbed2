"""The two operators as the benchmark runs them: data, the computation by torch and by us, every form of it, the check.

Owns what is computed at a shape and whether it was right; times are the business of `gpu.py`. The computation of the
unfused and decomposed forms is torch's; `unfused ours` is our kernel and then the collective, for a difference that is
the fusion's alone.

Embeddings arrive packed and are put side by side on the GPU, which is in the time of every form that communicates, also
of the collective alone. Beside it stand a few forms whose copies put rows side by side (`strided`): the collective, the
unfused ones, one decomposed and one fused, so that the best is compared with the best.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from dovetail.bench.fused.rows import Kind
from dovetail.bench.fused.spec import TILE_ROWS, Op, Shape, Spec
from dovetail.hw.gpu.device import Device
from dovetail.ops.gpu.decomposed import Chunked, How, Rows, Unfused, bag_rows, gemm_rows
from dovetail.ops.gpu.dma import LANES, WORDS_ON_DEVICE, DmaEmbedding, DmaGemm, embedding_exchange, gemm_exchange
from dovetail.ops.gpu.exchange import GPU, Buffers, Exchange, Layout, slice_rows_of
from dovetail.ops.gpu.launch import Head, PoolShape
from dovetail.ops.gpu.tiles import LARGE, Blocks, Order

#: A forgotten flag ends a run soon: a kernel that is over raises no more.
TIMEOUT_S = 20.0
_POISON = 0xFF  # NaN in every float that is written with it


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile(Blocks):
    """A cut of a product, with a head or without."""

    head: Head | None = None


_PAIRS, _SQUARE, _NARROW = {"group": 2}, {"group": 4}, {"width": 128, "group": 4, "stages": 4}
GEMM_TILES = tuple(
    GemmTile(**asdict(LARGE) | cut, head=head)
    for cuts, heads in (
        (({}, _SQUARE, _NARROW), (None, Head())),
        ((_PAIRS, _SQUARE), [Head(parts=parts, is_whole=True) for parts in (2, 3, 4, 5)]),
    )
    for cut in cuts for head in heads
)  # fmt: skip
#: Fewer programs leave more of the memory to copies; those that a multiprocessor can't hold are not launched.
POOL_TILES = tuple(PoolShape(programs=number) for number in (8, 7, 6, 5))
WORDS = {True: "device", False: "host"}  #: where flags lie, as a record names it


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One form of a shape."""

    kind: Kind
    name: str
    start: Callable[[int], Any]  #: launches into a raw stream, torch's current one; returns a ticket, or None
    setting: dict[str, Any]
    buffers: Buffers
    in_y: bool = True  #: it writes the GPU's rows to `y`
    made: Any = None  #: the fused operator


class Work(ABC):
    """An operator at a shape. An owner: `close()`."""

    dtype: torch.dtype
    sizes: dict[str, int]

    def __init__(self, device: Device, spec: Spec, shape: Shape, buffers: list[Buffers]) -> None:
        """`buffers`: of each of `exchanges`; all have one `y`."""
        self.device, self.spec, self.shape = device, spec, shape
        self.buffers, self.others, self.exchange = buffers[0], buffers[1:], buffers[0].exchange
        self.where = self.buffers.y[GPU].device
        self._stack = ExitStack()
        largest = max(len(t) for each in buffers for t in (each.y[GPU], *each.written))
        self._spoiled = torch.full((min(largest, 64 << 20),), _POISON, dtype=torch.uint8, device=self.where)
        self._streams = [device.driver.stream_create() for _ in range(2 * LANES)]  # few: many share queues
        for stream in self._streams:
            self._stack.callback(device.driver.stream_destroy, stream)
        self._unfused = {each: self._kept(Unfused(device, each, timeout_s=TIMEOUT_S)) for each in buffers}
        self.reference = torch.empty(0)

    @classmethod
    def exchanges(cls, spec: Spec, shape: Shape) -> list[Exchange]:
        """What is sent: the way that is meant to be fastest, then others of the same rows."""
        return [cls.exchange_of(spec, shape)]

    # --- what differs

    @staticmethod
    @abstractmethod
    def exchange_of(spec: Spec, shape: Shape) -> Exchange:
        """What is sent."""

    @abstractmethod
    def scale(self, size: int) -> None:
        """Makes the operands for a depth K or a bag length."""

    @abstractmethod
    def fresh(self) -> None:
        """New operands, and what torch makes of them."""

    @abstractmethod
    def rows(self) -> Rows:
        """torch's operator, by rows."""

    @abstractmethod
    def dma(self, num_slices: int, order: Order, tile: Any, buffers: Buffers) -> Any:
        """The fused form."""

    @abstractmethod
    def start(self, made: Any, stream: int) -> Any:
        """Starts a fused form."""

    @abstractmethod
    def compute(self, made: Any) -> None:
        """Its computation alone."""

    tiles: tuple[Any, ...]
    step: int  #: what sizes are multiples of
    hows: tuple[How, ...]
    rtol: float
    in_place: bool  #: torch writes to `y`

    @staticmethod
    def tile_name(tile: Any, made: Any = None) -> str:
        """As a row names it: ``128x256g8+4/2`` has a head of four row tiles in two parts, which `made` tells."""
        if isinstance(tile, Blocks):
            head = f"+{made.kernel.head}/{made.kernel.parts}" if made is not None and made.kernel.head else ""
            return f"{tile.height}x{tile.width}g{tile.group}{head}"
        return f"{tile.bags}x{tile.depth}w{tile.warps}p{tile.programs}"

    @staticmethod
    def settled(tile: Any, made: Any) -> Any:
        """A tile as it was launched: with programs that fit."""
        number = getattr(made.kernel, "programs", 0)
        return replace(tile, programs=number) if number else tile

    @staticmethod
    def is_distinct(tile: Any, made: Any) -> bool:
        """Whether it differs from the others: a tile with a head is like one without where there can be none."""
        return not getattr(tile, "head", None) or bool(made.kernel.head)

    # --- forms

    def plain(self) -> list[Contender]:
        """torch's computation, the collective, one after the other."""
        rows, total = self.rows(), sum(self.exchange.send)

        def alone(_stream: int) -> None:
            rows(0, total)

        found = [
            Contender(
                kind=Kind.COMPUTE, name="torch", start=alone, setting={}, buffers=self.buffers, in_y=self.in_place
            ),
            *self.comms(),
        ]  # fmt: skip
        for each, unfused in self._unfused.items():
            found.append(Contender(
                kind=Kind.UNFUSED, name=self._name("torch", each), start=partial(unfused.start, rows),
                setting=self._layout(each), buffers=each, in_y=self.in_place,
            ))  # fmt: skip
        return found

    def comms(self) -> list[Contender]:
        """The collective alone."""
        return [
            Contender(
                kind=Kind.COMM, name=self._name("whole", each), start=partial(unfused.collective, each.y[GPU]),
                setting=self._layout(each), buffers=each,
            )
            for each, unfused in self._unfused.items()
        ]  # fmt: skip

    def ours(self, tile: Any) -> list[Contender]:
        """Our kernel alone, and before the collective."""
        made = self._kept(self.dma(1, Order.REMOTE, tile, self.buffers))
        y, cut = self.buffers.y[GPU], self.tile_name(tile, made)
        setting, name = {"tile": cut}, f"ours {cut}"

        def after(unfused: Unfused, stream: int) -> Any:
            self.compute(made)
            return unfused.collective(y, stream)

        return [
            Contender(
                kind=Kind.COMPUTE, name=name, start=lambda _: self.compute(made), setting=setting,
                buffers=self.buffers, made=made,
            ),
            *(
                Contender(
                    kind=Kind.UNFUSED, name=self._name(name, each), start=partial(after, unfused),
                    setting=setting | self._layout(each), buffers=each,
                )
                for each, unfused in self._unfused.items()
            ),
        ]  # fmt: skip

    def fused(self, num_slices: int, order: Order, tile: Any, buffers: Buffers | None = None) -> Contender:
        """Slices behind flags."""
        buffers = buffers or self.buffers
        made = self._kept(self.dma(num_slices, order, tile, buffers))
        cut = self.tile_name(tile, made)
        return Contender(
            kind=Kind.DMA, name=self._name(f"{num_slices} slices {order} {cut}", buffers),
            start=lambda stream: self.start(made, stream), buffers=buffers, made=made,
            setting={"slices": num_slices, "slice_rows": made.slice_rows, "order": str(order), "lanes": LANES,
                     "words": WORDS[WORDS_ON_DEVICE], "tile": cut} | self._layout(buffers),
        )  # fmt: skip

    def decomposed(
        self, num_chunks: int, how: How, buffers: Buffers | None = None, words_on_device: bool = WORDS_ON_DEVICE
    ) -> Contender:
        """torch's operator in chunks."""
        rows_each, buffers = self.slice_rows(num_chunks), buffers or self.buffers
        chunked = Chunked(
            self.device, buffers, rows_each, how=how, timeout_s=TIMEOUT_S, streams=self._streams,
            words_on_device=words_on_device,
        )  # fmt: skip
        made = self._kept(chunked)
        rows = self.rows()
        setting = {"chunks": num_chunks, "chunk_rows": rows_each, "how": str(how), "lanes": LANES}
        name = f"{num_chunks} chunks {how}"
        if how is How.WORDS:
            setting |= {"words": WORDS[words_on_device]}
            name += "" if words_on_device else " on host"
        return Contender(
            kind=Kind.DECOMPOSED, name=self._name(name, buffers), start=lambda stream: made.start(rows, stream),
            setting=setting | self._layout(buffers), buffers=buffers, in_y=self.in_place,
        )  # fmt: skip

    def _layout(self, buffers: Buffers) -> dict[str, str]:
        return {"layout": str(buffers.exchange.layout)}

    def _name(self, name: str, buffers: Buffers) -> str:
        return name if buffers is self.buffers else f"{name} {buffers.exchange.layout}"

    def slice_rows(self, number: int) -> int:
        """Rows of one of so many slices of all that leaves."""
        tile = TILE_ROWS if self.shape.op is Op.GEMM else 8
        return slice_rows_of(sum(self.exchange.send[1:]), 1 << 30, tile, number)

    def _kept(self, made: Any) -> Any:
        self._stack.callback(made.close)
        return made

    @contextmanager
    def scope(self) -> Iterator[None]:
        """What is made inside is closed at its end."""
        outer, self._stack = self._stack, ExitStack()
        try:
            with self._stack:
                yield
        finally:
            self._stack = outer

    # --- the check

    def peers_fresh(self) -> None:
        """New rows of the peers."""
        for tensor in self.buffers.y[1:]:
            tensor.copy_(torch.randint(0, _POISON, (tensor.numel(),), dtype=torch.uint8, device=self.where))

    def spoil(self, contender: Contender) -> None:
        """NaN wherever something is to be written; the collective alone is given something to send."""
        step = len(self._spoiled)
        for tensor in (self.buffers.y[GPU], *contender.buffers.written):
            for begin in range(0, len(tensor), step):
                part = tensor[begin : begin + step]
                part.copy_(self._spoiled[: len(part)], non_blocking=True)
        if contender.kind is Kind.COMM:
            self.buffers.y[GPU].random_(0, _POISON)
        self.synchronize()

    def is_right(self, contender: Contender) -> bool:
        """Every byte that crossed is what was sent, and what was sent is torch's result, up to rounding."""
        computed = self.buffers.y[GPU][: self.exchange.y_bytes(GPU)].view(self.dtype).view(len(self.reference), -1)
        right = not contender.in_y or contender.kind is Kind.COMM or self._alike(computed, self.reference)
        if contender.kind is Kind.COMPUTE:
            return right
        first = self.exchange.send[GPU]
        for n, (sent, there) in enumerate(contender.buffers.crossed(self.where)):
            leaves = n % 2 == 0
            if not leaves or contender.in_y:
                right = right and torch.equal(there, sent)
            if leaves and contender.kind is not Kind.COMM:
                right = right and self._alike_bytes(there, self.reference[first : first + len(there)])
                first += len(there)
        for n, (sent, there) in enumerate(contender.buffers.finished()):
            if n or contender.in_y:
                right = right and torch.equal(there, sent)
            else:
                right = right and self._alike_bytes(there, self.reference[: len(there)])
        return right

    def _alike_bytes(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return self._alike(found.contiguous().view(self.dtype), wanted)

    def _alike(self, found: torch.Tensor, wanted: torch.Tensor) -> bool:
        scale = wanted.float().abs().mean().item() if wanted.numel() else 1.0
        return torch.allclose(found.float(), wanted.float(), rtol=self.rtol, atol=self.rtol * scale)

    def synchronize(self) -> None:
        """Waits for torch's part of the GPU."""
        if self.where.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Gives everything back."""
        self._stack.close()


class GemmWork(Work):
    """y = x @ w.T, bf16."""

    dtype, tiles, step, hows, rtol, in_place = torch.bfloat16, GEMM_TILES, 64, tuple(How), 1 / 64, True

    @staticmethod
    def exchange_of(spec: Spec, shape: Shape) -> Exchange:
        """What is sent."""
        n = spec.width(shape.size_bytes)
        send = shape.rows(spec.ranks, n * torch.bfloat16.itemsize)
        receive = (send[0], *reversed(send[1:]))
        return gemm_exchange((sum(send), 1), (n, 1), torch.bfloat16, send, receive)

    def scale(self, size: int) -> None:
        """K."""
        m, n = sum(self.exchange.send), self.exchange.row_bytes[GPU] // self.dtype.itemsize
        self.sizes = {"m": m, "n": n, "k": size}
        self.x, self.w = (torch.empty(rows, size, dtype=self.dtype, device=self.where) for rows in (m, n))
        self.w.normal_()
        self.fresh()

    def fresh(self) -> None:
        """A new x."""
        self.x.normal_()
        self.reference = torch.mm(self.x, self.w.t())
        self.synchronize()

    def rows(self) -> Rows:
        """By torch.mm."""
        y = self.buffers.y[GPU][: self.exchange.y_bytes(GPU)].view(self.dtype).view(len(self.x), len(self.w))
        return gemm_rows(self.x, self.w, y)

    def dma(self, num_slices: int, order: Order, tile: GemmTile, buffers: Buffers) -> DmaGemm:
        """See `Work`."""
        return DmaGemm(
            self.device, buffers, self.x.shape, self.w.shape, self.dtype, order=order, blocks=tile, head=tile.head,
            slice_rows=self.slice_rows(num_slices), timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def start(self, made: DmaGemm, stream: int) -> Any:
        """See `Work`."""
        return made.start(self.x, self.w, stream)

    def compute(self, made: DmaGemm) -> None:
        """See `Work`."""
        made.compute(self.x, self.w)


class EmbeddingWork(Work):
    """Sums of bags of one length over several tables, fp32."""

    dtype, tiles, step, hows, rtol, in_place = torch.float32, POOL_TILES, 1, (How.EVENTS,), 1e-4, False
    weight: torch.Tensor | None = None  #: the rows of all tables, one table below the other

    @staticmethod
    def exchange_of(spec: Spec, shape: Shape) -> Exchange:
        """What is sent, packed."""
        width = spec.tables * spec.dim * torch.float32.itemsize
        return embedding_exchange([spec.tables] * spec.ranks, spec.dim, torch.float32, shape.rows(spec.ranks, width))

    @classmethod
    def exchanges(cls, spec: Spec, shape: Shape) -> list[Exchange]:
        """Packed and strided."""
        packed = cls.exchange_of(spec, shape)
        return [packed, replace(packed, layout=Layout.STRIDED)]

    def scale(self, size: int) -> None:
        """The length of bags."""
        spec, batch = self.spec, sum(self.exchange.send)
        self.sizes = {"tables": spec.tables, "dim": spec.dim, "table_rows": spec.table_rows}
        self.sizes |= {"batch": batch, "bag": size}
        if self.weight is None:
            self.weight = torch.randn(spec.tables * spec.table_rows, spec.dim, device=self.where)
        self.offsets = torch.arange(spec.tables * batch + 1, device=self.where) * size
        shape = (spec.tables, batch, size)
        self.values = torch.empty(shape, dtype=torch.int64, device=self.where)
        self.merged = torch.empty((batch, spec.tables, size), dtype=torch.int64, device=self.where)
        self.fresh()

    def fresh(self) -> None:
        """New values: for us in the order of tables, for torch in that of samples, over one table."""
        spec = self.spec
        self.values.random_(0, spec.table_rows)
        first = torch.arange(spec.tables, device=self.where) * spec.table_rows
        torch.add(self.values.permute(1, 0, 2), first[None, :, None], out=self.merged)
        self.reference = self.rows()(0, len(self.merged)).view(len(self.merged), -1).clone()
        self.synchronize()

    def rows(self) -> Rows:
        """By torch's embedding_bag, one call over one table."""
        batch, tables, bag = self.merged.shape
        assert self.weight is not None
        offsets = torch.arange(batch * tables + 1) * bag
        compute = bag_rows(self.weight, self.merged.view(-1), offsets, tables, "sum")
        if self.where.type == "cuda":
            return compute
        y = self.buffers.y[GPU].view(self.dtype).view(batch, -1)  # a stand-in: no engine reaches memory of torch's

        def placed(begin: int, end: int) -> torch.Tensor:
            return y[begin:end].copy_(compute(begin, end).view(end - begin, -1))

        return placed

    def dma(self, num_slices: int, order: Order, tile: PoolShape, buffers: Buffers) -> DmaEmbedding:
        """See `Work`."""
        assert self.weight is not None
        tables = self.weight.view(self.spec.tables, -1, self.spec.dim).unbind()
        return DmaEmbedding(
            self.device, buffers, tables, order=order, shape=tile,
            slice_rows=self.slice_rows(num_slices), timeout_s=TIMEOUT_S,
        )  # fmt: skip

    def start(self, made: DmaEmbedding, stream: int) -> Any:
        """See `Work`."""
        return made.start(self.values.view(-1), self.offsets, stream)

    def compute(self, made: DmaEmbedding) -> None:
        """See `Work`."""
        made.compute(self.values.view(-1), self.offsets)


WORKS: dict[Op, type[GemmWork] | type[EmbeddingWork]] = {Op.GEMM: GemmWork, Op.EMBEDDING: EmbeddingWork}
