"""Ranks with GPUs that run plans together: how they agree on a run before any of them issues it.

Owns the handshake on the host. Each run begins with an exchange of slots (the call, where its buffers are) through the
CPU's engines: every rank sees the same slots and comes to the same verdict, a dead or late rank is an error there, and
nothing has moved. Entering is a second step, on the GPU: a rank's stream raises its entry word when it gets there, and
the peers' streams wait for that. So a rank may be far ahead of its GPU.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import DovetailError, MismatchError, PeerError
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.gpu.device import WORD_BYTES
from dovetail.hw.gpu.ticket import GpuTicket
from dovetail.hw.gpu.world import NOWHERE, GpuWorld
from dovetail.hw.world import Group
from dovetail.plan import passes
from dovetail.plan.build import all_gather

log = logging.getLogger("dovetail")

#: Buffers that a slot names: input, output, scratch.
POSTED = 3
#: Signals of one rank in a plan.
NUM_WORDS = 512


def slot_type(size: int) -> np.dtype[Any]:
    """What a rank posts; `params` holds split sizes."""
    return np.dtype(
        [
            ("call", "u8"),
            ("size_bytes", "u8"),
            ("on_heap", "u4"),
            ("staged", "u4"),
            ("num_params", "u8"),
            ("how", "u8", (POSTED,)),
            ("handle", "V64", (POSTED,)),
            ("offset", "u8", (POSTED,)),
            ("bytes", "u8", (POSTED,)),
            ("params", "i8", (4 * size,)),
        ]
    )


@dataclass(slots=True, kw_only=True)
class Post:
    """One rank's part of an exchange."""

    call: int
    size_bytes: int
    on_heap: bool
    staged: bool
    buffers: Sequence[tuple[int, int]]  #: (address, bytes) of input, output and scratch; address 0: none
    params: Sequence[int]


class Closable(Protocol):
    """What is closed with a group."""

    def close(self) -> None: ...


