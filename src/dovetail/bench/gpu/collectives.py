"""A collective between a GPU and host peers, ours beside loops of copies: checked, timed side by side, checked again.

Owns the rows of ``dovetail bench COLLECTIVE --backend cuda``. What is timed is what crosses the link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.bench.cases import Case
from dovetail.bench.gpu.contenders import PLAIN, Contender, baselines, ours
from dovetail.bench.gpu.peers import Given, Peers
from dovetail.bench.gpu.session import Session, pages
from dovetail.bench.gpu.spec import CollectiveSpec, Effort
from dovetail.bench.gpu.timing import Timing, timed
from dovetail.measure.sizes import approximate_bytes, format_bytes

Progress = Callable[[int, int, str], None]
Row = dict[str, Any]
_CHECKS = 2
"""Fresh inputs before the timing, and one more after it."""


def measure(session: Session, spec: CollectiveSpec, progress: Progress | None = None) -> tuple[list[Row], list[str]]:
    """Rows, one per size and contender, and lines about what was left out."""
    cases = [Case.of(spec.collective, spec.ranks, size_bytes, "uint8") for size_bytes in spec.sizes]
    fitting = [case for case in cases if pages(Peers.host_bytes(case)) <= session.pin_limit_bytes]
    notes = [
        f"{case.collective} of {format_bytes(case.size_bytes)} left out: its peers need "
        f"{approximate_bytes(Peers.host_bytes(case))} of pinned memory; {session.limit_text()}"
        for case in cases
        if case not in fitting
    ]
    if not fitting:
        return [], notes
    most = max(map(Peers.host_bytes, fitting))
    host, device = session.arena("host", most), session.arena("device", most)
    rows: list[Row] = []
    for done, case in enumerate(fitting):
        if progress:
            progress(done, len(fitting), f"{case.collective} {format_bytes(case.size_bytes)}")
        host.reset()
        device.reset()
        peers = Peers(case, device, host)
        others, left_out = baselines(session, peers)
        with ours(session, peers, spec.wanted) as (contenders, refused):
            rows += cell(session, peers, [*contenders, *others], spec.effort)
        notes += [note for note in (*refused, *left_out) if note not in notes]
    return rows, notes


def cell(session: Session, peers: Peers, contenders: Sequence[Contender], effort: Effort) -> list[Row]:
    """The rows of one size. A contender that is wrong is not timed; one that goes wrong meanwhile loses its time."""
    right = _check(session, peers, contenders, range(_CHECKS))
    going = [contender for contender, is_right in zip(contenders, right, strict=True) if is_right]
    timings = timed([contender.call for contender in going], effort)
    still = _check(session, peers, going, range(_CHECKS, _CHECKS + 1))
    valid = {id(c): timing for c, timing, is_right in zip(going, timings, still, strict=True) if is_right}
    limit = next((valid[id(c)].time_us for c in going if c.backend == PLAIN and id(c) in valid), None)
    return [_row(peers, contender, valid.get(id(contender)), limit) for contender in contenders]


def _check(session: Session, peers: Peers, contenders: Sequence[Contender], iterations: range) -> list[bool]:
    """Which contenders give the right result on fresh data, seen by the CPU on one side and the GPU on the other."""
    right = [True] * len(contenders)
    for iteration in iterations:
        given = peers.fresh(iteration)
        for index, contender in enumerate(contenders):
            right[index] &= check_one(session, peers, contender, given)
    return right


def check_one(session: Session, peers: Peers, contender: Contender, given: Given) -> bool:
    """Runs a contender once on `given` and says whether both sides have what they should."""
    plain, in_place = contender.backend == PLAIN, contender.in_place
    if plain:
        peers.fill_plain(given)
    else:
        peers.fill(given, in_place=in_place)
    session.synchronize()
    contender.call()
    session.synchronize()
    return peers.plain_is_right(given) if plain else peers.is_right(given, in_place=in_place)


def _row(peers: Peers, contender: Contender, timing: Timing | None, limit_us: float | None) -> Row:
    case, time_us = peers.case, timing.time_us if timing else None
    crossing = contender.paths.get("h2d", 0) + contender.paths.get("d2h", 0)
    return {
        "collective": case.collective,
        "backend": contender.backend,
        "variant": contender.variant,
        "requested": contender.variant,
        "streams": contender.streams,
        "ranks": case.ranks,
        "size_bytes": case.size_bytes,
        "piece_bytes": peers.piece_bytes,
        "tensors": "host peers",
        "time_us": None if time_us is None else round(time_us, 3),
        "algbw_gbps": None if time_us is None else case.algbw_gbps(time_us),
        "busbw_gbps": None if time_us is None else case.busbw_gbps(time_us),
        "link_gbps": None if time_us is None else crossing / time_us / 1e3,
        "h2d_bytes": contender.paths.get("h2d", 0),
        "d2h_bytes": contender.paths.get("d2h", 0),
        "d2d_bytes": contender.paths.get("d2d", 0),
        "limit_us": None if limit_us is None else round(limit_us, 3),
        "limit_share": limit_us / time_us if limit_us and time_us else None,
        "correct": timing is not None,
        "dtype": case.dtype,
        "in_place": contender.in_place or peers.gathers,
        "iterations": timing.iterations if timing else 0,
    }
