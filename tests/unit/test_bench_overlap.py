"""`dovetail bench overlap`: scenarios, their scale, shares and regrets of made-up times, a stand-in driver, usage."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import standin

from dovetail import cli
from dovetail.bench.overlap import LLAMA, lines, pick, plans, rows_of, scale, verdict
from dovetail.bench.overlap.sample import ALWAYS_DMA, AUTO, CONCCL, TRIED, Sampled, others, slowest
from dovetail.bench.overlap.spec import RATIOS, Spec
from dovetail.bench.overlap.suite import QUICK
from dovetail.bench.overlap.tune import COMPUTES, MOST_SLOWDOWN, PIECES, End, Tuner, while_both
from dovetail.overlap import ideal
from dovetail.overlap.strategy import Setting, Strategy
from dovetail.overlap.tables import ByCores, Tables
from dovetail.overlap.tasks import Bound, Load, Mover, Traffic
from dovetail.overlap.timing import Times
from dovetail.plan import passes
from dovetail.plan.check import check
from dovetail.plan.plan import Plan
from dovetail.plan.step import DType

ROOT = Path(__file__).parents[2]
SERIAL = {mover: Setting(Strategy.SERIAL, mover=mover) for mover in Mover}
DMA, STREAMS = Setting(Strategy.DMA), Setting(Strategy.STREAMS)


# --- scenarios and their scale


def test_the_suite() -> None:
    assert len(LLAMA) >= 36
    assert len({scenario.name for scenario in LLAMA}) == len(LLAMA)
    assert {scenario.ratio for scenario in LLAMA} == set(RATIOS)
    assert all(1 + min(s.ratio, 1 / s.ratio) >= 1.25 for s in LLAMA)
    special = [s for s in LLAMA if s.job.is_small or s.job.kind == "reduce_scatter"]
    assert 3 * len(special) >= len(LLAMA)
    assert {s.compute.bound for s in special} == set(Bound)
    kinds = {"all_gather", "all_to_all", "reduce_scatter", "fetch", "store", "offload"}
    assert {s.job.kind for s in LLAMA} == kinds
    assert {s.job.piece_bytes for s in special} >= {4096, 1 << 20}
    # Scenarios of one computation follow each other: it is made once.
    order = [s.compute for s in LLAMA]
    assert len(dict.fromkeys(order)) == 1 + sum(a is not b for a, b in itertools.pairwise(order))


def test_tuning_sees_nothing_of_the_suite() -> None:
    shapes = {compute.shape for compute in COMPUTES.values()} | {compute.small for compute in COMPUTES.values()}
    assert not shapes & ({s.compute.shape for s in LLAMA} | {s.compute.small for s in LLAMA})
    assert all(piece % 11 == 0 for piece in PIECES)  # those of the suite are 4 to 7 times a power of two


def test_scenarios_by_name() -> None:
    assert [s.name for s in pick(QUICK)] == [s.name for s in LLAMA if s.name in QUICK]
    assert all(s.compute.name == "70b-up" for s in pick(["70b-up+*"]))
    with pytest.raises(ValueError, match="--scenario: 'lunch' is none of 70b-attn"):
        pick(["lunch"])


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("unit_us", [3.0, 37.0, 250.0])
def test_repeats_bring_the_ratio_near(unit_us: float, ratio: float) -> None:
    number = scale.repeats(unit_us, 2000.0, ratio)
    assert 1 <= number <= scale.MOST_REPEATS
    found = 2000.0 / (number * unit_us)
    if number < scale.MOST_REPEATS:
        assert 0.25 <= found <= 4
        assert abs(math.log(found / ratio)) <= math.log(1.5)


def test_sizes_on_the_line() -> None:
    line = scale.Line.through((1000, 30.0), (101000, 130.0))
    assert (line.fixed_us, line.bytes_per_us) == (pytest.approx(29), pytest.approx(1000))
    assert scale.piece_bytes(line, 29 + 3 * 65.536, 3) == 65536
    assert scale.piece_bytes(line, 29 + 3 * 80.0, 3) == 5 << 14
    assert scale.piece_bytes(line, 0.0, 3) == 4096
    assert scale.piece_bytes(line, 1e9, 3) == 64 << 20
    odd = scale.Line.through((1000, 30.0), (2000, 10.0))
    assert odd.size_bytes(10.0) == pytest.approx(2000)


PLANS = [
    plans.copies(("into",), 4, 4096), plans.copies(("out",), 1, 1000), plans.copies(("into", "out"), 2, 4096),
    plans.reduce_scatter(4, 4096, DType.BFLOAT16),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_plans_of_the_host_link_are_proved(plan: Plan) -> None:
    check(passes.entry(plan), runs=2)


# --- rows and verdict


def sampled(
    both: dict[Setting, list[tuple[float, float]]], *, compute_us: float = 100.0, engines: float = 50.0,
    cores: float = 80.0, **more: Any,
) -> Sampled:  # fmt: skip
    """Round by round (end of the computation, end of the communication) of each setting."""
    rounds = len(next(iter(both.values())))
    made = Sampled(
        scenario=LLAMA[0], backend="cuda", ranks=4, piece_bytes=1000, crossing_bytes=6000, repeats=2,
        load=Load(flops=1e9, size_bytes=1e6), traffic=Traffic(kind="all_gather", size_bytes=3000), right=True,
        compute_us=[compute_us] * rounds, comm_us={Mover.ENGINES: [engines] * rounds, Mover.CORES: [cores] * rounds},
        both={s: [Times(compute_us=a, comm_us=b) for a, b in times] for s, times in both.items()},
    )  # fmt: skip
    return replace(made, **more)


def steady(rounds: int = 4, **settings: tuple[float, float]) -> dict[Setting, list[tuple[float, float]]]:
    known = {"by_engines": SERIAL[Mover.ENGINES], "by_cores": SERIAL[Mover.CORES], "dma": DMA, "streams": STREAMS}
    known |= {"eight": Setting(Strategy.PARTITION, 8), "sixteen": Setting(Strategy.PARTITION, 16)}
    return {known[name]: [times] * rounds for name, times in settings.items()}


ALL = {
    "by_engines": (100.0, 152.0), "by_cores": (100.0, 181.0), "dma": (101.0, 51.0), "streams": (130.0, 120.0),
    "eight": (115.0, 140.0), "sixteen": (125.0, 90.0),
}  # fmt: skip


def test_rows_of_settings() -> None:
    found = {row["setting"]: row for row in rows_of([sampled(steady(**ALL))], 1e9) if row["row"] == "setting"}
    dma, streams, serial = found["dma"], found["streams"], found["serial by engines"]
    assert dma["class"] == "G-long"
    assert dma["ideal_speedup"] == pytest.approx(1.5)
    assert dma["speedup"] == pytest.approx(152 / 101)
    assert dma["share_of_ideal"] == pytest.approx((152 / 101 - 1) / 0.5)
    assert (dma["compute_slowdown"], dma["comm_slowdown"]) == (pytest.approx(1.01), pytest.approx(1.02))
    assert streams["comm_slowdown"] == pytest.approx(120 / 80)  # of the same mover
    assert streams["total_us"] == 130
    assert dma["link_gbps"] == pytest.approx(3000 / 51 / 1e3)
    assert dma["memory_share"] == pytest.approx(6000 / 51e-6 / 1e9)
    assert (serial["compute_slowdown"], serial["comm_slowdown"]) == (None, None)
    assert serial["link_gbps"] == pytest.approx(3000 / 52 / 1e3)
    assert dma["alone_comm_us"] == {"engines": 50, "cores": 80}
    assert dma["ratio"] == pytest.approx(0.5)


def test_the_best_is_found_in_other_rounds_than_it_is_judged_in() -> None:
    """`streams` is the best of the even rounds, `dma` of the odd ones: that is what the regret is taken from."""
    both = steady(**ALL)
    both[STREAMS] = [(90, 90), (110, 110), (90, 90), (110, 110)]
    both[DMA] = [(95, 95), (88, 88), (95, 95), (88, 88)]
    made = sampled(both, choices={AUTO: DMA, ALWAYS_DMA: DMA, CONCCL: STREAMS}, tried=(DMA, STREAMS))
    found = {row["policy"]: row for row in rows_of([made]) if row["row"] == "policy"}
    assert {row["best"] for row in found.values()} == {"streams"}
    assert found[AUTO]["regret"] == pytest.approx(88 / 110 - 1)
    assert found[CONCCL]["regret"] == 0
    assert (found[TRIED]["setting"], found[TRIED]["regret"]) == ("streams", 0)
    assert list(found) == [AUTO, TRIED, CONCCL, ALWAYS_DMA]


def test_verdict() -> None:
    rows = rows_of([sampled(steady(**ALL), choices={AUTO: DMA, ALWAYS_DMA: DMA}, tried=(DMA,))])
    shares = verdict.shares(rows)
    assert shares["all"]["partition"][0] == pytest.approx((152 / 125 - 1) / 0.5)  # sixteen: the better one
    assert shares["all"]["dma"] == shares["with peers"]["dma"] == shares["compute-bound"]["dma"]
    assert "memory-bound" not in shares
    text = "\n".join(lines(rows))
    assert "best speedup: 1.50 of 1.50, dma in 70b-attn+all_gather@1" in text
    assert "auto: within 3% of the best in 1 of 1 scenarios; regret 0.0% on the mean, 0% at worst" in text
    assert "streams: the computation takes x1.30, the communication x1.50 of its time alone" in text
    assert text.endswith("all correct")


def test_a_scenario_with_little_to_gain_is_in_no_share() -> None:
    rows = rows_of([sampled(steady(**ALL), engines=10.0)])
    assert verdict.shares(rows) == {}
    assert "  not in the shares: 1 scenarios of an ideal speedup below 1.24" in lines(rows)


def test_energy_in_the_verdict() -> None:
    joules = {STREAMS: (0.5, 0.01), DMA: (0.4, 0.01)}
    rows = rows_of([sampled(steady(**ALL), joules=joules)])
    assert "dma / streams: 0.80 on the mean (0.80 to 0.80); less in 1 of 1 scenarios" in "\n".join(lines(rows))


def test_a_wrong_scenario_has_no_times() -> None:
    made = replace(sampled(steady(**ALL)), right=False, both={}, compute_us=[], comm_us={})
    rows = rows_of([made])
    assert [(row["correct"], row["strategy"]) for row in rows] == [(False, None)]
    assert lines(rows) == ["1 of 1 scenarios WRONG"]


def test_each_time_is_that_of_the_slowest_rank() -> None:
    one = sampled({DMA: [(10.0, 20.0), (11.0, 5.0)]}, compute_us=7.0)
    other = sampled({DMA: [(12.0, 3.0), (9.0, 6.0)]}, compute_us=6.0)
    both = slowest([one, replace(other, right=False)])
    assert [(t.compute_us, t.comm_us) for t in both.both[DMA]] == [(12, 20), (11, 6)]
    assert both.compute_us == [7, 7]
    assert not both.right


def test_policies_that_have_nothing_to_say_are_left_out() -> None:
    available = [*SERIAL.values(), STREAMS, DMA, Setting(Strategy.PARTITION, 8)]
    traffic, times = Traffic(kind="all_gather", size_bytes=1 << 20), {Mover.ENGINES: 60.0, Mover.CORES: 50.0}
    found = others(available, traffic, Load(), None, 100.0, times)
    assert found == {ALWAYS_DMA: DMA, "always serial": SERIAL[Mover.CORES], "always streams": STREAMS}
    tables = Tables(
        num_cores=132, core_step=8, flops=1e15, memory_bytes_per_s=4e12, link_bytes_per_s=5e10,
        compute_by_cores={bound: ByCores(((68, 1.8), (132, 1.0))) for bound in Bound},
        comm_by_cores={"all_gather": ByCores(((8, 1.5), (16, 1.0)))},
    )  # fmt: skip
    theirs = others(available, traffic, Load(), tables, 100.0, times)[CONCCL]
    assert (theirs.strategy, theirs.cores) == (Strategy.PRIORITY_PARTITION, 8)
    assert CONCCL not in others([SERIAL[Mover.CORES], DMA], traffic, Load(), tables, 100.0, times)


# --- tuning


@pytest.mark.parametrize(("compute", "comm"), [(1.0, 1.0), (1.3, 2.0), (1.0, 6.0), (2.5, 1.1)])
@pytest.mark.parametrize("alone", [(100.0, 100.0), (100.0, 40.0), (60.0, 100.0)])
def test_slowdowns_give_the_times_that_they_were_taken_from(
    alone: tuple[float, float], compute: float, comm: float
) -> None:
    """`ideal.together_us` is the other way round."""
    ends = alone[0] * compute, alone[1] * comm
    total = ideal.together_us(*alone, compute, comm)
    first = min(ends)
    found = while_both(
        End(alone[0], ends[0] if ends[0] == first else total), End(alone[1], ends[1] if ends[1] == first else total)
    )
    assert found == (pytest.approx(compute), pytest.approx(comm))


def test_one_that_waited_for_the_other_has_the_greatest_slowdown() -> None:
    assert while_both(End(100.0, 100.0), End(50.0, 151.0)) == (1.0, MOST_SLOWDOWN)
    compute, comm = while_both(End(100.0, 150.0, own=1.5), End(50.0, 50.0))
    assert (compute, comm) == (pytest.approx(1.5), 1.0)  # its cores alone


def test_a_partition_costs_what_it_costs_the_worst_of_the_shapes() -> None:
    tuner = Tuner(SimpleNamespace(place=SimpleNamespace(num_cores=132)), 60.0, 0.0)
    tuner._own_by_cores[Bound.MEMORY, False] = ByCores(((116, 1.1), (124, 1.05), (132, 1.0)))
    tuner._compute_by_cores[Bound.MEMORY] = ByCores(((116, 1.1), (124, 1.26), (132, 1.0)))
    cases = {8: 1.26 / 1.05, 16: 1.0}
    for cores, risk in cases.items():
        assert tuner._shape_risk(Setting(Strategy.DMA_PARTITION, cores), Bound.MEMORY) == pytest.approx(risk)
    assert tuner._shape_risk(Setting(Strategy.DMA_PARTITION, 8), Bound.STREAM) == 1  # nothing was measured
    assert tuner._shape_risk(Setting(Strategy.DMA), Bound.MEMORY) == 1


# --- on a stand-in driver, in a process of its own

WORK = """
import json, sys, time
from dovetail.bench.gpu.session import Session
from dovetail.bench.gpu.spec import Bounds
from dovetail.bench.overlap import cost, Spec, lines, pick, rows_of, tune
from dovetail.bench.overlap.energy import PairGauge, moving
from dovetail.bench.overlap.gpu import GpuSite
from dovetail.bench.overlap.measure import measure
from dovetail.overlap import section, timing
from dovetail.overlap.tasks import Load

