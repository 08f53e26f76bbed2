"""torch tensors over memory of ours, and the current stream. The only place of this package that knows torch."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any

from dovetail import env
from dovetail.errors import NotSupported


class _Exported:
    """Device memory as torch takes it; torch holds this object as long as a tensor uses the memory."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


def require_gpu(backend: str, device: int) -> None:
    """Raises `NotSupported` where torch uses no GPU: what the driver gives can't be a tensor then.

    A driver that somebody named may be a stand-in, whose device memory is the host's.
    """
    import torch

    if not torch.cuda.is_available() and env.library(backend) == env.usual_library(backend):
        raise NotSupported(
            f"torch {torch.__version__} uses no GPU here (torch.cuda.is_available() is False), so there is no tensor "
            f"on cuda:{device}: install a torch for this GPU, or use CPU tensors"
        )


def on_device(address: int, size_bytes: int, device: int, on_free: Callable[[], None]) -> Any:
    """A byte tensor over device memory; `on_free` is called when the last tensor over it is gone."""
    import torch

    if not torch.cuda.is_available():  # a stand-in driver, whose device memory is the host's
        return on_host(address, size_bytes, on_free)
    owner = _Exported(address, size_bytes)
    weakref.finalize(owner, on_free).atexit = False
    return torch.as_tensor(owner, device=torch.device("cuda", device))


def on_host(address: int, size_bytes: int, on_free: Callable[[], None]) -> Any:
    """A byte tensor over (pinned) host memory."""
    import torch

    owner = (ctypes.c_uint8 * size_bytes).from_address(address)
    weakref.finalize(owner, on_free).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


def current_stream(device: int) -> int:
    """torch's current stream on a device; 0 is the legacy default one."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return 0
    # torch's short way takes 0.2 us, the public one 4 (pytorch/pytorch#78165).
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(device).cuda_stream) if raw is None else raw(device)


def is_capturing(device: int | None = None) -> bool:
    """Whether torch's current stream on a device, by default the current one, captures a graph."""
    import torch

    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return False
    if device is None or device == cuda.current_device():
        return bool(cuda.is_current_stream_capturing())
    with cuda.device(device):
        return bool(cuda.is_current_stream_capturing())


def recorded(device: int) -> Any:
    """An event behind what torch's current stream on a device has to do."""
    import torch

    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(_stream(device, current_stream(device)))
    return event


@functools.lru_cache(maxsize=64)
def _stream(device: int, raw: int) -> Any:
    """torch's object for its current stream, `raw`: to ask for it takes longer than to record an event."""
    import torch

    return torch.cuda.current_stream(device)
