"""Which transport `auto` takes, and why. In force is what rank 0 has: profile, forced transport, `DOVETAIL_DISABLE`.

The section "fused" of a profile is a table by backend, operator and number of ranks; each entry is a list of rows
``[operations, bytes, {transport: time_us}]``, one per measured shape. A call takes what was fastest at the
nearest of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dovetail.coll.choose import settings
from dovetail.errors import NotSupported
from dovetail.hw.world import Group
from dovetail.ops import calls

UNFUSED, DECOMPOSED, STORE, DMA = "unfused", "decomposed", "store", "dma"
AUTO = "auto"
NAMES = (UNFUSED, DECOMPOSED, STORE, DMA)

#: What there is, by backend and operator.
TRANSPORTS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        calls.GemmAllToAll.op: (UNFUSED, STORE, DMA),
        calls.EmbeddingAllToAll.op: (UNFUSED, STORE, DMA),
        calls.GemvAllReduce.op: (UNFUSED, DECOMPOSED, STORE),
        calls.AllGatherMatmul.op: (UNFUSED, DECOMPOSED, STORE),
        calls.MatmulReduceScatter.op: (UNFUSED, DECOMPOSED, STORE, DMA),
    },
}


class Choice(NamedTuple):
    """A transport and one line that says why."""

    transport: str
    reason: str


def transport_for(group: Group, call: calls.Call, requested: str, backend: str) -> Choice:
    """What a call runs. Raises `ValueError` or `NotSupported` for a transport that it can't have."""
    has = TRANSPORTS.get(backend, {}).get(call.op, (UNFUSED,))
    if requested != AUTO:
        return Choice(_known(requested, call.op, has, backend, group), "asked for")
    if not group.world.local:
        return Choice(UNFUSED, "the group spans hosts: fused operators are for ranks of one host")
    told = settings(group)
    if told.get("disable"):
        return Choice(UNFUSED, "DOVETAIL_DISABLE")
    forced = told.get("transport")
    if forced and forced in has:
        return Choice(forced, "DOVETAIL_TRANSPORT")
    if len(has) == 1:
        return Choice(UNFUSED, f"{backend} has no other transport for {call.op}")
    table = told.get("fused", {}).get(backend, {}).get(call.op, {})
    return from_table(table, call, group.size, has)


def _known(name: str, op: str, has: tuple[str, ...], backend: str, group: Group) -> str:
    if name not in NAMES:
        raise ValueError(f"no transport {name!r}; there are {', '.join((AUTO, *NAMES))}")
    if name != UNFUSED and not group.world.local:
        raise NotSupported(f"{group} spans hosts: only transport 'unfused' can serve it")
    if name not in has:
        raise NotSupported(f"{op} on {backend} has the transports {', '.join(has)}, not {name!r}")
    return name


def from_table(table: dict[str, Any], call: calls.Call, ranks: int, has: tuple[str, ...]) -> Choice:
    """The fastest at the nearest measured shape, by operations and bytes; without figures the cores' stores."""
    if not table:
        return Choice(STORE if STORE in has else UNFUSED, "not measured here (`dovetail tune --only fused`)")
    measured = min((int(n) for n in table), key=lambda n: (abs(n - ranks), n))
    operations, size = call.load
    rows = table[str(measured)]

    def far(row: list[Any]) -> float:
        return abs(math.log2((row[0] + 1) / (operations + 1))) + abs(math.log2((row[1] + 1) / (size + 1)))

    row = min(rows, key=far)
    times = {name: t for name, t in row[2].items() if name in has}
    best = min(times, key=lambda name: times[name])
    plain = times.get(UNFUSED, math.inf)
    text = f"measured {times[best]:.0f} us, unfused {plain:.0f}, at {row[1]} bytes and {measured} ranks"
    return Choice(best, text)
