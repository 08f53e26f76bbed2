"""Parameters: proves a plan for every value of its splits with two of them.

Control flow does not depend on parameters, only addresses do. The checker asks for one form and no other: an operand
whose offset is a parameter lies in one piece of a `Partition`. That is, the parameter is the offset of piece k, the
step's length parameter is the length of piece k or must be equal to it (`Plan.equal`), and the constant part of the
offset is the `skip` that the length leaves out. Then it covers [skip, skip + min(length, L - skip)) of piece k.

Why a binding in which no length is short (`generic`) stands for all:
- Pieces of a partition are disjoint for every value. Two operands of one piece overlap, for any L, only in bytes in
  which they overlap when L exceeds every skip + length, as it does here; and operands at fixed offsets are longest
  then. So generic has every overlap that any binding has, and happens-before does not depend on the binding.
- A smaller L takes from each operand of its piece the bytes from L on, on both sides of a copy alike. What remains is
  the generic flow of the bytes below L: a byte that was right stays right.
- Lengths that are not declared equal differ in generic, so a step that mixes two pieces up does not fit the goal.
The last argument asks that all operands which carry bytes of a piece shrink with it; one of a fixed length would read
bytes that are not there. A second binding, with some lengths zero and the others shorter than a chunk, catches that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dovetail.plan.check.chains import Ints
from dovetail.plan.check.flow import Flow, Operands
from dovetail.plan.check.memory import Memories
from dovetail.plan.check.text import Text
from dovetail.plan.plan import AT_RUN, Partition, Plan, Role
from dovetail.plan.step import NONE, UNBOUNDED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """One value for every length parameter."""

    length: Ints  #: per parameter, as a length
    offset: dict[tuple[int, int], int]  #: (memory, offset parameter) -> where the piece begins
    note: str  #: for messages

    def place(self, operands: Operands) -> tuple[Ints, Ints]:
        """The offset and the length of every operand."""
        start, length = operands.offset, operands.length
        if (operands.param >= 0).any():
            start = start.copy()
            for i in np.flatnonzero(operands.param >= 0).tolist():
                start[i] += self.offset[int(operands.memory[i]), int(operands.param[i])]
        if (operands.length_param >= 0).any():
            left = np.maximum(self.length[operands.length_param] - operands.skip, 0)
            length = np.where(operands.length_param >= 0, np.minimum(length, left), length)
        return start, length


class Pieces:
    """The partitions of a plan by memory, and which parameters must be equal."""

    def __init__(self, plan: Plan, memories: Memories, text: Text) -> None:
        self.plan, self.memories, self.text = plan, memories, text
        self.partition: dict[int, Partition] = {}
        for p in plan.partitions:
            self._add(p)
        self.group = np.arange(len(plan.params) + 1)  # the last entry is NONE's
        for a, b in plan.equal:
            self.group[self.group == self.group[a]] = self.group[b]

    def _add(self, p: Partition) -> None:
        names = f"partition of rank {p.rank} buffer {p.buffer}"
        if not (0 <= p.rank < self.plan.world and 0 <= p.buffer < len(self.plan.buffers)):
            raise self.text.error(f"{names}: no such buffer")
        used = [*p.offsets, *p.lengths]
        if len(p.offsets) != len(p.lengths) or not all(0 <= q < len(self.plan.params) for q in used):
            raise self.text.error(f"{names}: needs a known parameter for each piece's offset and length")
        if len(set(p.offsets)) != len(p.offsets):
            raise self.text.error(f"{names}: two pieces have one offset parameter")
        views = [b for b, v in enumerate(self.plan.buffers) if v.role is Role.VIEW and v.of == p.buffer]
        whole = [v for v in views if self.plan.buffers[v].sizes[p.rank] == AT_RUN]
        for memory in {int(self.memories.at[p.rank, b]) for b in [p.buffer, *whole]}:
            if memory in self.partition:
                raise self.text.error(f"{names}: it has another one already")
            self.partition[memory] = p

    def check(self, operands: Operands, name: Callable[[int], str]) -> None:
        """Raises PlanError unless every operand of a partitioned memory lies in one piece."""
        cut = np.zeros(len(self.memories.size), bool)
        cut[list(self.partition)] = True
        loose = cut | (self.memories.size == AT_RUN)
        for i in np.flatnonzero(loose[operands.memory] | (operands.param >= 0)).tolist():
            if problem := self._problem(operands, i):
                step = name(int(operands.node[i]))
                buffer = self.plan.buffers[int(self.memories.buffer[operands.memory[i]])].name
                raise self.text.error(f"{step}: operand in {buffer}: {problem}", [step])

    def _problem(self, operands: Operands, i: int) -> str:
        partition = self.partition.get(int(operands.memory[i]))
        param, length_param = int(operands.param[i]), int(operands.length_param[i])
        if partition is None:
            return "its place or size is known only at run time, so the buffer needs a partition"
        if param != NONE and param not in partition.offsets:
            return f"p{param} is not the offset of a piece of this buffer"
        k = 0 if param == NONE else partition.offsets.index(param)
        if length_param == NONE or self.group[length_param] != self.group[partition.lengths[k]]:
            return f"its length must be that of the piece at {f'p{param}' if param != NONE else 0}, or equal to it"
        if operands.offset[i] != operands.skip[i]:
            return "the constant part of its offset must be its skip"
        return ""

    def bindings(self, flows: tuple[Flow, ...], element: int) -> Iterator[Binding]:
        """`generic`, then `short`; one empty binding for a plan without parameters."""
        if not self.plan.params:
            yield Binding(length=np.zeros(0, np.int64), offset={}, note="")
            return
        tables = [t for f in flows for t in (f.writes, f.reads)]
        ends = [(t.skip + t.length % UNBOUNDED)[t.length_param >= 0] for t in tables]
        longest = -(-int(np.concatenate([*ends, [0]]).max()) // element) * element
        _, kind = np.unique(self.group[:-1], return_inverse=True)
        yield self._binding(longest + (3 + 2 * kind) * element)
        yield self._binding(np.where(kind % 2, 0, 1 + kind % 3) * element)

    def _binding(self, length: Ints) -> Binding:
        offset: dict[tuple[int, int], int] = {}
        for memory, p in self.partition.items():
            begins = np.concatenate([[0], np.cumsum(length[list(p.lengths)])]).tolist()
            offset.update({(memory, q): begins[k] for k, q in enumerate(p.offsets)})
        pieces = sorted({q for p in self.partition.values() for q in p.lengths})
        shown = ", ".join(f"{self.plan.params[q].name} = {int(length[q])}" for q in pieces[:4])
        return Binding(length=length, offset=offset, note=f" (where {shown}{', ..' if len(pieces) > 4 else ''})")
