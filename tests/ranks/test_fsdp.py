"""FSDP2 with our hooks beside stock FSDP2 on gloo: the same bits in losses, gradients and parameters.

Buffers are poisoned with NaN whenever they are lent, so one that is lent while somebody still reads or writes it shows.
Two ranks: a sum of two has one order. More: gloo's order is its own, so stock is compared with a tolerance, and bit for
bit with a stock FSDP2 whose reduce-scatter sums in rank order.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dovetail
from dovetail.coll import session
from dovetail.errors import NotSupported
from dovetail.overlap.fsdp.auto import Auto
from tests.ranks import workers
from tests.ranks.conftest import Pool

ROOT = Path(__file__).parents[2]
WIDTH, TOKENS, BLOCKS = 24, 10, 3


@dataclass(frozen=True)
class Case:
    """How the model is sharded and trained."""

    reshard: bool | int = True
    prefetch: int = 0
    micro: int = 1  #: forwards and backwards per step
    sync_each: bool = False  #: gradients are reduced in each of them, not in the last only
    dtype: torch.dtype = torch.float32
    mixed: bool = False  #: parameters in bf16, reductions in fp32
    keep_grads: bool = False  #: zeroed, not dropped
    replicas: int = 1  #: HSDP: groups that share the parameters


CASES = {
    "plain": Case(),
    "kept after forward": Case(reshard=False),
    "two ahead": Case(prefetch=2),
    "two ahead, kept": Case(prefetch=2, reshard=False),
    "accumulated": Case(micro=3, prefetch=1),
    "accumulated, reduced each time": Case(micro=2, sync_each=True, prefetch=2),
    "mixed precision": Case(mixed=True, prefetch=2),
    "bf16": Case(dtype=torch.bfloat16),
    "fp64: sum, then divided": Case(dtype=torch.float64),
    "gradients zeroed in place": Case(keep_grads=True, micro=2),
}
FOUR = {
    "two ahead": Case(prefetch=2),
    "mixed precision": Case(mixed=True, prefetch=2),
    "accumulated, reduced each time": Case(micro=2, sync_each=True, prefetch=2),
    "kept by pairs after forward": Case(reshard=2, prefetch=1),
    "two groups of two": Case(replicas=2, prefetch=1),
}


class Block(nn.Module):
    """Attention and an MLP; its sizes are not multiples of the number of ranks, so FSDP pads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 37), nn.Linear(37, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ v)
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks between two layers of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * 1  # FSDP warns of a view


def sharded(case: Case) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    shape = (dist.get_world_size(),) if case.replicas == 1 else (case.replicas, dist.get_world_size() // case.replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :])
    torch.manual_seed(5)
    model = Model().to(case.dtype)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.mixed else MixedPrecisionPolicy()
    blocks = list(model.blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for k, block in enumerate(blocks):
        if case.prefetch:
            block.set_modules_to_forward_prefetch(blocks[k + 1 : k + 1 + case.prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, k - case.prefetch) : k][::-1])
    return model


def trained(model: Any, case: Case, steps: int = 3, late: bool = False) -> list[torch.Tensor]:
    """Losses, gradients of this rank, and its parameters after all. `late`: this rank is slow to compute."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    handles = [m.register_forward_hook(lambda *_: time.sleep(1e-3)) for m in model.blocks] if late else []
    for step in range(steps):
        for micro in range(case.micro):
            model.set_requires_gradient_sync(case.sync_each or micro == case.micro - 1)
            x = workers.data(10 * step + micro, dist.get_rank(), 2 * TOKENS * 7, torch.float32)
            loss = model(x.view(2, TOKENS, 7).to(case.dtype)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=not case.keep_grads)
    for handle in handles:
        handle.remove()
    return [*seen, *(p.to_local().detach().clone() for p in model.parameters())]


def alike(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(mine) == len(theirs)
    differ = [k for k, (a, b) in enumerate(zip(mine, theirs, strict=True)) if not workers.same(a, b)]
    assert not differ, f"{len(differ)} of {len(mine)} tensors, the first is {differ[0]}"
    assert all(t.isfinite().all() for t in mine)


def begin(path: str) -> None:
    """Once per process: torch's group beside ours, and blocks that are NaN when they are lent."""
    if dist.is_initialized():
        return
    group = session.world()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size)
    from dovetail.overlap.fsdp import buffers

    plain = buffers.Block.lend
    buffers.Block.lend = lambda self: plain(self).fill_(0xFF)  # type: ignore[method-assign]


