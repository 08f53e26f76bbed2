"""How much memory can still be had, so that a large allocation fails with an error and not by the kernel's killer; and
memory that outlives the call that it is made in.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from dovetail.errors import HardwareError

#: Below this an allocation is not worth the look.
_LARGE_BYTES = 64 << 20
_CGROUP = Path("/sys/fs/cgroup")


def require(size_bytes: int) -> None:
    """Raises `HardwareError` if that much memory is not available; reserving it would end some process."""
    if size_bytes < _LARGE_BYTES:
        return
    left = available_bytes()
    if left is not None and size_bytes > left:
        raise HardwareError(
            f"no memory for {size_bytes} bytes of heap: {left} bytes are available on this machine (or container)"
        )


def lasting() -> contextlib.AbstractContextManager[Any]:
    """Around tensors that later calls write to: one that is made in torch's inference mode could not be written to
    outside of it."""
    import torch

    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def available_bytes() -> int | None:
    """What the kernel says is available, or what is left of the container's limit; None where neither is told."""
    found = [n for n in (_system(), _container()) if n is not None]
    return min(found) if found else None


def _system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)
