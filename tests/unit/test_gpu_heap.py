"""The heap on a GPU: blocks that are apart, used again only when the stream is that far, and full in a clear way."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu import tensors
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.driver import WAIT, WORD, Kind
from dovetail.hw.gpu.heap import Heap, PinnedSource

from .gpulib import Control, until, view

MB = 1 << 20


@pytest.fixture(scope="module")
def control() -> Control:
    return Control()


@pytest.fixture
def device(control: Control) -> Iterator[Device]:
    control.reset()
    made = control.device()
    yield made
    control.reset()
    made.close()


@pytest.mark.parametrize("kind", ["device", "host"])
def test_blocks_are_apart(device: Device, kind: str) -> None:
    """Random sizes taken and given back: blocks never share a byte, and all comes back."""
    heap = Heap(device, kind, segment_bytes=MB)
    rng = random.Random(1)
    held: dict[int, int] = {}
    for _ in range(500):
        if held and rng.random() < 0.45:
            address = rng.choice(list(held))
            del held[address]
            heap.free(address)
        else:
            size = rng.choice((1, 100, 4096, 5000, 70_000, MB + 1))
            held[heap.alloc(size)] = size
        spans = sorted((a, a + n) for a, n in held.items())
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert heap.used_bytes == sum(-(-n // 4096) * 4096 for n in held.values())
    for address, size in held.items():
        found = heap.find(address, size)
        assert found is not None
        assert found[0].base + found[1] == address
        assert device.driver.memory_at(address).kind is heap.kind
        heap.free(address)
    assert all(s.free == [(0, s.size_bytes)] for s in heap.segments), "neighbours were not joined"
    heap.close()


def test_find(device: Device) -> None:
    heap, other = Heap(device, segment_bytes=MB), Heap(device, segment_bytes=MB)
    address = heap.alloc(100)
    segment, offset = heap.find(address + 8, 10) or pytest.fail("it is on the heap")
    assert offset == 8
    assert len(segment.handle) == 64
    assert heap.find(address, 2 * MB) is None  # reaches beyond the segment
    assert other.find(address, 1) is None
    heap.close()
    other.close()


def test_tensors(device: Device) -> None:
    with pytest.raises(ValueError, match="'device' or 'host', not 'gpu'"):
        Heap(device, "gpu")
    heap = Heap(device, segment_bytes=MB)
    with pytest.raises(ValueError, match="no negative sizes"):
        heap.empty((3, -1), torch.float32)
    assert heap.empty((0, 5), torch.float32).shape == (0, 5)
    t = heap.empty((3, 5), torch.bfloat16)
    assert (t.shape, t.dtype, t.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    assert t.data_ptr() % 4096 == 0
    t.fill_(2.0)
    assert heap.used_bytes == 4096
    part = t[1]
    del t
    gc.collect()
    heap.alloc(1)
    assert heap.used_bytes == 8192, "a view of it is alive"
    assert part.tolist() == [2.0] * 5
    del part
    device.driver.stream_synchronize(0)
    heap.alloc(1)
    assert heap.used_bytes == 8192
    heap.close()


def test_used_again_when_the_stream_is_that_far(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose tensor died is in use until what stood in the current stream at that moment is done."""
    driver = device.driver
    device.enter()
    stream, word = driver.stream_create(), device.pinned(64)
    monkeypatch.setattr(tensors, "current_stream", lambda index: stream)
    heap = Heap(device, segment_bytes=MB)
    t = heap.empty((MB,), torch.uint8)
    address = t.data_ptr()
    driver.stream_words(np.array([(WAIT, word.address, 1)], WORD), stream)
    driver.fill(address, 7, MB, stream)
    del t
    second = heap.alloc(MB)
    assert second != address, "given out while the stream still writes it"
    word.array[:8].view(np.uint64)[0] = 1
    driver.stream_synchronize(stream)
    assert heap.alloc(MB) == address
    assert view(address, MB).min() == 7
    heap.close()
    driver.stream_destroy(stream)


