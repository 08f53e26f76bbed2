"""Joules per gigabyte between GPU and host memory: by copy engines and by a kernel, the same bytes both ways at once.

Owns the order of the windows; the windows themselves are `dovetail.measure.energy`. Idle power is taken off: it is
measured with the context made, the kernels loaded and the GPU left alone for a while. The figures are the board's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from dovetail.bench.gpu.peers import Peers, case_of_pieces
from dovetail.bench.gpu.session import Session
from dovetail.bench.gpu.transfers import PROGRAMS, Transfer, by_engines, by_kernel
from dovetail.errors import NotSupported
from dovetail.measure import energy
from dovetail.measure.energy import Energy, Meter, Power

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
_PAUSE_S = 3.0
"""Clocks fall slowly after work."""
_ROUNDS = 2
_LAUNCHES = 4
"""Transfers of one repetition: the host's part of it must not leave the link idle."""


def measure(
    session: Session,
    collective: str,
    *,
    ranks: int = 4,
    piece_bytes: int = 16 << 20,
    seconds: float = 2.0,
    programs: Sequence[int] = PROGRAMS,
    meter: Meter | None = None,
    pause_s: float = _PAUSE_S,
    progress: Progress | None = None,
) -> tuple[list[Row], list[str]]:
    """One row per transfer, and lines about what was left out. Raises `NotSupported` without a meter."""
    with ExitStack() as stack:
        gauge = meter or stack.enter_context(energy.require(session.uuid))
        case = case_of_pieces(collective, ranks, piece_bytes)
        needed = Peers.host_bytes(case)
        peers = Peers(case, session.arena("device", needed), session.arena("host", needed))
        transfers, notes = [stack.enter_context(by_engines(session, peers))], []
        for number in programs:
            try:
                transfers.append(by_kernel(session, peers, number))
            except NotSupported as error:
                notes.append(f"copy kernel left out: {error}")
                break
        right = [transfer.check() for transfer in transfers]
        found = _windows(session, transfers, gauge, seconds, pause_s, progress)
        right = [transfer.check() and before for transfer, before in zip(transfers, right, strict=True)]
    rows = []
    for transfer, windows, is_right in zip(transfers, found, right, strict=True):
        shape = {"collective": collective, "ranks": ranks, "piece_bytes": piece_bytes, "correct": is_right}
        rows.append(row(transfer, windows) | shape)
    return rows, notes


def _windows(
    session: Session, transfers: Sequence[Transfer], meter: Meter, seconds: float, pause_s: float,
    progress: Progress | None,
) -> list[list[Energy]]:  # fmt: skip
    """The windows of each transfer: each round in the reverse order of the one before."""
    period_s = energy.period(meter)
    time.sleep(pause_s)
    idle: Power = energy.idle(meter, max(seconds / 2, 0.1), period_s=period_s)
    (stream,) = session.streams(1)
    found: list[list[Energy]] = [[] for _ in transfers]
    order = list(enumerate(transfers))
    for turn in range(_ROUNDS):
        for done, (index, transfer) in enumerate(order if turn % 2 == 0 else order[::-1]):
            if progress:
                progress(turn * len(order) + done, _ROUNDS * len(order), f"energy of {transfer.title}")
            work = _repeated(session, transfer, stream)
            found[index].append(energy.measure(work, meter=meter, seconds=seconds, idle_w=idle, period_s=period_s))
    return found


def _repeated(session: Session, transfer: Transfer, stream: int) -> Callable[[], None]:
    def work() -> None:
        tickets = [transfer.launch(stream) for _ in range(_LAUNCHES)]
        for ticket in tickets:
            if ticket is not None:
                ticket.wait()
        session.driver.stream_synchronize(stream)

    return work


def row(transfer: Transfer, windows: Sequence[Energy]) -> Row:
    """The mean of the windows. `error` is the larger of their own bounds and of how far they lie apart, halved."""
    size_bytes = transfer.size_bytes * _LAUNCHES
    each = [window.joules_per_gb(size_bytes) for window in windows]
    bounds = [window.error_per_gb(size_bytes) for window in windows]
    seconds = sum(window.seconds for window in windows)
    moved = sum(window.repetitions for window in windows) * size_bytes
    return {
        "kind": "energy",
        "backend": transfer.backend,
        "transfer": transfer.name,
        "programs": transfer.programs,
        "joules_per_gb": sum(each) / len(each),
        "error": max(*bounds, (max(each) - min(each)) / 2),
        "watts": sum(window.joules for window in windows) / seconds,
        "idle_w": windows[0].idle_w,
        "gbps": moved / seconds / 1e9,
        "gigabytes": moved / 1e9,
        "seconds": seconds,
        "meter": windows[0].meter,
        "notes": [window.note for window in windows if window.note],
    }


def lines(rows: Sequence[Row]) -> list[str]:
    """The verdict, a line per transfer."""
    found = []
    for each in rows:
        name = each["transfer"] + (f", {each['programs']} programs" if each["programs"] else " on copy engines")
        found.append(
            f"{name}: {each['joules_per_gb']:.3g} J/GB (+- {each['error']:.2g}) above idle at {each['gbps']:.1f} GB/s; "
            f"{each['watts']:.0f} W, idle {each['idle_w']:.0f} W"
        )
    return found
