"""The bench of fused operators: the grid, what rows say, and a measurement on the stand-in with kernels of the host."""

from __future__ import annotations

import contextlib
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

from dovetail.bench.fused import clock, gpu, operators, pilot, rows
from dovetail.bench.fused.rows import Cell, Kind, Product, Role, Row
from dovetail.bench.fused.spec import Op, Shape, Spec, Split, full, grid, quick
from dovetail.bench.fused.work import Cut
from dovetail.bench.gpu.session import Session
from dovetail.errors import HardwareError, NotSupported
from dovetail.measure import record
from dovetail.measure.interleave import orders, some_orders
from dovetail.ops.gpu import decomposed, launch
from dovetail.ops.gpu.decomposed import Chunked
from dovetail.ops.gpu.exchange import Buffers
from dovetail.ops.gpu.launch import BagLaunch, GemmLaunch, PoolShape, SplitK

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
        for ranks in (3, 4, 8) if split is Split.UNEVEN else (2, 4, 8):
            send = shape.rows(ranks, 8192)
            assert len(send) == ranks
            assert min(send) > 0
            assert abs(sum(send[1:]) * 8192 / size - 1) < 0.2
            assert (len(set(send[1:])) > 1) == (split is Split.UNEVEN)
            exchange = operators.WORKS[op].exchange_of(Spec(shapes=(shape,), ranks=ranks), shape)
            assert exchange.out_bytes == pytest.approx(exchange.in_bytes, rel=0.01)  # both ways the same


def test_with_one_peer_nothing_is_uneven() -> None:
    """Such shapes would be the equal ones under another name."""
    uneven = Shape(op=Op.GEMM, ratio=1, size_bytes=1 << 20, split=Split.UNEVEN)
    kept = replace(full(), ranks=2).shapes
    assert {shape.split for shape in kept} == {Split.EQUAL}
    assert len(kept) == 2 * 5 * 2
    assert len(replace(full(), ranks=3).shapes) == 2 * 5 * 2 * 2
    with pytest.raises(ValueError, match="uneven splits take at least 3 ranks, not 2"):
        Spec(shapes=(uneven,), ranks=2)
    with pytest.raises(ValueError, match="can't be shared out unevenly with 1 peer"):
        uneven.rows(2, 64)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"ranks": 1}, "at least one peer"), ({"slices": ((0, (0,)),)}, "at least 1"), ({"seconds": 0}, "above 0")],
)
def test_specs_that_can_not_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(shapes=(), **given)


# --- what rows say ---------------------------------------------------------------------------------------------------


def cell(kind: Kind, time_us: float, name: str = "x", role: Role = Role.COUNTS) -> Cell:
    return Cell(kind=kind, name=name, time_us=time_us, iterations=3, setting={}, role=role)


def row(op: Op = Op.GEMM, ratio: float = 1.0, **times: float) -> Row:
    given = {"compute": 100.0, "comm": 100.0, "unfused": 200.0, "decomposed": 120.0, "dma": 105.0} | times
    return Row(
        op=str(op), shape=f"{op} @{ratio:g}", size_bytes=1, out_bytes=1, in_bytes=1, split="equal", ratio=ratio,
        sizes={}, dtype="bfloat16", ranks=4, link="PCIe", pace="step", lanes=2, words="device", checks=20,
        cells=[cell(Kind(kind), time_us) for kind, time_us in given.items()],
    )  # fmt: skip


def product(**given: Any) -> Product:
    sizes = {"m": 2, "n": 2, "k": 2, "dtype": "bf16", "torch_us": 9.0, "ours_us": 10.0, "tile": "x", "iterations": 1}
    return Product(**sizes | given)


def test_the_fastest_of_each_kind_counts() -> None:
    one = row()
    assert (one.lower, one.over_ideal) == pytest.approx((0.475, 0.05))
    assert one.against_decomposed == pytest.approx(0.125)
    assert one.default_lower is None
    more = [cell(Kind.DECOMPOSED, 110, "ours"), cell(Kind.UNFUSED, 150), cell(Kind.COMPUTE, 80), cell(Kind.COMM, 95)]
    two = replace(one, cells=[*one.cells, *more])
    assert two.taken(Kind.DECOMPOSED).name == "ours"
    assert (two.lower, two.ideal_us, two.measured_ratio) == pytest.approx((0.3, 95, 80 / 95))
    with pytest.raises(ValueError, match="no time of comm, dma"):
        replace(one, cells=[c for c in one.cells if c.kind not in (Kind.COMM, Kind.DMA)])