timing._OPEN_AFTER_S = 0.003  # copies by the host wait for a stream, and so for its gate
found = {}


class Fill:
    repeats = 1

    def __init__(self, compute, session, size_bytes=1 << 14):
        self._memory = session.arena("device", size_bytes).take(size_bytes)
        self._session, self._size, self.site = session, size_bytes, None
        self._name = compute.name

    @property
    def load(self):
        return Load(name=self._name, flops=1e6 * self.repeats, size_bytes=self._size * self.repeats)

    def __call__(self):
        for _ in range(self.repeats):
            self._session.driver.fill(self._memory.data_ptr(), 7, self._size, sites[0].place.stream)

    def forget(self):
        self._memory.fill_(0)

    def is_right(self):
        return bool((self._memory == 7).all())


class Clockwork:
    name, settle_s = "clockwork", 0.0

    def joules(self):
        import time
        return int(time.perf_counter() * 200) * 0.5

    def watts(self):
        return 100.0


class Wrong(Fill):
    def is_right(self):
        return False


sites = []


def run(names, make=Fill, *, known=None, gauge=None, rounds=2, bounds=None):
    with Session("cuda", bounds) as session, GpuSite(session, 4, lambda c: make(c, session)) as site:
        sites[:] = [site]
        spec = Spec(scenarios=pick(names), rounds=rounds)
        samples, notes, memory = measure(site, None, spec, known, gauge)
        return rows_of(samples, memory), notes


