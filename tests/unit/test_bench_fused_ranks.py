"""The parts of `dovetail bench fused` on a CPU that need no second rank: grid, verdict, the table that is tuned."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import cli, profile
from dovetail.bench.baselines import fbgemm
from dovetail.bench.fused import cases, grid, tune, verdict
from dovetail.bench.fused.ranks import RankSpec, quieter, spec_of, tune_spec
from dovetail.measure import evidence, machine
from dovetail.ops import calls, choose

Row = dict[str, Any]


def row(op: str = grid.GEMM, shape: str = "16x1024x32", dtype: str = "float32", **times: float) -> Row:
    plain = times["unfused"]
    return {
        "row": "shape", "backend": "cpu", "op": op, "shape": shape, "dtype": dtype, "ranks": 2, "threads": 1,
        "operations": 1 << 20, "size_bytes": 1 << 16, "times_us": times, "correct": True, "wrong": [],
        "over_unfused": {name: plain / t for name, t in times.items()},
    }  # fmt: skip


# --- grid


@pytest.mark.parametrize("op", grid.OPS)
def test_a_grid_has_twelve_shapes_and_spans_sizes_and_work(op: str) -> None:
    shapes = [shape for shape in grid.grid([op]) if not shape.uneven]
    assert len(shapes) >= 12
    assert len(set(shapes)) == len(shapes)
    loads = [cases.case_of(tiny(shape), "float32", 0, 2).made().load for shape in shapes]
    sizes = sorted({size for _, size in loads})
    assert sizes[-1] >= 16 * sizes[0]
    if op == grid.EMBEDDING:
        work = {shape.bag for shape in shapes if isinstance(shape, grid.Lookup)}
    else:
        work = {round(operations / size) for operations, size in loads}
    assert max(work) >= 8 * min(work)


def tiny(shape: grid.Shape) -> grid.Shape:
    """Without the large tables, which no load depends on."""
    return dataclasses.replace(shape, rows=16) if isinstance(shape, grid.Lookup) else shape


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_what_is_tuned_is_not_what_is_judged(backend: str) -> None:
    judged, tuned = set(grid.grid(backend=backend)), grid.coarse(backend=backend)
    assert not judged & set(tuned)
    assert {shape.op for shape in tuned} == set(grid.OPS)
    assert any(shape.uneven for shape in tuned)
    first = [shape.op for shape in tuned[: len(tuned) // 2]]
    assert set(first) == set(grid.OPS)  # with half of the time, no operator is without figures


def test_quick_is_a_part_of_the_grid() -> None:
    assert set(grid.quick()) < set(grid.grid())
    assert {shape.op for shape in grid.quick()} == set(grid.OPS)
    assert len({shape.name for shape in grid.grid([grid.GEMM])}) == len(grid.grid([grid.GEMM]))


def test_operators_by_name() -> None:
    assert grid.named("all") == grid.OPS
    assert grid.named("gemv_all_reduce, gemm_all_to_all") == (grid.GEMV, grid.GEMM)
    with pytest.raises(ValueError, match="--op: 'gemm' is not known; there are all, embedding_all_to_all"):
        grid.named("gemm")


# --- spec


def test_spec_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="--ranks: 1"):
        spec_of(grid.OPS, short=True, ranks=1)
    with pytest.raises(ValueError, match="--transport: 'smoke' is not known; there are unfused"):
        spec_of(grid.OPS, short=True, transports=("smoke",))
    with pytest.raises(ValueError, match="--iters"):
        spec_of(grid.OPS, short=True, rounds=0)


def test_unfused_always_runs() -> None:
    spec = RankSpec(shapes=grid.quick(), transports=("store",))
    assert spec.contenders(grid.GEMM) == ["unfused", "store", "auto"]
    assert RankSpec(shapes=grid.quick()).contenders(grid.GEMV) == ["unfused", "decomposed", "store", "auto"]
    assert "auto" not in tune_spec(grid.OPS, 2, 60).contenders(grid.GEMM)
    assert tune_spec(grid.OPS, 2, 1.0).seconds < tune_spec(grid.OPS, 2, 30.0).seconds


# --- data


@pytest.mark.parametrize("dtype", grid.DTYPES)
@pytest.mark.parametrize("op", grid.OPS)
def test_data_differs_by_rank_and_time_and_a_stale_result_is_seen(op: str, dtype: str) -> None:
    shape = tiny(grid.quick([op])[0])
    mine, other = (cases.case_of(shape, dtype, rank, 2) for rank in (0, 1))
    first = mine.expected().clone()
    if op != grid.GEMV:  # whose ranks get the same
        assert not mine.is_right(other.expected(), first)
    assert mine.is_right(first, first)
    mine.fresh(1)
    second = mine.expected()
    assert not mine.is_right(first, second)
    spoiled = second.clone()
    spoiled.view(-1)[-1] = math.nan
    assert not mine.is_right(spoiled, second)
    assert not mine.is_right(second[:-1], second)
    other.fresh(1)
    assert torch.equal(other.expected(), cases.case_of(shape, dtype, 1, 2).expected()) is False


def test_calls_run_on_the_newest_data() -> None:
    case = cases.case_of(grid.Product(op=grid.GEMV, m=2, n=8, k=4), "float32", 0, 2)
    run = case.compute()
    before = run()
    case.fresh(1)
    assert not torch.equal(before, run())


def test_uneven_splits_fit_together() -> None:
    shape = grid.Product(op=grid.GEMM, m=50, n=8, k=4, uneven=True)
    of_ranks = [cases.ProductCase(shape, torch.float32, rank, 3, "cpu") for rank in range(3)]
    for i, case in enumerate(of_ranks):
        received, sent = case.splits
        assert received is not None
        assert sent is not None
        assert sum(sent) == case.x.shape[0]
        assert len(set(sent)) > 1
        for j, other in enumerate(of_ranks):
            theirs = other.splits[0]
            assert theirs is not None
            assert sent[j] == theirs[i]


def test_bags_differ_in_length_and_cover_all_values() -> None:
    case = cases.LookupCase(grid.Lookup(batch=64, bag=8, rows=100), torch.float32, 0, 2, "cpu")
    lengths = case.offsets.diff()
    assert int(lengths.min()) >= 0
    assert int(lengths.sum()) == case.values.numel()
    assert len(set(lengths.tolist())) > 2


# --- verdict


def test_verdict_takes_the_best_transport_and_counts_losses() -> None:
    """Of torch and our collective the median of the rounds' ratios counts, where it is known."""
    ours = {"torch+ours": 95.0}
    rows = [
        row(unfused=100, store=80, dma=120, auto=100, gloo=160, **ours) | {"over_ours": {"store": 1.25}},
        row(shape="128x1024x32", unfused=100, store=110, dma=125, auto=110, gloo=220, **{"torch+ours": 100.0}),
    ]
    found = {text: holds for holds, text in verdict.verdict(rows)}
    over_gloo, over_ours, mean, least = found
    assert over_gloo.startswith("gemm_all_to_all: best transport 2.000x over gloo on the mean of 2, wanted 1.3")
    assert over_ours.startswith(f"gemm_all_to_all: best transport {math.sqrt(1.25 / 1.1):.3f}x over torch+ours")
    assert "auto 0.95x over unfused on the mean" in mean
    assert "auto at least 0.91x (128x1024x32 float32), wanted 0.95; below 0.95 at 1 of 2: 128x1024x32 float32" in least
    assert list(found.values()) == [True, True, False, False]
    (loss,) = verdict.losses(rows)
    assert loss == "gemm_all_to_all: best transport behind torch+ours at 1 of 2: 128x1024x32 float32 0.909"