class Ranks:
    """Pools with torch's process group, one at a time."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def run(self, world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
        if self._pool is None or self._pool.ranks != world:
            self.close()
            self._pool, self._folder = Pool(world), tempfile.TemporaryDirectory()
            self._pool.run(begin, f"{self._folder.name}/store")
        return self._pool.run(fn, *args)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._folder.cleanup()
        self._pool = None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def delay(most_us: float) -> None:
    """The last rank's engines are slow."""
    if dist.get_rank() == dist.get_world_size() - 1:
        session.group_of(dist.group.WORLD).inject_delay(most_us)


@pytest.mark.parametrize("world", [2])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_as_stock(ranks: Ranks, world: int, name: str) -> None:
    """With the last rank's engines delayed at random and the first rank late in its computation."""

    def job() -> None:
        from dovetail.overlap import fsdp

        case, late = CASES[name], dist.get_rank() == 0
        stock = trained(sharded(case), case)
        for strategy in ("dma", "serial", "streams") if name in ("plain", "mixed precision") else ("dma",):
            model = sharded(case)
            with fsdp.enable(model, strategy) as enabled:
                delay(100)
                alike(trained(model, case, late=late and strategy == "dma"), stock)
                delay(0)
            rows = enabled.explain()
            assert [r.strategy for r in rows] == [strategy] * (BLOCKS + 1)
            assert all(r.reason == "asked for" and not r.measuring and not r.fallbacks for r in rows), rows
            assert all(r.gathers >= 3 and r.scatters >= 3 and r.gather_bytes and r.scatter_bytes for r in rows)

    ranks.run(world, job)


