"""What torch tells about its current streams, on a torch that has no GPU: captures and events are those of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dovetail.errors import NotSupported
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.world import world_of


class Streams:
    """torch.cuda with two devices: which is current, whose current stream captures, where events were recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.capturing, self.recorded = 0, {1}, [""]
        self.asked = 0  # for a stream as torch's object
        self.recorded.clear()
        for name, fake in {
            "is_initialized": lambda: True, "current_device": lambda: self.now, "device": self.device,
            "is_current_stream_capturing": lambda: self.now in self.capturing, "current_stream": self.current_stream,
            "Event": self.event,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
        tensors._stream.cache_clear()

    @contextlib.contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.now = self.now, index
        try:
            yield
        finally:
            self.now = before

    def current_stream(self, device: int) -> str:
        self.asked += 1
        return f"stream of {device}"

    def event(self) -> Any:
        streams = self

        class Event:
            def record(self, stream: str) -> None:
                streams.recorded.append(stream)

        return Event()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    yield Streams(monkeypatch)
    tensors._stream.cache_clear()


def test_a_capture_is_that_of_the_device_that_is_asked_about(streams: Streams) -> None:
    assert [tensors.is_capturing(device) for device in (0, 1, None)] == [False, True, False]
    streams.now = 1
    assert [tensors.is_capturing(device) for device in (0, 1, None)] == [False, True, True]
    assert streams.now == 1


def test_events_are_recorded_in_the_current_stream_of_a_device(streams: Streams) -> None:
    for device in (0, 1, 1, 0):
        tensors.recorded(device)
    assert streams.recorded == ["stream of 0", "stream of 1", "stream of 1", "stream of 0"]
    assert streams.asked == 2, "torch is asked once for each stream"


def test_a_torch_that_was_not_used_captures_nothing() -> None:
    assert not tensors.is_capturing()
    assert tensors.current_stream(0) == 0


def test_a_torch_that_uses_no_gpu_has_no_tensors_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a driver may have a torch without it: what the driver gives would be taken for the host's."""
    if torch.cuda.is_available():
        pytest.skip("torch uses a GPU here")
    monkeypatch.delenv("DOVETAIL_CUDA_LIBRARY", raising=False)
    with pytest.raises(NotSupported, match="uses no GPU here.*no tensor on cuda:3: install a torch"):
        tensors.require_gpu("cuda", 3)
    with pytest.raises(NotSupported, match="uses no GPU here"):
        world_of(SimpleNamespace(gpu=None), "cuda", 0)  # type: ignore[arg-type]
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", "some/other.so")
    tensors.require_gpu("cuda", 0)
