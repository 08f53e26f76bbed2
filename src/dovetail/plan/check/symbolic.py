"""The right result, by symbolic execution: every byte is traced to the input bytes it was made of.

Runs only on a plan without races. Then any linear extension of happens-before gives every read the same value, so one
is executed. And one run is: what the caller fills is new in each run, and a read finds what was written in the same run
or filled before it, or else it would have read an undefined byte in run 1, which is an error. So run k does what run 1
did, on the inputs of run k.

Values are numbers, equal iff they denote the same thing: below the number of cells, the content that cell had when its
caller (or somebody outside) filled it; above, a reduction, numbered by its op, dtype and ordered sources (`Terms`). No
hashing is involved. A reduction of reductions is not the flat one: sums of floats depend on their order, which is part
of the contract. A reduction of one source is a copy.

A write that copies has the value of the write its read finds: a pointer. Pointers are followed by doubling, all at
once; reductions are evaluated from the innermost out.
"""

from __future__ import annotations

import numpy as np

from dovetail.plan.check.cells import Incidence
from dovetail.plan.check.chains import Ints
from dovetail.plan.check.flow import Flow
from dovetail.plan.check.scene import Scene
from dovetail.plan.check.terms import Terms

_UNKNOWN = -1


def check_result(scene: Scene) -> None:
    """Raises PlanError if a step reads an undefined byte, cuts an element, or the goal does not hold."""
    for part, flow in ((0, scene.steps), (2, scene.goal)):
        _check_elements(scene, part, flow)
    source = _sources(scene)
    terms = Terms(len(scene.cells))
    values = _values(scene, source, terms)
    _check_goal(scene, values, terms)


def _check_elements(scene: Scene, part: int, flow: Flow) -> None:
    """No cell begins inside an element of a reduction."""
    reduces = np.flatnonzero(flow.element > 1)
    if not len(reduces):
        return
    for which, operand, element in (
        (part, reduces, flow.element[reduces]),
        (part + 1, *_reads_of(flow, reduces)),
    ):
        found = scene.cells.parts[which]
        size = np.ones(len(found.first) - 1, np.int64)
        size[operand] = element
        of = found.operand
        inside = scene.cells.low[found.cell] - scene.extents[which].start[of]
        split = (inside % size[of] != 0) | (scene.cells.length[found.cell] % size[of] != 0)
        if split.any():
            i = int(np.argmax(split))
            node = int((flow.writes if which == part else flow.reads).node[of[i]])
            step = scene.text.goal(node) if part else scene.text.step(node)
            where = scene.where(which, int(of[i]), int(found.cell[i]))
            raise scene.text.error(f"{step}: its elements are cut by others, at {where}{scene.note}", [step])


def _reads_of(flow: Flow, writes: Ints) -> tuple[Ints, Ints]:
    count = flow.count[writes]
    begins = np.repeat(flow.first[writes] - (np.cumsum(count) - count), count)
    return begins + np.arange(int(count.sum())), np.repeat(flow.element[writes], count)


def _sources(scene: Scene) -> Ints:
    """For every cell that a step reads: the write it finds there, or -1 for what the caller filled."""
    read = scene.read
    operand = read.operand
    node = scene.steps.reads.node[operand]
    found = scene.history.previous(read.cell, scene.order.position[node])
    undefined = (found < 0) & ~scene.memories.filled[scene.steps.reads.memory[operand]]
    if undefined.any():
        i = int(np.argmax(undefined))
        step = scene.text.step(int(node[i]))
        where = scene.where(1, int(operand[i]), int(read.cell[i]))
        raise scene.text.error(f"{step} reads {where}{scene.note}, which nobody has written", [step])
    return found


def _values(scene: Scene, source: Ints, terms: Terms) -> Ints:
    """The value of every cell that a step writes."""
    flow, written, read = scene.steps, scene.written, scene.read
    operand, ordinal = written.operand, written.ordinal
    copied = np.flatnonzero(flow.count[operand] == 1)
    entry = read.first[flow.first[operand[copied]]] + ordinal[copied]
    value = _filled(scene)
    root = np.arange(len(written.cell))
    found = source[entry]
    value[copied] = np.where(found < 0, read.cell[entry], _UNKNOWN)
    root[copied] = np.where(found < 0, copied, found)
    while not np.array_equal(further := root[root], root):
        root = further
    pending = np.flatnonzero(flow.count[operand] > 1)
    while len(pending):
        ready = _combine(scene, source, terms, value, root, pending)
        pending = pending[~ready]
    return value[root]


