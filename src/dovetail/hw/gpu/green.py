"""Green contexts: how the CUDA driver cuts a GPU's multiprocessors in two.

Owns the resources that are asked for, split and turned into contexts. A green context is never made current: a stream
of it takes what is launched while the device's primary context is, with the modules, memory and events of that one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_uint, c_uint64
from types import SimpleNamespace

from dovetail.hw.gpu.driver import DriverError
from dovetail.hw.gpu.partition import StreamShare, rounded

#: CUdevResource has 144 bytes up to CUDA 13.1. A longer one of a later driver would still find room.
RESOURCE_BYTES = 512

# Where a CUdevResource of multiprocessors has its words: type, count, fewest that can be cut off, and in which steps.
# Drivers before CUDA 13.0 promise the first two only.
_TYPE, _COUNT, _LEAST, _STEP = 0, 96 // 4, 100 // 4, 104 // 4
_TELLS_STEPS = 13000

_MULTIPROCESSORS = 1  # CU_DEV_RESOURCE_TYPE_SM
_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # the driver takes no context, and no stream, without

#: (fewest, step) by the major compute capability, as the driver's manual has it; 9 and later cut eights.
_STEPS = {6: (2, 2), 7: (2, 2), 8: (4, 2)}
_STEPS_9 = (8, 8)

#: A share in which nothing runs needs no multiprocessors that a cluster of blocks could be scheduled on together: the
#: driver then cuts pairs off.
IDLE_STEP = 2
_ANY_PLACE = 1  # CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING

Resource = ctypes.Array[c_uint]


def _resource() -> Resource:
    return (c_uint * (RESOURCE_BYTES // 4))()


class Green:
    """The calls of `cuda_calls.GREEN`, and what to do with a stream that is new (`own`) or over (`destroy`)."""

    def __init__(
        self, calls: SimpleNamespace, version: int, own: Callable[[int], int], destroy: Callable[[int], None]
    ) -> None:
        self._call, self._version, self._own, self._destroy = calls, version, own, destroy

    def step(self, device: int, capability: int) -> int:
        """Shares are multiples of so many. `device` is the driver's handle, `capability` its major number."""
        return self._steps(self._whole(device), capability)[1]

    def idle_step(self, device: int, capability: int) -> int:
        """The same of shares that stay idle. The driver is asked for one: not all cut so few off."""
        whole = self._whole(device)
        step = self._steps(whole, capability)[1]
        if step <= IDLE_STEP:
            return step
        try:
            self._cut(whole, IDLE_STEP, _ANY_PLACE)
        except DriverError:
            return step
        return IDLE_STEP

    def split(
        self, device: int, capability: int, number: int, *, idle: bool = False
    ) -> tuple[StreamShare, StreamShare]:
        """`Driver.split_cores`."""
        whole = self._whole(device)
        least, step = self._steps(whole, capability)
        usual = step
        if idle and (finer := self.idle_step(device, capability)) < step:
            least = step = finer
        count = rounded(number, whole[_COUNT], least=least, step=step)
        taken, rest = self._cut(whole, count, _ANY_PLACE if count % usual else 0)
        first = self._share(device, taken)
        try:
            return first, self._share(device, rest)
        except BaseException:
            first.close()
            raise

    def _cut(self, whole: Resource, count: int, flags: int) -> tuple[Resource, Resource]:
        """So many, and the others."""
        taken, rest, groups = _resource(), _resource(), c_uint(1)
        name = "cuDevSmResourceSplitByCount"
        self._call.cuDevSmResourceSplitByCount(taken, byref(groups), whole, rest, flags, count)
        others = flags and taken[_COUNT] != count
        if others or groups.value != 1 or rest[_TYPE] != _MULTIPROCESSORS or not rest[_COUNT]:
            raise DriverError(f"{name} did not cut {count} of {whole[_COUNT]} multiprocessors off", call=name, code=0)
        return taken, rest

    def _whole(self, device: int) -> Resource:
        """All multiprocessors that the process may use."""
        found = _resource()
        self._call.cuDeviceGetDevResource(device, found, _MULTIPROCESSORS)
        return found

    def _steps(self, whole: Resource, capability: int) -> tuple[int, int]:
        """The fewest multiprocessors that can be cut off, and the step."""
        if self._version >= _TELLS_STEPS and whole[_LEAST] and whole[_STEP]:
            return whole[_LEAST], whole[_STEP]
        return _STEPS.get(capability, _STEPS_9)

    def _share(self, device: int, resource: Resource) -> StreamShare:
        call, description, context = self._call, c_uint64(), c_uint64()
        call.cuDevResourceGenerateDesc(byref(description), resource, 1)
        call.cuGreenCtxCreate(byref(context), description.value, device, _DEFAULT_STREAM)

        def create(priority: int) -> int:
            stream = c_uint64()
            call.cuGreenCtxStreamCreate(byref(stream), context.value, _NON_BLOCKING, priority)
            return self._own(stream.value)

        # Streams go first: those of a context that is gone cannot be destroyed any more.
        return StreamShare(resource[_COUNT], create, self._destroy, lambda: call.cuGreenCtxDestroy(context.value))
