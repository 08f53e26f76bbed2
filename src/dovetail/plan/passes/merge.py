"""Fewer, larger commands: joins copies that continue each other and folds equally spaced ones into strided copies.

Works on neighbours in a queue with no sync between them, so the order of everything else stays as it was.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dovetail.plan.plan import Plan
from dovetail.plan.step import NONE, Op, Rows

_PLACE = ("src_rank", "src_buffer", "dst_rank", "dst_buffer")


def merge(plan: Plan, *, fold: bool = True) -> Plan:
    """Joins contiguous copies; with `fold`, equally spaced copies of one length become one `COPY2D`."""
    queues = []
    for q in plan.queues:
        steps = _join(q.steps)
        queues.append(dataclasses.replace(q, steps=_fold(steps) if fold else steps))
    return plan.replace(queues=tuple(queues), passes=(*plan.passes, "merge"))


def _neighbours(steps: Rows) -> np.ndarray:
    """For each row but the first: are it and the one before it plain copies between the same two buffers?"""
    plain = (steps["op"] == Op.COPY) & (steps["src_alt"] == steps["src_offset"])
    for column in ("src_param", "dst_param", "length_param"):
        plain &= steps[column] == NONE
    same: np.ndarray = plain[1:] & plain[:-1]
    for column in _PLACE:
        same = same & (steps[column][1:] == steps[column][:-1])
    return same


def _join(steps: Rows) -> Rows:
    if len(steps) < 2:
        return steps
    contiguous = _neighbours(steps)
    for side in ("src_offset", "dst_offset"):
        contiguous = contiguous & (steps[side][:-1] + steps["length"][:-1] == steps[side][1:])
    starts = np.flatnonzero(np.concatenate([[True], ~contiguous]))
    joined: Rows = steps[starts].copy()
    moved = np.add.reduceat(steps["length"], starts)
    joined["length"] = np.where(joined["op"] == Op.COPY, moved, joined["length"])
    return joined


def _fold(steps: Rows) -> Rows:
    """Cuts the queue into maximal stretches of constant stride, each of at least three rows, and folds those."""
    if len(steps) < 3:
        return steps
    near = _neighbours(steps) & (steps["length"][1:] == steps["length"][:-1])
    stride = {side: np.diff(steps[side]) for side in ("src_offset", "dst_offset")}
    apart = (stride["src_offset"] >= steps["length"][:-1]) & (stride["dst_offset"] >= steps["length"][:-1])
    near &= apart
    regular = near[1:] & near[:-1]
    for side in stride:
        regular = regular & (stride[side][1:] == stride[side][:-1])
    keep = np.ones(len(steps), bool)
    out = steps.copy()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], regular, [False]]).astype(np.int8)))
    previous_end = -1
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        first, last = max(begin, previous_end + 1), end + 1  # rows first..last have one stride
        if last - first < 2:
            continue
        out[first]["op"] = Op.COPY2D
        out[first]["rows"] = last - first + 1
        out[first]["src_pitch"] = stride["src_offset"][first]
        out[first]["dst_pitch"] = stride["dst_offset"][first]
        keep[first + 1 : last + 1] = False
        previous_end = last
    folded: Rows = out[keep]
    return folded
