"""A GPU and seven regions of host memory exchange pieces by the GPU's copy engines: no multiprocessor is needed.

The plan is the all-to-all of any eight ranks, cut to what crosses the link of rank 0. Run it as it stands.
"""

from __future__ import annotations

import time

import torch

from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.heap import Heap
from dovetail.hw.gpu.local import LocalRunner
from dovetail.plan import passes
from dovetail.plan.build import all_to_all
from dovetail.plan.check import check

RANKS, PIECE_BYTES = 8, 1 << 20


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.init()  # torch and the plan share one context
    plan = passes.entry(passes.crossing(all_to_all.pcpy(RANKS, PIECE_BYTES, own_copy=False), 0))
    print(f"{plan.name}: proved in {check(plan, runs=2).elapsed_ms:.1f} ms")
    with Device("cuda") as gpu:
        on_gpu, on_host = Heap(gpu, "device"), Heap(gpu, "host")
        buffers = {}
        for rank in range(RANKS):
            heap = on_host if rank else on_gpu
            for name in ("input", "output"):
                buffers[rank, name] = heap.empty((RANKS * PIECE_BYTES,), torch.uint8).random_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with LocalRunner(gpu, plan, host_ranks=frozenset(range(1, RANKS))) as runner:
            run = runner.bind(buffers)
            run.submit().wait()
            for rank in range(1, RANKS):  # piece `rank` of the GPU's input is in that rank's output, and the reverse
                piece = slice(rank * PIECE_BYTES, (rank + 1) * PIECE_BYTES)
                assert torch.equal(buffers[rank, "output"][:PIECE_BYTES], buffers[0, "input"][piece].cpu())
                assert torch.equal(buffers[0, "output"][piece].cpu(), buffers[rank, "input"][:PIECE_BYTES])
            begin = time.perf_counter()
            for _ in range(20):
                ticket = run.submit()
                ticket.wait()
            seconds = (time.perf_counter() - begin) / 20
        moved = sum(ticket.bytes_by_path.values())
        print(f"{gpu.name}: {ticket.bytes_by_path}, {moved / seconds / 1e9:.1f} GB/s both directions together")


if __name__ == "__main__":
    main()
