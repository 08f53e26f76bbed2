"""The slots of a window in device memory: which item lies in which, who has it, and which one goes next.

Pure bookkeeping. A slot that is lent is never given to another item; of the others the empty ones go first, then the
one that was used longest ago. What its users still have under way stays noted in the slot, for the next copy into it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from dovetail.errors import DovetailError
from dovetail.kv.mover import Transfer
from dovetail.kv.order import Users


class WindowFull(DovetailError):
    """All slots that could be given away are lent; nothing has changed."""


@dataclass(slots=True, eq=False)
class Slot:
    """Room for one item."""

    number: int
    key: Hashable = None
    filled: bool = False  #: `key` lies in it, or is on its way
    lent: int = 0  #: how often
    used: int = 0  #: when, by the window's count
    users: Users = field(default_factory=dict)  #: who may still use what lies in it
    fetch: Transfer | None = None  #: the latest one: it writes the slot
    store: Transfer | None = None  #: the latest one: it reads the slot


class Window:
    """`num_slots` slots, all empty."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a window needs at least one slot, not {num_slots}")
        self.slots = [Slot(number) for number in range(num_slots)]
        self._of: dict[Hashable, Slot] = {}
        self._count = 0

    @property
    def keys(self) -> list[Hashable]:
        """Of the items in the window, in the order of their slots."""
        return [slot.key for slot in self.slots if slot.filled]

    def find(self, key: Hashable) -> Slot | None:
        """Where an item lies."""
        return self._of.get(key)

    def room(self, keys: Sequence[Hashable]) -> list[Slot]:
        """Slots for those of the items that are not in the window, ascending. Changes nothing.

        Raises:
            ValueError: more items than slots.
            WindowFull: too many of them are lent.
        """
        if len(keys) > len(self.slots):
            raise ValueError(f"{len(keys)} items are asked for at once, the window has {len(self.slots)} slots")
        there = [self._of[key] for key in keys if key in self._of]
        needed = len(keys) - len(there)
        able = [slot for slot in self.slots if not slot.lent and slot not in there]
        if needed > len(able):
            lent = ", ".join(repr(slot.key) for slot in self.slots if slot.lent)
            raise WindowFull(
                f"{needed} slots are needed, {len(able)} of {len(self.slots)} can be had; lent are {lent}: call done() "
                "or store() on those that are no longer used, or make a window of more slots"
            )
        able.sort(key=lambda slot: (slot.filled, slot.used))
        return sorted(able[:needed], key=lambda slot: slot.number)

    def empty(self, slot: Slot) -> None:
        """What lies in it is no longer found."""
        if slot.filled:
            del self._of[slot.key]
        slot.filled, slot.key = False, None

    def fill(self, slot: Slot, key: Hashable) -> None:
        """An item is on its way into an empty slot."""
        slot.key, slot.filled = key, True
        self._of[key] = slot

    def lend(self, key: Hashable) -> Slot:
        """Somebody uses an item of the window; in which slot it lies."""
        slot = self._of[key]
        slot.lent += 1
        self._touch(slot)
        return slot

    def take_back(self, slot: Slot) -> None:
        """One of them is done."""
        slot.lent -= 1
        self._touch(slot)

    def _touch(self, slot: Slot) -> None:
        self._count += 1
        slot.used = self._count
