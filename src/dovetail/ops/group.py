"""Ranks that call operators together: how they agree on a call before any of them writes into another's memory.

Each call begins with an exchange of slots (what is called, where its memory is, split sizes). A rank whose arguments
are wrong posts its error instead: it raises that error, the others raise one that quotes it, and nothing has moved.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from dovetail.coll.arguments import usable
from dovetail.errors import DovetailError, MismatchError, NotSupported
from dovetail.hw.cpu import native
from dovetail.hw.meeting import Meeting
from dovetail.hw.world import Group
from dovetail.ops.cpu.memory import Blocks, Peers
from dovetail.ops.repeat import Lookup, Repeat, Said, Same

_TEXT_BYTES = 184
#: Words of a slot that a transport may use: heap offsets of its memory, numbers of tables.
NUM_WORDS = 4
_CALL, _REFUSED = 1, 2
#: A stage is this large at least, and grows to what calls need.
_LEAST_STAGE = 64 << 10
_LINE = 64
#: Calls that are remembered.
_MOST_TEXTS = 1024
_NOTHING: tuple[bytes, list[tuple[int, ...]]] = (b"", [])

T = TypeVar("T")


class WrongRow(IndexError):
    """An earlier call of some rank had a row number out of range. All ranks raise it where they meet for the next one,
    of which nothing was moved."""


@runtime_checkable
class Fails(Protocol):
    """What a group keeps that other ranks may wait in."""

    def fail(self, error: DovetailError) -> None: ...


@runtime_checkable
class Ends(Protocol):
    """What a transport keeps that ends with its group, without the other ranks."""

    def end(self) -> None: ...


class _Call:
    """Around a call that all ranks make, from when they may meet for it on. What it raises breaks the group, since the
    others would wait for this rank; unless all ranks raise it and nothing was moved."""

    __slots__ = ("_group",)

    def __init__(self, group: OpsGroup) -> None:
        self._group = group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._group.transport = ""
        if error is not None and not isinstance(error, (MismatchError, WrongRow)):
            self._group.fail(error)


class OpsGroup:
    """The operators' side of a `Group` on one host. All members make one together."""

    def __init__(self, group: Group) -> None:
        self.group = group
        size = group.size
        self._head, self._words = struct.Struct(f"<q{_TEXT_BYTES}s"), struct.Struct(f"<{NUM_WORDS + 2 * size + 2}q")
        self._meeting = Meeting(
            group, self._head.size + self._words.size, "ops", purpose="its first operator", read=self._read
        )
        self._texts: dict[tuple[str, str], bytes] = {}
        self.transport = ""  #: of the call that is being made: ranks must have the same one
        self._call = _Call(self)
        self._no_splits = (0,) * (2 * size)
        self.blocks, self.peers = Blocks(group.world), Peers(group.world)
        self._bases = [int(group.world.native.base(r)) for r in group.ranks]
        self._no_words = (*(0,) * NUM_WORDS, *self._no_splits)
        self._scratch: dict[str, Any] = {}
        self._stage: Any = None
        self._before: Any = None  # the stage before it, until nobody can know of it
        self.stage = (0, 0)  #: of our own: offset, bytes of a half
        self.plain = self._words.pack(*self._no_words, *self.stage)  #: what a call without words posts
        self._stages: list[tuple[int, int]] = [(0, 0)] * size  # everybody's, as they were posted last
        self._halves: tuple[list[int], list[int]] = ([0] * size, [0] * size)  # where both halves of each begin
        self._room = 0  # bytes of the smallest half
        self.stage_epoch = 0  #: grows when anybody's stage is another
        self._orderly: dict[bytes, tuple[bytes, list[tuple[int, ...]]]] = {}  # by what we said: what all said
        self.meetings = 0  #: exchanges so far; halves of stages are used in turn by it
        self.known: dict[Any, Any] = {}  #: what transports keep for shapes seen before
        self.products: dict[Any, Any] = {}  #: that were run before, see `quick`
        self.lookups: dict[Any, Any] = {}  #: likewise

    def calling(self, transport: str) -> _Call:
        """Around a call by this transport."""
        self.transport = transport
        return self._call

    def checked(self, make: Callable[[], T]) -> T:
        """What `make` returns. If it refuses its arguments, the other ranks are told, and it is raised here."""
        try:
            return make()
        except Exception as error:
            if self.group.broken is not None:
                raise
            text = f"{type(error).__name__}: {error}".encode()[:_TEXT_BYTES]
            self._meeting.exchange(self._head.pack(_REFUSED, text))
            self.meetings += 1
            raise

    def agree(
        self, text: str, words: Sequence[int] = (), splits: Sequence[int] = (), *, copies: Sequence[int] = ()
    ) -> list[tuple[int, ...]]:
        """Each rank's `words`, then its `splits` (what it sends, what it receives). Blocks until all have called.

        `copies`, to where `push` says: destination, source and bytes of each; they are there when it returns.

        Raises:
            MismatchError: they do not make the same call, or one refused its arguments; nothing was moved.
        """
        known = self._texts.get((text, self.transport))
        if known is None:
            if len(self._texts) >= _MOST_TEXTS:
                self._texts.clear()
            full = f"{text} by {self.transport}" if self.transport else text
            known = self._texts[text, self.transport] = self._head.pack(_CALL, full.encode()[:_TEXT_BYTES])
        mine = known + (self._packed(words, splits) if words or splits else self.plain)
        before, told = self._orderly.get(mine, _NOTHING)
        slots = self._meeting.repeat(mine, before, copies)
        self.meetings += 1
        return told if slots is None else self._look(mine, slots, text, splits)

    def said(self, text: str, words: Sequence[int], splits: Sequence[int]) -> Said | None:
        """What this rank says of a call, and what all said when it did so last; None if it has not."""
        known = self._texts.get((text, self.transport))
        if known is None:
            return None
        mine = known + (self._packed(words, splits) if words or splits else self.plain)
        before = self._orderly.get(mine)
        return None if before is None else Said(mine, text, splits, *before)

    def same(self, text: str, words: Sequence[int] = (), splits: Sequence[int] = ()) -> Same | None:
        """A call that was made before with these words; None if not all of it has been said."""
        said = self.said(text, words, splits)
        return None if said is None else Same(self, said)

    def repeat(
        self, text: str, splits: Sequence[int], *, part: int, step: int, sums: bool, dtype: int
    ) -> Repeat | None:
        """A call that was made before, and what it sends to the stages before it meets: see `Repeat`. None if it can't
        be repeated: not all of it has been said, or a stage has no room."""
        if self._room < part * self.group.size or (said := self.said(text, (), splits)) is None:
            return None
        made = native.load().Repeat(self._meets(said), self._stages_there(), part, step, sums, dtype)
        return Repeat(self, made, said)

    def lookup(
        self, said: Said, size_bytes: int, *, tables: Sequence[int], batch: int, dim: int, dtype: int, mean: bool
    ) -> Lookup | None:
        """The same for bags out of so many `tables` of each rank, `size_bytes` of every output: see `Lookup`. All that
        was `said` came by stages."""
        if self._room < size_bytes:
            return None
        made = native.load().Lookup(self._meets(said), self._stages_there(), tables, batch, dim, dtype, mean)
        return Lookup(self, made, said)

    def _meets(self, said: Said) -> Any:
        return native.load().Meets(*self._meeting.fixed, said.mine, said.before)

    def _stages_there(self) -> Any:
        return native.load().Stages(self.group.rank, *self._halves)

    def stage_halves(self, rank: int, shape: tuple[int, ...], dtype: Any, at_byte: int = 0) -> tuple[Any, Any]:
        """A rank's stage as tensors, one for each half, or what begins at a byte of it."""
        begins = [half[rank] - self._bases[rank] + at_byte for half in self._halves]
        return self.at(rank, begins[0], shape, dtype), self.at(rank, begins[1], shape, dtype)

    def _packed(self, words: Sequence[int], splits: Sequence[int]) -> bytes:
        padded = (*words, *(0,) * (NUM_WORDS - len(words)))
        return self._words.pack(*padded, *(splits or self._no_splits), *self.stage)

    @property
    def fixed(self) -> tuple[Any, ...]:
        """For native code that makes the exchange."""
        return self._meeting.fixed

    @property
    def is_limit_in_force(self) -> bool:
        """Whether native code would meet under the group's time limit: `agree` sees to it."""
        return self._meeting.is_limit_in_force

    def judge(self, status: int, said: Said) -> list[tuple[int, ...]]:
        """Looks at an exchange that native code has made, and that was not like the last."""
        return self._look(said.mine, self._meeting.judge(status), said.text, said.splits)

    def _look(self, mine: bytes, slots: bytes, text: str, splits: Sequence[int]) -> list[tuple[int, ...]]:
        """What everybody said, if that is in order."""
        known = mine[: self._head.size]
        step, head = self._meeting.size_bytes, self._head.size
        starts = range(0, len(slots), step)
        if any(slots[at : at + head] != known for at in starts):
            raise self._mismatch(slots)
        rows = [self._words.unpack_from(slots, at + head) for at in starts]
        self._learn([(row[-2], row[-1]) for row in rows])
        rows = [row[:-2] for row in rows]
        if splits:
            self._match(text, rows)
        if len(self._orderly) >= _MOST_TEXTS:
            self._orderly.clear()
        self._orderly[mine] = slots, rows
        return rows

    def _learn(self, stages: list[tuple[int, int]]) -> None:
        """Everybody's stages, as they posted them in this exchange."""
        self._before = None
        if stages != self._stages:
            self._stages, self._room = stages, min(size for _, size in stages)
            begins = [base + offset for base, (offset, _) in zip(self._bases, stages, strict=True)]
            self.stage_epoch += 1
            self._halves = begins, [begin + size for begin, (_, size) in zip(begins, stages, strict=True)]

    def _match(self, text: str, rows: list[tuple[int, ...]]) -> None:
        """What i sends to j is what j expects from i."""
        size = self.group.size
        for i in range(size):
            for j in range(size):
                sent, expected = rows[i][NUM_WORDS + j], rows[j][NUM_WORDS + size + i]
                if sent != expected:
                    calls = {
                        r: f"{text} with input_splits {list(rows[r][NUM_WORDS : NUM_WORDS + size])} and "
                        f"output_splits {list(rows[r][NUM_WORDS + size :])}"
                        for r in {i, j}
                    }
                    text = f"rank {i} sends {sent} rows to rank {j}, which expects {expected}; nothing was moved"
                    raise MismatchError(text, calls=calls)

    def _read(self, slot: bytes) -> str:
        """What a rank called, or why it refused that."""
        return str(self._head.unpack_from(slot)[1].rstrip(b"\0").decode(errors="replace"))

    def _mismatch(self, slots: bytes) -> DovetailError:
        kinds, texts = [], []
        for at in range(0, len(slots), self._meeting.size_bytes):
            kinds.append(self._head.unpack_from(slots, at)[0])
            texts.append(self._read(slots[at:]))
        if _REFUSED in kinds:
            rank = kinds.index(_REFUSED)
            return MismatchError(
                f"rank {rank} of {self.group} refused its arguments ({texts[rank]}); nothing was moved"
            )
        mine = texts[self.group.rank]
        other = next(r for r, t in enumerate(texts) if t != mine)
        calls = {self.group.rank: mine, other: texts[other]}
        return MismatchError(f"the ranks of {self.group} do not make the same call; nothing was moved", calls=calls)

    def barrier(self) -> None:
        """Returns when all members have called it; what they wrote before can be read."""
        self._meeting.barrier()

    def fail(self, error: BaseException, *held: Any) -> None:
        """A call ended between agreement and its end: the group is broken, and memory that a late peer may still
        write is not used again."""
        native.keep((held, self._scratch, self._stage, self._before))
        self._scratch, self._stage, self._before = {}, None, None
        self.tell(error if isinstance(error, DovetailError) else DovetailError(f"an operator failed: {error!r}"))

    def tell(self, error: DovetailError) -> None:
        """Breaks the group: who waits for this rank, in whichever meeting, collective or kernel, is told at once. Any
        thread may call it."""
        self._meeting.fail(error)
        for kept in self.group.keep:
            if isinstance(kept, Fails):
                kept.fail(error)
        if self.group.gpu is not None:
            self.group.gpu.fail(error)
        if self.group.native is not None:
            self.group.native.break_all(self.group.rank)  # who waits in a collective of the call, or in a kernel

    def push(self, size_bytes: int) -> list[int] | None:
        """Where each rank's stage takes what is sent to it before this call's `agree`: addresses here. None if
        some stage is not known to be so large; ours then grows, and a later call can.

        A stage has two halves, used in turn by the number of exchanges. What a rank is sent in a call it reads before
        it enters its next exchange; the same half comes again two exchanges later. So a call needs one meeting only:
        `agree`, after the peers' stages were written. All ranks decide alike: from what all of them posted last.
        """
        if self.stage[1] < size_bytes:
            import torch

            half = -(-max(size_bytes, _LEAST_STAGE) // 4096) * 4096
            self._before = self._stage  # a peer that makes another call may still write there
            self._stage = self.blocks.empty((2 * half,), torch.uint8)
            self.stage = (self.blocks.offset(self._stage), half)
            self.plain = self._words.pack(*self._no_words, *self.stage)
        return None if self._room < size_bytes else self._halves[self.meetings % 2]

    @property
    def region(self) -> int:
        """Bytes of a half of the smallest stage that each rank has for itself, if all may send; the same on all."""
        return self._room // self.group.size // _LINE * _LINE

    def scratch(self, name: str, size_bytes: int) -> Any:
        """Memory of this rank that peers reach, at least this large, kept for the next call. Peers use it between
        `agree` and the end of the call only, so one serves all calls."""
        import torch

        found = self._scratch.get(name)
        if found is None or found.nbytes < size_bytes:
            self._scratch.pop(name, None)
            found = self._scratch[name] = self.blocks.empty((max(size_bytes, 1),), torch.uint8)
        return found

    def close(self) -> None:
        """Ends it on this rank, with its group."""
        self._meeting.close()
        native.keep((self._stage, self._before))  # a member that calls on writes there before it finds out
        self._scratch.clear()
        self._stage = self._before = None
        for kept in self.known.values():
            if isinstance(kept, Ends):
                kept.end()
        self.known.clear()
        self.products.clear()
        self.lookups.clear()

    def base(self, rank: int) -> int:
        """The address at which the heap of a rank of the group begins here."""
        return self._bases[rank]

    def at(self, rank: int, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor over the memory of a rank of the group."""
        return self.peers.at(self.group.ranks[rank], offset, shape, dtype)


def ops_group(group: Group) -> OpsGroup:
    """The one of a group; made at the first operator, by all members together."""
    found: OpsGroup | None = group.ops
    if found is None:
        usable(group)
        if not group.world.local:
            raise NotSupported(f"{group} spans hosts: its operators run unfused")
        found = group.ops = OpsGroup(group)
    return found
