"""FSDP2 on Dovetail's collectives: ms per step of stock FSDP2 and of each strategy, with the same losses.

Run: python examples/10_fsdp.py [width [rounds]], or under torchrun --standalone --nproc-per-node=2
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import dovetail
from dovetail.measure import interleave
from dovetail.overlap import fsdp


def sharded(width: int) -> nn.Module:
    """Blocks that are gathered one by one, each while the two before it compute."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)]
    for block in blocks:
        fully_shard(block)
    for k, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[k + 1 : k + 3])
    return fully_shard(nn.Sequential(*blocks))


class Trainer:
    """A model, its optimizer, and the losses it had."""

    def __init__(self, width: int, strategy: str | None) -> None:
        self.model, self.width, self.losses = sharded(width), width, []
        self.enabled = fsdp.enable(self.model, strategy) if strategy else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        for _ in range(26 if strategy == "auto" else 2):  # `auto` has chosen by then
            self.step()

    def step(self) -> None:
        seed = len(self.losses) * 64 + dist.get_rank()
        x = torch.randn(64, self.width, generator=torch.Generator().manual_seed(seed))
        loss = (self.model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def work(store: str, rank: int = -1, size: int = -1) -> None:
    """What each rank does; torchrun has said which it is, `dovetail.launch` lets us ask."""
    torch.set_num_threads(1)
    if store != "env://":
        rank, size = dovetail.init().rank, dovetail.init().size
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    width, rounds = (int(text) for text in [*sys.argv[1:], *("64", "5")[len(sys.argv) - 1 :]])
    trainers = {name or "stock": Trainer(width, name) for name in (None, "streams", "serial", "dma", "auto")}
    times = interleave.interleave([t.step for t in trainers.values()], dist.barrier, [rounds] * len(trainers))
    for (name, trainer), ns in zip(trainers.items(), times, strict=True) if dist.get_rank() == 0 else ():
        same = all(a == b for a, b in zip(trainer.losses, trainers["stock"].losses, strict=False))
        print(f"{name:8}{statistics.median(ns) / 1e6:8.2f} ms a step; losses like stock's: {same}")
    if dist.get_rank() == 0:
        print(trainers["auto"].enabled)
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        work("env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        dovetail.launch(work, ranks=2, args=(f"file://{folder}/store",))


if __name__ == "__main__":
    main()
