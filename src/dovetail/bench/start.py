"""The start line: the barrier before every timed call, the same for all contenders.

It belongs to none of them: a few words of shared memory, so nobody's channels are warmed for him. It has two parts.
First the ranks gather: one that waits long for another sleeps, so that threads of a baseline which still send what the
other waits for get the core. Then, all being awake, they start at the same moment: each writes when it came, all take
the latest time plus a margin, and wait for that moment on the clock that the processes of a machine share. Ranks that
share cores cannot start together; they only gather.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

from dovetail.errors import Timeout

_LINE = 8
"""Words of 8 bytes in a cache line; every rank writes to a line of its own."""
_GATHERED, _READY, _CAME = 0, 1, 2
"""Words of a line: gatherings reached, starts reached, and (two, used in turn) the time of coming to a start."""
_MARGIN_NS, _MARGIN_PER_RANK_NS = 1000, 300
"""How long a rank may take to see that the last one has come."""
_SPINS, _NAP_S = 100, 20e-6


def make(path: Path, ranks: int) -> None:
    """Make the file that the ranks share."""
    path.write_bytes(bytes(8 * _LINE * ranks))


class StartLine:
    """A barrier over a shared file; `close` unmaps it."""

    def __init__(self, path: Path, rank: int, ranks: int, *, share_cores: bool, timeout_s: float) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * _LINE * ranks)
        self._words = memoryview(self._map).cast("q")
        self._own = rank * _LINE
        self._lines = [peer * _LINE for peer in range(ranks)]
        self._margin_ns = _MARGIN_NS + _MARGIN_PER_RANK_NS * ranks
        self._share_cores = share_cores
        self._timeout_s = timeout_s
        self._count = 0

    def __call__(self) -> None:
        """Wait for all ranks, then for the common moment."""
        words, clock = self._words, time.perf_counter_ns
        self._count = count = self._count + 1
        words[self._own + _GATHERED] = count
        for line in self._lines:
            if words[line + _GATHERED] < count:
                self._wait(line, count)
        if self._share_cores:
            return
        # A fast rank may write its next time while a slow one still reads this one, never the next but one.
        came = _CAME + count % 2
        words[self._own + came] = clock()
        words[self._own + _READY] = count
        for line in self._lines:
            while words[line + _READY] < count:
                pass
        begin = max([words[line + came] for line in self._lines]) + self._margin_ns
        while clock() < begin:
            pass

    def close(self) -> None:
        """Unmap; the file is its maker's to remove."""
        self._words.release()
        self._map.close()

    def _wait(self, line: int, count: int) -> None:
        """Wait for one rank to gather: look, then give the core away, then sleep."""
        words = self._words
        for _ in range(_SPINS):
            if words[line + _GATHERED] >= count:
                return
            if self._share_cores:
                os.sched_yield()
        deadline = time.monotonic() + self._timeout_s
        while words[line + _GATHERED] < count:
            time.sleep(_NAP_S)
            if time.monotonic() > deadline:
                late = line // _LINE
                raise Timeout(f"rank {late} did not come to the start line within {self._timeout_s:g} s")
