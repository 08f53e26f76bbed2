"""The buffers of a collective between a GPU and host peers: fresh data in, the right result out.

Every contender works on the same buffers. all_gather is in place, as NCCL's may be: a rank's input is its part of the
output. all_to_all has an input and an output; `swap` has its data in the output. Only what crosses the link is a
result: the GPU gets a piece of every peer, every peer one of the GPU.

`arriving` and `leaving` are the bytes that cross, in the peers' order: for the plain copies and for the checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from dovetail.bench.cases import Case
from dovetail.bench.gpu.plans import GPU
from dovetail.bench.gpu.session import Arena, pages
from dovetail.plan.plan import Plan, Role

_POISON = 0xA5


def case_of_pieces(collective: str, ranks: int, piece_bytes: int) -> Case:
    """The case in which every copy is of `piece_bytes`."""
    return Case.of(collective, ranks, piece_bytes * (ranks if collective == "all_to_all" else 1), "uint8")


class Pair(NamedTuple):
    """One copy of the collective."""

    dst: torch.Tensor
    src: torch.Tensor


class Given(NamedTuple):
    """The inputs of one check, and what must cross the link, each where it is compared."""

    inputs: list[torch.Tensor]
    arriving: torch.Tensor
    """On the GPU."""
    leaving: torch.Tensor
    """In host memory."""


class Peers:
    """The buffers of one case, cut from two arenas."""

    def __init__(self, case: Case, device: Arena, host: Arena) -> None:
        self.case, self.ranks = case, case.ranks
        self.gathers = case.collective == "all_gather"
        self.piece_bytes = case.size_bytes if self.gathers else case.size_bytes // case.ranks
        arenas = [device if rank == GPU else host for rank in range(self.ranks)]
        self.outputs = [arena.take(case.num_output) for arena in arenas]
        if self.gathers:
            self.inputs = [self._piece(output, rank) for rank, output in enumerate(self.outputs)]
        else:
            self.inputs = [arena.take(case.size_bytes) for arena in arenas]
        crossing = self.crossing_bytes
        self.plain_in = Pair(device.take(crossing), host.take(crossing))
        self.plain_out = Pair(host.take(crossing), device.take(crossing))

    @staticmethod
    def host_bytes(case: Case) -> int:
        """What a case takes of the host's arena; the GPU's is no larger."""
        gathers = case.collective == "all_gather"
        own = pages(case.num_output) + (0 if gathers else pages(case.size_bytes))
        piece_bytes = case.size_bytes if gathers else case.size_bytes // case.ranks
        return (case.ranks - 1) * own + 2 * pages((case.ranks - 1) * piece_bytes)

    @property
    def crossing_bytes(self) -> int:
        """Bytes over the link in each direction."""
        return (self.ranks - 1) * self.piece_bytes

    def _piece(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return tensor[number * self.piece_bytes : (number + 1) * self.piece_bytes]

    def pairs_in(self) -> list[Pair]:
        """To the GPU, from each peer."""
        first = [self.inputs[rank] if self.gathers else self._piece(self.inputs[rank], GPU) for rank in self._peers]
        return [Pair(self._piece(self.outputs[GPU], rank), src) for rank, src in zip(self._peers, first, strict=True)]

    def pairs_out(self) -> list[Pair]:
        """From the GPU, to each peer."""
        own = self.inputs[GPU]
        sources = [own if self.gathers else self._piece(own, rank) for rank in self._peers]
        return [Pair(self._piece(self.outputs[rank], GPU), s) for rank, s in zip(self._peers, sources, strict=True)]

    @property
    def _peers(self) -> range:
        return range(1, self.ranks)

    def bound_to(self, plan: Plan) -> dict[tuple[int, str], torch.Tensor]:
        """The buffers by the names that `plan` has for them."""
        names = [buffer.name for buffer in plan.buffers if buffer.role not in (Role.SCRATCH, Role.VIEW)]
        found = {"input": self.inputs, "output": self.outputs, "data": self.outputs}
        return {(rank, name): found[name][rank] for name in names for rank in range(self.ranks)}

    # --- checks

    def fresh(self, iteration: int) -> Given:
        """Inputs never given before, and what must arrive."""
        inputs = [self.case.input(rank, iteration) for rank in range(self.ranks)]
        arriving = torch.cat([inputs[r] if self.gathers else self._piece(inputs[r], GPU) for r in self._peers])
        own = inputs[GPU]
        leaving = own.repeat(self.ranks - 1) if self.gathers else own[self.piece_bytes :]
        return Given(inputs, arriving.to(self.outputs[GPU].device), leaving)

    def fill(self, given: Given, *, in_place: bool) -> None:
        """Poisons what is to be written, then puts the inputs in; of an all_to_all `in_place` into the outputs."""
        for pair in (*self.pairs_in(), *self.pairs_out()):
            pair.dst.fill_(_POISON)
        for tensor, data in zip(self.outputs if in_place else self.inputs, given.inputs, strict=True):
            tensor.copy_(data)

    def is_right(self, given: Given, *, in_place: bool) -> bool:
        """Whether both sides have what they should, to the last bit, and everything else is as it was."""
        arrived = all(
            torch.equal(pair.dst, self._piece(given.arriving, number)) for number, pair in enumerate(self.pairs_in())
        )
        left = all(
            torch.equal(pair.dst, self._piece(given.leaving, number)) for number, pair in enumerate(self.pairs_out())
        )
        return arrived and left and self._untouched(given.inputs, in_place=in_place)

    def _untouched(self, inputs: Sequence[torch.Tensor], *, in_place: bool) -> bool:
        if not in_place:
            return all(torch.equal(mine.cpu(), data) for mine, data in zip(self.inputs, inputs, strict=True))
        own, piece = self.outputs[GPU][: self.piece_bytes].cpu(), inputs[GPU][: self.piece_bytes]
        rest = [torch.equal(self.outputs[r][self.piece_bytes :], inputs[r][self.piece_bytes :]) for r in self._peers]
        return torch.equal(own, piece) and all(rest)

    def fill_plain(self, given: Given) -> None:
        """As `fill`, for the plain copies."""
        self.plain_in.dst.fill_(_POISON)
        self.plain_out.dst.fill_(_POISON)
        self.plain_in.src.copy_(given.arriving)
        self.plain_out.src.copy_(given.leaving)

    def plain_is_right(self, given: Given) -> bool:
        """As `is_right`, for the plain copies."""
        return torch.equal(self.plain_in.dst, given.arriving) and torch.equal(self.plain_out.dst, given.leaving)
