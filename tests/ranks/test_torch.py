"""Beside torch.distributed: attaching to it, its groups and meshes, torchrun, and the same values as gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from tests.ranks import workers

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import dovetail
attach = sys.argv[1] == "attach"
if attach:
    dist.init_process_group("gloo")
g = dovetail.init(timeout=60)
t = torch.full((1000,), float(g.rank + 1))
dovetail.all_reduce(t)
assert t[0] == sum(range(1, g.size + 1)), t[0]
if attach:
    assert (g.rank, g.size) == (dist.get_rank(), dist.get_world_size())
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[g.rank // 2]
    out, want = torch.empty(20), torch.empty(20)
    inp = torch.arange(10.0) + 100 * g.rank
    dovetail.all_gather_into_tensor(out, inp, group=mine)
    dist.all_gather_into_tensor(want, inp, group=mine)
    assert torch.equal(out, want)
    b = torch.full((5,), float(g.rank))
    dovetail.broadcast(b, src=2 * (g.rank // 2) + 1, group=mine)
    assert b[0] == 2 * (g.rank // 2) + 1
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, y = torch.ones(7) * g.rank, torch.ones(7) * g.rank
    dovetail.all_reduce(x, group=mesh["a"])
    dist.all_reduce(y, group=mesh["a"].get_group())
    assert torch.equal(x, y)
    try:
        dovetail.all_reduce(x, group=mesh)
        raise SystemExit("a mesh of two dimensions was taken")
    except ValueError as error:
        assert "one dimension" in str(error)
    z = torch.ones(9) * g.rank
    dovetail.all_reduce(z, group=mine, variant="torch")
    assert z[0] == 4 * (g.rank // 2) + 1
dovetail.barrier()
print("well", g.rank)
if attach:
    dist.destroy_process_group()  # gloo's threads don't outlive Python
"""


@pytest.mark.parametrize(("how", "ranks"), [("attach", 4), ("alone", 2)])
def test_torchrun(tmp_path: Path, how: str, ranks: int) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")} | {"OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, str(script), how]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("well") == ranks


@pytest.mark.parametrize("world", [2, 3])
def test_same_values_as_gloo(pools: Any, world: int) -> None:
    """Every collective on variant `torch`: what the user would run without us gives the same bytes."""

    def job() -> None:
        g = workers.world()
        n = 120
        inp = workers.data(1, g.rank, n * g.size, torch.float32)
        piece = inp[:n].contiguous()

        def pair(make: Any, call: Any) -> None:
            ours, theirs = make(), make()
            call(ours, "auto")
            call(theirs, "torch")
            assert workers.same(ours, theirs)

        pair(lambda: torch.empty(n * g.size), lambda o, v: dovetail.all_gather_into_tensor(o, piece, variant=v))
        pair(lambda: torch.empty(n * g.size), lambda o, v: dovetail.all_to_all_single(o, inp, variant=v))
        pair(lambda: piece.clone().int(), lambda t, v: dovetail.all_reduce(t, variant=v))
        whole, parts = inp.int(), list(inp.split(n)) if g.rank == 0 else None
        pair(lambda: torch.empty(n).int(), lambda o, v: dovetail.reduce_scatter_tensor(o, whole, variant=v))
        pair(piece.clone, lambda t, v: dovetail.broadcast(t, g.size - 1, variant=v))
        pair(lambda: torch.empty(n), lambda t, v: dovetail.scatter(t, parts, 0, variant=v))

        def collect(t: torch.Tensor, v: str) -> None:
            dovetail.gather(piece, list(t.view(g.size, n)) if g.rank == 0 else None, 0, variant=v)

        pair(lambda: torch.zeros(n * g.size), collect)
        dovetail.barrier(variant="torch")
        splits = [3 * (r + 1) for r in range(g.size)]
        gets = [3 * (g.rank + 1)] * g.size
        pair(
            lambda: torch.empty(sum(gets)),
            lambda o, v: dovetail.all_to_all_single(o, inp[: sum(splits)], gets, splits, variant=v),
        )

    pools.get(world).run(job)


def test_disabled_and_forced(spare_pool: Any) -> None:
    """DOVETAIL_DISABLE and DOVETAIL_VARIANT of rank 0 are in force on all ranks."""

    def job() -> tuple[str, str]:
        choice = dovetail.explain("all_gather", 4096)
        t = torch.ones(4)
        dovetail.all_reduce(t)
        assert t[0] == 2
        return tuple(choice)  # type: ignore[return-value]

    assert spare_pool(2, {"DOVETAIL_DISABLE": "1"}).run(job) == [("torch", "DOVETAIL_DISABLE")] * 2
    assert spare_pool(2, {"DOVETAIL_VARIANT": "bcst"}).run(job) == [("bcst", "DOVETAIL_VARIANT")] * 2


def test_alone() -> None:
    """Without any launcher a process is a world of one, with the same values."""
    code = (
        "import torch, dovetail\n"
        "t = torch.arange(5.0)\n"
        "dovetail.all_reduce(t)\n"
        "out = torch.empty(5)\n"
        "dovetail.all_gather_into_tensor(out, t)\n"
        "assert out.tolist() == [0, 1, 2, 3, 4], out\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
