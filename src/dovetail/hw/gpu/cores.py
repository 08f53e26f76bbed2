"""Copies by a kernel on some of a GPU's multiprocessors: the fall-back of copy engines, and their rival.

Owns how copies are cut into pieces, in which order, and who runs them: a Triton kernel, or on a stand-in the driver.
This is how a collective library moves bytes: a few programs that stay until all is moved.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NotSupported
from dovetail.hw.gpu.driver import Driver

Ints = NDArray[np.int64]
#: What one program moves before it takes the next piece: short enough that programs end together.
PIECE_BYTES = 64 << 10
_VECTOR_BYTES, _WORD_BYTES = 16, 8
_BLOCK = {"int64": 2048, "int8": 4096}
_NUM_WARPS = 8


def pieces(dst: Ints, src: Ints, size: Ints, piece_bytes: int = PIECE_BYTES) -> tuple[Ints, Ints, Ints]:
    """The same copies in pieces, the first of each, then the second of each: all peers and directions get on at once.

    Copies must be independent of each other.
    """
    number = -(-size // piece_bytes)
    which = np.repeat(np.arange(len(size)), number)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)
    order = np.lexsort((which, nth))
    which, begin = which[order], nth[order] * piece_bytes
    return dst[which] + begin, src[which] + begin, np.minimum(size[which] - begin, piece_bytes)


class Copier:
    """Copies by a kernel. Acts on the device that was current when it was made."""

    def __init__(self, programs: int) -> None:
        """`programs`: how many move the bytes; each takes a multiprocessor, or the larger part of one."""
        import torch

        self.programs = _at_least_one(programs)
        self._torch: Any = torch
        self.device = torch.cuda.current_device()

    def prepare(self, dst: Ints, src: Ints, size: Ints, stream: int) -> Callable[[], None]:
        """Copies that are independent of each other, to be launched into the raw stream again and again."""
        torch, (to, of, length) = self._torch, pieces(dst, src, size)
        word = "int8" if ((to | of | length) % _VECTOR_BYTES).any() else "int64"
        words = length // _WORD_BYTES if word == "int64" else length
        table = torch.from_numpy(np.stack([to, of, words])).to(f"cuda:{self.device}")
        kernel = _loaded(self.device, word)
        grid = (min(self.programs, len(to)), 1, 1)
        address, number = table.data_ptr(), len(to)
        constants = (_word(word), _BLOCK[word])

        def launch(_held: Any = table) -> None:
            kernel[grid](address, number, *constants, stream=stream)

        return launch


@functools.cache
def _loaded(device: int, word: str) -> Any:
    """The kernel, compiled and loaded: a first launch would wait for ever behind an armed gate."""
    import torch

    from dovetail.hw.gpu.kernels.copy import copies_kernel

    with torch.cuda.device(device):
        table = torch.zeros(3, dtype=torch.int64, device="cuda")
        kernel = copies_kernel[(1,)](table.data_ptr(), 0, _word(word), _BLOCK[word], num_warps=_NUM_WARPS)
        torch.cuda.synchronize()
    return kernel


def _word(name: str) -> Any:
    import triton.language as tl

    return getattr(tl, name)


class StandInCopier:
    """The same pieces by copies of the driver, for one whose GPU is a stand-in and runs no kernels."""

    def __init__(self, driver: Driver, programs: int) -> None:
        self.programs, self._driver = _at_least_one(programs), driver

    def prepare(self, dst: Ints, src: Ints, size: Ints, stream: int) -> Callable[[], None]:
        """As `Copier.prepare`."""
        rows = list(zip(*(column.tolist() for column in pieces(dst, src, size)), strict=True))

        def launch() -> None:
            for to, of, length in rows:
                self._driver.copy(to, of, length, stream)

        return launch


def _at_least_one(programs: int) -> int:
    if programs < 1:
        raise ValueError(f"a copy kernel has at least one program, not {programs}")
    return programs


def copier(driver: Driver, programs: int) -> Copier | StandInCopier:
    """Who copies by cores here. Raises `NotSupported` on a GPU without Triton."""
    import torch

    if driver.name not in ("cuda", "hip") or not torch.cuda.is_available():
        return StandInCopier(driver, programs)
    if importlib.util.find_spec("triton") is None:
        raise NotSupported("copies by multiprocessors need Triton, which is not installed: pip install triton")
    return Copier(programs)
