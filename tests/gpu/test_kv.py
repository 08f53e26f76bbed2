"""Blocks of a KV cache on a real GPU: every path gives the bytes of plain copies, also beside computation."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from dovetail.hw.gpu.device import Device
from dovetail.kv.choose import Path
from dovetail.kv.layout import Layout, block_outermost, layer_outermost
from dovetail.kv.learn import RARELY, SETTLED, TRIALS
from dovetail.kv.mover import GpuMover
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Pieces, Table, table

LAYOUTS = [
    layer_outermost("short rows", num_layers=40, row_bytes=4096, num_blocks=600),
    layer_outermost("split", num_layers=10, row_bytes=16 << 10, num_blocks=600, split=True),
    layer_outermost("gaps", num_layers=9, row_bytes=18 << 10, num_blocks=600, gap_bytes=4096),
    block_outermost("block", num_layers=10, row_bytes=16 << 10, num_blocks=600),
]
PATHS = [Path.DMA_2D, Path.DMA_BATCH, Path.DMA_LOOP, Path.STAGED, Path.MIXED, Path.KERNEL, Path.AUTO]


class Rig:
    """A cache on the GPU and a pinned pool of two pieces, full of random bytes."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        self.rng, self.layout = np.random.default_rng(seed), layout
        self.pieces = Pieces(num_slots=400, slot_bytes=layout.slot_bytes, slots_per_piece=256)
        self.cache = torch.randint(0, 256, (layout.size_bytes,), dtype=torch.uint8, device="cuda")
        self.parts = [
            torch.randint(0, 256, (self.pieces.size_bytes(n),), dtype=torch.uint8).pin_memory() for n in range(2)
        ]
        torch.cuda.synchronize()
        self.device = Device("cuda")
        self.mover = GpuMover(self.device, self.cache.data_ptr(), [p.data_ptr() for p in self.parts])

    def copies(self, direction: Direction, count: int = 300) -> Table:
        blocks = self.rng.permutation(self.layout.num_blocks)[:count]
        return table(direction, self.layout, blocks, self.rng.permutation(400)[:count], self.pieces)

    def memories(self) -> list[Any]:
        return [self.cache.cpu().numpy(), *(p.numpy().copy() for p in self.parts)]

    def expected(self, *requests: tuple[Direction, Table]) -> list[Any]:
        cache, *parts = self.memories()
        for direction, copies in requests:
            CpuMover(cache, parts).submit(direction, copies)
        return [cache, *parts]

    def is_like(self, wanted: list[Any]) -> bool:
        return all(np.array_equal(found, right) for found, right in zip(self.memories(), wanted, strict=True))

    def close(self) -> None:
        self.mover.close()
        self.device.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_path_moves_the_same_bytes(layout: Layout, path: Path) -> None:
    rig = Rig(layout)
    for direction in Direction:
        requests = [(direction, rig.copies(direction)) for _ in range(2)]
        wanted = rig.expected(*requests)
        transfers = [rig.mover.submit(direction, copies, path) for _, copies in requests]
        transfers[-1].wait()
        assert all(t.is_over() for t in transfers)
        assert rig.is_like(wanted)
    rig.close()


@pytest.mark.parametrize("path", [Path.DMA_2D, Path.STAGED, Path.MIXED, Path.AUTO])
def test_beside_a_computation(path: Path) -> None:
    """Both directions at once while GEMMs hold the multiprocessors, behind a late stream that writes the cache."""
    rig = Rig(LAYOUTS[1], 3)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    caller = torch.cuda.Stream()
    for _ in range(5):
        blocks, slots = rig.rng.permutation(600), rig.rng.permutation(400)
        fetch = table("fetch", rig.layout, blocks[:200], slots[:200], rig.pieces)
        store = table("store", rig.layout, blocks[200:400], slots[200:], rig.pieces)
        fresh = torch.randint(0, 256, (rig.layout.size_bytes,), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        cache, pool = fresh.cpu().numpy(), [p.numpy().copy() for p in rig.parts]
        CpuMover(cache, pool).submit("store", store)
        CpuMover(cache, pool).submit("fetch", fetch)
        for _ in range(40):
            torch.mm(a, a, out=out)
        with torch.cuda.stream(caller):
            torch.cuda._sleep(2_000_000)
            rig.cache.copy_(fresh)
        moves = [
            rig.mover.submit(direction, copies, path, after=[caller.cuda_stream])
            for direction, copies in (("store", store), ("fetch", fetch))
        ]
        for move in moves:
            move.wait()
        assert rig.is_like([cache, *pool])
    rig.close()


def test_auto_learns_from_its_own_transfers() -> None:
    """On the GPU's clock: no longer than the host saw; once settled it says what it measured, and bytes stay right."""
    rig = Rig(LAYOUTS[1], 5)
    timed = 0
    for _ in range(SETTLED + RARELY):
        copies = rig.copies(Direction.FETCH)
        wanted = rig.expected((Direction.FETCH, copies))
        torch.cuda.synchronize()
        began = time.perf_counter()
        transfer = rig.mover.submit("fetch", copies, Path.AUTO, beside=False)
        transfer.wait()
        assert 0 <= transfer.time_us < (time.perf_counter() - began) * 1e6
        timed += transfer.time_us > 0
        assert rig.is_like(wanted)
    assert timed >= 2 * TRIALS  # later ones if the times vary
    assert transfer.choice.reason.startswith("measured here: ")
    rig.close()
