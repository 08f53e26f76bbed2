"""What the kernels of one group of ranks have in common: words, tables, agreement on a call, launches, failures.

Owns the memory that ranks share (signals, staging), the tables of tiles on the device and the order of launches; which
operators there are is not its business. Nothing collective happens in a destructor.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import DovetailError, MismatchError, NotSupported, Timeout
from dovetail.hw.cpu import native
from dovetail.hw.world import Group
from dovetail.language import Addresses, Symmetric
from dovetail.language.symmetric import indexed
from dovetail.ops.gpu import tiles
from dovetail.ops.gpu.tiles import Blocks

#: Looks per second of a kernel that waits, at most: so a wait is not shorter than the group's timeout.
_LOOKS_PER_S = 2_000_000
_INTERPRETED_LOOKS_PER_S = 5_000
#: What `kernels.protocol` calls what a rank waits for.
_WHAT = ("begin its part", "finish its part", "send a slice", "copy its rows")
_TEXT_BYTES = 160
_TABLE_WORDS = 1 << 14
#: Tables of tiles that are kept for splits seen before.
_MOST_SPLITS = 256
#: Words of a call on this rank alone: run number, programs that ended, a wait ran out.
LOCAL_WORDS = 3
_INTERPRETED = Blocks(height=16, width=32, depth=32, group=2, warps=4, stages=1)


@dataclass(slots=True)
class State:
    """What the ranks share for calls of one kind. Its runs follow each other."""

    signals: Symmetric
    local: torch.Tensor
    stage: Symmetric | None = None
    result: Symmetric | None = None  #: where peers store what a captured call then copies to its output


@dataclass(slots=True)
class Rows:
    """A table of tiles on the device, and counters that only kernels with this table use."""

    blocks: Blocks
    tiles: torch.Tensor
    segments: torch.Tensor
    slice_tiles: torch.Tensor
    counters: torch.Tensor
    even: bool


class Tables:
    """Addresses on the device. An entry is written once and never again: kernels in flight hold its place.

    On a GPU an entry is copied from pinned memory in torch's current stream, and other streams wait for that. While a
    graph is captured the copy is part of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._copied: dict[tuple[int, ...], Any] = {}  # entries whose copy was issued; an event until it is done
        self._chunk: tuple[torch.Tensor, torch.Tensor] | None = None
        self._left = 0

    def of(self, addresses: NDArray[np.int64]) -> torch.Tensor:
        """The table of these addresses."""
        key = (*addresses.tolist(),)
        here, there = self._found.get(key) or self._made(key)
        if self._device.type == "cpu":
            return there
        if is_capturing(self._device):
            if key not in self._copied:
                there.copy_(here, non_blocking=True)
        elif key not in self._copied:
            there.copy_(here, non_blocking=True)
            self._copied[key] = recorded(self._device)
        elif (event := self._copied[key]) is not None:
            if event.query():
                self._copied[key] = None
            else:
                torch.cuda.current_stream(self._device).wait_event(event)
        return there

    def _made(self, key: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        if self._chunk is None or self._left < len(key):
            if is_capturing(self._device):
                raise NotSupported("no room for a table of addresses while a graph is captured: call it once before")
            self._left = max(_TABLE_WORDS, len(key))
            words = torch.zeros(self._left, dtype=torch.int64, pin_memory=self._device.type != "cpu")
            self._chunk = words, words.to(self._device)
        end = len(self._chunk[0]) - self._left + len(key)
        here, there = (words[end - len(key) : end] for words in self._chunk)
        self._left -= len(key) + len(key) % 2
        here.copy_(torch.tensor(key, dtype=torch.int64))
        self._found[key] = here, there
        return here, there


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
        import triton

        self.group, self.device = group, indexed(device)
        self._interpreted = bool(triton.knobs.runtime.interpret)
        if (self.device.type == "cpu") != self._interpreted:
            raise NotSupported(
                f"kernels for {self.device.type} tensors with TRITON_INTERPRET={int(self._interpreted)}: they run on a "
                "GPU, or on CPU tensors under Triton's interpreter"
            )
        self._addresses = Addresses.of(group, self.device)
        mine = self._addresses.device_id
        _, ids = self._addresses.exchange([], mine)
        self.num_sharing = ids.count(mine)  #: ranks on this rank's GPU, itself included
        self.programs = self._share(programs)
        self._blocks = blocks or (_INTERPRETED if self._interpreted else None)
        self._states: dict[Hashable, State] = {}
        self._rows: dict[Hashable, Rows] = {}
        self._uneven: dict[Hashable, Rows] = {}  # of splits that may change with every call
        self._inputs: dict[Hashable, torch.Tensor] = {}  # copies of inputs that peers can't reach
        self._tables = Tables(self.device)
        self._status = torch.zeros(2, dtype=torch.int64, pin_memory=not self._interpreted)
        self._held: deque[tuple[Any, Any]] = deque()
        self._captured: list[Any] = []
        self._last: Any = None  # the stream of the last launch

    def _share(self, programs: int | None) -> int:
        if self._interpreted:
            if programs not in (None, 1):
                raise NotSupported(f"{programs} programs: the interpreter runs one after the other, so 1 is the most")
            return 1
        many = torch.cuda.get_device_properties(self.device).multi_processor_count
        most = many // self.num_sharing
        if not 1 <= (programs or most) <= most:
            raise NotSupported(
                f"{programs or most} programs per kernel: {self.num_sharing} ranks share this GPU of {many} "
                f"multiprocessors, so each may have 1 to {most}; with more, a kernel could wait for one that has no "
                "place to run"
            )
        return programs or most

    # --- failures and the end

    def check(self) -> None:
        """Raises what a kernel of this rank that has ended reported; returns at once if nothing was.

        Raises:
            Timeout: a peer was late; the group is broken.
            IndexError: a row number was out of range.
        """
        self._check_late()
        if bad := int(self._status[1]):
            self._status[1] = 0
            raise IndexError(f"values[{bad - 1}] was not a row of its table; nothing was pooled for it")

    def _check_late(self) -> None:
        late = int(self._status[0])
        if late:
            what, rank = late // 65536 - 1, late % 65536
            error = Timeout(
                f"rank {rank} of {self.group} did not {_WHAT[what]} of a fused operator within about "
                f"{self.group.timeout_s:g} s; this rank's result is void"
            )
            self._broken(error)
            raise error

    def close(self) -> None:
        """Waits for this rank's kernels and gives everything back, together with the other members."""
        self._addresses.settle()
        states, self._states = self._states, {}
        for state in states.values():
            state.signals.close()
            for more in (state.stage, state.result):
                if more is not None:
                    more.close()
        self._rows.clear()
        self._uneven.clear()
        self._inputs.clear()
        self._held.clear()
        self._captured.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _broken(self, error: DovetailError) -> None:
        """Memory that a late peer may still write is not used again."""
        native.keep((self._held, self._states, self._inputs, self._captured))
        self._held, self._states, self._inputs, self._captured = deque(), {}, {}, []
        self._addresses.fail(error)

    # --- for the operators

    def _ready(self) -> None:
        """Begins a call: raises what an earlier one left, and lets go of memory that is no longer used."""
        if self.group.broken is not None:
            raise self.group.broken
        self._check_late()
        if self._is_capturing():
            return  # a capture would end if an event were asked for
        while self._held and (self._held[0][0] is None or self._held[0][0].query()):
            self._held.popleft()
        if self._held and not self._interpreted:
            stream = torch.cuda.current_stream(self.device)
            if self._last != stream:
                stream.wait_event(self._held[-1][0])  # what this call writes, an earlier run may still be reading

    def _state(
        self, kind: Hashable, num_words: int, stage: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> State:
        """What ranks share for a kind of call; made in the first one, by all of them."""
        found = self._states.get(kind)
        if found is None:
            self._refuse_capture()
            signals = Symmetric(self.group, (num_words,), torch.int64, self.device)
            local = torch.zeros(LOCAL_WORDS + 1, dtype=torch.int64, device=self.device)
            made = None
            if stage is not None:
                assert dtype is not None
                made = Symmetric(self.group, stage, dtype, self.device)
            found = self._states[kind] = State(signals, local, made)
        return found

    def _scratch(self, m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
        """For an input; used again by the next call, which comes after all peers have read it."""
        found = self._inputs.get((m, k, dtype))
        if found is None:
            self._refuse_capture()
            found = self._inputs[m, k, dtype] = self._addresses.empty((m, k), dtype)
        return found

    def _agree(
        self, text: str, tensor: torch.Tensor | None, numbers: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        """(table of everybody's `tensor`, everybody's numbers); blocks until all have called.

        Raises:
            MismatchError: they do not make the same call; nothing was moved.
            IndexError: an earlier call of some rank had a row number out of range; nothing was moved.
        """
        bad, self._status[1] = int(self._status[1]), 0
        words = struct.pack(f"<{1 + len(numbers)}q", bad, *numbers)
        note = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES) + words
        addresses, notes = self._addresses.exchange([] if tensor is None else [tensor], note)
        texts = [n[:_TEXT_BYTES].decode(errors="replace").rstrip() for n in notes]
        if len(set(texts)) > 1 or len({len(n) for n in notes}) > 1:
            calls = dict(enumerate(texts))
            raise MismatchError(f"the ranks of {self.group} do not make the same call; nothing was moved", calls=calls)
        rows = [struct.unpack(f"<{1 + len(numbers)}q", n[_TEXT_BYTES:]) for n in notes]
        for rank, row in enumerate(rows):
            if row[0]:
                raise IndexError(
                    f"values[{row[0] - 1}] of rank {rank} was not a row of its table in an earlier call; nothing was "
                    "pooled for it then, and nothing was moved now"
                )
        table = self._tables.of(addresses[:, 0]) if tensor is not None else torch.empty(0, dtype=torch.int64)
        return table, [row[1:] for row in rows]

    def _row_tiles(
        self, kind: Hashable, rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, *, order: str,
        rows_before: tuple[int, ...] | None = None, slice_rows: int | None = None, num_counters: int = 0,
        blocks: Blocks | None = None,
    ) -> Rows:  # fmt: skip
        """The tiles of rows that are grouped by rank; made in the first call, by this rank alone."""
        blocks = blocks or self._blocks or tiles.gemm_blocks(rows, n, k, dtype.itemsize, self.programs)
        key = (kind, rows, n, blocks, order, rows_before, slice_rows)
        known = self._rows if rows_before is None else self._uneven
        found = known.get(key)
        if found is None:
            self._refuse_capture()
            if known is self._uneven and len(known) >= _MOST_SPLITS:
                del known[next(iter(known))]  # the stream's order keeps its memory until kernels are done with it
            made = tiles.row_tiles(
                rows, self.group.rank, blocks.height, slice_rows=slice_rows, order=order, rows_before=rows_before
            )

            def put(array: NDArray[np.int64]) -> torch.Tensor:
                return torch.from_numpy(array).to(self.device, copy=True)

            many = max(num_counters, self.group.size, len(made.slices))
            counters = torch.zeros(many, dtype=torch.int64, device=self.device)
            found = known[key] = Rows(
                blocks, put(made.tiles), put(made.segments), put(made.slice_tiles), counters,
                made.is_even(blocks.height),
            )  # fmt: skip
        return found

    def _words(self, state: State, counters: torch.Tensor) -> tuple[Any, ...]:
        """signals, local, counters, status, bound."""
        per_s = _INTERPRETED_LOOKS_PER_S if self._interpreted else _LOOKS_PER_S
        bound = max(1, math.ceil(self.group.timeout_s * per_s))
        return state.signals.table, state.local, counters, self._status.data_ptr(), bound

    def _launch(self, kernel: Any, blocks: Blocks, held: Any, *args: Any) -> None:
        """Launches on torch's current stream; `held` is what must stay until the kernel has ended."""
        if self._interpreted:
            kernel[(1,)](*args)
            self._held.append((None, held))
            self._check_late()
            return
        capturing = self._is_capturing()
        stream = torch.cuda.current_stream(self.device)
        if not capturing and self._held and self._last != stream:
            stream.wait_event(self._held[-1][0])  # runs follow each other, on whichever stream
        with torch.cuda.device(self.device):
            kernel[(self.programs,)](*args, num_warps=blocks.warps, num_stages=blocks.stages)
        if capturing:
            self._captured.append(held)  # replays use this memory as long as the graph lives
        else:
            self._held.append((recorded(self.device), held))
            self._last = stream

    def _is_capturing(self) -> bool:
        return is_capturing(self.device)

    def _refuse_capture(self, op: str = "") -> None:
        if self._is_capturing():
            raise NotSupported(
                f"{op} can't be captured in a graph: its output is new memory in every call"
                if op
                else "a graph is captured and this shape is new: call the operator once before the capture"
            )


def recorded(device: torch.device) -> Any:
    """An event behind what torch's current stream has to do."""
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream captures a graph."""
    return device.type != "cpu" and bool(torch.cuda.is_current_stream_capturing())
