"""A collective of a group as a communication: asynchronous by our engines, or by cores on the calling thread.

Owns nothing of the collective: it is called by its public name, with whatever arguments it takes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail import coll
from dovetail.coll import arguments
from dovetail.coll.dispatch import BaselineWork
from dovetail.coll.recipes import C10D_NAMES
from dovetail.coll.recipes import Collective as Kind
from dovetail.coll.session import group_of
from dovetail.overlap.tasks import Mover, Pending, Traffic

_SPLITS = ("output_split_sizes", "input_split_sizes")
_REDUCES = ("all_reduce", "reduce_scatter")


class Collective:
    """`Collective(dovetail.all_gather_into_tensor, output, input, group=group)`, on a CPU or on GPUs.

    On GPUs all ranks make it together: the first of a group finds out whether they share one.
    """

    def __init__(self, function: Callable[..., Any], *tensors: Any, group: Any = None, **keywords: Any) -> None:
        """Keywords go to the collective; `async_op` and `armed` are ours to choose.

        Raises:
            ValueError: not one of our collectives, or a keyword of those.
        """
        name = getattr(function, "__name__", "")
        collective = C10D_NAMES.get(name) or Kind.__members__.get(str(name).upper())
        if collective is None or getattr(coll, name, None) is not function:
            raise ValueError(f"{function!r} is no collective of dovetail")
        if wrong := {"async_op", "armed"} & set(keywords):
            raise ValueError(f"{', '.join(sorted(wrong))}: whoever runs the communication chooses that")
        self.group = group_of(group)
        self._call = functools.partial(function, *tensors, group=group, **keywords)
        given = [t for t in tensors[:2] if hasattr(t, "data_ptr")]  # behind them split sizes may be tensors too
        if not given:
            raise ValueError(f"{name}: give it its tensors")
        first = given[0]
        kind = collective.name.lower()
        self._where = first.device
        self.device: Any = _device_of(self.group, given)
        local = self.device is not None and _on_one_gpu(self.group, self.device)
        # With split sizes each rank has its own bytes: a choice by size would differ between ranks. The lists that only
        # the root of a gather has don't count.
        uneven = collective is Kind.ALL_TO_ALL and _has_splits(keywords, tensors)
        size = 0 if uneven else max(int(t.nbytes) for t in given)
        self.traffic = Traffic(
            kind=kind, size_bytes=size, num_pieces=self.group.size, reduces=kind in _REDUCES, local=local
        )  # fmt: skip
        # By cores on GPUs is what the user would have without us: the process group's own library, which needs GPUs of
        # its own for all ranks.
        library = self.device is None or (self.group.baseline is not None and not local)
        self.movers = frozenset(Mover) if library else frozenset({Mover.ENGINES})

    def start(self, mover: Mover, *, stream: int = 0, cores: int = 0) -> Pending | None:
        """On a CPU engines begin and cores are done when this returns; on a GPU the stream goes on behind it."""
        if self.device is None:
            pending: Pending | None = self._call(async_op=mover is Mover.ENGINES)
            return pending
        import torch

        cuda: Any = torch.cuda
        with cuda.stream(cuda.ExternalStream(stream, device=self._where)):
            work = self._call(async_op=True, **({"variant": "torch"} if mover is Mover.CORES else {}))
            work.wait()
        return _InStream(self.device, stream) if isinstance(work, BaselineWork) else _Synchronized(work)


def _has_splits(keywords: Mapping[str, Any], given: Sequence[Any]) -> bool:
    positional = zip(_SPLITS, given[2:], strict=False)
    named = ((name, keywords[name]) for name in _SPLITS if name in keywords)
    sizes = [arguments.split_sizes(name, value) for name, value in (*positional, *named)]
    return any(sizes)


def _device_of(group: Any, given: list[Any]) -> Any:
    """The GPU of a call's tensors; None on a CPU."""
    backend, index = arguments.one_device(given)
    if backend == "cpu":
        return None
    from dovetail.hw.gpu.world import world_of

    return world_of(group.world, backend, index).device


_shared: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _on_one_gpu(group: Any, device: Any) -> bool:
    """Are all ranks of a group on the same GPU? Asked once."""
    if group not in _shared:
        import torch

        mine = torch.frombuffer(bytearray(device.driver.device_uuid(device.index)), dtype=torch.uint8)
        every = torch.empty(group.size * len(mine), dtype=torch.uint8)
        coll.all_gather_into_tensor(every, mine, group=group)
        _shared[group] = bool((every.view(group.size, -1) == mine).all())
    return _shared[group]


class _Synchronized:
    """A call of ours on a GPU, to be waited for by the host."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Blocks until the GPU is done with it; raises its error."""
        self._work.synchronize()


class _InStream:
    """A library's call that a stream was ordered behind: `wait` and `synchronize` of NCCL's don't block the host."""

    def __init__(self, device: Any, stream: int) -> None:
        self._device, self._event = device, device.take_event()
        device.driver.event_record(self._event, stream)

    def wait(self) -> None:
        """Blocks until the GPU is done with it."""
        self._device.driver.event_synchronize(self._event)

    def __del__(self) -> None:
        self._device.give_event(self._event)
