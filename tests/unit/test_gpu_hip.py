"""The table of HIP, against a runtime in software: every call, the differences of versions, and what it refuses."""

import ctypes
import gc
import multiprocessing
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.standin import build

from dovetail.errors import NotSupported
from dovetail.hw.gpu import hip as hip_module
from dovetail.hw.gpu import rocr
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE, Driver, DriverError, Kind, SourceOrder, load
from dovetail.hw.gpu.hip import HipDriver
from dovetail.hw.gpu.library import Library
from dovetail.plan.step import Op

DEFAULTS = {"VERSION": "71400000", "DEVICES": "1", "DELAY_US": "0", "FAIL": "", "STREAM_WAIT": "1", "RANGES": "1"}
LOOP, ATTRIBUTES, ENGINE = 70_100_000, 71_300_000, 71_400_000


class StandIn:
    """The handle of the stand-in library: its settings and its record of calls."""

    def __init__(self, path: str) -> None:
        self.path, self.handle = path, ctypes.CDLL(path)
        for name, value in DEFAULTS.items():
            self.set(name, value)
        self.calls()

    def set(self, name: str, value: str) -> None:
        self.handle.standin_set(name.encode(), value.encode())

    def calls(self, name: str = "") -> list[str]:
        """What was called since the last time, with its details."""
        lines: list[str] = []
        buffer = ctypes.create_string_buffer(1 << 16)
        while self.handle.standin_calls(buffer, len(buffer)):
            lines += buffer.value.decode().splitlines()
        return [line for line in lines if line.split()[0] == name or not name]


@pytest.fixture
def standin() -> StandIn:
    return StandIn(str(build("hip")))


@pytest.fixture
def hip(standin: StandIn) -> HipDriver:
    driver = HipDriver(standin.path)
    driver.use(0)
    return driver


@pytest.fixture
def stream(hip: HipDriver) -> Iterator[int]:
    made = hip.stream_create()
    yield made
    hip.stream_destroy(made)  # a test that failed may have left it parked, so it is not waited for


def at_version(standin: StandIn, version: int) -> HipDriver:
    standin.set("VERSION", str(version))
    return HipDriver(standin.path)


def device_bytes(hip: HipDriver, values: np.ndarray) -> int:
    """Device memory with these values."""
    address = hip.device_alloc(values.nbytes)
    ctypes.memmove(address, values.tobytes(), values.nbytes)
    return address


def read(address: int, size: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(address, size), np.uint8)


