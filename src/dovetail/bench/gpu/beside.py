"""A GEMM beside transfers: how much of its speed each leaves, by copy engines and by a kernel on multiprocessors.

Owns the window: transfers follow each other from before the GEMMs begin until after they end; a sample in which they
did not is taken again with more of them. Times are the GPU's own, from events. In every round each contender has its
turn, in orders that favour none; figures are medians over rounds.

GEMM kept: the GEMM's time alone over its time beside. GB/s: bytes inside the window (of a transfer that reaches over
its edge, the share of its time inside) over the window.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dovetail.bench.gpu.peers import Peers, case_of_pieces
from dovetail.bench.gpu.session import Session, pages
from dovetail.bench.gpu.transfers import PROGRAMS, Transfer, Waits, by_engines, by_kernel
from dovetail.errors import HardwareError, NotSupported
from dovetail.hw.gpu.driver import Driver
from dovetail.measure.interleave import schedule
from dovetail.measure.sizes import format_bytes
from dovetail.measure.stats import median

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
COLLECTIVES = ("all_gather", "all_to_all")
_GEMM = 8192
_GEMMS = 4
"""GEMMs in a window, after one that lets the GPU get going."""
_RTOL, _ATOL = 1 / 64, 1.0
"""Two roundings of bf16; the elements of the product are about 90."""
_MARGIN = 1.5
_RETRIES = 6
_MOST_LAUNCHES = 512


class Computation(Protocol):
    """What transfers run beside."""

    @property
    def title(self) -> str: ...
    def launch(self, stream: int) -> None:
        """Puts one into the raw stream."""

    def is_right(self) -> bool:
        """Whether the last result is what it should be."""


class Gemm:
    """A square bf16 GEMM by torch, on random data; or on zeros, which keep the GPU below its limit of power."""

    def __init__(self, size: int = _GEMM, *, zeros: bool = False) -> None:
        import torch

        self._torch: Any = torch
        self.title = f"{size}x{size}x{size} bfloat16"
        make = torch.zeros if zeros else torch.randn
        self._a, self._b = (make(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        torch.mm(self._a, self._b, out=self._out)
        self._wanted = self._out.clone()
        self._out.zero_()
        torch.cuda.synchronize()

    def launch(self, stream: int) -> None:
        """Puts one into the raw stream."""
        with self._torch.cuda.stream(self._torch.cuda.ExternalStream(stream)):
            self._torch.mm(self._a, self._b, out=self._out)

    def is_right(self) -> bool:
        """What it was alone, the first time; to the rounding of another order of sums, which cuBLAS may choose."""
        torch = self._torch
        if torch.equal(self._out, self._wanted):
            return True
        return bool(torch.allclose(self._out.float(), self._wanted.float(), rtol=_RTOL, atol=_ATOL))


class Span(NamedTuple):
    """From when to when, in microseconds on one clock."""

    begin: float
    end: float

    def covers(self, other: Span) -> bool:
        """Whether all of `other` lies inside."""
        return self.begin <= other.begin and other.end <= self.end


def bytes_inside(window: Span, runs: Sequence[Span], size_bytes: int) -> float:
    """Bytes that runs of `size_bytes` each moved inside the window, at an even pace in each of them."""
    moved = 0.0
    for run in runs:
        inside = min(run.end, window.end) - max(run.begin, window.begin)
        if inside > 0:
            moved += size_bytes * (min(inside / (run.end - run.begin), 1.0))
    return moved


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One window. Without a computation there is only the transfer, and the other way round."""

    compute_us: float | None = None
    gbps: float | None = None


