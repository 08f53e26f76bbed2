"""Prefixes of prompts, kept in host memory and brought back: the pool, the planner and a mover in one object.

Owns the life of a transfer: slots are held while bytes are under way, a prefix can be fetched once all of it has
landed, and nothing is reused early, also when the caller drops what it was given.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from dovetail.errors import HardwareError, Timeout
from dovetail.hw.gpu.device import Device
from dovetail.kv.choose import Path
from dovetail.kv.handles import Fetch, Store
from dovetail.kv.index import block_hashes
from dovetail.kv.layout import Layout
from dovetail.kv.memory import PIECE_BYTES, DriverPinner, HostMemory
from dovetail.kv.models import BLOCK_TOKENS
from dovetail.kv.mover import GpuMover, Transfer
from dovetail.kv.plain import CpuMover
from dovetail.kv.planner import Direction, Pieces, Table, layer_tables, table
from dovetail.kv.policy import Policy
from dovetail.kv.pool import Pool, Stats

logger = logging.getLogger(__name__)
_LAND_S = 10.0  # that a fetch which failed half way waits for what it had begun
_PAUSE_S = 50e-6
_NOBODY = b"everybody"  # the salt where there is one tenant only


class Mover(Protocol):
    """Who moves bytes between the cache and the pool."""

    def submit(
        self,
        direction: Direction | str,
        table: Table,
        path: Path | str = ...,
        *,
        after: Sequence[int] = (),
        beside: bool | None = None,
    ) -> Transfer: ...

    def is_idle(self, direction: Direction | str) -> bool:
        """True if nothing is under way in this direction, also after a `submit` that failed."""

    def fewest_copies(self, path: Path, num_blocks: int, num_runs: int) -> int:
        """That a fetch of so many blocks, in so many runs of slots, is likely to take."""


class Move:
    """A store or a fetch under way. It ends by itself when somebody asks; `wait` asks until then."""

    def __init__(
        self, parts: list[Transfer], num_tokens: int, size_bytes: int, end: Callable[[], None], layers: int | None
    ) -> None:
        self.num_tokens, self.size_bytes = num_tokens, size_bytes  #: what is moved
        self.layers = layers  #: in each part; None: all
        self.parts = parts  #: one, or of a fetch by layers one for each step, in order: join or wait for each
        self._end: Callable[[], None] | None = end

    @property
    def transfer(self) -> Transfer:
        """The last part: what is over when all is."""
        return self.parts[-1]

    def is_over(self) -> bool:
        """True once all bytes have landed; a stored prefix can be fetched from then on."""
        # The last part is over last; asking the others lets them give back what they hold.
        if self._end is not None and self.transfer.is_over() and all(part.is_over() for part in self.parts):
            end, self._end = self._end, None
            end()
        return self._end is None

    def wait(self, timeout_s: float = 60.0) -> None:
        """Blocks until then; raises `Timeout`."""
        self.transfer.wait(timeout_s)
        self.is_over()


class Prefixes:
    """Blocks of prompts, by their tokens. `with Prefixes.on_gpu(...) as kept:`, or `close()`."""

    def __init__(
        self, layout: Layout, pool: Pool, mover: Mover, path: Path | str, *, block_tokens: int = BLOCK_TOKENS
    ) -> None:
        memory = pool.memory
        self.layout, self.pool, self.block_tokens = layout, pool, block_tokens
        self._mover, self._path = mover, Path(path)
        self._pieces = Pieces(
            num_slots=memory.num_slots, slot_bytes=memory.slot_bytes, slots_per_piece=memory.slots_per_piece
        )
        self._moves: dict[int, Move] = {}  # by id: looking and adding in several threads lose none
        self._torn = False  # a fetch failed half way, and nobody has seen the end of its copies

    @classmethod
    def on_gpu(
        cls,
        device: Device,
        layout: Layout,
        cache: int,
        *,
        pool_bytes: int,
        piece_bytes: int = PIECE_BYTES,
        policy: Policy | None = None,
        path: Path | str = Path.AUTO,
    ) -> Prefixes:
        """For a cache in a GPU's memory that begins at the address `cache`; the pool is pinned."""
        pinner = DriverPinner(device.driver, device.enter)
        memory = _memory(layout, pool_bytes, piece_bytes, pinner)
        with contextlib.ExitStack() as made:  # what was made goes again if the rest is refused
            made.callback(memory.close)
            mover = made.enter_context(GpuMover(device, cache, [piece.base for piece in memory.pieces]))
            mover.prepare(path, layout.strided_rows)
            found = cls(layout, Pool(memory, policy=policy), mover, path)
            made.pop_all()
        return found

    @classmethod
    def on_cpu(
        cls,
        layout: Layout,
        cache: Any,
        *,
        pool_bytes: int,
        piece_bytes: int = PIECE_BYTES,
        policy: Policy | None = None,
    ) -> Prefixes:
        """For a cache in host memory: a flat NumPy array of bytes.

        Raises:
            ValueError: it is not that, or shorter than the layout.
        """
        if getattr(cache, "dtype", None) != np.uint8 or cache.ndim != 1 or len(cache) < layout.size_bytes:
            found = f"{getattr(cache, 'dtype', type(cache).__name__)} of shape {getattr(cache, 'shape', '?')}"
            raise ValueError(f"layout {layout.name} needs a flat array of {layout.size_bytes} uint8, not {found}")
        memory = _memory(layout, pool_bytes, piece_bytes, None)
        return cls(layout, Pool(memory, policy=policy), CpuMover(cache, _flat(memory)), Path.CPU)

    def lookup(self, token_ids: Sequence[int], *, salt: bytes = _NOBODY) -> int:
        """How many leading tokens of a prompt could be fetched now."""
        self._settle()
        return self.pool.lookup(self._keys(token_ids, salt)) * self.block_tokens

    def store(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        *,
        salt: bytes = _NOBODY,
        after: Sequence[int] = (),
        beside: bool | None = None,
    ) -> Move:
        """Keeps the full blocks of a prompt that are not kept yet; `blocks` are the cache's, in the prompt's order.

        Args:
            after: streams that still write the cache: the copies begin behind their work so far.
            beside: for the path auto: does computation run meanwhile? If not said: yes, unless `after` are all done.

        Raises:
            ValueError: fewer blocks than the prompt fills, or a bad id, or `after` where there are no streams; nothing
                has changed.
            PoolFull: there is no room; nothing has changed.
        """
        keys = self._keys(token_ids, salt)
        mine = self._checked(blocks, len(keys), after)
        self._settle()
        begun = self.pool.begin_store(keys)
        try:
            return self._begin(Direction.STORE, mine[begun.indices], begun, begun.commit, after, beside)
        except BaseException:
            begun.abort(lambda: self._mover.is_idle(Direction.STORE))  # some of the copies may be under way
            raise

    def fetch(
        self,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        *,
        salt: bytes = _NOBODY,
        after: Sequence[int] = (),
        beside: bool | None = None,
        layers: int | Callable[[int, int], int | None] | None = None,
    ) -> Move:
        """Brings the leading blocks of a prompt that are kept into `blocks` of the cache; `num_tokens` says how far.

        Args:
            after: streams that still read or write those blocks: the copies begin behind their work so far.
            beside: as for `store`.
            layers: bring so many layers at a time, the first ones first; `Move.parts` has a transfer for each step, so
                that a layer can be computed while the next ones are under way. Or a function that says how many, or
                None: all at once; it is told the number of blocks, and how few copies can bring them.

        Raises:
            ValueError: fewer blocks than the prompt fills, or a bad id; nothing has changed.
            HardwareError: the driver refused. What it had taken has landed, unless that took 10 s: until not `is_torn`
                the blocks may be written.
        """
        keys = self._keys(token_ids, salt)
        mine = self._checked(blocks, len(keys), after)
        self._settle()
        begun = self.pool.begin_fetch(keys, partial=True)
        try:
            step = layers if not callable(layers) else layers(len(begun), self._fewest_copies(begun))
            return self._begin(Direction.FETCH, mine[: len(begun)], begun, begun.release, after, beside, step)
        except BaseException:
            begun.release(lambda: self._mover.is_idle(Direction.FETCH))
            raise

    def _begin(
        self,
        direction: Direction,
        blocks: Any,
        begun: Store | Fetch,
        end: Callable[[], None],
        after: Sequence[int],
        beside: bool | None,
        layers: int | None = None,
    ) -> Move:
        request = (direction, self.layout, blocks, begun.slots, self._pieces)
        tables = [table(*request)] if layers is None else layer_tables(*request, layers=layers)
        size_bytes = sum(copies.size_bytes for copies in tables)
        parts: list[Transfer] = []
        try:
            for n, copies in enumerate(tables):  # of one direction: each begins behind the one before
                after = () if n else after
                parts.append(self._mover.submit(direction, copies, self._path, after=after, beside=beside))
            begun.guard(parts[-1].is_over)
            move = Move(parts, len(blocks) * self.block_tokens, size_bytes, end, layers)
            self._moves[id(move)] = move
        except BaseException:
            if direction is Direction.FETCH:  # the caller gives its blocks to others next
                self._land(parts)
            raise
        return move

    def _land(self, parts: list[Transfer]) -> None:
        """Waits for the copies of a fetch that failed: whole parts, and what was issued of another one."""
        self._torn, deadline = True, time.monotonic() + _LAND_S
        try:
            for part in parts:
                part.wait(max(deadline - time.monotonic(), 0))
            while self.is_torn:
                if time.monotonic() > deadline:
                    raise Timeout(f"they were not over after {_LAND_S:g} s")
                time.sleep(_PAUSE_S)
        except (HardwareError, Timeout) as error:  # what made the fetch fail says more
            logger.warning("a fetch failed half way, and its copies could not be waited for: %s", error)

    @property
    def is_torn(self) -> bool:
        """True while copies of a fetch that has failed may still write into its blocks."""
        with contextlib.suppress(HardwareError):  # nobody knows then
            self._torn = self._torn and not self._mover.is_idle(Direction.FETCH)
        return self._torn

    def _fewest_copies(self, begun: Fetch) -> int:
        return self._mover.fewest_copies(self._path, len(begun), begun.num_runs)

    def _checked(self, blocks: Sequence[int], needed: int, after: Sequence[int]) -> Any:
        """The first `needed` blocks; refuses what a mover would, before the pool evicts anything for it."""
        if type(self._mover) is CpuMover:  # one that is derived from it may have streams
            self._mover.check(after)
        return _blocks(blocks, needed, self.layout.num_blocks)

    def _keys(self, token_ids: Sequence[int], salt: bytes) -> list[bytes]:
        return block_hashes(token_ids, self.block_tokens, salt=salt)

    def _settle(self) -> None:
        """Ends what has landed, whether or not its caller asks."""
        for number, move in list(self._moves.items()):
            if move.is_over():
                self._moves.pop(number, None)

    def stats(self) -> Stats:
        """Of the pool."""
        self._settle()
        return self.pool.stats()

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits for what is under way and gives the memory back. Safe to call twice."""
        for move in list(self._moves.values()):
            move.wait(timeout_s)
        self._moves = {}
        if isinstance(self._mover, GpuMover):
            self._mover.close(timeout_s)
        self.pool.close()

    def __enter__(self) -> Prefixes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def slots_of(pool_bytes: int, slot_bytes: int) -> int:
    """How many blocks a pool of so many bytes holds; `ValueError` if none."""
    if not hasattr(pool_bytes, "__index__"):
        raise TypeError(f"pool_bytes must be an int, such as 16 << 20, not {pool_bytes!r}")
    if pool_bytes < slot_bytes:
        raise ValueError(f"a pool of {pool_bytes} bytes holds no block: one has {slot_bytes} bytes")
    return pool_bytes // slot_bytes


def _memory(layout: Layout, pool_bytes: int, piece_bytes: int, pinner: DriverPinner | None) -> HostMemory:
    slots = slots_of(pool_bytes, layout.slot_bytes)
    return HostMemory(slots, layout.slot_bytes, piece_bytes=piece_bytes, pinner=pinner)


def _flat(memory: HostMemory) -> list[Any]:
    """Each piece as one array of bytes."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * piece.size_bytes).from_address(piece.base)) for piece in memory.pieces
    ]


def _blocks(blocks: Sequence[int], needed: int, limit: int) -> Any:
    given = np.asarray(blocks).reshape(-1)
    if len(given) < needed:
        raise ValueError(f"the prompt fills {needed} blocks, only {len(given)} are named")
    found = given[:needed]
    if needed and found.dtype.kind not in "iu" and not all(type(block) is int for block in found.tolist()):
        raise ValueError(f"blocks must be whole numbers, not {found.dtype}: {found.tolist()[:8]}")
    out = found[(found < 0) | (found >= limit)]
    if out.size:
        raise ValueError(f"blocks: {out[0]} is out of range; there are 0..{limit - 1}")
    if len(np.unique(found)) < needed:
        raise ValueError("a prompt has each block of the cache once; one is named twice")
    return found.astype(np.int64)
