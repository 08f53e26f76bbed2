"""Which transport `auto` takes, and why. In force is what rank 0 has: profile, forced transport, `DOVETAIL_DISABLE`.

The section "fused" of a profile is a table by backend, operator and number of ranks; each entry is a list of rows
``[operations, bytes, {transport: time_us}, dtype]``, one per measured shape; the dtype may be missing. A call takes
what gained most over unfused at the shapes near it. Of GPUs the name stands beside the operators ("device"): figures
of another one than rank 0's first do not count. So does whose collectives unfused ran on ("collectives"): those of
torch are slower, and what gained over them says nothing once ours are in force.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from dovetail.coll.choose import settings
from dovetail.errors import NotSupported
from dovetail.hw.world import Group
from dovetail.ops import calls

UNFUSED, DECOMPOSED, STORE, DMA = "unfused", "decomposed", "store", "dma"
AUTO = "auto"
WHERE = DEVICE, COLLECTIVES = "device", "collectives"
OURS, TORCHS = "ours", "torch"
_TUNE = "`dovetail tune --only fused --backend cuda`"
NAMES = (UNFUSED, DECOMPOSED, STORE, DMA)
#: A transport is taken where it gains so much over unfused on the mean of shapes nearby, and has at least this share
#: of its speed at each of them.
_LEAST_GAIN, _LEAST_SHARE = 1.03, 0.95
_NEAR = 0.25  # weight of a shape nearby
_MOST_KNOWN = 4096

OPERATORS = (
    calls.EmbeddingAllToAll.op,
    calls.GemvAllReduce.op,
    calls.GemmAllToAll.op,
    calls.AllGatherMatmul.op,
    calls.MatmulReduceScatter.op,
)
_ON_GPUS: dict[str, tuple[str, ...]] = {
    calls.GemmAllToAll.op: (UNFUSED, DECOMPOSED, STORE, DMA),
    calls.EmbeddingAllToAll.op: (UNFUSED, STORE, DMA),
    calls.GemvAllReduce.op: (UNFUSED, STORE),
    calls.AllGatherMatmul.op: (UNFUSED, STORE),
    calls.MatmulReduceScatter.op: (UNFUSED, DECOMPOSED, STORE, DMA),
}
#: What there is, by backend and operator.
TRANSPORTS: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {
        calls.GemmAllToAll.op: (UNFUSED, STORE, DMA),
        calls.EmbeddingAllToAll.op: (UNFUSED, STORE, DMA),
        calls.GemvAllReduce.op: (UNFUSED, DECOMPOSED, STORE),
        calls.AllGatherMatmul.op: (UNFUSED, DECOMPOSED, STORE),
        calls.MatmulReduceScatter.op: (UNFUSED, DECOMPOSED, STORE, DMA),
    },
    "cuda": _ON_GPUS,
    "hip": _ON_GPUS,
}


class Choice(NamedTuple):
    """A transport and one line that says why."""

    transport: str
    reason: str


def transport_for(group: Group, call: calls.Call, requested: str, backend: str) -> Choice:
    """What a call runs. Raises `ValueError` or `NotSupported` for a transport that it can't have."""
    if not isinstance(requested, str):
        raise TypeError(f"transport is one of {', '.join((AUTO, *NAMES))}, not {requested!r:.80}")
    has = TRANSPORTS.get(backend, {}).get(call.op, (UNFUSED,))
    if backend != "cpu" and call.dtype is torch.float64:
        has = (UNFUSED,)  # no kernel of ours multiplies it
    if requested != AUTO:
        return Choice(_known(requested, call.op, has, backend, group), "asked for")
    made = getattr(group, "ops", None)
    known = {} if made is None else made.known  # what is in force does not change while a group lives
    key = AUTO, call.op, call.load, call.dtype, backend
    choice: Choice | None = known.get(key)
    if choice is None:
        choice = _chosen(group, call, has, backend)
        if len(known) < _MOST_KNOWN:
            known[key] = choice
    return choice


def _chosen(group: Group, call: calls.Call, has: tuple[str, ...], backend: str) -> Choice:
    """What `auto` takes."""
    if not group.world.local:
        return Choice(UNFUSED, "the group spans hosts: fused operators are for ranks of one host")
    told = settings(group)
    if told.get("disable"):
        return Choice(UNFUSED, "DOVETAIL_DISABLE")
    forced = told.get("transport")
    if forced and forced in has:
        return Choice(forced, "DOVETAIL_TRANSPORT")
    choice = _by_figures(told, call, group.size, has, backend)
    if not forced:
        return choice
    return Choice(choice.transport, f"DOVETAIL_TRANSPORT={forced}: this operator has none; {choice.reason}")


