"""No two accesses to a byte, one of them a write, without an order between them.

It is enough to look at neighbours: in each cell, writes sorted by the linear extension, every write against the next,
every read against the write before it and the write after it. If all of these are ordered, so are all others, by
transitivity. From run to run: every access of a cell against the first write of the next run.

The caller is a part of this. At its start rank r fills all of its own buffers (with data, or garbage in an output), at
its end it reads them, and from then on it may fill them again. So an access to a caller's buffer must come after the
start of that rank and, if it writes or if there is another run, before the end of it. That covers all that happens to
these buffers from run to run; only scratch memory, staging rings and what is outside are looked at cell by cell.
"""

from __future__ import annotations

import numpy as np

from dovetail.plan.check.chains import Ints
from dovetail.plan.check.flow import Operands
from dovetail.plan.check.scene import Scene
from dovetail.plan.step import Op


def check_races(scene: Scene, *, repeated: bool) -> None:
    """Raises PlanError on the first race found."""
    for part, operands in enumerate((scene.steps.writes, scene.steps.reads)):
        _check_caller(scene, part, operands, repeated=repeated)
    _check_writes(scene)
    _check_reads(scene)
    if repeated:
        _check_next(scene)


def _check_caller(scene: Scene, part: int, operands: Operands, *, repeated: bool) -> None:
    extent, memories = scene.extents[part], scene.memories
    mine = np.flatnonzero(memories.callers[operands.memory] & (extent.length * extent.rows > 0))
    node, rank = operands.node[mine], memories.rank[operands.memory[mine]]
    early = ~scene.order.started(rank, node)
    late = ~scene.order.ended(node, rank) & (repeated | (part == 0))
    for bad, when, run in ((early, "start", "run 2" if repeated else "run 1"), (late, "end", "run 1")):
        if not bad.any():
            continue
        i = int(mine[np.argmax(bad)])
        step, who = scene.text.step(int(operands.node[i])), f"caller of rank {int(rank[np.argmax(bad)])}"
        low = int(extent.start[i])
        high = low + int((extent.rows[i] - 1) * extent.pitch[i] + extent.length[i])
        where = scene.text.bytes(int(operands.memory[i]), low, high)
        does = "writes" if part == 0 else "reads"
        order = "after the start" if when == "start" else "before the end"
        raise scene.text.error(
            f"race: {step} ({run}) {does} {where}{scene.note}, but nothing orders it {order} of the {who} ({run})",
            [step, f"{who} at the {when} of {run}"],
        )


def _check_writes(scene: Scene) -> None:
    a, b = scene.history.neighbours()
    operand = scene.written.operand
    node = scene.steps.writes.node
    na, nb = node[operand[a]], node[operand[b]]
    bad = ~scene.order.before(na, nb) | (na == nb)
    if bad.any():
        i = int(np.argmax(bad))
        raise _race(scene, (0, int(a[i])), (0, int(b[i])), ("run 1", "run 1"))


def _check_reads(scene: Scene) -> None:
    """Every read against the writes around it."""
    read, written = scene.read, scene.written
    some = np.flatnonzero(scene.history.count[read.cell] > 0)
    if not len(some):
        return
    cell, operand, into = read.cell[some], read.operand[some], written.operand
    node, write_node = scene.steps.reads.node[operand], scene.steps.writes.node
    position = scene.order.position[node]
    previous, following = scene.history.previous(cell, position), scene.history.following(cell, position)
    own = np.flatnonzero((following >= 0) & (write_node[into[following]] == node))
    _check_own(scene, some[own], following[own])
    for other, first in ((previous, True), (following, False)):
        at = np.flatnonzero((other >= 0) & (write_node[into[other]] != node))
        mine, theirs = node[at], write_node[into[other[at]]]
        ok = scene.order.before(theirs, mine) if first else scene.order.before(mine, theirs)
        if not ok.all():
            i = int(np.argmin(ok))
            pair = (0, int(other[at][i])), (1, int(some[at][i]))
            raise _race(scene, *(pair if first else pair[::-1]), ("run 1", "run 1"))


def _check_own(scene: Scene, reads: Ints, writes: Ints) -> None:
    """A step may write what it reads only if it swaps, or combines element by element in place."""
    if not len(reads):
        return
    node = scene.steps.writes.node[scene.written.operand[writes]]
    rows = scene.order.chains.rows["op"][node]
    aligned = (rows == Op.REDUCE) & (scene.read.ordinal[reads] == scene.written.ordinal[writes])
    bad = ~(aligned | (rows == Op.SWAP))
    if bad.any():
        i = int(np.argmax(bad))
        raise _race(scene, (1, int(reads[i])), (0, int(writes[i])), ("run 1", "run 1"))


def _check_next(scene: Scene) -> None:
    """What outlives a run: every access against the first write of the next run."""
    for part, operands in enumerate((scene.steps.writes, scene.steps.reads)):
        found = scene.cells.parts[part]
        outlives = ~scene.memories.callers[operands.memory]
        if not outlives.any():
            continue
        operand = found.operand
        some = np.flatnonzero(outlives[operand])
        first = scene.history.first(found.cell[some])
        some, first = some[first >= 0], first[first >= 0]
        theirs = scene.steps.writes.node[scene.written.operand[first]]
        ok = scene.order.before_next(operands.node[operand[some]], theirs)
        if not ok.all():
            i = int(np.argmin(ok))
            raise _race(scene, (part, int(some[i])), (0, int(first[i])), ("run 1", "run 2"))


def _race(scene: Scene, a: tuple[int, int], b: tuple[int, int], runs: tuple[str, str]) -> Exception:
    """The error for two entries, (part, place in its incidence) each."""
    tables = (scene.steps.writes, scene.steps.reads)
    names, ends = [], []
    for part, entry in (a, b):
        operand = int(np.searchsorted(scene.cells.parts[part].first, entry, side="right")) - 1
        ends.append((part, operand))
        names.append(scene.text.step(int(tables[part].node[operand])))
    where = scene.overlap(ends[0], ends[1], int(scene.cells.parts[a[0]].cell[a[1]]))
    verbs = ["writes" if part == 0 else "reads" for part, _ in (a, b)]
    if names[0] == names[1] and runs[0] == runs[1]:
        return scene.text.error(f"overlap: {names[0]} reads and writes, or writes twice, {where}{scene.note}", names)
    return scene.text.error(
        f"race: {names[0]} ({runs[0]}, {verbs[0]}) and {names[1]} ({runs[1]}, {verbs[1]}) are not ordered on {where}"
        f"{scene.note}",
        names,
    )
