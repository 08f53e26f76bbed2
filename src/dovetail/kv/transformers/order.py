"""Order between copies and computation: who waits for whom, as events between streams.

On a GPU nothing here blocks the CPU. On the CPU there are no streams: waiting is done where a stream would.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail.kv.mover import Transfer


def join(transfer: Transfer, device: torch.device) -> None:
    """What the current stream of `device` is given from now on comes after the last byte."""
    if device.type == "cuda":
        _join(transfer, torch.cuda.current_stream(device).cuda_stream)
    else:
        transfer.wait()


def computing(device: torch.device) -> tuple[int, ...]:
    """The current stream, for `after`: copies then begin behind what it has been given so far."""
    return (torch.cuda.current_stream(device).cuda_stream,) if device.type == "cuda" else ()


def is_computing(device: torch.device) -> bool | None:
    """Whether the current stream has work to do; None where there are no streams."""
    return not torch.cuda.current_stream(device).query() if device.type == "cuda" else None


class Fence:
    """What the next user of some memory has to wait for: a stream that runs nothing and only waits.

    It is told of readers and writers; `after` hands it to copies, `enter` makes the current stream wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream
        self._stream: Any = make(device) if device.type == "cuda" else None

    def behind_compute(self) -> None:
        """Waits for what the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def behind(self, transfer: Transfer) -> None:
        """Waits for the last byte of a transfer."""
        if self._stream is not None:
            _join(transfer, self._stream.cuda_stream)
        else:
            transfer.wait()

    @property
    def after(self) -> tuple[int, ...]:
        """For copies: they begin behind all that this fence was told of so far."""
        return () if self._stream is None else (self._stream.cuda_stream,)

    def enter(self) -> None:
        """What the current stream is given from now on comes behind it too."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class Arrivals:
    """Waits of a graph: before layer n it waits for the transfer that was last expected for it, if any.

    A graph that runs must be over before something else is expected: it waits for whatever an event stands for then.
    """

    def __init__(self, device: torch.device, num_layers: int, stream: Any) -> None:
        """`stream`: one of torch's that only waits; several may share it."""
        cuda: Any = torch.cuda
        self._device, self._stream = device, stream
        self._events = [cuda.Event(external=True) for _ in range(num_layers)]
        for event in self._events:  # one that was never recorded is waited for by nobody
            event.record(self._stream)

    def expect(self, layer: int, transfer: Transfer) -> None:
        """Layer `layer` of the next run, and those behind it, come after the last byte."""
        _join(transfer, self._stream.cuda_stream)
        self._events[layer].record(self._stream)

    def wait(self, layer: int) -> None:
        """Called while the graph is captured: what is captured from now on waits."""
        torch.cuda.current_stream(self._device).wait_event(self._events[layer])


def _join(transfer: Transfer, stream: int) -> None:
    reach: Any = transfer
    reach.join(stream)