def _filled(scene: Scene) -> Ints:
    """The values that come from outside; the others are unknown yet."""
    written = scene.written
    value = np.full(len(written.cell), _UNKNOWN, np.int64)
    at = np.flatnonzero(scene.steps.count[written.operand] == 0)
    value[at] = written.cell[at]
    order = at[np.argsort(written.cell[at], kind="stable")]
    again = np.flatnonzero(written.cell[order][1:] == written.cell[order][:-1])
    if len(again):
        a, b = (int(written.operand[order[again[0] + k]]) for k in (0, 1))
        steps = [scene.text.step(int(scene.steps.writes.node[n])) for n in (a, b)]
        where = scene.where(0, a, int(written.cell[order[again[0]]]))
        raise scene.text.error(f"{steps[0]} and {steps[1]} both fill {where}: which of the two is meant?", steps)
    return value


def _combine(scene: Scene, source: Ints, terms: Terms, value: Ints, root: Ints, pending: Ints) -> np.ndarray:
    """Evaluates the reductions whose sources are known, in place; returns which."""
    flow, read = scene.steps, scene.read
    operand, ordinal = scene.written.operand[pending], scene.written.ordinal[pending]
    count = flow.count[operand]
    columns = []
    ready = np.ones(len(pending), bool)
    for k in range(int(count.max())):
        entry = read.first[flow.first[operand] + np.minimum(k, count - 1)] + ordinal
        found = source[entry]
        column = np.where(found < 0, read.cell[entry], value[root[found]])
        ready &= column != _UNKNOWN
        columns.append(column)
    at = np.flatnonzero(ready)
    combined = terms.reduce(flow.combine[operand[at]], count[at], [c[at] for c in columns])
    value[pending[at]] = combined
    return ready


def _check_goal(scene: Scene, values: Ints, terms: Terms) -> None:
    """Every cell of the goal has the value that was asked for, and its rank knows at its end."""
    goal, want, of = scene.goal, scene.cells.parts[2], scene.cells.parts[3]
    operand = want.operand
    memory = goal.writes.memory[operand]
    last = scene.history.last(want.cell)
    has = np.where(scene.memories.filled[memory], want.cell, _UNKNOWN)
    has = np.where(last >= 0, values[last], has) if len(values) else has
    wrong = has != _expected(goal, want, of, terms)
    if wrong.any():
        raise _wrong(scene, int(np.argmax(wrong)), last, has)
    rest = np.flatnonzero((last >= 0) & ~scene.memories.callers[memory])
    writer = scene.steps.writes.node[scene.written.operand[last[rest]]]
    late = ~scene.order.ended(writer, scene.memories.rank[memory[rest]])
    if late.any():
        i = int(np.argmax(late))
        step = scene.text.step(int(writer[i]))
        where = scene.where(2, int(operand[rest[i]]), int(want.cell[rest[i]]))
        raise scene.text.error(f"race: {step} writes {where}{scene.note} and may do so after its rank's end", [step])


def _expected(goal: Flow, want: Incidence, of: Incidence, terms: Terms) -> Ints:
    operand, ordinal = want.operand, want.ordinal
    count = goal.count[operand]
    expected: Ints = of.cell[of.first[goal.first[operand]] + ordinal] if len(operand) else want.cell
    many = np.flatnonzero(count > 1)
    if len(many):
        op, num = operand[many], count[many]
        columns = [
            of.cell[of.first[goal.first[op] + np.minimum(k, num - 1)] + ordinal[many]] for k in range(int(num.max()))
        ]
        expected = expected.copy()
        expected[many] = terms.reduce(goal.combine[op], num, columns)
    return expected


def _wrong(scene: Scene, i: int, last: Ints, has: Ints) -> Exception:
    want = scene.cells.parts[2]
    operand, cell = int(want.operand[i]), int(want.cell[i])
    goal = scene.text.goal(int(scene.goal.writes.node[operand]))
    where = scene.where(2, operand, cell)
    if last[i] < 0:
        return scene.text.error(f"wrong result: no step writes {where}{scene.note}; {goal} asks for it", [goal])
    step = scene.text.step(int(scene.steps.writes.node[scene.written.operand[last[i]]]))
    meaning = _meaning(scene, int(has[i]))
    return scene.text.error(
        f"wrong result: {where}{scene.note} ends with {meaning}, written by {step}; that is not {goal}", [step, goal]
    )


def _meaning(scene: Scene, value: int) -> str:
    """What a value denotes, for people."""
    if value >= len(scene.cells):
        return "another reduction"
    for part in (1, 0, 3):
        found = scene.cells.parts[part]
        if len(at := np.flatnonzero(found.cell == value)):
            return f"what was filled into {scene.where(part, int(found.operand[at[0]]), value)}"
    return "something else"
