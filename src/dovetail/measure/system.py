"""Tries what the operating system allows this process: memfd, pidfd, cross-memory attach.

Owns the attempts. Each ``try_`` function does the thing and cleans up; it returns None when it works, otherwise what
the system said.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from pathlib import Path

_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19


def try_memfd() -> str | None:
    """Make memory without a name, reserve a page of it, map it and write."""
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        handle = os.memfd_create("dovetail-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(handle, 0, mmap.PAGESIZE)
            with mmap.mmap(handle, mmap.PAGESIZE) as page:
                page[0] = 1
        finally:
            os.close(handle)
    except OSError as error:
        return str(error)
    return None


def try_pidfd() -> str | None:
    """Open a handle of this very process."""
    if not hasattr(os, "pidfd_open"):
        return "this system has no pidfd_open"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return str(error)
    return None


def try_cross_memory(scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> str | None:
    """Read memory of this process by ``process_vm_readv``, and look at Yama's scope for that of others."""

    class Extent(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    try:
        readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return "this system has no process_vm_readv"
    readv.restype = ctypes.c_ssize_t
    source, target = ctypes.c_uint64(0x5A), ctypes.c_uint64(0)
    extents = [Extent(ctypes.addressof(cell), 8) for cell in (target, source)]
    zero, one = ctypes.c_ulong(0), ctypes.c_ulong(1)
    moved = readv(os.getpid(), ctypes.byref(extents[0]), one, ctypes.byref(extents[1]), one, zero)
    if moved != 8 or target.value != source.value:
        return os.strerror(ctypes.get_errno())
    level = scope.read_text().strip() if scope.exists() else "0"
    if level != "0" and not _capabilities() >> _CAP_SYS_PTRACE & 1:
        return f"kernel.yama.ptrace_scope is {level}"
    return None


def process_flags() -> list[str]:
    """What the process is denied or granted: seccomp, no-new-privileges, and two capabilities."""
    status = _status()
    if not status:
        return []
    capabilities = _capabilities()
    return [
        f"seccomp {'off' if status.get('Seccomp', '0') == '0' else 'on'}",
        *(["no new privileges"] if status.get("NoNewPrivs") == "1" else []),
        f"SYS_PTRACE {'yes' if capabilities >> _CAP_SYS_PTRACE & 1 else 'no'}",
        f"IPC_LOCK {'yes' if capabilities >> _CAP_IPC_LOCK & 1 else 'no'}",
    ]


def shm_free_bytes(path: str = "/dev/shm") -> int | None:
    """Free bytes of the shared-memory file system, or None where there is none."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def _status() -> dict[str, str]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _capabilities() -> int:
    return int(_status().get("CapEff", "0"), 16)
