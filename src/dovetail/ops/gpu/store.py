"""The transport `store`: one persistent kernel per operator, whose programs write to peers while they compute.

Owns the operators: what is checked, what is allocated, which kernel is launched. Device-agnostic: on a GPU it launches
on torch's current stream and returns before the kernel ends; under Triton's interpreter it works on the CPU heap, one
program per kernel, and returns when it has ended.

A kernel waits for peers while it holds multiprocessors, so all programs of all ranks must fit on their GPU at once: R
ranks that share one get at most floor(multiprocessors / R) programs each. Every wait is bounded, and ends early if the
peer is dead or the group broken (`status.py`); the kernel then ends, its result is void, the group is broken, and the
next call (or `check`) raises `Timeout` or `PeerError`.

`gemv_all_reduce`, `all_gather_matmul` and `matmul_reduce_scatter` can be captured in a CUDA graph once they have run
before with that shape: run numbers are counted on the device. Memory of captured calls is kept until `close`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dovetail.errors import MismatchError, NotSupported
from dovetail.ops.gpu import tiles
from dovetail.ops.gpu.bags import DTYPES, check_bags
from dovetail.ops.gpu.launcher import Again
from dovetail.ops.gpu.shared import NO_TABLE, Meet, Rows, Shared, raise_wrong_rows
from dovetail.ops.gpu.tiles import Blocks, Order

#: Of an output that is a copy at most: the GPU copies so much in a few microseconds.
COPIED_BYTES = 8 << 20


class Store(Shared):
    """The five fused operators of a group, by stores to peers. All members make one together and call it alike."""

    SMALL = -2
    """What a rank says, in the place of `Addresses.short`, of an output that is to be a copy."""

    def gemm_all_to_all(
        self, x: torch.Tensor, w: torch.Tensor, send: Sequence[int], receive: Sequence[int], *, order: str = "remote"
    ) -> torch.Tensor:
        """y = x @ w.T with the rows sent to their ranks: out [sum(receive), N].

        Peers store to `out` itself, on the symmetric heap; or, where it is small on all ranks, to memory that is kept
        from call to call, of which it is a copy: to tell them of new memory takes the host longer.

        Args:
            x: [sum(send), K], rows grouped by destination.
            send: rows for each rank, numbers on the host.
            receive: rows from each rank; those of rank 0 come first in `out`.
            order: "remote" (rows for peers are computed first), "local" or "natural".
        """
        x, w = self._begin("gemm_all_to_all", x, w)
        self.refuse_capture("gemm_all_to_all")
        send, receive = tuple(send), tuple(receive)
        world, rank, n, k = self.group.size, self.group.rank, w.shape[0], w.shape[1]
        if len(send) != world or len(receive) != world or min(*send, *receive, 0) < 0 or sum(send) != x.shape[0]:
            raise ValueError(
                f"send and receive are {world} numbers of rows each, and send adds up to x's {x.shape[0]}; not "
                f"{list(send)} and {list(receive)}"
            )
        text, shape = f"gemm_all_to_all(x [.., {k}], w [{n}, {k}], {x.dtype})", (sum(receive), n)
        made, table, numbers = self._agree_where(text, shape, x.dtype, (*send, *receive))
        for i, j in itertools.product(range(world), repeat=2):
            if numbers[i][j] != numbers[j][world + i]:
                calls = {r: f"{text} with send {numbers[r][:world]}, receive {numbers[r][world:]}" for r in (i, j)}
                raise MismatchError(
                    f"rank {i} sends {numbers[i][j]} rows to rank {j}, which expects {numbers[j][world + i]}; nothing "
                    "was moved",
                    calls=calls,
                )
        out: torch.Tensor
        if made is None:
            room = n * max(sum(each[world:]) for each in numbers)
            if not room:  # on all ranks
                return x.new_empty(shape)
            state = self._state(("gemm_all_to_all", x.dtype), 2 * world, 0, room, dtype=x.dtype)
            assert state.result is not None
            table, out = state.result.table, state.result.tensor[: math.prod(shape)].view(shape)
        else:
            state, out = self._state(("gemm_all_to_all",), 2 * world), made
        before = tuple(sum(numbers[r][world : world + rank]) for r in range(world))
        rows = self._row_tiles(("gemm_all_to_all",), send, n, k, x.dtype, order=order, rows_before=before)
        from dovetail.ops.kernels.fused_gemm import gemm_all_to_all_kernel

        if n:
            copy = self._launch(
                gemm_all_to_all_kernel, rows.blocks, (made, table, state, rows), (x, w),
                table, rows.tiles, rows.segments, *self._words(state, rows.counters), rank, world, n, k,
                _tl(x.dtype), *self._shape(rows, n, k, x.dtype),
                then=out.clone if made is None else None, again=Again(_both) if made is None else None,
            )  # fmt: skip
            return out if copy is None else copy
        return out

    def _agree_where(
        self, text: str, shape: tuple[int, int], dtype: torch.dtype, numbers: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor, list[tuple[int, ...]]]:
        """(output, table of everybody's, everybody's numbers). No output, on all ranks alike, if all of them are small
        and each is to be a copy."""
        meet, made = self.meet, None
        if meet is None or math.prod(shape) * dtype.itemsize > COPIED_BYTES:
            made = self._addresses.empty(shape, dtype)
        if meet is None:
            return made, *self._agree(text, made, numbers)
        name = self.SMALL if made is None else self._addresses.short(made)
        rows = meet(name)
        raise_wrong_rows([row[1] for row in rows])
        names, told = [row[0] for row in rows], [row[2:] for row in rows]
        if names == [self.SMALL] * len(names):
            self.named = self.SMALL
            return None, NO_TABLE, told
        if made is None:
            made = self._addresses.empty(shape, dtype)
        addresses = None if self.SMALL in names else self._addresses.resolved(names)
        if addresses is None:  # memory of some rank is new to the others
            addresses = self._addresses.exchange([made])[0][:, 0]
        return made, self._tables.of(addresses), told

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
        place = None if self.is_placed(x) else self._scratch(m, k, x.dtype)
        there = x if place is None else place
        table, _ = self._agree(f"all_gather_matmul(x [{m}, {k}], w [.., {k}], {x.dtype})", there, ())
        if not m:  # on all ranks; n = 0 may be this one's only, and the others need its signals
            return x.new_empty((0, n)), x.new_empty((0, k))
        state = self._state(("all_gather_matmul",), 2 * world)
        if copy is None:
            copy = self._copies(m, n, k, x.dtype)
        shape, all_rows = (world * m, n), (world * m if copy else 0, k)

        def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if place is not None:
                place.copy_(x)
            return w, x.new_empty(shape), x.new_empty(all_rows)

        w, y, gathered = given = first(x, w)
        key = ("all_gather_matmul", copy)
        rows = self._row_tiles(key, (m,) * world, n, k, x.dtype, order=order, num_counters=2 * world)
        from dovetail.ops.kernels.fused_gemm import all_gather_matmul_kernel

        self._launch(
            all_gather_matmul_kernel, rows.blocks, (there, table, state, rows), given,
            table, rows.tiles, rows.segments, *self._words(state, rows.counters), rank, world, m, n, k,
            _tl(x.dtype), *self._shape(rows, n, k, x.dtype), copy, 4096,
            again=None if place is None else Again(first, result=1),
        )  # fmt: skip
        return y, gathered

    def _copies(self, m: int, n: int, k: int, dtype: torch.dtype) -> bool:
        """Whether rows of peers are copied here first, if nobody says."""
        world = self.group.size
        blocks = self._blocks or tiles.gemm_blocks([m] * world, n, k, dtype.itemsize, self.part.programs)
        return self.part.num_sharing < world and n > blocks.width

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
        kind, height, *sizes = self._reduce_scatter_state(m, n, k, x.dtype, slice_rows)
        self._agree(f"matmul_reduce_scatter(x [{many}, ..], w [{n}, ..], {x.dtype}, slice_rows {height})", None, ())
        if not (m and n):
            return x.new_empty((m, n))
        num_slices = -(-m // height)
        state = self._state(kind, *sizes, dtype=x.dtype)
        shape = m, n

        def first(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x, w, x.new_empty(shape)

        given = first(x, w)
        rows = self._row_tiles(kind, (m,) * world, n, k, x.dtype, order=order, slice_rows=height)
        from dovetail.ops.kernels.fused_gemm import matmul_reduce_scatter_kernel

        assert state.stage is not None
        self._launch(
            matmul_reduce_scatter_kernel, rows.blocks, (state, rows), given,
            state.stage.table, rows.tiles, rows.slice_tiles, rows.segments,
            *self._words(state, rows.counters), rank, world, num_slices, height, m, n, k,
            _tl(x.dtype), *self._shape(rows, n, k, x.dtype), 16, 256, again=Again(first, result=2),
        )  # fmt: skip
        return given[2]

    def _reduce_scatter_state(
        self, m: int, n: int, k: int, dtype: torch.dtype, slice_rows: int | None = None
    ) -> tuple[Any, ...]:
        """(kind, rows of a slice, words, items of the stage), the same on all ranks."""
        world = self.group.size
        blocks = self._blocks or tiles.gemm_blocks([m] * world, n, k, dtype.itemsize, self.part.least_cores)
        height = max(1, min(slice_rows or -(-m // (4 * blocks.height)) * blocks.height, m))
        return ("matmul_reduce_scatter", dtype), height, (2 + -(-m // height)) * world, world * m * n

    def gemv_all_reduce(self, x: torch.Tensor, w: torch.Tensor, *, order: str = "remote") -> torch.Tensor:
        """x @ w.T summed over the ranks (each has a part of K): out [M, N], the same bits on every rank.

        M is at most 64. Peers store to memory that is kept from call to call, and `out` is a copy of it: so there is
        nothing to tell them where it lies.
        """
        x, w = self._begin("gemv_all_reduce", x, w)
        world, rank = self.group.size, self.group.rank
        (m, k), n = x.shape, w.shape[0]
        if m > 64:
            raise ValueError(f"x has {m} rows; gemv_all_reduce takes up to 64")
        blocks, kind, *sizes = self._gemv_state(m, n, x.dtype)
        self._agree(f"gemv_all_reduce(x [{m}, ..], w [{n}, ..], {x.dtype})", None, ())
        if not (m and n):
            return x.new_empty((m, n))
        state = self._state(kind, *sizes, dtype=x.dtype)
        counter = self._counter((kind, m, n, k))
        from dovetail.ops.kernels.gemv import gemv_all_reduce_kernel

        assert state.stage is not None
        assert state.result is not None
        result: torch.Tensor = state.result.tensor[: m * n].view(m, n)
        out = self._launch(
            gemv_all_reduce_kernel, blocks, (state, counter), (x, w),
            state.result.table, state.stage.table, *self._words(state, counter), rank, world, self.part.walkers,
            m, n, k, _tl(x.dtype), blocks.height, blocks.width, blocks.depth,
            n % blocks.width == 0, k % blocks.depth == 0, _precision(x.dtype), self._interpreted,
            blocks.stages if x.dtype == torch.float32 else 0, Order(order) is Order.REMOTE,
            then=result.clone, again=Again(_both),
        )  # fmt: skip
        assert out is not None
        return out

    def _gemv_state(self, m: int, n: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """(blocks, kind, words, items of the stage, items of the result), the same on all ranks."""
        world = self.group.size
        made = tiles.gemv_blocks(m, n, dtype.itemsize, self.part.least_cores, world)
        blocks = tiles.fitting(made, dtype.itemsize, self.part.memory_bytes)
        room = math.ceil(math.ceil(n / blocks.width) / world)
        words = (2 + self.part.walkers) * world
        return blocks, ("gemv_all_reduce", dtype), words, world * room * m * blocks.width, m * n

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

        A row number out of range pools nothing; `check` raises `IndexError` for it, or the next call on all ranks.
        """
        self._ready()
        self.refuse_capture("embedding_all_to_all")
        world, rank = self.group.size, self.group.rank
        check_bags(weights, values, offsets, batch, mode, per_sample_weights, world)
        dim, dtype = weights[0].shape[1], weights[0].dtype
        local_batch = batch // world
        if self.meet is not None:
            tables_of_rank, out, table = self._meet_for_tables(self.meet, len(weights), local_batch, dim, dtype)
        else:
            if tables_of_rank is None:
                _, counts = self._agree(f"embedding_all_to_all(batch {batch}, {mode})", None, (len(weights),))
                tables_of_rank = [c[0] for c in counts]
            if len(tables_of_rank) != world or tables_of_rank[rank] != len(weights):
                raise ValueError(
                    f"tables_of_rank has {world} numbers and this rank's {len(weights)} tables, not "
                    f"{list(tables_of_rank)}"
                )
            out = self._addresses.empty((local_batch, sum(tables_of_rank), dim), dtype)
            text = f"embedding_all_to_all(batch {batch}, dim {dim}, {mode}, {dtype})"
            table, _ = self._agree(text, out, tables_of_rank)
        num_tables = sum(tables_of_rank)
        state = self._state(("embedding_all_to_all",), 2 * world)
        if not out.numel():
            return out
        bags, depth, block = tiles.bag_shape(dim, values.numel(), len(weights) * batch)
        if self._interpreted:
            bags, depth = 4, 2  # small problems in several steps
        blocks = Blocks(height=bags, width=1, depth=1, warps=16, stages=1)
        key = ("embedding_all_to_all", len(weights))
        rows = self._row_tiles(key, (local_batch,) * world, 1, 1, dtype, order=order, blocks=blocks)
        places = self._tables.of(np.array([w.data_ptr() for w in weights], np.int64))
        sizes = self._tables.of(np.array([w.shape[0] for w in weights], np.int64))
        scales = values if per_sample_weights is None else per_sample_weights
        from dovetail.ops.kernels.fused_embedding import embedding_all_to_all_kernel

        signals, local, counters, status, bound = self._words(state, rows.counters)
        self._launch(
            embedding_all_to_all_kernel, blocks,
            (out, places, sizes, table, state, rows), (places, sizes, values, offsets, scales),
            table, rows.tiles, rows.segments, signals, local, counters,
            self._wrong_row, status, bound, rank, world, sum(tables_of_rank[:rank]), num_tables, len(weights), batch,
            dim, _tl(dtype), bags, depth, block, mode == "mean", per_sample_weights is not None, self._interpreted,
            self.part.programs,
        )  # fmt: skip
        return out

    def _meet_for_tables(
        self, meet: Meet, mine: int, local_batch: int, dim: int, dtype: torch.dtype
    ) -> tuple[Sequence[int], torch.Tensor, torch.Tensor]:
        """(tables of each rank, output, table of outputs). An output is made for as many tables as the ranks had in
        their last call, so that it can be named where they meet; a rank that now has others names none, and all make
        another."""
        before, out, name = self._tables_before, None, 0
        if before is not None and before[self.group.rank] == mine:
            out = self._addresses.empty((local_batch, sum(before), dim), dtype)
            name = self._addresses.short(out)
        rows = meet(name)
        raise_wrong_rows([row[1] for row in rows])
        every = self._tables_before = tuple(row[2] for row in rows)
        addresses = self._addresses.resolved([row[0] for row in rows])
        if out is None or addresses is None:
            out = self._addresses.empty((local_batch, sum(every), dim), dtype)
            addresses = self._addresses.exchange([out])[0][:, 0]
        return every, out, self._tables.of(addresses)

    # --- arguments

    def _begin(self, name: str, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(f"{name}: x is [rows, k] and w [n, k], not {tuple(x.shape)} and {tuple(w.shape)}")
        if x.dtype != w.dtype or x.dtype not in DTYPES:
            can = ", ".join(str(d) for d in DTYPES)
            raise NotSupported(f"{name} of {x.dtype} and {w.dtype}: the kernels multiply {can}, both alike")
        if x.device != w.device or x.device.type != self.device.type:
            raise ValueError(f"{name}: x is on {x.device}, w on {w.device}; this store is for {self.device}")
        self._ready()
        return x.contiguous(), w.contiguous()

    def is_placed(self, x: torch.Tensor) -> bool:
        """Whether peers can read this input where it lies."""
        return self._addresses.reaches(x) and x.data_ptr() % 16 == 0

    def refuse_captured(self, op: str, x: torch.Tensor, w: torch.Tensor) -> None:
        """Raises `NotSupported` if a graph is captured and this product can't be part of it: it needs memory that only
        a call before the capture can make, together with the other ranks."""
        (rows, k), n, dtype, world = x.shape, w.shape[0], x.dtype, self.group.size
        if not self.is_capturing() or not rows or (not n and op != "all_gather_matmul"):
            return
        if op == "gemv_all_reduce":
            _, kind, *sizes = self._gemv_state(rows, n, dtype)
            known = (kind, rows, n, k) in self._counters
        elif op == "matmul_reduce_scatter":
            m = rows // world
            kind, height, *sizes = self._reduce_scatter_state(m, n, k, dtype)
            known = self._row_key(kind, (m,) * world, n, k, dtype, "remote", None, height)[0] in self._rows
        elif op == "all_gather_matmul":
            kind, sizes = (op,), [2 * world]
            copy = self._copies(rows, n, k, dtype)
            key, _ = self._row_key((op, copy), (rows,) * world, n, k, dtype, "local")
            scratch = self._inputs.get(dtype)
            placed = self.is_placed(x) or (scratch is not None and scratch.numel() >= rows * k)
            known = placed and key in self._rows and self._tables.has_room(world)
        else:
            self.refuse_capture(op)
        state = self._states.get(kind)
        if not known or state is None or not state.has((*sizes, 0, 0)[:3]):
            self.refuse_capture()

    def _shape(self, rows: Rows, n: int, k: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """What a GEMM kernel is compiled for, from BM on."""
        b = rows.blocks
        return (
            b.height, b.width, b.depth, b.group, self.part.programs,
            rows.even, n % b.width == 0, k % b.depth == 0, _precision(dtype), self._interpreted,
        )  # fmt: skip


def _both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x, w


def _tl(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
