"""Computations to communicate beside: matrix products and sums of vectors by torch, on a GPU or a CPU.

Owns their operands and what their results must be. A result is compared with what the same call gave alone.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from dovetail.bench.overlap.spec import Compute, Make
from dovetail.overlap.tasks import Load

_RTOL, _ATOL = 1 / 64, 1.0  # two roundings of bf16; elements of a product of random numbers are some tens and more
_TILE = (128, 256)  # of a product: what a work-group computes, about


class Work(Protocol):
    """A `Computation` that is repeated, and can be checked."""

    repeats: int

    @property
    def load(self) -> Load: ...
    def __call__(self) -> Any: ...
    def forget(self) -> None:
        """Spoils the results, so that old ones are not taken for new ones."""

    def is_right(self) -> bool:
        """Are the results what they should be?"""


class TorchWork:
    """Puts itself into torch's current stream, or runs on the calling thread."""

    def __init__(self, compute: Compute, backend: str) -> None:
        import torch

        self._torch: Any = torch
        self.compute, self.repeats = compute, 1
        self._shape = compute.of(backend)
        self._backend = backend
        kind = {"device": "cpu" if backend == "cpu" else "cuda"}
        self._dtype = torch.float32 if backend == "cpu" else torch.bfloat16
        sizes = self._sizes()
        random = torch.Generator(device=kind["device"]).manual_seed(sum(self._shape))
        self._operands = [
            tuple(torch.randn(size, **kind, dtype=self._dtype, generator=random) for size in sizes)  # type: ignore[call-overload]
            for _ in range(compute.operands)
        ]
        self._call = torch.mm if compute.make is Make.MM else torch.add
        self._outputs = [self._call(*pair) for pair in self._operands]
        self._wanted = [output.clone() for output in self._outputs]
        if backend != "cpu":
            self._torch.cuda.synchronize()

    def _sizes(self) -> list[tuple[int, ...]]:
        if self.compute.make is Make.ADD:
            return [self._shape, self._shape]
        m, k, n = self._shape
        return [(m, k), (k, n)]

    @property
    def load(self) -> Load:
        """Of all repeats together; work-groups are those of one."""
        name = f"{self.compute.name} x{self.repeats}"
        item = self._dtype.itemsize
        if self.compute.make is Make.ADD:
            (n,) = self._shape
            size = 3 * n * item
            return Load(name=name, flops=self.repeats * n, size_bytes=self.repeats * size, launches=self.repeats)
        m, k, n = self._shape
        size = (m * k + k * n + m * n) * item
        groups = math.ceil(m / _TILE[0]) * math.ceil(n / _TILE[1])
        flops = 2 * m * k * n
        return Load(
            name=name, flops=self.repeats * flops, size_bytes=self.repeats * size, groups=groups, launches=self.repeats
        )  # fmt: skip

    def __call__(self) -> None:
        """All repeats."""
        number = len(self._operands)
        for turn in range(self.repeats):
            self._call(*self._operands[turn % number], out=self._outputs[turn % number])

    def forget(self) -> None:
        """Spoils the results; of several sets of operands, those that a call will use."""
        for output in self._outputs[: self.repeats]:
            output.fill_(-1)
        self._synchronize()

    def is_right(self) -> bool:
        """What they were alone, the first time; to the rounding of another order of sums, which cuBLAS may choose."""
        self._synchronize()
        pairs = list(zip(self._outputs, self._wanted, strict=True))[: self.repeats]
        return all(self._alike(found, wanted) for found, wanted in pairs)

    def _alike(self, found: Any, wanted: Any) -> bool:
        torch = self._torch
        if torch.equal(found, wanted):
            return True
        if self._backend == "cpu" or self.compute.make is Make.ADD:
            return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-3))
        return bool(torch.allclose(found.float(), wanted.float(), rtol=_RTOL, atol=_ATOL))

    def _synchronize(self) -> None:
        if self._backend != "cpu":
            self._torch.cuda.synchronize()
