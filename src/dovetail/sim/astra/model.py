"""The time of one collective, as ASTRA-sim reports it."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.errors import NotSupported
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.npus import World
from dovetail.sim.astra.phases import Plan, plan
from dovetail.sim.astra.queues import run_chunks
from dovetail.sim.astra.system import AstraSystem
from dovetail.sim.astra.timing import PhaseTime, Undecided, phase_time
from dovetail.sim.net.algorithms import Collective

MAX_MESSAGES = 5_000_000  #: more than these are not played NPU by NPU


def collective_time_ns(
    network: AstraNetwork,
    system: AstraSystem,
    collective: Collective | str,
    size_bytes: int,
    *,
    involved: Sequence[bool] | None = None,
) -> int:
    """Time of one collective that all NPUs start at tick 0: what ASTRA-sim reports for its slowest NPU, in ns.

    Args:
        network: dimensions with their links.
        system: chunking, algorithms and endpoint.
        collective: all_reduce, all_gather, reduce_scatter or all_to_all.
        size_bytes: Chakra's comm_size: what an NPU holds before the collective.
        involved: which dimensions take part; None means all.

    Raises:
        NotSupported: ASTRA-sim does not do this either (the message says what it does), or it is too big to play.
        ValueError: a bad argument.
    """
    made = plan(network, system, as_collective(collective), size_bytes, involved)
    try:
        return alike(network, system, made).duration_ns
    except Undecided:
        return max(every_npu(network, system, made))


def as_collective(name: Collective | str) -> Collective:
    """Raises ValueError that names the collectives."""
    try:
        return Collective(name)
    except ValueError:
        raise ValueError(f"collective must be one of {', '.join(Collective)}, not {name!r}") from None


def alike(network: AstraNetwork, system: AstraSystem, made: Plan) -> PhaseTime:
    """The time on one NPU that stands for all. Raises Undecided where they are not alike."""
    times = [phase_time(network, system, phase) for phase in made.phases]
    queues = [phase.queue for phase in made.phases]
    return run_chunks(queues, times, num_chunks=made.num_chunks, active_chunks=system.active_chunks)


def every_npu(network: AstraNetwork, system: AstraSystem, made: Plan) -> list[int]:
    """The time on each NPU, all of them played."""
    world = World(network, system)
    check_messages(world, made)
    ends = [-1] * network.num_npus

    def ended(npu: int) -> None:
        ends[npu] = world.now

    for npu in world.npus:
        npu.start(made, lambda number=npu.number: ended(number))  # type: ignore[misc]
    world.run()
    check_all_ended(ends)
    return ends


def check_messages(world: World, *plans: Plan) -> None:
    """Raises NotSupported when playing every NPU would take minutes."""
    total = sum(made.num_chunks * sum(map(world.num_messages, made.phases)) for made in plans)
    if total > MAX_MESSAGES:
        raise NotSupported(
            f"NPUs differ here, and {total} messages are too many to play one by one (at most {MAX_MESSAGES}); use "
            "fewer NPUs or splits"
        )


def check_all_ended(ends: Sequence[int]) -> None:
    """Raises NotSupported if an NPU is still waiting when nothing happens any more."""
    stuck = [npu for npu, end in enumerate(ends) if end < 0]
    if stuck:
        raise NotSupported(
            f"NPUs wait for each other in a different order and never end ({len(stuck)} of {len(ends)}), in ASTRA-sim "
            "too; change splits, active_chunks or the order of dimensions"
        )
