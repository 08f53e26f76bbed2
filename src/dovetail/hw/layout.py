"""What the ranks tell each other about a plan's buffers: the same on every executor, so that mixed ranks agree."""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.errors import NotSupported
from dovetail.plan.plan import AT_RUN, Plan, Role
from dovetail.plan.step import NONE, Op

#: Buffers that lie in a rank's scratch memory: their places in it follow each other.
SCRATCH_ROLES = {Role.SCRATCH: 1, Role.VIEW: 2}
_ALIGN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which buffers the caller gives, which of them are posted, and where scratch lies."""

    user: tuple[int, ...]  #: buffers that the caller gives, in the order of its pointers
    input: int  #: position among `user` that is posted first: what peers read
    output: int  #: position that is posted second: what peers write; NONE if there is none
    scratch: tuple[int, ...]  #: offset of each buffer in a rank's scratch memory
    scratch_bytes: int  #: 0 if there is none; NONE if it is as large as the input


def layout_of(plan: Plan) -> Layout:
    """Orders buffers; raises `NotSupported` if peers touch more than two of a caller's."""
    user = tuple(n for n, b in enumerate(plan.buffers) if b.role not in SCRATCH_ROLES)
    first, second = _posted(plan, user)
    scratch, at, grows = [], 0, False
    for b in plan.buffers:
        scratch.append(at)
        if b.role in SCRATCH_ROLES:
            grows = grows or AT_RUN in b.sizes
            at += -(-max(0, *b.sizes) // _ALIGN) * _ALIGN
    return Layout(user=user, input=first, output=second, scratch=tuple(scratch), scratch_bytes=NONE if grows else at)


def _posted(plan: Plan, user: tuple[int, ...]) -> tuple[int, int]:
    """Which of the caller's buffers a slot names: the first that is filled and the first output, if that is enough.

    Direct and staged plans of one collective have the same buffers first, so they agree on this.
    """
    filled = [k for k, n in enumerate(user) if plan.buffers[n].role in (Role.INPUT, Role.INOUT, Role.OUTSIDE)]
    outputs = [k for k, n in enumerate(user) if plan.buffers[n].role is Role.OUTPUT]
    usual = (filled[0] if filled else 0, outputs[0] if outputs else NONE)
    remote = _touched_by_others(plan)
    wanted = [k for k, n in enumerate(user) if n in remote]
    if set(wanted) <= set(usual):
        return usual
    if len(wanted) > 2:
        names = ", ".join(plan.buffers[user[k]].name for k in wanted)
        raise NotSupported(f"plan {plan.name}: peers touch {names}; this executor lets them touch at most two buffers")
    return wanted[0], wanted[1] if len(wanted) > 1 else NONE


def _touched_by_others(plan: Plan) -> set[int]:
    """Buffers with an operand that is not on the rank of the queue, views counted as what they show."""
    found: set[int] = set()
    for q in plan.queues:
        for side in ("src", "dst", "dst2"):
            far = (q.steps[f"{side}_rank"] != q.rank) & (q.steps[f"{side}_buffer"] != NONE)
            found.update(q.steps[f"{side}_buffer"][far].tolist())
        for row in q.steps[q.steps["op"] == Op.REDUCE]:
            sources = plan.sources[row["first_source"] : row["first_source"] + row["num_sources"]]
            found.update(sources["buffer"][sources["rank"] != q.rank].tolist())
    return found | {plan.buffers[n].of for n in found if plan.buffers[n].role is Role.VIEW}


def reached(plan: Plan) -> set[tuple[int, int]]:
    """(rank, buffer) that some step of another rank touches, whatever the parameters are."""
    found: set[tuple[int, int]] = set()
    for q in plan.queues:
        sure = q.steps[(q.steps["length_param"] == NONE) & (q.steps["length"] > 0)]
        for side in ("src", "dst", "dst2"):
            there = sure[(sure[f"{side}_rank"] != q.rank) & (sure[f"{side}_buffer"] != NONE)]
            found.update(zip(there[f"{side}_rank"].tolist(), there[f"{side}_buffer"].tolist(), strict=True))
        for row in sure[sure["op"] == Op.REDUCE]:
            sources = plan.sources[row["first_source"] : row["first_source"] + row["num_sources"]]
            far = sources[sources["rank"] != q.rank]
            found.update(zip(far["rank"].tolist(), far["buffer"].tolist(), strict=True))
    return found


def numbered(ranks: list[int]) -> list[tuple[int, int]]:
    """(rank, how many of that rank stand before) for each: which word of its home a signal is."""
    seen: dict[int, int] = {}
    out = []
    for r in ranks:
        out.append((r, seen.get(r, 0)))
        seen[r] = out[-1][1] + 1
    return out
