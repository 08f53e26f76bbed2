"""The thread that issues asynchronous calls: agreeing with the other ranks blocks, the caller must not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dovetail.errors import DovetailError


class Issuer:
    """Issues the calls of a rank in order: inline while nothing asynchronous is pending, else behind it.

    The thread is a daemon, which an executor's is not: a rank that leaves with an error while a call of it waits for
    the others must not stay alive until that wait times out, since its peers take it for one that still comes.
    """

    def __init__(self, enter: Callable[[], None] = lambda: None) -> None:
        """`enter` is called once in the thread."""
        self._enter = enter
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._pending: Future[Any] | None = None
        self._closed = False

    def run(self, job: Callable[[], Any]) -> Any:
        """Runs a job now, after those that are pending."""
        if self._pending is not None and not self._pending.done():
            return self._put(job).result()
        return job()

    def later(self, job: Callable[[], Any]) -> Future[Any]:
        """Runs a job in the thread; the future is cancelled if the issuer is closed before."""
        self._pending = self._put(job)
        return self._pending

    def _put(self, job: Callable[[], Any]) -> Future[Any]:
        if self._closed:
            raise DovetailError("the GPU side of this world is closed: no call can be issued")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="dovetail issue", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _serve(self) -> None:
        self._enter()
        while (item := self._jobs.get()) is not None:
            future, job = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, job  # or the last call's tensors would live until the next

    def close(self) -> None:
        """Waits for nothing: what is pending ends with an error of its own."""
        self._closed = True
        while True:
            try:
                item = self._jobs.get_nowait()
            except queue.Empty:
                break
            if item is not None:
                item[0].cancel()
                item[0].set_running_or_notify_cancel()
        self._jobs.put(None)
