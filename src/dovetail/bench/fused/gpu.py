"""`dovetail bench fused` on one GPU with peers in host memory: every form of an operator and its collective.

Owns the order of a measurement: calibrated, settled in a pilot, checked, timed side by side, checked again. All forms
of a shape move the same bytes over the link, both ways: rows of the GPU to its peers, and rows of the peers to the GPU,
which are there in step with the GPU's own (`Pace.STEP`), as those of ranks that compute the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dovetail.bench.fused.clock import Clock
from dovetail.bench.fused.operators import GEMM_TILES, WORKS, GemmWork
from dovetail.bench.fused.pilot import Pilot, race
from dovetail.bench.fused.rows import Kind, Product, Row, than
from dovetail.bench.fused.spec import Shape, Spec
from dovetail.bench.fused.work import WORDS, Contender, Work
from dovetail.bench.gpu.session import Arena, Session, pages
from dovetail.errors import HardwareError
from dovetail.ops.gpu.dma import DmaGemm, gemm_exchange
from dovetail.ops.gpu.exchange import Buffers, Exchange, Pace
from dovetail.ops.gpu.released import LANES, WORDS_ON_DEVICE


class Measured(NamedTuple):
    """All that was found."""

    rows: list[Row]
    products: list[Product]

    def as_dicts(self) -> list[dict[str, Any]]:
        """For a record."""
        return [*(row.as_dict() for row in self.rows), *(product.as_dict() for product in self.products)]


def measure(
    session: Session, spec: Spec, progress: Callable[[str], None] | None = None, into: Measured | None = None
) -> Measured:
    """Measures all shapes of a spec. `into` gets each as it is done: what is there if it is ended before.

    Raises:
        HardwareError: a form gave a wrong byte, or can't be timed.
        NotSupported: more host memory would be pinned than the session allows.
    """
    tell = progress or (lambda text: None)
    found = Measured([], []) if into is None else into
    with _Site(session, spec) as site:
        for sizes in spec.products:
            product = site.product(*sizes)
            found.products.append(product)
            tell(f"{product.m}x{product.n}x{product.k}: {product.share:.3f} of torch.mm ({product.tile})")
        for shape in spec.shapes:
            row = site.row(shape)
            found.rows.append(row)
            tell(f"{shape.name}: {row.us(Kind.DMA):.0f} us, {than(row.lower, 'unfused')}")
        return found


class _Site:
    """The GPU, its clock and memory."""

    def __init__(self, session: Session, spec: Spec) -> None:
        self._session, self._spec = session, spec
        exchanges = [WORKS[shape.op].exchanges(spec, shape) for shape in spec.shapes]
        exchanges += [[_alone(*sizes)] for sizes in spec.products]
        sizes = {kind: max([1, *(_bytes(e, kind) for e in exchanges)]) for kind in ("device", "host")}
        self._arenas: dict[str, Arena] = {kind: session.arena(kind, size) for kind, size in sizes.items()}
        self._clock = Clock(session)  # last: there is nothing to give back if memory is refused, it is the session's
        self._tiles: dict[str, Any] = {}  # whose computation was fastest at the last shape of an operator

    def __enter__(self) -> _Site:
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.close()

    def _buffers(self, exchanges: Sequence[Exchange]) -> list[Buffers]:
        """With one `y` for all."""
        for arena in self._arenas.values():
            arena.reset()
        found: list[Buffers] = []
        for exchange in exchanges:
            y = found[0].y if found else None
            found.append(Buffers(exchange, lambda kind, size: self._arenas[kind].take(size), y))
        return found

    def product(self, m: int, n: int, k: int) -> Product:
        """Our kernel, by the tile that is fastest in a pilot and by the default one, and torch.mm."""
        x, w = (torch.randn(rows, k, device=self._device(), dtype=torch.bfloat16) for rows in (m, n))
        out = torch.empty(m, n, device=x.device, dtype=x.dtype)
        (buffers,) = self._buffers([_alone(m, n, k)])
        with contextlib.ExitStack() as stack:

            def kernel(name: str, **how: Any) -> Contender:
                made = DmaGemm(self._session.device, buffers, x.shape, w.shape, x.dtype, **how)
                stack.callback(made.close)
                name = name or GemmWork.tile_name(made.blocks, made.kernel)
                return _contender(name, functools.partial(made.compute, x, w), buffers, made)

            plain = _contender("torch", lambda: torch.mm(x, w.t(), out=out), buffers)
            ours = [kernel("", blocks=tile, split=tile.split) for tile in GEMM_TILES]
            ours = [c for c, tile in zip(ours, GEMM_TILES, strict=True) if GemmWork.is_distinct(tile, c.made.kernel)]
            default = kernel("default")
            self._clock.run(plain)
            for contender in (*ours, default):
                contender.made.y.fill_(float("nan"))
                self._clock.run(contender)
                if not torch.allclose(contender.made.y.float(), out.float(), rtol=1 / 64, atol=k**0.5 / 64):
                    raise HardwareError(f"the product {m}x{n}x{k} by tiles of {contender.name} is wrong")
            picked = ours[race(self._clock, "product", ours)[0][0]]
            cells = self._clock.timed([plain, picked, default], self._spec, f"{m} {n} {k}")
        torch_cell, ours_cell, default_cell = cells
        quartiles = {"torch": torch_cell, "ours": ours_cell, "default": default_cell}
        return Product(
            m=m, n=n, k=k, dtype="bfloat16", torch_us=torch_cell.time_us, ours_us=ours_cell.time_us, tile=picked.name,
            iterations=ours_cell.iterations, default_us=default_cell.time_us,
            quartiles_us={name: cell.quartiles_us for name, cell in quartiles.items() if cell.quartiles_us},
        )  # fmt: skip

    def _device(self) -> str:
        return f"cuda:{self._session.device.index}" if self._session.has_torch else "cpu"

    def row(self, shape: Shape) -> Row:
        """One shape, all forms."""
        kind, spec, clock = WORKS[shape.op], self._spec, self._clock
        exchanges = kind.exchanges(spec, shape)
        with contextlib.closing(kind(self._session.device, spec, shape, self._buffers(exchanges))) as work:
            pilot = Pilot(clock, work)
            routes = pilot.routes()
            pilot.calibrate(routes[0], self._tiles.get(shape.op, work.tiles[0]))
            tile = self._tiles[shape.op] = pilot.tile()
            contenders = pilot.contenders(routes, tile)
            checks, gated = self._check(work, contenders)
            row = Row(
                op=str(shape.op), shape=shape.name, size_bytes=shape.size_bytes, out_bytes=exchanges[0].out_bytes,
                in_bytes=exchanges[0].in_bytes, split=str(shape.split), ratio=shape.ratio, sizes=work.sizes,
                dtype=str(work.dtype).removeprefix("torch."), ranks=spec.ranks, link=self._link(),
                pace=str(Pace.STEP), lanes=LANES, words=WORDS[WORDS_ON_DEVICE], checks=checks, gated_checks=gated,
                cells=clock.timed(contenders, spec, shape.name), pilot=pilot.tried,
            )  # fmt: skip
            taken = [row.taken(each) for each in (Kind.UNFUSED, Kind.DECOMPOSED, Kind.DMA)]
            row = replace(row, cells=clock.with_host(row.cells, contenders, taken))
            after = self._check_gated(work, _fused(contenders), "after it was timed")
        return replace(row, checks=row.checks + after, gated_checks=row.gated_checks + after)

    def _link(self) -> str:
        facts = self._session.facts()
        return f"PCIe {facts.get('pcie_generation')} x{facts.get('pcie_width')}, peers in pinned host memory"

    # --- checks: new data and spoiled memory each time

    def _check(self, work: Work, contenders: Sequence[Contender]) -> tuple[int, int]:
        """Every form, the fused ones again and again behind the gate, each at least once; returns (all, gated) runs."""
        work.fresh()
        work.peers_fresh()
        for contender in contenders:
            self._check_one(work, contender, self._clock.run, "")
        fused = _fused(contenders)
        number = max(self._spec.checks - 1, len(fused))
        gated = self._check_gated(work, [fused[turn % len(fused)] for turn in range(number)], "behind the gate")
        return len(contenders) + gated, gated

    def _check_gated(self, work: Work, contenders: Sequence[Contender], when: str) -> int:
        """As they are timed."""
        for contender in contenders:
            work.fresh()
            work.peers_fresh()
            self._check_one(work, contender, self._clock.us, when)
        return len(contenders)

    def _check_one(self, work: Work, contender: Contender, run: Callable[[Contender], float], when: str) -> None:
        work.spoil(contender)
        run(contender)
        work.synchronize()
        if not work.is_right(contender):
            at = f"{work.shape.name}: {contender.kind} {contender.name}"
            raise HardwareError(f"{at} gave wrong bytes{when and ', '}{when}")


def _fused(contenders: Sequence[Contender]) -> list[Contender]:
    return [contender for contender in contenders if contender.kind is Kind.DMA]


def _contender(name: str, compute: Callable[[], object], buffers: Buffers, made: Any = None) -> Contender:
    """A computation alone."""

    def start(_stream: int) -> None:
        compute()

    return Contender(kind=Kind.COMPUTE, name=name, start=start, setting={}, buffers=buffers, made=made)


def _alone(m: int, n: int, k: int) -> Exchange:
    return gemm_exchange((m, k), (n, k), torch.bfloat16, (m,), (m,))


def _bytes(exchanges: Sequence[Exchange], kind: str) -> int:
    """What the buffers of exchanges with one `y` take of an arena."""
    ranks = [0] if kind == "device" else range(1, exchanges[0].world)
    sizes = [exchanges[0].y_bytes(r) for r in ranks]
    sizes += [e.output_bytes(r) for e in exchanges for r in ranks]
    sizes += [e.wide_bytes for e in exchanges if kind == "device"]
    return sum(pages(max(1, size)) for size in sizes)
