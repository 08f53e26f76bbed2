"""The bench of fused operators: the grid, what rows say, and a measurement on the stand-in with kernels of the host."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests import standin

from dovetail.bench.fused import gpu, rows, work
from dovetail.bench.fused.rows import Cell, Kind, Product, Row
from dovetail.bench.fused.spec import Op, Shape, Spec, Split, full, grid, quick
from dovetail.bench.gpu.session import Session
from dovetail.errors import HardwareError
from dovetail.measure import record
from dovetail.ops.gpu import launch
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch, Head, PoolShape

# --- shapes ----------------------------------------------------------------------------------------------------------


def test_the_grid() -> None:
    shapes = full().shapes
    assert len(shapes) == len({shape.name for shape in shapes}) == 2 * 5 * 2 * 2
    assert shapes[0].name == "gemm_all_to_all 16M equal @0.25"
    assert {shape.op for shape in quick().shapes} == set(Op)
    assert set(quick().shapes) <= set(shapes)


@pytest.mark.parametrize("split", list(Split))
@pytest.mark.parametrize("op", list(Op))
def test_rows_add_up_to_the_bytes_that_were_asked_for(op: Op, split: Split) -> None:
    for size in (16 << 20, 200 << 20):
        shape = Shape(op=op, ratio=1, size_bytes=size, split=split)
        for ranks in (2, 4, 8):
            send = shape.rows(ranks, 8192)
            assert len(send) == ranks
            assert min(send) > 0
            assert abs(sum(send[1:]) * 8192 / size - 1) < 0.2
            assert (len(set(send[1:])) > 1) == (split is Split.UNEVEN and ranks > 2)
            exchange = work.WORKS[op].exchange_of(Spec(shapes=(shape,), ranks=ranks), shape)
            assert exchange.out_bytes == pytest.approx(exchange.in_bytes, rel=0.01)  # both ways the same


@pytest.mark.parametrize(
    ("given", "message"),
    [({"ranks": 1}, "at least one peer"), ({"slices": ((0, (0,)),)}, "at least 1"), ({"seconds": 0}, "above 0")],
)
def test_specs_that_can_not_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(shapes=(), **given)


# --- what rows say ---------------------------------------------------------------------------------------------------


def cell(kind: Kind, time_us: float, name: str = "x") -> Cell:
    return Cell(kind=kind, name=name, time_us=time_us, iterations=3, setting={})


def row(op: Op = Op.GEMM, ratio: float = 1.0, **times: float) -> Row:
    given = {"compute": 100.0, "comm": 100.0, "unfused": 200.0, "decomposed": 120.0, "dma": 105.0} | times
    return Row(
        op=str(op), shape=f"{op} @{ratio:g}", size_bytes=1, out_bytes=1, in_bytes=1, split="equal", ratio=ratio,
        sizes={}, dtype="bfloat16", ranks=4, link="PCIe", pace="step", lanes=2, words="device", checks=20,
        cells=[cell(Kind(kind), time_us) for kind, time_us in given.items()],
    )  # fmt: skip


def test_the_fastest_of_each_kind_counts() -> None:
    one = row()
    assert (one.lower, one.over_ideal) == pytest.approx((0.475, 0.05))
    assert one.against_decomposed == pytest.approx(0.125)
    two = replace(one, cells=[*one.cells, cell(Kind.DMA, 90, "finer"), cell(Kind.UNFUSED, 150), cell(Kind.COMPUTE, 80)])
    assert two.best(Kind.DMA).name == "finer"
    assert (two.lower, two.ideal_us, two.measured_ratio) == pytest.approx((0.4, 100, 0.8))
    with pytest.raises(ValueError, match="no time of comm, dma"):
        replace(one, cells=[c for c in one.cells if c.kind not in (Kind.COMM, Kind.DMA)])


def test_a_row_can_be_recorded(tmp_path: Any) -> None:
    made = gpu.Measured([row()], [Product(m=1, n=1, k=1, dtype="bf16", torch_us=9, ours_us=10, tile="x", iterations=1)])
    file = record.write(record.new("fused", "dovetail bench fused", made.as_dicts()), tmp_path / "f.json")
    found = record.read(file, kind="fused").rows
    assert [r["kind"] for r in found] == ["operator", "product"]
    assert found[0]["lower"] == pytest.approx(0.475)
    assert found[0]["cells"][-1]["kind"] == "dma"
    assert found[1]["share"] == pytest.approx(0.9)
    assert json.loads(json.dumps(found)) == found


def test_the_verdict() -> None:
    good = [row(), row(ratio=4.0, compute=400, unfused=500, decomposed=430, dma=410)]
    assert [ok for ok, _ in rows.verdict(good)] == [True, True, True, True]
    assert rows.mean_lower(good) == pytest.approx((0.475 + 0.18) / 2)
    slow = [row(dma=125), row(ratio=4.0, compute=400, unfused=500, decomposed=430, dma=440)]
    found = rows.verdict(slow, [Product(m=2, n=2, k=2, dtype="x", torch_us=9, ours_us=10, tile="", iterations=1)])
    assert [ok for ok, _ in found] == [False, False, False, False, False]
    assert "gemm_all_to_all @1: 37.5% lower than unfused, wanted 40%" in found[0][1]
    assert "25.0% above the ideal" in found[1][1]
    assert "not ahead at 2 of 2 shapes" in found[3][1]
    assert "90.0% of torch.mm" in found[4][1]
    assert rows.not_ahead(slow) == slow
    assert rows.verdict([row(Op.EMBEDDING, dma=128)])[0][0]  # 36 %: enough for this one
    assert len(rows.table(good)) == 3


# --- a measurement ---------------------------------------------------------------------------------------------------


class Host:
    """The kernels by torch on the host, raising the flags as a kernel would; faults can be put in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault = ""
        self.threads: list[threading.Thread] = []
        host = self

        def gemm(self: GemmLaunch, x: Any, w: Any, y: Any, flags: Any = None, value: int = 0) -> None:
            host.run(lambda: torch.mm(x, w.t(), out=y), y, self._tables.no_flags if flags is None else flags, value)

        def bags(self: BagLaunch, values: Any, offsets: Any, y: Any, flags: Any = None, value: int = 0) -> None:
            first = torch.repeat_interleave(torch.arange(self.T) * len(self._weights[0]), len(values) // self.T)
            tables = torch.cat(self._weights)

            def pool() -> None:
                pooled = torch.nn.functional.embedding_bag(
                    values + first, tables, offsets, mode="sum", include_last_offset=True
                )
                y.copy_(pooled.view(self.T, self.B, self.D).permute(1, 0, 2))

            host.run(pool, y, self._tables.no_flags if flags is None else flags, value)

        monkeypatch.setattr(GemmLaunch, "__call__", gemm)
        monkeypatch.setattr(BagLaunch, "__call__", bags)

    def run(self, compute: Any, y: torch.Tensor, flags: torch.Tensor, value: int) -> None:
        if self.fault == "early" and value:
            self.threads.append(threading.Thread(target=lambda: (time.sleep(0.05), compute())))
        else:
            compute()
        if self.fault == "wrong":
            y.view(len(y), -1)[-1, -1] += 64
        for address in flags.tolist() if value else []:
            ctypes.c_uint64.from_address(address).value = value
        for thread in self.threads:
            if not thread.ident:
                thread.start()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[Host]:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(standin.build("cuda")))
    monkeypatch.setenv("DOVETAIL_CHECK", "1")
    monkeypatch.setattr(gpu, "_PILOT", 1)
    monkeypatch.setattr(gpu, "_MOST_SIZE", 64)
    small = work.GemmTile(height=16, width=16, depth=16, warps=4, stages=1)
    for where in (gpu, work):
        monkeypatch.setattr(where, "GEMM_TILES", (small,))
    monkeypatch.setattr(work.GemmWork, "tiles", (small,))
    monkeypatch.setattr(work.EmbeddingWork, "tiles", (PoolShape(bags=2), PoolShape(bags=4)))
    made = Host(monkeypatch)
    yield made
    for thread in made.threads:
        thread.join(20)


