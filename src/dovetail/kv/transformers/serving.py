"""Prefixes for the blocks of a `PagedMemory` on a GPU, with a mover that knows whether the GPU computes.

`auto` chooses by that. The fence that a fetch comes behind does not tell it: the stream that computes does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TypeVar

from dovetail.hw.gpu.device import Device
from dovetail.kv.choose import Path
from dovetail.kv.memory import DriverPinner, HostMemory
from dovetail.kv.mover import GpuMover, GpuTransfer
from dovetail.kv.planner import Direction, Table
from dovetail.kv.pool import Pool
from dovetail.kv.prefixes import Prefixes, slots_of
from dovetail.kv.transformers import order
from dovetail.kv.transformers.memory import PagedMemory


class ServingMover(GpuMover):
    """Copies of a server: what it begins while the current stream has work to do runs beside computation."""

    def __init__(self, device: Device, memory: PagedMemory, pieces: Sequence[int]) -> None:
        super().__init__(device, memory.tokens.data_ptr(), pieces)
        self._where = memory.device

    def submit(
        self,
        direction: Direction | str,
        table: Table,
        path: Path | str = Path.AUTO,
        *,
        after: Sequence[int] = (),
        beside: bool | None = None,
        entries_per_call: int | None = None,
    ) -> GpuTransfer:
        """As `GpuMover.submit`. A prefix that is begun says `beside` itself, for all its parts."""
        if beside is None and after:
            beside = order.is_computing(self._where)
        return super().submit(
            direction, table, path, after=after, beside=beside, entries_per_call=entries_per_call
        )


Mover = TypeVar("Mover", bound=ServingMover)


def prefixes(
    memory: PagedMemory, device: Device, pool_bytes: int, path: Path | str, kind: type[Mover]
) -> tuple[Prefixes, Mover]:
    """Prefixes of these blocks in pinned memory, and who moves them.

    Raises:
        ValueError: the pool would not hold a block.
        HardwareError: it can't be pinned; nothing is left behind.
    """
    slot_bytes = memory.layout.slot_bytes
    slots = slots_of(pool_bytes, slot_bytes)
    host = HostMemory(slots, slot_bytes, pinner=DriverPinner(device.driver, device.enter))
    with contextlib.ExitStack() as made:  # what was made goes again if the rest is refused
        made.callback(host.close)
        mover = kind(device, memory, [piece.base for piece in host.pieces])
        made.enter_context(mover)
        mover.prepare(path, memory.layout.strided_rows)
        found = Prefixes(memory.layout, Pool(host), mover, path)
        made.pop_all()
    return found, mover
