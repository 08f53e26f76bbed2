"""Shares of a GPU's multiprocessors: how many can be cut off, which bits of a mask they are, and the streams of one.

Knows no driver: whoever cuts (`green.py` on CUDA, `hip.py`) says how a stream of a share is made and destroyed.
Two shares of one split never have a multiprocessor in common.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from dovetail.errors import HardwareError, NotSupported


def rounded(number: int, total: int, *, least: int, step: int, least_rest: int = 1) -> int:
    """`number` rounded up to a share that can be cut off `total` multiprocessors.

    Args:
        least: what the smallest share has.
        step: shares are multiples of it.
        least_rest: what must be left for the others.

    Raises:
        NotSupported: `total` is too few for any cut.
        ValueError: `number` is below 1, or leaves too few.

    >>> rounded(12, 132, least=8, step=8)
    16
    """
    most = (total - least_rest) // step * step
    if most < least:
        raise NotSupported(f"{total} multiprocessors are too few to split: a share has {least} or more")
    if not 1 <= number <= most:
        raise ValueError(f"{number} of {total} multiprocessors can't be split off; 1 to {most} can, in steps of {step}")
    return max(least, -(-number // step) * step)


def mask_words(first: int, end: int, total: int) -> list[int]:
    """A mask of `total` bits in words of 32, with the bits `first` to `end` (not included) set.

    >>> [hex(word) for word in mask_words(8, 40, 64)]
    ['0xffffff00', '0xff']
    """
    bits = (1 << end) - (1 << first)
    return [bits >> at & 0xFFFF_FFFF for at in range(0, total, 32)]


class StreamShare:
    """A `driver.Share`: streams that one function makes and another destroys. From any thread, one at a time."""

    def __init__(
        self,
        num_cores: int,
        create: Callable[[int], int],
        destroy: Callable[[int], None],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """`create(priority)` makes a stream; `release` comes after the last `destroy`."""
        self.num_cores = num_cores
        self._create, self._destroy, self._release = create, destroy, release
        self._streams: list[int] = []
        self._lock = threading.Lock()  # a green context has none
        self._closed = False

    def stream(self, *, priority: int = 0) -> int:
        with self._lock:
            if self._closed:
                raise ValueError("this share of the multiprocessors is closed; split them again")
            made = self._create(priority)
            self._streams.append(made)
            return made

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            steps = [*(lambda s=stream: self._destroy(s) for stream in self._streams), self._release]
            self._streams = []
            _all(steps)


def _all(steps: list[Callable[[], None]]) -> None:
    """Takes every step, even if one fails; then raises the first failure."""
    failures = []
    for step in steps:
        try:
            step()
        except HardwareError as error:
            failures.append(error)
    if failures:
        raise failures[0]
