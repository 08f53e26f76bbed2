"""The path `auto` for one mover: what can run here, what is known of a request, and whose time is learned from.

Owns the rule of which times count. A transfer is timed only if nothing of the mover was under way when it began, and
its time is dropped if one of the other direction begins before it is over: those share the link. So at most one is
watched at a time. Whether its time is there is looked at when the next transfer is submitted; nothing waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any, Protocol

from dovetail.hw.gpu.device import Device
from dovetail.kv import costs as measured
from dovetail.kv import staging
from dovetail.kv.choose import BY_STAGING, VECTOR_BYTES, Choice, Costs, Path, Shape, estimate, is_aligned
from dovetail.kv.learn import Learner, Request
from dovetail.kv.planner import Direction, Form, Table

_MOST_SHAPES = 4096  # whose estimates are kept


class Timed(Protocol):
    """A transfer with its time."""

    direction: Direction
    choice: Choice
    time_us: float

    def is_over(self) -> bool: ...


class Auto:
    """Chooses and learns. Called by one thread, as the mover is."""

    def __init__(
        self,
        device: Device,
        cache: int,
        costs: Costs | None,
        paths: Collection[Path | str],
        *,
        has_launch: bool,
        learn: bool,
    ) -> None:
        """For a cache at an address; `has_launch`: staged has a kernel, whether or not Triton is here."""
        self._device, self._cache, self._costs = device, cache, costs
        self._paths = frozenset(Path(path) for path in paths)
        self._has_launch, self._learn = has_launch, learn
        self._learner = Learner()
        self._requests: dict[tuple[Direction, bool, int, int, frozenset[Path]], Request] = {}
        self._watched: tuple[Timed, Request | None] | None = None

    def choose(
        self, direction: Direction, table: Table, *, beside: bool, is_clear: Callable[[], bool]
    ) -> tuple[Choice, Request | None]:
        """The path, and what learns from the transfer: nothing if others are under way (not `is_clear`)."""
        request = self._request(direction, table, beside, self._able)
        if not BY_STAGING.isdisjoint(request.near()) and not self._can_stage(table):
            request = self._request(direction, table, beside, self._able - BY_STAGING)
        is_timed = self._learn and table.size_bytes > 0 and request.is_due() and is_clear()
        return request.choose(is_timed=is_timed), request if is_timed else None

    def watch(self, transfer: Timed, request: Request) -> None:
        """Its time is noted when it is over."""
        self._watched = transfer, request

    def look(self, direction: Direction) -> None:
        """To be called before a transfer begins: takes the time of the one that is watched, if that is over."""
        if self._watched is None:
            return
        transfer, request = self._watched
        if transfer.is_over():
            self._watched = None
            if request:
                request.note(transfer.choice.path, transfer.time_us)
        elif transfer.direction is not direction:  # one of its own direction comes behind it
            self._watched = transfer, None

    def leave_out(self, paths: Collection[Path]) -> None:
        """They are not taken any more."""
        self._paths -= frozenset(paths)
        vars(self).pop("_able", None)  # to be found anew

    def _request(self, direction: Direction, table: Table, beside: bool, paths: frozenset[Path]) -> Request:
        """A shape that was seen before is estimated once."""
        key = (direction, beside, table.size_bytes, table.num_rows, paths)
        found = self._requests.get(key)
        if found is None:
            if self._costs is None:
                self._costs = measured.current(self._device.driver.name, self._device.name)
            if len(self._requests) >= _MOST_SHAPES:
                self._requests.clear()
            shape = Shape.of(table)
            known = estimate(direction, shape, self._costs, beside=beside, paths=paths)
            found = self._requests[key] = self._learner.request(direction, beside, shape, paths, known)
        return found

    @property
    def can_stage(self) -> bool:
        """May it take a path by staging memory?"""
        return not BY_STAGING.isdisjoint(self._able)

    @functools.cached_property
    def _able(self) -> frozenset[Path]:
        """The paths that may be taken here."""
        caps = self._device.caps
        paths = self._paths if caps.batched_copy else self._paths - {Path.DMA_BATCH}
        staged = not self._cache % VECTOR_BYTES and caps.stream_gates and (self._has_launch or staging.has_kernel())
        return paths if staged else paths - BY_STAGING

    def _can_stage(self, table: Table) -> bool:
        """Can the kernel move these rows, and do any of them gain by it?"""
        gains = gains_by_staging(table.form or table, staging.CHUNK_BYTES)
        return bool(gains if table.form else gains.any()) and is_aligned(table)


def gains_by_staging(of: Table | Form, chunk_bytes: int) -> Any:
    """Which copies of a table do, or if those of a form do: rows contiguous on the host only, several to a chunk."""
    return (of.rows > 1) & (of.host_pitch == of.width) & (of.width <= chunk_bytes // 2)
