"""What `dovetail simulate network` does: makes the network that the options describe, and prices a collective on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dovetail.sim.net import Network

_ALL = "all"


def network_of(
    machine: str | None, shape: str | None, bandwidth: str, latency: str, ranks: int | None
) -> tuple[Network, str, float]:
    """The network, what it is called, and the time of a call that moves no bytes."""
    if (machine is None) == (shape is None):
        raise ValueError("give either --machine or --shape, such as --shape ring:8,ring:16")
    if machine is not None:
        from dovetail.sim import files

        there = files.load(machine)
        return there.network(ranks), f"{there.name}: {there.title}", there.library.launch_ns
    if ranks is not None:
        raise ValueError("--ranks is for --machine; a --shape has its ranks in it")
    assert shape is not None
    return _shaped(shape, bandwidth, latency), f"{shape} at {bandwidth} GB/s, {latency} ns", 0.0


def _shaped(shape: str, bandwidth: str, latency: str) -> Network:
    from dovetail.sim.net import Dimension, Kind, Network

    words = shape.split(",")
    gbps, ns = _each("--bandwidth", bandwidth, len(words)), _each("--latency", latency, len(words))
    dimensions = []
    for word, rate, time in zip(words, gbps, ns, strict=True):
        kind, colon, number = word.strip().partition(":")
        if kind not in list(Kind) or not colon or not number.isdecimal():
            raise ValueError(f"--shape: {word!r} must be KIND:RANKS with one of {', '.join(Kind)}, such as ring:8")
        dimensions.append(Dimension(kind=Kind(kind), ranks=int(number), bandwidth_gbps=rate, latency_ns=time))
    return Network(dimensions=tuple(dimensions))


def _each(option: str, text: str, count: int) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: {text!r} must be numbers, such as 50 or 450,50") from None
    if len(values) not in (1, count):
        raise ValueError(f"{option}: {len(values)} figures for {count} dimensions; give one, or one each")
    return values * count if len(values) == 1 else values


def rows(
    network: Network, title: str, launch_ns: float, collective: str, algorithm: str, sizes: Sequence[int], chunks: int
) -> list[dict[str, Any]]:
    """A row for each size and algorithm."""
    from dovetail.sim.net import Algorithm, simulate

    chosen = list(Algorithm) if algorithm == _ALL else [algorithm]
    found = []
    for size in sizes:
        for name in chosen:
            made = simulate(network, collective, size, algorithm=name, chunks=chunks, launch_ns=launch_ns)
            closed = made.closed_form_ns
            found.append(
                {
                    "network": title,
                    "ranks": network.ranks,
                    "collective": collective,
                    "algorithm": str(name),
                    "chunks": chunks,
                    "size_bytes": size,
                    "time_ns": made.time_ns,
                    "time_us": made.time_ns / 1000,
                    "limit_us": (made.bound_ns - launch_ns) / 1000,
                    "closed_form_us": None if closed is None else closed / 1000,
                    "busiest_link": float(max(made.link_utilisation, default=0.0)),
                    "mode": "links",
                    "simulated": True,
                }
            )
    return found
