"""The world of this process: its rank, its part of the symmetric heap, and the groups it belongs to.

Owns the native world and everything that must be closed with it. `Group` is what collectives are called on. Nothing
collective happens in a destructor; after `fork` the child's objects are dead.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dovetail import env
from dovetail.errors import DovetailError, HardwareError, MismatchError, NotSupported, PeerError, Timeout
from dovetail.hw import memory, rendezvous
from dovetail.hw.cpu import native
from dovetail.hw.slots import Describe, describe_plan

if TYPE_CHECKING:
    import torch

log = logging.getLogger("dovetail")

#: Why a group ended, in its abort word: its ranks wait for each other in different calls.
CROSSED = 5
#: Spins before a waiting rank yields its core: long when every rank has one, short when they must share.
_SPINS_ALONE = 4000
_SPINS_SHARED = 5


class World:
    """This process among the others. Make one with `dovetail.init()`."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        token: str,
        notice: bytes = b"",
        timeout_s: float | None = None,
        local: bool = True,
        describe: Describe = describe_plan,
    ) -> None:
        """`describe`: reads what ranks post of collectives, if there are some."""
        if not 0 <= rank < size:
            raise ValueError(f"rank must be in 0..{size - 1}, not {rank}")
        self.rank, self.size, self.token = rank, size, token
        self.timeout_s = env.timeout_s() if timeout_s is None else timeout_s
        self.local = local  #: all ranks are on this host; otherwise only the baseline can serve them
        self.notices: list[bytes] = [notice] * size
        self.pid = os.getpid()
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        self._lock = threading.Lock()
        self._native: Any = None
        self.memory_bytes: list[int] = []  #: of each rank's part of the heap
        self.gpu: Any = None  #: the GPU side of this rank, `hw.gpu.world.GpuWorld`, once a GPU is used
        self.describe = describe
        if local:
            self._meet(notice)
        _worlds.add(self)
        self.group = self.new_group(range(size), name="world")

    def _meet(self, notice: bytes) -> None:
        module = native.load()
        members = rendezvous.meet(self.token, self.rank, self.size, env.heap_bytes(), notice, self.timeout_s)
        self.notices = [m.notice for m in members]
        self.memory_bytes = [m.memory_bytes for m in members]
        spins = _SPINS_ALONE if self.size <= (os.cpu_count() or 1) else _SPINS_SHARED
        try:
            self._native = module.World(
                rank=self.rank,
                fds=[m.memory_fd for m in members],
                pidfds=[m.pidfd for m in members],
                bytes=[m.memory_bytes for m in members],
                engines=env.engines(),
                spins=spins,
            )
        except MemoryError as error:
            raise HardwareError(str(error)) from error
        finally:
            for m in members:
                os.close(m.memory_fd)  # the native world has its own
                if m.pidfd >= 0:
                    os.close(m.pidfd)

    @property
    def native(self) -> Any:
        """The native world, or an error that says why there is none."""
        if self._native is None:
            if not self.local:
                raise NotSupported("this world spans hosts: there is no shared heap; collectives run on the baseline")
            raise DovetailError(
                "this world is closed (or belongs to the parent of a forked process): call dovetail.init()"
            )
        return self._native

    def new_group(self, ranks: Sequence[int], *, name: str = "") -> Group:
        """A group of some ranks. Every member calls this, in the same order for equal `ranks`; others don't."""
        return self._made(tuple(ranks), name, lambda name: Group(self, tuple(ranks), name))

    def companion(self, base: Group, name: str, purpose: str) -> Group:
        """A further group of the same ranks, for calls of another sort. Where a rank waits in one of them for a rank
        that waits for it in another, both get a `MismatchError`. `purpose`: what is done first in it, for that error.
        """
        full = f"{name} {base.name}"
        return self._made(base.ranks, full, lambda name: Group(self, base.ranks, name, base=base, purpose=purpose))

    def _made(self, members: tuple[int, ...], name: str, make: Callable[[str], Group]) -> Group:
        if len(set(members)) != len(members) or not all(0 <= r < self.size for r in members) or not members:
            raise ValueError(f"ranks must be different and in 0..{self.size - 1}, not {list(members)}")
        if self.rank not in members:
            raise ValueError(f"rank {self.rank} is not one of {list(members)}: only members make a group")
        with self._lock:  # for the name only: joining waits for others
            counted = not name
            name = name or f"#{self._counts.get(members, 0) + 1}"
            if (members, name) in self._groups:
                return self._groups[members, name]
            if counted:
                self._counts[members] = self._counts.get(members, 0) + 1
        try:
            made = make(name)
        except BaseException:
            if counted:
                self._counts[members] -= 1  # who tries again meets the others under the same name
            raise
        with self._lock:
            return self._groups.setdefault((members, name), made)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on this rank's part of the heap."""
        import torch

        items = math.prod(shape)
        if any(n < 0 for n in shape):
            raise ValueError(f"a shape has no negative sizes: {tuple(shape)}")
        if items == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        size_bytes = items * dtype.itemsize
        memory.require(size_bytes)
        with memory.lasting():
            try:
                raw: torch.Tensor = self.native.alloc(size_bytes)
            except MemoryError as error:
                raise HardwareError(str(error)) from error
            return raw.view(dtype).view(tuple(shape))

    @property
    def used_bytes(self) -> int:
        """Bytes of this rank's heap that are taken."""
        return int(self.native.used_bytes)

    def close(self) -> None:
        """Lets everything go. Peers that call on with this rank get a `PeerError` or `Timeout`. Safe to call twice."""
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for g in groups:
            g.close()
        if self.gpu is not None:
            self.gpu.close()
            self.gpu = None
        if self._native is not None:
            self._native.stop()
            self._native = None  # memory goes with the last tensor over it
        _worlds.discard(self)

    def _dead_after_fork(self) -> None:
        if self._native is not None:
            self._native.forked()
            native.keep(self._native)  # its threads are the parent's: never run its destructor here
        self._native = None
        native.keep(self.gpu)
        self.gpu = None
        for g in self._groups.values():
            g.native = None
            native.keep(g.gpu)
            native.keep(g.ops)
            g.gpu = g.ops = None
            for known in (g.calls, g.tables, g.fast, g.barriers):
                native.keep(dict(known))
                known.clear()
        self._groups = {}

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Group:
    """Ranks that call collectives together; `rank` and `size` are this process's place among them."""

    def __init__(
        self, world: World, ranks: tuple[int, ...], name: str, *, base: Group | None = None, purpose: str = ""
    ) -> None:
        """`base`, `purpose`: see `World.companion`."""
        self.world, self.ranks, self.name = world, ranks, name
        #: A group and its companions.
        self.kin: list[Group] = [] if base is None else base.kin
        #: Reads the call out of what a rank posts as its input; without it the slot says what it is.
        self.read: Callable[[bytes], str] | None = None
        self.rank, self.size = ranks.index(world.rank), len(ranks)
        self.timeout_s: float = world.timeout_s if base is None else base.timeout_s
        self.calls: dict[Any, Any] = {}  #: bound calls by shape; filled and read by `dovetail.coll`
        self.tables: dict[Any, Any] = {}  #: native tables from tensors to bound calls, likewise
        self.fast: dict[Any, dict[str, Any]] = {}  #: collective -> variant -> the method of such a table
        self.barriers: dict[str, Any] = {}  #: variant -> the bound barrier
        self.baseline: Any = None  #: the torch process group that stands behind variant "torch"
        self.keep: list[Any] = []  #: what must live as long as the group
        self.native: Any = None
        self.gpu: Any = None  #: its GPU side, `hw.gpu.group.GpuGroup`, once a GPU tensor is used in it
        self.ops: Any = None  #: its operators' side, `ops.group.OpsGroup`, once a fused operator is called in it
        self._error: DovetailError | None = None
        if world.local:
            self.native = self._join(base, purpose)
        self.kin.append(self)

    def _join(self, base: Group | None, purpose: str) -> Any:
        key = int.from_bytes(
            hashlib.blake2b(repr((self.world.token, self.ranks, self.name)).encode(), digest_size=8).digest(), "little"
        )
        try:
            return self.world.native.group(
                ranks=list(self.ranks), rank=self.rank, key=key or 1, timeout_s=self.timeout_s,
                max_params=4 * self.size, base=None if base is None else base.native, purpose=purpose,
            )  # fmt: skip
        except MemoryError as error:
            raise HardwareError(str(error)) from error
        except RuntimeError as error:
            how, _, who = str(error).partition(":")
            if how == "dead":
                raise PeerError(f"rank {who} died before it joined group {self}", rank=int(who)) from None
            if how == "late":
                raise Timeout(f"rank {who} did not join group {self} within {self.timeout_s:g} s") from None
            if base is not None and how == "crossed":
                raise base.crossed([int(who)], purpose) from None
            if base is not None and how == "broken":
                raise base.broken_by_others(purpose) from None
            raise

    @property
    def broken(self) -> DovetailError | None:
        """The error that broke this group, if one did: every later call raises it again."""
        return None if self._error is None else self._error.with_traceback(None)  # frames would keep memory mapped

    def set_broken(self, error: DovetailError) -> None:
        """Remembers the first error that broke the group."""
        self._error = self._error or error

    def saying(self, rank: int) -> str:
        """The call that a member is in, or has made last in this group, as text."""
        slot = self.native.slot(rank)
        if self.read is not None and slot["input"]:
            return self.read(slot["input"])
        return self.world.describe(slot, self.size)

    def crossed(self, about: Sequence[int], mine: str = "") -> DovetailError:
        """The error of calls that have crossed: this rank waits in one for a member that waits for it in another.

        Args:
            about: ranks, one of which is such a member.
            mine: this rank's call; without it that which it has made last in this group.
        """
        calls = {self.rank: mine or self.saying(self.rank)}
        for r in about:
            if r != self.rank and len(calls) == 1 and (text := self._elsewhere(r, joins=bool(mine))):
                calls[r] = text
        text = f"the ranks of {self.kin[0]} wait for each other in different calls; nothing was moved"
        error = MismatchError(f"{text}. The group is broken: make a new one", calls=calls)
        for g in self.kin:
            g.set_broken(error)
        return error

    def _elsewhere(self, rank: int, *, joins: bool) -> str:
        """The call in which a member waits for this rank, which `joins` a companion of this group or is in a run."""
        for g in self.kin:
            if (g is not self or joins) and g.native is not None and g.native.newest(rank) > g.native.begun:
                return g.saying(rank)
        return str(self.kin[0].native.purpose(rank))

    def broken_by_others(self, mine: str = "") -> DovetailError:
        """The error of a group that another rank has broken."""
        word = self.native.abort
        code, about, reporter = word & 0xFF, word >> 8 & 0xFFFF, word >> 24 & 0xFFFF
        if code == CROSSED:
            return self.crossed([about, reporter], mine)
        error = PeerError(f"the group failed on rank {reporter}", rank=reporter)
        self.set_broken(error)
        return error

    def set_timeout(self, seconds: float) -> None:
        """How long a silent rank is waited for, from the next call on."""
        if not seconds > 0:
            raise ValueError(f"a timeout is positive, not {seconds}")
        self.timeout_s = seconds
        if self.native is not None:
            self.native.timeout_ns = int(seconds * 1e9)

    def inject_delay(self, most_us: float) -> None:
        """For tests: wait a random time up to `most_us` before every step that this rank runs in this group."""
        self.native.delay_ns = int(most_us * 1000)

    def close(self) -> None:
        """Ends the group on this rank; its other members find it closed if they call on."""
        if self.ops is not None:
            self.ops.close()
            self.ops = None
        if self.gpu is not None:
            self.gpu.close()
            self.gpu = None
        if self.native is not None:
            self.native.close()
        self.native = None
        self.calls.clear()
        self.tables.clear()
        self.fast.clear()
        self.barriers.clear()
        if self in self.kin:
            self.kin.remove(self)
        self.world._groups.pop((self.ranks, self.name), None)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Group({self.name}, rank {self.rank} of {self.size})"


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _after_fork() -> None:
    for world in list(_worlds):
        world._dead_after_fork()


os.register_at_fork(after_in_child=_after_fork)
