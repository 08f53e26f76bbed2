"""Host memory for KV blocks: slots of one size, in pieces that are faulted in and, if asked, pinned.

A *slot* holds one block of all layers, contiguously. A *piece* is one mapping and one registration: a copy may not
span two of them (not even where their addresses adjoin), so no slot does. Owns the mappings and their registration;
who may use a slot is the pool's business. Either all of it is there or none: what fails half way is taken back.

Nothing reaches a disk from here: the memory is anonymous and left out of core dumps. The kernel may swap memory that
is not pinned. A forked child sees zeros, and its `HostMemory` is dead: pinned pages would be copied at the fork.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import HardwareError
from dovetail.hw import memory
from dovetail.measure.machine import memlock_bytes
from dovetail.measure.sizes import approximate_bytes

if TYPE_CHECKING:
    from dovetail.hw.gpu.driver import Driver

PIECE_BYTES = 1 << 30
_MOST_THREADS = 16
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which Python's mmap does not name
_ADVICE = (mmap.MADV_HUGEPAGE, mmap.MADV_DONTDUMP, _WIPE_ON_FORK)

# Mappings that something may still write, or that a driver would not let go: never unmapped.
_abandoned: list[mmap.mmap] = []


class Pinner(Protocol):
    """Makes host memory reachable for the engines of a GPU."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pins it; raises `HardwareError` if the driver refuses."""

    def unregister(self, address: int) -> None: ...


class DriverPinner:
    """Pins through a GPU driver. `enter` makes a device current in the calling thread (`Device.enter`)."""

    def __init__(self, driver: Driver, enter: Callable[[], None] | None = None) -> None:
        self._driver, self._enter = driver, enter or (lambda: None)

    def register(self, address: int, size_bytes: int) -> None:
        self._enter()
        self._driver.host_register(address, size_bytes)

    def unregister(self, address: int) -> None:
        self._enter()
        self._driver.host_unregister(address)


@dataclass(slots=True, eq=False)
class Piece:
    """One mapping: the slots from `first_slot` on."""

    first_slot: int
    num_slots: int
    base: int
    size_bytes: int  #: mapped and registered: whole pages
    mapping: mmap.mmap
    pinned: bool = False


