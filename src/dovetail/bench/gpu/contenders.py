"""Who moves the bytes of a collective with host peers: our variants, loops of single copies, and two plain copies.

A contender's call returns when the GPU is done. Ours goes through a plan; the baselines are what a user would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dovetail.bench.gpu.peers import Pair, Peers
from dovetail.bench.gpu.plans import crossing_plan, streams_of
from dovetail.bench.gpu.session import Session
from dovetail.errors import NotSupported
from dovetail.hw.gpu.local import LocalRunner

LOOP, TORCH, PLAIN = "loop", "torch", "plain"
BASELINES = (LOOP, TORCH, PLAIN)
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do it, bound to the buffers."""

    backend: str
    """``cuda`` for ours, otherwise the baseline's name."""
    variant: str
    streams: int
    call: Call
    in_place: bool = False
    paths: dict[str, int] = field(default_factory=dict)
    """Bytes of one call by direction: ``h2d``, ``d2h``, ``d2d`` (inside the GPU, by a kernel)."""


def paths_of(peers: Peers) -> dict[str, int]:
    """What the collective itself moves."""
    return {"h2d": peers.crossing_bytes, "d2h": peers.crossing_bytes}


@contextmanager
def ours(session: Session, peers: Peers, variants: Sequence[str]) -> Iterator[tuple[list[Contender], list[str]]]:
    """Our variants, and lines about those that this driver cannot run."""
    made, notes = [], []
    with ExitStack() as stack:
        for variant in variants:
            try:
                made.append(_bind(session, peers, variant, stack))
            except NotSupported as error:
                notes.append(f"{peers.case.collective}: {variant} left out: {error}")
        yield made, notes


def _bind(session: Session, peers: Peers, variant: str, stack: ExitStack) -> Contender:
    plan = crossing_plan(peers.case.collective, variant, peers.ranks, peers.piece_bytes)
    host_ranks = frozenset(range(1, peers.ranks))
    runner = LocalRunner(session.device, plan, host_ranks=host_ranks, most_streams=streams_of(variant))
    stack.callback(runner.close)
    buffers = peers.bound_to(plan)
    if variant == "graph":
        run: Any = runner.graph(buffers)
        stack.callback(run.close)
    else:
        run = runner.bind(buffers)
    submit = run.submit
    return Contender(
        backend="cuda",
        variant=variant,
        streams=runner.program.num_streams,
        call=lambda: submit().wait(),
        in_place=variant == "swap",
        paths=_first_run(submit),
    )


def _first_run(submit: Callable[[], Any]) -> dict[str, int]:
    ticket = submit()
    ticket.wait()
    return dict(ticket.bytes_by_path)


def baselines(session: Session, peers: Peers) -> tuple[list[Contender], list[str]]:
    """Loops of driver copies and of torch's, each in one stream and in two; two plain copies, one per direction."""
    found = [_loop(session, peers, 1), _loop(session, peers, 2)]
    notes = []
    if session.has_torch:
        found += [_torch(session, peers, 1), _torch(session, peers, 2)]
    else:
        notes.append("torch left out: torch sees no GPU here")
    copy, wait = session.driver.copy, session.driver.stream_synchronize
    one, other = session.streams(2)
    (to_device, of_host), (to_host, of_device) = (
        [t.data_ptr() for t in pair] for pair in (peers.plain_in, peers.plain_out)
    )
    size_bytes = peers.crossing_bytes

    def plain() -> None:
        copy(to_host, of_device, size_bytes, one)
        copy(to_device, of_host, size_bytes, other)
        wait(one)
        wait(other)

    found.append(Contender(backend=PLAIN, variant=PLAIN, streams=2, call=plain, paths=paths_of(peers)))
    return found, notes


def _loop(session: Session, peers: Peers, streams: int) -> Contender:
    out, into = (_addresses(pairs) for pairs in (peers.pairs_out(), peers.pairs_in()))
    size_bytes, copy, wait = peers.piece_bytes, session.driver.copy, session.driver.stream_synchronize
    first, second = _two(session.streams(streams))

    def loop() -> None:
        for dst, src in out:
            copy(dst, src, size_bytes, first)
        for dst, src in into:
            copy(dst, src, size_bytes, second)
        wait(first)
        if streams == 2:
            wait(second)

    return Contender(backend=LOOP, variant=LOOP, streams=streams, call=loop, paths=paths_of(peers))


def _two(streams: list[Any]) -> tuple[Any, Any]:
    return streams[0], streams[-1]


def _addresses(pairs: Sequence[Pair]) -> list[tuple[int, int]]:
    return [(pair.dst.data_ptr(), pair.src.data_ptr()) for pair in pairs]


def _torch(session: Session, peers: Peers, streams: int) -> Contender:
    import torch

    cuda: Any = torch.cuda
    out, into = peers.pairs_out(), peers.pairs_in()
    first, second = _two([cuda.ExternalStream(stream) for stream in session.streams(streams)])

    def loop() -> None:
        with cuda.stream(first):
            for dst, src in out:
                dst.copy_(src, non_blocking=True)
        with cuda.stream(second):
            for dst, src in into:
                dst.copy_(src, non_blocking=True)
        first.synchronize()
        if streams == 2:
            second.synchronize()

    return Contender(backend=TORCH, variant=TORCH, streams=streams, call=loop, paths=paths_of(peers))
