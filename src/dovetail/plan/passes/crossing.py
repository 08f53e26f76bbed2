"""What crosses one rank's link: the moves that touch that rank, and what these need.

For a rank that is a device among ranks that are only memory: timed is what goes over its link. Owns the choice of moves
and of goal rows; waits and signals stay, so every order that held still holds and no new race can arise.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left

import numpy as np

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.linear import linearize
from dovetail.plan.plan import Plan, Role
from dovetail.plan.step import NONE, Op

_Range = tuple[tuple[int, int], int, int]  # ((rank, buffer), begin, end)


def crossing(plan: Plan, rank: int) -> Plan:
    """Keeps the moves with an operand on `rank`, and of the others only what these read later.

    A move that only feeds is cut to the bytes between the first and the last that are read; a broadcast from elsewhere
    keeps the destinations that count. A goal row stays if its destination is on `rank`, or if its source is and every
    byte of its destination is still written as it was.

    Raises:
        ValueError: no such rank.
        PlanError: the plan reduces, or has parameters or accesses from outside.
    """
    if not 0 <= rank < plan.world:
        raise ValueError(f"rank must be in 0..{plan.world - 1}, not {rank}")
    if any((rows["op"] == Op.REDUCE).any() for rows in (*(q.steps for q in plan.queues), plan.goal)):
        raise PlanError(f"plan {plan.name}: what crosses a link is only defined for plans that copy; this one reduces")
    if plan.params or plan.external:
        raise PlanError(f"plan {plan.name}: crossing takes no parameters and no accesses from outside")
    operands, order = _Operands(plan), linearize(plan)
    steps = [q.steps.copy() for q in plan.queues]
    keep = [~st.among(q.steps["op"], st.MOVES) for q in plan.queues]
    moves = [(q, i) for q, i in zip(order.queue.tolist(), order.index.tolist(), strict=True) if not keep[q][i]]
    needed = _Bytes()
    for q, i in reversed(moves):
        keep[q][i] = _keep(steps[q][i], rank, needed, operands)
    right = _Bytes()  # what was last written by a move that was kept
    for q, i in moves:
        for at in operands.writes(plan.queues[q].steps[i]):
            right.remove(at)
        for at in operands.writes(steps[q][i]) if keep[q][i] else ():
            right.add(at)
    stays = [_stays(row, rank, right, operands) for row in plan.goal]
    queues = [dataclasses.replace(q, steps=steps[n][keep[n]]) for n, q in enumerate(plan.queues)]
    return plan.replace(
        queues=tuple(queues), goal=plan.goal[np.array(stays, bool)], passes=(*plan.passes, f"crossing {rank}")
    )


def _keep(row: np.void, rank: int, needed: _Bytes, operands: _Operands) -> bool:
    """Decides on a move, in reverse order, and cuts it in place; `needed` are the bytes that kept moves read later."""
    if row["op"] == Op.BROADCAST and row["src_rank"] != rank:
        _narrow(row, rank, needed, operands)
    if rank not in (row["src_rank"], row["dst_rank"], row["dst2_rank"]):
        found = [part for at in operands.writes(row) for part in needed.find(at)]
        if not found:
            return False
        if row["op"] == Op.COPY:
            skip = min(begin for _, begin, _ in found) - int(row["dst_offset"])
            row["length"] = max(end for _, _, end in found) - int(row["dst_offset"]) - skip
            for column in ("src_offset", "src_alt", "dst_offset"):
                row[column] += skip
    for at in operands.writes(row):
        needed.remove(at)
    for at in operands.reads(row):
        needed.add(at)
    return True


def _narrow(row: np.void, rank: int, needed: _Bytes, operands: _Operands) -> None:
    """Makes a broadcast a copy if only one of its destinations is on `rank` or read later."""
    counts = [
        row[f"{side}_rank"] == rank or bool(needed.find(at))
        for side, at in zip(("dst", "dst2"), operands.writes(row), strict=True)
    ]
    if sum(counts) != 1:
        return
    for part in ("rank", "buffer", "offset", "param"):
        if counts[1]:
            row[f"dst_{part}"] = row[f"dst2_{part}"]
        row[f"dst2_{part}"] = 0 if part == "offset" else NONE
    row["op"] = Op.COPY


def _stays(row: np.void, rank: int, right: _Bytes, operands: _Operands) -> bool:
    if row["dst_rank"] == rank:
        return True
    written = operands.writes(row)
    held = sum(end - begin for at in written for _, begin, end in right.find(at))
    return bool(row["src_rank"] == rank and held == sum(end - begin for _, begin, end in written))


class _Operands:
    """The ranges that a row touches, views resolved."""

    def __init__(self, plan: Plan) -> None:
        self._buffers = plan.buffers

    def writes(self, row: np.void) -> list[_Range]:
        sides = {Op.BROADCAST: ("dst", "dst2"), Op.SWAP: ("dst", "src")}.get(Op(int(row["op"])), ("dst",))
        return [part for side in sides for part in self._ranges(row, side)]

    def reads(self, row: np.void) -> list[_Range]:
        sides = ("src", "dst") if row["op"] == Op.SWAP else ("src",)
        return [part for side in sides for part in self._ranges(row, side)]

    def _ranges(self, row: np.void, side: str) -> list[_Range]:
        rank, number, offset = (int(row[f"{side}_{part}"]) for part in ("rank", "buffer", "offset"))
        buffer = self._buffers[number]
        if buffer.role is Role.VIEW and not buffer.staged[rank]:
            number = buffer.of
        elif buffer.role is Role.VIEW and side == "src":
            offset = int(row["src_alt"])
        length, strided = int(row["length"]), row["op"] == Op.COPY2D
        pitch = int(row[f"{side}_pitch"]) if strided else 0
        begins = [offset + k * pitch for k in range(int(row["rows"]) if strided else 1)]
        return [((rank, number), begin, begin + length) for begin in begins]


class _Bytes:
    """A set of bytes, as sorted ranges that neither overlap nor touch."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def _meeting(self, at: _Range) -> tuple[list[tuple[int, int]], int, int]:
        """The ranges of a place, and which of them share a byte with `at`."""
        place, begin, end = at
        ranges = self._ranges.setdefault(place, [])
        low = bisect_left(ranges, (begin, begin))
        if low and ranges[low - 1][1] > begin:
            low -= 1
        return ranges, low, max(low, bisect_left(ranges, (end, end)))

    def find(self, at: _Range) -> list[_Range]:
        """The parts of `at` that are in the set."""
        ranges, low, high = self._meeting(at)
        return [(at[0], max(b, at[1]), min(e, at[2])) for b, e in ranges[low:high]] if at[1] < at[2] else []

    def remove(self, at: _Range) -> None:
        ranges, low, high = self._meeting(at)
        if low < high and at[1] < at[2]:
            around = ((ranges[low][0], at[1]), (at[2], ranges[high - 1][1]))
            ranges[low:high] = [(b, e) for b, e in around if b < e]

    def add(self, at: _Range) -> None:
        if at[1] >= at[2]:
            return
        self.remove(at)
        ranges, low, high = self._meeting(at)
        begin, end = at[1:]
        if low and ranges[low - 1][1] == begin:
            low, begin = low - 1, ranges[low - 1][0]
        if high < len(ranges) and ranges[high][0] == end:
            high, end = high + 1, ranges[high][1]
        ranges[low:high] = [(begin, end)]
