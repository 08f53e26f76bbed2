"""`dovetail bench fused` on one GPU with peers in host memory: every form of an operator and its collective.

Owns the order of a measurement: calibrated, checked, warmed, timed side by side. All forms of a shape move the same
bytes over the link, both ways: rows of the GPU to its peers, and rows of the peers to the GPU, which are there in step
with the GPU's own (`Pace.STEP`), as those of ranks that compute the same. Everything is queued behind a gate and begins
when it opens: no launch is in the times, which are the GPU's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dovetail.bench.fused.rows import Cell, Kind, Product, Row
from dovetail.bench.fused.spec import Shape, Spec
from dovetail.bench.fused.work import GEMM_TILES, TIMEOUT_S, WORDS, WORKS, Contender, Work
from dovetail.bench.gpu.session import Arena, Session, pages
from dovetail.errors import HardwareError
from dovetail.measure.interleave import orders
from dovetail.measure.stats import median
from dovetail.ops.gpu.decomposed import How
from dovetail.ops.gpu.dma import LANES, WORDS_ON_DEVICE, DmaGemm, gemm_exchange
from dovetail.ops.gpu.exchange import Buffers, Exchange, Pace
from dovetail.ops.gpu.tiles import Order
from dovetail.overlap.gpu import GpuPlace
from dovetail.overlap.tasks import Load
from dovetail.overlap.timing import GpuTimer

_ATTEMPTS = 3
_WARM_UP = 2
_PILOT = 5
_MOST_SIZE = 1 << 16  # K of a product, or the length of a bag


class Measured(NamedTuple):
    """All that was found."""

    rows: list[Row]
    products: list[Product]

    def as_dicts(self) -> list[dict[str, Any]]:
        """For a record."""
        return [*(row.as_dict() for row in self.rows), *(product.as_dict() for product in self.products)]


def measure(session: Session, spec: Spec, progress: Callable[[str], None] | None = None) -> Measured:
    """Measures all shapes of a spec.

    Raises:
        HardwareError: a form gave a wrong byte, or can't be timed.
        NotSupported: more host memory would be pinned than the session allows.
    """
    tell = progress or (lambda text: None)
    with contextlib.ExitStack() as stack:
        site = stack.enter_context(_Site(session, spec))
        products = [site.product(*sizes) for sizes in spec.products]
        for product in products:
            tell(f"{product.m}x{product.n}x{product.k}: {product.share:.3f} of torch.mm ({product.tile})")
        rows = []
        for shape in spec.shapes:
            rows.append(site.row(shape))
            row = rows[-1]
            tell(f"{shape.name}: {row.us(Kind.DMA):.0f} us, {row.lower:.1%} lower than unfused")
        return Measured(rows, products)


class _Site:
    """The GPU, its clock and memory."""

    def __init__(self, session: Session, spec: Spec) -> None:
        self._session, self._spec = session, spec
        self._place = GpuPlace(session.device)
        self._timer = GpuTimer(self._place)
        exchanges = [WORKS[shape.op].exchanges(spec, shape) for shape in spec.shapes]
        exchanges += [[_alone(*sizes)] for sizes in spec.products]
        self._arenas: dict[str, Arena] = {
            kind: session.arena(kind, max([1, *(_bytes(e, kind) for e in exchanges)])) for kind in ("device", "host")
        }
        self._tiles: dict[str, Any] = {}  # whose computation was fastest at the last shape of an operator

    def __enter__(self) -> _Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.close()
        self._place.close()

    def _buffers(self, exchanges: Sequence[Exchange]) -> list[Buffers]:
        """With one `y` for all."""
        for arena in self._arenas.values():
            arena.reset()
        found: list[Buffers] = []
        for exchange in exchanges:
            y = found[0].y if found else None
            found.append(Buffers(exchange, lambda kind, size: self._arenas[kind].take(size), y))
        return found

    # --- times

    def _run(self, contender: Contender) -> None:
        """Once, without a gate; returns when the GPU is done."""
        with self._place.current(self._timer.main):
            ticket = contender.start(self._timer.main)
        if ticket is not None:
            ticket.wait(TIMEOUT_S)
        self._session.driver.stream_synchronize(self._timer.main)

    def _us(self, contender: Contender) -> float:
        for _ in range(_ATTEMPTS):
            call = _Call(contender, self._timer.main)
            time_us = self._timer.compute(call)
            if call.ticket is not None:
                call.ticket.wait(TIMEOUT_S)
            if not self._timer.was_opened or not self._session.has_torch:
                return time_us
        raise HardwareError(f"{contender.name} waited on the host for what it had launched: it can't be timed")

    def _quick_us(self, contender: Contender, number: int = _PILOT) -> float:
        for _ in range(_WARM_UP):
            self._run(contender)
        return median(self._us(contender) for _ in range(number))

    def _timed(self, contenders: Sequence[Contender]) -> list[Cell]:
        """Side by side, in orders that favour none."""
        about = [self._quick_us(contender, 1) for contender in contenders]
        spec, square = self._spec, orders(len(contenders))
        rounds = min(max(int(spec.seconds * 1e6 / sum(about)), spec.fewest_rounds), spec.most_rounds)
        times: list[list[float]] = [[] for _ in contenders]
        for turn in range(rounds):
            for number in square[turn % len(square)]:
                times[number].append(self._us(contenders[number]))
        return [
            Cell(kind=c.kind, name=c.name, time_us=median(found), iterations=len(found), setting=c.setting)
            for c, found in zip(contenders, times, strict=True)
        ]

    # --- rows

    def product(self, m: int, n: int, k: int) -> Product:
        """Our kernel and torch.mm."""
        exchange = _alone(m, n, k)
        x, w = (torch.randn(rows, k, device=self._device(), dtype=torch.bfloat16) for rows in (m, n))
        out = torch.empty(m, n, device=x.device, dtype=x.dtype)
        (buffers,) = self._buffers([exchange])
        with contextlib.ExitStack() as stack:
            made = []
            for tile in GEMM_TILES:
                each = DmaGemm(self._session.device, buffers, x.shape, w.shape, x.dtype, blocks=tile, head=tile.head)
                stack.callback(each.close)
                if Work.is_distinct(tile, each):
                    made.append(each)
            plain = _contender("torch", lambda: torch.mm(x, w.t(), out=out), buffers)
            ours = [_contender(Work.tile_name(e.blocks, e), functools.partial(e.compute, x, w), buffers) for e in made]
            for contender, each in zip(ours, made, strict=True):
                each.y.fill_(float("nan"))
                self._run(contender)
                self._run(plain)
                if not torch.allclose(each.y.float(), out.float(), rtol=1 / 64, atol=k**0.5 / 64):
                    raise HardwareError(f"the product {m}x{n}x{k} by tiles of {contender.name} is wrong")
            cells = self._timed([plain, *ours])
        best = min(cells[1:], key=lambda cell: cell.time_us)
        return Product(
            m=m, n=n, k=k, dtype="bfloat16", torch_us=cells[0].time_us, ours_us=best.time_us, tile=best.name,
            iterations=best.iterations,
        )  # fmt: skip

    def _device(self) -> str:
        return f"cuda:{self._session.device.index}" if self._session.has_torch else "cpu"

    def row(self, shape: Shape) -> Row:
        """One shape, all forms."""
        kind = WORKS[shape.op]
        exchanges = kind.exchanges(self._spec, shape)
        exchange = exchanges[0]
        work = kind(self._session.device, self._spec, shape, self._buffers(exchanges))
        try:
            self._calibrate(work)
            contenders = self._contenders(work)
            checks = self._check(work, contenders)
            cells = self._timed(contenders)
        finally:
            work.close()
        return Row(
            op=str(shape.op), shape=shape.name, size_bytes=shape.size_bytes, out_bytes=exchange.out_bytes,
            in_bytes=exchange.in_bytes, split=str(shape.split), ratio=shape.ratio, sizes=work.sizes,
            dtype=str(work.dtype).removeprefix("torch."), ranks=self._spec.ranks, link=self._link(),
            pace=str(Pace.STEP), lanes=LANES, words=WORDS[WORDS_ON_DEVICE], checks=checks, cells=cells,
        )  # fmt: skip

    def _link(self) -> str:
        facts = self._session.facts()
        return f"PCIe {facts.get('pcie_generation')} x{facts.get('pcie_width')}, peers in pinned host memory"

    def _calibrate(self, work: Work) -> None:
        """Finds the size at which the computation takes `ratio` times as long as the communication."""
        sizes, times = [work.step * 8, work.step * 32], []
        for size in sizes:
            with work.scope():
                work.scale(size)
                compute = work.plain()[0]
                tile = self._tiles.get(work.shape.op, work.tiles[0])
                times.append(min(self._quick_us(compute), self._quick_us(work.ours(tile)[0])))
                comm_us = min(self._quick_us(comm) for comm in work.comms())
        slope = max((times[1] - times[0]) / (sizes[1] - sizes[0]), 1e-6)
        wanted = sizes[1] + (work.shape.ratio * comm_us - times[1]) / slope
        work.scale(min(max(round(wanted / work.step), 1), _MOST_SIZE // work.step) * work.step)

    def _pick_tiles(self, work: Work, num_slices: int) -> tuple[Any, Any]:
        """The tiles whose computation is fastest, and those whose fused form is: not always the same."""
        alone: list[tuple[float, Any]] = []
        fused: list[tuple[float, Any]] = []
        for tile in work.tiles:
            for found in (alone, fused):
                with work.scope():
                    by_itself = found is alone
                    contender = work.ours(tile)[0] if by_itself else work.fused(num_slices, Order.REMOTE, tile)
                    if work.is_distinct(tile, contender.made):
                        time_us = self._quick_us(contender, 3)
                        found.append((time_us, work.settled(tile, contender.made)))
        best, best_fused = (min(found, key=lambda each: each[0])[1] for found in (alone, fused))
        self._tiles[work.shape.op] = best
        return best, best_fused

    def _contenders(self, work: Work) -> list[Contender]:
        spec = self._spec
        slices, chunks = _distinct(work, spec.slices_of(work.shape.size_bytes)), _distinct(work, spec.chunks)
        middle, middle_chunks = slices[len(slices) // 2], chunks[len(chunks) // 2]
        tile, tile_fused = self._pick_tiles(work, middle)
        found = [*work.plain(), *work.ours(tile)]
        found += [work.decomposed(number, how) for number in chunks for how in work.hows]
        if How.WORDS in work.hows:
            found.append(work.decomposed(middle_chunks, How.WORDS, words_on_device=False))
        found += [work.fused(number, Order.REMOTE, tile_fused) for number in slices]
        if work.shape.ratio == 1:
            found.append(work.fused(middle, Order.LOCAL, tile_fused))
        for other in work.others:
            found += [
                work.decomposed(middle_chunks, How.EVENTS, other),
                work.fused(middle, Order.REMOTE, tile_fused, other),
            ]
        return found

    def _check(self, work: Work, contenders: Sequence[Contender]) -> int:
        """Every form with new data and spoiled memory, the fused ones again and again; returns how many runs."""
        fused = [contender for contender in contenders if contender.kind is Kind.DMA]
        number = 0
        for turn in range(max(self._spec.checks, 1)):
            work.fresh()
            work.peers_fresh()
            for contender in contenders if turn == 0 else [fused[turn % len(fused)]]:
                work.spoil(contender)
                self._run(contender)
                work.synchronize()
                number += 1
                if not work.is_right(contender):
                    raise HardwareError(f"{work.shape.name}: {contender.kind} {contender.name} gave wrong bytes")
        return number


class _Call:
    """A contender as the timer takes a computation."""

    def __init__(self, contender: Contender, stream: int) -> None:
        self.load = Load(name=contender.name)
        self._contender, self._stream = contender, stream
        self.ticket: Any = None

    def __call__(self) -> None:
        self.ticket = self._contender.start(self._stream)


def _contender(name: str, compute: Callable[[], object], buffers: Buffers) -> Contender:
    """A computation alone."""

    def start(_stream: int) -> None:
        compute()

    return Contender(kind=Kind.COMPUTE, name=name, start=start, setting={}, buffers=buffers)


def _distinct(work: Work, numbers: Sequence[int]) -> list[int]:
    """Those numbers of slices that make slices of different sizes: they are whole tiles."""
    return sorted({work.slice_rows(number): number for number in sorted(numbers, reverse=True)}.values())


def _alone(m: int, n: int, k: int) -> Exchange:
    return gemm_exchange((m, k), (n, k), torch.bfloat16, (m,), (m,))


def _bytes(exchanges: Sequence[Exchange], kind: str) -> int:
    """What the buffers of exchanges with one `y` take of an arena."""
    ranks = [0] if kind == "device" else range(1, exchanges[0].world)
    sizes = [exchanges[0].y_bytes(r) for r in ranks]
    sizes += [e.output_bytes(r) for e in exchanges for r in ranks]
    sizes += [e.wide_bytes for e in exchanges if kind == "device"]
    return sum(pages(max(1, size)) for size in sizes)