def test_verdict_tells_dtypes_apart_and_wrong_ones_have_no_time() -> None:
    bad = row(dtype="bfloat16", unfused=100, gloo=90, store=100)
    bad |= {"correct": False, "wrong": ["dma"]}
    rows = [row(unfused=100, store=50, gloo=300), bad]
    lines = verdict.lines(rows)
    assert "(float32 6.00, bfloat16 0.90)" in lines[0]
    assert lines[-1] == "1 of 2 rows WRONG"
    assert verdict.lines(rows[:1])[-1] == "all correct"


def test_ablations_are_relative_and_skew_counts_what_is_left() -> None:
    order = row(unfused=1) | {"row": "order", "times_us": {"store, remote first": 50.0, "store, local first": 60.0}}
    skew = row(unfused=1) | {"row": "skew", "late_us": 100.0, "times_us": {"unfused, together": 100.0, "store": 140.0}}
    first, second = verdict.ablations([order, skew])
    assert first == "gemm_all_to_all, order: time over that of store, remote first: store, local first 1.20"
    assert second.endswith("unfused, together: store 0.40")


def test_fbgemm_has_its_lines_where_it_ran() -> None:
    times = {"unfused": 100.0, "store": 50.0, "fbgemm+gloo": 150.0, "fbgemm+ours": 75.0}
    found = verdict.fbgemm([row(op=grid.EMBEDDING, **times), row(op=grid.EMBEDDING, unfused=100, store=50)])
    assert found == [
        "embedding_all_to_all: best transport 3.000x over fbgemm+gloo on the mean of 1",
        "embedding_all_to_all: best transport 1.500x over fbgemm+ours on the mean of 1",
    ]