def test_what_was_picked_counts_even_if_it_is_not_the_fastest() -> None:
    """A setting that looks better afterwards, or the default, changes the figure of `dma` by nothing."""
    others = [cell(Kind.DMA, 90, "finer", Role.ABLATION), cell(Kind.DMA, 130, "default", Role.DEFAULT)]
    cells = [c for c in row().cells if c.kind is not Kind.DMA]
    found = replace(row(), cells=[*cells, *others, cell(Kind.DMA, 110, "picked", Role.PICKED)])
    assert found.taken(Kind.DMA).name == "picked"
    assert (found.lower, found.default_lower, found.against_decomposed) == pytest.approx((0.45, 0.35, 1 - 110 / 120))
    assert found.as_dict()["taken"]["dma"] == "picked"
    with pytest.raises(ValueError, match="no time of dma"):
        replace(found, cells=[*cells, *others])


def test_no_form_is_below_the_ideal() -> None:
    """A form that does all of the communication in less shows what communication can be."""
    found = row(compute=80, comm=100, dma=95, decomposed=92)
    assert found.ideal_us == 92
    assert found.over_ideal == pytest.approx(95 / 92 - 1)
    assert row(compute=110, comm=50, dma=105).over_ideal == 0


def test_a_row_can_be_recorded(tmp_path: Any) -> None:
    one = row()
    cells = [replace(c, quartiles_us=(1.0, 2.0), host_us=3.0) for c in one.cells]
    made = gpu.Measured([replace(one, cells=cells, pilot={"slices": {"x": 1.5}})], [product()])
    file = record.write(record.new("fused", "dovetail bench fused", made.as_dicts()), tmp_path / "f.json")
    found = record.read(file, kind="fused").rows
    assert [r["kind"] for r in found] == ["operator", "product"]
    assert found[0]["lower"] == pytest.approx(0.475)
    assert found[0]["cells"][-1]["kind"] == "dma"
    assert found[0]["cells"][-1]["role"] == "counts"
    assert list(found[0]["cells"][-1]["quartiles_us"]) == [1.0, 2.0]
    assert found[1]["share"] == pytest.approx(0.9)
    assert json.loads(json.dumps(found)) == found


def test_the_verdict() -> None:
    good = [row(), row(ratio=4.0, compute=400, unfused=500, decomposed=430, dma=410)]
    assert [ok for ok, _ in rows.verdict(good)] == [True, True, True, True]
    assert rows.mean_lower(good) == pytest.approx((0.475 + 0.18) / 2)
    slow = [row(dma=125), row(ratio=4.0, compute=400, unfused=500, decomposed=430, dma=440)]
    found = rows.verdict(slow, [product(default_us=12.0)])
    assert [ok for ok, _ in found] == [False, False, False, False, False]
    assert "gemm_all_to_all @1, ratio 1.00: 37.5% lower than unfused, wanted 40% (dma x; unfused x)" in found[0][1]
    assert "25.0% above the ideal" in found[1][1]
    assert "3.2% HIGHER than decomposed on the mean; not ahead at 2 of 2 shapes" in found[3][1]
    assert "90.0% of torch.mm, wanted 95% (tile x; the default tile 75.0%)" in found[4][1]
    assert rows.not_ahead(slow) == slow
    assert rows.verdict([row(Op.EMBEDDING, dma=128)])[0][0]  # 36 %: enough for this one
    worse = rows.verdict([row(dma=210)])
    assert "5.0% HIGHER than unfused" in worse[0][1]
    assert not any(ok for ok, _ in worse)
    with_default = [replace(r, cells=[*r.cells, cell(Kind.DMA, 250, "d", Role.DEFAULT)]) for r in (row(), row())]
    assert "(picked in a pilot; the default is 25.0% HIGHER than unfused)" in rows.verdict(with_default)[4][1]


def test_the_table_says_what_was_taken() -> None:
    lines = rows.table([row(), row(ratio=4.0, compute=330)])
    assert len(lines) == 3
    assert "  1.00" in lines[1]
    assert "  3.30" in lines[2]  # what was measured, not what was asked for
    assert lines[1].endswith("x; x; x")


# --- the pilot -------------------------------------------------------------------------------------------------------


