"""What users call: one runtime for each device, made when it is first needed."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from dovetail.hw.gpu.device import Device
from dovetail.overlap import policy
from dovetail.overlap.runtime import Outcome, Runtime
from dovetail.overlap.strategy import AUTO
from dovetail.overlap.tasks import Communication, Computation, check

_lock = threading.Lock()
_runtimes: dict[int, Runtime] = {}


def runtime(device: Device | None = None) -> Runtime:
    """The runtime of a device (None: the CPU), made when first asked for."""
    with _lock:
        found = _runtimes.get(id(device))
        if found is None:
            found = _runtimes[id(device)] = Runtime(device)
        return found


def _drop_after_fork() -> None:
    """A child has none of its parent's threads and contexts."""
    _runtimes.clear()


os.register_at_fork(after_in_child=_drop_after_fork)


def explain(compute: Computation | Callable[[], Any] | None, comm: Communication) -> policy.Ranking:
    """What `auto` would choose for a pair that is new, and why; nothing runs. None: a computation of unknown length.

    `.choice` is the setting, `.reason` says why, `.predictions` has the estimates.
    """
    check(comm)
    return runtime(comm.device).explain(compute, comm)


def run(
    compute: Computation | Callable[[], Any], comm: Communication, strategy: str = AUTO, *, cores: int = 0
) -> Outcome:
    """Runs a communication beside a computation.

    On a GPU both begin behind torch's current stream, which goes on behind both; the call returns at once. On a CPU
    both are over when it returns. All ranks of the communication's group must make the same calls.

    Args:
        compute: launches work on torch's current stream; a callable, or a `Computation`, which may say what is known.
        comm: a `Collective`, a `LocalCommunication`, or anything of that protocol.
        strategy: "auto" or one of `dovetail.overlap.Strategy`.
        cores: for a strategy that was asked for: how many cores move the bytes, or the computation goes without.

    Raises:
        ValueError, NotSupported: an unknown strategy, or one that can't run here; nothing was started.
    """
    found = _runtimes.get(id(getattr(comm, "device", None)))  # without the lock, which only who makes one needs
    if found is None:
        check(comm)
        found = runtime(comm.device)
    return found.run(compute, comm, strategy, cores=cores)


def beside(
    comm: Communication, strategy: str = AUTO, *, cores: int = 0, name: str = ""
) -> contextlib.AbstractContextManager[Outcome]:
    """A communication that runs beside what is launched inside a `with`, and is waited for at its end.

    On a GPU it is torch's current stream that waits, not the host. `name` is by which the computation is known; by
    default the place of the call.
    """
    if not name and strategy == AUTO:
        caller = sys._getframe(1)
        name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    check(comm)
    return runtime(comm.device).beside(comm, strategy, cores=cores, name=name)


def close() -> None:
    """Gives back what `run` and `beside` have made; they make it anew."""
    with _lock:
        for made in _runtimes.values():
            made.close()
        _runtimes.clear()
