"""What `dovetail simulate astra` does: ASTRA-sim's files in, its nanoseconds or those of contended links out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.measure.sizes import parse_bytes

if TYPE_CHECKING:
    from dovetail.sim.astra import AstraNetwork, AstraSystem

_ASTRA, _LINKS = "astra", "links"
Row = dict[str, Any]


def run(
    network: Path,
    system: Path | None,
    collective: str | None,
    size: str | None,
    workload: str | None,
    mode: str,
    algorithm: str | None,
    write: Path | None,
) -> tuple[list[Row], str]:
    """The rows, and a heading for them."""
    from dovetail.sim.astra import AstraNetwork, AstraSystem

    if mode not in (_ASTRA, _LINKS):
        raise ValueError(f"--mode: {mode!r} is not known; there are {_ASTRA}, {_LINKS}")
    if (workload is None) == (collective is None) or (collective is None) != (size is None):
        raise ValueError("give either --collective with --size, or --workload")
    if mode == _ASTRA and algorithm is not None:
        raise ValueError("--algorithm is for --mode links; in mode astra the system file says how")
    there = AstraNetwork.from_file(network)
    found = AstraSystem.from_file(system) if system is not None else None
    if found is None and (mode == _ASTRA or write is not None):
        raise ValueError("--system is missing: ASTRA-sim's times depend on it (only --mode links does without)")
    if mode == _LINKS:
        if collective is None or size is None:
            raise ValueError("--mode links prices a collective: give --collective and --size")
        rows = [_links(there, collective, parse_bytes(size), algorithm or "direct")]
    elif workload is not None:
        assert found is not None
        rows = _workload(there, found, workload)
    else:
        assert found is not None
        assert collective is not None
        assert size is not None
        rows = [_collective(there, found, collective, parse_bytes(size))]
    if write is not None:
        assert found is not None
        if collective is None or size is None:
            raise ValueError("--write makes the workload of one collective: give --collective and --size")
        _write(write, there, found, collective, parse_bytes(size))
    shape = " x ".join(f"{kind} {n}" for kind, n in zip(there.topology, there.npus, strict=True))
    return rows, f"{shape}, mode {mode}"


def _collective(network: AstraNetwork, system: AstraSystem, collective: str, size_bytes: int) -> Row:
    from dovetail.sim.astra import collective_time_ns

    time_ns = collective_time_ns(network, system, collective, size_bytes)
    return {**_what(network, collective, size_bytes), "mode": _ASTRA, "time_ns": time_ns, "simulated": True}


def _links(network: AstraNetwork, collective: str, size_bytes: int, algorithm: str) -> Row:
    """Chakra counts the input of a rank, as `dovetail.sim.net` does."""
    from dovetail.sim.net import simulate

    made = simulate(network.to_network(), collective, size_bytes, algorithm=algorithm)
    return {
        **_what(network, collective, size_bytes),
        "mode": _LINKS,
        "algorithm": algorithm,
        "time_ns": made.time_ns,
        "limit_ns": made.bound_ns,
        "simulated": True,
    }


def _what(network: AstraNetwork, collective: str, size_bytes: int) -> Row:
    return {"collective": collective, "npus": list(network.npus), "size_bytes": size_bytes}


def _workload(network: AstraNetwork, system: AstraSystem, prefix: str) -> list[Row]:
    from dovetail.sim.astra import read_workload, workload_time_ns

    times = workload_time_ns(network, system, read_workload(prefix, network.num_npus))
    return [
        {"workload": Path(prefix).name, "npu": npu, "mode": _ASTRA, "time_ns": time_ns, "simulated": True}
        for npu, time_ns in enumerate(times)
    ]


def _write(folder: Path, network: AstraNetwork, system: AstraSystem, collective: str, size_bytes: int) -> None:
    from dovetail.sim.astra import write_collective_workload

    folder.mkdir(parents=True, exist_ok=True)
    network.to_file(folder / "network.yml")
    system.to_file(folder / "system.json")
    prefix = write_collective_workload(folder, network, collective, size_bytes)
    print(
        f"wrote {network.num_npus} traces; run them with AstraSim_Analytical_Congestion_Unaware"
        f" --workload-configuration={prefix} --system-configuration={folder / 'system.json'}"
        f" --network-configuration={folder / 'network.yml'} --remote-memory-configuration=..."
    )


def most(rows: list[Row], number: int = 8) -> list[Row]:
    """Rows to show: of a long workload those of the first NPUs and the slowest one."""
    if len(rows) <= number:
        return rows
    slowest = max(rows, key=lambda row: int(row["time_ns"]))
    return [*rows[: number - 1], slowest]
