"""Communications of a GPU with host memory, each with its buffers, fresh data and the check of what arrived.

Owns which plan a job is and where its bytes lie. Every mover moves the same buffers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from dovetail.bench.gpu.peers import Given, Peers, case_of_pieces
from dovetail.bench.gpu.plans import crossing_plan
from dovetail.bench.gpu.session import Arena, Session, pages
from dovetail.bench.overlap import plans
from dovetail.bench.overlap.spec import Job
from dovetail.overlap.local import LocalCommunication
from dovetail.overlap.tasks import Mover
from dovetail.plan.step import DType

_POISON = 0xA5
_WAYS = {"fetch": (plans.INTO,), "store": (plans.OUT,), "offload": (plans.INTO, plans.OUT)}
KINDS = ("all_gather", "all_to_all", "reduce_scatter", *_WAYS)


class _Data(Protocol):
    """The buffers of a job: what goes in, and whether the right thing came out."""

    def fresh(self, iteration: int) -> None:
        """New inputs, never given before."""

    def fill(self) -> None:
        """Poisons what is to be written, and puts the inputs in."""

    def is_right(self) -> bool: ...


class Link:
    """A communication over the link. An owner: `close()`."""

    def __init__(self, session: Session, comm: LocalCommunication, data: _Data, crossing_bytes: int) -> None:
        self.comm, self.crossing_bytes = comm, crossing_bytes  #: bytes over the link, both directions together
        self._session, self._data = session, data
        self._iteration = 0

    def fresh(self) -> None:
        """New data for the next checks."""
        self._iteration += 1
        self._data.fresh(self._iteration)

    def check(self, mover: Mover, stream: int) -> bool:
        """Moves it once and says whether all of it arrived, to the last bit."""
        self._data.fill()
        self._session.synchronize()
        self.comm.start(mover, stream=stream).wait()
        self._session.driver.stream_synchronize(stream)
        self._session.synchronize()
        return self._data.is_right()

    def close(self) -> None:
        """Waits for what is under way."""
        self.comm.close()


def pieces_of(job: Job, ranks: int) -> int:
    """How many pieces it moves in a direction."""
    return ranks - 1 if job.with_peers else job.num_pieces


def arena_bytes(job: Job, ranks: int, piece_bytes: int) -> int:
    """What it takes of each of the two arenas, at most."""
    if job.kind == "reduce_scatter":
        return (ranks + 1) * pages(piece_bytes)
    if job.with_peers:
        return Peers.host_bytes(case_of_pieces(job.kind, ranks, piece_bytes))
    return 2 * pages(job.num_pieces * piece_bytes)


def link(session: Session, job: Job, ranks: int, piece_bytes: int, device: Arena, host: Arena) -> Link:
    """A job with pieces of `piece_bytes`, over memory of the two arenas, from their beginning."""
    device.reset()
    host.reset()
    others = frozenset(range(1, ranks)) if job.with_peers else frozenset({plans.HOST})
    if job.kind == "reduce_scatter":
        sums = _Sums(ranks, piece_bytes, device, host)
        plan = plans.reduce_scatter(ranks, piece_bytes, DType.BFLOAT16)
        made = LocalCommunication(session.device, plan, sums.buffers, host_ranks=others, kind=job.kind)
        return Link(session, made, sums, (ranks - 1) * piece_bytes)
    if job.with_peers:
        peers = Peers(case_of_pieces(job.kind, ranks, piece_bytes), device, host)
        plan = crossing_plan(job.kind, "pcpy", ranks, piece_bytes)
        made = LocalCommunication(session.device, plan, peers.bound_to(plan), host_ranks=others, kind=job.kind)
        return Link(session, made, _Collective(peers), 2 * peers.crossing_bytes)
    ways = _WAYS[job.kind]
    copied = _Copies(ways, job.num_pieces * piece_bytes, device, host)
    plan = plans.copies(ways, job.num_pieces, piece_bytes)
    made = LocalCommunication(session.device, plan, copied.buffers, host_ranks=others, kind=job.kind)
    return Link(session, made, copied, len(ways) * job.num_pieces * piece_bytes)


class _Collective:
    """Of a collective that only moves."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._given: Given | None = None

    def fresh(self, iteration: int) -> None:
        self._given = self._peers.fresh(iteration)

    def fill(self) -> None:
        assert self._given is not None
        self._peers.fill(self._given, in_place=False)

    def is_right(self) -> bool:
        assert self._given is not None
        return self._peers.is_right(self._given, in_place=False)


class _Copies:
    """Of plain copies."""

    def __init__(self, ways: tuple[str, ...], size_bytes: int, device: Arena, host: Arena) -> None:
        self.buffers: dict[tuple[int, str], torch.Tensor] = {}
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._given: list[torch.Tensor] = []
        for way in ways:
            ends = (plans.HOST, plans.GPU) if way == plans.INTO else (plans.GPU, plans.HOST)
            source, target = ((device if end == plans.GPU else host).take(size_bytes) for end in ends)
            self.buffers[ends[0], f"{way} from"], self.buffers[ends[1], f"{way} to"] = source, target
            self._pairs.append((source, target))

    def fresh(self, iteration: int) -> None:
        random = torch.Generator().manual_seed(iteration)
        self._given = [_random(source.numel(), random) for source, _ in self._pairs]

    def fill(self) -> None:
        for (source, target), given in zip(self._pairs, self._given, strict=True):
            target.fill_(_POISON)
            source.copy_(given)

    def is_right(self) -> bool:
        every = zip(self._pairs, self._given, strict=True)
        return all(torch.equal(each.cpu(), given) for pair, given in every for each in pair)


class _Sums:
    """Of a reduction: small whole numbers, whose sum is exact in every order."""

    def __init__(self, ranks: int, piece_bytes: int, device: Arena, host: Arena) -> None:
        self._inputs = [(device if rank == plans.GPU else host).take(piece_bytes) for rank in range(ranks)]
        self._output = device.take(piece_bytes)
        self.buffers = {(rank, "input"): tensor for rank, tensor in enumerate(self._inputs)}
        self.buffers[plans.GPU, "output"] = self._output
        self._given: list[torch.Tensor] = []

    def fresh(self, iteration: int) -> None:
        random = torch.Generator().manual_seed(iteration)
        number = self._output.numel() // torch.bfloat16.itemsize
        self._given = [
            torch.randint(-4, 5, (number,), generator=random, dtype=torch.int8).to(torch.bfloat16) for _ in self._inputs
        ]

    def fill(self) -> None:
        self._output.fill_(_POISON)
        for tensor, given in zip(self._inputs, self._given, strict=True):
            tensor.copy_(given.view(torch.uint8))

    def is_right(self) -> bool:
        total = sum(self._given[1:], self._given[0].clone())
        return torch.equal(self._output.cpu().view(torch.bfloat16), total)


def _random(size_bytes: int, random: torch.Generator) -> torch.Tensor:
    """Random to the last bit, whatever the number of bytes."""
    words = torch.randint(-(1 << 62), 1 << 62, (-(-size_bytes // 8),), generator=random)
    return words.view(torch.uint8)[:size_bytes]
