"""`dovetail bench kv`: blocks of a paged KV cache between host memory and a GPU (or host memory), by path.

Owns the rows. Block ids and slots are random; beside every path stands what one contiguous copy per block of the same
bytes reaches (`contiguous`). Contenders are timed in turn, round by round, and each is
checked on poisoned rows before and after.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dovetail.kv.choose import Path
from dovetail.kv.layout import Layout, block_outermost
from dovetail.kv.models import Model
from dovetail.kv.mover import CpuMover, GpuMover, Transfer
from dovetail.kv.planner import Direction, Pieces, Table, table
from dovetail.measure.stats import median

if TYPE_CHECKING:
    from dovetail.bench.gpu.session import Session

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
Bytes = NDArray[np.uint8]
CONTIGUOUS = "contiguous"
ENTRIES = (128, 512, 2048, 0)  #: of a batch; 0 is all in one call, as vLLM calls it
_POISON = 0xA5
_SAMPLES = 64
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What is measured."""

    models: tuple[Model, ...]
    tokens: tuple[int, ...]
    cache_bytes: int
    paths: tuple[str, ...]
    outermost: str = "layer"
    rounds: int = 5
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.models or not self.tokens or not self.paths or min(self.tokens) < 1:
            raise ValueError("a bench of kv needs layouts, numbers of tokens above 0, and paths")


