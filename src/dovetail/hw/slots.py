"""What a rank posts of a call, as text: for errors that show what each rank called.

Owns the number that plans made by hand have where collectives have theirs. What collectives' numbers mean is told by
whoever makes the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Describe = Callable[[dict[str, Any], int], str]
"""Turns what a slot shows (`call`, `size_bytes`, `params`) and the size of the group into the text of a call."""

#: No collective has this number.
PLAN_CALL = 0xFF


def describe_plan(slot: dict[str, Any], size: int) -> str:
    """Where there are no collectives."""
    word = slot["call"]
    return f"a plan (fingerprint {word >> 8:x})" if word & 0xFF == PLAN_CALL else f"collective number {word & 0xFF}"
