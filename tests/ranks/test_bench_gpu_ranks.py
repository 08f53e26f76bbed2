"""`dovetail bench --backend cuda --peers ranks` and `dovetail tune --backend cuda` over the stand-in driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail import cli, profile
from dovetail.bench import placement, runner, tune
from dovetail.bench.gpu.sharing import Site
from dovetail.bench.spec import COLLECTIVES, Spec
from dovetail.coll import session
from dovetail.measure import evidence, machine, record
from tests import standin
from tests.ranks import workers
from tests.ranks.conftest import Pool


class StandIn:
    """A placement on a stand-in GPU: its memory is the host's, and no stream orders what the host reads."""

    backend = "cuda"
    device = "cuda:0"
    binds_cores = False

    def __init__(self, *, force: bool = False) -> None:
        self.force = force

    def survey(self, ranks: int) -> Site:
        return Site(gpus=1, nccl=(2, 29, 1))

    def facts(self) -> dict[str, Any]:
        return {"name": "stand-in 0"}

    def open(self, rank: int) -> None:
        workers.use("standin")

    def group_backend(self, spec: Spec) -> str:
        return "gloo"

    def empty(self, num_elements: int, dtype: torch.dtype, *, symmetric: bool) -> torch.Tensor:
        return workers.make("symmetric" if symmetric else "ordinary", 0, num_elements, dtype)

    def until_done(self, call: Callable[[], object]) -> Callable[[], object]:
        def whole() -> None:
            call()
            workers.settle()

        return whole


class Spoiling(StandIn):
    """One variant of ours leaves a wrong byte on rank 1."""

    def open(self, rank: int) -> None:
        super().open(rank)
        right = dovetail.all_gather_into_tensor

        def wrong(out: torch.Tensor, inp: torch.Tensor, **how: Any) -> None:
            right(out, inp, **how)
            workers.settle()
            if rank == 1 and how.get("variant") == "pcpy":
                out.view(torch.uint8)[-1] ^= 1

        dovetail.all_gather_into_tensor = wrong


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, forked: None) -> Path:
    """Ranks find a stand-in GPU on which the self-test has passed; the profile that says so."""
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(standin.build("cuda")))
    monkeypatch.setenv("DOVETAIL_GPU_SEGMENT", "4M")
    monkeypatch.setenv("DOVETAIL_PROFILE", str(tmp_path / "profile.json"))
    monkeypatch.delenv("DOVETAIL_REQUIRE", raising=False)
    monkeypatch.setattr(placement, "Cuda", StandIn)
    for section, facts in ((evidence.SELFTEST, {"passed": True}), (evidence.ENGINES, {"paths": {"d2d": "SM kernel"}})):
        evidence.save(section, "cuda", evidence.stamped("stand-in 0", 13000, facts))
    return tmp_path / "profile.json"


