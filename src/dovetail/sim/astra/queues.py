"""Chunks on their way through the dimensions: each dimension serves a few at a time, first come, first served.

Owns the event model of one NPU. An event is the end of a chunk's phase: the chunk joins the queue of its next
dimension, the dimension it leaves starts who waits there, then the next one does, all in the same tick.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from dovetail.sim.astra.timing import PhaseTime, Undecided


def run_chunks(queues: Sequence[int], times: Sequence[PhaseTime], *, num_chunks: int, active_chunks: int) -> PhaseTime:
    """When the last chunk is through, from a common start at tick 0.

    Args:
        queues: the dimension of each phase.
        times: the time of each phase.
        num_chunks: chunks, all with these phases.
        active_chunks: chunks that a dimension serves at a time.

    Raises:
        Undecided: chunks in different phases come to one dimension in one tick, in an order that NPUs may not share.
    """
    waiting: dict[int, deque[int]] = {queue: deque() for queue in queues}  # the phase that a waiting chunk is in
    running = dict.fromkeys(queues, 0)
    ends: list[tuple[int, int, int, int]] = []  # tick, tick when the end was put there, number, phase
    number = 0

    def start(queue: int, now: int) -> None:
        nonlocal number
        while waiting[queue] and running[queue] < active_chunks:
            phase = waiting[queue].popleft()
            running[queue] += 1
            number += 1
            end = now + times[phase].duration_ns
            heapq.heappush(ends, (end, end - times[phase].lead_ns, number, phase))

    waiting[queues[0]].extend([0] * num_chunks)
    start(queues[0], 0)
    joined: dict[int, tuple[int, int, int]] = {}  # per dimension, who joined last: tick, tick when put there, phase
    end, lead = 0, 0
    while ends:
        end, put_at, _, phase = heapq.heappop(ends)
        lead = end - put_at
        running[queues[phase]] -= 1
        if phase + 1 == len(queues):
            start(queues[phase], end)
            continue
        queue = queues[phase + 1]
        before = joined.get(queue)
        if before is not None and before[:2] == (end, put_at) and before[2] != phase:
            raise Undecided(f"chunks of phases {before[2]} and {phase} come to dimension {queue} at {end} ns")
        joined[queue] = (end, put_at, phase)
        waiting[queue].append(phase + 1)
        start(queues[phase], end)
        start(queue, end)
    return PhaseTime(end, lead)
