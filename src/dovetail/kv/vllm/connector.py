"""vLLM's offloading connector, which also asks for the block-outermost layout and reports paths and reasons.

Optional: the spec works under vLLM's own connector too, with its layer-outermost layout and without these counts.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform

from dovetail.kv.vllm.spec import DovetailWorker

BLOCK_OUTERMOST = "BLHNC"


class DovetailConnector(OffloadingConnector):  # type: ignore[misc]  # vLLM need not be installed
    """`"kv_connector": "DovetailConnector", "kv_connector_module_path": "dovetail.kv.vllm.connector"`."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Block-outermost on CUDA, where a block is then one copy; vLLM drops it where a backend can't.

        Elsewhere no backend has it, and what vLLM would take instead need not keep a block together.
        """
        if current_platform.is_cuda():
            return BLOCK_OUTERMOST
        layout: str | None = super().get_required_kvcache_layout(vllm_config)
        return layout

    def get_kv_connector_stats(self) -> Any:
        """vLLM's in the scheduler; in a worker what was moved since the last call, by path and reason."""
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        if not isinstance(worker, DovetailWorker):
            return super().get_kv_connector_stats()
        new = worker.transfers.counts.take()
        if not new:
            return None
        stats = OffloadingConnectorStats()
        for metric, values in new.items():
            for cause, value in values.items():
                stats.increase_counter(metric, value, cause)
        return stats