def test_tune_then_bench_all(
    gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is tuned for the GPU stands beside what was there, and `auto` takes it."""
    monkeypatch.setattr(tune, "_MOST_S", 0.02)
    before = json.loads(gpu.read_text())["sections"]
    cli_main("tune --backend cuda --ranks 2 -b 1K -e 1K --budget 100s --json", tmp_path / "tune.json")
    measured = {(row["collective"], row["variant"]) for row in record.read(tmp_path / "tune.json", kind="tune").rows}
    assert {("all_gather", "torch"), ("all_gather", "pcpy"), ("all_reduce", "twoshot")} <= measured
    data = json.loads(gpu.read_text())
    assert {name: data["sections"][name] for name in before} == before
    assert set(data["sections"]["coll"]) == {"cuda"}
    assert set(data["sections"]["coll"]["cuda"]) == set(COLLECTIVES)
    assert profile.load(gpu, machine.profile_key([2]))[0] is not None
    # Doctored, so that the choice can only come from this file.
    data["sections"]["coll"]["cuda"]["all_gather"]["2"] = [[None, "bcst"]]
    gpu.write_text(json.dumps(data))
    capsys.readouterr()

    words = "bench all --backend cuda --peers ranks --ranks 2 -b 1K -e 4K -f 4 --quick --iters 3 --json"
    cli_main(words, tmp_path / "bench.json")
    kept = record.read(tmp_path / "bench.json", kind="bench")
    assert [(row["collective"], row["backend"], row["size_bytes"]) for row in kept.rows] == [
        (collective, backend, size)
        for collective in COLLECTIVES
        for size in (1024, 4096)
        for backend in ("cuda", "gloo")
    ]
    assert all(row["correct"] and row["time_us"] > 0 and row["requested"] in ("auto", "gloo") for row in kept.rows)
    assert {(row["peers"], row["gpus"], row["mps"]) for row in kept.rows} == {("ranks", 1, False)}
    assert {(row["backend"], row["tensors"]) for row in kept.rows} == {("cuda", "symmetric"), ("gloo", "ordinary")}
    ours = [row for row in kept.rows if (row["collective"], row["backend"]) == ("all_gather", "cuda")]
    assert all(row["variant"] == "bcst" and row["reason"].startswith("profile of ") for row in ours)
    assert all(row["limit_us"] > 0 for row in ours)
    assert kept.machine["gpu"] == {"name": "stand-in 0"}
    shown = capsys.readouterr()
    assert "all_gather, 2 ranks on 1 GPU, float32, symmetric tensors" in shown.out
    assert "slowest rank's median, until the GPU is done" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if line.endswith("all correct")] == list(COLLECTIVES)
    assert "note: nccl left out: NCCL needs a GPU for each rank, and 2 ranks share 1 GPU" in shown.err
    assert "note: nccl-ce left out: NCCL needs" in shown.err
    assert "note: 2 ranks share 1 GPU and MPS is off: their kernels run in turns" in shown.err
    assert "nvidia-cuda-mps-control -d" in shown.err


@pytest.mark.usefixtures("gpu")
def test_wrong_result_has_no_time() -> None:
    spec = Spec(
        collectives=("all_gather",), ranks=2, sizes=(1000,), variants=("b2b", "pcpy"), backend="cuda",
        tensors="ordinary", dtype="bfloat16", iterations=2,
    )  # fmt: skip
    outcome = runner.run(spec, placement=Spoiling())
    assert [(row["requested"], row["correct"], row["tensors"]) for row in outcome.rows] == [
        ("b2b", True, "ordinary"), ("pcpy", False, "ordinary"),
    ]  # fmt: skip
    assert outcome.rows[1]["time_us"] is None
    assert not outcome.correct


def test_explain_for_a_gpu(gpu: Path, spare_pool: Callable[..., Pool]) -> None:
    """It asks the driver for a name and takes no GPU; in one rank, so without any other."""

    def job() -> dict[str, Any]:
        found: dict[str, Any] = {"cuda": dovetail.explain("all_reduce", 4096, device="cuda:0")}
        found["cpu"] = dovetail.explain("all_reduce", 4096, device="cpu")
        found["same"] = dovetail.explain("all_reduce", 4096) == found["cpu"]
        found["asked"] = dovetail.explain("all_reduce", 4096, variant="oneshot", device=torch.device("cuda", 0))
        for device in ("cuda:1", "meta"):
            with pytest.raises((dovetail.errors.NotSupported, ValueError)) as error:
                dovetail.explain("all_reduce", 4096, device=device)
            found[device] = str(error.value)
        found["untouched"] = session.world().gpu is None
        return found

    profile_of = {"DOVETAIL_PROFILE": str(gpu)}
    (found,) = spare_pool(1, profile_of).run(job)
    assert found["cuda"].variant == "twoshot"
    assert found["cuda"].reason.startswith("shipped default, 2 ranks (nearest to 1), larger sizes; the profile of ")
    assert found["cpu"].variant == "twoshot"
    assert found["same"]
    assert found["untouched"]
    assert found["asked"] == ("oneshot", "asked for")
    assert found["cuda:1"] == "there is no cuda device 1: this process sees 1"
    assert found["meta"] == "device must be the CPU or a GPU, such as 'cuda', not meta"
    gpu.unlink()
    (found,) = spare_pool(1, profile_of).run(job)
    assert found["cuda"] == ("torch", "the self-test has not run on stand-in 0: run `dovetail doctor --selftest`")


def cli_main(line: str, file: Path) -> None:
    """The command line, which must succeed."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*line.split(), str(file)])
    assert ended.value.code in (None, cli.OK)
