"""The thread that issues asynchronous calls: agreeing with the other ranks blocks, the caller must not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Issuer:
    """Issues the calls of a rank in order: inline while nothing asynchronous is pending, else behind it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[Any] | None = None

    def run(self, job: Callable[[], Any]) -> Any:
        """Runs a job now, after those that are pending."""
        if self._pending is not None and not self._pending.done():
            assert self._thread is not None
            return self._thread.submit(job).result()
        return job()

    def later(self, job: Callable[[], Any]) -> Future[Any]:
        """Runs a job in the thread; the future is cancelled if the issuer is closed before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="dovetail issue")
        self._pending = self._thread.submit(job)
        return self._pending

    def close(self) -> None:
        """Waits for nothing: what is pending ends with an error of its own."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