def test_while_a_graph_is_captured(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that comes back meanwhile waits for the end of the capture, and the heap does not grow."""
    heap, driver = Heap(device, segment_bytes=MB), device.driver
    gone = heap.empty((MB,), torch.uint8)
    address = gone.data_ptr()
    device.enter()
    stream = driver.stream_create()
    monkeypatch.setattr(tensors, "current_stream", lambda _: stream)
    driver.graph_begin(stream)
    del gone
    gc.collect()
    with pytest.raises(NotSupported, match="captures a graph: allocate before"):
        heap.alloc(1)
    driver.graph_destroy(driver.graph_end(stream))
    heap._collect()  # marked now that it can be
    driver.stream_synchronize(stream)
    assert heap.alloc(MB) == address
    heap.close()
    driver.stream_destroy(stream)


def test_given_back_from_any_thread_and_inside_any_lock(device: Device) -> None:
    """The garbage collector may come in the middle of anything."""
    heap = Heap(device, segment_bytes=MB)
    errors: list[object] = []
    hook, sys.unraisablehook = sys.unraisablehook, errors.append

    def drop() -> None:
        mine = [heap.empty((10,), torch.uint8)]
        mine.append(mine)  # type: ignore[arg-type]
        del mine
        with device._lock, heap._lock:
            gc.collect()

    try:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "a finalizer waits for a lock that its own thread holds"
        late = heap.empty((10,), torch.uint8)
        plain = threading.Thread(target=lambda held: held.clear(), args=([late],))
        del late
        plain.start()
        plain.join(10)
    finally:
        sys.unraisablehook = hook
    assert not errors
    device.driver.stream_synchronize(0)
    heap.alloc(1)
    assert heap.used_bytes == 4096
    heap.close()


def test_full(control: Control, device: Device) -> None:
    """First a smaller segment is tried, then the error names the size; what fits afterwards works."""
    heap = Heap(device, segment_bytes=MB)
    heap.alloc(MB)
    control.set(FAIL="cuMemAlloc:2:1")  # the large segment is refused, one of the asked size is not
    heap.alloc(8192)
    assert heap.segments[-1].size_bytes == 8192
    control.set(FAIL="cuMemAlloc:2:0")
    with pytest.raises(HardwareError, match="no device memory for 12288 bytes of heap on stand-in 0: .*OUT_OF_MEMORY"):
        heap.alloc(10_000)
    control.set(FAIL="")
    heap.alloc(10_000)
    heap.close()
    host = Heap(device, "host", segment_bytes=MB)
    control.set(FAIL="cuMemHostAlloc:2:0")
    with pytest.raises(HardwareError, match="no pinned memory for 4096 bytes"):
        host.alloc(1)
    control.set(FAIL="")
    host.close()


def test_more_host_memory_than_there_is(device: Device) -> None:
    with pytest.raises(HardwareError, match="no pinned memory .*available"):
        Heap(device, "host", source=PinnedSource(device)).alloc(1 << 50)


def test_closing(control: Control, device: Device) -> None:
    """Twice; memory goes with the last tensor over it; a closed heap gives nothing."""
    heap = Heap(device, segment_bytes=MB)
    t, u = heap.empty((100,), torch.uint8), heap.empty((100,), torch.uint8)
    del u
    control.calls()
    heap.close()
    heap.close()
    assert not control.calls("cuMemFree")
    assert t.fill_(3).tolist() == [3] * 100
    with pytest.raises(HardwareError, match="is closed"):
        heap.alloc(1)
    del t
    gc.collect()
    assert len(control.calls("cuMemFree")) == 1
    assert not heap.segments
    assert heap.kind is Kind.DEVICE
    empty = Heap(device, segment_bytes=MB)
    empty.alloc(1)
    empty.close()
    assert len(control.calls("cuMemFree")) == 1


def test_no_ipc(control: Control) -> None:
    control.set(IPC=0)
    with control.device() as poor:
        heap = Heap(poor, segment_bytes=MB)
        heap.alloc(1)
        assert heap.segments[0].handle == b""
        heap.close()


def test_events_of_returned_blocks_are_used_again(control: Control, device: Device) -> None:
    heap = Heap(device, segment_bytes=MB)
    for _ in range(5):
        heap.empty((10,), torch.uint8)
    until(lambda: bool(heap.alloc(1)))
    control.calls()
    for _ in range(100):
        heap.empty((10,), torch.uint8)
        device.driver.stream_synchronize(0)
    assert len(control.calls("cuEventCreate")) <= 1
    heap.close()


def test_torch_sees_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's torch is given: the array interface of the memory, alive as long as the tensor."""
    made: list[object] = []
    freed: list[int] = []

    def as_tensor(owner: object, device: torch.device) -> object:
        assert device == torch.device("cuda", 1)
        made.append(owner)
        return owner

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("S", (), {"cuda_stream": 77 + device}))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    owner = tensors.on_device(0x7F00, 96, 1, lambda: freed.append(1))
    shown = owner.__cuda_array_interface__
    assert (shown["data"], shown["shape"], shown["typestr"]) == ((0x7F00, False), (96,), "|u1")
    assert tensors.current_stream(1) == 78
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 55 + device)
    assert tensors.current_stream(1) == 56
    assert not freed
    made.clear()
    del owner
    assert freed == [1]