class Fake:
    """A clock whose times are given; a second number is that of later runs."""

    def __init__(self, **times: tuple[float, ...]) -> None:
        self.times = {name: list(given) for name, given in times.items()}
        self.runs: dict[str, int] = dict.fromkeys(times, 0)

    def run(self, contender: Any) -> float:
        return 0.0

    def us(self, contender: Any) -> float:
        given = self.times[contender.name]
        self.runs[contender.name] += 1
        return given.pop(0) if len(given) > 1 else given[0]

    def quick_us(self, contender: Any, number: int) -> float:
        return self.us(contender)


class Named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_a_race() -> None:
    """Who is clearly slower is not run to the end; a lucky first run does not win; as many as asked for are kept."""
    given = Fake(slow=(50.0,), lucky=(9.0, 14.0), good=(10.0,), near=(10.2,))
    named: list[Any] = [Named(name) for name in given.times]
    best, times_us = pilot.race(given, "x", named, 2)
    assert [named[n].name for n in best] == ["good", "near"]
    assert given.runs == {"slow": 1, "lucky": 2, "good": 5, "near": 5}
    assert times_us == pytest.approx([50, 11.5, 10, 10.2])
    assert len(pilot.race(given, "x", named[:1], 3)[0]) == 1


class Scaled:
    """A work whose computation takes `fixed + size * each` microseconds, a little more at large sizes."""

    step, shape = 64, Shape(op=Op.GEMM, ratio=2.0, size_bytes=1 << 20)

    def __init__(self, fixed: float, each: float, bend: float) -> None:
        self.fixed, self.each, self.bend, self.size = fixed, each, bend, 0

    def scale(self, size: int) -> None:
        self.size = size

    def scope(self) -> Any:
        return contextlib.nullcontext()

    def torch_alone(self) -> Any:
        return Named("compute")

    def alone(self, tile: Any) -> Any:
        return Named("compute")

    def comm(self, route: Any) -> Any:
        return Named("comm")

    def us(self) -> float:
        return self.fixed + self.size * self.each * (1 + self.bend * self.size / 10000)


@pytest.mark.parametrize(("fixed", "each", "bend"), [(20, 0.05, 0), (20, 0.05, 0.2), (0, 0.05, 0.3), (60, 0.02, 0.1)])
def test_the_size_is_corrected_once(fixed: float, each: float, bend: float) -> None:
    """At small sizes a product runs faster than at large ones: a line through two probes misses the ratio."""
    work: Any = Scaled(fixed, each, bend)
    route: Any = None

    class Times(Fake):
        def quick_us(self, contender: Any, number: int) -> float:
            return work.us() if contender.name == "compute" else 300.0

    pilot.Pilot(Times(), work).calibrate(route, None)
    assert work.size % 64 == 0
    assert work.us() / 300 == pytest.approx(2, rel=0.05)


# --- a measurement ---------------------------------------------------------------------------------------------------


def rows_of(kernel: GemmLaunch | BagLaunch) -> torch.Tensor:
    """The rows of a kernel's tiles: it computes no others."""
    return torch.cat([torch.arange(first, end) for first, end in kernel._tables.tiles[:, :2].tolist()])