small = ["70b-attn-tp8-chunk+all_gather-4K@1/2", "70b-decode-tp8+page-1M@1", "residual+reduce_scatter-1M@2"]
rows, notes = run(small)
found["rows"], found["notes"], found["lines"] = rows, notes, lines(rows)
found["wrong"] = run(small[:1], Wrong)[0]
found["pinned"] = run(small[:2], bounds=Bounds(pin_bytes=1 << 20))[1]
gauge = PairGauge(Clockwork(), pause_s=0.0, window_s=0.05)
import dovetail.bench.overlap.energy as energy
energy.LEAST_US = 0.0
found["energy"] = run(small[:1], gauge=gauge)[0]
tune.PIECES, tune.BESIDE, tune._SHORT_ROUNDS = (5632, 1408), 2, 5
with Session("cuda") as session, GpuSite(session, 4, lambda c: Fill(c, session)) as site:
    sites[:] = [site]
    outcome = tune.measure(site, None, 60.0, time.monotonic())
    found["tuned"] = section.section(outcome.tables)
    found["tune lines"], found["tune notes"] = tune.lines(outcome.tables), outcome.notes
    found["tune rows"] = outcome.rows
    section.parse(found["tuned"], "test")
    found["cost"] = cost.measure(site, session, rounds=3)
    found["cost lines"] = cost.lines(found["cost"])
    short = tune.measure(site, None, 1e-6, 0.0)
    found["short"] = short.notes
    energy._PAUSE_S = 0.0
    made = site.link(tune._job("all_gather"), 4096)
    made.fresh()
    found["moving"] = {str(k): v for k, v in moving(site, tune._IDLE, made.comm, Clockwork())[0].items()}
