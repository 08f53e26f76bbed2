"""Waits between copies and computation, on streams that only write down what they are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.llama import LateMover, generate, llama, prompt
from tests.standin import build

from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device
from dovetail.kv.memory import HostMemory
from dovetail.kv.mover import GpuMover
from dovetail.kv.pool import Pool
from dovetail.kv.prefixes import Prefixes, _flat
from dovetail.kv.transformers import KVShape, OffloadedCache, PagedMemory, PrefixStore, order, serving
from dovetail.kv.transformers import rotation as rotating

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Stream:
    def __init__(self, log: list[str], number: int) -> None:
        self._log, self.cuda_stream = log, number

    def query(self) -> bool:
        return False

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.cuda_stream} behind {other.cuda_stream}")


class Transfer:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def is_over(self) -> bool:
        return False

    def wait(self, timeout_s: float = 60.0) -> None:
        self._log.append("the CPU waits")

    def join(self, stream: int) -> None:
        self._log.append(f"{stream} behind a transfer")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stream 1 is the current one, others are 2."""
    told: list[str] = []
    cuda: Any = torch.cuda
    monkeypatch.setattr(cuda, "current_stream", lambda device: Stream(told, 1))
    monkeypatch.setattr(cuda, "Stream", lambda device: Stream(told, 2))
    return told


def test_on_a_gpu_streams_wait_and_the_cpu_does_not(log: list[str]) -> None:
    fence, transfer = order.Fence(GPU), Transfer(log)
    fence.behind_compute()
    fence.behind(transfer)
    fence.enter()
    order.join(transfer, GPU)
    assert log == ["2 behind 1", "2 behind a transfer", "1 behind 2", "1 behind a transfer"]
    assert fence.after == (2,)
    assert order.computing(GPU) == (1,)
    assert order.is_computing(GPU) is True


def test_on_the_cpu_there_are_no_streams_to_be_behind(log: list[str]) -> None:
    fence, transfer = order.Fence(CPU), Transfer(log)
    fence.behind_compute()
    fence.enter()
    assert log == []
    fence.behind(transfer)
    order.join(transfer, CPU)
    assert log == ["the CPU waits"] * 2
    assert fence.after == order.computing(CPU) == ()
    assert order.is_computing(CPU) is None


class Fence(order.Fence):
    """Has a stream, 7 and above, and writes down what it is told."""

    def __init__(self, log: list[str], stream: int = 7) -> None:
        super().__init__(CPU)
        self._told, self._number = log, stream

    def behind_compute(self) -> None:
        self._told.append(f"{self._number} behind compute")

    def behind(self, transfer: Any) -> None:
        self._told.append(f"{self._number} behind a transfer")
        transfer.wait()

    @property
    def after(self) -> tuple[int, ...]:
        return (self._number,)

    def enter(self) -> None:
        self._told.append(f"compute behind {self._number}")


def test_a_fetch_is_behind_those_who_had_its_blocks_and_a_store_behind_the_computation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order, "computing", lambda device: (1,))
    model, log = llama(2), []
    memory = PagedMemory.for_model(model, 8)
    memory.fence = Fence(log)
    host = HostMemory(8, memory.layout.slot_bytes)
    mover = LateMover(memory.bytes(), _flat(host))
    store = PrefixStore(memory, kept=Prefixes(memory.layout, Pool(host), mover, "cpu"))
    with store.begin(prompt(40)) as cache:
        assert log == ["compute behind 7"]
        generate(model, prompt(40), cache, new=2)
        move = store.keep(cache, prompt(40))
    assert log == ["compute behind 7", "7 behind compute"]  # others come behind what is queued now
    assert mover.afters == [("fetch", (7,)), ("store", (1,))]
    memory.take(8)  # also those under the store
    assert log[2:] == ["7 behind a transfer", "compute behind 7"]
    assert move.is_over()
    store.kept.close()


def test_auto_is_told_whether_the_gpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is idle while the GPU computes: that must not look like an idle GPU."""
    told: list[Any] = []
    monkeypatch.setattr(GpuMover, "submit", lambda self, *_, **options: told.append(options["beside"]))
    monkeypatch.setattr(order, "is_computing", lambda device: True)
    memory = PagedMemory(KVShape(num_layers=1, num_heads=1, head_dim=8, dtype=torch.float32), 8)
    with Device("cuda", driver=CudaDriver(build("cuda"))) as gpu:
        kept, mover = serving.prefixes(memory, gpu, 1 << 20, "auto", serving.ServingMover)
        empty: Any = None
        mover.submit("fetch", empty, after=[7])
        mover.submit("fetch", empty)
        mover.submit("fetch", empty, after=[7], beside=False)
        kept.close()
        with pytest.raises(ValueError, match="a pool of 10 bytes holds no block"):
            serving.prefixes(memory, gpu, 10, "auto", serving.ServingMover)
    assert told == [True, None, False]


def test_a_buffer_is_filled_behind_its_attention_and_a_layer_behind_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr(order, "computing", lambda device: (1,))
    movers: list[LateMover] = []

    def late(gpu: Any, tokens: torch.Tensor, host: Any) -> LateMover:
        movers.append(LateMover(tokens.reshape(-1).view(torch.uint8).numpy(), _flat(host)))
        return movers[0]

    monkeypatch.setattr(rotating, "_mover", late)
    model = llama(3)
    with OffloadedCache(KVShape.of(model), 64) as cache, torch.inference_mode():
        rotation = cache.rotation
        assert rotation is not None
        rotation._fences = [Fence(log, 7), Fence(log, 8)]
        model(input_ids=prompt(20), past_key_values=cache)
        # Layers 0 and 1 begin in buffers 7 and 8; 2 takes 7 when 1 is entered, 0 takes 8 when 2 is entered. Nothing is
        # fetched for 0, 1 and 2, so they are written behind their buffers' fences.
        assert log == [
            "compute behind 7", "7 behind a transfer",
            "7 behind compute", "compute behind 8", "8 behind a transfer",
            "8 behind compute", "8 behind a transfer", "compute behind 7", "7 behind a transfer",
        ]  # fmt: skip
        assert movers[0].afters == [("store", (1,)), ("store", (1,)), ("fetch", (8,)), ("store", (1,))]
