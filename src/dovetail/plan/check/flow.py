"""Which bytes every step reads and writes, and how what it writes follows from what it reads.

Owns the table of operands, static but for parameters (`bind` places them), and the structural rules: inside the buffer,
on memory the step's engine can reach, nothing written to an input. The goal of a plan is such a table too: what it
"writes" is what must be there at the end, what it "reads" is what the callers filled in.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.check.chains import Chains, Ints
from dovetail.plan.check.memory import Memories
from dovetail.plan.plan import Plan, Region
from dovetail.plan.step import NONE, DType, Op, Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operands:
    """Columns, one entry per operand."""

    node: Ints  #: of the step; for a goal the number of its row
    memory: Ints
    offset: Ints
    param: Ints  #: added to the offset, or NONE
    length: Ints
    length_param: Ints
    skip: Ints
    rows: Ints
    pitch: Ints

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """Writes, reads, and for each write the reads it is made of."""

    writes: Operands
    reads: Operands
    first: Ints  #: per write: its first read, or NONE if it comes from outside
    count: Ints  #: per write: how many reads
    combine: Ints  #: per write: reduce_op * 256 + dtype, or NONE for a copy
    element: Ints  #: per write: bytes that stay together; 1 for a copy


class _Table:
    """Collects operands."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self.length = 0

    def add(self, num: int, **columns: Any) -> Ints:
        """Adds `num` operands and returns their numbers."""
        self.blocks.append({k: np.broadcast_to(np.asarray(v, np.int64), num) for k, v in columns.items()})
        self.length += num
        return np.arange(self.length - num, self.length)

    def freeze(self) -> Operands:
        names = [f.name for f in fields(Operands)]
        if not self.blocks:
            return Operands(**{n: np.zeros(0, np.int64) for n in names})
        return Operands(**{n: np.concatenate([b[n] for b in self.blocks]) for n in names})


class _Builder:
    def __init__(self, plan: Plan, memories: Memories, *, goal: bool) -> None:
        self.plan = plan
        self.at = memories.shown if goal else memories.at
        self.staged = np.zeros_like(memories.staged) if goal else memories.staged
        self.writes, self.reads = _Table(), _Table()
        self.links: list[tuple[Ints, Ints, Ints, Ints]] = []

    def freeze(self) -> Flow:
        columns = [np.concatenate(c) if c else np.zeros(0, np.int64) for c in zip(*self.links, strict=True)]
        first, count, combine, element = columns or [np.zeros(0, np.int64)] * 4
        return Flow(
            writes=self.writes.freeze(),
            reads=self.reads.freeze(),
            first=first,
            count=count,
            combine=combine,
            element=element,
        )

    def moves(self, rows: Rows, nodes: Ints) -> None:
        """Adds the operands of `rows`, whose numbers are `nodes`."""
        op = rows["op"]
        for of, sides in (
            ((Op.COPY, Op.COPY2D), (("src", "dst"),)),
            ((Op.BROADCAST,), (("src", "dst"), ("src", "dst2"))),
            ((Op.SWAP,), (("src", "dst"), ("dst", "src"))),
        ):
            sel = np.flatnonzero(np.isin(op, of))
            if not len(sel):
                continue
            some, ids = rows[sel], nodes[sel]
            read = {side: self._side(self.reads, some, ids, side) for side in dict.fromkeys(s for s, _ in sides)}
            for src, dst in sides:
                self._link(self._side(self.writes, some, ids, dst), read[src])
        sel = np.flatnonzero(op == Op.REDUCE)
        if len(sel):
            self._reduces(rows[sel], nodes[sel])

    def _side(self, table: _Table, rows: Rows, nodes: Ints, side: str) -> Ints:
        rank, buffer = rows[f"{side}_rank"], rows[f"{side}_buffer"]
        offset = rows[f"{side}_offset"]
        if side == "src":
            offset = np.where(self.staged[rank, buffer], rows["src_alt"], offset)
        strided = rows["op"] == Op.COPY2D
        flat = strided & (rows["src_pitch"] == rows["length"]) & (rows["dst_pitch"] == rows["length"])
        return table.add(
            len(rows),
            node=nodes,
            memory=self.at[rank, buffer],
            offset=offset,
            param=rows[f"{side}_param"],
            length=np.where(flat, rows["length"] * rows["rows"], rows["length"]),
            length_param=rows["length_param"],
            skip=rows["skip"],
            rows=np.where(strided & ~flat, rows["rows"], 1),
            pitch=rows["dst_pitch" if side == "dst" else "src_pitch"] * strided,
        )

    def _reduces(self, rows: Rows, nodes: Ints) -> None:
        count = rows["num_sources"].astype(np.int64)
        row = np.repeat(np.arange(len(rows)), count)
        begins = np.cumsum(count) - count
        source = self.plan.sources[rows["first_source"][row] + np.arange(len(row)) - begins[row]]
        rank, buffer = source["rank"], source["buffer"]
        reads = self.reads.add(
            len(row),
            node=nodes[row],
            memory=self.at[rank, buffer],
            offset=np.where(self.staged[rank, buffer], source["alt"], source["offset"]),
            param=source["param"],
            length=rows["length"][row],
            length_param=rows["length_param"][row],
            skip=rows["skip"][row],
            rows=1,
            pitch=0,
        )
        writes = self._side(self.writes, rows, nodes, "dst")
        sizes = np.array([t.size_bytes for t in DType], np.int64)
        combine = rows["reduce_op"].astype(np.int64) * 256 + rows["dtype"]
        element = sizes[rows["dtype"]]
        self.links.append((reads[begins] if len(reads) else begins, count, combine, element))
        assert len(writes) == len(count)

    def outside(self, region: Region, table: _Table, node: int) -> Ints:
        """Adds one region that somebody outside touches."""
        return table.add(
            1,
            node=node,
            memory=self.at[region.rank, region.buffer],
            offset=region.offset,
            param=NONE,
            length=region.length,
            length_param=NONE,
            skip=0,
            rows=1,
            pitch=0,
        )

    def _link(self, writes: Ints, reads: Ints | None) -> None:
        first = np.full(len(writes), NONE, np.int64) if reads is None else reads
        one = np.ones(len(writes), np.int64)
        self.links.append((first, one * (reads is not None), one * NONE, one))

    def externals(self, chains: Chains) -> None:
        """Adds what is outside the plan."""
        for number, outside in enumerate(chains.outside):
            node = chains.outside_node(number)
            reads = self.outside(outside.read, self.reads, node) if outside.read else None
            if outside.write:
                self._link(self.outside(outside.write, self.writes, node), reads)


def step_flow(plan: Plan, chains: Chains, memories: Memories) -> Flow:
    """What the steps of a plan, and those outside it, do."""
    builder = _Builder(plan, memories, goal=False)
    nodes = np.flatnonzero(np.isin(chains.rows["op"], st.MOVES))
    builder.moves(chains.rows[nodes], nodes)
    builder.externals(chains)
    return builder.freeze()


def goal_flow(plan: Plan, memories: Memories) -> Flow:
    """What must hold at the end."""
    builder = _Builder(plan, memories, goal=True)
    builder.moves(plan.goal, np.arange(len(plan.goal)))
    return builder.freeze()
