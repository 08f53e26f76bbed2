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
from dovetail.ops.gpu.tiles import Blocks

#: Kernels, by what they were compiled for; then all are forgotten, and Triton finds them again.
_MOST_COMPILED = 1024
_UNALIGNED = 15  # Triton compiles for addresses that are multiples of 16, or for any


class Again(NamedTuple):
    """How a call like one that was made is made again: what its kernel's arguments begin with."""

    #: Makes those tensors of x and w.
    first: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
    result: int | None = None  #: which of them is the result, if one is


class Launch(NamedTuple):
    """A kernel that is launched directly, with the arguments that calls like each other have in common."""

    kernel: Callable[..., Any]
    rest: Sequence[Any]  #: of the arguments, behind the tensors of a call; addresses, but for the interpreter
    held: Any  #: must stay until the run has ended
    then: Callable[[], torch.Tensor] | None  #: done behind it, as a part of the run
    again: Again | None  #: None if peers write to new memory in each call


def is_aligned(*given: torch.Tensor) -> bool:
    """Whether a kernel that Triton compiled for multiples of 16 bytes takes all of these."""
    return not any(t.data_ptr() & _UNALIGNED for t in given)


class Launcher:
    """Of a group's kernels on one device; under Triton's interpreter a launch returns when the kernel has ended."""

    def __init__(self, device: torch.device, status: Status, *, interpreted: bool) -> None:
        self._device, self._status, self.interpreted = device, status, interpreted
        self.held: deque[tuple[Any, Any]] = deque()  #: (event behind a run, what it uses)
        self.captured: list[Any] = []  #: replays use this memory as long as their graph lives
        self.latest: Launch | None = None  #: of the call that is being made, if it went directly
        self._stream = 0  # of the latest
        self._compiled: dict[Hashable, Callable[..., None]] = {}

    @property
    def is_capturing(self) -> bool:
        """Whether torch's current stream captures a graph."""
        return not self.interpreted and tensors.is_capturing(self._device.index)

    def begin(self) -> None:
        """Lets go of what no run uses any more. What the current stream is given next comes behind the runs so far."""
        self.latest = None
        if self.is_capturing:
            return  # a capture would end if an event were asked for
        held = self.held
        while held and (held[0][0] is None or held[0][0].query()):
            held.popleft()
        if held and not self.interpreted and self._stream != tensors.current_stream(self._device.index):
            # What this call writes, an earlier run may still be reading.
            torch.cuda.current_stream(self._device).wait_event(held[-1][0])

    def run(
        self, kernel: Any, programs: int, blocks: Blocks, held: Any, first: Sequence[torch.Tensor], rest: Sequence[Any],
        *, then: Callable[[], torch.Tensor] | None = None, again: Again | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Launches a kernel of Triton's, and does `then` behind it; returns what that does.

        Args:
            held: what must stay until the run has ended: memory that peers use, and tables, which may have been made on
                another stream. Not what is this rank's alone: torch keeps that for the current stream.
            first: what the arguments begin with; `rest` follows.
            again: how to make the call again.
        """
        if self.interpreted:
            return self.launch(Launch(kernel[(1,)], rest, held, then, again), first)
        key: list[Hashable] = [id(kernel), programs, blocks.warps, blocks.stages]
        numbers: list[Any] = []
        for a in (*first, *rest):
            if isinstance(a, torch.Tensor):
                numbers.append(a.data_ptr())
                key.append((a.dtype, is_aligned(a)))
            else:
                numbers.append(a)
                key.append(a)
        known = self._compiled.get(tuple(key))
        if known is not None:
            return self.launch(Launch(known, numbers[len(first) :], held, then, again), first)
        slow = functools.partial(self._by_triton, kernel, programs, blocks, tuple(key))
        return self._launched(slow, (*first, *rest), held, then)

    def launch(self, launch: Launch, first: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The same for what was launched before; `first` may be others of the same alignment."""
        self.latest = launch
        args = first if self.interpreted else [t.data_ptr() for t in first]
        return self._launched(launch.kernel, (*args, *launch.rest), launch.held, launch.then)

    def _launched(
        self, kernel: Callable[..., Any], args: Sequence[Any], held: Any, then: Callable[[], torch.Tensor] | None
    ) -> torch.Tensor | None:
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
        try:
            return then() if then is not None else None
        finally:  # the kernel runs, whatever became of the rest
            if self.is_capturing:
                self.captured.append(held)
                self._status.begun(captured=True)
            else:
                event = tensors.recorded(self._device.index)
                self.held.append((event, held))
                self._stream = stream
                self._status.begun(event)

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