def _by_figures(told: dict[str, Any], call: calls.Call, ranks: int, has: tuple[str, ...], backend: str) -> Choice:
    """By what rank 0's profile has for the call."""
    if len(has) == 1:
        return Choice(UNFUSED, f"{backend} has no other transport for {call.op}")
    tuned = told.get("fused", {}).get(backend, {})
    table = tuned.get(call.op, {})
    if backend != "cpu":
        measured, (here, driver) = tuned.get(DEVICE), told.get("gpu", {}).get(backend, ("", 0))
        if not table or measured != here:
            where = f"{here}, only on {measured}" if table else "this GPU"
            return Choice(UNFUSED, f"nothing was measured on {where} ({_TUNE})")
        if tuned.get(COLLECTIVES) == TORCHS and has_passed(told.get("selftest", {}).get(backend, {}), here, driver):
            since = "unfused was measured with torch's collectives, and the self-test of ours has passed since"
            return Choice(UNFUSED, f"{since}: measure again ({_TUNE})")
    return from_table(table, call, ranks, has)


def has_passed(selftest: Mapping[str, Any], device: str, driver: int) -> bool:
    """Are our collectives in force on this GPU? By an entry of the self-test."""
    return bool(selftest.get("passed")) and (selftest.get("device"), selftest.get("driver")) == (device, driver)


def _known(name: str, op: str, has: tuple[str, ...], backend: str, group: Group) -> str:
    if name not in NAMES:
        raise ValueError(f"no transport {name!r}; there are {', '.join((AUTO, *NAMES))}")
    if name != UNFUSED and not group.world.local:
        raise NotSupported(f"{group} spans hosts: only transport 'unfused' can serve it")
    if name not in has:
        raise NotSupported(f"{op} on {backend} has the transports {', '.join(has)}, not {name!r}")
    return name


def from_table(table: dict[str, Any], call: calls.Call, ranks: int, has: tuple[str, ...]) -> Choice:
    """The transport with the largest gain over unfused near the call, by what was measured; without figures the cores'
    stores. A gain within what two runs of the same thing differ by is none."""
    if not table:
        return Choice(STORE if STORE in has else UNFUSED, "not measured here (`dovetail tune --only fused`)")
    measured = min((int(n) for n in table), key=lambda n: (abs(n - ranks), n))
    return _picked(table[str(measured)], call.load, str(call.dtype).removeprefix("torch."), has, measured)


def _picked(given: list[list[Any]], load: tuple[int, int], dtype: str, has: tuple[str, ...], ranks: int) -> Choice:
    """Gains are averaged over the rows of the dtype (of any, if there are none of it), the nearest counting most: a row
    that is farther off than the nearest by a factor of two in operations or bytes counts a quarter. What lost at one
    of those is not taken: a load does not tell all, such as the length of bags."""
    rows = [row for row in given if UNFUSED in row[2]]
    rows = [row for row in rows if dtype in row[3:]] or rows
    operations, size = load
    far = [abs(math.log2((row[0] + 1) / (operations + 1))) + abs(math.log2((row[1] + 1) / (size + 1))) for row in rows]
    gains: dict[str, float] = {}
    for name in has:
        mine = [
            (math.log(row[2][UNFUSED] / row[2][name]), 4.0 ** (min(far) - d))
            for row, d in zip(rows, far, strict=True) if name in row[2]
        ]  # fmt: skip
        if mine and all(gain >= math.log(_LEAST_SHARE) for gain, weight in mine if weight >= _NEAR):
            gains[name] = math.exp(sum(gain * weight for gain, weight in mine) / sum(weight for _, weight in mine))
    best = max(gains, key=lambda name: gains[name], default=UNFUSED)
    if best == UNFUSED or gains[best] < _LEAST_GAIN:
        return Choice(UNFUSED, f"nothing else was clearly faster near {size} bytes with {ranks} ranks")
    return Choice(best, f"measured near {size} bytes with {ranks} ranks: {gains[best]:.2f} times as fast as unfused")