class Host:
    """The kernels by torch on the host, raising the flags as a kernel would; faults can be put in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fault = ""
        self.threads: list[threading.Thread] = []
        host = self

        def gemm(self: GemmLaunch, x: Any, w: Any, y: Any, flags: Any = None, value: int = 0) -> None:
            at = rows_of(self)
            host.run(lambda: y.index_copy_(0, at, torch.mm(x[at], w.t())), y, flags, value)

        def bags(self: BagLaunch, values: Any, offsets: Any, y: Any, flags: Any = None, value: int = 0) -> None:
            at = rows_of(self)
            first = torch.repeat_interleave(torch.arange(self.T) * len(self._weights[0]), len(values) // self.T)
            tables = torch.cat(self._weights)

            def pool() -> None:
                pooled = torch.nn.functional.embedding_bag(
                    values + first, tables, offsets, mode="sum", include_last_offset=True
                )
                y.index_copy_(0, at, pooled.view(self.T, self.B, self.D).permute(1, 0, 2)[at])

            host.run(pool, y, flags, value)

        monkeypatch.setattr(GemmLaunch, "__call__", gemm)
        monkeypatch.setattr(BagLaunch, "__call__", bags)

    def run(self, compute: Any, y: torch.Tensor, flags: torch.Tensor | None, value: int) -> None:
        if self.fault == "early" and value:
            self.threads.append(threading.Thread(target=lambda: (time.sleep(0.05), compute())))
        else:
            compute()
        if self.fault == "wrong":
            y.view(len(y), -1)[-1, -1] += 64
        for address in flags.tolist() if flags is not None and value else []:
            ctypes.c_uint64.from_address(address).value = value
        for thread in self.threads:
            if not thread.ident:
                thread.start()

    def join(self) -> None:
        """While the memory that they write to is there."""
        for thread in self.threads:
            thread.join(20)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Host:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(standin.build("cuda")))
    monkeypatch.setenv("DOVETAIL_CHECK", "1")
    monkeypatch.setattr(pilot, "_PILOT", 1)
    monkeypatch.setattr(pilot, "_STAGES", ((1, 1.0),))
    monkeypatch.setattr(pilot, "_MOST_SIZE", 64)
    monkeypatch.setattr(clock, "_FEWEST_HOST", 1)
    small = operators.GemmTile(height=16, width=16, depth=16, warps=4, stages=1)
    monkeypatch.setattr(gpu, "GEMM_TILES", (small,))
    monkeypatch.setattr(operators.GemmWork, "tiles", (small,))
    monkeypatch.setattr(operators.EmbeddingWork, "tiles", (PoolShape(bags=2), PoolShape(bags=4)))
    return Host(monkeypatch)


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
        gemm, kinds = each.op == Op.GEMM, [c.kind for c in each.cells]
        counts = dict(zip(Kind, (kinds.count(kind) for kind in Kind), strict=True))
        assert counts[Kind.COMPUTE] == 2
        assert counts[Kind.COMM] in ((1, 2) if gemm else (2, 3))
        assert counts[Kind.UNFUSED] == counts[Kind.COMM] + 1
        assert counts[Kind.DECOMPOSED] == 4
        assert len({(c.kind, c.name) for c in each.cells}) == len(each.cells)
        assert "whole" in [c.name for c in each.cells if c.kind is Kind.COMM]
        assert {c.setting["by"] for c in each.cells if c.kind is Kind.DECOMPOSED} == {"torch", "ours"}
        fused = [c for c in each.cells if c.kind is Kind.DMA]
        picked, others = fused[: 1 + spec.rivals], fused[1 + spec.rivals :]
        assert {c.role for c in picked} == {Role.PICKED}
        assert others[0].role == Role.DEFAULT
        assert {c.role for c in others[1:]} == {Role.ABLATION}
        assert each.taken(Kind.DMA) is min(picked, key=lambda c: c.time_us)
        keys = ("slices", "first", "head", "order", "lanes", "tile", "layout")
        settings = [{key: c.setting.get(key) for key in keys} for c in fused]
        assert len({tuple(setting.values()) for setting in settings}) == len(fused)
        for other in settings[2 + spec.rivals :]:  # the fastest of the pilot but for one setting, and what comes of it
            changed = {key for key, value in settings[0].items() if other[key] != value}
            assert changed <= {"slices", "first"} or changed in ({"head"}, {"layout"}) or "order" in changed
        assert sum(setting["order"] == "local" for setting in settings) == (each.ratio == 1)
        assert {"packed", "strided"} <= {setting["layout"] for setting in settings} or gemm
        planned = [c for c in fused if c.setting.get("slices") == 0]
        assert planned
        assert all(c.setting["cut"] and sum(c.setting["cut"]) == sum(planned[0].setting["cut"]) for c in planned)
        assert each.checks == len(each.cells) + max(4, len(fused)) + len(fused)
        assert each.gated_checks == each.checks - len(each.cells)
        for c in each.cells:
            low, high = c.quartiles_us or (0, 0)
            assert 0 < low <= c.time_us <= high
            assert c.iterations == 2
        assert {c.kind for c in each.cells if c.host_us} == {Kind.UNFUSED, Kind.DECOMPOSED, Kind.DMA}
        assert sum(c.host_us is not None for c in each.cells) == 3
        assert set(each.pilot) == {
            "collective", "tile", "computation", "fused tile", "slices", "first slice", "planned slices", "cut",
            "chunks by torch", "chunks by our kernel",
        }  # fmt: skip
        assert {"whole", "whole 2 lanes", "5 slices 2 lanes"} <= set(each.pilot["collective"])
        assert len(each.pilot["collective"]) == (3 if gemm else 6)
        assert any(" 1 lane" in name for name in each.pilot["cut"])
        assert sum("first by event" in name for name in each.pilot["first slice"]) >= 1
        assert any("words" in name for name in each.pilot["chunks by torch"]) == gemm
        cuts = {name.split(" chunks")[0].split()[-1] for name in each.pilot["chunks by our kernel"]}
        assert cuts == {"2", "5", "planned"}
    assert found.products[0].m == 32
    assert set(found.products[0].quartiles_us) == {"torch", "ours", "default"}
    assert json.dumps(found.as_dicts())


@contextlib.contextmanager
def given_times(monkeypatch: pytest.MonkeyPatch, time_of: Any) -> Iterator[list[str]]:
    """A clock that says what `time_of` gives for a form; yields the names of those it was asked for."""
    asked: list[str] = []
    us = clock.Clock.us

    def fake(self: clock.Clock, contender: Any) -> float:
        us(self, contender)
        asked.append(contender.name)
        return float(time_of(contender, len(asked)))

    with monkeypatch.context() as patched:
        patched.setattr(clock.Clock, "us", fake)
        yield asked


def test_the_best_of_a_pilot_is_timed(host: Host, monkeypatch: Any) -> None:
    """Tiles of each form as they were launched, slices, layout, lanes, the way of the collective, the rivals."""
    spec = replace(small(Shape(op=Op.EMBEDDING, ratio=1, size_bytes=6 << 10)), products=(), rivals=1)
    liked = {
        Kind.COMPUTE: "ours 2x4", Kind.COMM: "5 slices 2 lanes", Kind.DMA: "5 slices 1/16 remote 4x4 1 lane",
        Kind.DECOMPOSED: "5 chunks",
    }  # fmt: skip

    def time_of(contender: Any, _: int) -> float:
        wanted = liked.get(contender.kind, "")
        return 10.0 - sum(word in contender.name for word in wanted.split())

    monkeypatch.setattr(BagLaunch, "programs", property(lambda self: 7))
    with Session("cuda") as session, given_times(monkeypatch, time_of):
        found = gpu.measure(session, spec).rows[0]
    names = {kind: [c.name for c in found.cells if c.kind is kind] for kind in Kind}
    assert names[Kind.COMPUTE] == ["torch", "ours 2x4w4p7"]
    assert set(names[Kind.COMM]) == {"5 slices 2 lanes", "5 slices 2 lanes strided", "whole"}
    assert names[Kind.UNFUSED][0] == "ours 2x4w4p7, 5 slices 2 lanes"
    assert sorted(name.split(",")[0] for name in names[Kind.UNFUSED]) == [*["ours 2x4w4p7"] * 3, "torch"]
    assert found.taken(Kind.DMA).name == "5 slices from 1/16 remote 4x4w4p7 1 lane"
    assert [name.split(" chunks")[0] for name in names[Kind.DECOMPOSED]] == ["5", "ours 2x4w4p7 5"]


@pytest.mark.parametrize("op", list(Op))
def test_a_first_slice_by_event_is_picked_where_it_is_faster(host: Host, monkeypatch: Any, op: Op) -> None:
    """And checked and timed like all others; what it is without is beside it."""
    spec = replace(small(Shape(op=op, ratio=1, size_bytes=12 << 10)), products=())
    with Session("cuda") as session, given_times(monkeypatch, lambda c, _: 10.0 - ("first by event" in c.name)):
        found = gpu.measure(session, spec).rows[0]
    taken, fused = found.taken(Kind.DMA), [c for c in found.cells if c.kind is Kind.DMA]
    assert ", first by event, remote" in taken.name
    assert taken.setting["head"]
    assert [c.setting["head"] for c in fused if c.name == taken.name.replace(", first by event,", "")] == [False]
    assert all(not c.setting["head"] for c in fused if c.setting.get("order") == "local")


@pytest.mark.parametrize("op", list(Op))
def test_the_computation_alone_has_the_first_slice_too(host: Host, op: Op) -> None:
    """Also of parameters that want a gradient."""
    spec, shape = small(), Shape(op=op, ratio=1, size_bytes=12 << 10)
    kind = operators.WORKS[op]
    exchanges = kind.exchanges(spec, shape)
    with Session("cuda") as session, contextlib.ExitStack() as stack:
        arenas = {where: session.arena(where, 1 << 20) for where in ("device", "host")}
        buffers = [Buffers(exchange, lambda where, size: arenas[where].take(size)) for exchange in exchanges[:1]]
        work = stack.enter_context(contextlib.closing(kind(session.device, spec, shape, buffers)))
        work.scale(16)
        if isinstance(work, operators.GemmWork):
            work.w.requires_grad_()
        made = work.dma(Cut(slices=4, tile=work.tiles[0], layout=work.layouts[0], head=True), buffers[0])
        stack.callback(made.close)
        made.y.fill_(float("nan"))
        work.compute(made)
        assert torch.allclose(made.y.view(len(work.reference), -1), work.reference.to(made.y.dtype), atol=0.25)
        assert made.kernel._tables.tiles.shape[0] < made.tiles.tiles.shape[0]  # ours has the others


def test_a_first_slice_may_be_all_that_leaves(host: Host, monkeypatch: Any) -> None:
    """With one peer and one slice: the kernel has the rows that stay."""
    spec = replace(small(Shape(op=Op.GEMM, ratio=1, size_bytes=12 << 10)), products=(), ranks=2, slices=((0, (1, 4)),))

    def time_of(contender: Any, _: int) -> float:
        return 10.0 - contender.name.startswith("1 slices, first by event")

    with Session("cuda") as session, given_times(monkeypatch, time_of):
        found = gpu.measure(session, spec).rows[0]
    assert found.taken(Kind.DMA).name.startswith("1 slices, first by event")


def test_the_picked_form_stays_picked(host: Host, monkeypatch: Any) -> None:
    """Whatever the pilot saw, the row's figure is that of the later measurement, of the same form."""
    spec = replace(small(Shape(op=Op.GEMM, ratio=0.5, size_bytes=12 << 10)), products=())
    timed = clock.Clock.timed
    later: list[bool] = []

    def now(self: Any, *given: Any) -> Any:
        later.append(True)
        return timed(self, *given)

    def time_of(contender: Any, _: int) -> float:
        if contender.kind is not Kind.DMA:
            return 10.0
        coarse = contender.name.startswith("2 slices")
        return 5.0 + (coarse if not later else 3 * (not coarse))

    monkeypatch.setattr(clock.Clock, "timed", now)
    with Session("cuda") as session, given_times(monkeypatch, time_of):
        found = gpu.measure(session, spec).rows[0]
    assert found.taken(Kind.DMA).name.startswith("5 slices")
    assert found.us(Kind.DMA) == 8
    assert min(c.time_us for c in found.cells if c.kind is Kind.DMA) == 5
    assert found.lower == pytest.approx(0.2)


