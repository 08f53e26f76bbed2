"""Signal words: 64-bit counters that streams, kernels and the CPU all reach.

In pinned host memory, because a stream may not write a word in another GPU's memory on every driver, and because the
watchdog must be able to raise any of them. Words that a kernel of this GPU raises for streams of this GPU may lie in
its own memory (`DeviceWords`): the flag and its wait then stay on the GPU, and a stream of the table's own raises them
from outside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dovetail.hw.gpu.device import WORD_BYTES, Device
from dovetail.hw.gpu.driver import WORD, WRITE
from dovetail.hw.layout import numbered
from dovetail.plan.plan import Plan, SignalKind

#: Signal value = (run << VALUE_BITS) + v, as on the CPU: what one run waits for, an earlier one can't reach.
VALUE_BITS = 20


class WordTable:
    """The words of a plan's signals: word `index` in the block of the rank that is its home."""

    def __init__(self, homes: Sequence[tuple[int, int]], blocks: Mapping[int, tuple[int, int]], num_words: int) -> None:
        """`blocks`: (address for the CPU, address for the GPU) of each rank's words."""
        self._homes, self._blocks = list(homes), dict(blocks)
        self._views: dict[int, NDArray[np.uint64]] = {
            rank: np.ctypeslib.as_array((ctypes.c_uint64 * (num_words * WORD_BYTES // 8)).from_address(host))
            for rank, (host, _) in blocks.items()
        }

    @classmethod
    def of_one_process(cls, device: Device, plan: Plan) -> WordTable:
        """Words of a plan whose ranks all belong to this process. Their gates are one: one write opens them all."""
        num_words = max(1, len(plan.signals))
        block = device.pinned(num_words * WORD_BYTES)
        gates = [n for n, s in enumerate(plan.signals) if s.kind is SignalKind.GATE]
        homes = [(0, gates[0] if n in gates else n) for n in range(num_words)]
        return cls(homes, {0: (block.address, block.address)}, num_words)

    @classmethod
    def of_ranks(cls, plan: Plan, blocks: Mapping[int, tuple[int, int]], num_words: int) -> WordTable:
        """Words of a plan whose ranks are processes, each with a block that all of them map."""
        return cls(numbered([s.rank for s in plan.signals]), blocks, num_words)

    def address(self, signal: int) -> int:
        """Where the GPU finds the word of a signal."""
        rank, index = self._homes[signal]
        return self._blocks[rank][1] + index * WORD_BYTES

    def read(self, signal: int) -> int:
        """Its value, seen from the CPU."""
        rank, index = self._homes[signal]
        return int(self._views[rank][index * WORD_BYTES // 8])

    def raise_to(self, signal: int, value: int) -> None:
        """Raises it; a word that is there already stays. Stores of aligned words are single and ordered on the CPU."""
        rank, index = self._homes[signal]
        view, at = self._views[rank], index * WORD_BYTES // 8
        if int(view[at]) < value:
            view[at] = value


class DeviceWords(WordTable):
    """As `of_one_process`, with the words of imported signals in the device's memory. Close it when no run uses it."""

    @classmethod
    def of_one_process(cls, device: Device, plan: Plan) -> DeviceWords:
        """Words of a plan whose ranks all belong to this process."""
        plain = WordTable.of_one_process(device, plan)
        made = cls(plain._homes, plain._blocks, max(1, len(plan.signals)))
        made._place(device, [n for n, s in enumerate(plan.signals) if s.kind is SignalKind.IMPORTED])
        return made

    def _place(self, device: Device, signals: Sequence[int]) -> None:
        self._device, self._seen = device, device.pinned(WORD_BYTES)
        driver = device.driver
        self._base = driver.device_alloc(max(1, len(signals)) * WORD_BYTES)
        self._there = {signal: self._base + k * WORD_BYTES for k, signal in enumerate(signals)}
        self._stream = driver.stream_create()
        driver.fill(self._base, 0, max(1, len(signals)) * WORD_BYTES, self._stream)
        driver.stream_synchronize(self._stream)

    def address(self, signal: int) -> int:
        """Where the GPU finds the word of a signal."""
        return self._there.get(signal) or super().address(signal)

    def read(self, signal: int) -> int:
        """Its value; one on the device is copied, which takes microseconds and waits for no other stream."""
        if signal not in self._there:
            return super().read(signal)
        driver = self._device.driver
        driver.copy(self._seen.address, self._there[signal], WORD_BYTES, self._stream)
        driver.stream_synchronize(self._stream)
        return ctypes.c_uint64.from_address(self._seen.address).value

    def raise_to(self, signal: int, value: int) -> None:
        """Raises it; a word that is there already stays."""
        if signal not in self._there:
            super().raise_to(signal, value)
        elif self.read(signal) < value:
            row = np.zeros(1, WORD)
            row["kind"], row["address"], row["value"] = WRITE, self._there[signal], value
            self._device.driver.stream_words(row, self._stream)

    def close(self) -> None:
        """Gives the memory back."""
        if self._base:
            self._device.driver.stream_destroy(self._stream)
            self._device.driver.device_free(self._base)
        self._base = 0
