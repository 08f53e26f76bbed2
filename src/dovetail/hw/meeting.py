"""Ranks of a group that tell each other a few bytes before they do something together, and when they are done.

Both go through the CPU's engines: every rank sees the same bytes, a dead or late rank is an error there. Used by
whatever shares memory without a plan for it: tables of peers' addresses, operators that write into a peer's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.errors import DovetailError
from dovetail.hw.cpu import native
from dovetail.hw.cpu.executor import PlanRunner
from dovetail.hw.world import Group
from dovetail.plan import passes
from dovetail.plan.build import all_gather, rooted


class Meeting:
    """All members of `group` make one together, with the same `size_bytes` and `name`."""

    def __init__(
        self, group: Group, size_bytes: int, name: str, *, purpose: str, read: Callable[[bytes], str] | None = None
    ) -> None:
        """`purpose`: what the first meeting is for, as text; `read`: the call that a rank's bytes say, as text. Both
        are for errors."""
        import torch

        self.group, self.size_bytes = group, size_bytes
        host = group.world
        self._companion = host.companion(group, name, purpose)
        self._companion.read = read or (lambda _: purpose)
        mine = host.empty((size_bytes,), torch.uint8).zero_()
        everybody = host.empty((size_bytes * group.size,), torch.uint8)
        self._held = [mine, everybody]
        self._there: Any = memoryview(everybody.numpy())  # type: ignore[arg-type]
        companion = self._companion
        gather, meet = all_gather.pcpy(group.size, size_bytes), rooted.barrier(group.size)
        self._exchange = PlanRunner(companion, passes.entry(gather), check=False)
        self.fixed = self._exchange.fixed(self._held)  #: for native code that makes the same exchange
        self._meet = native.load().meet
        self._barrier = PlanRunner(companion, passes.entry(meet), check=False).blocking([])

    def exchange(self, mine: bytes) -> bytes:
        """Everybody's bytes, `size_bytes` of each rank. Blocks until all members are here.

        Raises:
            PeerError, Timeout: a rank is gone or silent; the group is broken.
        """
        self._run(self._met, mine, b"", ())
        return bytes(self._there)

    def repeat(self, mine: bytes, seen: bytes, copies: Sequence[int]) -> bytes | None:
        """As `exchange`; None if everybody's bytes are `seen`. `copies` (destination, source and bytes of each) are
        made first, so that members who are here can read them."""
        return None if self._run(self._met, mine, seen, copies) else bytes(self._there)

    def _met(self, mine: bytes, seen: bytes, copies: Sequence[int]) -> bool:
        return self._exchange.check(self._meet(*self.fixed, mine, seen, copies))

    def judge(self, status: int) -> bytes:
        """Everybody's bytes after an exchange that native code has made; or the error of one that failed."""
        self._run(self._exchange.check, status)
        return bytes(self._there)

    def barrier(self) -> None:
        """Returns when all members have called it: what they wrote to shared memory before can be read."""
        self._run(self._barrier)

    @property
    def is_limit_in_force(self) -> bool:
        """Whether the time limit is the group's, as it is behind every exchange that was made here."""
        return self._companion.timeout_s == self.group.timeout_s

    def _run(self, run: Callable[..., Any], *given: Any) -> Any:
        if self.group.broken is not None:
            raise self.group.broken
        if not self.is_limit_in_force:
            self._companion.set_timeout(self.group.timeout_s)
        try:
            return run(*given)
        except DovetailError as error:
            self.group.set_broken(error)
            raise

    def fail(self, error: DovetailError) -> None:
        """Breaks the group: this rank can't go on, and who waits for it is told at once."""
        self.group.set_broken(error)
        if self._companion.native is not None:
            self._companion.native.break_all(self.group.rank)

    def close(self) -> None:
        """Ends it on this rank; members that wait for it are told."""
        self._companion.close()
