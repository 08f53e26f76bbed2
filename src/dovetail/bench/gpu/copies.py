"""One copy between host and GPU: through a plan beside the driver's own call, by size and direction.

Owns the rows of ``dovetail bench copies``. `share` is the driver's time over ours: what the plan costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from dovetail.bench.cases import Case
from dovetail.bench.gpu.session import Session, pages
from dovetail.bench.gpu.spec import Effort, check_sizes
from dovetail.bench.gpu.timing import Timing, timed
from dovetail.hw.gpu.local import LocalRunner
from dovetail.measure.sizes import approximate_bytes, format_bytes
from dovetail.plan import step as st
from dovetail.plan.build.assembly import Assembly
from dovetail.plan.plan import ABSENT, Plan, Role

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
Calls = dict[str, Callable[[], object]]
H2D, D2H = "h2d", "d2h"
_POISON = 0xA5
_CHECKS = 2
_GPU, _HOST = 0, 1


def copy_plan(size_bytes: int, direction: str, *, before: bool = False, after: bool = False) -> Plan:
    """One copy between the GPU (rank 0) and a host peer (rank 1), with a stamp `before` and `after` it if asked."""
    a = Assembly(f"copy {direction}", 2)
    of, to = (_HOST, _GPU) if direction == H2D else (_GPU, _HOST)
    src = a.buffer("input", Role.INPUT, [size_bytes if rank == of else ABSENT for rank in range(2)])
    dst = a.buffer("output", Role.OUTPUT, [size_bytes if rank == to else ABSENT for rank in range(2)])
    move = st.copy((of, src, 0), (to, dst, 0), size_bytes)
    done = a.signal("done", _HOST)
    first, last = [st.stamp(0)] * before, [st.stamp(1)] * after
    a.queue(_GPU, 0, *first, move, *last, st.signal(done))
    a.queue(_HOST, 0, st.wait(done))
    a.goal(move)
    return a.plan()


def copy_buffers(direction: str, device: torch.Tensor, host: torch.Tensor) -> dict[tuple[int, str], torch.Tensor]:
    """The buffers of `copy_plan`."""
    if direction == H2D:
        return {(_HOST, "input"): host, (_GPU, "output"): device}
    return {(_GPU, "input"): device, (_HOST, "output"): host}


def measure(
    session: Session, sizes: Sequence[int], effort: Effort, progress: Progress | None = None
) -> tuple[list[Row], list[str]]:
    """Rows, two per size and direction: ``cuda`` (the plan) and ``driver``; and lines about sizes left out."""
    check_sizes(sizes)
    fitting = [n for n in sizes if pages(n) <= session.pin_limit_bytes]
    notes = [
        f"copies of {format_bytes(n)} left out: they need {approximate_bytes(n)} of pinned memory; "
        f"{session.limit_text()}"
        for n in sizes
        if n not in fitting
    ]
    if not fitting:
        return [], notes
    arenas = [session.arena(kind, max(fitting)) for kind in ("device", "host")]
    rows: list[Row] = []
    for done, size_bytes in enumerate(fitting):
        if progress:
            progress(done, len(fitting), f"copy of {format_bytes(size_bytes)}")
        for arena in arenas:
            arena.reset()
        device, host = (arena.take(size_bytes) for arena in arenas)
        for direction in (H2D, D2H):
            rows += _pair(session, direction, device, host, effort)
    return rows, notes


def _pair(session: Session, direction: str, device: torch.Tensor, host: torch.Tensor, effort: Effort) -> list[Row]:
    size_bytes, driver, (stream,) = host.numel(), session.driver, session.streams(1)
    dst, src = (device, host) if direction == H2D else (host, device)
    to, of = dst.data_ptr(), src.data_ptr()
    with ExitStack() as stack:
        plan = copy_plan(size_bytes, direction)
        runner = LocalRunner(session.device, plan, host_ranks=frozenset({_HOST}), most_streams=1)
        stack.callback(runner.close)
        submit = runner.bind(copy_buffers(direction, device, host)).submit

        def plain() -> None:
            driver.copy(to, of, size_bytes, stream)
            driver.stream_synchronize(stream)

        calls: Calls = {"cuda": lambda: submit().wait(), "driver": plain}
        right = _check(session, calls, dst, src, range(_CHECKS))
        going = {name: call for name, call in calls.items() if right[name]}
        found = dict(zip(going, timed(list(going.values()), effort), strict=True))
        still = _check(session, going, dst, src, range(_CHECKS, _CHECKS + 1))
    timings = {name: timing for name, timing in found.items() if still[name]}
    theirs = timings.get("driver")
    return [_row(name, direction, size_bytes, timings.get(name), theirs) for name in calls]


def _check(session: Session, calls: Calls, dst: torch.Tensor, src: torch.Tensor, iterations: range) -> dict[str, bool]:
    """Whether fresh random bytes arrive, and leave the source as it was."""
    right = dict.fromkeys(calls, True)
    for iteration in iterations:
        data = Case.of("broadcast", 1, src.numel(), "uint8").input(0, iteration)
        src.copy_(data)
        for name, call in calls.items():
            dst.fill_(_POISON)
            session.synchronize()
            call()
            session.synchronize()
            right[name] &= torch.equal(dst.cpu(), data) and torch.equal(src.cpu(), data)
    return right


def _row(backend: str, direction: str, size_bytes: int, timing: Timing | None, theirs: Timing | None) -> Row:
    return {
        "collective": "copies",
        "backend": backend,
        "direction": direction,
        "size_bytes": size_bytes,
        "time_us": None if timing is None else round(timing.time_us, 3),
        "bandwidth_gbps": None if timing is None else size_bytes / timing.time_us / 1e3,
        "share": theirs.time_us / timing.time_us if timing and theirs else None,
        "correct": timing is not None,
        "iterations": timing.iterations if timing else 0,
    }


def lines(rows: Sequence[Row]) -> list[str]:
    """The verdict: the share of the driver's own copy that a plan reaches, by direction."""
    found = []
    for direction in (H2D, D2H):
        mine = [row for row in rows if (row["backend"], row["direction"]) == ("cuda", direction) and row["share"]]
        shown = ", ".join(f"{format_bytes(row['size_bytes'])} {row['share']:.1%}" for row in mine)
        if shown:
            found.append(f"{direction}: a plan of one copy reaches of the driver's own call: {shown}")
    wrong = sum(not row["correct"] for row in rows)
    return [*found, f"{wrong} of {len(rows)} results WRONG" if wrong else "all correct"]