def small(*shapes: Shape) -> Spec:
    return Spec(
        shapes=shapes, ranks=3, slices=((0, (2, 5)),), chunks=(2,), columns=((0, 16),), tables=3, dim=4, table_rows=20,
        least_slice_bytes=1, products=((32, 16, 16),), seconds=0.001, fewest_rounds=2, most_rounds=2, checks=5,
    )  # fmt: skip


def test_every_form_is_measured(host: Host) -> None:
    said: list[str] = []
    spec = small(*grid(ratios=(1.0,), sizes=(12 << 10,)), Shape(op=Op.GEMM, ratio=0.5, size_bytes=12 << 10))
    with Session("cuda") as session:
        found = gpu.measure(session, spec, said.append)
    assert len(found.rows) == 5
    assert len(said) == 6
    for each in found.rows:
        kinds = [c.kind for c in each.cells]
        counts = [kinds.count(kind) for kind in Kind]
        local = each.ratio == 1
        assert counts == ([2, 1, 2, 3, 2 + local] if each.op == Op.GEMM else [2, 2, 4, 2, 4])
        assert each.checks == len(each.cells) + 4
        assert all(c.time_us > 0 and c.iterations == 2 for c in each.cells)
        fused = [c.setting for c in each.cells if c.kind is Kind.DMA]
        assert [s["order"] for s in fused][:3] == ["remote", "remote", "local"][: 2 + local]
        assert {(s["lanes"], s["words"]) for s in fused} == {(each.lanes, each.words)} == {(2, "device")}
        layouts = ["below"] * (2 + local) if each.op == Op.GEMM else [*["packed"] * 3, "strided"]
        assert [s["layout"] for s in fused] == layouts
        names = [c.name for c in each.cells if c.kind is Kind.DECOMPOSED]
        assert names[-1] == ("2 chunks words on host" if each.op == Op.GEMM else "2 chunks events strided")
    assert found.products[0].m == 32
    assert json.dumps(found.as_dicts())


