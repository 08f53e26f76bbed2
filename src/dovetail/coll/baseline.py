"""Variant `torch`: the caller's own process group, as it would run without us. Also what `auto` falls back to.

Where there is none (under `dovetail.launch`), a gloo group is made the first time it is needed.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from dovetail.coll.recipes import Collective
from dovetail.errors import NotSupported
from dovetail.hw.world import Group
from dovetail.plan.step import ReduceOp

dist: Any = torch.distributed
c10d: Any = torch._C._distributed_c10d  # where the options of a process group's own methods are

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.AVG,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.BAND: dist.ReduceOp.BAND,
    ReduceOp.BOR: dist.ReduceOp.BOR,
    ReduceOp.BXOR: dist.ReduceOp.BXOR,
}


def process_group(group: Group) -> Any:
    """The torch process group of ours: the caller's where there is one, else a gloo group of our own."""
    if group.baseline is None:
        world = group.world
        if dist.is_initialized() and group is world.group and dist.get_world_size() == group.size:
            group.baseline = dist.group.WORLD
        elif dist.is_initialized():
            raise NotSupported(f"{group} has no process group behind it: make the group from a ProcessGroup")
        else:
            group.baseline = _own_gloo(group)
    return group.baseline


def _own_gloo(group: Group) -> Any:
    """A gloo group over a loopback store, found through one of our own broadcasts."""
    from dovetail.coll import api

    store: Any = None
    port = torch.zeros(1, dtype=torch.int64)
    if group.rank == 0:
        store = c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        port[0] = store.port
    api.broadcast(port, 0, group=group, variant="pull")
    if store is None:
        store = c10d.TCPStore("127.0.0.1", int(port[0]), None, False)
    options: Any = c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=group.timeout_s)
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    made = c10d.ProcessGroupGloo(store, group.rank, group.size, options)
    group.keep.append(store)  # lives as long as the group
    return made


class Staged:
    """A call of a CPU process group with GPU tensors: on copies in pinned memory, the results back when it is over."""

    def __init__(self, work: Any, back: list[tuple[Any, Any]]) -> None:
        self._work, self._back = work, back
        self._written = [gpu for gpu, _ in back]

    def wait(self, *timeout: Any) -> bool:
        """Blocks until the results are on their way to the GPU, in torch's current stream."""
        done = self._work.wait(*timeout)
        for gpu, host in self._back:
            gpu.copy_(host)
        self._back = []
        return bool(done)

    def synchronize(self) -> None:
        """Blocks until the results are on the GPU; the inner work's own would leave them on the host."""
        self.wait()

    def result(self) -> list[Any]:
        """The GPU's tensors, when the results are on their way to them."""
        self.wait()
        return self._written

    def is_completed(self) -> bool:
        """True once the results are on their way to the GPU: brings them there if they are due."""
        return bool(self._work.is_completed()) and self.wait()

    def get_future(self) -> Any:
        """A torch Future that is done when the results are on the GPU."""
        made: Any = torch.futures.Future()

        def settle(_: Any) -> None:
            try:
                self.wait()
                torch.cuda.synchronize()
            except RuntimeError as error:
                made.set_exception(error)
            else:
                made.set_result(None)

        self._work.get_future().add_done_callback(settle)
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _serves_gpus(pg: Any) -> bool:
    """True if a process group takes GPU tensors itself: NCCL and RCCL do, gloo only some calls.

    Of a group of several backends (``cpu:gloo,cuda:nccl``) that of the GPU counts.
    """
    if isinstance(pg, c10d.ProcessGroupGloo):
        return False
    try:
        backend = pg._get_backend(torch.device("cuda"))
    except RuntimeError:
        return False  # it has none for GPUs
    return bool(backend.name() != "gloo")


def run(group: Group, collective: Collective, tensors: tuple[Any, ...], *, op: ReduceOp, root: int, splits: Any) -> Any:
    """Starts the collective on the baseline. Returns c10d's Work."""
    pg = process_group(group)
    flat = [t for part in tensors for t in (part if isinstance(part, list) else [part])]
    if any(not t.is_cpu for t in flat) and not _serves_gpus(pg):
        return _run_staged(pg, group, collective, tensors, op, root, splits)
    return _run(pg, group, collective, tensors, op, root, splits)


def _pinned_like(t: torch.Tensor) -> torch.Tensor:
    """As gloo itself stages what it takes of a GPU."""
    return torch.empty_like(t, device="cpu", pin_memory=True)


def _run_staged(
    pg: Any, group: Group, collective: Collective, tensors: tuple[Any, ...], op: ReduceOp, root: int, splits: Any
) -> Any:
    """Only what is read goes to the host and only what is written comes back: an output may be a part of its input."""
    parts = [part if isinstance(part, list) else [part] for part in tensors]
    written = parts[-1] if collective is Collective.GATHER else parts[0]
    read = parts[0] if collective is Collective.GATHER else parts[-1]
    host = {id(t): _pinned_like(t) for part in parts for t in part}
    for t in read:
        host[id(t)].copy_(t)
    moved = tuple([host[id(t)] for t in part] if isinstance(part, list) else host[id(part)] for part in tensors)
    return Staged(_run(pg, group, collective, moved, op, root, splits), [(t, host[id(t)]) for t in written])


def _run(
    pg: Any, group: Group, collective: Collective, tensors: tuple[Any, ...], op: ReduceOp, root: int, splits: Any
) -> Any:
    with torch.no_grad():
        match collective:
            case Collective.ALL_GATHER:
                return pg._allgather_base(tensors[0], tensors[1], c10d.AllgatherOptions())
            case Collective.ALL_TO_ALL:
                out_splits, in_splits = splits or ([], [])
                return pg.alltoall_base(tensors[0], tensors[1], out_splits, in_splits, c10d.AllToAllOptions())
            case Collective.ALL_REDUCE:
                options = c10d.AllreduceOptions()
                options.reduceOp = _OPS[op]
                return pg.allreduce([tensors[0]], options)
            case Collective.REDUCE_SCATTER:
                scatter = c10d.ReduceScatterOptions()
                scatter.reduceOp = _OPS[op]
                return pg._reduce_scatter_base(tensors[0], tensors[1], scatter)
            case Collective.BROADCAST:
                cast = c10d.BroadcastOptions()
                cast.rootRank = root
                cast.rootTensor = 0
                return pg.broadcast([tensors[0]], cast)
            case Collective.GATHER:
                collect = c10d.GatherOptions()
                collect.rootRank = root
                return pg.gather([list(tensors[1])] if group.rank == root else [], [tensors[0]], collect)
            case Collective.SCATTER:
                spread = c10d.ScatterOptions()
                spread.rootRank = root
                return pg.scatter([tensors[0]], [list(tensors[1])] if group.rank == root else [], spread)
            case _:
                return pg.barrier()