def test_graphs_have_a_line_where_there_were_any() -> None:
    times = {"unfused": 120.0, "torch+ours": 90.0, "store": 60.0, "graph": 30.0}
    rows = [row(op=grid.GEMV, **times), row(op=grid.GEMV, unfused=100, store=50), row(op=grid.GEMM, unfused=9, store=8)]
    (line,) = verdict.graphs(rows)
    assert line.startswith("gemv_all_reduce: store replayed in a graph 3.00x over torch+ours, 4.00x over unfused")
    assert line in verdict.lines(rows)


def test_missing_fbgemm_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fbgemm.missing.cache_clear()
    monkeypatch.setattr(fbgemm, "PACKAGE", "no_such_package")
    assert fbgemm.missing() == "fbgemm-gpu-cpu is not installed"
    fbgemm.missing.cache_clear()


def test_an_fbgemm_for_another_torch_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "broken_fbgemm"
    package.mkdir()
    (package / "__init__.py").write_text("raise OSError('undefined symbol\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fbgemm, "PACKAGE", "broken_fbgemm")
    fbgemm.missing.cache_clear()
    assert fbgemm.missing() == f"fbgemm-gpu-cpu can't be loaded with torch {torch.__version__}: undefined symbol"
    fbgemm.missing.cache_clear()


# --- tuning


HAS = ("unfused", "store", "dma")


def product(rows: int, k: int = 64, dtype: torch.dtype = torch.float32) -> calls.Call:
    return calls.gemm_all_to_all(torch.zeros(rows, k, dtype=dtype), torch.zeros(8, k, dtype=dtype), None, None, 2)


def entry(call: calls.Call, dtype: str | None = "float32", **times: float) -> list[Any]:
    return [*call.load, times, *([dtype] if dtype else [])]


def test_the_section_is_what_auto_reads() -> None:
    wrong = row(unfused=100, store=1)
    wrong["times_us"] = {"store": 1.0}
    rows = [row(unfused=100, store=80, gloo=300, auto=80, compute=10), wrong]
    assert tune.section(rows) == {
        "cpu": {"gemm_all_to_all": {"2": [[1 << 20, 1 << 16, {"unfused": 100, "store": 80}, "float32"]]}}
    }


def test_the_quieter_of_two_measurements_counts() -> None:
    """As a whole, since what disturbs one contender seldom leaves the others alone; a wrong result in either stays."""
    quiet, loud = (row(**times) | {"over_ours": {}} for times in (times_of(100, 50, 210), times_of(110, 120, 200)))
    assert quieter(quiet, loud) == quieter(loud, quiet) == quiet
    wrong = quiet | {"times_us": {"unfused": 100.0, "dma": 210.0}, "wrong": ["store"], "correct": False}
    for pair in ((wrong, loud), (loud, wrong)):
        found = quieter(*pair)
        assert (found["times_us"].keys(), found["wrong"], found["correct"]) == ({"unfused", "dma"}, ["store"], False)
        assert "store" not in found["over_unfused"]


def times_of(unfused: float, store: float, dma: float) -> dict[str, float]:
    return {"unfused": unfused, "store": store, "dma": dma}


def test_auto_takes_the_largest_gain_near_the_call() -> None:
    small_call, large = product(16), product(4096)
    table = {"2": [entry(small_call, unfused=10, store=20, dma=40), entry(large, unfused=900, store=800, dma=600)]}
    assert choose.from_table(table, small_call, 2, HAS).transport == "unfused"
    assert choose.from_table(table, large, 2, HAS).transport == "dma"
    assert choose.from_table(table, large, 2, ("unfused", "store")).transport == "store"
    assert "1.50 times as fast as unfused" in choose.from_table(table, large, 2, HAS).reason


def test_a_gain_within_noise_is_none() -> None:
    call = product(16)
    near = {"2": [entry(call, unfused=100, store=99, dma=100)]}
    assert choose.from_table(near, call, 2, HAS).transport == "unfused"
    # One lucky row among four of its neighbours does not turn the choice.
    rows = [entry(product(n), unfused=100, store=130) for n in (16, 18, 20, 22)]
    lucky = {"2": [*rows, entry(product(17 * 2), unfused=100, store=80)]}
    assert choose.from_table(lucky, product(18), 2, HAS).transport == "unfused"


def test_what_lost_nearby_is_not_taken() -> None:
    call = product(16)
    rows = [entry(call, unfused=100, store=40, dma=80), entry(call, unfused=100, store=130, dma=90)]  # short bags, long
    assert choose.from_table({"2": rows}, call, 2, HAS).transport == "dma"
    assert choose.from_table({"2": rows}, call, 2, ("unfused", "store")).transport == "unfused"
    far_off = entry(product(4096), unfused=100, store=130)
    assert choose.from_table({"2": [rows[0], far_off]}, call, 2, HAS).transport == "store"


def test_figures_of_the_dtype_count_if_there_are_any() -> None:
    call, half = product(16), product(16, dtype=torch.bfloat16)
    rows = [entry(call, "float32", unfused=100, store=50), entry(half, "bfloat16", unfused=100, store=200)]
    table = {"2": rows}
    assert choose.from_table(table, call, 2, HAS).transport == "store"
    assert choose.from_table(table, half, 2, HAS).transport == "unfused"
    assert choose.from_table({"2": [entry(call, None, unfused=100, store=50)]}, half, 2, HAS).transport == "store"


def test_the_nearest_number_of_ranks_is_taken_and_nothing_measured_is_said() -> None:
    call = product(16)
    table = {"2": [entry(call, unfused=100, store=50)], "8": [entry(call, unfused=100, store=200)]}
    assert choose.from_table(table, call, 3, HAS).transport == "store"
    assert choose.from_table(table, call, 6, HAS).transport == "unfused"
    assert "dovetail tune --only fused" in choose.from_table({}, call, 2, HAS).reason


def test_uneven_splits_are_chosen_without_the_rank_s_own_sizes() -> None:
    x, w = torch.zeros(6, 4), torch.zeros(8, 4)
    mine = calls.gemm_all_to_all(x, w, [1, 5], [4, 2], 2)
    assert mine.load == (0, 0)
    even = [entry(product(n), unfused=100, store=200) for n in (16, 4096)]
    table = {"2": [*even, [0, 0, {"unfused": 100, "store": 60}, "float32"]]}
    assert choose.from_table(table, mine, 2, HAS).transport == "store"


def test_saving_keeps_what_else_the_profile_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "profile.json"
    monkeypatch.setenv("DOVETAIL_PROFILE", str(file))
    before = {"kv": {"cpu": 1}, "fused": {"cpu": {grid.GEMV: {"2": [[1, 1, {"unfused": 1}]]}, grid.GEMM: {"2": []}}}}
    profile.save(profile.Profile(key=machine.profile_key([4]), sections=before))
    assert tune.save([row(unfused=100, store=80)]) == file
    found = json.loads(file.read_text())
    assert found["key"]["ranks"] == [4]  # collectives were not measured with 2
    assert found["sections"]["kv"] == {"cpu": 1}
    assert found["sections"]["fused"]["cpu"][grid.GEMV] == {"2": [[1, 1, {"unfused": 1}]]}
    assert len(found["sections"]["fused"]["cpu"][grid.GEMM]["2"]) == 1
    (line,) = tune.lines([row(unfused=100, store=80)])
    assert line == "gemm_all_to_all, cpu, 2 ranks: fastest of 1 shapes: store 1; 1.25x over unfused"


def test_figures_of_another_gpu_go_when_this_one_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))

    def saved() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "profile.json").read_text())["sections"]["fused"]
        return found

    mine = row(unfused=100, store=80) | {"backend": "cuda"}
    old, new = {"device": "NVIDIA A100"}, {"device": "NVIDIA H200", "collectives": "torch"}
    tune.save([mine | {"ranks": 4}], old)
    tune.save([row(unfused=100, store=80)])
    assert set(saved()["cuda"][grid.GEMM]) == {"4"}
    tune.save([mine], new)
    assert saved()["cuda"]["device"] == "NVIDIA H200"
    assert set(saved()["cuda"][grid.GEMM]) == {"2"}
    tune.save([mine | {"ranks": 4}], new)
    assert set(saved()["cuda"][grid.GEMM]) == {"2", "4"}
    evidence.save(evidence.SELFTEST, "cuda", {"passed": True, "device": "NVIDIA H200", "driver": 13000})
    for where in (("hip", "MI300X", 7), ("cuda", "NVIDIA A100", 13000), ("cuda", "NVIDIA H200", 12080)):
        assert tune.where(*where) == {"device": where[1], "collectives": "torch"}
    tune.save([mine], tune.where("cuda", "NVIDIA H200", 13000))
    assert saved()["cuda"]["collectives"] == "ours"
    assert set(saved()["cuda"][grid.GEMM]) == {"2"}
    assert "cpu" in saved()


