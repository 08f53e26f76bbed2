"""Copies on chosen engines, against ROCr and HIP in software: which engine ran what; that nothing moves early."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.standin import build

from dovetail.errors import HardwareError, NotSupported, Timeout
from dovetail.hw.gpu import rocr, sdma
from dovetail.hw.gpu.driver import WAIT, WORD, DriverError
from dovetail.hw.gpu.hip import HipDriver
from dovetail.hw.gpu.library import Library
from dovetail.hw.gpu.rocr import Engines
from dovetail.hw.gpu.sdma import SdmaQueues

DEFAULTS = {"DEVICES": "3", "DELAY_US": "0", "FAIL": "", "ENGINES": "6", "TWINS": "0", "BUSY": "0", "BREAK": "0"}
CPU, GPU = 0xC00, 0xC01
COPY = "hsa_amd_memory_async_copy_on_engine"
Queues = list[tuple[np.ndarray, np.ndarray, np.ndarray]]


class Machine:
    """Both stand-ins, with memory that both of them know."""

    def __init__(self) -> None:
        self.paths = {name: str(build(name)) for name in ("hip", "hsa")}
        self.handles = {name: ctypes.CDLL(path) for name, path in self.paths.items()}
        self.handles["hsa"].standin_own.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for name, value in {**DEFAULTS, "LAYOUT": "0", "VERSION": "71400000"}.items():
            self.set(name, value)
        self.calls()
        self.hip, self.engines = HipDriver(self.paths["hip"]), Engines(self.paths["hsa"])

    def set(self, name: str, value: str) -> None:
        for handle in self.handles.values():
            handle.standin_set(name.encode(), value.encode())

    def calls(self, name: str = "") -> list[str]:
        """What ROCr was asked since the last time."""
        lines: list[str] = []
        buffer = ctypes.create_string_buffer(1 << 16)
        while self.handles["hsa"].standin_calls(buffer, len(buffer)):
            lines += buffer.value.decode().splitlines()
        return [line for line in lines if line.split()[0] == name or not name]

    def engines_of_copies(self) -> list[int]:
        return [int(line.split("engine=")[1].split()[0], 16) for line in self.calls(COPY)]

    def memory(self, device: int, values: np.ndarray | int) -> int:
        """Memory of a device (-1: pinned) with these values, or of that size and zero."""
        data = np.zeros(values, np.uint8) if isinstance(values, int) else values
        if device < 0:
            address = self.hip.host_alloc(data.nbytes)
        else:
            self.hip.use(device)
            address = self.hip.device_alloc(data.nbytes)
            self.hip.use(0)
        ctypes.memmove(address, data.tobytes(), data.nbytes)
        self.handles["hsa"].standin_own(address, data.nbytes, device)
        return address


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("DOVETAIL_TIMEOUT", "10")
    made = Machine()
    yield made
    made.set("FAIL", "")
    made.engines.close()


@pytest.fixture
def engines(machine: Machine) -> Engines:
    return machine.engines


@pytest.fixture
def hip(machine: Machine) -> HipDriver:
    machine.hip.use(0)
    return machine.hip


@pytest.fixture
def stream(hip: HipDriver) -> Iterator[int]:
    made = hip.stream_create()
    yield made
    hip.stream_destroy(made)  # a test that failed may have left it parked, so it is not waited for


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def numbers(size: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def read(address: int, size: int) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(address, size), np.uint8)


def settle(hip: HipDriver, stream: int) -> None:
    """Waits for the stream, but not for ever: a wrong wait shows as a failure."""
    deadline = time.monotonic() + 10
    while not hip.stream_done(stream):
        assert time.monotonic() < deadline, "the stream is stuck"
        time.sleep(1e-4)


def gate(hip: HipDriver, stream: int) -> Callable[[], None]:
    """Parks the stream; the result opens it."""
    word = hip.host_alloc(8)
    hip.stream_words(np.array([(WAIT, word, 1)], WORD), stream)
    return lambda: ctypes.memset(word, 1, 1) and None


# --- ROCr: agents


def test_a_missing_library_says_what_to_do() -> None:
    with pytest.raises(NotSupported, match=r"the ROCr runtime \(libnone.so\) cannot be loaded"):
        Engines("libnone.so")
    assert not rocr.available("libnone.so")


def test_whether_engines_can_be_chosen(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOVETAIL_HSA_LIBRARY", machine.paths["hsa"])
    machine.calls()
    assert rocr.available()
    assert machine.calls() == []  # nothing was started for that
    monkeypatch.setattr(Library, "has", lambda _self, symbol: symbol != COPY)
    assert not rocr.available()


def test_agents(engines: Engines) -> None:
    assert [a.is_gpu for a in engines.agents] == [False, True, True, True]
    assert engines.host().handle == CPU
    assert engines.agents[2] == rocr.Agent(GPU + 1, True, "0000:c1:00.0", "GPU-standin-device-1")


def test_the_agent_of_a_hip_device(engines: Engines, hip: HipDriver) -> None:
    found = [engines.agent(hip.device_pci(d), hip.device_uuid(d)).handle for d in range(3)]
    assert found == [GPU, GPU + 1, GPU + 2]
    with pytest.raises(NotSupported, match=r"ROCr has 0 GPUs at 0000:01:00.0 .* it has: 0000:c0:00.0 GPU-standin"):
        engines.agent("0000:01:00.0")


def test_partitions_are_told_apart_by_uuid(machine: Machine, hip: HipDriver) -> None:
    machine.set("TWINS", "1")
    engines = Engines(machine.paths["hsa"])
    assert engines.agent("0000:C0:00.0", hip.device_uuid(2)).handle == GPU + 2
    with pytest.raises(NotSupported, match="ROCr has 0 GPUs at 0000:c0:00.0 with UUID b'another'"):
        engines.agent("0000:c0:00.0", b"another")
    engines.close()


def test_owners(machine: Machine, engines: Engines) -> None:
    assert engines.owner(machine.memory(1, 64) + 63) == GPU + 1
    assert engines.owner(machine.memory(-1, 64)) == CPU
    with pytest.raises(HardwareError, match=r"ROCr does not know the memory at 0x10;.*through HIP"):
        engines.owner(0x10)


def test_it_is_closed_once(machine: Machine) -> None:
    machine.calls()
    machine.engines.close()
    machine.engines.close()
    assert machine.calls() == ["hsa_shut_down"]
    with pytest.raises(
        DriverError, match=r"hsa_agent_get_info failed: HSA_STATUS_ERROR_NOT_INITIALIZED \(4107\): An API"
    ):
        machine.engines._info(CPU, 17, ctypes.byref(ctypes.c_int()))


def test_a_status_without_text(machine: Machine) -> None:
    machine.set("FAIL", "hsa_init:4711:1")
    with pytest.raises(DriverError, match=r"hsa_init failed: unknown status \(4711\): no text"):
        Engines(machine.paths["hsa"])


# --- ROCr: engines


def test_free_engines(machine: Machine, engines: Engines) -> None:
    assert engines.free(GPU + 1, GPU) == 0b111100  # peers: not those of the host
    assert engines.free(CPU, GPU) == engines.free(GPU, CPU) == 0b111111
    assert engines.free(GPU, GPU) == 0b111111  # asked as if it went to the host
    machine.set("BUSY", str(0b000100))
    assert engines.free(GPU + 1, GPU) == 0b111000
    machine.set("BUSY", str(0b111111))
    assert engines.free(GPU + 1, GPU) == 0
    machine.set("FAIL", "hsa_amd_memory_copy_engine_status:4097:1")
    with pytest.raises(
        DriverError, match=r"hsa_amd_memory_copy_engine_status failed: HSA_STATUS_ERROR_INVALID_ARGUMENT"
    ):
        engines.free(GPU + 1, GPU)


def test_preferred_engines(machine: Machine, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engines.preferred(GPU + 1, GPU) == 0b001000
    assert engines.preferred(CPU, GPU) == engines.preferred(GPU, GPU) == 0
    machine.set("FAIL", "hsa_amd_memory_get_preferred_copy_engine:4104:1")
    with pytest.raises(DriverError, match="hsa_amd_memory_get_preferred_copy_engine failed: HSA_STATUS_ERROR_OUT_OF"):
        engines.preferred(GPU + 1, GPU)
    monkeypatch.setattr(Library, "has", lambda _self, _symbol: False)
    older = Engines(machine.paths["hsa"])
    assert older.preferred(GPU + 1, GPU) == 0
    older.close()


def test_bits() -> None:
    assert rocr.bits(0b101100) == [4, 8, 32]
    assert rocr.bits(0) == []


# --- ROCr: signals


def test_signals(machine: Machine, engines: Engines) -> None:
    signal = engines.signal_create(3)
    assert machine.calls("hsa_amd_signal_create") == ["hsa_amd_signal_create value=3 attributes=1"]
    assert engines.load(signal) == ctypes.c_int64.from_address(engines.signal_word(signal)).value == 3
    begin = time.monotonic()
    assert engines.wait(signal, 0.02) == 3
    assert time.monotonic() - begin >= 0.02
    engines.store(signal, -1)
    assert engines.wait(signal, 10) == -1
    engines.store(signal, 5)
    threading.Timer(0.15, engines.store, (signal, 0)).start()
    assert engines.wait(signal, 30) == 0
    engines.signal_destroy(signal)
    with pytest.raises(DriverError, match=r"hsa_signal_destroy failed: HSA_STATUS_ERROR_INVALID_SIGNAL \(4102\)"):
        engines.signal_destroy(0)


def test_the_signal_behind_a_word_of_hip(machine: Machine, engines: Engines, hip: HipDriver) -> None:
    word = hip.signal_alloc()
    signal = engines.signal_at(word)
    engines.store(signal, 42)
    assert ctypes.c_int64.from_address(word).value == 42
    machine.set("LAYOUT", "1")
    with pytest.raises(NotSupported, match="this ROCr lays signals out differently"):
        engines.signal_at(word)
    with pytest.raises(DriverError, match="HSA_STATUS_ERROR_INVALID_SIGNAL"):
        engines.signal_at(hip.host_alloc(4096) + 64)


def test_layouts_are_the_published_ones() -> None:
    operation, info = rocr._Operation, rocr._PointerInfo
    assert ctypes.sizeof(operation) == 128
    offsets = [
        operation.completion.offset,
        operation.src.offset,
        operation.src_agent.offset,
        operation.dst_agent.offset,
    ]
    assert [*offsets, operation.dst.offset, operation.size.offset] == [8, 16, 24, 32, 40, 48]
    assert (info.owner.offset, info.flags.offset) == (40, 48)


# --- ROCr: copies


def test_copies_know_their_agents(machine: Machine, engines: Engines) -> None:
    mine, peer, host = machine.memory(0, 64), machine.memory(1, 64), machine.memory(-1, 64)
    dst, src = words(peer, mine, mine, host, mine), words(mine, peer, host, mine, mine)
    plain = engines.copies(dst, src, words(8, 8, 8, 8, 0))
    assert len(plain) == 4  # a copy of nothing would never signal
    assert plain.dst_agent.tolist() == [GPU + 1, GPU, GPU, CPU]
    assert plain.src_agent.tolist() == [GPU, GPU + 1, CPU, GPU]
    pulled = engines.copies(dst, src, words(8, 8, 8, 8, 0), on=GPU)
    assert pulled.dst_agent.tolist() == [GPU + 1, GPU + 1, GPU, CPU]
    assert pulled.src_agent.tolist() == [GPU, GPU, CPU, GPU]
    with pytest.raises(ValueError, match="arrays of one length, not 2, 1 and 1"):
        engines.copies(words(1, 2), words(1), words(1))


def test_copies_wait_for_their_dependencies_and_count_down(machine: Machine, engines: Engines) -> None:
    values = numbers(96, 1)
    source, target = machine.memory(0, values), machine.memory(1, 96)
    steps = words(0, 32, 64)
    copies = engines.copies(steps + np.uint64(target), steps + np.uint64(source), words(32, 32, 32))
    first, second, done = (engines.signal_create(n) for n in (1, 1, 3))
    machine.calls()
    engines.copies_on_engine(copies, 0b1000, (first, second), done)
    assert machine.calls(COPY) == [f"{COPY} engine=0x8 dst=0xc02 src=0xc01 size=32 depends=2 force=1"] * 3
    engines.store(second, 0)
    assert engines.wait(done, 0.01) == 3
    assert not read(target, 96).any()
    assert engines.free(GPU + 1, GPU) == 0b110100
    engines.store(first, 0)
    assert engines.wait(done, 10) == 0
    assert (read(target, 96) == values).all()


def test_copies_without_dependencies(machine: Machine, engines: Engines) -> None:
    source, target = machine.memory(-1, numbers(8, 2)), machine.memory(0, 8)
    done = engines.signal_create(1)
    engines.copies_on_engine(engines.copies(words(target), words(source), words(8)), 1, (), done)
    assert engines.wait(done, 10) == 0
    assert (read(target, 8) == numbers(8, 2)).all()


def test_an_engine_that_does_not_serve_the_pair(machine: Machine, engines: Engines) -> None:
    copies = engines.copies(words(machine.memory(1, 8)), words(machine.memory(0, 8)), words(8))
    done = engines.signal_create(1)
    with pytest.raises(DriverError, match=rf"{COPY} failed: HSA_STATUS_ERROR_INVALID_ARGUMENT \(4097\): One of the"):
        engines.copies_on_engine(copies, 0b10, (), done)


def test_operations_of_many_entries(machine: Machine, engines: Engines) -> None:
    a, b = numbers(64, 3), numbers(64, 4)
    mine, peers = machine.memory(0, a), [machine.memory(1, b), machine.memory(2, b)]
    start, done = engines.signal_create(1), engines.signal_create(1)
    both = engines.copies(words(*peers), words(mine, mine), words(64, 64))
    engines.broadcast(both, (start,), done)
    assert engines.wait(done, 0.005) == 1
    assert (read(peers[0], 64) == b).all()
    engines.store(start, 0)
    assert engines.wait(done, 10) == 0
    assert all((read(peer, 64) == a).all() for peer in peers)
    ctypes.memmove(peers[1], b.tobytes(), 64)
    engines.store(done, 1)
    engines.swap(engines.copies(words(peers[1] + 8), words(mine + 8), words(16)), (), done)
    assert engines.wait(done, 10) == 0
    assert (read(mine + 8, 16) == b[8:24]).all()
    assert (read(peers[1] + 8, 16) == a[8:24]).all()
    engines.store(done, 1)
    halves = engines.copies(words(peers[0], peers[1]), words(mine + 8, mine + 16), words(8, 8))
    engines.linear(halves, (), done)
    assert engines.wait(done, 10) == 0
    assert (read(peers[1], 8) == read(mine + 16, 8)).all()
    assert [line.split(" ", 1)[1] for line in machine.calls("hsa_amd_memory_async_batch_copy")] == [
        "ops=1 type=1 entries=2 depends=1",
        "ops=1 type=2 entries=1 depends=0",
        "ops=1 type=0 entries=2 depends=0",
    ]


def test_what_operations_refuse(machine: Machine, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, peer = machine.memory(0, 64), machine.memory(1, 64)
    with pytest.raises(ValueError, match="a broadcast has one source and one size"):
        engines.broadcast(engines.copies(words(peer, peer), words(mine, mine + 8), words(8, 8)), (), 0)
    with pytest.raises(ValueError, match=r"1 to 1024 entries \(2 given\) from one agent"):
        engines.linear(engines.copies(words(peer, mine), words(mine, peer), words(8, 8)), (), 0)
    with pytest.raises(ValueError, match=r"1 to 1024 entries \(0 given\)"):
        engines.swap(engines.copies(words(), words(), words()), (), 0)
    monkeypatch.setattr(Library, "has", lambda _self, symbol: "batch" not in symbol)
    older = Engines(machine.paths["hsa"])
    with pytest.raises(NotSupported, match="this ROCr has no hsa_amd_memory_async_batch_copy; ROCm 7.14 or newer has"):
        older.swap(engines.copies(words(peer), words(mine), words(8)), (), 0)
    older.close()


# --- queues in the order of a stream


@pytest.mark.parametrize(
    ("choices", "most", "found"),
    [
        ([[4, 8], [4, 8], [4, 8]], None, [4, 8, 4]),
        ([[8, 4], [4, 8]], None, [8, 4]),
        ([[4, 8], [8, 4], [4, 8]], 1, [4, 4, 4]),
        ([[4, 8], [8]], 1, [8, 8]),
        ([[1, 2], [1, 2], [1, 2], [1, 2]], 2, [1, 2, 1, 2]),
        ([], None, []),
    ],
)
def test_engines_are_dealt_out(choices: list[list[int]], most: int | None, found: list[int]) -> None:
    assert sdma.assign(choices, most) == found


def test_engines_that_cannot_be_dealt_out() -> None:
    with pytest.raises(NotSupported, match="no free engine serves all copies of queue 1; split the queue by peer"):
        sdma.assign([[4], []])
    with pytest.raises(NotSupported, match="all copies of queue 1 with 1 in all"):
        sdma.assign([[4], [8]], 1)


class Gather:
    """GPU 0 pushes a chunk to each of two peers and to the host: three queues."""

    def __init__(self, machine: Machine, size: int = 4096) -> None:
        self.size, self.source = size, machine.memory(0, 3 * size)
        self.targets = [machine.memory(d, size) for d in (1, 2, -1)]
        half = size // 2
        self.queues: Queues = [
            (words(to, to + half), words(self.source + n * size, self.source + n * size + half), words(half, half))
            for n, to in enumerate(self.targets)
        ]

    def one_queue(self) -> Queues:
        return [tuple(np.concatenate(column) for column in zip(*self.queues, strict=True))]  # type: ignore[list-item]

    def fill(self, seed: int) -> None:
        ctypes.memmove(self.source, numbers(3 * self.size, seed).tobytes(), 3 * self.size)

    def arrived(self, seed: int) -> bool:
        got = np.concatenate([read(to, self.size) for to in self.targets])
        return bool((got == numbers(3 * self.size, seed)).all())

    def moved(self) -> bool:
        return any(read(to, self.size).any() for to in self.targets)


def test_pcpy_uses_an_engine_per_queue(machine: Machine, hip: HipDriver, stream: int) -> None:
    gather = Gather(machine)
    gather.fill(5)
    with SdmaQueues(hip, machine.engines, 0, gather.queues) as queues:
        machine.calls()
        queues.run(stream)
        settle(hip, stream)
        assert gather.arrived(5)
        used = machine.engines_of_copies()
        # Peers 1 and 2 get the engines that ROCr prefers for them, the host one that is left.
        assert used == [0b001000, 0b001000, 0b010000, 0b010000, 0b000001, 0b000001]
        assert [q.name for q in queues.queues] == ["SDMA engine 3", "SDMA engine 4", "SDMA engine 0"]


@pytest.mark.parametrize("how", ["one queue", "one engine"])
def test_b2b_uses_one_engine(machine: Machine, hip: HipDriver, stream: int, how: str) -> None:
    gather = Gather(machine)
    gather.fill(6)
    arrays, most = (gather.one_queue(), None) if how == "one queue" else (gather.queues, 1)
    with SdmaQueues(hip, machine.engines, 0, arrays, most_engines=most) as queues:
        machine.calls()
        queues.run(stream)
        settle(hip, stream)
        assert gather.arrived(6)
        assert set(machine.engines_of_copies()) == {0b000100 if how == "one queue" else 0b001000}
        assert len(queues.queues) == (1 if how == "one queue" else 3)


def test_more_queues_than_engines_share(machine: Machine, hip: HipDriver, stream: int) -> None:
    machine.set("ENGINES", "4")
    source, target = machine.memory(0, numbers(50, 7)), machine.memory(1, 50)
    arrays: Queues = [(words(target + 10 * n), words(source + 10 * n), words(10)) for n in range(5)]
    with SdmaQueues(hip, machine.engines, 0, arrays) as queues:
        assert sorted(q.engine for q in queues.queues) == [4, 4, 8, 8, 8]
        queues.run(stream)
        settle(hip, stream)
    assert (read(target, 50) == numbers(50, 7)).all()


def test_a_pull_runs_on_our_own_engines(machine: Machine, hip: HipDriver, stream: int) -> None:
    source, target = machine.memory(1, numbers(64, 8)), machine.memory(0, 64)
    with SdmaQueues(hip, machine.engines, 0, [(words(target), words(source), words(64))]) as queues:
        queues.run(stream)
        settle(hip, stream)
    assert (read(target, 64) == numbers(64, 8)).all()
    assert all(" src=0xc01 " in line for line in machine.calls(COPY))


def test_copies_inside_a_gpu_and_empty_queues(machine: Machine, hip: HipDriver, stream: int) -> None:
    source, target = machine.memory(0, numbers(64, 9)), machine.memory(0, 64)
    arrays: Queues = [(words(target), words(source), words(64)), (words(), words(), words())]
    with SdmaQueues(hip, machine.engines, 0, arrays) as queues:
        queues.run(stream)
        queues.wait(10)
        settle(hip, stream)
    assert (read(target, 64) == numbers(64, 9)).all()


def test_nothing_moves_before_the_stream_gets_there(machine: Machine, hip: HipDriver, stream: int) -> None:
    gather, after = Gather(machine), machine.memory(-1, 4096)
    open_gate = gate(hip, stream)
    hip.fill(gather.source, 0x5A, 3 * gather.size, stream)  # the copies must see this
    with SdmaQueues(hip, machine.engines, 0, gather.queues) as queues:
        queues.run(stream)
        hip.copy(after, gather.targets[1], 4096, stream)  # and this must see the copies
        time.sleep(0.02)
        assert not gather.moved()
        assert not hip.stream_done(stream)
        with pytest.raises(Timeout, match="SDMA engine 3 has 2 of 2 copies of run 1 to do; the stream has not started"):
            queues.wait(0.01)
        open_gate()
        queues.wait(10)
        settle(hip, stream)
        assert all((read(to, gather.size) == 0x5A).all() for to in gather.targets)
        assert (read(after, 4096) == 0x5A).all()


def test_the_stream_waits_for_slow_engines(machine: Machine, hip: HipDriver, stream: int) -> None:
    """An engine that somebody else holds keeps the stream, and the error names it."""
    gather = Gather(machine)
    gather.fill(10)
    engines = machine.engines
    with SdmaQueues(hip, engines, 0, gather.queues) as queues:
        theirs, never, done = machine.memory(1, 8), engines.signal_create(1), engines.signal_create(1)
        held = engines.copies(words(theirs), words(gather.source), words(8))
        engines.copies_on_engine(held, queues.queues[1].engine, (never,), done)
        queues.run(stream)
        with pytest.raises(Timeout, match=r"SDMA engine 4 has 2 of 2 .* it was started and makes no progress"):
            queues.wait(0.05)
        assert not hip.stream_done(stream)
        assert (read(gather.targets[0], gather.size) == numbers(3 * gather.size, 10)[: gather.size]).all()
        engines.store(never, 0)
        settle(hip, stream)
        assert gather.arrived(10)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_signals_are_used_again(machine: Machine, hip: HipDriver, stream: int, in_flight: int) -> None:
    """Many runs without a wait between them; each result is kept by the stream before the next run changes it."""
    machine.set("DELAY_US", "200")
    gather, rounds = Gather(machine, 64), 24
    kept = machine.memory(-1, rounds * 3 * 64)
    inputs = machine.memory(-1, np.concatenate([numbers(3 * 64, n) for n in range(rounds)]))
    with SdmaQueues(hip, machine.engines, 0, gather.queues, runs_in_flight=in_flight) as queues:
        for n in range(rounds):
            hip.copy(gather.source, inputs + n * 192, 192, stream)
            queues.run(stream)
            for k, to in enumerate(gather.targets):
                hip.copy(kept + n * 192 + k * 64, to, 64, stream)
        queues.wait(30)
        settle(hip, stream)
    assert (read(kept, rounds * 192) == read(inputs, rounds * 192)).all()


def test_one_run_too_many_waits_for_the_oldest(
    machine: Machine, hip: HipDriver, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = Gather(machine)
    open_gate = gate(hip, stream)
    with SdmaQueues(hip, machine.engines, 0, gather.queues) as queues:
        queues.run(stream)
        queues.run(stream)
        monkeypatch.setenv("DOVETAIL_TIMEOUT", "0.02")
        with pytest.raises(Timeout, match="copies of run 1 to do; the stream has not started it yet"):
            queues.run(stream)
        # Engines that are done do not make the signals free: the stream has its waits still before it.
        machine.engines.store(queues._slots[0].signals[0], 0)
        with pytest.raises(Timeout, match="the copies of run 1 are done, but the stream has not seen it"):
            queues.run(stream)
        monkeypatch.setenv("DOVETAIL_TIMEOUT", "10")
        gather.fill(11)
        threading.Timer(0.05, open_gate).start()
        queues.run(stream)
        queues.wait(10)
        settle(hip, stream)
        assert gather.arrived(11)


def test_a_failed_copy_names_its_engine(machine: Machine, hip: HipDriver, stream: int) -> None:
    gather = Gather(machine)
    gather.fill(12)
    with SdmaQueues(hip, machine.engines, 0, gather.queues) as queues:
        machine.set("BREAK", str(queues.queues[2].engine))
        queues.run(stream)
        for _ in range(2):
            with pytest.raises(HardwareError, match="a copy of run 1 failed on SDMA engine 0"):
                queues.wait(10)
        settle(hip, stream)  # it was let go
        with pytest.raises(HardwareError, match="a copy of run 1 failed"):
            queues.run(stream)


@pytest.mark.parametrize("nth", [1, 4])
def test_a_refused_copy_leaves_no_engine_held(machine: Machine, hip: HipDriver, stream: int, nth: int) -> None:
    gather = Gather(machine)
    queues = SdmaQueues(hip, machine.engines, 0, gather.queues)
    machine.set("FAIL", f"{COPY}:4104:{nth}")
    with pytest.raises(DriverError, match=f"{COPY} failed: HSA_STATUS_ERROR_OUT_OF_RESOURCES"):
        queues.run(stream)
    with pytest.raises(HardwareError, match=f"run 1 could not be issued: {COPY} failed"):
        queues.run(stream)
    settle(hip, stream)
    deadline = time.monotonic() + 10
    while machine.engines.free(GPU + 1, GPU) != 0b111100 and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert machine.engines.free(GPU + 1, GPU) == 0b111100
    queues.close()


def test_a_stream_that_captures_is_refused(machine: Machine, hip: HipDriver, stream: int) -> None:
    with SdmaQueues(hip, machine.engines, 0, Gather(machine).queues) as queues:
        hip.graph_begin(stream)
        with pytest.raises(NotSupported, match="copies on chosen engines cannot be captured"):
            queues.run(stream)
        hip.graph_destroy(hip.graph_end(stream))


def test_no_free_engine(machine: Machine, hip: HipDriver) -> None:
    machine.set("BUSY", str(0b111111))
    with pytest.raises(NotSupported, match="no free engine serves all copies of queue 0"):
        SdmaQueues(hip, machine.engines, 0, Gather(machine).queues)


def test_close_frees_the_signals_once(machine: Machine, hip: HipDriver, stream: int) -> None:
    queues = SdmaQueues(hip, machine.engines, 0, Gather(machine).queues)
    held = [word for slot in queues._slots for word in slot.words]
    queues.run(stream)
    queues.close()
    queues.close()
    assert all(not hip.memory_at(word).size_bytes for word in held)
    for call in (lambda: queues.run(stream), lambda: queues.wait(1)):
        with pytest.raises(HardwareError, match="these SDMA queues are closed"):
            call()


def test_close_leaves_signals_that_engines_still_use(
    machine: Machine, hip: HipDriver, stream: int, caplog: pytest.LogCaptureFixture
) -> None:
    open_gate = gate(hip, stream)
    queues = SdmaQueues(hip, machine.engines, 0, Gather(machine).queues)
    queues.run(stream)
    with caplog.at_level(logging.WARNING, logger="dovetail"):
        queues.close(0.01)
    assert "signals of SDMA queues stay allocated" in caplog.text
    assert "SDMA engine 3 has 2 of 2 copies" in caplog.text
    assert hip.memory_at(queues._slots[0].words[0]).size_bytes == 64
    open_gate()
