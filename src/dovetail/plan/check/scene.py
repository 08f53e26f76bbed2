"""One plan under one binding, cut into cells: what the race check and the symbolic execution both look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dovetail.plan.check.bind import Binding
from dovetail.plan.check.cells import Cells, Incidence, cut
from dovetail.plan.check.chains import Ints
from dovetail.plan.check.fit import Extent, Link, TooFineError
from dovetail.plan.check.flow import Flow, Operands
from dovetail.plan.check.history import History
from dovetail.plan.check.memory import Memories
from dovetail.plan.check.order import Order
from dovetail.plan.check.text import Text


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """Everything about a plan that depends on the binding."""

    steps: Flow
    goal: Flow
    order: Order
    memories: Memories
    text: Text
    note: str
    extents: list[Extent]  #: of the steps' writes and reads, the goal's writes and reads
    cells: Cells
    history: History

    @property
    def written(self) -> Incidence:
        """The cells that steps write."""
        return self.cells.parts[0]

    @property
    def read(self) -> Incidence:
        """The cells that steps read."""
        return self.cells.parts[1]

    def where(self, part: int, operand: int, cell: int) -> str:
        """The bytes of a cell, as an error names them."""
        low = int(self.cells.low[cell])
        return self.text.bytes(int(self.extents[part].memory[operand]), low, low + int(self.cells.length[cell]))

    def overlap(self, a: tuple[int, int], b: tuple[int, int], cell: int) -> str:
        """The bytes that two operands, (part, number) each, share around a cell."""
        low, high = 0, 1 << 62
        for part, n in (a, b):
            e = self.extents[part]
            if int(e.rows[n]) > 1:
                return self.where(part, n, cell)
            low, high = max(low, int(e.start[n])), min(high, int(e.start[n] + e.length[n]))
        return self.text.bytes(int(self.extents[a[0]].memory[a[1]]), low, high)


def stage(steps: Flow, goal: Flow, order: Order, memories: Memories, text: Text, binding: Binding) -> Scene:
    """Places the operands and cuts the memory under them."""
    extents = [_extent(t, binding) for t in (steps.writes, steps.reads, goal.writes, goal.reads)]
    links = [_link(steps, 0, 1), _link(goal, 2, 3)]
    element = int(max([1, *steps.element.tolist(), *goal.element.tolist()]))
    try:
        cells = cut(extents, links, len(memories.size), element)
    except TooFineError:
        raise text.error("its moves shift bytes against each other too finely to be followed") from None
    written = cells.parts[0]
    history = History(written.cell, order.position[steps.writes.node[written.operand]], len(cells))
    return Scene(
        steps=steps,
        goal=goal,
        order=order,
        memories=memories,
        text=text,
        note=binding.note,
        extents=extents,
        cells=cells,
        history=history,
    )


def _extent(operands: Operands, binding: Binding) -> Extent:
    start, length = binding.place(operands)
    return Extent(operands.memory, start, length, operands.rows, operands.pitch)


def _link(flow: Flow, to: int, of: int) -> Link:
    write = np.repeat(np.arange(len(flow.count)), flow.count)
    begins = np.cumsum(flow.count) - flow.count
    read: Ints = np.arange(len(write)) - begins[write] + flow.first[write]
    return Link(to, of, write, read)