def test_what_is_tuned_on_gpus() -> None:
    """Layers of a GPU's size, none of which is judged by."""
    spec = tune_spec(grid.OPS, 2, 60, "cuda")
    assert spec.backend == "cuda"
    assert not set(spec.shapes) & set(grid.grid(backend="cuda"))
    layers = [shape for shape in spec.shapes if shape.op == grid.GEMV]
    assert min(shape.n for shape in layers if isinstance(shape, grid.Product)) > 4096


# --- usage


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "fused", "--op", "gemm"), "--op: 'gemm' is not known"),
        (("bench", "fused", "--transport", "smoke"), "--transport: 'smoke' is not known"),
        (("bench", "fused", "--ranks", "1"), "--ranks: 1"),
        (("bench", "fused", "--iters", "0"), "--iters: 0"),
        (("bench", "fused", "--pin", "1G"), "--force and --pin are for --backend cuda"),
        (("bench", "fused", "--layout", "mla"), "--layout is for kv"),
        (("bench", "fused", "--suite", "llama"), "--suite is for overlap"),
        (("bench", "fused", "--dtype", "int32"), "--dtype is for collectives"),
        (("bench", "fused", "--backend", "cuda", "--ablate"), "--transport and --ablate are for --backend cpu"),
        (("bench", "fused", "--backend", "cuda", "--op", "gemv_all_reduce"), "--op: on a GPU with host peers"),
        (("bench", "all_gather", "--op", "all"), "--op is for fused"),
        (("bench", "overlap", "--ablate"), "--ablate is for fused"),
        (("tune", "--only", "fused,kv"), "--only: measure"),
        (("tune", "--only", "fused", "--cache", "1G"), "--cache is for --only kv"),
    ],
)
def test_wrong_options_are_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    assert ended.value.code == cli.USAGE
    assert said in capsys.readouterr().err


