"""ASTRA-sim's network file: YAML with four lists, an entry per dimension. PyYAML is imported when a file is read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.sim.astra.network import AstraNetwork, Topology

if TYPE_CHECKING:
    from yaml import Node

_KEYS = ("topology", "npus_count", "bandwidth", "latency")


def read_network(path: str | Path) -> AstraNetwork:
    """Reads a network file. Raises ValueError that names file, line, what was found and what is allowed."""
    import yaml

    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path}: a mapping with the keys {', '.join(_KEYS)} is expected")
    lists: dict[str, list[tuple[str, int]]] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        if key.value not in _KEYS:
            raise ValueError(f"{path}, line {line}: no key {key.value!r}; the keys are {', '.join(_KEYS)}")
        if key.value in lists:
            raise ValueError(f"{path}, line {line}: {key.value} is given twice")
        if not isinstance(value, yaml.SequenceNode):
            raise ValueError(f"{path}, line {line}: {key.value} must be a list, such as [ 4, 2 ], not {value.value!r}")
        lists[key.value] = [_entry(path, key.value, item) for item in value.value]
    if missing := [key for key in _KEYS if key not in lists]:
        raise ValueError(f"{path}: {', '.join(missing)} missing; the keys are {', '.join(_KEYS)}")
    npus = tuple(_whole(path, *entry) for entry in lists["npus_count"])
    topology = tuple(_topology(path, *entry) for entry in lists["topology"])
    bandwidth = tuple(_number(path, "bandwidth", *entry) for entry in lists["bandwidth"])
    latency = tuple(_number(path, "latency", *entry) for entry in lists["latency"])
    try:
        return AstraNetwork(topology=topology, npus=npus, bandwidth_gib=bandwidth, latency_ns=latency)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_network(network: AstraNetwork, path: str | Path) -> None:
    """Writes a network file that ASTRA-sim reads."""
    lines = (
        f"topology: [ {', '.join(network.topology)} ]",
        f"npus_count: [ {', '.join(map(str, network.npus))} ]",
        f"bandwidth: [ {', '.join(map(repr, network.bandwidth_gib))} ]  # GB/s of 2^30 bytes",
        f"latency: [ {', '.join(map(repr, network.latency_ns))} ]  # ns",
    )
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _entry(path: str | Path, key: str, item: Node) -> tuple[str, int]:
    line = item.start_mark.line + 1
    if not isinstance(item.value, str):
        raise ValueError(f"{path}, line {line}: {key} must be a list of plain values, not of {item.tag}")
    return item.value, line


def _topology(path: str | Path, text: str, line: int) -> Topology:
    try:
        return Topology(text)
    except ValueError:
        raise ValueError(f"{path}, line {line}: topology must be one of {', '.join(Topology)}, not {text!r}") from None


def _whole(path: str | Path, text: str, line: int) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{path}, line {line}: npus_count must be whole numbers from 1 on, not {text!r}")
    return int(text)


def _number(path: str | Path, key: str, text: str, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{path}, line {line}: {key} must be numbers, not {text!r}") from None
