"""What FSDP calls: an all-gather and a reduce-scatter per module, on the heap and through our collectives.

Owns nothing but counts. FSDP waits for an all-gather where its parameters are needed, if it is given a c10d `Work`; so
the asynchronous ones give it that also where FSDP did not ask for one. A reduce-scatter's result is read as soon as the
call returns, so it is never left in flight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from dovetail.coll import api
from dovetail.coll.dtypes import reduce_op, reducible
from dovetail.errors import HardwareError, NotSupported
from dovetail.overlap.fsdp.auto import Auto
from dovetail.overlap.fsdp.buffers import Buffers
from dovetail.overlap.strategy import Strategy

log = logging.getLogger("dovetail")


@dataclass(slots=True, eq=False, kw_only=True)
class Unit:
    """One module as FSDP sees it: parameters that move together. Both hooks ask and count here."""

    name: str
    owner: Any  #: the `Enabled` that set the hooks
    buffers: Buffers
    fixed: Strategy = Strategy.STREAMS  #: what it runs, if no `auto` finds that
    reason: str = ""
    auto: Auto | None = None
    number: int = 0  #: among the modules of that `auto`
    gathers: int = 0
    scatters: int = 0
    gather_bytes: int = 0  #: of the last all-gather's result
    scatter_bytes: int = 0  #: of the last reduce-scatter's input
    fallbacks: dict[str, int] = field(default_factory=dict)

    def strategy(self) -> Strategy:
        """What a call that begins now runs."""
        return self.fixed if self.auto is None else self.auto.strategy(self.number)

    def fell_back(self, reason: str) -> None:
        """Counts it, and says it the first time."""
        if reason not in self.fallbacks:
            log.warning("fsdp, module %r: %s", self.name, reason)
        self.fallbacks[reason] = self.fallbacks.get(reason, 0) + 1

    def allocate(self, strategy: Strategy, stock: Any, size: Sequence[Any], **where: Any) -> torch.Tensor:
        """Memory for a call: on the heap, or where FSDP would have it."""
        if strategy is not Strategy.STREAMS:
            try:
                return self.buffers.take(size, where["dtype"], where["device"])
            except HardwareError as error:
                self.fell_back(f"ordinary memory, which is staged: {error}")
        made: torch.Tensor = stock.allocate(size, **where)
        return made


class Pending(dist.Work):
    """A c10d `Work` for a call of ours, or for one that is over; tells when its result was needed and there."""

    def __init__(self, work: Any, done: Callable[[], None] | None) -> None:
        super().__init__()
        self._work, self._done = work, done

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the call is over, or orders the current stream behind it; raises its error."""
        if self._work is not None:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        done, self._done = self._done, None
        if done is not None:
            done()
        return True

    def is_completed(self) -> bool:
        """True once the call is over."""
        return self._work is None or bool(self._work.is_completed())


class Gather(AllGather):
    """FSDP's all-gather of one module. `stock` is what stood here before, and what `streams` means."""

    def __init__(self, unit: Unit, stock: AllGather) -> None:
        self.unit, self.stock = unit, stock
        self._strategy: Strategy | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The output; its part of this rank is the input."""
        self._strategy = self.unit.strategy()
        return self.unit.allocate(self._strategy, self.stock, size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Begins it; FSDP waits for what this returns before it reads `output_tensor`."""
        unit, began = self.unit, time.perf_counter()
        strategy = self._strategy or unit.strategy()
        unit.gathers += 1
        unit.gather_bytes = output_tensor.nbytes
        if strategy is Strategy.STREAMS:
            work = self.stock(output_tensor, input_tensor, group, async_op)
        else:
            later = strategy is Strategy.DMA
            work = api.all_gather_into_tensor(output_tensor, input_tensor, group, later)
            if not later:
                _settle(output_tensor)
        auto, number = unit.auto, unit.number
        if auto is not None and auto.measuring:  # also for a call that is over: FSDP's wait shows where it was needed
            return Pending(work, lambda: auto.gathered(number, time.perf_counter() - began))
        return work if work is None or isinstance(work, dist.Work) else Pending(work, None)


class Scatter(ReduceScatter):
    """FSDP's reduce-scatter of one module."""

    def __init__(self, unit: Unit, stock: ReduceScatter) -> None:
        self.unit, self.stock = unit, stock
        self._strategy: Strategy | None = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The input, then the output, which gradients are views of until the optimizer drops them."""
        self._strategy = self.unit.strategy()
        return self.unit.allocate(self._strategy, self.stock, size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        """Over when this returns; on a GPU, in torch's current stream."""
        unit, began = self.unit, time.perf_counter()
        strategy = self._strategy or unit.strategy()
        unit.scatters += 1
        unit.scatter_bytes = input_tensor.nbytes
        work = None
        if strategy is Strategy.STREAMS or not self._ours(input_tensor.dtype, op):
            work = self.stock(output_tensor, input_tensor, group, op, async_op)
        else:
            api.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
            if strategy is Strategy.SERIAL:
                _settle(output_tensor)
        if unit.auto is not None:
            unit.auto.scattered(unit.number, time.perf_counter() - began)
        return work

    def _ours(self, dtype: torch.dtype, op: Any) -> bool:
        """Whether our collectives have that reduction: they have AVG, but no factor to multiply by first."""
        try:
            reducible(dtype, reduce_op(op))
        except (NotSupported, TypeError) as error:
            self.unit.fell_back(f"reduce-scatter on the caller's group: {error}")
            return False
        return True


def _settle(t: torch.Tensor) -> None:
    """`serial` on a GPU, where calls are only ordered in a stream: the host waits too, so nothing runs beside it."""
    if t.is_cuda:
        torch.cuda.current_stream(t.device).synchronize()
