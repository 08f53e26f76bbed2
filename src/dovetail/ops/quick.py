"""Products on the CPU whose like was run before: what was found out then about shapes and transport still holds.

Owns what is remembered of them, for each group. A decoding step is some ten microseconds long; checking its arguments
again and looking up what it may run takes as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.hw.world import Group
from dovetail.ops import calls
from dovetail.ops.choose import Choice
from dovetail.ops.cpu.store import Repeated
from dovetail.ops.group import OpsGroup

_MOST = 1024


@dataclass(slots=True)
class Known:
    """A call without its tensors, and how it runs."""

    call: calls.Product
    choice: Choice
    forward: Callable[[OpsGroup, Any], torch.Tensor]
    repeated: Repeated | None = None  #: runs it in fewer steps

    def forget(self) -> None:
        """Lets the tensors go."""
        self.call.x = self.call.w = _NOTHING


def learn(
    ranks: OpsGroup, call: calls.Call, choice: Choice, transport: str, forward: Callable[[OpsGroup, Any], torch.Tensor]
) -> None:
    """After a call on the CPU that was checked and has run; it is not used any more. `transport` was asked for."""
    is_uneven = isinstance(call, calls.GemmAllToAll) and not call.even
    if isinstance(call, calls.Product) and not is_uneven and len(ranks.quick) < _MOST:
        made = Known(call, choice, forward)
        ranks.quick[call.op, call.x.shape, call.w.shape, call.dtype, transport] = made
        made.forget()


def find(group: Group, op: str, x: Any, w: Any, transport: str) -> Known | None:
    """What is known of a call with such tensors; None if it must be looked at."""
    if group.ops is None or not (calls.is_plain(x) and calls.is_plain(w)) or x.dtype is not w.dtype:
        return None
    found: Known | None = group.ops.quick.get((op, x.shape, w.shape, x.dtype, transport))
    return found


_NOTHING = torch.empty(0, 0)
