"""Rewrites steps that an executor lacks into ones that it has; the pass list of the plan says what was lowered.

`BROADCAST` becomes two copies, `COPY2D` a copy per row, `SWAP` three copies through scratch memory of its rank.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NotSupported
from dovetail.plan import step as st
from dovetail.plan.plan import Buffer, Plan, Queue, Role, Space
from dovetail.plan.step import NONE, Op, Rows

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_OPERAND = ("rank", "buffer", "offset", "param")


def lower(plan: Plan, native: Collection[Op]) -> Plan:
    """A plan that uses only `native` ops for its moves. REDUCE can't be lowered: engines do no arithmetic."""
    used = np.bincount(np.concatenate([np.zeros(0, np.uint8), *(q.steps["op"] for q in plan.queues)]))
    present = {Op(o) for o in np.flatnonzero(used).tolist()}
    missing = {op for op in present if op in st.MOVES and op not in native}
    if Op.REDUCE in missing or (missing and Op.COPY not in native):
        raise NotSupported(f"plan {plan.name}: no way to run {', '.join(sorted(o.name for o in missing))} here")
    if not missing:
        return plan
    rows = st.sequence(*(q.steps for q in plan.queues))
    of_queue = np.repeat(np.arange(len(plan.queues)), [len(q) for q in plan.queues])
    parts = np.ones(len(rows), np.int64)
    for op, num in ((Op.BROADCAST, 2), (Op.COPY2D, rows["rows"]), (Op.SWAP, 3)):
        parts = np.where(rows["op"] == op, num, parts) if op in missing else parts
    whole = np.repeat(np.arange(len(rows)), parts)  # the row that each new one comes from
    part = np.arange(len(whole)) - (np.cumsum(parts) - parts)[whole]
    made, buffers = rows[whole], plan.buffers
    if Op.BROADCAST in missing:
        _broadcasts(made, rows["op"][whole] == Op.BROADCAST, part)
    if Op.COPY2D in missing:
        _strided(made, rows["op"][whole] == Op.COPY2D, part)
    if Op.SWAP in missing:
        swaps = np.flatnonzero(rows["op"][whole] == Op.SWAP)
        rank = np.array([q.rank for q in plan.queues])[of_queue[whole[swaps[::3]]]]
        sizes = _swaps(made, swaps, rank, plan.world, len(buffers))
        spare = Buffer(name="swap space", role=Role.SCRATCH, sizes=sizes, spaces=(Space.HEAP,) * plan.world)
        buffers = (*buffers, spare)
    made["op"][st.among(rows["op"][whole], missing)] = Op.COPY
    ends = np.cumsum(np.bincount(of_queue[whole], minlength=len(plan.queues)))[:-1]
    queues = [
        Queue(rank=q.rank, engine=q.engine, steps=own, name=q.name)
        for q, own in zip(plan.queues, np.split(made, ends), strict=True)
    ]
    name = "lower " + "+".join(sorted(o.name.lower() for o in missing))
    return plan.replace(queues=tuple(queues), buffers=buffers, passes=(*plan.passes, name))


def _broadcasts(made: Rows, mine: Mask, part: Ints) -> None:
    """The second copy of each goes to the second destination."""
    second = np.flatnonzero(mine & (part == 1))
    for field in _OPERAND:
        made[f"dst_{field}"][second] = made[f"dst2_{field}"][second]
        made[f"dst2_{field}"][mine] = 0 if field == "offset" else NONE


def _strided(made: Rows, mine: Mask, part: Ints) -> None:
    """A copy of each row."""
    at = np.flatnonzero(mine)
    for offset, pitch in (("src_offset", "src_pitch"), ("src_alt", "src_pitch"), ("dst_offset", "dst_pitch")):
        made[offset][at] += part[at] * made[pitch][at]
    for field, value in (("rows", 1), ("src_pitch", 0), ("dst_pitch", 0)):
        made[field][at] = value


def _swaps(made: Rows, at: Ints, rank: Ints, world: int, spare: int) -> tuple[int, ...]:
    """a to spare, b to a, spare to b; `at` has the three rows of each swap, which a queue of `rank` runs.

    Every swap has its own range of the spare buffer, so that those of several queues don't share it; returns its sizes.
    """
    first, second, third = at[::3], at[1::3], at[2::3]
    length, begin = made["length"][first], np.zeros(len(first), np.int64)
    for r in range(world):
        mine = rank == r
        begin[mine] = np.cumsum(length[mine]) - length[mine]
    for field in _OPERAND:
        a, b = made[f"src_{field}"][first], made[f"dst_{field}"][first]
        between = {"rank": rank, "buffer": spare, "offset": begin, "param": NONE}[field]
        made[f"dst_{field}"][first] = between
        made[f"src_{field}"][second], made[f"dst_{field}"][second] = b, a
        made[f"src_{field}"][third] = between
    for copy in (second, third):  # what is swapped is no staged view
        made["src_alt"][copy] = made["src_offset"][copy]
    return tuple(np.bincount(rank, length, world).astype(np.int64).tolist())
