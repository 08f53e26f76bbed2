"""Transport `dma` on the CPU: the plain operator slice by slice; a finished slice releases its copy on an engine.

The same plan as on a GPU (`plan.build.sliced`): here the caller raises the flags, and the copies are done by the
software engine's thread. It pays where a core is free for that; `store` needs none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail.hw.cpu.executor import PlanRunner
from dovetail.ops import calls
from dovetail.ops.cpu import pooling
from dovetail.ops.cpu.product import ready
from dovetail.ops.cpu.shared import CPU, Order, add_up, remote_first
from dovetail.ops.group import NUM_WORDS, OpsGroup
from dovetail.plan import passes
from dovetail.plan.build.sliced import Flags, Own, Slice, sliced_all_to_all

#: A slice has at least so many bytes: below it the engine's hand-over is what takes time.
_LEAST_BYTES = 256 << 10
_MOST_SLICES = 8  # of a destination
_MOST_KEPT = 32


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of this rank's y that are computed at once."""

    destination: int
    first: int  #: row of y
    rows: int
    there: int  #: row of the destination's output
    signal: str
    value: int


@dataclass(slots=True)
class _Bound:
    runner: PlanRunner
    parts: list[_Part]


def _cut(rows: int, row_bytes: int, slices: int | None) -> list[int]:
    """Row numbers at which a piece is cut: into `slices`, or as its size suggests."""
    number = max(1, min(slices or min(_MOST_SLICES, rows * row_bytes // _LEAST_BYTES), rows))
    return [rows * k // number for k in range(number + 1)]


def _bind(
    g: OpsGroup,
    key: Any,
    send: Sequence[Sequence[int]],
    first_row: Callable[[int, int], int],
    row_bytes: int | Sequence[int],
    place: Callable[[int, int], tuple[int, int]],
    output_bytes: Sequence[int],
    order: Order,
    slices: int | None,
) -> _Bound:
    """The plan of a pattern of splits, and this rank's parts in the order in which they are computed.

    Args:
        send: rows from each rank to each.
        first_row: of a source's y, the row at which a destination's piece begins.
        row_bytes: of y, one number or one for each source.
        place: of (source, destination), the byte of the output at which the piece begins, and the pitch of its rows.
        order: of the destinations.
        slices: of a destination's piece; None: as its size suggests.
    """
    key = (*key, order, slices)
    if (found := g.known.get(key)) is not None:
        return found  # type: ignore[no-any-return]
    size = g.group.size
    widths = [row_bytes] * size if isinstance(row_bytes, int) else list(row_bytes)
    pieces, parts = [], []
    for i in range(size):
        for d in order(i, size):
            cuts = _cut(send[i][d], widths[i], slices)
            begin, pitch = place(i, d)
            kept = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
            for value, (a, b) in enumerate(kept, 1):
                row = first_row(i, d) + a
                pieces.append(
                    Slice(
                        source=i, destination=d, source_offset=row * widths[i], destination_offset=begin + a * pitch,
                        row_bytes=widths[i], rows=b - a, destination_pitch=pitch,
                    )
                )  # fmt: skip
                if i == g.group.rank:
                    parts.append(_Part(d, row, b - a, a, f"slices {i}->{d}", value))
    y_bytes = [sum(send[i]) * widths[i] for i in range(size)]
    plan = sliced_all_to_all(
        size, pieces, y_bytes=y_bytes, output_bytes=output_bytes, flags=Flags.DESTINATION, own=Own.PLACED
    )
    made = _Bound(PlanRunner(g.group, passes.entry(plan), check=False), parts)
    earlier = [k for k in g.known if isinstance(k, tuple) and k[0] == "dma"]
    if len(earlier) >= _MOST_KEPT:
        del g.known[earlier[0]]
    g.known[key] = made
    return made


def _run(bound: _Bound, tensors: dict[str, torch.Tensor], compute: Callable[[_Part], None]) -> None:
    """Computes the parts; each releases its copy."""
    given = {name: t for name, t in tensors.items() if t.numel()}
    ticket = bound.runner.submit(given)
    try:
        for part in bound.parts:
            compute(part)
            ticket.raise_signal(part.signal, part.value)
    except BaseException:
        bound.runner.group.native.break_all(bound.runner.group.rank)  # nobody waits for what does not come
        raise
    ticket.wait()


def gemm_all_to_all(
    g: OpsGroup, c: calls.GemmAllToAll, *, order: Order = remote_first, slices: int | None = None
) -> torch.Tensor:
    """Rows of a destination slice by slice; its own rows straight into the output."""
    size, n, item = g.group.size, c.n, c.dtype.itemsize
    rank = g.group.rank
    slots = g.agree(c.text, (), (*c.send, *c.receive))
    send = [row[NUM_WORDS : NUM_WORDS + size] for row in slots]
    receive = [row[NUM_WORDS + size :] for row in slots]

    def place(i: int, d: int) -> tuple[int, int]:
        return sum(receive[d][:i]) * n * item, n * item

    outputs = [sum(r) * n * item for r in receive]
    key = ("dma", c.op, n, c.dtype, tuple(send))
    bound = _bind(g, key, send, lambda i, d: sum(send[i][:d]), n * item, place, outputs, order, slices)
    y = torch.empty((c.rows, n), dtype=c.dtype, device=CPU)
    out = g.blocks.empty((sum(c.receive), n), c.dtype)
    base = sum(c.receive[:rank])

    multiply = ready(c.w, c.rows)

    def compute(part: _Part) -> None:
        rows = slice(part.first, part.first + part.rows)
        own = part.destination == rank
        multiply(c.x[rows], out[base + part.there : base + part.there + part.rows] if own else y[rows])

    _run(bound, {"y": y, "output": out}, compute)
    return out


def matmul_reduce_scatter(
    g: OpsGroup, c: calls.MatmulReduceScatter, *, order: Order = remote_first, slices: int | None = None
) -> torch.Tensor:
    """Partial rows go to their owner slice by slice; it adds them up in the order of ranks."""
    size, rank, n, item = g.group.size, g.group.rank, c.n, c.dtype.itemsize
    m = c.rows // size
    part_bytes = m * n * item
    g.agree(c.text)
    send = [(m,) * size] * size
    key = ("dma", c.op, m, n, c.dtype)
    bound = _bind(
        g, key, send, lambda i, d: d * m, n * item, lambda i, d: (i * part_bytes, n * item), [part_bytes * size] * size,
        order, slices,
    )  # fmt: skip
    y = torch.empty((c.rows, n), dtype=c.dtype, device=CPU)
    stage = g.scratch("partial", part_bytes * size)[: part_bytes * size].view(c.dtype).view(size, m, n)

    multiply = ready(c.w, c.rows)

    def compute(part: _Part) -> None:
        rows = slice(part.first, part.first + part.rows)
        own = part.destination == rank
        multiply(c.x[rows], stage[rank, part.there : part.there + part.rows] if own else y[rows])

    _run(bound, {"y": y, "output": stage}, compute)
    out = torch.empty((m, n), dtype=c.dtype, device=CPU)
    add_up(out, [stage.data_ptr() + s * part_bytes for s in range(size)])
    return out


def embedding_all_to_all(
    g: OpsGroup, c: calls.EmbeddingAllToAll, *, order: Order = remote_first, slices: int | None = None
) -> torch.Tensor:
    """Samples of a destination slice by slice; a sample's tables are one row of a strided copy."""
    size, rank, item = g.group.size, g.group.rank, c.dtype.itemsize
    local, tables = c.batch // size, len(c.weights)
    every = [row[0] for row in g.agree(c.text, (tables,))]
    total = sum(every)
    wide = total * c.dim * item

    def place(i: int, d: int) -> tuple[int, int]:
        return sum(every[:i]) * c.dim * item, wide

    send = [(local,) * size] * size
    key = ("dma", c.op, tuple(every), local, c.dim, c.dtype)
    bound = _bind(
        g, key, send, lambda i, d: d * local, [t * c.dim * item for t in every], place, [local * wide] * size, order,
        slices,
    )  # fmt: skip
    y = torch.empty((c.batch, tables, c.dim), dtype=c.dtype, device=CPU)
    out = g.blocks.empty((local, total, c.dim), c.dtype)
    first = sum(every[:rank])

    def compute(part: _Part) -> None:
        own = part.destination == rank
        here = out[part.there : part.there + part.rows, first : first + tables]
        pooling.pool(c, part.first, part.first + part.rows, here if own else y[part.first : part.first + part.rows])

    _run(bound, {"y": y, "output": out}, compute)
    return out


FORWARD: dict[type[calls.Call], Callable[..., torch.Tensor]] = {
    calls.GemmAllToAll: gemm_all_to_all,
    calls.MatmulReduceScatter: matmul_reduce_scatter,
    calls.EmbeddingAllToAll: embedding_all_to_all,
}
