"""What the kernels of one group of ranks have in common: words, tables, agreement on a call, launches, failures.

Owns the memory that ranks share (signals, staging) and the tables of tiles on the device; which operators there are is
not its business. Nothing collective happens in a destructor.
"""

from __future__ import annotations

import logging
import math
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import DovetailError, MismatchError, NotSupported
from dovetail.hw import memory
from dovetail.hw.cpu import native
from dovetail.hw.gpu import tensors
from dovetail.hw.world import Group
from dovetail.language import Addresses, Symmetric
from dovetail.language.symmetric import gpu_world, indexed
from dovetail.ops.gpu import tiles
from dovetail.ops.gpu.launcher import Again, Launcher
from dovetail.ops.gpu.part import Part
from dovetail.ops.gpu.status import WRONG_ROW, Status
from dovetail.ops.gpu.tables import Tables
from dovetail.ops.gpu.tiles import Blocks
from dovetail.ops.group import WrongRow

log = logging.getLogger("dovetail")

T = TypeVar("T")
Meet = Callable[[int], list[tuple[int, ...]]]
NO_TABLE = torch.empty(0, dtype=torch.int64)

#: Looks per second of a kernel that waits, at most: so a wait is not shorter than the group's timeout.
_LOOKS_PER_S = 2_000_000
_INTERPRETED_LOOKS_PER_S = 5_000
_TEXT_BYTES = 160
#: Tables of tiles, and counters, that are kept for shapes and splits seen before.
_MOST_ROWS = 256
#: Words of a call on this rank alone: those of `kernels.protocol`.
LOCAL_WORDS = 4
_INTERPRETED = Blocks(height=16, width=32, depth=32, group=2, warps=4, stages=1)


class Repeats(Protocol):
    """A call that can be made again in few steps, and keeps memory that calls share."""

    def forget(self) -> None:
        """Lets it go."""


@dataclass(slots=True)
class State:
    """What the ranks share for calls of one kind. Its runs follow each other."""

    signals: Symmetric
    local: torch.Tensor
    stage: Symmetric | None  #: where peers store parts, of any shape that has room there
    result: Symmetric | None  #: where they store what a call then copies to its output
    sizes: tuple[int, int, int]  #: words, items of the stage, items of the result

    def has(self, sizes: Sequence[int]) -> bool:
        """Whether it is so large."""
        return all(need <= have for need, have in zip(sizes, self.sizes, strict=True))


@dataclass(slots=True)
class Rows:
    """A table of tiles on the device, and counters that only kernels with this table use."""

    blocks: Blocks
    tiles: torch.Tensor
    segments: torch.Tensor
    slice_tiles: torch.Tensor
    counters: torch.Tensor
    even: bool


