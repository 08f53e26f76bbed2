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


def run(group: Group, collective: Collective, tensors: tuple[Any, ...], *, op: ReduceOp, root: int, splits: Any) -> Any:
    """Starts the collective on the baseline. Returns c10d's Work."""
    pg = process_group(group)
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
