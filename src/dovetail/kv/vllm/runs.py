"""Our slot allocator in the place of vLLM's free list: a store gets few contiguous runs of chunks.

vLLM's manager pops chunk numbers one at a time; `reserve` tells how many are about to be popped, so that they are taken
together.
"""

from __future__ import annotations

from dovetail.kv.slots import SlotAllocator


class FreeRuns:
    """Free chunks, with the four methods that vLLM's manager uses of a list."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        self.clear()

    def clear(self) -> None:
        """All chunks are free."""
        self._allocator = SlotAllocator(self._num_chunks)
        self._reserved: list[int] = []

    def reserve(self, number: int) -> None:
        """Takes chunks for the next `number` pops, in as few runs as can be."""
        unused, self._reserved = self._reserved, []  # theirs no more, also if `alloc` refuses
        if unused:
            self._allocator.free(unused)
        self._reserved = self._allocator.alloc(number).tolist()[::-1]

    def pop(self) -> int:
        """A chunk that was free."""
        return self._reserved.pop() if self._reserved else int(self._allocator.alloc(1)[0])

    def append(self, chunk: int) -> None:
        """Gives a chunk back."""
        self._allocator.free([chunk])

    def __len__(self) -> int:
        return self._allocator.num_free + len(self._reserved)