class GpuGroup:
    """The GPU side of a `Group`. All members make one together."""

    def __init__(self, group: Group, world: GpuWorld) -> None:
        import torch

        self.group, self.world = group, world
        self.lock = threading.RLock()
        self._pending: list[Future[Any]] = []
        self.last: GpuTicket | None = None
        self.runs = 0
        self._scratch: list[tuple[int, int]] = []
        self.calls: weakref.WeakSet[Closable] = weakref.WeakSet()  #: closed with the group
        host = group.world
        self._companion = host.companion(group, "gpu", "its first call with GPU tensors, or its first plan on GPUs")
        self._slot = slot_type(group.size)
        self._companion.read = self._said
        n = self._slot.itemsize
        self._mine = host.empty((n,), torch.uint8)
        self._all = host.empty((n * group.size,), torch.uint8)
        self._pair = [self._mine, self._all]
        self._here: NDArray[np.uint8] = self._mine.numpy()
        self._there: NDArray[np.uint8] = self._all.numpy()
        self._runner = PlanRunner(self._companion, passes.entry(all_gather.pcpy(group.size, n)), check=False)
        self._words = world.take_words(NUM_WORDS * WORD_BYTES)
        self.blocks = self._share_words()
        world.groups.add(self)

    def _share_words(self) -> dict[int, tuple[int, int]]:
        """Tells everybody where this rank's signal words are, and pins theirs; agrees on where runs count from."""
        native, ranks = self.group.world.native, self.group.ranks
        mine = self._here.view(self._slot)
        mine["offset"][0, 0] = self._words.data_ptr() - native.base(self.group.world.rank)
        mine["size_bytes"][0] = self.world.runs
        self._runner.run(self._pair)
        self.runs = int(self._there.view(self._slot)["size_bytes"].max())
        blocks = {}
        for r, world_rank in enumerate(ranks):
            offset = int(self._there.view(self._slot)["offset"][r, 0])
            host = self.world.pin_words(world_rank, offset, NUM_WORDS * WORD_BYTES)
            blocks[r] = (host, self.world.device.driver.device_pointer(host))
        return blocks

    def slot(self, post: Post) -> bytes:
        """What this rank posts for a call."""
        slots = np.zeros(1, self._slot)
        slot = slots[0]
        slot["call"], slot["size_bytes"] = post.call, post.size_bytes
        slot["on_heap"], slot["staged"], slot["num_params"] = post.on_heap, post.staged, len(post.params)
        for k in range(POSTED):
            address, size = post.buffers[k]
            how, handle, offset = self.world.name_of(address, size) if address and size else (NOWHERE, b"", 0)
            slot["how"][k], slot["offset"][k], slot["bytes"][k] = how, offset, size
            slot["handle"][k] = np.void(handle.ljust(64, b"\0"))
        slot["params"][: len(post.params)] = post.params
        return slots.tobytes()

    def exchange(self, slot: bytes) -> bytes:
        """Everybody's slots. Blocks until all ranks made their call; `agreed` tells whether they made the same.

        Raises:
            PeerError, Timeout: a rank is gone or silent; the group is broken.
        """
        if self.group.broken is not None:
            raise self.group.broken
        if self._companion.timeout_s != self.group.timeout_s:
            self._companion.set_timeout(self.group.timeout_s)
        self._here[:] = np.frombuffer(slot, np.uint8)
        try:
            self._runner.run(self._pair)
        except DovetailError as error:
            self.group.set_broken(error)
            raise
        self.runs += 1
        self.world.runs = max(self.world.runs, self.runs)
        return self._there.tobytes()

    def agreed(self, gathered: bytes) -> NDArray[np.void]:
        """The slots, if all ranks made the same call.

        Raises:
            MismatchError: they did not; nothing was moved and the group goes on.
        """
        slots = np.frombuffer(gathered, self._slot)
        mine = slots[self.group.rank]
        same = (slots["call"] == mine["call"]) & (slots["size_bytes"] == mine["size_bytes"])
        same &= slots["num_params"] == mine["num_params"]
        if not same.all():
            calls = self.calls_of(slots, {self.group.rank, int(np.argmin(same))})
            raise MismatchError(f"the ranks of {self.group} do not make the same call; nothing was moved", calls=calls)
        return slots

    def calls_of(self, slots: NDArray[np.void], ranks: Iterable[int]) -> dict[int, str]:
        """What these ranks called, for messages."""
        return {r: self._text(slots[r]) for r in sorted(ranks)}

    def _said(self, posted: bytes) -> str:
        return self._text(np.frombuffer(posted, self._slot)[0])

    def _text(self, slot: NDArray[np.void]) -> str:
        params = slot["params"][: int(slot["num_params"])].tolist()
        shown = {"call": int(slot["call"]), "size_bytes": int(slot["size_bytes"]), "params": params}
        return self.group.world.describe(shown, self.group.size)

    def gone(self, *, waiting: bool) -> DovetailError | None:
        """The error if a member has died or failed, or has closed the group while this rank waits for its words.

        A member closes after its own part is over: whoever waits for nothing any more is not hurt.
        """
        native = self._companion.native
        if self.group.broken is not None:
            return self.group.broken
        if native is None:
            return PeerError("the group was closed on this rank", rank=self.group.rank)
        for r, world_rank in enumerate(self.group.ranks):
            if r != self.group.rank and self.group.world.native.peer_dead(world_rank):
                return PeerError(f"rank {r} died; the group is broken: make a new one from the others", rank=r)
            if waiting and r != self.group.rank and native.closed(r):
                return PeerError(f"rank {r} closed the group; it is broken", rank=r)
        return self.gave_up()

    def gave_up(self) -> DovetailError | None:
        """The error if a member has ended a run early; it marks the group before it opens any wait."""
        native = self._companion.native
        if native is not None and (word := native.abort):
            reporter = word >> 24 & 0xFFFF
            return PeerError(f"the group failed on rank {reporter}", rank=reporter)
        return None

    def fail(self, error: DovetailError) -> None:
        """Breaks the group on every rank. Said at once: a call that has returned can't raise it any more."""
        if self.group.broken is None:
            log.error("rank %d: %s is broken: %s", self.group.rank, self.group, error)
        self.group.set_broken(error)
        if self._companion.native is not None:
            self._companion.native.break_all(self.group.rank)

    def later(self, job: Callable[[], Any]) -> Future[Any]:
        """Issues an asynchronous call of this group; closing the group cancels it if it has not begun."""
        future = self.world.issuer.later(job)
        self._pending = [*(p for p in self._pending if not p.done()), future]
        return future

    def settle(self) -> None:
        """Blocks the host until this rank's GPU is done with the runs of the group; raises the last one's error."""
        futures.wait(self._pending)
        if self.last is not None:
            self.last.wait()

    def scratch(self, size_bytes: int) -> int:
        """Memory of this rank that peers reach, at least this large. Runs follow each other: one block serves all."""
        if not size_bytes:
            return 0
        if not self._scratch or self._scratch[-1][1] < size_bytes:
            self._scratch.append((self.world.heap.alloc(size_bytes), size_bytes))  # runs in flight may use the old one
        return self._scratch[-1][0]

    def leave(self, deadline_s: float) -> None:
        """Gives up what is not over at `deadline_s`: the group is broken then, on every rank."""
        last = self.last
        if last is None:
            return
        with contextlib.suppress(DovetailError):  # the error of a run that is over, or the time is
            last.wait(max(0.0, deadline_s - time.monotonic()))
        if not last.is_over():  # runs before it are opened by the watchdog, since the group is broken
            last.abandon(DovetailError(f"rank {self.group.rank} left {self.group} after an error"))

    def close(self) -> None:
        """Ends it on this rank, after what is in flight."""
        for job in self._pending:
            job.cancel()
        if self.last is not None:
            self.last.give_up("was not fired before its group was closed")
            try:
                self.last.wait()
            except DovetailError:
                log.debug("the last run of %s failed", self.group, exc_info=True)
        self._companion.close()  # ends a call that waits for the others, so that its lock is free
        for call in list(self.calls):
            call.close()
        if self.group.broken is None:  # otherwise a late peer may still write there: both stay as they are
            for address, _ in self._scratch:
                self.world.heap.free(address)
            if self.blocks:
                self.world.give_words(self._words)
        else:
            self.world.device.keep(self._words)
        self._scratch, self.blocks = [], {}
