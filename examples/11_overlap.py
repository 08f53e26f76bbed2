"""A collective beside a computation: every strategy by name, then `auto`, which finds the fastest here. Two CPU ranks.

On GPUs the code is the same with CUDA tensors; with one GPU and peers in host memory, see `LocalCommunication`.
"""

from __future__ import annotations

import statistics
import time

import torch

import dovetail
from dovetail import overlap
from dovetail.errors import NotSupported
from dovetail.overlap import Call, Collective, Load, Strategy

ROWS, COLUMNS, ITEMS = 256, 256, 1 << 18


def work() -> list[str]:
    """What each rank does; returns lines."""
    group = dovetail.init()
    torch.set_num_threads(1)
    x, w = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS, COLUMNS)
    mine, everyone = dovetail.empty(ITEMS), dovetail.empty(ITEMS * group.size)
    mine.fill_(group.rank + 1)
    gather = Collective(dovetail.all_gather_into_tensor, everyone, mine)
    product = Call(lambda: x @ w, Load(name="x @ w", flops=2.0 * ROWS * COLUMNS * COLUMNS))
    lines = []
    for strategy in Strategy:
        times = []
        try:
            for _ in range(7):
                dovetail.barrier()
                begin = time.perf_counter()
                outcome = overlap.run(product, gather, strategy)
                times.append((time.perf_counter() - begin) * 1e6)
                assert torch.equal(outcome.value, x @ w)
        except NotSupported as error:  # a single core has no shares; only operators are fused
            lines.append(f"{strategy}: {error}")
            continue
        lines.append(f"{strategy}: {statistics.median(times):.0f} us")
    for _ in range(20):  # tries a few, keeps the fastest on the slowest rank
        everyone.zero_()
        chosen = overlap.run(product, gather)
    assert everyone[::ITEMS].tolist() == [1.0, 2.0]
    lines.append(f"auto: {chosen.setting} ({chosen.reason})")
    with overlap.beside(gather) as outcome:  # the same for code that is not one call
        y = x @ w
        y = y.relu()
    lines.append(f"with: {outcome.setting}")
    overlap.close()
    return lines


def main() -> None:
    print("\n".join(dovetail.launch(work, ranks=2)[0]))


if __name__ == "__main__":
    main()
