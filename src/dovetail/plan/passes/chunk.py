"""Cuts long moves into chunks, so that what one writes is still in cache (or on the link) when the next reads it.

Moves of equal length that follow each other without a sync are cut together and interleaved: a reduction and the copy
that sends its result alternate chunk by chunk. Only moves whose ranges meet at equal places may do so; others are cut
one after the other.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.plan import Plan
from dovetail.plan.step import NONE, Op, Rows

_LINEAR = (Op.COPY, Op.BROADCAST, Op.SWAP, Op.REDUCE)


def chunk(plan: Plan, chunk_bytes: int) -> Plan:
    """Cuts every linear move of a fixed length above `chunk_bytes`; a multiple of 64 keeps elements whole."""
    if chunk_bytes < 64 or chunk_bytes % 64:
        raise ValueError(f"chunk_bytes must be a positive multiple of 64, not {chunk_bytes}")
    sources = [plan.sources]
    queues = []
    for q in plan.queues:
        out: list[Rows] = []
        for run in _runs(q.steps):
            out += _cut(plan, run, chunk_bytes, sources)
        queues.append(dataclasses.replace(q, steps=st.sequence(*out)))
    return plan.replace(
        queues=tuple(queues), sources=np.concatenate(sources), passes=(*plan.passes, f"chunk {chunk_bytes}")
    )


def _runs(steps: Rows) -> list[Rows]:
    """Maximal runs of linear moves of one length; everything else stands alone."""
    linear = st.among(steps["op"], _LINEAR) & (steps["length_param"] == NONE)
    same = linear[1:] & linear[:-1] & (steps["length"][1:] == steps["length"][:-1])
    return np.split(steps, np.flatnonzero(~same) + 1) if len(steps) else []


def _cut(plan: Plan, run: Rows, chunk_bytes: int, sources: list[Rows]) -> list[Rows]:
    length = int(run["length"][0])
    if run["op"][0] not in _LINEAR or run["length_param"][0] != NONE or length <= chunk_bytes:
        return [run]
    offsets = np.arange(0, length, chunk_bytes, dtype=np.int64)
    pieces = []
    for row in run:
        rows = np.repeat(np.array([row], st.STEP), len(offsets))
        rows["length"] = np.minimum(chunk_bytes, length - offsets)
        for column in ("src_offset", "src_alt", "dst_offset", "dst2_offset"):
            rows[column] += offsets
        if row["op"] == Op.REDUCE:
            n, first = int(row["num_sources"]), int(row["first_source"])
            more = np.tile(plan.sources[first : first + n], len(offsets))
            for column in ("offset", "alt"):
                more[column] += np.repeat(offsets, n)
            rows["first_source"] = sum(len(s) for s in sources) + np.arange(len(offsets)) * n
            sources.append(more)
        pieces.append(rows)
    return [st.interleave(*pieces)] if _aligned(plan, run) else pieces


def _aligned(plan: Plan, run: Rows) -> bool:
    """True if ranges that two moves of the run share begin at the same place, so that chunks meet only themselves."""
    length = int(run["length"][0])
    at: list[tuple[int, int, int]] = []
    for row in run:
        for side in ("src", "dst", "dst2"):
            if row[f"{side}_rank"] != NONE:
                at.append((int(row[f"{side}_rank"]), int(row[f"{side}_buffer"]), int(row[f"{side}_offset"])))
        first = int(row["first_source"])
        for s in plan.sources[first : first + int(row["num_sources"])]:
            at.append((int(s["rank"]), int(s["buffer"]), int(s["offset"])))
    starts = sorted(set(at))
    return all(a[:2] != b[:2] or b[2] - a[2] >= length for a, b in itertools.pairwise(starts))
