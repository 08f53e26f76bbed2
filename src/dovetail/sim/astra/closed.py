"""The closed form: a ring on one dimension, one chunk at a time. Independent of the event model, which it checks."""

from __future__ import annotations

from dovetail.errors import NotSupported
from dovetail.sim.astra.model import as_collective
from dovetail.sim.astra.network import AstraNetwork
from dovetail.sim.astra.phases import chunks
from dovetail.sim.astra.system import AstraSystem
from dovetail.sim.net.algorithms import Collective


def closed_form_ns(network: AstraNetwork, system: AstraSystem, collective: Collective | str, size_bytes: int) -> int:
    """Time of a ring collective on one dimension with one active chunk.

    With n NPUs, a chunk of D bytes, endpoint delay e and a message time of t, chunks run one after another, each for
    `steps * t + (steps + 1) * e + reductions * three passes over the message`:

    | collective | steps | message | reductions |
    |---|---|---|---|
    | all_to_all | n(n-1)/2 | D/n | 0 |
    | all_gather | n-1 | D | 0 |
    | reduce_scatter | n-1 | D/n | n-1 |
    | all_reduce | 2(n-1) | D/n | n-1 |

    Raises NotSupported where there is no closed form; `collective_time_ns` has no such limit.
    """
    kind = as_collective(collective)
    if network.num_dimensions != 1 or system.active_chunks != 1 or getattr(system, kind) != ("ring",):
        raise NotSupported(
            "the closed form holds for one dimension, one active chunk and the ring algorithm; "
            f"this is {network.num_dimensions}, {system.active_chunks}, {getattr(system, kind)}: use collective_time_ns"
        )
    (n,) = network.npus
    chunk, num_chunks = chunks(network, system, kind, size_bytes)
    steps = {
        Collective.ALL_TO_ALL: n * (n - 1) // 2,
        Collective.ALL_GATHER: n - 1,
        Collective.REDUCE_SCATTER: n - 1,
        Collective.ALL_REDUCE: 2 * (n - 1),
    }[kind]
    message = chunk if kind == Collective.ALL_GATHER else chunk // n
    per_chunk = steps * network.message_ns(0, 1, message) + (steps + 1) * system.endpoint_delay_ns
    if kind in (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE):
        per_chunk += (n - 1) * system.reduce_ns(message)
    return num_chunks * per_chunk
