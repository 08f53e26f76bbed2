"""Plans of collectives between a GPU (rank 0) and peers in host memory: only what crosses the link.

Nothing is moved inside the GPU unless the variant needs it (`swap` does): on NVIDIA that would be a kernel, no DMA.
"""

from __future__ import annotations

import dataclasses

from dovetail.plan import passes
from dovetail.plan import step as st
from dovetail.plan.build import all_gather, all_to_all
from dovetail.plan.plan import Plan, Queue
from dovetail.plan.step import Op

GPU = 0
"""The rank that is the GPU."""


def crossing_plan(collective: str, variant: str, ranks: int, piece_bytes: int) -> Plan:
    """The plan of a variant. ``graph`` runs the plan of ``pcpy``; ``b2b`` is one stream of it."""
    if collective == "all_gather":
        made = _all_gather(variant, ranks, piece_bytes)
    else:
        made = _all_to_all(variant, ranks, piece_bytes)
    return passes.crossing(made, GPU)


def streams_of(variant: str) -> int:
    """One per direction, except where the variant is that all goes through one. A swap goes both ways in one queue."""
    return 1 if variant in ("b2b", "swap") else 2


def _all_gather(variant: str, ranks: int, size_bytes: int) -> Plan:
    if variant == "bcst":
        return all_gather.bcst(ranks, size_bytes, own_copy=False)
    if variant == "pull":
        return without_own(all_gather.pull(ranks, size_bytes))
    made = all_gather.pcpy(ranks, size_bytes, own_copy=False)
    return passes.b2b(made) if variant == "b2b" else made


def _all_to_all(variant: str, ranks: int, size_bytes: int) -> Plan:
    if variant == "swap":
        return swaps_by_gpu(all_to_all.swap(ranks, size_bytes))
    if variant == "pull":
        return without_own(all_to_all.pull(ranks, size_bytes))
    made = all_to_all.pcpy(ranks, size_bytes, own_copy=False)
    return passes.b2b(made) if variant == "b2b" else made


def without_own(plan: Plan) -> Plan:
    """Without moves inside one rank, and without the goals that they fulfil: the caller's, as with `own_copy=False`."""
    queues = []
    for queue in plan.queues:
        own = st.among(queue.steps["op"], st.MOVES) & (queue.steps["src_rank"] == queue.steps["dst_rank"])
        queues.append(dataclasses.replace(queue, steps=queue.steps[~own]))
    goal = plan.goal[plan.goal["src_rank"] != plan.goal["dst_rank"]]
    return plan.replace(queues=tuple(queues), goal=goal, passes=(*plan.passes, "without own"))


def swaps_by_gpu(plan: Plan) -> Plan:
    """The GPU does each swap it takes part in, so that one that is lowered uses the GPU's memory as its third place.

    A peer's would be host memory, and no engine copies from there to there. Such a peer's queue and the GPU's queue
    that waits for it change places.
    """
    engine = 1 + max(queue.engine for queue in plan.queues)
    signals, homes = list(plan.signals), dict(enumerate(queue.rank for queue in plan.queues))
    for number, queue in enumerate(plan.queues):
        swaps = queue.steps[queue.steps["op"] == Op.SWAP]
        if queue.rank == GPU or not (swaps["dst_rank"] == GPU).any():
            continue
        done = int(queue.steps["signal"][queue.steps["op"] == Op.SIGNAL][0])
        waiting = next(k for k, q in enumerate(plan.queues) if _waits_for(q, done))
        homes[number], homes[waiting] = GPU, queue.rank
        signals[done] = dataclasses.replace(signals[done], rank=queue.rank)
    queues = [
        queue if homes[k] == queue.rank else dataclasses.replace(queue, rank=homes[k], engine=engine + k)
        for k, queue in enumerate(plan.queues)
    ]
    return plan.replace(queues=tuple(queues), signals=tuple(signals), passes=(*plan.passes, "swaps by the GPU"))


def _waits_for(queue: Queue, signal: int) -> bool:
    return bool(((queue.steps["op"] == Op.WAIT) & (queue.steps["signal"] == signal)).any())