class Place(Protocol):
    """Where cache and pool lie."""

    backend: str

    def paths(self) -> tuple[str, ...]:
        """What can move bytes here."""

    def begin(self, cache_bytes: int, pool_bytes: int) -> None:
        """Takes the memory; raises ValueError or NotSupported where there is not so much."""

    def submit(self, direction: Direction, copies: Table, path: Path, entries: int | None) -> Transfer: ...

    def host(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the pool, to be read and written."""

    def read(self, offset: int, size_bytes: int) -> Bytes:
        """A copy of bytes of the cache."""

    def fill(self, offset: int, size_bytes: int, byte: int) -> None:
        """Overwrites bytes of the cache."""


def measure(spec: Spec, place: Place, progress: Progress | None = None) -> tuple[list[Row], list[str]]:
    """A row for each layout, number of tokens, direction and contender; and lines about what was left out."""
    rows: list[Row] = []
    notes: list[str] = []
    fitting = []
    for model in spec.models:
        for tokens in spec.tokens:
            blocks = model.blocks(tokens)
            if blocks * model.block_bytes > spec.cache_bytes:
                notes.append(f"{model.name}: {tokens} tokens do not fit into the cache")
            else:
                fitting.append((model, tokens, blocks))
    if not fitting:
        return rows, notes
    place.begin(spec.cache_bytes, max(blocks * model.block_bytes for model, _, blocks in fitting))
    for done, (model, tokens, blocks) in enumerate(fitting):
        if progress:
            progress(done, len(fitting), f"{model.name}, {tokens} tokens")
        rows += _case(spec, place, model, tokens, blocks)
    return rows, notes


def _case(spec: Spec, place: Place, model: Model, tokens: int, count: int) -> list[Row]:
    num_blocks = spec.cache_bytes // model.block_bytes
    layout = model.layout(num_blocks, outermost=spec.outermost)
    whole = block_outermost(CONTIGUOUS, num_layers=model.num_layers, row_bytes=model.row_bytes, num_blocks=num_blocks)
    pieces = Pieces(num_slots=count, slot_bytes=layout.slot_bytes, slots_per_piece=count)
    rng = np.random.default_rng([spec.seed, count, model.num_layers, model.row_bytes])
    blocks, slots = rng.permutation(num_blocks)[:count], rng.permutation(count)
    rows = []
    for direction in Direction:
        made = []
        for name, of, path, entries in _contenders(spec, place, layout, whole):
            began = time.perf_counter_ns()
            copies = table(direction, of, blocks, slots, pieces)
            plan_us = (time.perf_counter_ns() - began) / 1e3
            submit = functools.partial(place.submit, direction, copies, path, entries)
            sample = _Sample(place, of, blocks, slots, rng)
            made.append(_Contender(name, entries, copies, plan_us, submit, sample))
        _race(direction, made, spec.rounds)
        same = {
            "collective": "kv", "backend": place.backend, "layout": model.name, "outermost": spec.outermost,
            "direction": str(direction), "tokens": tokens, "blocks": count, "num_layers": model.num_layers,
            "row_bytes": model.row_bytes, "cache_bytes": spec.cache_bytes,
        }  # fmt: skip
        rows += _shared([same | contender.row() for contender in made])
    return rows


@dataclass(slots=True)
class _Contender:
    """One way to move the same blocks."""

    name: str
    entries: int | None
    copies: Table
    plan_us: float
    submit: Callable[[], Transfer]
    sample: _Sample
    right: bool = True
    submits_us: list[float] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)

    def once(self) -> tuple[float, float]:
        """Microseconds until everything was submitted, and until it had landed."""
        began = time.perf_counter_ns()
        transfer = self.submit()
        submitted = time.perf_counter_ns()
        transfer.wait(_TIMEOUT_S)
        return (submitted - began) / 1e3, (time.perf_counter_ns() - began) / 1e3

    def row(self) -> Row:
        """Its part of a row; a contender whose bytes came changed has no time."""
        time_us = round(median(self.times_us), 1) if self.right else None
        return {
            "size_bytes": self.copies.size_bytes, "path": self.name, "entries_per_call": self.entries,
            "copies": len(self.copies), "plan_us": round(self.plan_us, 1),
            "submit_us": round(median(self.submits_us), 1) if self.right else None, "time_us": time_us,
            "bandwidth_gbps": self.copies.size_bytes / time_us / 1e3 if time_us else None, "correct": self.right,
            "iterations": len(self.times_us),
        }  # fmt: skip


def _race(direction: Direction, contenders: Sequence[_Contender], rounds: int) -> None:
    """Checks all, times them in turn, round by round, and checks them again."""
    for contender in contenders:
        contender.right = contender.sample.arrives(direction, contender.submit)
    going = [contender for contender in contenders if contender.right]
    for n in range(rounds + 1):
        for contender in going:
            submit_us, time_us = contender.once()
            if n:  # the first round warms up
                contender.submits_us.append(submit_us)
                contender.times_us.append(time_us)
    for contender in going:
        contender.right = contender.sample.arrives(direction, contender.submit)


def _contenders(spec: Spec, place: Place, layout: Layout, whole: Layout) -> list[tuple[str, Layout, Path, int | None]]:
    """(name, layout, path, entries of a call)."""
    strided = Path.CPU if Path.CPU in place.paths() else Path.DMA_2D
    made: list[tuple[str, Layout, Path, int | None]] = [(CONTIGUOUS, whole, strided, None)]
    for name in spec.paths:
        path = Path(name)
        if path is Path.DMA_BATCH:
            made += [(f"{path} {n or 'one call'}", layout, path, n or 1 << 20) for n in ENTRIES]
        else:
            made.append((str(path), layout, path, None))
    return made


def _shared(rows: list[Row]) -> list[Row]:
    """With the share of what contiguous copies reach."""
    best = next(row["bandwidth_gbps"] for row in rows if row["path"] == CONTIGUOUS)
    return [row | {"share": row["bandwidth_gbps"] / best if best and row["bandwidth_gbps"] else None} for row in rows]


class _Sample:
    """Random rows of the blocks that are moved: fresh random bytes at the source, poison at the destination."""

    def __init__(self, place: Place, layout: Layout, blocks: Any, slots: Any, rng: np.random.Generator) -> None:
        self._place, self._rng = place, rng
        group = layout.groups[0]
        k = rng.integers(0, len(blocks), _SAMPLES)
        row = rng.integers(0, group.num_rows, _SAMPLES)
        pairs = set(zip(k.tolist(), row.tolist(), strict=True))
        self._size = group.row_bytes
        self._rows = [
            (int(group.bases[r] + blocks[n] * group.strides[r]), int(slots[n] * layout.slot_bytes + r * self._size))
            for n, r in sorted(pairs)
        ]

    def arrives(self, direction: Direction, submit: Callable[[], Transfer]) -> bool:
        """Whether what is at the source of each row is at its destination afterwards."""
        wanted = []
        fetch = direction is Direction.FETCH
        for device, host in self._rows:
            there = self._place.host(host, self._size)
            if fetch:
                there[:] = self._rng.integers(0, 256, self._size, dtype=np.uint8)
                wanted.append(there.copy())
                self._place.fill(device, self._size, _POISON)
            else:
                byte = int(self._rng.integers(0, 256))
                self._place.fill(device, self._size, byte)
                wanted.append(np.full(self._size, byte, np.uint8))
                there[:] = byte ^ 0xFF
        submit().wait(_TIMEOUT_S)
        for (device, host), right in zip(self._rows, wanted, strict=True):
            came = self._place.read(device, self._size) if fetch else self._place.host(host, self._size)
            if not np.array_equal(came, right):
                return False
        return True


class CpuPlace:
    """Cache and pool in host memory."""

    backend = "cpu"

    def paths(self) -> tuple[str, ...]:
        """Plain copies."""
        return (Path.CPU,)

    def begin(self, cache_bytes: int, pool_bytes: int) -> None:
        """Takes the memory and touches it."""
        from dovetail.hw import memory

        memory.require(cache_bytes + pool_bytes)
        self._cache, self._pool = np.zeros(cache_bytes, np.uint8), np.zeros(pool_bytes, np.uint8)
        self._cache[::4096], self._pool[::4096] = 1, 1
        self._mover = CpuMover(self._cache, [self._pool])

    def submit(self, direction: Direction, copies: Table, path: Path, entries: int | None) -> Transfer:
        """Moves at once."""
        return self._mover.submit(direction, copies, path)

    def host(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the pool."""
        return self._pool[offset : offset + size_bytes]

    def read(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the cache."""
        return self._cache[offset : offset + size_bytes].copy()

    def fill(self, offset: int, size_bytes: int, byte: int) -> None:
        """Overwrites bytes of the cache."""
        self._cache[offset : offset + size_bytes] = byte


class GpuPlace:
    """The cache in a GPU's memory, the pool in pinned memory beside it."""

    backend = "cuda"

    def __init__(self, session: Session) -> None:
        self._session = session
        self._mover: GpuMover | None = None

    def paths(self) -> tuple[str, ...]:
        """The forms that copy engines know."""
        forms: tuple[str, ...] = (Path.AUTO, Path.DMA_2D, Path.DMA_BATCH, Path.DMA_LOOP)
        return (*forms, Path.KERNEL) if self._session.has_torch else forms

    def begin(self, cache_bytes: int, pool_bytes: int) -> None:
        """Takes and pins the memory."""
        self._cache = self._session.arena("device", cache_bytes).take(cache_bytes)
        self._pool = self._session.arena("host", pool_bytes).take(pool_bytes)
        self._view: Bytes = self._pool.numpy()
        self._mover = GpuMover(self._session.device, self._cache.data_ptr(), [self._pool.data_ptr()])

    def submit(self, direction: Direction, copies: Table, path: Path, entries: int | None) -> Transfer:
        """Starts copies."""
        assert self._mover is not None
        return self._mover.submit(direction, copies, path, entries_per_call=entries)

    def host(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the pool."""
        return self._view[offset : offset + size_bytes]

    def read(self, offset: int, size_bytes: int) -> Bytes:
        """Bytes of the cache."""
        self._session.synchronize()
        found: Bytes = self._cache[offset : offset + size_bytes].cpu().numpy()
        return found

    def fill(self, offset: int, size_bytes: int, byte: int) -> None:
        """Overwrites bytes of the cache."""
        self._cache[offset : offset + size_bytes].fill_(byte)
        self._session.synchronize()

    def close(self) -> None:
        """Waits for what is under way."""
        if self._mover is not None:
            self._mover.close()


def lines(rows: Sequence[Row]) -> list[str]:
    """The verdict: for each layout and direction, the share of contiguous copies, and the ratio to the other paths."""
    found = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        for direction in Direction:
            here = [row for row in rows if (row["layout"], row["direction"]) == (layout, direction) and row["share"]]
            best: dict[str, list[float]] = {}
            for row in here:
                best.setdefault(row["path"], []).append(row["share"])
            shown = ", ".join(f"{path} {min(s):.0%}-{max(s):.0%}" for path, s in best.items() if path != CONTIGUOUS)
            if shown:
                found.append(f"{layout} {direction}: of one contiguous copy per block: {shown}")
    wrong = sum(not row["correct"] for row in rows)
    return [*found, f"{wrong} of {len(rows)} results WRONG" if wrong else "all correct"]
