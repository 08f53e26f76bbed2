"""Launches of kernels that wait for other ranks, on torch's current stream: their order, and what must stay meanwhile.

Runs of a group follow each other, on whichever streams. A kernel that was launched before with arguments like these is
launched directly: Triton's own way looks at each of them again, which takes the host longer than a small kernel the
GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from dovetail.hw.gpu import tensors
from dovetail.ops.gpu.status import Status
from dovetail.ops.gpu.tables import is_capturing, recorded
from dovetail.ops.gpu.tiles import Blocks

#: Kernels, by what they were compiled for; then all are forgotten, and Triton finds them again.
_MOST_COMPILED = 1024
_ALIGNED = 15  # Triton compiles for addresses that are multiples of 16, or for any


class Launcher:
    """Of a group's kernels on one device; under Triton's interpreter a launch returns when the kernel has ended."""

    def __init__(self, device: torch.device, status: Status, *, interpreted: bool) -> None:
        self._device, self._status, self._interpreted = device, status, interpreted
        self.held: deque[tuple[Any, Any]] = deque()  #: (event behind a run, what it uses)
        self.captured: list[Any] = []  #: replays use this memory as long as their graph lives
        self._last = 0  # the stream of the last launch
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    def begin(self) -> None:
        """Lets go of what no run uses any more. What the current stream is given next comes behind the runs so far."""
        if is_capturing(self._device):
            return  # a capture would end if an event were asked for
        held = self.held
        while held and (held[0][0] is None or held[0][0].query()):
            held.popleft()
        if held and not self._interpreted and self._last != tensors.current_stream(self._device.index):
            # What this call writes, an earlier run may still be reading.
            torch.cuda.current_stream(self._device).wait_event(held[-1][0])

    def run(
        self, kernel: Any, programs: int, blocks: Blocks, held: Any, args: Sequence[Any],
        then: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Launches, and does `then` behind it, as a part of the run; returns what that does.

        Args:
            held: what must stay until the run has ended: memory that peers use, and tables, which may have been made on
                another stream.
        """
        if self._interpreted:
            self._status.begun()
            try:
                kernel[(1,)](*args)
            finally:
                self._status.ended()
            self.held.append((None, held))
            return then() if then is not None else None
        self._put(kernel, programs, blocks, args)
        made = then() if then is not None else None
        if is_capturing(self._device):
            self.captured.append(held)
            self._status.begun(captured=True)
        else:
            event = recorded(self._device)
            self.held.append((event, held))
            self._last = tensors.current_stream(self._device.index)
            self._status.begun(event)
        return made

    def _put(self, kernel: Any, programs: int, blocks: Blocks, args: Sequence[Any]) -> None:
        key: list[Hashable] = [id(kernel), programs, blocks.warps, blocks.stages]
        numbers: list[Any] = []
        for a in args:
            if isinstance(a, torch.Tensor):
                address = a.data_ptr()
                numbers.append(address)
                key.append((a.dtype, address & _ALIGNED == 0))
            else:
                numbers.append(a)
                key.append(a)
        known = self._compiled.get(tuple(key))
        if known is not None and torch.cuda.current_device() == self._device.index:
            known(*numbers, stream=tensors.current_stream(self._device.index))
            return
        with torch.cuda.device(self._device):
            compiled = kernel[(programs,)](*args, num_warps=blocks.warps, num_stages=blocks.stages)
        if torch.version.hip is None:  # there Triton also looks at how large a tensor's memory is
            if len(self._compiled) >= _MOST_COMPILED:
                self._compiled.clear()
            self._compiled[tuple(key)] = compiled[programs, 1, 1]

    def forget(self) -> tuple[Any, ...]:
        """What runs may still use; it is not this object's any more."""
        left = self.held, self.captured
        self.held, self.captured = deque(), []
        return left