def test_large_slices_only() -> None:
    spec = full()
    assert spec.slices_of(16 << 20) == (3, 4, 6, 8, 12)
    assert spec.slices_of(200 << 20) == (6, 12, 24, 48)
    assert spec.slices_of(1) == (3,)
    assert set(spec.slices_of(16 << 20)) <= set(spec.chunks_of(16 << 20))


def test_a_split_is_compared_and_named(host: Host, monkeypatch: Any) -> None:
    """With and without, for the computation and the fused form; a tile with nothing to split is not tried again."""
    cut = {"height": 16, "width": 16, "depth": 2, "warps": 4, "stages": 1}
    tiles = tuple(operators.GemmTile(**cut, split=split) for split in (SplitK.NONE, SplitK.HEAD))
    none = operators.GemmTile(**cut | {"depth": 16}, split=SplitK.HEAD)
    monkeypatch.setattr(operators.GemmWork, "tiles", (*tiles, none))
    monkeypatch.setattr(gpu, "GEMM_TILES", (*tiles, none))
    monkeypatch.setattr(launch, "few_waves", lambda num, columns, programs: (1, 2))
    spec = replace(small(Shape(op=Op.GEMM, ratio=1, size_bytes=6 << 10)), products=((32, 16, 16),))
    with Session("cuda") as session, given_times(monkeypatch, lambda c, _: 1.0 if "head" in c.name else 2.0) as tried:
        found = gpu.measure(session, spec)
    names = [c.name for c in found.rows[0].cells]
    assert "ours 16x16g8w4 head 1/2" in names
    tiles_of = {c.setting.get("tile") for c in found.rows[0].cells if c.role in (Role.PICKED, Role.ABLATION)}
    assert tiles_of == {"16x16g8w4 head 1/2"}
    assert any(name.endswith("slices remote 16x16g8w4") for name in tried)
    assert found.rows[0].pilot["tile"].keys() == {"ours 16x16g8w4", "ours 16x16g8w4 head 1/2"}
    assert found.products[0].tile == "16x16g8w4 head 1/2"
    assert found.products[0].default_us == 2


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("fault", ["wrong", "early"])
def test_a_wrong_form_is_not_timed(host: Host, monkeypatch: Any, op: Op, fault: str) -> None:
    spec = replace(small(*grid(ops=(op,), ratios=(1.0,), sizes=(6 << 10,), splits=(Split.UNEVEN,))), products=())
    timed = []
    monkeypatch.setattr(clock.Clock, "timed", lambda self, *given: timed.append(given))
    checked = gpu._Site._check

    def with_fault(self: Any, *given: Any) -> Any:
        host.fault = fault
        return checked(self, *given)

    monkeypatch.setattr(gpu._Site, "_check", with_fault)
    who = "dma" if fault == "early" else "compute ours"
    with Session("cuda") as session:
        with pytest.raises(HardwareError, match=f"{who} .*gave wrong bytes"):
            gpu.measure(session, spec)
        host.join()
    assert not timed


