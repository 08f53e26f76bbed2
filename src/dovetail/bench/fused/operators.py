"""The two operators of the benchmark on a GPU: their data, torch's computation and ours, and the tiles to be tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from dovetail.bench.fused.spec import Op, Shape, Spec
from dovetail.bench.fused.work import TIMEOUT_S, Cut, Work
from dovetail.ops.gpu.decomposed import How, Rows, bag_rows, gemm_rows, kernel_rows
from dovetail.ops.gpu.dma import DmaEmbedding, DmaGemm, embedding_exchange, gemm_exchange
from dovetail.ops.gpu.exchange import GPU, Buffers, Exchange, Layout
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch, PoolShape, SplitK
from dovetail.ops.gpu.rates import bag_rates, gemm_rates
from dovetail.ops.gpu.tiles import LARGE, SMALL, Blocks, RowTiles


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile(Blocks):
    """A cut of a product, and which tiles are computed by several programs."""

    split: SplitK = SplitK.NONE


GEMM_TILES = (
    GemmTile(**asdict(LARGE)),
    *(GemmTile(**asdict(LARGE) | {"group": 4}, split=split) for split in SplitK),
    GemmTile(**asdict(SMALL)),
)
#: Fewer programs leave more of the memory to copies; those that a multiprocessor can't hold are not launched.
POOL_TILES = tuple(PoolShape(programs=number) for number in (8, 7, 6, 5))


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

    def _y(self) -> torch.Tensor:
        return self.buffers.y[GPU][: self.exchange.y_bytes(GPU)].view(self.dtype).view(len(self.x), len(self.w))

    def rows(self) -> Rows:
        """By torch.mm."""
        return gemm_rows(self.x, self.w, self._y())

    def kernel_rows(self, tiles: RowTiles, tile: GemmTile) -> Rows:
        """See `Work`."""
        x, w, y = self.x, self.w, self._y()

        def make(part: RowTiles) -> Callable[[], object]:
            kernel = GemmLaunch(part, len(w), x.shape[1], self.cores, self.where, blocks=tile, split=tile.split)
            return partial(kernel, x, w, y)

        return kernel_rows(tiles, make, y)

    def dma(self, cut: Cut, buffers: Buffers) -> DmaGemm:
        """See `Work`."""
        how: dict[str, Any] = _rows(*self.cut_rows(cut.slices or 1, cut.first))
        if not cut.slices:
            (m, k), n = self.x.shape, len(self.w)
            how = {"rates": gemm_rates(cut.tile, cut.tile.split, m, n, k, self.cores, **self.measured(cut.tile))}
        return DmaGemm(
            self.device, buffers, self.x.shape, self.w.shape, self.dtype, order=cut.order, blocks=cut.tile,
            split=cut.tile.split, head=cut.head, timeout_s=TIMEOUT_S, lanes=cut.lanes, **how,
        )  # fmt: skip

    def default(self) -> DmaGemm:
        """See `Work`."""
        return DmaGemm(self.device, self.buffers, self.x.shape, self.w.shape, self.dtype, timeout_s=TIMEOUT_S)

    def start(self, made: DmaGemm, stream: int) -> Any:
        """See `Work`."""
        return made.start(self.x, self.w, stream)

    def compute(self, made: DmaGemm) -> None:
        """See `Work`."""
        made.compute(self.x, self.w)

    @staticmethod
    def tile_name(tile: Blocks, kernel: GemmLaunch | None = None) -> str:
        """``128x256g8 tail 4/2``: of the last four row tiles each tile has two programs, which `kernel` tells."""
        split = getattr(tile, "split", SplitK.NONE)
        more = "" if split is SplitK.NONE else f" {split}"
        if kernel is not None:
            several = [number for number in kernel.parts if number > 1]
            more = f" {kernel.split} {len(several)}/{several[0]}" if several else ""
        warps = "" if tile.warps == LARGE.warps else f"w{tile.warps}"
        return f"{tile.height}x{tile.width}g{tile.group}{warps}{more}"

    @staticmethod
    def is_distinct(tile: GemmTile, kernel: GemmLaunch) -> bool:
        """A tile is like one without a split where there is nothing to split."""
        return tile.split is SplitK.NONE or max(kernel.parts, default=1) > 1

    @staticmethod
    def tile_rows(tile: Blocks) -> int:
        """See `Work`."""
        return tile.height


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

    def _tables(self) -> tuple[torch.Tensor, ...]:
        assert self.weight is not None
        return self.weight.view(self.spec.tables, -1, self.spec.dim).unbind()

    def kernel_rows(self, tiles: RowTiles, tile: PoolShape) -> Rows:
        """See `Work`."""
        spec, batch = self.spec, len(self.merged)
        y = self.buffers.y[GPU][: self.exchange.y_bytes(GPU)].view(self.dtype).view(batch, spec.tables, spec.dim)
        values, offsets, tables = self.values.view(-1), self.offsets, self._tables()

        def make(part: RowTiles) -> Callable[[], object]:
            kernel = BagLaunch(part, tables, batch, self.cores, self.where, mode="sum", shape=tile)
            return partial(kernel, values, offsets, y)

        return kernel_rows(tiles, make, y)

    def dma(self, cut: Cut, buffers: Buffers) -> DmaEmbedding:
        """See `Work`."""
        how: dict[str, Any] = _rows(*self.cut_rows(cut.slices or 1, cut.first))
        if not cut.slices:
            send = self.exchange.send
            how = {"rates": bag_rates(sum(send), sum(send[1:]), **self.measured(cut.tile))}
        return DmaEmbedding(
            self.device, buffers, self._tables(), order=cut.order, shape=cut.tile, lanes=cut.lanes,
            timeout_s=TIMEOUT_S, head=cut.head, **how,
        )  # fmt: skip

    def default(self) -> DmaEmbedding:
        """See `Work`."""
        return DmaEmbedding(self.device, self.buffers, self._tables(), timeout_s=TIMEOUT_S)

    def start(self, made: DmaEmbedding, stream: int) -> Any:
        """See `Work`."""
        return made.start(self.values.view(-1), self.offsets, stream)

    def compute(self, made: DmaEmbedding) -> None:
        """See `Work`."""
        made.compute(self.values.view(-1), self.offsets)

    @staticmethod
    def tile_name(tile: PoolShape, kernel: BagLaunch | None = None) -> str:
        """``4x4w4p8``: bags, rows of each, warps, programs."""
        return f"{tile.bags}x{tile.depth}w{tile.warps}p{tile.programs}"

    @staticmethod
    def settled(tile: PoolShape, kernel: BagLaunch) -> PoolShape:
        """With as many programs as fit."""
        return replace(tile, programs=kernel.programs) if kernel.programs else tile

    @staticmethod
    def tile_rows(tile: PoolShape) -> int:
        """See `Work`."""
        return tile.bags


def _rows(rows: int, first: int | None) -> dict[str, Any]:
    return {"slice_rows": rows, "first_rows": first}


WORKS: dict[Op, type[GemmWork] | type[EmbeddingWork]] = {Op.GEMM: GemmWork, Op.EMBEDDING: EmbeddingWork}