found["with tables"] = run(small[:1], known=outcome.tables)[0]
print("FOUND", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    more = {
        "DOVETAIL_CUDA_LIBRARY": str(standin.build("cuda")), "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path,
        "DOVETAIL_CHECK": "1", "STANDIN_CORES": "132",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", WORK], env=os.environ | more, capture_output=True, text=True, timeout=110, check=False
    )
    line = next((text for text in done.stdout.splitlines() if text.startswith("FOUND ")), None)
    assert line is not None, done.stderr
    result: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return result


def test_scenarios_on_a_stand_in_driver(found: dict[str, Any]) -> None:
    rows, notes = found["rows"], found["notes"]
    assert notes == []
    settings = [row for row in rows if row["row"] == "setting"]
    assert all(row["correct"] and row["total_us"] > 0 and math.isfinite(row["share_of_ideal"]) for row in settings)
    assert {row["kind"] for row in rows} == {"all_gather", "fetch", "reduce_scatter"}
    for name in {row["scenario"] for row in rows}:
        here = [row["setting"] for row in settings if row["scenario"] == name]
        splits = [f"{s} {k}" for s in ("partition", "priority+partition") for k in (8, 16, 32, 64)]
        movers = ["serial by engines", "serial by cores", "streams", "priority", "streams 32", "priority 32"]
        assert here == [*movers, *splits, "dma", *(f"dma+partition {k}" for k in (2, 4, 8))]
    assert {row["iterations"] for row in rows} == {2}
    sizes = {row["scenario"]: (row["size_bytes"], row["crossing_bytes"]) for row in rows}
    assert list(sizes.values()) == [(3 * 4096, 6 * 4096), (1 << 20, 1 << 20), (3 << 20, 3 << 20)]
    assert {row["policy"] for row in rows if row["row"] == "policy"} == {
        "auto", "auto, tried", "always dma", "always serial", "always streams",
    }  # fmt: skip
    assert found["lines"][-1] == "all correct"


def test_a_wrong_result_is_not_timed(found: dict[str, Any]) -> None:
    assert [(row["correct"], row["strategy"]) for row in found["wrong"]] == [(False, None)]


def test_what_may_not_be_pinned_is_left_out(found: dict[str, Any]) -> None:
    (note,) = found["pinned"]
    assert note.startswith("70b-decode-tp8+page-1M@1 left out: ")
    assert "--pin allows more" in note


def test_energy_of_a_pair(found: dict[str, Any]) -> None:
    joules = {row["strategy"]: row["joules"] for row in found["energy"] if row["row"] == "setting"}
    assert {name for name, joule in joules.items() if joule is not None} == {"streams", "dma"}


def test_c_chooses_once_there_are_tables(found: dict[str, Any]) -> None:
    policies = {row["policy"]: row for row in found["with tables"] if row["row"] == "policy"}
    assert "this run" in policies["auto"]["reason"]
    assert policies["conccl"]["strategy"] in ("partition", "priority+partition")
    assert policies["conccl"]["setting"] in {row["setting"] for row in found["with tables"] if row["row"] == "setting"}


def test_tuning_on_a_stand_in_driver(found: dict[str, Any]) -> None:
    section, notes = found["tuned"], found["tune notes"]
    kinds = {"all_gather", "all_to_all", "reduce_scatter", "fetch", "store", "offload"}
    assert notes == []
    assert set(section["alone"]) == set(section["comm_by_cores"]) == kinds
    assert [cores for cores, _ in section["compute_by_cores"]["compute"]] == [36, 68, 100, 116, 124, 128, 130, 132]
    assert {row[0] for row in section["beside"]} == {
        "streams", "priority", "partition", "priority+partition", "dma", "dma+partition"
    }  # fmt: skip
    assert {(row[2], row[3]) for row in section["beside"]} == {(b, k) for b in Bound for k in kinds}
    assert set(section["compute_alone"]) == set(section["compute_by_cores"]) == set(Bound)
    assert all(row["correct"] for row in found["tune rows"])
    assert any(line.startswith("dma, while both run: computation x") for line in found["tune lines"])
    assert found["short"][0].startswith("out of time: 6 of 12 ")
    assert set(found["moving"]) <= {"engines", "cores"}


# --- usage


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench overlap --suite lunch", "--suite: 'lunch' is not known; there is llama"),
        ("bench overlap --scenario lunch", "--scenario: 'lunch' is none of 70b-attn+all_gather@1"),
        ("bench overlap --strategy lunch", "there are the strategies serial, streams"),
        ("bench overlap --strategy fused", "fused belongs to an operator"),
        ("bench overlap --iters 1", "--iters: 1 must be at least 2"),
        ("bench overlap --ranks 1", "--ranks: 1 must be 2 to 64"),
        ("bench overlap --energy", "--energy is for --backend cuda"),
        ("bench overlap --pin 1G", "--force and --pin are for --backend cuda"),
        ("bench overlap --tokens 1K", "--tokens is for kv"),
        ("bench overlap --variant pcpy", "--variant is for collectives"),
        ("bench overlap --end 1M", "--end is for collectives"),
        ("bench overlap --json /", "is a directory"),
        ("bench overlap --plot /etc/hostname", "--plot: /etc/hostname is no folder"),
        ("bench all_gather --suite llama", "--suite is for overlap"),
        ("bench kv --strategy dma", "--strategy is for overlap"),
        ("tune --only overlap --ranks 2,4", "with --only overlap one number of ranks is measured"),
        ("tune --only overlap --cache 1G", "--cache is for --only kv"),
        ("tune --only overlap --begin 1K", "--begin is for --only coll"),
        ("tune --only coll,overlap", "--only: measure overlap by itself"),
    ],
)
def test_errors_of_usage(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert message in capsys.readouterr().err


def test_a_spec_needs_scenarios() -> None:
    with pytest.raises(ValueError, match="needs a scenario"):
        Spec(scenarios=())


def test_what_a_run_costs_the_host(found: dict[str, Any]) -> None:
    known = found["cost"][0]
    assert [row["pair"] for row in found["cost"]] == ["known"] * 3 + ["new", "new, of new sizes"]
    assert [row["setting"] for row in found["cost"]][1:3] == ["dma", "streams"]
    for row in found["cost"]:
        assert row["correct"]
        assert row["over_us"] == pytest.approx(row["run_us"] - row["hand_us"])
        assert row["hand_us"] > 0
    assert found["cost lines"][0].startswith(f"pair that is known, {known['setting']}: ")
    assert found["cost lines"][-1] == "all correct"


@pytest.mark.parametrize("words", [["--cost"], ["--cost", "--backend", "cuda", "--energy"]])
def test_cost_is_for_a_gpu_and_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "overlap", *words])
    assert ended.value.code == 2
    assert "--cost" in capsys.readouterr().err