@pytest.mark.parametrize(
    ("when", "message"), [("_check_gated", "behind the gate"), ("with_host", "after it was timed")]
)
def test_a_form_is_checked_as_it_is_timed(host: Host, monkeypatch: Any, when: str, message: str) -> None:
    """Behind the gate, and again when all is timed: a fault that comes later than the first checks is found."""
    spec = replace(small(Shape(op=Op.GEMM, ratio=1, size_bytes=6 << 10)), products=())
    of: Any = gpu._Site if when == "_check_gated" else clock.Clock
    before = getattr(of, when)

    def with_fault(self: Any, *given: Any) -> Any:
        found = None if when == "_check_gated" else before(self, *given)
        host.fault = "early"
        return before(self, *given) if when == "_check_gated" else found

    monkeypatch.setattr(of, when, with_fault)
    with Session("cuda") as session:
        with pytest.raises(HardwareError, match=f"dma .*gave wrong bytes, {message}"):
            gpu.measure(session, spec)
        host.join()


def test_every_fused_form_is_checked_behind_the_gate(host: Host, monkeypatch: Any) -> None:
    """Before and after it is timed, with spoiled memory and new data each time; other forms without the gate."""
    spec = replace(small(Shape(op=Op.EMBEDDING, ratio=1, size_bytes=6 << 10)), products=(), checks=1)
    events: list[tuple[str, str]] = []

    def logged(of: Any, verb: str, name_of: Any) -> None:
        call = getattr(of, verb)

        def wrapped(self: Any, *given: Any) -> Any:
            events.append((verb, name_of(given)))
            return call(self, *given)

        monkeypatch.setattr(of, verb, wrapped)

    for verb in ("us", "run"):
        logged(clock.Clock, verb, lambda given: given[0].name)
    for verb in ("spoil", "is_right"):
        logged(operators.EmbeddingWork, verb, lambda given: given[0].name)
    for of, verb in ((operators.EmbeddingWork, "fresh"), (clock.Clock, "timed")):
        logged(of, verb, lambda given: "")
    with Session("cuda") as session:
        row = gpu.measure(session, spec).rows[0]
    when = events.index(("timed", ""))
    at = [n for n, (verb, _) in enumerate(events) if verb == "is_right"]
    assert all(events[n - 2] == ("spoil", events[n][1]) for n in at)
    gated = [n for n in at if events[n - 1] == ("us", events[n][1])]
    assert all(events[n - 3] == ("fresh", "") for n in gated)
    fused = [c.name for c in row.cells if c.kind is Kind.DMA]
    assert [events[n][1] for n in gated if n < when] == fused
    assert [events[n][1] for n in gated if n > when] == fused
    assert [events[n][1] for n in at if n not in gated] == [c.name for c in row.cells]
    assert (len(at), len(gated)) == (row.checks, row.gated_checks)


