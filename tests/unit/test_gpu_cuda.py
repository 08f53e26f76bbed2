"""The CUDA table against the stand-in driver: every call, the traps of the real one, and what its errors say."""

from __future__ import annotations

import ctypes
import inspect
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests import standin

from dovetail.errors import NotSupported
from dovetail.hw.gpu import cuda as table
from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE, Driver, DriverError, Kind, Memory, SourceOrder, load
from dovetail.hw.gpu.library import Library

ROOT = Path(__file__).parents[2]
SETTINGS = ("VERSION", "FAIL", "DEVICES", "PEERS", "DELAY_US", "NO_DEVICE", "STREAM_WORDS", "IPC", "VMM")
INVALID = r"failed: CUDA_ERROR_INVALID_VALUE \(1\): invalid argument"


class Control:
    """The back door of the stand-in: settings and the record of calls."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.standin_calls.restype = ctypes.c_size_t
        self._library.standin_calls.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self._library.standin_set(name.encode(), str(value).encode())

    def reset(self) -> None:
        self.set(**dict.fromkeys(SETTINGS, ""), MOST_PARKED=15)
        while self.calls():  # other modules' tests may have left more than is read at a time
            pass

    def calls(self, name: str = "") -> list[str]:
        """The calls since the last time, as lines; those of one name."""
        buffer = ctypes.create_string_buffer(1 << 20)
        self._library.standin_calls(buffer, len(buffer))
        return [line for line in buffer.value.decode().splitlines() if line.split()[0].startswith(name)]

    def parked(self) -> int:
        return int(self._library.standin_parked())


@pytest.fixture(scope="module")
def control(need: Callable[[str, object], None]) -> Control:
    return Control(standin.build("cuda"))


@pytest.fixture
def cuda(control: Control) -> Iterator[CudaDriver]:
    control.reset()
    driver = CudaDriver(control.path)
    driver.use(0)
    control.calls()
    yield driver
    control.reset()


def view(address: int, size_bytes: int, dtype: str = "u1") -> NDArray[np.generic]:
    """Memory of the stand-in, seen from the host."""
    return np.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address), dtype)


def words(*values: int) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def rows(*given: tuple[int, int, int]) -> NDArray[np.void]:
    return np.array(list(given), WORD)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


@pytest.fixture
def gate(cuda: CudaDriver) -> Iterator[NDArray[np.generic]]:
    """Words in pinned memory, zero. At the end all waits for the first 8 are let through."""
    address = cuda.host_alloc(4096)
    found = view(address, 4096, "u8")
    yield found
    found[:8] = 1 << 62
    cuda.host_free(address)


def address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


class TestLoading:
    def test_a_missing_library_says_what_is_missing(self) -> None:
        said = r"the CUDA driver \(libnone.so.9\) cannot be loaded: .*libnone.so.9.*; install it, or stay on the CPU$"
        with pytest.raises(NotSupported, match=said):
            CudaDriver("libnone.so.9")

    def test_a_library_that_is_no_driver(self) -> None:
        with pytest.raises(NotSupported, match=r"the CUDA driver \(libc.so.6\) has no cuGetProcAddress_v2"):
            CudaDriver("libc.so.6")

    def test_a_driver_that_is_too_old(self, control: Control) -> None:
        control.set(VERSION=11060)
        with pytest.raises(NotSupported, match="has no cuStreamBatchMemOp of version 11070; CUDA 12.0 or later"):
            CudaDriver(control.path)
        control.reset()

    def test_no_device(self, control: Control) -> None:
        control.set(NO_DEVICE=1)
        with pytest.raises(NotSupported, match=r"no device.*cuInit failed: CUDA_ERROR_NO_DEVICE \(100\): no CUDA"):
            CudaDriver(control.path)
        control.reset()

    def test_the_environment_names_the_library(self, control: Control, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", control.path)
        load.cache_clear()
        driver = load("cuda")
        assert (driver.name, driver.version) == ("cuda", 13000)
        load.cache_clear()

    def test_it_has_the_calls_of_the_protocol(self) -> None:
        for name, method in inspect.getmembers(Driver, inspect.isfunction):
            if not name.startswith("_"):
                assert inspect.signature(getattr(CudaDriver, name)) == inspect.signature(method), name

    def test_layouts(self) -> None:
        assert (table._COPY_2D.size, table._COPY_3D.size, table._MEM_OP.size) == (128, 200, 48)
        assert {len(attributes) for attributes in table._ATTRIBUTES.values()} == {24}


class TestLibrary:
    def test_functions_raise_for_every_code_but_0(self) -> None:
        library = Library("C library", "libc.so.6", lambda library, code: (f"{library.name} {code}", "too much"))
        assert library.has("abs")
        assert not library.has("absolutely")
        checked = library.function("abs", ctypes.c_int)
        assert checked(0) == 0
        with pytest.raises(DriverError, match=r"abs failed: C library 3 \(3\): too much") as caught:
            checked(-3)
        assert (caught.value.call, caught.value.code) == ("abs", 3)
        assert library.raw("abs", ctypes.c_int)(-3) == 3  # its own object: the check above is not on it
        assert library.raw("strlen", ctypes.c_char_p, restype=ctypes.c_size_t)(b"four") == 4

    def test_a_missing_function(self) -> None:
        library = Library("C library", "libc.so.6", lambda library, code: ("", ""))
        with pytest.raises(NotSupported, match=r"the C library \(libc.so.6\) has no absolutely; a newer one is needed"):
            library.function("absolutely")


class TestErrors:
    def test_the_text_has_call_name_code_and_message(self, cuda: CudaDriver) -> None:
        with pytest.raises(DriverError) as caught:
            cuda.device_free(12345)
        assert str(caught.value) == "cuMemFree failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument"
        assert (caught.value.call, caught.value.code) == ("cuMemFree", 1)

    def test_a_code_that_the_driver_cannot_name(self, cuda: CudaDriver, control: Control) -> None:
        control.set(FAIL="cuEventCreate:4711:1")
        with pytest.raises(DriverError, match=r"cuEventCreate failed: unknown error \(4711\): unknown error"):
            cuda.event_create()

    def test_faults_come_at_their_call(self, cuda: CudaDriver, control: Control) -> None:
        control.set(FAIL="cuMemAlloc:2:3,cuStreamQuery:700:0")
        held = [cuda.device_alloc(64) for _ in range(2)]
        with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            cuda.device_alloc(64)
        for at in (*held, cuda.device_alloc(64)):
            cuda.device_free(at)
        for _ in range(2):
            with pytest.raises(DriverError, match=r"cuStreamQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)"):
                cuda.stream_done(0)

    def test_a_thread_without_a_context(self, cuda: CudaDriver) -> None:
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(DriverError, match=r"cuMemAlloc failed: CUDA_ERROR_INVALID_CONTEXT \(201\)"):
                pool.submit(cuda.device_alloc, 64).result()
            pool.submit(cuda.use, 0).result()
            cuda.device_free(pool.submit(cuda.device_alloc, 64).result())


class TestDevices:
    def test_names(self, cuda: CudaDriver, control: Control) -> None:
        control.set(DEVICES=2)
        assert cuda.num_devices() == 2
        assert (cuda.device_name(0), cuda.device_name(1)) == ("stand-in 0", "stand-in 1")
        assert len(cuda.device_uuid(0)) == len(cuda.device_uuid(1)) == 16
        assert cuda.device_uuid(0) != cuda.device_uuid(1)
        assert cuda.num_multiprocessors(1) == 4
        with pytest.raises(DriverError, match=r"cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE \(101\)"):
            cuda.use(2)

    def test_the_primary_context_is_retained_once(self, cuda: CudaDriver, control: Control) -> None:
        cuda.use(0)
        cuda.use(0)
        assert control.calls("cuDevicePrimaryCtxRetain") == []

    def test_peers(self, cuda: CudaDriver, control: Control) -> None:
        control.set(DEVICES=3)
        assert cuda.can_reach(0, 2)
        assert cuda.can_reach(1, 1)
        cuda.enable_peer(2)
        cuda.enable_peer(2)  # the driver says 704, already enabled
        control.set(PEERS=0)
        assert not cuda.can_reach(0, 1)
        with pytest.raises(DriverError, match=r"cuCtxEnablePeerAccess failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"):
            cuda.enable_peer(1)

    @pytest.mark.parametrize(
        ("version", "batched", "partition"),
        [(12000, False, False), (12040, False, False), (12050, False, True), (12080, True, True), (13000, True, True)],
    )
    def test_capabilities(self, control: Control, version: int, batched: bool, partition: bool) -> None:
        control.reset()
        control.set(VERSION=version)
        found = CudaDriver(control.path).capabilities(0)
        assert (found.backend, found.engine, found.compute_cores) == ("cuda", "copy engine", 0)
        assert (found.batched_copy, found.strided_batch, found.partition) == (batched, batched, partition)
        assert found.most_batched == (1 << 20 if batched else 0)
        assert found.stream_gates and found.ipc and found.vmm and not found.engine_choice  # noqa: PT018
        control.reset()

    def test_attributes_turn_abilities_off(self, cuda: CudaDriver, control: Control) -> None:
        control.set(STREAM_WORDS=0, IPC=0, VMM=0)
        found = cuda.capabilities(0)
        assert (found.stream_gates, found.ipc, found.vmm) == (False, False, False)
        control.calls()
        assert cuda.capabilities(0) is found
        assert control.calls() == []


class TestStreams:
    def test_they_do_not_synchronise_with_the_default_one(self, cuda: CudaDriver, control: Control) -> None:
        least, greatest = cuda.stream_priorities()
        assert greatest < least
        stream = cuda.stream_create(priority=greatest)
        assert control.calls("cuStreamCreate") == [f"cuStreamCreateWithPriority flags=1 priority={greatest}"]
        cuda.stream_destroy(stream)
        with pytest.raises(DriverError, match="cuStreamSynchronize failed: CUDA_ERROR_INVALID_HANDLE"):
            cuda.stream_synchronize(stream)

    def test_done_and_synchronize(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        stream, event = cuda.stream_create(), cuda.event_create()
        cuda.stream_words(rows((WAIT, address(gate), 1)), stream)
        cuda.event_record(event, stream)
        assert not cuda.stream_done(stream)
        assert not cuda.event_done(event)
        gate[0] = 1
        cuda.event_synchronize(event)
        assert cuda.event_done(event)
        cuda.stream_synchronize(stream)
        assert cuda.stream_done(stream)
        cuda.event_destroy(event)
        cuda.stream_destroy(stream)

    def test_a_stream_waits_for_an_event_of_another(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        first, second, event = cuda.stream_create(), cuda.stream_create(), cuda.event_create()
        cuda.stream_words(rows((WAIT, address(gate), 1), (WRITE, address(gate) + 64, 7)), first)
        cuda.event_record(event, first)
        cuda.stream_wait_event(second, event)
        cuda.copy(address(gate) + 72, address(gate) + 64, 8, second)
        assert not cuda.stream_done(second)
        gate[0] = 1
        cuda.stream_synchronize(second)
        assert gate[9] == 7

    def test_time_between_events(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        stream = cuda.stream_create()
        begin, end, untimed = cuda.event_create(timing=True), cuda.event_create(timing=True), cuda.event_create()
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
            cuda.event_elapsed_us(begin, end)
        cuda.event_record(begin, stream)
        cuda.stream_words(rows((WAIT, address(gate), 1)), stream)
        cuda.event_record(end, stream)
        with pytest.raises(DriverError, match="CUDA_ERROR_NOT_READY"):
            cuda.event_elapsed_us(begin, end)
        cuda.event_synchronize(begin)
        time.sleep(0.01)
        gate[0] = 1
        cuda.stream_synchronize(stream)
        assert 10_000 <= cuda.event_elapsed_us(begin, end) < 20e6
        with pytest.raises(DriverError, match=INVALID):
            cuda.event_elapsed_us(begin, untimed)


class TestMemory:
    def test_kinds(self, cuda: CudaDriver) -> None:
        on_device, pinned, own = cuda.device_alloc(8192), cuda.host_alloc(4096), np.zeros(1 << 16, np.uint8)
        assert cuda.memory_at(on_device + 100) == Memory(Kind.DEVICE, 0, on_device, 8192)
        assert cuda.memory_at(pinned) == Memory(Kind.PINNED, 0, pinned, 4096)
        assert cuda.memory_at(address(own)) == Memory(Kind.PAGEABLE, -1, 0, 0)
        cuda.host_register(address(own), own.nbytes)
        assert cuda.memory_at(address(own) + 5) == Memory(Kind.PINNED, 0, address(own), own.nbytes)
        assert cuda.device_pointer(address(own)) == address(own)
        with pytest.raises(DriverError, match=r"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"):
            cuda.host_register(address(own) + 4096, 4096)
        cuda.host_unregister(address(own))
        with pytest.raises(DriverError, match=r"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED \(713\)"):
            cuda.host_unregister(address(own))
        cuda.device_free(on_device)
        cuda.host_free(pinned)
        assert cuda.memory_at(on_device).kind is Kind.PAGEABLE

    def test_an_invalid_value_is_pageable_and_another_code_an_error(self, cuda: CudaDriver, control: Control) -> None:
        control.set(FAIL="cuPointerGetAttributes:1:1,cuPointerGetAttributes:201:2")
        pinned = cuda.host_alloc(64)
        assert cuda.memory_at(pinned).kind is Kind.PAGEABLE
        with pytest.raises(DriverError, match="cuPointerGetAttributes failed: CUDA_ERROR_INVALID_CONTEXT"):
            cuda.memory_at(pinned)
        cuda.host_free(pinned)

    def test_host_memory_is_for_every_device(self, cuda: CudaDriver, control: Control) -> None:
        pinned = cuda.host_alloc(64)
        own = np.zeros(64, np.uint8)
        cuda.host_register(address(own), 64)
        assert all("flags=3" in line for line in control.calls("cuMemHost"))  # portable, mapped
        cuda.host_unregister(address(own))
        cuda.host_free(pinned)

    def test_nothing_to_allocate(self, cuda: CudaDriver) -> None:
        with pytest.raises(ValueError, match="0 bytes"):
            cuda.host_alloc(0)  # the driver would return address 0 without an error
        with pytest.raises(DriverError, match=INVALID):
            cuda.device_alloc(0)

    def test_another_process_opens_it(self, cuda: CudaDriver, control: Control) -> None:
        shared = cuda.device_alloc(4096)
        view(shared, 4096)[:] = 1
        handle = cuda.ipc_export(shared)
        assert len(handle) == 64
        code = f"""
