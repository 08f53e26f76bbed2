"""A GPU of the stand-in driver in this process, and what tests of the executor do with it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests import standin

from dovetail.hw.gpu.cuda import CudaDriver
from dovetail.hw.gpu.device import Device
from dovetail.hw.gpu.heap import Heap
from dovetail.plan import Plan, Role

SETTINGS = ("VERSION", "FAIL", "DEVICES", "PEERS", "DELAY_US", "NO_DEVICE", "STREAM_WORDS", "IPC", "VMM", "SEED")


class Control:
    """The back door of the stand-in: settings and the record of calls."""

    def __init__(self) -> None:
        self.path = str(standin.build("cuda"))
        self._library = ctypes.CDLL(self.path)
        self._library.standin_calls.restype = ctypes.c_size_t
        self._library.standin_calls.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def set(self, **settings: object) -> None:
        for name, value in settings.items():
            self._library.standin_set(name.encode(), str(value).encode())

    def reset(self) -> None:
        self.set(**dict.fromkeys(SETTINGS, ""), MOST_PARKED=15)
        self.calls()

    def calls(self, name: str = "") -> list[str]:
        """The calls since the last time, as lines; those of one name."""
        found = ""
        buffer = ctypes.create_string_buffer(1 << 20)
        while self._library.standin_calls(buffer, len(buffer)):
            found += buffer.value.decode()
        return [line for line in found.splitlines() if line.split()[0].startswith(name)]

    def parked(self) -> int:
        return int(self._library.standin_parked())

    def device(self) -> Device:
        return Device("cuda", driver=CudaDriver(self.path))


def number(line: str, name: str) -> int:
    """`name=value` of a line of the record."""
    return int(next(part for part in line.split() if part.startswith(f"{name}=")).partition("=")[2], 0)


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def view(address: int, size_bytes: int, dtype: str = "u1") -> NDArray[Any]:
    """Memory of the stand-in, seen from the host."""
    return np.frombuffer((ctypes.c_ubyte * size_bytes).from_address(address), dtype)


def callers(plan: Plan, rank: int) -> list[int]:
    """The buffers that a rank's caller gives."""
    roles = (Role.SCRATCH, Role.VIEW)
    return [n for n, b in enumerate(plan.buffers) if b.role not in roles and b.sizes[rank] > 0]


def tensors_of(
    plan: Plan, contents: Mapping[tuple[int, int], NDArray[np.uint8]], heap_of: Callable[[int], Heap]
) -> dict[tuple[int, str], torch.Tensor]:
    """Every caller's buffers on a heap, filled."""
    made = {}
    for r in range(plan.world):
        for n in callers(plan, r):
            t = heap_of(r).empty((plan.buffers[n].sizes[r],), torch.uint8)
            t.numpy()[:] = contents[r, n]
            made[r, plan.buffers[n].name] = t
    return made


def wrong(
    plan: Plan, tensors: Mapping[tuple[int, str], torch.Tensor], want: Mapping[tuple[int, int], NDArray[np.uint8]]
) -> list[tuple[int, str]]:
    """The buffers that do not hold what they should."""
    names = {b.name: n for n, b in enumerate(plan.buffers)}
    return [(r, name) for (r, name), t in tensors.items() if not np.array_equal(t.numpy(), want[r, names[name]])]