def test_chunks_need_all_their_rows(host: Host, monkeypatch: Any) -> None:
    """A launch of our kernel that leaves out a row of its chunk shows."""
    spec = replace(small(Shape(op=Op.EMBEDDING, ratio=1, size_bytes=6 << 10)), products=())
    one_slice = decomposed.one_slice

    def short(tiles: Any, number: int) -> Any:
        found = one_slice(tiles, number)
        found.tiles[-1, 1] -= number == 1
        return found

    monkeypatch.setattr(decomposed, "one_slice", short)
    with Session("cuda") as session, pytest.raises(HardwareError, match="decomposed ours .*gave wrong bytes"):
        gpu.measure(session, spec)


# --- nothing is left behind -------------------------------------------------------------------------------------------


class Counted:
    """Streams and events of a driver that were made and not given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
        self.open: list[tuple[str, int]] = []
        self.fail_at = -1
        for kind in ("stream", "event"):
            for verb in ("create", "destroy"):
                call = f"{kind}_{verb}"
                monkeypatch.setattr(driver, call, self._wrapped(kind, verb, getattr(driver, call)))

    def _wrapped(self, kind: str, verb: str, call: Any) -> Any:
        def wrapped(*given: Any, **more: Any) -> Any:
            if verb == "create":
                if self.fail_at == 0:
                    self.fail_at = -1
                    raise HardwareError("no more of them")
                self.fail_at -= self.fail_at > 0
                found = call(*given, **more)
                self.open.append((kind, found))
                return found
            if (kind, given[0]) in self.open:  # others were there before
                self.open.remove((kind, given[0]))
            return call(*given, **more)

        return wrapped


def test_a_refused_arena_leaves_nothing_open(host: Host, monkeypatch: Any) -> None:
    with Session("cuda") as session:
        counted = Counted(monkeypatch, session.driver)
        session.pin_limit_bytes = 1
        with pytest.raises(NotSupported, match="pinned memory are over the limit"):
            gpu.measure(session, small(Shape(op=Op.GEMM, ratio=1, size_bytes=6 << 10)))
        assert "stream" not in dict(counted.open)  # an event is the heap's, for memory that comes back


def test_what_can_not_be_made_leaves_nothing_open(host: Host, monkeypatch: Any) -> None:
    """Whichever stream or event is refused: the clock's, the work's, those of chunks."""
    shape = Shape(op=Op.EMBEDDING, ratio=1, size_bytes=6 << 10)
    spec = replace(small(shape), products=())
    with Session("cuda") as session:
        kind = operators.WORKS[shape.op]
        session.device.streams(4)  # the device's own
        buffers = [
            Buffers(e, lambda where, size: session.arena(where, size).take(size)) for e in kind.exchanges(spec, shape)
        ]
        counted = Counted(monkeypatch, session.driver)
        makers: list[tuple[str, Any, tuple[int, ...]]] = [
            ("work", lambda: kind(session.device, spec, shape, buffers), (0, 1, 3)),
            ("chunks", lambda: Chunked(session.device, buffers[0], 8), (0, 1, 3, 4, 6)),
            ("clock", lambda: clock.Clock(session), (0, 3)),  # the first of the place's, the first of the timer's
        ]
        for name, make, places in makers:
            make().close()
            assert counted.open == [], name
            for place in places:
                counted.fail_at = place
                with pytest.raises(HardwareError, match="no more of them"):
                    make()
                assert counted.open == [], (name, place)


# --- orders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 7, 16, 17])
def test_nobody_is_always_early(number: int) -> None:
    """With fewer rounds than orders places are spread, by each seed in another way; with more, all are taken."""
    square = orders(number)
    for rounds in (1, 5, len(square), len(square) + 3):
        for seed in range(20):
            found = some_orders(number, rounds, seed)
            assert len(found) == rounds
            assert set(found) <= set(square)
            assert found == some_orders(number, rounds, seed)
            if rounds >= len(square):
                assert set(found[: len(square)]) == set(square)
    if number > 2:
        assert some_orders(number, 5, "a") != some_orders(number, 5, "b")
    for seed in range(20):
        found = some_orders(number, 7, seed)
        mean = [sum(order.index(c) for order in found) / 7 for c in range(number)]
        assert max(mean) - min(mean) <= max(2, 0.45 * number)
    first = [sum(order.index(c) for order in square[:7]) / 7 for c in range(number)]
    assert number < 16 or max(first) - min(first) > 0.5 * number  # what the first seven orders would do
