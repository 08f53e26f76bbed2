"""The transport `store`: one persistent kernel per operator, whose programs write to peers while they compute.

Owns the operators: what is checked, what is allocated, which kernel is launched. Device-agnostic: on a GPU it launches
on torch's current stream and returns before the kernel ends; under Triton's interpreter it works on the CPU heap, one
program per kernel, and returns when it has ended.

A kernel waits for peers while it holds multiprocessors, so all programs of all ranks must fit on their GPU at once: R
ranks that share one get at most floor(multiprocessors / R) programs each. Every wait is bounded; one that runs out ends
the kernel, and the next call (or `check`) raises `Timeout` and the group is broken.

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
from dovetail.language import Symmetric
from dovetail.ops.gpu import tiles
from dovetail.ops.gpu.shared import LOCAL_WORDS, Rows, Shared
from dovetail.ops.gpu.tiles import Blocks, Order

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Under the interpreter tiles are as small as for many programs, so that small problems have several.
_MANY = 1 << 20


class Store(Shared):
    """The five fused operators of a group, by stores to peers. All members make one together and call it alike."""

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
        for i, j in itertools.product(range(world), repeat=2):
            if numbers[i][j] != numbers[j][world + i]:
                calls = {r: f"{text} with send {numbers[r][:world]}, receive {numbers[r][world:]}" for r in (i, j)}
                raise MismatchError(
                    f"rank {i} sends {numbers[i][j]} rows to rank {j}, which expects {numbers[j][world + i]}; nothing "
                    "was moved",
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
        if not self._addresses.reaches(x) or x.data_ptr() % 16:
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
        blocks = tiles.gemv_blocks(m, n, x.dtype.itemsize, _MANY if self._interpreted else self.programs)
        room = math.ceil(math.ceil(n / blocks.width) / world)
        kind = ("gemv_all_reduce", m, n, x.dtype, blocks.width)
        if not (m and n):
            return torch.empty((m, n), dtype=x.dtype, device=self.device)
        out: torch.Tensor
        if self._is_capturing():
            state = self._state(kind, 0)
            assert state.result is not None
            out, table = state.result.tensor, state.result.table
        else:
            out = self._addresses.empty((m, n), x.dtype)
            table, _ = self._agree(f"gemv_all_reduce(x [{m}, ..], w [{n}, ..], {x.dtype})", out, ())
            state = self._state(kind, (2 + room) * world, (world, room, m, blocks.width), x.dtype)
            if state.result is None:
                state.result = Symmetric(self.group, (m, n), x.dtype, self.device)
        from dovetail.ops.kernels.gemv import gemv_all_reduce_kernel

        assert state.stage is not None
        self._launch(
            gemv_all_reduce_kernel, blocks, out,
            x, w, table, state.stage.table, *self._words(state, state.local[LOCAL_WORDS:]), rank, world, m, n, k,
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

        A row number out of range pools nothing; `check` raises `IndexError` for it, or the next call on all ranks.
        """
        self._ready()
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
            embedding_all_to_all_kernel, blocks, (out, tuple(weights), values, offsets, scales),
            places, sizes, values, offsets, scales, table, rows.tiles, rows.segments, signals, local, counters,
            self._status[1:], status, bound, rank, world, sum(tables_of_rank[:rank]), num_tables, len(weights), batch,
            dim, _tl(dtype), bags, depth, block, mode == "mean", per_sample_weights is not None, self._interpreted,
            self.programs,
        )  # fmt: skip
        return out

    # --- arguments

    def _begin(self, name: str, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
            raise ValueError(f"{name}: x is [rows, k] and w [n, k], not {tuple(x.shape)} and {tuple(w.shape)}")
        if x.dtype != w.dtype or x.dtype not in _DTYPES:
            can = ", ".join(str(d) for d in _DTYPES)
            raise NotSupported(f"{name} of {x.dtype} and {w.dtype}: the kernels multiply {can}, both alike")
        if x.device != w.device or x.device.type != self.device.type:
            raise ValueError(f"{name}: x is on {x.device}, w on {w.device}; this store is for {self.device}")
        self._ready()
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

    def _shape(self, rows: Rows, n: int, k: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """What a GEMM kernel is compiled for, from BM on."""
        b = rows.blocks
        return (
            b.height, b.width, b.depth, b.group, self.programs,
            rows.even, n % b.width == 0, k % b.depth == 0, _precision(dtype), self._interpreted,
        )  # fmt: skip


def _tl(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
