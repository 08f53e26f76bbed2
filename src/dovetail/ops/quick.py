"""Calls whose like was run before: what was found out then about shapes and transport still holds.

Owns what is remembered of them, for each group. A decoding step is some ten microseconds long; checking its arguments
again and looking up what it may run takes as long, and on a GPU much of what launching a kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.coll.registry import registry
from dovetail.hw.cpu import native
from dovetail.hw.world import Group
from dovetail.ops import calls, unfused
from dovetail.ops.choose import STORE, UNFUSED, Choice
from dovetail.ops.cpu import lookups
from dovetail.ops.cpu.repeated import Repeated
from dovetail.ops.gpu import repeated as repeated_on_gpu
from dovetail.ops.gpu import transport as transport_on_gpu
from dovetail.ops.group import OpsGroup

_Repeats = Repeated | repeated_on_gpu.Repeated | unfused.Repeated
#: Under which products with splits are kept.
UNEVEN = "gemm_all_to_all, uneven"
#: Batches of bags that are remembered, by how many and of what they are.
_MOST_LOOKUPS = 64


@dataclass(slots=True)
class Known:
    """A call without its tensors, and how it runs."""

    call: calls.Product
    choice: Choice
    forward: Callable[[OpsGroup, Any], torch.Tensor]
    tally: list[int]  #: how often it ran, among others
    on_gpu: bool
    repeated: _Repeats | None = None  #: runs it in fewer steps


def learn(
    ranks: OpsGroup, call: calls.Call, choice: Choice, transport: str,
    forward: Callable[[OpsGroup, Any], torch.Tensor], *, on_gpu: bool,
) -> None:  # fmt: skip
    """After a call that was checked and has run; it is not used any more. `transport` was asked for."""
    if isinstance(call, calls.Product):
        key = UNEVEN if isinstance(call, calls.GemmAllToAll) and not call.even else call.op, transport
        shapes = ranks.products.get(key)
        if shapes is None:
            shapes = ranks.products[key] = native.load().Shapes()
        if shapes.find(call.x, call.w) is None:  # it may have come by way of torch's dispatcher, which always does
            made = Known(call, choice, forward, registry.tally(call.op, *choice), on_gpu)
            shapes.add(call.x, call.w, made)
            call.forget()
    elif isinstance(call, calls.EmbeddingAllToAll) and choice.transport == STORE and not on_gpu:
        _learn_lookup(ranks, call, choice, transport)


def _learn_lookup(ranks: OpsGroup, call: calls.EmbeddingAllToAll, choice: Choice, transport: str) -> None:
    known, key = ranks.lookups, _lookup_key(call.weights, call.offsets, call.mode, call.num_tables, transport)
    if key in known and not known[key][0].is_over:
        return  # this call only was none for it
    with ranks.calling(choice.transport):
        repeated = lookups.Repeated.of(ranks, call)
    if repeated is not None:
        if len(known) >= _MOST_LOOKUPS:
            known.clear()
        known[key] = repeated, choice.transport, registry.tally(call.op, *choice)


def _lookup_key(
    tables: list[torch.Tensor], offsets: torch.Tensor, mode: str, num_tables: int, transport: str
) -> tuple[Any, ...]:
    """Of calls that native code can tell to be alike, or not."""
    return transport, mode, num_tables, len(tables), tables[0].dtype, tables[0].shape[1:], offsets.numel()


def _ready(group: Group) -> OpsGroup | None:
    """The operators' side of a group on which calls can be made without a look at it."""
    return None if group.broken is not None or group.native is None else group.ops


def run_lookup(
    group: Group, tables: Any, values: Any, offsets: Any, mode: str, num_tables: int, transport: str
) -> torch.Tensor | None:  # fmt: skip
    """The result of an `embedding_all_to_all` whose like was run before; None if it must be looked at."""
    ranks = _ready(group)
    if ranks is None or not ranks.lookups:
        return None
    if not (_is_tensor(values) and _is_tensor(offsets) and type(tables) is list and tables and _is_tensor(tables[0])):
        return None
    if type(mode) is not str or type(num_tables) is not int or type(transport) is not str:
        return None
    try:
        found = ranks.lookups.get(_lookup_key(tables, offsets, mode, num_tables, transport))
    except RuntimeError:  # nested tensors have no shape
        found = None
    if found is None:
        return None
    repeated, by, tally = found
    with ranks.calling(by):
        out: torch.Tensor | None = repeated(tables, values, offsets)
    tally[0] += out is not None
    return out


def _is_tensor(given: Any) -> bool:
    return type(given) is torch.Tensor or type(given) is torch.nn.Parameter


def run(
    group: Group, op: str, x: Any, w: Any, transport: str, splits: tuple[Any, Any] | None = None
) -> torch.Tensor | None:  # fmt: skip
    """The result of a call whose like was run before; None if it must be looked at.

    `splits`: of `UNEVEN`, rows that are received and sent; they may be others each time.
    """
    ranks = _ready(group)
    if ranks is None or type(transport) is not str or (shapes := ranks.products.get((op, transport))) is None:
        return None
    if (known := shapes.find(x, w)) is None or x.is_neg() or w.is_neg() or is_autocast():
        return None
    if splits is not None and not _takes(known.call, *splits):
        return None
    if known.on_gpu and not transport_on_gpu.is_clear(ranks, x.device):
        return None
    with ranks.calling(known.choice.transport):
        known.tally[0] += 1
        if (repeated := known.repeated) is not None and (out := repeated(x, w)) is not None:
            return out  # type: ignore[no-any-return]
        return _run(ranks, known, x, w)


def is_autocast() -> bool:
    """Would torch multiply in another dtype than that of its arguments?"""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _takes(call: calls.Product, receive: Any, send: Any) -> bool:
    """Gives a call its splits, if they are lists or tuples of numbers of rows."""
    assert isinstance(call, calls.GemmAllToAll)
    for splits in (receive, send):
        if type(splits) not in (list, tuple) or len(splits) != call.world:
            return False
        for rows in splits:
            if type(rows) is not int or not 0 <= rows < calls.MOST_ROWS:
                return False
    if sum(send) != sum(call.send):  # the rows of x, which are as many as they were
        return False
    call.send, call.receive = tuple(send), tuple(receive)
    return True


def _run(ranks: OpsGroup, known: Known, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    call = known.call
    call.x, call.w = x, w
    try:
        out = known.forward(ranks, call)
        known.repeated = _repeated(ranks, known)
        return out
    finally:
        call.forget()


def _repeated(ranks: OpsGroup, known: Known) -> _Repeats | None:
    """What runs a call like the one that was just made, if there is something shorter."""
    if ranks.transport == STORE:
        return repeated_on_gpu.Repeated.of(ranks, known.call) if known.on_gpu else Repeated.of(ranks, known.call)
    return unfused.Repeated.of(ranks, known.call) if known.on_gpu and ranks.transport == UNFUSED else None
