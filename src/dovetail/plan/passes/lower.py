"""Rewrites steps that an executor lacks into ones that it has; the pass list of the plan says what was lowered.

`BROADCAST` becomes two copies, `COPY2D` a copy per row, `SWAP` three copies through scratch memory of its rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from dovetail.errors import NotSupported
from dovetail.plan import step as st
from dovetail.plan.plan import Buffer, Plan, Role, Space
from dovetail.plan.step import NONE, Op, Rows


def lower(plan: Plan, native: Collection[Op]) -> Plan:
    """A plan that uses only `native` ops for its moves. REDUCE can't be lowered: engines do no arithmetic."""
    used = np.bincount(np.concatenate([np.zeros(0, np.uint8), *(q.steps["op"] for q in plan.queues)]))
    present = {Op(o) for o in np.flatnonzero(used).tolist()}
    missing = {op for op in present if op in st.MOVES and op not in native}
    if Op.REDUCE in missing or (missing and Op.COPY not in native):
        raise NotSupported(f"plan {plan.name}: no way to run {', '.join(sorted(o.name for o in missing))} here")
    if not missing:
        return plan
    scratch = np.zeros(plan.world, np.int64)
    queues = []
    for q in plan.queues:
        blocks = [_lowered(row, q.rank, missing, scratch, len(plan.buffers)) for row in q.steps]
        queues.append(dataclasses.replace(q, steps=st.sequence(*blocks)))
    buffers = plan.buffers
    if Op.SWAP in missing:
        spare = Buffer(
            name="swap space", role=Role.SCRATCH, sizes=tuple(scratch.tolist()), spaces=(Space.HEAP,) * plan.world
        )
        buffers = (*buffers, spare)
    name = "lower " + "+".join(sorted(o.name.lower() for o in missing))
    return plan.replace(queues=tuple(queues), buffers=buffers, passes=(*plan.passes, name))


def _lowered(row: np.void, rank: int, missing: set[Op], scratch: np.ndarray, spare: int) -> Rows:
    rows = np.array([row], st.STEP)
    if row["op"] not in missing:
        return rows
    if row["op"] == Op.BROADCAST:
        rows = np.repeat(rows, 2)
        for part in ("rank", "buffer", "offset", "param"):
            rows[f"dst_{part}"][1] = row[f"dst2_{part}"]
            rows[f"dst2_{part}"] = 0 if part == "offset" else NONE
    elif row["op"] == Op.COPY2D:
        rows = np.repeat(rows, int(row["rows"]))
        index = np.arange(len(rows), dtype=np.int64)
        rows["src_offset"] += index * row["src_pitch"]
        rows["src_alt"] += index * row["src_pitch"]
        rows["dst_offset"] += index * row["dst_pitch"]
        rows["rows"], rows["src_pitch"], rows["dst_pitch"] = 1, 0, 0
    else:  # SWAP: a range of the spare buffer for each, so that swaps of several queues don't share it
        spare_at = (rank, spare, int(scratch[rank]))
        scratch[rank] += int(row["length"])
        a = tuple(int(row[f"src_{p}"]) for p in ("rank", "buffer", "offset"))
        b = tuple(int(row[f"dst_{p}"]) for p in ("rank", "buffer", "offset"))
        n = int(row["length"])
        return st.sequence(st.copy(a, spare_at, n), st.copy(b, a, n), st.copy(spare_at, b, n))
    rows["op"] = Op.COPY
    return rows
