"""Tables of addresses on a device, made on the host when a call needs them.

Owns their memory. A table is found again by what is in it, and a kernel that may still read one must hold it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import NotSupported
from dovetail.hw import memory
from dovetail.hw.gpu import tensors

_CHUNK_WORDS = 1 << 14
#: So many tables are known; then all are forgotten, and calls make theirs again.
_MOST_TABLES = 4096


class Tables:
    """Addresses on the device. A place is written once and never again, and is there as long as anybody has the tensor.

    On a GPU a table is copied from pinned memory in torch's current stream, and other streams wait for that. While a
    graph is captured the copy is part of the graph, and its source is kept.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._copied: dict[tuple[int, ...], Any] = {}  # entries whose copy was issued; an event until it is done
        self._chunk: tuple[torch.Tensor, torch.Tensor] | None = None
        self._left = 0
        self._captured: list[torch.Tensor] = []

    def of(self, addresses: NDArray[np.int64]) -> torch.Tensor:
        """The table of these addresses."""
        key = (*addresses.tolist(),)
        here, there = self._found.get(key) or self._made(key)
        if self._device.type == "cpu":
            return there
        if tensors.is_capturing(self._device.index):
            if key not in self._copied:
                there.copy_(here, non_blocking=True)
                self._captured.append(here)
        elif key not in self._copied:
            there.copy_(here, non_blocking=True)
            self._copied[key] = tensors.recorded(self._device.index)
        elif (event := self._copied[key]) is not None:
            if event.query():
                self._copied[key] = None
            else:
                torch.cuda.current_stream(self._device).wait_event(event)
        return there

    def has_room(self, words: int) -> bool:
        """Whether a table of so many words can be made while a graph is captured."""
        return self._chunk is not None and self._left >= words

    def _made(self, key: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        capturing = self._device.type != "cpu" and tensors.is_capturing(self._device.index)
        if not capturing and len(self._found) >= _MOST_TABLES:
            self._found.clear()
            self._copied.clear()
            self._chunk = None
        if self._chunk is None or self._left < len(key):
            if capturing:
                raise NotSupported("no room for a table of addresses while a graph is captured: call it once before")
            self._left = max(_CHUNK_WORDS, len(key))
            with memory.lasting():
                words = torch.zeros(self._left, dtype=torch.int64, pin_memory=self._device.type != "cpu")
                self._chunk = words, words.to(self._device)
        end = len(self._chunk[0]) - self._left + len(key)
        here, there = (words[end - len(key) : end] for words in self._chunk)
        self._left -= len(key) + len(key) % 2
        here.copy_(torch.tensor(key, dtype=torch.int64))
        self._found[key] = here, there
        return here, there
