"""`dovetail simulate` and `dovetail trace`: rows, records, plots, and errors of usage. Every output says simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit import simlib

from dovetail import cli
from dovetail.measure import record
from dovetail.sim import files


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    return int(ended.value.code or 0)


def test_a_collective_by_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    words = "simulate collective --machine mi300x --collective all_gather --variant all --prelaunch both -b 1K -e 1M"
    assert run(*words.split(), "-f", "32", "--json", str(out)) == 0
    assert "simulated" in capsys.readouterr().out
    found = record.read(out, kind="simulate_collective")
    assert found.simulated
    assert len(found.rows) == 3 * 4 * 2
    row = next(r for r in found.rows if r["variant"] == "bcst" and r["prelaunch"] and r["total_bytes"] == 1024)
    assert row["speedup_over_pcpy"] == pytest.approx(3.67, rel=0.2)
    assert sum(row["phases"].values()) == pytest.approx(row["time_us"])
    assert sum(row[f"{p}_pct"] for p in ("control", "schedule", "copy", "sync")) == pytest.approx(100)
    base = [r for r in found.rows if r["variant"] == "pcpy" and not r["prelaunch"]]
    assert {r["speedup_over_pcpy"] for r in base} == {1.0}


def test_a_plot_is_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "p.html"
    words = "simulate collective --collective all_to_all --variant pcpy,swap -b 1K -e 1M -f 32"
    assert run(*words.split(), "--plot", str(page)) == 0
    text = page.read_text()
    assert "simulated" in text
    assert "swap" in text
    assert 'src="http' not in text
    assert run(*words.split(), "--plot", str(tmp_path / "p.png")) == 2
    assert f"--plot: {tmp_path / 'p.png'} must end in .html" in capsys.readouterr().err


def test_one_copy_has_the_phases_of_a_table(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    assert run("simulate", "collective", "--collective", "copy", "-b", "1K", "-e", "1K", "--json", str(out)) == 0
    (row,) = record.read(out).rows
    assert row["ranks"] == 2
    assert row["control_pct"] == pytest.approx(5, abs=2)


def test_what_if(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "w.json"
    assert run("simulate", "whatif", "-b", "1K", "-e", "1M", "-f", "1024", "--json", str(out)) == 0
    text = capsys.readouterr().out
    assert "simulated" in text
    assert "parallel submitter: a host thread for each rank" in text
    assert {r["change"] for r in record.read(out, kind="simulate_whatif").rows} >= {"as it is", "all together"}


def test_a_fit_writes_a_machine_that_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    speedups, phases = simlib.DATA / "mi300x_all_gather.json", simlib.DATA / "mi300x_phases.json"
    tables = ("--table", f"all_gather={speedups}", "--table", str(phases))
    assert run("simulate", "fit", "--check", *tables) == 0
    assert "at 21 of 22 sizes" in capsys.readouterr().out
    mine = tmp_path / "mine.toml"
    free = "host.submit_ns,engine.poll_ns"
    assert run("simulate", "fit", *tables, "--free", free, "--output", str(mine), "--name", "mine") == 0
    told = capsys.readouterr()
    assert "held out" in told.out
    assert "warning" not in told.err
    machine = files.load(mine)
    assert machine.name == "mine"
    assert machine.title == "mine, fitted from mi300x to mi300x_all_gather.json, mi300x_phases.json, every second size"
    assert "mi300x_all_gather.json, mi300x_phases.json, every second size" in machine.sources["host.submit_ns"].note
    assert run("simulate", "collective", "--machine", str(mine), "-b", "1K", "-e", "1K") == 0


@pytest.mark.parametrize("noise", [1, 9], ids=["smooth", "noisy"])
def test_a_profile_becomes_a_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], noise: int) -> None:
    """One that is off by far is told to be."""
    sizes = [1 << k for k in range(10, 22)]
    points = [
        [size, variant, (3 + size / 5000) * noise ** (k % 4)]
        for k, size in enumerate(sizes) for variant in ("pcpy", "b2b", "pull")
    ]  # fmt: skip
    profile = {"schema": "dovetail.profile/1", "sections": {"points": {"cpu": {"all_gather": {"2": points}}}}}
    path, mine = tmp_path / "profile.json", tmp_path / "mine.toml"
    path.write_text(json.dumps(profile))
    assert run("simulate", "fit", "--machine", "cpu-2core", "--table", str(path), "--output", str(mine)) == 0
    assert "profile.json" in files.load(mine).sources["engine.copy_gbps"].note
    assert ("do not read its times" in capsys.readouterr().err) == (noise > 1)


SYSTEM = {
    "scheduling-policy": "LIFO", "endpoint-delay": 10, "active-chunks-per-dimension": 1, "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring", "ring"], "all-gather-implementation": ["ring", "ring"],
    "reduce-scatter-implementation": ["ring", "ring"], "all-to-all-implementation": ["ring", "ring"],
    "collective-optimization": "localBWAware", "local-mem-bw": 1600, "boost-mode": 0,
}  # fmt: skip


@pytest.fixture
def astra(tmp_path: Path) -> tuple[str, ...]:
    network, system = tmp_path / "N.yml", tmp_path / "S.json"
    network.write_text("topology: [Ring, Ring]\nnpus_count: [4, 4]\nbandwidth: [25.0, 25.0]\nlatency: [700.0, 700.0]\n")
    system.write_text(json.dumps(SYSTEM))
    return "simulate", "astra", "--network", str(network), "--system", str(system)


def test_astra_to_the_nanosecond_and_back_through_its_files(
    astra: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, there = tmp_path / "a.json", tmp_path / "to_astra_sim"
    words = ("--collective", "all_to_all", "--size", "4194304")
    assert run(*astra, *words, "--json", str(out), "--write", str(there)) == 0
    text = capsys.readouterr().out
    assert "simulated" in text
    assert "wrote 16 traces" in text
    found = record.read(out, kind="simulate_astra")
    assert found.simulated
    assert [row["time_ns"] for row in found.rows] == [314300]  # a row of tests/data/astra_golden.json
    again = ("simulate", "astra", "--network", str(there / "network.yml"), "--system", str(there / "system.json"))
    assert run(*again, "--workload", str(there / "all_to_all"), "--json", str(out)) == 0
    assert [row["time_ns"] for row in record.read(out).rows] == [314300] * 16


def test_the_same_network_with_contention(astra: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    words = ("--mode", "links", "--collective", "all_to_all", "--size", "4M", "--json", str(out))
    assert run(*astra[:4], *words) == 0
    (row,) = record.read(out).rows
    assert row["time_ns"] == row["limit_ns"] < 314300


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--collective all_to_all", "give either --collective with --size, or --workload"),
        ("--collective all_to_all --size 1M --workload x", "give either --collective with --size, or --workload"),
        ("--collective all_to_all --size 1M --mode fast", "--mode: 'fast' is not known; there are astra, links"),
        ("--collective all_to_al --size 1M", "all_to_al"),
        ("--workload nowhere", "nowhere.0.et"),
        ("--workload nowhere --mode links", "--mode links prices a collective"),
    ],
)
def test_errors_of_astra_usage(
    astra: tuple[str, ...], words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*astra, *words.split()) == 2
    assert message in capsys.readouterr().err


def test_astra_needs_its_system_file(astra: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*astra[:4], "--collective", "all_reduce", "--size", "1M") == 2
    assert "--system is missing" in capsys.readouterr().err


def test_a_network_by_its_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "n.json"
    words = "simulate network --shape ring:8,ring:16 --algorithm all --bandwidth 50 --latency 500,250 -b 64M -e 64M"
    assert run(*words.split(), "--json", str(out), "--plot", str(tmp_path / "n.html")) == 0
    assert "simulated" in capsys.readouterr().out
    found = {row["algorithm"]: row for row in record.read(out, kind="simulate_network").rows}
    assert set(found) == {"ring", "direct", "dimension"}
    assert found["direct"]["time_us"] == pytest.approx((1 << 26) * 16 / (8 * 50) / 1000 + 4 * 0.5 + 8 * 0.25, rel=1e-3)


def test_rccl_on_the_links_of_mi300x(tmp_path: Path) -> None:
    out = tmp_path / "n.json"
    words = "simulate network --machine mi300x --collective all_reduce -b 16M -e 16G -f 4"
    assert run(*words.split(), "--json", str(out)) == 0
    found = {row["size_bytes"]: row["time_us"] for row in record.read(out).rows}
    for row in json.loads((simlib.DATA / "mi300x_rccl_all_reduce.json").read_text())["rows"]:
        if row["size_bytes"] >= 16 << 20:
            assert found[row["size_bytes"]] == pytest.approx(row["time_us"], rel=0.05)


def test_the_machines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("simulate", "machines") == 0
    assert "8x AMD Instinct MI300X" in capsys.readouterr().out


def test_a_trace_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.json"
    assert run("trace", "--machine", "h200-nvl8", "--variant", "b2b", "--size", "8M", "-o", str(out)) == 0
    assert "us simulated" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("simulate collective --machine mi300", "no machine 'mi300'; shipped are"),
        ("simulate collective --collective all_gathr", "collective must be one of all_gather"),
        ("simulate collective --variant swap", "--variant: 'swap' is not known; there are pcpy, bcst, b2b, pull"),
        ("simulate collective --prelaunch maybe", "--prelaunch: 'maybe' is not known; there are both, on, off"),
        ("simulate collective --ranks 9", "this all_gather is for 9 ranks, machine mi300x has 8"),
        ("simulate fit --check --output x.toml --table none.json", "--check changes nothing"),
        ("simulate whatif --machine cpu-2core", "machine cpu-2core has no links"),
        ("simulate network --shape ring:99999999", "is too large to simulate"),
        ("simulate collective -b 2K -e 1K", "the first must be above 0 and not above the last"),
        ("simulate whatif --ranks 99", "is for 99 ranks"),
        ("simulate fit --table none.json", "none.json"),
        ("simulate network", "give either --machine or --shape"),
        ("simulate network --shape ring:8 --machine mi300x", "give either --machine or --shape"),
        ("simulate network --shape ring", "'ring' must be KIND:RANKS with one of ring, switch, fully_connected"),
        ("simulate network --shape ring:4,ring:4,ring:4 --bandwidth 1,2", "2 figures for 3 dimensions; give one"),
        ("simulate network --shape ring:4 --bandwidth fast", "'fast' must be numbers"),
        ("simulate network --shape ring:4 --ranks 3", "--ranks is for --machine"),
        ("simulate network --shape ring:4 --algorithm tree", "algorithm must be one of ring, direct, dimension"),
        ("simulate network --machine cpu-2core", "machine cpu-2core has no links"),
        ("trace --machine mi300x --ranks 9", "is for 9 ranks"),
        ("trace --machine mi300x --ranks 0", "Invalid value for '--ranks'"),
        ("simulate collective -n 0", "Invalid value for '--ranks'"),
        ("simulate whatif -n 0", "Invalid value for '--ranks'"),
        ("simulate network --machine mi300x -n 0", "Invalid value for '--ranks'"),
        ("trace --machine mi300x --size 3x", "3x"),
    ],
)
def test_errors_of_usage(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words.split()) == 2
    assert message in capsys.readouterr().err


def test_sim_needs_no_torch() -> None:
    """With torch, yaml and plotly out of reach, `dovetail.sim` and its parts can still be imported and used."""
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "yaml", "plotly", "triton"):
            raise ImportError(f"{name} is out of reach")
sys.meta_path.insert(0, Refuse())
import dovetail.sim, dovetail.sim.fit, dovetail.sim.whatif, dovetail.sim.net, dovetail.sim.astra
from dovetail.sim import Case, load, plan_of, price
case = Case(collective="all_gather", variant="b2b", total_bytes=1 << 20, ranks=8)
print(price(plan_of(case), load("mi300x")).time_ns)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 0