class HostMemory:
    """`num_slots` slots of `slot_bytes`. `with HostMemory(...) as memory:`, or `close()`.

    Args:
        piece_bytes: a piece holds as many whole slots as fit into this, and at least one.
        pinner: pins each piece; None leaves the memory pageable.

    Raises:
        HardwareError: there is not enough memory, or a piece could not be pinned; nothing is left behind.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, piece_bytes: int = PIECE_BYTES, pinner: Pinner | None = None
    ) -> None:
        self._pieces: list[Piece] = []
        for name, given in (("num_slots", num_slots), ("slot_bytes", slot_bytes), ("piece_bytes", piece_bytes)):
            if given < 1:
                raise ValueError(f"{name} is {given}; it must be 1 or more")
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self.slots_per_piece = min(num_slots, max(1, piece_bytes // slot_bytes))
        self._pinner, self._pid = pinner, os.getpid()
        self._require()
        try:
            self._map()
            self._pin()
        except BaseException as error:
            try:
                self.close()
            except HardwareError as left:
                error.add_note(f"and {len(self._pieces)} pieces stay pinned until the process ends: {left.__cause__}")
                self.abandon()
            raise
        self._bases = np.array([piece.base for piece in self._pieces], np.uint64)

    @property
    def size_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.slot_bytes

    @property
    def pinned(self) -> bool:
        """True if engines reach it."""
        return self._pinner is not None

    @property
    def pieces(self) -> Sequence[Piece]:
        """In the order of their slots; empty once closed."""
        return tuple(self._pieces)

    # --- where slots are

    def address(self, slot: int) -> int:
        """Of the first byte of a slot."""
        return int(self.addresses(np.array([slot]))[0])

    def addresses(self, slots: NDArray[np.int64] | Sequence[int]) -> NDArray[np.uint64]:
        """Of the first byte of each slot."""
        self.ensure_open()
        piece, within = np.divmod(checked_slots(slots, self.num_slots), self.slots_per_piece)
        found: NDArray[np.uint64] = self._bases[piece] + within.astype(np.uint64) * np.uint64(self.slot_bytes)
        return found

    def piece_of(self, slots: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
        """The number of the piece that each slot lies in."""
        return checked_slots(slots, self.num_slots) // self.slots_per_piece

    def boundaries(self) -> NDArray[np.uint64]:
        """The addresses, ascending, where a piece begins or ends: a copy must be split at those inside it."""
        self.ensure_open()
        return np.unique([at for piece in self._pieces for at in (piece.base, piece.base + piece.size_bytes)]).astype(
            np.uint64
        )

    def view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a slot, to read and write; its mapping lives as long as the view."""
        self.ensure_open()
        piece, within = divmod(int(checked_slots([slot], self.num_slots)[0]), self.slots_per_piece)
        return np.frombuffer(self._pieces[piece].mapping, np.uint8, self.slot_bytes, within * self.slot_bytes)

    @property
    def is_forked(self) -> bool:
        """True in a forked child, where it is of no use."""
        return os.getpid() != self._pid

    def ensure_open(self) -> None:
        """Raises `HardwareError` in a forked child, and once it is closed."""
        if self.is_forked:
            raise HardwareError("this memory belongs to the parent process: a forked child must make its own")
        if not self._pieces:
            raise HardwareError(f"this memory of {self.num_slots} slots is closed: make a new one")

    # --- making it and giving it back

    def _require(self) -> None:
        left = memory.available_bytes()
        if left is not None and self.size_bytes > left:
            raise HardwareError(
                f"no memory for {self.num_slots} slots of {self.slot_bytes} bytes: that is "
                f"{approximate_bytes(self.size_bytes)}, and {approximate_bytes(left)} are available on this machine "
                "(or container); ask for fewer slots, or raise the container's memory limit"
            )

    def _map(self) -> None:
        for first in range(0, self.num_slots, self.slots_per_piece):
            number = min(self.slots_per_piece, self.num_slots - first)
            size = -(-number * self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            try:
                mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:
                raise HardwareError(
                    f"mapping {approximate_bytes(size)} for slots {first} to {first + number - 1} of "
                    f"{self.num_slots} failed ({error.strerror}): ask for fewer slots, or raise `ulimit -v`"
                ) from error
            base = np.frombuffer(mapping, np.uint8).ctypes.data
            self._pieces.append(Piece(first, number, base, size, mapping))
            for advice in _ADVICE:
                with contextlib.suppress(OSError):  # a kernel without it: slower, no less right
                    mapping.madvise(advice)
        # A driver that pins would fault pages in one by one, in one thread.
        threads = min(len(self._pieces), len(os.sched_getaffinity(0)), _MOST_THREADS)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_touch, [piece.mapping for piece in self._pieces]))

    def _pin(self) -> None:
        if self._pinner is None:
            return
        for number, piece in enumerate(self._pieces):
            try:
                self._pinner.register(piece.base, piece.size_bytes)
            except (HardwareError, OSError) as error:
                raise HardwareError("\n".join(self._refusal(number, piece.size_bytes, error))) from error
            piece.pinned = True

    def _refusal(self, number: int, size_bytes: int, error: Exception) -> Iterator[str]:
        asked = sum(piece.size_bytes for piece in self._pieces)
        pinned = sum(piece.size_bytes for piece in self._pieces if piece.pinned)
        lock, left = memlock_bytes(), memory.available_bytes()
        yield (
            f"pinning {approximate_bytes(asked)} of host memory failed at piece {number} of {len(self._pieces)} "
            f"({approximate_bytes(size_bytes)}), {approximate_bytes(pinned)} were pinned and are given back: {error}"
        )
        yield (
            f"  limits: memlock {'unlimited' if lock is None else approximate_bytes(lock)}, "
            f"memory available {'unknown' if left is None else approximate_bytes(left)} beside this memory"
        )
        yield (
            "  raise memlock (`ulimit -l unlimited`, `docker run --ulimit memlock=-1`) or the container's memory "
            "limit, ask for fewer slots, or pass pinner=None for pageable memory that only the CPU copies"
        )

    def close(self) -> None:
        """Unpins and unmaps, the last piece first; a view keeps its own mapping. Safe to call twice.

        Nothing may copy to or from it any more. Not to be called by two threads at once.

        Raises:
            HardwareError: the driver kept pieces; they stay mapped, and the next call tries again.
        """
        if self.is_forked:
            return
        refused: list[tuple[Piece, Exception]] = []
        while self._pieces:
            piece = self._pieces.pop()
            try:
                if piece.pinned and self._pinner is not None:
                    self._pinner.unregister(piece.base)
                piece.pinned = False
            except (HardwareError, OSError) as error:
                refused.insert(0, (piece, error))
                continue
            with contextlib.suppress(BufferError):  # it goes with the last view
                piece.mapping.close()
        if refused:
            self._pieces = [piece for piece, _ in refused]
            size = sum(piece.size_bytes for piece in self._pieces)
            raise HardwareError(
                f"{len(refused)} pieces ({approximate_bytes(size)}) could not be unpinned and stay mapped: "
                f"{refused[0][1]}; finish the copies that use them and call close() again"
            ) from refused[0][1]

    def abandon(self) -> None:
        """Leaves it mapped and pinned until the process ends: something may still write it, and nobody can tell."""
        _abandoned.extend(piece.mapping for piece in self._pieces)
        self._pieces = []

    def __enter__(self) -> HostMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._pieces or self.is_forked:
            return
        try:
            self.close()
        except HardwareError:
            self.abandon()
        warnings.warn(f"{self.num_slots} slots of host memory were not closed", ResourceWarning)


def checked_slots(slots: NDArray[np.int64] | Sequence[int], num_slots: int) -> NDArray[np.int64]:
    """Slot numbers as an array, all of them between 0 and `num_slots`."""
    given = np.asarray(slots)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(f"slots are a row of whole numbers, not {given.dtype} of shape {given.shape}")
    wrong = given[(given < 0) | (given >= num_slots)]
    if wrong.size:
        raise ValueError(f"slot {wrong[0]} is none of this memory: its slots are 0 to {num_slots - 1}")
    return given.astype(np.int64, copy=False)


def _touch(mapping: mmap.mmap) -> None:
    np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE] = 0
