"""What else this machine did while a benchmark ran: a busy machine gives figures that are not to be trusted."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

BUSY_SHARE = 0.05
"""Above this share of the machine's time a run says that it was disturbed."""
_IDLE, _WAITING = 3, 4


class Others:
    """Counts from its making on. Own time is that of this process and of its children that have ended."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._began = (time.monotonic(), self._busy_s(), _own_s())

    def share(self) -> float | None:
        """The share of all cores' time that other processes, or other guests of the host, took; None if unknown."""
        now, busy_s, own_s = time.monotonic(), self._busy_s(), _own_s()
        began, busy_then_s, own_then_s = self._began
        if busy_s is None or busy_then_s is None or now <= began:
            return None
        others_s = (busy_s - busy_then_s) - (own_s - own_then_s)
        return min(max(others_s / ((now - began) * (os.cpu_count() or 1)), 0.0), 1.0)

    def _busy_s(self) -> float | None:
        try:
            first = self._stat.read_text().splitlines()[0].split()[1:9]
        except (OSError, IndexError):
            return None
        ticks = [int(word) for word in first]
        return (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
