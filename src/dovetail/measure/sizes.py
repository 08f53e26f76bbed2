"""Sizes as people write them: ``16M`` and back, and geometric ranges in the manner of nccl-tests.

Units are powers of 1024. A size is what one rank contributes, in bytes.
"""

from __future__ import annotations

from dovetail.env import parse_bytes

__all__ = ["approximate_bytes", "format_bytes", "geometric", "parse_bytes"]


def format_bytes(size_bytes: int) -> str:
    """``16777216`` -> ``'16M'``; what is no whole number of K is given in bytes, so that parsing gives it back."""
    if size_bytes < 0:
        raise ValueError(f"a size cannot be negative, got {size_bytes}")
    for shift, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "K")):
        if size_bytes >= 1 << shift and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{unit}"
    return str(size_bytes)


def geometric(begin: int | str, end: int | str, factor: float = 2) -> list[int]:
    """Sizes from `begin` to `end`, each `factor` times the one before; `end` is included when the steps meet it.

    The three are nccl-tests' ``-b``, ``-e`` and ``-f``: ``geometric("1K", "16M", 4)`` is 1K, 4K, ... 16M.

    Raises:
        ValueError: a size that is none, `begin` above `end`, or a factor that does not grow.
    """
    first = parse_bytes(begin) if isinstance(begin, str) else begin
    last = parse_bytes(end) if isinstance(end, str) else end
    if not 0 < first <= last:
        raise ValueError(f"sizes run from {begin} to {end}; the first must be above 0 and not above the last")
    if not factor > 1:
        raise ValueError(f"factor is {factor}; it must be above 1, such as 2 or 4")
    sizes = [first]
    while (size := max(sizes[-1] + 1, round(sizes[-1] * factor))) <= last:
        sizes.append(size)
    return sizes


def approximate_bytes(size_bytes: int) -> str:
    """``25274793984`` -> ``'23.5 GiB'``, for people to read; it is not meant to be parsed."""
    for shift, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 1 << shift:
            return f"{size_bytes / (1 << shift):.4g} {unit}"
    return f"{size_bytes} B"
