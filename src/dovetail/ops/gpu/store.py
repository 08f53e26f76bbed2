"""The transport `store`: one persistent kernel per operator, whose programs write to peers while they compute.

Owns the memory that the ranks of a group share for it (signal words, staging), the tables of tiles and the launches.
Device-agnostic: on a GPU it launches on torch's current stream and returns before the kernel ends; under Triton's
interpreter it works on the CPU heap, one program per kernel, and returns when it has ended.

A kernel waits for peers while it holds multiprocessors, so all programs of all ranks must fit on their GPU at once: R
ranks that share one get at most floor(multiprocessors / R) programs each. Every wait is bounded; one that runs out ends
the kernel, and the next call (or `check`) raises `Timeout` and the group is broken.

`gemv_all_reduce`, `all_gather_matmul` and `matmul_reduce_scatter` can be captured in a CUDA graph once they have run
before with that shape: run numbers are counted on the device. Memory of captured calls is kept until `close`.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.errors import DovetailError, MismatchError, NotSupported, Timeout
from dovetail.hw.cpu import native
from dovetail.hw.world import Group
from dovetail.language import Addresses, Symmetric
from dovetail.language.symmetric import indexed
from dovetail.ops.gpu import tiles
from dovetail.ops.gpu.tiles import Blocks, Order

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Looks per second of a kernel that waits: about what a GPU does, and what the interpreter does.
_LOOKS_PER_S = 1_000_000
_INTERPRETED_LOOKS_PER_S = 5_000
#: What `kernels.protocol` calls what a rank waits for.
_WHAT = ("begin its part", "finish its part", "send a slice", "copy its rows")
_TEXT_BYTES = 160
_TABLE_WORDS = 1 << 14
#: Tables of tiles that are kept for splits seen before.
_MOST_SPLITS = 256
#: Words of a call on this rank alone: run number, programs that ended, a wait ran out.
_LOCAL_WORDS = 3
_INTERPRETED = Blocks(height=16, width=32, depth=32, group=2, warps=4, stages=1)
#: Elements of one step of a bag kernel, and rows of one bag in it at most.
_BAG_ELEMENTS, _MOST_DEPTH = 16384, 16


@dataclass(slots=True)
class _State:
    """What the ranks share for calls of one kind. Its runs follow each other."""

    signals: Symmetric
    local: torch.Tensor
    stage: Symmetric | None = None
    result: Symmetric | None = None  #: where peers store what a captured call then copies to its output


@dataclass(slots=True)
class _Rows:
    """A table of tiles on the device, and counters that only kernels with this table use."""

    blocks: Blocks
    tiles: torch.Tensor
    segments: torch.Tensor
    slice_tiles: torch.Tensor
    counters: torch.Tensor
    even: bool


class _Tables:
    """Addresses on the device. An entry is written once and never again: kernels in flight hold its place.

    On a GPU an entry is copied from pinned memory in torch's current stream, other streams wait for that. One that is
    made while a graph is captured is copied by every replay, and is not used by other calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: dict[tuple[Any, ...], torch.Tensor] = {}
        self._captured: dict[tuple[Any, ...], torch.Tensor] = {}
        self._fresh: dict[tuple[Any, ...], Any] = {}  # copies that may not be done
        self._chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._used = _TABLE_WORDS

    def of(self, addresses: NDArray[np.int64]) -> torch.Tensor:
        """The table of these addresses."""
        key = (*addresses.tolist(),)
        capturing = _is_capturing(self._device)
        found = self._found.get(key)
        if found is not None and not capturing and key in self._fresh:
            event = self._fresh[key]
            if event.query():
                del self._fresh[key]
            else:
                torch.cuda.current_stream(self._device).wait_event(event)
        if found is None and capturing:
            found = self._captured.get(key)
        return self._made(key, capturing) if found is None else found

    def _made(self, key: tuple[int, ...], capturing: bool) -> torch.Tensor:
        if self._used + len(key) > _TABLE_WORDS:
            if capturing:
                raise NotSupported("no room for a table of addresses while a graph is captured: call it once before")
            here = torch.zeros(_TABLE_WORDS, dtype=torch.int64, pin_memory=self._device.type != "cpu")
            self._chunks.append((here, here if self._device.type == "cpu" else here.to(self._device)))
            self._used = 0
        here, there = (words[self._used : self._used + len(key)] for words in self._chunks[-1])
        self._used += -(-len(key) // 2) * 2
        here.copy_(torch.tensor(key, dtype=torch.int64))
        if self._device.type != "cpu":
            there.copy_(here, non_blocking=True)
            if not capturing:
                self._fresh[key] = _recorded(self._device)
        (self._captured if capturing else self._found)[key] = there
        return there


class Store:
    """The fused operators of a group on one kind of device, by stores to peers. All members make one together.

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
        self._states: dict[Hashable, _State] = {}
        self._rows: dict[Hashable, _Rows] = {}
        self._uneven: dict[Hashable, _Rows] = {}  # of splits that may change with every call
        self._inputs: dict[Hashable, torch.Tensor] = {}  # copies of inputs that peers can't reach
        self._tables = _Tables(self.device)
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

    # --- operators

    def gemm_all_to_all(
        self, x: torch.Tensor, w: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, order: str = "remote"
    ) -> torch.Tensor:
        """y = x @ w.T with the rows sent to their ranks: out [sum(receive), N], on the symmetric heap.

        Args:
            x: [sum(send), K], rows grouped by destination.
            send: rows for each rank, numbers on the host.
            receive: rows from each rank; those of rank 0 come first in `out`.
            order: "remote" (rows for peers are computed first), "local" or "natural".
        """
        x, w = self._begin("gemm_all_to_all", x, w)
        self._refuse_capture("gemm_all_to_all")
        send, receive = tuple(send), tuple(receive)
        world, rank, n, k = self.group.size, self.group.rank, w.shape[0], w.shape[1]
        if len(send) != world or len(receive) != world or min(*send, *receive, 0) < 0 or sum(send) != x.shape[0]:
            raise ValueError(
                f"send and receive are {world} numbers of rows each, and send adds up to x's {x.shape[0]}; not "
                f"{list(send)} and {list(receive)}"
            )
        out = self._addresses.empty((sum(receive), n), x.dtype)
        text = f"gemm_all_to_all(x [.., {k}], w [{n}, {k}], {x.dtype})"
        table, numbers = self._agree(text, out, (*send, *receive))
        for other in range(world):
            if numbers[rank][other] != numbers[other][world + rank]:
                calls = {
                    r: f"{text} with send {numbers[r][:world]}, receive {numbers[r][world:]}" for r in (rank, other)
                }
                raise MismatchError(
                    f"rank {rank} sends {send[other]} rows to rank {other}, which expects "
                    f"{numbers[other][world + rank]}; nothing was moved",
                    calls=calls,
                )
        state = self._state(("gemm_all_to_all",), 2 * world)
        before = tuple(sum(numbers[r][world : world + rank]) for r in range(world))
        rows = self._row_tiles(("gemm_all_to_all",), send, n, k, x.dtype, order=order, rows_before=before)
        from dovetail.ops.kernels.fused_gemm import gemm_all_to_all_kernel

        if n:
            self._launch(
                gemm_all_to_all_kernel, rows.blocks, out,
                x, w, table, rows.tiles, rows.segments, *self._words(state, rows.counters), rank, world, n, k,
                _tl(x.dtype), *self._shape(rows, n, k, x.dtype),
            )  # fmt: skip
        return out

    def all_gather_matmul(
        self, x: torch.Tensor, w: torch.Tensor, *, copy: bool | None = None, order: str = "local"
    ) -> torch.Tensor:
        """All ranks' x [M, K] one below the other, times w.T: y [world * M, N].

        An x on the symmetric heap is read where it lies, another one is copied there first.

        Args:
            copy: copy the peers' rows to this rank before they are multiplied; by default if they come over a link and
                would be read more than once.
            order: "local" (own rows first, they are there) or "remote".
        """
        return self._all_gather_matmul(x, w, copy, order)[0]

    def all_gather_matmul_with_input(
        self, x: torch.Tensor, w: torch.Tensor, *, order: str = "local"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`all_gather_matmul` and the gathered x [world * M, K]."""
        return self._all_gather_matmul(x, w, True, order)

    def _all_gather_matmul(
        self, x: torch.Tensor, w: torch.Tensor, copy: bool | None, order: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = self._begin("all_gather_matmul", x, w)
        world, rank = self.group.size, self.group.rank
        (m, k), n = x.shape, w.shape[0]
        if not self._addresses.reaches(x):
            x = self._scratch(m, k, x.dtype).copy_(x)
        table, _ = self._agree(f"all_gather_matmul(x [{m}, {k}], w [.., {k}], {x.dtype})", x, ())
        state = self._state(("all_gather_matmul",), 2 * world)
        blocks = self._blocks or tiles.gemm_blocks([m] * world, n, k, x.dtype.itemsize, self.programs)
        if copy is None:
            copy = self.num_sharing < world and n > blocks.width
        y = torch.empty((world * m, n), dtype=x.dtype, device=self.device)
        gathered = torch.empty((world * m, k) if copy else (0, k), dtype=x.dtype, device=self.device)
        key = ("all_gather_matmul", copy)
        rows = self._row_tiles(key, (m,) * world, n, k, x.dtype, order=order, num_counters=2 * world)
        from dovetail.ops.kernels.fused_gemm import all_gather_matmul_kernel

        self._launch(
            all_gather_matmul_kernel, rows.blocks, (x, y, gathered),
            table, w, y, gathered, rows.tiles, rows.segments, *self._words(state, rows.counters), rank, world, m, n, k,
            _tl(x.dtype), *self._shape(rows, n, k, x.dtype), copy, 4096,
        )  # fmt: skip
        return y, gathered

    def matmul_reduce_scatter(
        self, x: torch.Tensor, w: torch.Tensor, *, slice_rows: int | None = None, order: str = "remote"
    ) -> torch.Tensor:
        """x @ w.T summed over the ranks (each has a part of K): out [M / world, N], this rank's rows of it.

        Every partial is rounded to the dtype, summed in fp32 in the order of the ranks and rounded once.

        Args:
            slice_rows: rows that an owner begins to sum as soon as they are there; a quarter of its rows by default.
        """
        x, w = self._begin("matmul_reduce_scatter", x, w)
        world, rank = self.group.size, self.group.rank
        (many, k), n = x.shape, w.shape[0]
        if many % world:
            raise ValueError(f"x has {many} rows, which {world} ranks can't share equally")
        m = many // world
        if slice_rows is not None and slice_rows < 1:
            raise ValueError(f"slice_rows is at least 1, not {slice_rows}")
        blocks = self._blocks or tiles.gemm_blocks([m] * world, n, k, x.dtype.itemsize, self.programs)
        height = min(slice_rows or -(-m // (4 * blocks.height)) * blocks.height, max(m, 1))
        num_slices = -(-m // max(height, 1))
        kind = ("matmul_reduce_scatter", m, n, x.dtype, height)
        self._agree(f"matmul_reduce_scatter(x [{many}, ..], w [{n}, ..], {x.dtype}, slice_rows {height})", None, ())
        state = self._state(kind, (2 + num_slices) * world, (world, m, n), x.dtype)
        out = torch.empty((m, n), dtype=x.dtype, device=self.device)
        rows = self._row_tiles(kind, (m,) * world, n, k, x.dtype, order=order, slice_rows=height)
        from dovetail.ops.kernels.fused_gemm import matmul_reduce_scatter_kernel

        assert state.stage is not None
        if m and n:
            self._launch(
                matmul_reduce_scatter_kernel, rows.blocks, out,
                x, w, out, state.stage.table, rows.tiles, rows.slice_tiles, rows.segments,
                *self._words(state, rows.counters), rank, world, num_slices, height, m, n, k,
                _tl(x.dtype), *self._shape(rows, n, k, x.dtype), 16, 256,
            )  # fmt: skip
        return out

    def gemv_all_reduce(self, x: torch.Tensor, w: torch.Tensor, *, order: str = "remote") -> torch.Tensor:
        """x @ w.T summed over the ranks (each has a part of K): out [M, N], the same bits on every rank.

        M is at most 64. `out` is on the symmetric heap, or a copy in the graph's memory while one is captured.
        """
        x, w = self._begin("gemv_all_reduce", x, w)
        world, rank = self.group.size, self.group.rank
        (m, k), n = x.shape, w.shape[0]
        if m > 64:
            raise ValueError(f"x has {m} rows; gemv_all_reduce takes up to 64")
        blocks = self._gemv_blocks(m, n, k, x.dtype)
        room = math.ceil(math.ceil(n / blocks.width) / world)
        kind = ("gemv_all_reduce", m, n, x.dtype, blocks.width)
        text = f"gemv_all_reduce(x [{m}, ..], w [{n}, ..], {x.dtype})"
        if not (m and n):
            return torch.zeros((m, n), dtype=x.dtype, device=self.device)
        if self._is_capturing():
            state = self._state(kind, 0)
            assert state.result is not None
            out, table = state.result.tensor, state.result.table
        else:
            out = self._addresses.empty((m, n), x.dtype)
            table, _ = self._agree(text, out, ())
            state = self._state(kind, (2 + room) * world, (world, room, m, blocks.width), x.dtype)
            if state.result is None:
                state.result = Symmetric(self.group, (m, n), x.dtype, self.device)
        from dovetail.ops.kernels.gemv import gemv_all_reduce_kernel

        assert state.stage is not None
        self._launch(
            gemv_all_reduce_kernel, blocks, out,
            x, w, table, state.stage.table, *self._words(state, state.local[_LOCAL_WORDS:]), rank, world, m, n, k,
            _tl(x.dtype), blocks.height, blocks.width, blocks.depth,
            n % blocks.width == 0, k % blocks.depth == 0, _precision(x.dtype), self._interpreted,
            Order(order) is Order.REMOTE,
        )  # fmt: skip
        return out.clone() if self._is_capturing() else out

    def embedding_all_to_all(
        self,
        weights: Sequence[torch.Tensor],
        values: torch.Tensor,
        offsets: torch.Tensor,
        batch: int,
        mode: str = "sum",
        per_sample_weights: torch.Tensor | None = None,
        tables_of_rank: Sequence[int] | None = None,
        *,
        order: str = "remote",
    ) -> torch.Tensor:
        """Pools this rank's tables for the whole batch; out [batch / world, all tables, dim] for its own samples.

        Args:
            weights: this rank's tables, [rows, dim] of one dim and dtype, contiguous.
            values: row numbers, int64 or int32; offsets: where bags begin, tables * batch + 1 numbers, table by table.
            batch: samples of all ranks together.
            mode: "sum" or "mean" (by the bag's length).
            per_sample_weights: a factor per value.
            tables_of_rank: how many tables each rank has; asked for by one more exchange if it is not given.

        A row number out of range pools nothing and is raised as `IndexError` by the next call or by `check`.
        """
        self._begin_any("embedding_all_to_all")
        self._refuse_capture("embedding_all_to_all")
        world, rank = self.group.size, self.group.rank
        self._check_bags(weights, values, offsets, batch, mode, per_sample_weights)
        dim, dtype = weights[0].shape[1], weights[0].dtype
        if tables_of_rank is None:
            _, counts = self._agree(f"embedding_all_to_all(batch {batch}, {mode})", None, (len(weights),))
            tables_of_rank = [c[0] for c in counts]
        if len(tables_of_rank) != world or tables_of_rank[rank] != len(weights):
            raise ValueError(
                f"tables_of_rank has {world} numbers and this rank's {len(weights)} tables, not {list(tables_of_rank)}"
            )
        local_batch, num_tables = batch // world, sum(tables_of_rank)
        out = self._addresses.empty((local_batch, num_tables, dim), dtype)
        text = f"embedding_all_to_all(batch {batch}, dim {dim}, {mode}, {dtype})"
        table, _ = self._agree(text, out, tables_of_rank)
        state = self._state(("embedding_all_to_all",), 2 * world)
        if not out.numel():
            return out
        bags, depth, block = self._bag_shape(dim, values.numel(), len(weights) * batch)
        blocks = Blocks(height=bags, width=1, depth=1, warps=16, stages=1)
        key = ("embedding_all_to_all", len(weights))
        rows = self._row_tiles(key, (local_batch,) * world, 1, 1, dtype, order=order, blocks=blocks)
        places = self._tables.of(np.array([w.data_ptr() for w in weights], np.int64))
        sizes = self._tables.of(np.array([w.shape[0] for w in weights], np.int64))
        scales = values if per_sample_weights is None else per_sample_weights
        from dovetail.ops.kernels.fused_embedding import embedding_all_to_all_kernel

        signals, local, counters, status, bound = self._words(state, rows.counters)
        self._launch(
            embedding_all_to_all_kernel, blocks, (out, tuple(weights), values, offsets, scales),
            places, sizes, values, offsets, scales, table, rows.tiles, rows.segments, signals, local, counters,
            self._status[1:], status, bound, rank, world, sum(tables_of_rank[:rank]), num_tables, len(weights), batch,
            dim, _tl(dtype), bags, depth, block, mode == "mean", per_sample_weights is not None, self._interpreted,
            self.programs,
        )  # fmt: skip
        return out

    # --- failures and the end

    def check(self) -> None:
        """Raises what a kernel that has ended reported; returns at once if nothing was.

        Raises:
            Timeout: a peer was late; the group is broken.
            IndexError: a row number was out of range.
        """
        late, bad = self._status.tolist()
        if late:
            what, rank = late // 65536 - 1, late % 65536
            error = Timeout(
                f"rank {rank} of {self.group} did not {_WHAT[what]} of a fused operator within about "
                f"{self.group.timeout_s:g} s; this rank's result is void"
            )
            self._broken(error)
            raise error
        if bad:
            self._status[1] = 0
            raise IndexError(f"values[{bad - 1}] is not a row of its table; nothing was pooled for it")

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

    def __enter__(self) -> Store:
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

    # --- what the operators have in common

    def _begin_any(self, name: str) -> None:
        if self.group.broken is not None:
            raise self.group.broken
        self.check()
        if self._is_capturing():
            return  # a capture would end if an event were asked for
        while self._held and (self._held[0][0] is None or self._held[0][0].query()):
            self._held.popleft()

    def _begin(self, name: str, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(f"{name}: x is [rows, k] and w [n, k], not {tuple(x.shape)} and {tuple(w.shape)}")
        if x.dtype != w.dtype or x.dtype not in _DTYPES:
            can = ", ".join(str(d) for d in _DTYPES)
            raise NotSupported(f"{name} of {x.dtype} and {w.dtype}: the kernels multiply {can}, both alike")
        if x.device != w.device or x.device.type != self.device.type:
            raise ValueError(f"{name}: x is on {x.device}, w on {w.device}; this store is for {self.device}")
        self._begin_any(name)
        return x.contiguous(), w.contiguous()

    def _check_bags(
        self, weights: Sequence[torch.Tensor], values: torch.Tensor, offsets: torch.Tensor, batch: int, mode: str,
        scales: torch.Tensor | None,
    ) -> None:  # fmt: skip
        if not weights:
            raise ValueError("weights has no table: every rank pools at least one")
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode is 'sum' or 'mean', not {mode!r}")
        if batch % self.group.size:
            raise ValueError(f"a batch of {batch} can't be shared equally by {self.group.size} ranks")
        if offsets.numel() != len(weights) * batch + 1:
            raise ValueError(f"offsets has {offsets.numel()} numbers, not {len(weights)} tables * {batch} + 1")
        for t, w in enumerate(weights):
            if w.dim() != 2 or w.shape[1] != weights[0].shape[1] or w.dtype != weights[0].dtype:
                raise ValueError(f"weights[{t}] is {w.dtype} {tuple(w.shape)}: tables have one dim and dtype")
            if not w.is_contiguous() or w.data_ptr() % 16:
                raise ValueError(f"weights[{t}] must be contiguous and begin at a multiple of 16 bytes")
            if w.dtype not in _DTYPES:
                raise NotSupported(f"weights are {w.dtype}: the kernels pool {', '.join(str(d) for d in _DTYPES)}")
        if scales is not None and scales.shape != values.shape:
            raise ValueError(f"per_sample_weights is {tuple(scales.shape)}, values {tuple(values.shape)}")

    def _state(
        self, kind: Hashable, num_words: int, stage: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> _State:
        found = self._states.get(kind)
        if found is None:
            self._refuse_capture()
            signals = Symmetric(self.group, (num_words,), torch.int64, self.device)
            local = torch.zeros(_LOCAL_WORDS + 1, dtype=torch.int64, device=self.device)
            made = None
            if stage is not None:
                assert dtype is not None
                made = Symmetric(self.group, stage, dtype, self.device)
            found = self._states[kind] = _State(signals, local, made)
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
        """
        note = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES) + struct.pack(f"<{len(numbers)}q", *numbers)
        addresses, notes = self._addresses.exchange([] if tensor is None else [tensor], note)
        texts = [n[:_TEXT_BYTES].decode(errors="replace").rstrip() for n in notes]
        if len(set(texts)) > 1 or len({len(n) for n in notes}) > 1:
            calls = dict(enumerate(texts))
            raise MismatchError(f"the ranks of {self.group} do not make the same call; nothing was moved", calls=calls)
        table = self._tables.of(addresses[:, 0]) if tensor is not None else torch.empty(0, dtype=torch.int64)
        return table, [struct.unpack(f"<{len(numbers)}q", n[_TEXT_BYTES:]) for n in notes]

    def _row_tiles(
        self, kind: Hashable, rows: tuple[int, ...], n: int, k: int, dtype: torch.dtype, *, order: str,
        rows_before: tuple[int, ...] | None = None, slice_rows: int | None = None, num_counters: int = 0,
        blocks: Blocks | None = None,
    ) -> _Rows:  # fmt: skip
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
            found = known[key] = _Rows(
                blocks, put(made.tiles), put(made.segments), put(made.slice_tiles), counters,
                made.is_even(blocks.height),
            )  # fmt: skip
        return found

    def _words(self, state: _State, counters: torch.Tensor) -> tuple[Any, ...]:
        """signals, local, counters, status, bound."""
        per_s = _INTERPRETED_LOOKS_PER_S if self._interpreted else _LOOKS_PER_S
        bound = max(1, math.ceil(self.group.timeout_s * per_s))
        return state.signals.table, state.local, counters, self._status.data_ptr(), bound

    def _shape(self, rows: _Rows, n: int, k: int, dtype: torch.dtype) -> tuple[Any, ...]:
        b = rows.blocks
        return (
            b.height, b.width, b.depth, b.group, self.programs,
            rows.even, n % b.width == 0, k % b.depth == 0, _precision(dtype), self._interpreted,
        )  # fmt: skip

    def _gemv_blocks(self, m: int, n: int, k: int, dtype: torch.dtype) -> Blocks:
        if self._interpreted:
            return Blocks(height=16, width=16, depth=32, warps=4, stages=1)
        height = 16 if m <= 16 else 32 if m <= 32 else 64
        width = 32 if -(-n // 32) >= self.programs else 16
        return Blocks(height=height, width=width, depth=256 // dtype.itemsize, warps=4, stages=4)

    def _bag_shape(self, dim: int, num_values: int, num_bags: int) -> tuple[int, int, int]:
        """(bags, depth, block of dims): powers of two, for bags of the average length."""
        block = max(16, 1 << (dim - 1).bit_length())
        if self._interpreted:
            return 4, 2, block
        depth = min(_MOST_DEPTH, 1 << max(0, (num_values // max(num_bags, 1)).bit_length() - 1))
        return max(1, min(64, _BAG_ELEMENTS // (depth * block))), depth, block

    def _launch(self, kernel: Any, blocks: Blocks, held: Any, *args: Any) -> None:
        if self._interpreted:
            kernel[(1,)](*args)
            self._held.append((None, held))
            self.check()
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
            self._held.append((_recorded(self.device), held))
            self._last = stream

    def _is_capturing(self) -> bool:
        return _is_capturing(self.device)

    def _refuse_capture(self, op: str = "") -> None:
        if self._is_capturing():
            raise NotSupported(
                f"{op} can't be captured in a graph: its output is new memory in every call"
                if op
                else "a graph is captured and this shape is new: call the operator once before the capture"
            )


def _recorded(device: torch.device) -> Any:
    """An event behind what torch's current stream has to do."""
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record(cuda.current_stream(device))
    return event


def _is_capturing(device: torch.device) -> bool:
    return device.type != "cpu" and bool(torch.cuda.is_current_stream_capturing())


def _tl(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
