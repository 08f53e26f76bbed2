"""What operators on the CPU have in common: the order in which ranks are served, sums, what goes by stages, and memory
that is not used again after an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dovetail.coll.dtypes import DTYPES
from dovetail.hw.cpu import native
from dovetail.ops.group import OpsGroup
from dovetail.plan.step import ReduceOp

#: Where memory is made here, whatever torch's default device is.
CPU = torch.device("cpu")
#: Bytes of a result up to which it is copied out of the stage.
COPIED_BYTES = 1 << 20
#: Posted instead of an offset: rows, or bags, were sent to stages.
STAGED = -2
#: The plan's dtypes by number, and the loaded native part: looked up in every call.
NUMBERS = {kind: int(number) for kind, number in DTYPES.items()}
loaded = functools.cache(native.load)
assert int(ReduceOp.SUM) == 0


def remote_first(rank: int, size: int) -> list[int]:
    """The ranks after this one, and itself last."""
    return [(rank + 1 + k) % size for k in range(size)]


def local_first(rank: int, size: int) -> list[int]:
    """Itself, then the ranks after it: what `remote_first` is compared with."""
    return [(rank + k) % size for k in range(size)]


Order = Callable[[int, int], list[int]]


def add_up(out: torch.Tensor, sources: list[int]) -> None:
    """out = the sum over addresses, in their order, in fp32 for shorter floats and rounded once."""
    if out.numel():
        loaded().reduce(NUMBERS[out.dtype], 0, out.data_ptr(), sources, out.numel())


class unfinished:  # noqa: N801 - used as a statement
    """Around the part of a call in which peers write our memory: after an error it is not used again."""

    __slots__ = ("_group", "_held")

    def __init__(self, group: OpsGroup, *held: Any) -> None:
        self._group, self._held = group, held

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._group.fail(error, *self._held)
