"""The plan's rows laid end to end: one chain per queue, then one per access from outside.

Owns the numbering that the rest of the checker speaks in. A *node* is a row of this table; a *chain* is what runs in
order. An `External` becomes a chain of its own: a `WAIT` for its exported signal, if it has one, and then the access,
a row that moves nothing here (`STAMP`) but has a node, so that it is ordered like any step.

Externals that differ only in `before` are one access whose end several signals promise: a network copy that tells the
receiver `arrived` and the sender `sent`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.plan import step as st
from dovetail.plan.plan import External, Plan, Region, SignalKind
from dovetail.plan.step import Rows

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """One access by somebody outside, and every signal that says it has ended."""

    read: Region | None
    write: Region | None
    after: tuple[int, int] | None
    before: tuple[tuple[int, int], ...]

    @property
    def rank(self) -> int:
        """Whose run it belongs to where no signal says so: the rank it writes on, else the one it reads from."""
        region = self.write or self.read
        assert region is not None
        return region.rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chains:
    """All rows, and where each stands."""

    rows: Rows
    first: Ints  #: of each chain, and one past the last
    chain: Ints  #: of each node
    index: Ints  #: of each node in its chain
    rank: Ints  #: of each chain
    num_queues: int
    outside: tuple[Outside, ...]

    def __len__(self) -> int:
        return len(self.rank)

    def outside_node(self, number: int) -> int:
        """The node of an access from outside."""
        return int(self.first[self.num_queues + number + 1]) - 1


def flatten(plan: Plan) -> Chains:
    """Numbers the rows of a plan."""
    outside = _outside(plan)
    blocks = [q.steps for q in plan.queues]
    blocks += [st.sequence(*([st.wait(*o.after)] if o.after else []), st.stamp(0)) for o in outside]
    lengths = np.array([len(b) for b in blocks], np.int64)
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    chain = np.repeat(np.arange(len(blocks)), lengths)
    return Chains(
        rows=np.concatenate(blocks) if blocks else st.blank(0),
        first=first,
        chain=chain,
        index=np.arange(len(chain)) - first[chain],
        rank=np.array([q.rank for q in plan.queues] + [o.rank for o in outside], np.int64),
        num_queues=len(plan.queues),
        outside=outside,
    )


def _outside(plan: Plan) -> tuple[Outside, ...]:
    merged: dict[tuple[Region | None, Region | None, tuple[int, int] | None], list[tuple[int, int]]] = {}
    for number, external in enumerate(plan.external):
        _validate(plan, number, external)
        befores = merged.setdefault((external.read, external.write, external.after), [])
        if external.before:
            befores.append(external.before)
    return tuple(Outside(read=r, write=w, after=a, before=tuple(b)) for (r, w, a), b in merged.items())


def _validate(plan: Plan, number: int, external: External) -> None:
    def fail(problem: str) -> PlanError:
        return PlanError(f"plan {plan.name}: external {number} {problem}", steps=(f"external {number}",))

    for region in (external.read, external.write):
        if region and not (0 <= region.rank < plan.world and 0 <= region.buffer < len(plan.buffers)):
            raise fail(f"names rank {region.rank} buffer {region.buffer}, which the plan has not")
    if not (external.read or external.write):
        raise fail("neither reads nor writes: give it a region")
    if external.read and external.write and external.read.length != external.write.length:
        raise fail(f"copies {external.read.length} bytes to {external.write.length}: the two must be equal")
    for end, kind in ((external.after, SignalKind.EXPORTED), (external.before, SignalKind.IMPORTED)):
        if end and not (0 <= end[0] < len(plan.signals) and plan.signals[end[0]].kind is kind):
            raise fail(f"is ordered by signal {end[0]}, which must be an {kind} one")
