"""Which plans are proved before they run: those that somebody made, once, unless the environment says otherwise."""

from __future__ import annotations

import functools
import hashlib

from dovetail import env
from dovetail.plan.check import check
from dovetail.plan.plan import Plan

_MOST_REMEMBERED = 1024


def prove_first(plan: Plan, *, wanted: bool) -> None:
    """Proves two runs of a plan if it is `wanted`, or as DOVETAIL_CHECK says. One that was proved here before is not.

    Raises:
        PlanError: the plan is wrong.
    """
    forced = env.check()
    if wanted if forced is None else forced:
        _prove(_Known(plan))


class _Known:
    """A plan, compared by what it does and what it promises."""

    def __init__(self, plan: Plan) -> None:
        self.plan: Plan | None = plan
        promised = (plan.goal.tobytes(), plan.partitions, plan.external, plan.passes)
        self._key = plan.fingerprint(), hashlib.blake2b(repr(promised).encode(), digest_size=16).digest()

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and self._key == other._key


@functools.lru_cache(_MOST_REMEMBERED)
def _prove(known: _Known) -> None:
    assert known.plan is not None
    check(known.plan, runs=2)
    known.plan = None  # not kept alive by the cache
