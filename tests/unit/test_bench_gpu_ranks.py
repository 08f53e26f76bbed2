"""Ranks on GPUs without any: what may be asked for, what cannot run where, and the lines about it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail import cli
from dovetail.bench import placement, runner
from dovetail.bench.gpu import sharing
from dovetail.bench.gpu.sharing import Site
from dovetail.bench.spec import GPU_BASELINES, Spec
from dovetail.bench.tune import section, winners
from dovetail.bench.verdict import verdicts
from dovetail.coll import baseline
from dovetail.coll.recipes import Collective
from dovetail.errors import NotSupported
from dovetail.measure import gpu
from dovetail.plan.step import ReduceOp

GOOD: dict[str, Any] = {"collectives": ("all_gather",), "ranks": 4, "sizes": (1024,), "backend": "cuda"}
RANKS = "--backend cuda --peers ranks"


def test_spec_travels_and_knows_who_shares() -> None:
    spec = Spec(**GOOD, baselines=GPU_BASELINES, gpus=2)
    assert Spec.from_json(spec.to_json()) == spec
    assert spec.shares_gpus
    assert not Spec(**GOOD, gpus=4).shares_gpus
    assert not Spec(**GOOD | {"backend": "cpu"}).shares_gpus


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "tpu"}, "backend: 'tpu' is not known; there are cpu, cuda"),
        ({"baselines": ("openmpi",)}, "baseline: 'openmpi' is not known; there are gloo, nccl, nccl-ce"),
    ],
)
def test_spec_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec(**GOOD | change)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"bench all_gathers {RANKS}", "collective: 'all_gathers' is not known; there are all_gather, all_to_all"),
        (f"bench all_gather {RANKS} --baseline openmpi", "there are gloo, nccl, nccl-ce"),
        (f"bench all_gather {RANKS} --energy", "--energy is for --backend cuda with host peers"),
        (f"bench all_gather {RANKS} --pin 1G", "--pin is for --backend cuda with host peers"),
        (f"bench copies {RANKS}", "'copies' is measured with host peers: leave --peers out"),
        (f"bench all_gather {RANKS} --ranks 0", "--ranks: 0 must be 2 to 64"),
        (f"bench all_gather {RANKS} --variant graph", "'graph' is not known; there are auto, pcpy"),
        ("bench all_gather --backend cuda --peers pipes", "peers: 'pipes' is not known; there are host, ranks"),
        ("bench all_gather --backend cuda --baseline gloo", "--baseline is for --backend cpu and --peers ranks"),
        ("bench all_gather --peers ranks", "--peers is for --backend cuda"),
        ("bench all_gather --force", "--force is for --backend cuda"),
        ("tune --backend hip", "backend: 'hip' is not known; there are cpu, cuda"),
        ("tune --force", "--force is for --backend cuda"),
    ],
)
def test_usage(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(line.split())
    assert ended.value.code == cli.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranks", "site", "left"),
    [
        (2, Site(gpus=2, nccl=(2, 28, 9)), {}),
        (4, Site(gpus=2, nccl=(2, 28, 9)), {"nccl": "4 ranks share 2 GPUs", "nccl-ce": "4 ranks share 2 GPUs"}),
        (2, Site(gpus=2, nccl=(2, 27, 5)), {"nccl-ce": "NCCL 2.27.5 has no collectives on copy engines, 2.28"}),
        (2, Site(gpus=2), {"nccl": "this torch has no NCCL", "nccl-ce": "this torch has no NCCL"}),
    ],
    ids=["all-run", "shared", "old", "none"],
)
def test_baselines_that_cannot_run_are_left_out(ranks: int, site: Site, left: dict[str, str]) -> None:
    kept, notes = sharing.fitting(GPU_BASELINES, ranks, site)
    assert kept == tuple(name for name in GPU_BASELINES if name not in left)
    assert len(notes) == len(left)
    for note, (name, why) in zip(notes, left.items(), strict=True):
        assert note.startswith(f"{name} left out: ")
        assert why in note
    for name in left:
        with pytest.raises(NotSupported, match=f"DOVETAIL_REQUIRE names {name}, but "):
            sharing.fitting((name,), ranks, site, {name})


def test_the_cpu_has_no_lines_about_gpus() -> None:
    assert sharing.fitting(("openmpi", "gloo"), 8, Site()) == (("openmpi", "gloo"), [])
    assert sharing.mps_notes(8, Site()) == []


def test_line_about_mps() -> None:
    assert sharing.mps_notes(2, Site(gpus=2)) == []
    assert sharing.mps_notes(4, Site(gpus=1, mps="on (control daemon at /tmp/nvidia-mps)")) == []
    (line,) = sharing.mps_notes(4, Site(gpus=1))
    assert line.startswith("4 ranks share 1 GPU and MPS is off: their kernels run in turns")
    assert "nvidia-cuda-mps-control -d" in line
    (line,) = sharing.mps_notes(
        4, Site(gpus=2, mps="off: CUDA_MPS_PIPE_DIRECTORY is /x, but no control daemon is there")
    )
    assert "4 ranks share 2 GPUs and MPS is off (CUDA_MPS_PIPE_DIRECTORY is /x, but no control" in line


class TestSurvey:
    asked: list[bytes]

    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = []
        self.driver = SimpleNamespace(num_devices=lambda: 3, device_uuid=lambda index: bytes([index]) * 16)
        monkeypatch.setattr("dovetail.hw.gpu.driver.load", lambda backend: self.driver)
        monkeypatch.setattr(gpu, "refuse_if_busy", lambda device, force: self.asked.append(device))
        monkeypatch.setattr(gpu, "mps", lambda: "off")

    def test_looks_at_the_gpus_of_the_ranks_only(self) -> None:
        assert sharing.survey(2, force=False).gpus == 3
        assert self.asked == [bytes(16), b"\1" * 16]

    def test_without_a_gpu(self) -> None:
        self.driver.num_devices = lambda: 0
        with pytest.raises(NotSupported, match="shows this process no GPU"):
            sharing.survey(2, force=False)


def test_without_a_gpu_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotSupported, match="finds no GPU; `dovetail doctor` says why"):
        runner.run(Spec(**GOOD))


def test_process_group_is_what_a_user_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    where = placement.of("cuda")
    assert where.group_backend(Spec(**GOOD, gpus=4)) == "cpu:gloo,cuda:nccl"
    assert where.group_backend(Spec(**GOOD, gpus=1)) == "gloo"
    assert placement.of("cpu").group_backend(Spec(**GOOD | {"backend": "cpu"})) == "gloo"


def test_rows_say_what_the_ranks_ran_on() -> None:
    rows: list[dict[str, Any]] = [{"backend": "cuda"}, {"backend": "nccl"}]
    sharing.describe(rows, 4, Site(gpus=8, nccl=(2, 28, 9), mps="on (x)"))
    assert rows == [
        {"backend": "cuda", "peers": "ranks", "gpus": 4, "mps": True},
        {"backend": "nccl", "peers": "ranks", "gpus": 4, "mps": True, "library": "NCCL 2.28.9"},
    ]


def row(backend: str, variant: str, time_us: float) -> dict[str, Any]:
    return {"collective": "all_gather", "backend": backend, "variant": variant, "requested": variant, "ranks": 2,
            "size_bytes": 1024, "time_us": time_us, "correct": True}  # fmt: skip


def test_rows_of_a_gpu_are_ours_too() -> None:
    rows = [row("cuda", "pcpy", 10.0), row("cuda", "torch", 40.0), row("nccl", "nccl", 20.0)]
    (verdict,) = verdicts(rows)
    assert verdict.line().startswith("all_gather pcpy: nccl takes 2.00x our time")
    assert section(winners(rows, "cuda"), "cuda") == {"cuda": {"all_gather": {"2": [[None, "pcpy", 10.0]]}}}
    assert winners(rows) == []


# --- variant torch on GPU tensors


def process_group(name: str | None) -> Any:
    def backend(device: torch.device) -> Any:
        if name is None:
            raise RuntimeError("no backend for device cuda")
        return SimpleNamespace(name=lambda: name)

    return SimpleNamespace(_get_backend=backend)


@pytest.mark.parametrize(("name", "serves"), [("nccl", True), ("gloo", False), (None, False)])
def test_the_callers_nccl_serves_gpu_tensors(name: str | None, serves: bool) -> None:
    assert baseline._serves_gpus(process_group(name)) is serves


def test_staging_leaves_an_output_inside_its_input_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only results come back: the input, if it did, would lie over them."""
    monkeypatch.setattr(baseline, "_pinned_like", torch.empty_like)
    inp = torch.arange(8.0)
    out = inp[4:]

    def reduce_scatter(output: torch.Tensor, given: torch.Tensor, options: Any) -> Any:
        assert output.data_ptr() != out.data_ptr()
        assert torch.equal(given, torch.arange(8.0))
        output.copy_(given[4:] * 2)
        return SimpleNamespace(wait=lambda: True)

    pg = SimpleNamespace(_reduce_scatter_base=reduce_scatter)
    work = baseline._run_staged(pg, None, Collective.REDUCE_SCATTER, (out, inp), ReduceOp.SUM, 0, None)  # type: ignore[arg-type]
    assert work.wait()
    assert inp.tolist() == [0, 1, 2, 3, 8, 10, 12, 14]
