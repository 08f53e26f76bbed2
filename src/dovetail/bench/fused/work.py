"""An operator at a shape as the benchmark runs it: every form of it, and the check of what it gave.

Owns how a form is made and whether it was right; what is computed is that of `operators.py`, which forms are worth
timing that of `pilot.py`, times that of `clock.py`. Unfused and decomposed forms are there with torch's operator and
with our kernel: the difference of the latter to the fused form is the fusion's alone.

Embeddings arrive packed and are put side by side on the GPU, which is in the time of every form that communicates, also
of the collective alone. Every form can also be had with copies that put rows side by side (`strided`), so that the best
is compared with the best.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dovetail.bench.fused.rows import Kind, Role
from dovetail.bench.fused.spec import TILE_ROWS, Op, Shape, Spec
from dovetail.hw.gpu.device import Device
from dovetail.ops.gpu.cut import EVENT_US, planned_cut
from dovetail.ops.gpu.decomposed import Chunked, How, Rows, Unfused
from dovetail.ops.gpu.exchange import GPU, Buffers, Exchange, Layout, first_rows_of, slice_rows_of
from dovetail.ops.gpu.rates import bag_rates
from dovetail.ops.gpu.released import LANES, WORDS_ON_DEVICE
from dovetail.ops.gpu.tiles import END, FIRST, Order, RowTiles, row_tiles

#: A forgotten flag ends a run soon: a kernel that is over raises no more.
TIMEOUT_S = 20.0
_POISON = 0xFF  # NaN in every float that is written with it
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
    role: Role = Role.COUNTS
    made: Any = None  #: the operator of ours behind it, with its `kernel`; None: torch's, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the collective moves rows that are all there."""

    layout: Layout
    lanes: int = 1
    slices: int = 0  #: of all that leaves; 0: one copy for each peer and direction

    @property
    def name(self) -> str:
        """``24 slices 2 lanes strided``; packed rows and one lane are not named."""
        cut = f"{self.slices} slices" if self.slices else "whole"
        return cut + _lanes(self.lanes, 1) + _placed(self.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A setting of the fused form."""

    slices: int  #: 0: cut where they arrive soonest, by what was measured of both sides
    tile: Any
    layout: Layout
    first: int = 1  #: the first slice is this part of the others, which grow from there
    head: bool = False  #: the first slice is a launch of its own, with an event
    order: Order = Order.REMOTE
    lanes: int = LANES


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A setting of the decomposed form."""

    number: int  #: 0: see `Cut`
    layout: Layout
    first: int = 1
    tile: Any = None  #: of our kernel; None: by torch
    how: How = How.EVENTS
    words_on_device: bool = WORDS_ON_DEVICE


def _lanes(number: int, usual: int) -> str:
    return "" if number == usual else f" {number} lane{'s' if number > 1 else ''}"


def _grown(first: int) -> str:
    return "" if first == 1 else f" from 1/{first}"


def _placed(layout: Layout) -> str:
    return " strided" if layout is Layout.STRIDED else ""


class Work(ABC):
    """An operator at a shape. An owner: `close()`."""

    dtype: torch.dtype
    sizes: dict[str, int]
    tiles: tuple[Any, ...]
    step: int  #: what sizes are multiples of
    hows: tuple[How, ...]  #: of the decomposed form by torch
    rtol: float
    in_place: bool  #: torch writes to `y`

    def __init__(self, device: Device, spec: Spec, shape: Shape, buffers: list[Buffers]) -> None:
        """`buffers`: of each of `exchanges`; all have one `y`."""
        self.device, self.spec, self.shape = device, spec, shape
        self.buffers, self.exchange = buffers[0], buffers[0].exchange
        self._by_layout = {each.exchange.layout: each for each in buffers}
        self.where = self.buffers.y[GPU].device
        self.cores = device.driver.num_multiprocessors(device.index)
        largest = max(len(t) for each in buffers for t in (each.y[GPU], *each.written))
        self._spoiled = torch.full((min(largest, 64 << 20),), _POISON, dtype=torch.uint8, device=self.where)
        self._routes: dict[Route, Unfused] = {}
        self.reference = torch.empty(0)
        #: What a pilot has measured: the computation alone, by tile, and by "torch"; the collective.
        self.alone_us: dict[Any, float] = {}
        self.comm_us = 0.0
        self._streams: list[int] = []
        self._base = self._stack = ExitStack()
        try:
            for _ in range(2 * LANES):  # few: many share queues
                self._streams.append(device.driver.stream_create())
                self._base.callback(device.driver.stream_destroy, self._streams[-1])
        except BaseException:
            self.close()
            raise

    @property
    def layouts(self) -> list[Layout]:
        """The one that is meant to be fastest, then others."""
        return list(self._by_layout)

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
    def kernel_rows(self, tiles: RowTiles, tile: Any) -> Rows:
        """Our kernel, by the slices of a table: a launch for each."""

    @abstractmethod
    def dma(self, cut: Cut, buffers: Buffers) -> Any:
        """The fused form."""

    @abstractmethod
    def default(self) -> Any:
        """The fused form as the library makes it when nothing is said."""

    @abstractmethod
    def start(self, made: Any, stream: int) -> Any:
        """Starts a fused form."""

    @abstractmethod
    def compute(self, made: Any) -> None:
        """Its computation alone."""

    @staticmethod
    @abstractmethod
    def tile_name(tile: Any, kernel: Any = None) -> str:
        """As a row names it; `kernel`: launched with it, which may tell more."""

    @staticmethod
    def settled(tile: Any, kernel: Any) -> Any:
        """A tile as it was launched."""
        return tile

    @staticmethod
    def is_distinct(tile: Any, kernel: Any) -> bool:
        """Whether it differs from the others of `tiles`."""
        return True

    def measured(self, tile: Any) -> dict[str, Any]:
        """Of both sides: microseconds of the computation by this tile, or "torch", and of a row on the link."""
        compute_us = self.alone_us.get(tile, min(self.alone_us.values()))
        return {"compute_us": compute_us, "row_us": self.comm_us / max(1, sum(self.exchange.send[1:]))}

    # --- forms

    def torch_alone(self) -> Contender:
        """torch's computation."""
        rows, total = self.rows(), sum(self.exchange.send)

        def alone(_stream: int) -> None:
            rows(0, total)

        return Contender(
            kind=Kind.COMPUTE, name="torch", start=alone, setting={}, buffers=self.buffers, in_y=self.in_place
        )  # fmt: skip

    def alone(self, tile: Any) -> Contender:
        """Our computation."""
        made = self._kept(self.dma(Cut(slices=1, tile=tile, layout=self.layouts[0]), self.buffers))
        cut = self.tile_name(tile, made.kernel)
        return Contender(
            kind=Kind.COMPUTE, name=f"ours {cut}", start=lambda _: self.compute(made), setting={"tile": cut},
            buffers=self.buffers, made=made,
        )  # fmt: skip

    def routes(self) -> list[Route]:
        """Ways of the collective that are worth a try."""
        slices = self.spec.slices_of(self.shape.size_bytes)
        middle = slices[len(slices) // 2]
        ways = ((1, 0), (LANES, 0), (LANES, middle))
        return [Route(layout=layout, lanes=n, slices=cut) for layout in self.layouts for n, cut in ways]

    def comm(self, route: Route) -> Contender:
        """The collective alone."""
        buffers, unfused = self._by_layout[route.layout], self._unfused(route)
        return Contender(
            kind=Kind.COMM, name=route.name, start=lambda stream: unfused.collective(self.buffers.y[GPU], stream),
            setting=_route_setting(route), buffers=buffers,
        )  # fmt: skip

    def unfused(self, route: Route, alone: Contender) -> Contender:
        """A computation, then the collective."""
        then, made = self._unfused(route), alone.made
        start = partial(then.start, self.rows()) if made is None else partial(self._ours_then, made, then)
        return Contender(
            kind=Kind.UNFUSED, name=f"{alone.name}, {route.name}", start=start, in_y=alone.in_y,
            setting=alone.setting | _route_setting(route), buffers=self._by_layout[route.layout],
        )  # fmt: skip

    def _ours_then(self, made: Any, then: Unfused, stream: int) -> Any:
        self.compute(made)
        return then.collective(self.buffers.y[GPU], stream)

    def fused(self, cut: Cut, role: Role = Role.ABLATION) -> Contender:
        """Slices behind flags."""
        buffers = self._by_layout[cut.layout]
        made = self._kept(self.dma(cut, buffers))
        tile = self.tile_name(cut.tile, made.kernel)
        how = f"{_grown(cut.first)}{', first by event,' if cut.head else ''} {cut.order} {tile}"
        slices = f"{cut.slices} slices" if cut.slices else "planned slices"
        name = f"{slices}{how}{_lanes(cut.lanes, LANES)}{_placed(cut.layout)}"
        setting = {"slices": cut.slices, "first": cut.first, "order": str(cut.order), "lanes": cut.lanes, "tile": tile}
        setting["head"] = cut.head
        return self._fused(made, name, setting, buffers, role)

    def as_default(self) -> Contender:
        """The library's default: no setting of it was looked for."""
        made = self._kept(self.default())
        tile = self.tile_name(made.kernel.blocks if self.shape.op is Op.GEMM else made.kernel.shape, made.kernel)
        return self._fused(made, "default", {"lanes": LANES, "tile": tile}, self.buffers, Role.DEFAULT)

    def _fused(self, made: Any, name: str, setting: dict[str, Any], buffers: Buffers, role: Role) -> Contender:
        more = {"slice_rows": made.tiles.slice_rows, "first_rows": made.tiles.first_rows}
        if made.tiles.is_given:
            more["cut"] = (made.tiles.slices[:, END] - made.tiles.slices[:, FIRST]).tolist()
        more["words"] = WORDS[WORDS_ON_DEVICE]
        more["layout"] = str(buffers.exchange.layout)
        return Contender(
            kind=Kind.DMA, name=name, start=lambda stream: self.start(made, stream), buffers=buffers, role=role,
            setting=setting | more, made=made,
        )  # fmt: skip

    def decomposed(self, chunks: Chunks) -> Contender:
        """The operator in chunks."""
        number, how, by_torch = chunks.number, chunks.how, chunks.tile is None
        buffers, cuts = self._by_layout[chunks.layout], None
        rows_each, first = self.cut_rows(number or 1, chunks.first)
        if not number:
            measured = self.measured(chunks.tile or "torch")
            rates = bag_rates(sum(self.exchange.send), sum(self.exchange.send[1:]), **measured)
            rates = replace(rates, flag_us=EVENT_US)
            cuts = planned_cut(self.exchange.send, self.exchange.served, self._step, rates).pieces
        made = self._kept(Chunked(
            self.device, buffers, rows_each, first_rows=first, cuts=cuts, how=how, timeout_s=TIMEOUT_S,
            streams=self._streams, words_on_device=chunks.words_on_device,
        ))  # fmt: skip
        setting: dict[str, Any] = {"by": "torch" if by_torch else "ours", "chunks": number}
        setting["chunk_rows"] = rows_each if number else None
        setting |= {"first": chunks.first, "how": str(how), "lanes": LANES, "layout": str(chunks.layout)}
        name = f"{number} chunks{_grown(chunks.first)} {how}" if number else f"planned chunks {how}"
        if cuts:
            setting["cut"] = [end - begin for _, begin, end in cuts]
        if by_torch:
            rows = self.rows()
        else:
            height = self.tile_rows(chunks.tile)
            tiles = row_tiles(self.exchange.send, GPU, height, slice_rows=rows_each, first_rows=first, cuts=cuts)
            rows = self.kernel_rows(tiles, chunks.tile)
            setting["tile"] = self.tile_name(chunks.tile)
            name = f"ours {setting['tile']} {name}"
        if how is How.WORDS:
            setting["words"] = WORDS[chunks.words_on_device]
            name += "" if chunks.words_on_device else " on host"
        return Contender(
            kind=Kind.DECOMPOSED, name=name + _placed(chunks.layout), start=lambda stream: made.start(rows, stream),
            setting=setting, buffers=buffers, in_y=self.in_place or not by_torch,
        )  # fmt: skip

    @staticmethod
    @abstractmethod
    def tile_rows(tile: Any) -> int:
        """Rows of a tile."""

    def slice_rows(self, number: int) -> int:
        """Rows of one of so many slices of all that leaves."""
        return slice_rows_of(sum(self.exchange.send[1:]), 1 << 30, self._step, number)

    def cut_rows(self, number: int, first: int = 1) -> tuple[int, int | None]:
        """Rows of such a slice, and of the first one if that is smaller."""
        rows = self.slice_rows(number)
        least = first_rows_of(rows, self._step, first)
        return rows, least if least < rows else None

    @property
    def _step(self) -> int:
        return TILE_ROWS if self.shape.op is Op.GEMM else 8

    def distinct(self, numbers: tuple[int, ...]) -> list[int]:
        """Those numbers of slices that make slices of different sizes: they are whole tiles."""
        return sorted({self.slice_rows(number): number for number in sorted(numbers, reverse=True)}.values())

    def _unfused(self, route: Route) -> Unfused:
        """Made once: forms that take the same way share it."""
        if route not in self._routes:
            made = Unfused(
                self.device, self._by_layout[route.layout], lanes=route.lanes, timeout_s=TIMEOUT_S,
                slice_rows=self.slice_rows(route.slices) if route.slices else None,
            )  # fmt: skip
            self._base.callback(made.close)
            self._routes[route] = made
        return self._routes[route]

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
        self._base.close()


def _route_setting(route: Route) -> dict[str, Any]:
    return {"layout": str(route.layout), "comm_lanes": route.lanes, "comm_slices": route.slices}