class Window:
    """Takes samples: two streams of our own and timing events."""

    def __init__(self, driver: Driver, streams: Sequence[int], computation: Computation, count: int = _GEMMS) -> None:
        self._driver, self._computation, self._count = driver, computation, count
        self._comp, self._comm = streams
        self._events: list[int] = []
        self._used = 0
        self._launches: dict[str, int] = {}

    def alone(self) -> Sample:
        """The computation with nothing beside it."""
        window = self._compute([])
        return Sample(compute_us=(window.end - window.begin) / self._count)

    def transfer_alone(self, transfer: Transfer) -> Sample:
        """The transfer with nothing beside it."""
        number = self._launches.setdefault(transfer.title, 4)
        waits: list[Waits | None] = []
        marks = self._transfers(transfer, number, waits)
        self._finish(waits)
        runs = self._spans(marks[0], marks)
        # The first one also has the launch on an idle GPU in it.
        window = Span(runs[1].begin, runs[-1].end)
        return Sample(gbps=bytes_inside(window, runs, transfer.size_bytes) / (window.end - window.begin) / 1e3)

    def beside(self, transfer: Transfer) -> Sample:
        """Both. Raises `HardwareError` if the transfers cannot be made to last as long as the computation."""
        for _ in range(_RETRIES):
            number = self._launches.setdefault(transfer.title, 4)
            waits: list[Waits | None] = []
            first = self._transfers(transfer, 1, waits)
            begin, end = self._issue()
            marks = [*first, *self._transfers(transfer, number, waits, mark=False)]
            self._finish(waits)
            runs = self._spans(marks[0], marks)
            window = Span(self._us(marks[0], begin), self._us(marks[0], end))
            if Span(runs[0].begin, runs[-1].end).covers(window):
                gbps = bytes_inside(window, runs, transfer.size_bytes) / (window.end - window.begin) / 1e3
                return Sample(compute_us=(window.end - window.begin) / self._count, gbps=gbps)
            lasted = max(runs[-1].end - runs[0].begin, 1.0)
            more = math.ceil(number * _MARGIN * max(window.end / lasted, 1.0))
            self._launches[transfer.title] = min(more, _MOST_LAUNCHES)
        raise HardwareError(f"{transfer.title} did not last as long as what it ran beside, after {_RETRIES} attempts")

    def close(self) -> None:
        """Gives the events back."""
        for event in self._events:
            self._driver.event_destroy(event)
        self._events = []

    # --- the parts of a sample

    def _compute(self, waits: list[Waits | None]) -> Span:
        begin, end = self._issue()
        self._finish(waits)
        return Span(0.0, self._us(begin, end))

    def _issue(self) -> tuple[int, int]:
        """One computation, then those that count between two events."""
        self._computation.launch(self._comp)
        begin = self._record(self._comp)
        for _ in range(self._count):
            self._computation.launch(self._comp)
        return begin, self._record(self._comp)

    def _transfers(self, transfer: Transfer, number: int, waits: list[Waits | None], *, mark: bool = True) -> list[int]:
        """Launches, with an event after each, and one before the first if `mark`."""
        marks = [self._record(self._comm)] if mark else []
        for _ in range(number):
            waits.append(transfer.launch(self._comm))
            marks.append(self._record(self._comm))
        return marks

    def _finish(self, waits: Sequence[Waits | None]) -> None:
        for ticket in waits:
            if ticket is not None:
                ticket.wait()
        for stream in (self._comp, self._comm):
            self._driver.stream_synchronize(stream)
        self._used = 0

    def _record(self, stream: int) -> int:
        if self._used == len(self._events):
            self._events.append(self._driver.event_create(timing=True))
        event = self._events[self._used]
        self._used += 1
        self._driver.event_record(event, stream)
        return event

    def _us(self, begin: int, end: int) -> float:
        return self._driver.event_elapsed_us(begin, end)

    def _spans(self, origin: int, marks: Sequence[int]) -> list[Span]:
        times = [self._us(origin, mark) if mark != origin else 0.0 for mark in marks]
        return [Span(begin, end) for begin, end in itertools.pairwise(times)]


