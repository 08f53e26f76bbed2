"""What an asynchronous call returns: a `Work` with c10d's methods and a `Ticket` that says who moved the bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dovetail.coll.bound import DONE, Bound
from dovetail.errors import DovetailError, Timeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """How a call was served."""

    collective: str
    variant: str  #: what ran
    reason: str  #: why it was chosen
    engine: str  #: who moved the bytes
    cores: int  #: compute cores that this took
    size_bytes: int


class Work:
    """A call in flight. Holds its tensors until it is over."""

    def __init__(self, bound: Bound, describe: Callable[[int], Ticket], tensors: tuple[Any, ...]) -> None:
        self._bound, self._describe, self._tensors = bound, describe, tensors
        self._native: Any = None
        self._callbacks: list[Callable[[Work], None]] = []
        self._lock = threading.Lock()
        self._over = False

    def attach(self, native: Any) -> None:
        """Gives it the native ticket; called once, by whoever started it."""
        self._native = native

    def wait(self, timeout: Any = None) -> bool:
        """Blocks until the call is over; raises its error.

        `timeout` (seconds or a timedelta) raises `Timeout` when it ends first and leaves the call running; the group's
        own timeout ends it.
        """
        seconds = -1.0 if timeout is None else float(getattr(timeout, "total_seconds", lambda: timeout)())
        status = self._native.wait(seconds)
        if status == 0:
            raise Timeout(f"the call was not over after {seconds:g} s; it goes on")
        if status != DONE:
            raise self._bound.fail(self._native.failure())
        return True

    def is_completed(self) -> bool:
        """True once the call is over, well or not."""
        return bool(self._native.status != 0)

    def is_success(self) -> bool:
        """True once the call is over and well."""
        return bool(self._native.status == DONE)

    def exception(self) -> DovetailError | None:
        """The error of a call that failed."""
        if self._native.status in (0, DONE):
            return None
        return self._bound.fail(self._native.failure())

    def fire(self) -> Work:
        """Opens the gate of an armed call: from now on peers may see its tensors."""
        self._native.fire()
        return self

    def add_done_callback(self, callback: Callable[[Work], None]) -> None:
        """Calls `callback(work)` when the call is over, in the thread that ends it; at once if it is over already."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> list[Any]:
        """The tensors of a call that is over."""
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Any:
        """A torch Future of `result()`, as c10d's Work has it."""
        import torch

        future: Any = torch.futures.Future()

        def settle(work: Work) -> None:
            error = work.exception()
            if error is None:
                future.set_result(list(work._tensors))
            else:
                future.set_exception(error)

        self.add_done_callback(settle)
        return future

    @property
    def ticket(self) -> Ticket:
        """Choice, reason, engine, bytes and cores. Final once the call is over."""
        return self._describe(self._native.choice)

    def _finished(self) -> None:
        with self._lock:
            self._over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
