"""The collectives as cases: how much each rank gives and gets, fresh data, the right result, and bandwidths.

`size_bytes` is what each rank contributes: its input tensor. A number of elements that the ranks must share equally
(all_to_all, reduce_scatter) is rounded down to a multiple of the ranks, as nccl-tests does; the case says what it is.

Bandwidths are those of nccl-tests, with n ranks, time t, and GB = 10^9 bytes:

    algbw = S / t            S: the output of all_gather (n * size_bytes), otherwise size_bytes
    busbw = algbw * factor   factor: (n-1)/n for all_gather, all_to_all, reduce_scatter; 2(n-1)/n for all_reduce;
                             1 for broadcast
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.bench.spec import COLLECTIVES, DTYPES

ROOT = 0
"""The rank that broadcasts."""

_FACTOR: dict[str, Callable[[int], float]] = {
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One collective at one size."""

    collective: str
    ranks: int
    dtype: str
    num_elements: int
    """Elements of one rank's input."""

    @staticmethod
    def of(collective: str, ranks: int, size_bytes: int, dtype: str = "float32") -> Case:
        """The case nearest to `size_bytes` from below, with at least one element for everyone."""
        if collective not in COLLECTIVES:
            raise ValueError(f"collective {collective!r} is not known; there are {', '.join(COLLECTIVES)}")
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not known; there are {', '.join(DTYPES)}")
        if ranks < 1 or size_bytes < 1:
            raise ValueError(f"ranks and size_bytes must be at least 1, got {ranks} and {size_bytes}")
        unit = ranks if collective in ("all_to_all", "reduce_scatter") else 1
        num_elements = size_bytes // _torch_dtype(dtype).itemsize
        return Case(
            collective=collective, ranks=ranks, dtype=dtype, num_elements=max(num_elements - num_elements % unit, unit)
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return _torch_dtype(self.dtype)

    @property
    def size_bytes(self) -> int:
        """What each rank contributes."""
        return self.num_elements * self.torch_dtype.itemsize

    @property
    def num_output(self) -> int:
        """Elements of one rank's output."""
        if self.collective == "all_gather":
            return self.num_elements * self.ranks
        if self.collective == "reduce_scatter":
            return self.num_elements // self.ranks
        return self.num_elements

    @property
    def in_place(self) -> bool:
        """Whether the output takes the place of the input."""
        return self.collective in ("all_reduce", "broadcast")

    @property
    def reduces(self) -> bool:
        """Whether the result is a sum."""
        return self.collective in ("all_reduce", "reduce_scatter")

    def algbw_gbps(self, time_us: float) -> float:
        """Bytes of the operation over its time."""
        moved = self.size_bytes * (self.ranks if self.collective == "all_gather" else 1)
        return moved / time_us / 1e3

    def busbw_gbps(self, time_us: float) -> float:
        """What the busiest link carries, comparable between collectives and numbers of ranks."""
        return self.algbw_gbps(time_us) * _FACTOR[self.collective](self.ranks)

    def input(self, rank: int, iteration: int) -> torch.Tensor:
        """Fresh random data, different for every rank, iteration and size; any rank can make that of any other.

        Where bytes are only moved they are random to the last bit, NaNs included. What is summed are small whole
        numbers: their sum is exact in every dtype, so no order of summation gives another result.
        """
        seed = [zlib.crc32(self.collective.encode()), self.size_bytes, rank, iteration]
        random = np.random.Generator(np.random.SFC64(seed))
        if self.reduces:
            low = 0 if self.dtype == "uint8" else -4
            return torch.from_numpy(random.integers(low, 5, self.num_elements, dtype=np.int8)).to(self.torch_dtype)
        return torch.from_numpy(random.integers(0, 256, self.size_bytes, dtype=np.uint8)).view(self.torch_dtype)

    def expected(self, rank: int, iteration: int) -> torch.Tensor:
        """What the output of `rank` must be, by plain torch."""
        if self.collective == "broadcast":
            return self.input(ROOT, iteration)
        inputs = [self.input(peer, iteration) for peer in range(self.ranks)]
        if self.collective == "all_gather":
            return torch.cat(inputs)
        if self.collective == "all_to_all":
            return torch.cat([given.chunk(self.ranks)[rank] for given in inputs])
        total = inputs[0].clone()
        for given in inputs[1:]:
            total += given
        return total if self.collective == "all_reduce" else total.chunk(self.ranks)[rank].clone()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes, wherever they are; unlike ``==`` it finds a NaN equal to itself."""
    return torch.equal(left.contiguous().view(torch.uint8).cpu(), right.contiguous().view(torch.uint8).cpu())


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