class FakeSession:
    """A GPU that is only asked for its facts."""

    def __init__(self, backend: str, bounds: object) -> None:
        self.asked = backend, bounds

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None: ...

    def facts(self) -> dict[str, str]:
        return {"name": "none"}


def test_on_a_gpu_the_spec_follows_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dovetail.bench.fused import gpu, rows
    from dovetail.bench.gpu import session

    seen: list[Any] = []

    class Line(str):
        __slots__ = ()

        def as_dict(self) -> Row:
            return {"shape": f"of {self}"}

    def measure(_session: object, spec: Any, tell: Any, into: Any) -> None:
        seen.append(spec)
        tell("one")
        into.rows.append(Line("a row"))
        into.products.append(Line("a product"))

    monkeypatch.setattr(rows, "table", lambda found: [f"table of {found[0]}"])
    monkeypatch.setattr(rows, "verdict", lambda found, products: [(True, f"{found[0]}"), (False, f"{products[0]}")])
    monkeypatch.setattr(session, "Session", FakeSession)
    monkeypatch.setattr(gpu, "measure", measure)
    file = tmp_path / "gpu.json"
    words = ["bench", "fused", "--backend", "cuda", "--op", "gemm_all_to_all", "--ranks", "3", "--iters", "4"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--quick", "--json", str(file)])
    assert ended.value.code in (None, cli.OK)
    (spec,) = seen
    assert {shape.op for shape in spec.shapes} == {"gemm_all_to_all"}
    assert (spec.ranks, spec.fewest_rounds, spec.most_rounds) == (3, 4, 4)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ["table of a row", "holds  a row", "MISSES a product"]
    assert "no failure" in shown[3]
    data = json.loads(file.read_text())
    assert data["machine"]["gpu"] == {"name": "none"}
    assert [row["shape"] for row in data["rows"]] == ["of a row", "of a product"]
