"""Which stored blocks go first when the pool is full.

A policy keeps an order of keys and nothing else: it knows neither slots nor who reads a block. The pool calls it with
its lock held, so a policy needs none of its own and may not call the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol


class Policy(Protocol):
    """What the pool tells and asks. `keys` are those of one request, in the order of its prefix."""

    def inserted(self, keys: Sequence[bytes]) -> None:
        """Blocks can be fetched from now on."""

    def touched(self, keys: Sequence[bytes]) -> None:
        """Blocks are fetched, or stored as a part of this request, perhaps by an earlier one."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Blocks are gone."""

    def victims(self, number: int, allowed: Callable[[bytes], bool]) -> Sequence[bytes]:
        """At most `number` keys for which `allowed` says true, the first to go first; changes nothing."""


class LRU:
    """The least recently used block goes first; of one request the last, which is of no use without those before."""

    def __init__(self) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def inserted(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def touched(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._order.move_to_end(key)

    def removed(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self._order[key]

    def victims(self, number: int, allowed: Callable[[bytes], bool]) -> Sequence[bytes]:
        found: list[bytes] = []
        for key in self._order:
            if len(found) >= number:
                break
            if allowed(key):
                found.append(key)
        return found
