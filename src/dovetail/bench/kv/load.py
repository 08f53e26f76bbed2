"""Computation beside transfers: how fast each is next to the other.

Owns the window: computations are queued on the GPU without a gap, and transfers follow each other through the middle
part of them. A transfer counts if it ended inside. What the computation keeps is its time before and after that part
over its time in it: clocks drift with temperature and power, so only neighbours can be compared. The matrices of the
GEMM are zero: at its limit of power an H200's clock wanders by 5 %, more than what is to be seen here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from dovetail.bench.gpu.beside import Gemm
from dovetail.errors import HardwareError

Times = tuple[float, float]
_LEAST_US = 40_000.0  # of the part with transfers
_AROUND_US = 20_000.0  # before it and after it, and to get going
_TRANSFERS = 2.5  # that fit into one
_RETRIES = 4


class Decode:
    """A product with few rows: all its time goes into reading weights, as when tokens are decoded."""

    def __init__(self, tokens: int = 32, width: int = 8192, hidden: int = 8 * 28672) -> None:
        """About 1 ms on an H200: a stream takes some 1,000 launches, and a window needs to be longer than those."""
        import torch

        self._torch: Any = torch
        self._x, self._weights = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((tokens, width), (width, hidden))
        )
        self._out = torch.mm(self._x, self._weights)

    def launch(self, stream: int) -> None:
        """Puts one into the raw stream."""
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream)):
            self._torch.mm(self._x, self._weights, out=self._out)


class Load:
    """A computation that is repeated in a stream of its own."""

    def __init__(self, name: str) -> None:
        import torch

        self.name = name
        self._cuda: Any = torch.cuda
        self._computation: Gemm | Decode = Gemm(zeros=True) if name == "gemm" else Decode()
        self._stream = self._cuda.Stream()
        self._one_us = _AROUND_US
        for _ in range(2):  # the first time warms up
            begin, end = self._marks(2)
            begin.record(self._stream)
            self._compute(20)
            end.record(self._stream)
            end.synchronize()
            self._one_us = float(begin.elapsed_time(end)) * 1e3 / 20

    def beside(self, once: Callable[[], Times], about_us: float) -> tuple[list[Times], float]:
        """Transfers, each as (submitted, landed) in microseconds, and the share of its speed that computation kept.

        Args:
            about_us: what a transfer takes on an idle GPU.

        Raises:
            HardwareError: no transfer ended inside the longest window, or the last one always came too late.
        """
        window_us, over_us = max(_LEAST_US, _TRANSFERS * about_us), 2 * about_us
        for _ in range(_RETRIES):
            marks, around, inside = self._issue(window_us, over_us)
            marks[1].synchronize()
            found = []
            while True:
                taken = once()
                if marks[2].query():
                    break
                found.append(taken)
            late = marks[3].query()  # the last one reached into what should be computation alone
            marks[4].synchronize()
            if found and not late:
                before, within, _, behind = (float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks))
                return found, (before + behind) / (2 * around) / (within / inside)
            window_us, over_us = window_us if found else 3 * window_us, max(over_us, 2 * taken[1])
        raise HardwareError(f"transfers did not end in time beside {window_us / 1e3:.0f} ms of {self.name}")

    def _issue(self, window_us: float, over_us: float) -> tuple[list[Any], int, int]:
        """Warming up, alone, with transfers, until the last of them is over, alone; marks before, between and after."""
        around, inside = (math.ceil(us / self._one_us) for us in (_AROUND_US, window_us))
        marks = self._marks(5)
        self._compute(around)
        for mark, number in zip(marks, (around, inside, math.ceil(over_us / self._one_us), around, 0), strict=True):
            mark.record(self._stream)
            self._compute(number)
        return marks, around, inside

    def _marks(self, number: int) -> list[Any]:
        return [self._cuda.Event(enable_timing=True) for _ in range(number)]

    def _compute(self, number: int) -> None:
        for _ in range(number):
            self._computation.launch(self._stream.cuda_stream)
