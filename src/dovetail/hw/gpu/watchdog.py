"""A stream that waits can't give up; this thread does it for it.

Owns the runs of this process that may stand at a wait for somebody else. It looks at each now and then and, when its
time is over or its peer is gone, has the run opened from the host: the streams drain and the ticket says why. Also
keeps such a run's memory alive until it is over, whoever else forgets it. Started by the first run it is given.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("dovetail")

_LOOK_S = 0.02


class Watched(Protocol):
    """A run that may wait for somebody else."""

    def is_over(self) -> bool: ...
    def look(self) -> None:
        """Ends the run if it must end."""


class Watchdog:
    """Looks at runs until they are over."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter  #: called once in the thread, before it looks at anything
        self._runs: list[Watched] = []
        self._lock = threading.Lock()
        self._work = threading.Event()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, run: Watched) -> None:
        """Watches `run` until it is over. Wakes the thread only if it had nothing to do."""
        with self._lock:
            self._runs.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="dovetail watchdog", daemon=True)
                self._thread.start()
        if not self._work.is_set():
            self._work.set()

    def _serve(self) -> None:
        self._enter()
        while not self._end.wait(_LOOK_S):
            with self._lock:
                if not self._runs:
                    self._work.clear()
                runs = list(self._runs)
            if not runs:
                self._work.wait()
                continue
            over = {id(run) for run in runs if self._is_over(run)}
            if over:
                with self._lock:
                    self._runs = [r for r in self._runs if id(r) not in over]

    def _is_over(self, run: Watched) -> bool:
        try:
            if not run.is_over():
                run.look()
                return False
        except Exception:
            log.exception("a run can't be watched any more")
        return True

    def close(self) -> None:
        """Stops looking."""
        self._end.set()
        self._work.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)
