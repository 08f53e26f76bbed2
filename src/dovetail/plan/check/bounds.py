"""Structural rules: every operand inside memory that its step may touch.

Checked before anything else, so that the rest of the checker can trust every address. The length of an operand whose
length is a parameter is taken at its cap, so that the rule holds for every value; where the offset is a parameter too,
the operand lies in a piece of a partition, and `bind` proves that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dovetail.plan import step as st
from dovetail.plan.check.chains import Bools, Chains
from dovetail.plan.check.flow import Flow, Operands
from dovetail.plan.check.memory import Memories
from dovetail.plan.check.text import Text
from dovetail.plan.plan import ABSENT, Plan
from dovetail.plan.step import DType, Op, ReduceOp, Rows


def check_rows(plan: Plan, rows: Rows, name: Callable[[int], str], text: Text) -> None:
    """What must hold of rows before their operands can be looked up."""

    def require(ok: Bools, problem: str) -> None:
        if not ok.all():
            step = name(int(np.argmin(ok)))
            raise text.error(f"{step}: {problem}", [step])

    op = rows["op"]
    reduces = op == Op.REDUCE
    require(~reduces | ((rows["dtype"] <= max(DType)) & (rows["reduce_op"] <= max(ReduceOp))), "unknown dtype or op")
    if reduces.any():
        known = _known_sources(plan)
        total = np.concatenate([[0], np.cumsum(known)])
        first, num = rows["first_source"] * reduces, rows["num_sources"] * reduces
        require(total[first + num] - total[first] == num, "a source names a rank, buffer or parameter out of range")
        size = np.array([t.size_bytes for t in DType])[np.minimum(rows["dtype"], max(DType))]
        whole = (rows["length"] % size == 0) & (rows["skip"] % size == 0)
        require(~reduces | whole, "the length of a reduction must be whole elements of its dtype")
    strided = op == Op.COPY2D
    params = (rows["length_param"] >= 0) | (rows["src_param"] >= 0) | (rows["dst_param"] >= 0)
    require(~strided | ~params, "a strided copy takes no parameters")
    several = strided & (rows["rows"] > 1)
    require(~several | (rows["dst_pitch"] >= rows["length"]), "rows of the destination overlap: dst_pitch < length")
    require(~several | (rows["src_pitch"] >= 0), "src_pitch must not be negative")
    span = np.maximum(rows["dst_pitch"], rows["src_pitch"]).astype(float) * rows["rows"]
    require(~several | (span < st.UNBOUNDED), "spans more than memory can hold")


def _known_sources(plan: Plan) -> Bools:
    s = plan.sources
    known: Bools = (s["rank"] >= 0) & (s["rank"] < plan.world) & (s["param"] < len(plan.params))
    return known & (s["buffer"] >= 0) & (s["buffer"] < len(plan.buffers))


def check_goal(plan: Plan, flow: Flow, memories: Memories, text: Text) -> None:
    """A goal speaks of buffers that somebody filled."""
    odd = np.flatnonzero(~np.isin(plan.goal["op"], (Op.COPY, Op.COPY2D, Op.REDUCE)))
    if len(odd):
        raise text.error(f"{text.goal(int(odd[0]))}: a goal is a copy or a reduction", [text.goal(int(odd[0]))])
    memory = flow.reads.memory
    bad = ~(memories.filled[memory] | memories.outside[memory])
    if bad.any():
        goal = text.goal(int(flow.reads.node[np.argmax(bad)]))
        raise text.error(f"{goal}: its source is filled by nobody: not an input, inout or outside buffer", [goal])
    for operands in (flow.reads, flow.writes):
        check_inside(operands, memories, text.goal, text)


def check_reach(flow: Flow, chains: Chains, memories: Memories, text: Text) -> None:
    """Every operand of a step inside its buffer, on memory the step's rank can reach; inputs only read."""
    for operands in (flow.writes, flow.reads):
        check_inside(operands, memories, text.step, text)
        chain, memory = chains.chain[operands.node], operands.memory
        away = memories.rank[memory] != chains.rank[chain]
        bad = memories.local[memory] & away & (chain < chains.num_queues)
        if bad.any():
            raise _touch(operands, int(np.argmax(bad)), "is local to its rank: only that rank's queues reach it", text)
    bad = memories.input[flow.writes.memory]
    if bad.any():
        raise _touch(flow.writes, int(np.argmax(bad)), "is an input: the plan must not write it", text)


def check_inside(operands: Operands, memories: Memories, name: Callable[[int], str], text: Text) -> None:
    """Inside the buffer, for every value of a length parameter."""
    size = memories.size[operands.memory]
    touched = (operands.length > 0) & (operands.rows > 0)
    high = operands.offset + (operands.rows - 1) * operands.pitch + operands.length
    fixed = size >= 0
    out = touched & ((operands.offset < 0) | (size == ABSENT) | (fixed & (operands.param < 0) & (high > size)))
    if out.any():
        i = int(np.argmax(out))
        step, memory = name(int(operands.node[i])), int(operands.memory[i])
        where = text.bytes(memory, int(operands.offset[i]), int(high[i]))
        has = f"has {int(size[i])} bytes" if size[i] >= 0 else "is absent" if size[i] == ABSENT else "begins at 0"
        raise text.error(f"{step} touches {where}, but the buffer {has}", [step])


def _touch(operands: Operands, i: int, problem: str, text: Text) -> Exception:
    step, low = text.step(int(operands.node[i])), int(operands.offset[i])
    high = low + int((operands.rows[i] - 1) * operands.pitch[i] + operands.length[i])
    return text.error(f"{step} touches {text.bytes(int(operands.memory[i]), low, high)}, which {problem}", [step])
