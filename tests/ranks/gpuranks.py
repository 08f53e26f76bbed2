"""What the tests of GPU ranks share: pools of real processes over the stand-in driver, and their tensors.

Device memory is the host's and streams are threads, so CI sees what a GPU would: copies in random order and late.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dovetail.coll import choose
from tests import standin
from tests.ranks import workers
from tests.ranks.conftest import Pool

KINDS = ("symmetric", "ordinary", "mixed")


def environment(**more: object) -> dict[str, str]:
    """Of a rank whose GPU is the stand-in's."""
    return {"DOVETAIL_CUDA_LIBRARY": str(standin.build("cuda")), "DOVETAIL_GPU_SEGMENT": "4M"} | {
        name: str(value) for name, value in more.items()
    }


def word(address: int) -> Any:
    """The 64-bit word at an address, to be written as a kernel would."""
    return np.frombuffer((ctypes.c_uint64 * 1).from_address(address), np.uint64)


def set_standin(name: str, value: object) -> None:
    """A setting of the stand-in, in this rank."""
    ctypes.CDLL(os.environ["DOVETAIL_CUDA_LIBRARY"]).standin_set(name.encode(), str(value).encode())


def set_up() -> Any:
    """In a rank: CPU tensors count as a GPU's, and `auto` takes our paths; gives the world's group."""
    workers.use("standin")
    choose.untested = lambda told, device: None
    return workers.world()


class Ready:
    """One pool at a time, kept from test to test; its ranks are set up."""

    def __init__(self) -> None:
        self.pool: Pool | None = None

    def get(self, ranks: int) -> Pool:
        if self.pool is None or self.pool.ranks != ranks or not all(p.is_alive() for p in self.pool.processes):
            self.close()
            self.pool = Pool(ranks, environment(STANDIN_DELAY_US=20))
        return self.pool

    def run(self, ranks: int, job: Callable[..., Any]) -> list[Any]:
        """A failed test may leave a broken group: the next one starts anew."""
        try:
            return self.get(ranks).run(job)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        self.pool = None


N = 3000


def sum_of(seed: int, size: int) -> torch.Tensor:
    return workers.reduced([workers.data(seed, r, N, torch.float32) for r in range(size)], "sum")


def gathered(seed: int, size: int) -> torch.Tensor:
    return torch.cat([workers.data(seed, r, N, torch.float32) for r in range(size)])


def pair_of(seed: int, g: Any, kind: str = "symmetric") -> tuple[torch.Tensor, torch.Tensor]:
    """(output, input) of an all_gather."""
    inp = workers.make(kind, g.rank, N, torch.float32).copy_(workers.data(seed, g.rank, N, torch.float32))
    return workers.make(kind, g.rank, N * g.size, torch.float32), inp


def tensor_of(items: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return workers.make("symmetric", 0, items, dtype)
