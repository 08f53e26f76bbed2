"""vLLM's shared host memory, where others read it too: other ranks, or the tiers behind it.

vLLM makes it, pins it and gives it back; a row is a chunk of all ranks, of which each has its part.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.cpu.gpu_worker import pin_mmap_region
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

_abandoned: list[Any] = []  # something may still write them


@dataclass(frozen=True, slots=True)
class Part:
    """What was pinned at once, from this rank's first byte on."""

    base: int
    size_bytes: int


class Region:
    """This rank's part of each row, as slots."""

    def __init__(self, spec: Any, *, pin: bool) -> None:
        """`spec`: one of vLLM's, with its sizes."""
        row_bytes, page_bytes = spec.kv_bytes_per_chunk, spec.cpu_page_size_per_worker
        rank = 0 if spec.replicated_layout else spec.config.parallel.rank
        known = inspect.signature(SharedOffloadRegion).parameters
        noun = "chunk" if "num_chunks" in known else "block"  # of 0.32 and of 0.29
        self.num_slots = getattr(spec, f"num_{noun}s")
        sizes = {f"num_{noun}s": self.num_slots, f"kv_bytes_per_{noun}": row_bytes, "cpu_page_size": page_bytes}
        self._region = SharedOffloadRegion(engine_id=spec.config.engine_id, rank=rank, **sizes)
        if pin:
            pin_mmap_region(self._region)
        self.slot_bytes = row_bytes
        pinned = getattr(self._region, "pinned_addresses", [])
        self.slots_per_piece = (pinned[1] - pinned[0]) // row_bytes if len(pinned) > 1 else self.num_slots
        first = self._region._base.data_ptr() + rank * page_bytes
        self._parts = []
        for slot in range(0, self.num_slots, self.slots_per_piece):
            number = min(self.slots_per_piece, self.num_slots - slot)
            self._parts.append(Part(first + slot * row_bytes, number * row_bytes - rank * page_bytes))

    @property
    def pieces(self) -> Sequence[Part]:
        """Empty once closed."""
        return tuple(self._parts)

    def close(self) -> None:
        """vLLM unpins and unmaps it."""
        if self._parts:
            self._region.cleanup()
        self._parts = []

    def abandon(self) -> None:
        """It stays mapped until the process ends."""
        _abandoned.append(self._region)
        self._parts = []
