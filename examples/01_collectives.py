"""Collectives on symmetric and ordinary tensors, blocking and asynchronous. Run: python examples/01_collectives.py"""

from __future__ import annotations

import torch

import dovetail


def work() -> tuple[list[float], float, str]:
    """What each rank does."""
    group = dovetail.init()
    mine = dovetail.empty(4).fill_(group.rank)  # on the heap: peers reach it without a copy
    everyone = torch.empty(4 * group.size)  # ordinary: staged
    dovetail.all_gather_into_tensor(everyone, mine)

    gradient = dovetail.empty(1 << 16).fill_(group.rank + 1)
    pending = dovetail.all_reduce(gradient, async_op=True)
    everyone.mul_(2)  # computation beside it
    pending.wait()
    return everyone[::4].tolist(), gradient[0].item(), pending.ticket.reason


def main() -> None:
    for rank, (gathered, total, reason) in enumerate(dovetail.launch(work, ranks=2)):
        print(f"rank {rank}: gathered {gathered}, reduced to {total} ({reason})")


if __name__ == "__main__":
    main()