@pytest.mark.parametrize("world", [4])
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_sum_in_rank_order(ranks: Ranks, world: int, name: str) -> None:
    def job() -> None:
        from dovetail.overlap import fsdp

        case = FOUR[name]
        model = sharded(case)
        for module in [model, *model.blocks]:
            module.set_custom_reduce_scatter(in_rank_order())
        expected = trained(model, case)
        model = sharded(case)
        with fsdp.enable(model, "dma"):
            delay(100)
            ours = trained(model, case)
            delay(0)
        alike(ours, expected)
        num = case.micro + len(list(model.parameters()))  # the first step: AdamW makes much of a last bit of its grads
        for a, b in zip(ours[:num], trained(sharded(case), case, steps=1)[:num], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    ranks.run(world, job)


def in_rank_order() -> Any:
    """FSDP's default reduce-scatter, but on gathered inputs and in plain torch."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class InRankOrder(DefaultReduceScatter):
        def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> None:
            parts = [torch.empty_like(input_tensor) for _ in range(group.size())]
            dist.all_gather(parts, input_tensor, group=group)
            assert op == dist.ReduceOp.AVG
            total = workers.reduced(parts, "avg")
            output_tensor.copy_(total.view(group.size(), -1)[group.rank()])

    return InRankOrder()


@pytest.mark.parametrize("world", [2])
def test_auto_tries_all_and_ranks_agree(ranks: Ranks, world: int) -> None:
    """The values are those of stock while strategies change, and after."""

    def job() -> list[tuple[str, str]]:
        from dovetail.overlap import fsdp
        from dovetail.overlap.fsdp import enabled as module

        module.Auto = functools.partial(Auto, rounds=2)  # type: ignore[misc]
        case = CASES["two ahead"]
        stock = trained(sharded(case), case, steps=14)
        model = sharded(case)
        enabled = fsdp.enable(model)
        assert {(r.strategy, r.reason, r.measuring) for r in fsdp.explain(model)} == {
            ("streams", "not measured yet", True)
        }
        delay(20)
        alike(trained(model, case, steps=14), stock)
        delay(0)
        rows = enabled.explain()
        assert not any(r.measuring for r in rows), rows
        fsdp.disable(model)
        module.Auto = Auto  # type: ignore[misc]
        return [(r.strategy, r.reason) for r in rows]

    found = ranks.run(world, job)
    assert found[0] == found[1]
    assert all("a step takes" in reason for _, reason in found[0])


@pytest.mark.parametrize("world", [2])
def test_disabled_is_stock_again(ranks: Ranks, world: int) -> None:
    """In the middle of training, with gradients that lie in our buffers; and the heap gets its memory back."""

    def job() -> None:
        from dovetail.overlap import fsdp

        case = CASES["two ahead"]
        model, other = sharded(case), sharded(case)
        x = workers.data(1, dist.get_rank(), 70, torch.float32).view(1, TOKENS, 7)
        with fsdp.enable(model, "dma"):  # its group stays
            model(x).sum().backward()
        model.zero_grad()
        used = session.world().used_bytes
        before = [m._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm for m in (model, model.blocks[1])]
        fsdp.enable(model, "dma")
        with pytest.raises(ValueError, match=r"module '\(root\)' is enabled already: call disable\(\)"):
            fsdp.enable(model)
        with pytest.raises(ValueError, match=r"module '\(root\)' is enabled"):
            fsdp.enable(model.blocks[1])
        model(x).sum().backward()
        assert session.world().used_bytes > used
        grads = [p.grad.to_local().clone() for p in model.parameters()]
        fsdp.disable(model)
        assert [m._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm for m in (model, model.blocks[1])] == before
        for function in (fsdp.disable, fsdp.explain):
            with pytest.raises(ValueError, match="FSDPModel is not enabled"):
                function(model)
        trained(sharded(case), case, steps=1)
        alike([p.grad.to_local() for p in model.parameters()], grads)
        model.zero_grad()
        assert session.world().used_bytes == used
        alike(trained(model, case), trained(other, case))
        with fsdp.enable(model, "dma"):
            pending = model(x)  # one more forward before, its backward after
        pending.sum().backward()
        other(x).sum().backward()
        alike([p.grad.to_local() for p in model.parameters()], [p.grad.to_local() for p in other.parameters()])

    ranks.run(world, job)


@pytest.mark.parametrize("world", [2])
def test_fallbacks_say_so(ranks: Ranks, world: int) -> None:
    """A heap that is full, a reduction that is not ours, DOVETAIL_DISABLE, and ranks on several hosts."""

    def job() -> None:
        from dovetail.errors import HardwareError
        from dovetail.overlap import fsdp
        from dovetail.overlap.fsdp import buffers

        case = CASES["plain"]
        stock = trained(sharded(case), case)

        def full(*_: Any) -> None:
            raise HardwareError("no memory for 8 bytes of heap")

        model, take = sharded(case), buffers.Buffers.take
        with fsdp.enable(model, "dma") as enabled:
            if dist.get_rank() == 0:  # the others have theirs on the heap: ranks may differ
                buffers.Buffers.take = full  # type: ignore[method-assign]
            alike(trained(model, case), stock)
            buffers.Buffers.take = take  # type: ignore[method-assign]
            fallen = enabled.explain()[1].fallbacks
            expected = {"ordinary memory, which is staged: no memory for 8 bytes of heap": 12}
            assert fallen == (expected if dist.get_rank() == 0 else {}), fallen
            model.set_gradient_divide_factor(3.0)
            with pytest.raises((RuntimeError, ValueError), match="(?i)premul"):  # gloo's own answer: it has no such sum
                trained(model, case, steps=1)
            assert any("on the caller's group" in reason for r in enabled.explain() for reason in r.fallbacks)

        for name, value, reason in (("environ", "1", "DOVETAIL_DISABLE"), ("hosts", "", "the group spans hosts")):
            dovetail.finalize()
            host = session._host
            if name == "hosts":
                session._host = lambda: f"host {dist.get_rank()}"
            os.environ["DOVETAIL_DISABLE"] = value
            model = sharded(case)
            with fsdp.enable(model) as enabled:
                alike(trained(model, case), stock)
                assert {(r.strategy, r.reason) for r in enabled.explain()} == {("streams", reason)}
            if name == "hosts":
                with pytest.raises(NotSupported, match="spans hosts: only the caller's process group"):
                    fsdp.enable(model, "dma")
            else:
                with fsdp.enable(model, "dma") as enabled:
                    assert enabled.explain()[0].strategy == "dma", "a strategy that was asked for stays"
            session._host = host
            os.environ.pop("DOVETAIL_DISABLE")
        dovetail.finalize()
        dovetail.init(timeout=60)

    ranks.run(world, job)


def under_torchrun() -> None:
    """What each rank of the next test does."""
    from dovetail.overlap import fsdp

    dist.init_process_group("gloo")
    case = CASES["two ahead"]
    stock = trained(sharded(case), case, steps=4)
    for strategy in ("dma", "auto"):
        model = sharded(case)
        with fsdp.enable(model, strategy):
            alike(trained(model, case, steps=4), stock)
    print("well", dist.get_rank())
    dist.destroy_process_group()


def test_torchrun() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("DOVETAIL_")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{env.get('PYTHONPATH', '')}"}
    code = "from tests.ranks import test_fsdp; test_fsdp.under_torchrun()"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.py")
        script.write_text(code)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("well") == 2