from dovetail.hw.gpu.cuda import CudaDriver
cuda = CudaDriver({control.path!r})
cuda.use(0)
first, second = (cuda.ipc_open(bytes.fromhex({handle.hex()!r})) for _ in range(2))
assert first == second
assert str(cuda.memory_at(first).kind) == "device" and cuda.memory_at(first).size_bytes == 4096
stream = cuda.stream_create()
cuda.fill(first, 9, 100, stream)
cuda.stream_synchronize(stream)
cuda.ipc_close(first)
cuda.ipc_close(second)
try:
    cuda.ipc_close(first)
except Exception as error:
    print(error)
"""
        done = run(code)
        assert done.stdout == "cuIpcCloseMemHandle failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument\n", (
            done.stderr
        )
        assert view(shared, 4096).sum() == 100 * 9 + 3996
        cuda.device_free(shared)

    def test_handles_that_cannot_be_opened(self, cuda: CudaDriver) -> None:
        shared, pinned = cuda.device_alloc(4096), cuda.host_alloc(64)
        with pytest.raises(DriverError, match=r"cuIpcOpenMemHandle failed: CUDA_ERROR_INVALID_CONTEXT \(201\)"):
            cuda.ipc_open(cuda.ipc_export(shared))  # by its own process
        with pytest.raises(DriverError, match=INVALID):
            cuda.ipc_open(bytes(64))
        with pytest.raises(ValueError, match="64 bytes, not 10"):
            cuda.ipc_open(bytes(10))
        with pytest.raises(DriverError, match=INVALID):
            cuda.ipc_export(pinned)
        with pytest.raises(DriverError, match=f"cuIpcCloseMemHandle {INVALID}"):
            cuda.ipc_close(shared)  # it was not opened
        cuda.device_free(shared)
        cuda.host_free(pinned)


class TestCopies:
    def test_copy_and_fill(self, cuda: CudaDriver) -> None:
        there, here, stream = cuda.device_alloc(4096), cuda.host_alloc(4096), cuda.stream_create()
        cuda.fill(there, 0xAB, 4096, stream)
        view(here, 100)[:] = np.arange(100)
        cuda.copy(there + 1000, here, 100, stream)
        cuda.stream_synchronize(stream)
        assert (view(there + 1000, 100) == np.arange(100)).all()
        assert (view(there, 1000) == 0xAB).all()
        assert (view(there + 1100, 4096 - 1100) == 0xAB).all()

    def test_the_default_stream_is_0(self, cuda: CudaDriver) -> None:
        there = cuda.device_alloc(64)
        cuda.fill(there, 1, 64, 0)
        cuda.stream_synchronize(0)
        assert view(there, 64).sum() == 64

    def test_what_the_driver_refuses(self, cuda: CudaDriver) -> None:
        there, stream, own = cuda.device_alloc(4096), cuda.stream_create(), np.zeros(8192, np.uint8)
        with pytest.raises(DriverError, match=f"cuMemcpyAsync {INVALID}"):
            cuda.copy(there, there + 4000, 100, stream)
        cuda.host_register(address(own), 4096)
        cuda.host_register(address(own) + 4096, 4096)
        with pytest.raises(DriverError, match=f"cuMemcpyAsync {INVALID}"):
            cuda.copy(there, address(own) + 4000, 200, stream)  # two registrations, though adjacent
        cuda.host_unregister(address(own))
        cuda.host_unregister(address(own) + 4096)

    @pytest.mark.parametrize(("dst_pitch", "src_pitch"), [(48, 32), (32, 48), (40, 64), (48, 48)])
    def test_rows(self, cuda: CudaDriver, control: Control, dst_pitch: int, src_pitch: int) -> None:
        there, here, stream = cuda.device_alloc(4096), cuda.host_alloc(4096), cuda.stream_create()
        view(there, 4096)[:] = 0
        view(here, 4096)[:] = np.random.default_rng(3).integers(1, 255, 4096)
        cuda.copy_rows(there, dst_pitch, here, src_pitch, 32, 10, stream)
        cuda.stream_synchronize(stream)
        assert [line.split()[0] for line in control.calls("cuMemcpy")] == ["cuMemcpy2DAsync"]
        for row in range(10):
            assert (view(there + row * dst_pitch, 32) == view(here + row * src_pitch, 32)).all()
        assert np.count_nonzero(view(there, 4096)) == 320

    @pytest.mark.parametrize(("dst_pitch", "src_pitch", "num_rows"), [(32, 32, 10), (99, 77, 1)])
    def test_rows_without_a_gap_are_one_copy(
        self, cuda: CudaDriver, control: Control, dst_pitch: int, src_pitch: int, num_rows: int
    ) -> None:
        there, stream = cuda.device_alloc(4096), cuda.stream_create()
        cuda.copy_rows(there, dst_pitch, there + 2048, src_pitch, 32, num_rows, stream)
        assert [line.split()[:2] for line in control.calls("cuMemcpy")] == [["cuMemcpyAsync", f"size={32 * num_rows}"]]

    def test_no_rows_and_rows_that_overlap(self, cuda: CudaDriver, control: Control) -> None:
        stream = cuda.stream_create()
        cuda.copy_rows(1, 32, 2, 32, 0, 5, stream)
        cuda.copy_rows(1, 32, 2, 32, 16, 0, stream)
        assert control.calls("cuMemcpy") == []
        with pytest.raises(ValueError, match=r"rows of 64 bytes overlap at pitches 32 \(dst\) and 64 \(src\)"):
            cuda.copy_rows(1, 32, 2, 64, 64, 2, stream)

    @pytest.mark.parametrize(
        ("pitch", "calls"),
        [
            ((1 << 31) - 1, ["cuMemcpy2DAsync"]),
            (1 << 31, ["cuMemcpy3DAsync"]),  # beyond CU_DEVICE_ATTRIBUTE_MAX_PITCH
            (3 << 30, ["cuMemcpy3DAsync"]),
            ((3 << 30) + 8, ["cuMemcpy3DAsync"]),  # no multiple of the width
            ((1 << 31) + 11, ["cuMemcpyAsync"] * 3),  # a prime: no pitch and height
        ],
    )
    def test_rows_more_than_2_gib_apart(self, cuda: CudaDriver, control: Control, pitch: int, calls: list[str]) -> None:
        there, here, stream = cuda.device_alloc(2 * pitch + 4096), cuda.host_alloc(4096), cuda.stream_create()
        view(here, 4096)[:] = np.random.default_rng(4).integers(0, 255, 4096)
        cuda.copy_rows(there, pitch, here, 200, 100, 3, stream)
        cuda.stream_synchronize(stream)
        assert [line.split()[0] for line in control.calls("cuMemcpy")] == calls
        for row in range(3):
            assert (view(there + row * pitch, 100) == view(here + row * 200, 100)).all()
        cuda.copy_rows(here + 1000, 100, there, pitch, 100, 3, stream)
        cuda.stream_synchronize(stream)
        assert (view(here + 1000, 300).reshape(3, 100) == view(here, 600).reshape(3, 200)[:, :100]).all()
        cuda.device_free(there)

    @given(st.integers(1, 1 << 40), st.integers(1, 1 << 20))
    def test_layers_give_the_stride(self, stride: int, width: int) -> None:
        if stride >= width and (found := table._layers(stride, width)):
            pitch, height = found
            assert pitch * height == stride
            assert width <= pitch <= table.MOST_PITCH


class TestBatch:
    @pytest.mark.parametrize("version", [12080, 12090, 13000, 13010])
    def test_many_copies(self, control: Control, version: int) -> None:
        control.reset()
        control.set(VERSION=version, DELAY_US=50)
        cuda = CudaDriver(control.path)
        cuda.use(0)
        there, here, stream = cuda.device_alloc(1 << 16), cuda.host_alloc(1 << 16), cuda.stream_create()
        view(here, 1 << 16)[:] = np.random.default_rng(5).integers(0, 255, 1 << 16)
        offset = np.arange(40, dtype=np.uint64) * 1024
        size = np.arange(40, dtype=np.uint64) * 7 + 1
        cuda.copy_batch(there + offset, here + offset[::-1].copy(), size, SourceOrder.STREAM, stream)
        cuda.stream_synchronize(stream)
        for i in range(40):
            assert (view(there + i * 1024, i * 7 + 1) == view(here + (39 - i) * 1024, i * 7 + 1)).all()
        form = "13000" if version >= 13000 else "12080"
        assert f"form={form} count=40 order=1 flags=1" in control.calls("cuMemcpyBatchAsync")[0]
        control.reset()

    def test_a_driver_without_it(self, control: Control) -> None:
        control.reset()
        control.set(VERSION=12070)
        cuda = CudaDriver(control.path)
        with pytest.raises(NotSupported, match=r"CUDA 12070 has no cuMemcpyBatchAsync \(12080 and later have\)"):
            cuda.copy_batch(words(1), words(2), words(3), SourceOrder.STREAM, 99)
        control.reset()

    def test_it_is_refused_as_a_whole(self, cuda: CudaDriver) -> None:
        there, here, stream = cuda.device_alloc(4096), cuda.host_alloc(4096), cuda.stream_create()
        view(there, 4096)[:] = 3
        with pytest.raises(DriverError) as caught:
            cuda.copy_batch(words(there, there + 4090), words(here, here), words(8, 8), SourceOrder.STREAM, stream)
        assert str(caught.value) == "cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE (1): invalid argument"
        cuda.stream_synchronize(stream)
        assert (view(there, 4096) == 3).all()

    def test_the_older_form_tells_which_entry(self, control: Control) -> None:
        control.reset()
        control.set(VERSION=12080)
        cuda = CudaDriver(control.path)
        cuda.use(0)
        there, stream = cuda.device_alloc(4096), cuda.stream_create()
        at = words(there, there + 64, there + 4090, there + 128)
        with pytest.raises(DriverError, match=rf"cuMemcpyBatchAsync {INVALID} \(entry 2 of 4\)") as caught:
            cuda.copy_batch(at, words(*[there + 1024] * 4), words(8, 8, 8, 8), SourceOrder.STREAM, stream)
        assert (caught.value.call, caught.value.code) == ("cuMemcpyBatchAsync", 1)
        control.set(FAIL="cuMemcpyBatchAsync:700:1")
        with pytest.raises(DriverError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS"):
            cuda.copy_batch(at[:1], at[1:2], words(8), SourceOrder.STREAM, stream)
        control.reset()

    def test_no_single_entry_is_at_fault(self, control: Control) -> None:
        control.reset()
        control.set(VERSION=12080)
        cuda = CudaDriver(control.path)
        cuda.use(0)
        there, stream = cuda.device_alloc(4096), cuda.stream_create()
        cuda.graph_begin(stream)
        cuda._plain.add(stream)  # as if somebody had begun the capture behind our back
        with pytest.raises(DriverError, match=r"CAPTURE_UNSUPPORTED \(900\).*\(no single one of 1 entries\)"):
            cuda.copy_batch(words(there), words(there + 8), words(8), SourceOrder.STREAM, stream)
        cuda.graph_destroy(cuda.graph_end(stream))
        control.reset()

    def test_the_default_stream_is_refused_before_the_driver_is_asked(self, cuda: CudaDriver, control: Control) -> None:
        there = cuda.device_alloc(64)
        control.calls()
        for stream in (0, 1):
            with pytest.raises(ValueError, match="cannot run on the default stream"):
                cuda.copy_batch(words(there), words(there + 8), words(8), SourceOrder.STREAM, stream)
        assert control.calls() == []

    def test_arrays_of_other_lengths(self, cuda: CudaDriver) -> None:
        with pytest.raises(ValueError, match="one length, not 1, 2 and 1"):
            cuda.copy_batch(words(1), words(1, 2), words(1), SourceOrder.STREAM, cuda.stream_create())

    def test_empty_entries_are_left_out(self, cuda: CudaDriver, control: Control) -> None:
        there, stream = cuda.device_alloc(64), cuda.stream_create()
        view(there, 64)[:] = np.arange(64)
        cuda.copy_batch(words(there, 0), words(there + 32, 0), words(8, 0), SourceOrder.STREAM, stream)
        cuda.copy_batch(words(there), words(there), words(0), SourceOrder.STREAM, stream)
        cuda.copy_batch(words(), words(), words(), SourceOrder.STREAM, stream)
        cuda.stream_synchronize(stream)
        assert (view(there, 8) == np.arange(32, 40)).all()
        assert ["count=1 " in line for line in control.calls("cuMemcpyBatch")] == [True]

    @pytest.mark.parametrize(("order", "value"), [(1, 2), (2, 1), (3, 1)])
    def test_when_the_source_is_read(self, cuda: CudaDriver, gate: NDArray[np.generic], order: int, value: int) -> None:
        there, here, stream = cuda.device_alloc(64), cuda.host_alloc(64), cuda.stream_create()
        view(here, 64)[:] = 1
        cuda.stream_words(rows((WAIT, address(gate), 1)), stream)
        cuda.copy_batch(words(there), words(here), words(64), SourceOrder(order), stream)
        view(here, 64)[:] = 2
        gate[0] = 1
        cuda.stream_synchronize(stream)
        assert (view(there, 64) == value).all()

    def test_two_registrations(self, cuda: CudaDriver) -> None:
        own, there, stream = np.zeros(8192, np.uint8), cuda.device_alloc(4096), cuda.stream_create()
        cuda.host_register(address(own), 4096)
        cuda.host_register(address(own) + 4096, 4096)
        with pytest.raises(DriverError, match=f"cuMemcpyBatchAsync {INVALID}"):
            cuda.copy_batch(words(there), words(address(own) + 4000), words(200), SourceOrder.STREAM, stream)
        cuda.host_unregister(address(own))
        cuda.host_unregister(address(own) + 4096)


class TestBatchAndCapture:
    def test_what_the_driver_does_is_silent(self, cuda: CudaDriver) -> None:
        there, stream = cuda.device_alloc(64), cuda.stream_create()
        view(there, 64)[:] = np.arange(64)
        cuda.graph_begin(stream)
        batch = (words(there), words(there + 8), words(8))
        cuda._plain.add(stream)
        with pytest.raises(DriverError, match="900"):
            cuda.copy_batch(*batch, SourceOrder.STREAM, stream)
        graph = cuda.graph_end(stream)  # valid
        cuda.graph_launch(graph, stream)
        cuda._plain.discard(stream)
        cuda.stream_synchronize(stream)
        assert (view(there, 64) == np.arange(64)).all()

    def refused(self, cuda: CudaDriver, stream: int) -> None:
        with pytest.raises(NotSupported, match="cannot be captured into a graph; use single copies"):
            cuda.copy_batch(words(1), words(2), words(8), SourceOrder.STREAM, stream)

    def test_a_stream_of_ours(self, cuda: CudaDriver, control: Control) -> None:
        there, stream = cuda.device_alloc(64), cuda.stream_create()
        batch = (words(there), words(there + 8), words(8), SourceOrder.STREAM, stream)
        cuda.copy_batch(*batch)
        cuda.copy_batch(*batch)
        assert control.calls("cuStreamIsCapturing") == []  # known without asking
        cuda.graph_begin(stream)
        assert cuda.stream_capturing(stream)
        self.refused(cuda, stream)
        cuda.graph_destroy(cuda.graph_end(stream))
        control.calls()
        cuda.copy_batch(*batch)
        cuda.copy_batch(*batch)
        assert len(control.calls("cuStreamIsCapturing")) == 1
        cuda.stream_synchronize(stream)

    def test_a_stream_of_somebody_else(self, cuda: CudaDriver, control: Control) -> None:
        other = CudaDriver(control.path)
        there, stream = cuda.device_alloc(64), other.stream_create()
        other.graph_begin(stream)
        self.refused(cuda, stream)
        other.graph_destroy(other.graph_end(stream))
        control.calls()
        for _ in range(3):
            cuda.copy_batch(words(there), words(there + 8), words(8), SourceOrder.STREAM, stream)
        assert len(control.calls("cuStreamIsCapturing")) == 3
        cuda.stream_synchronize(stream)

    def test_a_stream_of_ours_that_an_event_drew_into_a_capture(self, cuda: CudaDriver, control: Control) -> None:
        other = CudaDriver(control.path)
        outer, inner, event = other.stream_create(), cuda.stream_create(), cuda.event_create()
        there = cuda.device_alloc(64)
        other.graph_begin(outer)
        cuda.event_record(event, outer)
        cuda.stream_wait_event(inner, event)
        self.refused(cuda, inner)
        cuda.fill(there, 5, 64, inner)
        cuda.event_record(event, inner)
        cuda.stream_wait_event(outer, event)
        graph = other.graph_end(outer)
        assert not cuda.stream_capturing(inner)
        assert not (view(there, 64) == 5).any()
        cuda.graph_launch(graph, outer)
        cuda.stream_synchronize(outer)
        assert (view(there, 64) == 5).all()


class TestWords:
    def test_a_wait_compares_by_signed_difference(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        stream = cuda.stream_create()
        for now, asked, opens in [
            (5, 5, True),
            (6, 5, True),
            (4, 5, False),
            (3, 2**64 - 2, True),
            (2**64 - 2, 3, False),
        ]:
            gate[0] = now
            cuda.stream_words(rows((WAIT, address(gate), asked)), stream)
            if not opens:
                until(lambda: not cuda.stream_done(stream))
                gate[0] = asked
            cuda.stream_synchronize(stream)

    def test_a_write_comes_after_the_copies_before_it(
        self, cuda: CudaDriver, control: Control, gate: NDArray[np.generic]
    ) -> None:
        control.set(DELAY_US=3000)
        here, there, stream = cuda.host_alloc(4096), cuda.device_alloc(4096), cuda.stream_create()
        view(here, 4096)[:] = 6
        at = np.arange(8, dtype=np.uint64) * 512
        cuda.copy_batch(there + at, here + at, np.full(8, 512, np.uint64), SourceOrder.STREAM, stream)
        cuda.stream_words(rows((WRITE, address(gate) + 128, 1)), stream)
        until(lambda: bool(gate[16] == 1))
        assert (view(there, 4096) == 6).all()

    @pytest.mark.parametrize("count", [0, 1, 8, 9, 255, 256, 600])
    def test_fewer_than_256_go_in_a_call(self, cuda: CudaDriver, control: Control, count: int) -> None:
        here, stream = cuda.host_alloc(8 * 600), cuda.stream_create()
        found = view(here, 8 * 600, "u8")
        ops = np.zeros(count, WORD)
        ops["kind"], ops["value"] = WRITE, np.arange(count) + (1 << 40)
        ops["address"] = here + 8 * np.arange(count)
        control.calls()
        cuda.stream_words(ops, stream)
        cuda.stream_synchronize(stream)
        assert (found[:count] == np.arange(count) + (1 << 40)).all()
        assert not found[count:].any()
        sizes = [int(line.split()[1].removeprefix("count=")) for line in control.calls("cuStreamBatchMemOp")]
        assert sum(sizes) == count
        assert all(0 < size <= 255 for size in sizes)
        assert len(sizes) == -(-count // 255)

    def test_waits_and_writes_in_order(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        here, first, second = address(gate), cuda.stream_create(), cuda.stream_create()
        turns = 20
        ping = [(WRITE, here + 256, i + 1) if k else (WAIT, here + 320, i) for i in range(turns) for k in range(2)]
        pong = [(WRITE, here + 320, i + 1) if k else (WAIT, here + 256, i + 1) for i in range(turns) for k in range(2)]
        cuda.stream_words(rows(*pong), second)
        cuda.stream_words(rows(*ping), first)
        cuda.stream_synchronize(first)
        cuda.stream_synchronize(second)
        assert (gate[32], gate[40]) == (turns, turns)

    @pytest.mark.parametrize("count", [1, 20])
    def test_what_is_refused(self, cuda: CudaDriver, gate: NDArray[np.generic], count: int) -> None:
        stream, own = cuda.stream_create(), np.zeros(8, np.uint64)
        with pytest.raises(ValueError, match=r"a row is WAIT \(0\) or WRITE \(1\), not 2"):
            cuda.stream_words(rows(*[(2, address(gate), 1)] * count), stream)
        for bad in (address(gate) + 4, address(own)):
            with pytest.raises(DriverError, match=f"cuStreamBatchMemOp {INVALID}"):
                cuda.stream_words(rows(*[(WRITE, bad, 1)] * count), stream)

    def test_the_memory_of_a_peer(self, cuda: CudaDriver, control: Control) -> None:
        control.set(DEVICES=5)
        cuda.use(4)
        there = cuda.device_alloc(64)
        cuda.use(3)
        stream = cuda.stream_create()
        write = rows((WRITE, there, 1))
        with pytest.raises(DriverError, match=INVALID):
            cuda.stream_words(write, stream)
        cuda.enable_peer(4)
        cuda.stream_words(write, stream)
        cuda.stream_synchronize(stream)
        assert view(there, 8, "u8")[0] == 1
        control.set(VERSION=13010)
        with pytest.raises(DriverError, match=r"cuStreamBatchMemOp failed: CUDA_ERROR_NOT_SUPPORTED \(801\)"):
            cuda.stream_words(write, stream)
        cuda.use(0)

    def test_too_many_parked_streams_stop_the_others(
        self, cuda: CudaDriver, control: Control, gate: NDArray[np.generic]
    ) -> None:
        there, free = cuda.device_alloc(64), cuda.stream_create()
        parked = [cuda.stream_create() for _ in range(16)]
        for stream in parked[:15]:
            cuda.stream_words(rows((WAIT, address(gate), 1)), stream)
        until(lambda: control.parked() == 15)
        cuda.fill(there, 1, 64, free)
        cuda.stream_synchronize(free)
        cuda.stream_words(rows((WAIT, address(gate) + 8, 1)), parked[15])
        until(lambda: control.parked() == 16)
        cuda.fill(there, 2, 64, free)
        time.sleep(0.02)
        assert not cuda.stream_done(free)
        assert (view(there, 64) == 1).all()
        gate[1] = 1  # one goes through
        cuda.stream_synchronize(free)
        assert (view(there, 64) == 2).all()
        gate[0] = 1
        for stream in parked:
            cuda.stream_synchronize(stream)


class TestGraphs:
    def test_what_is_captured_runs_at_every_launch(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        there, here, stream = cuda.device_alloc(64), cuda.host_alloc(64), cuda.stream_create()
        view(there, 64)[:] = 0
        assert not cuda.stream_capturing(stream)
        cuda.graph_begin(stream)
        cuda.copy(there, here, 64, stream)
        cuda.stream_words(rows((WRITE, address(gate) + 128, 4)), stream)
        graph = cuda.graph_end(stream)
        assert (view(there, 64) == 0).all()
        for value in (7, 8):
            view(here, 64)[:] = value
            gate[16] = 0
            cuda.graph_launch(graph, stream)
            cuda.stream_synchronize(stream)
            assert (view(there, 64) == value).all()
            assert gate[16] == 4
        cuda.graph_destroy(graph)
        with pytest.raises(DriverError, match="cuGraphLaunch failed: CUDA_ERROR_INVALID_HANDLE"):
            cuda.graph_launch(graph, stream)

    def test_a_capture_that_fails(self, cuda: CudaDriver) -> None:
        stream, other, event = cuda.stream_create(), cuda.stream_create(), cuda.event_create()
        cuda.graph_begin(stream)
        with pytest.raises(DriverError, match=r"cuStreamBeginCapture failed: CUDA_ERROR_ILLEGAL_STATE \(401\)"):
            cuda.graph_begin(stream)
        with pytest.raises(DriverError, match=r"cuStreamSynchronize failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            cuda.stream_synchronize(stream)
        with pytest.raises(DriverError, match=r"cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            cuda.graph_end(stream)
        with pytest.raises(DriverError, match=r"cuStreamEndCapture failed: CUDA_ERROR_ILLEGAL_STATE"):
            cuda.graph_end(stream)
        cuda.event_record(event, other)
        cuda.graph_begin(stream)
        with pytest.raises(DriverError, match=r"cuStreamWaitEvent failed: CUDA_ERROR_STREAM_CAPTURE_ISOLATION"):
            cuda.stream_wait_event(stream, event)
        with pytest.raises(DriverError, match=r"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"):
            cuda.graph_end(stream)
        with pytest.raises(DriverError, match=r"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
            cuda.graph_begin(0)
        cuda.stream_synchronize(stream)

    def test_the_captured_graph_is_destroyed_even_if_it_cannot_be_made_executable(
        self, cuda: CudaDriver, control: Control
    ) -> None:
        stream = cuda.stream_create()
        cuda.graph_begin(stream)
        control.set(FAIL="cuGraphInstantiateWithFlags:2:1")
        with pytest.raises(DriverError, match="cuGraphInstantiateWithFlags failed: CUDA_ERROR_OUT_OF_MEMORY"):
            cuda.graph_end(stream)
        assert len(control.calls("cuGraphDestroy")) == 1

    def test_the_mode_is_of_the_thread(self, cuda: CudaDriver, control: Control) -> None:
        stream = cuda.stream_create()
        cuda.graph_begin(stream)
        assert "mode=1 " in control.calls("cuStreamBeginCapture")[0]
        cuda.graph_destroy(cuda.graph_end(stream))


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class TestStandIn:
    def test_settings_come_from_the_environment(self, control: Control, tmp_path: Path) -> None:
        code = """
