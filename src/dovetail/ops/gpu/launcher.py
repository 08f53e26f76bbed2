"""Launches of kernels that wait for other ranks, on torch's current stream: their order, and what must stay meanwhile.

Runs of a group follow each other, on whichever streams. A kernel that was launched before with arguments like these is
launched directly: Triton's own way looks at each of them again, which takes the host longer than a small kernel the
GPU.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from dovetail.hw.gpu import tensors
from dovetail.ops.gpu.status import Status
from dovetail.ops.gpu.tables import is_capturing, recorded
from dovetail.ops.gpu.tiles import Blocks

#: Kernels, by what they were compiled for; then all are forgotten, and Triton finds them again.
_MOST_COMPILED = 1024
_UNALIGNED = 15  # Triton compiles for addresses that are multiples of 16, or for any


class Launch(NamedTuple):
    """A kernel with its arguments."""

    kernel: Callable[..., Any]
    args: Sequence[Any]  #: numbers if it is launched directly, otherwise with tensors among them
    held: Any  #: must stay until the run has ended
    then: Callable[[], torch.Tensor] | None  #: done behind it, as a part of the run
    is_direct: bool


class Launcher:
    """Of a group's kernels on one device; under Triton's interpreter a launch returns when the kernel has ended."""

    def __init__(self, device: torch.device, status: Status, *, interpreted: bool) -> None:
        self._device, self._status, self.interpreted = device, status, interpreted
        self.held: deque[tuple[Any, Any]] = deque()  #: (event behind a run, what it uses)
        self.captured: list[Any] = []  #: replays use this memory as long as their graph lives
        self.latest: Launch | None = None
        self._stream = 0  # of the latest
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    def begin(self) -> None:
        """Lets go of what no run uses any more. What the current stream is given next comes behind the runs so far."""
        self.latest = None
        if is_capturing(self._device):
            return  # a capture would end if an event were asked for
        held = self.held
        while held and (held[0][0] is None or held[0][0].query()):
            held.popleft()
        if held and not self.interpreted and self._stream != tensors.current_stream(self._device.index):
            # What this call writes, an earlier run may still be reading.
            torch.cuda.current_stream(self._device).wait_event(held[-1][0])

    def run(
        self, kernel: Any, programs: int, blocks: Blocks, held: Any, args: Sequence[Any],
        then: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Launches a kernel of Triton's, and does `then` behind it; returns what that does.

        Args:
            held: what must stay until the run has ended: memory that peers use, and tables, which may have been made on
                another stream.
        """
        if self.interpreted:
            return self.launch(Launch(kernel[(1,)], args, held, then, True))
        key: list[Hashable] = [id(kernel), programs, blocks.warps, blocks.stages]
        numbers: list[Any] = []
        for a in args:
            if isinstance(a, torch.Tensor):
                address = a.data_ptr()
                numbers.append(address)
                key.append((a.dtype, address & _UNALIGNED == 0))
            else:
                numbers.append(a)
                key.append(a)
        known = self._compiled.get(tuple(key))
        if known is not None:
            return self.launch(Launch(known, numbers, held, then, True))
        slow = functools.partial(self._by_triton, kernel, programs, blocks, tuple(key))
        return self.launch(Launch(slow, args, held, then, False))

    def launch(self, launch: Launch) -> torch.Tensor | None:
        """The same for what was launched before; tensors among the arguments may be others of the same alignment."""
        self.latest = launch
        kernel, args, held, then, _ = launch
        if self.interpreted:
            self._status.begun()
            try:
                kernel(*args)
            finally:
                self._status.ended()
            self.held.append((None, held))
            return then() if then is not None else None
        stream = tensors.current_stream(self._device.index)
        if torch.cuda.current_device() == self._device.index:
            kernel(*args, stream=stream)
        else:
            with torch.cuda.device(self._device):
                kernel(*args, stream=stream)
        made = then() if then is not None else None
        if is_capturing(self._device):
            self.captured.append(held)
            self._status.begun(captured=True)
        else:
            event = recorded(self._device)
            self.held.append((event, held))
            self._stream = stream
            self._status.begun(event)
        return made

    def _by_triton(
        self, kernel: Any, programs: int, blocks: Blocks, key: Hashable, *args: Any, stream: int
    ) -> None:  # fmt: skip
        compiled = kernel[(programs,)](*args, num_warps=blocks.warps, num_stages=blocks.stages)
        if torch.version.hip is None:  # there Triton also looks at how large a tensor's memory is
            if len(self._compiled) >= _MOST_COMPILED:
                self._compiled.clear()
            self._compiled[key] = compiled[programs, 1, 1]

    def forget(self) -> tuple[Any, ...]:
        """What runs may still use; it is not this object's any more."""
        left = self.held, self.captured
        self.held, self.captured, self.latest = deque(), [], None
        return left