def measure(
    session: Session,
    *,
    ranks: int = 4,
    piece_bytes: int = 16 << 20,
    rounds: int = 20,
    programs: Sequence[int] = PROGRAMS,
    computation: Computation | None = None,
    progress: Progress | None = None,
) -> tuple[list[Row], list[str]]:
    """One row for the computation alone and one per transfer beside it; and lines about what was left out.

    Raises `NotSupported` without a GPU that torch sees, unless a `computation` is given.
    """
    if computation is None:
        if not session.has_torch:
            raise NotSupported("the GEMM needs a GPU that torch sees; torch sees none here")
        computation = Gemm()
    cases = [case_of_pieces(collective, ranks, piece_bytes) for collective in COLLECTIVES]
    needed = sum(pages(Peers.host_bytes(case)) for case in cases)
    host, device = session.arena("host", needed), session.arena("device", needed)
    notes: list[str] = []
    with ExitStack() as stack:
        both = [Peers(case, device, host) for case in cases]
        transfers = [stack.enter_context(by_engines(session, peers)) for peers in both]
        for number in programs:
            try:
                transfers.append(by_kernel(session, both[0], number))
            except NotSupported as error:
                notes.append(f"copy kernel left out: {error}")
                break
        window = Window(session.driver, session.streams(2), computation)
        stack.callback(window.close)
        right = [transfer.check() for transfer in transfers]
        samples, same = _samples(window, transfers, computation, rounds, progress)
        right = [transfer.check() and before for transfer, before in zip(transfers, right, strict=True)]
    shape = {"ranks": ranks, "piece_bytes": piece_bytes, "computation": computation.title, "rounds": rounds}
    return _rows(transfers, samples, right, same, shape), notes


def _samples(
    window: Window, transfers: Sequence[Transfer], computation: Computation, rounds: int, progress: Progress | None
) -> tuple[list[list[Sample]], bool]:
    """Of the computation alone, then of each transfer alone, then of each beside; and whether results stayed right."""
    calls: list[Callable[[], Sample]] = [window.alone]
    calls += [lambda t=transfer: window.transfer_alone(t) for transfer in transfers]  # type: ignore[misc]
    calls += [lambda t=transfer: window.beside(t) for transfer in transfers]  # type: ignore[misc]
    for call in calls:  # warm, and the number of launches found
        call()
    found: list[list[Sample]] = [[] for _ in calls]
    same = computation.is_right()
    turns = schedule([rounds] * len(calls))
    for done, contender in enumerate(turns):
        if progress and done % len(calls) == 0:
            progress(done // len(calls), rounds, f"beside {computation.title}")
        found[contender].append(calls[contender]())
        same = same and (done % len(calls) != 0 or computation.is_right())
    return found, same and computation.is_right()


def _rows(
    transfers: Sequence[Transfer], samples: Sequence[Sequence[Sample]], right: Sequence[bool], same: bool, shape: Row
) -> list[Row]:
    alone_us = median(sample.compute_us or 0.0 for sample in samples[0])
    first = {
        "collective": "beside", "backend": "gemm", "transfer": "none", "programs": 0, **shape,
        "compute_us": round(alone_us, 3), "compute_alone_us": round(alone_us, 3), "compute_kept": 1.0,
        "gbps": None, "alone_gbps": None, "gbps_kept": None, "correct": same,
    }  # fmt: skip
    rows: list[Row] = [first]
    for index, transfer in enumerate(transfers):
        alone = median(sample.gbps or 0.0 for sample in samples[1 + index])
        beside = samples[1 + len(transfers) + index]
        compute_us, gbps = (median(getattr(sample, name) for sample in beside) for name in ("compute_us", "gbps"))
        rows.append({
            "collective": "beside", "backend": transfer.backend, "transfer": transfer.name,
            "programs": transfer.programs, **shape,
            "compute_us": round(compute_us, 3), "compute_alone_us": round(alone_us, 3),
            "compute_kept": alone_us / compute_us,
            "gbps": gbps, "alone_gbps": alone, "gbps_kept": gbps / alone if alone else None,
            "correct": right[index] and same,
        })  # fmt: skip
    return rows


def lines(rows: Sequence[Row]) -> list[str]:
    """The verdict, a line per transfer."""
    found = []
    for row in rows[1:]:
        name = row["transfer"] + (f", {row['programs']} programs" if row["programs"] else " on copy engines")
        found.append(
            f"{row['computation']} beside {name}: {row['compute_kept']:.1%} of its speed kept, "
            f"transfer {row['gbps']:.1f} GB/s ({row['alone_gbps']:.1f} alone)"
        )
    wrong = sum(not row["correct"] for row in rows)
    size = format_bytes(rows[0]["piece_bytes"]) if rows else ""
    verdict = f"{wrong} of {len(rows)} results WRONG" if wrong else "all correct"
    return [*found, f"pieces of {size}, both directions together; {verdict}"]
