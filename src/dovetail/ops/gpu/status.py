"""Words between the kernels of a rank and its host: what a kernel has to report, and that it need not wait any more.

A kernel that waits for a peer can't see that the peer is dead. The host can: while kernels may run, the watchdog looks
at the group and at its members, and tells the kernels whom they need not wait for. They end, and the group is broken on
every rank.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import DovetailError, PeerError, Timeout
from dovetail.hw.world import Group

if TYPE_CHECKING:
    from dovetail.language import Addresses

log = logging.getLogger("dovetail")

#: The words. LATE and STOP are those of `kernels.protocol`.
LATE, WRONG_ROW, STOP = range(3)
#: What `kernels.protocol` calls what a rank waits for.
_WHAT = ("begin its part", "finish its part", "send a slice", "copy its rows")
#: Kernels are watched so long after the last one has ended: the next one comes soon.
_LINGER_S = 1.0
_PAUSE_S = 0.01
_ALL_BITS = 1 << 63


class Status:
    """The words of one rank's kernels in a group, and who looks at them."""

    def __init__(self, group: Group, addresses: Addresses) -> None:
        self._group, self._addresses = group, addresses
        self.words = torch.zeros(3, dtype=torch.int64, pin_memory=addresses.device.type != "cpu")
        self._array: NDArray[np.int64] = self.words.numpy()
        self._lock = threading.Lock()
        self._watched = False
        self._event: Any = None  # behind the last kernel
        self._running = False  # a kernel, under the interpreter
        self._for_ever = False
        self._until = 0.0
        self._told = False

    # --- for the rank's own thread

    def begun(self, event: Any = None, *, captured: bool = False) -> None:
        """A kernel runs until `event` has happened; without one until `ended`. One that was captured may run at any
        time."""
        with self._lock:
            self._event, self._running = event, event is None and not captured
            self._for_ever |= captured
            self._until = time.monotonic() + _LINGER_S
            if not self._watched:
                self._watched = True
                self._addresses.watchdog.add(_Watch(self))

    def ended(self) -> None:
        """The kernel without an event has."""
        self._running = False

    @property
    def is_quiet(self) -> bool:
        """Whether no kernel has anything to report."""
        return not (self._array[LATE] or self._array[WRONG_ROW])

    def take_wrong_row(self) -> int:
        """1 + the place of a value that names no row, reported once; 0 if there is none."""
        found = int(self._array[WRONG_ROW])
        self._array[WRONG_ROW] = 0
        return found

    def error(self) -> DovetailError | None:
        """What the kernels' first failed wait comes to."""
        late = int(self._array[LATE])
        if not late:
            return None
        if self._group.broken is not None:
            return self._group.broken
        what, rank = late // 65536 - 1, late % 65536
        void = "this rank's result is void"
        if rank != self._group.rank and self._group.world.native.peer_dead(self._group.ranks[rank]):
            text = f"rank {rank} of {self._group} died and did not {_WHAT[what]} of a fused operator; {void}"
            return PeerError(text, rank=rank)
        native = self._group.native
        if native is not None and (word := native.abort):
            reporter = word >> 24 & 0xFFFF
            return PeerError(f"{self._group} failed on rank {reporter} in a fused operator; {void}", rank=reporter)
        return Timeout(
            f"rank {rank} of {self._group} did not {_WHAT[what]} of a fused operator within about "
            f"{self._group.timeout_s:g} s; {void}"
        )

    def tell(self, error: DovetailError) -> None:
        """Breaks the group on every rank, once; who waits for this one is told at once, in a meeting or a kernel."""
        with self._lock:
            told, self._told = self._told, True
        if told:
            return
        if self._group.broken is None:
            log.error("rank %d: %s is broken: %s", self._group.rank, self._group, error)
        self._addresses.fail(error)
        if self._group.ops is not None:
            self._group.ops.tell(error)
        if self._group.native is not None:
            self._group.native.break_all(self._group.rank)
        self._array[STOP] = -1

    def leave(self, deadline_s: float) -> None:
        """Gives up what is not over at `deadline_s` (of the monotonic clock)."""
        event = self._event
        while event is not None and not event.query():
            if time.monotonic() > deadline_s:
                self.tell(DovetailError(f"rank {self._group.rank} left {self._group} after an error"))
                return
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """No kernel runs any more."""
        with self._lock:
            self._event, self._running, self._for_ever, self._until = None, False, False, 0.0

    # --- for the watchdog

    def rests(self) -> bool:
        """Whether no kernel has run for a while: it need not be looked at until the next one begins."""
        if self._array[LATE] and not self._told and (error := self.error()) is not None:
            self.tell(error)
        with self._lock:
            busy = self._running or self._for_ever or not (self._event is None or self._event.query())
            if busy or time.monotonic() < self._until:
                return False
            self._watched = False
            return True

    def look(self) -> None:
        """Tells kernels whom they need not wait for."""
        gone = self._gone()
        if gone != self._array[STOP]:
            self._array[STOP] = gone

    def _gone(self) -> int:
        """A bit for each rank: those that died, or all if the group is broken. Who died after its part is not waited
        for, so kernels that need it no more go on."""
        native = self._group.native
        if self._group.broken is not None or native is None or native.abort:
            return -1
        dead = 0
        with contextlib.suppress(DovetailError):  # the world was closed
            for rank, in_world in enumerate(self._group.ranks):
                if rank != self._group.rank and self._group.world.native.peer_dead(in_world):
                    dead |= 1 << rank
        return dead if dead < _ALL_BITS else -1


class _Watch:
    """One time of being watched: the watchdog tells them apart."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def is_over(self) -> bool:
        return self._status.rests()

    def look(self) -> None:
        self._status.look()
