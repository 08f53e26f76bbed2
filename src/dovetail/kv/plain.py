"""Copies of a plan where the cache is in host memory too: on the calling thread, over when they are submitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dovetail.kv.choose import Path
from dovetail.kv.planner import Direction, Table


class CpuMover:
    """Copies between a cache in host memory and pieces of host memory, on the calling thread."""

    def __init__(self, cache: Any, pieces: Sequence[Any]) -> None:
        """Flat arrays of bytes."""
        self._cache, self._pieces = cache, list(pieces)

    def submit(
        self,
        direction: Direction | str,
        table: Table,
        path: Path | str = Path.CPU,
        *,
        after: Sequence[int] = (),
        beside: bool | None = None,
    ) -> CpuTransfer:
        """Moves everything before it returns. There are no streams to be `after`, and nothing to choose."""
        self.check(after)
        if Path(path) is not Path.CPU:
            raise ValueError(f"a cache in host memory is moved by the path {Path.CPU}, not {path}")
        fetch = Direction(direction) is Direction.FETCH
        columns = (
            table.device, table.piece, table.host, table.width, table.rows, table.device_pitch, table.host_pitch,
        )  # fmt: skip
        for device, piece, host, width, rows, pitch, host_pitch in zip(*(c.tolist() for c in columns), strict=True):
            there = _strides(self._cache, device, width, rows, pitch)
            here = _strides(self._pieces[piece], host, width, rows, host_pitch)
            if fetch:
                there[...] = here
            else:
                here[...] = there
        return CpuTransfer()

    def check(self, after: Sequence[int]) -> None:
        """Raises ValueError if there is a stream to be `after`."""
        if after:
            raise ValueError("a cache in host memory has no streams: wait for its writers before you call")

    def is_idle(self, direction: Direction | str) -> bool:
        """Always: what it moves, it moves before it returns."""
        return True

    def fewest_copies(self, path: Path, num_blocks: int, num_runs: int) -> int:
        """One for each block."""
        return num_blocks


def _strides(memory: Any, offset: int, width: int, rows: int, pitch: int) -> Any:
    """Rows of a flat array of bytes, checked against its end."""
    last = offset + (rows - 1) * pitch + width
    if offset < 0 or last > len(memory):
        raise ValueError(f"bytes {offset} to {last} are outside a memory of {len(memory)} bytes")
    return np.lib.stride_tricks.as_strided(memory[offset:], (rows, width), (pitch, 1))


class CpuTransfer:
    """Over when it is made."""

    def is_over(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout_s: float = 60.0) -> None:
        """Returns at once."""
