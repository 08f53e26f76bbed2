"""The path `staged`: contiguous copies between host memory and staging memory on the GPU, and a kernel beyond.

An engine pays for every row of a strided copy, and two to three times as much beside computation, when memory answers
late; a contiguous copy pays for none, and one of parts of slots, for a few layers, for few. The kernel moves rows at
the speed of the GPU's memory, so it needs multiprocessors for a few percent of the time that the link needs.

Owns staging memory in chunks, used round and round, and the order between the two halves. A chunk is filled only after
it was emptied, and emptied only after it was filled. The kernel waits for a place between the kernels of others, and
next to a kernel that holds all multiprocessors one launch in a while is all it gets: so each moves whatever is ready,
and says by a word in memory, not by its end, which chunks are done with. Copies and the transfer's end wait for those.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import NotSupported, Timeout
from dovetail.hw.gpu.device import Device, Pinned
from dovetail.hw.gpu.driver import WAIT, WORD, WRITE
from dovetail.kv.choose import VECTOR_BYTES
from dovetail.kv.planner import Direction

Ints = NDArray[np.int64]
CHUNK_BYTES, NUM_CHUNKS = 32 << 20, 8
_WORD_BYTES = 8
_AHEAD = 3  # chunks that copies are issued before the kernel
_FEWEST_CHUNKS = 3  # of a small transfer, so that its two halves overlap
_LEAST_BYTES = 4 << 20
_PAUSE_S = 50e-6
_TILE_WORDS, _NUM_WARPS = 2048, 8
_PER_MULTIPROCESSOR = 4  # programs


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """What a launch of the kernel works on."""

    direction: Direction
    words: int  #: address of what the kernel's docstring lists
    staging: int  #: address
    num_copies: int
    num_rows: int
    row_bytes: int
    per_chunk: int  #: copies in a chunk
    chunk_bytes: int
    num_chunks: int
    programs: int

    @property
    def size_bytes(self) -> int:
        """Of a copy."""
        return self.num_rows * self.row_bytes

    def done(self, n: int) -> int:
        """Address of the word that counts the programs that are done with chunk n."""
        return self.words + _WORD_BYTES * (1 + 2 * self.programs + 2 * self.num_copies + n)


#: Puts the kernel into a raw stream.
Launch = Callable[[Half, int], None]


class Staging:
    """Staging memory for one direction. `close()` it when nothing is under way."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        num_chunks: int = NUM_CHUNKS,
        launch: Launch | None = None,
    ) -> None:
        if chunk_bytes % VECTOR_BYTES or chunk_bytes < VECTOR_BYTES or num_chunks < 2:
            raise ValueError(f"staging needs 2 chunks of whole {VECTOR_BYTES} bytes, not {num_chunks} of {chunk_bytes}")
        if not device.caps.stream_gates:
            raise NotSupported("the path staged needs streams that can wait for words in memory; use dma-2d")
        self.chunk_bytes, self.num_chunks = chunk_bytes, num_chunks
        self._device, self._driver, self._direction = device, device.driver, direction
        self.launch = launch or Kernel(device)
        self.programs = num_programs(device)
        with contextlib.ExitStack() as made:  # what was made goes again if the rest is refused
            self._memory = self._driver.device_alloc(chunk_bytes * num_chunks)
            made.callback(self._driver.device_free, self._memory)
            self._kernels = self._driver.stream_create(priority=min(self._driver.stream_priorities()))
            made.callback(self._driver.stream_destroy, self._kernels)
            self._ends = self._driver.stream_create()
            made.callback(self._driver.stream_destroy, self._ends)
            self._events = [device.take_event() for _ in range(num_chunks)]  # by place: behind its copies
            self._made = made.pop_all()
        # Each table begins with the chunks that are ready (all, for a store), and each program's next tile and count.
        self._head = np.zeros(1 + 2 * self.programs, np.int64)
        self._head[0] = 0 if direction is Direction.FETCH else num_chunks
        self._head[1 : 1 + self.programs] = np.arange(self.programs)
        self._word = np.zeros(1, WORD)
        self._emptied: dict[int, tuple[_Table, int]] = {}  # of a fetch, by place: the word that says so, and its table
        self._tables: list[_Table] = []
        self._reserved: _Table | None = None  # for the next run
        self._lost: list[_Table] = []  # of runs that failed half way: nobody can tell when they are free

    def run(
        self, device: Ints, pitch: Ints, host: Ints, piece: Ints, num_rows: int, row_bytes: int, stream: int
    ) -> int:
        """Puts copies of `num_rows` rows each, contiguous on the host, into `stream` and into its own.

        Args:
            device: addresses in the cache, `pitch` apart from row to row.
            host: addresses in pinned memory.
            piece: the registration that each of those is in: one copy may not reach into two, even if they adjoin.
            stream: for the engine's half.

        Returns:
            The stream that is done when the last byte has landed.
        """
        size = num_rows * row_bytes
        if size > self.chunk_bytes:
            raise ValueError(f"a copy of {size} bytes does not fit into a chunk of {self.chunk_bytes}")
        if (np.bitwise_or.reduce(device | pitch) | row_bytes) % VECTOR_BYTES:
            raise NotSupported(f"the path staged moves whole {VECTOR_BYTES} bytes; use dma-2d for these rows")
        fetch = self._direction is Direction.FETCH
        per_chunk = self._per_chunk(len(device), size)
        num_chunks = -(-len(device) // per_chunk)
        table = self._table(device, pitch, num_chunks)
        half = Half(
            direction=self._direction, words=table.there, staging=self._memory, num_copies=len(device),
            num_rows=num_rows, row_bytes=row_bytes, per_chunk=per_chunk, chunk_bytes=self.chunk_bytes,
            num_chunks=self.num_chunks, programs=self.programs,
        )  # fmt: skip
        try:
            self._driver.copy(table.there, table.here.address, table.size_bytes, stream)
            self._device.order(stream, self._kernels)  # a launch of a store may fill all chunks: all are empty by then
            runs = self._runs(host, piece, size, per_chunk)
            if fetch:
                self._fetch(half, runs, table, stream)
            else:
                for n in range(num_chunks):
                    self._store(half, n, runs, stream)
            return self._end(table, half, num_chunks, stream)
        except BaseException:
            self._lost.append(table)
            raise

    def _table(self, device: Ints, pitch: Ints, num_chunks: int) -> _Table:
        """What the kernel reads and counts."""
        table = self._take(len(self._head) + 2 * len(device) + num_chunks)
        table.fill(self._head, device, pitch, np.zeros(num_chunks, np.int64))
        return table

    def _end(self, table: _Table, half: Half, num_chunks: int, stream: int) -> int:
        """The stream of the transfer's end. The table is free when nobody reads its words any more."""
        if self._direction is Direction.FETCH:
            self._device.order(stream, self._ends)  # the table's own words must be there before one is waited for
            self._words(WAIT, half.done(num_chunks - 1), self.programs, self._ends)
            self._driver.event_record(table.ends[0], self._ends)
        else:
            self._driver.event_record(table.ends[0], stream)
        self._driver.event_record(table.ends[1], self._kernels)
        table.is_new = False
        self._tables.append(table)
        return self._ends if self._direction is Direction.FETCH else stream

    def _per_chunk(self, num_copies: int, size: int) -> int:
        """Copies of a chunk: as many as fit, fewer where there would be few chunks."""
        most = self.chunk_bytes // size
        wanted = -(-num_copies // _FEWEST_CHUNKS)
        return max(1, min(most, max(wanted, _LEAST_BYTES // size)))

    def _fetch(self, half: Half, runs: _Runs, table: _Table, stream: int) -> None:
        """Copies are issued some chunks ahead of the kernel, whose launch takes longer than a copy's."""
        ahead, num_chunks = min(_AHEAD, self.num_chunks - 1), len(runs.of_chunk)
        for n in range(num_chunks + ahead):
            if n < num_chunks:
                self._bring(half, n, runs, stream)
            if (m := n - ahead) >= 0:
                place = m % self.num_chunks
                self._driver.stream_wait_event(self._kernels, self._events[place])
                self.launch(half, self._kernels)
                self._emptied[place] = (table, half.done(m))

    def _bring(self, half: Half, n: int, runs: _Runs, stream: int) -> None:
        place = n % self.num_chunks
        if place in self._emptied:
            self._words(WAIT, self._emptied[place][1], self.programs, stream)
        for staged, host, number in runs.of_chunk[n].tolist():
            self._driver.copy_rows(staged, half.size_bytes, host, runs.pitch, half.size_bytes, number, stream)
        self._words(WRITE, half.words, n + 1, stream)
        self._driver.event_record(self._events[place], stream)

    def _store(self, half: Half, n: int, runs: _Runs, stream: int) -> None:
        place = n % self.num_chunks
        if n >= self.num_chunks:  # not before there is something to do for it
            self._driver.stream_wait_event(self._kernels, self._events[place])
        self.launch(half, self._kernels)
        self._words(WAIT, half.done(n), self.programs, stream)
        for staged, host, number in runs.of_chunk[n].tolist():
            self._driver.copy_rows(host, runs.pitch, staged, half.size_bytes, half.size_bytes, number, stream)
        self._words(WRITE, half.words, self.num_chunks + n + 1, stream)
        self._driver.event_record(self._events[place], stream)

    def _runs(self, host: Ints, piece: Ints, size: int, per_chunk: int) -> _Runs:
        """Copies that follow each other on the host as one, inside a piece and a chunk."""
        steps = host[1:] - host[:-1]
        apart = steps[steps >= size]
        pitch = int(apart.min()) if len(apart) else size  # of slots, of which these copies may be a part
        begins = np.ones(len(host), bool)
        begins[1:] = (steps != pitch) | (piece[1:] != piece[:-1])
        begins[::per_chunk] = True
        (first,) = begins.nonzero()
        ends = np.concatenate((first[1:], [len(host)]))
        chunk, inside = np.divmod(first, per_chunk)
        staged = self._memory + chunk % self.num_chunks * self.chunk_bytes + inside * size
        found = np.stack((staged, host[first], ends - first), axis=1)
        cuts = [*(inside == 0).nonzero()[0].tolist(), len(first)]
        return _Runs(pitch, [found[a:b] for a, b in itertools.pairwise(cuts)])

    def _words(self, kind: int, address: int, value: int, stream: int) -> None:
        self._word[0] = kind, address, value
        self._driver.stream_words(self._word, stream)

    def _take(self, num_words: int) -> _Table:
        """The table that is reserved, another one that nobody uses any more, or a new one."""
        reserved = self._reserved
        if reserved and reserved.num_words >= num_words:
            self._reserved = None
            return reserved
        for n, table in enumerate(self._tables):
            if table.num_words >= num_words and (table.is_new or all(map(self._driver.event_done, table.ends))):
                # Its chunks are empty, and its words are about to mean something else.
                self._emptied = {place: found for place, found in self._emptied.items() if found[0] is not table}
                return self._tables.pop(n)
        return _Table(self._device, num_words)

    def reserve(self, num_copies: int) -> None:
        """Takes what a run of so many copies needs, so that it can't fail for want of memory."""
        table = self._take(len(self._head) + 3 * num_copies)
        if self._reserved:  # too small
            self._tables.append(self._reserved)
        self._reserved = table

    def is_idle(self) -> bool:
        """True if its streams have nothing left to do."""
        return self._driver.stream_done(self._kernels) and self._driver.stream_done(self._ends)

    def close(self, timeout_s: float = 60.0) -> None:
        """Gives the memory back, after what its streams have been given; raises `Timeout`."""
        deadline = time.monotonic() + timeout_s
        while not self.is_idle():
            if time.monotonic() > deadline:
                raise Timeout(f"staged copies were under way for {timeout_s:g} s; their memory is kept")
            time.sleep(_PAUSE_S)
        for table in filter(None, [*self._tables, *self._lost, self._reserved]):
            table.close()
        for event in self._events:
            self._device.give_event(event)
        self._made.close()
        self._tables, self._lost, self._events, self._emptied, self._reserved = [], [], [], {}, None


class _Runs(NamedTuple):
    """Copies that are equally far apart on the host, so that an engine moves several at once."""

    pitch: int  #: how far
    of_chunk: list[Ints]  #: of each chunk rows of (address in it, host address, number of copies)


class _Table:
    """Numbers for the kernel: written here, read there."""

    def __init__(self, device: Device, num_words: int) -> None:
        self.num_words = 1 << (num_words - 1).bit_length()
        self.there = device.driver.device_alloc(self.num_words * _WORD_BYTES)
        try:
            self.here = Pinned(device.driver, self.num_words * _WORD_BYTES)
        except BaseException:
            device.driver.device_free(self.there)
            raise
        self.ends = device.take_event(), device.take_event()  #: when nobody uses it any more
        self.is_new = True  #: its events say nothing yet: others may have used them
        self.size_bytes = 0
        self._device = device

    def fill(self, *columns: Ints) -> None:
        """With these numbers, one column behind the other."""
        begin, numbers = 0, self.here.array.view(np.int64)
        for column in columns:
            numbers[begin : begin + len(column)] = column
            begin += len(column)
        self.size_bytes = begin * _WORD_BYTES

    def close(self) -> None:
        self.here.close()
        self._device.driver.device_free(self.there)
        for event in self.ends:
            self._device.give_event(event)


@functools.cache
def has_kernel() -> bool:
    """Are Triton and a GPU that torch can use here?"""
    if importlib.util.find_spec("triton") is None:
        return False
    import torch

    cuda: Any = torch.cuda
    return bool(cuda.is_available())


class Kernel:
    """The kernel, by Triton. Calling it puts it into a stream; raises `NotSupported` where there is none."""

    def __init__(self, device: Device) -> None:
        if not has_kernel():
            what = "the path staged needs Triton and a GPU that torch can use"
            raise NotSupported(f"{what}: pip install 'dovetail-ml[gpu]'")
        import torch

        from dovetail.kv.kernels.staged import staged_kernel

        self._index, self._jit = device.index, staged_kernel
        self._programs = num_programs(device)
        self._cuda: Any = torch.cuda
        self._made: dict[tuple[bool, int], Any] = {}  # by what it was compiled for

    def prepare(self, row_bytes: int) -> None:
        """Compiles it for rows of this length, both ways, so that no transfer waits for that."""
        with self._cuda.device(self._index):
            for direction in Direction:
                named = _compiled_for(direction, row_bytes)
                kernel = self._jit.warmup(*(0,) * 8, **named, num_warps=_NUM_WARPS, grid=(self._programs,))
                self._keep(named, kernel)

    def __call__(self, half: Half, stream: int) -> None:
        named = _compiled_for(half.direction, half.row_bytes)
        numbers = (
            half.words, half.staging, half.num_copies, half.num_rows,
            half.row_bytes // VECTOR_BYTES, half.per_chunk, half.chunk_bytes, half.num_chunks,
        )  # fmt: skip
        known = self._made.get((named["UNPACK"], named["BLOCK"]))
        if known is not None and self._cuda.current_device() == self._index:
            # Nothing is specialized: the same code, without Triton's look at every argument.
            known(*numbers, *named.values(), stream=stream)
            return
        external = self._cuda.ExternalStream(stream, device=self._index)
        with self._cuda.device(self._index), self._cuda.stream(external):
            self._keep(named, self._jit[(self._programs,)](*numbers, **named, num_warps=_NUM_WARPS))

    def _keep(self, named: dict[str, Any], kernel: Any) -> None:
        self._made[named["UNPACK"], named["BLOCK"]] = kernel[self._programs, 1, 1]


def _compiled_for(direction: Direction, row_bytes: int) -> dict[str, Any]:
    """The constants of the kernel, in its order."""
    block = min(1 << (row_bytes // _WORD_BYTES - 1).bit_length(), _TILE_WORDS)
    return {"UNPACK": direction is Direction.FETCH, "BLOCK": block, "ROWS": _TILE_WORDS // block}


def num_programs(device: Device) -> int:
    """That a launch has."""
    return _PER_MULTIPROCESSOR * device.driver.num_multiprocessors(device.index)
