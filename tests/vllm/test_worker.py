"""The worker that vLLM is given for caches on a GPU: vLLM's own job classes, a stand-in for the driver."""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.standin import build

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is missing: make test-vllm", allow_module_level=True)

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from dovetail.hw.gpu import driver
from dovetail.kv.vllm import connector, spec
from dovetail.kv.vllm.options import Options

LAYERS, BLOCKS, PAGE = 3, 16, 64


class OnGpu:
    """A tensor that says it is a GPU's; in the stand-in it is."""

    def __init__(self, tensor: torch.Tensor, where: str = "cuda") -> None:
        self._tensor, self.device = tensor, SimpleNamespace(type=where, index=0)

    def view(self, *shape: Any) -> torch.Tensor:
        return self._tensor.view(*shape)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("DOVETAIL_CUDA_LIBRARY", str(build("cuda")))
    driver.load.cache_clear()
    found = driver.load("cuda")
    found.use(0)
    stream = found.stream_create()
    monkeypatch.setattr(spec, "_stream_of", lambda device: stream)
    yield found
    driver.load.cache_clear()


def made(**changes: Any) -> Any:
    """A spec as vLLM leaves it, without an engine around it."""
    bare: Any = spec.DovetailOffloadingSpec.__new__(spec.DovetailOffloadingSpec)
    known = {"replicated_layout": False, "blocks_per_chunk": 2, "num_chunks": 6, "num_blocks": 6}
    vars(bare).update({**known, "_worker": None, "_options": Options(), **changes})
    return bare


def caches(tensors: list[Any]) -> CanonicalKVCaches:
    refs = [CanonicalKVCacheRef(tensor_idx=n, page_size_bytes=PAGE) for n in range(len(tensors))]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=t, page_size_bytes=PAGE) for t in tensors], group_data_refs=[refs]
    )


def test_jobs_of_vllm_on_a_gpu(stand_in: Any) -> None:
    size = LAYERS * BLOCKS * PAGE
    memory = (ctypes.c_int8 * size).from_address(stand_in.device_alloc(size))
    cache = torch.frombuffer(memory, dtype=torch.int8).view(LAYERS, BLOCKS, PAGE)
    cache.copy_(torch.randint(-128, 128, cache.shape, dtype=torch.int8))
    before = cache.clone()
    worker = made().create_worker(caches([OnGpu(layer) for layer in cache]))
    assert worker.transfers.memory.pinned
    blocks = GPULoadStoreSpec([3, 7, 4, 9], group_sizes=[4], block_indices=[2])
    assert worker.submit_store(1, blocks, CPULoadStoreSpec([5, 0]))
    assert worker.submit_load(2, CPULoadStoreSpec([2]), GPULoadStoreSpec([15], group_sizes=[1], block_indices=[0]))
    worker.wait({1, 2})
    back = GPULoadStoreSpec([10, 11, 12], group_sizes=[3], block_indices=[3])  # the first one was there already
    assert worker.submit_load(3, CPULoadStoreSpec([5, 0]), back)
    worker.wait({3})
    assert torch.equal(cache[:, [10, 11, 12]], before[:, [7, 4, 9]])
    deadline, found = time.monotonic() + 10, []
    while len(found) < 3 and time.monotonic() < deadline:
        found += worker.get_finished()
    sizes = {result.job_id: (result.success, result.transfer_size) for result in found}
    assert sizes == {1: (True, 4 * LAYERS * PAGE), 2: (True, LAYERS * PAGE), 3: (True, 3 * LAYERS * PAGE)}
    assert all(result.transfer_time >= 0 for result in found)
    assert {path for _, path, _ in worker.transfers.counts.transfers} <= {"dma-2d", "dma-batch", "staged"}
    worker.shutdown()
    assert not worker.transfers.memory.pieces


@pytest.mark.parametrize(
    ("where", "variable", "reason"),
    [("xpu", "", "a cache in memory of xpu is not supported"), ("cuda", "1", "DOVETAIL_DISABLE is set")],
)
def test_vllms_worker_where_ours_cannot_serve(
    where: str, variable: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DOVETAIL_DISABLE", variable)
    monkeypatch.setattr(CPUOffloadingSpec, "create_worker", lambda self, kv_caches: "vLLM's")
    tensors: list[Any] = [OnGpu(torch.zeros(BLOCKS, PAGE, dtype=torch.int8), where)]
    assert made().create_worker(caches(tensors)) == "vLLM's"
    assert f"vLLM's own worker moves KV blocks: {reason}" in caplog.text


def test_block_outermost_is_asked_for_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(attention_config=SimpleNamespace(hisparse_config=None))
    asked = connector.DovetailConnector.get_required_kvcache_layout
    assert asked(config) == "LBHNC"
    monkeypatch.setattr(connector, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert asked(config) == "BLHNC"
    layout = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout["BLHNC"]
    assert layout.is_block_outermost
