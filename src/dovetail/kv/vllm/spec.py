"""What vLLM loads: its own offloading specs, with our worker.

Everything but `create_worker` is vLLM's: manager, policies, events, metrics, config keys. Where our worker can't serve,
vLLM's does, and a warning says why. For vLLM 0.29 and newer.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from dovetail import env
from dovetail.hw.gpu.device import Device
from dovetail.kv.planner import Direction
from dovetail.kv.vllm import counts
from dovetail.kv.vllm.jobs import Caches, Job, Page
from dovetail.kv.vllm.manager import use_runs
from dovetail.kv.vllm.options import Options, Pool
from dovetail.kv.vllm.region import Region
from dovetail.kv.vllm.transfers import Host, Transfers, private_memory

logger = logging.getLogger(__name__)


class OurWorker:
    """What is ours in a spec of vLLM that keeps blocks in host memory; stands before it in the list of bases."""

    _shared = False  #: others than this worker read the host memory
    _worker: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # vLLM's
        self._options = Options.of(config.extra_config)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """vLLM's, and those of `counts`, which `DovetailConnector` reports."""
        texts = {
            counts.TRANSFERS: "Transfers of KV blocks by path, and why that path was taken.",
            counts.BYTES: "Bytes of KV blocks moved by path, and why that path was taken.",
        }
        ours = {
            name: OffloadingCounterMetadata(documentation=text, labelnames=counts.LABELS)
            for name, text in texts.items()
        }
        theirs: Any = super()
        return {**theirs.build_metric_definitions(extra_config), **ours}

    def get_manager(self) -> Any:
        """vLLM's, with our slot allocator if it was asked for."""
        theirs: Any = super()
        manager = theirs.get_manager()
        if self._options.pool is Pool.DOVETAIL:
            use_runs(getattr(manager, "primary_tier", manager))
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        """Also where vLLM itself has no worker, on a CPU."""
        if not current_platform.is_cpu():
            theirs: Any = super()
            return theirs.get_worker(kv_caches)
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    def create_worker(self, kv_caches: Any) -> Any:
        """Ours, or vLLM's where ours can't serve."""
        reason = self._refusal(kv_caches)
        if reason:
            logger.warning("vLLM's own worker moves KV blocks: %s", reason)
            theirs: Any = super()
            return theirs.create_worker(kv_caches)
        place = kv_caches.tensors[0].tensor.device
        device = Device("hip" if torch.version.hip else "cuda", place.index) if place.type == "cuda" else None
        return DovetailWorker(self._transfers(kv_caches, device), device)

    def _refusal(self, kv_caches: Any) -> str:
        spec: Any = self
        where = kv_caches.tensors[0].tensor.device.type
        if self._shared and spec.config.canonical_layout:
            return "the format `canonical_layout` is not supported"
        if where == "cpu":
            return ""  # vLLM has nothing there
        if where != "cuda":
            return f"a cache in memory of {where} is not supported"
        return "DOVETAIL_DISABLE is set" if env.disable() else ""

    def _transfers(self, kv_caches: Any, device: Device | None) -> Transfers:
        spec: Any = self
        shared = self._shared or spec.replicated_layout
        caches = Caches(_groups(kv_caches), blocks_per_chunk=spec.blocks_per_chunk, shared=shared)
        # Of 0.29 and of 0.32: what a chunk is called has changed.
        num_chunks = spec.num_chunks if hasattr(spec, "num_chunks") else spec.num_blocks
        memory: Host
        if shared:
            memory = Region(spec, pin=device is not None)
        else:
            memory = private_memory(caches, num_chunks, self._options, device)
        if device is None:
            return Transfers.on_cpu(caches, memory, self._options.path)
        return Transfers.on_gpu(device, caches, memory, self._options.path, lambda: _stream_of(device))


class DovetailOffloadingSpec(OurWorker, CPUOffloadingSpec):  # type: ignore[misc]  # vLLM need not be installed
    """`"spec_name": "DovetailOffloadingSpec", "spec_module_path": "dovetail.kv.vllm.spec"`."""


class DovetailTieringSpec(OurWorker, TieringOffloadingSpec):  # type: ignore[misc]
    """With vLLM's tiers behind the host memory: `"spec_name": "DovetailTieringSpec"`, the same module."""

    _shared = True


def _groups(kv_caches: Any) -> list[list[Page]]:
    """The caches of each group, and their places in vLLM's format: pages in the order of its tensors."""
    tensors = [(cache.tensor.view(torch.int8), cache.page_size_bytes) for cache in kv_caches.tensors]
    offsets = np.cumsum([0, *(size for _, size in tensors)]).tolist()

    def page(ref: Any) -> Page:
        tensor, size = tensors[ref.tensor_idx]
        used = tensor.view(-1, size)[:, : ref.page_size_bytes]
        return Page(tensor=used, padded_bytes=size, offset=offsets[ref.tensor_idx])

    return [[page(ref) for ref in refs] for refs in kv_caches.group_data_refs]


def _stream_of(device: Device) -> int:
    """On which the model runs."""
    return int(torch.cuda.current_stream(device.index).cuda_stream)


class DovetailWorker(OffloadingWorker):  # type: ignore[misc]
    """vLLM's calls, passed on to `Transfers`."""

    def __init__(self, transfers: Transfers, device: Device | None) -> None:
        self.transfers, self._device = transfers, device

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Cache to host."""
        self.transfers.submit(job_id, Direction.STORE, _job(src_spec, dst_spec))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Host to cache."""
        self.transfers.submit(job_id, Direction.FETCH, _job(dst_spec, src_spec))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Jobs whose last byte has landed."""
        return [
            TransferResult(job_id=f.job_id, success=True, transfer_size=f.size_bytes, transfer_time=f.time_s)
            for f in self.transfers.finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Blocks until they are over."""
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        """Gives the host memory back."""
        logger.info("KV blocks moved: %s", self.transfers.counts)
        self.transfers.close()
        if self._device is not None:
            self._device.close()


def _job(cache: Any, host: Any) -> Job:
    return Job(
        blocks=cache.block_ids, chunks=host.block_ids, group_sizes=cache.group_sizes, block_indices=cache.block_indices
    )
