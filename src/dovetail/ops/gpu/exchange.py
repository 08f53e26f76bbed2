"""What a GPU and its peers in host memory send each other: rows, cut into slices, as plans.

Owns where every byte of an operator's output goes, and the memory of both sides; it computes and launches nothing. The
same exchange gives the plan of slices behind flags and the one of whole pieces, so both move the same bytes.

Rank 0 is the GPU. It computes `y`, its rows grouped by destination, and sends rows `send[j]` to rank j; peer j sends
`receive[j]` rows. Nothing is moved inside the GPU: rows for the GPU itself stay in `y` (on NVIDIA a copy there would be
a kernel), and between two peers nothing is moved at all: only what crosses the GPU's link. What has to be placed inside
the GPU afterwards is the business of `place.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dovetail.ops.gpu.tiles import DESTINATION, END, FIRST, RowTiles, destinations, pieces
from dovetail.plan.build.sliced import Done, Own, Slice, sliced_all_to_all
from dovetail.plan.plan import ABSENT, Plan

if TYPE_CHECKING:
    import torch

GPU = 0
#: A slice is worth its wait and its copy from about this size on.
LEAST_SLICE_BYTES = 5 << 19
_MOST_ALIKE = 256  #: parts of all rows of peers: smaller pieces do not come of cutting them like the GPU's
#: Slices of all that is sent, if nothing else is asked for; the first one is so small a part of the others.
NUM_SLICES = 12
FIRST_PART = 16


class Pace(StrEnum):
    """When the rows of peers that are only memory are there."""

    STEP = "step"  #: in step with the GPU, as those of ranks that compute the same
    START = "start"  #: all of them when the run begins


class Layout(StrEnum):
    """How the rows of several sources stand in an output."""

    BELOW = "below"  #: one source's below the other's, of one width (products)
    PACKED = "packed"  #: they arrive like that, of any width, in plain runs of memory, and are put side by side then
    STRIDED = "strided"  #: copies put them side by side: an engine pays for every row, more so beside a busy memory


def slice_rows_of(rows: int, row_bytes: int, tile_rows: int = 1, num_slices: int = NUM_SLICES) -> int:
    """Rows of a slice: about `num_slices` in all, or larger ones of about `LEAST_SLICE_BYTES`; whole tiles.

    >>> slice_rows_of(12288, 16384, 128)
    1024
    """
    wanted = max(rows / num_slices, LEAST_SLICE_BYTES / max(row_bytes, 1))
    return max(1, round(wanted / tile_rows)) * tile_rows


def first_rows_of(slice_rows: int, tile_rows: int = 1, part: int = FIRST_PART) -> int:
    """Rows of the first slice: the sooner it is there, the sooner copies begin.

    >>> first_rows_of(1024, 128), first_rows_of(1024)
    (128, 64)
    """
    return min(max(slice_rows // part // tile_rows, 1) * tile_rows, slice_rows)


class Slices(NamedTuple):
    """What leaves the GPU, in the order in which it is computed, and what arrives."""

    leaving: list[Slice]
    arriving: list[Slice]
    follows: list[int]  #: of each that arrives: the one that leaves when it is there; empty if all are at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Who sends how many rows, and how wide they are."""

    send: tuple[int, ...]  #: rows of the GPU for each rank; `send[0]` stay
    receive: tuple[int, ...]  #: rows of each rank for the GPU; `receive[0]` is `send[0]`
    row_bytes: tuple[int, ...]  #: width of the rows that each rank computes
    layout: Layout = Layout.BELOW

    def __post_init__(self) -> None:
        world = len(self.send)
        if world < 1 or not len(self.receive) == len(self.row_bytes) == world:
            raise ValueError(f"send {self.send}, receive {self.receive} and row_bytes {self.row_bytes} name all ranks")
        if min(*self.send, *self.receive, *self.row_bytes, 0) < 0 or self.send[GPU] != self.receive[GPU]:
            given = f"send {self.send}, receive {self.receive}, row_bytes {self.row_bytes}"
            raise ValueError(f"{given}: nothing is negative, and what stays is in both")
        if self.is_wide and len(set(self.receive)) > 1:
            raise ValueError(f"rows side by side are as many from every rank, not {self.receive}")
        if not self.is_wide and len(set(self.row_bytes)) > 1:
            raise ValueError(f"rows below each other are of one width, not {self.row_bytes}")

    @property
    def is_wide(self) -> bool:
        """A finished output has the rows of all ranks side by side (embeddings)."""
        return self.layout is not Layout.BELOW

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.send)

    @property
    def peers(self) -> frozenset[int]:
        """All but the GPU."""
        return frozenset(range(1, self.world))

    @property
    def served(self) -> list[int]:
        """The ranks in the order in which the GPU computes their rows: its own last."""
        return destinations(self.world, GPU)

    @property
    def out_bytes(self) -> int:
        """Over the link, from the GPU."""
        return sum(self.send[1:]) * self.row_bytes[GPU]

    @property
    def in_bytes(self) -> int:
        """Over the link, to the GPU."""
        return sum(rows * width for rows, width in zip(self.receive[1:], self.row_bytes[1:], strict=True))

    def y_bytes(self, rank: int) -> int:
        """Of what a rank computes and this exchange moves; on the GPU with the rows that stay."""
        return (sum(self.send) if rank == GPU else self.receive[rank]) * self.row_bytes[rank]

    def output_bytes(self, rank: int) -> int:
        """Of what copies write to; a peer's has only the rows of the GPU, unless copies put all side by side."""
        if self.layout is Layout.STRIDED:
            return (self.receive[GPU] if rank == GPU else self.send[rank]) * sum(self.row_bytes)
        return self._above(self.world) if rank == GPU else self.send[rank] * self.row_bytes[GPU]

    @property
    def wide_bytes(self) -> int:
        """Of the GPU's finished output, where rows that arrived packed are put side by side; 0 if none are."""
        return self.receive[GPU] * sum(self.row_bytes) if self.layout is Layout.PACKED else 0

    def _above(self, source: int) -> int:
        """Bytes of the sources before one, where they stand below each other; the GPU's own rows have a place."""
        return sum(rows * width for rows, width in zip(self.receive[:source], self.row_bytes[:source], strict=True))

    def _target(self, source: int, destination: int) -> tuple[int, int]:
        """Where a source's first row stands in an output, and the pitch."""
        if self.layout is Layout.STRIDED:
            return sum(self.row_bytes[:source]), sum(self.row_bytes)
        return self._above(source) if destination == GPU else 0, self.row_bytes[source]

    def _slice(self, source: int, destination: int, first: int, begin: int, end: int) -> Slice:
        """Rows [begin, end) of a source's y, whose rows for this destination begin at `first`."""
        offset, pitch = self._target(source, destination)
        width = self.row_bytes[source]
        return Slice(
            source=source, destination=destination, source_offset=begin * width, rows=end - begin, row_bytes=width,
            destination_offset=offset + (begin - first) * pitch, destination_pitch=pitch, mover=GPU,
        )  # fmt: skip

    def _arriving(self, slice_rows: int | None, first_rows: int | None = None) -> Iterator[Slice]:
        """What the peers send: the rank before the GPU first, since everybody sends to the rank behind it first."""
        for source, begin, end in pieces(self.receive, range(self.world - 1, 0, -1), slice_rows, first_rows):
            yield self._slice(source, GPU, 0, begin, end)

    def _alike(self, leaving: Sequence[Slice]) -> Iterator[Slice]:
        """The same, cut where as large a part of all rows has come as had left at the end of one of these."""
        total = sum(self.receive[1:])
        done = np.cumsum([piece.rows for piece in leaving])
        least = max(1, total // _MOST_ALIKE)  # what is nearer to the end of a source's rows is not cut off
        before = 0
        for source in range(self.world - 1, 0, -1):
            rows, begin = self.receive[source], 0
            inside = [int(end) - before for end in done * total // done[-1]]
            for end in (*(end for end in inside if least <= end <= rows - least), rows):
                if end > begin:
                    yield self._slice(source, GPU, 0, begin, end)
                    begin = end
            before += rows

    def slices(self, tiles: RowTiles, pace: Pace | str = Pace.STEP) -> Slices:
        """The slices of a table of tiles, and what the peers send, cut as they are."""
        cuts = [(int(c[FIRST]), int(c[END]), int(c[DESTINATION])) for c in tiles.slices]
        first = [sum(self.send[:to]) for to in range(self.world)]
        leaving = [self._slice(GPU, to, first[to], begin, end) for begin, end, to in cuts]
        remote = [k for k, piece in enumerate(leaving) if piece.destination != GPU]
        most = tiles.slice_rows or max((end - begin for begin, end, _ in cuts), default=1)
        alike = tiles.is_given and remote
        arriving = list(self._alike([leaving[k] for k in remote]) if alike else self._arriving(most, tiles.first_rows))
        follows: list[int] = []
        if Pace(pace) is Pace.STEP and remote and arriving:
            # So large a part of all rows is there when the GPU has as large a part of its own.
            done, there = (np.cumsum([s.rows for s in side]) for side in ([leaving[k] for k in remote], arriving))
            follows = [remote[k] for k in np.searchsorted(done * there[-1], there * done[-1])]
        return Slices(leaving, arriving, follows)

    def sliced(self, tiles: RowTiles, *, pace: Pace | str = Pace.STEP, lanes: int = 1) -> Plan:
        """Slices behind flags; flag k is that of slice k of the table. `lanes`: queues in each direction."""
        leaving, arriving, follows = self.slices(tiles, pace)
        after = {len(leaving) + n: k for n, k in enumerate(follows)}
        return self._plan([*leaving, *arriving], after, ready=frozenset() if follows else self.peers, lanes=lanes)

    def headed(self, tiles: RowTiles, *, pace: Pace | str = Pace.STEP, lanes: int = 1) -> tuple[Plan, Plan]:
        """`sliced` in two plans: the first slice without a flag, for a run that begins when it is there; all others.

        Raises:
            ValueError: the first slice is the only one, or stays on the GPU; or peers that do not wait for it.
        """
        if Pace(pace) is not Pace.STEP:
            raise ValueError("with a first slice of its own peers are in step with the GPU: both runs begin behind it")
        leaving, arriving, follows = self.slices(tiles, pace)
        if len(leaving) < 2 or leaving[0].destination == GPU:
            raise ValueError("a first slice of its own must leave the GPU, and others follow it")
        early = [piece for piece, k in zip(arriving, follows, strict=False) if k == 0]
        late, after = arriving[len(early) :], [k - 1 for k in follows if k]
        head = self._plan([leaving[0], *early], {}, ready=frozenset(range(self.world)), lanes=lanes)
        words = {len(leaving) - 1 + n: k for n, k in enumerate(after)}
        return head, self._plan([*leaving[1:], *late], words, ready=frozenset(), lanes=lanes, first_lane=1)

    def whole(self, *, lanes: int = 1, slice_rows: int | None = None) -> Plan:
        """The same bytes without a flag; `y` is there when the run begins.

        A copy for each peer and direction, or one for every `slice_rows` rows; `lanes` queues in each direction take
        them in turn.
        """
        leaving = []
        for to, begin, end in pieces(self.send, range(1, self.world), slice_rows):
            first = sum(self.send[:to])
            leaving.append(self._slice(GPU, to, first, first + begin, first + end))
        arriving = self._arriving(slice_rows)
        return self._plan([*leaving, *arriving], {}, ready=frozenset(range(self.world)), lanes=lanes)

    def _plan(
        self, slices: list[Slice], follows: dict[int, int], ready: frozenset[int], lanes: int = 1, first_lane: int = 0
    ) -> Plan:
        ranks = range(self.world)
        return sliced_all_to_all(
            self.world, slices, y_bytes=[self.y_bytes(r) for r in ranks], own=Own.LEFT, done=Done.END, ready=ready,
            output_bytes=[self.output_bytes(r) for r in ranks], follows=follows, lanes=lanes, first_lane=first_lane,
        )  # fmt: skip


class Buffers:
    """The memory of an exchange: `y` and `output` of every rank, bytes.

    `wide`: the GPU's finished output, [its samples][all ranks' rows side by side]; None if there is none. The peers are
    other ranks: where rows arrive packed, each puts its own side by side, which is not done here.
    """

    def __init__(
        self, exchange: Exchange, take: Callable[[str, int], torch.Tensor], y: list[torch.Tensor] | None = None
    ) -> None:
        """`take`: bytes of "device" or pinned "host" memory; `y`: that of another exchange of the same rows."""
        kinds = ["device" if rank == GPU else "host" for rank in range(exchange.world)]
        self.exchange = exchange
        self.y = y or [take(kind, max(1, exchange.y_bytes(r))) for r, kind in enumerate(kinds)]
        self.output = [take(kind, max(1, exchange.output_bytes(r))) for r, kind in enumerate(kinds)]
        self.wide: torch.Tensor | None = self.output[GPU] if exchange.is_wide else None
        if exchange.layout is Layout.PACKED:
            self.wide = take("device", max(1, exchange.wide_bytes))

    @property
    def written(self) -> list[torch.Tensor]:
        """All that a run writes to, but `y`."""
        return [*self.output, *([self.wide] if self.exchange.layout is Layout.PACKED and self.wide is not None else [])]

    @property
    def all_columns(self) -> torch.Tensor:
        """The GPU's finished output as rows of bytes."""
        e = self.exchange
        assert self.wide is not None
        return self.wide[: e.receive[GPU] * sum(e.row_bytes)].view(e.receive[GPU], sum(e.row_bytes))

    def columns(self, source: int) -> torch.Tensor:
        """Where a source's rows stand in it."""
        widths = self.exchange.row_bytes
        return self.all_columns.narrow(1, sum(widths[:source]), widths[source])

    def arrived(self, source: int) -> torch.Tensor:
        """A source's rows as they arrived, packed; the GPU's own in `y`."""
        e = self.exchange
        rows, width = e.receive[source], e.row_bytes[source]
        of, at = (self.y[GPU], 0) if source == GPU else (self.output[GPU], e._above(source))
        return of[at : at + rows * width].view(rows, width)

    def of(self, plan: Plan, y: torch.Tensor | None = None) -> dict[tuple[int, str], Any]:
        """By the names that a plan has for them; `y`: another one of the GPU."""
        given = {"y": self.y, "input": self.y, "output": self.output}
        found = {
            (rank, buffer.name): given[buffer.name][rank]
            for buffer in plan.buffers
            for rank in range(plan.world)
            if buffer.sizes[rank] not in (ABSENT, 0)
        }
        if y is not None:
            found |= {key: y for key in found if key[0] == GPU and key[1] != "output"}
        return found

    def finished(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(what was computed, where it stands in the GPU's finished output) of each source; nothing if there is none.

        Rows of bytes, on the GPU; the first pair is the GPU's own.
        """
        e = self.exchange
        for source in range(e.world if self.wide is not None else 0):
            size, there = e.receive[source] * e.row_bytes[source], self.columns(source)
            yield self.y[source][:size].to(there.device).view(there.shape), there

    def crossed(self, where: torch.device | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(what was sent, what arrived) of each pair over the link, as rows of bytes: to a peer, from it, to the next.

        `y` is taken as it is now. `where`: both are brought there, each tensor in one copy.
        """
        e = self.exchange
        y, output = ([t if where is None else t.to(where) for t in side] for side in (self.y, self.output))
        for peer in range(1, e.world):
            for source, destination in ((GPU, peer), (peer, GPU)):
                rows = e.send[peer] if source == GPU else e.receive[peer]
                first = sum(e.send[:peer]) if source == GPU else 0
                width, there = e.row_bytes[source], output[destination]
                offset, pitch = e._target(source, destination)
                sent = y[source][first * width : (first + rows) * width].view(rows, width)
                yield sent, there.as_strided((rows, width), (pitch, 1), there.storage_offset() + offset)
