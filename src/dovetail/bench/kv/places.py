"""Where cache and pool lie: in host memory, or on a GPU with a pinned pool beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.bench.kv.load import Load
from dovetail.errors import NotSupported
from dovetail.kv.choose import Path
from dovetail.kv.mover import GpuMover, Transfer
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Table
from dovetail.kv.staging import has_kernel

if TYPE_CHECKING:
    import torch

    from dovetail.bench.gpu.session import Session

Bytes = NDArray[np.uint8]


class Place(Protocol):
    """Where cache and pool lie."""

    backend: str

    def paths(self) -> tuple[str, ...]:
        """What can move bytes here."""

    def load(self, name: str) -> Load:
        """What computes beside the transfers."""

    def begin(self, cache_bytes: int, pool_bytes: int) -> None:
        """Takes the memory; raises ValueError or NotSupported where there is not so much."""

    def submit(
        self, direction: Direction, copies: Table, path: Path, entries: int | None, beside: bool
    ) -> Transfer: ...

    def host(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the pool, to be read and written."""

    def read(self, offset: int, size_bytes: int) -> Bytes:
        """A copy of bytes of the cache."""

    def fill(self, offset: int, size_bytes: int, byte: int) -> None:
        """Overwrites bytes of the cache."""


#: Memory that is touched at a time: between two such steps Ctrl-C is looked at. New pages may take 2 s for a GB.
_TOUCHED_BYTES, _PAGE_BYTES = 64 << 20, 4096


class CpuPlace:
    """Cache and pool in host memory."""

    backend = "cpu"

    def paths(self) -> tuple[str, ...]:
        """Plain copies."""
        return (Path.CPU,)

    def load(self, name: str) -> Load:
        """There is no GPU to be busy."""
        raise ValueError(f"--beside {name} needs --backend cuda: copies in host memory run on the calling thread")

    def begin(self, cache_bytes: int, pool_bytes: int) -> None:
        """Takes the memory and touches it."""
        from dovetail.hw import memory

        memory.require(cache_bytes + pool_bytes)
        self._cache, self._pool = np.zeros(cache_bytes, np.uint8), np.zeros(pool_bytes, np.uint8)
        for made in (self._cache, self._pool):
            for at in range(0, len(made), _TOUCHED_BYTES):
                made[at : at + _TOUCHED_BYTES : _PAGE_BYTES] = 1
        self._mover = CpuMover(self._cache, [self._pool])

    def submit(self, direction: Direction, copies: Table, path: Path, entries: int | None, beside: bool) -> Transfer:
        """Moves at once."""
        return self._mover.submit(direction, copies, path)

    def host(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the pool."""
        return self._pool[offset : offset + size_bytes]

    def read(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the cache."""
        return self._cache[offset : offset + size_bytes].copy()

    def fill(self, offset: int, size_bytes: int, byte: int) -> None:
        """Overwrites bytes of the cache."""
        self._cache[offset : offset + size_bytes] = byte


class GpuPlace:
    """The cache in a GPU's memory, the pool in pinned memory beside it."""

    backend = "cuda"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mover: GpuMover | None = None
        self._cache: torch.Tensor
        self._pool: torch.Tensor

    def paths(self) -> tuple[str, ...]:
        """The forms that copy engines know."""
        forms: tuple[str, ...] = (Path.AUTO, Path.DMA_2D, Path.DMA_BATCH, Path.DMA_LOOP)
        return (*forms, Path.STAGED, Path.MIXED, Path.KERNEL) if has_kernel() else forms

    def load(self, name: str) -> Load:
        """What computes beside; raises `NotSupported` without a GPU that torch can use."""
        if not self._session.has_torch:
            raise NotSupported(f"--beside {name} needs a GPU that torch can use")
        return Load(name)

    def begin(self, cache_bytes: int, pool_bytes: int) -> None:
        """Takes and pins the memory, if it has not enough of it."""
        if self._mover is not None and cache_bytes <= len(self._cache) and pool_bytes <= len(self._pool):
            return
        self.close()
        self._cache = self._session.arena("device", cache_bytes).take(cache_bytes)
        self._pool = self._session.arena("host", pool_bytes).take(pool_bytes)
        self._view: Bytes = self._pool.numpy()
        self._mover = GpuMover(self._session.device, self._cache.data_ptr(), [self._pool.data_ptr()])

    def submit(self, direction: Direction, copies: Table, path: Path, entries: int | None, beside: bool) -> Transfer:
        """Starts copies."""
        assert self._mover is not None
        return self._mover.submit(direction, copies, path, entries_per_call=entries, beside=beside)

    def host(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the pool."""
        return self._view[offset : offset + size_bytes]

    def read(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the cache."""
        self._session.synchronize()
        found: Bytes = self._cache[offset : offset + size_bytes].cpu().numpy()
        return found

    def fill(self, offset: int, size_bytes: int, byte: int) -> None:
        """Overwrites bytes of the cache."""
        self._cache[offset : offset + size_bytes].fill_(byte)
        self._session.synchronize()

    def close(self) -> None:
        """Waits for what is under way."""
        if self._mover is not None:
            self._mover.close()
