"""Random plans on the CPU's engines and on GPU memory, byte for byte: `python -m tests.gpu.random_plans 10000`.

Every rank runs each plan twice, on equal contents: by `PlanRunner` on the CPU heap and by `GpuRunner` on the GPU heap,
ranks sharing one GPU if there is only one. All of the caller's buffers are compared, undefined bytes included: they
were filled alike.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dovetail
from dovetail.coll import gpu, session
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.gpu.call import GpuRunner
from dovetail.plan.plan import Role
from tests.unit.randomplans import contents_of, random_plan

BUFFER_BYTES = 4096
MOST_BUFFERS = 32


def compare(first: int, plans: int, device: str) -> dict[str, Any]:
    """Runs seeds first .. first + plans on this rank's engines. Returns counts, and seeds that differed."""
    torch.set_num_threads(1)
    group = dovetail.init()
    side = gpu.group_of(group, "cuda", torch.cuda.current_device() if device == "cuda" else 0)
    shape = (MOST_BUFFERS, BUFFER_BYTES)
    host, far = session.world().empty(shape, torch.uint8), side.world.heap.empty(shape, torch.uint8)
    moves, wrong, begin = 0, [], time.monotonic()
    for seed in range(first, first + plans):
        plan = random_plan(seed, ranks=group.size, moves=4 + seed % 21, buffer_bytes=BUFFER_BYTES)
        contents = contents_of(plan, seed)
        garbage = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
        names, sizes = [], []
        for n, b in enumerate(plan.buffers):
            if b.role is not Role.SCRATCH and b.sizes[group.rank] > 0:
                if (group.rank, n) in contents:
                    garbage[len(names), : b.sizes[group.rank]] = contents[group.rank, n]
                names.append(b.name)
                sizes.append(b.sizes[group.rank])
        host.copy_(torch.from_numpy(garbage))
        far.copy_(host)
        PlanRunner(group, plan).submit({n: host[k, : sizes[k]] for k, n in enumerate(names)}).wait(60)
        stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None
        ticket = GpuRunner(side, plan).submit({n: far[k, : sizes[k]] for k, n in enumerate(names)}, after=stream)
        ticket.wait(60)
        if not torch.equal(far.cpu(), host):
            wrong.append(seed)
        moves += sum(plan.counts(r).commands for r in range(plan.world))
        dovetail.barrier()  # nobody refills memory that a peer still compares
    return {"plans": plans, "moves": moves, "wrong": wrong, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", type=int)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "standin"), default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    job = (given.first, given.plans, given.device)
    found = dovetail.launch(compare, given.ranks, job, env={"DOVETAIL_TIMEOUT": "60"})
    wrong = sorted({seed for f in found for seed in f["wrong"]})
    row = {**found[0], "ranks": given.ranks, "first_seed": given.first, "wrong": wrong, "device": given.device}
    print(f"{row['plans']} plans, {row['moves']} moves, {given.ranks} ranks: {len(wrong)} differ, {row['seconds']} s")
    if given.json:
        from dovetail.measure import record

        command = ["python", "-m", "tests.gpu.random_plans", *sys.argv[1:]]
        record.write(record.new("random_plans", command, [row]), given.json)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