def test_tiles_are_picked_for_each_form(host: Host, monkeypatch: Any) -> None:
    """The computation alone and the fused form have tiles of their own, as they were launched."""
    spec = replace(small(Shape(op=Op.EMBEDDING, ratio=1, size_bytes=6 << 10)), products=())
    times = {"ours 2x4w4p8": 5.0, "ours 4x4w4p8": 9.0}
    monkeypatch.setattr(gpu._Site, "_quick_us", lambda self, c, number=1: times.get(c.name, 5.0 + ("2x4" in c.name)))
    monkeypatch.setattr(BagLaunch, "programs", property(lambda self: 7))
    with Session("cuda") as session:
        names = [c.name for c in gpu.measure(session, spec).rows[0].cells]
    assert "ours 2x4w4p7" in names
    assert "2 slices remote 4x4w4p7" in names


def test_large_slices_only() -> None:
    spec = full()
    assert spec.slices_of(16 << 20) == (3, 4, 6, 8, 12)
    assert spec.slices_of(200 << 20) == (6, 12, 24, 48)
    assert spec.slices_of(1) == (3,)


def test_a_head_is_compared_and_named(host: Host, monkeypatch: Any) -> None:
    """With and without, for the computation and the fused form; a tile whose head is empty is not tried again."""
    cut = {"height": 16, "width": 16, "depth": 2, "warps": 4, "stages": 1}
    tiles = tuple(work.GemmTile(**cut, head=head) for head in (None, Head()))
    none = work.GemmTile(**cut | {"depth": 16}, head=Head())
    monkeypatch.setattr(work.GemmWork, "tiles", (*tiles, none))
    monkeypatch.setattr(gpu, "GEMM_TILES", (*tiles, none))
    tried: list[str] = []

    def quick(self: Any, contender: Any, number: int = 1) -> float:
        tried.append(contender.name)
        return 1.0 if "+" in contender.name else 2.0

    monkeypatch.setattr(gpu._Site, "_quick_us", quick)
    monkeypatch.setattr(launch, "head_tiles", lambda num, columns, programs, parts: 3)
    spec = replace(small(Shape(op=Op.GEMM, ratio=1, size_bytes=6 << 10)), products=((32, 16, 16),))
    with Session("cuda") as session:
        found = gpu.measure(session, spec)
    names = [c.name for c in found.rows[0].cells]
    assert "ours 16x16g8+3/2" in names
    assert {c.setting["tile"] for c in found.rows[0].cells if c.kind is Kind.DMA} == {"16x16g8+3/2"}
    pilot = [name for name in tried if name.endswith(("g8", "g8+3/2"))]
    assert {"ours 16x16g8", "ours 16x16g8+3/2"} <= set(pilot)
    assert any(name.endswith("slices remote 16x16g8") for name in pilot)
    assert found.products[0].tile in ("16x16g8", "16x16g8+3/2")


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("fault", ["wrong", "early"])
def test_a_wrong_form_is_not_timed(host: Host, monkeypatch: Any, op: Op, fault: str) -> None:
    spec = replace(small(*grid(ops=(op,), ratios=(1.0,), sizes=(6 << 10,), splits=(Split.UNEVEN,))), products=())
    timed = []
    monkeypatch.setattr(gpu._Site, "_timed", lambda self, contenders: timed.append(contenders))
    checked = gpu._Site._check

    def with_fault(self: Any, *given: Any) -> int:
        host.fault = fault
        return checked(self, *given)

    monkeypatch.setattr(gpu._Site, "_check", with_fault)
    who = "dma" if fault == "early" else "compute ours"
    with Session("cuda") as session, pytest.raises(HardwareError, match=f"{who} .*gave wrong bytes"):
        gpu.measure(session, spec)
    assert not timed
