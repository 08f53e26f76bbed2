"""How large a communication is, and how often a computation is repeated, for their times to stand in a given ratio.

Pure functions of times that were measured once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dovetail.bench.overlap.spec import RATIOS

MOST_REPEATS = 128  #: all of them wait behind a gate together, and a stream takes a thousand launches
_LEAST_BYTES, _MOST_BYTES = 4 << 10, 192 << 20  # of a piece; in a direction
_STEPS = 4  # sizes from one power of two to the next


@dataclass(frozen=True, slots=True)
class Line:
    """The time of a communication by its size: `fixed_us + size_bytes / bytes_per_us`."""

    fixed_us: float
    bytes_per_us: float

    @staticmethod
    def through(small: tuple[int, float], large: tuple[int, float]) -> Line:
        """Two points (bytes, microseconds); one that is slower than the other in spite of its size tells no fixed."""
        rise = (large[1] - small[1]) / (large[0] - small[0])
        if rise <= 0:
            return Line(0.0, large[0] / large[1])
        return Line(max(small[1] - small[0] * rise, 0.0), 1 / rise)

    def size_bytes(self, time_us: float) -> float:
        """That takes so long."""
        return max(time_us - self.fixed_us, 0.0) * self.bytes_per_us


def piece_bytes(line: Line, want_us: float, num_pieces: int) -> int:
    """Of each of so many pieces in a direction: near what takes `want_us`, four to seven times a power of two."""
    wanted = min(line.size_bytes(want_us), _MOST_BYTES) / num_pieces
    if wanted <= _LEAST_BYTES:
        return _LEAST_BYTES
    step = (1 << math.floor(math.log2(wanted))) // _STEPS
    return math.floor(wanted / step + 0.5) * step


def repeats(unit_us: float, comm_us: float, ratio: float) -> int:
    """Of a computation of `unit_us`: comm_us over all of them is nearest to `ratio`, and within 1/4 to 4 if it can be.

    >>> repeats(10.0, 45.0, 2.0)
    2
    """
    wanted = comm_us / (ratio * unit_us)
    choices = {min(max(n, 1), MOST_REPEATS) for n in (math.floor(wanted), math.ceil(wanted))}

    def far(number: int) -> tuple[bool, float]:
        found = comm_us / (number * unit_us)
        return not RATIOS[0] <= found <= RATIOS[-1], abs(math.log(found / ratio))

    return min(choices, key=far)