class Shared:
    """The kernels of a group on one kind of device. All members make one together.

    Args:
        programs: of each kernel; as many as this rank may have by default.
        blocks: the tiles of every GEMM; chosen by shape by default.

    Raises:
        NotSupported: more programs than this rank's share of the GPU, or no Triton for this device.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device | str,
        *,
        programs: int | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        self.group, self.device = group, indexed(device)
        self._interpreted = prepare(group, self.device)
        self._addresses = Addresses.of(group, self.device)
        self.part = Part.of(self._addresses, group.rank, self.device, programs, interpreted=self._interpreted)
        self._blocks = blocks or (_INTERPRETED if self._interpreted else None)
        self._states: dict[Hashable, State] = {}
        self._outgrown: list[Symmetric] = []  # signals that a peer's last kernel may still raise
        self._rows: OrderedDict[Hashable, Rows] = OrderedDict()
        self._counters: OrderedDict[Hashable, torch.Tensor] = OrderedDict()
        self._inputs: dict[torch.dtype, torch.Tensor] = {}  # for copies of inputs that peers can't reach
        self._tables = Tables(self.device)
        self._status = Status(group, self._addresses)
        self.launcher = Launcher(self.device, self._status, interpreted=self._interpreted)
        #: How ranks meet for the call that is being made: takes the name of this rank's memory, returns what each rank
        #: said: that, what it found in `take_wrong_row`, and more. Without it they meet for addresses only.
        self.meet: Meet | None = None
        #: How this rank's memory was named there; None if some rank's was new to the others.
        self.named: int | None = None
        #: Calls that can be made again in few steps, as long as the memory that calls share stays what it is.
        self.repeats: weakref.WeakSet[Repeats] = weakref.WeakSet()
        self._tables_before: tuple[int, ...] | None = None  # of embeddings, of each rank, in the last call
        self._addresses.leaves(self)

    # --- failures and the end

    def check(self) -> None:
        """Raises what a kernel of this rank that has ended reported; returns at once if nothing was.

        Raises:
            PeerError: a peer died, or the group was broken on one; the group is broken.
            Timeout: a peer was late; the group is broken.
            IndexError: a row number was out of range.
        """
        self.check_late()
        if bad := self._status.take_wrong_row():
            raise IndexError(f"values[{bad - 1}] was not a row of its table; nothing was pooled for it")

    def check_late(self) -> None:
        """Raises if a peer of an earlier kernel died or was late; the group is broken then."""
        if (error := self._status.error()) is not None:
            self._broken(error)
            raise error

    def settle(self) -> None:
        """Waits for all kernels of this rank, replayed ones too. One that waits for a dead or late peer ends."""
        if not self._interpreted:
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Waits for this rank's kernels and gives everything back, together with the other members."""
        self.settle()
        if self.group.broken is not None:
            self._forget()
        states, self._states = self._states, {}
        for state in states.values():
            for each in (state.signals, state.stage, state.result):
                if each is not None:
                    each.close()
        for signals in self._outgrown:
            signals.close()
        self._end()

    def end(self) -> None:
        """Ends it on this rank alone, with its group. A peer may still raise a signal: its words are not used again."""
        try:
            self.settle()
        except RuntimeError:
            log.warning("rank %d: kernels of %s failed", self.group.rank, self.group, exc_info=True)
            self._forget()
        if self.group.broken is not None:
            self._forget()
        native.keep((self._outgrown, [state.signals for state in self._states.values()]))
        self._states = {}
        self._end()

    def leave(self, deadline_s: float) -> None:
        """Gives up kernels that are not over at `deadline_s`: this process ends by an error."""
        self._status.leave(deadline_s)

    def _end(self) -> None:
        self._status.close()
        self.launcher.forget()
        for kept in (self._rows, self._counters, self._inputs, self._outgrown):
            kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _broken(self, error: DovetailError) -> None:
        """Memory that a late peer may still write is not used again."""
        self._forget()
        self._status.tell(error)

    def _forget(self) -> None:
        native.keep((self.launcher.forget(), self._states, self._inputs, self._outgrown))
        self._states, self._inputs, self._outgrown = {}, {}, []

    # --- for the operators

    def take_wrong_row(self) -> int:
        """1 + the place of a row number that an earlier kernel found out of range, told once; 0 if there is none."""
        return self._status.take_wrong_row()

    def _renew(self) -> None:
        """Before memory that calls share is made: nothing keeps what it takes the place of."""
        self.refuse_capture()
        for call in list(self.repeats):
            call.forget()
        self.repeats.clear()

    @property
    def is_quiet(self) -> bool:
        """Whether `check` has nothing to raise."""
        return self._status.is_quiet

    def _ready(self) -> None:
        """Begins a call: raises what an earlier one left, and lets go of memory that is no longer used."""
        if self.group.broken is not None:
            raise self.group.broken
        self.check_late()
        self.named = None
        self.launcher.begin()

    def _state(self, kind: Hashable, *sizes: int, dtype: torch.dtype = torch.int64) -> State:
        """What ranks share for a kind of call: words, items of the stage, items of the result. It is made in the first
        call and made larger in later ones, by all ranks alike."""
        wanted = (*sizes, 0, 0)[:3]
        found = self._states.get(kind)
        if found is not None and found.has(wanted):
            return found
        self._renew()
        if found is not None:
            self._outgrown.append(found.signals)  # its memory goes when the kernels that hold it have ended
            wanted = tuple(
                have if need <= have else max(need, have + have // 4)
                for need, have in zip(wanted, found.sizes, strict=True)
            )
        words, *items = wanted
        signals = Symmetric(self.group, (words,), torch.int64, self.device)
        with memory.lasting():
            local = torch.zeros(LOCAL_WORDS, dtype=torch.int64, device=self.device)
        stage, result = (Symmetric(self.group, (n,), dtype, self.device) if n else None for n in items)
        made = self._states[kind] = State(signals, local, stage, result, (words, items[0], items[1]))
        return made

    def _scratch(self, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
        """For an input; used again by the next call, which comes after all peers have read it."""
        found = self._inputs.get(dtype)
        if found is None or found.numel() < m * k:
            self._renew()
            have = 0 if found is None else found.numel()
            found = self._inputs[dtype] = self._addresses.empty((max(m * k, have + have // 4),), dtype)
        return found[: m * k].view(m, k)

    def _counter(self, key: Hashable) -> torch.Tensor:
        """A word that counts tiles of calls of one shape."""
        found = self._counters.get(key)
        if found is None:
            self.refuse_capture()
            found = torch.zeros(1, dtype=torch.int64, device=self.device)
        return kept(self._counters, key, found)

    def _agree(
        self, text: str, tensor: torch.Tensor | None, numbers: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """(table of everybody's `tensor`, everybody's numbers); blocks until all have called.

        If the call is one that ranks meet for anyway (`meet`), the tensors are named there, and the numbers are those
        that they give there.

        Raises:
            MismatchError: they do not make the same call; nothing was moved.
            WrongRow: an earlier call of some rank had a row number out of range; nothing was moved.
        """
        if self.meet is not None:
            return self._agree_there(self.meet, tensor)
        words = struct.pack(f"<{1 + len(numbers)}q", self._status.take_wrong_row(), *numbers)
        note = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES) + words
        addresses, notes = self._addresses.exchange([] if tensor is None else [tensor], note)
        texts = [n[:_TEXT_BYTES].decode(errors="replace").rstrip() for n in notes]
        if len(set(texts)) > 1 or len({len(n) for n in notes}) > 1:
            calls = dict(enumerate(texts))
            raise MismatchError(f"the ranks of {self.group} do not make the same call; nothing was moved", calls=calls)
        rows = [struct.unpack(f"<{1 + len(numbers)}q", n[_TEXT_BYTES:]) for n in notes]
        raise_wrong_rows([row[0] for row in rows])
        table = self._tables.of(addresses[:, 0]) if tensor is not None else NO_TABLE
        return table, [row[1:] for row in rows]

    def _agree_there(self, meet: Meet, tensor: torch.Tensor | None) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        name = self.named = 0 if tensor is None else self._addresses.short(tensor)
        rows = meet(name)
        raise_wrong_rows([row[1] for row in rows])
        if tensor is None:
            return NO_TABLE, [row[2:] for row in rows]
        addresses = self._addresses.resolved([row[0] for row in rows])
        if addresses is None:  # memory of some rank is new to the others
            addresses, self.named = self._addresses.exchange([tensor])[0][:, 0], None
        return self._tables.of(addresses), [row[2:] for row in rows]

    def _row_tiles(
        self, kind: Hashable, rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, *, order: str,
        rows_before: tuple[int, ...] | None = None, slice_rows: int | None = None, num_counters: int = 0,
        blocks: Blocks | None = None,
    ) -> Rows:  # fmt: skip
        """The tiles of rows that are grouped by rank; made in the first call, by this rank alone."""
        key, blocks = self._row_key(kind, rows, n, k, dtype, order, rows_before, slice_rows, blocks)
        found = self._rows.get(key)
        if found is None:
            self.refuse_capture()
            made = tiles.row_tiles(
                rows, self.group.rank, blocks.height, slice_rows=slice_rows, order=order, rows_before=rows_before
            )

            def put(array: NDArray[np.int64]) -> torch.Tensor:
                return torch.from_numpy(array).to(self.device, copy=True)

            many = max(num_counters, self.group.size, len(made.slices))
            counters = torch.zeros(many, dtype=torch.int64, device=self.device)
            found = Rows(
                blocks, put(made.tiles), put(made.segments), put(made.slice_tiles), counters,
                made.is_even(blocks.height),
            )  # fmt: skip
        return kept(self._rows, key, found)

    def _row_key(
        self, kind: Hashable, rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, order: str,
        rows_before: tuple[int, ...] | None = None, slice_rows: int | None = None, blocks: Blocks | None = None,
    ) -> tuple[Hashable, Blocks]:  # fmt: skip
        blocks = blocks or self._blocks
        if blocks is None:
            made = tiles.gemm_blocks(rows, n, k, dtype.itemsize, self.part.programs)
            blocks = tiles.fitting(made, dtype.itemsize, self.part.memory_bytes)
        return (kind, rows, n, blocks, order, rows_before, slice_rows), blocks

    def _words(self, state: State, counters: torch.Tensor) -> tuple[Any, ...]:
        """signals, local, counters, status, bound."""
        per_s = _INTERPRETED_LOOKS_PER_S if self._interpreted else _LOOKS_PER_S
        bound = max(1, math.ceil(self.group.timeout_s * per_s))
        return state.signals.table, state.local, counters, self._status.words.data_ptr(), bound

    @property
    def _wrong_row(self) -> torch.Tensor:
        """Where a kernel reports a row number that is out of range."""
        return self._status.words[WRONG_ROW:]

    def _launch(
        self, kernel: Any, blocks: Blocks, held: Any, first: Sequence[torch.Tensor], *rest: Any,
        then: Callable[[], torch.Tensor] | None = None, again: Again | None = None,
    ) -> torch.Tensor | None:  # fmt: skip
        """Launches on torch's current stream, and does `then` behind it; `held` is what must stay until both are over.
        `Launcher.run` says what the arguments are."""
        again = again if self.named is not None else None  # memory of some rank may be new to the others again
        made = self.launcher.run(kernel, self.part.programs, blocks, held, first, rest, then=then, again=again)
        if self._interpreted:
            self.check_late()
        return made

    def is_capturing(self) -> bool:
        """Whether torch's current stream captures a graph."""
        return self.launcher.is_capturing

    def refuse_capture(self, op: str = "") -> None:
        """Raises `NotSupported` if a graph is captured: what an operator, or a new shape, would need is not there."""
        if self.is_capturing():
            raise NotSupported(
                f"{op} can't be captured in a graph: peers are told where its output lies"
                if op
                else "a graph is captured and this shape is new: call the operator once before the capture"
            )


def prepare(group: Group, device: torch.device) -> bool:
    """What a rank needs before it meets the others; returns whether kernels run under Triton's interpreter.

    Raises:
        NotSupported: no Triton for this device, or a graph is captured.
        HardwareError, ValueError: the GPU can't be used by this rank.
    """
    import triton

    interpreted = bool(triton.knobs.runtime.interpret)
    if (device.type == "cpu") != interpreted:
        raise NotSupported(
            f"kernels for {device.type} tensors with TRITON_INTERPRET={int(interpreted)}: they run on a GPU, or on CPU "
            "tensors under Triton's interpreter"
        )
    if not interpreted and tensors.is_capturing(indexed(device).index):
        raise NotSupported("a graph is captured and this operator is new: call it once before the capture")
    if not interpreted:
        gpu_world(group.world, indexed(device).index)
    return interpreted


def raise_wrong_rows(places: Sequence[int]) -> None:
    """All ranks raise what one has reported: 1 + the place of a value, or 0."""
    for rank, place in enumerate(places):
        if place:
            raise WrongRow(
                f"values[{place - 1}] of rank {rank} was not a row of its table in an earlier call; nothing was pooled "
                "for it then, and nothing was moved now"
            )


def kept(known: OrderedDict[Hashable, T], key: Hashable, value: T) -> T:
    """Notes what was used last, and forgets what was not used for long; kernels hold what they still need."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > _MOST_ROWS:
        known.popitem(last=False)
    return value