def numbers(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def rows(*entries: tuple[int, int, int]) -> np.ndarray:
    return np.array(list(entries), WORD)


# --- the library


def test_a_missing_library_says_what_to_do() -> None:
    with pytest.raises(NotSupported, match=r"the HIP runtime \(libnone.so\) cannot be loaded.*stay on the CPU"):
        HipDriver("libnone.so")


def test_the_environment_names_the_library(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HIP_LIBRARY", standin.path)
    load.cache_clear()
    driver = load("hip")
    load.cache_clear()
    assert (driver.name, driver.version) == ("hip", ENGINE)


def test_it_is_a_driver(hip: HipDriver) -> None:
    table: Driver = hip
    asked = {name for name in vars(Driver) if not name.startswith("_")}
    assert asked <= set(dir(table))


def test_a_runtime_without_a_call_is_too_old(standin: StandIn) -> None:
    with pytest.raises(NotSupported, match="has no hipNothing; a newer one is needed"):
        Library("HIP runtime", standin.path, lambda _library, _code: ("", "")).function("hipNothing")


# --- devices


def test_devices(hip: HipDriver, standin: StandIn) -> None:
    standin.set("DEVICES", "2")
    assert hip.num_devices() == 2
    assert hip.version == hip.driver_version() == ENGINE
    assert hip.device_name(1) == "Stand-in MI300X"
    assert hip.device_pci(1) == "0000:c1:00.0"
    assert hip.device_uuid(0) == b"standin-device-0" != hip.device_uuid(1)
    assert hip.num_multiprocessors(0) == 304
    hip.use(1)
    assert hip.memory_at(hip.device_alloc(64)).device == 1
    hip.use(0)


def test_peers(hip: HipDriver, standin: StandIn) -> None:
    standin.set("DEVICES", "2")
    assert hip.can_reach(0, 1)
    assert hip.can_reach(0, 0)
    hip.enable_peer(1)
    hip.enable_peer(1)
    assert standin.handle.hipPeekAtLastError() == 0  # nobody else trips over "already enabled"
    with pytest.raises(DriverError, match=r"hipDeviceEnablePeerAccess failed: hipErrorInvalidDevice \(101\)"):
        hip.enable_peer(7)
    standin.set("PEERS", "0")
    assert not hip.can_reach(0, 1)
    standin.set("PEERS", "1")


def test_errors_carry_the_runtimes_words(hip: HipDriver, standin: StandIn) -> None:
    with pytest.raises(DriverError) as caught:
        hip.use(5)
    assert str(caught.value) == "hipSetDevice failed: hipErrorInvalidDevice (101): invalid device ordinal"
    assert (caught.value.call, caught.value.code) == ("hipSetDevice", 101)
    assert standin.handle.hipPeekAtLastError() == 0


@pytest.mark.parametrize(
    ("version", "batched", "swaps"),
    [(60_400_000, False, False), (LOOP, True, False), (ATTRIBUTES, True, False), (ENGINE, True, True)],
)
def test_capabilities_follow_the_version(standin: StandIn, version: int, batched: bool, swaps: bool) -> None:
    caps = at_version(standin, version).capabilities(0)
    assert (caps.backend, caps.batched_copy, caps.most_batched) == ("hip", batched, 8192 if batched else 0)
    assert (Op.SWAP in caps.native_ops) is swaps
    assert {Op.COPY, Op.COPY2D, Op.REDUCE} <= caps.native_ops
    assert caps.stream_gates
    assert caps.ipc
    assert caps.partition
    assert not (caps.vmm)
    assert not (caps.strided_batch)
    assert not (caps.runs_captured)
    assert not (caps.compute_cores)


def test_capabilities_follow_the_library(hip: HipDriver, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    standin.set("STREAM_WAIT", "0")
    monkeypatch.setattr(Library, "has", lambda _self, _symbol: False)
    caps = HipDriver(standin.path).capabilities(0)
    assert not (caps.stream_gates)
    assert not (caps.batched_copy)
    assert not (caps.partition)
    assert not (caps.ipc)


@pytest.mark.parametrize("there", [True, False])
def test_engines_can_be_chosen_where_rocr_is(standin: StandIn, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setenv("DOVETAIL_HSA_LIBRARY", str(build("hsa")) if there else "libnone.so")
    driver = HipDriver(standin.path)
    assert driver.capabilities(0).engine_choice is there
    monkeypatch.setattr(rocr, "available", lambda: pytest.fail("asked twice"))
    assert driver.capabilities(0).engine_choice is there


# --- streams and events


def test_streams(hip: HipDriver, standin: StandIn) -> None:
    assert hip.stream_priorities() == (1, -1)
    stream = hip.stream_create(priority=-1)
    assert standin.calls("hipStreamCreateWithPriority") == ["hipStreamCreateWithPriority flags=1 priority=-1"]
    word = hip.host_alloc(8)
    hip.stream_words(rows((WAIT, word, 3)), stream)
    assert not hip.stream_done(stream)
    assert standin.handle.hipPeekAtLastError() == 0
    ctypes.c_uint64.from_address(word).value = 3
    hip.stream_synchronize(stream)
    assert hip.stream_done(stream)
    assert not hip.stream_capturing(stream)
    hip.stream_destroy(stream)
    with pytest.raises(DriverError, match=r"hipStreamQuery failed: hipErrorInvalidHandle \(400\)"):
        hip.stream_done(stream)
    hip.host_free(word)


def test_a_stream_with_a_mask_of_compute_units(hip: HipDriver, standin: StandIn) -> None:
    stream = hip.stream_create_masked([0xFFFFFF00, 0xFFFFFFFF])
    (line,) = standin.calls("hipExtStreamCreateWithCUMask")
    assert line == "hipExtStreamCreateWithCUMask device=0 mask=0xffffff00,0xffffffff"
    hip.stream_destroy(stream)
    with pytest.raises(ValueError, match=r"the mask \[0, 0\] leaves no compute unit"):
        hip.stream_create_masked([0, 0])


def test_events_order_streams_and_take_times(hip: HipDriver, stream: int) -> None:
    other, word = hip.stream_create(), hip.host_alloc(8)
    begin, end = hip.event_create(timing=True), hip.event_create(timing=True)
    source, target = device_bytes(hip, numbers(64, 1)), hip.device_alloc(64)
    hip.event_record(begin, stream)
    hip.stream_words(rows((WAIT, word, 1)), stream)
    hip.copy(target, source, 64, stream)
    hip.event_record(end, stream)
    hip.stream_wait_event(other, end)
    late = hip.device_alloc(64)
    hip.copy(late, target, 64, other)
    assert not hip.event_done(end)
    hip.event_synchronize(begin)
    time.sleep(0.005)
    ctypes.c_uint64.from_address(word).value = 1
    hip.stream_synchronize(other)
    hip.event_synchronize(end)
    assert hip.event_done(end)
    assert (read(late, 64) == numbers(64, 1)).all()
    assert hip.event_elapsed_us(begin, end) >= 5000
    hip.event_destroy(begin)
    with pytest.raises(DriverError, match="hipEventQuery failed: hipErrorInvalidHandle"):
        hip.event_done(begin)
    hip.event_destroy(end)
    hip.stream_destroy(other)


def test_events_without_timing_say_so(hip: HipDriver, standin: StandIn) -> None:
    hip.event_destroy(hip.event_create())
    assert standin.calls("hipEventCreateWithFlags") == ["hipEventCreateWithFlags flags=2"]


# --- memory


def test_memory_is_told_apart(hip: HipDriver, standin: StandIn) -> None:
    device, pinned = hip.device_alloc(4096), hip.host_alloc(8192)
    mine = np.zeros(4096, np.uint8)
    assert hip.memory_at(mine.ctypes.data).kind is Kind.PAGEABLE
    hip.host_register(mine.ctypes.data, mine.nbytes)
    assert hip.memory_at(device + 100) == hip_module.Memory(Kind.DEVICE, 0, device, 4096)
    assert hip.memory_at(pinned + 8191) == hip_module.Memory(Kind.PINNED, 0, pinned, 8192)
    assert hip.memory_at(mine.ctypes.data).kind is Kind.PINNED
    assert hip.device_pointer(pinned) == pinned
    hip.host_unregister(mine.ctypes.data)
    with pytest.raises(DriverError, match="hipErrorHostMemoryNotRegistered"):
        hip.host_unregister(mine.ctypes.data)
    hip.device_free(device)
    hip.host_free(pinned)
    assert hip.memory_at(device).kind is Kind.PAGEABLE
    assert "hipHostMalloc size=8192 flags=0x40000003" in standin.calls("hipHostMalloc")


def test_memory_that_the_runtime_does_not_tell_of(hip: HipDriver, standin: StandIn) -> None:
    pinned = hip.host_alloc(64)
    standin.set("RANGES", "0")
    assert hip.memory_at(pinned) == hip_module.Memory(Kind.PINNED, 0, 0, 0)
    standin.set("FAIL", "hipPointerGetAttributes:1:1")
    assert hip.memory_at(pinned) == hip_module.Memory(Kind.PAGEABLE, -1, 0, 0)  # older runtimes
    standin.set("FAIL", "hipPointerGetAttributes:700:1")
    with pytest.raises(DriverError, match="hipPointerGetAttributes failed: hipErrorIllegalAddress"):
        hip.memory_at(pinned)


def test_out_of_memory(hip: HipDriver, standin: StandIn) -> None:
    standin.set("FAIL", "hipMalloc:2:1,hipHostMalloc:2:1")
    with pytest.raises(DriverError, match=r"hipMalloc failed: hipErrorOutOfMemory \(2\): out of memory"):
        hip.device_alloc(1 << 20)
    with pytest.raises(DriverError, match="hipHostMalloc failed: hipErrorOutOfMemory"):
        hip.host_alloc(1 << 20)
    hip.device_free(hip.device_alloc(1 << 20))
    with pytest.raises(ValueError, match="0 bytes of host memory cannot be allocated"):
        hip.host_alloc(0)


def _child(path: str, handle: bytes, expected: bytes) -> None:
    driver = HipDriver(path)
    driver.use(0)
    address = driver.ipc_open(handle)
    assert ctypes.string_at(address, len(expected)) == expected
    ctypes.memset(address, 7, 4)
    driver.ipc_close(address)


def test_other_processes_map_device_memory(hip: HipDriver, standin: StandIn) -> None:
    values = numbers(256, 3)
    address = device_bytes(hip, values)
    handle = hip.ipc_export(address)
    assert len(handle) == 64
    with pytest.raises(DriverError, match="hipIpcOpenMemHandle failed: hipErrorInvalidContext"):
        hip.ipc_open(handle)
    assert standin.calls("hipIpcOpenMemHandle") == ["hipIpcOpenMemHandle flags=1"]
    child = multiprocessing.get_context("spawn").Process(
        target=_child, args=(standin.path, handle, values.tobytes()), daemon=True
    )
    child.start()
    child.join(30)
    assert child.exitcode == 0
    assert read(address, 4).tolist() == [7, 7, 7, 7]


def test_words_of_signals(hip: HipDriver, stream: int) -> None:
    word = hip.signal_alloc()
    assert word % 64 == 8
    assert ctypes.c_int64.from_address(word).value == 1
    hip.stream_wait_equal(word, 0, stream)
    hip.stream_words(rows((WRITE, word, 5)), stream)
    assert not hip.stream_done(stream)
    ctypes.c_int64.from_address(word).value = 0
    hip.stream_synchronize(stream)
    assert ctypes.c_int64.from_address(word).value == 5
    hip.device_free(word)
    with pytest.raises(DriverError, match="hipErrorInvalidValue"):
        hip.stream_wait_equal(word, 0, stream)


# --- copies


def test_copy_and_fill(hip: HipDriver, stream: int) -> None:
    source, target = device_bytes(hip, numbers(4096, 4)), hip.device_alloc(4096)
    hip.copy(target, source, 4096, stream)
    hip.fill(target, 0xAB, 16, stream)
    hip.stream_synchronize(stream)
    assert (read(target, 16) == 0xAB).all()
    assert (read(target + 16, 4080) == numbers(4096, 4)[16:]).all()
    with pytest.raises(DriverError, match=r"hipMemcpyAsync failed: hipErrorInvalidValue \(1\): invalid argument"):
        hip.copy(target, source, 4097, stream)


def test_rows(hip: HipDriver, stream: int, standin: StandIn) -> None:
    source, target = device_bytes(hip, numbers(1000, 5)), hip.device_alloc(1000)
    hip.fill(target, 0, 1000, stream)
    hip.copy_rows(target, 50, source, 100, 40, 10, stream)
    hip.stream_synchronize(stream)
    expected = np.zeros((10, 50), np.uint8)
    expected[:, :40] = numbers(1000, 5).reshape(10, 100)[:, :40]
    assert (read(target, 500).reshape(10, 50) == expected).all()
    assert standin.calls("hipMemcpy2DAsync") == ["hipMemcpy2DAsync width=40 rows=10 kind=4"]


@pytest.mark.parametrize(
    ("pitch", "divided"),
    [(3 << 30, (3 << 29, 2)), (9 << 30, (3 << 29, 6)), (2**31 + 11, None)],
    ids=["halves", "sixths", "prime"],
)
def test_pitches_above_2_gib(
    hip: HipDriver, stream: int, standin: StandIn, pitch: int, divided: tuple[int, int] | None
) -> None:
    num_rows, width = 3, 24
    source, target = hip.device_alloc((num_rows - 1) * pitch + width), hip.device_alloc(num_rows * 32)
    values = numbers(num_rows * width, 6).reshape(num_rows, width)
    for row in range(num_rows):
        ctypes.memmove(source + row * pitch, values[row].tobytes(), width)
    hip.copy_rows(target, 32, source, pitch, width, num_rows, stream)
    hip.stream_synchronize(stream)
    assert (read(target, num_rows * 32).reshape(num_rows, 32)[:, :width] == values).all()
    calls = [line for line in standin.calls() if line.startswith("hipMemcpy")]
    if divided is None:
        assert calls == [f"hipMemcpyAsync size={width} kind=4"] * num_rows
    else:
        shape = f"pitch=32,{divided[0]} height=1,{divided[1]} extent={width},1,{num_rows} kind=4"
        assert calls == [f"hipMemcpy3DAsync {shape}"]
    hip.device_free(source)
    hip.device_free(target)


def test_the_division_of_pitches() -> None:
    assert hip_module.slices(100, 40) == (100, 1)
    assert hip_module.slices(2**31, 40) == (2**30, 2)
    assert hip_module.slices(2**31 + 11, 40) is None  # a prime number
    assert hip_module.slices(2**32, 2**31) is None  # nothing smaller holds a row
    assert hip_module.slices(3 * (2**31 - 1), 1) == (2**31 - 1, 3)


@pytest.mark.parametrize(
    ("version", "order", "record"),
    [
        (LOOP, SourceOrder.ANY, "attributes=0 order=0 flags=0"),
        (ATTRIBUTES, SourceOrder.STREAM, "attributes=1 order=1 flags=0x1"),
        (ATTRIBUTES, SourceOrder.DURING_CALL, "attributes=1 order=2 flags=0x1"),
        (ENGINE, SourceOrder.ANY, "attributes=1 order=3 flags=0x101"),
    ],
)
def test_batches_by_version(standin: StandIn, version: int, order: SourceOrder, record: str) -> None:
    driver = at_version(standin, version)
    driver.use(0)
    stream, source, target = driver.stream_create(), driver.host_alloc(300), driver.device_alloc(300)
    ctypes.memmove(source, numbers(300, 7).tobytes(), 300)
    offsets = words(0, 100, 200)
    driver.copy_batch(offsets + np.uint64(target), offsets + np.uint64(source), words(100, 100, 100), order, stream)
    driver.stream_synchronize(stream)
    assert (read(target, 300) == numbers(300, 7)).all()
    assert standin.calls("hipMemcpyBatchAsync") == [f"hipMemcpyBatchAsync count=3 {record}"]


def test_a_batch_reads_live_sources_in_the_order_of_the_stream(hip: HipDriver, stream: int) -> None:
    word, source, target = hip.host_alloc(8), device_bytes(hip, numbers(64, 8)), hip.device_alloc(64)
    hip.stream_words(rows((WAIT, word, 1)), stream)
    hip.fill(source, 9, 64, stream)
    hip.copy_batch(words(target), words(source), words(64), SourceOrder.STREAM, stream)
    ctypes.c_uint64.from_address(word).value = 1
    hip.stream_synchronize(stream)
    assert (read(target, 64) == 9).all()


def test_a_prepared_batch_runs_again_and_again(hip: HipDriver, stream: int, standin: StandIn) -> None:
    source, target = hip.device_alloc(64), hip.device_alloc(64)
    issue = hip.prepared_batch(words(target), words(source), words(64), SourceOrder.STREAM, stream)
    gc.collect()  # the arrays are its own now
    for byte in (1, 2):
        hip.fill(source, byte, 64, stream)
        issue()
        hip.stream_synchronize(stream)
        assert (read(target, 64) == byte).all()
    calls = standin.calls()
    assert sum(line.startswith("hipMemcpyBatchAsync") for line in calls) == 2
    assert "hipStreamIsCapturing" not in calls
    with pytest.raises(ValueError, match="as many sources"):
        hip.prepared_batch(words(1), words(), words(1), SourceOrder.STREAM, stream)


def test_what_a_batch_refuses(hip: HipDriver, stream: int, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = hip.device_alloc(64), hip.device_alloc(64)
    with pytest.raises(ValueError, match=r"as many sources \(1\) and sizes \(2\) as targets \(2\)"):
        hip.copy_batch(words(1, 2), words(1), words(1, 2), SourceOrder.STREAM, stream)
    many = np.full(8193, source, np.uint64)
    with pytest.raises(ValueError, match="at most 8192 entries; cut it into several"):
        hip.copy_batch(many, many, many, SourceOrder.STREAM, stream)
    assert not standin.calls("hipMemcpyBatchAsync")
    hip.copy_batch(words(), words(), words(), SourceOrder.STREAM, stream)
    assert not standin.calls("hipMemcpyBatchAsync")
    with pytest.raises(DriverError, match=r"hipErrorInvalidValue \(1\): invalid argument \(entry 1 of 2 entries\)"):
        hip.copy_batch(words(target, target), words(source, 4096), words(8, 8), SourceOrder.STREAM, stream)
    standin.set("FAIL", "hipMemcpyBatchAsync:2:1")
    with pytest.raises(DriverError, match=r"out of memory \(no single one of 1 entries\)"):
        hip.copy_batch(words(target), words(source), words(8), SourceOrder.STREAM, stream)
    # What those 8192 keep away: the real runtime faults.
    standin.calls()
    monkeypatch.setattr(hip_module, "MOST_BATCHED", 1 << 20)
    with pytest.raises(DriverError, match="hipErrorIllegalAddress"):
        hip.copy_batch(many, many, many, SourceOrder.STREAM, stream)
    assert standin.calls("fault") == ["fault hipMemcpyBatchAsync count=8193"]


def test_a_batch_cannot_be_captured(hip: HipDriver, stream: int) -> None:
    source = hip.device_alloc(64)
    hip.graph_begin(stream)
    with pytest.raises(NotSupported, match="a batch of copies cannot be captured into a graph"):
        hip.copy_batch(words(source), words(source), words(8), SourceOrder.STREAM, stream)
    hip.graph_destroy(hip.graph_end(stream))


@pytest.mark.parametrize("version", [60_400_000, LOOP, ATTRIBUTES])
def test_old_runtimes_say_what_they_lack(standin: StandIn, version: int) -> None:
    driver = at_version(standin, version)
    with pytest.raises(NotSupported, match=f"HIP {version} cannot exchange memory; from 71400000 on it can"):
        driver.swap_batch(words(1), words(1), words(1), 0)
    if version < LOOP:
        with pytest.raises(NotSupported, match="HIP 60400000 has no hipMemcpyBatchAsync; 70100000 or newer has"):
            driver.copy_batch(words(1), words(1), words(1), SourceOrder.STREAM, 0)


def test_swaps(hip: HipDriver, stream: int, standin: StandIn) -> None:
    a, b = device_bytes(hip, numbers(200, 9)), device_bytes(hip, numbers(200, 10))
    offsets = words(0, 120)
    hip.swap_batch(offsets + np.uint64(a), offsets + np.uint64(b), words(100, 80), stream)
    hip.stream_synchronize(stream)
    mask = np.ones(200, bool)
    mask[100:120] = False
    assert (read(a, 200) == np.where(mask, numbers(200, 10), numbers(200, 9))).all()
    assert (read(b, 200) == np.where(mask, numbers(200, 9), numbers(200, 10))).all()
    assert standin.calls("hipMemcpyBatchAsync") == ["hipMemcpyBatchAsync count=2 attributes=1 order=1 flags=0x200"]
    with pytest.raises(DriverError, match="entry 0 of 1"):
        hip.swap_batch(words(a), words(4096), words(8), stream)


# --- stream memory operations and graphs


def test_words_are_waited_for_and_written_in_order(hip: HipDriver, stream: int, standin: StandIn) -> None:
    block = hip.host_alloc(64)
    view = (ctypes.c_uint64 * 8).from_address(block)
    hip.stream_words(rows((WRITE, block + 8, 1), (WAIT, block, 2**40), (WRITE, block + 8, 2)), stream)
    deadline = time.monotonic() + 5
    while view[1] != 1 and time.monotonic() < deadline:
        time.sleep(1e-4)
    view[0] = 2**40 - 1
    time.sleep(0.002)
    assert view[1] == 1
    assert not hip.stream_done(stream)
    view[0] = 2**40 + 5
    hip.stream_synchronize(stream)
    assert view[1] == 2
    assert standin.calls("hipStreamWaitValue64") == [
        f"hipStreamWaitValue64 value={2**40} flags=0 mask=0xffffffffffffffff"
    ]
    with pytest.raises(DriverError, match="hipStreamWriteValue64 failed: hipErrorInvalidValue"):
        hip.stream_words(rows((WRITE, np.zeros(1, np.uint64).ctypes.data, 1)), stream)


def test_graphs_run_what_was_captured(hip: HipDriver, stream: int, standin: StandIn) -> None:
    source, target = device_bytes(hip, numbers(64, 11)), hip.device_alloc(64)
    hip.graph_begin(stream)
    assert hip.stream_capturing(stream)
    hip.copy(target, source, 64, stream)
    graph = hip.graph_end(stream)
    assert not hip.stream_capturing(stream)
    assert (read(target, 64) == 0xCD).all()
    for seed in (12, 13):
        ctypes.memmove(source, numbers(64, seed).tobytes(), 64)
        hip.graph_launch(graph, stream)
        hip.stream_synchronize(stream)
        assert (read(target, 64) == numbers(64, seed)).all()
    hip.graph_destroy(graph)
    with pytest.raises(DriverError, match="hipGraphLaunch failed: hipErrorInvalidHandle"):
        hip.graph_launch(graph, stream)
    calls = standin.calls()
    assert "hipStreamBeginCapture mode=1" in calls
    assert calls.count("hipGraphDestroy") == 1


def test_a_failed_instantiation_leaves_no_graph(hip: HipDriver, stream: int, standin: StandIn) -> None:
    standin.set("FAIL", "hipGraphInstantiateWithFlags:2:1")
    hip.graph_begin(stream)
    with pytest.raises(DriverError, match="hipGraphInstantiateWithFlags failed: hipErrorOutOfMemory"):
        hip.graph_end(stream)
    assert standin.calls("hipGraphDestroy") == ["hipGraphDestroy"]
    hip.graph_begin(stream)
    with pytest.raises(DriverError, match="hipStreamSynchronize failed: hipErrorStreamCaptureUnsupported"):
        hip.stream_synchronize(stream)
    with pytest.raises(DriverError, match="hipStreamEndCapture failed: hipErrorStreamCaptureInvalidated"):
        hip.graph_end(stream)


@pytest.mark.parametrize("seed", range(3))
def test_copies_and_gates_under_random_delays(hip: HipDriver, standin: StandIn, seed: int) -> None:
    """Two streams hand a buffer back and forth by words; every hand-over must see the bytes of the last."""
    standin.set("DELAY_US", "300")
    standin.set("SEED", str(seed))
    pair, block = [hip.stream_create(), hip.stream_create()], hip.host_alloc(64)
    buffers = [device_bytes(hip, numbers(128, seed)), hip.device_alloc(128)]
    for turn in range(6):
        me = turn % 2
        hip.stream_words(rows((WAIT, block, turn)), pair[me])
        offsets = words(0, 32, 64, 96)
        targets, sources = offsets + np.uint64(buffers[1 - me]), offsets + np.uint64(buffers[me])
        hip.copy_batch(targets, sources, words(32, 32, 32, 32), SourceOrder.STREAM, pair[me])
        hip.fill(buffers[me], turn, 128, pair[me])
        hip.stream_words(rows((WRITE, block, turn + 1)), pair[me])
    for stream in pair:
        hip.stream_synchronize(stream)
        hip.stream_destroy(stream)
    assert (read(buffers[0], 128) == numbers(128, seed)).all()
    assert (read(buffers[1], 128) == 5).all()


def test_layouts_are_the_published_ones() -> None:
    sizes = {"_Attributes": 24, "_Copy3D": 160, "_Handle": 64, "_Pitched": 32, "_PointerAttributes": 32}
    assert {name: ctypes.sizeof(getattr(hip_module, name)) for name in sizes} == sizes
    assert (hip_module._Attributes.flags.offset, hip_module._Copy3D.extent.offset) == (20, 128)
