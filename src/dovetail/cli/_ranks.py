"""How many ranks a command takes."""

from __future__ import annotations

FEWEST, MOST = 2, 64


def check(number: int | None) -> None:
    """Raises `ValueError` for a number of ranks that is given and out of bounds, before anything is started."""
    if number is not None and not FEWEST <= number <= MOST:
        raise ValueError(f"--ranks: {number} must be {FEWEST} to {MOST}")