from dovetail.hw.gpu.driver import load
cuda = load("cuda")
cuda.use(1)
print(cuda.version, cuda.num_devices())
try:
    cuda.event_create()
except Exception as error:
    print(error)
"""
        done = run(
            code,
            DOVETAIL_CUDA_LIBRARY=control.path,
            STANDIN_VERSION="12080",
            STANDIN_DEVICES="2",
            STANDIN_FAIL="cuEventCreate:2:1",
            STANDIN_LOG=str(tmp_path / "log"),
        )
        assert done.stdout == "12080 2\ncuEventCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory\n", (
            done.stderr
        )
        assert (tmp_path / "log").read_text().splitlines()[-1] == "cuEventCreate flags=2"

    def test_a_batch_has_no_order(self, cuda: CudaDriver, control: Control) -> None:
        there, stream = cuda.device_alloc(64), cuda.stream_create()
        seen = set()
        for seed in range(20):
            control.set(SEED=seed)
            view(there, 64)[:] = np.arange(64)
            cuda.copy_batch(
                words(there, there + 8), words(there + 8, there + 16), words(8, 8), SourceOrder.STREAM, stream
            )
            cuda.stream_synchronize(stream)
            seen.add(int(view(there, 1)[0]))
        assert seen == {8, 16}

    def test_streams_run_beside_each_other(self, cuda: CudaDriver, gate: NDArray[np.generic]) -> None:
        streams = [cuda.stream_create() for _ in range(6)]
        chain = list(range(6))
        random.Random(1).shuffle(chain)
        for i in chain:
            cuda.stream_words(
                rows((WAIT, address(gate) + 64 + 8 * i, 1), (WRITE, address(gate) + 72 + 8 * i, 1)), streams[i]
            )
        gate[8] = 1
        for stream in streams:
            cuda.stream_synchronize(stream)
        assert gate[14] == 1

    def test_calls_from_many_threads(self, cuda: CudaDriver) -> None:
        there, here = cuda.device_alloc(1 << 16), cuda.host_alloc(1 << 16)
        view(here, 1 << 16)[:] = np.random.default_rng(8).integers(0, 255, 1 << 16)

        def work(part: int) -> None:
            cuda.use(0)
            stream, base = cuda.stream_create(), part * 8192
            at = base + np.arange(64, dtype=np.uint64) * 128
            for _ in range(20):
                cuda.copy_batch(there + at, here + at, np.full(64, 128, np.uint64), SourceOrder.STREAM, stream)
            cuda.stream_synchronize(stream)
            cuda.stream_destroy(stream)

        threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (view(there, 1 << 16) == view(here, 1 << 16)).all()

    def test_it_is_compiled_once(self, control: Control) -> None:
        before = Path(control.path).stat().st_mtime_ns
        with ThreadPoolExecutor(4) as pool:
            assert {str(path) for path in pool.map(standin.build, ["cuda"] * 4)} == {control.path}
        assert Path(control.path).stat().st_mtime_ns == before
        with pytest.raises(ValueError, match="stand-ins for cuda, hip, hsa, not 'tpu'"):
            standin.build("tpu")
