"""What one chunk of a collective goes through: its phases, one per visit of a dimension, and their sizes.

Owns the cutting of a collective into chunks and the order of dimensions, no time. All chunks of a collective are equal:
the last one is not shorter, it is rounded up.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dovetail.errors import NotSupported
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.system import Algorithm, AstraSystem, Implementation, Optimization
from dovetail.sim.net.algorithms import Collective

MAX_DIMENSIONS = 4  #: ASTRA-sim marks this many as taking part when a trace does not say which do

_ONE = (Algorithm.ONE_RING, Algorithm.ONE_DIRECT, Algorithm.ONE_HALVING_DOUBLING)


@dataclass(frozen=True, slots=True)
class Phase:
    """One visit of a dimension; `queue` is the dimension it waits for."""

    queue: int
    collective: Collective
    implementation: Implementation
    num_npus: int  #: of the logical ring that takes part
    whole: bool  #: the ring is all NPUs of the network, not one dimension
    size_bytes: int
    backward: bool = False  #: packets go down the ring; the way back of an all-reduce does

    @property
    def final_bytes(self) -> int:
        """What the next phase starts with; a tree keeps the size, whatever it stands for."""
        if self.implementation.algorithm == Algorithm.DOUBLE_BINARY_TREE:
            return self.size_bytes
        match self.collective:
            case Collective.ALL_GATHER:
                return self.size_bytes * self.num_npus
            case Collective.REDUCE_SCATTER:
                return self.size_bytes // self.num_npus
            case _:
                return self.size_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A collective: `num_chunks` times the same phases."""

    phases: tuple[Phase, ...]
    num_chunks: int


def plan(
    network: AstraNetwork,
    system: AstraSystem,
    collective: Collective,
    size_bytes: int,
    involved: Sequence[bool] | None = None,
) -> Plan:
    """Cuts a collective; `involved` says which dimensions take part (None: all).

    Raises NotSupported where ASTRA-sim itself has no defined answer.
    """
    rings = _rings(network, system, collective)
    takes_part = _involved(len(rings), involved)
    chunk_bytes, num_chunks = chunks(network, system, collective, size_bytes)
    active = [queue for queue, (_, num_npus, _) in enumerate(rings) if num_npus > 1 and takes_part[queue]]
    if not active:
        raise NotSupported(
            f"{collective} has no dimension of two NPUs or more to run on, and ASTRA-sim never ends it; give the "
            "network more NPUs or let another dimension take part"
        )
    phases = []
    size = chunk_bytes
    for queue, kind in _order(system, collective, active):
        implementation, num_npus, whole = rings[queue]
        backward = collective == Collective.ALL_REDUCE and kind == Collective.ALL_GATHER
        phases.append(Phase(queue, kind, implementation, num_npus, whole, size, backward))
        size = phases[-1].final_bytes
    return Plan(tuple(phases), num_chunks)


def chunks(network: AstraNetwork, system: AstraSystem, collective: Collective, size_bytes: int) -> tuple[int, int]:
    """Bytes of a chunk, and how many; the remainder of an uneven cut becomes more chunks of full size."""
    size_bytes = operator.index(size_bytes)
    if size_bytes < 0:
        raise ValueError(f"size_bytes must be zero or more, not {size_bytes}")
    chunk = size_bytes // system.splits
    if collective == Collective.ALL_GATHER:
        if chunk == 0:
            raise NotSupported(
                f"an all_gather of {size_bytes} bytes in {system.splits} splits leaves no byte per chunk, and "
                "ASTRA-sim never ends it; use at least as many bytes as splits"
            )
    elif chunk < network.num_npus:  # small collectives are rounded up to a byte per NPU and chunk
        return network.num_npus, system.splits
    return chunk, -(-size_bytes // chunk)


def _order(system: AstraSystem, collective: Collective, active: Sequence[int]) -> Iterable[tuple[int, Collective]]:
    if collective == Collective.ALL_REDUCE and system.optimization == Optimization.LOCAL_BW_AWARE:
        *inner, last = active
        yield from ((queue, Collective.REDUCE_SCATTER) for queue in inner)
        yield last, Collective.ALL_REDUCE
        yield from ((queue, Collective.ALL_GATHER) for queue in reversed(inner))
    elif collective == Collective.ALL_GATHER:
        yield from ((queue, collective) for queue in reversed(active))
    else:
        yield from ((queue, collective) for queue in active)


def _rings(
    network: AstraNetwork, system: AstraSystem, collective: Collective
) -> list[tuple[Implementation, int, bool]]:
    implementations = system.implementations(collective)
    if not implementations:
        raise ValueError(f"the system has no implementation of {collective}; give one word per dimension")
    if len(implementations) > network.num_dimensions:
        raise ValueError(
            f"{collective} has {len(implementations)} implementations ({', '.join(map(str, implementations))}) for "
            f"{network.num_dimensions} dimensions; give at most one per dimension"
        )
    rings = []
    for implementation, num_npus in zip(implementations, network.npus, strict=False):
        whole = implementation.algorithm in _ONE
        rings.append((implementation, network.num_npus if whole else num_npus, whole))
        if whole:
            break
    _check_trees(network, collective, implementations)
    return rings


def _check_trees(network: AstraNetwork, collective: Collective, implementations: Sequence[Implementation]) -> None:
    for dimension, implementation in enumerate(implementations):
        if implementation.algorithm != Algorithm.DOUBLE_BINARY_TREE:
            continue
        n = network.npus[dimension]
        if collective != Collective.ALL_REDUCE:
            raise NotSupported(f"doubleBinaryTree is an all_reduce only, not {collective}; ring and direct do it")
        if n < 2 or n & (n - 1):
            raise NotSupported(f"doubleBinaryTree needs a power of two of NPUs, not {n}: ASTRA-sim crashes; use ring")
        if dimension + 1 == len(implementations) < network.num_dimensions:
            raise NotSupported("doubleBinaryTree, if last, must stand on the network's last dimension; else use ring")


def _involved(num_rings: int, involved: Sequence[bool] | None) -> Sequence[bool]:
    if involved is None:
        if num_rings > MAX_DIMENSIONS:
            raise NotSupported(
                f"ASTRA-sim lets {MAX_DIMENSIONS} dimensions take part unless a trace says more; {num_rings} were "
                "given: pass involved, or use fewer dimensions"
            )
        return (True,) * num_rings
    if len(involved) < num_rings:
        raise ValueError(f"involved needs an entry for each of {num_rings} dimensions, not {len(involved)}")
    return involved
